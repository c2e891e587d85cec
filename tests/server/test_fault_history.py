"""Histories of every fault at once; `make simulate` runs more of them, `make simulate ARGS="--seed N"` one again."""

import logging
from collections.abc import Iterator

import pytest

from tests.simulate import run_fault_histories

EVENTS = {
    *("DELETE", "stream reset", "left", "paused", "looked", "cache cleared", "reload", "reload refused"),
    *("guilty step", "step out of memory", "result unreadable", "failed row", "device lost"),
    *("prompt that raises", "prompt that fails", "prompt too long", "unknown model", "bad field", "wrong key"),
    *("body that breaks off", "stalled", "disk hung"),
}


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """Each fault is logged, with its traceback."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.slow
def test_histories_of_faults_of_every_kind_leave_nothing_and_count_each_token_once() -> None:
    tally = run_fault_histories(range(100, 124))
    assert tally.num_requests >= 24 * 100
    assert tally.num_preemptions
    assert tally.num_restored_blocks
    assert {event for event, count in tally.events.items() if count} == EVENTS
    assert {200, 400, 401, 404, 408, 429, 499, 500, 503} <= tally.statuses.keys()
