"""A response's bytes as an HTTP/1.1 client must read them (RFC 9112), by hand: h11 takes as long as the server."""

import re
from dataclasses import dataclass

_STATUS_LINE = re.compile(rb"HTTP/1\.1 ([1-5][0-9]{2}) [ -~]*")  # RFC 9112 §4
_FIELD = re.compile(rb"([!#$%&'*+.^_`|~0-9a-z-]+): ([!-~](?:[ -~]*[!-~])?)?")  # RFC 9112 §5, names as the server writes
_CHUNK_SIZE = re.compile(rb"[0-9a-f]+")  # RFC 9112 §7.1; this server sends no extensions
_CRLF = b"\r\n"


@dataclass(slots=True)
class ReadResponse:
    """The only response of a connection, as far as it has come."""

    status: int
    headers: dict[str, str]
    body: bytes
    is_complete: bool


def read_response(received: bytes) -> ReadResponse | None:
    """
    Returns: None while its head is not complete.

    Raises:
        AssertionError: no client would understand it, or something follows it.
    """
    head, separator, rest = received.partition(b"\r\n\r\n")
    if not separator:
        return None
    status_line, *lines = head.split(_CRLF)
    status = _STATUS_LINE.fullmatch(status_line)
    assert status is not None, f"{status_line!r} is no status line"
    headers: dict[str, str] = {}
    for line in lines:
        field = _FIELD.fullmatch(line)
        assert field is not None, f"{line!r} is no header field"
        name = field[1].decode()
        assert name not in headers, f"{name} is there twice"
        headers[name] = (field[2] or b"").decode()
    if "transfer-encoding" in headers:
        assert headers["transfer-encoding"] == "chunked"
        assert "content-length" not in headers, "both lengths"  # RFC 9112 §6.2
        body, is_complete = _read_chunks(rest)
    else:
        length = int(headers["content-length"])
        assert len(rest) <= length, "something follows the body"
        body, is_complete = rest, len(rest) == length
    return ReadResponse(int(status[1]), headers, body, is_complete)


def _read_chunks(rest: bytes) -> tuple[bytes, bool]:
    """The content of as many chunks as have come, and whether the last one has."""
    content: list[bytes] = []
    start = 0
    while (line_end := rest.find(_CRLF, start)) >= 0:
        line = rest[start:line_end]
        assert _CHUNK_SIZE.fullmatch(line), f"{line!r} is no chunk size"
        size = int(line, 16)
        data_end = line_end + 2 + size
        assert rest[data_end : data_end + 2] == _CRLF[: max(0, len(rest) - data_end)], "a chunk goes on past its size"
        if size == 0:
            is_complete = len(rest) >= data_end + 2
            assert len(rest) <= data_end + 2, "something follows the last chunk"
            return b"".join(content), is_complete
        content.append(rest[line_end + 2 : data_end])
        start = data_end + 2
    return b"".join(content), False
