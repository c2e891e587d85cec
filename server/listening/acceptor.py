"""Takes new connections off one listening socket, a few at a time. Thread: loop.

Level-triggered: what is left in the kernel's queue wakes the loop again, after whatever else was ready. Out of
descriptors or memory it pauses: the queue would wake the loop for nothing until there are some again.
"""

import asyncio
import errno
import logging
import socket
from collections.abc import Callable
from typing import Any

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
