"""What the server counts, and the page that Prometheus reads (/metrics, exposition format 0.0.4). Thread: loop."""

import asyncio
import ctypes
import logging
import os
import re
import resource
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from core.types import EngineStats, Usage
from server import __version__
from server.gate.identity import mask_keys
from server.observing.logs import num_lines_dropped
from server.observing.slo import NO_PROMISES, SloMonitor, SloRules
from server.observing.timing import S_NS, Stage, StageClock

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


_NVML = "libnvidia-ml.so.1"


class _Memory(ctypes.Structure):
    """nvmlMemory_t, in bytes."""

    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


class _Utilization(ctypes.Structure):
    """nvmlUtilization_t, in percent of the last sampling period."""

    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


@dataclass(frozen=True, slots=True)
class DeviceState:
    """
    Args:
        utilization: share of the last moments in which something ran, 0 to 1; None: the device does not tell (MIG).
    """

    memory_used_bytes: int
    memory_total_bytes: int
    utilization: float | None


class DeviceMonitor:
    """The machine's devices, by their number in the driver."""

    def __init__(self) -> None:
        self._library: Any = None
        self._handles: list[ctypes.c_void_p] = []
        try:
            library = ctypes.CDLL(_NVML)
        except OSError:
            return  # no such devices here
        if library.nvmlInit_v2() == 0:
            self._library = library
            self._handles = self._find()

    def states(self) -> dict[str, DeviceState]:
        """Those that can be asked."""
        found = {str(i): self._state(handle) for i, handle in enumerate(self._handles)}
        return {number: state for number, state in found.items() if state is not None}

    def _find(self) -> list[ctypes.c_void_p]:
        count = ctypes.c_uint()
        if self._library.nvmlDeviceGetCount_v2(ctypes.byref(count)) != 0:
            return []
        handles = []
        for index in range(count.value):
            handle = ctypes.c_void_p()
            if self._library.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(index), ctypes.byref(handle)) == 0:
                handles.append(handle)
        return handles

    def _state(self, handle: ctypes.c_void_p) -> DeviceState | None:
        memory, utilization = _Memory(), _Utilization()
        if self._library.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory)) != 0:
            return None
        is_told = self._library.nvmlDeviceGetUtilizationRates(handle, ctypes.byref(utilization)) == 0
        return DeviceState(memory.used, memory.total, utilization.gpu / 100 if is_told else None)


_STATM = Path("/proc/self/statm")
_PAGE_BYTES = resource.getpagesize()


def resident_bytes() -> int:
    """Source: proc_pid_statm(5), the second field; where there is none, what it once was at most (getrusage(2))."""
    try:
        return int(_STATM.read_bytes().split()[1]) * _PAGE_BYTES
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def cpu_s() -> float:
    """Of all threads, in user and system mode."""
    times = os.times()
    return times.user + times.system


TICK_S = 0.25


class LoopLag:
    """Sets a timer again and again, from start() to close(), and notes how late it is called.

    Args:
        clock: monotonic seconds, finer than the loop's own milliseconds.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, clock: Callable[[], float], lags: Histogram) -> None:
        self._loop = loop
        self._clock = clock
        self._lags = lags
        self._timer: asyncio.TimerHandle | None = None
        self._due_s = 0.0

    def start(self) -> None:
        self._due_s = self._clock() + TICK_S
        self._timer = self._loop.call_later(TICK_S, self._tick)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _tick(self) -> None:
        late_s = max(0.0, self._clock() - self._due_s)
        self.start()
        self._lags.observe(late_s)


logger = logging.getLogger(__name__)

TTFT_BUCKETS_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.6, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
INTER_TOKEN_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.4, 0.8, 1.6, 5.0, 10.0)
E2E_BUCKETS_S = (0.01, 0.05, 0.1, 0.3, 0.6, 1.0, 2.0, 5.0, 10.0, 20.0, 40.0, 60.0, 120.0, 600.0, 3600.0)
STAGE_BUCKETS_S = (1e-5, 5e-5, 1e-4, 5e-4, 1e-3, 5e-3, 0.02, 0.1, 0.5, 2.0, 10.0, 60.0, 600.0)
STEP_BUCKETS_S = (1e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.6, 1.0, 2.5, 10.0)
DELAY_BUCKETS_S = (1e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 0.01, 0.025, 0.05, 0.1, 0.5, 1.0, 10.0)
COUNT_BUCKETS = (0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0)

# Names of fields are the clients' to choose: so many that look like names are told apart, the rest are one
MAX_UNKNOWN_FIELDS = 64
_FIELD_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
OTHER_FIELDS = "(other)"
MAX_TENANTS = 64
# Shown from the start: of a series that begins with its first failure, no alert sees the rise
OUR_FAULTS = {"engine_error": 0, "internal_error": 0}
# Likewise; not those of a server that has too much to do, loads or drains
OUR_REFUSALS = {"internal_error": 0, "issuer_unavailable": 0, "ledger_unavailable": 0}
OTHER_TENANTS = "(other)"


@dataclass(slots=True)
class TenantCounts:
    """What one tenant has had since the start."""

    num_requests: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_completion_tokens: int = 0
    queue_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """What the service rests on. None: it has no such thing, or nobody knows.

    Args:
        ledger_is_up: it takes writes.
        ledger_commit_age_s: since it last took one.
        ledger_disk: free bytes, and all.
        reload: when the last one was, in unix time, and whether it was taken.
        expiries: in unix time, of "certificate" and "revocation_list": the first of several.
        jwks_age_s: since the issuer's keys were fetched.
    """

    ledger_is_up: bool | None = None
    ledger_commit_age_s: float | None = None
    ledger_disk: tuple[int, int] | None = None
    reload: tuple[float, bool] | None = None
    expiries: Mapping[str, float] = field(default_factory=dict)
    jwks_age_s: float | None = None


class Finished(msgspec.Struct, frozen=True, kw_only=True):
    """A request that is over, as the counters see it.

    Args:
        usage: None: it never became a generation.
        is_billed: False: its tokens are nobody's to pay.
        error_code: that it was answered with, or broken off by.
        is_our_fault: and neither the client's nor a limit's.
    """

    tenant: str
    status: int
    timings: StageClock
    usage: Usage | None
    error_code: str | None
    is_our_fault: bool
    is_billed: bool = True


class Metrics:
    """The server's counters, and the page made of them and the engine's latest snapshot."""

    def __init__(self, slo: SloRules | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self.model_name = ""  # known once the model is loaded
        self.ttft = Histogram(TTFT_BUCKETS_S)
        self.inter_token = Histogram(INTER_TOKEN_BUCKETS_S)
        self.e2e = Histogram(E2E_BUCKETS_S)
        self.queue_time = Histogram(TTFT_BUCKETS_S)
        self.prefill_time = Histogram(TTFT_BUCKETS_S)
        self.decode_time = Histogram(E2E_BUCKETS_S)
        self.stages = {stage.value: Histogram(STAGE_BUCKETS_S) for stage in Stage}
        self.step_time = Histogram(STEP_BUCKETS_S)
        self.step_tokens = Histogram(COUNT_BUCKETS)
        self.step_rows = {"prefill": Histogram(COUNT_BUCKETS), "decode": Histogram(COUNT_BUCKETS)}
        self.loop_lag = Histogram(DELAY_BUCKETS_S)
        self.gil_wait = Histogram(DELAY_BUCKETS_S)
        self.responses: Counter[int] = Counter()  # by status
        self.finished: Counter[str] = Counter()  # sequences, by finish reason
        self.refused: Counter[str] = Counter()  # requests that never became a generation, by error code
        self.failed: Counter[str] = Counter()  # generations, by error code
        self.unknown_fields: Counter[str] = Counter()
        self.tenants: dict[str, TenantCounts] = {}
        self.num_active: Callable[[], int] = lambda: 0  # generations in progress
        self.standing: Callable[[], Standing] = Standing
        self.num_prompt_tokens = 0
        self.num_generation_tokens = 0
        self.num_disconnects = 0
        self.slo = SloMonitor(slo or NO_PROMISES, clock)
        self._clock = clock
        self._started_s = clock()
        self._devices = DeviceMonitor()
        self._scrape_s = 0.0  # of the last page
        self._step = EngineStats()  # the last that was observed

    def count_generation(self, usage: Usage, timings: StageClock) -> None:
        self.num_prompt_tokens += usage.num_prompt_tokens
        self.num_generation_tokens += usage.num_completion_tokens
        if timings.end_s is not None:
            self.e2e.observe(timings.end_s - timings.accepted_s)

    def count_request(self, done: Finished) -> None:
        """Every request passes here once, when its last byte is out."""
        self.responses[done.status] += 1
        if done.usage is not None:
            self._count_stages(done.timings)
            self._count_tenant(done, done.usage)
            self._judge(done, done.usage)
            if done.error_code is not None:
                self.failed[done.error_code] += 1
        elif done.error_code is not None:
            self.refused[done.error_code] += 1
            if done.is_our_fault:
                self.slo.observe(None, None, None, has_failed=True)

    def _count_stages(self, timings: StageClock) -> None:
        stages = timings.stages_ns()
        for stage, spent_ns in stages.items():
            self.stages[stage].observe(spent_ns / S_NS)
        for stage, histogram in ((Stage.QUEUE, self.queue_time), (Stage.PREFILL, self.prefill_time)):
            if stage in stages:
                histogram.observe(stages[stage] / S_NS)
        if timings.first_token_s is not None and timings.end_s is not None:
            self.decode_time.observe(timings.end_s - timings.first_token_s)

    def _count_tenant(self, done: Finished, usage: Usage) -> None:
        is_told_apart = done.tenant in self.tenants or len(self.tenants) < MAX_TENANTS
        counts = self.tenants.setdefault(done.tenant if is_told_apart else OTHER_TENANTS, TenantCounts())
        counts.num_requests += 1
        if done.is_billed:
            counts.num_prompt_tokens += usage.num_prompt_tokens
            counts.num_cached_tokens += usage.num_cached_tokens
            counts.num_completion_tokens += usage.num_completion_tokens
        counts.queue_s += done.timings.stages_ns().get(Stage.QUEUE, 0) / S_NS

    def _judge(self, done: Finished, usage: Usage) -> None:
        timings, is_whole = done.timings, done.error_code is None and done.status == 200
        tokens_per_s = None
        if timings.first_token_s is not None and timings.end_s is not None and usage.num_completion_tokens > 1:
            decode_s = timings.end_s - timings.first_token_s
            tokens_per_s = (usage.num_completion_tokens - 1) / decode_s if decode_s > 0 else None
        latency_s = timings.total_ns / S_NS if is_whole else None
        self.slo.observe(timings.ttft_s, latency_s, tokens_per_s, done.is_our_fault)

    def observe_step(self, stats: EngineStats) -> None:
        """A step's news: once a step."""
        before = self._step
        if stats.num_steps == before.num_steps:
            return
        self._step = stats
        self.step_time.observe(stats.step_s)
        num_prompt = stats.num_prompt_tokens - before.num_prompt_tokens
        self.step_tokens.observe(num_prompt + stats.num_generated_tokens - before.num_generated_tokens)
        num_prefill = stats.num_prefill_rows - before.num_prefill_rows
        self.step_rows["prefill"].observe(num_prefill)
        self.step_rows["decode"].observe(stats.num_rows - before.num_rows - num_prefill)

    def count_unknown_fields(self, names: Iterable[str]) -> None:
        """Of each told apart, the first is told in a debug line. A name that may be text or a key is not shown."""
        num_others = 0
        for name in names:
            num_told_apart = len(self.unknown_fields) - (OTHER_FIELDS in self.unknown_fields)
            is_told_apart = name in self.unknown_fields or num_told_apart < MAX_UNKNOWN_FIELDS
            if not is_told_apart or _FIELD_NAME.fullmatch(name) is None or mask_keys(name) != name:
                num_others += 1
                continue
            if name not in self.unknown_fields:
                logger.debug("the unknown field %s is ignored, here and from now on", name)
            self.unknown_fields[name] += 1
        if num_others:
            logger.debug("unknown fields are ignored, whose names are not shown: %d", num_others)
            self.unknown_fields[OTHER_FIELDS] += num_others

    def render(self, stats: EngineStats, num_connections: int, num_accepted: int, refused: Counter[str]) -> bytes:
        began_s = self._clock()
        page = Page({"model_name": self.model_name})
        self._render_routers_subset(page, stats)
        self._render_connections(page, num_connections, num_accepted, refused)
        self._render_requests(page)
        self._render_tenants(page)
        self._render_engine(page, stats)
        self._render_process(page)
        self._render_standing(page, self.standing())
        self._render_devices(page)
        self._render_slo(page, stats)
        body = page.encode()
        self._scrape_s = self._clock() - began_s
        return body

    def _render_connections(self, page: Page, num_open: int, num_accepted: int, refused: Counter[str]) -> None:
        page.gauge("steploop_connections", "Open connections, handshakes included.", num_open)
        page.counter("steploop_connections_accepted_total", "Connections accepted.", num_accepted)
        page.counters("steploop_connections_refused_total", "Connections turned away.", "reason", refused)
        help_text = (
            "Generations whose clients left before the end. Responses of status 499 also count clients that left while"
            " their body was still coming, and answers that DELETE cancelled."
        )
        page.counter(
            "steploop_log_lines_dropped_total", "Lines that the log's reader did not take.", num_lines_dropped()
        )
        page.counter("steploop_disconnects_total", help_text, self.num_disconnects)

    def _render_requests(self, page: Page) -> None:
        page.gauge("steploop_requests_active", "Generations in progress, waiting ones included.", self.num_active())
        page.counters("steploop_responses_total", "Responses by status.", "status", self.responses)
        page.counters(
            "steploop_requests_refused_total",
            "Requests that never were a generation.",
            "reason",
            OUR_REFUSALS | self.refused,
        )
        page.counters("steploop_requests_failed_total", "Generations broken off.", "reason", OUR_FAULTS | self.failed)
        page.counters("steploop_unknown_fields_total", "Ignored request fields.", "field", self.unknown_fields)
        help_text = "Where the time of generations went; the stages of one are its whole time."
        page.histograms("steploop_stage_seconds", help_text, "stage", self.stages)

    def _render_tenants(self, page: Page) -> None:
        columns: tuple[tuple[str, str, Callable[[TenantCounts], float]], ...] = (
            ("requests", "Generations.", lambda one: one.num_requests),
            ("prompt_tokens", "Prompt tokens that are billed.", lambda one: one.num_prompt_tokens),
            ("cached_tokens", "Those of them that were cached.", lambda one: one.num_cached_tokens),
            ("completion_tokens", "Generated tokens that are billed.", lambda one: one.num_completion_tokens),
            ("queue_seconds", "Waited in the queue.", lambda one: one.queue_s),
        )
        for name, help_text, value_of in columns:
            values = {tenant: value_of(counts) for tenant, counts in self.tenants.items()}
            page.counters(f"steploop_tenant_{name}_total", help_text, "tenant", values)

    def _render_engine(self, page: Page, stats: EngineStats) -> None:
        page.gauge("steploop_kv_blocks", "KV blocks.", stats.num_blocks)
        page.gauge("steploop_kv_blocks_used", "KV blocks in use.", stats.num_used_blocks)
        page.gauge("steploop_kv_blocks_cached", "Free KV blocks that are kept.", stats.num_cached_blocks)
        self._render_prefix_cache(page, "steploop_", stats)
        page.counter("steploop_prefix_cache_evictions_total", "Cached KV blocks reused.", stats.num_cache_evictions)
        self._render_offload(page, stats)
        page.gauge("steploop_requests_paused", "Requests paused by slow readers or quotas.", stats.num_paused)
        page.counter("steploop_steps_total", "Engine steps.", stats.num_steps)
        page.gauge("steploop_step_last_seconds", "Duration of the last step.", stats.step_s)
        page.histogram("steploop_step_seconds", "Duration of steps.", self.step_time)
        page.histogram("steploop_step_tokens", "Tokens of a step: of prompts computed, and drawn.", self.step_tokens)
        help_text = "Rows of a step: sequences that computed some of a prompt, and those that went on."
        page.histograms("steploop_step_rows", help_text, "kind", self.step_rows)
        errors = {"0.5": stats.step_cost_error_p50, "0.9": stats.step_cost_error_p90}
        help_text = "Of the last steps, how far the time predicted was off, as a share of the time measured."
        page.gauges("steploop_step_cost_error_ratio", help_text, "quantile", errors)

    def _render_offload(self, page: Page, stats: EngineStats) -> None:
        page.gauge("steploop_kv_host_blocks", "KV blocks that fit in host memory.", stats.num_host_blocks)
        page.gauge("steploop_kv_host_blocks_used", "KV blocks kept there.", stats.num_used_host_blocks)
        page.counter("steploop_kv_offloaded_blocks_total", "KV blocks copied to it.", stats.num_offloaded_blocks)
        page.counter("steploop_kv_restored_blocks_total", "KV blocks copied back.", stats.num_restored_blocks)
        help_text = "KV blocks found there and computed again: that was faster."
        page.counter("steploop_kv_recomputed_blocks_total", help_text, stats.num_recomputed_blocks)
        help_text = "KV blocks that could not be written to the directory."
        page.counter("steploop_kv_unwritten_blocks_total", help_text, stats.num_unwritten_blocks)
        help_text = "Forgotten KV blocks whose files could not be deleted from it."
        page.gauge("steploop_kv_undeleted_blocks", help_text, stats.num_undeleted_blocks)
        copied = {"out": stats.num_offloaded_blocks, "back": stats.num_restored_blocks}
        copied_bytes = {direction: count * stats.block_bytes for direction, count in copied.items()}
        page.counters("steploop_kv_copied_bytes_total", "Of these copies.", "direction", copied_bytes)

    def _render_process(self, page: Page) -> None:
        page.histogram("steploop_loop_lag_seconds", "How late the event loop calls a timer.", self.loop_lag)
        help_text = "How long the engine's thread waits for the interpreter's lock; one sample a second."
        page.histogram("steploop_gil_wait_seconds", help_text, self.gil_wait)
        page.gauge("steploop_scrape_seconds", "What the page before this one took of the loop.", self._scrape_s)
        page.gauge("steploop_uptime_seconds", "Since the process began to listen.", self._clock() - self._started_s)
        page.gauge("process_resident_memory_bytes", "Memory of the process.", resident_bytes())
        page.counter("process_cpu_seconds_total", "CPU time of the process, all threads.", cpu_s())

    def _render_standing(self, page: Page, standing: Standing) -> None:
        page.gauges("steploop_build_info", "What runs: its version.", "version", {__version__: 1})
        free, size = standing.ledger_disk or (None, None)
        reloaded_s, is_taken = standing.reload or (None, None)
        shown: tuple[tuple[str, str, float | None], ...] = (
            ("ledger_up", "1: the ledger takes writes; 0: generations are refused.", standing.ledger_is_up),
            ("ledger_commit_age_seconds", "Since the ledger last took a write.", standing.ledger_commit_age_s),
            ("ledger_disk_free_bytes", "Room on the ledger's disk, at its last write.", free),
            ("ledger_disk_bytes", "Size of the ledger's disk.", size),
            ("reload_success", "1: the last reload was taken; 0: it was refused.", is_taken),
            ("reload_timestamp_seconds", "When the last reload was.", reloaded_s),
            ("jwks_age_seconds", "Since the keys of the JWTs' issuer were fetched.", standing.jwks_age_s),
        )
        for name, help_text, value in shown:
            page.gauge_if_known(f"steploop_{name}", help_text, value)
        help_text = "When the first of the certificates, or of the revocation lists, runs out."
        page.gauges("steploop_expiry_timestamp_seconds", help_text, "what", standing.expiries)

    def _render_devices(self, page: Page) -> None:
        states = self._devices.states()
        used = {number: state.memory_used_bytes for number, state in states.items()}
        total = {number: state.memory_total_bytes for number, state in states.items()}
        busy = {number: state.utilization for number, state in states.items() if state.utilization is not None}
        page.gauges("steploop_device_memory_used_bytes", "Memory in use, by whomever.", "device", used)
        page.gauges("steploop_device_memory_bytes", "Memory of the device.", "device", total)
        page.gauges("steploop_device_utilization_ratio", "Share of time in which something ran.", "device", busy)

    def _render_slo(self, page: Page, stats: EngineStats) -> None:
        states = self.slo.states(stats.num_waiting, resident_bytes())
        values = {name: state.value for name, state in states.items() if state.value is not None}
        thresholds = {name: state.threshold for name, state in states.items() if state.threshold is not None}
        kept = {name: float(states[name].is_ok) for name in thresholds}
        page.gauges("steploop_slo_value", "Measured over the last 5 minutes.", "slo", values)
        page.gauges("steploop_slo_threshold", "Promised by [slo] of the configuration.", "slo", thresholds)
        page.gauges("steploop_slo_ok", "1: the promise is kept, or nothing was measured; 0: broken.", "slo", kept)

    def _render_prefix_cache(self, page: Page, prefix: str, stats: EngineStats) -> None:
        page.counter(f"{prefix}prefix_cache_queries_total", "Prompt tokens looked up.", stats.num_cache_queries)
        page.counter(f"{prefix}prefix_cache_hits_total", "Prompt tokens found.", stats.num_cache_hits)

    def _render_routers_subset(self, page: Page, stats: EngineStats) -> None:
        usage = stats.num_used_blocks / stats.num_blocks if stats.num_blocks else 0.0
        page.gauge("vllm:num_requests_waiting", "Requests in the queue.", stats.num_waiting)
        page.gauge("vllm:num_requests_running", "Requests running.", stats.num_running)
        page.gauge("vllm:kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1.", usage)
        page.counter("vllm:prompt_tokens_total", "Prompt tokens.", self.num_prompt_tokens)
        page.counter("vllm:generation_tokens_total", "Generated tokens.", self.num_generation_tokens)
        page.counter("vllm:num_preemptions_total", "Preemptions.", stats.num_preemptions)
        self._render_prefix_cache(page, "vllm:", stats)
        page.counters("vllm:request_success_total", "Finished sequences.", "finished_reason", self.finished)
        page.histogram("vllm:time_to_first_token_seconds", "First byte of the head to first token.", self.ttft)
        page.histogram("vllm:inter_token_latency_seconds", "Token to token.", self.inter_token)
        page.histogram("vllm:e2e_request_latency_seconds", "First byte of the head to last token.", self.e2e)
        page.histogram("vllm:request_queue_time_seconds", "Waited in the queue.", self.queue_time)
        page.histogram("vllm:request_prefill_time_seconds", "Admitted to first token drawn.", self.prefill_time)
        page.histogram("vllm:request_decode_time_seconds", "First token to last.", self.decode_time)
