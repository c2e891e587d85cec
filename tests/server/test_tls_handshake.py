"""How TLS begins over real sockets: what is no handshake, those that fail, their caps, their end in a drain."""

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
import uvloop

from server.listening.clients import HANDSHAKE, MAX_CONNECTIONS
from server.wire.stream import HttpStream
from server.wire.tls import REFUSED_ALERT, ServerTls, TlsFiles
from tests.certificates import make_certificate, needs_openssl
from tests.server.memory_connection import GET, Hold
from tests.server.tls_server import connect, get_http2, new_client, serving, trusting, wait_until

pytestmark = needs_openssl


@pytest.mark.parametrize("has_body", [False, True])
async def test_request_in_the_clear_is_told_that_tls_is_spoken_and_is_served_nothing(
    tmp_path: Path, has_body: bool
) -> None:
    certificate, key = make_certificate(tmp_path)
    served: list[HttpStream] = []

    async def serve(stream: HttpStream) -> None:
        served.append(stream)

    async with serving(ServerTls(TlsFiles(certificate, key)), handler=serve) as listener:
        reader, writer = await asyncio.open_connection("127.0.0.1", listener.port)
        writer.write(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 200000\r\n\r\n" + bytes(200_000) * has_body)
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 400 ")
        assert b"connection: close" in head
        assert b"speaks TLS" in body
        writer.close()
        await wait_until(lambda: listener.num_open == 0)
        assert not served


@pytest.mark.parametrize("said", [b"\x00", b"\xff" * 100, b"\x16\x03\x01", b" GET / HTTP/1.1"])
async def test_what_is_neither_tls_nor_a_request_is_closed(tmp_path: Path, said: bytes) -> None:
    certificate, key = make_certificate(tmp_path)
    async with serving(ServerTls(TlsFiles(certificate, key))) as listener:
        reader, writer = await asyncio.open_connection("127.0.0.1", listener.port)
        writer.write(said)
        writer.write_eof()
        with contextlib.suppress(ConnectionError):  # it is closed with bytes unread
            assert b"HTTP" not in await reader.read()
        writer.close()
        await wait_until(lambda: listener.num_open == 0)
        assert listener.refusals.counts[HANDSHAKE] == 1


async def test_who_is_one_too_many_gets_an_alert(tmp_path: Path) -> None:
    certificate, key = make_certificate(tmp_path)
    async with serving(ServerTls(TlsFiles(certificate, key)), max_connections=1) as listener:
        _, first = await asyncio.open_connection("127.0.0.1", listener.port)
        await wait_until(lambda: listener.num_open == 1)
        reader, writer = await asyncio.open_connection("127.0.0.1", listener.port)
        assert await reader.read() == REFUSED_ALERT
        client = ssl.create_default_context().wrap_bio(told := ssl.MemoryBIO(), ssl.MemoryBIO(), False, "a")
        told.write(REFUSED_ALERT)
        with pytest.raises(ssl.SSLError, match=r"(?i)internal"):
            client.do_handshake()
        writer.close()
        first.close()


OLD_HELLO = bytes((22, 3, 1, 0, 45, 1, 0, 0, 41, 3, 2)) + bytes(32) + bytes((0, 0, 2, 0xC0, 0x13, 1, 0))
HANDSHAKE_FAILURE, PROTOCOL_VERSION = 40, 70  # RFC 8446 §6: alerts


@pytest.mark.parametrize(
    ("version", "alert"),
    [(0, HANDSHAKE_FAILURE), (1, PROTOCOL_VERSION), (2, PROTOCOL_VERSION)],
    ids=["SSL 3.0", "TLS 1.0", "TLS 1.1"],
)
async def test_who_knows_only_old_versions_is_told_so(tmp_path: Path, version: int, alert: int) -> None:
    certificate, key = make_certificate(tmp_path)
    async with serving(ServerTls(TlsFiles(certificate, key))) as listener:
        reader, writer = await asyncio.open_connection("127.0.0.1", listener.port)
        writer.write(OLD_HELLO[:10] + bytes((version,)) + OLD_HELLO[11:])
        assert await reader.readexactly(7) == bytes((21, 3, version, 0, 2, 2, alert))
        writer.close()
        await wait_until(lambda: listener.num_open == 0)
        assert listener.refusals.counts[HANDSHAKE] == 1


@pytest.mark.parametrize("loop", [asyncio.run, uvloop.run])
def test_who_has_no_cipher_in_common_is_told_so_and_has_until_the_deadline_to_leave(
    tmp_path: Path, loop: Callable[[Coroutine[Any, Any, None]], None]
) -> None:
    certificate, key = make_certificate(tmp_path)
    weak = trusting(certificate)
    weak.maximum_version = ssl.TLSVersion.TLSv1_2
    weak.set_ciphers("AES128-SHA")
    say, hear = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = weak.wrap_bio(hear, say, server_hostname="127.0.0.1")
    with pytest.raises(ssl.SSLWantReadError):
        client.do_handshake()
    hello = say.read()

    async def main() -> None:
        async with serving(ServerTls(TlsFiles(certificate, key))) as listener:
            for last_words in (b"", b"more"):  # the second goes on as if it had heard nothing
                reader, writer = await asyncio.open_connection("127.0.0.1", listener.port)
                writer.write(hello)
                hear.write(await reader.readexactly(7))
                assert listener.num_open == 1
                writer.write(last_words) if last_words else writer.close()
                await wait_until(lambda: listener.num_open == 0)
                writer.close()
            assert listener.refusals.counts[HANDSHAKE] == 2

    loop(main())
    with pytest.raises(ssl.SSLError, match=r"(?i)handshake.failure"):
        client.do_handshake()


async def test_connections_in_their_handshake_count_towards_the_cap(tmp_path: Path) -> None:
    certificate, key = make_certificate(tmp_path)
    async with serving(ServerTls(TlsFiles(certificate, key)), max_connections=2) as listener:
        silent = [await asyncio.open_connection("127.0.0.1", listener.port) for _ in range(2)]
        await wait_until(lambda: listener.num_open == 2)
        with pytest.raises((ConnectionError, ssl.SSLError)):
            await connect(listener.port, trusting(certificate))
        assert (listener.num_accepted, listener.refusals.counts[MAX_CONNECTIONS]) == (3, 1)
        silent[0][1].close()
        await wait_until(lambda: listener.num_open == 1)
        assert listener.refusals.counts[HANDSHAKE] == 1
        reader, writer = await connect(listener.port, trusting(certificate, "h2"))
        assert await get_http2(reader, writer, new_client()) == b"/"
        assert listener.num_open == 2
        writer.close()
        silent[1][1].close()
        await wait_until(lambda: listener.num_open == 0)


async def test_drain_does_not_wait_for_handshakes(tmp_path: Path) -> None:
    certificate, key = make_certificate(tmp_path)
    async with serving(ServerTls(TlsFiles(certificate, key))) as listener:
        reader, writer = await asyncio.open_connection("127.0.0.1", listener.port)
        await wait_until(lambda: listener.num_open == 1)
        await listener.drain(60)
        assert listener.num_open == 0
        assert await reader.read() == b""
        writer.close()


async def test_drain_at_any_moment_of_a_handshake_leaves_no_connection(tmp_path: Path) -> None:
    certificate, key = make_certificate(tmp_path)
    context = trusting(certificate, "http/1.1")

    async def drain_after(num_turns: int) -> None:
        async with serving(ServerTls(TlsFiles(certificate, key))) as listener:
            clients = [asyncio.create_task(connect(listener.port, context)) for _ in range(3)]
            for _ in range(num_turns):
                await asyncio.sleep(0)
            await listener.drain(5)
            assert listener.num_open == 0
            for found in await asyncio.gather(*clients, return_exceptions=True):
                if not isinstance(found, BaseException):
                    found[1].close()

    await asyncio.gather(*map(drain_after, range(40)))  # at once: drains wait for the clients' farewell


async def test_slow_reader_is_noticed_as_soon_as_in_the_clear(tmp_path: Path) -> None:
    certificate, key = make_certificate(tmp_path)
    hold = Hold()
    async with serving(ServerTls(TlsFiles(certificate, key)), handler=hold) as listener:
        raw = socket.socket()
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        raw.connect(("127.0.0.1", listener.port))
        context = trusting(certificate, "http/1.1")
        with await asyncio.to_thread(context.wrap_socket, raw, server_hostname="127.0.0.1") as client:
            await asyncio.to_thread(client.sendall, GET)
            await wait_until(lambda: bool(hold.streams))
            num_sent = 0
            while not hold.streams[0].is_blocked:
                hold.streams[0].send(b"x" * 1024)
                num_sent += 1024
                listener.batch.flush_all()
                await asyncio.sleep(0)
                assert num_sent < 64 * 1024
        await wait_until(lambda: hold.told == ["blocked", "gone"])
