"""A few of the thousand SIGTERMs under load that bench/drain.py sends: no stream is broken, and the bench can tell."""

from collections import Counter

from bench.drain import BROKEN, DONE, TOLD, RoundPlan, round_plans, run_rounds, table_of


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


def test_plans_are_the_same_for_the_same_seed_and_cover_all_graces() -> None:
    plans = round_plans(100, 7)
    assert plans == round_plans(100, 7)
    assert {plan.grace_s for plan in plans} == {0.0, 0.02, 10.0}
    assert {plan.has_second for plan in plans} == {False, True}
