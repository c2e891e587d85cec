"""What one connection may take of the server: the defaults of every limit on sockets and heads. Frozen; any thread."""

from dataclasses import dataclass, field

from server.wire.frame_limits import FrameLimits
from server.wire.http1_prefilter import HeadLimits

HELD_BODY_BYTES = 16 * 1024 * 1024
LINGER_BYTES = 16 * 1024 * 1024  # twice a body's limit: who still sends one is to read why it is refused


@dataclass(frozen=True, slots=True)
class Http2Limits:
    """What one HTTP/2 connection may take.

    Args:
        num_streams: at once, as advertised; more are refused, up to num_refused in a row.
        window_bytes: of a connection's request bodies, that the peer may send before they are read.
        heads_bytes: that the heads of the open requests weigh together; what is more is refused as more streams are.
        list_bytes: of a header list, decoded, before it is taken for an attack; head limits answer 431 below that.
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
    stall_s: float = 30.0  # in which the peer reads less than stall_bytes_per_s, and not all that is unsent
    stall_bytes_per_s: float = 500.0
    linger_s: float = 2.0  # and linger_bytes: thrown away after an answer that comes before its request's end
    linger_bytes: int = LINGER_BYTES
    unsent_bytes: int = 16 * 1024  # high mark of our own unsent bytes; a quarter of it is the low mark
    pipelined_bytes: int = 64 * 1024  # behind a request that is being answered; with more, its answer is the last
    unread_body_bytes: int = 64 * 1024  # held for a handler that does not read yet
    held_body_bytes: int = HELD_BODY_BYTES  # of incomplete bodies: beyond it, the connection's oldest alone goes on
    pieces_per_turn: int = 64  # chunks, or frames, that are understood before the loop turns to others
    bytes_per_turn: int = 64 * 1024  # in one read: the next waits for the loop's next turn
    num_requests: int = 1000  # of an HTTP/1.1 connection
    http2: Http2Limits = field(default_factory=Http2Limits)
    num_streams: int = 10_000  # of an HTTP/2 connection, one after the other
    control_bytes: int = 256 * 1024  # unread by an HTTP/2 peer: then it is not read from either
    max_control_bytes: int = 1024 * 1024
    drain_round_trip_s: float = 1.0  # for an HTTP/2 peer to hear of the end, for a new one's request to come
