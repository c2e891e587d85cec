"""How much host memory this process can still allocate, and memory for weights before torch is there. Imports no torch.

Within control groups and `ulimit -v`. Thread: any.
"""

import ctypes
import io
import mmap
import os
import resource
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path

from gpu import load_library

MEMORY_INFO = Path("/proc/meminfo")
CGROUP = Path("/sys/fs/cgroup")
PROCESS_CGROUPS, PROCESS_SIZES = Path("/proc/self/cgroup"), Path("/proc/self/statm")
UNLIMITED = 1 << 62
PAGE_BYTES = 2 * 1024**2  # large ones
READ_BYTES = 4 * 1024**2  # at a time
ADVISED_BYTES = 1024**2  # Linux reads no more at a time than a device takes
MADV_HUGEPAGE, MADV_POPULATE_WRITE = 14, 23  # madvise(2); the second since Linux 5.14


_populated_bytes = 0  # by reading_ahead, for weights that are still to be planned


def host_room_bytes() -> int:
    """What can still be allocated, with what `reading_ahead` has got."""
    return min(_available_bytes(), _cgroup_room_bytes(), _address_room_bytes()) + _populated_bytes


def host_bytes() -> int:
    """The host's whole memory."""
    return int(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


def _available_bytes() -> int:
    """Source: proc(5), MemAvailable: free plus what the kernel can drop, in KiB."""
    try:
        for line in MEMORY_INFO.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass  # not Linux: POSIX knows the total only
    return host_bytes()


def _cgroup_room_bytes() -> int:
    """The least room in the process's control group and all above it, in cgroup v1 and v2.

    Source: cgroups(7), /proc/[pid]/cgroup. In a container the path may be the host's: a missing group has no limit, and
    the root of the mounted tree is the container's own group.
    """
    try:
        lines = PROCESS_CGROUPS.read_text().splitlines()
    except OSError:
        lines = []
    room_bytes = UNLIMITED
    for line in [*lines, "0::/"]:
        _, controllers, path = line.split(":", 2)
        parts = Path(path.lstrip("/"))
        groups = (parts, *parts.parents)
        if controllers == "":
            names = ("memory.max", "memory.current", "inactive_file")
            for root in (CGROUP, CGROUP / "unified"):  # alone, or beside those of v1
                room_bytes = min([room_bytes, *(_room_of(root / group, *names) for group in groups)])
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            room_bytes = min([room_bytes, *(_room_of(CGROUP / "memory" / group, *names) for group in groups)])
    return room_bytes


def _room_of(group: Path, limit_name: str, used_name: str, dropped_name: str) -> int:
    """What a control group's limit leaves; cached files, which the kernel can drop, do not count as used."""
    try:
        limit, used_bytes = (group / limit_name).read_text().strip(), int((group / used_name).read_text())
    except (OSError, ValueError):
        return UNLIMITED
    if limit == "max":
        return UNLIMITED
    dropped_bytes = 0
    with suppress(OSError, ValueError, StopIteration):
        lines = (group / "memory.stat").read_text().splitlines()
        dropped_bytes = int(next(line.split()[1] for line in lines if line.startswith(f"{dropped_name} ")))
    return max(0, int(limit) - max(0, used_bytes - dropped_bytes))


def _address_room_bytes() -> int:
    """What ulimit -v leaves beside the memory that is mapped already."""
    limit_bytes, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit_bytes == resource.RLIM_INFINITY:
        return UNLIMITED
    try:
        mapped_bytes = int(PROCESS_SIZES.read_text().split()[0]) * resource.getpagesize()
    except OSError:
        mapped_bytes = 0
    return max(0, limit_bytes - mapped_bytes)


@contextmanager
def reading_ahead(file: Path | None, gets_memory: bool) -> Iterator[mmap.mmap | None]:
    """Load torch's library in another thread, and get large pages for what a file holds; read it in a second one.

    Yields private memory for the file's bytes, to write to, with its pages or not; None: there is not twice as much, or
    the system is not Linux.

    Raises:
        OSError: the file cannot be opened.
    """
    global _populated_bytes
    is_ending, memory = threading.Event(), None
    work: list[list[Callable[[], None]]] = [[load_library]]  # of each thread
    with nullcontext() if file is None else file.open("rb", buffering=0) as opened:
        size_bytes = 0 if opened is None else os.fstat(opened.fileno()).st_size
        if gets_memory and sys.platform == "linux" and 2 * size_bytes <= host_room_bytes():
            memory = mmap.mmap(-1, (size_bytes // PAGE_BYTES + 2) * PAGE_BYTES, mmap.MAP_PRIVATE)
            work[0].append(partial(_populate, memory, is_ending))
        if opened is not None:
            work.append([partial(_read, opened, is_ending)])
        threads = [threading.Thread(target=_in_turn, args=one, daemon=True) for one in work]
        for thread in threads:
            thread.start()
        try:
            yield memory
        finally:
            is_ending.set()
            for thread in threads:
                thread.join()
            _populated_bytes = 0


def _in_turn(*work: Callable[[], None]) -> None:
    for one in work:
        one()


def _read(file: io.FileIO, is_ending: threading.Event) -> None:
    buffer = bytearray(READ_BYTES)
    if sys.platform == "linux":  # large reads, before anything waits for one: a sixth of the CPU time
        for start in range(0, os.fstat(file.fileno()).st_size, ADVISED_BYTES):
            if not is_ending.is_set():
                os.posix_fadvise(file.fileno(), start, ADVISED_BYTES, os.POSIX_FADV_WILLNEED)
    with suppress(OSError):  # told where the weights are read
        while not is_ending.is_set() and file.readinto(buffer):
            pass


def _populate(memory: mmap.mmap, is_ending: threading.Event) -> None:
    global _populated_bytes
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    first, end = -(-address // PAGE_BYTES) * PAGE_BYTES, (address + len(memory)) // PAGE_BYTES * PAGE_BYTES
    advise = ctypes.CDLL(None).madvise  # without the GIL, which Python's holds
    advise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    advise(first, end - first, MADV_HUGEPAGE)
    for start in range(first, end, PAGE_BYTES):  # one by one: what else wants to map memory waits
        if is_ending.is_set() or advise(start, PAGE_BYTES, MADV_POPULATE_WRITE):
            return
        _populated_bytes += PAGE_BYTES
