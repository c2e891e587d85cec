"""The strict gate on raw HTTP/1.1 heads, ahead of h11. Thread: loop. Sans-io.

h11 0.16 takes what request smuggling needs: content-length beside transfer-encoding, `3, 3`, obs-fold, bare LF,
HTTP/1.0 with transfer-encoding, versions 1.9 and 2.0; and its limit on heads holds only for heads that are incomplete.
Here those are refused, with limits as origin servers have them. Each verdict depends on a prefix of the bytes only: it
is the same however the bytes are split over reads.
"""

import enum
import re
from dataclasses import dataclass

_REQUEST_LINE = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+ [\x21-\x7e]+ HTTP/1\.([01])")
_NAME = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+):")
_CONTROL = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")  # every CTL except HTAB
CONTENT_LENGTH = re.compile(rb"[0-9]{1,19}")  # 19 digits: below 2**64
_HOST = re.compile(rb"(?:\[[0-9A-Za-z:.%_~-]+\]|[0-9A-Za-z._~%!$&'()*+,;=-]*)(?::[0-9]*)?")


@dataclass(frozen=True, slots=True)
class HeadLimits:
    """What a request's head and the framing of its body may weigh; sizes count the line ends.

    Args:
        num_small_chunks: of a body, beyond one for each bytes_per_chunk of its content; content earns at most so many
            in advance. A chunk costs us as much however little it carries: 1,000 about as much as their request.
    """

    request_line_bytes: int = 8 * 1024
    head_bytes: int = 16 * 1024
    num_fields: int = 100
    num_small_chunks: int = 1000  # as FrameLimits.num_overhead_frames
    bytes_per_chunk: int = 256


class HeadRefused(Exception):
    """The peer's bytes are not a request that is taken here; the connection answers `status` and closes."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message


class Framing(enum.Enum):
    """How the length of a request's body is known (RFC 9112 §6.3)."""

    NONE = "none"
    COUNTED = "content-length"
    CHUNKED = "chunked"


class LineScanner:
    """Finds the end of a head, or of a trailer section, in a buffer that grows; each byte is looked at once.

    Args:
        has_request_line: the first line is a request line with a limit of its own; otherwise all lines are fields.
    """

    __slots__ = ("_has_request_line", "_limits", "_line_start", "_num_lines", "_searched")

    def __init__(self, limits: HeadLimits, has_request_line: bool = True) -> None:
        self._limits = limits
        self._has_request_line = has_request_line
        self.reset()

    def reset(self) -> None:
        self._line_start = 0
        self._searched = 0
        self._num_lines = 0

    @property
    def is_fresh(self) -> bool:
        """It has seen nothing of the section yet."""
        return not self._searched

    def scan(self, buffer: bytearray) -> int | None:
        """The index after the empty line that ends the section, or None as long as it has not come.

        `buffer` starts with the section, and is the same one, only longer, in each call until the end is found.

        Raises:
            HeadRefused: a limit is passed, or a line is not a line.
        """
        while (newline := buffer.find(b"\n", self._searched)) >= 0:
            end = newline + 1
            self._check_sizes(end)
            if self._take_line(buffer, end):
                return end
            self._line_start = self._searched = end
        self._searched = len(buffer)
        self._check_sizes(len(buffer))
        return None

    def _check_sizes(self, end: int) -> None:
        """Before a look at the line's content: a line cut by the end of a read is judged by its size alone."""
        limits = self._limits
        if self._num_lines == 0 and self._has_request_line and end > limits.request_line_bytes:
            # RFC 9112 §3: a request-target longer than the server wishes to parse is 414
            raise HeadRefused(414, f"The request line is longer than {limits.request_line_bytes} bytes.")
        if end > limits.head_bytes:
            # RFC 6585 §5
            raise HeadRefused(431, f"The header fields are larger than {limits.head_bytes} bytes.")

    def _take_line(self, buffer: bytearray, end: int) -> bool:
        """Judge the line that ends at `end`; True when it is the empty one."""
        start = self._line_start
        # RFC 9112 §2.2: a recipient MAY take a bare LF for a line end; we do not
        if end - start < 2 or buffer[end - 2] != 0x0D:
            raise HeadRefused(400, "Lines must end in CR LF.")
        is_request_line = self._has_request_line and self._num_lines == 0
        if end - start == 2:
            if is_request_line:
                raise HeadRefused(400, "The request line is empty.")
            return True
        if not is_request_line and buffer[start] in b" \t":
            # RFC 9112 §5.2: a server that receives obs-fold rejects it with 400, or replaces it; §2.2: nor may
            # whitespace stand between the request line and the first field
            raise HeadRefused(400, "A header line must not start with white space.")
        self._num_lines += 1
        if self._num_lines - self._has_request_line > self._limits.num_fields:
            raise HeadRefused(431, f"There are more than {self._limits.num_fields} header fields.")
        return False


def check_trailers(section: bytes) -> None:
    """Refuse a trailer section (with its empty line) that holds anything but fields. Its content is dropped unread.

    Raises:
        HeadRefused: a line is not a field.
    """
    for line in section[:-4].split(b"\r\n") if len(section) > 2 else ():
        _split_field(line)


def check_head(head: bytes) -> tuple[Framing, int]:
    """How the request's body is framed, and its length in bytes where that is COUNTED.

    Args:
        head: from the request line to the empty line, as LineScanner found it.

    Raises:
        HeadRefused: two recipients could read this head in two ways.
    """
    request_line, *lines = head[:-4].split(b"\r\n")
    match = _REQUEST_LINE.fullmatch(request_line)
    if match is None:
        # RFC 9112 §3: an invalid request line SHOULD be answered with 400
        raise HeadRefused(400, "The request line is not `METHOD target HTTP/1.1`.")
    is_http10 = match[1] == b"0"
    lengths: list[bytes] = []
    codings: list[bytes] = []
    hosts: list[bytes] = []
    for line in lines:
        name, value = _split_field(line)
        if name == b"content-length":
            lengths.append(value)
        elif name == b"transfer-encoding":
            codings.append(value)
        elif name == b"host":
            hosts.append(value)
    _check_hosts(hosts, is_http10)
    return _framing(lengths, codings, is_http10)


def _split_field(line: bytes) -> tuple[bytes, bytes]:
    match = _NAME.match(line)
    if match is None:
        # RFC 9112 §5.1: white space between the name and the colon MUST be rejected with 400
        raise HeadRefused(400, "A header line is not `name: value`.")
    value = line[match.end() :].strip(b" \t")
    if _CONTROL.search(value):
        # RFC 9110 §5.5: NUL, CR and LF in a value are dangerous, other control characters are invalid;
        # RFC 9112 §2.2: a bare CR is not a line end
        raise HeadRefused(400, "A header value holds a control character.")
    return match[1].lower(), value


def _check_hosts(hosts: list[bytes], is_http10: bool) -> None:
    # RFC 9112 §3.2: 400 to an HTTP/1.1 request that lacks Host, and to any with two or an invalid one
    if len(hosts) > 1:
        raise HeadRefused(400, "There is more than one Host header.")
    if not hosts and not is_http10:
        raise HeadRefused(400, "The Host header is missing.")
    if hosts and not is_authority(hosts[0]):
        raise HeadRefused(400, "The Host header is not a host and a port.")


def is_authority(value: bytes) -> bool:
    """Whether this is a host with an optional port, and no user before it (RFC 9110 §7.2, §4.2.4)."""
    return _HOST.fullmatch(value) is not None


def _framing(lengths: list[bytes], codings: list[bytes], is_http10: bool) -> tuple[Framing, int]:
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
        return Framing.CHUNKED, 0
    if not lengths:
        return Framing.NONE, 0
    # RFC 9112 §6.3 item 5: an invalid length, a list of lengths included, is an unrecoverable error
    if len(lengths) > 1 or CONTENT_LENGTH.fullmatch(lengths[0]) is None:
        raise HeadRefused(400, "Content-Length must be one decimal number.")
    length = int(lengths[0])
    return (Framing.COUNTED, length) if length else (Framing.NONE, 0)
