"""bench.scale on few tenants: simulated time, the same figures each time; and bench.lag on a real server, briefly."""

import json
from pathlib import Path

import pytest
import uvloop

from bench import lag, null_server, scale
from bench.results import Table, read_result, write_result
from core.plan import RunnerLimits
from core.simulation import CostModel, RooflineCost, Simulation
from tests.fakes import make_request, small_limits


def figures(path: Path) -> dict[str, Table]:
    return {table.title: table for table in read_result(path).tables}


def test_scale_gives_the_same_figures_each_time(tmp_path: Path) -> None:
    first, second = tmp_path / "first.json", tmp_path / "second.json"
    assert scale.main(["--quick", "--json", str(first)]) == 0
    assert scale.main(["--quick", "--json", str(second)]) == 0
    assert figures(first) == figures(second)


def test_scale_answers_every_request_of_the_rush_and_the_day(tmp_path: Path) -> None:
    out = tmp_path / "scale.json"
    assert scale.main(["--quick", "--json", str(out)]) == 0
    rush, day, total = figures(out).values()
    assert rush.rows[0][0] == scale.QUICK.num_tenants * scale.QUICK.streams
    hour_s = scale.QUICK.day_s / scale.NUM_HOURS
    shown = sum(float(row[1] or 0) * hour_s for row in day.rows)
    assert shown == pytest.approx(
        float(total.rows[0][0] or 0), abs=2
    )  # an hour whose requests began no step is left out


def test_measured_decode_steps_are_shown_beside_the_modelled_ones(tmp_path: Path) -> None:
    measured = tmp_path / "engine.json"
    columns = ("batch", "context", "step ms", "tokens/s")
    write_result(measured, "engine", "-", [Table("Decode", columns, ((1, 1000, 4.0, 250.0),))])
    ((batch, context, measured_ms, modelled_ms, ratio),) = scale.compare(measured).rows
    assert (batch, context, measured_ms) == (1, 1000, 4.0)
    assert modelled_ms == pytest.approx(1e3 * RooflineCost().seconds(1, 1000))
    assert ratio == pytest.approx(float(modelled_ms or 0) / 4.0)


def test_roofline_step_reads_its_weights_or_computes_whichever_takes_longer() -> None:
    cost = RooflineCost(weights_s=1.0, token_s=0.1, kv_token_s=0.01, launch_s=0.5, efficiency=0.5)
    assert cost.seconds(1, 0) == cost.seconds(10, 0) == 2.5
    assert cost.seconds(20, 100) == 0.5 + (2.0 + 1.0) / 0.5
    (trace,) = Simulation(small_limits(), cost, [make_request(num_prompt_tokens=8, max_tokens=1)]).run()
    assert trace.end_s == pytest.approx(cost.seconds(8, 8))


def test_runner_without_a_model_takes_the_steps_time() -> None:
    limits: RunnerLimits = small_limits()
    requests = [make_request(num_prompt_tokens=16, max_tokens=2)]
    (trace,) = Simulation(limits, CostModel(fixed_s=1.0, token_s=0.1), requests, runner=scale.TimedRunner).run()
    assert trace.end_s == pytest.approx(2.6 + 1.1)
    assert trace.token_ids == {0: [0, 0]}


def test_bodies_of_the_lag_bench_are_as_long_as_they_say() -> None:
    assert len(lag.long_text()) == lag.BODY_BYTES
    assert lag.BODY_BYTES - 2048 < len(lag.long_ids()) <= lag.BODY_BYTES
    messages = json.loads(lag.many_messages())["messages"]
    assert len(messages) * 4 < null_server.MAX_MODEL_LEN


@pytest.mark.slow
def test_lag_is_noted_while_long_bodies_are_posted() -> None:
    name, posted_per_s, *waits = uvloop.run(lag.measure(lag.CASES[3], 0.5))
    assert name == "4,080 messages"
    assert float(posted_per_s or 0) > 0
    assert len(waits) == 6
    assert all(float(wait or 0) > 0 for wait in waits)
