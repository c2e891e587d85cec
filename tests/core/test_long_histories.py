"""The scheduler's machines, with host memory and without it, for as long as a slow suite allows.

`make simulate` runs ten million steps.
"""

import multiprocessing
from concurrent.futures import ProcessPoolExecutor

import pytest

from tests.core.test_scheduler_machine import MACHINES
from tests.simulate import run_machine_of


@pytest.mark.slow
def test_every_machine_for_five_thousand_steps() -> None:
    """In two processes, as they share nothing; each machine in turn, by seed."""
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn")) as executor:
        num_steps = list(executor.map(run_machine_of, range(len(MACHINES))))
    assert num_steps == [5000] * len(MACHINES)
