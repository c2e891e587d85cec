"""The listening sockets, the connections they brought, and their orderly end. Thread: loop."""

import asyncio
import errno
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from core.errors import ExitCode, StartupError
from server.connection import Connection
from server.connection_limits import ConnectionLimits
from server.exchanges import ConnectionContext, Handler, Refuse
from server.response_fields import HttpDate
from server.tls import HANDSHAKE_S, ServerTls
from server.write_batch import WriteBatch

_NOTSENT_LOWAT_BYTES = 16 * 1024  # without it a loopback's kernel takes 4 MB before a slow reader is noticed
_MISSING = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)  # e.g. ::1 where IPv6 is switched off
_LATE_GRACE_S = 1.0  # for answers to connections that came while others were waited for
_ABORT_GRACE_S = 1.0  # for handlers to settle what they hold, once their connections are gone


@dataclass(frozen=True, slots=True)
class ListenerConfig:
    """Where to listen, and how much to take.

    Args:
        host: a name or an address; a name with several addresses listens on all of them.
        port: 0 lets the system choose.
        backlog: connections the kernel holds before they are accepted.
        max_connections: open at once; one more is closed at once and counted as refused.
        tls: None: in the clear.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    backlog: int = 1024
    max_connections: int = 4096
    connection: ConnectionLimits = field(default_factory=ConnectionLimits)
    tls: ServerTls | None = None


class Listener:
    """Accepts connections and knows them all (ConnectionRegistry).

    Attributes:
        port: the real one, once started.
        num_accepted, num_refused: connections since the start, the refused ones in both.
        batch: whoever sends to many streams at once calls its flush_all at the end.
    """

    def __init__(
        self,
        handler: Handler,
        refuse: Refuse,
        config: ListenerConfig,
        loop: asyncio.AbstractEventLoop | None = None,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """Bind nothing yet. Without `loop`, the running one."""
        loop = loop or asyncio.get_running_loop()
        self.port = config.port
        self.num_accepted = 0
        self.num_refused = 0
        self.batch = WriteBatch(loop)
        self._config = config
        self._loop = loop
        self._context = ConnectionContext(
            handler, refuse, config.connection, self, loop, self.batch, HttpDate(wall_clock)
        )
        self._servers: list[asyncio.AbstractServer] = []
        self._connections: set[Connection] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._awaited: set[Connection] = self._connections  # whose end drain() waits for
        self._is_draining = False
        self._is_closed = False
        self._quiet: asyncio.Future[None] | None = None

    @property
    def num_open(self) -> int:
        return len(self._connections)

    @property
    def num_handlers(self) -> int:
        """Handlers that run; some may outlive their connections."""
        return len(self._tasks)

    def new_connection(self) -> Connection:
        """The protocol of a connection that has just been accepted."""
        return Connection(self._context)

    async def start(self) -> None:
        """Bind and accept.

        Raises:
            StartupError: the address cannot be had.
        """
        tls = self._config.tls
        for listening in await self._bind():
            server = await self._loop.create_server(
                self.new_connection,
                sock=listening,
                backlog=self._config.backlog,
                ssl=tls.context if tls is not None else None,
                ssl_handshake_timeout=HANDSHAKE_S if tls is not None else None,
            )
            self._servers.append(server)

    async def _bind(self) -> list[socket.socket]:
        """Listen on every address the host has; one that this machine lacks is left out while another is had."""
        config = self._config
        bound: list[socket.socket] = []
        missing: OSError | None = None
        try:
            infos = await self._loop.getaddrinfo(
                config.host or None, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )
            for family, _, _, _, address in dict.fromkeys(infos):
                try:
                    # with port 0, the first address chooses the port of all
                    bound.append(_listen(family, (address[0], self.port, *address[2:]), config.backlog))
                except OSError as error:
                    if error.errno not in _MISSING:
                        raise
                    missing = error
                else:
                    self.port = bound[-1].getsockname()[1]
            if missing is not None and not bound:
                raise missing
        except OSError as error:
            for sock in bound:
                sock.close()
            raise listening_error(error, config.host, config.port) from error
        return bound

    # What connections tell (ConnectionRegistry).

    def admit(self, connection: Connection) -> bool:
        self.num_accepted += 1
        if self._is_closed or len(self._connections) >= self._config.max_connections:
            self.num_refused += 1
            return False
        self._connections.add(connection)
        if self._is_draining:
            connection.close_after_answer()
        return True

    def forget(self, connection: Connection) -> None:
        self._connections.discard(connection)
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
            self._quiet.set_result(None)

    # The end.

    async def drain(self, grace_s: float) -> None:
        """Close idle connections, let the others finish for grace_s, stop listening, abort what is left.

        Who connects meanwhile gets one answer, so that the handler can say why there will be no more; the drain lasts
        no longer for it. When it returns, no connection is open and no handler runs.
        """
        self._is_draining = True
        self._awaited = set(self._connections)
        for connection in tuple(self._connections):
            connection.drain()
        is_in_time = await self._wait_quiet(grace_s)
        self._stop_listening()
        if is_in_time and await self._wait_quiet(_LATE_GRACE_S):
            return
        self.abort()
        if await self._wait_quiet(_ABORT_GRACE_S):
            return
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.wait(tuple(self._tasks))

    def _stop_listening(self) -> None:
        self._is_closed = True
        for server in self._servers:
            server.close()
        self._awaited = self._connections
        for connection in tuple(self._connections):
            connection.drain()

    def abort(self) -> None:
        """Close all connections now. Their handlers are told, or cancelled, as when a client leaves."""
        for connection in tuple(self._connections):
            connection.abort()

    async def _wait_quiet(self, timeout_s: float) -> bool:
        """Whether connections and handlers were all gone in time."""
        self._quiet = self._loop.create_future()
        self._tell_quiet()
        await asyncio.wait([self._quiet], timeout=timeout_s)
        return self._quiet.done()


def _listen(family: int, address: tuple[object, ...], backlog: int) -> socket.socket:
    """A listening socket. The accepted ones inherit its options: no system call is left per connection."""
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if hasattr(socket, "TCP_NOTSENT_LOWAT"):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _NOTSENT_LOWAT_BYTES)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        sock.bind(address)
        sock.listen(backlog)
    except OSError:
        sock.close()
        raise
    return sock


def listening_error(error: OSError, host: str, port: int) -> StartupError:
    """Why the address cannot be had, and what to take instead."""
    where = f"{host}:{port}"
    if error.errno == errno.EADDRINUSE:
        fix = f"--port {port + 1 if port < 65535 else 0}, or stop what listens there (`ss -ltnp 'sport = :{port}'`)"
        return StartupError(f"{where} is in use by another process", fix, ExitCode.PORT)
    if error.errno in (errno.EACCES, errno.EPERM):
        return StartupError(f"this user may not listen on {where}", "--port with a number from 1024 on", ExitCode.PORT)
    if isinstance(error, socket.gaierror) or error.errno in _MISSING:
        return StartupError(
            f"{host} is not an address of this machine", "--host 127.0.0.1, or --host 0.0.0.0 for all", ExitCode.PORT
        )
    cause = f"cannot listen on {where}: {error.strerror}"
    return StartupError(cause, "--host and --port of another one", ExitCode.PORT)
