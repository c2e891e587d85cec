"""The scheduler's machines, with host memory and without it, for as long as a slow suite allows."""

import pytest

from tests.simulate import run_machine_histories


@pytest.mark.slow
def test_a_hundred_thousand_steps() -> None:
    assert run_machine_histories(100_000, first_seed=0) > 5  # each machine
