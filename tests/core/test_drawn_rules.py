"""Machines that are run from a seed alone."""

import pytest

from tests.core.drawn_rules import drawn_rule, drawn_start, run_seeded


class CountingMachine:
    """Breaks at three."""

    limit = 3
    count = 0

    @drawn_start(first=(0, 1))
    def begin(self, first: int) -> None:
        self.count = first

    @drawn_rule(is_vital=True, by=(1, 2))
    def add(self, by: int) -> None:
        self.count += by

    @drawn_rule(lambda self: self.count > 1)
    def clear(self) -> None:
        assert self.count > 1
        self.count = 0

    def everything_holds(self) -> None:
        assert self.count < self.limit

    def teardown(self) -> None:
        pass


class BoundlessMachine(CountingMachine):
    limit = 10**9


def failure(seed: int) -> list[str]:
    with pytest.raises(AssertionError) as caught:
        run_seeded(seed, CountingMachine)
    (note,) = caught.value.__notes__
    return str(note).splitlines()


def test_what_fails_is_told_as_the_calls_that_led_to_it() -> None:
    lines = failure(seed=3)
    assert lines[0] == "machine = CountingMachine()"
    assert lines[-1] == "machine.teardown()"
    machine = CountingMachine()
    for line in lines[1:-1]:
        machine.everything_holds()
        exec(line, {"machine": machine})
    with pytest.raises(AssertionError):
        machine.everything_holds()


def test_a_seed_says_all() -> None:
    assert failure(seed=4) == failure(seed=4)
    assert len({tuple(failure(seed)) for seed in range(20)}) > 1


def test_a_rule_is_called_where_it_may_be() -> None:
    assert run_seeded(1, BoundlessMachine) == 5_000
