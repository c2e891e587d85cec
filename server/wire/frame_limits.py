"""How many frames of each kind a peer may send, and how fast. Thread: loop. Time is an argument."""

import re
from collections.abc import Callable
from dataclasses import dataclass

from server.values import BadValueError

_RATE = re.compile(r"(\d{1,6})\+(\d{1,6}(?:\.\d{1,3})?)/s")


@dataclass(frozen=True, slots=True)
class Rate:
    """So many at once, and so many more a second."""

    burst: int
    per_s: float


def rate_from(least_burst: int) -> Callable[[str], Rate]:
    """What reads a rate as operators write it: 200+20/s. It raises BadValueError where that is none, or too little."""

    def parse(text: str) -> Rate:
        match = _RATE.fullmatch(text.strip())
        if match is None or int(match[1]) < least_burst:
            least = f"; {least_burst} at once, at least" if least_burst > 1 else ""
            raise BadValueError(f"a burst and a rate, such as 200+20/s: 200 at once, and 20 more each second{least}")
        return Rate(int(match[1]), float(match[2]))

    return parse


def format_rate(rate: Rate) -> str:
    return f"{rate.burst}+{rate.per_s:g}/s"


@dataclass(frozen=True, slots=True)
class FrameLimits:
    """What the frames of one connection may be.

    Args:
        header_block_bytes: of a HEADERS frame and its CONTINUATIONs together.
        resets: RST_STREAM from the peer, and those it makes us send.
        num_overhead_frames: those that carry nothing, beyond one for each bytes_per_overhead_frame of content in either
            direction; content earns at most so many in advance.
    """

    frame_bytes: int = 16_384  # RFC 9113 §4.2: the least that must be taken
    header_block_bytes: int = 32 * 1024
    num_continuations: int = 8
    resets: Rate = Rate(200, 20)
    pings: Rate = Rate(100, 10)
    settings: Rate = Rate(100, 10)
    num_settings: int = 32
    num_overhead_frames: int = 1000
    bytes_per_overhead_frame: int = 64


class Budget:
    """A token bucket."""

    __slots__ = ("_at", "_level", "_rate")

    def __init__(self, rate: Rate) -> None:
        self._rate = rate
        self._level = float(rate.burst)
        self._at = 0.0

    def take(self, now: float) -> bool:
        """Spend one; False: there is none left."""
        rate = self._rate
        self._level = min(rate.burst, self._level + (now - self._at) * rate.per_s)
        self._at = now
        if self._level < 1:
            return False
        self._level -= 1
        return True
