"""What tests of a whole server must leave as it was."""

import gc
import signal
import sys
from collections.abc import Iterator

import pytest


@pytest.fixture
def _keep_interpreter_settings() -> Iterator[None]:
    """A server sets these for its whole process."""
    thresholds, interval = gc.get_threshold(), sys.getswitchinterval()
    yield
    gc.unfreeze()
    gc.set_threshold(*thresholds)
    sys.setswitchinterval(interval)


@pytest.fixture
def _keep_signal_handlers() -> Iterator[None]:
    """A server that has ended leaves its signals ignored, and so would the processes that later tests start."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)
