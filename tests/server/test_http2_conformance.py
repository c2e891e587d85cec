"""Every MUST of RFC 9113 and RFC 7541 that a server can be tried on, by a client that is no library.

Each case of http2_cases and hpack_cases is tried alone, beside streams that are being generated, and while the
connection drains, before its last GOAWAY and after it. A PING behind each tells when all has been said.
"""

import functools
import json

import pytest
from h2.errors import ErrorCodes

from server.wire.http2_frames import GOAWAY, HEADERS, PING, PREFACE, SETTINGS
from server.wire.stream import HttpStream
from tests.server import hpack_cases, http2_cases
from tests.server.fakes import MemoryServer
from tests.server.http2_cases.case import REFUSED, Case, has_acks
from tests.server.raw_http2 import (
    ACK,
    END_STREAM,
    START,
    Frame,
    Seen,
    data,
    get,
    goaway,
    ping,
    post,
    settings,
    window_update,
    wire,
)
from tests.server.raw_peer import MemoryPeer, respond
from tests.server.simulated_server import MODEL, Answer, SimulatedServer, chat

CASES = (*http2_cases.CASES, *hpack_cases.CASES)


def try_case(peer: MemoryPeer, case: Case) -> None:
    if case.setup:
        peer.send(wire(case.setup, peer.seen.base))
    peer.send(wire(case.frames, peer.seen.base))


def judge(case: Case, seen: Seen, goes_on: bool, is_drained: bool = False) -> None:
    """
    Args:
        goes_on: the PING behind the case was answered.
        is_drained: no new stream was taken.
    """
    expected = case.expected
    assert seen.goaway is expected.goaway
    last_streams = [frame.content[:4] for frame in seen.of(GOAWAY)]
    assert last_streams == sorted(last_streams, reverse=True)  # RFC 9113 §6.8: never increased
    assert goes_on is (expected.goaway is None)
    if expected.goaway is not None:
        return
    asked = {frame.stream for frame in case.frames if frame.kind == HEADERS}
    opened = asked - {frame.stream for frame in case.setup if frame.kind == HEADERS}
    if is_drained and opened:
        assert {seen.resets[stream] for stream in opened if stream in seen.resets} <= {REFUSED}
        assert expected.status is None or seen.resets[expected.stream] is REFUSED
        return
    own = {} if expected.reset is None else {expected.stream: expected.reset}
    assert seen.resets == own
    if expected.status is not None:
        assert seen.statuses[expected.stream] == expected.status
    assert case.check is None or case.check(seen)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_alone(case: Case) -> None:
    server = MemoryServer(respond)
    peer = MemoryPeer(server)
    try_case(peer, case)
    judge(case, peer.seen, peer.goes_on)
    server.close()


def begin_stream(peer: MemoryPeer) -> None:
    """Ask for one that goes on, on stream 1."""
    peer.send(wire([get(b"/wait")]))
    peer.seen.base = 2


@pytest.mark.parametrize("case", CASES, ids=str)
def test_while_draining(case: Case) -> None:
    server = MemoryServer(respond)
    peer = MemoryPeer(server)
    begin_stream(peer)
    peer.drain()
    assert [frame.content for frame in peer.seen.of(GOAWAY)] == [b"\x7f\xff\xff\xff\0\0\0\0"]
    try_case(peer, case)
    judge(case, peer.seen, peer.goes_on)
    server.close()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_after_the_last_goaway(case: Case) -> None:
    server = MemoryServer(respond)
    peer = MemoryPeer(server)
    begin_stream(peer)
    if case.setup:
        peer.send(wire(case.setup, peer.seen.base))
    peer.drain()
    (asked,) = (frame for frame in peer.seen.of(PING) if not frame.flags & ACK)
    peer.send(ping(asked.content, ACK).encode(0))
    assert len(peer.seen.of(GOAWAY)) == 2
    peer.send(wire(case.frames, peer.seen.base))
    judge(case, peer.seen, peer.goes_on, is_drained=True)
    server.close()


# Beside streams that are being generated.

CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "step"}], "seed": 7, "max_tokens": 12}
CHAT |= {"ignore_eos": True, "stream": True}


class LiveServer:
    """The whole server in virtual time, with the cases' paths beside its own."""

    def __init__(self) -> None:
        self.simulated = SimulatedServer()
        self.front = MemoryServer(self._handle, None, self.simulated.loop, self.simulated.app.refuse)
        self.peer = MemoryPeer(self.front)

    async def _handle(self, stream: HttpStream) -> None:
        is_chat = stream.request.path.startswith("/v1/")
        await (self.simulated.app.handle(stream) if is_chat else respond(stream))

    def begin_streams(self) -> None:
        """Two chats, on streams 1 and 3, that are in the middle of their text."""
        for stream in (1, 3):
            head = post(b"/v1/chat/completions", stream, (b"content-type", b"application/json"))
            self.peer.send(wire([head, data(json.dumps(CHAT).encode(), END_STREAM, stream)]))
        for _ in range(6):
            self.simulated.step()
        self.peer.look()
        assert all(0 < len(self.texts[stream]) < len(whole_text()) for stream in (0, 1))
        self.peer.seen.base = 4

    @property
    def texts(self) -> list[str]:
        base = self.peer.seen.base
        bodies = [self.peer.seen.body(stream - base) for stream in (1, 3)]
        return [Answer(200, {"content-type": "text/event-stream"}, body, True).text() for body in bodies]

    def finish(self) -> None:
        """Let the engine run on to the end."""
        self.simulated.run()
        self.peer.look()

    def close(self) -> None:
        """All peers leave, and nothing may be left of them."""
        self.front.listener.abort()
        self.simulated.run()
        assert self.front.is_quiet()
        self.simulated.close()


@functools.cache
def whole_text() -> str:
    """What the chats say when nothing disturbs them."""
    server = SimulatedServer()
    text = server.ask(chat(stream=True)).text()
    server.close()
    return text


@pytest.mark.parametrize("case", CASES, ids=str)
def test_beside_live_streams(case: Case) -> None:
    server = LiveServer()
    server.begin_streams()
    peer = server.peer
    try_case(peer, case)
    judge(case, peer.seen, peer.goes_on)
    peer.transport.feed(wire(case.restore, peer.seen.base))
    server.finish()
    if case.expected.goaway is None:
        assert server.texts == [whole_text()] * 2
    else:
        assert server.simulated.stats.num_running == 0
    server.close()


# Before any stream: the connection's preface.

FIRST = {
    "PING": ping(),
    "HEADERS": get(),
    "an acknowledgement": settings(flags=ACK),
    "GOAWAY": goaway(),
    "an unknown frame": Frame(0x77),
    "WINDOW_UPDATE": window_update(1),
}


@pytest.mark.parametrize("name", FIRST)
def test_first_frame_is_settings(name: str) -> None:
    """RFC 9113 §3.4."""
    server = MemoryServer(respond)
    transport = server.exchange(PREFACE + FIRST[name].encode(0))
    seen = Seen()
    seen.add(bytes(transport.received))
    assert seen.goaway is ErrorCodes.PROTOCOL_ERROR
    server.close()


def test_our_first_frame_is_settings_and_theirs_are_acknowledged() -> None:
    """RFC 9113 §3.4, §6.5.3."""
    server = MemoryServer(respond)
    peer = MemoryPeer(server)
    first, *_ = peer.seen.frames
    assert (first.kind, first.flags & ACK, first.stream) == (SETTINGS, 0, 0)
    assert has_acks(0)(peer.seen)
    server.close()


def test_request_may_come_with_the_preface() -> None:
    """RFC 9113 §3.4: a client need not wait for our SETTINGS."""
    server = MemoryServer(respond)
    transport = server.exchange(START + get().encode(0))
    seen = Seen()
    seen.add(bytes(transport.received))
    assert seen.statuses == {1: 200}
    server.close()
