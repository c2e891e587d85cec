"""Every MUST of RFC 9113 and RFC 7541 that a server can be tried on, by a client that is no library.

Each case of http2_cases and hpack_cases is tried in the clear, over TLS, beside streams that are being generated, and
while the connection drains, before its last GOAWAY and after it. A PING behind each tells when all has been said.
"""

import asyncio
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import pytest
import uvloop
from h2.errors import ErrorCodes

from core.errors import ServiceError
from server.connection_limits import ConnectionLimits
from server.frame_gate import GOAWAY, HEADERS, PING, SETTINGS
from server.listener import Listener, ListenerConfig
from server.messages import ResponseHead
from server.stream import HttpStream
from server.tls import ServerTls
from tests.certificates import make_certificate, needs_openssl
from tests.server import hpack_cases, http2_cases
from tests.server.fakes import MemoryServer, MemoryTransport, refuse
from tests.server.http2_cases import REFUSED, Case, Expected
from tests.server.raw_http2 import ACK, PREFACE, START, Frame, Seen, block, get, headers, ping, settings, wire
from tests.server.simulated_server import MODEL, SimulatedServer
from tests.server.test_connection import answer

CASES = (*http2_cases.CASES, *hpack_cases.CASES)
HANG_S = 20.0  # after which a real server is taken for hung


async def respond(stream: HttpStream) -> None:
    """What the cases ask for, by path."""
    match stream.request.path:
        case "/wait":
            await stream.read_body(2**20)
            stream.send_head(ResponseHead(200, ()))
            stream.send(b"begun")
            await asyncio.get_running_loop().create_future()
        case "/read":
            try:
                answer(stream, 200, b"%d" % len(await stream.read_body(2**20)))
            except ServiceError:
                answer(stream, 413, b"")
        case "/later":
            await asyncio.get_running_loop().create_future()
        case "/cookie":
            answer(stream, 200, stream.request.header(b"cookie") or b"")
        case _:
            answer(stream, 200, b"ok")


class Peer(Protocol):
    """A client on one connection.

    Attributes:
        seen: what the server has said.
    """

    seen: Seen

    def send(self, frames: bytes) -> None:
        """Send them, and see what comes of it, up to the answer to a PING behind them."""
        ...

    def drain(self) -> None:
        """Let the server begin its drain, and hear of it."""
        ...


class MemoryPeer:
    """On a network in memory."""

    def __init__(self, server: MemoryServer) -> None:
        self.seen = Seen()
        self.server = server
        self.transport: MemoryTransport = server.connect()
        self._num_seen = 0
        self._num_pings = 0
        self.send(START)

    def send(self, frames: bytes) -> None:
        self._num_pings += 1
        self.transport.feed(frames + ping(b"%08d" % self._num_pings).encode(0))
        self.look()

    def look(self) -> None:
        self.server.loop.settle()
        self.seen.add(bytes(self.transport.received[self._num_seen :]))
        self._num_seen = len(self.transport.received)

    def drain(self) -> None:
        self._drain = self.server.loop.create_task(self.server.listener.drain(60))
        self.look()

    @property
    def goes_on(self) -> bool:
        return self.seen.has_pong(b"%08d" % self._num_pings) and not self.transport.has_sent_eof


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
    assert goes_on is (expected.goaway is None)
    if expected.goaway is not None:
        return
    asked = {frame.stream for frame in case.frames if frame.kind == HEADERS}
    opened = asked - {frame.stream for frame in case.setup if frame.kind == HEADERS}
    if is_drained and opened:
        assert all(code is REFUSED for stream, code in seen.resets.items() if stream in opened and stream in asked)
        return
    own = {} if expected.reset is None else {expected.stream: expected.reset}
    assert seen.resets == own
    if expected.status is not None:
        assert seen.statuses[expected.stream] == expected.status
    assert case.check is None or case.check(seen)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_in_the_clear(case: Case) -> None:
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
