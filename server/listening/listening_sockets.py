"""The sockets that listen, made of binds, and why one cannot be had. Thread: main, at start.

Of what it opens, a Unix socket's file is its own to remove; what others listen on is never touched.
"""

import contextlib
import errno
import os
import socket
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from core.errors import ExitCode, StartupError
from server.listening.binds import DEFAULT_UNIX_MODE, Bind, PassedAddress, TcpAddress, UnixAddress
from server.listening.socket_activation import PassedSocket

_MISSING = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)  # e.g. ::1 where IPv6 is switched off

_LOCAL_ADDRESSES = "--host or --bind with 127.0.0.1, or 0.0.0.0 for all"


@dataclass(frozen=True, slots=True)
class ListeningSocket:
    """A socket that listens, and the bind that asked for it.

    Args:
        address: as it was asked for, or as the passed socket has it; the port is never 0.
        identity: device and inode of a Unix socket's file that is ours to remove.
    """

    sock: socket.socket
    bind: Bind
    address: TcpAddress | UnixAddress
    identity: tuple[int, int] | None = None

    @property
    def is_passed(self) -> bool:
        """Somebody else has it too: the next process finds in its queue who is not accepted here."""
        return isinstance(self.bind.address, PassedAddress)

    def hold_unsent(self, num_bytes: int) -> None:
        """The kernel takes so much of a TCP connection before it has sent the rest: a slow reader is soon noticed."""
        if self.sock.family != socket.AF_UNIX and hasattr(socket, "TCP_NOTSENT_LOWAT"):
            self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, num_bytes)

    def close(self) -> None:
        """Stop listening. The file goes along, unless another server has put its own there by now."""
        self.sock.close()
        if self.identity is not None and isinstance(self.address, UnixAddress):
            with contextlib.suppress(OSError):
                if _identity(self.address.path) == self.identity:
                    os.unlink(self.address.path)


def shown_addresses(sockets: Sequence[ListeningSocket]) -> str:
    """For a line of the log: a name with several addresses stands there once."""
    return ", ".join(dict.fromkeys(str(one.address) for one in sockets))


def open_binds(
    binds: Sequence[Bind], passed: Sequence[PassedSocket], backlog: int, unix_mode: int = DEFAULT_UNIX_MODE
) -> list[ListeningSocket]:
    """Listen on everything: the binds, then the passed sockets that no bind has named.

    Raises:
        StartupError: one of them cannot be had; nothing is left open of those that were opened here.
    """
    opened: list[ListeningSocket] = []
    try:
        for bind in binds:
            opened += _open_bind(bind, passed, backlog, unix_mode)
        named = {bind.address.name for bind in binds if isinstance(bind.address, PassedAddress)}
        opened += [_adopt(one, Bind(PassedAddress(one.name))) for one in passed if one.name not in named]
    except BaseException:
        for listening in opened:
            listening.close()
        raise
    return opened


def _open_bind(bind: Bind, passed: Sequence[PassedSocket], backlog: int, unix_mode: int) -> list[ListeningSocket]:
    match bind.address:
        case TcpAddress() as address:
            opened = _open_tcp(address, backlog)
            return [ListeningSocket(sock, bind, TcpAddress(address.host, _tcp_name(sock).port)) for sock in opened]
        case UnixAddress() as address:
            return [_open_unix(bind, address, backlog, unix_mode)]
        case PassedAddress(name):
            found = [_adopt(one, bind) for one in passed if one.name == name]
            if not found:
                names = ", ".join(dict.fromkeys(one.name for one in passed)) or "none at all"
                raise StartupError(
                    f"systemd has passed no socket called {name} (passed: {names})",
                    f"FileDescriptorName={name} in the socket unit, and start the service by it",
                    ExitCode.PORT,
                )
            return found


def _adopt(passed: PassedSocket, bind: Bind) -> ListeningSocket:
    """Serve a passed socket; its file, if it has one, stays systemd's."""
    sock = passed.sock
    sock.setblocking(False)
    if sock.family == socket.AF_UNIX:
        return ListeningSocket(sock, bind, UnixAddress(os.fsdecode(sock.getsockname())))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return ListeningSocket(sock, bind, _tcp_name(sock))


def _open_tcp(address: TcpAddress, backlog: int) -> list[socket.socket]:
    """Listen on every address the host has; one that this machine lacks is left out while another is had.

    Raises:
        StartupError: none can be had, or one is taken.
    """
    bound: list[socket.socket] = []
    port = address.port
    missing: OSError | None = None
    try:
        infos = socket.getaddrinfo(address.host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, _, _, _, found in dict.fromkeys(infos):
            try:
                # with port 0, the first address chooses the port of all
                bound.append(_listen_tcp(family, (found[0], port, *found[2:]), backlog))
            except OSError as error:
                if error.errno not in _MISSING:
                    raise
                missing = error
            else:
                port = bound[-1].getsockname()[1]
        if missing is not None and not bound:
            raise missing
    except (OSError, UnicodeError) as error:  # UnicodeError: a name that IDNA cannot have
        for sock in bound:
            sock.close()
        raise _tcp_error(error, address) from error
    return bound


def _listen_tcp(family: int, address: tuple[object, ...], backlog: int) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # the accepted ones inherit it
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        sock.bind(address)
        sock.listen(backlog)
    except OSError:
        sock.close()
        raise
    return sock


def _tcp_name(sock: socket.socket) -> TcpAddress:
    return TcpAddress(*sock.getsockname()[:2])


def _tcp_error(error: OSError | UnicodeError, address: TcpAddress) -> StartupError:
    """Why the address cannot be had, and what to take instead."""
    number = error.errno if isinstance(error, OSError) else None
    port = address.port
    if number == errno.EADDRINUSE:
        other = port + 1 if port < 65535 else 0
        fix = f"--port {other} or --bind with another one, or stop what listens there (`ss -ltnp 'sport = :{port}'`)"
        return StartupError(f"{address} is in use by another process", fix, ExitCode.PORT)
    if number in (errno.EACCES, errno.EPERM):
        fix = "--port or --bind with a number from 1024 on, or AmbientCapabilities=CAP_NET_BIND_SERVICE in the unit"
        return StartupError(f"this user may not listen on {address}", fix, ExitCode.PORT)
    if isinstance(error, (socket.gaierror, UnicodeError)):
        why = f" ({error.strerror})" if isinstance(error, socket.gaierror) and error.strerror else ""
        return StartupError(f"{address.host} does not resolve to an address{why}", _LOCAL_ADDRESSES, ExitCode.PORT)
    if number in _MISSING:
        return StartupError(f"{address.host} is not an address of this machine", _LOCAL_ADDRESSES, ExitCode.PORT)
    return StartupError(
        f"cannot listen on {address}: {error.strerror}", "--host and --port, or --bind, with another", ExitCode.PORT
    )


# Unix sockets.


def _open_unix(bind: Bind, address: UnixAddress, backlog: int, mode: int) -> ListeningSocket:
    """
    Raises:
        StartupError: somebody listens there, the path is something else's, or the directory is not to be written in.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        _remove_stale(address)
        # unix(7): the file is made with 0777 less the umask; a chmod afterwards would leave a moment in between
        former = os.umask(0o777 & ~mode)
        try:
            sock.bind(address.path)
        finally:
            os.umask(former)
        sock.listen(backlog)
        return ListeningSocket(sock, bind, address, _identity(address.path))
    except OSError as error:
        sock.close()
        raise _unix_error(error, address) from error
    except StartupError:
        sock.close()
        raise


def _remove_stale(address: UnixAddress) -> None:
    """Remove a socket's file whose server was killed. A file of another kind stays, and so does a live server's."""
    try:
        is_socket = stat.S_ISSOCK(os.lstat(address.path).st_mode)
    except FileNotFoundError:
        return
    if not is_socket:
        raise StartupError(
            f"{address.path} exists, and is no socket", "unix: with another path, or remove that file", ExitCode.PORT
        )
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as trial:
        trial.setblocking(False)  # a live server whose backlog is full would keep us waiting
        try:
            trial.connect(address.path)
        except ConnectionRefusedError:
            os.unlink(address.path)
            return
        except FileNotFoundError:  # it has just been removed by its server
            return
        except BlockingIOError:
            pass
    raise StartupError(
        f"{address} is in use by another process",
        f"unix: with another path, or stop what listens there (`ss -lxp src {address.path}`)",
        ExitCode.PORT,
    )


def _identity(path: str) -> tuple[int, int]:
    found = os.lstat(path)
    return found.st_dev, found.st_ino


def _unix_error(error: OSError, address: UnixAddress) -> StartupError:
    directory = Path(address.path).parent
    if error.errno in (errno.ENOENT, errno.ENOTDIR):
        cause, fix = f"{directory} is not a directory", f"mkdir -p {directory}"
    elif error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        cause, fix = f"this user may not make a socket in {directory}", "unix: with a path in a directory of its own"
    else:
        cause, fix = f"cannot listen on {address}: {error.strerror}", "unix: with another path"
    return StartupError(cause, fix, ExitCode.PORT)
