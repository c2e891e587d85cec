"""What RFC 9113 demands of a server for each frame in each state, as a table. Section numbers are its own.

Streams are counted from the first that is free on the connection: 1 is the next that a client may open.
"""

from collections.abc import Callable
from dataclasses import dataclass

from h2.errors import ErrorCodes

from server.wire.frame_gate import (
    DATA,
    GOAWAY,
    HEADERS,
    PING,
    PRIORITY,
    PUSH_PROMISE,
    RST_STREAM,
    SETTINGS,
    WINDOW_UPDATE,
)
from tests.server.raw_http2 import (
    ACK,
    ENABLE_PUSH,
    END_HEADERS,
    END_STREAM,
    HIGHEST_STREAM_ID,
    INITIAL_WINDOW,
    MAX_FRAME,
    MAX_LIST,
    MAX_STREAMS,
    PADDED,
    RESERVED,
    TABLE_SIZE,
    Frame,
    Seen,
    block,
    continuation,
    data,
    get,
    goaway,
    headers,
    literal,
    ping,
    post,
    priority,
    rst,
    settings,
    window_update,
)

PROTOCOL = ErrorCodes.PROTOCOL_ERROR
SIZE = ErrorCodes.FRAME_SIZE_ERROR
FLOW = ErrorCodes.FLOW_CONTROL_ERROR
CLOSED = ErrorCodes.STREAM_CLOSED
REFUSED = ErrorCodes.REFUSED_STREAM


@dataclass(frozen=True)
class Expected:
    """What is to come of a case.

    Args:
        goaway: the code with which the connection ends; None: it goes on.
        reset: the code with which the stream ends, and nothing else does.
        status: the stream's answer.
    """

    goaway: ErrorCodes | None = None
    reset: ErrorCodes | None = None
    status: int | None = None
    stream: int = 1


def ends(code: ErrorCodes) -> Expected:
    """RFC 9113 §5.4.1: a connection error."""
    return Expected(goaway=code)


def resets(code: ErrorCodes, stream: int = 1) -> Expected:
    """RFC 9113 §5.4.2: a stream error."""
    return Expected(reset=code, stream=stream)


def answers(status: int = 200, stream: int = 1) -> Expected:
    return Expected(status=status, stream=stream)


GOES_ON = Expected()


@dataclass(frozen=True)
class Case:
    """
    Args:
        setup: brings the streams into the state that is tried; nothing is wrong with it.
        frames: what is tried.
        check: what else must be seen.
        restore: takes back what would keep other streams from ending.
    """

    section: str
    name: str
    setup: tuple[Frame, ...]
    frames: tuple[Frame, ...]
    expected: Expected
    check: Callable[[Seen], bool] | None = None
    restore: tuple[Frame, ...] = ()

    def __str__(self) -> str:
        return f"{self.section} {self.name}"


def case(
    section: str,
    name: str,
    frames: Frame | tuple[Frame, ...],
    expected: Expected,
    setup: tuple[Frame, ...] = (),
    check: Callable[[Seen], bool] | None = None,
    restore: tuple[Frame, ...] = (),
) -> Case:
    return Case(section, name, setup, frames if isinstance(frames, tuple) else (frames,), expected, check, restore)


# States of stream 1.
OPEN = (post(),)
HALF_CLOSED = (get(b"/wait"),)  # remote
ENDED = (get(b"/now"),)  # by both
RESET_BY_PEER = (get(b"/wait"), rst())
RESET_BY_US = (headers(block(without=b"path")),)
ANSWERED_EARLY = (post(b"/now"),)  # its response has ended, its request was broken off without an error
PASSED_OVER = (get(stream=3),)  # closed by the use of a higher one

UNKNOWN = 0x77
UNKNOWN_SETTING = 0xF0F0
LARGEST = 16_384
LARGEST_INCREMENT = 2**31 - 1


def of_field(name: bytes, value: bytes = b"1") -> Frame:
    """A request with one more field."""
    return headers(block((name, value)))


def of_body(length: bytes, *frames: Frame) -> tuple[Frame, ...]:
    """A request that declares its body's length, and its body."""
    return (post(b"/read", 1, (b"content-length", length)), *frames)


def padded(payload: bytes, padding: int, said: int | None = None) -> bytes:
    return bytes((padding if said is None else said,)) + payload + bytes(padding)


def split(payload: bytes, *cuts: int) -> tuple[Frame, ...]:
    """A request's block in HEADERS and CONTINUATION frames."""
    pieces = [payload[a:b] for a, b in zip((0, *cuts), (*cuts, len(payload)), strict=True)]
    last = len(pieces) - 2
    rest = [continuation(piece, END_HEADERS if i == last else 0) for i, piece in enumerate(pieces[1:])]
    return (headers(pieces[0], END_STREAM), *rest)


def has_acks(num_acks: int) -> Callable[[Seen], bool]:
    """So many SETTINGS are acknowledged, over the one that the connection began with."""
    return lambda seen: len([f for f in seen.of(SETTINGS) if f.flags & ACK]) == 1 + num_acks


def has_body(body: bytes, stream: int = 1) -> Callable[[Seen], bool]:
    return lambda seen: seen.body(stream) == body and seen.has_ended(stream)


def sent(*lengths: int) -> Callable[[Seen], bool]:
    """The lengths of stream 1's DATA frames so far."""
    return lambda seen: [len(frame.content) for frame in seen.of(DATA, 1)] == list(lengths)


def is_reset_once(seen: Seen) -> bool:
    return len(seen.of(RST_STREAM, 1)) == 1


FORMAT = (
    case("4.1", "unknown frame type", Frame(UNKNOWN, b"x" * 100), GOES_ON),
    case("4.1", "unknown frame type on an idle stream", Frame(UNKNOWN, b"x", 0xFF, 5), GOES_ON),
    case("4.1", "undefined flags on HEADERS", headers(block(), END_HEADERS | END_STREAM | 0xD2), answers()),
    case("4.1", "undefined flags on DATA", data(b"abc", 0xF6 | END_STREAM), answers(), OPEN, has_body(b"3")),
    case("4.1", "undefined flags on PING", ping(b"flagged!", 0xFE), GOES_ON, check=lambda s: s.has_pong(b"flagged!")),
    case("4.1", "undefined flags on SETTINGS", settings(flags=0xFE), GOES_ON, check=has_acks(1)),
    case("4.1", "undefined flags on WINDOW_UPDATE", Frame(WINDOW_UPDATE, b"\0\0\0\1", 0xFF), GOES_ON),
    case("4.1", "undefined flags on RST_STREAM", Frame(RST_STREAM, bytes(4), 0xFF, 1), GOES_ON, HALF_CLOSED),
    case("4.1", "undefined flags on PRIORITY", Frame(PRIORITY, bytes(5), 0xFF, 1), GOES_ON, HALF_CLOSED),
    case("4.1", "undefined flags on GOAWAY", Frame(GOAWAY, bytes(8), 0xFF), GOES_ON),
    case("4.1", "undefined flags on CONTINUATION", (headers(block(), END_STREAM), continuation(b"", 0xFF)), answers()),
    case("4.1", "reserved bit of a stream", Frame(HEADERS, block(), 0x5, 1, reserved=True), answers()),
    case("4.1", "reserved bit on PING", Frame(PING, b"reserved", reserved=True), GOES_ON),
    case("4.1", "reserved bit on SETTINGS", Frame(SETTINGS, reserved=True), GOES_ON, check=has_acks(1)),
    case("4.2", "DATA of 2^14 bytes", data(bytes(LARGEST), END_STREAM), answers(), OPEN, has_body(b"16384")),
    case("4.2", "HEADERS of 2^14 bytes", headers(block((b"x", b"y" * (LARGEST - 80)))), answers(431)),
    case("4.2", "unknown frame of 2^14 bytes", Frame(UNKNOWN, bytes(LARGEST)), GOES_ON),
    case("4.2", "DATA of 2^14 + 1 bytes", data(bytes(LARGEST + 1)), ends(SIZE), OPEN),
    case("4.2", "HEADERS of 2^14 + 1 bytes", headers(bytes(LARGEST + 1)), ends(SIZE)),
    case("4.2", "CONTINUATION of 2^14 + 1 bytes", (headers(b"", 0), continuation(bytes(LARGEST + 1))), ends(SIZE)),
    case("4.2", "SETTINGS of 2^14 + 2 bytes", Frame(SETTINGS, bytes(LARGEST + 2)), ends(SIZE)),
    case("4.2", "unknown frame of 2^14 + 1 bytes", Frame(UNKNOWN, bytes(LARGEST + 1)), ends(SIZE)),
    case("4.2", "frame that says 2^24 - 1 bytes", Frame(DATA, b"", 0, 1, length=2**24 - 1), ends(SIZE), OPEN),
    case("4.3", "block in one frame", get(), answers()),
    case("4.3", "block in three frames", split(block(), 5, 20), answers()),
    case("4.3", "block behind an empty HEADERS", split(block(), 0), answers()),
    case("4.3", "block before an empty CONTINUATION", split(block(), len(block())), answers()),
    case("4.3", "block that is interrupted by its stream's DATA", (headers(block(), 0x1), data(b"x")), ends(PROTOCOL)),
    case("4.3", "block that is interrupted by PRIORITY", (headers(block(), 0x1), priority()), ends(PROTOCOL)),
    case("4.3", "block that is interrupted by RST_STREAM", (headers(block(), 0x1), rst()), ends(PROTOCOL)),
    case("4.3", "block that is interrupted by SETTINGS", (headers(block(), 0x1), settings()), ends(PROTOCOL)),
    case("4.3", "block that is interrupted by PING", (headers(block(), 0x1), ping()), ends(PROTOCOL)),
    case("4.3", "block that is interrupted by GOAWAY", (headers(block(), 0x1), goaway()), ends(PROTOCOL)),
    case("4.3", "block that is interrupted by a window", (headers(block(), 0x1), window_update(1)), ends(PROTOCOL)),
    case("4.3", "block that is interrupted by HEADERS", (headers(block(), 0x1), get(stream=3)), ends(PROTOCOL)),
    case("4.3", "block that is interrupted by its own HEADERS", (headers(block(), 0x1), get()), ends(PROTOCOL)),
    case("5.5", "block that is interrupted by an extension", (headers(block(), 0x1), Frame(UNKNOWN)), ends(PROTOCOL)),
)

STATES = (
    case("5.1", "idle: DATA", data(b"x"), ends(PROTOCOL)),
    case("5.1", "idle: RST_STREAM", rst(), ends(PROTOCOL)),
    case("5.1", "idle: WINDOW_UPDATE", window_update(1, 1), ends(PROTOCOL)),
    case("5.1", "idle: CONTINUATION", continuation(block()), ends(PROTOCOL)),
    case("5.1", "idle: PRIORITY", (priority(), get()), answers()),
    case("5.1", "idle: unknown frame", (Frame(UNKNOWN, b"x", 0, 1), get()), answers()),
    case("5.1", "open: PRIORITY", (priority(), data(b"x", END_STREAM)), answers(), OPEN),
    case("5.1", "open: WINDOW_UPDATE", (window_update(1, 1), data(b"x", END_STREAM)), answers(), OPEN),
    case("5.1", "open: RST_STREAM", rst(), GOES_ON, OPEN, lambda seen: 1 not in seen.statuses),
    case("5.1", "open: unknown frame", (Frame(UNKNOWN, b"x", 1, 1), data(b"", END_STREAM)), answers(), OPEN),
    case("5.1", "half-closed (remote): DATA", data(b"x"), resets(CLOSED), HALF_CLOSED),
    case("5.1", "half-closed (remote): DATA that ends it", data(b"", END_STREAM), resets(CLOSED), HALF_CLOSED),
    case("5.1", "half-closed (remote): HEADERS", get(), resets(CLOSED), HALF_CLOSED),
    case("5.1", "half-closed (remote): CONTINUATION", continuation(block()), ends(PROTOCOL), HALF_CLOSED),
    case("5.1", "half-closed (remote): WINDOW_UPDATE", window_update(1, 1), GOES_ON, HALF_CLOSED),
    case("5.1", "half-closed (remote): PRIORITY", priority(), GOES_ON, HALF_CLOSED),
    case("5.1", "half-closed (remote): RST_STREAM", rst(), GOES_ON, HALF_CLOSED),
    case("5.1", "half-closed (remote): unknown frame", Frame(UNKNOWN, b"x", 1, 1), GOES_ON, HALF_CLOSED),
    case("5.1", "closed by END_STREAM: DATA", data(b"x"), resets(CLOSED), ENDED),
    case("5.1", "closed by END_STREAM: HEADERS", get(), ends(CLOSED), ENDED),
    case("5.1", "closed by END_STREAM: CONTINUATION", continuation(block()), ends(PROTOCOL), ENDED),
    case("5.1", "closed by END_STREAM: WINDOW_UPDATE", window_update(1, 1), GOES_ON, ENDED),
    case("5.1", "closed by END_STREAM: RST_STREAM", rst(), GOES_ON, ENDED),
    case("5.1", "closed by END_STREAM: PRIORITY", priority(), GOES_ON, ENDED),
    case("5.1", "closed by the peer's RST_STREAM: DATA", data(b"x"), resets(CLOSED), RESET_BY_PEER),
    case("5.1", "closed by the peer's RST_STREAM: HEADERS", get(), resets(CLOSED), RESET_BY_PEER),
    case("5.1", "closed by the peer's RST_STREAM: CONTINUATION", continuation(b""), ends(PROTOCOL), RESET_BY_PEER),
    case("5.1", "closed by the peer's RST_STREAM: WINDOW_UPDATE", window_update(1, 1), GOES_ON, RESET_BY_PEER),
    case("5.1", "closed by the peer's RST_STREAM: PRIORITY", priority(), GOES_ON, RESET_BY_PEER),
    case("5.1", "closed by the peer's RST_STREAM: RST_STREAM", rst(), GOES_ON, RESET_BY_PEER),
    case("5.1", "closed by our RST_STREAM: WINDOW_UPDATE", window_update(1, 1), resets(PROTOCOL), RESET_BY_US),
    case("5.1", "closed by our RST_STREAM: RST_STREAM", rst(), resets(PROTOCOL), RESET_BY_US),
    case("5.1", "closed by our RST_STREAM: PRIORITY", priority(), resets(PROTOCOL), RESET_BY_US),
    case("5.1", "closed by our RST_STREAM: HEADERS", get(), resets(PROTOCOL), RESET_BY_US, is_reset_once),
    case("5.1", "closed by our RST_STREAM: DATA", data(b"x"), resets(PROTOCOL), RESET_BY_US, is_reset_once),
    case("5.1", "closed by our RST_STREAM: CONTINUATION", continuation(b""), ends(PROTOCOL), RESET_BY_US),
    case("5.1", "closed by an early answer: DATA", data(b"x"), answers(), ANSWERED_EARLY),
    case("5.1", "closed by an early answer: the last DATA", data(b"x", END_STREAM), answers(), ANSWERED_EARLY),
    case(
        "5.1",
        "closed by an early answer: trailers",
        headers(literal(b"x", b"1", 0x40)),
        answers(),
        ANSWERED_EARLY,
    ),
    case(
        "5.1",
        "field blocks on closed streams count for compression",
        (headers(literal(b"x", b"y", 0x40)), headers(block() + b"\xbe", stream=3)),
        answers(stream=3),
        ANSWERED_EARLY,
    ),
    case(
        "5.1",
        "DATA on closed streams counts for the connection's window",
        tuple(data(bytes(LARGEST)) for _ in range(33)),  # more than the window of 512 KiB
        answers(),
        ANSWERED_EARLY,
        lambda seen: sum(f.number for f in seen.of(WINDOW_UPDATE) if f.stream == 0) >= 2**19 - 65_535 + 2**18,
    ),
    case("5.1.1", "even stream: HEADERS", get(stream=2), ends(PROTOCOL)),
    case("5.1.1", "even stream: DATA", data(b"x", stream=2), ends(PROTOCOL)),
    case("5.1.1", "even stream: RST_STREAM", rst(stream=2), ends(PROTOCOL)),
    case("5.1.1", "even stream: WINDOW_UPDATE", window_update(1, 2), ends(PROTOCOL)),
    case("5.1.1", "lower stream: HEADERS", get(), ends(PROTOCOL), PASSED_OVER),
    case("5.1.1", "lower stream: WINDOW_UPDATE", window_update(1, 1), GOES_ON, PASSED_OVER),
    case("5.1.1", "lower stream: RST_STREAM", rst(), GOES_ON, PASSED_OVER),
    case("5.1.1", "used stream: HEADERS", get(), ends(CLOSED), ENDED),
    case("5.1.1", "streams may be left out", (get(stream=5), get(stream=11)), answers(stream=11)),
    case(
        "5.1.1",
        "the highest stream",
        get(stream=HIGHEST_STREAM_ID),
        GOES_ON,
        check=lambda seen: 200 in seen.statuses.values(),
    ),
)

PRIORITIES = (
    case("5.3", "HEADERS with a priority", headers(bytes(4) + b"\xff" + block(), 0x25), answers()),
    case("5.3", "HEADERS with a priority on a stream that is not", headers(b"\0\0\0\x63\0" + block(), 0x25), answers()),
    case("5.3", "exclusive dependency", headers(b"\x80\0\0\0\0" + block(), 0x25), answers()),
    case(  # RFC 7540 §5.3.1; RFC 9113 has dropped it with all of priority
        "5.3.1",
        "HEADERS that depend on themselves",
        headers(lambda stream: stream.to_bytes(4, "big") + b"\0" + block(), 0x25),
        ends(PROTOCOL),  # §5.4.1: a stream error may be treated as the connection's
    ),
    case(
        "5.3.1",
        "PRIORITY that depends on itself",
        Frame(PRIORITY, lambda stream: stream.to_bytes(4, "big") + b"\0", 0, 1),
        resets(PROTOCOL),
        HALF_CLOSED,
    ),
    case(
        "5.3.1",
        "PRIORITY of an idle stream that depends on itself",
        Frame(PRIORITY, lambda stream: stream.to_bytes(4, "big") + b"\0", 0, 1),
        ends(PROTOCOL),
    ),
    case("6.3", "PRIORITY on stream 0", priority(stream=0), ends(PROTOCOL)),
    case("6.3", "PRIORITY of 4 bytes", Frame(PRIORITY, bytes(4), 0, 1), resets(SIZE), HALF_CLOSED),
    case("6.3", "PRIORITY of 6 bytes", Frame(PRIORITY, bytes(6), 0, 1), resets(SIZE), HALF_CLOSED),
    case("6.3", "PRIORITY of no bytes", Frame(PRIORITY, b"", 0, 1), resets(SIZE), OPEN),
    case("6.3", "PRIORITY of 4 bytes on an idle stream", Frame(PRIORITY, bytes(4), 0, 1), ends(SIZE)),
    case("6.3", "PRIORITY of 4 bytes on a closed stream", Frame(PRIORITY, bytes(4), 0, 1), answers(), ENDED),
)

DATA_FRAMES = (
    case("6.1", "DATA on stream 0", data(b"x", stream=0), ends(PROTOCOL)),
    case("6.1", "DATA with padding", data(padded(b"abc", 9), 0x9), answers(), OPEN, has_body(b"3")),
    case("6.1", "DATA with no more than padding", data(padded(b"", 9), 0x9), answers(), OPEN, has_body(b"0")),
    case("6.1", "DATA with padding of no length", data(padded(b"abc", 0), 0x9), answers(), OPEN, has_body(b"3")),
    case("6.1", "DATA with padding as long as the frame", data(padded(b"abc", 0, 4), 0x9), ends(PROTOCOL), OPEN),
    case("6.1", "DATA with padding longer than the frame", data(padded(b"abc", 0, 255), 0x9), ends(PROTOCOL), OPEN),
    case("6.1", "DATA without room for its padding's length", data(b"", 0x9), ends(SIZE), OPEN),
    case("6.1", "DATA of nothing", data(b"", END_STREAM), answers(), OPEN, has_body(b"0")),
    case("6.1", "DATA in pieces", (data(b"ab"), data(), data(b"c", 0x1)), answers(), OPEN, has_body(b"3")),
    case(
        "6.1",
        "padding counts for the windows, and is given back",
        tuple(data(padded(b"", 255), PADDED) for _ in range(150)),
        GOES_ON,
        (*OPEN, *(data(padded(b"", 255), PADDED) for _ in range(150))),
        lambda seen: sum(f.number for f in seen.of(WINDOW_UPDATE, 1)) >= 300 * 256 - 65_535,
    ),
)

HEADER_FRAMES = (
    case("6.2", "HEADERS on stream 0", get(stream=0), ends(PROTOCOL)),
    case("6.2", "HEADERS with padding", headers(padded(block(), 200), 0x0D), answers()),
    case("6.2", "HEADERS with padding and priority", headers(padded(bytes(5) + block(), 7), 0x2D), answers()),
    case("6.2", "HEADERS with padding that exceeds them", headers(padded(block(), 0, 250), 0x0D), ends(PROTOCOL)),
    case(
        "6.2",
        "HEADERS with padding one longer than the block",
        headers(padded(block(), 0, len(block()) + 1), 0x0D),
        ends(PROTOCOL),
    ),
    case("6.2", "HEADERS with padding that exceeds the block", headers(padded(bytes(7), 0, 6), 0x2D), ends(PROTOCOL)),
    case("6.2", "HEADERS of padding alone", (headers(padded(b"", 4), 0x9), continuation(block())), answers()),
    case(
        "6.2",
        "HEADERS of padding and priority alone",
        (headers(padded(bytes(5), 4), 0x29), continuation(block())),
        answers(),
    ),
    case("6.2", "HEADERS without room for their padding's length", headers(b"", 0x0D), ends(SIZE)),
    case("6.2", "HEADERS without room for their priority", headers(bytes(4), 0x25), ends(SIZE)),
    case("6.2", "HEADERS without room for padding and priority", headers(bytes(5), 0x2D), ends(SIZE)),
    case("6.2", "HEADERS of nothing", headers(b""), resets(PROTOCOL)),
    case("6.10", "CONTINUATION on stream 0", continuation(block(), stream=0), ends(PROTOCOL)),
    case("6.10", "CONTINUATION on stream 0 in a block", (headers(b"", 0), continuation(b"", stream=0)), ends(PROTOCOL)),
    case("6.10", "CONTINUATION of another stream", (headers(b"", 0), continuation(b"", stream=3)), ends(PROTOCOL)),
    case("6.10", "CONTINUATION after a complete block", (get(), continuation(b"")), ends(PROTOCOL)),
    case("6.10", "CONTINUATION after the last", (*split(block(), 9), continuation(b"")), ends(PROTOCOL)),
    case("6.10", "CONTINUATION after DATA", (data(b"x"), continuation(b"")), ends(PROTOCOL), OPEN),
    case("6.10", "CONTINUATION without END_HEADERS after a block", (get(), continuation(b"", 0)), ends(PROTOCOL)),
    case("6.10", "END_STREAM on CONTINUATION means nothing", (post(), continuation(b"")), ends(PROTOCOL)),
    case("6.10", "eight CONTINUATIONs", split(block(), 1, 2, 3, 4, 5, 6, 7, 8), answers()),
    case(
        "6.10",
        "the END_STREAM of HEADERS holds for the block",
        split(block(path=b"/read"), 9),
        answers(),
        check=has_body(b"0"),
    ),
)

RESETS = (
    case("6.4", "RST_STREAM on stream 0", rst(stream=0), ends(PROTOCOL)),
    case("6.4", "RST_STREAM of an idle stream", rst(stream=7), ends(PROTOCOL), ENDED),
    case("6.4", "RST_STREAM of 3 bytes", Frame(RST_STREAM, bytes(3), 0, 1), ends(SIZE), HALF_CLOSED),
    case("6.4", "RST_STREAM of 5 bytes", Frame(RST_STREAM, bytes(5), 0, 1), ends(SIZE), HALF_CLOSED),
    case("6.4", "RST_STREAM of no bytes on a closed stream", Frame(RST_STREAM, b"", 0, 1), ends(SIZE), ENDED),
    case("5.4.2", "RST_STREAM is not answered", rst(), GOES_ON, HALF_CLOSED, lambda seen: not seen.of(RST_STREAM)),
    case("7", "RST_STREAM with an unknown code", rst(0xDEADBEEF), GOES_ON, HALF_CLOSED),
    case(
        "6.4",
        "nothing is sent on a stream that was reset",
        rst(),
        GOES_ON,
        (get(b"/wait"), rst()),
        lambda seen: not seen.has_ended(1),
    ),
)

SETTINGS_FRAMES = (
    case("6.5", "SETTINGS are acknowledged", settings(), GOES_ON, check=has_acks(1)),
    case("6.5", "SETTINGS are acknowledged each", (settings(), settings(), settings()), GOES_ON, check=has_acks(3)),
    case("6.5", "SETTINGS ACK", settings(flags=ACK), GOES_ON, check=has_acks(0)),
    case("6.5", "SETTINGS ACK with a payload", settings((MAX_STREAMS, 1), flags=ACK), ends(SIZE)),
    case("6.5", "SETTINGS ACK with a byte", Frame(SETTINGS, b"x", ACK), ends(SIZE)),
    case("6.5", "SETTINGS on an idle stream", Frame(SETTINGS, b"", 0, 1), ends(PROTOCOL)),
    case("6.5", "SETTINGS on a stream", Frame(SETTINGS, b"", 0, 1), ends(PROTOCOL), OPEN),
    case("6.5", "SETTINGS of 5 bytes", Frame(SETTINGS, bytes(5)), ends(SIZE)),
    case("6.5", "SETTINGS of 7 bytes", Frame(SETTINGS, bytes(7)), ends(SIZE)),
    case("6.5.2", "ENABLE_PUSH 0", settings((ENABLE_PUSH, 0)), GOES_ON, check=has_acks(1)),
    case("6.5.2", "ENABLE_PUSH 1", settings((ENABLE_PUSH, 1)), GOES_ON, check=has_acks(1)),
    case("6.5.2", "ENABLE_PUSH 2", settings((ENABLE_PUSH, 2)), ends(PROTOCOL)),
    case("6.5.2", "INITIAL_WINDOW_SIZE 2^31 - 1", settings((INITIAL_WINDOW, 2**31 - 1)), GOES_ON, check=has_acks(1)),
    case("6.5.2", "INITIAL_WINDOW_SIZE 2^31", settings((INITIAL_WINDOW, 2**31)), ends(FLOW)),
    case("6.5.2", "MAX_FRAME_SIZE 2^14 - 1", settings((MAX_FRAME, 2**14 - 1)), ends(PROTOCOL)),
    case("6.5.2", "MAX_FRAME_SIZE 2^14", settings((MAX_FRAME, 2**14)), GOES_ON, check=has_acks(1)),
    case("6.5.2", "MAX_FRAME_SIZE 2^24 - 1", settings((MAX_FRAME, 2**24 - 1)), GOES_ON, check=has_acks(1)),
    case("6.5.2", "MAX_FRAME_SIZE 2^24", settings((MAX_FRAME, 2**24)), ends(PROTOCOL)),
    case("6.5.2", "MAX_CONCURRENT_STREAMS 0 holds for pushes", (settings((MAX_STREAMS, 0)), get()), answers()),
    case("6.5.2", "MAX_HEADER_LIST_SIZE 0 is advice", (settings((MAX_LIST, 0)), get()), answers()),
    case("6.5.2", "HEADER_TABLE_SIZE 2^32 - 1", (settings((TABLE_SIZE, 2**32 - 1)), get()), answers()),
    case("6.5.2", "unknown setting", settings((UNKNOWN_SETTING, 7)), GOES_ON, check=has_acks(1)),
    case("6.5.2", "setting 0", settings((0, 7)), GOES_ON, check=has_acks(1)),
    case(
        "6.5.3", "first a wrong value, then a right one", settings((MAX_FRAME, 1), (MAX_FRAME, 2**14)), ends(PROTOCOL)
    ),
    case(
        "6.5.3",
        "the last of a setting's values holds",
        (settings((INITIAL_WINDOW, 0), (INITIAL_WINDOW, 1)), get()),
        answers(),
        check=sent(1),
        restore=(settings((INITIAL_WINDOW, 65_535)),),
    ),
    case("8441 3", "ENABLE_CONNECT_PROTOCOL 2", settings((8, 2)), ends(PROTOCOL)),
)

CONNECTION_FRAMES = (
    case("6.6", "PUSH_PROMISE", Frame(PUSH_PROMISE, b"\0\0\0\2" + block(), END_HEADERS, 1), ends(PROTOCOL), OPEN),
    case("6.6", "PUSH_PROMISE on stream 0", Frame(PUSH_PROMISE, b"\0\0\0\2", END_HEADERS), ends(PROTOCOL)),
    case("8.4", "PUSH_PROMISE on an idle stream", Frame(PUSH_PROMISE, b"\0\0\0\2", END_HEADERS, 1), ends(PROTOCOL)),
    case(
        "6.7", "PING is answered with its payload", ping(b"12345678"), GOES_ON, check=lambda s: s.has_pong(b"12345678")
    ),
    case(
        "6.7", "PING ACK is not answered", ping(b"12345678", ACK), GOES_ON, check=lambda s: not s.has_pong(b"12345678")
    ),
    case("6.7", "PING on a stream", Frame(PING, bytes(8), 0, 1), ends(PROTOCOL), OPEN),
    case("6.7", "PING ACK on an idle stream", Frame(PING, bytes(8), ACK, 1), ends(PROTOCOL)),
    case("6.7", "PING of 7 bytes", Frame(PING, bytes(7)), ends(SIZE)),
    case("6.7", "PING of 9 bytes", Frame(PING, bytes(9)), ends(SIZE)),
    case("6.7", "PING of no bytes", Frame(PING), ends(SIZE)),
    case("6.8", "GOAWAY leaves what was asked for", (goaway(), data(b"x", END_STREAM)), answers(), OPEN),
    case("6.8", "GOAWAY with debug data", goaway(0, 0, b"goodbye"), GOES_ON),
    case("6.8", "GOAWAY again, with a lower stream", (goaway(0, 2**31 - 1), goaway(0, 0)), GOES_ON),
    case("6.8", "GOAWAY on a stream", Frame(GOAWAY, bytes(8), 0, 1), ends(PROTOCOL), OPEN),
    case("6.8", "GOAWAY of 7 bytes", Frame(GOAWAY, bytes(7)), ends(SIZE)),
)

WINDOWS = (
    case("6.9", "WINDOW_UPDATE of 0 on the connection", window_update(0), ends(PROTOCOL)),
    case("6.9", "WINDOW_UPDATE of 0 on a stream", window_update(0, 1), resets(PROTOCOL), HALF_CLOSED),
    case("6.9", "WINDOW_UPDATE of 0 on an idle stream", window_update(0, 1), ends(PROTOCOL)),
    case("6.9", "WINDOW_UPDATE of 0 but for the reserved bit", window_update(RESERVED, 1), resets(PROTOCOL), OPEN),
    case("6.9", "WINDOW_UPDATE with the reserved bit", window_update(RESERVED | 5), GOES_ON),
    case(
        "6.9", "WINDOW_UPDATE with the reserved bit on a stream", window_update(RESERVED | 5, 1), GOES_ON, HALF_CLOSED
    ),
    case("6.9", "WINDOW_UPDATE of 3 bytes", Frame(WINDOW_UPDATE, bytes(3)), ends(SIZE)),
    case("6.9", "WINDOW_UPDATE of 5 bytes", Frame(WINDOW_UPDATE, bytes(5)), ends(SIZE)),
    case("6.9", "WINDOW_UPDATE of 3 bytes on a stream", Frame(WINDOW_UPDATE, bytes(3), 0, 1), ends(SIZE), OPEN),
    case(
        "6.9",
        "a response waits for its window",
        (settings((INITIAL_WINDOW, 0)), get()),
        answers(),
        check=sent(),
        restore=(settings((INITIAL_WINDOW, 65_535)),),
    ),
    case(
        "6.9.1",
        "a window that grows by one lets one byte through",
        (settings((INITIAL_WINDOW, 0)), get(), window_update(1, 1)),
        answers(),
        check=sent(1),
        restore=(settings((INITIAL_WINDOW, 65_535)),),
    ),
    case("6.9.1", "connection's window of 2^31 - 1 and more", window_update(LARGEST_INCREMENT), ends(FLOW)),
    case(
        "6.9.1",
        "stream's window of more than 2^31 - 1",
        window_update(LARGEST_INCREMENT, 1),
        resets(FLOW),
        HALF_CLOSED,
    ),
    case(
        "6.9.1",
        "stream's window past its end in two steps",
        (window_update(2**30, 1), window_update(2**30, 1)),
        resets(FLOW),
        HALF_CLOSED,
    ),
    case(
        "6.9.1",
        "body past the stream's window",
        tuple(data(bytes(LARGEST)) for _ in range(4)),  # 65,536 bytes, one more than the window
        ends(FLOW),
        (post(b"/later"),),
    ),
    case(
        "6.9.1",
        "body that fills the stream's window",
        (*(data(bytes(LARGEST)) for _ in range(3)), data(bytes(LARGEST - 1))),
        GOES_ON,
        (post(b"/later"),),
        lambda seen: not seen.of(WINDOW_UPDATE, 1),
    ),
    case(
        "6.9.2",
        "SETTINGS make windows grow",
        settings((INITIAL_WINDOW, 65_535)),
        answers(),
        (settings((INITIAL_WINDOW, 1)), get()),
        has_body(b"ok"),
    ),
    case(
        "6.9.2",
        "SETTINGS make a window negative, and it is kept",
        (settings((INITIAL_WINDOW, 0)), window_update(1, 1)),
        answers(),
        (settings((INITIAL_WINDOW, 1)), get()),  # one byte is sent: the window is -1, then 0
        sent(1),
        (settings((INITIAL_WINDOW, 65_535)),),
    ),
    case(
        "6.9.2",
        "SETTINGS that push a window past 2^31 - 1",
        settings((INITIAL_WINDOW, 2**31 - 1)),
        ends(FLOW),
        (*HALF_CLOSED, window_update(65_535, 1)),
    ),
    case(
        "6.9.2",
        "SETTINGS do not change the connection's window",
        (settings((INITIAL_WINDOW, 2**31 - 1)), window_update(2**31 - 1 - 65_535)),
        GOES_ON,
    ),
)

MESSAGES = (
    case("8.1", "request with a body", data(b"body", END_STREAM), answers(), OPEN, has_body(b"4")),
    case(
        "8.1",
        "request with trailers",
        (data(b"body"), headers(literal(b"x-sum", b"1"))),
        answers(),
        OPEN,
        has_body(b"4"),
    ),
    case("8.1", "request with nothing but trailers", headers(literal(b"x", b"1")), answers(), OPEN, has_body(b"0")),
    case("8.1", "trailers without END_STREAM", headers(literal(b"x", b"1"), END_HEADERS), resets(PROTOCOL), OPEN),
    case("8.1", "second head without END_STREAM", post(), resets(PROTOCOL), OPEN),
    case("8.1", "DATA after trailers", (headers(literal(b"x", b"1")), data(b"x")), resets(CLOSED), (post(b"/wait"),)),
    case("8.1", "HEADERS after trailers", (headers(literal(b"x", b"1")), get()), resets(CLOSED), (post(b"/wait"),)),
    case("8.1", "pseudo-field in trailers", headers(literal(b":path", b"/")), resets(PROTOCOL), OPEN),
    case("8.1", "status in trailers", headers(literal(b":status", b"200")), resets(PROTOCOL), OPEN),
    case("8.1", "upper case in trailers", headers(literal(b"X", b"1")), resets(PROTOCOL), OPEN),
    case("8.1", "connection in trailers", headers(literal(b"connection", b"close")), resets(PROTOCOL), OPEN),
    case("8.1.1", "content-length is right", of_body(b"4", data(b"bo"), data(b"dy", 0x1)), answers()),
    case("8.1.1", "content-length of 0", of_body(b"0", data(b"", 0x1)), answers()),
    case("8.1.1", "content-length does not count padding", of_body(b"4", data(padded(b"body", 9), 0x9)), answers()),
    case("8.1.1", "content-length without a body", headers(block((b"content-length", b"1"))), resets(PROTOCOL)),
    case("8.1.1", "content-length too long", of_body(b"5", data(b"body", 0x1)), resets(PROTOCOL)),
    case("8.1.1", "content-length too short", of_body(b"3", data(b"body", 0x1)), resets(PROTOCOL)),
    case("8.1.1", "content-length too short, in mid-body", of_body(b"3", data(b"body")), resets(PROTOCOL)),
    case(
        "8.1.1", "content-length too long for several", of_body(b"5", data(b"bo"), data(b"dy", 0x1)), resets(PROTOCOL)
    ),
    case(
        "8.1.1", "content-length too short for several", of_body(b"3", data(b"bo"), data(b"dy", 0x1)), resets(PROTOCOL)
    ),
    case("8.1.1", "content-length and an empty body", of_body(b"3", data(b"", 0x1)), resets(PROTOCOL)),
    case(
        "8.1.1",
        "content-length too long before trailers",
        of_body(b"5", data(b"body"), headers(literal(b"x", b"1"))),
        resets(PROTOCOL),
    ),
    case("8.1.1", "content-length that is no number", of_body(b"4x", data(b"body", 0x1)), resets(PROTOCOL)),
    case("8.1.1", "content-length that is negative", of_body(b"-4", data(b"body", 0x1)), resets(PROTOCOL)),
    case("8.1.1", "content-length with a sign", of_body(b"+4", data(b"body", 0x1)), resets(PROTOCOL)),
    case("8.1.1", "content-length of nothing", of_body(b"", data(b"", 0x1)), resets(PROTOCOL)),
    case("8.1.1", "content-length of 5,000 digits", of_body(b"9" * 5000, data(b"body", 0x1)), resets(PROTOCOL)),
    case("8.1.1", "content-length of a list", of_body(b"4, 4", data(b"body", 0x1)), resets(PROTOCOL)),
    case(
        "8.1.1",
        "two content-lengths",
        (post(b"/read", 1, (b"content-length", b"4"), (b"content-length", b"5")), data(b"body", 0x1)),
        resets(PROTOCOL),
    ),
    case("8.2.1", "upper case in a name", of_field(b"X-Upper"), resets(PROTOCOL)),
    case("8.2.1", "empty name", of_field(b""), resets(PROTOCOL)),
    case("8.2.1", "space in a name", of_field(b"x y"), resets(PROTOCOL)),
    case("8.2.1", "colon in a name", of_field(b"x:y"), resets(PROTOCOL)),
    case("8.2.1", "NUL in a name", of_field(b"x\0"), resets(PROTOCOL)),
    case("8.2.1", "DEL in a name", of_field(b"x\x7f"), resets(PROTOCOL)),
    case("8.2.1", "byte above ASCII in a name", of_field(b"x\xe4"), resets(PROTOCOL)),
    case("8.2.1", "NUL in a value", of_field(b"x", b"a\0b"), resets(PROTOCOL)),
    case("8.2.1", "CR in a value", of_field(b"x", b"a\rb"), resets(PROTOCOL)),
    case("8.2.1", "LF in a value", of_field(b"x", b"a\nb"), resets(PROTOCOL)),
    case("8.2.1", "space before a value", of_field(b"x", b" a"), resets(PROTOCOL)),
    case("8.2.1", "tab before a value", of_field(b"x", b"\ta"), resets(PROTOCOL)),
    case("8.2.1", "space after a value", of_field(b"x", b"a "), resets(PROTOCOL)),
    case("8.2.1", "tab after a value", of_field(b"x", b"a\t"), resets(PROTOCOL)),
    case("8.2.1", "empty value", of_field(b"x", b""), answers()),
    case("8.2.1", "byte above ASCII in a value", of_field(b"x", b"\xe4"), answers()),
    case("8.2.1", "LF in a pseudo-field", headers(block(path=b"/\n")), resets(PROTOCOL)),
    case("8.2.2", "connection", of_field(b"connection", b"close"), resets(PROTOCOL)),
    case("8.2.2", "proxy-connection", of_field(b"proxy-connection", b"close"), resets(PROTOCOL)),
    case("8.2.2", "keep-alive", of_field(b"keep-alive"), resets(PROTOCOL)),
    case("8.2.2", "transfer-encoding", of_field(b"transfer-encoding", b"chunked"), resets(PROTOCOL)),
    case("8.2.2", "upgrade", of_field(b"upgrade", b"websocket"), resets(PROTOCOL)),
    case("8.2.2", "te of something else", of_field(b"te", b"gzip"), resets(PROTOCOL)),
    case("8.2.2", "te of more than trailers", of_field(b"te", b"trailers, gzip"), resets(PROTOCOL)),
    case("8.2.2", "te of trailers", of_field(b"te", b"trailers"), answers()),
    case(
        "8.2.3",
        "crumbs of a cookie, which is not kept",
        headers(block((b"cookie", b"a=1"), (b"x", b"y"), (b"cookie", b"b=2"), path=b"/cookie")),
        answers(),
        check=has_body(b""),
    ),
    case("8.3", "unknown pseudo-field", headers(block((b":unknown", b"1"))), resets(PROTOCOL)),
    case("8.3", "pseudo-field of responses", headers(block((b":status", b"200"))), resets(PROTOCOL)),
    case("8.3", "informational status alone", headers(literal(b":status", b"100")), resets(PROTOCOL)),
    case("8.3", "pseudo-field after a field", headers(literal(b"x", b"y") + block()), resets(PROTOCOL)),
    case("8.3", "pseudo-field twice", headers(literal(b":path", b"/now") + block()), resets(PROTOCOL)),
    case("8.3.1", "method twice", headers(literal(b":method", b"GET") + block()), resets(PROTOCOL)),
    case("8.3.1", "scheme twice", headers(literal(b":scheme", b"http") + block()), resets(PROTOCOL)),
    case("8.3.1", "authority twice", headers(literal(b":authority", b"a") + block()), resets(PROTOCOL)),
    case("8.3.1", "no method", headers(block(without=b"method")), resets(PROTOCOL)),
    case("8.3.1", "no scheme", headers(block(without=b"scheme")), resets(PROTOCOL)),
    case("8.3.1", "no path", headers(block(without=b"path")), resets(PROTOCOL)),
    case("8.3.1", "neither authority nor host", headers(block(without=b"authority")), resets(PROTOCOL)),
    case("8.3.1", "host for authority", headers(block((b"host", b"a"), without=b"authority")), answers()),
    case("8.3.1", "host as authority", headers(block((b"host", b"a"))), answers()),
    case("8.3.1", "host other than authority", headers(block((b"host", b"b"))), resets(PROTOCOL)),
    case("8.3.1", "authority with a user", headers(block(authority=b"me@a")), resets(PROTOCOL)),
    case("8.3.1", "empty authority", headers(block(authority=b"")), resets(PROTOCOL)),
    case("8.3.1", "empty path", headers(block(path=b"")), resets(PROTOCOL)),
    case("8.3.1", "path that does not begin with a slash", headers(block(path=b"now")), resets(PROTOCOL)),
    case("8.3.1", "path * of another method", headers(block(path=b"*")), resets(PROTOCOL)),
    case("8.3.1", "path * of OPTIONS", headers(block(path=b"*", method=b"OPTIONS")), answers()),
    case("8.3.1", "empty scheme", headers(block(scheme=b"")), resets(PROTOCOL)),
    case("8.3.1", "empty method", headers(block(method=b"")), resets(PROTOCOL)),
    case(
        "8.5",
        "CONNECT",
        headers(literal(b":method", b"CONNECT") + literal(b":authority", b"a:1"), END_HEADERS),
        answers(501),
    ),
    case("8.5", "CONNECT with scheme and path", headers(block(method=b"CONNECT"), END_HEADERS), resets(PROTOCOL)),
    case("8.5", "CONNECT without an authority", headers(literal(b":method", b"CONNECT"), 0x4), resets(PROTOCOL)),
    case(
        "8441 4",
        "extended CONNECT, which is not offered",
        headers(block((b":protocol", b"websocket"), method=b"CONNECT"), END_HEADERS),
        resets(PROTOCOL),
    ),
    case(
        "8.1",
        "answer to HEAD has no body",
        headers(block(method=b"HEAD")),
        answers(),
        check=lambda seen: not seen.body() and seen.has_ended(),
    ),
    case(
        "8.1",
        "100 Continue comes before the final answer",
        post(b"/read", 1, (b"expect", b"100-continue")),
        answers(100),
        restore=(data(b"x", END_STREAM),),
    ),
    case(
        "8.1",
        "answer that needs no body ends the upload without an error",
        post(b"/now"),
        answers(),
        check=lambda seen: [frame.number for frame in seen.of(RST_STREAM, 1)] == [ErrorCodes.NO_ERROR],
    ),
)

CASES = (
    *FORMAT,
    *STATES,
    *PRIORITIES,
    *DATA_FRAMES,
    *HEADER_FRAMES,
    *RESETS,
    *SETTINGS_FRAMES,
    *CONNECTION_FRAMES,
    *WINDOWS,
    *MESSAGES,
)
