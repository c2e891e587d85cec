"""Kernels for CPUs with avx512_bf16, compiled by numba: what torch does slowly for few rows. Thread: engine.

Optional: without numba, or for a small model, nothing here is imported, and torch's own operators serve (gpu/tune.py
decides). Compiled code is cached beside these files, or where there is room (gpu/cache_files.py).
"""
