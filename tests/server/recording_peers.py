"""Clients of the simulated server that remember what they have asked and heard: Call, over HTTP/1.1 or HTTP/2."""

import functools
from dataclasses import dataclass
from typing import Any

import orjson
from hpack import Decoder, Encoder, NeverIndexedHeaderTuple

from server.wire.http2_frames import DATA, FRAME_HEADER, HEADER_BYTES, HEADERS, PREFACE, RST_STREAM, SETTINGS
from tests.server.fakes import MemoryTransport
from tests.server.http1_reader import read_response
from tests.server.raw_http2 import frame
from tests.server.simulated_server import Answer, request

END_STREAM, END_HEADERS = 0x1, 0x4
WINDOW_SETTING, WINDOW_UPDATE = 4, 8
CANCEL = (8).to_bytes(4, "big")


@dataclass(slots=True, kw_only=True, eq=False)
class Call:
    """One request, and its answer as far as it has come.

    Args:
        key: the caller's.
        body: JSON; None: none.
        is_cut: half of the body never comes.
        must_be: statuses of one that cannot succeed; None: it can.
        may_be: statuses besides, for what the client cannot know.
        may_be_cancelled: somebody of its tenant may have named it in a DELETE.
        has_left: the client went before the end.
        is_slow: the client does not read all in time, and may be cut off.
    """

    method: str
    path: str
    key: str
    body: dict[str, Any] | None
    is_cut: bool = False
    must_be: tuple[int, ...] | None = None
    may_be: tuple[int, ...] = (429, 503)
    may_be_cancelled: bool = False
    has_left: bool = False
    is_slow: bool = False
    is_over: bool = False
    answer: Answer | None = None

    @property
    def request_id(self) -> str | None:
        return None if self.answer is None else self.answer.headers.get("x-request-id")

    @property
    def error_codes(self) -> list[str]:
        """Of error events in a stream."""
        assert self.answer is not None
        if self.answer.headers["content-type"] == "application/json":
            return []
        return [e["error"]["code"] for e in self.answer.events if isinstance(e, dict) and "error" in e]

    @property
    def is_whole(self) -> bool:
        """It was answered to the end, and nothing broke off."""
        return self.answer is not None and self.answer.is_complete and not self.error_codes

    def check_one_end(self, is_broken: bool) -> None:
        """
        Args:
            is_broken: the device was lost in its time.
        """
        answer = self.answer
        assert answer is not None
        if not answer.is_complete:
            assert self.has_left or self.is_slow, f"it broke off: {self}"
            return
        if answer.status != 200:
            self._check_status(answer.status, is_broken)
            return
        assert self.must_be is None or self.error_codes, f"it should have failed: {self}"
        if answer.headers["content-type"] != "application/json":
            ends = [event for event in answer.events if event == "[DONE]"] + self.error_codes
            assert len(ends) == 1, f"its stream has the ends {ends}"
            assert answer.events[-1] == "[DONE]" or "error" in answer.events[-1]
            assert set(self.error_codes) <= self._expected_codes(is_broken), f"{answer.events[-1]} ends {self}"

    def _check_status(self, status: int, is_broken: bool) -> None:
        expected = (*(self.must_be or ()), *self.may_be, *[500] * is_broken, *[499] * self.may_be_cancelled)
        assert status in expected, f"{status} for {self}"

    def _expected_codes(self, is_broken: bool) -> set[str]:
        codes = {"engine_error"} if is_broken or self.must_be == (500,) else set()
        return codes | ({"request_cancelled"} if self.may_be_cancelled else set())


@functools.lru_cache(1024)
def _head(method: str, path: str, key: str) -> bytes:
    """Of a request, whatever was said before: nothing of it is indexed."""
    fields = {":method": method, ":scheme": "http", ":authority": "a", ":path": path, "authorization": f"Bearer {key}"}
    return Encoder().encode([NeverIndexedHeaderTuple(*field) for field in fields.items()])


class Http1Caller:
    """A connection with one request."""

    def __init__(self, transport: MemoryTransport) -> None:
        self.transport = transport
        self.calls: list[Call] = []
        self._num_bytes_read = 0

    @property
    def is_over(self) -> bool:
        return self.transport.is_lost or self.transport.is_closing() or bool(self.calls)

    def ask(self, call: Call) -> None:
        self.calls.append(call)
        call.is_slow = not self.transport.peer_reads
        body = None if call.body is None else orjson.dumps(call.body)
        data = request(call.method, call.path, body, f"Authorization: Bearer {call.key}")
        self.transport.feed(data[: len(data) - len(body or b"") // 2] if call.is_cut else data)

    def leave(self, how: str) -> None:
        self.finish()
        for call in self.calls:
            call.has_left |= not call.is_over
        self.transport.feed_eof() if how == "eof" else self.transport.reset()

    def look(self) -> None:
        """Read what has come, if it looks like all."""
        if self.transport.received.endswith((b"\r\n0\r\n\r\n", b"}", b"}\n")):
            self.finish()

    def finish(self) -> None:
        """Read what has come, from the beginning; nothing if that was done."""
        received = bytes(self.transport.received)
        if len(received) == self._num_bytes_read:
            return
        self._num_bytes_read = len(received)
        response = read_response(received)
        if response is not None:
            (call,) = self.calls
            call.answer = Answer(response.status, response.headers, response.body, response.is_complete)
            call.is_over = response.is_complete


class Http2Caller:
    """A connection with many requests. Frames by hand: an h2 of its own would cost as much as the server."""

    def __init__(self, transport: MemoryTransport, window: int) -> None:
        self.transport = transport
        self.calls: list[Call] = []
        self._decoder = Decoder()
        self._is_slow = window < 2**16 or not transport.peer_reads
        settings = WINDOW_SETTING.to_bytes(2, "big") + window.to_bytes(4, "big")
        transport.feed(PREFACE + frame(SETTINGS, settings) + frame(WINDOW_UPDATE, (2**31 - 65_536).to_bytes(4, "big")))

    @property
    def is_over(self) -> bool:
        return self.transport.is_lost or self.transport.is_closing()

    def ask(self, call: Call) -> None:
        self.calls.append(call)
        call.is_slow = self._is_slow
        stream_id = 2 * len(self.calls) - 1
        head = _head(call.method, call.path, call.key)
        content = b"" if call.body is None else orjson.dumps(call.body)
        if call.is_cut:
            content = content[: len(content) // 2]
        flags = 0 if call.is_cut else END_STREAM
        self.transport.feed(frame(HEADERS, head, END_HEADERS, stream_id) + frame(DATA, content, flags, stream_id))

    def reset(self, call: Call) -> None:
        self.finish()
        call.has_left |= not call.is_over
        call.is_over = True
        self.transport.feed(frame(RST_STREAM, CANCEL, 0, 2 * self.calls.index(call) + 1))

    def leave(self, how: str) -> None:
        self.finish()
        for call in self.calls:
            call.has_left |= not call.is_over
            call.is_over = True
        self.transport.feed_eof() if how == "eof" else self.transport.reset()

    def look(self) -> None:
        self.finish()

    def finish(self) -> None:
        """Read what has come."""
        received = self.transport.received
        if not received:
            return
        start, num_bytes = 0, len(received)
        while num_bytes >= start + HEADER_BYTES:
            high, low, kind, flags, stream_id = FRAME_HEADER.unpack_from(received, start)
            end = start + HEADER_BYTES + (high << 16 | low)
            if num_bytes < end:
                break
            if kind in (DATA, HEADERS):
                self._take(kind, flags, stream_id, bytes(received[start + HEADER_BYTES : end]))
            start = end
        del received[:start]

    def _take(self, kind: int, flags: int, stream_id: int, payload: bytes) -> None:
        call = self.calls[stream_id // 2]
        if kind == HEADERS:
            assert flags & END_HEADERS, "a head in several frames"
            fields = dict(self._decoder.decode(payload))
            if call.answer is None:
                call.answer = Answer(int(fields[":status"]), fields, b"", False)
        else:
            assert call.answer is not None
            call.answer.body += payload
        if flags & END_STREAM:
            assert call.answer is not None
            assert not call.answer.is_complete, "a second end"
            call.answer.is_complete = call.is_over = True
