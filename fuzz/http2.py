"""A connection's bytes to HTTP/2, gate and h2 included: requests, or a GOAWAY, and well-formed frames in answer.

However the bytes are split over reads, the connection fails with the same code or not at all, and the requests that
nobody takes back are the same: as long as we reset no stream, for what comes behind that is judged by when it was.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from fuzz.frames import stream_of_frames
from server.wire.frame_gate import FRAME_HEADER, GOAWAY, HEADER_BYTES, RST_STREAM
from server.wire.http2 import Http2Protocol
from server.wire.limits import HeadLimits, Http2Limits
from server.wire.messages import BodyChunk, BodyEnd, HttpRequest, ProtocolViolation, ResponseHead, StreamReset

_ANSWER = ResponseHead(200, ((b"x-request-id", b"1"),))
_SMALL_STEP = 7
_LARGE_STEP = 1_000
_NUM_READS = 500  # at most, so that an input takes no longer than it is worth
_FLUSH_BYTES = 2**16


@dataclass
class Reading:
    """What came of it.

    Args:
        requests: by stream, with their bodies so far; those that were reset are none.
        code: of the GOAWAY that the connection failed with.
        has_reset: we have reset a stream.
    """

    requests: dict[int, list[object]] = field(default_factory=dict)
    code: int | None = None
    has_reset: bool = False


def check(data: bytes) -> None:
    said = stream_of_frames(data)
    whole = _read(said, len(said) or 1)
    for step in (_SMALL_STEP, _LARGE_STEP):
        reading = _read(said, max(step, len(said) // _NUM_READS))
        if whole.has_reset or reading.has_reset:
            continue
        assert reading.code == whole.code, (reading.code, whole.code)
        if whole.code is None:
            assert reading.requests == whole.requests, (reading.requests, whole.requests)
    _answer(said)


def _new_protocol() -> Http2Protocol:
    return Http2Protocol(HeadLimits(), Http2Limits(), lambda: b"now")


def _read(said: bytes, step: int) -> Reading:
    """Listen, and answer nothing."""
    protocol = _new_protocol()
    reading = Reading()
    for start in range(0, len(said), step):
        for event in protocol.receive(said[start : start + step], 0.0):
            if isinstance(event, HttpRequest | ProtocolViolation):
                assert event.stream_id not in reading.requests
                reading.requests[event.stream_id] = [event, b""]
            elif isinstance(event, BodyChunk):
                body = reading.requests[event.stream_id][1]
                assert isinstance(body, bytes)
                reading.requests[event.stream_id][1] = body + event.data
            elif isinstance(event, BodyEnd):
                reading.requests[event.stream_id].append("end")
            elif isinstance(event, StreamReset):
                reading.requests.pop(event.stream_id, None)  # a malformed one was never told of
    out = list(_frames(b"".join(protocol.take_control())))
    reading.has_reset = any(kind == RST_STREAM for kind, _ in out)
    if protocol.has_failed:
        kind, payload = out[-1]
        assert kind == GOAWAY
        reading.code = int.from_bytes(payload[4:8], "big")
        assert protocol.receive(b"more", 0.0) == []
    else:
        assert all(kind != GOAWAY for kind, _ in out)
    return reading


def _answer(said: bytes) -> None:
    """Answer every request as it comes, and drain in the middle of it."""
    protocol = _new_protocol()
    for number, start in enumerate(range(0, len(said), _LARGE_STEP)):
        for event in protocol.receive(said[start : start + _LARGE_STEP], float(number)):
            if isinstance(event, BodyChunk):
                protocol.acknowledge(event.stream_id, len(event.data))
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
