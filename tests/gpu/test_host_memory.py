"""While a process imports, other threads read a file and get memory for it; what is planned counts that as free."""

import mmap
import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from gpu import PUTS_OFF, host_memory
from gpu.device import LEAST_BYTES, HugePages
from gpu.host_memory import PAGE_BYTES, host_room_bytes, reading_ahead

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")


def resident_bytes(address: int) -> int:
    """Of the mapping that has it."""
    found = None
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if place := re.match("([0-9a-f]+)-([0-9a-f]+) ", line):
            found = int(place[1], 16) <= address < int(place[2], 16)
        elif found and line.startswith("Rss:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("not mapped")


@pytest.fixture(autouse=True)
def nothing_populated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "_populated_bytes", 0)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "weights").write_bytes(bytes(5 * PAGE_BYTES + 1))
    return tmp_path / "weights"


def test_a_file_is_read_once_to_its_end_or_not_at_all(file: Path) -> None:
    is_ending = threading.Event()
    with file.open("rb", buffering=0) as opened:
        host_memory._read(opened, is_ending)
        assert opened.tell() == 5 * PAGE_BYTES + 1
        opened.seek(0)
        is_ending.set()
        host_memory._read(opened, is_ending)
        assert opened.tell() == 0


def test_memory_has_its_pages_before_it_is_written_and_counts_as_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "_available_bytes", lambda: 1000)
    memory = mmap.mmap(-1, 7 * PAGE_BYTES, mmap.MAP_PRIVATE)
    host_memory._populate(memory, threading.Event())
    address = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
    whole = (address + 7 * PAGE_BYTES) // PAGE_BYTES - -(-address // PAGE_BYTES)
    assert resident_bytes(address) == whole * PAGE_BYTES
    assert host_room_bytes() == 1000 + whole * PAGE_BYTES


def test_a_file_has_memory_where_twice_as_much_is_free(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    size_bytes = os.path.getsize(file)
    for free_bytes, gets_memory, is_given in (
        (2 * size_bytes, True, True),
        (2 * size_bytes - 1, True, False),
        (2 * size_bytes, False, False),
    ):
        monkeypatch.setattr(host_memory, "host_room_bytes", lambda free_bytes=free_bytes: free_bytes)
        with reading_ahead(file, gets_memory) as memory:
            assert (memory is not None) == is_given
            assert memory is None or len(memory) >= size_bytes + PAGE_BYTES
        assert host_memory._populated_bytes == 0


READ_AHEAD = """
import sys
from pathlib import Path
from gpu.host_memory import reading_ahead
with reading_ahead(None, gets_memory=False):
    pass
print("torch" in sys.modules, "libtorch_cpu.so" in Path("/proc/self/maps").read_text())
import gpu.device, torch
print(torch.rand(1, generator=torch.Generator().manual_seed(0)).item() < 1)
"""


@pytest.mark.skipif(not PUTS_OFF, reason="another build of torch")
def test_torchs_library_is_loaded_before_torch_is_imported() -> None:
    found = subprocess.run([sys.executable, "-c", READ_AHEAD], check=True, capture_output=True, text=True)
    assert found.stdout.split() == ["False", "True", "True"]


def test_a_file_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), reading_ahead(tmp_path / "none", gets_memory=True):
        pass


def test_tensors_of_any_size_lie_in_memory_that_was_got_and_its_rest_is_given_back() -> None:
    memory, pages = mmap.mmap(-1, 9 * PAGE_BYTES, mmap.MAP_PRIVATE), HugePages()
    host_memory._populate(memory, threading.Event())
    pages.begin_with(memory)
    first, second = pages.empty((3 * PAGE_BYTES + 1,), torch.uint8), pages.empty((LEAST_BYTES,), torch.uint8)
    assert first.data_ptr() % PAGE_BYTES == 0
    assert first.data_ptr() + len(first) <= second.data_ptr() < first.data_ptr() + 4 * PAGE_BYTES
    first.fill_(1)
    second.fill_(2)
    pages.release_rest()
    assert resident_bytes(first.data_ptr()) == 4 * PAGE_BYTES
    assert first.eq(1).all()
    assert second.eq(2).all()
    assert pages.empty((PAGE_BYTES,), torch.uint8).sum() == 0  # behind the others, and new
