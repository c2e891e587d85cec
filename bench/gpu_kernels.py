"""bench.gpu_check --part kernels: each kernel beside its float32 reference, and its time beside the limit.

A case of gpu_cases.py is built by gpu_problems.py. Outputs are poisoned: what a kernel does not write is not a number,
and makes its error infinite.
"""

from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from bench.device_clock import median_s, num_copies
from bench.gpu_cases import KernelCase, kernel_cases
from bench.gpu_environment import ceilings_case
from bench.gpu_parts import OK, SKIPPED, WRONG, Case, Context, Row, last_line
from bench.gpu_problems import NotHere, Problem
from bench.gpu_token_problems import BUILDERS
from gpu.device import DTYPES

# |out - ref| / |ref|: rounding a result once costs 2 ** -9 of it in bfloat16, 2 ** -12 in float16, at most; float32's
# sums of thousands, added in another order, differ by a few 2 ** -24.
TOLERANCES = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
CASE_LIMIT_S = 60.0  # compiling is most of it
TABLE = "Kernels"


def cases(is_quick: bool, is_device: bool) -> list[Case]:
    """This part's."""
    found = [Case(case.name, partial(_check, case), CASE_LIMIT_S, TABLE) for case in kernel_cases(is_quick, is_device)]
    return [ceilings_case(), *found]


def _check(case: KernelCase, context: Context) -> Iterator[Row]:
    with torch.inference_mode():
        try:
            problems = [_build(case, context, 0)]
        except NotHere as why:
            yield Row(TABLE, {"case": case.name}, SKIPPED, str(why))
            return
        error, tolerance = _error(problems[0])
        cells: dict[str, str | int | float | None] = {"case": case.name, "error": error, "tolerance": tolerance}
        is_right = error <= tolerance  # what is not a number is not
        copies = num_copies(int(problems[0].num_bytes), context.device)
        problems += [_build(case, context, seed) for seed in range(1, copies)]
        note = ""
        try:
            cells |= _times(problems, context)
        except RuntimeError as problem:  # its error is told all the same
            is_right, note = False, last_line(problem)
        yield Row(TABLE, cells, OK if is_right else WRONG, note)


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
    worst = max(relative_error(got, want) for got, want in zip(found, wanted, strict=True))
    tolerance = problem.tolerance
    return worst, TOLERANCES[problem.dtype] if tolerance is None else tolerance


def relative_error(found: Tensor, wanted: Tensor) -> float:
    """|found - wanted| / |wanted| in float64; infinite where found is not finite and wanted is, or shapes differ."""
    if found.shape != wanted.shape:
        return float("inf")
    difference = (found.double() - wanted.double()).norm().item()
    size = wanted.double().norm().item()
    error = difference / size if size else difference
    return error if error == error else float("inf")


def _times(problems: Sequence[Problem], context: Context) -> dict[str, str | int | float | None]:
    """Of the kernel, beside the limit and beside torch's operators where they do the same."""
    seconds, how = median_s([problem.launch for problem in problems], context.device)
    first = problems[0]
    cells: dict[str, str | int | float | None] = {
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
