"""Kernels in Triton for CUDA devices; torch's operators (gpu/operators.py) are their oracle.

gpu/tune.py decides whether they serve; `import gpu.kernels` and `gpu.kernels.sizes` do not import triton. Functions
under @triton.jit take their types from the calls; the typed code that launches them follows in the same file.
"""

import os

# Whether a * b + c may be rounded once: Triton 3.9 warns where this is not set, as its default will change. It may: one
# rounding is more exact and cheaper. It is decided when a kernel is compiled, so that a row's sums are the same in any
# company. An operator's own setting wins.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
