"""Settings of the process, before anything is imported, and what every test leaves as it was."""

import logging
import os
from collections.abc import Iterator

import pytest

# Triton decides when it is imported whether its kernels are interpreted, on tensors of a CPU. Whoever tests them on a
# device sets it to 0.
os.environ.setdefault("TRITON_INTERPRET", "1")

LEVELS = {logging.getLogger(name): logging.getLogger(name).level for name in (None, "server", "core", "gpu", "bench")}


@pytest.fixture(autouse=True)
def _restore_log_levels() -> Iterator[None]:
    """A server that ran in this process has set them, and tests after it would hear more."""
    yield
    for logger, level in LEVELS.items():
        logger.setLevel(level)
