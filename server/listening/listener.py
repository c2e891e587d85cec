"""The connections that the listening sockets bring, the caps on them, and their orderly end. Thread: loop.

A connection counts from the moment it is accepted: its TLS handshake is a part of it.
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
PAUSE_S = 0.2  # accept(2) is tried again so long after it had nothing to give a connection

_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)

# (the connection, the peer's address as the family has it)
Welcome = Callable[[socket.socket, Any], None]


class Acceptor:
    """
    Args:
        sock: listens, and does not block.
        welcome: takes every connection, and closes it in the end.

    Attributes:
        num_pauses: times that it had to wait for descriptors or memory.
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
        """Accept no more. The socket stays open, and its queue as it is."""
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
                continue  # accept(2): network errors of the connection to be, which is gone now
            accepted.setblocking(False)
            try:
                self._welcome(accepted, address)
            except Exception:  # a fault of ours: those behind it in the queue are to come in
                logger.exception("a connection cannot be taken, and is closed")
                accepted.close()

    def _pause_for(self, error: OSError) -> None:
        if not self.num_pauses:
            logger.error(
                "no connection can be accepted now: %s; raise the limit on open files (LimitNOFILE=, ulimit -n),"
                " or lower --max-connections",
                error.strerror,
            )
        self.num_pauses += 1
        self._loop.remove_reader(self._sock)
        self._pause = self._loop.call_later(PAUSE_S, self.start)


ALL_BUFFERED_BODY_BYTES = 256 * 1024 * 1024
HANDSHAKE_S = 5.0
NOTSENT_BYTES = 16 * 1024  # a loopback's kernel takes 4 MB without it

_UNIX_SEND_BUFFER_BYTES = 32 * 1024  # TCP_NOTSENT_LOWAT's part: the kernel's default takes 200 KiB before we notice
_LATE_GRACE_S = 1.0  # for answers to connections that came while others were waited for
_ABORT_GRACE_S = 1.0  # for handlers to settle what they hold, once their connections are gone


@dataclass(frozen=True, slots=True)
class ListenerConfig:
    """Where to listen, and how much to take.

    Args:
        passed: sockets that listen already; each is served, whether a bind names it or not.
        unix_mode: permissions of Unix sockets' files.
        backlog: connections the kernel holds before they are accepted.
        buffered_body_bytes: of incomplete bodies, all connections together: beyond it the oldest goes on, and that of
            each client that has less than its part.
        max_connections: open at once; one more is closed at once and counted as refused.
        clients: who may come, and what proxies may say.
        handshake_s: for what comes ahead of HTTP, from the accept: TLS, or a PROXY header.
        notsent_bytes: that the kernel takes of a TCP connection before it has sent the rest.
        tls: None: in the clear.
        takes_upgrade: from HTTP/1.1 to HTTP/2, in the clear; a proxy before us must not hand it on.
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


@dataclass(slots=True)
class _Opening:
    """A connection on its way to its transport."""

    task: asyncio.Task[None]
    may_be_cancelled: bool = True


class Listener:
    """Accepts connections and knows them all (ConnectionRegistry).

    Attributes:
        sockets: that listen, once started.
        num_accepted: connections since the start, with those that were refused.
        refusals: connections that were turned away.
        gate: knows who may come.
        batch: whoever sends to many streams at once calls its flush_all at the end.
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
        self._opening: dict[Connection, _Opening] = {}  # of _connections, those without a transport yet
        self._tasks: set[asyncio.Task[None]] = set()
        self._awaited: set[Connection] = self._connections  # whose end drain() waits for
        self._is_draining = False
        self._is_closed = False
        self._quiet: asyncio.Future[bool] | None = None  # False: it has not become so in time

    @property
    def port(self) -> int:
        """Of the first TCP socket; 0 without one."""
        return next((one.address.port for one in self.sockets if isinstance(one.address, TcpAddress)), 0)

    @property
    def num_open(self) -> int:
        """Connections, with those whose handshake is under way."""
        return len(self._connections)

    @property
    def num_refused(self) -> int:
        return self.refusals.counts.total()

    @property
    def num_handlers(self) -> int:
        """Handlers that run; some may outlive their connections."""
        return len(self._tasks)

    async def start(self) -> None:
        """Bind and accept.

        Raises:
            StartupError: an address cannot be had.
        """
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
        self._opening[connection] = _Opening(task)
        task.add_done_callback(partial(self._end_opening, connection, accepted))

    def admit(self, peer: Peer, takes_proxy: bool = False) -> Connection | None:
        """Count a new connection in; None: it is refused.

        Args:
            takes_proxy: the peer is a proxy that will tell first whom it speaks for.
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
        """See the connection to its transport, through whatever comes ahead of HTTP."""
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
            if tls is None:  # it is open in a turn of the loop, and uvloop would not tell it of a cancellation
                self._opening[connection].may_be_cancelled = False
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
        """The first byte that comes, which stays where it is; b"": the connection has ended, or none came by then."""
        try:
            async with asyncio.timeout_at(end):
                return await _peek(self._loop, accepted)
        except OSError:  # TimeoutError is one
            return b""

    async def _hear_proxy(self, connection: Connection, accepted: socket.socket) -> bool:
        """Whether the client may come that the proxy names; it is the connection's peer from now on."""
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
        if client.address is not None:  # its clients over a Unix socket are not ours, whom `unix` trusts
            client = self.gate.identify(client)
        reason = None if client.is_proxy else self.gate.why_refused(client)
        if reason is not None:
            self.refusals.add(reason, client)
            return False
        self.gate.enter(client)  # the proxy, which was admitted, is not counted
        connection.peer = client
        return True

    def _end_opening(self, connection: Connection, accepted: socket.socket, task: asyncio.Task[None]) -> None:
        """Whatever became of it. A task that is cancelled before it began has not run at all."""
        if connection in self._opening:
            accepted.close()
            self.forget(connection)
        if not task.cancelled():
            task.result()  # a bug of ours, if any: the loop's exception handler tells it

    # What connections tell (ConnectionRegistry).

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
        """Close idle connections, let the others finish for grace_s, stop listening, abort what is left.

        Who connects meanwhile gets one answer, so that the handler can say why there will be no more; the drain lasts
        no longer for it. On passed sockets they are left for the process to come. When it returns, no connection is
        open and no handler runs.
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
        """Whatever drain() waits for, it waits for grace_s more at most. Also just before drain() is called."""
        self._loop.call_later(grace_s, self._give_up)

    def _stop_listening(self) -> None:
        self._is_closed = True
        for listening, acceptor in self._acceptors:
            acceptor.stop()
            listening.close()
        self._acceptors.clear()
        self._awaited = self._connections
        for connection in self._connections - self._opening.keys():
            connection.drain()  # those that are opening follow as they open

    def abort(self) -> None:
        """Close all connections now. Their handlers are told, or cancelled, as when a client leaves."""
        for connection in self._connections - self._opening.keys():
            connection.abort()
        self._cancel_opening()

    def _cancel_opening(self) -> None:
        for opening in self._opening.values():
            if opening.may_be_cancelled:
                opening.task.cancel()

    async def _wait_quiet(self, timeout_s: float) -> bool:
        """Whether connections and handlers were all gone in time."""
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
    """Not a byte more is taken off the socket: the rest is the connection's.

    Raises:
        OSError: the connection ended before that.
    """
    received = b""
    while len(received) < num_bytes:
        data = await loop.sock_recv(accepted, num_bytes - len(received))
        if not data:
            raise ConnectionAbortedError(errno.ECONNABORTED, "the connection ended")
        received += data
    return received
