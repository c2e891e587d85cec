"""A listener that speaks TLS on a real socket, and clients of it."""

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from h2 import events
from h2.config import H2Configuration
from h2.connection import H2Connection

from server.listening.listener import Listener, ListenerConfig
from server.listening.sockets import Bind, TcpAddress
from server.wire.connection import Handler
from server.wire.limits import ConnectionLimits
from server.wire.stream import HttpStream
from server.wire.tls import ServerTls
from tests.server.fakes import refuse
from tests.server.http2_client import fields
from tests.server.memory_connection import answer


async def wait_until(is_so: Callable[[], bool]) -> None:
    """What the loop has to do for it is done a turn at a time."""
    while not is_so():
        await asyncio.sleep(0)


async def say_path(stream: HttpStream) -> None:
    answer(stream, 200, stream.request.path.encode())


@asynccontextmanager
async def listening(tls: ServerTls) -> AsyncIterator[int]:
    async with serving(tls) as listener:
        yield listener.port


@asynccontextmanager
async def serving(
    tls: ServerTls,
    max_connections: int = 100,
    handler: Handler = say_path,
    limits: ConnectionLimits | None = None,
) -> AsyncIterator[Listener]:
    limits = limits or ConnectionLimits()
    config = ListenerConfig((Bind(TcpAddress(port=0)),), max_connections=max_connections, connection=limits, tls=tls)
    listener = Listener(handler, refuse, config)
    await listener.start()
    try:
        yield listener
    finally:
        await listener.drain(0.0)


def trusting(certificate: Path, *alpn: str) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(certificate))
    context.set_alpn_protocols(list(alpn))
    return context


async def connect(port: int, context: ssl.SSLContext) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", port, ssl=context, server_hostname="127.0.0.1")


def new_client() -> H2Connection:
    client = H2Connection(H2Configuration(client_side=True))
    client.initiate_connection()
    return client


async def get_http2(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, client: H2Connection) -> bytes:
    stream_id = client.get_next_available_stream_id()
    client.send_headers(stream_id, fields(scheme="https"), end_stream=True)
    writer.write(client.data_to_send())
    body = b""
    while True:
        for event in client.receive_data(await reader.read(65_536)):
            if isinstance(event, events.DataReceived):
                body += event.data or b""
            elif isinstance(event, events.StreamEnded):
                return body
