"""What `bench.gpu_check --part kernels` tries, as data: a kernel by its builder's name, the shapes, the formats.

A new kernel adds a builder in bench/gpu_problems.py and a row here. Shapes are those of real models; the quick ones and
those of a CPU, where Triton's interpreter takes milliseconds for each program, are a few numbers wide.
"""

from dataclasses import dataclass, field
from typing import Any

SERVED = ("bfloat16", "float16", "float32")
BFLOAT = ("bfloat16",)
EIGHT_B = {"hidden": 4096, "heads": 32, "kv_heads": 8, "head_dim": 128, "inner": 14_336, "vocab": 128_256}
SMALL = {"hidden": 1024, "heads": 16, "kv_heads": 8, "head_dim": 128, "inner": 3072, "vocab": 151_936}
TINY = {"hidden": 96, "heads": 6, "kv_heads": 2, "head_dim": 16, "inner": 80, "vocab": 300}


@dataclass(frozen=True, slots=True)
class KernelCase:
    """One kernel on one shape.

    Args:
        builder: of gpu_problems.BUILDERS.
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


def kernel_cases(is_quick: bool, is_device: bool) -> list[KernelCase]:
    """All of them, in the order in which they run: those that serve every model first."""
    forms: tuple[str, ...]
    if not is_device:
        forms = ("plain", "int8", "fp8 by 32", "int4")
        return _cases(TINY, rows=(5,), dtypes=("float32",), contexts=((2, 40),), forms=forms)
    if is_quick:
        forms = ("plain", "fp8 by 128", "int4")
        return _cases(SMALL, rows=(1, 64), dtypes=BFLOAT, contexts=((4, 1024),), forms=forms)
    forms = ("plain", "int8", "fp8", "fp8 by 128", "int4")
    found = _cases(EIGHT_B, (1, 16, 512, 4096), BFLOAT, ((1, 1024), (64, 4096), (512, 1024)), forms)
    found += _cases(SMALL, (1, 16, 512), SERVED, ((1, 1024), (64, 4096)), ("plain",))
    return list({case.name: case for case in found}.values())  # some shapes are both models', or of no format


def _cases(
    model: dict[str, int],
    rows: tuple[int, ...],
    dtypes: tuple[str, ...],
    contexts: tuple[tuple[int, int], ...],
    forms: tuple[str, ...],
) -> list[KernelCase]:
    """Of one model's shapes.

    Args:
        contexts: (sequences, tokens of each): of attention.
    """
    heads = {name: model[name] for name in ("heads", "kv_heads", "head_dim")}
    query, kv = (model[name] * model["head_dim"] for name in ("heads", "kv_heads"))
    matrices = {
        "qkv": (query + 2 * kv, model["hidden"]),
        "output": (model["hidden"], query),
        "gate_up": (2 * model["inner"], model["hidden"]),
        "down": (model["hidden"], model["inner"]),
    }
    found = []
    for dtype in dtypes:
        for num_rows in rows:
            found += [
                KernelCase("add_norm", {"rows": num_rows, "width": model["hidden"]}, dtype),
                KernelCase("rotate_and_store", {"rows": num_rows, **heads, "norm": "none"}, dtype),
                KernelCase("rotate_and_store", {"rows": num_rows, **heads, "norm": "head"}, dtype),
                KernelCase("gate", {"rows": num_rows, "width": model["inner"], "activation": "silu"}, dtype),
                KernelCase("embed", {"rows": num_rows, "vocab": model["vocab"], "width": model["hidden"]}, dtype),
            ]
            for name, (num_out, num_in) in matrices.items():
                for form in forms:
                    if form in ("int4", "fp8 by 32") and num_in % 32:
                        continue  # see gpu.quantize.can_quantize
                    shape = {"matrix": name, "form": form, "rows": num_rows, "out": num_out, "in": num_in}
                    found.append(KernelCase("product", shape, dtype))
            shape = {"matrix": "head", "form": "plain", "rows": num_rows, "out": model["vocab"], "in": model["hidden"]}
            found.append(KernelCase("product", shape, dtype))
            found.append(KernelCase("sample", {"rows": min(num_rows, 512), "vocab": model["vocab"]}, "float32"))
        found += _once(model, dtype)
        for num_sequences, context in contexts:
            shape = {"sequences": num_sequences, "context": context, **heads}
            found.append(KernelCase("decode_attention", shape, dtype))
        num_sequences, context = contexts[0]
        found.append(KernelCase("extend_attention", {"prompts": 1, "tokens": context, **heads}, dtype))
        found.append(
            KernelCase("extend_attention", {"prompts": 2, "tokens": context, "decodes": num_sequences, **heads}, dtype)
        )
    return found


def _once(model: dict[str, int], dtype: str) -> list[KernelCase]:
    """What a model needs in one shape, or of which one shape shows all."""
    width = model["hidden"]
    num_rows = 4 if model is TINY else 64
    experts = {"experts": 4, "active": 2, "width": 32} if model is TINY else {"experts": 128, "active": 8, "width": 768}
    return [
        KernelCase("gate", {"rows": num_rows, "width": model["inner"], "activation": "gelu_pytorch_tanh"}, dtype),
        KernelCase("gate", {"rows": num_rows, "width": model["inner"], "activation": "clamped_swiglu"}, dtype),
        KernelCase("decoding_rows", {"rows": num_rows, "slots": 4 * num_rows, "width": num_rows * 16}, "float32"),
        KernelCase("prompt_tokens", {"tokens": 8 * num_rows, "slots": num_rows, "width": 16 * num_rows}, "float32"),
        KernelCase("scatter", {"rows": num_rows, "slots": 4 * num_rows, "width": width}, dtype),
        KernelCase("experts", {"rows": 2, "hidden": min(width, 2048), **experts}, dtype),
        KernelCase("experts", {"rows": num_rows * 4, "hidden": min(width, 2048), **experts}, dtype),
    ]
