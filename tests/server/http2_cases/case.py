"""What a case is: frames in a state of stream 1, and what is to come of them.

Streams are counted from the first that is free on the connection: 1 is the next that a client may open.
"""

from collections.abc import Callable
from dataclasses import dataclass

from h2.errors import ErrorCodes

from server.wire.http2_frames import DATA, SETTINGS
from tests.server.raw_http2 import (
    ACK,
    END_HEADERS,
    END_STREAM,
    Frame,
    Seen,
    block,
    continuation,
    get,
    headers,
    post,
    rst,
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
ANSWERED_EARLY = (post(b"/now"),)  # its response has ended, and its request, which is not wanted, has not
PASSED_OVER = (get(stream=3),)  # closed by the use of a higher one

UNKNOWN = 0x77
UNKNOWN_SETTING = 0xF0F0
LARGEST = 16_384
LARGEST_INCREMENT = 2**31 - 1


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
