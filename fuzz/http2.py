"""A connection's bytes to HTTP/2: requests, or a GOAWAY, and well-formed frames in answer.

However the bytes are split over reads, events and answers are the same. Of a connection that fails, the events of the
last read are not told, so that only its answers are compared.
"""

from collections.abc import Iterator

from fuzz.frames import stream_of_frames
from server.wire.http2 import Http2Protocol
from server.wire.http2_frames import FRAME_HEADER, GOAWAY, HEADER_BYTES
from server.wire.limits import HeadLimits, Http2Limits
from server.wire.messages import BodyChunk, Event, HttpRequest, ProtocolViolation, ResponseHead

_ANSWER = ResponseHead(200, ((b"x-request-id", b"1"),))
_STEPS = (1, 7, 1_000)
_READ_BYTES = 1_000
_NUM_READS = 500  # at most, so that an input takes no longer than it is worth
_FLUSH_BYTES = 2**16


def check(data: bytes) -> None:
    said = stream_of_frames(data)
    whole = _read(said, len(said) or 1)
    for step in _STEPS:
        reading = _read(said, max(step, len(said) // _NUM_READS))
        assert reading == whole, (reading, whole)
    _answer(said)


def _new_protocol() -> Http2Protocol:
    return Http2Protocol(HeadLimits(), Http2Limits(), lambda: b"now")


def _read(said: bytes, step: int) -> tuple[bytes, object, list[Event]]:
    """Listen, and answer nothing: what is written, which head is not complete, and the events."""
    protocol = _new_protocol()
    events: list[Event] = []
    for start in range(0, len(said), step):
        events += protocol.receive(said[start : start + step], 0.0)
    out = b"".join(protocol.take_control())
    frames = list(_frames(out))
    assert [kind for kind, _ in frames].count(GOAWAY) == protocol.has_failed
    if protocol.has_failed:
        assert frames[-1] == (GOAWAY, frames[-1][1][:4] + protocol.failed_with.to_bytes(4, "big"))
        assert protocol.receive(b"more", 0.0) == []
        return out, None, []
    return out, protocol.pending_head, events


def _answer(said: bytes) -> None:
    """Answer every request as it comes, and drain in the middle of it."""
    protocol = _new_protocol()
    for number, start in enumerate(range(0, len(said), _READ_BYTES)):
        for event in protocol.receive(said[start : start + _READ_BYTES], float(number)):
            if isinstance(event, BodyChunk):
                protocol.acknowledge(event.stream_id)
            elif isinstance(event, HttpRequest | ProtocolViolation) and protocol.is_open(event.stream_id):
                protocol.responses.send_head(event.stream_id, _ANSWER)
                protocol.responses.send_data(event.stream_id, b"x" * 1_000)
                trailers = ((b"x-sum", b"1"),) if event.stream_id % 3 else ()
                protocol.responses.send_end(event.stream_id, trailers)
        if number == 1:
            protocol.start_drain()
        list(_frames(b"".join(protocol.take_control())))
        if not protocol.has_failed:
            list(_frames(b"".join(protocol.take_data(_FLUSH_BYTES).frames)))


def _frames(out: bytes) -> Iterator[tuple[int, bytes]]:
    """Type and payload of each; all of them must be whole."""
    position = 0
    while position < len(out):
        high, low, kind, _, _ = FRAME_HEADER.unpack_from(out, position)
        end = position + HEADER_BYTES + (high << 16 | low)
        assert end <= len(out)
        yield kind, out[position + HEADER_BYTES : end]
        position = end
