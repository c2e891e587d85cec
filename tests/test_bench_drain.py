"""A few of the thousand SIGTERMs under load that bench/drain.py sends: no stream is broken, and the bench can tell."""

from collections import Counter

from bench.drain import BROKEN, DONE, TOLD, UNREACHED_GRACE_S, RoundPlan, round_plans, run_rounds, table_of


def test_sigterm_under_load_breaks_no_stream() -> None:
    plans = [
        RoundPlan(grace_s=10.0, step_rate=500.0, signal_after_s=0.02, has_second=False, seed=1),
        RoundPlan(grace_s=0.0, step_rate=500.0, signal_after_s=0.05, has_second=False, seed=2),
        RoundPlan(grace_s=10.0, step_rate=0.0, signal_after_s=0.03, has_second=True, seed=3),
        RoundPlan(grace_s=0.02, step_rate=0.0, signal_after_s=0.0, has_second=False, seed=4),
    ]
    rounds = run_rounds(plans)
    assert [round_.faults for round_ in rounds] == [[], [], [], []]
    ends = sum((round_.ends for round_ in rounds), Counter[str]())
    assert ends[DONE]
    assert ends[TOLD]
    assert not ends[BROKEN]
    assert sum(row[1] for row in table_of(rounds).rows if isinstance(row[1], int)) == len(plans)


def test_clients_that_do_not_move_are_told_and_keep_no_server_from_its_end() -> None:
    plans = [
        RoundPlan(UNREACHED_GRACE_S, step_rate=0.0, signal_after_s=0.1, has_second=True, seed=5, has_idlers=True),
        RoundPlan(grace_s=0.02, step_rate=0.0, signal_after_s=0.1, has_second=False, seed=6, has_idlers=True),
    ]
    assert [round_.faults for round_ in run_rounds(plans)] == [[], []]


def test_plans_are_the_same_for_the_same_seed_and_cover_all_graces() -> None:
    plans = round_plans(100, 7)
    assert plans == round_plans(100, 7)
    assert {plan.grace_s for plan in plans} == {0.0, 0.02, 10.0, UNREACHED_GRACE_S}
    assert {plan.grace_s for plan in plans if plan.has_idlers} == {0.0, 0.02, UNREACHED_GRACE_S}
    assert all(plan.has_second for plan in plans if plan.grace_s == UNREACHED_GRACE_S)
    assert {plan.has_second for plan in plans} == {False, True}
