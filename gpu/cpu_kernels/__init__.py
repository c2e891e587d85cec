"""Kernels compiled by numba for CPUs, mostly with AVX-512, where torch is slow for few rows. Thread: engine.

Optional: without numba, or for a small model, nothing here but support.py is imported, which decides with gpu/tune.py,
and torch's operators serve. Compiled code is cached beside these files, or elsewhere where that is not writable
(gpu/cache_files.py).
"""
