"""The metrics page, read by the letter of the exposition format 0.0.4."""

import re
from collections import Counter, defaultdict

from core.types import EngineStats, Usage
from server.metrics import MAX_UNKNOWN_FIELDS, Histogram, Metrics
from server.timing import StageClock

NAME = r"[a-zA-Z_:][a-zA-Z0-9_:]*"
LABEL = r'[a-zA-Z_][a-zA-Z0-9_]*="(?:[^"\\\n]|\\["\\n])*"'
SAMPLE = re.compile(rf"({NAME})(?:{{({LABEL}(?:,{LABEL})*)}})? (\S+)")


def samples_of(page: bytes) -> dict[str, float]:
    """Each sample by its name and labels; fails where a line, a type or a histogram is not as the format has it."""
    text = page.decode()
    assert text.endswith("\n")
    kinds: dict[str, str] = {}
    samples: dict[str, float] = {}
    buckets: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
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
            key = f"{sample[1]}{{{sample[2]}}}"
            assert key not in samples
            samples[key] = float(sample[3])
            if bound := re.search(r'\ble="([^"]*)"', sample[2] or ""):
                buckets[family].append((float(bound[1]), float(sample[3])))
    for family, found in buckets.items():
        assert found == sorted(found), "bounds and counts grow"
        assert found[-1][0] == float("inf")
        (count,) = [value for key, value in samples.items() if key.startswith(f"{family}_count{{")]
        assert found[-1][1] == count
    assert set(buckets) == {name for name, kind in kinds.items() if kind == "histogram"}
    return samples


def test_page_of_a_fresh_server_is_well_formed() -> None:
    samples = samples_of(Metrics().render(EngineStats(), 0, 0, Counter()))
    assert samples['vllm:kv_cache_usage_perc{model_name=""}'] == 0


def test_names_of_any_characters_are_escaped() -> None:
    metrics = Metrics()
    metrics.model_name = 'a"b\\c\nd'
    metrics.count_unknown_fields(('x"y\n', "é}"))
    samples = samples_of(metrics.render(EngineStats(num_blocks=8, num_used_blocks=2), 3, 5, Counter(max_connections=1)))
    label = 'model_name="a\\"b\\\\c\\nd"'
    assert samples[f"vllm:kv_cache_usage_perc{{{label}}}"] == 0.25
    assert samples[f"steploop_connections_accepted_total{{{label}}}"] == 5
    assert samples[f'steploop_unknown_fields_total{{{label},field="x\\"y\\n"}}'] == 1
    assert samples[f'steploop_unknown_fields_total{{{label},field="é}}"}}'] == 1


def test_histogram_counts_a_bound_into_its_bucket() -> None:
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 2.0, 9.0):
        histogram.observe(value)
    assert (histogram.counts, histogram.total) == ([2, 2, 1], 14.0)


def ended_after(seconds: float) -> StageClock:
    clock = StageClock(1.0)
    clock.end_s = 1.0 + seconds
    return clock


def test_generations_are_counted_with_their_time() -> None:
    metrics = Metrics()
    metrics.count_generation(Usage(num_prompt_tokens=3, num_completion_tokens=4), ended_after(2.5))
    metrics.count_generation(Usage(num_prompt_tokens=1, num_completion_tokens=1), StageClock(1.0))
    assert (metrics.num_prompt_tokens, metrics.num_generation_tokens, metrics.e2e.total) == (4, 5, 2.5)


def test_unknown_fields_beyond_the_first_names_are_counted_together() -> None:
    metrics = Metrics()
    for i in range(MAX_UNKNOWN_FIELDS + 5):
        metrics.count_unknown_fields((f"field{i}", "field0", "x" * 500))
    assert len(metrics.unknown_fields) == MAX_UNKNOWN_FIELDS + 1
    assert sum(metrics.unknown_fields.values()) == 3 * (MAX_UNKNOWN_FIELDS + 5)
    assert metrics.unknown_fields["field0"] == MAX_UNKNOWN_FIELDS + 6
    assert max(map(len, metrics.unknown_fields)) == 64


def test_values_are_counted_one_by_one_whatever_their_neighbours_are() -> None:
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 0.5, 0.0, 1.5, 1.5, 1.5, 9.0):
        histogram.observe(value)
    assert (histogram.counts, histogram.total) == ([3, 3, 1], 14.5)
    histogram.observe(9.0)
    histogram.observe(1.0)
    assert (histogram.counts, histogram.total) == ([4, 3, 2], 24.5)
