"""What the process takes of the machine, as Linux tells it. Any thread."""

import os
import resource
from pathlib import Path

_STATM = Path("/proc/self/statm")
_PAGE_BYTES = resource.getpagesize()


def resident_bytes() -> int:
    """Source: proc_pid_statm(5), the second field; where there is none, what it once was at most (getrusage(2))."""
    try:
        return int(_STATM.read_bytes().split()[1]) * _PAGE_BYTES
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def cpu_s() -> float:
    """Of all threads, in user and system mode."""
    times = os.times()
    return times.user + times.system
