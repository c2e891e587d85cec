"""The shown state of the scheduler, and the check of its accounting: each inconsistency is named."""

from collections.abc import Callable

import pytest

from core.engine import InconsistentAccounting, check_conservation, state_of
from core.scheduler import Scheduler
from core.types import Submit
from tests.fakes import EngineUnderTest, make_request, small_limits

pytestmark = pytest.mark.usefixtures("steps_in_flight")


def busy() -> EngineUnderTest:
    """Four sequences run, of three requests and two tenants; two more wait, one of them in a higher class."""
    under_test = EngineUnderTest(small_limits(max_batch_tokens=64))
    under_test.send(
        Submit(make_request("a", 9, 30, tenant="x", num_sequences=2)),
        Submit(make_request("b", 7, 30, tenant="y")),
        Submit(make_request("c", 5, 30, tenant="y")),
    )
    under_test.step(4)
    under_test.clock.advance(5.0)
    under_test.send(
        Submit(make_request("d", 6, 30, tenant="x", arrival_s=under_test.clock() - 2.0)),
        Submit(make_request("e", 8, 30, tenant="z", arrival_s=under_test.clock() - 1.0)),
    )
    under_test.step()
    return under_test


def test_snapshot_shows_queues_by_class_and_tenant_with_the_age_of_the_first() -> None:
    under_test = busy()
    shown = state_of(under_test.scheduler, under_test.clock())
    lines = [tuple(line.values())[:4] for line in shown["queues"]]
    assert lines == [(0, "x", 1, 6), (0, "z", 1, 8)]
    assert shown["queues"][0]["oldest_s"] == pytest.approx(shown["queues"][1]["oldest_s"] + 1.0)


def test_snapshot_shows_what_runs_and_what_it_holds(steps_in_flight: int) -> None:
    under_test = busy()
    shown = state_of(under_test.scheduler, under_test.clock())
    assert sorted((one["request_id"], one["index"]) for one in shown["running"]) == [
        ("a", 0),
        ("a", 1),
        ("b", 0),
        ("c", 0),
    ]
    assert all(one["num_tokens"] == one["num_computed_tokens"] + 2 - steps_in_flight for one in shown["running"])
    blocks = shown["blocks"]
    assert blocks["num_held"] == sum(one["num_blocks"] for one in shown["running"]) - blocks["num_shared"]
    assert blocks["num_shared"] == 2  # the full blocks of a's prompt, by both of its sequences
    assert blocks["num_held"] + blocks["num_cached"] + blocks["num_empty"] == blocks["num_all"]
    assert [(t["name"], t["num_requests"], t["num_running"]) for t in shown["tenants"]] == [
        ("x", 2, 2),
        ("y", 2, 2),
        ("z", 1, 0),
    ]


def test_snapshot_shows_the_last_step_and_what_it_was_predicted_to_take() -> None:
    under_test = busy()
    early = state_of(under_test.scheduler, under_test.clock())
    assert early["last_step"]["predicted_s"] is None
    assert (early["last_step"]["num_decoded_tokens"], early["last_step"]["num_prompt_tokens"]) == (4, 0)
    under_test.run()
    for number in range(12):  # enough steps with prompts
        under_test.send(Submit(make_request(f"p{number}", 40, 1)))
        under_test.run()
    late = state_of(under_test.scheduler, under_test.clock())
    assert late["step_cost"]["is_ready"]
    assert late["last_step"]["predicted_s"] == pytest.approx(late["last_step"]["measured_s"], rel=0.05)
    assert late["step_cost"]["fixed_s"] == pytest.approx(under_test.cost.fixed_s, rel=0.05)


def leak_a_block(scheduler: Scheduler) -> None:
    scheduler.pool.allocate(1)


def lose_a_slot(scheduler: Scheduler) -> None:
    scheduler.states.free_slots.append(2)


def lose_who_waits(scheduler: Scheduler) -> None:
    scheduler.states.waiting.remove(scheduler.states.groups["d"].sequences[0])


def lose_who_runs(scheduler: Scheduler) -> None:
    del scheduler.states.running[scheduler.states.groups["b"].sequences[0]]


def pause_twice(scheduler: Scheduler) -> None:
    scheduler.states.num_paused += 1


def let_a_tenant_leave(scheduler: Scheduler) -> None:
    scheduler.shares.leave(scheduler.shares.tenants()[0])


def lose_a_publication(scheduler: Scheduler) -> None:
    scheduler.pool._blocks.popitem()


@pytest.mark.parametrize(
    ("spoil", "claim"),
    [
        (leak_a_block, "blocks that are used"),
        (lose_a_slot, "slots in all"),
        (lose_who_waits, "sequences in the queue"),
        (lose_who_runs, "sequences that run"),
        (pause_twice, "requests that are paused"),
        (let_a_tenant_leave, "requests that tenants have"),
        (lose_a_publication, "blocks that are published"),
    ],
)
def test_inconsistent_accounting_is_named(spoil: Callable[[Scheduler], None], claim: str) -> None:
    scheduler = busy().scheduler
    check_conservation(scheduler)
    spoil(scheduler)
    with pytest.raises(InconsistentAccounting, match=claim):
        check_conservation(scheduler)
