"""Compiles kernels, and leaves their code where numba keeps it: `python -m gpu.cpu_kernels NAME...`; see compile_apart.

A name is a module of this folder, or a format of blocks.
"""

import sys
from importlib import import_module

from gpu.blocks import FORMATS


def main() -> None:
    for name in sys.argv[1:]:
        if name in FORMATS:
            from gpu.cpu_kernels.block_matmul import compile_format

            compile_format(name)
        else:
            import_module(f"gpu.cpu_kernels.{name}")


if __name__ == "__main__":
    main()
