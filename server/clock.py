"""What time it is, as an argument: so that tests can say. Threads: loop, main."""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Clock:
    """monotonic() for durations, unix() for what clients see; both in seconds."""

    monotonic: Callable[[], float]
    unix: Callable[[], float]
