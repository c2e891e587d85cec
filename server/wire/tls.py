"""TLS: the server's certificate, the handshake, and clients' certificates. Thread: loop.

TLS 1.2 with forward secrecy and authenticated ciphers only (RFC 9113 §9.2.2 lists the others), and TLS 1.3. The
handshake takes two steps, and not the loop's one call for both, so that the transport below TLS is known: by default
it buffers 64 KiB, which the transport above does not count, before it reports a peer that does not read.
"""

import asyncio
import contextlib
import enum
import errno
import logging
import re
import socket
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, cast

from core.errors import StartupError
from server.values import readable_fix
from server.wire.messages import ClientCertificate

logger = logging.getLogger(__name__)

ALPN = ("h2", "http/1.1")
REFUSED_ALERT = bytes((21, 3, 3, 0, 2, 2, 80))  # RFC 8446 §5.1, §6: fatal internal_error, for a refused connection

_NO_APPLICATION_PROTOCOL = 120  # RFC 7301 §3.2
_ALPN_EXTENSION = 16  # RFC 7301 §6
_HANDSHAKE_RECORD = 22  # RFC 8446 §5.1
_MAX_HELLO_BYTES = 128 * 1024  # OpenSSL's own limit
_CIPHERS = "ECDHE+AESGCM:ECDHE+CHACHA20"  # of TLS 1.2; those of 1.3 are all fit
_KEY = b"PRIVATE KEY-----"  # ends the first line of any of PEM's keys (RFC 7468 §10, §11 and before them)
# RFC 4514 §3: the names that may stand for their types
_SHORT_NAMES = {
    "commonName": "CN",
    "localityName": "L",
    "stateOrProvinceName": "ST",
    "organizationName": "O",
    "organizationalUnitName": "OU",
    "countryName": "C",
    "streetAddress": "STREET",
    "domainComponent": "DC",
    "userId": "UID",
}


class ClientAuth(enum.StrEnum):
    """Whether a client must show a certificate."""

    OPTIONAL = "optional"
    REQUIRED = "required"


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """
    Args:
        certificate: PEM, with its chain.
        key: PEM; None: it stands in the certificate's file.
        client_ca: PEM: who vouches for clients' certificates; None: they are not asked for any.
    """

    certificate: Path
    key: Path | None = None
    client_ca: Path | None = None
    client_auth: ClientAuth = ClientAuth.REQUIRED


class _ServerContext(ssl.SSLContext):
    """Shows a handshake its client's first bytes."""

    def wrap_bio(self, incoming: ssl.MemoryBIO, *args: Any, **named: Any) -> ssl.SSLObject:
        handshake = super().wrap_bio(incoming, *args, **named)
        if isinstance(handshake, _Handshake):
            handshake.incoming = incoming
        return handshake


class _Handshake(ssl.SSLObject):
    """TLS that sends its peer the alert of a failed handshake (RFC 8446 §6.2).

    A client that offers only unknown protocols is refused (RFC 7301 §3.2). OpenSSL would go on without one, and Python
    does not report what was offered: it is parsed from the ClientHello.

    asyncio and uvloop drop the alert that OpenSSL has written together with the connection. They send it if the
    handshake seems to go on; it fails with what the peer sends next, with its end, or at the deadline.
    """

    incoming: ssl.MemoryBIO | None = None  # until the ClientHello is whole
    has_unknown_protocols = False
    _failure: ssl.SSLError | None = None

    def do_handshake(self) -> None:
        if self._failure is not None:
            raise self._failure
        if self.incoming is not None:
            self._read_hello(self.incoming)
        try:
            super().do_handshake()
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise
        except ssl.SSLError as error:
            logger.debug("a TLS handshake has failed: %s", error)
            self._failure = error
            raise ssl.SSLWantReadError from error

    def _read_hello(self, incoming: ssl.MemoryBIO) -> None:
        """Wait until the ClientHello is complete; OpenSSL needs all of it, too."""
        data = incoming.read()
        incoming.write(data)
        try:
            hello = _handshake_message(data)
            if hello is None:
                if len(data) < _MAX_HELLO_BYTES:
                    raise ssl.SSLWantReadError
            else:
                offered = _offered_protocols(hello)
                self.has_unknown_protocols = bool(offered) and not {name.encode() for name in ALPN} & set(offered)
        except IndexError:
            pass  # malformed: OpenSSL reports it
        self.incoming = None


def _refuse_unknown_protocols(handshake: ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> int | None:
    """OpenSSL calls this for every ClientHello, with or without a server name. Returns the alert, if any."""
    is_refused = isinstance(handshake, _Handshake) and handshake.has_unknown_protocols
    return _NO_APPLICATION_PROTOCOL if is_refused else None


def _handshake_message(data: bytes) -> bytes | None:
    """The first handshake message in the records, without its header; None: it is incomplete.

    Raises:
        IndexError: these are no handshake records.
    """
    message, position = bytearray(), 0
    while position + 5 <= len(data):  # RFC 8446 §5.1: type, version, length
        if data[position] != _HANDSHAKE_RECORD:
            raise IndexError
        end = position + 5 + int.from_bytes(data[position + 3 : position + 5], "big")
        message += data[position + 5 : end]
        size = 4 + int.from_bytes(message[1:4], "big")  # RFC 8446 §4: type, length
        if len(message) >= max(size, 4):
            return bytes(message[4:size])
        position = end
    if position < len(data) and data[position] != _HANDSHAKE_RECORD:
        raise IndexError
    return None


def _offered_protocols(hello: bytes) -> list[bytes]:
    """The ALPN names (RFC 7301 §3.1) in a ClientHello (RFC 8446 §4.1.2). Raises IndexError: it is malformed."""
    position = 2 + 32  # version, random
    for num_length_bytes in (1, 2, 1):  # session id, cipher suites, compression methods
        position += num_length_bytes + _number(hello, position, num_length_bytes)
    position += 2
    while position + 4 <= len(hello):
        kind, size = _number(hello, position, 2), _number(hello, position + 2, 2)
        position += 4
        if kind == _ALPN_EXTENSION:
            names, at = [], position + 2
            while at < position + size:
                length = hello[at]
                names.append(hello[at + 1 : at + 1 + length])
                at += 1 + length
            return names
        position += size
    return []


def _number(data: bytes, position: int, num_bytes: int) -> int:
    if position + num_bytes > len(data):
        raise IndexError
    return int.from_bytes(data[position : position + num_bytes], "big")


class ServerTls:
    """A certificate that can be replaced while connections go on with the old one.

    Attributes:
        context: for new connections.
        expiries: of "certificate" and "revocation_list", in unix time: the earliest each.
    """

    def __init__(self, files: TlsFiles) -> None:
        """Raises StartupError: the files are not a certificate and its key, or not a CA."""
        self.files = files
        self.expiries: dict[str, float] = {}
        self.context = self._load()

    @property
    def needs_certificate(self) -> bool:
        """Clients without a certificate are refused."""
        return self.files.client_ca is not None and self.files.client_auth is ClientAuth.REQUIRED

    def reload(self) -> None:
        """Load the files again for new connections.

        Sessions of the old context cannot be resumed: a CA that was removed vouches for nobody any more.

        Raises:
            StartupError: the files cannot be used; nothing has changed.
        """
        self.context = self._load()

    def _load(self) -> ssl.SSLContext:
        context = _ServerContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_ciphers(_CIPHERS)
        context.options |= ssl.OP_NO_RENEGOTIATION | ssl.OP_NO_COMPRESSION
        context.set_alpn_protocols(list(ALPN))
        context.sslobject_class = _Handshake
        context.sni_callback = _refuse_unknown_protocols
        try:
            context.load_cert_chain(self.files.certificate, self.files.key, password=no_password)
        except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
            raise _certificate_refusal(self.files, error) from error
        if self.files.client_ca is not None:
            _ask_for_certificates(context, self.files.client_ca, self.files.client_auth)
        self.expiries = _expiries(self.files)
        return context


def _ask_for_certificates(context: ssl.SSLContext, client_ca: Path, client_auth: ClientAuth) -> None:
    try:
        context.load_verify_locations(client_ca)
    except (OSError, ValueError) as error:
        _check_readable(client_ca)
        raise StartupError(
            f"{client_ca} cannot vouch for clients: {_reason(error)}",
            "--tls-client-ca with the certificates of those who sign clients' certificates, in PEM",
        ) from error
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # every certificate in the file is trusted, root or not
    if context.cert_store_stats()["crl"]:  # OpenSSL loads the file's lists, and ignores them unless told
        context.verify_flags |= ssl.VERIFY_CRL_CHECK_LEAF
    context.verify_mode = ssl.CERT_REQUIRED if client_auth is ClientAuth.REQUIRED else ssl.CERT_OPTIONAL


def _expiries(files: TlsFiles) -> dict[str, float]:
    """See ServerTls. Blocks that OpenSSL accepts and cryptography does not are skipped."""
    from cryptography import x509  # takes 60 ms, which only TLS needs

    chain = _pem_blocks(files.certificate, b"CERTIFICATE")
    lists = [] if files.client_ca is None else _pem_blocks(files.client_ca, b"X509 CRL")
    ends: dict[str, list[datetime | None]] = {"certificate": [], "revocation_list": []}
    for block in chain:
        with contextlib.suppress(ValueError):
            ends["certificate"].append(x509.load_pem_x509_certificate(block).not_valid_after_utc)
    for block in lists:
        with contextlib.suppress(ValueError):
            ends["revocation_list"].append(x509.load_pem_x509_crl(block).next_update_utc)
    found = {what: [end.timestamp() for end in times if end is not None] for what, times in ends.items()}
    return {what: min(times) for what, times in found.items() if times}


def _pem_blocks(path: Path, label: bytes) -> list[bytes]:
    return re.findall(b"-----BEGIN %b-----.*?-----END %b-----" % (label, label), path.read_bytes(), re.DOTALL)


def _certificate_refusal(files: TlsFiles, error: OSError | ValueError) -> StartupError:
    if files.key is None and isinstance(error, ssl.SSLError) and _KEY not in files.certificate.read_bytes():
        return StartupError(f"there is no key in {files.certificate}", "--tls-key FILE")
    _check_readable(files.certificate)
    if files.key is not None:
        _check_readable(files.key)
    names = f"{files.certificate}" if files.key is None else f"{files.certificate} and {files.key}"
    return StartupError(
        f"{names} cannot be served with: {_reason(error)}",
        "--tls-cert with the certificate and its chain, --tls-key with its key, not encrypted, in PEM",
    )


def _check_readable(path: Path) -> None:
    """OpenSSL's errors name no file."""
    try:
        path.open("rb").close()
    except PermissionError as error:
        raise StartupError(f"{path} cannot be read: {error.strerror}", readable_fix(path)) from error
    except OSError:
        return  # the first error is reported


def _reason(error: OSError | ValueError) -> str:
    found = isinstance(error, OSError) and (getattr(error, "reason", None) or error.strerror)
    return str(found or error)


def server_tls(
    certificate: Path | None, key: Path | None, client_ca: Path | None = None, client_auth: str | None = None
) -> ServerTls | None:
    """TLS as configured; None: in the clear. A CA without client_auth requires clients' certificates.

    Raises:
        StartupError: the files cannot be used, or one is given without the other.
    """
    if client_auth is not None and client_ca is None:
        raise StartupError(
            f"--tls-client-auth {client_auth} has no CA to judge clients' certificates by", "--tls-client-ca FILE"
        )
    if certificate is not None:
        return ServerTls(TlsFiles(certificate, key, client_ca, ClientAuth(client_auth or ClientAuth.REQUIRED)))
    for file in (key, client_ca):
        if file is not None:
            cause = f"{file} has no certificate to go with it"
            raise StartupError(cause, "--tls-cert FILE")
    return None


def client_certificate(found: Mapping[str, Any] | None) -> ClientCertificate | None:
    """From getpeercert(); None: the client showed none, or was not asked."""
    if not found:
        return None
    subject = [
        "+".join(f"{_SHORT_NAMES.get(kind, kind)}={_escaped(value)}" for kind, value in pairs)
        for pairs in reversed(found.get("subject", ()))
    ]
    return ClientCertificate(",".join(subject), tuple(found.get("subjectAltName", ())))


def _escaped(value: str) -> str:
    """RFC 4514 §2.4."""
    escaped = re.sub(r'([,+"\\<>;])', r"\\\1", value).replace("\0", "\\00")
    if escaped.startswith(("#", " ")):
        escaped = f"\\{escaped}"
    return f"{escaped[:-1]}\\ " if escaped.endswith(" ") and len(value) > 1 else escaped


def no_password() -> str:
    """OpenSSL would ask on the terminal."""
    raise ValueError("the key is encrypted")


LOWER_UNSENT_BYTES = 4 * 1024  # high mark below TLS; the one above it is the connection's
_NO_LIMIT_S = 1e6  # on the wait for the peer's close_notify: Connection.close has its own


async def start_tls(
    loop: asyncio.AbstractEventLoop, accepted: socket.socket, context: ssl.SSLContext, timeout_s: float
) -> tuple[asyncio.Transport, asyncio.Transport]:
    """The TLS transport, and the one below it. A caller that sets its protocol at once misses nothing.

    Raises:
        OSError: the handshake has failed, or took too long. The connection is closed.
    """
    lower, opening = await loop.connect_accepted_socket(_EarlyBytes, accepted)
    try:
        if lower.is_closing():
            raise ConnectionAbortedError(errno.ECONNABORTED, "the connection ended")
        lower.pause_reading()
        lower.set_write_buffer_limits(high=LOWER_UNSENT_BYTES)
        loop.call_soon(_hand_on, lower, bytes(opening.received))
        upper = await loop.start_tls(
            lower, opening, context, server_side=True, ssl_handshake_timeout=timeout_s, ssl_shutdown_timeout=_NO_LIMIT_S
        )
    except BaseException:
        lower.abort()
        raise
    assert upper is not None
    return upper, lower


class _EarlyBytes(asyncio.Protocol):
    """Keeps what arrives before TLS is set up."""

    def __init__(self) -> None:
        self.received = bytearray()

    def data_received(self, data: bytes) -> None:
        self.received += data


def _hand_on(lower: asyncio.Transport, received: bytes) -> None:
    """Give TLS what arrived before it."""
    if lower.is_closing():
        return
    tls = cast(asyncio.BufferedProtocol, lower.get_protocol())
    while received:
        buffer = cast(memoryview, tls.get_buffer(len(received)))
        size = min(len(buffer), len(received))
        buffer[:size] = received[:size]
        tls.buffer_updated(size)
        received = received[size:]
