"""The metrics page, read by the letter of the exposition format 0.0.4."""

import re
from collections import Counter, defaultdict

from prometheus_client.parser import text_string_to_metric_families

from core.types import Admitted, EngineStats, Prefilled, Usage
from server.observing.metrics import MAX_TENANTS, OTHER_TENANTS, Histogram, Metrics
from server.observing.slo import SloRules
from server.observing.timing import Stage, StageClock

NAME = r"[a-zA-Z_:][a-zA-Z0-9_:]*"
LABEL = r'[a-zA-Z_][a-zA-Z0-9_]*="(?:[^"\\\n]|\\["\\n])*"'
SAMPLE = re.compile(rf"({NAME})(?:{{({LABEL}(?:,{LABEL})*)}})? (\S+)")


def samples_of(page: bytes) -> dict[str, float]:
    """Each sample by its name and labels; fails where a line, a type or a histogram is not as the format has it."""
    text = page.decode()
    assert text.endswith("\n")
    kinds: dict[str, str] = {}
    samples: dict[str, float] = {}
    buckets: defaultdict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
    for line in text[:-1].split("\n"):
        if help_line := re.fullmatch(rf"# HELP ({NAME}) \S.*", line):
            assert help_line[1] not in kinds, "a family stands in one place"
        elif type_line := re.fullmatch(rf"# TYPE ({NAME}) (counter|gauge|histogram)", line):
            kinds[type_line[1]] = type_line[2]
            family = type_line[1]
        else:
            sample = SAMPLE.fullmatch(line)
            assert sample, line
            assert sample[1] == family or (
                kinds[family] == "histogram"
                and sample[1] in {f"{family}_{part}" for part in ("bucket", "sum", "count")}
            )
            key = f"{sample[1]}{{{sample[2] or ''}}}"
            assert key not in samples
            samples[key] = float(sample[3])
            if bound := re.search(r'\ble="([^"]*)"', sample[2] or ""):
                series = re.sub(r',?le="[^"]*"', "", key.removeprefix(f"{family}_bucket"))
                buckets[family, series].append((float(bound[1]), float(sample[3])))
    for (family, series), found in buckets.items():
        assert found == sorted(found), "bounds and counts grow"
        assert found[-1][0] == float("inf")
        assert found[-1][1] == samples[f"{family}_count{series}"]
    assert {family for family, _ in buckets} == {name for name, kind in kinds.items() if kind == "histogram"}
    return samples


def test_page_of_a_fresh_server_is_well_formed() -> None:
    samples = samples_of(Metrics().render(EngineStats(), 0, 0, Counter()))
    assert samples['vllm:kv_cache_usage_perc{model_name=""}'] == 0


def test_page_of_several_models_names_none_of_them_for_all() -> None:
    metrics = Metrics()
    metrics.model_name = None
    metrics.count_generation(Usage(num_prompt_tokens=3, num_completion_tokens=4), ended_after(2.5), "a")
    metrics.count_generation(Usage(num_prompt_tokens=1, num_completion_tokens=1), ended_after(0.5), "b")
    metrics.count_finished(["length"], "a")
    metrics.count_first_token(0.1, "b")
    samples = samples_of(metrics.render(EngineStats(), 0, 0, Counter()))
    for name, value in (
        ('generation_tokens_total{model_name="a"}', 4),
        ('prompt_tokens_total{model_name="b"}', 1),
        ('request_success_total{model_name="a",finished_reason="length"}', 1),
        ('time_to_first_token_seconds_count{model_name="b"}', 1),
        ('e2e_request_latency_seconds_sum{model_name="a"}', 2.5),
        ("num_preemptions_total{}", 0),
    ):
        assert samples[f"vllm:{name}"] == value
    assert "vllm:generation_tokens_total{}" not in samples


def test_names_of_any_characters_are_escaped() -> None:
    metrics = Metrics()
    metrics.model_name = 'a"b\\c\nd'
    metrics.refused.update(('x"y\n', "é}"))
    samples = samples_of(metrics.render(EngineStats(num_blocks=8, num_used_blocks=2), 3, 5, Counter(max_connections=1)))
    label = 'model_name="a\\"b\\\\c\\nd"'
    assert samples[f"vllm:kv_cache_usage_perc{{{label}}}"] == 0.25
    assert samples[f"steploop_connections_accepted_total{{{label}}}"] == 5
    assert samples[f'steploop_requests_refused_total{{{label},reason="x\\"y\\n"}}'] == 1
    assert samples[f'steploop_requests_refused_total{{{label},reason="é}}"}}'] == 1


def ended_after(seconds: float) -> StageClock:
    clock = StageClock(1.0)
    clock.end_s = 1.0 + seconds
    return clock


def test_generations_are_counted_with_their_time() -> None:
    metrics = Metrics()
    metrics.count_generation(Usage(num_prompt_tokens=3, num_completion_tokens=4), ended_after(2.5), "")
    metrics.count_generation(Usage(num_prompt_tokens=1, num_completion_tokens=1), StageClock(1.0), "")
    assert (metrics.num_prompt_tokens, metrics.num_generation_tokens, metrics.e2e.total) == (4, 5, 2.5)


def test_values_are_counted_one_by_one_whatever_their_neighbours_are() -> None:
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 0.5, 0.0, 1.5, 1.5, 1.5, 9.0):
        histogram.observe(value)
    assert (histogram.counts, histogram.total) == ([3, 3, 1], 14.5)
    histogram.observe(9.0)
    histogram.observe(1.0)
    assert (histogram.counts, histogram.total) == ([4, 3, 2], 24.5)


def count_request(metrics: Metrics, tenant: str = "local", **fields: object) -> None:
    clock = StageClock(0.0)
    clock.enter(Stage.QUEUE, 1.0)
    clock.on_engine_mark(Admitted("r", 3.0))
    clock.on_engine_mark(Prefilled("r", 3.5, 1, 0))
    clock.enter(Stage.DECODE, 3.5)
    clock.first_token_s = 3.5
    clock.enter(Stage.SETTLE, 5.5)
    clock.end_s = 5.5
    clock.finish(5.5)
    values = {"status": 200, "usage": Usage(3, 5), "error_code": None, "is_our_fault": False} | fields
    metrics.count_request(tenant=tenant, timings=clock, **values)  # type: ignore[arg-type]


def page_of(metrics: Metrics, stats: EngineStats | None = None) -> bytes:
    return metrics.render(stats or EngineStats(), 0, 0, Counter())


def test_prometheus_reads_every_sample_of_a_busy_server() -> None:
    metrics = Metrics()
    metrics.model_name = 'a"b'
    count_request(metrics, "acme")
    count_request(metrics, usage=None, status=429, error_code="rate_limit_exceeded")
    metrics.observe_step(EngineStats(num_steps=1, num_rows=3, num_prefill_rows=1, num_prompt_tokens=9))
    page = page_of(metrics)
    families = list(text_string_to_metric_families(page.decode()))
    samples = [sample for family in families for sample in family.samples]
    assert len(samples) == len(samples_of(page))
    assert all(sample.labels["model_name"] == 'a"b' for sample in samples)
    values = {(one.name, *sorted(one.labels.items())[:-1]): one.value for one in samples if len(one.labels) == 1}
    assert values["vllm:request_queue_time_seconds_sum",] == 2.0
    assert values["vllm:request_prefill_time_seconds_sum",] == 0.5
    assert values["vllm:request_decode_time_seconds_sum",] == 2.0


def test_stages_refusals_and_tenants_are_told_apart() -> None:
    metrics = Metrics()
    count_request(metrics, "acme")
    count_request(metrics, "acme", error_code="engine_error")
    count_request(metrics, usage=None, status=503, error_code="overloaded")
    samples = samples_of(page_of(metrics))
    label = 'model_name=""'
    assert samples[f'steploop_stage_seconds_sum{{{label},stage="queue"}}'] == 4.0
    assert samples[f'steploop_stage_seconds_count{{{label},stage="template"}}'] == 0
    assert samples[f'steploop_requests_refused_total{{{label},reason="overloaded"}}'] == 1
    assert samples[f'steploop_requests_failed_total{{{label},reason="engine_error"}}'] == 1
    assert samples[f'steploop_tenant_requests_total{{{label},tenant="acme"}}'] == 2
    assert samples[f'steploop_tenant_completion_tokens_total{{{label},tenant="acme"}}'] == 10
    assert samples[f'steploop_tenant_queue_seconds_total{{{label},tenant="acme"}}'] == 4.0
    assert not any('tenant="local"' in name for name in samples), "who was refused had nothing"


def test_tenants_beyond_the_first_are_counted_together() -> None:
    metrics = Metrics()
    for i in range(MAX_TENANTS + 9):
        count_request(metrics, f"t{i}")
        count_request(metrics, "t0")
    assert len(metrics.tenants) == MAX_TENANTS + 1
    assert metrics.tenants[OTHER_TENANTS].num_requests == 9
    assert metrics.tenants["t0"].num_requests == MAX_TENANTS + 10


def test_each_step_is_observed_once_with_its_rows_and_tokens() -> None:
    metrics = Metrics()
    first = EngineStats(num_steps=1, num_rows=3, num_prefill_rows=1, num_prompt_tokens=9, num_generated_tokens=2)
    then = EngineStats(num_steps=2, num_rows=6, num_prefill_rows=1, num_prompt_tokens=9, num_generated_tokens=5)
    for stats in (first, first, then, then):
        metrics.observe_step(stats)
    assert (metrics.step_tokens.total, sum(metrics.step_tokens.counts)) == (14, 2)
    assert (metrics.step_rows["prefill"].total, metrics.step_rows["decode"].total) == (1, 5)


def test_drafts_are_counted_by_drafter() -> None:
    stats = EngineStats(draft_tokens={"suffix": 9, "mtp": 4}, accepted_tokens={"suffix": 7, "mtp": 0})
    samples = samples_of(page_of(Metrics(), stats))
    told = {
        (kind, drafter): samples[f'steploop_{kind}_tokens_total{{model_name="",drafter="{drafter}"}}']
        for kind in ("draft", "accepted")
        for drafter in ("suffix", "mtp")
    }
    assert list(told.values()) == [9, 4, 7, 0]


def test_promises_are_told_with_what_was_measured() -> None:
    metrics = Metrics(SloRules(ttft_p95_ms=3000, latency_p50_ms=9000, error_rate=0.5), lambda: 10.0)
    count_request(metrics)
    count_request(metrics, error_code="engine_error", is_our_fault=True)
    samples = samples_of(page_of(metrics))
    told = {
        name: [
            samples.get(f'steploop_slo_{kind}{{model_name="",slo="{name}"}}') for kind in ("value", "threshold", "ok")
        ]
        for name in ("ttft_p95_ms", "latency_p50_ms", "error_rate", "tokens_per_s_p50")
    }
    assert told == {
        "ttft_p95_ms": [3500.0, 3000.0, 0.0],
        "latency_p50_ms": [5500.0, 9000.0, 1.0],
        "error_rate": [0.5, 0.5, 1.0],
        "tokens_per_s_p50": [2.0, None, None],
    }
