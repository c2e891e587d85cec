"""Certificates that are served with, refused, and replaced."""

import os
import ssl
from pathlib import Path

import h11
import pytest
import uvloop

from core.errors import ExitCode, StartupError
from server.wire.tls import ServerTls, TlsFiles, server_tls
from tests.certificates import make_certificate, needs_openssl
from tests.server.tls_server import connect, get_http2, listening, new_client, trusting

pytestmark = needs_openssl


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
