"""An accepted connection, from its socket to its TLS. Thread: loop.

In two steps, and not in the loop's one call for both, so that the transport below TLS is known: left alone it holds
64 KiB that nobody above it sees, before it tells of a peer that does not read.
"""

import asyncio
import errno
import socket
import ssl
from typing import cast

LOWER_UNSENT_BYTES = 4 * 1024  # high mark below TLS; the one above it is the connection's
_NO_LIMIT_S = 1e6  # on the wait for the peer's close_notify: Connection.close has its own


async def start_tls(
    loop: asyncio.AbstractEventLoop, accepted: socket.socket, context: ssl.SSLContext, timeout_s: float
) -> tuple[asyncio.Transport, asyncio.Transport]:
    """The transport that speaks TLS, and the one below it. Who takes it at once (set_protocol) misses nothing.

    Raises:
        OSError: the handshake has failed, or was not complete in time. Nothing is left of the connection.
    """
    lower, opening = await loop.connect_accepted_socket(_Opening, accepted)
    try:
        if lower.is_closing():
            raise ConnectionAbortedError(errno.ECONNABORTED, "the connection ended")
        lower.pause_reading()
        lower.set_write_buffer_limits(high=LOWER_UNSENT_BYTES)
        loop.call_soon(_hand_on, lower, bytes(opening.received))
        upper = await loop.start_tls(
            lower,
            opening,
            context,
            server_side=True,
            ssl_handshake_timeout=timeout_s,
            ssl_shutdown_timeout=_NO_LIMIT_S,
        )
    except BaseException:
        lower.abort()
        raise
    assert upper is not None
    return upper, lower


class _Opening(asyncio.Protocol):
    """Keeps what comes before TLS has taken its place."""

    def __init__(self) -> None:
        self.received = bytearray()

    def data_received(self, data: bytes) -> None:
        self.received += data


def _hand_on(lower: asyncio.Transport, received: bytes) -> None:
    """To TLS, what came before it."""
    if lower.is_closing():
        return
    tls = cast(asyncio.BufferedProtocol, lower.get_protocol())
    while received:
        buffer = cast(memoryview, tls.get_buffer(len(received)))
        size = min(len(buffer), len(received))
        buffer[:size] = received[:size]
        tls.buffer_updated(size)
        received = received[size:]
