"""Histograms, and the text that Prometheus reads (exposition format 0.0.4). Thread: loop."""

from bisect import bisect_left
from collections.abc import Mapping

CONTENT_TYPE = b"text/plain; version=0.0.4; charset=utf-8"


class Histogram:
    """Counts per bucket, their sum and number. Neighbours of a step often have one value: a run is counted at once."""

    __slots__ = ("_counts", "_num_in_run", "_run_value", "_total", "bounds")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._total = 0.0
        self._run_value = 0.0
        self._num_in_run = 0

    def observe(self, value: float, times: int = 1) -> None:
        if value != self._run_value:
            self._end_run()
            self._run_value = value
        self._num_in_run += times

    @property
    def counts(self) -> list[int]:
        """By bucket, the last one without a bound."""
        self._end_run()
        return self._counts

    @property
    def total(self) -> float:
        """The sum of what was observed."""
        self._end_run()
        return self._total

    def _end_run(self) -> None:
        if self._num_in_run:
            self._counts[bisect_left(self.bounds, self._run_value)] += self._num_in_run
            self._total += self._run_value * self._num_in_run
            self._num_in_run = 0


class Page:
    """Families of samples, each in one place.

    Args:
        labels: by name, of every sample.
    """

    def __init__(self, labels: Mapping[str, str]) -> None:
        self._labels = _pairs(labels)
        self._lines: list[str] = []

    def encode(self) -> bytes:
        return ("\n".join(self._lines) + "\n").encode()

    def gauge(self, name: str, text: str, value: float) -> None:
        self._head(name, "gauge", text)
        self._lines.append(f"{name}{{{self._labels}}} {value}")

    def gauge_if_known(self, name: str, text: str, value: float | None) -> None:
        """A family without a sample tells who reads the page that there is such a thing."""
        if value is None:
            self._head(name, "gauge", text)
        else:
            self.gauge(name, text, float(value))

    def counter(self, name: str, text: str, value: float) -> None:
        self._head(name, "counter", text)
        self._lines.append(f"{name}{{{self._labels}}} {value}")

    def gauges(self, name: str, text: str, label: str, values: Mapping[str, float]) -> None:
        self._labelled(name, "gauge", text, label, values)

    def counters(self, name: str, text: str, label: str, values: Mapping[str, float] | Mapping[int, float]) -> None:
        self._labelled(name, "counter", text, label, values)

    def _labelled(
        self, name: str, kind: str, text: str, label: str, values: Mapping[str, float] | Mapping[int, float]
    ) -> None:
        self._head(name, kind, text)
        for key, value in sorted(values.items()):
            self._lines.append(f"{name}{{{self._labels},{_pairs({label: str(key)})}}} {value}")

    def histogram(self, name: str, text: str, histogram: Histogram) -> None:
        self._head(name, "histogram", text)
        self._buckets(name, self._labels, histogram)

    def histograms(self, name: str, text: str, label: str, values: Mapping[str, Histogram]) -> None:
        """One family of several, each with its value of the label."""
        self._head(name, "histogram", text)
        for key, histogram in values.items():
            self._buckets(name, f"{self._labels},{_pairs({label: key})}", histogram)

    def _buckets(self, name: str, labels: str, histogram: Histogram) -> None:
        count = 0
        for bound, in_bucket in zip((*histogram.bounds, "+Inf"), histogram.counts, strict=True):
            count += in_bucket
            self._lines.append(f'{name}_bucket{{{labels},le="{bound}"}} {count}')
        self._lines.append(f"{name}_sum{{{labels}}} {histogram.total}")
        self._lines.append(f"{name}_count{{{labels}}} {count}")

    def _head(self, name: str, kind: str, text: str) -> None:
        self._lines += [f"# HELP {name} {text}", f"# TYPE {name} {kind}"]


def _pairs(labels: Mapping[str, str]) -> str:
    return ",".join(f'{name}="{_escape(value)}"' for name, value in labels.items())


def _escape(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
