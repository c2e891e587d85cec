"""Compiles sampling's kernels for an H100 or H200 without a device: `python -m tests.gpu.kernels.sampling_ahead`.

In a process of its own: in a test's, kernels are interpreted. Prints a line of JSON for each of CASES.
"""

import json
import re
import subprocess
import tempfile
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from gpu.kernels import sampling
from gpu.kernels.device_sampler import MAX_BIASES, MAX_STOP_IDS, SHAPES

CAPABILITY, WARP = 90, 32
SEGMENTS = 2048  # of 262,144 tokens
CASES = (("sample_rows", "fp32"), ("scan_rows", "bf16"), ("end_rows", "fp16"))
INT64 = ("slots", "positions", "numbers", "token_ids", "last_tokens")
INT32 = ("bias_ids", "stop_ids", "seen", "listed", "tokens_kept", "found_tokens")
SCALARS = ("vocab_size", "range_size", "num_splits")


def compile_case(name: str, dtype: str) -> dict[str, object]:
    """What a program takes, and how it multiplies and adds."""
    shape, kernel = SHAPES[0][1], getattr(sampling, name)
    known = {
        "HAS_SEEN": True,
        "MAX_BIASES": MAX_BIASES,
        "MAX_STOP_IDS": MAX_STOP_IDS,
        "GROUP": shape.group,
        "SEGMENTS": SEGMENTS,
        "SPLITS": shape.num_splits,
    }
    constants = {argument: known[argument] for argument in kernel.arg_names if argument in known}
    types = {
        **dict.fromkeys(kernel.arg_names, "*fp32"),
        **dict.fromkeys(constants, "constexpr"),
        **dict.fromkeys(INT64, "*i64"),
        **dict.fromkeys(INT32, "*i32"),
        **dict.fromkeys(SCALARS, "i32"),
        "is_finite": "*i8",
        "logits": f"*{dtype}",
    }
    signature = {argument: types[argument] for argument in kernel.arg_names}
    aligned = {
        (place,): [["tt.divisibility", 16]] for place, kind in enumerate(signature.values()) if kind.startswith("*")
    }
    compiled = triton.compile(
        ASTSource(kernel, signature, constants, aligned),
        target=GPUTarget("cuda", CAPABILITY, WARP),
        options={"num_warps": shape.num_warps, "enable_fp_fusion": False},
    )
    ptx = compiled.asm["ptx"]
    return {
        "name": f"{name}-{dtype}",
        "shared_bytes": compiled.metadata.shared,
        "num_fused": len(re.findall(r"\bfma\.rn\.f32", ptx)),  # fma.rn.ftz.f32: inside a logprob's logarithm
        "num_near_divisions": len(re.findall(r"\bdiv\.(?:full|approx)", ptx)),
        "stack_bytes": stack_bytes(compiled.asm["cubin"]),
    }


def stack_bytes(cubin: bytes) -> int:
    """Of a thread: memory for what has no place in its registers."""
    reader = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [reader, "--dump-resource-usage", file.name]
        told = subprocess.run(command, text=True, capture_output=True, check=True).stdout
    found = re.search(r"STACK:(\d+)", told)
    assert found is not None, told
    return int(found[1])


if __name__ == "__main__":
    for case in CASES:
        print(json.dumps(compile_case(*case)), flush=True)
