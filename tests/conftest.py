"""Settings of the process, before anything is imported."""

import os

# Triton decides when it is imported whether its kernels are interpreted, on tensors of a CPU. Whoever tests them on a
# device sets it to 0.
os.environ.setdefault("TRITON_INTERPRET", "1")
