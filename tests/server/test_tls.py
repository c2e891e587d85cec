"""Certificates that are served with, refused, and replaced; the protocols offered; how TLS ends."""

import asyncio
import os
import ssl
from pathlib import Path

import h11
import pytest
import uvloop
from h2.errors import ErrorCodes

from core.errors import ExitCode, StartupError
from server.listening.clients import HANDSHAKE
from server.wire.http2_frames import PING
from server.wire.limits import ConnectionLimits
from server.wire.stream import HttpStream
from server.wire.tls import ServerTls, TlsFiles, server_tls
from tests.certificates import make_certificate, needs_openssl
from tests.server.raw_http2 import START, Seen, frame
from tests.server.tls_server import connect, get_http2, listening, new_client, serving, trusting, wait_until

pytestmark = needs_openssl


async def test_alpn_chooses_the_protocol(tmp_path: Path) -> None:
    certificate, key = make_certificate(tmp_path)
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


@pytest.mark.parametrize(
    "offered", [("acme-tls/1",), ("http/1.0", "h3"), ("x" * 255,) * 60], ids=["one", "two", "many"]
)
@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
@pytest.mark.parametrize("piece_bytes", [1, 2**20])
async def test_who_offers_only_protocols_that_we_do_not_know_is_refused(
    tmp_path: Path,
    offered: tuple[str, ...],
    version: ssl.TLSVersion,
    piece_bytes: int,
) -> None:
    """RFC 7301 §3.2. However its ClientHello is cut, and whether it names a server or not."""
    certificate, key = make_certificate(tmp_path)
    context = trusting(certificate, *offered)
    context.minimum_version = context.maximum_version = version
    context.check_hostname = False
    async with serving(ServerTls(TlsFiles(certificate, key))) as listener:
        for name in (None, "localhost"):
            client = RawTlsClient(context, name)
            await client.open(listener.port)
            with pytest.raises(ssl.SSLError, match=r"(?i)no.application.protocol"):
                await client.shake_hands(piece_bytes)
            client.close()
        await wait_until(lambda: listener.num_open == 0)
        assert listener.refusals.counts[HANDSHAKE] == 2
        reader, writer = await connect(listener.port, trusting(certificate, "acme-tls/1", "h2"))
        assert await get_http2(reader, writer, new_client()) == b"/"
        writer.close()


class RawTlsClient:
    """TLS by hand: it sees what the server ends, TLS or the connection, and ends nothing itself."""

    def __init__(self, context: ssl.SSLContext, name: str | None = "127.0.0.1") -> None:
        self._hear, self._say = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._hear, self._say, server_hostname=name)

    async def open(self, port: int) -> None:
        self._reader, self._writer = await asyncio.open_connection("127.0.0.1", port)

    async def shake_hands(self, piece_bytes: int = 2**20) -> None:
        while True:
            try:
                self._tls.do_handshake()
            except ssl.SSLWantReadError:
                self._write_out(piece_bytes)
                self._hear.write(await self._reader.read(65_536))
            else:
                self._write_out(piece_bytes)
                return

    def send(self, data: bytes) -> None:
        self._tls.write(data)
        self._write_out()

    def _write_out(self, piece_bytes: int = 2**20) -> None:
        data = self._say.read()
        for start in range(0, len(data), piece_bytes):
            self._writer.write(data[start : start + piece_bytes])

    async def drain(self) -> None:
        await self._writer.drain()

    async def read_to_end(self) -> bytes:
        """What comes until the server has ended the connection, and before that TLS."""
        self._hear.write(await self._reader.read())
        said = bytearray()
        while True:
            data = self._tls.read(65_536)  # SSLWantReadError: TLS has not been ended
            if not data:
                return bytes(said)
            said += data

    def close(self) -> None:
        self._writer.close()


async def read_all(stream: HttpStream) -> None:
    await stream.read_body(2**30)


UNBOUNDED = ConnectionLimits(linger_s=1e6, idle_s=1e6, stall_s=1e6)  # no clock ends what is tried here


async def test_connection_error_is_followed_by_the_end_of_tls_and_of_the_connection_at_once(tmp_path: Path) -> None:
    """RFC 9113 §5.4.1: a PING on a stream. A hundred times: what is between is a race."""
    certificate, key = make_certificate(tmp_path)
    context = trusting(certificate, "h2")
    async with serving(ServerTls(TlsFiles(certificate, key)), limits=UNBOUNDED) as listener:
        for _ in range(100):
            client = RawTlsClient(context)
            await client.open(listener.port)
            await client.shake_hands()
            client.send(START)
            client.send(frame(PING, bytes(8), stream_id=3))
            seen = Seen()
            seen.add(await client.read_to_end())
            assert seen.goaway is ErrorCodes.PROTOCOL_ERROR
            client.close()
        await wait_until(lambda: listener.num_open == 0)


@pytest.mark.parametrize("alpn", ["h2", "http/1.1"])
async def test_peer_in_the_middle_of_an_upload_reads_why_it_is_refused(tmp_path: Path, alpn: str) -> None:
    certificate, key = make_certificate(tmp_path)
    begin = {
        "h2": START + frame(PING, bytes(8), stream_id=3),
        "http/1.1": b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\nx\r\n",
    }
    async with serving(ServerTls(TlsFiles(certificate, key)), handler=read_all, limits=UNBOUNDED) as listener:
        client = RawTlsClient(trusting(certificate, alpn))
        await client.open(listener.port)
        await client.shake_hands()
        client.send(begin[alpn])
        for _ in range(12):  # MiB: less than is thrown away at most
            client.send(bytes(2**20))
            await client.drain()
        said = await client.read_to_end()
        assert said.startswith(b"HTTP/1.1 400 ") if alpn == "http/1.1" else b"\0\0\x08\x07\0" in said
        client.close()
        await wait_until(lambda: listener.num_open == 0)


async def send_for_ever(client: RawTlsClient) -> None:
    while True:
        client.send(bytes(2**20))
        await client.drain()


async def test_peer_that_does_not_stop_its_upload_is_cut_off(tmp_path: Path) -> None:
    certificate, key = make_certificate(tmp_path)
    async with serving(ServerTls(TlsFiles(certificate, key)), limits=UNBOUNDED) as listener:
        client = RawTlsClient(trusting(certificate, "h2"))
        await client.open(listener.port)
        await client.shake_hands()
        client.send(START + frame(PING, bytes(8), stream_id=3))
        with pytest.raises(ConnectionError):
            await send_for_ever(client)
        await wait_until(lambda: listener.num_open == 0)
        client.close()


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


async def test_new_connections_get_the_new_certificate_and_old_ones_go_on(tmp_path: Path) -> None:
    certificate, key = make_certificate(tmp_path)
    tls = ServerTls(TlsFiles(certificate, key))
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


async def test_files_that_do_not_fit_are_refused_and_the_old_ones_stay(tmp_path: Path) -> None:
    certificate, key = make_certificate(tmp_path)
    tls = ServerTls(TlsFiles(certificate, key))
    trusted = trusting(certificate, "h2")
    key.write_text("not a key")
    with pytest.raises(StartupError) as caught:
        tls.reload()
    assert caught.value.exit_code is ExitCode.CONFIGURATION
    assert str(key) in caught.value.cause
    async with listening(tls) as port:
        _, writer = await connect(port, trusted)
        writer.close()


def test_key_of_another_certificate_is_refused(tmp_path: Path) -> None:
    certificate, _ = make_certificate(tmp_path / "one")
    _, key = make_certificate(tmp_path / "two")
    with pytest.raises(StartupError, match="KEY_VALUES_MISMATCH"):
        ServerTls(TlsFiles(certificate, key))


@pytest.mark.parametrize("unreadable", ["certificate", "key", "client_ca"])
def test_file_that_may_not_be_read_is_named_with_who_must(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unreadable: str
) -> None:
    certificate, key = make_certificate(tmp_path)
    client_ca = tmp_path / "ca.pem"
    client_ca.write_bytes(certificate.read_bytes())
    files = {"certificate": certificate, "key": key, "client_ca": client_ca}
    for name, path in files.items():
        path.chmod(0 if name == unreadable else 0o644)
    tmp_path.chmod(0o755)
    monkeypatch.chdir(tmp_path)  # whoever we are then, our parents need not be open to them
    try:
        if os.geteuid() == 0:
            os.seteuid(65534)  # root may read all
        with pytest.raises(
            StartupError, match=f"^{files[unreadable].name} cannot be read: Permission denied"
        ) as caught:
            ServerTls(TlsFiles(**{name: Path(path.name) for name, path in files.items()}))
    finally:
        os.seteuid(os.getuid())
    assert f"chmod u+r {files[unreadable].name}" in caught.value.fix


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
