"""What every step reads lies in large pages where the system lets it, and is the same bytes."""

import mmap

import numpy as np
import pytest

from gpu import device
from gpu.device import LEAST_BYTES, MADV_COLLAPSE, PAGE_BYTES, use_huge_pages


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, int]]:
    """What the system was asked for: (address, bytes, advice)."""
    calls: list[tuple[int, int, int]] = []

    def advise(address: int, size_bytes: int, advice: int) -> int:
        calls.append((address, size_bytes, advice))
        return 0

    monkeypatch.setattr(device, "_madvise", lambda: advise)
    return calls


def test_whole_pages_around_the_bytes_are_asked_for(asked: list[tuple[int, int, int]]) -> None:
    assert use_huge_pages(3 * PAGE_BYTES + 64, PAGE_BYTES)
    assert use_huge_pages(4 * PAGE_BYTES, 2 * PAGE_BYTES)
    assert asked == [
        (3 * PAGE_BYTES, 2 * PAGE_BYTES, MADV_COLLAPSE),
        (4 * PAGE_BYTES, 2 * PAGE_BYTES, MADV_COLLAPSE),
    ]


def test_little_is_left_as_it_lies(asked: list[tuple[int, int, int]]) -> None:
    assert not use_huge_pages(PAGE_BYTES, LEAST_BYTES - 1)
    assert not asked


def test_a_refusal_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "_madvise", lambda: lambda *_: -1)
    assert not use_huge_pages(PAGE_BYTES, PAGE_BYTES)
    monkeypatch.setattr(device, "_madvise", lambda: None)
    assert not use_huge_pages(PAGE_BYTES, PAGE_BYTES)


def test_the_bytes_stay_what_they_are() -> None:
    with mmap.mmap(-1, 4 * PAGE_BYTES) as memory:
        numbers = np.frombuffer(memory, dtype=np.int64)
        numbers[:] = np.arange(len(numbers))
        use_huge_pages(numbers.ctypes.data, numbers.nbytes)
        assert np.array_equal(numbers, np.arange(len(numbers)))
        del numbers
