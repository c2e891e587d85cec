"""Gives back the memory that starting needed, and serving does not. Thread: engine (at start, and idle).

Importing torch runs its initialisers once, and LLVM compiles and links kernels once: some 130 MiB of their files stay
resident after that. What is dropped of them comes back from the file when it is run again, page by page. And what is
freed between pieces that stay, the allocator keeps: 27 to 40 MiB once a 0.5B model's weights are packed.
"""

import ctypes
import re
from collections.abc import Iterator
from pathlib import Path

_SMAPS = Path("/proc/self/smaps")  # proc_pid_smaps(5)
_MAPPING = re.compile(r"([0-9a-f]+)-([0-9a-f]+) (\S{4}) \S+ \S+ \d+ +/.*\.so[.\d]*$")
_COUNT = re.compile(r"(Anonymous|Rss): +(\d+) kB$")
_MADV_DONTNEED = 4  # madvise(2)


def drop_code_pages() -> int:
    """Returns how many bytes were resident of what was dropped; 0 where the system does not tell.

    A mapping of which a page was written to, as the loader does where it relocates, is left alone: it would not come
    back from the file.
    """
    try:
        lines = _SMAPS.read_text(errors="replace").splitlines()
    except OSError:
        return 0
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return sum(
        resident_bytes
        for start, size, resident_bytes in _clean_mappings(lines)
        if madvise(start, size, _MADV_DONTNEED) == 0
    )


def trim_heap() -> None:
    """Give the system back what the allocator keeps of freed memory, where it is glibc's; malloc_trim(3)."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(ctypes.c_size_t(0))


def _clean_mappings(lines: list[str]) -> Iterator[tuple[int, int, int]]:
    """(address, bytes, resident bytes) of libraries' mappings that cannot be written to, and were not."""
    found: tuple[int, int] | None = None
    resident_bytes = 0
    for line in lines:
        if match := _MAPPING.match(line):
            start, end = int(match[1], 16), int(match[2], 16)
            found = None if "w" in match[3] else (start, end - start)
        elif re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            found = None
        elif found is not None and (count := _COUNT.match(line)):
            if count[1] == "Rss":
                resident_bytes = int(count[2]) * 1024
            elif count[2] == "0" and resident_bytes:
                yield (*found, resident_bytes)
