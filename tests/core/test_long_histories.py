"""The scheduler's machines, with host memory and without it, for as long as a slow suite allows."""

import itertools
import multiprocessing
from concurrent.futures import ProcessPoolExecutor

import pytest

from tests.core.scheduler_machine import run_machine
from tests.core.test_scheduler_machine import MACHINES
from tests.simulate import run_machine_of, seeds_for

NUM_STEPS = 100_000
SEEDS_APART = 1_000


def run_by_hypothesis(num_steps: int, first_seed: int) -> int:
    """Returns how many seeds that took."""
    seeds = itertools.count(first_seed)
    return seeds_for(num_steps, (run_machine(seed, MACHINES[seed % len(MACHINES)]) for seed in seeds))


@pytest.mark.slow
def test_a_hundred_thousand_steps() -> None:
    """In two processes, as they share nothing."""
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn")) as executor:
        halves = executor.map(run_by_hypothesis, (NUM_STEPS // 2,) * 2, (0, SEEDS_APART))
        assert all(5 < num_seeds <= SEEDS_APART for num_seeds in halves)  # each machine; no seed twice


@pytest.mark.slow
def test_each_machine_from_a_seed_alone() -> None:
    assert sum(map(run_machine_of, range(len(MACHINES)))) == len(MACHINES) * 5_000
