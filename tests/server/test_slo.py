"""Promises: their thresholds, the window, and what a file may say of them."""

from pathlib import Path

import pytest

from core.errors import StartupError
from server.config_sources import load_config
from server.observing.slo import MAX_SAMPLES, WINDOW_S, SloMonitor, SloRules


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_percentiles_are_ranks_of_the_samples() -> None:
    monitor = SloMonitor(SloRules(), Clock())
    for i in range(1, 101):
        monitor.observe(i / 1000, i / 100, float(i), has_failed=i > 90)
    values = {name: state.value for name, state in monitor.states(3, 2**20).items()}
    assert values == {
        "ttft_p50_ms": 50.0,
        "ttft_p95_ms": 95.0,
        "latency_p50_ms": 500.0,
        "latency_p95_ms": 950.0,
        "tokens_per_s_p50": 50.0,
        "error_rate": 0.1,
        "queue_depth": 3.0,
        "memory_mib": 1.0,
    }


def test_rate_is_promised_at_least_and_all_else_at_most() -> None:
    monitor = SloMonitor(SloRules(tokens_per_s_p50=20, ttft_p50_ms=20, queue_depth=0), Clock())
    monitor.observe(0.02, None, 19.0, False)
    states = monitor.states(1, 0)
    assert [states[name].is_ok for name in ("tokens_per_s_p50", "ttft_p50_ms", "queue_depth", "memory_mib")] == [
        False,
        True,
        False,
        True,
    ]


def test_what_was_not_measured_breaks_no_promise() -> None:
    states = SloMonitor(SloRules(ttft_p50_ms=1, error_rate=0), Clock()).states(0, 0)
    assert all(state.is_ok for state in states.values())


def test_samples_leave_with_the_window_and_are_bounded() -> None:
    clock = Clock()
    monitor = SloMonitor(SloRules(), clock)
    for _ in range(2 * MAX_SAMPLES):
        monitor.observe(1.0, 1.0, 1.0, True)
    assert len(monitor._samples) == MAX_SAMPLES
    clock.now_s = WINDOW_S + 1
    monitor.observe(0.5, None, None, False)
    states = monitor.states(0, 0)
    assert (states["ttft_p95_ms"].value, states["error_rate"].value) == (500.0, 0.0)


def test_file_says_what_is_promised(tmp_path: Path) -> None:
    path = tmp_path / "steploop.toml"
    path.write_text("port = 8080\n[slo]\nttft_p95_ms = 500\nerror_rate = 0.01\n")
    assert load_config({"config_file": str(path)}, {}).slo == SloRules(ttft_p95_ms=500, error_rate=0.01)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[slo]\nttft_p99_ms = 5", "unknown field `ttft_p99_ms`"),
        ("[slo]\nttft_p95_ms = 0", "> 0"),
        ("[slo]\nerror_rate = 2", "<= 1"),
        ("slo = 3", "Expected `object`"),
    ],
)
def test_file_that_promises_nonsense_is_refused_with_what_is_known(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "steploop.toml"
    path.write_text(text)
    with pytest.raises(StartupError) as caught:
        load_config({"config_file": str(path)}, {})
    assert said in caught.value.cause
    assert "ttft_p95_ms" in caught.value.fix
