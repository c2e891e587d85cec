"""Clients' certificates: who is let in, and what is handed on of them."""

import ssl
import subprocess
from datetime import UTC, datetime
from pathlib import Path

import pytest
from h2 import events
from h2.config import H2Configuration
from h2.connection import H2Connection

from core.errors import StartupError
from server.listening.clients import HANDSHAKE
from server.wire.messages import ClientCertificate
from server.wire.stream import HttpStream
from server.wire.tls import ClientAuth, ServerTls, TlsFiles, client_certificate
from tests.certificates import make_certificate, make_client_certificate, make_revocations, needs_openssl
from tests.server.http2_client import fields
from tests.server.memory_connection import answer
from tests.server.tls_server import connect, serving, trusting, wait_until

pytestmark = needs_openssl

# RFC 8446 §6.2, as OpenSSL names the alerts
REQUIRED, UNKNOWN_CA, REVOKED = "(?i)certificate.required", "(?i)unknown.ca", "(?i)certificate.revoked"


async def say_subject(stream: HttpStream) -> None:
    certificate = stream.peer.certificate
    answer(stream, 200, b"nobody" if certificate is None else repr(certificate).encode())


def authorities(directory: Path) -> tuple[Path, Path, tuple[Path, Path]]:
    """The server's certificate and key, and those of the clients' CA."""
    return *make_certificate(directory), make_certificate(directory / "ca", "ca")


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
async def test_the_clients_certificate_is_handed_on_with_its_names(tmp_path: Path, mode: ClientAuth) -> None:
    certificate, key, ca = authorities(tmp_path)
    own = make_client_certificate(
        tmp_path, ca, "/O=Example, Inc./CN=router", "URI:spiffe://example/router", "DNS:r.example"
    )
    names = (("URI", "spiffe://example/router"), ("DNS", "r.example"))
    tls = ServerTls(TlsFiles(certificate, key, ca[0], mode))
    async with serving(tls, handler=say_subject) as listener:
        known = repr(ClientCertificate("CN=router,O=Example\\, Inc.", names)).encode()
        assert await who_am_i(listener.port, showing(certificate, own)) == known


@pytest.mark.parametrize(
    ("mode", "has_stranger", "alert"),
    [
        (ClientAuth.OPTIONAL, False, None),
        (ClientAuth.REQUIRED, False, REQUIRED),
        (ClientAuth.OPTIONAL, True, UNKNOWN_CA),
        (ClientAuth.REQUIRED, True, UNKNOWN_CA),
    ],
)
async def test_clients_without_a_certificate_are_let_in_where_it_is_optional_and_strangers_never(
    tmp_path: Path, mode: ClientAuth, has_stranger: bool, alert: str | None
) -> None:
    certificate, key, (ca, _) = authorities(tmp_path)
    stranger = make_client_certificate(tmp_path, make_certificate(tmp_path / "other", "ca"), "/CN=router")
    async with serving(ServerTls(TlsFiles(certificate, key, ca, mode)), handler=say_subject) as listener:
        context = showing(certificate, stranger if has_stranger else None)
        if alert is None:
            assert await who_am_i(listener.port, context) == b"nobody"
            return
        with pytest.raises(ssl.SSLError, match=alert):
            await who_am_i(listener.port, context)
        await wait_until(lambda: listener.refusals.counts[HANDSHAKE] == 1)


async def test_who_is_on_a_list_of_the_ca_file_is_not_let_in_any_more(tmp_path: Path) -> None:
    certificate, key, ca = authorities(tmp_path)
    kept = make_client_certificate(tmp_path / "kept", ca, "/CN=kept")
    gone = make_client_certificate(tmp_path / "gone", ca, "/CN=gone")
    tls = ServerTls(TlsFiles(certificate, key, make_revocations(tmp_path, ca), ClientAuth.OPTIONAL))
    async with serving(tls, handler=say_subject) as listener:
        assert b"CN=gone" in await who_am_i(listener.port, showing(certificate, gone))
        make_revocations(tmp_path, ca, gone[0])
        tls.reload()
        assert b"CN=kept" in await who_am_i(listener.port, showing(certificate, kept))
        with pytest.raises(ssl.SSLError, match=REVOKED):
            await who_am_i(listener.port, showing(certificate, gone))


def test_it_is_known_when_certificate_and_revocation_list_run_out(tmp_path: Path) -> None:
    certificate, key = make_certificate(tmp_path)
    revocations = make_revocations(tmp_path, (certificate, key))

    def told(*command: str) -> float:
        shown = subprocess.run(["openssl", *command], check=True, capture_output=True, text=True).stdout
        return (
            datetime.strptime(shown.strip().partition("=")[2], "%b %d %H:%M:%S %Y GMT").replace(tzinfo=UTC).timestamp()
        )

    assert ServerTls(TlsFiles(certificate, key, revocations)).expiries == {
        "certificate": told("x509", "-enddate", "-noout", "-in", str(certificate)),
        "revocation_list": told("crl", "-nextupdate", "-noout", "-in", str(revocations)),
    }
    assert ServerTls(TlsFiles(certificate, key, certificate)).expiries.keys() == {"certificate"}


async def test_the_ca_is_reloaded_with_the_certificate_and_sessions_of_the_old_one_do_not_help(tmp_path: Path) -> None:
    certificate, key, ca = authorities(tmp_path)
    own = make_client_certificate(tmp_path, ca, "/CN=router")
    tls = ServerTls(TlsFiles(certificate, key, ca[0], ClientAuth.REQUIRED))
    async with serving(tls, handler=say_subject) as listener:
        context = showing(certificate, own)
        assert b"CN=router" in await who_am_i(listener.port, context)
        ca[0].write_text(make_certificate(tmp_path / "new", "ca")[0].read_text())
        tls.reload()
        with pytest.raises(ssl.SSLError, match=UNKNOWN_CA):
            await who_am_i(listener.port, context)
        ca[0].write_text("no certificate")
        with pytest.raises(StartupError, match="cannot vouch for clients"):
            tls.reload()


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
