"""The scheduler's machines, with host memory and without it, for as long as a slow suite allows."""

import multiprocessing
from concurrent.futures import ProcessPoolExecutor

import pytest

from tests.core.drawn_rules import NUM_HISTORIES, NUM_STEPS
from tests.simulate import run_machine_of


@pytest.mark.slow
def test_a_hundred_thousand_steps() -> None:
    """In two processes, as they share nothing; each machine in turn, by seed."""
    num_seeds = 100_000 // (NUM_HISTORIES * NUM_STEPS)
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn")) as executor:
        assert sum(executor.map(run_machine_of, range(num_seeds))) == 100_000
