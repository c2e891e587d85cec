"""Kernels in Triton for CUDA devices, beside torch's operators (gpu/operators.py), which they are held against.

Whether they serve is gpu/tune.py's to decide; `import gpu.kernels` and `gpu.kernels.sizes` do not import triton. What
is @triton.jit takes its types from the calls; what launches it is below it in the same file, typed.
"""

import os

# Triton 3.9 warns where nobody has said whether a * b + c may be rounded once, as its default will change. It may: one
# rounding is nearer to the float32 that is meant, and the cheaper. It is decided when a kernel is compiled, so that a
# row's sums are the same in any company. Who has set the variable otherwise is obeyed.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
