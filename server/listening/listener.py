"""The listener: accepts connections, bounds their number, and closes them gracefully. Thread: loop.

A connection counts from its accept on: the TLS handshake is part of it.
"""

import asyncio
import contextlib
import errno
import logging
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from server.listening.clients import (
    HANDSHAKE,
    MAX_CONNECTIONS,
    PROXY_HEAD_BYTES,
    PROXY_HEADER,
    SHUTDOWN,
    UNTRUSTED_PROXY,
    ClientGate,
    ClientRules,
    ProxyProtocolError,
    Refusals,
    num_behind_proxy_head,
    proxied_client,
)
from server.listening.sockets import DEFAULT_UNIX_MODE, Bind, ListeningSocket, PassedSocket, TcpAddress, open_binds
from server.wire.connection import Connection, ConnectionContext, Handler, Refuse, WriteBatch, http_date
from server.wire.http1_exchanges import first_exchanges
from server.wire.limits import ConnectionLimits
from server.wire.messages import Peer, socket_peer
from server.wire.stream import BodyRoom
from server.wire.tls import REFUSED_ALERT, ServerTls, start_tls

logger = logging.getLogger(__name__)

ACCEPTS_PER_WAKEUP = 32
PAUSE_S = 0.2  # before the next attempt after accept(2) found no descriptor or memory

_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)

# (the connection, the peer's address as the family has it)
Welcome = Callable[[socket.socket, Any], None]


class Acceptor:
    """
    Args:
        sock: listens, and does not block.
        welcome: takes every connection, and must close it.

    Attributes:
        num_pauses: for want of descriptors or memory.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, sock: socket.socket, welcome: Welcome) -> None:
        self.num_pauses = 0
        self._loop = loop
        self._sock = sock
        self._welcome = welcome
        self._pause: asyncio.TimerHandle | None = None

    def start(self) -> None:
        self._pause = None
        self._loop.add_reader(self._sock, self._accept_some)

    def stop(self) -> None:
        """Accept no more; the socket stays open."""
        if self._pause is not None:
            self._pause.cancel()
        self._loop.remove_reader(self._sock)

    def _accept_some(self) -> None:
        for _ in range(ACCEPTS_PER_WAKEUP):
            try:
                accepted, address = self._sock.accept()
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                if error.errno in _EXHAUSTED:
                    self._pause_for(error)
                    return
                continue  # accept(2): a network error of the new connection, which is gone
            accepted.setblocking(False)
            try:
                self._welcome(accepted, address)
            except Exception:  # a bug of ours: the others in the queue are accepted
                logger.exception("a connection cannot be handled, and is closed")
                accepted.close()

    def _pause_for(self, error: OSError) -> None:
        if not self.num_pauses:
            logger.error(
                "connections cannot be accepted: %s; raise the limit on open files (LimitNOFILE=, ulimit -n),"
                " or lower --max-connections",
                error.strerror,
            )
        self.num_pauses += 1
        self._loop.remove_reader(self._sock)
        self._pause = self._loop.call_later(PAUSE_S, self.start)


ALL_BUFFERED_BODY_BYTES = 256 * 1024 * 1024
HANDSHAKE_S = 5.0
NOTSENT_BYTES = 16 * 1024  # without it, a loopback's kernel takes 4 MB

_UNIX_SEND_BUFFER_BYTES = 32 * 1024  # in place of TCP_NOTSENT_LOWAT: by default the kernel takes 200 KiB
_LATE_GRACE_S = 1.0  # for answers on connections that came during the drain
_ABORT_GRACE_S = 1.0  # for handlers to settle once their connections are gone


@dataclass(frozen=True, slots=True)
class ListenerConfig:
    """
    Args:
        passed: listening sockets; each is served, whether a bind names it or not.
        unix_mode: permissions of Unix sockets' files.
        backlog: connections the kernel holds before they are accepted.
        buffered_body_bytes: of incomplete bodies on all connections: see BodyRoom.
        max_connections: open at once; one more is refused and closed.
        handshake_s: for a PROXY header, and from there for TLS.
        notsent_bytes: that the kernel takes of a TCP connection ahead of what it has sent.
        tls: None: in the clear.
        takes_upgrade: from HTTP/1.1 to HTTP/2, in the clear; a proxy in front must not forward it.
    """

    binds: Sequence[Bind] = (Bind(),)
    passed: Sequence[PassedSocket] = ()
    unix_mode: int = DEFAULT_UNIX_MODE
    backlog: int = 1024
    max_connections: int = 4096
    buffered_body_bytes: int = ALL_BUFFERED_BODY_BYTES
    clients: ClientRules = field(default_factory=ClientRules)
    connection: ConnectionLimits = field(default_factory=ConnectionLimits)
    handshake_s: float = HANDSHAKE_S
    notsent_bytes: int = NOTSENT_BYTES
    tls: ServerTls | None = None
    takes_upgrade: bool = False


class Listener:
    """Implements ConnectionRegistry.

    Attributes:
        sockets: once started.
        num_accepted: connections, refused ones included.
        batch: to be flushed (flush_all) after sending to many streams at once.
    """

    def __init__(
        self,
        handler: Handler,
        refuse: Refuse,
        config: ListenerConfig,
        loop: asyncio.AbstractEventLoop | None = None,
        wall_clock: Callable[[], float] = time.time,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Bind nothing yet. Without `loop`, the running one."""
        loop = loop or asyncio.get_running_loop()
        self.sockets: list[ListeningSocket] = []
        self.num_accepted = 0
        self.refusals = Refusals(loop.time)
        self.gate = ClientGate(config.clients)
        self.batch = WriteBatch(loop)
        self._config = config
        self._loop = loop
        self._context = ConnectionContext(
            handler,
            refuse,
            config.connection,
            self,
            loop,
            self.batch,
            http_date(wall_clock),
            BodyRoom(config.buffered_body_bytes),
            clock,
            first_exchanges,
            config.takes_upgrade,
        )
        self._acceptors: list[tuple[ListeningSocket, Acceptor]] = []  # of the sockets that are still open
        self._connections: set[Connection] = set()
        # Without a transport yet; None: the task must not be cancelled any more
        self._opening: dict[Connection, asyncio.Task[None] | None] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._awaited: set[Connection] = self._connections  # drain() waits for their end
        self._is_draining = False
        self._is_closed = False
        self._quiet: asyncio.Future[bool] | None = None  # False: the time is over

    @property
    def port(self) -> int:
        """Of the first TCP socket; 0 without one."""
        return next((one.address.port for one in self.sockets if isinstance(one.address, TcpAddress)), 0)

    @property
    def num_open(self) -> int:
        """Connections, those in a handshake included."""
        return len(self._connections)

    @property
    def num_handlers(self) -> int:
        """Running handlers; some may outlive their connections."""
        return len(self._tasks)

    async def start(self) -> None:
        """Bind and accept. Raises StartupError if an address is not available."""
        config = self._config
        self.sockets = open_binds(config.binds, config.passed, config.backlog, config.unix_mode)
        for listening in self.sockets:
            listening.hold_unsent(config.notsent_bytes)
            acceptor = Acceptor(
                self._loop, listening.sock, partial(self._welcome, listening.bind, listening.sock.family)
            )
            acceptor.start()
            self._acceptors.append((listening, acceptor))

    # The beginning of a connection.

    def _welcome(self, bind: Bind, family: int, accepted: socket.socket, address: Any) -> None:
        if family == socket.AF_UNIX:
            accepted.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _UNIX_SEND_BUFFER_BYTES)
        connection = self.admit(socket_peer(family, address), bind.takes_proxy)
        if connection is None:
            if self._config.tls is not None and not (bind.is_plain or bind.takes_proxy):
                with contextlib.suppress(OSError):
                    accepted.send(REFUSED_ALERT)
            accepted.close()
            return
        task = self._loop.create_task(self._open(connection, bind, accepted))
        self._opening[connection] = task
        task.add_done_callback(partial(self._end_opening, connection, accepted))

    def admit(self, peer: Peer, takes_proxy: bool = False) -> Connection | None:
        """Count a new connection; None: it is refused.

        Args:
            takes_proxy: it begins with a PROXY header.
        """
        self.num_accepted += 1
        peer = self.gate.identify(peer)
        reason = self._why_refused(peer, takes_proxy)
        if reason is not None:
            self.refusals.add(reason, peer)
            return None
        connection = Connection(self._context, peer)
        self.gate.enter(peer)
        self._connections.add(connection)
        if self._is_draining:
            connection.closes_after_answer = True
        return connection

    def _why_refused(self, peer: Peer, takes_proxy: bool) -> str | None:
        if self._is_closed:
            return SHUTDOWN
        if len(self._connections) >= self._config.max_connections:
            return MAX_CONNECTIONS
        if peer.is_proxy:
            return None
        return UNTRUSTED_PROXY if takes_proxy else self.gate.why_refused(peer)

    async def _open(self, connection: Connection, bind: Bind, accepted: socket.socket) -> None:
        """Give the connection its transport, after a PROXY header and the TLS handshake."""
        if bind.takes_proxy and not await self._hear_proxy(connection, accepted):
            return
        tls = None if bind.is_plain else self._config.tls
        handshake_end = self._loop.time() + self._config.handshake_s
        if tls is not None:
            first = await self._hear_first(accepted, handshake_end)
            if not first:
                self.refusals.add(HANDSHAKE, connection.peer)
                return
            if first.isalpha():  # of a method, in the clear; a TLS record begins with 22
                connection.is_misdirected = True
                tls = None
        try:
            if tls is None:  # it opens within a turn of the loop, and uvloop would not tell it of a cancellation
                self._opening[connection] = None
                await self._loop.connect_accepted_socket(lambda: connection, accepted)
            else:
                timeout_s = max(1e-3, handshake_end - self._loop.time())
                transport, lower = await start_tls(self._loop, accepted, tls.context, timeout_s)
                transport.set_protocol(connection)
                connection.tls_made(transport, lower)
        except OSError as error:  # ssl.SSLError is one
            logger.debug("the connection from %s did not open: %s", connection.peer, error)
            if connection in self._opening:
                self.refusals.add(HANDSHAKE, connection.peer)

    async def _hear_first(self, accepted: socket.socket, end: float) -> bytes:
        """Peek at the first byte; b"": the connection has ended, or none came in time."""
        try:
            async with asyncio.timeout_at(end):
                return await _peek(self._loop, accepted)
        except OSError:  # TimeoutError is one
            return b""

    async def _hear_proxy(self, connection: Connection, accepted: socket.socket) -> bool:
        """Read the PROXY header; its client becomes the connection's peer. False: it is invalid, or refused."""
        try:
            async with asyncio.timeout(self._config.handshake_s):
                head = await _receive(self._loop, accepted, PROXY_HEAD_BYTES)
                client = proxied_client(head, await _receive(self._loop, accepted, num_behind_proxy_head(head)))
        except (OSError, ProxyProtocolError) as error:
            logger.debug("no PROXY header from %s: %s", connection.peer, error)
            self.refusals.add(PROXY_HEADER, connection.peer)
            return False
        if client is None:
            return True
        if client.address is not None:  # `unix` trusts peers of our sockets, not of the proxy's
            client = self.gate.identify(client)
        reason = None if client.is_proxy else self.gate.why_refused(client)
        if reason is not None:
            self.refusals.add(reason, client)
            return False
        self.gate.enter(client)  # the proxy itself is not counted
        connection.peer = client
        return True

    def _end_opening(self, connection: Connection, accepted: socket.socket, task: asyncio.Task[None]) -> None:
        """Clean up if it did not open. A task that is cancelled before it began has not run at all."""
        if connection in self._opening:
            accepted.close()
            self.forget(connection)
        if not task.cancelled():
            task.result()  # the loop's exception handler logs a bug of ours

    # ConnectionRegistry.

    def opened(self, connection: Connection) -> None:
        self._opening.pop(connection, None)
        if self._is_closed:
            self._loop.call_soon(connection.drain)

    def forget(self, connection: Connection) -> None:
        self._opening.pop(connection, None)
        self._connections.remove(connection)
        self.gate.leave(connection.peer)
        self._awaited.discard(connection)
        self._tell_quiet()

    def keep_task(self, task: asyncio.Task[None]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._forget_task)

    def _forget_task(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._tell_quiet()

    def _tell_quiet(self) -> None:
        if self._quiet is not None and not self._quiet.done() and not self._awaited and not self.num_handlers:
            self._quiet.set_result(True)

    # The end.

    async def drain(self, grace_s: float) -> None:
        """Close idle connections, let the others finish for grace_s, stop listening, abort the rest.

        New connections get one answer meanwhile, so that the handler can tell that the server ends; the drain does not
        wait for them. Those on passed sockets are left for the next process. When it returns, no connection is open and
        no handler runs.
        """
        self._is_draining = True
        for listening, acceptor in self._acceptors:
            if listening.is_passed:
                acceptor.stop()
        self._awaited = self._connections - self._opening.keys()
        for connection in tuple(self._awaited):
            connection.drain()
        for connection in self._opening:
            connection.closes_after_answer = True
        is_in_time = await self._wait_quiet(grace_s)
        self._stop_listening()
        if is_in_time and await self._wait_quiet(_LATE_GRACE_S):
            return
        self.abort()
        if await self._wait_quiet(_ABORT_GRACE_S):
            return
        for task in tuple(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(tuple(self._tasks))

    def hurry(self, grace_s: float) -> None:
        """Let drain(), running or about to be called, wait for grace_s more at most."""
        self._loop.call_later(grace_s, self._give_up)

    def _stop_listening(self) -> None:
        self._is_closed = True
        for listening, acceptor in self._acceptors:
            acceptor.stop()
            listening.close()
        self._acceptors.clear()
        self._awaited = self._connections
        for connection in self._connections - self._opening.keys():
            connection.drain()  # those that are opening follow in opened()

    def abort(self) -> None:
        """Close all connections now; to their handlers it is as if the clients left."""
        for connection in self._connections - self._opening.keys():
            connection.abort()
        for task in self._opening.values():
            if task is not None:
                task.cancel()

    async def _wait_quiet(self, timeout_s: float) -> bool:
        """Whether all connections and handlers ended in time."""
        self._quiet = self._loop.create_future()
        self._tell_quiet()
        timer = self._loop.call_later(timeout_s, self._give_up)
        try:
            return await self._quiet
        finally:
            timer.cancel()

    def _give_up(self) -> None:
        if self._quiet is not None and not self._quiet.done():
            self._quiet.set_result(False)


async def _peek(loop: asyncio.AbstractEventLoop, accepted: socket.socket) -> bytes:
    readable = asyncio.Event()
    loop.add_reader(accepted, readable.set)
    try:
        await readable.wait()
    finally:
        loop.remove_reader(accepted)
    return accepted.recv(1, socket.MSG_PEEK)


async def _receive(loop: asyncio.AbstractEventLoop, accepted: socket.socket, num_bytes: int) -> bytes:
    """Exactly so many: the rest is the connection's. Raises OSError if it ends before."""
    received = b""
    while len(received) < num_bytes:
        data = await loop.sock_recv(accepted, num_bytes - len(received))
        if not data:
            raise ConnectionAbortedError(errno.ECONNABORTED, "the connection ended")
        received += data
    return received
