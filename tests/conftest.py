"""Settings of the process, before anything is imported, and what every test leaves as it was."""

import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

# Triton decides when it is imported whether its kernels are interpreted, on tensors of a CPU. Whoever tests them on a
# device sets it to 0.
os.environ.setdefault("TRITON_INTERPRET", "1")

LEVELS = {logging.getLogger(name): logging.getLogger(name).level for name in (None, "server", "core", "gpu", "bench")}

TESTS = Path(__file__).parent
# Folders with the longest files first; those of the benches before them
FOLDERS = ("e2e", "deploy", "gpu", "core", "server")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Processes that share the tests take files in this order: at the end none is left alone with a long one."""
    items.sort(key=lambda item: _folder_place(item.path))


def _folder_place(path: Path) -> int:
    folder = path.relative_to(TESTS).parts[0]
    return FOLDERS.index(folder) if folder in FOLDERS else -1


@pytest.fixture(autouse=True)
def _restore_log_levels() -> Iterator[None]:
    """A server that ran in this process has set them, and tests after it would hear more."""
    yield
    for logger, level in LEVELS.items():
        logger.setLevel(level)
