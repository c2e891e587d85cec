"""CPU time of another process, by thread, as Linux counts it (proc(5))."""

import os
from dataclasses import dataclass
from pathlib import Path

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class CpuTimes:
    """Seconds since the process began.

    Args:
        main_s: of the thread that runs the event loop; other_s: of all others together.
        user_s, system_s: of all threads, ended ones too, in ticks of 10 ms.
    """

    main_s: float
    other_s: float
    user_s: float
    system_s: float

    @property
    def total_s(self) -> float:
        return self.main_s + self.other_s

    def __sub__(self, other: "CpuTimes") -> "CpuTimes":
        return CpuTimes(
            self.main_s - other.main_s,
            self.other_s - other.other_s,
            self.user_s - other.user_s,
            self.system_s - other.system_s,
        )


def busiest(pid: int) -> int:
    """The child that has worked most, of servers that have their loop in a worker; without children, the process."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return max(map(int, children), key=lambda child: cpu_times(child).total_s, default=pid)


def cpu_times(pid: int) -> CpuTimes:
    """
    Raises:
        OSError: there is no such process.
    """
    user_s, system_s = _user_and_system_s(Path(f"/proc/{pid}/stat"))
    main_s = other_s = 0.0
    for task in Path(f"/proc/{pid}/task").iterdir():
        try:
            thread_s = _thread_s(task)
        except FileNotFoundError:  # it ended meanwhile
            continue
        if task.name == str(pid):
            main_s = thread_s
        else:
            other_s += thread_s
    return CpuTimes(main_s, other_s, user_s, system_s)


def _thread_s(task: Path) -> float:
    """Nanoseconds where the kernel keeps scheduler statistics, else ticks."""
    try:
        on_cpu_ns = int((task / "schedstat").read_text().split()[0])
    except (FileNotFoundError, IndexError):
        on_cpu_ns = 0
    return on_cpu_ns / 1e9 if on_cpu_ns else sum(_user_and_system_s(task / "stat"))


def _user_and_system_s(stat: Path) -> tuple[float, float]:
    fields = stat.read_text().rpartition(")")[2].split()  # the name before it may contain anything
    return int(fields[11]) / _TICKS_PER_S, int(fields[12]) / _TICKS_PER_S
