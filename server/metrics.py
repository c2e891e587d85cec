"""What /metrics shows, in the Prometheus text format (exposition format 0.0.4). Thread: loop.

Own names are steploop_*; beside them stands the subset of vllm:* that routers and dashboards already read (API.md).
"""

import logging
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping

from core.types import EngineStats, Usage
from server.logs import escape
from server.timing import StageClock

logger = logging.getLogger(__name__)

CONTENT_TYPE = b"text/plain; version=0.0.4; charset=utf-8"

TTFT_BUCKETS_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.6, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
INTER_TOKEN_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.4, 0.8, 1.6, 5.0, 10.0)
E2E_BUCKETS_S = (0.01, 0.05, 0.1, 0.3, 0.6, 1.0, 2.0, 5.0, 10.0, 20.0, 40.0, 60.0, 120.0, 600.0, 3600.0)

# Names of fields are the clients' to choose: so many are told apart, by so many characters, the rest are one
MAX_UNKNOWN_FIELDS = 64
MAX_FIELD_NAME_CHARS = 64
OTHER_FIELDS = "(other)"


class Histogram:
    """Counts per bucket, their sum and number. Neighbours of a step often have one value: a run is counted at once."""

    __slots__ = ("_counts", "_num_in_run", "_run_value", "_total", "bounds")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._total = 0.0
        self._run_value = 0.0
        self._num_in_run = 0  # not yet among the counts

    def observe(self, value: float) -> None:
        if value != self._run_value:
            self._end_run()
            self._run_value = value
        self._num_in_run += 1

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


class Metrics:
    """The server's counters, and the page made of them and the engine's latest snapshot."""

    def __init__(self) -> None:
        self.model_name = ""  # known once the model is loaded
        self.ttft = Histogram(TTFT_BUCKETS_S)
        self.inter_token = Histogram(INTER_TOKEN_BUCKETS_S)
        self.e2e = Histogram(E2E_BUCKETS_S)
        self.responses: Counter[int] = Counter()  # by status
        self.finished: Counter[str] = Counter()  # sequences, by finish reason
        self.unknown_fields: Counter[str] = Counter()
        self.num_prompt_tokens = 0
        self.num_generation_tokens = 0
        self.num_disconnects = 0

    def count_generation(self, usage: Usage, timings: StageClock) -> None:
        self.num_prompt_tokens += usage.num_prompt_tokens
        self.num_generation_tokens += usage.num_completion_tokens
        if timings.end_s is not None:
            self.e2e.observe(timings.end_s - timings.accepted_s)

    def count_unknown_fields(self, names: Iterable[str]) -> None:
        """Of each told apart, the first is told in a debug line."""
        for name in names:
            shown = name[:MAX_FIELD_NAME_CHARS]
            is_told_apart = shown in self.unknown_fields or len(self.unknown_fields) < MAX_UNKNOWN_FIELDS
            key = shown if is_told_apart else OTHER_FIELDS
            if key not in self.unknown_fields:
                logger.debug("the unknown field %s is ignored, here and from now on", escape(key))
            self.unknown_fields[key] += 1

    def render(self, stats: EngineStats, num_connections: int, num_accepted: int, refused: Counter[str]) -> bytes:
        page = _Page(f'model_name="{_escape(self.model_name)}"')
        self._render_routers_subset(page, stats)
        page.family("steploop_connections", "gauge", "Open connections, handshakes included.", num_connections)
        page.family("steploop_connections_accepted_total", "counter", "Connections accepted.", num_accepted)
        page.labelled("steploop_connections_refused_total", "Connections turned away.", "reason", refused)
        page.labelled("steploop_responses_total", "Responses by status.", "status", self.responses)
        page.labelled("steploop_unknown_fields_total", "Ignored request fields.", "field", self.unknown_fields)
        page.family("steploop_disconnects_total", "counter", "Clients gone before the end.", self.num_disconnects)
        page.family("steploop_kv_blocks", "gauge", "KV blocks.", stats.num_blocks)
        page.family("steploop_kv_blocks_used", "gauge", "KV blocks in use.", stats.num_used_blocks)
        page.family("steploop_kv_blocks_cached", "gauge", "Free KV blocks that are kept.", stats.num_cached_blocks)
        self._render_prefix_cache(page, "steploop_", stats)
        evictions = stats.num_cache_evictions
        page.family("steploop_prefix_cache_evictions_total", "counter", "Cached KV blocks reused.", evictions)
        page.family("steploop_requests_paused", "gauge", "Sequences paused by slow readers.", stats.num_paused)
        page.family("steploop_steps_total", "counter", "Engine steps.", stats.num_steps)
        page.family("steploop_step_seconds", "gauge", "Duration of the last step.", stats.step_s)
        errors = {"0.5": stats.step_cost_error_p50, "0.9": stats.step_cost_error_p90}
        help_text = "Of the last steps, how far the time predicted was off, as a share of the time measured."
        page.labelled("steploop_step_cost_error_ratio", help_text, "quantile", errors, kind="gauge")
        return page.encode()

    def _render_prefix_cache(self, page: "_Page", prefix: str, stats: EngineStats) -> None:
        queries, hits = stats.num_cache_queries, stats.num_cache_hits
        page.family(f"{prefix}prefix_cache_queries_total", "counter", "Prompt tokens looked up.", queries)
        page.family(f"{prefix}prefix_cache_hits_total", "counter", "Prompt tokens found.", hits)

    def _render_routers_subset(self, page: "_Page", stats: EngineStats) -> None:
        usage = stats.num_used_blocks / stats.num_blocks if stats.num_blocks else 0.0
        page.family("vllm:num_requests_waiting", "gauge", "Requests in the queue.", stats.num_waiting)
        page.family("vllm:num_requests_running", "gauge", "Requests running.", stats.num_running)
        page.family("vllm:kv_cache_usage_perc", "gauge", "Share of KV blocks in use, 0 to 1.", usage)
        page.family("vllm:prompt_tokens_total", "counter", "Prompt tokens.", self.num_prompt_tokens)
        page.family("vllm:generation_tokens_total", "counter", "Generated tokens.", self.num_generation_tokens)
        page.family("vllm:num_preemptions_total", "counter", "Preemptions.", stats.num_preemptions)
        self._render_prefix_cache(page, "vllm:", stats)
        page.labelled("vllm:request_success_total", "Finished sequences.", "finished_reason", self.finished)
        page.histogram("vllm:time_to_first_token_seconds", "Head to first token.", self.ttft)
        page.histogram("vllm:inter_token_latency_seconds", "Token to token.", self.inter_token)
        page.histogram("vllm:e2e_request_latency_seconds", "Head to end.", self.e2e)


class _Page:
    def __init__(self, label: str) -> None:
        self._label = label
        self._lines: list[str] = []

    def encode(self) -> bytes:
        return ("\n".join(self._lines) + "\n").encode()

    def family(self, name: str, kind: str, text: str, value: float) -> None:
        self._head(name, kind, text)
        self._lines.append(f"{name}{{{self._label}}} {value}")

    def labelled(
        self, name: str, text: str, label: str, values: Mapping[str, float] | Mapping[int, float], kind: str = "counter"
    ) -> None:
        self._head(name, kind, text)
        for key, value in sorted(values.items()):
            self._lines.append(f'{name}{{{self._label},{label}="{_escape(str(key))}"}} {value}')

    def histogram(self, name: str, text: str, histogram: Histogram) -> None:
        self._head(name, "histogram", text)
        count = 0
        for bound, in_bucket in zip((*histogram.bounds, "+Inf"), histogram.counts, strict=True):
            count += in_bucket
            self._lines.append(f'{name}_bucket{{{self._label},le="{bound}"}} {count}')
        self._lines.append(f"{name}_sum{{{self._label}}} {histogram.total}")
        self._lines.append(f"{name}_count{{{self._label}}} {count}")

    def _head(self, name: str, kind: str, text: str) -> None:
        self._lines += [f"# HELP {name} {text}", f"# TYPE {name} {kind}"]


def _escape(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
