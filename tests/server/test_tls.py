"""Certificates that are served with, refused, and replaced; over real sockets."""

import asyncio
import contextlib
import os
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import h11
import pytest
import uvloop
from h2 import events
from h2.config import H2Configuration
from h2.connection import H2Connection

from core.errors import ExitCode, StartupError
from server.listening.binds import Bind, TcpAddress
from server.listening.listener import Listener, ListenerConfig
from server.listening.refusals import HANDSHAKE, MAX_CONNECTIONS
from server.wire.exchanges import Handler
from server.wire.peer import ClientCertificate
from server.wire.stream import HttpStream
from server.wire.tls import (
    REFUSED_ALERT,
    ClientAuth,
    ServerTls,
    TlsFiles,
    client_certificate,
    server_tls,
    version_alert,
)
from tests.certificates import make_certificate, make_client_certificate, needs_openssl
from tests.server.fakes import refuse
from tests.server.http2_client import fields
from tests.server.memory_connection import GET, Hold, answer

pytestmark = needs_openssl


async def wait_until(is_so: Callable[[], bool]) -> None:
    """What the loop has to do for it is done a turn at a time."""
    while not is_so():
        await asyncio.sleep(0)


async def say_subject(stream: HttpStream) -> None:
    certificate = stream.peer.certificate
    answer(stream, 200, b"nobody" if certificate is None else repr(certificate).encode())


async def say_path(stream: HttpStream) -> None:
    answer(stream, 200, stream.request.path.encode())


@asynccontextmanager
async def listening(tls: ServerTls) -> AsyncIterator[int]:
    async with serving(tls) as listener:
        yield listener.port


@asynccontextmanager
async def serving(tls: ServerTls, max_connections: int = 100, handler: Handler = say_path) -> AsyncIterator[Listener]:
    config = ListenerConfig((Bind(TcpAddress(port=0)),), max_connections=max_connections, tls=tls)
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


def new_client() -> H2Connection:
    client = H2Connection(H2Configuration(client_side=True))
    client.initiate_connection()
    return client


def test_alpn_chooses_the_protocol(tmp_path: Path) -> None:
    certificate, key = make_certificate(tmp_path)

    async def main() -> None:
        async with listening(ServerTls(TlsFiles(certificate, key))) as port:
            reader, writer = await connect(port, trusting(certificate, "h2", "http/1.1"))
            assert writer.get_extra_info("ssl_object").selected_alpn_protocol() == "h2"
            assert await get_http2(reader, writer, new_client()) == b"/"
            writer.close()
            for alpn in (("http/1.1",), ()):
                reader, writer = await connect(port, trusting(certificate, *alpn))
                writer.write(b"GET /old HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
                client = h11.Connection(h11.CLIENT)
                client.send(h11.Request(method="GET", target="/", headers=[("host", "a")]))
                client.receive_data(await reader.read())
                response = client.next_event()
                assert isinstance(response, h11.Response)
                assert response.status_code == 200
                writer.close()

    uvloop.run(main())


def test_nothing_older_than_tls_12_is_spoken(tmp_path: Path) -> None:
    certificate, key = make_certificate(tmp_path)

    async def main(port_of: ServerTls) -> None:
        async with listening(port_of) as port:
            modern = trusting(certificate, "h2")
            modern.minimum_version = modern.maximum_version = ssl.TLSVersion.TLSv1_2
            _, writer = await connect(port, modern)
            assert writer.get_extra_info("cipher")[0].startswith("ECDHE-")
            writer.close()
            weak = trusting(certificate, "h2")
            weak.maximum_version = ssl.TLSVersion.TLSv1_2
            weak.set_ciphers("AES128-SHA")
            with pytest.raises((ssl.SSLError, ConnectionError)):
                await connect(port, weak)

    tls = ServerTls(TlsFiles(certificate, key))
    assert tls.context.minimum_version is ssl.TLSVersion.TLSv1_2
    uvloop.run(main(tls))


def test_new_connections_get_the_new_certificate_and_old_ones_go_on(tmp_path: Path) -> None:
    certificate, key = make_certificate(tmp_path)
    tls = ServerTls(TlsFiles(certificate, key))

    async def main() -> None:
        async with listening(tls) as port:
            old = trusting(certificate, "h2")
            reader, writer = await connect(port, old)
            client = new_client()
            assert await get_http2(reader, writer, client) == b"/"
            make_certificate(tmp_path)
            tls.reload()
            assert await get_http2(reader, writer, client) == b"/"
            with pytest.raises(ssl.SSLCertVerificationError):
                await connect(port, old)
            _, new_writer = await connect(port, trusting(certificate, "h2"))
            new_writer.close()
            writer.close()

    uvloop.run(main())


def test_files_that_do_not_fit_are_refused_and_the_old_ones_stay(tmp_path: Path) -> None:
    certificate, key = make_certificate(tmp_path)
    tls = ServerTls(TlsFiles(certificate, key))
    trusted = trusting(certificate, "h2")
    key.write_text("not a key")

    async def main() -> None:
        with pytest.raises(StartupError) as caught:
            tls.reload()
        assert caught.value.exit_code is ExitCode.CONFIGURATION
        assert str(key) in caught.value.cause
        async with listening(tls) as port:
            _, writer = await connect(port, trusted)
            writer.close()

    uvloop.run(main())


def test_key_of_another_certificate_is_refused(tmp_path: Path) -> None:
    certificate, _ = make_certificate(tmp_path / "one")
    _, key = make_certificate(tmp_path / "two")
    with pytest.raises(StartupError, match="KEY_VALUES_MISMATCH"):
        ServerTls(TlsFiles(certificate, key))


def test_certificate_without_a_key_is_refused_with_the_flag_that_is_missing(tmp_path: Path) -> None:
    certificate, _ = make_certificate(tmp_path)
    with pytest.raises(StartupError, match="there is no key in") as caught:
        ServerTls(TlsFiles(certificate))
    assert caught.value.fix == "--tls-key FILE"


def test_key_alone_is_refused(tmp_path: Path) -> None:
    assert server_tls(None, None) is None
    with pytest.raises(StartupError, match="no certificate"):
        server_tls(None, tmp_path / "key.pem")


def test_encrypted_key_is_refused_without_a_question(tmp_path: Path) -> None:
    certificate, key = make_certificate(tmp_path)
    encrypted = tmp_path / "encrypted.pem"
    os.spawnlp(os.P_WAIT, "openssl", "openssl", "ec", "-in", key, "-aes128", "-passout", "pass:x", "-out", encrypted)
    with pytest.raises(StartupError, match="encrypted"):
        ServerTls(TlsFiles(certificate, encrypted))


def test_certificate_and_key_may_be_one_file(tmp_path: Path) -> None:
    certificate, key = make_certificate(tmp_path)
    both = tmp_path / "both.pem"
    both.write_text(key.read_text() + certificate.read_text())
    assert ServerTls(TlsFiles(both)).context.get_ca_certs() == []


@pytest.mark.parametrize("has_body", [False, True])
def test_request_in_the_clear_is_told_that_tls_is_spoken_and_is_served_nothing(tmp_path: Path, has_body: bool) -> None:
    certificate, key = make_certificate(tmp_path)
    served: list[HttpStream] = []

    async def serve(stream: HttpStream) -> None:
        served.append(stream)

    async def main() -> None:
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

    uvloop.run(main())


@pytest.mark.parametrize("said", [b"\x00", b"\xff" * 100, b"\x16\x03\x01", b" GET / HTTP/1.1"])
def test_what_is_neither_tls_nor_a_request_is_closed(tmp_path: Path, said: bytes) -> None:
    certificate, key = make_certificate(tmp_path)

    async def main() -> None:
        async with serving(ServerTls(TlsFiles(certificate, key))) as listener:
            reader, writer = await asyncio.open_connection("127.0.0.1", listener.port)
            writer.write(said)
            writer.write_eof()
            with contextlib.suppress(ConnectionError):  # it is closed with bytes unread
                assert b"HTTP" not in await reader.read()
            writer.close()
            await wait_until(lambda: listener.num_open == 0)
            assert listener.refusals.counts[HANDSHAKE] == 1

    uvloop.run(main())


def test_who_is_one_too_many_gets_an_alert(tmp_path: Path) -> None:
    certificate, key = make_certificate(tmp_path)

    async def main() -> None:
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

    uvloop.run(main())


OLD_HELLO = bytes((22, 3, 1, 0, 41, 1, 0, 0, 37, 3, 2)) + bytes(32) + bytes((0, 0, 2, 0xC0, 0x13, 1, 0))
NEW_HELLO = OLD_HELLO[:10] + b"\3" + OLD_HELLO[11:]


@pytest.mark.parametrize("version", [0, 1, 2], ids=["SSL 3.0", "TLS 1.0", "TLS 1.1"])
def test_who_knows_only_old_versions_is_told_so(tmp_path: Path, version: int) -> None:
    """RFC 8446 §6.2: the handshake would fail without a word, for no loop sends what OpenSSL says last."""
    certificate, key = make_certificate(tmp_path)

    async def main() -> None:
        async with serving(ServerTls(TlsFiles(certificate, key))) as listener:
            reader, writer = await asyncio.open_connection("127.0.0.1", listener.port)
            writer.write(OLD_HELLO[:10] + bytes((version,)) + OLD_HELLO[11:])
            assert await reader.read() == bytes((21, 3, version, 0, 2, 2, 70))
            writer.close()
            await wait_until(lambda: listener.num_open == 0)
            assert listener.refusals.counts[HANDSHAKE] == 1

    uvloop.run(main())


@pytest.mark.parametrize("hello", [b"", b"\x16", OLD_HELLO[:10], NEW_HELLO[:11], b"\x17" + OLD_HELLO[1:11]])
def test_what_is_no_old_hello_is_left_to_openssl(hello: bytes) -> None:
    assert version_alert(hello) == b""


def test_connections_in_their_handshake_count_towards_the_cap(tmp_path: Path) -> None:
    certificate, key = make_certificate(tmp_path)

    async def main() -> None:
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

    uvloop.run(main())


def test_drain_does_not_wait_for_handshakes(tmp_path: Path) -> None:
    certificate, key = make_certificate(tmp_path)

    async def main() -> None:
        async with serving(ServerTls(TlsFiles(certificate, key))) as listener:
            reader, writer = await asyncio.open_connection("127.0.0.1", listener.port)
            await wait_until(lambda: listener.num_open == 1)
            await listener.drain(60)
            assert listener.num_open == 0
            assert await reader.read() == b""
            writer.close()

    uvloop.run(main())


def test_slow_reader_is_noticed_as_soon_as_in_the_clear(tmp_path: Path) -> None:
    certificate, key = make_certificate(tmp_path)
    hold = Hold()

    async def main() -> None:
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

    uvloop.run(main())


# Clients' certificates.


def showing(certificate: Path, shown: tuple[Path, Path] | None) -> ssl.SSLContext:
    context = trusting(certificate, "h2")
    if shown is not None:
        context.load_cert_chain(*shown)
    return context


async def who_am_i(port: int, context: ssl.SSLContext) -> bytes:
    """What the server knows of the client; raises where it does not let it in."""
    reader, writer = await connect(port, context)
    client = H2Connection(H2Configuration(client_side=True))
    client.initiate_connection()
    client.send_headers(1, fields(scheme="https"), end_stream=True)
    writer.write(client.data_to_send())
    body = b""
    while data := await reader.read(65_536):
        for event in client.receive_data(data):
            body += event.data or b"" if isinstance(event, events.DataReceived) else b""
            if isinstance(event, events.StreamEnded):
                writer.close()
                return body
    raise ConnectionResetError("the connection ended without an answer")


@pytest.mark.parametrize("mode", ClientAuth)
def test_the_clients_certificate_is_handed_on_with_its_names(tmp_path: Path, mode: ClientAuth) -> None:
    certificate, key = make_certificate(tmp_path)
    ca = make_certificate(tmp_path / "ca", "ca")
    own = make_client_certificate(
        tmp_path, ca, "/O=Example, Inc./CN=router", "URI:spiffe://example/router", "DNS:r.example"
    )
    names = (("URI", "spiffe://example/router"), ("DNS", "r.example"))

    async def main() -> None:
        tls = ServerTls(TlsFiles(certificate, key, ca[0], mode))
        async with serving(tls, handler=say_subject) as listener:
            known = repr(ClientCertificate("CN=router,O=Example\\, Inc.", names)).encode()
            assert await who_am_i(listener.port, showing(certificate, own)) == known

    uvloop.run(main())


@pytest.mark.parametrize(("mode", "is_let_in"), [(ClientAuth.OPTIONAL, True), (ClientAuth.REQUIRED, False)])
def test_who_shows_no_certificate_is_let_in_where_it_is_optional(
    tmp_path: Path, mode: ClientAuth, is_let_in: bool
) -> None:
    certificate, key = make_certificate(tmp_path)
    ca, _ = make_certificate(tmp_path / "ca", "ca")

    async def main() -> None:
        async with serving(ServerTls(TlsFiles(certificate, key, ca, mode)), handler=say_subject) as listener:
            if is_let_in:
                assert await who_am_i(listener.port, showing(certificate, None)) == b"nobody"
                return
            with pytest.raises((ConnectionError, ssl.SSLError)):
                await who_am_i(listener.port, showing(certificate, None))
            assert listener.refusals.counts[HANDSHAKE] == 1

    uvloop.run(main())


@pytest.mark.parametrize("mode", ClientAuth)
def test_a_certificate_nobody_vouches_for_is_never_let_in(tmp_path: Path, mode: ClientAuth) -> None:
    certificate, key = make_certificate(tmp_path)
    ca, _ = make_certificate(tmp_path / "ca", "ca")
    stranger = make_client_certificate(tmp_path, make_certificate(tmp_path / "other", "ca"), "/CN=router")

    async def main() -> None:
        async with serving(ServerTls(TlsFiles(certificate, key, ca, mode)), handler=say_subject) as listener:
            with pytest.raises((ConnectionError, ssl.SSLError)):
                await who_am_i(listener.port, showing(certificate, stranger))

    uvloop.run(main())


def test_the_ca_is_reloaded_with_the_certificate_and_sessions_of_the_old_one_do_not_help(tmp_path: Path) -> None:
    certificate, key = make_certificate(tmp_path)
    ca = make_certificate(tmp_path / "ca", "ca")
    own = make_client_certificate(tmp_path, ca, "/CN=router")
    tls = ServerTls(TlsFiles(certificate, key, ca[0], ClientAuth.REQUIRED))

    async def main() -> None:
        async with serving(tls, handler=say_subject) as listener:
            context = showing(certificate, own)
            assert b"CN=router" in await who_am_i(listener.port, context)
            ca[0].write_text(make_certificate(tmp_path / "new", "ca")[0].read_text())
            tls.reload()
            with pytest.raises((ConnectionError, ssl.SSLError)):
                await who_am_i(listener.port, context)
            ca[0].write_text("no certificate")
            with pytest.raises(StartupError, match="cannot vouch for clients"):
                tls.reload()

    uvloop.run(main())


def test_what_stands_alone_is_refused_by_name(tmp_path: Path) -> None:
    certificate, key = make_certificate(tmp_path)
    with pytest.raises(StartupError, match="has no CA") as caught:
        server_tls(certificate, key, None, "optional")
    assert caught.value.fix == "--tls-client-ca FILE"
    with pytest.raises(StartupError, match=r"ca\.pem has no certificate"):
        server_tls(None, None, tmp_path / "ca.pem")
    tls = server_tls(certificate, key, certificate)
    assert tls is not None
    assert tls.needs_certificate


@pytest.mark.parametrize(
    ("value", "written"),
    [
        ('a,b+c"d\\e<f>g;h', 'a\\,b\\+c\\"d\\\\e\\<f\\>g\\;h'),
        ("#a", "\\#a"),
        (" a ", "\\ a\\ "),
        (" ", "\\ "),
        ("a\0b", "a\\00b"),
        ("Jürgen", "Jürgen"),
    ],
)
def test_a_subject_is_written_so_that_no_value_looks_like_another_part(value: str, written: str) -> None:
    found = client_certificate({"subject": ((("organizationName", "O"),), (("commonName", value),))})
    assert found == ClientCertificate(f"CN={written},O=O")
    assert client_certificate({}) is client_certificate(None) is None


def test_drain_at_any_moment_of_a_handshake_leaves_no_connection(tmp_path: Path) -> None:
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

    async def main() -> None:
        """At once: drains wait for the clients' farewell."""
        await asyncio.gather(*map(drain_after, range(40)))

    uvloop.run(main())
