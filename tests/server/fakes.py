"""A network in memory: a transport with the server's connection at one end and the test at the other."""

import asyncio
from collections.abc import Awaitable, Callable
from ipaddress import IPv4Address
from typing import Any

from server.api.replies import protocol_error_body
from server.listening.clients import ClientRules
from server.listening.listener import ALL_BUFFERED_BODY_BYTES, Listener, ListenerConfig
from server.wire.connection import Refuse
from server.wire.limits import ConnectionLimits
from server.wire.messages import Headers, Http2ErrorCode, Peer
from server.wire.stream import HttpStream, content_headers
from tests.server.virtual_loop import VirtualTimeLoop

PEER = Peer(IPv4Address("192.0.2.7"), 4242)
OPERATOR = Peer(IPv4Address("127.0.0.1"), 4242)


class MemoryTls:
    """What stands for an ssl.SSLObject: HTTP/1.1, and no certificate of the client's."""

    def getpeercert(self) -> None:
        return None

    def selected_alpn_protocol(self) -> None:
        return None


class MemoryTransport(asyncio.Transport):
    """The server's end of a connection. What the peer has not read stays in its buffer, with water marks.

    Attributes:
        writes: each call of write, in order.
        peer_reads: bytes arrive at once; else they stay until peer_read.
        received: what the peer has read.
        can_half_close: unlike TLS.
        tls: what TLS tells of itself, which waits for the peer's farewell before it closes; None: in the clear.
    """

    def __init__(self, loop: VirtualTimeLoop, protocol: asyncio.Protocol, peer_reads: bool = True) -> None:
        super().__init__()
        self.writes: list[bytes] = []
        self.received = bytearray()
        self.peer_reads = peer_reads
        self.can_half_close = True
        self.tls: MemoryTls | None = None
        self.is_reading_paused = False
        self.is_lost = False
        self.was_aborted = False
        self.has_sent_eof = False
        self._loop = loop
        self._protocol = protocol
        self._unread = bytearray()
        self._inbox: list[bytes | None] = []
        self._high = 64 * 1024
        self._low = 16 * 1024
        self._is_writing_paused = False
        self._is_closing = False
        loop.call_soon(protocol.connection_made, self)

    # The server's side.

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self.tls if name == "ssl_object" and self.tls is not None else default

    def write(self, data: bytes | bytearray | memoryview) -> None:
        assert not self.has_sent_eof
        if self._is_closing:
            return
        self.writes.append(bytes(data))
        self._unread += data
        if self.peer_reads:
            self.peer_read()
        elif len(self._unread) > self._high and not self._is_writing_paused:
            self._is_writing_paused = True
            self._protocol.pause_writing()

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self._high = 64 * 1024 if high is None else high
        self._low = self._high // 4 if low is None else low

    def get_write_buffer_size(self) -> int:
        return len(self._unread)

    def can_write_eof(self) -> bool:
        return self.can_half_close

    def write_eof(self) -> None:
        assert self.can_half_close
        self.has_sent_eof = True

    def pause_reading(self) -> None:
        assert not self.is_reading_paused
        self.is_reading_paused = True

    def resume_reading(self) -> None:
        assert self.is_reading_paused
        self.is_reading_paused = False
        self._loop.call_soon(self._deliver)

    def is_closing(self) -> bool:
        return self._is_closing

    def close(self) -> None:
        if not self._is_closing:
            self._is_closing = True
            self._end_if_read()

    def abort(self) -> None:
        self._is_closing = self.was_aborted = True
        self._unread.clear()
        self._loop.call_soon(self._lose, None)

    # The peer's side.

    def feed(self, data: bytes) -> None:
        """The peer sends."""
        self._inbox.append(data)
        self._loop.call_soon(self._deliver)

    def feed_eof(self) -> None:
        """The peer closes its side."""
        self._inbox.append(None)
        self._loop.call_soon(self._deliver)

    def reset(self) -> None:
        """The peer is gone without a word."""
        self._is_closing = True
        self._loop.call_soon(self._lose, ConnectionResetError())

    def peer_read(self, num_bytes: int | None = None) -> None:
        """The peer reads so much of what is there, or everything."""
        taken = len(self._unread) if num_bytes is None else num_bytes
        self.received += self._unread[:taken]
        del self._unread[:taken]
        if self._is_writing_paused and len(self._unread) <= self._low:
            self._is_writing_paused = False
            self._loop.call_soon(self._protocol.resume_writing)
        if self._is_closing:
            self._end_if_read()

    def _end_if_read(self) -> None:
        if not self._unread and self.tls is None:
            self._loop.call_soon(self._lose, None)

    def _deliver(self) -> None:
        while self._inbox and not self.is_reading_paused and not self._is_closing:
            data = self._inbox.pop(0)
            if data is not None:
                self._protocol.data_received(data)
            elif not self._protocol.eof_received():
                self.close()

    def _lose(self, error: Exception | None) -> None:
        if not self.is_lost:
            self.is_lost = True
            self._protocol.connection_lost(error)


def refuse(
    status: int, message: str, peer: Peer, since: float, stream: HttpStream | None, code: Http2ErrorCode | None
) -> tuple[Headers, bytes]:
    """What a connection answers by itself where no app accounts for it."""
    body = protocol_error_body(status, message)
    return content_headers(body), body


class MemoryServer:
    """The real listener and its connections on a virtual-time loop, with peers in memory instead of sockets.

    Attributes:
        peer: of new connections.
    """

    def __init__(
        self,
        handler: Callable[[HttpStream], Awaitable[None]],
        limits: ConnectionLimits | None = None,
        loop: VirtualTimeLoop | None = None,
        refuse: Refuse = refuse,
        clients: ClientRules | None = None,
        buffered_body_bytes: int = ALL_BUFFERED_BODY_BYTES,
        takes_upgrade: bool = False,
    ) -> None:
        self.loop = VirtualTimeLoop() if loop is None else loop
        self.peer = PEER
        config = ListenerConfig(
            connection=limits or ConnectionLimits(),
            clients=clients or ClientRules(),
            buffered_body_bytes=buffered_body_bytes,
            takes_upgrade=takes_upgrade,
        )
        self.listener = Listener(handler, refuse, config, self.loop, lambda: 0.0, self.loop.time)

    def connect(self, peer_reads: bool = True) -> MemoryTransport:
        transport = self.dial(peer_reads)
        self.loop.settle()
        return transport

    def dial(self, peer_reads: bool = True) -> MemoryTransport:
        """A new connection that is made when the loop runs next."""
        connection = self.listener.admit(self.peer)
        assert connection is not None, "the connection was refused"
        return MemoryTransport(self.loop, connection, peer_reads)

    def exchange(self, *pieces: bytes) -> MemoryTransport:
        """A new connection that sends these pieces, one read each, and what has come of it when all is quiet."""
        transport = self.connect()
        for piece in pieces:
            transport.feed(piece)
            self.loop.settle()
        return transport

    def is_quiet(self) -> bool:
        """No connection is open, no handler runs, no timer is set."""
        return not self.listener.num_open and not self.listener.num_handlers and self.loop.next_timer() is None

    def close(self) -> None:
        """All peers are cut off; nothing may be left of them."""
        self.listener.abort()
        self.loop.settle()
        is_quiet = self.is_quiet()
        self.loop.close()
        assert is_quiet, "a connection, a handler or a timer is left over"
        assert not self.listener.gate.num_addresses, "a client is counted that has gone"
