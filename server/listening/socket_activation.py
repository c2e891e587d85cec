"""Listening sockets that whoever started this process has opened for it (systemd's LISTEN_FDS). Thread: main, at start.

sd_listen_fds(3), without libsystemd: they are the descriptors from 3 on, meant for the process LISTEN_PID names.
"""

import logging
import os
import socket
from collections.abc import MutableMapping
from dataclasses import dataclass

from core.errors import ExitCode, StartupError

logger = logging.getLogger(__name__)

FIRST_DESCRIPTOR = 3  # SD_LISTEN_FDS_START
UNNAMED = "unknown"  # systemd's word for a descriptor without a name

_VARIABLES = ("LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES", "LISTEN_PIDFDID")
_FIX = "ListenStream= with an address or a path in the socket unit, and Accept=no"


@dataclass(frozen=True, slots=True)
class PassedSocket:
    """A stream socket that listens already; name: FileDescriptorName=, by default the socket unit's."""

    sock: socket.socket
    name: str


def take_passed_sockets(environ: MutableMapping[str, str], pid: int) -> list[PassedSocket]:
    """The sockets passed to the process with this id. The variables are removed: no child is to take them for its own.

    Raises:
        StartupError: the variables are malformed, or a descriptor is no stream socket that listens.
    """
    values = {name: environ.pop(name, "") for name in _VARIABLES}
    if not values["LISTEN_FDS"]:
        return []
    if values["LISTEN_PID"] != str(pid):
        owner = values["LISTEN_PID"] or "nobody"
        logger.warning("LISTEN_FDS is for process %s and this is %d: no passed socket is served", owner, pid)
        return []
    if not values["LISTEN_FDS"].isdecimal():
        cause = f"LISTEN_FDS is {values['LISTEN_FDS']!r}, and no number of sockets"
        raise StartupError(cause, "unset LISTEN_FDS, or start by a socket unit", ExitCode.CONFIGURATION)
    count = int(values["LISTEN_FDS"])
    names = values["LISTEN_FDNAMES"].split(":") if values["LISTEN_FDNAMES"] else []
    names += [UNNAMED] * (count - len(names))
    return [_passed_socket(FIRST_DESCRIPTOR + number, names[number]) for number in range(count)]


def _passed_socket(descriptor: int, name: str) -> PassedSocket:
    try:
        os.set_inheritable(descriptor, False)
        sock = socket.socket(fileno=descriptor)
    except OSError as error:
        cause = f"descriptor {descriptor}, passed as {name}, is no socket: {error.strerror}"
        raise StartupError(cause, _FIX, ExitCode.PORT) from error
    is_fit = (
        sock.family in (socket.AF_INET, socket.AF_INET6, socket.AF_UNIX)
        and sock.type == socket.SOCK_STREAM
        and sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    )
    if not is_fit:
        sock.close()
        cause = f"the socket passed as {name} does not listen for streams"
        raise StartupError(cause, _FIX, ExitCode.PORT)
    return PassedSocket(sock, name)
