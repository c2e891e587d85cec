"""HTTP/1.1 without I/O: bytes to events, response heads and bodies to bytes. Thread: loop.

One exchange at a time: bytes of a next, pipelined request stay in the buffer until `next_request`. Heads are read by
http1_head; response heads are written and streamed bodies framed by hand.
"""

import enum
import http
import re
import sys
from collections.abc import Callable

from server.wire.frame_gate import PREFACE
from server.wire.http1_body import BodyDecoder, ChunkedBody, CountedBody
from server.wire.http1_head import RequestHead, read_head, read_plain_head
from server.wire.http1_prefilter import Framing, HeadLimits, HeadRefused, LineScanner, is_authority
from server.wire.messages import (
    BodyChunk,
    BodyEnd,
    Event,
    Headers,
    Http2Preface,
    HttpRequest,
    ProtocolViolation,
    ResponseHead,
    StreamReset,
)
from server.wire.response_fields import ResponseError, check_fields

CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
SWITCH_TO_HTTP2 = b"HTTP/1.1 101 Switching Protocols\r\nconnection: Upgrade\r\nupgrade: h2c\r\n\r\n"
LAST_CHUNK = b"0\r\n\r\n"
_NUM_CHUNK_HEADS = 64  # kept, for each of a stream's choices

_STATUS_LINES = {s.value: f"HTTP/1.1 {s.value} {s.phrase}\r\n".encode() for s in http.HTTPStatus}
_ABSOLUTE = re.compile(rb"https?://([^/?#]*)([/?].*)?", re.IGNORECASE)


class _Reading(enum.Enum):
    HEAD = enum.auto()
    BODY = enum.auto()
    COMPLETE = enum.auto()  # the request is; its response is not
    FAILED = enum.auto()  # a violation, or the end of the connection


class _Sending(enum.Enum):
    HEAD = enum.auto()
    COUNTED = enum.auto()
    CHUNKED = enum.auto()
    TO_CLOSE = enum.auto()  # HTTP/1.0: the end of the connection ends the body
    NO_BODY = enum.auto()  # HEAD, 204, 304: what is sent is dropped
    ENDED = enum.auto()


_CHUNKED = _Sending.CHUNKED  # looked up for every token: a member of an enum costs 70 ns, a global 7


class ChunkHeads(dict[int, bytes]):
    """Of chunks with the same head: what comes before the rest of each, by how many bytes that rest has.

    Args:
        head: of their data.
    """

    def __init__(self, head: bytes) -> None:
        self._head = head

    def __missing__(self, num_bytes: int) -> bytes:
        if len(self) >= _NUM_CHUNK_HEADS:
            self.clear()
        start = self[num_bytes] = b"%x\r\n%b" % (len(self._head) + num_bytes, self._head)
        return start


class Http1Protocol:
    """One connection's protocol.

    Attributes:
        keep_alive: another request may follow. May be set to False at any time; a head sent from then on says so.
        num_requests: whose heads have been read.
    """

    def __init__(self, limits: HeadLimits, date: Callable[[], bytes], chunks_at_once: int = sys.maxsize) -> None:
        """
        Args:
            chunks_at_once: of a body, that one call understands.
        """
        self.keep_alive = True
        self.num_requests = 0
        self._limits = limits
        self._date = date
        self._chunks_at_once = chunks_at_once
        self._buffer = bytearray()
        self._scanner = LineScanner(limits)
        self._body: BodyDecoder = CountedBody(0)
        self._reading = _Reading.HEAD
        self._sending = _Sending.ENDED
        self._may_skip_line = True
        self._is_head_request = False
        self._is_http10 = False
        self._remaining = 0  # of a counted response body

    @property
    def is_idle(self) -> bool:
        """Between requests, and no byte of the next one has come."""
        return self._reading is _Reading.HEAD and not self._buffer

    @property
    def has_read_request(self) -> bool:
        """Nothing of the request is still to come."""
        return self._reading is _Reading.COMPLETE

    @property
    def is_reading_body(self) -> bool:
        """Some of the request's body is still to come."""
        return self._reading is _Reading.BODY

    @property
    def has_more(self) -> bool:
        """The last call understood as much as it may: receive(b"") goes on."""
        return self._reading is _Reading.BODY and self._body.has_more

    @property
    def is_sending_chunks(self) -> bool:
        """The head of a response has gone, and its body is chunked."""
        return self._sending is _CHUNKED

    @property
    def num_buffered(self) -> int:
        """Bytes received and not yet understood."""
        return len(self._buffer)

    def receive(self, data: bytes) -> list[Event]:
        """What the bytes mean. A ProtocolViolation is the last event ever."""
        if self._reading is _Reading.FAILED:
            return []
        self._buffer += data
        return self._parse()

    def receive_eof(self) -> list[Event]:
        """The connection has ended: no answer can be sent any more. Idempotent."""
        is_under_way = self._sending is not _Sending.ENDED
        self.stop_reading()
        self._sending = _Sending.ENDED
        return [StreamReset(self.num_requests)] if is_under_way else []

    def next_request(self) -> list[Event]:
        """Request and response are complete: read on, first what was pipelined."""
        assert self._reading is _Reading.COMPLETE
        assert self._sending is _Sending.ENDED
        assert self.keep_alive
        self._reading = _Reading.HEAD
        self._may_skip_line = True
        self._is_head_request = False
        return self._parse()

    def _parse(self) -> list[Event]:
        events: list[Event] = []
        stream_id = self.num_requests + (self._reading is _Reading.HEAD)
        try:
            if self._reading is _Reading.HEAD:
                self._read_head(events)
            if self._reading is _Reading.BODY:
                self._read_body(events)
        except HeadRefused as refusal:
            self.stop_reading()
            events.append(ProtocolViolation(stream_id, refusal.status, refusal.message))
        return events

    def leave(self) -> bytes:
        """Another protocol goes on. What was received and not understood is its own."""
        rest = bytes(self._buffer)
        self.stop_reading()
        self._sending = _Sending.ENDED
        return rest

    def stop_reading(self) -> None:
        """No byte is understood from now on; an answer that is due, or that refuses a head, can still be sent."""
        self._reading = _Reading.FAILED
        self.keep_alive = False
        self._buffer.clear()

    def _read_head(self, events: list[Event]) -> None:
        if self.num_requests == 0 and PREFACE.startswith(self._buffer[: len(PREFACE)]):
            if len(self._buffer) >= len(PREFACE):
                events.append(Http2Preface(bytes(self._buffer)))
                self.stop_reading()
            return
        if self._may_skip_line:
            if b"\r\n".startswith(self._buffer) and len(self._buffer) < 2:
                return
            # RFC 9112 §2.2: a server SHOULD ignore at least one empty line before the request line
            if self._buffer.startswith(b"\r\n"):
                del self._buffer[:2]
            self._may_skip_line = False
        # Of what has come before the end, the scanner has seen a part, and goes on
        plain = read_plain_head(self._buffer, self._limits) if self._scanner.is_fresh else None
        if plain is not None:
            head, end = plain
            del self._buffer[:end]
            events.append(self._begin_exchange(head))
            return
        scanned = self._scanner.scan(self._buffer)
        if scanned is None:
            return
        section = bytes(self._buffer[:scanned])
        del self._buffer[:scanned]
        self._scanner.reset()
        events.append(self._begin_exchange(read_head(section)))

    def _begin_exchange(self, head: RequestHead) -> HttpRequest:
        framing = head.framing
        path, headers = _route(head.method, head.target, head.headers)
        path, _, query = path.partition("?")
        connection = _list_values(headers, b"connection")
        self._is_http10 = head.is_http10
        # RFC 9112 §9.3. An HTTP/1.0 client's keep-alive is not honoured: it cannot read chunks, a close ends its body.
        self.keep_alive = self.keep_alive and not self._is_http10 and b"close" not in connection
        self._is_head_request = head.method == b"HEAD"
        is_chunked = framing is Framing.CHUNKED
        self._body = ChunkedBody(self._limits, self._chunks_at_once) if is_chunked else CountedBody(head.length)
        self._reading = _Reading.COMPLETE if framing is Framing.NONE else _Reading.BODY
        self._sending = _Sending.HEAD
        self.num_requests += 1
        # RFC 9110 §10.1.1: the expectation of an HTTP/1.0 client, or of one without content, is ignored
        expects_continue = (
            framing is not Framing.NONE and not self._is_http10 and b"100-continue" in _list_values(headers, b"expect")
        )
        return HttpRequest(
            stream_id=self.num_requests,
            method=head.method.decode("ascii"),
            path=path,
            query=query,
            headers=headers,
            has_body=framing is not Framing.NONE,
            expects_continue=expects_continue,
        )

    def _read_body(self, events: list[Event]) -> None:
        content = self._body.decode(self._buffer)
        if content:
            events.append(BodyChunk(self.num_requests, content))
        if self._body.is_complete:
            self._reading = _Reading.COMPLETE
            events.append(BodyEnd(self.num_requests))

    def send_head(self, head: ResponseHead) -> bytes:
        """The head's bytes. A status below 200 is informational, and the head is still to come.

        With content-length among the headers the body is counted; otherwise it is chunked, or, for an HTTP/1.0 client,
        ended by the close. `connection: close` is added where the connection cannot go on, unread request included.

        Raises:
            ResponseError: framing fields or bytes that are not the application's to send, or a head already sent.
        """
        if self._sending is not _Sending.HEAD and self._reading is not _Reading.FAILED:
            raise ResponseError("There is no request that this head could answer.")
        if head.status < 200:
            return self._informational(head)
        length = self._check_fields(head)
        self._choose_framing(head.status, length)
        if not self.has_read_request or self._sending is _Sending.TO_CLOSE:
            self.keep_alive = False
        lines = [_status_line(head.status), b"date: %b\r\n" % self._date()]
        lines += [b"%b: %b\r\n" % field for field in head.headers if field[0] != b"connection"]
        if self._sending is _Sending.CHUNKED:
            lines.append(b"transfer-encoding: chunked\r\n")
        if not self.keep_alive:
            lines.append(b"connection: close\r\n")  # RFC 9112 §9.6
        lines.append(b"\r\n")
        return b"".join(lines)

    def _informational(self, head: ResponseHead) -> bytes:
        if head.status < 100 or head.status == 101:
            raise ResponseError(f"Status {head.status} is not sent here.")
        self._check_fields(head)
        if self._is_http10:  # RFC 9110 §15.2: a server MUST NOT send 1xx to an HTTP/1.0 client
            return b""
        return _status_line(head.status) + b"".join(b"%b: %b\r\n" % field for field in head.headers) + b"\r\n"

    def _check_fields(self, head: ResponseHead) -> int | None:
        """The content-length; the application's `connection: close` is heeded."""
        if any(name == b"connection" and value.lower() == b"close" for name, value in head.headers):
            self.keep_alive = False
        return check_fields(head)

    def _choose_framing(self, status: int, length: int | None) -> None:
        """RFC 9112 §6.3, from the sender's side."""
        if self._is_head_request or status in (204, 304):
            self._sending = _Sending.NO_BODY
        elif length is not None:
            self._sending = _Sending.COUNTED
            self._remaining = length
        else:
            self._sending = _Sending.TO_CLOSE if self._is_http10 else _Sending.CHUNKED

    def send_data(self, data: bytes) -> bytes:
        """The body's next bytes, framed; none where the response has no body, or `data` is empty.

        Raises:
            ResponseError: before the head, after the end, or beyond the content-length.
        """
        sending = self._sending
        if sending is _CHUNKED:
            # RFC 9112 §7.1. An empty chunk would end the body.
            return b"%x\r\n%b\r\n" % (len(data), data) if data else b""
        if sending is _Sending.COUNTED:
            self._remaining -= len(data)
            if self._remaining < 0:
                raise ResponseError("The body is longer than its content-length.")
            return data
        if sending is _Sending.TO_CLOSE:
            return data
        if sending is _Sending.NO_BODY:
            return b""
        raise ResponseError("A body is sent after its head and before its end.")

    def send_end(self) -> bytes:
        """What ends the body.

        Raises:
            ResponseError: before the head, twice, or short of the content-length.
        """
        sending = self._sending
        if sending in (_Sending.HEAD, _Sending.ENDED):
            raise ResponseError("A response ends once, after its head.")
        if sending is _Sending.COUNTED and self._remaining:
            raise ResponseError(f"The body is {self._remaining} bytes shorter than its content-length.")
        self._sending = _Sending.ENDED
        return LAST_CHUNK if sending is _Sending.CHUNKED else b""


def _route(method: bytes, target: bytes, headers: Headers) -> tuple[str, Headers]:
    """Path and query of a request target, and the headers with the Host that counts (RFC 9112 §3.2)."""
    if method == b"CONNECT":
        raise HeadRefused(501, "CONNECT is for proxies, and this is none.")
    if b"#" in target:
        raise HeadRefused(400, "A request target has no fragment.")
    if target.startswith(b"/") or (target == b"*" and method == b"OPTIONS"):
        return target.decode("ascii"), headers
    absolute = _ABSOLUTE.fullmatch(target)
    if absolute is None or not absolute[1] or not is_authority(absolute[1]):
        raise HeadRefused(400, "The request target is neither a path nor an http URL.")
    # RFC 9112 §3.2.2: with the absolute form, Host is ignored and replaced by the target's authority
    kept = tuple(field for field in headers if field[0] != b"host")
    rest = (absolute[2] or b"/").decode("ascii")
    return rest if rest.startswith("/") else "/" + rest, ((b"host", absolute[1]), *kept)


def _list_values(headers: Headers, name: bytes) -> set[bytes]:
    """The members of a comma-separated field, in lower case, over all its lines."""
    return {part.strip(b" \t") for key, value in headers if key == name for part in value.lower().split(b",")}


def _status_line(status: int) -> bytes:
    return _STATUS_LINES.get(status) or b"HTTP/1.1 %d \r\n" % status  # the reason phrase is optional, its space is not
