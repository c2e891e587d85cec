"""The protocol without I/O: every input whole and split, answers read back by h11's client."""

import sys
from itertools import pairwise

import h11
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.wire.connection import http_date
from server.wire.http1 import Http1Protocol
from server.wire.limits import HeadLimits
from server.wire.messages import (
    BodyChunk,
    BodyEnd,
    Event,
    HttpRequest,
    ProtocolViolation,
    ResponseError,
    ResponseHead,
)

HOST = b"Host: a\r\n"
GET = b"GET /v1/models?limit=2 HTTP/1.1\r\n" + HOST + b"\r\n"
CHUNKED = b"POST /c HTTP/1.1\r\n" + HOST + b"Transfer-Encoding: chunked\r\n\r\n"
EMPTY = ResponseHead(200, ((b"content-length", b"0"),))


def new_protocol(chunks_at_once: int = sys.maxsize) -> Http1Protocol:
    return Http1Protocol(HeadLimits(), http_date(lambda: 0.0), chunks_at_once)


def understand(pieces: list[bytes], chunks_at_once: int = sys.maxsize) -> list[Event]:
    """All events of a connection whose requests are answered as soon as they are complete, with bodies joined."""
    protocol = new_protocol(chunks_at_once)
    events: list[Event] = []
    for piece in pieces:
        events += protocol.receive(piece)
        while protocol.has_more:
            events += protocol.receive(b"")
        while protocol.has_read_request and protocol.keep_alive:
            protocol.send_head(EMPTY)
            protocol.send_end()
            events += protocol.next_request()
            while protocol.has_more:
                events += protocol.receive(b"")
    return _joined(events)


def _joined(events: list[Event]) -> list[Event]:
    """Body chunks of one request as one; those before a violation do not count."""
    joined: list[Event] = []
    for event in events:
        if isinstance(event, BodyChunk) and joined and isinstance(joined[-1], BodyChunk):
            joined[-1] = BodyChunk(event.stream_id, joined[-1].data + event.data)
        elif isinstance(event, ProtocolViolation) and joined and isinstance(joined[-1], BodyChunk):
            joined[-1] = event
        else:
            joined.append(event)
    return joined


@settings(deadline=None)
@given(st.lists(st.binary(min_size=1, max_size=60), max_size=8), st.lists(st.integers(0, 600), max_size=6))
def test_chunked_bodies_come_back_as_they_were(contents: list[bytes], cuts: list[int]) -> None:
    data = CHUNKED + b"".join(b"%x\r\n%b\r\n" % (len(c), c) for c in contents) + b"0\r\n\r\n" + GET
    bounds = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    events = understand([data[a:b] for a, b in pairwise(bounds)], chunks_at_once=2)
    body = b"".join(event.data for event in events if isinstance(event, BodyChunk))
    assert body == b"".join(contents)
    assert [type(event) for event in events if not isinstance(event, BodyChunk)] == [HttpRequest, BodyEnd, HttpRequest]


def violations(data: bytes) -> list[tuple[int, int]]:
    events = understand([data])
    return [(event.stream_id, event.status) for event in events if isinstance(event, ProtocolViolation)]


def test_small_chunks_are_taken_without_end_once_they_carry_enough() -> None:
    assert violations(CHUNKED + (b"100\r\n" + b"x" * 256 + b"\r\n") * 5000 + b"0\r\n\r\n" + GET) == []
    large = b"186a0\r\n" + b"x" * 100_000 + b"\r\n"  # earns no more than there was in the beginning
    assert violations(CHUNKED + large + b"1\r\nx\r\n" * 1001 + b"0\r\n\r\n") == []
    assert violations(CHUNKED + large + b"1\r\nx\r\n" * 1002 + b"0\r\n\r\n") == [(1, 400)]


def test_trailers_have_the_limits_of_heads() -> None:
    assert violations(CHUNKED + b"0\r\n" + b"X: 1\r\n" * 100 + b"\r\n") == []
    assert violations(CHUNKED + b"0\r\n" + b"X: 1\r\n" * 101 + b"\r\n") == [(1, 431)]
    assert violations(CHUNKED + b"0\r\nX: " + b"a" * 17000) == [(1, 431)]


def test_a_violation_is_the_last_event() -> None:
    protocol = new_protocol()
    assert len(protocol.receive(b"x\n" + GET)) == 1
    assert protocol.receive(GET) == []


def test_request_head_is_told() -> None:
    (request,) = new_protocol().receive(GET)
    assert request == HttpRequest(1, "GET", "/v1/models", "limit=2", ((b"host", b"a"),), has_body=False)


def test_absolute_target_replaces_the_host() -> None:
    (request,) = new_protocol().receive(b"GET http://b:80?x HTTP/1.1\r\nX: 1\r\n" + HOST + b"\r\n")
    assert isinstance(request, HttpRequest)
    assert (request.path, request.query) == ("/", "x")
    assert request.headers == ((b"host", b"b:80"), (b"x", b"1"))


def test_expectation_counts_only_with_a_body_on_http11() -> None:
    def expects(version: bytes, *lines: bytes) -> bool:
        data = b"\r\n".join([b"POST / " + version, b"Host: a", b"Expect: 100-continue", *lines, b"", b""])
        (request, *_) = new_protocol().receive(data)
        assert isinstance(request, HttpRequest)
        return request.expects_continue

    assert expects(b"HTTP/1.1", b"Content-Length: 2")
    assert not expects(b"HTTP/1.1")
    assert not expects(b"HTTP/1.0", b"Content-Length: 2")


def test_next_request_waits_for_the_response() -> None:
    protocol = new_protocol()
    assert len(protocol.receive(GET + GET)) == 1
    assert protocol.receive(GET) == []
    protocol.send_head(EMPTY)
    protocol.send_end()
    (second,) = protocol.next_request()
    assert isinstance(second, HttpRequest)
    assert second.stream_id == 2
    assert protocol.num_buffered == len(GET)


def read_back(answer: bytes, request: bytes, is_closed: bool = True) -> tuple[h11.Response, bytes]:
    """The response as h11's client reads it; the method decides whether there is a body."""
    client = h11.Connection(h11.CLIENT)
    client.send(h11.Request(method=request.split()[0], target="/", headers=[("host", "a")]))
    client.send(h11.EndOfMessage())
    client.receive_data(answer)
    if is_closed:
        client.receive_data(b"")
    response: h11.Response | None = None
    body = b""
    while True:
        event = client.next_event()
        assert event is not h11.NEED_DATA
        if isinstance(event, h11.Response):
            response = event
        elif isinstance(event, h11.Data):
            body += event.data
        elif isinstance(event, h11.EndOfMessage):
            assert response is not None
            return response, body


@pytest.mark.parametrize("method", [b"GET", b"HEAD"])
@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
@pytest.mark.parametrize("length", [None, b"10"])
def test_answers_are_read_back_as_sent(method: bytes, version: bytes, length: bytes | None) -> None:
    protocol = new_protocol()
    protocol.receive(method + b" / HTTP/" + version + b"\r\n" + HOST + b"\r\n")
    headers = ((b"x-a", b"1"),) + (((b"content-length", length),) if length else ())
    answer = protocol.send_head(ResponseHead(200, headers))
    for piece in (b"hello", b"", b"there"):
        answer += protocol.send_data(piece)
    answer += protocol.send_end()
    closes = version == b"1.0"
    response, body = read_back(answer, method, is_closed=closes)
    assert body == (b"" if method == b"HEAD" else b"hellothere")
    fields = dict(response.headers)
    assert fields[b"x-a"] == b"1"
    assert fields[b"date"] == b"Thu, 01 Jan 1970 00:00:00 GMT"
    assert (fields.get(b"connection") == b"close") == closes
    assert fields.get(b"content-length") == length
    is_chunked = not length and not closes and method == b"GET"
    assert (fields.get(b"transfer-encoding") == b"chunked") == is_chunked


@pytest.mark.parametrize("status", [204, 304])
def test_statuses_without_a_body_have_none(status: int) -> None:
    protocol = new_protocol()
    protocol.receive(GET)
    answer = protocol.send_head(ResponseHead(status, ())) + protocol.send_data(b"x") + protocol.send_end()
    assert answer.endswith(b"\r\n\r\n")
    assert b"transfer-encoding" not in answer


def test_early_answer_closes_unless_the_body_is_there() -> None:
    whole, partial = new_protocol(), new_protocol()
    post = b"POST / HTTP/1.1\r\n" + HOST + b"Content-Length: 2\r\n\r\n"
    whole.receive(post + b"ok")
    partial.receive(post + b"o")
    assert b"connection: close" not in whole.send_head(EMPTY)
    assert b"connection: close" in partial.send_head(EMPTY)
    assert not partial.keep_alive


@pytest.mark.parametrize(
    "field",
    [
        (b"x", b"a\r\nset-cookie: b"),
        (b"x", b"a\nb"),
        (b"x", b"\x00"),
        (b"x y", b"a"),
        (b"X", b"a"),
        (b"", b"a"),
        (b"transfer-encoding", b"chunked"),
        (b"content-length", b"-1"),
        (b"content-length", b"1, 1"),
    ],
)
def test_fields_that_would_split_the_response_are_our_bug(field: tuple[bytes, bytes]) -> None:
    protocol = new_protocol()
    protocol.receive(GET)
    with pytest.raises(ResponseError):
        protocol.send_head(ResponseHead(200, (field,)))
    assert protocol.send_head(EMPTY)  # an error can still be told


@pytest.mark.parametrize(
    ("status", "headers"),
    [(101, ()), (103, ()), (204, ((b"content-length", b"1"),)), (200, ((b"connection", b"close"),))],
)
def test_heads_that_cannot_be_sent(status: int, headers: tuple[tuple[bytes, bytes], ...]) -> None:
    protocol = new_protocol()
    protocol.receive(GET)
    with pytest.raises(ResponseError):
        protocol.send_head(ResponseHead(status, headers))


def test_body_must_match_its_content_length() -> None:
    protocol = new_protocol()
    protocol.receive(GET)
    protocol.send_head(ResponseHead(200, ((b"content-length", b"2"),)))
    protocol.send_data(b"a")
    with pytest.raises(ResponseError, match="1 bytes shorter"):
        protocol.send_end()
    with pytest.raises(ResponseError, match="longer"):
        protocol.send_data(b"bc")


def test_response_out_of_order_is_our_bug() -> None:
    protocol = new_protocol()
    with pytest.raises(ResponseError):
        protocol.send_head(EMPTY)
    protocol.receive(GET)
    with pytest.raises(ResponseError):
        protocol.send_data(b"x")
    with pytest.raises(ResponseError):
        protocol.send_end()
    protocol.send_head(EMPTY)
    with pytest.raises(ResponseError):
        protocol.send_head(EMPTY)
    protocol.send_end()
    with pytest.raises(ResponseError):
        protocol.send_end()


def test_date_is_made_once_a_second() -> None:
    now = 784111777.2
    date = http_date(lambda: now)
    first = date()
    assert first == b"Sun, 06 Nov 1994 08:49:37 GMT"
    now += 0.5
    assert date() is first
    now += 0.5
    assert date() == b"Sun, 06 Nov 1994 08:49:38 GMT"
