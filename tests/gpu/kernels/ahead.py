"""Compiles kernels for an H100 or H200 (sm_90) without a device: what only the interpreter accepts is found.

In a process of its own, as in this one kernels are interpreted (tests/conftest.py).
"""

import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

CAPABILITY = 90
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
        constants: name -> value.
        multiples_of_16: integers that are.
    """

    kernel: str
    arguments: dict[str, str]
    constants: dict[str, Any]
    num_warps: int = 4
    num_stages: int = 3
    multiples_of_16: tuple[str, ...] = ()

    def __str__(self) -> str:
        kinds = dict.fromkeys(kind.removeprefix("*") for kind in self.arguments.values() if kind.startswith("*"))
        return "-".join([self.kernel.split(":")[1], *kinds, *map(str, self.constants.values())])


@dataclass(frozen=True)
class Compiled:
    """What a program takes, and a thread of it; error: why it was not compiled."""

    case: Case
    shared_bytes: int = 0
    num_registers: int = 0
    stack_bytes: int = 0
    error: str | None = None


def pointer(dtype: torch.dtype) -> str:
    return "*" + TRITON_TYPES[dtype]


def compile_ahead(cases: Sequence[Case], cache: Path) -> list[Compiled]:
    """One for each case.

    Args:
        cache: an empty directory: nothing is taken from an earlier run.
    """
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(cache)}
    told = json.dumps([asdict(case) for case in cases])
    ran = subprocess.run(
        [sys.executable, "-m", "tests.gpu.kernels.ahead"], input=told, text=True, capture_output=True, env=environment
    )
    assert ran.returncode == 0, ran.stderr
    lines = ran.stdout.splitlines()
    return [Compiled(case, **json.loads(line)) for case, line in zip(cases, lines, strict=True)]


def assert_fits(compiled: Compiled) -> None:
    """It compiles, keeps its numbers in registers, and has the shared memory it wants."""
    assert compiled.error is None, compiled.error
    assert compiled.shared_bytes <= SHARED_MEMORY_BYTES
    assert compiled.num_registers > 0
    assert compiled.stack_bytes == 0


def _compile(case: dict[str, Any]) -> dict[str, Any]:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    module, name = case["kernel"].split(":")
    kernel = getattr(importlib.import_module(module), name)
    constants, arguments = case["constants"], case["arguments"]
    signature = {
        argument: "constexpr" if argument in constants else arguments[argument] for argument in kernel.arg_names
    }
    divisible = [["tt.divisibility", 16]]
    attributes = {
        (place,): divisible
        for place, argument in enumerate(kernel.arg_names)
        if signature[argument].startswith("*") or argument in case["multiples_of_16"]
    }
    source = ASTSource(kernel, signature, constants, attributes)
    try:
        compiled = triton.compile(
            source,
            target=GPUTarget("cuda", CAPABILITY, 32),
            options={"num_warps": case["num_warps"], "num_stages": case["num_stages"]},
        )
    except Exception as error:  # whatever the compiler says is the test's to show
        return {"error": f"{type(error).__name__}: {error}"}
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        registers, stack_bytes = _resources(Path(file.name))
    return {"shared_bytes": compiled.metadata.shared, "num_registers": registers, "stack_bytes": stack_bytes}


def _resources(cubin: Path) -> tuple[int, int]:
    """Of a thread: registers, and bytes of memory for what has no place in them."""
    import triton

    reader = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    ran = subprocess.run([reader, "--dump-resource-usage", cubin], text=True, capture_output=True, check=True)
    found = re.search(r"REG:(\d+) STACK:(\d+)", ran.stdout)
    assert found is not None, ran.stdout
    return int(found[1]), int(found[2])


if __name__ == "__main__":
    for told in json.load(sys.stdin):
        print(json.dumps(_compile(told)), flush=True)
