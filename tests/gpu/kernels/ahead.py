"""Kernels compiled for an H100 or H200 (sm_90) without a device: what only the interpreter accepts is found.

In a process of its own (ahead_compiler.py), as in this one kernels are interpreted (tests/conftest.py).
"""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

SHARED_MEMORY_BYTES = 227 * 1024  # of one program, at most
TRITON_TYPES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.bool: "i1",
}


@dataclass(frozen=True)
class Case:
    """One kernel in one form.

    Args:
        kernel: "module:name".
        arguments: name -> "*bf16", "i32" and so on, in any order; the addresses are multiples of 16 bytes.
        constants: name -> value; of LAYOUT the format's name.
        multiples_of_16: integers that are.
    """

    kernel: str
    arguments: dict[str, str]
    constants: dict[str, Any]
    num_warps: int = 4
    num_stages: int = 3
    multiples_of_16: tuple[str, ...] = ()
    enable_fp_fusion: bool = True

    def __str__(self) -> str:
        kinds = dict.fromkeys(kind.removeprefix("*") for kind in self.arguments.values() if kind.startswith("*"))
        return "-".join([self.kernel.split(":")[1], *kinds, *map(str, self.constants.values())])


@dataclass(frozen=True)
class Compiled:
    """What a program takes, and a thread of it.

    Args:
        num_fused: products and sums of float32 that are rounded once.
        num_near_divisions: that are not rounded as IEEE 754 has it.
        error: why it was not compiled.
    """

    case: Case
    shared_bytes: int = 0
    num_registers: int = 0
    stack_bytes: int = 0
    num_fused: int = 0
    num_near_divisions: int = 0
    error: str | None = None


def pointer(dtype: torch.dtype) -> str:
    return "*" + TRITON_TYPES[dtype]


def compile_ahead(cases: Sequence[Case], cache: Path) -> list[Compiled]:
    """One for each case.

    Args:
        cache: where Triton keeps what it has compiled, by the source and all it depends on.
    """
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(cache)}
    told = json.dumps([asdict(case) for case in cases])
    ran = subprocess.run(
        [sys.executable, "-m", "tests.gpu.kernels.ahead_compiler"],
        input=told,
        text=True,
        capture_output=True,
        env=environment,
    )
    assert ran.returncode == 0, ran.stderr
    lines = ran.stdout.splitlines()
    return [Compiled(case, **json.loads(line)) for case, line in zip(cases, lines, strict=True)]


def assert_fits(compiled: Compiled, most_stack_bytes: int = 0) -> None:
    """It compiles, keeps its numbers in registers, and has the shared memory it wants."""
    assert compiled.error is None, compiled.error
    assert compiled.shared_bytes <= SHARED_MEMORY_BYTES
    assert compiled.num_registers > 0
    assert compiled.stack_bytes <= most_stack_bytes
