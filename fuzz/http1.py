"""A connection's bytes to HTTP/1.1: the same messages however they are split, and the same that h11 reads.

h11 is the more lenient: what it reads of a connection that we accept must be what we read, body and rest included.
"""

from dataclasses import dataclass, field

import h11

from server.wire.http1 import Http1Protocol
from server.wire.limits import HeadLimits
from server.wire.messages import BodyChunk, Event, Http2Preface, HttpRequest, ProtocolViolation, ResponseHead

_LIMITS = HeadLimits()
_SIZE_LINE_BYTES = 256
_EMPTY = ResponseHead(200, ((b"content-length", b"0"),))


@dataclass
class Message:
    head: HttpRequest
    body: bytes = b""
    is_complete: bool = False


@dataclass
class Reading:
    """What came of a connection's bytes.

    Args:
        end: the status that refused the rest, or what else ended it; empty while it goes on.
    """

    messages: list[Message] = field(default_factory=list)
    end: str = ""


def check(data: bytes) -> None:
    whole = read(data, len(data) or 1)
    for step in (1, 5):
        assert read(data, step) == whole, (read(data, step), whole)
    _compare_with_h11(data, [message for message in whole.messages if message.is_complete])


def read(data: bytes, step: int) -> Reading:
    """Feed so many bytes at a time; every complete request is answered at once."""
    protocol = Http1Protocol(_LIMITS, lambda: b"now")
    reading = Reading()
    for start in range(0, len(data), step):
        _take(protocol, protocol.receive(data[start : start + step]), reading)
        if reading.end:
            assert protocol.receive(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n") == []
            break
        if step == 1:
            assert protocol.num_buffered <= max(_LIMITS.head_bytes, _SIZE_LINE_BYTES)
    return reading


def _take(protocol: Http1Protocol, events: list[Event], reading: Reading) -> None:
    for event in events:
        assert not reading.end
        if isinstance(event, HttpRequest):
            reading.messages.append(Message(event))
        elif isinstance(event, BodyChunk):
            reading.messages[-1].body += event.data
        elif isinstance(event, ProtocolViolation):
            assert event.status in (400, 414, 431, 501)
            if reading.messages and not reading.messages[-1].is_complete:
                reading.messages[-1].body = b""  # nobody gets it: how much came before the fault is of no matter
            reading.end = str(event.status)
        elif isinstance(event, Http2Preface):
            reading.end = "HTTP/2"
    if protocol.has_read_request and not reading.end:
        reading.messages[-1].is_complete = True
        protocol.send_head(_EMPTY)
        protocol.send_end()
        if protocol.keep_alive:
            _take(protocol, protocol.next_request(), reading)
        else:
            reading.end = "closed"


def _compare_with_h11(data: bytes, ours: list[Message]) -> None:
    peer = h11.Connection(h11.SERVER, max_incomplete_event_size=2**20)
    peer.receive_data(data)
    try:
        for message in ours:
            request = peer.next_event()
            assert isinstance(request, h11.Request)
            assert request.method.decode() == message.head.method
            body = b""
            while not isinstance(event := peer.next_event(), h11.EndOfMessage):
                assert isinstance(event, h11.Data), event
                body += event.data
            assert body == message.body
            peer.send(h11.Response(status_code=200, headers=[("content-length", "0")]))
            peer.send(h11.EndOfMessage())
            if peer.our_state is h11.MUST_CLOSE:
                return
            peer.start_next_cycle()
    except h11.RemoteProtocolError:
        return  # it takes no white space before a chunk's extension
