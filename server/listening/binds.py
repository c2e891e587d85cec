"""Where to listen, as operators write it. Pure; any thread.

A bind is [proxy:][plain:] and an address: HOST:PORT, unix:PATH, or systemd:NAME for sockets that systemd passes.
"""

import os
from dataclasses import dataclass

from server.values import BadValueError

DEFAULT_HOST = "127.0.0.1"
DEFAULT_PORT = 8000
DEFAULT_UNIX_MODE = 0o660

_UNIX = "unix:"
_SYSTEMD = "systemd:"
_PROXY = "proxy:"
_PLAIN = "plain:"
_MAX_UNIX_PATH_BYTES = 107  # unix(7): sun_path has 108, and ends with a NUL
_SAMPLE_UNIX = f"{_UNIX}/run/steploop/http.sock"
_EXPECTED = "HOST:PORT, [IPV6]:PORT, unix:PATH or systemd:NAME, behind proxy: or plain: where that is meant"


@dataclass(frozen=True, slots=True)
class TcpAddress:
    """A name or an address; a name with several addresses is all of them. Port 0: the system chooses."""

    host: str = DEFAULT_HOST
    port: int = DEFAULT_PORT

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class UnixAddress:
    """A file's path; or, of a passed socket, NUL and a name without a file (unix(7), abstract)."""

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
        is_plain: in the clear, also where there is a certificate.
    """

    address: TcpAddress | UnixAddress | PassedAddress = TcpAddress()
    takes_proxy: bool = False
    is_plain: bool = False


def bind_value(text: str) -> Bind:
    """A bind as it is written.

    Raises:
        BadValueError: it is none.
    """
    rest, takes_proxy, is_plain = text.strip(), False, False
    while rest.startswith((_PROXY, _PLAIN)):
        takes_proxy |= rest.startswith(_PROXY)
        is_plain |= rest.startswith(_PLAIN)
        rest = rest.partition(":")[2]
    if rest.startswith(_UNIX):
        return Bind(_unix_address(rest.removeprefix(_UNIX)), takes_proxy, is_plain)
    if rest.startswith(_SYSTEMD):
        return Bind(_passed_address(rest.removeprefix(_SYSTEMD)), takes_proxy, is_plain)
    return Bind(_tcp_address(rest), takes_proxy, is_plain)


def unix_mode_value(text: str) -> int:
    """Permissions of a Unix socket's file, as chmod takes them: "660"."""
    digits = text.strip()
    if not digits.isascii() or not digits.isdigit() or any(d in "89" for d in digits) or int(digits, 8) > 0o777:
        raise BadValueError("three octal digits, such as 660 or 600")
    return int(digits, 8)


def format_unix_mode(mode: int) -> str:
    return f"{mode:03o}"


def _tcp_address(text: str) -> TcpAddress:
    host, colon, port = text.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif text.startswith("[") and text.endswith("]"):
        raise BadValueError(_EXPECTED, f"{text}:{DEFAULT_PORT}")
    elif ":" in host:
        raise BadValueError(f"{_EXPECTED}; an IPv6 address stands in brackets", f"[{host}]:{port}")
    if not port.isascii() or not port.isdigit() or len(port) > 5 or int(port) > 65_535:
        raise BadValueError(_EXPECTED, f"{text}:{DEFAULT_PORT}" if text and not colon and not text.isdigit() else None)
    if not host:
        raise BadValueError(f"{_EXPECTED}; all addresses are 0.0.0.0 and [::]", f"{DEFAULT_HOST}:{port}")
    return TcpAddress(host, int(port))


def _unix_address(text: str) -> UnixAddress:
    path = os.path.expanduser(text)
    if not path or path.endswith("/"):
        raise BadValueError(f"{_EXPECTED}; the path of a file is missing", _SAMPLE_UNIX)
    size = len(os.fsencode(path))
    if size > _MAX_UNIX_PATH_BYTES:
        expected = f"a path of at most {_MAX_UNIX_PATH_BYTES} bytes, as the kernel has it; this has {size}"
        raise BadValueError(expected, _SAMPLE_UNIX)
    return UnixAddress(path)


def _passed_address(text: str) -> PassedAddress:
    if not text:
        raise BadValueError(f"{_EXPECTED}; the name is that of FileDescriptorName= in the socket unit")
    return PassedAddress(text)
