"""HTTP/1.1 without I/O: bytes to events, response heads and bodies to bytes. Thread: loop.

One exchange at a time: a pipelined request stays in the buffer until `next_request`. Verdicts are the same however the
input is split into reads.

h11 0.16 accepts what request smuggling needs: content-length beside transfer-encoding, `3, 3`, obs-fold, bare LF,
HTTP/1.0 with transfer-encoding, versions 1.9 and 2.0, CR in chunk extensions, bare LF in trailers; and it limits only
heads that are incomplete. Here those are refused, with limits as origin servers have them.
"""

import enum
import http
import re
import sys
from collections.abc import Callable, Iterable
from typing import NamedTuple

from server.wire.http2_frames import PREFACE
from server.wire.limits import HeadLimits
from server.wire.messages import (
    CONTENT_LENGTH,
    BodyChunk,
    BodyEnd,
    Event,
    Headers,
    HeadRefused,
    Http2Preface,
    HttpRequest,
    ProtocolViolation,
    ResponseError,
    ResponseHead,
    check_fields,
    is_authority,
)

CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
SWITCH_TO_HTTP2 = b"HTTP/1.1 101 Switching Protocols\r\nconnection: Upgrade\r\nupgrade: h2c\r\n\r\n"

_TOKEN = rb"[!#$%&'*+.^_`|~0-9A-Za-z-]++"
_REQUEST_LINE = rb"(%b) ([\x21-\x7e]++) HTTP/1\.([01])\r\n" % _TOKEN
_FIELD_LINE = rb"%b:[\t\x20-\x7e\x80-\xff]*+\r\n" % _TOKEN  # RFC 9110 §5.5: no CTL in a value except HTAB
# A whole head. Possessive quantifiers keep matching linear. No `*+` over the fields: Python before 3.11.5 matches such
# groups wrongly (gh-106052); fields can be cut in one way only, so that nothing is tried twice
_HEAD = re.compile(rb"%b((?:%b)*)\r\n" % (_REQUEST_LINE, _FIELD_LINE))
_TRAILERS = re.compile(rb"(?:%b)*\r\n" % _FIELD_LINE)
_FIELD = re.compile(rb"(%b):([^\r]*+)\r\n" % _TOKEN)  # within a head that has matched
_NAME = re.compile(rb"%b:" % _TOKEN)
_CR = 0x0D
_DECIDING = frozenset(
    (b"host", b"content-length", b"transfer-encoding")
)  # which host is asked, and where the request ends
_ABSOLUTE = re.compile(rb"https?://([^/?#]*)([/?].*)?", re.IGNORECASE)
_STATUS_LINES = {s.value: f"HTTP/1.1 {s.value} {s.phrase}\r\n".encode() for s in http.HTTPStatus}

_SIZE_LINE_BYTES = 256
_EXTENSION_BYTES = 16 * 1024  # of all chunks of a body together; their meaning is ignored
_STEPS_PER_CHUNK = 3  # its size, its data, its line end
_QUOTED = rb'"(?:[\t\x20\x21\x23-\x5b\x5d-\x7e\x80-\xff]|\\[\t\x20-\x7e\x80-\xff])*"'
# RFC 9112 §7.1.1, quotes included: a reader that heeds them would go on past a CRLF within an open quote
_EXTENSION = rb"[ \t]*;[ \t]*%b(?:[ \t]*=[ \t]*(?:%b|%b))?" % (_TOKEN, _TOKEN, _QUOTED)
_SIZE_LINE = re.compile(rb"([0-9A-Fa-f]{1,16})((?:%b)*)\r\n" % _EXTENSION)


class LineScanner:
    """Finds the end of a head or of a trailer section in a buffer that grows; scans each byte once.

    Args:
        has_request_line: the first line is a request line, with a limit of its own; otherwise all lines are fields.
    """

    __slots__ = ("_limits", "_line_start", "_most_bytes", "_num_fields", "_request_line_is_due", "_searched")

    def __init__(self, limits: HeadLimits, has_request_line: bool = True) -> None:
        self._limits = limits
        self._request_line_is_due = has_request_line
        self._most_bytes = min(limits.request_line_bytes, limits.head_bytes) if has_request_line else limits.head_bytes
        self._line_start = self._searched = self._num_fields = 0

    def scan(self, buffer: bytearray) -> int | None:
        """The index after the empty line that ends the section; None until that has come.

        Args:
            buffer: begins with the section; only grows between calls. An incomplete line is judged by its size alone.

        Raises:
            HeadRefused: a limit is passed, or a line end is malformed.
        """
        while (newline := buffer.find(b"\n", self._searched)) >= 0:
            start, end = self._line_start, newline + 1
            if end > self._most_bytes:
                self._refuse_size(end)
            # RFC 9112 §2.2: a recipient MAY take a bare LF for a line end; we do not
            if newline == start or buffer[newline - 1] != _CR:
                raise HeadRefused(400, "Lines must end in CR LF.")
            self._line_start = self._searched = end
            if self._request_line_is_due:
                if end - start == 2:
                    raise HeadRefused(400, "The request line is empty.")
                self._request_line_is_due = False
                self._most_bytes = self._limits.head_bytes
            elif end - start == 2:
                return end
            elif buffer[start] in b" \t":
                # RFC 9112 §5.2: a server that receives obs-fold rejects it with 400, or replaces it; §2.2: nor may
                # whitespace stand between the request line and the first field
                raise HeadRefused(400, "A header line must not start with white space.")
            else:
                self._num_fields += 1
                if self._num_fields > self._limits.num_fields:
                    raise HeadRefused(431, f"There are more than {self._limits.num_fields} header fields.")
        self._searched = len(buffer)
        if len(buffer) > self._most_bytes:
            self._refuse_size(len(buffer))
        return None

    def _refuse_size(self, end: int) -> None:
        limits = self._limits
        if self._request_line_is_due and end > limits.request_line_bytes:
            # RFC 9112 §3: a request-target longer than the server wishes to parse is 414
            raise HeadRefused(414, f"The request line is longer than {limits.request_line_bytes} bytes.")
        # RFC 6585 §5
        raise HeadRefused(431, f"The header fields are larger than {limits.head_bytes} bytes.")


class RequestHead(NamedTuple):
    """A request's head, parsed."""

    method: bytes
    target: bytes
    headers: Headers
    is_http10: bool
    length: int | None  # of the body (RFC 9112 §6.3); None: it is chunked


class HeadReader:
    """Reads a request's head from a buffer that grows; usually all of it is there, and one match reads it."""

    def __init__(self, limits: HeadLimits) -> None:
        self._limits = limits
        self._scanner: LineScanner | None = None  # of an incomplete head

    def read(self, buffer: bytearray) -> tuple[RequestHead, int] | None:
        """The head at the start of the buffer, and where it ends; None until that has come.

        Raises:
            HeadRefused: a limit is passed, or the head is malformed or ambiguous.
        """
        head = self._match(buffer) if self._scanner is None else None
        if head is None:
            self._scanner = self._scanner or LineScanner(self._limits)
            end = self._scanner.scan(buffer)
            if end is None:
                return None
            head = self._match(buffer)
            if head is None:
                raise _why_malformed(bytes(buffer[:end]))
        self._scanner = None
        return head

    def _match(self, buffer: bytearray) -> tuple[RequestHead, int] | None:
        """None: it is incomplete, malformed, or past a limit."""
        limits = self._limits
        match = _HEAD.match(buffer, 0, limits.head_bytes)
        if match is None:
            return None
        start, end = match.span(4)
        fields = _FIELD.findall(buffer, start, end)
        if start > limits.request_line_bytes or len(fields) > limits.num_fields:
            return None
        headers = tuple([(name.lower(), value.strip(b" \t")) for name, value in fields])
        is_http10 = match[3] == b"0"
        deciding = [field for field in headers if field[0] in _DECIDING]
        _check_hosts(_values(deciding, b"host"), is_http10)
        return RequestHead(match[1], match[2], headers, is_http10, _body_length(deciding, is_http10)), match.end()


def _why_malformed(section: bytes) -> HeadRefused:
    """Of a head whose line ends are well-formed."""
    request_line, separator, fields = section.partition(b"\r\n")
    if re.fullmatch(_REQUEST_LINE, request_line + separator) is None:
        # RFC 9112 §3: an invalid request line SHOULD be answered with 400
        return HeadRefused(400, "The request line is not `METHOD target HTTP/1.1`.")
    return _why_malformed_fields(fields)


def _why_malformed_fields(section: bytes) -> HeadRefused:
    if all(_NAME.match(line) for line in section[:-4].split(b"\r\n")):
        # RFC 9110 §5.5: NUL, CR and LF in a value are dangerous, other control characters are invalid;
        # RFC 9112 §2.2: a bare CR is not a line end
        return HeadRefused(400, "A header value holds a control character.")
    # RFC 9112 §5.1: white space between the name and the colon MUST be rejected with 400
    return HeadRefused(400, "A header line is not `name: value`.")


def _values(headers: Iterable[tuple[bytes, bytes]], name: bytes) -> list[bytes]:
    return [value for key, value in headers if key == name]


def _check_hosts(hosts: list[bytes], is_http10: bool) -> None:
    # RFC 9112 §3.2: 400 to an HTTP/1.1 request that lacks Host, and to any with two or an invalid one
    if len(hosts) > 1:
        raise HeadRefused(400, "There is more than one Host header.")
    if not hosts and not is_http10:
        raise HeadRefused(400, "The Host header is missing.")
    if hosts and not is_authority(hosts[0]):
        raise HeadRefused(400, "The Host header is not a host and a port.")


def _body_length(headers: list[tuple[bytes, bytes]], is_http10: bool) -> int | None:
    lengths, codings = _values(headers, b"content-length"), _values(headers, b"transfer-encoding")
    if codings:
        if lengths:
            # RFC 9112 §6.3 item 3: ought to be handled as an error, it is how requests are smuggled
            raise HeadRefused(400, "Content-Length and Transfer-Encoding exclude each other.")
        if is_http10:
            # RFC 9112 §6.1: Transfer-Encoding in HTTP/1.0 is faulty framing
            raise HeadRefused(400, "HTTP/1.0 has no Transfer-Encoding.")
        if len(codings) > 1 or codings[0].lower() != b"chunked":
            # RFC 9112 §6.1 allows 501 for a coding not understood; where chunked is not last, §6.3 item 4 wants 400
            raise HeadRefused(400, "The only Transfer-Encoding taken is `chunked`.")
        return None
    # RFC 9112 §6.3 item 5: an invalid length, a list of lengths included, is an unrecoverable error
    if len(lengths) > 1 or (lengths and CONTENT_LENGTH.fullmatch(lengths[0]) is None):
        raise HeadRefused(400, "Content-Length must be one decimal number.")
    return int(lengths[0]) if lengths else 0


class CountedBody:
    """A body of a known length (RFC 9112 §6.3 item 6).

    Attributes:
        has_more: the last call took as much as it may; the buffer may hold more.
    """

    def __init__(self, length: int) -> None:
        self._remaining = length
        self.is_complete = length == 0
        self.has_more = False

    def decode(self, buffer: bytearray) -> bytes:
        """The next content, possibly none, removed from the front of the buffer.

        Raises:
            HeadRefused: the framing is broken.
        """
        content = bytes(buffer[: self._remaining])
        del buffer[: len(content)]
        self._remaining -= len(content)
        self.is_complete = self._remaining == 0
        return content


class ChunkedBody:
    """chunk = size [extension] CRLF data CRLF, until a chunk of size 0 and the trailers (RFC 9112 §7.1)."""

    def __init__(self, limits: HeadLimits, chunks_at_once: int = sys.maxsize) -> None:
        self.is_complete = False
        self.has_more = False
        self._steps_at_once = chunks_at_once * _STEPS_PER_CHUNK
        self._remaining = 0  # of the chunk's data
        self._is_after_data = False  # its CRLF is due
        self._extension_bytes = 0
        self._limits = limits
        self._credit = self._most_credit = limits.num_small_chunks * limits.bytes_per_chunk  # in bytes of content
        self._trailers: LineScanner | None = None

    def decode(self, buffer: bytearray) -> bytes:
        pieces: list[bytes] = []
        position = 0  # of the first byte not yet parsed
        num_steps = 0
        self.has_more = False
        while not self.is_complete and self._trailers is None:
            if num_steps >= self._steps_at_once:
                self.has_more = True
                break
            num_steps += 1
            after = self._step(buffer, position, pieces)
            if after == position:
                break
            position = after
        del buffer[:position]
        if self._trailers is not None:
            self._take_trailers(self._trailers, buffer)
        return b"".join(pieces)

    def _step(self, buffer: bytearray, position: int, pieces: list[bytes]) -> int:
        """Parse one size line, piece of data or CRLF; the position after it, unchanged if more bytes are needed."""
        if self._remaining:
            piece = bytes(buffer[position : position + self._remaining])
            if piece:
                pieces.append(piece)
            self._remaining -= len(piece)
            self._is_after_data = self._remaining == 0
            return position + len(piece)
        if self._is_after_data:
            return self._take_line_end(buffer, position)
        return self._take_size(buffer, position)

    def _take_line_end(self, buffer: bytearray, position: int) -> int:
        line_end = bytes(buffer[position : position + 2])
        if not b"\r\n".startswith(line_end):
            raise HeadRefused(400, "A chunk is longer than its size.")
        if len(line_end) < 2:
            return position
        self._is_after_data = False
        return position + 2

    def _take_size(self, buffer: bytearray, position: int) -> int:
        newline = buffer.find(b"\n", position, position + _SIZE_LINE_BYTES)
        if newline < 0:
            if len(buffer) - position >= _SIZE_LINE_BYTES:
                raise HeadRefused(400, f"A chunk's size line is longer than {_SIZE_LINE_BYTES} bytes.")
            return position
        match = _SIZE_LINE.fullmatch(buffer, position, newline + 1)
        if match is None:
            raise HeadRefused(400, "A chunk does not begin with a hexadecimal size.")
        # RFC 9112 §7.1.1: a server ought to limit the total length of chunk extensions
        self._extension_bytes += len(match[2])
        if self._extension_bytes > _EXTENSION_BYTES:
            raise HeadRefused(400, f"The chunk extensions are larger than {_EXTENSION_BYTES} bytes.")
        self._remaining = int(match[1], 16)
        self._charge(self._remaining)
        if self._remaining == 0:
            self._trailers = LineScanner(self._limits, has_request_line=False)
        return newline + 1

    def _charge(self, num_bytes: int) -> None:
        """A chunk of so many bytes begins."""
        limits = self._limits
        self._credit = min(self._most_credit, self._credit + num_bytes) - limits.bytes_per_chunk
        if self._credit < 0:
            raise HeadRefused(
                400,
                f"The chunks are too small. Send at least {limits.bytes_per_chunk} bytes in each, or the whole body.",
            )

    def _take_trailers(self, scanner: LineScanner, buffer: bytearray) -> None:
        """Check and drop them: RFC 9110 §6.5.1 allows it."""
        end = scanner.scan(buffer)
        if end is None:
            return
        if _TRAILERS.fullmatch(buffer, 0, end) is None:
            raise _why_malformed_fields(bytes(buffer[:end]))
        del buffer[:end]
        self.is_complete = True


LAST_CHUNK = b"0\r\n\r\n"


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


class Http1Protocol:
    """One connection's protocol.

    Attributes:
        keep_alive: another request may follow. May be set to False at any time; a head sent from then on says so.
        num_requests: whose heads have been read.
    """

    def __init__(self, limits: HeadLimits, date: Callable[[], bytes], chunks_at_once: int = sys.maxsize) -> None:
        """chunks_at_once: of a body, that one call parses."""
        self.keep_alive = True
        self.num_requests = 0
        self._limits = limits
        self._date = date
        self._chunks_at_once = chunks_at_once
        self._buffer = bytearray()
        self._heads = HeadReader(limits)
        self._body: CountedBody | ChunkedBody = CountedBody(0)
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
        """The last call parsed as much as it may: receive(b"") goes on."""
        return self._reading is _Reading.BODY and self._body.has_more

    @property
    def is_sending_chunks(self) -> bool:
        """The head of a response has gone, and its body is chunked."""
        return self._sending is _CHUNKED

    @property
    def num_buffered(self) -> int:
        """Bytes received and not yet parsed."""
        return len(self._buffer)

    def receive(self, data: bytes) -> list[Event]:
        """The events in the bytes. A ProtocolViolation is the last one."""
        if self._reading is _Reading.FAILED:
            return []
        self._buffer += data
        return self._parse()

    def next_request(self) -> list[Event]:
        """Request and response are complete: read on, beginning with what was pipelined."""
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
        """End reading and sending. Returns what was received and not parsed."""
        rest = bytes(self._buffer)
        self.stop_reading()
        self._sending = _Sending.ENDED
        return rest

    def stop_reading(self) -> None:
        """End reading; an answer that is due, or that refuses a head, can still be sent."""
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
        found = self._heads.read(self._buffer)
        if found is not None:
            head, end = found
            del self._buffer[:end]
            events.append(self._begin_exchange(head))

    def _begin_exchange(self, head: RequestHead) -> HttpRequest:
        has_body = head.length != 0
        path, headers = _route(head.method, head.target, head.headers)
        path, _, query = path.partition("?")
        connection = _list_values(headers, b"connection")
        self._is_http10 = head.is_http10
        # RFC 9112 §9.3. An HTTP/1.0 client's keep-alive is not honoured: it cannot read chunks, a close ends its body.
        self.keep_alive = self.keep_alive and not self._is_http10 and b"close" not in connection
        self._is_head_request = head.method == b"HEAD"
        self._body = (
            ChunkedBody(self._limits, self._chunks_at_once) if head.length is None else CountedBody(head.length)
        )
        self._reading = _Reading.BODY if has_body else _Reading.COMPLETE
        self._sending = _Sending.HEAD
        self.num_requests += 1
        # RFC 9110 §10.1.1: the expectation of an HTTP/1.0 client, or of one without content, is ignored
        expects_continue = has_body and not self._is_http10 and b"100-continue" in _list_values(headers, b"expect")
        return HttpRequest(
            stream_id=self.num_requests,
            method=head.method.decode("ascii"),
            path=path,
            query=query,
            headers=headers,
            has_body=has_body,
            expects_continue=expects_continue,
            is_http10=self._is_http10,
        )

    def _read_body(self, events: list[Event]) -> None:
        content = self._body.decode(self._buffer)
        if content:
            events.append(BodyChunk(self.num_requests, content))
        if self._body.is_complete:
            self._reading = _Reading.COMPLETE
            events.append(BodyEnd(self.num_requests))

    def send_head(self, head: ResponseHead) -> bytes:
        """The head's bytes.

        With content-length among the headers the body is counted; otherwise it is chunked, or, for an HTTP/1.0 client,
        ended by the close. `connection: close` is added where the connection cannot go on, unread request included.

        Raises:
            ResponseError: fields that the application must not send, or a head already sent.
        """
        if self._sending is not _Sending.HEAD and self._reading is not _Reading.FAILED:
            raise ResponseError("There is no request that this head could answer.")
        length = check_fields(head)
        self._choose_framing(head.status, length)
        if not self.has_read_request or self._sending is _Sending.TO_CLOSE:
            self.keep_alive = False
        lines = [_status_line(head.status), b"date: %b\r\n" % self._date()]
        lines += [b"%b: %b\r\n" % field for field in head.headers]
        if self._sending is _Sending.CHUNKED:
            lines.append(b"transfer-encoding: chunked\r\n")
        if not self.keep_alive:
            lines.append(b"connection: close\r\n")  # RFC 9112 §9.6
        lines.append(b"\r\n")
        return b"".join(lines)

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
        """What ends the body. Raises ResponseError: before the head, twice, or short of the content-length."""
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
        raise HeadRefused(501, "CONNECT is not supported.")
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
    return {part.strip(b" \t") for value in _values(headers, name) for part in value.lower().split(b",")}


def _status_line(status: int) -> bytes:
    return _STATUS_LINES.get(status) or b"HTTP/1.1 %d \r\n" % status  # the reason phrase is optional, its space is not
