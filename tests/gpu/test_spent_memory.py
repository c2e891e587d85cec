"""What starting needed goes, and the process goes on."""

import subprocess
import sys

from gpu.device import _clean_mappings

MAPPED = """\
7f0000000000-7f0000002000 r-xp 00001000 fe:00 11  /usr/lib/libfirst.so.3.1
Rss:                   8 kB
Anonymous:             0 kB
7f0000002000-7f0000003000 r--p 00003000 fe:00 11  /usr/lib/libfirst.so.3.1
Rss:                   4 kB
Anonymous:             4 kB
7f0000003000-7f0000004000 rw-p 00004000 fe:00 11  /usr/lib/libfirst.so.3.1
Rss:                   4 kB
Anonymous:             0 kB
7f0000004000-7f0000005000 r-xp 00000000 00:00 0  [vdso]
Rss:                   4 kB
Anonymous:             0 kB
7f0000005000-7f0000006000 r--p 00000000 fe:00 12  /models/one/model.safetensors
Rss:                   4 kB
Anonymous:             0 kB
7f0000006000-7f0000007000 r-xp 00000000 fe:00 13  /usr/lib/second.cpython-311.so
Rss:                   0 kB
Anonymous:             0 kB
"""

DROPS = """
import torch
from gpu.device import drop_code_pages
first = drop_code_pages()
assert first > 1 << 20, first
product = torch.eye(64) @ torch.ones(64, 64)
assert product.sum() == 64 * 64
assert 0 < drop_code_pages() < first
"""

TRIMS = """
import ctypes
from gpu.device import trim_heap
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]

def anonymous_bytes():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("RssAnon")) * 1024

pieces = [libc.malloc(1 << 16) for _ in range(1024)]
for piece in pieces:
    ctypes.memset(piece, 1, 1 << 16)
for piece in pieces[:-1]:  # the last one keeps the heap as long as it is
    libc.free(piece)
before = anonymous_bytes()
trim_heap()
assert before - anonymous_bytes() > 48 << 20, (before, anonymous_bytes())
"""


def test_only_libraries_pages_that_nobody_wrote_to_are_dropped() -> None:
    assert list(_clean_mappings(MAPPED.splitlines())) == [(0x7F0000000000, 0x2000, 8192)]


def test_what_was_dropped_comes_back_when_it_is_needed() -> None:
    subprocess.run([sys.executable, "-c", DROPS], check=True)


def test_what_was_freed_goes_back_to_the_system() -> None:
    subprocess.run([sys.executable, "-c", TRIMS], check=True)
