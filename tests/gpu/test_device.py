"""Choices of device, dtype and threads with their reasons; what the machine has; large pages; memory given back."""

import mmap
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from core.config import EngineConfig
from core.errors import DeviceUnavailable
from gpu import device, host_memory
from gpu.device import (
    LEAST_BYTES,
    LINE_BYTES,
    MADV_COLLAPSE,
    MADV_HUGEPAGE,
    PAGE_BYTES,
    HugePages,
    own_huge_pages,
    use_huge_pages,
)

CPU = torch.device("cpu")


def choose(**fields: object) -> device.DeviceChoice:
    return device.choose_device(EngineConfig(**{"device": "cpu", **fields}))


def test_what_is_asked_for_is_chosen() -> None:
    choice = choose(dtype="float16", threads=3)
    assert (choice.device, choice.dtype, choice.dtype_name, choice.threads) == (CPU, torch.float16, "float16", 3)
    assert {choice.device_reason, choice.dtype_reason, choice.threads_reason} == {"asked for"}


@pytest.mark.parametrize(
    ("flags", "dtype", "reason"),
    [
        ("fpu avx512_bf16 sse", torch.bfloat16, "the CPU has avx512_bf16"),
        ("amx_bf16 avx512_bf16", torch.bfloat16, "the CPU has amx_bf16"),
        ("fpu avx512f", torch.float32, "the CPU has no bf16 instructions"),
    ],
)
def test_auto_dtype_follows_the_cpus_instructions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: str, dtype: torch.dtype, reason: str
) -> None:
    (tmp_path / "cpuinfo").write_text(f"processor\t: 0\nflags\t\t: {flags}\n\nprocessor\t: 1\nflags\t\t: other\n")
    monkeypatch.setattr(device, "CPU_INFO", tmp_path / "cpuinfo")
    choice = choose()
    assert (choice.dtype, choice.dtype_reason) == (dtype, reason)


def test_a_machine_that_does_not_tell_its_flags_gets_float32(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(device, "CPU_INFO", tmp_path / "none")
    assert choose().dtype == torch.float32


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_auto_device_without_cuda_is_the_cpu_and_asking_for_it_is_refused() -> None:
    choice = choose(device="auto")
    assert choice.device == CPU
    assert "no CUDA" in choice.device_reason
    with pytest.raises(DeviceUnavailable, match="Device cuda"):
        choose(device="cuda")


@pytest.mark.parametrize("fields", [{"device": "tpu"}, {"dtype": "int3"}, {"threads": 0}], ids=str)
def test_unknown_choices_are_refused_with_a_fix(fields: dict[str, object]) -> None:
    with pytest.raises(DeviceUnavailable) as caught:
        choose(**fields)
    assert caught.value.fix.startswith("--")


def test_threads_are_physical_cores_at_most_unless_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "num_physical_cores", lambda: 8)
    assert (choose().threads, choose().are_threads_asked) == (8, False)
    assert (choose(threads=3).threads, choose(threads=3).are_threads_asked) == (3, True)


def test_hyper_threads_of_a_core_count_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for cpu, siblings in enumerate(("0,2", "1,3", "0,2", "1,3")):
        (tmp_path / f"cpu{cpu}" / "topology").mkdir(parents=True)
        (tmp_path / f"cpu{cpu}" / "topology" / "thread_siblings_list").write_text(siblings + "\n")
    monkeypatch.setattr(device, "CPU_TOPOLOGY", tmp_path)
    monkeypatch.setattr(device.os, "sched_getaffinity", lambda pid: {0, 1, 2, 3})
    assert device.num_physical_cores() == 2


def test_free_memory_is_the_lesser_of_machine_and_control_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "meminfo").write_text("MemTotal: 9000 kB\nMemFree: 10 kB\nMemAvailable: 5000 kB\n")
    monkeypatch.setattr(host_memory, "MEMORY_INFO", tmp_path / "meminfo")
    monkeypatch.setattr(host_memory, "CGROUP", tmp_path)
    monkeypatch.setattr(host_memory, "PROCESS_CGROUPS", tmp_path / "none")
    assert device.free_memory_bytes(CPU) == 5000 * 1024
    limit_group(tmp_path, "max", 1000)
    assert device.free_memory_bytes(CPU) == 5000 * 1024
    limit_group(tmp_path, "4000", 1000)
    assert device.free_memory_bytes(CPU) == 3000


def limit_group(group: Path, limit: str, used: int, dropped: int = 0, version: int = 2) -> None:
    names = {1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")}
    limit_name, used_name, dropped_name = names.get(version, ("memory.max", "memory.current", "inactive_file"))
    group.mkdir(parents=True, exist_ok=True)
    (group / limit_name).write_text(f"{limit}\n")
    (group / used_name).write_text(f"{used}\n")
    (group / "memory.stat").write_text(f"anon 7\n{dropped_name} {dropped}\n")


@pytest.mark.parametrize(
    ("cgroups", "limits", "room"),
    [
        # a unit's own, its slice, and the root of all
        ("0::/system.slice/steploop.service", {"system.slice/steploop.service": ("5000", 1000, 0)}, 4000),
        ("0::/a/b/c", {"a/b/c": ("max", 10, 0), "a/b": ("9000", 100, 0), "a": ("5000", 4000, 500)}, 1500),
        ("0::/a/b", {"a/b": ("9000", 100, 0), "a": ("7000", 100, 0), "": ("600", 100, 0)}, 500),
        ("0::/a", {"other": ("10", 1, 0)}, 5000 * 1024),
        ("0::/a", {"a": ("100", 900, 0)}, 0),
        # a container without a namespace for it: the path is the host's, the root its own
        ("0::/kubepods/pod7/container", {"": ("800", 100, 0)}, 700),
        ("4:cpu,memory:/docker/7\n0::/", {"memory/docker/7": ("3000", 500, 100), "memory": ("9" * 19, 500, 0)}, 2600),
        ("4:memory:/docker/7\n1:cpu:/x", {"memory": ("3000", 500, 0), "memory/x": ("1", 0, 0)}, 2500),
        ("4:memory:/a\n0::/b", {"memory/a": ("3000", 500, 0), "unified/b": ("2000", 500, 0)}, 1500),
    ],
)
def test_the_smallest_of_all_control_groups_limits_holds(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    cgroups: str,
    limits: dict[str, tuple[str, int, int]],
    room: int,
) -> None:
    (tmp_path / "meminfo").write_text("MemAvailable: 5000 kB\n")
    (tmp_path / "cgroup").write_text(f"9:name=systemd:/\n{cgroups}\n")
    monkeypatch.setattr(host_memory, "MEMORY_INFO", tmp_path / "meminfo")
    monkeypatch.setattr(host_memory, "PROCESS_CGROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(host_memory, "CGROUP", tmp_path / "mounted")
    for group, found in limits.items():
        limit_group(tmp_path / "mounted" / group, *found, version=1 if group.startswith("memory") else 2)
    assert device.free_memory_bytes(CPU) == room


def test_what_ulimit_leaves_beside_what_is_mapped_is_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "statm").write_text("3 2 1 1 0 1 0\n")
    monkeypatch.setattr(host_memory, "PROCESS_SIZES", tmp_path / "statm")
    page_bytes = host_memory.resource.getpagesize()
    monkeypatch.setattr(host_memory.resource, "getrlimit", lambda which: (5 * page_bytes, -1))
    assert device.free_memory_bytes(CPU) == 2 * page_bytes


def cache_of(directory: Path, **sizes: str) -> None:
    for index, size in sizes.items():
        (directory / "cpu0" / "cache" / index).mkdir(parents=True)
        (directory / "cpu0" / "cache" / index / "size").write_text(size)


def test_the_last_level_cache_is_the_largest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "CPU_TOPOLOGY", tmp_path)
    assert device.last_level_cache_bytes() == 0
    cache_of(tmp_path, index0="48K\n", index1="2048K\n", index2="491520K\n", index3="?\n")
    assert device.last_level_cache_bytes() == 480 * 1024**2


@pytest.mark.parametrize(
    ("cache", "free_mib", "read_mib"),
    [("32768K", 10**6, 256), ("491520K", 10**6, 960), ("491520K", 800, 100), ("", 1, 1)],
)
def test_a_probe_reads_more_than_a_cache_holds_within_what_is_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: str, free_mib: int, read_mib: int
) -> None:
    cache_of(tmp_path, index0=cache)
    monkeypatch.setattr(device, "CPU_TOPOLOGY", tmp_path)
    monkeypatch.setattr(device, "free_memory_bytes", lambda device: free_mib * 1024**2)
    assert device.probe_bytes(CPU) == read_mib * 1024**2


def test_measured_bandwidth_is_a_machines() -> None:
    assert 1e8 < device.measure_bandwidth(CPU) < 1e13


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


def test_tensors_share_chunks_without_overlap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "CHUNK_BYTES", 4 * PAGE_BYTES)
    pages = HugePages()
    sizes = (LEAST_BYTES, LEAST_BYTES - 1, LEAST_BYTES + 1, 3 * PAGE_BYTES, 5 * PAGE_BYTES)
    found = [pages.empty((size,), torch.uint8) for size in sizes] + [pages.empty((3, PAGE_BYTES // 2), torch.bfloat16)]
    for number, tensor in enumerate(found):
        tensor.fill_(number)
    assert [(tensor == number).all().item() for number, tensor in enumerate(found)] == [True] * len(found)
    assert found[2].data_ptr() == found[0].data_ptr() + LEAST_BYTES
    assert [tensor.data_ptr() % LINE_BYTES for tensor in found] == [0] * len(found)


def test_pages_are_private_and_asked_for_before_they_are_written(asked: list[tuple[int, int, int]]) -> None:
    found = own_huge_pages((3, PAGE_BYTES // 2), torch.bfloat16)
    assert asked == [(found.data_ptr(), 3 * PAGE_BYTES, MADV_HUGEPAGE)]
    assert own_huge_pages((LEAST_BYTES - 1,), torch.uint8).shape == (LEAST_BYTES - 1,)
    assert len(asked) == 1
    mappings = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
    ranges = [([int(end, 16) for end in one[0].split("-")], one[1]) for one in mappings]
    assert [flags for (first, end), flags in ranges if first <= found.data_ptr() < end] == ["rw-p"]


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
    assert list(device._clean_mappings(MAPPED.splitlines())) == [(0x7F0000000000, 0x2000, 8192)]


def test_what_was_freed_goes_back_to_the_system_and_what_was_dropped_comes_back_when_it_is_needed() -> None:
    subprocess.run([sys.executable, "-c", TRIMS + DROPS], check=True)
