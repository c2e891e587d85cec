"""What one connection may take of the server: the defaults of every limit on sockets, heads, bodies and frames.

Frozen; any thread. The times of a TokenBucket are arguments.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, field

from server.values import BadValueError

BUFFERED_BODY_BYTES = 16 * 1024 * 1024
LINGER_BYTES = 16 * 1024 * 1024  # twice a body's limit: who still sends one is to read why it is refused

_RATE = re.compile(r"(\d{1,6})\+(\d{1,6}(?:\.\d{1,3})?)/s")


@dataclass(frozen=True, slots=True)
class Rate:
    """So many at once, and so many more a second."""

    burst: int
    per_s: float


def rate_from(least_burst: int) -> Callable[[str], Rate]:
    """A parser of rates as operators write them: 200+20/s. It raises BadValueError for anything else, or too little."""

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
class HeadLimits:
    """The sizes of a request's head and of its body's framing; line ends count.

    Args:
        num_small_chunks: of a body, beyond one for each bytes_per_chunk of its content; content earns at most so many
            in advance. A chunk costs the same however little it carries: 1,000 of them about as much as a request.
    """

    request_line_bytes: int = 8 * 1024
    head_bytes: int = 16 * 1024
    num_fields: int = 100
    num_small_chunks: int = 1000  # as FrameLimits.num_overhead_frames
    bytes_per_chunk: int = 256


@dataclass(frozen=True, slots=True)
class FrameLimits:
    """The frames of one HTTP/2 connection.

    Args:
        header_block_bytes: of a HEADERS frame and its CONTINUATIONs together.
        resets: RST_STREAM from the peer, and those it makes us send.
        num_overhead_frames: frames without content, beyond one for each bytes_per_overhead_frame of content in either
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


class TokenBucket:
    __slots__ = ("_at", "_level", "_rate")

    def __init__(self, rate: Rate) -> None:
        self._rate = rate
        self._level = float(rate.burst)
        self._at = 0.0

    def take(self, now: float) -> bool:
        """Take one token; False: none is left."""
        rate = self._rate
        self._level = min(rate.burst, self._level + (now - self._at) * rate.per_s)
        self._at = now
        if self._level < 1:
            return False
        self._level -= 1
        return True


@dataclass(frozen=True, slots=True)
class Http2Limits:
    """What one HTTP/2 connection may take.

    Args:
        num_streams: at once, as advertised; more are refused, up to num_refused in a row.
        window_bytes: of a connection's request bodies, sent and not yet read.
        heads_bytes: of memory for the heads of all open requests; beyond it, streams are refused.
        list_bytes: of a decoded header list; more is an attack. Above the head limits, 431 is answered.
        early_bytes: of a request that go on coming, for linger_s, after its answer.
    """

    frames: FrameLimits = field(default_factory=FrameLimits)
    num_streams: int = 256
    num_refused: int = 256
    window_bytes: int = 512 * 1024
    heads_bytes: int = 768 * 1024
    list_bytes: int = 64 * 1024
    early_bytes: int = LINGER_BYTES


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """What one connection may take; times in seconds."""

    head: HeadLimits = field(default_factory=HeadLimits)
    head_s: float = 10.0  # from a head's first byte to its last, however it dribbles
    body_s: float = 30.0  # for a body, and one more second for each body_bytes_per_s; without a byte, never longer
    body_bytes_per_s: float = 500.0
    idle_s: float = 75.0  # without a byte between requests, or before the first
    stall_s: float = 30.0  # in which the peer must read stall_bytes_per_s, or all that is unsent
    stall_bytes_per_s: float = 500.0
    linger_s: float = 2.0  # and linger_bytes: dropped after an answer that comes before its request's end
    linger_bytes: int = LINGER_BYTES
    unsent_bytes: int = 16 * 1024  # high mark of our own unsent bytes; a quarter of it is the low mark
    pipelined_bytes: int = 64 * 1024  # behind the current request; with more, its answer is the last
    unread_body_bytes: int = 64 * 1024  # buffered for a handler that does not read yet
    buffered_body_bytes: int = BUFFERED_BODY_BYTES  # of incomplete ones: beyond it, only the oldest goes on
    pieces_per_turn: int = 64  # chunks, or frames, that are parsed before other connections have their turn
    bytes_per_turn: int = 64 * 1024  # in one read: the next waits for the loop's next turn
    num_requests: int = 1000  # of an HTTP/1.1 connection
    http2: Http2Limits = field(default_factory=Http2Limits)
    num_streams: int = 10_000  # of an HTTP/2 connection, one after the other
    control_bytes: int = 256 * 1024  # of answers that an HTTP/2 peer does not read: then reading from it pauses
    max_control_bytes: int = 1024 * 1024
    drain_round_trip_s: float = 1.0  # for an HTTP/2 peer to hear of the end, or for a new connection's first request
