"""What starting needed goes, and the process goes on."""

import subprocess
import sys

from gpu.code_pages import _clean_mappings

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

SCRIPT = """
import torch
from gpu.code_pages import drop_code_pages
first = drop_code_pages()
assert first > 1 << 20, first
product = torch.eye(64) @ torch.ones(64, 64)
assert product.sum() == 64 * 64
assert 0 < drop_code_pages() < first
"""


def test_only_libraries_pages_that_nobody_wrote_to_are_dropped() -> None:
    assert list(_clean_mappings(MAPPED.splitlines())) == [(0x7F0000000000, 0x2000, 8192)]


def test_what_was_dropped_comes_back_when_it_is_needed() -> None:
    subprocess.run([sys.executable, "-c", SCRIPT], check=True)
