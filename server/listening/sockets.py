"""Where to listen: binds as operators write them, and the listening sockets. Thread: main, at start.

A bind is [proxy:][plain:] and an address: HOST:PORT, unix:PATH, or systemd:NAME for sockets that systemd passes
(sd_listen_fds(3), without libsystemd: the descriptors from 3 on, for the process that LISTEN_PID names). The file of a
Unix socket opened here is removed at the end; other processes' sockets are never touched.
"""

import contextlib
import errno
import logging
import os
import resource
import socket
import stat
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from core.errors import ExitCode, StartupError
from server.values import BadValueError

logger = logging.getLogger(__name__)

DEFAULT_HOST = "127.0.0.1"
DEFAULT_PORT = 8000
DEFAULT_UNIX_MODE = 0o660

_UNIX = "unix:"
_SYSTEMD = "systemd:"
_PROXY = "proxy:"
_PLAIN = "plain:"
_MAX_UNIX_PATH_BYTES = 107  # unix(7): sun_path has 108, and ends with a NUL
_SAMPLE_UNIX = f"{_UNIX}/run/steploop/http.sock"
_EXPECTED = "HOST:PORT, [IPV6]:PORT, unix:PATH or systemd:NAME, optionally after proxy: or plain:"


@dataclass(frozen=True, slots=True)
class TcpAddress:
    """A name stands for all of its addresses. Port 0: the system chooses."""

    host: str = DEFAULT_HOST
    port: int = DEFAULT_PORT

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class UnixAddress:
    """A file's path; of a passed abstract socket (unix(7)), NUL and its name."""

    path: str

    @property
    def abstract_name(self) -> str | None:
        return self.path[1:] if self.path.startswith("\0") else None

    def __str__(self) -> str:
        name = self.abstract_name
        return f"{_UNIX}{self.path}" if name is None else f"{_UNIX}@{name}"  # as systemd writes it


@dataclass(frozen=True, slots=True)
class PassedAddress:
    """Sockets that systemd passes under this name (FileDescriptorName=)."""

    name: str

    def __str__(self) -> str:
        return f"{_SYSTEMD}{self.name}"


@dataclass(frozen=True, slots=True)
class Bind:
    """One place to listen on.

    Args:
        takes_proxy: every connection begins with a PROXY protocol header.
        is_plain: without TLS, even if there is a certificate.
    """

    address: TcpAddress | UnixAddress | PassedAddress = TcpAddress()
    takes_proxy: bool = False
    is_plain: bool = False


def bind_value(text: str) -> Bind:
    """Raises BadValueError."""
    rest, takes_proxy, is_plain = text.strip(), False, False
    while rest.startswith((_PROXY, _PLAIN)):
        takes_proxy |= rest.startswith(_PROXY)
        is_plain |= rest.startswith(_PLAIN)
        rest = rest.partition(":")[2]
    if rest.startswith(_UNIX):
        return Bind(_unix_address(rest.removeprefix(_UNIX)), takes_proxy, is_plain)
    if rest.startswith(_SYSTEMD):
        return Bind(_passed_address(rest.removeprefix(_SYSTEMD)), takes_proxy, is_plain)
    return Bind(tcp_address(rest, _EXPECTED), takes_proxy, is_plain)


def unix_mode_value(text: str) -> int:
    """Permissions of a Unix socket's file, as chmod takes them: "660". Raises BadValueError."""
    digits = text.strip()
    if not digits.isascii() or not digits.isdigit() or any(d in "89" for d in digits) or int(digits, 8) > 0o777:
        raise BadValueError("three octal digits, such as 660 or 600")
    return int(digits, 8)


def format_unix_mode(mode: int) -> str:
    return f"{mode:03o}"


def tcp_address(text: str, expected: str = "HOST:PORT or [IPV6]:PORT") -> TcpAddress:
    """Raises BadValueError."""
    host, colon, port = text.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif text.startswith("[") and text.endswith("]"):
        raise BadValueError(expected, f"{text}:{DEFAULT_PORT}")
    elif ":" in host:
        raise BadValueError(f"{expected}; write an IPv6 address in brackets", f"[{host}]:{port}")
    if not port.isascii() or not port.isdigit() or len(port) > 5 or int(port) > 65_535:
        raise BadValueError(expected, f"{text}:{DEFAULT_PORT}" if text and not colon and not text.isdigit() else None)
    if not host:
        raise BadValueError(f"{expected}; all addresses are 0.0.0.0 and [::]", f"{DEFAULT_HOST}:{port}")
    return TcpAddress(host, int(port))


def _unix_address(text: str) -> UnixAddress:
    path = os.path.expanduser(text)
    if not path or path.endswith("/"):
        raise BadValueError(f"{_EXPECTED}; the path is missing", _SAMPLE_UNIX)
    size = len(os.fsencode(path))
    if size > _MAX_UNIX_PATH_BYTES:
        expected = f"a path of at most {_MAX_UNIX_PATH_BYTES} bytes, the kernel's limit; this has {size}"
        raise BadValueError(expected, _SAMPLE_UNIX)
    return UnixAddress(path)


def _passed_address(text: str) -> PassedAddress:
    if not text:
        raise BadValueError(f"{_EXPECTED}; the name is that of FileDescriptorName= in the socket unit")
    return PassedAddress(text)


# Sockets that systemd passes.

FIRST_DESCRIPTOR = 3  # SD_LISTEN_FDS_START
UNNAMED = "unknown"  # systemd's word for a descriptor without a name

_VARIABLES = ("LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES", "LISTEN_PIDFDID")
_FIX = "ListenStream= with an address or a path in the socket unit, and Accept=no"


@dataclass(frozen=True, slots=True)
class PassedSocket:
    """A listening stream socket; its name is FileDescriptorName=, by default the socket unit's."""

    sock: socket.socket
    name: str


def take_passed_sockets(environ: MutableMapping[str, str], pid: int) -> list[PassedSocket]:
    """The sockets passed to the process with this id. Removes the variables, so that no child takes them for its own.

    Raises:
        StartupError: the variables are malformed, or a descriptor is not a listening stream socket.
    """
    values = {name: environ.pop(name, "") for name in _VARIABLES}
    if not values["LISTEN_FDS"]:
        return []
    if values["LISTEN_PID"] != str(pid):
        owner = values["LISTEN_PID"] or "nobody"
        logger.warning("LISTEN_FDS is for process %s and this is %d: no passed socket is served", owner, pid)
        return []
    if not values["LISTEN_FDS"].isdecimal():
        cause = f"LISTEN_FDS is {values['LISTEN_FDS']!r}, which is not a number"
        raise StartupError(cause, "unset LISTEN_FDS, or start by a socket unit")
    count = int(values["LISTEN_FDS"])
    names = values["LISTEN_FDNAMES"].split(":") if values["LISTEN_FDNAMES"] else []
    names += [UNNAMED] * (count - len(names))
    return [_passed_socket(FIRST_DESCRIPTOR + number, names[number]) for number in range(count)]


def _passed_socket(descriptor: int, name: str) -> PassedSocket:
    try:
        os.set_inheritable(descriptor, False)
        sock = socket.socket(fileno=descriptor)
    except OSError as error:
        cause = f"descriptor {descriptor}, passed as {name}, is not a socket: {error.strerror}"
        raise StartupError(cause, _FIX, ExitCode.PORT) from error
    is_stream = sock.family in (socket.AF_INET, socket.AF_INET6, socket.AF_UNIX) and sock.type == socket.SOCK_STREAM
    if not (is_stream and sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)):
        sock.close()
        raise StartupError(f"the socket passed as {name} does not listen for streams", _FIX, ExitCode.PORT)
    return PassedSocket(sock, name)


# Opening.

_MISSING = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)  # e.g. ::1 where IPv6 is disabled
_LOCAL_ADDRESSES = "--host or --bind with 127.0.0.1, or 0.0.0.0 for all"


@dataclass(frozen=True, slots=True)
class ListeningSocket:
    """A listening socket and its bind.

    Args:
        address: the bind's or the passed socket's; the port is never 0.
        identity: device and inode of the Unix socket's file, if it was made here.
    """

    sock: socket.socket
    bind: Bind
    address: TcpAddress | UnixAddress
    identity: tuple[int, int] | None = None

    @property
    def is_passed(self) -> bool:
        """systemd keeps it open: the next process finds the connections that are not accepted here in its queue."""
        return isinstance(self.bind.address, PassedAddress)

    def hold_unsent(self, num_bytes: int) -> None:
        """Bound what the kernel takes ahead of a TCP connection's reader, so that a slow one is soon noticed."""
        if self.sock.family != socket.AF_UNIX and hasattr(socket, "TCP_NOTSENT_LOWAT"):
            self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, num_bytes)

    def close(self) -> None:
        """Stop listening, and remove the file unless another server has replaced it."""
        self.sock.close()
        if self.identity is not None and isinstance(self.address, UnixAddress):
            with contextlib.suppress(OSError):
                if _identity(self.address.path) == self.identity:
                    os.unlink(self.address.path)


def shown_addresses(sockets: Sequence[ListeningSocket]) -> str:
    """For a log line: each address once."""
    return ", ".join(dict.fromkeys(str(one.address) for one in sockets))


def open_binds(
    binds: Sequence[Bind], passed: Sequence[PassedSocket], backlog: int, unix_mode: int = DEFAULT_UNIX_MODE
) -> list[ListeningSocket]:
    """Listen on the binds and on the passed sockets that no bind names.

    Raises:
        StartupError: an address is not available; sockets that were opened before it are closed.
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
            opened = open_tcp(address, backlog)
            return [ListeningSocket(sock, bind, TcpAddress(address.host, _tcp_name(sock).port)) for sock in opened]
        case UnixAddress() as address:
            return [_open_unix(bind, address, backlog, unix_mode)]
        case PassedAddress(name):
            found = [_adopt(one, bind) for one in passed if one.name == name]
            if not found:
                names = ", ".join(dict.fromkeys(one.name for one in passed)) or "none at all"
                fix = f"FileDescriptorName={name} in the socket unit, and start the service by it"
                cause = f"systemd passed no socket named {name} (passed: {names})"
                raise StartupError(cause, fix, ExitCode.PORT)
            return found


def _adopt(passed: PassedSocket, bind: Bind) -> ListeningSocket:
    """Serve a passed socket; its file, if any, belongs to systemd."""
    sock = passed.sock
    sock.setblocking(False)
    if sock.family == socket.AF_UNIX:
        return ListeningSocket(sock, bind, UnixAddress(os.fsdecode(sock.getsockname())))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return ListeningSocket(sock, bind, _tcp_name(sock))


def open_tcp(address: TcpAddress, backlog: int) -> list[socket.socket]:
    """Listen on every address of the host that this machine has.

    Raises:
        StartupError: it has none of them, or one is in use.
    """
    bound: list[socket.socket] = []
    port = address.port
    missing: OSError | None = None
    try:
        infos = socket.getaddrinfo(address.host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, _, _, _, found in dict.fromkeys(infos):
            try:
                # with port 0, all addresses get the port chosen for the first
                bound.append(_listen_tcp(family, (found[0], port, *found[2:]), backlog))
            except OSError as error:
                if error.errno not in _MISSING:
                    raise
                missing = error
            else:
                port = bound[-1].getsockname()[1]
        if missing is not None and not bound:
            raise missing
    except (OSError, UnicodeError) as error:  # UnicodeError: not a valid IDNA name
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
    number = error.errno if isinstance(error, OSError) else None
    port = address.port
    if number == errno.EADDRINUSE:
        cause, other = f"{address} is in use by another process", port + 1 if port < 65535 else 0
        fix = f"--port {other} or --bind with another one, or stop what listens there (`ss -ltnp 'sport = :{port}'`)"
    elif number in (errno.EACCES, errno.EPERM):
        cause = f"this user may not listen on {address}"
        fix = "--port or --bind with a number from 1024 on, or AmbientCapabilities=CAP_NET_BIND_SERVICE in the unit"
    elif isinstance(error, (socket.gaierror, UnicodeError)):
        why = f" ({error.strerror})" if isinstance(error, socket.gaierror) and error.strerror else ""
        cause, fix = f"{address.host} does not resolve to an address{why}", _LOCAL_ADDRESSES
    elif number in _MISSING:
        cause, fix = f"{address.host} is not an address of this machine", _LOCAL_ADDRESSES
    else:
        cause, fix = f"cannot listen on {address}: {error.strerror}", "--host and --port, or --bind, with another"
    return StartupError(cause, fix, ExitCode.PORT)


def _open_unix(bind: Bind, address: UnixAddress, backlog: int, mode: int) -> ListeningSocket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        _remove_stale(address)
        # unix(7): the file is made with 0777 less the umask; a later chmod would leave it open for a moment
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
    """Remove the socket file of a server that was killed. Raises StartupError: it is a live server's, or no socket."""
    try:
        is_socket = stat.S_ISSOCK(os.lstat(address.path).st_mode)
    except FileNotFoundError:
        return
    if not is_socket:
        cause, fix = f"{address.path} exists and is not a socket", "unix: with another path, or remove that file"
        raise StartupError(cause, fix, ExitCode.PORT)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as trial:
        trial.setblocking(False)  # a live server whose backlog is full would block us
        try:
            trial.connect(address.path)
        except ConnectionRefusedError:
            os.unlink(address.path)
            return
        except FileNotFoundError:  # its server has just removed it
            return
        except BlockingIOError:
            pass
    fix = f"unix: with another path, or stop what listens there (`ss -lxp src {address.path}`)"
    raise StartupError(f"{address} is in use by another process", fix, ExitCode.PORT)


def _identity(path: str) -> tuple[int, int]:
    found = os.lstat(path)
    return found.st_dev, found.st_ino


def _unix_error(error: OSError, address: UnixAddress) -> StartupError:
    directory = Path(address.path).parent
    if error.errno in (errno.ENOENT, errno.ENOTDIR):
        cause, fix = f"{directory} is not a directory", f"mkdir -p {directory}"
    elif error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        cause, fix = f"this user may not create a socket in {directory}", "unix: with a path in a directory of its own"
    else:
        cause, fix = f"cannot listen on {address}: {error.strerror}", "unix: with another path"
    return StartupError(cause, fix, ExitCode.PORT)


RESERVED = 256  # descriptors for the model's files, listening sockets, libraries and handlers


def allow_connections(num_connections: int) -> None:
    """Raise the process's limit on open files for so many connections; log a warning if that fails."""
    needed = num_connections + RESERVED
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    wanted = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    if wanted < needed:
        logger.warning(
            "this process may open %d files, too few for %d connections: raise the limit (LimitNOFILE=%d in the unit,"
            " ulimit -n %d), or lower --max-connections",
            wanted,
            num_connections,
            needed,
            needed,
        )
