"""Compiles kernels for an H100 or H200 (sm_90) without a device: what ahead.py starts, as a process of its own.

It reads a list of cases as JSON from its input, and prints a line of JSON for each, in their order. Imports no torch.
"""

import importlib
import json
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

CAPABILITY, WARP = 90, 32


def compile_case(case: dict[str, Any]) -> dict[str, Any]:
    """What Compiled says of it. case: Case's fields."""
    module, name = case["kernel"].split(":")
    kernel = getattr(importlib.import_module(module), name)
    constants, arguments = case["constants"], case["arguments"]
    if constants.get("LAYOUT") is not None:
        formats = importlib.import_module("gpu.kernels.block_formats")
        constants = constants | {"LAYOUT": formats.LAYOUTS[constants["LAYOUT"]]}
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
    options = {name: case[name] for name in ("num_warps", "num_stages", "enable_fp_fusion")}
    try:
        compiled = triton.compile(source, target=GPUTarget("cuda", CAPABILITY, WARP), options=options)
    except Exception as error:  # whatever the compiler says is the test's to show
        return {"error": f"{type(error).__name__}: {error}"}
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        registers, stack_bytes = resources(Path(file.name))
    ptx = compiled.asm["ptx"]
    return {
        "shared_bytes": compiled.metadata.shared,
        "num_registers": registers,
        "stack_bytes": stack_bytes,
        "num_fused": len(re.findall(r"\bfma\.rn\.f32", ptx)),  # fma.rn.ftz.f32: inside a logarithm
        "num_near_divisions": len(re.findall(r"\bdiv\.(?:full|approx)", ptx)),
    }


def resources(cubin: Path) -> tuple[int, int]:
    """Of a thread: registers, and bytes of memory for what has no place in them."""
    reader = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    ran = subprocess.run([reader, "--dump-resource-usage", cubin], text=True, capture_output=True, check=True)
    found = re.search(r"REG:(\d+) STACK:(\d+)", ran.stdout)
    assert found is not None, ran.stdout
    return int(found[1]), int(found[2])


if __name__ == "__main__":
    cases = json.load(sys.stdin)
    for module in {case["kernel"].split(":")[0] for case in cases}:
        importlib.import_module(module)
    with ProcessPoolExecutor(len(os.sched_getaffinity(0)), multiprocessing.get_context("fork")) as pool:
        for found in pool.map(compile_case, cases):
            print(json.dumps(found), flush=True)
