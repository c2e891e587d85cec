"""What kernels are held against their references for, beside the shapes that are timed: as data, see gpu_cases.py.

Heads of all sizes and groups, windows, caps and sinks, one-token contexts and splits, other formats, matrices whose
sides no tile divides, quantised experts, and everything that requests may ask of sampling.
"""

from collections.abc import Iterable
from typing import Any

from bench.gpu_cases import TINY, KernelCase, heads_of

FLOATS = ("float16", "float32")
# (query heads, KV heads, head_dim)
HEADS = ((32, 8, 64), (28, 4, 128), (32, 32, 96), (32, 8, 80), (8, 1, 256), (64, 8, 128), (8, 8, 128), (5, 1, 24))
SCORES: tuple[dict[str, Any], ...] = (
    {"window": 128},
    {"window": 4096},  # wider than the context
    {"window": 1},
    {"cap": 30.0},
    {"sinks": True},
    {"window": 128, "sinks": True},
    {"window": 200, "cap": 50.0},
)
# (sequences, tokens of each): one token, one block, the first of a second block, the borders of splits
CONTEXTS = ((3, 1), (2, 16), (2, 17), (2, 256), (2, 257), (1, 20_000))
FORMS = ("int8", "fp8", "fp8 by 128", "int4", "int4 by 128")


def variant_cases(is_quick: bool, is_device: bool) -> list[KernelCase]:
    """What serves most models first."""
    if not is_device:
        return _tiny()
    heads = HEADS[:2] if is_quick else HEADS
    usual = {"heads": 32, "kv_heads": 8, "head_dim": 128}
    found = [case for scores in SCORES for case in _attention({**usual, **scores})]
    found += [case for sizes in heads for case in _attention(_heads(*sizes))]
    found += _sampling((1, 9, 40, 300), (32_000,) if is_quick else (128_256, 201_088, 1000))
    if is_quick:
        return found
    found += [KernelCase("decode_attention", {"sequences": n, "context": m, **usual}) for n, m in CONTEXTS]
    found += [case for scores in SCORES for case in _attention({**_heads(64, 8, 64), **scores})]
    found += _between("bfloat16", 7, 2880, 0.22)
    found += _products((1, 3, 16, 17, 300), 1000, 1056, ("plain", "int8", "fp8", "int4"))
    found += _experts((1, 40, 700), {"hidden": 1024, "experts": 32, "active": 4, "width": 512})
    return found


def other_formats(is_quick: bool, is_device: bool) -> list[KernelCase]:
    """Variants in formats that few models are served in."""
    found: list[KernelCase] = []
    for dtype in () if is_quick or not is_device else FLOATS:
        for scores in ({}, {"window": 128, "sinks": True}, {"cap": 30.0}):
            found += [case for sizes in HEADS[:3] for case in _attention({**_heads(*sizes), **scores}, dtype)]
        found += _between(dtype, 7, 2880, 0.22)
        found += _products((1, 16, 300), 1024, 2048, ("plain", "int8", "int4 by 128"), dtype)
        found += _experts((3, 200), {"hidden": 512, "experts": 8, "active": 2, "width": 256}, dtype)
    return found


def _tiny() -> list[KernelCase]:
    """In float32: the interpreter's bfloat16 products are wrong."""
    usual = heads_of(TINY)
    found = []
    for scores in ({"window": 21}, {"window": 1}, {"cap": 3.0}, {"sinks": True}, {"window": 21, "cap": 3.0}):
        found += _attention({**usual, **scores}, "float32", 40)
    for sizes in ((2, 2, 24), (3, 1, 80)):
        found += _attention(_heads(*sizes), "float32", 33)
    found.append(KernelCase("decode_attention", {"sequences": 2, "context": 1, **usual}, "float32"))
    found += _sampling((11,), (300,))
    found += _between("float32", 3, 40, 0.22)
    found += _products((3,), 40, 96, ("plain", "fp8 by 32", "int4 by 32"), "float32")
    return found + _experts((5,), {"hidden": 64, "experts": 4, "active": 2, "width": 32}, "float32", ("int8", "int4"))


def _heads(num_heads: int, num_kv_heads: int, head_dim: int) -> dict[str, Any]:
    return {"heads": num_heads, "kv_heads": num_kv_heads, "head_dim": head_dim}


def _attention(shape: dict[str, Any], dtype: str = "bfloat16", context: int = 700) -> list[KernelCase]:
    """Decodes alone, and prompts and decodes in one launch."""
    mixed = {"prompts": 2, "tokens": context // 2, "decodes": 3}
    return [
        KernelCase("decode_attention", {"sequences": 5, "context": context, **shape}, dtype),
        KernelCase("extend_attention", {**mixed, **shape}, dtype),
    ]


def _sampling(rows: Iterable[int], vocabularies: Iterable[int]) -> list[KernelCase]:
    """By few rows several programs read one, and by many one does."""
    return [
        KernelCase(builder, {"rows": num_rows, "vocab": vocab, **asks}, "float32")
        for vocab in vocabularies
        for num_rows in rows
        for builder, asks in (("sample", {"asks": "all"}), ("sample", {"asks": "unpenalised"}), ("logprobs", {}))
    ]


def _between(dtype: str, num_rows: int, width: int, scale: float) -> list[KernelCase]:
    """Products aside: norms, rotations, activations."""
    rows, heads = {"rows": num_rows}, _heads(6, 2, 40)
    return [
        KernelCase("add_norm", {**rows, "width": width, "scale": scale}, dtype),
        KernelCase("add_norm", {**rows, "width": width, "weight": False}, dtype),
        KernelCase("norm", {**rows, "width": width}, dtype),
        KernelCase("rotate_and_store", {**rows, **heads, "norm": "all"}, dtype),
        KernelCase("rotate_and_store", {**rows, **heads, "norm": "none", "turns": False}, dtype),
        KernelCase("gate", {**rows, "width": width, "activation": "gelu_pytorch_tanh"}, dtype),
        KernelCase("gate", {**rows, "width": width, "activation": "clamped_swiglu"}, dtype),
        KernelCase("embed", {**rows, "vocab": 300, "width": width}, dtype),
    ]


def _products(
    rows: Iterable[int], num_out: int, num_in: int, forms: Iterable[str], dtype: str = "bfloat16"
) -> list[KernelCase]:
    shape = {"out": num_out, "in": num_in, "bias": False}
    return [
        KernelCase("product", {"matrix": "any", "form": form, "rows": num_rows, **shape}, dtype)
        for form in forms
        for num_rows in rows
    ]


def _experts(
    rows: Iterable[int], shape: dict[str, int], dtype: str = "bfloat16", forms: Iterable[str] = FORMS
) -> list[KernelCase]:
    found = [
        KernelCase("experts", {"rows": num_rows, **shape, "form": form}, dtype) for form in forms for num_rows in rows
    ]
    clamped = {"form": "plain", "activation": "clamped_swiglu", "bias": True}
    return [*found, *(KernelCase("experts", {"rows": num_rows, **shape, **clamped}, dtype) for num_rows in rows)]
