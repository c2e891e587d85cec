"""Clients of bench/drain.py: they ask on until they are turned away, and judge how each of their requests ended.

HTTP/1.1 clients want to be told by `connection: close`, HTTP/2 ones by two GOAWAYs; what has begun wants its end.
"""

import asyncio
import json
import random
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field

from bench import http2_frames
from bench.http2_frames import (
    ACK,
    DATA,
    END_STREAM,
    FRAME_HEADER_BYTES,
    GOAWAY,
    HEADERS,
    MAX_STREAM_ID,
    OPENING,
    PING,
    REFUSED_STREAM,
    RST_STREAM,
    frame,
)
from bench.peer import MODEL

NUM_STREAMS = 6  # at once on an HTTP/2 connection
PATH = "/v1/completions"
ENDLESS_TOKENS = 15_000

HTTP2_HEAD = http2_frames.request_head("POST", PATH)

DONE = "whole"
TOLD = "error event or 503"
REFUSED = "REFUSED_STREAM"
CLOSED = "sent late, closed unanswered"
BROKEN = "broken"
MAX_LATE_ANSWERS = 2  # on one connection without `connection: close`: taken before the server had heard of its end


@dataclass(frozen=True, slots=True)
class RoundPlan:
    """What happens in one round.

    Args:
        grace_s: what the server gives its streams.
        step_rate: of the null runner, steps/s; 0: as fast as it goes.
        signal_after_s: under load.
        has_second: another SIGTERM follows.
        has_idlers: some clients do not move.
    """

    grace_s: float
    step_rate: float
    signal_after_s: float
    has_second: bool
    seed: int
    has_idlers: bool = False


@dataclass
class Round:
    """One server and its clients."""

    plan: RoundPlan
    ends: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    is_signalled: bool = False

    def end(self, how: str, detail: str = "") -> None:
        self.ends[how] += 1
        if how == BROKEN:
            self.faults.append(detail)


def body_of(chance: random.Random, plan: RoundPlan) -> bytes:
    """A completion, streamed or whole; where the grace is short, many outlast it and the farewell after it."""
    outlasts = plan.grace_s < 1 and chance.random() < 0.5
    num_tokens = ENDLESS_TOKENS if outlasts else chance.randint(1, 120)
    fields = {"model": MODEL, "prompt": [5, 6], "ignore_eos": True, "max_tokens": num_tokens}
    return json.dumps(fields | {"stream": chance.random() < 0.7}).encode()


class Http1Client:
    """One request after the other, on one connection as long as the server keeps it, then on new ones."""

    def __init__(self, round_: Round, port: int, number: int) -> None:
        self._round = round_
        self._port = port
        self._chance = random.Random(round_.plan.seed * 100 + number)
        self._num_late = 0  # answers to requests sent after the signal that did not announce the end

    async def run(self) -> None:
        while True:
            try:
                reader, writer = await asyncio.open_connection("127.0.0.1", self._port, limit=2**24)
            except OSError:
                assert self._round.is_signalled, "the server is gone before its signal"
                return
            try:
                is_turned_away = await self._use(reader, writer)
            finally:
                writer.close()
                with suppress(OSError):
                    await writer.wait_closed()
            if is_turned_away:
                return

    async def _use(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Ask until the connection ends; whether there was a refusal."""
        while True:
            body = body_of(self._chance, self._round.plan)
            head = f"POST {PATH} HTTP/1.1\r\nhost: a\r\ncontent-length: {len(body)}\r\n\r\n".encode()
            was_signalled = self._round.is_signalled
            writer.write(head + body)
            received = b""
            try:
                received = await reader.readuntil(b"\r\n\r\n")
                fields = received.lower()
                content = await self._content(reader, fields)
            except (asyncio.IncompleteReadError, ConnectionError) as error:
                partial = received + getattr(error, "partial", b"")
                is_excused = was_signalled and not partial
                self._round.end(CLOSED if is_excused else BROKEN, f"HTTP/1.1: {partial[-200:]!r}")
                return was_signalled
            self._round.end(*_verdict(content))
            is_closing = b"\r\nconnection: close" in fields
            if is_closing:
                return b'"draining"' in content
            self._num_late += was_signalled
            if self._num_late > MAX_LATE_ANSWERS:
                self._round.end(BROKEN, "HTTP/1.1: asked again and again after the signal, and never told to close")
                return True

    async def _content(self, reader: asyncio.StreamReader, fields: bytes) -> bytes:
        if b"transfer-encoding: chunked" not in fields:
            return await reader.readexactly(int(fields.partition(b"content-length: ")[2].partition(b"\r\n")[0]))
        content = b""
        while size := int(await reader.readuntil(b"\r\n"), 16):
            content += (await reader.readexactly(size + 2))[:-2]
        await reader.readexactly(2)
        return content


def _verdict(content: bytes) -> tuple[str, str]:
    """Of an answer that is framed to its end."""
    if content.startswith(b"{"):
        return (TOLD if b'"draining"' in content else DONE), ""
    if content.endswith(b"data: [DONE]\n\n"):
        return DONE, ""
    return (TOLD if b'"code":"draining"' in content else BROKEN), f"a stream's end: {content[-200:]!r}"


class Http2Client:
    """Several streams at once on one connection, new ones for those that end, until the connection ends."""

    def __init__(self, round_: Round, port: int, number: int) -> None:
        self._round = round_
        self._port = port
        self._chance = random.Random(round_.plan.seed * 100 + 50 + number)
        self._streams: dict[int, bytes] = {}  # id -> content so far
        self._sent_late: set[int] = set()  # after the signal
        self._goaways: list[int] = []
        self._next_stream_id = 1

    async def run(self) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        writer.write(OPENING)
        received = bytearray()
        try:
            while True:
                self._ask(writer)
                data = await reader.read(65_536)
                if not data:
                    break
                received += data
                self._take_frames(received, writer)
        except ConnectionError:
            pass
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()
        self._judge_end()

    def _ask(self, writer: asyncio.StreamWriter) -> None:
        """Also after the first GOAWAY, which says only that another will follow; not after that."""
        while len(self._streams) < NUM_STREAMS and len(self._goaways) < 2:
            stream_id, self._next_stream_id = self._next_stream_id, self._next_stream_id + 2
            body = body_of(self._chance, self._round.plan)
            self._streams[stream_id] = b""
            if self._round.is_signalled:
                self._sent_late.add(stream_id)
            writer.write(http2_frames.request(stream_id, HTTP2_HEAD, body))

    def _take_frames(self, received: bytearray, writer: asyncio.StreamWriter) -> None:
        while len(received) >= FRAME_HEADER_BYTES:
            end = FRAME_HEADER_BYTES + int.from_bytes(received[:3], "big")
            if len(received) < end:
                return
            kind, flags, stream_id = received[3], received[4], int.from_bytes(received[5:9], "big")
            payload = bytes(received[FRAME_HEADER_BYTES:end])
            del received[:end]
            if kind == PING and not flags & ACK:
                writer.write(frame(PING, payload, ACK))
            elif kind == GOAWAY:
                self._take_goaway(int.from_bytes(payload[:4], "big"), int.from_bytes(payload[4:8], "big"))
            elif kind == RST_STREAM:
                self._take_reset(stream_id, int.from_bytes(payload, "big"))
            elif stream_id in self._streams:
                if kind == DATA:
                    self._streams[stream_id] += payload
                if flags & END_STREAM and kind in (DATA, HEADERS):
                    self._round.end(*_verdict(self._streams.pop(stream_id)))

    def _take_goaway(self, last_stream_id: int, code: int) -> None:
        self._goaways.append(last_stream_id)
        if code:
            self._round.end(BROKEN, f"HTTP/2: GOAWAY with code {code}")
        if last_stream_id != MAX_STREAM_ID:
            for stream_id in [stream_id for stream_id in self._streams if stream_id > last_stream_id]:
                self._take_reset(stream_id, REFUSED_STREAM)

    def _take_reset(self, stream_id: int, code: int) -> None:
        content = self._streams.pop(stream_id, None)
        if content is not None:
            is_refused = code == REFUSED_STREAM and not content and stream_id in self._sent_late
            self._round.end(REFUSED if is_refused else BROKEN, f"HTTP/2: reset with {code} after {content[-200:]!r}")

    def _judge_end(self) -> None:
        for stream_id, content in self._streams.items():
            self._round.end(BROKEN, f"HTTP/2: the connection ended in stream {stream_id} after {content[-200:]!r}")
        if len(self._goaways) != 2 or self._goaways[0] != MAX_STREAM_ID or self._goaways[1] == MAX_STREAM_ID:
            self._round.end(BROKEN, f"HTTP/2: GOAWAYs for {self._goaways} instead of {MAX_STREAM_ID} and the last one")
