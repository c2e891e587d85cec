"""How many threads compute a step, by its tokens: measured on the model's own products. Thread: engine.

One row's products are bound by memory, which one core may nearly fill by itself: further threads only take the event
loop's core. What is measured comes in slices: at start all at once, on an idle server one by one.
"""

import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

from gpu.linear import Linear

MEASURED_TOKENS = (1, 4, 8, 32)  # of a step
PREFILL_TOKENS = 128  # bound by arithmetic: all threads from here on, whatever disturbed the measurement
ROUNDS = 3  # the best counts, and the first warms up
WORTH_A_THREAD = 1.05  # more threads must be so much faster
NOISE = 0.03  # of a time, by which two measurements of the same differ: what less decides is within noise
SLICE_S = 0.02  # of products, after which a measurement may be put down; one product is not divided

Found = TypeVar("Found")
Measurement = Generator[None, None, Found]
"""Gives what it finds, after any number of slices. Closed between two, it leaves all as it was."""

Probe = tuple[Linear, int]
"""A product, and the width of what goes in."""


@dataclass(frozen=True, slots=True)
class StepThreads:
    """Args: by_tokens: (tokens from which it holds, threads), ascending, the first from 1."""

    by_tokens: tuple[tuple[int, int], ...]

    def of(self, num_tokens: int) -> int:
        """Threads for a step of so many tokens."""
        return next((threads for least, threads in reversed(self.by_tokens) if num_tokens >= least), 1)

    def __str__(self) -> str:
        first, *others = self.by_tokens
        return "; ".join([str(first[1]), *(f"{threads} from {least} tokens a step" for least, threads in others)])


@dataclass(frozen=True, slots=True)
class Look(Generic[Found]):
    """What was measured once. is_clear: it would be the same with times that differ by NOISE."""

    found: Found
    is_clear: bool


def at_once(measurement: Measurement[Found]) -> Found:
    """All slices of it."""
    while True:
        try:
            next(measurement)
        except StopIteration as end:
            found: Found = end.value
            return found


def measure_threads(probes: Sequence[Probe], max_threads: int, dtype: torch.dtype) -> Measurement[Look[StepThreads]]:
    """The fewest threads that are about as fast as any, for each of MEASURED_TOKENS. Torch's are as before then."""
    before = torch.get_num_threads()
    counts = sorted({2**power for power in range(max_threads.bit_length())} | {max_threads})
    by_tokens: list[tuple[int, int]] = []
    is_clear = True
    try:
        for num_tokens in MEASURED_TOKENS:
            seconds = []
            for count in counts:
                seconds.append((yield from seconds_of(probes, num_tokens, count, dtype)))
            threads = fewest(counts, seconds)
            others = {fewest(counts, seconds, WORTH_A_THREAD + error) for error in (-NOISE, NOISE)}
            is_clear &= others == {threads}
            if not by_tokens or by_tokens[-1][1] != threads:
                by_tokens.append((num_tokens, threads))
    finally:
        torch.set_num_threads(before)
    if by_tokens[-1][1] != max_threads:
        by_tokens.append((PREFILL_TOKENS, max_threads))
    return Look(StepThreads(tuple(by_tokens)), is_clear)


def fewest(counts: Sequence[int], seconds: Sequence[float], worth: float = WORTH_A_THREAD) -> int:
    """The first count whose time is not worth more threads. counts ascend."""
    limit = min(seconds) * worth
    return next(count for count, taken in zip(counts, seconds, strict=True) if taken <= limit)


def seconds_of(probes: Sequence[Probe], num_tokens: int, threads: int, dtype: torch.dtype) -> Measurement[float]:
    """The best round of all products. Torch's threads are changed."""
    torch.set_num_threads(threads)
    inputs = {width: torch.zeros(num_tokens, width, dtype=dtype) for _, width in probes}
    best_s, slice_s = float("inf"), 0.0
    for _ in range(ROUNDS):
        round_s = 0.0
        for linear, width in probes:
            started_s = time.perf_counter()
            linear(inputs[width])
            took_s = time.perf_counter() - started_s
            round_s, slice_s = round_s + took_s, slice_s + took_s
            if slice_s >= SLICE_S:
                yield
                slice_s = 0.0
        best_s = min(best_s, round_s)
    yield
    return best_s
