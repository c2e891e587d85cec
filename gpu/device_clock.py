"""How long work takes on a device, where several ways of it are measured against each other. Thread: engine (at start).

A way that fails when it is measured is none: it is said, and the others serve. An error that costs the device itself
is told apart: nothing is computed on it afterwards.
"""

import logging
import math
from collections.abc import Callable

import torch

from gpu.device import synchronize

logger = logging.getLogger(__name__)

TIMED_ROUNDS = 3
NEVER_S = math.inf  # what a way takes that fails

Timer = Callable[[Callable[[], object]], float]
"""Some work on the device, which it may do several times -> the seconds it takes"""


def graph_seconds(work: Callable[[], object]) -> float:
    """The best round on a CUDA device, of a graph as decode replays it: what the host takes to launch is not in it."""
    work()  # compiles, and loads libraries
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    before = torch.cuda.stream(torch.cuda.current_stream())  # a capture that fails leaves its own behind
    with before, torch.cuda.graph(graph):
        work()
    graph.replay()
    best_ms = math.inf
    for _ in range(TIMED_ROUNDS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        best_ms = min(best_ms, start.elapsed_time(end))
    return best_ms / 1000


def seconds_or_never(clock: Timer, work: Callable[[], object], name: str, device: torch.device) -> float:
    """What the clock says, or NEVER_S where the work fails there.

    Args:
        name: of the way, for the log.

    Raises:
        torch.AcceleratorError: the device is lost.
    """
    try:
        return clock(work)
    except Exception as error:  # whatever a compiler, a library or a driver makes of a device that it does not know
        synchronize(device)
        logger.warning("%s does not serve here: %s: %s", name, type(error).__name__, error)
        return NEVER_S
