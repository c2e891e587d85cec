"""HTTP/1.1 and server-sent events as a client reads them: bytes in, bytes out, no sockets.

Small and strict enough for measuring: one exchange at a time, no pipelining, no compression, no trailers' content. It
costs a few microseconds per event, so that the client is not what is measured.
"""

import msgspec

MAX_HEAD_BYTES = 16_384
MAX_CHUNK_LINE_BYTES = 4_096
MAX_EVENT_BYTES = 1_048_576

# Framing states of a body.
_HEAD, _LENGTH, _UNTIL_EOF, _CHUNK_LINE, _CHUNK_DATA, _CHUNK_END, _TRAILERS, _END = range(8)


class BadResponse(Exception):
    """The peer's bytes are not HTTP/1.1, not SSE, or longer than any sane server's."""


class ResponseHead(msgspec.Struct, frozen=True):
    """Status and fields, names in lower case; of repeated fields the last."""

    status: int
    headers: dict[bytes, bytes]
    keeps_alive: bool


def encode_request(method: str, path: str, host: str, headers: dict[str, str], body: bytes = b"") -> bytes:
    """Head and body of one request, ready to be written; content-length is added."""
    lines = [f"{method} {path} HTTP/1.1", f"host: {host}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    lines += [f"content-length: {len(body)}", "", ""]
    return "\r\n".join(lines).encode("latin-1") + body


class ResponseParser:
    """The bytes of one response, framed (RFC 9112 §6.3).

    `head` is there once it was read, `is_complete` once the body ended; `surplus` is what came after it.
    """

    def __init__(self) -> None:
        self.head: ResponseHead | None = None
        self.surplus = b""
        self._state = _HEAD
        self._pending = b""  # of a head, a chunk line or a trailer that is not whole yet
        self._remaining = 0  # bytes of the body or chunk

    @property
    def is_complete(self) -> bool:
        return self._state == _END

    @property
    def has_started(self) -> bool:
        return self.head is not None or bool(self._pending)

    def feed(self, data: bytes) -> bytes:
        """The body bytes that `data` brings.

        Raises:
            BadResponse: the peer cannot be understood from here on.
        """
        if self._pending:
            data = self._pending + data
            self._pending = b""
        body: list[bytes] = []
        while data and self._state != _END:
            if self._state == _HEAD:
                data = self._feed_head(data)
            elif self._state == _CHUNK_LINE:
                data = self._feed_chunk_line(data)
            elif self._state == _CHUNK_DATA:
                data = self._feed_chunk_data(data, body)
            elif self._state == _CHUNK_END:
                data = self._feed_chunk_end(data)
            elif self._state == _TRAILERS:
                data = self._feed_trailers(data)
            else:
                data = self._feed_plain(data, body)
        self.surplus += data
        return body[0] if len(body) == 1 else b"".join(body)

    def feed_eof(self) -> None:
        """The peer closed. Ends a body that has no other end.

        Raises:
            BadResponse: the body was to be longer.
        """
        if self._state == _UNTIL_EOF:
            self._state = _END
        elif self._state != _END:
            raise BadResponse("the connection closed in the middle of the response")

    def _hold(self, data: bytes, limit: int, what: str) -> bytes:
        if len(data) > limit:
            raise BadResponse(f"{what} is longer than {limit} bytes")
        self._pending = data
        return b""

    def _feed_head(self, data: bytes) -> bytes:
        end = data.find(b"\r\n\r\n")
        if end < 0:
            return self._hold(data, MAX_HEAD_BYTES, "the response's head")
        head = _parse_head(data[:end])
        if head.status >= 200:  # RFC 9110 §15.2: interim answers come before the final one
            self.head = head
            self._choose_framing(head)
        return data[end + 4 :]

    def _choose_framing(self, head: ResponseHead) -> None:
        coding, length = head.headers.get(b"transfer-encoding"), head.headers.get(b"content-length")
        if head.status in (204, 304):
            self._state = _END
        elif coding is not None:
            if coding.lower() != b"chunked":
                raise BadResponse(f"unknown transfer coding {coding!r}")
            self._state = _CHUNK_LINE
        elif length is not None:
            if not length.isdigit():
                raise BadResponse(f"bad content-length {length!r}")
            self._remaining = int(length)
            self._state = _LENGTH if self._remaining else _END
        else:
            self._state = _UNTIL_EOF

    def _feed_plain(self, data: bytes, body: list[bytes]) -> bytes:
        if self._state == _UNTIL_EOF:
            body.append(data)
            return b""
        taken = data[: self._remaining]
        body.append(taken)
        self._remaining -= len(taken)
        if not self._remaining:
            self._state = _END
        return data[len(taken) :]

    def _feed_chunk_line(self, data: bytes) -> bytes:
        end = data.find(b"\r\n")
        if end < 0:
            return self._hold(data, MAX_CHUNK_LINE_BYTES, "a chunk's size line")
        size_text = data[:end].partition(b";")[0].strip()
        try:
            size = int(size_text, 16)
        except ValueError as error:
            raise BadResponse(f"bad chunk size {size_text[:20]!r}") from error
        if size < 0:
            raise BadResponse(f"bad chunk size {size_text[:20]!r}")
        self._remaining = size
        self._state = _CHUNK_DATA if size else _TRAILERS
        return data[end + 2 :]

    def _feed_chunk_data(self, data: bytes, body: list[bytes]) -> bytes:
        taken = data[: self._remaining]
        body.append(taken)
        self._remaining -= len(taken)
        if not self._remaining:
            self._state = _CHUNK_END
        return data[len(taken) :]

    def _feed_chunk_end(self, data: bytes) -> bytes:
        if not b"\r\n".startswith(data[:2]):
            raise BadResponse("a chunk is longer than its size line says")
        if len(data) < 2:
            return self._hold(data, 2, "a chunk's end")
        self._state = _CHUNK_LINE
        return data[2:]

    def _feed_trailers(self, data: bytes) -> bytes:
        end = data.find(b"\r\n")
        if end < 0:
            return self._hold(data, MAX_HEAD_BYTES, "a trailer")
        if end == 0:
            self._state = _END
        return data[end + 2 :]


def _parse_head(data: bytes) -> ResponseHead:
    status_line, *lines = data.split(b"\r\n")
    version, _, rest = status_line.partition(b" ")
    if version not in (b"HTTP/1.1", b"HTTP/1.0") or not rest[:3].isdigit():
        raise BadResponse(f"not an HTTP/1 status line: {status_line[:60]!r}")
    headers = {}
    for line in lines:
        name, colon, value = line.partition(b":")
        if not colon:
            raise BadResponse(f"not a header field: {line[:60]!r}")
        headers[name.lower()] = value.strip()
    connection = headers.get(b"connection", b"keep-alive" if version == b"HTTP/1.1" else b"close")
    return ResponseHead(int(rest[:3]), headers, b"close" not in connection.lower())


class SseParser:
    """The `data` of each server-sent event (WHATWG HTML §9.2.6). Names, ids and comments are passed over."""

    def __init__(self) -> None:
        self._pending = b""

    def feed(self, data: bytes) -> list[bytes]:
        """
        Raises:
            BadResponse: an event longer than MAX_EVENT_BYTES.
        """
        if self._pending:
            data = self._pending + data
        held = b""
        if b"\r" in data:
            if data.endswith(b"\r"):  # half of a CRLF, perhaps
                data, held = data[:-1], b"\r"
            data = data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        parts = data.split(b"\n\n")
        self._pending = parts.pop() + held
        if len(self._pending) > MAX_EVENT_BYTES:
            raise BadResponse(f"an event is longer than {MAX_EVENT_BYTES} bytes")
        events = []
        for part in parts:
            if part.startswith(b"data: ") and b"\n" not in part:
                events.append(part[6:])
            else:
                events += _data_of(part)
        return events


def _data_of(event: bytes) -> list[bytes]:
    """The slow way: several lines, or none that is data. One element, or none."""
    values = []
    for line in event.split(b"\n"):
        name, _, value = line.partition(b":")
        if name == b"data":
            values.append(value.removeprefix(b" "))
    return [b"\n".join(values)] if values else []
