"""How much host memory this process can still allocate, within control groups and `ulimit -v`. Imports no torch.

Thread: any.
"""

import os
import resource
from contextlib import suppress
from pathlib import Path

MEMORY_INFO = Path("/proc/meminfo")
CGROUP = Path("/sys/fs/cgroup")
PROCESS_CGROUPS, PROCESS_SIZES = Path("/proc/self/cgroup"), Path("/proc/self/statm")
UNLIMITED = 1 << 62


def host_room_bytes() -> int:
    """What can still be allocated."""
    return min(_available_bytes(), _cgroup_room_bytes(), _address_room_bytes())


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
