"""A whole connection, either protocol, on a network in memory: nothing unhandled, and nothing left over at its end."""

import asyncio
import logging
from typing import Any

from core.errors import ErrorKind, ServiceError
from fuzz.frames import stream_of_frames
from server.wire.limits import ConnectionLimits
from server.wire.messages import ResponseHead
from server.wire.stream import HttpStream
from tests.server.fakes import MemoryServer, MemoryTransport

_LIMITS = ConnectionLimits()
_HELD_BYTES = _LIMITS.max_control_bytes + 256 * 1024  # for the peer: one write may pass the limit
_BODY_BYTES = 1_000
_PIECE = b"x" * 3_000
_TRAILERS = ((b"x-sum", b"1"),)
_STATUSES = {ErrorKind.BODY_TOO_LARGE: 413, ErrorKind.REQUEST_TIMEOUT: 408}
_LONG_S = 1_000.0  # longer than any clock of the connection's

_READS, _SETTLES, _TAKES_TIME, _NUM_ENDS = 1, 2, 4, 4


class _Faults(logging.Handler):
    """What is reported as gone wrong on our side."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.found: list[Any] = []
        logging.getLogger("server").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.found.append(record.exc_info or record.getMessage())

    def on_loop(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self.found.append(context.get("exception", context))


_faults = _Faults()


def check(data: bytes) -> None:
    """The first byte says how the peer behaves and how it ends, the second how much it sends at once."""
    _faults.found.clear()
    manner, size = (data[0], 1 + data[1] * 16) if len(data) > 1 else (0, 1)
    server = MemoryServer(_serve, _LIMITS)
    server.loop.set_exception_handler(_faults.on_loop)
    transport = server.connect(peer_reads=bool(manner & _READS))
    said = stream_of_frames(data[2:])
    for start in range(0, len(said), max(size, len(said) // 500)):
        transport.feed(said[start : start + max(size, len(said) // 500)])
        if manner & _SETTLES:
            server.loop.advance(1.0 if manner & _TAKES_TIME else 0.0)
    server.loop.settle()
    assert transport.get_write_buffer_size() <= _HELD_BYTES
    _end(server, transport, manner // 8 % _NUM_ENDS)
    server.close()
    assert not _faults.found, _faults.found


def _end(server: MemoryServer, transport: MemoryTransport, how: int) -> None:
    if how == 0:
        transport.feed_eof()
    elif how == 1:
        transport.reset()
    elif how == 2:
        server.loop.run(server.listener.drain(_LONG_S))
    else:
        transport.peer_read()
        server.loop.advance(_LONG_S)
        assert transport.is_lost
    server.loop.settle()


async def _serve(stream: HttpStream) -> None:
    try:
        await stream.read_body(_BODY_BYTES)
    except ServiceError as error:
        stream.send_head(ResponseHead(_STATUSES[error.kind], ()))
    else:
        stream.send_head(ResponseHead(200, ()))
        stream.send(_PIECE)
        await asyncio.sleep(1)
        stream.send(_PIECE)
    stream.end(_TRAILERS)
