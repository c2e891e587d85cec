"""Chooses the device, number format and threads to compute with; asks the machine what it has. Thread: engine.

Each choice has its reason as text, for the banner. Also copies from the host to the device, large pages, and returning
memory that only starting needed (trim RSS).
"""

import ctypes
import math
import mmap
import os
import re
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from core.config import EngineConfig
from core.errors import DeviceUnavailable
from gpu import PUTS_OFF
from gpu.host_memory import MADV_HUGEPAGE, PAGE_BYTES, host_bytes, host_room_bytes

if PUTS_OFF:  # a module that is put off imports torch._prims, which does this, and takes 0.1 s
    torch._C._set_generator_metaclass(torch._opaque_base.OpaqueBaseMeta)

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
# Instructions that multiply bf16 natively: without them bf16 is slower than float32.
BF16_CPU_FLAGS = ("amx_bf16", "avx512_bf16")
# See RunnerLimits. A CPU with avx512_bf16 was as fast with 8 rows as with 4; H100 and H200 have a ceiling over 180.
FEW_TOKENS = {"cpu": 8, "cuda": 128}
CPU_INFO = Path("/proc/cpuinfo")
CPU_TOPOLOGY = Path("/sys/devices/system/cpu")
MIN_PROBE_BYTES = 256 * 1024**2  # on a GPU, and where the cache's size is unknown
PROBE_CACHES = 2  # a probe's size in last-level caches: read in order, over and over, little of it stays in one
PROBE_MEMORY_SHARE = 8  # a probe takes at most this fraction (1/8) of the free memory
PROBE_ROUNDS = 3


@dataclass(frozen=True, slots=True)
class DeviceChoice:
    """Where and how to compute.

    Args:
        device: "cpu" or "cuda:0".
        threads: on a CPU, at most so many compute (gpu/tune.py chooses); on CUDA, torch's for what the host computes.
    """

    device: torch.device
    device_reason: str
    dtype: torch.dtype
    dtype_reason: str
    threads: int
    threads_reason: str
    are_threads_asked: bool = False

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")


def choose_device(config: EngineConfig) -> DeviceChoice:
    """Choose device, dtype and the most threads; applies nothing.

    Raises:
        DeviceUnavailable: what the settings name is not there.
    """
    device, device_reason = _device(config.device)
    dtype, dtype_reason = _dtype(config.dtype, device)
    threads, threads_reason = _threads(config.threads)
    is_asked = config.threads is not None
    return DeviceChoice(device, device_reason, dtype, dtype_reason, threads, threads_reason, is_asked)


def apply_threads(choice: DeviceChoice) -> None:
    """Set torch's compute threads for this process."""
    torch.set_num_threads(choice.threads)


def _device(asked: str) -> tuple[torch.device, str]:
    if asked not in ("auto", "cpu", "cuda"):
        raise DeviceUnavailable(f"Device {asked!r} is not known.", "--device auto, cpu or cuda")
    if asked == "cpu":
        return torch.device("cpu"), "asked for"
    if torch.cuda.is_available():
        name = torch.cuda.get_device_name(0)
        return torch.device("cuda", 0), name if asked == "auto" else f"{name}, asked for"
    why = "this torch has no CUDA" if torch.version.cuda is None else "no CUDA device was found"
    if asked == "cuda":
        raise DeviceUnavailable(f"Device cuda: {why}.", "--device cpu, or install a CUDA build of torch and its driver")
    return torch.device("cpu"), why


def _dtype(asked: str, device: torch.device) -> tuple[torch.dtype, str]:
    if asked in DTYPES:
        return DTYPES[asked], "asked for"
    if asked != "auto":
        raise DeviceUnavailable(f"dtype {asked!r} is not known.", f"--dtype auto, {', '.join(DTYPES)}")
    if device.type == "cuda":
        if torch.cuda.get_device_capability(device)[0] >= 8:
            return torch.bfloat16, "native on this GPU"
        return torch.float16, "this GPU has no bf16"
    native = [flag for flag in BF16_CPU_FLAGS if flag in cpu_flags()]
    if native:
        return torch.bfloat16, f"the CPU has {native[0]}"
    return torch.float32, "the CPU has no bf16 instructions"


def _threads(asked: int | None) -> tuple[int, str]:
    cores = num_physical_cores()
    if asked is not None:
        if asked < 1:
            raise DeviceUnavailable(f"{asked} compute threads are too few.", f"--threads {max(1, cores - 1)}")
        return asked, "asked for"
    return cores, f"{cores} physical cores; fewer for steps of few tokens"


def cpu_flags() -> frozenset[str]:
    """The first CPU's instruction set flags; empty where the kernel does not tell (not Linux on x86)."""
    return frozenset(_cpu_info("flags").split())


def cpu_model() -> str:
    """The first CPU's name; empty where the kernel does not tell."""
    return _cpu_info("model name")


def _cpu_info(name: str) -> str:
    try:
        lines = CPU_INFO.read_text().splitlines()
    except OSError:
        return ""
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith(name)), "")


def arithmetic_of(device: torch.device) -> str:
    """What rounds its numbers: another one may round them otherwise."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{device} {torch.backends.cpu.get_cpu_capability()} {'amx' if 'amx_bf16' in cpu_flags() else ''}"


def num_physical_cores() -> int:
    """Cores this process may run on, hyper-threads counted once."""
    allowed = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))
    return max(1, len({_siblings(cpu) for cpu in allowed}))


def _siblings(cpu: int) -> str:
    """The hyper-threads of this one's core, as the kernel lists them."""
    try:
        return (CPU_TOPOLOGY / f"cpu{cpu}" / "topology" / "thread_siblings_list").read_text().strip()
    except OSError:
        return str(cpu)


def last_level_cache_bytes() -> int:
    """The first CPU's largest cache, which other cores may share; 0 where the kernel does not tell."""
    sizes = [0]
    for path in (CPU_TOPOLOGY / "cpu0" / "cache").glob("index*/size"):
        with suppress(OSError, ValueError):
            sizes.append(int(path.read_text().strip().removesuffix("K")) * 1024)  # sysfs-devices-system-cpu: in KiB
    return max(sizes)


def probe_bytes(device: torch.device) -> int:
    """How much to read so that it comes from memory and not from a cache; whole MiB, within what is free."""
    wanted = max(MIN_PROBE_BYTES, PROBE_CACHES * last_level_cache_bytes() if device.type == "cpu" else 0)
    room = free_memory_bytes(device) // PROBE_MEMORY_SHARE
    return max(1, min(wanted, room) // 1024**2) * 1024**2


def free_memory_bytes(device: torch.device) -> int:
    """What can still be allocated: on a CPU, within control groups and ulimit -v."""
    return int(torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else host_room_bytes()


def total_memory_bytes(device: torch.device) -> int:
    return int(torch.cuda.mem_get_info(device)[1]) if device.type == "cuda" else host_bytes()


def measure_bandwidth(device: torch.device) -> float:
    """Bytes per second that the device reads from its memory: the best of a few rounds, 0.1 to 1 s on a CPU.

    Sums float32, which reads as decode reads weights: once, in order.
    """
    size_bytes = probe_bytes(device)
    values = torch.ones(size_bytes // 4, device=device)
    best_s = float("inf")
    for _ in range(PROBE_ROUNDS):
        synchronize(device)
        started_s = time.perf_counter()
        values.sum()
        synchronize(device)
        best_s = min(best_s, time.perf_counter() - started_s)
    return size_bytes / best_s


def synchronize(device: torch.device) -> None:
    """Wait for all work sent to the device.

    Raises:
        torch.AcceleratorError: the device is lost: such an error is raised again by every later call.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def to_device(array: npt.NDArray[Any], device: torch.device) -> Tensor:
    """Start a copy to the device; on a CPU, share the array's memory.

    To a GPU from pinned memory of torch's own pool: copying from other memory may block the host until the device has
    caught up.
    """
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    if device.type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


LEAST_BYTES = PAGE_BYTES // 2  # less is not worth a call
CHUNK_BYTES = 64 * 1024**2  # of address space: only what is written to takes memory
LINE_BYTES = 64  # of a cache
MADV_COLLAPSE = 25  # Linux 6.1, include/uapi/asm-generic/mman-common.h
MADV_DONTNEED = 4  # madvise(2)


class HugePages:
    """Memory whose pages are large from the first write on: to collapse small ones takes as long as to read a file.

    Tensors share chunks; a chunk is unmapped with the last of them.
    """

    def __init__(self) -> None:
        self._rest = torch.empty(0, dtype=torch.uint8)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """On the CPU. Once it is written, use_huge_pages says whether its pages are large."""
        size_bytes = math.prod(shape) * dtype.itemsize
        if len(self._rest) < size_bytes or size_bytes < LEAST_BYTES:
            if _madvise() is None or not LEAST_BYTES <= size_bytes <= CHUNK_BYTES:
                return own_huge_pages(shape, dtype)
            self._rest = _advised(CHUNK_BYTES)
        found, self._rest = self._rest[:size_bytes], self._rest[-(-size_bytes // LINE_BYTES) * LINE_BYTES :]
        return found.view(dtype).view(shape)

    def begin_with(self, memory: mmap.mmap) -> None:
        """Take this memory first, which may have its pages already: see reading_ahead."""
        mapped = torch.frombuffer(memory, dtype=torch.uint8)
        self._rest = mapped[-mapped.data_ptr() % PAGE_BYTES :]

    def release_rest(self) -> None:
        """Give pages that no tensor is in back to the system; what is left may still be written to."""
        first, end = self._rest.data_ptr(), self._rest.data_ptr() + len(self._rest)
        first = -(-first // PAGE_BYTES) * PAGE_BYTES
        if (advise := _madvise()) is not None and first < end:
            advise(first, end - first, MADV_DONTNEED)


def _advised(size_bytes: int) -> Tensor:
    """At least so many bytes, from a page's start on. Private: memory that may be shared has small pages."""
    pages_bytes = -(-size_bytes // PAGE_BYTES) * PAGE_BYTES
    pages = mmap.mmap(-1, pages_bytes + PAGE_BYTES, mmap.MAP_PRIVATE)
    mapped = torch.frombuffer(pages, dtype=torch.uint8)  # owns them
    first = -mapped.data_ptr() % PAGE_BYTES
    _madvise()(mapped.data_ptr() + first, pages_bytes, MADV_HUGEPAGE)
    return mapped[first : first + pages_bytes]


huge_pages = HugePages()


def own_huge_pages(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """As HugePages.empty, in no chunk: the memory goes with the tensor."""
    size_bytes = math.prod(shape) * dtype.itemsize
    if _madvise() is None or size_bytes < LEAST_BYTES:
        return torch.empty(shape, dtype=dtype)
    return _advised(size_bytes)[:size_bytes].view(dtype).view(shape)


def use_huge_pages(address: int, size_bytes: int) -> bool:
    """Collapse the pages of these bytes into large ones, now; returns whether the system did so for all of them."""
    advise = _madvise()
    if advise is None or size_bytes < LEAST_BYTES:
        return False
    first = address // PAGE_BYTES * PAGE_BYTES
    end = -(-(address + size_bytes) // PAGE_BYTES) * PAGE_BYTES
    return bool(advise(first, end - first, MADV_COLLAPSE) == 0)


@cache
def _madvise() -> Any:
    if sys.platform != "linux":
        return None
    advise = ctypes.CDLL(None).madvise
    advise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return advise


def trim_heap() -> None:
    """Return freed memory to the system, where the allocator is glibc's; malloc_trim(3)."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(ctypes.c_size_t(0))


_SMAPS = Path("/proc/self/smaps")  # proc_pid_smaps(5)
_MAPPING = re.compile(r"([0-9a-f]+)-([0-9a-f]+) (\S{4}) \S+ \S+ \d+ *(.*)$")
_LIBRARY = re.compile(r"/.*\.so[.\d]*$")
_COUNT = re.compile(r"(Anonymous|Rss): +(\d+) kB$")


shares_code_pages = False  # with a process that this one was forked from, and with others: little is its own


def drop_code_pages() -> int:
    """Drop libraries' pages that only starting needed, unless they are shared; they are read again when needed.

    A mapping with a page that was written to, as the loader does where it relocates, would not come back from the file,
    and is left alone. Returns how many resident bytes were dropped; 0 where the system does not tell.
    """
    if shares_code_pages:
        return 0
    try:
        lines = _SMAPS.read_text(errors="replace").splitlines()
    except OSError:
        return 0
    advise = _madvise()
    found = _clean_mappings(lines)
    return sum(resident for start, size, resident in found if advise(start, size, MADV_DONTNEED) == 0)


def _clean_mappings(lines: list[str]) -> Iterator[tuple[int, int, int]]:
    """(address, bytes, resident bytes) of libraries' mappings that cannot be written to, and never were."""
    found: tuple[int, int] | None = None
    resident_bytes = 0
    for line in lines:
        if match := _MAPPING.match(line):
            start, end = int(match[1], 16), int(match[2], 16)
            found = (start, end - start) if "w" not in match[3] and _LIBRARY.match(match[4]) else None
        elif found is not None and (count := _COUNT.match(line)):
            if count[1] == "Rss":
                resident_bytes = int(count[2]) * 1024
            elif count[2] == "0" and resident_bytes:
                yield (*found, resident_bytes)
