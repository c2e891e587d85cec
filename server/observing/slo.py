"""Service level objectives: [slo] of the TOML file, and whether the last minutes met them. Thread: loop.

All of them are measured, whether a threshold is set or not.
"""

from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec

from core.errors import StartupError

WINDOW_S = 300.0
MAX_SAMPLES = 4096  # the newest of the window: sorting so many takes half a millisecond

_Positive = Annotated[float, msgspec.Meta(gt=0)]


class SloRules(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Thresholds; None: no objective.

    Args:
        tokens_per_s_p50: of a stream: a minimum; the others are maxima.
        error_rate: share of generations that fail by our fault, late by the operator's deadlines included.
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
MINIMA = frozenset({"tokens_per_s_p50"})
_PERCENTILES = {  # the rule: a field of _Sample, percent, scale
    "ttft_p50_ms": ("ttft_s", 50, 1e3),
    "ttft_p95_ms": ("ttft_s", 95, 1e3),
    "latency_p50_ms": ("latency_s", 50, 1e3),
    "latency_p95_ms": ("latency_s", 95, 1e3),
    "tokens_per_s_p50": ("tokens_per_s", 50, 1.0),
}


def parse_slo(table: Any, path: Path) -> SloRules:
    """[slo] of the TOML file at `path`. Raises StartupError, which names the field."""
    try:
        return msgspec.convert(table, SloRules)
    except msgspec.ValidationError as error:
        fix = f"known: {', '.join(SloRules.__struct_fields__)}; the server's own settings stand above [slo]"
        raise StartupError(f"[slo] in {path}: {error}", fix) from error


class _Sample(NamedTuple):
    """A generation that is over; None: it had none."""

    at_s: float
    ttft_s: float | None
    latency_s: float | None
    tokens_per_s: float | None
    has_failed: bool


class SloState(NamedTuple):
    """One objective. `is_ok` unless a measured value breaks a threshold."""

    value: float | None
    threshold: float | None
    is_ok: bool


class SloMonitor:
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
        states = {}
        for name, threshold in msgspec.structs.asdict(self.rules).items():
            value, is_ok = values[name], True
            if value is not None and threshold is not None:
                is_ok = value >= threshold if name in MINIMA else value <= threshold
            states[name] = SloState(value, threshold, is_ok)
        return states

    def _values(self) -> dict[str, float | None]:
        oldest_s = self._clock() - WINDOW_S
        while self._samples and self._samples[0].at_s < oldest_s:
            self._samples.popleft()
        values: dict[str, float | None] = {}
        for rule, (name, percent, scale) in _PERCENTILES.items():
            measured = sorted(value for one in self._samples if (value := getattr(one, name)) is not None)
            # the nearest rank: so many percent of the samples are no larger
            values[rule] = measured[-(-len(measured) * percent // 100) - 1] * scale if measured else None
        num_failed = sum(one.has_failed for one in self._samples)
        return values | {"error_rate": num_failed / len(self._samples) if self._samples else None}
