"""What a service manager is told of this process, by hand: one datagram a message. Thread: loop.

Source: sd_notify(3), systemd.service(5) (Type=notify, WatchdogSec=). Without $NOTIFY_SOCKET nothing is sent.
"""

import logging
import socket
import time
from collections.abc import Callable, Mapping

logger = logging.getLogger(__name__)

SEND_TIMEOUT_S = 1.0  # the manager reads at once; one that hangs must not hang the loop for long
EXTENSION_S = 30.0  # more time for what the manager waits for; asked again long before it is over


class ServiceManager:
    """The manager that has started this process, if one has.

    Args:
        environ: of the process: NOTIFY_SOCKET, WATCHDOG_USEC, WATCHDOG_PID.
        pid: ours; a watchdog meant for another process is not ours to feed.
        monotonic_ns: CLOCK_MONOTONIC, as systemd reads it.

    Attributes:
        watchdog_s: it wants a ping at least so often, from ready() on; None: it wants none.
    """

    def __init__(
        self, environ: Mapping[str, str], pid: int, monotonic_ns: Callable[[], int] = time.monotonic_ns
    ) -> None:
        self.watchdog_s = _watchdog_s(environ, pid)
        self._monotonic_ns = monotonic_ns
        self._address = _unix_address(environ.get("NOTIFY_SOCKET", ""))

    @property
    def is_there(self) -> bool:
        return self._address is not None

    def tell_loading(self, stage: str) -> None:
        """Loading goes on, and may take longer than the unit's TimeoutStartSec."""
        self._send(_status(f"Loading: {stage}"), _EXTENSION)

    def tell_ready(self, status: str) -> None:
        """Start or reload is over."""
        self._send("READY=1", _status(status))

    def tell_status(self, status: str) -> None:
        self._send(_status(status))

    def tell_reloading(self) -> None:
        """tell_ready() must follow."""
        self._send("RELOADING=1", f"MONOTONIC_USEC={self._monotonic_ns() // 1000}", _status("Reloading"))

    def tell_stopping(self, status: str) -> None:
        """The end goes on, and may take longer than the unit's TimeoutStopSec."""
        self._send("STOPPING=1", _status(status), _EXTENSION)

    def feed_watchdog(self) -> None:
        if self.watchdog_s is not None:
            self._send("WATCHDOG=1")

    def _send(self, *lines: str) -> None:
        if self._address is None:
            return
        try:
            # each message by a socket of its own, as sd_notify(3) does: the manager may have bound its anew
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
                sock.settimeout(SEND_TIMEOUT_S)
                sock.sendto("\n".join(lines).encode(), self._address)
        except OSError as error:  # the manager itself acts on what it misses
            logger.warning("the service manager does not take %s: %s", lines[0], error)


_EXTENSION = f"EXTEND_TIMEOUT_USEC={EXTENSION_S * 1e6:.0f}"


def _status(text: str) -> str:
    return "STATUS=" + " ".join(text.split())  # a line's end would begin another message


def _unix_address(address: str) -> str | None:
    """For the socket module; a leading @ stands for the NUL of an abstract address."""
    if not address:
        return None
    if address[0] not in "@/":
        logger.warning("NOTIFY_SOCKET=%s is no Unix socket: the service manager is told nothing", address)
        return None
    return "\0" + address[1:] if address[0] == "@" else address


def _watchdog_s(environ: Mapping[str, str], pid: int) -> float | None:
    """sd_watchdog_enabled(3): the time between pings at which the manager gives the process up."""
    usec = environ.get("WATCHDOG_USEC", "")
    if not usec.isdecimal() or int(usec) == 0 or environ.get("WATCHDOG_PID", str(pid)) != str(pid):
        return None
    return int(usec) / 1e6
