"""Settles on a GPU what is proven without one by Triton's interpreter and on a CPU: `python -m bench.gpu_check`.

    python -m bench.gpu_check --part environment|kernels|blocks|kv|model|deterministic|http [--quick]

- environment: versions, device, ceilings. Each other part begins with the ceilings of its own run.
- kernels: every kernel and its variants beside its reference in float32; then times and shares of the limit.
- blocks: a GGUF file's blocks, in every format: decoded and multiplied to the bits of the matrix dequantised; times of
  real matrices and of tiles beside those that serve; a model in blocks, and a file that is loaded, in the engine.
- kv: keys and values in 8 bits: what is stored, attention over it, and its speed over long contexts beside bf16's.
- model: each family beside transformers on the CPU, and a real shape's tokens however steps are sent; then the speed of
  random models in the engine, beside the targets (bench/gpu_run.py).
- deterministic: --deterministic, its matmuls and whole models alone and in company to the last bit; and what it costs.
- http: random models through the server's port, and beside the engine alone.

Runs from the source tree, needs no network and installs nothing. What a machine lacks beside torch, triton and
transformers can be carried there: `make wheels` where there is a network, and where there is none

    python3 -m pip install --no-index --no-deps --target /tmp/site build/wheels/*.whl
    PYTHONPATH=/tmp/site python3 -m bench.gpu_check --part kernels

A case that fails is a row of the table, and a case that takes its process or the device down costs that case alone.
Results are written as they come. Exit code: 0; 1: something is wrong, has failed, misses its target or was left out
for want of time: told in the last lines; 2: a package is missing, or there is no such case.
"""

import argparse
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

ALWAYS = ("numpy", "torch", "msgspec", "jinja2", "rich", "safetensors", "tokenizers")
SERVER = ("hpack", "orjson", "uvloop")
# What each part imports, beside ALWAYS; a kernel needs triton on any device.
NEEDED: dict[str, tuple[str, ...]] = {
    "environment": (),
    "kernels": ("triton",),
    "blocks": ("triton",),
    "kv": ("triton", *SERVER),
    "model": ("transformers",),
    "deterministic": ("triton", "transformers"),
    "http": SERVER,
}


def missing_packages(part: str) -> list[str]:
    """What the part cannot do without, and is not here."""
    return [name for name in (*ALWAYS, *NEEDED[part]) if find_spec(name) is None]


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code."""
    argv = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(
        prog="python -m bench.gpu_check", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", choices=tuple(NEEDED), required=True)
    parser.add_argument("--quick", action="store_true", help="few shapes: see that it works, in a minute or two")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="cpu: tiny shapes")
    parser.add_argument("--only", metavar="TEXT", help="cases whose name has it, and the ceilings")
    parser.add_argument("--limit", type=float, default=470.0, metavar="S", help="of the part (default: %(default)s)")
    parser.add_argument("--out", type=Path, metavar="DIR", help="default: bench/results; none with --quick or a CPU")
    arguments = parser.parse_args(argv)
    missing = missing_packages(arguments.part)
    if missing:
        print(f"bench.gpu_check: --part {arguments.part} needs {', '.join(missing)}: not installed", file=sys.stderr)
        print("Fix: make wheels, where there is a network; see --help", file=sys.stderr)
        return 2
    from bench.gpu_run import run_part  # imports what has just been looked for

    return run_part(arguments, argv)


if __name__ == "__main__":
    sys.exit(main())
