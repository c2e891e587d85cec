"""The scheduler's machines, with host memory and without it, for as long as a slow suite allows.

`make simulate` runs ten million steps.
"""

import multiprocessing
from concurrent.futures import ProcessPoolExecutor

import pytest

from tests.core.drawn_rules import NUM_HISTORIES, NUM_STEPS
from tests.simulate import run_machine_of


@pytest.mark.slow
def test_fifty_thousand_steps() -> None:
    """In two processes, as they share nothing; each machine in turn, by seed."""
    num_seeds = 50_000 // (NUM_HISTORIES * NUM_STEPS)
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn")) as executor:
        assert sum(executor.map(run_machine_of, range(num_seeds))) == 50_000
