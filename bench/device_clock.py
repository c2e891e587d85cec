"""How long work takes on a device, or on a CPU: medians of rounds, over inputs that rotate beyond the caches."""

import statistics
import time
from collections.abc import Callable, Sequence

import torch

from gpu.streams import recording

ROTATED_BYTES = 256 * 1024**2  # more than a device's cache keeps (an H200 has 50 MB)
MAX_COPIES = 32
ROUNDS = 7
CPU_ROUNDS = 1  # where kernels are interpreted, times mean nothing
WARM_ROUNDS = 2


def num_copies(size_bytes: int, device: torch.device) -> int:
    """Of inputs of so many bytes, that rotate: what is not in a cache when its turn comes. One on a CPU."""
    if device.type != "cuda":
        return 1
    return max(1, min(MAX_COPIES, -(-ROTATED_BYTES // max(1, size_bytes))))


def median_s(calls: Sequence[Callable[[], object]], device: torch.device, rounds: int = ROUNDS) -> tuple[float, str]:
    """Seconds of one call, the median of rounds of all of them, and how they were sent.

    On a device: "graph", as decode replays them, so that what the host takes to launch is not in it; "launched", where
    they cannot be captured: by events around all calls.
    """
    if device.type != "cuda":
        rounds = min(rounds, CPU_ROUNDS)
        return statistics.median(_wall_s(calls) for _ in range(rounds)) / len(calls), "called"
    for call in calls:  # compiles, and loads libraries
        call()
    torch.cuda.synchronize(device)
    try:
        send, how = _captured(calls), "graph"
    except RuntimeError:  # what it does is not for graphs
        torch.cuda.synchronize(device)
        send, how = (lambda: _call_all(calls)), "launched"
    for _ in range(WARM_ROUNDS):
        send()
    return statistics.median(_event_s(send) for _ in range(rounds)) / len(calls), how


def _captured(calls: Sequence[Callable[[], object]]) -> Callable[[], None]:
    graph = torch.cuda.CUDAGraph()
    with recording(graph, torch.cuda.graph_pool_handle()):
        _call_all(calls)
    return graph.replay


def _call_all(calls: Sequence[Callable[[], object]]) -> None:
    for call in calls:
        call()


def _event_s(send: Callable[[], None]) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start.record()
    send()
    end.record()
    end.synchronize()
    milliseconds: float = start.elapsed_time(end)
    return milliseconds / 1e3


def _wall_s(calls: Sequence[Callable[[], object]]) -> float:
    started_s = time.perf_counter()
    _call_all(calls)
    return time.perf_counter() - started_s
