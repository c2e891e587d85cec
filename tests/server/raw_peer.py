"""A client that speaks HTTP/2 by hand to a server in memory, and a handler that does what its paths say."""

import asyncio

from core.errors import ServiceError
from server.wire.messages import ResponseHead
from server.wire.stream import HttpStream
from tests.server.fakes import MemoryServer, MemoryTransport
from tests.server.memory_connection import answer
from tests.server.raw_http2 import START, Seen, ping


async def respond(stream: HttpStream) -> None:
    """What the cases ask for, by path."""
    match stream.request.path:
        case "/wait":
            await stream.read_body(2**20)
            stream.send_head(ResponseHead(200, ()))
            stream.send(b"begun")
            await asyncio.get_running_loop().create_future()
        case "/much":
            stream.send_head(ResponseHead(200, ()))
            stream.send(bytes(2**16))
            await asyncio.get_running_loop().create_future()
        case "/large":
            answer(stream, 200, bytes(10_000))
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


class MemoryPeer:
    """A client on a network in memory.

    Attributes:
        seen: what the server has said.
    """

    def __init__(self, server: MemoryServer, reads: bool = True) -> None:
        self.seen = Seen()
        self.server = server
        self.transport: MemoryTransport = server.connect(reads)
        self._num_seen = 0
        self._num_pings = 0
        self.feed(START)

    def feed(self, frames: bytes) -> None:
        """Send them, and see what comes of it."""
        self.transport.feed(frames)
        self.look()

    def send(self, frames: bytes) -> None:
        """The same, with a PING behind them; see goes_on."""
        self._num_pings += 1
        self.feed(frames + ping(b"%08d" % self._num_pings).encode(0))

    def look(self) -> None:
        self.server.loop.settle()
        self.seen.add(bytes(self.transport.received[self._num_seen :]))
        self._num_seen = len(self.transport.received)

    def advance(self, seconds: float) -> None:
        self.server.loop.advance(seconds)
        self.look()

    def drain(self) -> None:
        """Let the server begin its drain, and hear of it."""
        self._drain = self.server.loop.create_task(self.server.listener.drain(60))
        self.look()

    @property
    def goes_on(self) -> bool:
        """The last PING was answered."""
        return self.seen.has_pong(b"%08d" % self._num_pings) and not self.transport.has_sent_eof

    def outcome(self, stream: int = 1) -> str:
        """How the connection or its stream ended, as docs/limits.md says it; `passes` if neither has."""
        if self.seen.goaway is not None:
            return f"GOAWAY {self.seen.goaway.name}"
        if stream in self.seen.resets:
            return f"RST_STREAM {self.seen.resets[stream].name}"
        status = self.seen.statuses.get(stream, 200)
        return "passes" if status < 400 else str(status)
