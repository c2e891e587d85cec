"""Waiting for another process: the one place in the tests where time passes, and always with a bound."""

import time
from collections.abc import Callable
from typing import TypeVar

INTERVAL_S = 0.02
NUM_ATTEMPTS = 9000  # three minutes, on a machine that does nothing else

T = TypeVar("T")


def wait_for(read: Callable[[], T | None], what: Callable[[], str]) -> T:
    """The first value of read() that is neither None nor false.

    Args:
        what: says for the failure what was waited for, and how things stood.
    """
    for _ in range(NUM_ATTEMPTS):
        value = read()
        if value:
            return value
        time.sleep(INTERVAL_S)
    raise AssertionError(f"waited in vain for {what()}")
