"""Host memory that a CUDA device copies from and to by itself, of exactly the size asked. Thread: engine (at start).

Torch's own allocator of it rounds up to a power of two, as suits small buffers that come and go: of 70 GiB it makes
128. This is ordinary memory that the driver is told to pin, and stays until the process ends.
"""

import mmap
from contextlib import suppress

import torch
from torch import Tensor


def pinned_for_good(size_bytes: int) -> Tensor:
    """Bytes, zero at first.

    Raises:
        OSError: the system has no such memory.
        RuntimeError: the driver does not pin it.
    """
    pages = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(AttributeError, OSError):  # not Linux, or without large pages: pinning takes longer
        pages.madvise(mmap.MADV_HUGEPAGE)
    memory = torch.frombuffer(pages, dtype=torch.uint8)
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    torch.cuda.check_error(runtime.cudaHostRegister(memory.data_ptr(), size_bytes, 0))
    return memory
