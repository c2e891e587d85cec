"""Samples to figures: percentiles and what a table shows of them."""

from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt


def percentile(values: Sequence[float] | npt.NDArray[np.float64], q: float) -> float | None:
    """The value below which q percent of the values lie, linear between neighbours; None of no values.

    Args:
        q: in [0, 100].
    Source: Hyndman and Fan (1996), definition 7.
    """
    if len(values) == 0:
        return None
    return float(np.percentile(np.asarray(values, dtype=np.float64), q))


class Distribution(msgspec.Struct, frozen=True):
    """What is left of many samples; the unit is the samples'. None: there were none."""

    count: int
    mean: float | None
    p50: float | None
    p95: float | None
    p99: float | None
    max: float | None


def summarize(values: Sequence[float]) -> Distribution:
    """The figures of these samples."""
    if not values:
        return Distribution(0, None, None, None, None, None)
    samples = np.asarray(values, dtype=np.float64)
    p50, p95, p99 = (percentile(samples, q) for q in (50, 95, 99))
    return Distribution(len(samples), float(samples.mean()), p50, p95, p99, float(samples.max()))
