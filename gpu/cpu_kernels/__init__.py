"""Kernels compiled by numba for CPUs, mostly with avx512_bf16, where torch is slow for few rows. Thread: engine.

Optional: without numba, or for a small model, nothing here is imported, and torch's operators serve (gpu/tune.py
decides). Compiled code is cached beside these files, or elsewhere where that is not writable (gpu/cache_files.py).
"""
