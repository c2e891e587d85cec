"""How many threads compute a step, by its tokens: measured at start on the model's own products. Thread: engine.

One row's products are bound by memory, which one core may nearly fill by itself: further threads only take the event
loop's core. What was measured is kept in a file of the user's cache, per machine and shape, unless others computed at
the same time; a file that cannot be read is as none, one that cannot be written is done without.
"""

import json
import os
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from core.config import ModelConfig
from gpu.device import DeviceChoice, cpu_model
from gpu.linear import Linear

MEASURED_TOKENS = (1, 4, 8, 32)  # of a step
PREFILL_TOKENS = 128  # bound by arithmetic: all threads from here on, whatever disturbed the measurement
ROUNDS = 3  # the best counts, and the first warms up
WORTH_A_THREAD = 1.05  # more threads must be so much faster
# A smaller model's products take about as long as waking a thread: several compute in long prefills only.
MIN_PARAMETERS = 64_000_000
SMALL_MODEL_TOKENS = 128

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


def choose_threads(config: ModelConfig, choice: DeviceChoice, probes: Sequence[Probe]) -> StepThreads:
    """As asked; for a large model as measured, now or earlier; or as is usual."""
    if choice.are_threads_asked or choice.device.type != "cpu" or choice.threads == 1:
        return StepThreads(((1, choice.threads),))
    if config.num_parameters < MIN_PARAMETERS:
        return StepThreads(((1, 1), (SMALL_MODEL_TOKENS, choice.threads)))
    machine, shape = _machine(choice.threads), _shape(config, choice)
    known = read_measured(cache_file())
    found = known.get(machine, {}).get(shape)
    if found is None:
        found = measure_threads(probes, choice.threads, choice.dtype)
        known.setdefault(machine, {})[shape] = found
        if load_average() <= choice.threads:
            _write_measured(cache_file(), known)
    return found


def measured_here(choice: DeviceChoice) -> dict[str, StepThreads]:
    """What is known of this machine: by shape of model."""
    return read_measured(cache_file()).get(_machine(choice.threads), {})


def measure_threads(probes: Sequence[Probe], max_threads: int, dtype: torch.dtype) -> StepThreads:
    """The fewest threads that are about as fast as any, for each of MEASURED_TOKENS. Torch's are as before then."""
    before = torch.get_num_threads()
    counts = sorted({2**power for power in range(max_threads.bit_length())} | {max_threads})
    by_tokens: list[tuple[int, int]] = []
    try:
        for num_tokens in MEASURED_TOKENS:
            threads = fewest(counts, [_seconds(probes, num_tokens, count, dtype) for count in counts])
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


def _seconds(probes: Sequence[Probe], num_tokens: int, threads: int, dtype: torch.dtype) -> float:
    torch.set_num_threads(threads)
    inputs = {width: torch.zeros(num_tokens, width, dtype=dtype) for _, width in probes}
    best_s = float("inf")
    for _ in range(ROUNDS):
        started_s = time.perf_counter()
        for linear, width in probes:
            linear(inputs[width])
        best_s = min(best_s, time.perf_counter() - started_s)
    return best_s


def load_average() -> float:
    """Threads that computed or waited for a core, over the last minute; 0 where the system does not tell."""
    try:
        return os.getloadavg()[0]
    except OSError:
        return 0.0


def cache_file() -> Path:
    """Source: XDG Base Directory Specification: a relative path is not valid, and ignored."""
    named = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (named if named.is_absolute() else Path.home() / ".cache") / "steploop" / "threads.json"


def read_measured(path: Path) -> dict[str, dict[str, StepThreads]]:
    """Machine -> shape -> threads; empty where the file is missing or not what we write."""
    try:
        content = json.loads(path.read_bytes())
        return {
            machine: {shape: _checked(pairs) for shape, pairs in shapes.items()} for machine, shapes in content.items()
        }
    except (OSError, ValueError, TypeError, AttributeError, RecursionError):
        return {}


def _checked(pairs: object) -> StepThreads:
    """
    Raises:
        ValueError, TypeError: it is not what StepThreads holds.
    """
    by_tokens = tuple((int(least), int(threads)) for least, threads in pairs)  # type: ignore[attr-defined]
    if not by_tokens or by_tokens[0][0] != 1 or list(by_tokens) != sorted(by_tokens):
        raise ValueError("not from 1 token on, ascending")
    if any(threads < 1 for _, threads in by_tokens):
        raise ValueError("no threads")
    return StepThreads(by_tokens)


def _write_measured(path: Path, known: dict[str, dict[str, StepThreads]]) -> None:
    """Whole or not at all: others may read it, or write it too."""
    content = {
        machine: {shape: found.by_tokens for shape, found in shapes.items()} for machine, shapes in known.items()
    }
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
            json.dump(content, file, indent=1)
        os.replace(file.name, path)


def _machine(threads: int) -> str:
    return f"{cpu_model()}, {threads} cores, torch {torch.__version__}"


def _shape(config: ModelConfig, choice: DeviceChoice) -> str:
    mlp = f"{config.intermediate_size}" if config.experts is None else f"{config.experts.num_experts} experts"
    return f"{config.hidden_size} x {mlp}, {config.query_size} + {config.kv_size}, {choice.dtype_name}"
