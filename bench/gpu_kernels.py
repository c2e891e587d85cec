"""bench.gpu_check --part kernels: each kernel beside its float32 reference, and its time beside the limit.

Cases are data: a kernel by its builder's name (bench/gpu_problems.py), a shape, a format. Shapes that are timed are
those of real models; variants are held against their references alone: heads of all sizes and groups, windows, caps and
sinks, one-token contexts and splits, matrices whose sides no tile divides, quantised experts, and everything that
requests may ask of sampling. Those of a CPU, where Triton's interpreter takes milliseconds for each program, are a few
numbers wide. Outputs are poisoned: what a kernel does not write is not a number, and makes its error infinite.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bench.gpu_problems import BUILDERS, Draw, Problem
from bench.gpu_run import OK, WRONG, Case, Context, Row, ceilings_case, target_of
from bench.limits import median_s, num_copies
from bench.results import Cell
from gpu.device import DTYPES

# |out - ref| / |ref|: rounding a result once costs 2 ** -9 of it in bfloat16, 2 ** -12 in float16, at most; float32's
# sums of thousands, added in another order, differ by a few 2 ** -24.
TOLERANCES = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
CASE_LIMIT_S = 90.0  # compiling is most of it
ERRORS, TIMES = "Kernels: errors", "Kernels: times"

Sizes = dict[str, Any]
EIGHT_B: Sizes = {"hidden": 4096, "heads": 32, "kv_heads": 8, "head_dim": 128, "inner": 14_336, "vocab": 128_256}
SMALL: Sizes = {"hidden": 1024, "heads": 16, "kv_heads": 8, "head_dim": 128, "inner": 3072, "vocab": 151_936}
TINY: Sizes = {"hidden": 96, "heads": 6, "kv_heads": 2, "head_dim": 16, "inner": 80, "vocab": 300}
MOST_HEAD_ROWS = 512  # a prompt's chunk has one row that samples

FLOATS = ("float16", "float32")
# (query heads, KV heads, head_dim)
HEADS = ((32, 8, 64), (28, 4, 128), (32, 32, 96), (32, 8, 80), (8, 1, 256), (64, 8, 128), (8, 8, 128), (5, 1, 24))
SCORES: tuple[Sizes, ...] = (
    {"window": 128},
    {"window": 4096},  # wider than the context
    {"window": 1},
    {"cap": 30.0},
    {"sinks": True},
    {"window": 128, "sinks": True},
    {"window": 200, "cap": 50.0},
)
TINY_SCORES: tuple[Sizes, ...] = (
    *({"window": 21}, {"window": 1}, {"cap": 3.0}, {"sinks": True}, {"window": 21, "cap": 3.0}),
)
# (sequences, tokens of each): one token, one block, the first of a second block, the borders of splits
CONTEXTS = ((3, 1), (2, 16), (2, 17), (2, 256), (2, 257), (1, 20_000))
FORMS = ("int8", "fp8", "fp8 by 128", "int4", "int4 by 128")


@dataclass(frozen=True, slots=True)
class KernelCase:
    """One kernel on one shape.

    Args:
        builder: of gpu_problems.BUILDERS.
        shape: the builder's arguments.
        dtype: of rows and, where they are not quantised, of weights.
    """

    builder: str
    shape: Sizes = field(default_factory=dict)
    dtype: str = "bfloat16"

    @property
    def name(self) -> str:
        shown = ", ".join(f"{name} {value}" for name, value in self.shape.items())
        return f"{self.builder}: {shown}; {self.dtype}"


def timed_cases(is_quick: bool, is_device: bool) -> list[KernelCase]:
    """Of real models' shapes, what serves every model first: attention, plain matmuls, then what lies between them."""
    if not is_device:
        return _of_model(TINY, (5,), ((2, 40),), ("int8", "fp8 by 32", "int4"), "float32")
    if is_quick:
        return _of_model(SMALL, (1, 64), ((4, 1024),), ("fp8 by 128", "int4"))
    found = _of_model(EIGHT_B, (1, 16, 512, 4096), ((64, 4096), (1, 1024), (512, 1024)))
    found += _of_model(SMALL, (1, 16, 512), ((64, 4096), (1, 1024)))
    found += _of_matrices(EIGHT_B, (1, 16, 512), FORMS)
    return list({case.name: case for case in found}.values())  # some shapes are both models'


def variant_cases(is_quick: bool, is_device: bool) -> list[KernelCase]:
    """What serves most models first. On a CPU in float32: the interpreter's bfloat16 products are wrong."""
    if not is_device:
        usual = _heads_of(TINY)
        found = [case for scores in TINY_SCORES for case in _attention({**usual, **scores}, "float32", 40)]
        found += [case for sizes in ((2, 2, 24), (3, 1, 80)) for case in _attention(_heads(*sizes), "float32", 33)]
        found.append(KernelCase("decode_attention", {"sequences": 2, "context": 1, **usual}, "float32"))
        found += _sampling((11,), (300,)) + _between("float32", 3, 40, 0.22)
        found += _matmuls((3,), 40, 96, ("plain", "fp8 by 32", "int4 by 32"), "float32")
        shape = {"hidden": 64, "experts": 4, "active": 2, "width": 32}
        return found + _experts((5,), shape, "float32", ("int8", "int4"))
    usual = _heads(32, 8, 128)
    found = [case for scores in SCORES for case in _attention({**usual, **scores})]
    found += [case for sizes in HEADS[: 2 if is_quick else None] for case in _attention(_heads(*sizes))]
    found += _sampling((1, 9, 40, 300), (32_000,) if is_quick else (128_256, 201_088, 1000))
    if is_quick:
        return found
    found += [KernelCase("decode_attention", {"sequences": n, "context": m, **usual}) for n, m in CONTEXTS]
    found += [case for scores in SCORES for case in _attention({**_heads(64, 8, 64), **scores})]
    found += _between("bfloat16", 7, 2880, 0.22)
    found += _matmuls((1, 3, 16, 17, 300), 1000, 1056, ("plain", "int8", "fp8", "int4"))
    return found + _experts((1, 40, 700), {"hidden": 1024, "experts": 32, "active": 4, "width": 512})


def other_formats(is_quick: bool, is_device: bool) -> list[KernelCase]:
    """Variants in formats that few models are served in."""
    found: list[KernelCase] = []
    for dtype in () if is_quick or not is_device else FLOATS:
        for scores in ({}, {"window": 128, "sinks": True}, {"cap": 30.0}):
            found += [case for sizes in HEADS[:3] for case in _attention({**_heads(*sizes), **scores}, dtype)]
        found += _between(dtype, 7, 2880, 0.22)
        found += _matmuls((1, 16, 300), 1024, 2048, ("plain", "int8", "int4 by 128"), dtype)
        found += _experts((3, 200), {"hidden": 512, "experts": 8, "active": 2, "width": 256}, dtype)
    return found


def _of_model(
    model: Sizes,
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
    heads, width, vocab = _heads_of(model), model["hidden"], model["vocab"]
    num_sequences, context = min(contexts)
    mixed = {"prompts": 2, "tokens": context, "decodes": num_sequences, **heads}
    prompts = [{"prompts": 1, "tokens": context, **heads}, mixed]
    if model is EIGHT_B:
        prompts.append({"prompts": 2, "tokens": 8192, "decodes": 64, **heads})
    found = [KernelCase("decode_attention", {"sequences": n, "context": m, **heads}, dtype) for n, m in contexts]
    found += [KernelCase("extend_attention", shape, dtype) for shape in prompts]
    for num_rows in rows:
        found += _of_matrices(model, (num_rows,), ("plain",), dtype)
        if num_rows <= MOST_HEAD_ROWS:
            head = {"matrix": "head", "form": "plain", "rows": num_rows, "out": vocab, "in": width}
            found.append(KernelCase("product", head, dtype))
            for asks in ("all", "greedy"):
                found.append(KernelCase("sample", {"rows": num_rows, "vocab": vocab, "asks": asks}, "float32"))
    for num_rows in rows:
        found += [
            KernelCase("add_norm", {"rows": num_rows, "width": width}, dtype),
            KernelCase("rotate_and_store", {"rows": num_rows, **heads, "norm": "none"}, dtype),
            KernelCase("rotate_and_store", {"rows": num_rows, **heads, "norm": "head"}, dtype),
            KernelCase("gate", {"rows": num_rows, "width": model["inner"], "activation": "silu"}, dtype),
            KernelCase("embed", {"rows": num_rows, "vocab": vocab, "width": width}, dtype),
        ]
    return found + _once(model, dtype) + _of_matrices(model, rows, forms, dtype)


def _once(model: Sizes, dtype: str) -> list[KernelCase]:
    """What a model needs in one shape, or of which one shape shows all."""
    num = 4 if model is TINY else 64  # rows
    experts = {"experts": 4, "active": 2, "width": 32} if model is TINY else {"experts": 128, "active": 8, "width": 768}
    hidden, cleared = min(model["hidden"], 2048), {"width": model["kv_heads"] * model["head_dim"]}
    return [
        KernelCase("experts", {"rows": 2, "hidden": hidden, **experts, "form": "plain"}, dtype),
        KernelCase("experts", {"rows": num * 4, "hidden": hidden, **experts, "form": "plain"}, dtype),
        KernelCase("decoding_rows", {"rows": num, "slots": 4 * num, "width": num * 16}, "float32"),
        KernelCase("prompt_tokens", {"tokens": 8 * num, "slots": num, "width": 16 * num}, "float32"),
        KernelCase("scatter", {"rows": num, "slots": 4 * num, "width": model["hidden"]}, dtype),
        KernelCase("clear", {"layers": 2, "blocks": 2 * num, "cleared": num // 4, **cleared}, dtype),
    ]


def _of_matrices(model: Sizes, rows: Iterable[int], forms: Iterable[str], dtype: str = "bfloat16") -> list[KernelCase]:
    """A layer's matmuls; a form whose groups do not divide a matrix's rows leaves that one out."""
    query, kv = (model[name] * model["head_dim"] for name in ("heads", "kv_heads"))
    matrices = {
        "gate_up": (2 * model["inner"], model["hidden"]),
        "down": (model["hidden"], model["inner"]),
        "qkv": (query + 2 * kv, model["hidden"]),
        "output": (model["hidden"], query),
    }
    return [
        KernelCase("product", {"matrix": name, "form": form, "rows": num_rows, "out": num_out, "in": num_in}, dtype)
        for form in forms
        for num_rows in rows
        for name, (num_out, num_in) in matrices.items()
        if num_in % _least_width(form) == 0
    ]


def _least_width(form: str) -> int:
    """That rows of matrices in this form are a multiple of; see gpu.quant.can_quantize."""
    scheme, _, group = form.partition(" by ")
    return int(group) if group else 32 if scheme == "int4" else 1


def _heads_of(model: Sizes) -> Sizes:
    return _heads(*(model[name] for name in ("heads", "kv_heads", "head_dim")))


def _heads(num_heads: int, num_kv_heads: int, head_dim: int) -> Sizes:
    return {"heads": num_heads, "kv_heads": num_kv_heads, "head_dim": head_dim}


def _attention(shape: Sizes, dtype: str = "bfloat16", context: int = 700) -> list[KernelCase]:
    """Decodes alone, and prompts and decodes in one launch."""
    return [
        KernelCase("decode_attention", {"sequences": 5, "context": context, **shape}, dtype),
        KernelCase("extend_attention", {"prompts": 2, "tokens": context // 2, "decodes": 3, **shape}, dtype),
    ]


def _sampling(rows: Iterable[int], vocabularies: Iterable[int]) -> list[KernelCase]:
    """By few rows several programs read one, and by many one does."""
    asked: tuple[tuple[str, Sizes], ...] = (
        *(("sample", {"asks": "all"}), ("sample", {"asks": "unpenalised"}), ("logprobs", {})),
    )
    return [
        KernelCase(name, {"rows": num_rows, "vocab": vocab, **asks}, "float32")
        for vocab in vocabularies
        for num_rows in rows
        for name, asks in asked
    ]


def _between(dtype: str, num_rows: int, width: int, scale: float) -> list[KernelCase]:
    """Norms, rotations, activations."""
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


def _matmuls(
    rows: Iterable[int], num_out: int, num_in: int, forms: Iterable[str], dtype: str = "bfloat16"
) -> list[KernelCase]:
    shape = {"out": num_out, "in": num_in, "bias": False}
    return [
        KernelCase("product", {"matrix": "any", "form": form, "rows": num_rows, **shape}, dtype)
        for form in forms
        for num_rows in rows
    ]


def _experts(
    rows: Iterable[int], shape: Sizes, dtype: str = "bfloat16", forms: Iterable[str] = FORMS
) -> list[KernelCase]:
    clamped: Sizes = {"form": "plain", "activation": "clamped_swiglu", "bias": True}
    asked = [*({"form": form} for form in forms), clamped]
    return [KernelCase("experts", {"rows": num_rows, **shape, **more}, dtype) for more in asked for num_rows in rows]


def cases(is_quick: bool, is_device: bool) -> list[Case]:
    """This part's: errors first, by several processes at once, which fills Triton's cache of what is compiled."""
    timed, variants = timed_cases(is_quick, is_device), variant_cases(is_quick, is_device)
    times = [Case(f"time of {case.name}", partial(_time, case), CASE_LIMIT_S, TIMES) for case in timed]
    return [ceilings_case(), *_checks([*timed, *variants]), *times, *_checks(other_formats(is_quick, is_device))]


def _checks(cases: Sequence[KernelCase]) -> list[Case]:
    by_name = {case.name: case for case in cases}
    return [
        Case(f"error of {name}", partial(_check, case), CASE_LIMIT_S, ERRORS, is_shared=True)
        for name, case in by_name.items()
    ]


def _check(case: KernelCase, context: Context) -> Iterator[Row]:
    with torch.inference_mode():
        error, tolerance = _error(_build(case, context, 0))
    if context.is_device:
        torch.cuda.empty_cache()  # others use it, too
    cells: dict[str, Cell] = {"case": case.name, "error": error, "tolerance": tolerance}
    yield Row(ERRORS, cells, OK if error <= tolerance else WRONG)  # what is not a number is not


def _time(case: KernelCase, context: Context) -> Iterator[Row]:
    with torch.inference_mode():
        first = _build(case, context, 0)
        copies = num_copies(int(first.num_bytes), context.device)
        cells = _times([first, *(_build(case, context, seed) for seed in range(1, copies))], context)
    target, share, verdict = target_of("", case.name), cells.get("share of limit"), ""
    if target is not None and isinstance(share, float):
        cells["target"], verdict = target.shown, target.verdict(share, share, context)
    yield Row(TIMES, {"case": case.name, **cells}, verdict)


def _build(case: KernelCase, context: Context, seed: int) -> Problem:
    generator = torch.Generator(context.device).manual_seed(seed)
    return BUILDERS[case.builder](Draw(generator, DTYPES[case.dtype]), **case.shape)


def _error(problem: Problem) -> tuple[float, float]:
    """The largest of all outputs', and the tolerance it is held against."""
    was_deterministic = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)  # torch.empty and its like give NaN
    try:
        found = problem.outputs(problem.launch())
    finally:
        torch.use_deterministic_algorithms(was_deterministic)
    tolerance = TOLERANCES[problem.dtype] if problem.tolerance is None else problem.tolerance
    error_of = relative_error if tolerance else share_of_others
    return max(error_of(got, want) for got, want in zip(found, problem.reference(), strict=True)), tolerance


def relative_error(found: Tensor, wanted: Tensor) -> float:
    """|found - wanted| / |wanted| in float64; infinite where found is not finite and wanted is, or shapes differ."""
    if found.shape != wanted.shape:
        return float("inf")
    difference = (found.double() - wanted.double()).norm().item()
    size = wanted.double().norm().item()
    error = difference / size if size else difference
    return error if error == error else float("inf")


def share_of_others(found: Tensor, wanted: Tensor) -> float:
    """Of the numbers, those that are not the same; infinite where shapes differ."""
    if found.shape != wanted.shape:
        return float("inf")
    return (found.double() != wanted.double()).double().mean().item()


def _times(problems: Sequence[Problem], context: Context) -> dict[str, Cell]:
    """Of the kernel, beside the limit and beside torch's operators where they do the same."""
    seconds, how = median_s([problem.launch for problem in problems], context.device)
    num_bytes, flops = problems[0].num_bytes, problems[0].flops
    cells: dict[str, Cell] = {"µs": seconds * 1e6, "GB/s": num_bytes / seconds / 1e9}
    cells |= {"TFLOP/s": flops / seconds / 1e12, "sent": how}
    if (speed := context.speed) is not None:
        limit_s = max(num_bytes / speed.read_bytes_per_s, flops / speed.flops)
        cells |= {"limit µs": limit_s * 1e6, "share of limit": limit_s / seconds}
    peers = [problem.peer for problem in problems if problem.peer is not None]
    if peers:
        cells["torch µs"] = median_s(peers, context.device)[0] * 1e6
    return cells
