"""What the operator promises, and whether the last minutes kept it. Thread: loop.

The promises are [slo] of the TOML file; what is not promised is measured all the same.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec

from core.errors import ExitCode, StartupError

WINDOW_S = 300.0
MAX_SAMPLES = 4096  # of the window, the newest: a percentile of so many is sorted in half a millisecond

_Positive = Annotated[float, msgspec.Meta(gt=0)]


class SloRules(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Thresholds; None: nothing is promised.

    Args:
        error_rate: of generations, the share that fails by our fault, late by the operator's deadlines too.
        tokens_per_s_p50: of a stream, at least; the others are at most.
        queue_depth: requests.
        memory_mib: of the process, resident.
    """

    ttft_p50_ms: _Positive | None = None
    ttft_p95_ms: _Positive | None = None
    latency_p50_ms: _Positive | None = None
    latency_p95_ms: _Positive | None = None
    tokens_per_s_p50: _Positive | None = None
    error_rate: Annotated[float, msgspec.Meta(ge=0, le=1)] | None = None
    queue_depth: Annotated[float, msgspec.Meta(ge=0)] | None = None
    memory_mib: _Positive | None = None


NO_PROMISES = SloRules()
AT_LEAST = frozenset({"tokens_per_s_p50"})


def parse_slo(table: Any, path: Path) -> SloRules:
    """What [slo] of a TOML file says.

    Raises:
        StartupError: naming the field.
    """
    try:
        return msgspec.convert(table, SloRules)
    except msgspec.ValidationError as error:
        fix = f"known: {', '.join(SloRules.__struct_fields__)}; the server's own settings stand above [slo]"
        raise StartupError(f"[slo] in {path}: {error}", fix, ExitCode.CONFIGURATION) from error


@dataclass(frozen=True, slots=True)
class _Sample:
    """A generation that is over; None: it had none."""

    at_s: float
    ttft_s: float | None
    latency_s: float | None
    tokens_per_s: float | None
    has_failed: bool


@dataclass(frozen=True, slots=True)
class SloState:
    """One promise, or what could be one.

    Args:
        value: None: nothing has been measured.
        threshold: None: nothing is promised.
    """

    value: float | None
    threshold: float | None
    is_ok: bool


class SloMonitor:
    """Samples of the last minutes against the rules."""

    def __init__(self, rules: SloRules, clock: Callable[[], float]) -> None:
        self.rules = rules
        self._clock = clock
        self._samples: deque[_Sample] = deque(maxlen=MAX_SAMPLES)

    def observe(
        self, ttft_s: float | None, latency_s: float | None, tokens_per_s: float | None, has_failed: bool
    ) -> None:
        """A generation is over.

        Args:
            latency_s: None: it was not answered in full.
        """
        self._samples.append(_Sample(self._clock(), ttft_s, latency_s, tokens_per_s, has_failed))

    def states(self, queue_depth: int, memory_bytes: int) -> dict[str, SloState]:
        """By name of the rule."""
        values = self._values() | {"queue_depth": float(queue_depth), "memory_mib": memory_bytes / 2**20}
        rules = msgspec.structs.asdict(self.rules)
        return {name: SloState(values[name], rules[name], _is_ok(name, values, rules)) for name in rules}

    def _values(self) -> dict[str, float | None]:
        oldest_s = self._clock() - WINDOW_S
        while self._samples and self._samples[0].at_s < oldest_s:
            self._samples.popleft()
        samples = tuple(self._samples)
        ttfts = sorted(one.ttft_s for one in samples if one.ttft_s is not None)
        latencies = sorted(one.latency_s for one in samples if one.latency_s is not None)
        rates = sorted(one.tokens_per_s for one in samples if one.tokens_per_s is not None)
        num_failed = sum(one.has_failed for one in samples)
        return {
            "ttft_p50_ms": _percentile(ttfts, 50, 1e3),
            "ttft_p95_ms": _percentile(ttfts, 95, 1e3),
            "latency_p50_ms": _percentile(latencies, 50, 1e3),
            "latency_p95_ms": _percentile(latencies, 95, 1e3),
            "tokens_per_s_p50": _percentile(rates, 50, 1.0),
            "error_rate": num_failed / len(samples) if samples else None,
        }


def _is_ok(name: str, values: Mapping[str, float | None], rules: Mapping[str, float | None]) -> bool:
    """Nothing promised or nothing measured is nothing broken."""
    value, threshold = values[name], rules[name]
    if value is None or threshold is None:
        return True
    return value >= threshold if name in AT_LEAST else value <= threshold


def _percentile(ordered: Sequence[float], percent: int, scale: float) -> float | None:
    """The nearest rank: of so many percent of the samples none is larger."""
    if not ordered:
        return None
    return ordered[-(-len(ordered) * percent // 100) - 1] * scale
