"""Compiles kernels, and keeps their code: `python -m gpu.cpu_kernels NAME... [--keep DIRECTORY]`; see compile_apart.

A name is a module of this folder, or a format of blocks. numba keeps the code where it finds it; the directory gets it
for processes without numba (compiled.py). Ends with the process that started it.
"""

import argparse
import sys
from importlib import import_module
from pathlib import Path

from gpu.blocks import FORMATS
from gpu.parallel.follower import die_with_parent


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m gpu.cpu_kernels")
    parser.add_argument("names", nargs="+")
    parser.add_argument("--keep", type=Path)
    given = parser.parse_args()
    die_with_parent()
    for name in given.names:
        if name in FORMATS:
            from gpu.cpu_kernels.block_matmul import compile_format

            compile_format(name)
        else:
            import_module(f"gpu.cpu_kernels.{name}")
    if given.keep is not None:
        from gpu.cpu_kernels.compiled import keep_compiled

        try:
            keep_compiled(given.keep)
        except (OSError, RuntimeError) as error:
            sys.exit(f"the kernels' code cannot be kept: {error}")


if __name__ == "__main__":
    main()
