"""The server's metrics, and /metrics in Prometheus's exposition format 0.0.4. Thread: loop."""

import asyncio
import ctypes
import logging
import os
import re
import resource
import time
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from core.types import EngineStats, Usage
from server import __version__
from server.gate.identity import mask_keys
from server.observing.logs import num_lines_dropped
from server.observing.recorder import Recorder
from server.observing.slo import NO_PROMISES, SloMonitor, SloRules
from server.observing.timing import S_NS, Stage, StageClock

TICK_S = 0.25
_NVML = "libnvidia-ml.so.1"  # its functions return 0 for success; source: the NVML API reference
logger = logging.getLogger(__name__)

CONTENT_TYPE = b"text/plain; version=0.0.4; charset=utf-8"
TTFT_BUCKETS_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.6, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
INTER_TOKEN_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.4, 0.8, 1.6, 5.0, 10.0)
E2E_BUCKETS_S = (0.01, 0.05, 0.1, 0.3, 0.6, 1.0, 2.0, 5.0, 10.0, 20.0, 40.0, 60.0, 120.0, 600.0, 3600.0)
STAGE_BUCKETS_S = (1e-5, 5e-5, 1e-4, 5e-4, 1e-3, 5e-3, 0.02, 0.1, 0.5, 2.0, 10.0, 60.0, 600.0)
STEP_BUCKETS_S = (1e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.6, 1.0, 2.5, 10.0)
DELAY_BUCKETS_S = (1e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 0.01, 0.025, 0.05, 0.1, 0.5, 1.0, 10.0)
COUNT_BUCKETS = (0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0)

# Clients choose the names of fields: so many that look like names have a series of their own
MAX_UNKNOWN_FIELDS = 64
_FIELD_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
OTHER_FIELDS = "(other)"
MAX_TENANTS = 64
# Shown from the start: if a series began with its first failure, no alert would see it rise
OUR_FAULTS = {"engine_error": 0, "internal_error": 0}
# Likewise; without the refusals of a server that is overloaded, loading or draining
OUR_REFUSALS = {"internal_error": 0, "issuer_unavailable": 0, "ledger_unavailable": 0}
OTHER_TENANTS = "(other)"


class Histogram:
    """Counts per bucket, and the sum. A run of equal values, as the rows of a step observe, is counted at once."""

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
        """By bucket; the last has no bound."""
        self._end_run()
        return self._counts

    @property
    def total(self) -> float:
        self._end_run()
        return self._total

    def _end_run(self) -> None:
        if self._num_in_run:
            self._counts[bisect_left(self.bounds, self._run_value)] += self._num_in_run
            self._total += self._run_value * self._num_in_run
            self._num_in_run = 0


@dataclass(slots=True)
class TenantCounts:
    """One tenant's, since the start."""

    num_requests: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_completion_tokens: int = 0
    queue_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """The state of the ledger, the configuration and the certificates. None: there is no such thing, or it is unknown.

    Args:
        ledger_is_up: it takes writes.
        ledger_commit_age_s: since it last took one.
        ledger_disk: free bytes, and all.
        reload: unix time of the last one, and whether it succeeded.
        expiries: unix times, of "certificate" and "revocation_list": the first of several.
        jwks_age_s: since the issuer's keys were fetched.
    """

    ledger_is_up: bool | None = None
    ledger_commit_age_s: float | None = None
    ledger_disk: tuple[int, int] | None = None
    reload: tuple[float, bool] | None = None
    expiries: Mapping[str, float] = field(default_factory=dict)
    jwks_age_s: float | None = None


@dataclass(slots=True)
class ModelCounts:
    """Of one model, or of all.

    Args:
        finished: sequences, by finish reason.
    """

    num_prompt_tokens: int = 0
    num_generation_tokens: int = 0
    finished: Counter[str] = field(default_factory=Counter)
    ttft: Histogram = field(default_factory=lambda: Histogram(TTFT_BUCKETS_S))
    e2e: Histogram = field(default_factory=lambda: Histogram(E2E_BUCKETS_S))


class Metrics(ModelCounts):
    """
    Attributes:
        num_active: returns the number of generations in progress.
        upstreams, pools: return those of server/upstream/pool.py, by the label that shows them.
        local_models: of server/local_models.py, by name.
        scrape_s: what the last page took.
    """

    def __init__(self, slo: SloRules | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self.model_name: str | None = ""  # known once the model is loaded; None: there are several
        self.inter_token = Histogram(INTER_TOKEN_BUCKETS_S)
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
        self.refused: Counter[str] = Counter()  # requests that never became a generation, by error code
        self.failed: Counter[str] = Counter()  # generations, by error code
        self.unknown_fields: Counter[str] = Counter()
        self.tenants: dict[str, TenantCounts] = {}
        # Tokens of a block and blocks; known once the model is loaded
        self.cache_config: dict[tuple[int, int], int] = {}
        self.own_model = ""  # the engine's in this process, if there are several
        self._by_model = defaultdict[str, ModelCounts](ModelCounts)  # if there are several
        self.num_active: Callable[[], int] = lambda: 0
        self.standing: Callable[[], Standing] = Standing
        self.upstreams: Callable[[], Mapping[str, Any]] = dict
        self.pools: Callable[[], Mapping[str, Any]] = dict
        self.local_models: Callable[[], Mapping[str, Any]] = dict
        self.adapters: Callable[[], Mapping[tuple[str, ...], float]] = dict
        self.budgets: Callable[[], Mapping[tuple[str, ...], float]] = dict
        self.recorder: Recorder | None = None
        self.num_reasoning_tokens = 0
        self.num_disconnects = 0
        self.slo = SloMonitor(slo or NO_PROMISES, clock)
        self._clock = clock
        self._started_s = clock()
        self.devices = DeviceMonitor()
        self.scrape_s = 0.0
        self._step = EngineStats()  # as of the last step

    def _counts_of(self, model: str) -> tuple[ModelCounts, ...]:
        """model: by its own name; so below."""
        return (self,) if self.model_name is not None else (self, self._by_model[model])

    def count_first_token(self, ttft_s: float, model: str) -> None:
        for counts in self._counts_of(model):
            counts.ttft.observe(ttft_s)

    def count_finished(self, reasons: Collection[str], model: str) -> None:
        for counts in self._counts_of(model):
            counts.finished.update(reasons)

    def count_generation(self, usage: Usage, timings: StageClock, model: str) -> None:
        self.num_reasoning_tokens += usage.num_thought_tokens
        for counts in self._counts_of(model):
            counts.num_prompt_tokens += usage.num_prompt_tokens
            counts.num_generation_tokens += usage.num_completion_tokens
            if timings.end_s is not None:
                counts.e2e.observe(timings.end_s - timings.accepted_s)

    def count_request(
        self,
        tenant: str,
        status: int,
        timings: StageClock,
        usage: Usage | None,
        error_code: str | None,
        is_our_fault: bool,
        is_billed: bool = True,
    ) -> None:
        """To be called once for every request, when its last byte is out.

        Args:
            usage: None: it never became a generation.
            error_code: of its error answer, or of what broke it off.
            is_our_fault: not the client's, and not a limit's.
        """
        self.responses[status] += 1
        if usage is not None:
            stages = timings.stages_ns()
            self._count_stages(timings, stages)
            self._count_tenant(tenant, usage if is_billed else Usage(0, 0), stages)
            self._judge(timings, usage, error_code is None and status == 200, is_our_fault)
            if error_code is not None:
                self.failed[error_code] += 1
        elif error_code is not None:
            self.refused[error_code] += 1
            if is_our_fault:
                self.slo.observe(None, None, None, has_failed=True)

    def _count_stages(self, timings: StageClock, stages: Mapping[Stage, int]) -> None:
        for stage, spent_ns in stages.items():
            self.stages[stage].observe(spent_ns / S_NS)
        for stage, histogram in ((Stage.QUEUE, self.queue_time), (Stage.PREFILL, self.prefill_time)):
            if stage in stages:
                histogram.observe(stages[stage] / S_NS)
        if timings.first_token_s is not None and timings.end_s is not None:
            self.decode_time.observe(timings.end_s - timings.first_token_s)

    def _count_tenant(self, tenant: str, billed: Usage, stages: Mapping[Stage, int]) -> None:
        has_series = tenant in self.tenants or len(self.tenants) < MAX_TENANTS
        counts = self.tenants.setdefault(tenant if has_series else OTHER_TENANTS, TenantCounts())
        counts.num_requests += 1
        counts.num_prompt_tokens += billed.num_prompt_tokens
        counts.num_cached_tokens += billed.num_cached_tokens
        counts.num_completion_tokens += billed.num_completion_tokens
        counts.queue_s += stages.get(Stage.QUEUE, 0) / S_NS

    def _judge(self, timings: StageClock, usage: Usage, is_whole: bool, is_our_fault: bool) -> None:
        tokens_per_s = None
        if timings.first_token_s is not None and timings.end_s is not None and usage.num_completion_tokens > 1:
            decode_s = timings.end_s - timings.first_token_s
            tokens_per_s = (usage.num_completion_tokens - 1) / decode_s if decode_s > 0 else None
        latency_s = timings.total_ns / S_NS if is_whole else None
        self.slo.observe(timings.ttft_s, latency_s, tokens_per_s, is_our_fault)

    def observe_step(self, stats: EngineStats) -> None:
        """To be called after each step; once is enough."""
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
        """Log the first of each name at debug level. A name that may be text or a key is not shown."""
        num_others = 0
        for name in names:
            num_known = len(self.unknown_fields) - (OTHER_FIELDS in self.unknown_fields)
            has_series = name in self.unknown_fields or num_known < MAX_UNKNOWN_FIELDS
            if not has_series or _FIELD_NAME.fullmatch(name) is None or mask_keys(name) != name:
                num_others += 1
                continue
            if name not in self.unknown_fields:
                logger.debug("the unknown field %s is ignored", name)
            self.unknown_fields[name] += 1
        self.count_hidden_fields(num_others)

    def count_hidden_fields(self, num: int) -> None:
        """Unknown ones whose names may be text or keys, as those of a query."""
        if num:
            logger.debug("%d unknown fields are ignored, whose names are not shown", num)
            self.unknown_fields[OTHER_FIELDS] += num

    def render(self, stats: EngineStats, num_connections: int, num_accepted: int, refused: Counter[str]) -> bytes:
        began_s, memory_bytes = self._clock(), resident_bytes()
        slo = self.slo.states(stats.num_waiting, memory_bytes)
        copied_blocks = {"out": stats.num_offloaded_blocks, "back": stats.num_restored_blocks}
        upstreams, version_requests = self.upstreams(), Counter[str]()
        for label, one in upstreams.items():
            if one.settings.version is not None:
                version_requests[f"{label.removesuffix(one.place)}{one.settings.version}"] += one.num_requests
        pools, own = self.pools(), [(self.own_model, stats)] if self.own_model else []
        finished = {(name, reason): n for name, one in self._by_model.items() for reason, n in one.finished.items()}
        now = {  # TABLE's paths begin with these names
            "metrics": self,
            "stats": stats,
            "standing": self.standing(),
            "tenants": self.tenants,
            "upstreams": upstreams,
            "version_requests": version_requests,
            "pools": pools,
            "models": self._by_model,
            "finished": finished,
            "waiting": {name: one.num_waiting for name, one in (*pools.items(), *own)},
            "running": {name: one.num_running for name, one in (*pools.items(), *own)},
            "local_models": self.local_models(),
            "adapters": self.adapters(),
            "budgets": self.budgets(),
            "devices": self.devices.states(),
            "slo": slo,
            "promised": {name: state for name, state in slo.items() if state.threshold is not None},
            "refused": OUR_REFUSALS | self.refused,
            "failed": OUR_FAULTS | self.failed,
            "num_active": self.num_active(),
            "num_connections": num_connections,
            "num_accepted": num_accepted,
            "connections_refused": refused,
            "kv_usage": stats.num_used_blocks / stats.num_blocks if stats.num_blocks else 0.0,
            "kv_copied_bytes": {name: num * stats.block_bytes for name, num in copied_blocks.items()},
            "step_cost_errors": {"0.5": stats.step_cost_error_p50, "0.9": stats.step_cost_error_p90},
            "num_lines_dropped": num_lines_dropped(),
            "recorder": self.recorder,
            "resident_bytes": memory_bytes,
            "cpu_s": sum(os.times()[:2]),
            "build": {__version__: 1},
        }
        labels = {} if self.model_name is None else {"model_name": self.model_name}
        lines: list[str] = []
        for family in FAMILIES:
            by_model = None if labels else BY_MODEL.get(family.name)
            _add_family(lines, by_model or family, now, labels)
        body = ("\n".join(lines) + "\n").encode()
        self.scrape_s = self._clock() - began_s
        return body

    @property
    def uptime_s(self) -> float:
        return self._clock() - self._started_s


# Each family of samples: name, kind, path of the value, the label that distinguishes several samples, and help.
# The first are what routers know from vLLM.
TABLE = """
vllm:num_requests_waiting gauge stats.num_waiting | Requests in the queue.
vllm:num_requests_running gauge stats.num_running | Requests running.
vllm:kv_cache_usage_perc gauge kv_usage | Share of KV blocks in use, 0 to 1.
vllm:prompt_tokens_total counter metrics.num_prompt_tokens | Prompt tokens.
vllm:generation_tokens_total counter metrics.num_generation_tokens | Generated tokens.
steploop_reasoning_tokens_total counter metrics.num_reasoning_tokens | Generated tokens of reasoning.
steploop_draft_tokens_total counter stats.draft_tokens[drafter] | Draft tokens verified.
steploop_accepted_tokens_total counter stats.accepted_tokens[drafter] | Draft tokens accepted.
steploop_forced_tokens_total counter stats.num_forced_tokens | Generated tokens that a grammar forced.
vllm:num_preemptions_total counter stats.num_preemptions | Preemptions.
vllm:prefix_cache_queries_total counter stats.num_cache_queries | Prompt tokens looked up.
vllm:prefix_cache_hits_total counter stats.num_cache_hits | Prompt tokens found.
vllm:request_success_total counter metrics.finished[finished_reason] | Finished sequences.
vllm:time_to_first_token_seconds histogram metrics.ttft | First byte of the head to first token.
vllm:inter_token_latency_seconds histogram metrics.inter_token | Token to token.
vllm:e2e_request_latency_seconds histogram metrics.e2e | First byte of the head to last token.
vllm:request_queue_time_seconds histogram metrics.queue_time | Waited in the queue.
vllm:request_prefill_time_seconds histogram metrics.prefill_time | Admitted to first token sampled.
vllm:request_decode_time_seconds histogram metrics.decode_time | First token to last.
vllm:cache_config_info gauge metrics.cache_config[block_size,num_gpu_blocks] | The KV cache: tokens of a block, blocks.
vllm:gpu_cache_usage_perc gauge kv_usage | As vllm:kv_cache_usage_perc: its older name.
vllm:gpu_prefix_cache_queries_total counter stats.num_cache_queries | As vllm:prefix_cache_queries_total.
vllm:gpu_prefix_cache_hits_total counter stats.num_cache_hits | As vllm:prefix_cache_hits_total.
vllm:lora_requests_info gauge adapters[max_lora,running_lora_adapters,waiting_lora_adapters] | Which LoRA
    adapters have requests, and how many there may be; the value is the time.
steploop_upstream_up gauge upstreams.is_up[upstream] | 1: its health check succeeds, or its process is loaded.
steploop_upstream_requests_active gauge upstreams.num_active[upstream] | Requests in progress there.
steploop_upstream_requests_total counter upstreams.num_requests[upstream] | Requests sent there.
steploop_upstream_version_requests_total counter version_requests[version] | Requests sent to each version of a model.
steploop_upstream_failures_total counter upstreams.num_failures[upstream] | Requests that failed there.
steploop_upstream_connections gauge upstreams.num_connections[upstream] | Open connections to it.
steploop_upstream_prompt_tokens_waiting gauge upstreams.num_waiting_tokens[upstream] | Of prompts without a first token
    there, those that it had to compute; estimated.
steploop_upstream_requests_waiting gauge pools.num_waiting[model] | Requests waiting here for an upstream.
steploop_upstream_retries_total counter pools.num_retries[model] | Requests that were retried.
steploop_model_loaded gauge local_models.is_awake[model] | 1: this model, which starts on request, is loaded.
steploop_model_loads_total counter local_models.num_loads[model] | Starts of its process.
steploop_model_failures_total counter local_models.num_failures[model] | Failed loads and crashes of its process.
steploop_model_load_seconds gauge local_models.last_load_s[model] | Duration of the last load; 0: none has finished.
steploop_connections gauge num_connections | Open connections, handshakes included.
steploop_connections_accepted_total counter num_accepted | Connections accepted.
steploop_connections_refused_total counter connections_refused[reason] | Connections refused.
steploop_log_lines_dropped_total counter num_lines_dropped | Log lines dropped because their reader was too slow.
steploop_records_total counter recorder.num_written | Requests written into the files of --record.
steploop_records_dropped_total counter recorder.num_dropped | Requests that could not be written there.
steploop_disconnects_total counter metrics.num_disconnects | Generations whose clients left before the end. Responses
    of status 499 also count clients that left while their body was still coming, and answers that DELETE cancelled.
steploop_requests_active gauge num_active | Generations in progress, waiting ones included.
steploop_responses_total counter metrics.responses[status] | Responses by status.
steploop_requests_refused_total counter refused[reason] | Requests refused before generation.
steploop_requests_failed_total counter failed[reason] | Generations that failed.
steploop_unknown_fields_total counter metrics.unknown_fields[field] | Ignored request fields.
steploop_stage_seconds histogram metrics.stages[stage] | Where the time of generations went; the stages of one are its
    whole time.
steploop_tenant_requests_total counter tenants.num_requests[tenant] | Generations.
steploop_tenant_prompt_tokens_total counter tenants.num_prompt_tokens[tenant] | Billed prompt tokens.
steploop_tenant_cached_tokens_total counter tenants.num_cached_tokens[tenant] | Billed prompt tokens that were cached.
steploop_tenant_completion_tokens_total counter tenants.num_completion_tokens[tenant] | Generated tokens that are
    billed.
steploop_tenant_queue_seconds_total counter tenants.queue_s[tenant] | Waited in the queue.
steploop_budget_used_ratio gauge budgets[tenant,key,limit] | Used part of the budgets of the day and the month: of
    tenants; of keys, those of which 80 % are used.
steploop_kv_blocks gauge stats.num_blocks | KV blocks.
steploop_kv_blocks_used gauge stats.num_used_blocks | KV blocks in use.
steploop_kv_blocks_cached gauge stats.num_cached_blocks | Free KV blocks with cached content.
steploop_kv_window_blocks gauge stats.num_window_blocks | KV blocks of layers with windows; 0: layers share blocks.
steploop_kv_window_blocks_used gauge stats.num_used_window_blocks | Of these, in use.
steploop_kv_window_blocks_cached gauge stats.num_cached_window_blocks | Of these, free with cached content.
steploop_prefix_cache_queries_total counter stats.num_cache_queries | Prompt tokens looked up.
steploop_prefix_cache_hits_total counter stats.num_cache_hits | Prompt tokens found.
steploop_prefix_cache_evictions_total counter stats.num_cache_evictions | Cached KV blocks reused.
steploop_kv_host_blocks gauge stats.num_host_blocks | KV blocks that fit in host memory.
steploop_kv_host_blocks_used gauge stats.num_used_host_blocks | KV blocks in host memory.
steploop_kv_offloaded_blocks_total counter stats.num_offloaded_blocks | KV blocks copied to host memory.
steploop_kv_restored_blocks_total counter stats.num_restored_blocks | KV blocks copied back to the device.
steploop_kv_recomputed_blocks_total counter stats.num_recomputed_blocks | KV blocks found in host memory but recomputed:
    that was faster.
steploop_kv_unwritten_blocks_total counter stats.num_unwritten_blocks | KV blocks that could not be written to the
    directory.
steploop_kv_undeleted_blocks gauge stats.num_undeleted_blocks | Dropped KV blocks whose files could not be deleted
    from it.
steploop_kv_copied_bytes_total counter kv_copied_bytes[direction] | Bytes of these copies.
steploop_requests_paused gauge stats.num_paused | Requests paused by slow readers or quotas.
steploop_steps_total counter stats.num_steps | Engine steps.
steploop_step_last_seconds gauge stats.step_s | Duration of the last step.
steploop_step_seconds histogram metrics.step_time | Duration of steps.
steploop_step_tokens histogram metrics.step_tokens | Tokens of a step: of prompts computed, and sampled.
steploop_step_rows histogram metrics.step_rows[kind] | Rows of a step: sequences that computed some of a prompt, and
    those that went on.
steploop_step_cost_error_ratio gauge step_cost_errors[quantile] | Of the last steps, how far the time predicted was
    off, as a share of the time measured.
steploop_loop_lag_seconds histogram metrics.loop_lag | How late the event loop calls a timer.
steploop_gil_wait_seconds histogram metrics.gil_wait | How long the engine's thread waits for the interpreter's lock;
    one sample a second.
steploop_scrape_seconds gauge metrics.scrape_s | Loop time of the previous scrape.
steploop_uptime_seconds gauge metrics.uptime_s | Time since the process started to listen.
process_resident_memory_bytes gauge resident_bytes | Memory of the process.
process_cpu_seconds_total counter cpu_s | CPU time of the process, all threads.
steploop_build_info gauge build[version] | The running version.
steploop_ledger_up gauge standing.ledger_is_up | 1: the ledger can be written; 0: generations are refused.
steploop_ledger_commit_age_seconds gauge standing.ledger_commit_age_s | Time since the ledger's last write.
steploop_ledger_disk_free_bytes gauge standing.ledger_disk.0 | Free space on the ledger's disk, at its last write.
steploop_ledger_disk_bytes gauge standing.ledger_disk.1 | Size of the ledger's disk.
steploop_reload_success gauge standing.reload.1 | 1: the last reload succeeded; 0: it was refused.
steploop_reload_timestamp_seconds gauge standing.reload.0 | Time of the last reload.
steploop_jwks_age_seconds gauge standing.jwks_age_s | Age of the JWT issuer's keys.
steploop_expiry_timestamp_seconds gauge standing.expiries[what] | When the first of the certificates, or of the
    revocation lists, runs out.
steploop_device_memory_used_bytes gauge devices.memory_used_bytes[device] | Memory in use, by all processes.
steploop_device_memory_bytes gauge devices.memory_total_bytes[device] | Memory of the device.
steploop_device_utilization_ratio gauge devices.utilization[device] | Share of time in which the device was busy.
steploop_slo_value gauge slo.value[slo] | Measured over the last 5 minutes.
steploop_slo_threshold gauge slo.threshold[slo] | Threshold in [slo] of the configuration.
steploop_slo_ok gauge promised.is_ok[slo] | 1: the SLO is met, or nothing was measured; 0: missed.
"""
# Of a server that answers for several models, those that routers and dashboards read by model.
TABLE_BY_MODEL = """
vllm:num_requests_waiting gauge waiting[model_name] | Requests in the queue.
vllm:num_requests_running gauge running[model_name] | Requests running.
vllm:prompt_tokens_total counter models.num_prompt_tokens[model_name] | Prompt tokens.
vllm:generation_tokens_total counter models.num_generation_tokens[model_name] | Generated tokens.
vllm:request_success_total counter finished[model_name,finished_reason] | Finished sequences.
vllm:time_to_first_token_seconds histogram models.ttft[model_name] | First byte of the head to first token.
vllm:e2e_request_latency_seconds histogram models.e2e[model_name] | First byte of the head to last token.
"""
_ROW = re.compile(r"^(\S+) (gauge|counter|histogram) ([a-z0-9_.]+)(?:\[([\w,]+)\])? \| ((?:.|\n    )+)$", re.MULTILINE)


class MetricFamily(NamedTuple):
    """A row of TABLE."""

    name: str
    kind: str
    path: tuple[str, ...]
    label: str
    text: str


def _families(table: str) -> tuple[MetricFamily, ...]:
    return tuple(
        MetricFamily(name, kind, tuple(path.split(".")), label, text.replace("\n    ", " "))
        for name, kind, path, label, text in _ROW.findall(table)
    )


FAMILIES = _families(TABLE)
BY_MODEL = {family.name: family for family in _families(TABLE_BY_MODEL)}


def _value_of(now: Mapping[str, Any], path: Sequence[str]) -> Any:
    """None: the page shows the family without a sample. Of a dict of objects: the attribute of each that has it."""
    value = now[path[0]]
    for name in path[1:]:
        if isinstance(value, dict):
            value = {key: getattr(one, name) for key, one in value.items() if getattr(one, name) is not None}
        elif value is not None:
            value = value[int(name)] if name.isdecimal() else getattr(value, name)
    return value


def _add_family(lines: list[str], family: MetricFamily, now: Mapping[str, Any], labels: Mapping[str, str]) -> None:
    """`labels` are every sample's."""
    lines += [f"# HELP {family.name} {family.text}", f"# TYPE {family.name} {family.kind}"]
    value = _value_of(now, family.path)
    if isinstance(value, dict):
        keys = value if family.kind == "histogram" else sorted(value)
        samples = {_pairs({**labels, **_labels_of(family, key)}): value[key] for key in keys}
    else:
        samples = {} if value is None else {_pairs(labels): value}
    for pairs, one in samples.items():
        if isinstance(one, Histogram):
            _add_buckets(lines, family.name, pairs, one)
        else:
            lines.append(f"{family.name}{_braced(pairs)} {float(one) if isinstance(one, bool) else one}")


def _labels_of(family: MetricFamily, key: Any) -> dict[str, str]:
    values = key if isinstance(key, tuple) else (key,)
    return dict(zip(family.label.split(","), map(str, values), strict=True))


def _add_buckets(lines: list[str], name: str, labels: str, histogram: Histogram) -> None:
    count = 0
    for bound, in_bucket in zip((*histogram.bounds, "+Inf"), histogram.counts, strict=True):
        count += in_bucket
        lines.append(f'{name}_bucket{{{labels}{"," if labels else ""}le="{bound}"}} {count}')
    lines += [f"{name}_sum{_braced(labels)} {histogram.total}", f"{name}_count{_braced(labels)} {count}"]


def _braced(pairs: str) -> str:
    return f"{{{pairs}}}" if pairs else ""


def _pairs(labels: Mapping[str, str]) -> str:
    return ",".join(f'{name}="{_escape(value)}"' for name, value in labels.items())


def _escape(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


class LoopLag:
    """Measures how late the loop calls a timer, from start() to close().

    Args:
        clock: monotonic seconds, finer than the loop's milliseconds.
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


class _Memory(ctypes.Structure):
    """nvmlMemory_t, in bytes."""

    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


class _Utilization(ctypes.Structure):
    """nvmlUtilization_t, in percent of the last sampling period."""

    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


class DeviceState(NamedTuple):
    """`utilization`: share of the last sampling period in which a kernel ran; None: the device does not tell (MIG)."""

    memory_used_bytes: int
    memory_total_bytes: int
    utilization: float | None


class DeviceMonitor:
    """NVIDIA's devices as their library (NVML) tells, by their number in the driver; without it, none."""

    def __init__(self) -> None:
        self._library: Any = None
        self._handles: dict[str, ctypes.c_void_p] = {}
        try:
            library = ctypes.CDLL(_NVML)
        except OSError:
            return  # no such devices here
        count = ctypes.c_uint()
        if library.nvmlInit_v2() != 0 or library.nvmlDeviceGetCount_v2(ctypes.byref(count)) != 0:
            return
        self._library = library
        found = ((str(i), ctypes.c_void_p(), ctypes.c_uint(i)) for i in range(count.value))
        self._handles = {
            number: handle
            for number, handle, index in found
            if library.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle)) == 0
        }

    def states(self) -> dict[str, DeviceState]:
        """Of the devices that answer."""
        found = {number: self._state(handle) for number, handle in self._handles.items()}
        return {number: state for number, state in found.items() if state is not None}

    def _state(self, handle: ctypes.c_void_p) -> DeviceState | None:
        memory, utilization = _Memory(), _Utilization()
        if self._library.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory)) != 0:
            return None
        is_told = self._library.nvmlDeviceGetUtilizationRates(handle, ctypes.byref(utilization)) == 0
        return DeviceState(memory.used, memory.total, utilization.gpu / 100 if is_told else None)


def resident_bytes() -> int:
    """Source: proc_pid_statm(5), the second field; without it the maximum so far, getrusage(2)."""
    try:
        return int(Path("/proc/self/statm").read_bytes().split()[1]) * resource.getpagesize()
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
