"""The service manager's end of sd_notify(3): a real datagram socket."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

TIMEOUT_S = 60.0  # for a message that never comes


class NotifySocket:
    """What a process has told, message by message, each as its fields.

    Attributes:
        address: for $NOTIFY_SOCKET.
        history: all that was received so far.
    """

    def __init__(self, sock: socket.socket, address: str) -> None:
        self._socket = sock
        self.address = address
        self.history: list[dict[str, str]] = []

    def receive(self) -> dict[str, str]:
        fields = dict(line.split("=", 1) for line in self._socket.recv(4096).decode().split("\n"))
        self.history.append(fields)
        return fields

    def receive_until(self, field: str, value: str | None = None) -> dict[str, str]:
        """The next message with the field; where a value is given, with one that begins so."""
        while True:
            fields = self.receive()
            if field in fields and fields[field].startswith(value or ""):
                return fields

    def receive_rest(self) -> list[dict[str, str]]:
        """What has come, of a process that has ended."""
        self._socket.setblocking(False)
        rest = []
        try:
            while True:
                rest.append(self.receive())
        except BlockingIOError:
            return rest


@contextmanager
def notify_socket(path: Path | None) -> Iterator[NotifySocket]:
    """Bind one.

    Args:
        path: None: an abstract address, chosen by the kernel.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.settimeout(TIMEOUT_S)
        sock.bind("" if path is None else str(path))
        name = sock.getsockname()
        yield NotifySocket(sock, "@" + name[1:].decode() if isinstance(name, bytes) else name)
