"""Binds for proxies, on real loopback sockets: the PROXY header ahead of HTTP and of TLS."""

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from ipaddress import ip_network
from pathlib import Path
from typing import Any

import pytest

from server.listening.clients import (
    DENIED,
    MAX_CONNECTIONS,
    MAX_PER_ADDRESS,
    PROXY_HEADER,
    UNTRUSTED_PROXY,
    ClientRules,
)
from server.listening.clients import UNIX as UNIX_PROXIES
from server.listening.listener import HANDSHAKE_S, Listener, ListenerConfig
from server.listening.sockets import Bind, TcpAddress, UnixAddress
from server.wire.connection import Handler
from server.wire.stream import HttpStream
from server.wire.tls import ServerTls, TlsFiles
from tests.certificates import make_certificate, needs_openssl
from tests.server.fakes import refuse
from tests.server.memory_connection import answer
from tests.server.test_clients import HEADERS
from tests.server.tls_server import trusting, wait_until

GET = b"GET / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n"
TCP4, TCP6, LOCAL = HEADERS["tcp4"][0], HEADERS["tcp6 with tlvs"][0], HEADERS["local"][0]
TRUSTED = (ip_network("127.0.0.1"),)


async def say_who(stream: HttpStream) -> None:
    answer(stream, 200, str(stream.peer).encode())


@asynccontextmanager
async def serving(
    rules: ClientRules | None = None,
    tls: ServerTls | None = None,
    max_connections: int = 100,
    handshake_s: float = HANDSHAKE_S,
    handler: Handler = say_who,
) -> AsyncIterator[Listener]:
    binds = (Bind(TcpAddress(port=0), takes_proxy=True),)
    clients = rules or ClientRules(trusted_proxies=TRUSTED)
    config = ListenerConfig(binds, max_connections=max_connections, clients=clients, tls=tls, handshake_s=handshake_s)
    listener = Listener(handler, refuse, config)
    await listener.start()
    try:
        yield listener
    finally:
        await listener.drain(0)
        assert listener.gate.num_addresses == 0


async def exchange(listener: Listener, *pieces: bytes, source: str = "127.0.0.1") -> bytes:
    """What comes back until the connection ends; nothing when it is reset."""
    reader, writer = await asyncio.open_connection("127.0.0.1", listener.port, local_addr=(source, 0))
    try:
        for piece in pieces:
            writer.write(piece)
            await asyncio.sleep(0)
        return await reader.read()
    except ConnectionResetError:
        return b""
    finally:
        writer.close()


def body(received: bytes) -> bytes:
    return received.partition(b"\r\n\r\n")[2]


async def test_the_client_that_the_header_names_is_the_peer() -> None:
    async with serving() as listener:
        assert body(await exchange(listener, TCP4 + GET)) == b"192.0.2.7:4242"
        assert body(await exchange(listener, TCP6, GET)) == b"[2001:db8::7]:4242"
        every_byte = [bytes([byte]) for byte in TCP4 + GET]
        assert body(await exchange(listener, *every_byte)) == b"192.0.2.7:4242"
        assert body(await exchange(listener, HEADERS["unix"][0] + GET)) == b"unix"
        assert body(await exchange(listener, LOCAL + GET)).startswith(b"127.0.0.1:")


@needs_openssl
async def test_tls_begins_behind_the_header(tmp_path: Path) -> None:
    certificate, key = make_certificate(tmp_path)
    async with serving(tls=ServerTls(TlsFiles(certificate, key))) as listener:
        reader, writer = await asyncio.open_connection("127.0.0.1", listener.port)
        writer.write(TCP4)
        await writer.start_tls(trusting(certificate, "http/1.1"), server_hostname="127.0.0.1")
        writer.write(GET)
        assert body(await reader.read()) == b"192.0.2.7:4242"
        writer.close()
        with pytest.raises((ConnectionError, ssl.SSLError)):
            await asyncio.open_connection("127.0.0.1", listener.port, ssl=trusting(certificate))
        assert listener.refusals.counts[PROXY_HEADER] == 1


@pytest.mark.parametrize(
    ("data", "reason", "options"),
    [
        (GET, PROXY_HEADER, {}),
        (b"PROXY TCP4 192.0.2.7 192.0.2.1 1 2\r\n" + GET, PROXY_HEADER, {}),
        (HEADERS["longest"][0][:14] + b"\xff\xff", PROXY_HEADER, {}),
        (TCP4[:20], PROXY_HEADER, {"handshake_s": 0.0}),  # the rest does not come
        (TCP4 + GET, UNTRUSTED_PROXY, {"rules": ClientRules()}),
    ],
)
async def test_a_connection_without_a_trusted_header_is_closed_unanswered(
    data: bytes, reason: str, options: dict[str, Any]
) -> None:
    async with serving(**options) as listener:
        assert await exchange(listener, data) == b""
        assert listener.refusals.counts[reason] == 1
        assert listener.num_open == 0


async def test_the_proxys_own_clients_over_a_unix_socket_are_no_proxies_of_ours() -> None:
    async def say_trust(stream: HttpStream) -> None:
        answer(stream, 200, str(stream.peer.is_proxy).encode())

    rules = ClientRules(trusted_proxies=(*TRUSTED, UNIX_PROXIES))
    async with serving(rules, handler=say_trust) as listener:
        assert body(await exchange(listener, LOCAL + GET)) == b"True"
        assert body(await exchange(listener, HEADERS["unix"][0] + GET)) == b"False"


async def test_a_denied_client_is_closed_and_the_next_one_is_served() -> None:
    async with serving(ClientRules(trusted_proxies=TRUSTED, deny=(ip_network("192.0.2.0/24"),))) as listener:
        assert await exchange(listener, TCP4 + GET) == b""
        assert body(await exchange(listener, TCP6 + GET)) == b"[2001:db8::7]:4242"
        assert listener.refusals.counts[DENIED] == 1


async def test_connections_are_counted_by_the_client_that_the_header_names() -> None:
    async with serving(ClientRules(trusted_proxies=TRUSTED, max_per_address=1)) as listener:
        _, holder = await asyncio.open_connection("127.0.0.1", listener.port)
        holder.write(TCP4)
        await wait_until(lambda: listener.gate.num_addresses == 1)
        assert await exchange(listener, TCP4 + GET) == b""
        assert listener.refusals.counts[MAX_PER_ADDRESS] == 1
        assert body(await exchange(listener, TCP6 + GET)) == b"[2001:db8::7]:4242"
        holder.close()
        await wait_until(lambda: listener.num_open == 0)
        assert body(await exchange(listener, TCP4 + GET)) == b"192.0.2.7:4242"


async def test_connections_that_wait_for_their_header_count_towards_the_cap() -> None:
    async with serving(max_connections=1) as listener:
        _, silent = await asyncio.open_connection("127.0.0.1", listener.port)
        await wait_until(lambda: listener.num_open == 1)
        assert await exchange(listener, TCP4 + GET) == b""
        assert listener.refusals.counts[MAX_CONNECTIONS] == 1
        silent.close()


async def test_direct_clients_are_judged_and_counted_as_they_come() -> None:
    rules = ClientRules(deny=(ip_network("127.0.0.2"),), max_per_address=1)
    listener = Listener(say_who, refuse, ListenerConfig((Bind(TcpAddress(port=0)),), clients=rules))
    await listener.start()
    assert await exchange(listener, GET, source="127.0.0.2") == b""
    _, holder = await asyncio.open_connection("127.0.0.1", listener.port)
    await wait_until(lambda: listener.num_open == 1)
    assert await exchange(listener, GET) == b""
    assert body(await exchange(listener, GET, source="127.0.0.3")).startswith(b"127.0.0.3:")
    counts = listener.refusals.counts
    assert (counts[DENIED], counts[MAX_PER_ADDRESS]) == (1, 1)
    holder.close()
    await listener.drain(5)
    assert listener.gate.num_addresses == 0


async def test_a_proxy_at_a_unix_socket_is_trusted_by_that_name(tmp_path_factory: pytest.TempPathFactory) -> None:
    path = str(tmp_path_factory.mktemp("s") / "a")
    rules = ClientRules(trusted_proxies=(UNIX_PROXIES,))
    listener = Listener(say_who, refuse, ListenerConfig((Bind(UnixAddress(path), takes_proxy=True),), clients=rules))
    await listener.start()
    reader, writer = await asyncio.open_unix_connection(path)
    writer.write(TCP4 + GET)
    assert body(await reader.read()) == b"192.0.2.7:4242"
    writer.close()
    await listener.drain(5)
