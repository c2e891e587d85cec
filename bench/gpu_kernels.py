"""bench.gpu_check --part kernels: each kernel beside its float32 reference, and its time beside the limit.

What gpu_cases.py and gpu_variants.py name is built by the builders below. Outputs are poisoned: what a kernel does not
write is not a number, and makes its error infinite.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from bench import (
    gpu_attention_problems,
    gpu_problems,
    gpu_product_problems,
    gpu_row_problems,
    gpu_sampling_problems,
)
from bench.device_clock import median_s, num_copies
from bench.gpu_cases import KernelCase, timed_cases
from bench.gpu_environment import ceilings_case
from bench.gpu_parts import BELOW, OK, WRONG, Case, Context, Row
from bench.gpu_problems import Problem
from bench.gpu_targets import device_name, target_of
from bench.gpu_variants import other_formats, variant_cases
from bench.results import Cell
from gpu.device import DTYPES

# |out - ref| / |ref|: rounding a result once costs 2 ** -9 of it in bfloat16, 2 ** -12 in float16, at most; float32's
# sums of thousands, added in another order, differ by a few 2 ** -24.
TOLERANCES = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
CASE_LIMIT_S = 90.0  # compiling is most of it
ERRORS, TIMES = "Kernels: errors", "Kernels: times"

BUILDERS: Mapping[str, Callable[..., Problem]] = {
    "add_norm": gpu_problems.add_norm,
    "norm": gpu_problems.norm,
    "rotate_and_store": gpu_problems.rotate_and_store,
    "gate": gpu_problems.gate,
    "embed": gpu_row_problems.embed,
    "decoding_rows": gpu_row_problems.row_tables,
    "prompt_tokens": gpu_row_problems.step_tokens,
    "scatter": gpu_row_problems.scatter,
    "clear": gpu_row_problems.clear,
    "product": gpu_product_problems.product,
    "experts": gpu_product_problems.experts,
    "decode_attention": gpu_attention_problems.decode_attention,
    "extend_attention": gpu_attention_problems.extend_attention,
    "sample": gpu_sampling_problems.sample,
    "logprobs": gpu_sampling_problems.logprobs,
}


def cases(is_quick: bool, is_device: bool) -> list[Case]:
    """This part's: errors first, by several workers at once, which fills Triton's cache of what is compiled."""
    timed, variants = timed_cases(is_quick, is_device), variant_cases(is_quick, is_device)
    return [
        ceilings_case(),
        *_checks([*timed, *variants]),
        *(_case(f"time of {case.name}", partial(_time, case), TIMES, False) for case in timed),
        *_checks(other_formats(is_quick, is_device)),
    ]


def _checks(cases: Sequence[KernelCase]) -> list[Case]:
    by_name = {case.name: case for case in cases}
    return [_case(f"error of {name}", partial(_check, case), ERRORS, True) for name, case in by_name.items()]


def _case(name: str, run: Callable[[Context], Iterator[Row]], table: str, is_shared: bool) -> Case:
    return Case(name, run, CASE_LIMIT_S, table, is_shared=is_shared)


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
    target, share = target_of("", case.name), cells.get("share of limit")
    if target is None or not isinstance(share, float):
        yield Row(TIMES, {"case": case.name, **cells})
        return
    cells["target"] = target.shown
    is_met = target.is_met(share, share, device_name(context)) if context.is_device else None
    yield Row(TIMES, {"case": case.name, **cells}, "" if is_met is None else OK if is_met else BELOW)


def _build(case: KernelCase, context: Context, seed: int) -> Problem:
    generator = torch.Generator(context.device).manual_seed(seed)
    return BUILDERS[case.builder](generator, DTYPES[case.dtype], **case.shape)


def _error(problem: Problem) -> tuple[float, float]:
    """The largest of all outputs', and the tolerance it is held against."""
    was_deterministic = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)  # torch.empty and its like give NaN
    try:
        found = problem.outputs(problem.launch())
    finally:
        torch.use_deterministic_algorithms(was_deterministic)
    wanted = problem.reference()
    assert len(found) == len(wanted)
    tolerance = TOLERANCES[problem.dtype] if problem.tolerance is None else problem.tolerance
    error_of = relative_error if tolerance else share_of_others
    return max(error_of(got, want) for got, want in zip(found, wanted, strict=True)), tolerance


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
    first = problems[0]
    cells: dict[str, Cell] = {
        "µs": seconds * 1e6,
        "GB/s": first.num_bytes / seconds / 1e9,
        "TFLOP/s": first.flops / seconds / 1e12,
        "sent": how,
    }
    if context.has_speed:
        speed = context.speed
        limit_s = max(first.num_bytes / speed.read_bytes_per_s, first.flops / speed.flops)
        cells |= {"limit µs": limit_s * 1e6, "share of limit": limit_s / seconds}
    if first.peer is not None:
        peers = [problem.peer for problem in problems if problem.peer is not None]
        cells["torch µs"] = median_s(peers, context.device)[0] * 1e6
    return cells
