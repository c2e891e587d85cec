"""One request to an upstream, and its answer as it comes: a head, pieces of a body, an end. Thread: loop.

Whoever reads may pause: then at most a window of bytes more comes (HTTP/2), or what one read of the socket holds.
"""

import asyncio
import re
from collections.abc import Iterator
from typing import NamedTuple, Protocol

MAX_EVENT_BYTES = 8 * 1024 * 1024
_LINE_END, _EVENT_END = re.compile(rb"\n"), re.compile(rb"\r\n\r\n|\n\r?\n|\r\r")
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
Fields = tuple[tuple[bytes, bytes], ...]  # names in lower case


class UpstreamFault(Exception):
    """An upstream has not answered, or has broken its answer off. The text completes "The upstream failed: ...".

    Args:
        is_untouched: the request has not been begun: it can be sent elsewhere, whatever it does.
        is_absent: nobody listens there.
    """

    def __init__(self, why: str, is_untouched: bool = False, is_absent: bool = False) -> None:
        super().__init__(why)
        self.is_untouched = is_untouched
        self.is_absent = is_absent


class ConnectionLost(UpstreamFault):
    """By the other side."""


class AnswerHead(NamedTuple):
    status: int
    fields: Fields

    def field(self, name: bytes) -> bytes | None:
        return next((value for key, value in self.fields if key == name), None)


class Outgoing(NamedTuple):
    """A request to an upstream."""

    method: bytes
    path: bytes
    fields: Fields  # without Host and the body's length
    body: bytes = b""

    @property
    def length(self) -> Fields:
        """The field that tells the body's."""
        return ((b"content-length", b"%d" % len(self.body)),) if self.body else ()


class Reader(Protocol):
    """What takes an answer: its methods are called in this order, on_end last and once, none after a cancel."""

    def on_head(self, head: AnswerHead) -> None: ...
    def on_data(self, data: bytes) -> None: ...
    def on_end(self, fault: UpstreamFault | None) -> None:
        """With what has broken the answer off, perhaps before its head."""


class Carrier(Protocol):
    """HTTP on one connection, as its exchanges need it: what their readers have read, held up, or no longer want."""

    def acknowledge(self, exchange: "Exchange", num_bytes: int) -> None: ...
    def set_paused(self, exchange: "Exchange", is_paused: bool) -> None: ...
    def cancel(self, exchange: "Exchange") -> None: ...


class Exchange:
    """
    Attributes:
        is_over: the answer is complete, broken off, or cancelled.
        has_head: it has come.
    """

    def __init__(self, carrier: Carrier, reader: Reader) -> None:
        self.is_over = self.has_head = False
        self._carrier = carrier
        self._reader = reader
        self._num_unread = 0
        self._is_paused = False

    # The reader's side.

    def pause(self) -> None:
        if not self._is_paused and not self.is_over:
            self._is_paused = True
            self._carrier.set_paused(self, True)

    def resume(self) -> None:
        if self._is_paused:
            self._is_paused = False
            num_unread, self._num_unread = self._num_unread, 0
            if not self.is_over:
                self._carrier.acknowledge(self, num_unread)
                self._carrier.set_paused(self, False)

    def cancel(self) -> None:
        """Nobody wants the rest. The upstream hears of it in this turn. Idempotent."""
        if not self.is_over:
            self.is_over = True
            self._carrier.cancel(self)

    # The connection's side.

    def take_head(self, head: AnswerHead) -> None:
        self.has_head = True
        self._reader.on_head(head)

    def take_data(self, data: bytes) -> None:
        if self.is_over:
            return
        if self._is_paused:
            self._num_unread += len(data)
        else:
            self._carrier.acknowledge(self, len(data))
        self._reader.on_data(data)

    def take_end(self, fault: UpstreamFault | None = None) -> None:
        """The answer is complete, or will never be. Idempotent."""
        if not self.is_over:
            self.is_over = True
            self._reader.on_end(fault)


class WholeAnswer:
    """A `Reader` for whoever waits for all of an answer: `done` is its head and body, or an UpstreamFault."""

    def __init__(self, most_bytes: int) -> None:
        self.done: asyncio.Future[tuple[AnswerHead, bytes]] = asyncio.get_running_loop().create_future()
        self._head = AnswerHead(0, ())
        self._body = bytearray()
        self._most_bytes = most_bytes

    def on_head(self, head: AnswerHead) -> None:
        self._head = head

    def on_data(self, data: bytes) -> None:
        self._body += data
        if len(self._body) > self._most_bytes:
            self.on_end(UpstreamFault(f"its answer is larger than {self._most_bytes} bytes"))

    def on_end(self, fault: UpstreamFault | None) -> None:
        if self.done.done():
            return
        if fault is None:
            self.done.set_result((self._head, bytes(self._body)))
        else:
            self.done.set_exception(fault)


class EventReader:
    """Splits a stream into its events (WHATWG HTML §9.2.6), or into lines. Raises UpstreamFault: one is too long."""

    def __init__(self, are_lines: bool) -> None:
        self._are_lines = are_lines
        self._is_start = True
        self._buffer = bytearray()

    def push(self, data: bytes) -> Iterator[tuple[bytes | None, bytes | None]]:
        """Events' names and data, or lines; comments have no data."""
        buffer, are_lines = self._buffer, self._are_lines
        is_event = not (buffer or are_lines) and data.startswith(b"data: ") and data.endswith(b"\n\n")
        if is_event and data.find(b"\n") == len(data) - 2 and b"\r" not in data:  # one alone, as most pieces are
            self._is_start = False
            yield None, data[6:-2]
            return
        searched = max(0, len(buffer) - 3)
        buffer += data
        if self._is_start and len(buffer) >= len(_BYTE_ORDER_MARK):
            self._is_start = False
            if buffer.startswith(_BYTE_ORDER_MARK):
                del buffer[: len(_BYTE_ORDER_MARK)]
        while (end := (_LINE_END if are_lines else _EVENT_END).search(buffer, searched)) is not None:
            raw = bytes(buffer[: end.start()])
            del buffer[: end.end()]
            searched = 0
            if are_lines:
                yield None, raw
            elif raw.startswith(b"data: ") and b"\n" not in raw and b"\r" not in raw:  # most are
                yield None, raw[6:]
            else:
                fields = [line.partition(b":") for line in raw.splitlines()]
                name = next((value.removeprefix(b" ") for key, _, value in fields if key == b"event"), None)
                lines = [value.removeprefix(b" ") for key, _, value in fields if key == b"data"]
                yield name, b" ".join(lines) if lines else None  # in JSON, a line break is but space
        if len(buffer) > MAX_EVENT_BYTES:
            raise UpstreamFault(f"an event is larger than {MAX_EVENT_BYTES} bytes")
