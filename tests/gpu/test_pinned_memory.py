"""Exactly so many bytes are pinned, where they lie; the driver is the test's."""

import mmap

import pytest
import torch

from gpu.streams import pinned_for_good


class Cudart:
    """Notes what it is asked to pin, and says no where there is more than it has."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, room_bytes: int) -> None:
        self.pinned: list[tuple[int, int, int]] = []
        self._room_bytes = room_bytes
        monkeypatch.setattr(torch.cuda, "cudart", lambda: self)
        monkeypatch.setattr(torch.cuda, "check_error", self.check)

    def cudaHostRegister(self, address: int, size_bytes: int, flags: int) -> int:  # noqa: N802
        self.pinned.append((address, size_bytes, flags))
        return 0 if size_bytes <= self._room_bytes else 2

    def check(self, error: int) -> None:
        if error:
            raise RuntimeError("out of memory (2)")


def test_as_much_is_pinned_as_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    cudart = Cudart(monkeypatch, room_bytes=1 << 30)
    size_bytes = 5 * 2**20 + 24  # torch's own allocator makes 8 MiB of it
    memory = pinned_for_good(size_bytes)
    assert cudart.pinned == [(memory.data_ptr(), size_bytes, 0)]
    assert memory.data_ptr() % mmap.PAGESIZE == 0
    assert not memory.any()
    assert memory.fill_(7).sum() == 7 * size_bytes


def test_that_it_cannot_be_pinned_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    Cudart(monkeypatch, room_bytes=100)
    with pytest.raises(RuntimeError, match="out of memory"):
        pinned_for_good(101)
