"""The scheduler's machines, with host memory and without it, for as long as a slow suite allows."""

import multiprocessing
from concurrent.futures import ProcessPoolExecutor

import pytest

from tests.simulate import run_machine_histories

NUM_STEPS = 100_000
SEEDS_APART = 1_000


@pytest.mark.slow
def test_a_hundred_thousand_steps() -> None:
    """In two processes, as they share nothing."""
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn")) as executor:
        halves = executor.map(run_machine_histories, (NUM_STEPS // 2,) * 2, (0, SEEDS_APART))
        assert all(5 < num_seeds <= SEEDS_APART for num_seeds in halves)  # each machine; no seed twice
