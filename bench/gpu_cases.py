"""What `bench.gpu_check --part kernels` tries, as data: a kernel by its builder's name, the shapes, the formats.

A new kernel adds a builder (bench/gpu_problems.py and its like) and a row here. Shapes that are timed are those of real
models; variants, which are held against their references alone, are gpu_variants.py's. Those of a CPU, where Triton's
interpreter takes milliseconds for each program, are a few numbers wide.
"""

from dataclasses import dataclass, field
from typing import Any

EIGHT_B = {"hidden": 4096, "heads": 32, "kv_heads": 8, "head_dim": 128, "inner": 14_336, "vocab": 128_256}
SMALL = {"hidden": 1024, "heads": 16, "kv_heads": 8, "head_dim": 128, "inner": 3072, "vocab": 151_936}
TINY = {"hidden": 96, "heads": 6, "kv_heads": 2, "head_dim": 16, "inner": 80, "vocab": 300}
MOST_HEAD_ROWS = 512  # a prompt's chunk has one row that draws


@dataclass(frozen=True, slots=True)
class KernelCase:
    """One kernel on one shape.

    Args:
        builder: of gpu_token_problems.BUILDERS.
        shape: the builder's arguments.
        dtype: of rows and, where they are not quantised, of weights.
    """

    builder: str
    shape: dict[str, Any] = field(default_factory=dict)
    dtype: str = "bfloat16"

    @property
    def name(self) -> str:
        shown = ", ".join(f"{name} {value}" for name, value in self.shape.items())
        return f"{self.builder}: {shown}; {self.dtype}"


def timed_cases(is_quick: bool, is_device: bool) -> list[KernelCase]:
    """Of real models' shapes, what serves every model first: attention, plain products, then what lies between them."""
    if not is_device:
        return _of_model(TINY, (5,), ((2, 40),), ("int8", "fp8 by 32", "int4"), "float32")
    if is_quick:
        return _of_model(SMALL, (1, 64), ((4, 1024),), ("fp8 by 128", "int4"))
    found = _of_model(EIGHT_B, (1, 16, 512, 4096), ((64, 4096), (1, 1024), (512, 1024)))
    found += _of_model(SMALL, (1, 16, 512), ((64, 4096), (1, 1024)))
    found += _quantized(EIGHT_B, (1, 16, 512), ("int8", "fp8", "fp8 by 128", "int4", "int4 by 128"))
    return list({case.name: case for case in found}.values())  # some shapes are both models'


def _of_model(
    model: dict[str, int],
    rows: tuple[int, ...],
    contexts: tuple[tuple[int, int], ...],
    forms: tuple[str, ...] = (),
    dtype: str = "bfloat16",
) -> list[KernelCase]:
    """
    Args:
        contexts: (sequences, tokens of each): of attention.
        forms: of quantised matrices.
    """
    heads = heads_of(model)
    found = [
        KernelCase("decode_attention", {"sequences": num_sequences, "context": context, **heads}, dtype)
        for num_sequences, context in contexts
    ]
    num_sequences, context = min(contexts)
    prompts = [
        {"prompts": 1, "tokens": context, **heads},
        {"prompts": 2, "tokens": context, "decodes": num_sequences, **heads},
    ]
    if model is EIGHT_B:
        prompts.append({"prompts": 2, "tokens": 8192, "decodes": 64, **heads})
    found += [KernelCase("extend_attention", shape, dtype) for shape in prompts]
    for num_rows in rows:
        found += _products(model, num_rows, "plain", dtype)
        if num_rows <= MOST_HEAD_ROWS:
            shape = {"matrix": "head", "form": "plain", "rows": num_rows, "out": model["vocab"], "in": model["hidden"]}
            found += [KernelCase("product", shape, dtype)]
            found += [KernelCase("sample", {"rows": num_rows, "vocab": model["vocab"], "asks": "all"}, "float32")]
            found += [KernelCase("sample", {"rows": num_rows, "vocab": model["vocab"], "asks": "greedy"}, "float32")]
    for num_rows in rows:
        found += _elementwise(model, num_rows, dtype)
    return found + _once(model, dtype) + _quantized(model, rows, forms, dtype)


def heads_of(model: dict[str, int]) -> dict[str, int]:
    return {name: model[name] for name in ("heads", "kv_heads", "head_dim")}


def _products(model: dict[str, int], num_rows: int, form: str, dtype: str) -> list[KernelCase]:
    query, kv = (model[name] * model["head_dim"] for name in ("heads", "kv_heads"))
    matrices = {
        "gate_up": (2 * model["inner"], model["hidden"]),
        "down": (model["hidden"], model["inner"]),
        "qkv": (query + 2 * kv, model["hidden"]),
        "output": (model["hidden"], query),
    }
    return [
        KernelCase("product", {"matrix": name, "form": form, "rows": num_rows, "out": num_out, "in": num_in}, dtype)
        for name, (num_out, num_in) in matrices.items()
        if num_in % least_width(form) == 0
    ]


def least_width(form: str) -> int:
    """That rows of matrices in this form are a multiple of; see gpu.quantize.can_quantize."""
    scheme, _, group = form.partition(" by ")
    return int(group) if group else 32 if scheme == "int4" else 1


def _quantized(
    model: dict[str, int], rows: tuple[int, ...], forms: tuple[str, ...], dtype: str = "bfloat16"
) -> list[KernelCase]:
    return [case for form in forms for num_rows in rows for case in _products(model, num_rows, form, dtype)]


def _elementwise(model: dict[str, int], num_rows: int, dtype: str) -> list[KernelCase]:
    rows, heads = {"rows": num_rows}, heads_of(model)
    return [
        KernelCase("add_norm", {**rows, "width": model["hidden"]}, dtype),
        KernelCase("rotate_and_store", {**rows, **heads, "norm": "none"}, dtype),
        KernelCase("rotate_and_store", {**rows, **heads, "norm": "head"}, dtype),
        KernelCase("gate", {**rows, "width": model["inner"], "activation": "silu"}, dtype),
        KernelCase("embed", {**rows, "vocab": model["vocab"], "width": model["hidden"]}, dtype),
    ]


def _once(model: dict[str, int], dtype: str) -> list[KernelCase]:
    """What a model needs in one shape, or of which one shape shows all."""
    num_rows = 4 if model is TINY else 64
    experts = {"experts": 4, "active": 2, "width": 32} if model is TINY else {"experts": 128, "active": 8, "width": 768}
    hidden = min(model["hidden"], 2048)
    cleared = {"width": model["kv_heads"] * model["head_dim"]}
    return [
        KernelCase("experts", {"rows": 2, "hidden": hidden, **experts, "form": "plain"}, dtype),
        KernelCase("experts", {"rows": num_rows * 4, "hidden": hidden, **experts, "form": "plain"}, dtype),
        KernelCase("decoding_rows", {"rows": num_rows, "slots": 4 * num_rows, "width": num_rows * 16}, "float32"),
        KernelCase("prompt_tokens", {"tokens": 8 * num_rows, "slots": num_rows, "width": 16 * num_rows}, "float32"),
        KernelCase("scatter", {"rows": num_rows, "slots": 4 * num_rows, "width": model["hidden"]}, dtype),
        KernelCase("clear", {"layers": 2, "blocks": 2 * num_rows, "cleared": num_rows // 4, **cleared}, dtype),
    ]
