"""How many threads compute a step, by its tokens: measured at start on the model's own products. Thread: engine.

One row's products are bound by memory, which one core may nearly fill by itself: further threads only take the event
loop's core.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from gpu.linear import Linear

MEASURED_TOKENS = (1, 4, 8, 32)  # of a step
PREFILL_TOKENS = 128  # bound by arithmetic: all threads from here on, whatever disturbed the measurement
ROUNDS = 3  # the best counts, and the first warms up
WORTH_A_THREAD = 1.05  # more threads must be so much faster

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


def measure_threads(probes: Sequence[Probe], max_threads: int, dtype: torch.dtype) -> StepThreads:
    """The fewest threads that are about as fast as any, for each of MEASURED_TOKENS. Torch's are as before then."""
    before = torch.get_num_threads()
    counts = sorted({2**power for power in range(max_threads.bit_length())} | {max_threads})
    by_tokens: list[tuple[int, int]] = []
    try:
        for num_tokens in MEASURED_TOKENS:
            threads = fewest(counts, [seconds_of(probes, num_tokens, count, dtype) for count in counts])
            if not by_tokens or by_tokens[-1][1] != threads:
                by_tokens.append((num_tokens, threads))
    finally:
        torch.set_num_threads(before)
    if by_tokens[-1][1] != max_threads:
        by_tokens.append((PREFILL_TOKENS, max_threads))
    return StepThreads(tuple(by_tokens))


def fewest(counts: Sequence[int], seconds: Sequence[float]) -> int:
    """The first count whose time is not worth more threads. counts ascend."""
    limit = min(seconds) * WORTH_A_THREAD
    return next(count for count, taken in zip(counts, seconds, strict=True) if taken <= limit)


def seconds_of(probes: Sequence[Probe], num_tokens: int, threads: int, dtype: torch.dtype) -> float:
    """The best round of all products. Torch's threads are changed."""
    torch.set_num_threads(threads)
    inputs = {width: torch.zeros(num_tokens, width, dtype=dtype) for _, width in probes}
    best_s = float("inf")
    for _ in range(ROUNDS):
        started_s = time.perf_counter()
        for linear, width in probes:
            linear(inputs[width])
        best_s = min(best_s, time.perf_counter() - started_s)
    return best_s
