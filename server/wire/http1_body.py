"""Request bodies of HTTP/1.1, taken from the connection's buffer as they come. Thread: loop. Sans-io.

Chunked bodies are decoded here and not by h11, which takes CR in extensions, bare LF in trailers and spaces after
sizes: a strict gate ahead of it would have to find every chunk anyway, and of two readings one is too many.
"""

import re
import sys
from typing import Protocol

from server.wire.http1_prefilter import HeadLimits, HeadRefused, LineScanner, check_trailers

_SIZE_LINE_BYTES = 256
_EXTENSION_BYTES = 16 * 1024  # of all chunks of a body together: extensions are read, and mean nothing
_STEPS_PER_CHUNK = 3  # its size, its data, its line end
_TOKEN = rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+"
_QUOTED = rb'"(?:[\t\x20\x21\x23-\x5b\x5d-\x7e\x80-\xff]|\\[\t\x20-\x7e\x80-\xff])*"'
# RFC 9112 §7.1.1. All of it, quotes too: a reader that heeds them would go on past the CRLF within an open one
_EXTENSION = rb"[ \t]*;[ \t]*%b(?:[ \t]*=[ \t]*(?:%b|%b))?" % (_TOKEN, _TOKEN, _QUOTED)
_SIZE_LINE = re.compile(rb"([0-9A-Fa-f]{1,16})((?:%b)*)\r\n" % _EXTENSION)


class BodyDecoder(Protocol):
    """Takes its own bytes from the front of a buffer, and leaves what comes after the body.

    Attributes:
        has_more: enough was taken at once; the buffer may have more of it.
    """

    is_complete: bool
    has_more: bool

    def decode(self, buffer: bytearray) -> bytes:
        """The next content, possibly none.

        Raises:
            HeadRefused: the framing is broken.
        """
        ...


class CountedBody:
    """A body of a known length (RFC 9112 §6.3 item 6)."""

    def __init__(self, length: int) -> None:
        self._remaining = length
        self.is_complete = length == 0
        self.has_more = False

    def decode(self, buffer: bytearray) -> bytes:
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
        position = 0  # bytes before it are done with
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
        """Take one size line, one piece of data or one CRLF; the position after it, the same if more bytes are due."""
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
        """A chunk of so many bytes begins; its content is here before the next can begin."""
        limits = self._limits
        self._credit = min(self._most_credit, self._credit + num_bytes) - limits.bytes_per_chunk
        if self._credit < 0:
            raise HeadRefused(
                400,
                f"The chunks are too small. Send at least {limits.bytes_per_chunk} bytes in each, or the whole body.",
            )

    def _take_trailers(self, scanner: LineScanner, buffer: bytearray) -> None:
        """Read them for their end only: RFC 9110 §6.5.1 lets a recipient drop trailers it has no use for."""
        end = scanner.scan(buffer)
        if end is None:
            return
        check_trailers(bytes(buffer[:end]))
        del buffer[:end]
        self.is_complete = True
