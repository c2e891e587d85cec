"""The certificate, the TLS it is served with, and what clients' certificates say. Thread: loop.

TLS 1.2 with forward secrecy and authenticated ciphers only (RFC 9113 §9.2.2 lists the others), and TLS 1.3.
"""

import base64
import contextlib
import enum
import logging
import re
import ssl
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from core.errors import ExitCode, StartupError
from server.wire.peer import ClientCertificate

logger = logging.getLogger(__name__)

ALPN = ("h2", "http/1.1")
REFUSED_ALERT = bytes((21, 3, 3, 0, 2, 2, 80))  # RFC 8446 §5.1, §6: fatal internal_error, to who gets no handshake

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


_SEQUENCE = 0x30
_TIME_FORMATS = {0x17: "%y%m%d%H%M%SZ", 0x18: "%Y%m%d%H%M%SZ"}  # UTCTime, GeneralizedTime


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


class _TellingHandshake(ssl.SSLObject):
    """TLS whose peer is told why the handshake has failed (RFC 8446 §6.2).

    asyncio and uvloop drop, with the connection, the alert that OpenSSL has written. They send it if the handshake goes
    on to them: then it fails with what the peer says next, its end or the deadline.
    """

    _failure: ssl.SSLError | None = None

    def do_handshake(self) -> None:
        if self._failure is not None:
            raise self._failure
        try:
            super().do_handshake()
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise
        except ssl.SSLError as error:
            logger.debug("a TLS handshake has failed: %s", error)
            self._failure = error
            raise ssl.SSLWantReadError from error


class ServerTls:
    """A certificate that can be replaced while connections live on the old one.

    Attributes:
        context: for connections to come.
        expiries: in unix time, of "certificate" and "revocation_list": the first that comes.
    """

    def __init__(self, files: TlsFiles) -> None:
        """
        Raises:
            StartupError: the files are no certificate and its key, or no CA.
        """
        self.files = files
        self.expiries: dict[str, float] = {}
        self.context = self._load()

    @property
    def needs_certificate(self) -> bool:
        """Nobody is served who shows none."""
        return self.files.client_ca is not None and self.files.client_auth is ClientAuth.REQUIRED

    def reload(self) -> None:
        """Serve new connections with what the files hold now. Those that are open keep what they have.

        Sessions of the old context cannot be resumed: a CA that is gone vouches for nobody any more.

        Raises:
            StartupError: the files are not fit; nothing has changed.
        """
        self.context = self._load()

    def _load(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_ciphers(_CIPHERS)
        context.options |= ssl.OP_NO_RENEGOTIATION | ssl.OP_NO_COMPRESSION
        context.set_alpn_protocols(list(ALPN))
        context.sslobject_class = _TellingHandshake
        try:
            context.load_cert_chain(self.files.certificate, self.files.key, password=_no_password)
        except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
            raise _certificate_refusal(self.files, error) from error
        if self.files.client_ca is not None:
            _ask_for_certificates(context, self.files.client_ca, self.files.client_auth)
        ends = {
            "certificate": _expiries(self.files.certificate, b"CERTIFICATE"),
            "revocation_list": () if self.files.client_ca is None else _expiries(self.files.client_ca, b"X509 CRL"),
        }
        self.expiries = {what: min(found) for what, found in ends.items() if found}
        return context


def _ask_for_certificates(context: ssl.SSLContext, client_ca: Path, client_auth: ClientAuth) -> None:
    try:
        context.load_verify_locations(client_ca)
    except (OSError, ValueError) as error:
        raise StartupError(
            f"{client_ca} cannot vouch for clients: {_reason(error)}",
            "--tls-client-ca with the certificates of those who sign clients' certificates, in PEM",
            ExitCode.CONFIGURATION,
        ) from error
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # whoever is in the file is trusted, root or not
    if context.cert_store_stats()["crl"]:  # OpenSSL reads the file's lists, and asks none of them unless told to
        context.verify_flags |= ssl.VERIFY_CRL_CHECK_LEAF
    context.verify_mode = ssl.CERT_REQUIRED if client_auth is ClientAuth.REQUIRED else ssl.CERT_OPTIONAL


def _expiries(path: Path, label: bytes) -> list[float]:
    """In unix time, of what OpenSSL has read from a PEM file: notAfter of certificates, nextUpdate of CRLs."""
    blocks = re.findall(b"-----BEGIN %b-----(.*?)-----END" % label, path.read_bytes(), re.DOTALL)
    found = []
    for block in blocks:
        with contextlib.suppress(ValueError, IndexError, StopIteration):  # OpenSSL reads more than we do
            found.append(_expiry(base64.b64decode(block)))
    return [end_s for end_s in found if end_s is not None]


def _expiry(der: bytes) -> float | None:
    """RFC 5280 §4.1, §5.1: the second time in what is signed; a certificate's stand in a SEQUENCE of their own."""
    signed = list(_elements(_first(_first(der))))
    times = [one for one in signed if one[0] in _TIME_FORMATS]
    for tag, content in signed:
        if not times and tag == _SEQUENCE and content[:1] and content[0] in _TIME_FORMATS:
            times = list(_elements(content))
    if len(times) < 2:
        return None  # a CRL need not say when the next one comes
    tag, content = times[1]
    return datetime.strptime(content.decode("ascii"), _TIME_FORMATS[tag]).replace(tzinfo=UTC).timestamp()


def _elements(der: bytes) -> Iterator[tuple[int, bytes]]:
    """Tags and contents, one after another."""
    start = 0
    while start < len(der):
        tag, length = der[start], der[start + 1]
        start += 2
        if length & 0x80:  # so many bytes say how long it is
            num_bytes = length & 0x7F
            length = int.from_bytes(der[start : start + num_bytes])
            start += num_bytes
        yield tag, der[start : start + length]
        start += length


def _first(der: bytes) -> bytes:
    return next(_elements(der))[1]


def _certificate_refusal(files: TlsFiles, error: OSError | ValueError) -> StartupError:
    if files.key is None and isinstance(error, ssl.SSLError) and _KEY not in files.certificate.read_bytes():
        return StartupError(f"there is no key in {files.certificate}", "--tls-key FILE", ExitCode.CONFIGURATION)
    names = f"{files.certificate}" if files.key is None else f"{files.certificate} and {files.key}"
    return StartupError(
        f"{names} cannot be served with: {_reason(error)}",
        "--tls-cert with the certificate and its chain, --tls-key with its key, not encrypted, in PEM",
        ExitCode.CONFIGURATION,
    )


def _reason(error: OSError | ValueError) -> str:
    found = isinstance(error, OSError) and (getattr(error, "reason", None) or error.strerror)
    return str(found or error)


def server_tls(
    certificate: Path | None, key: Path | None, client_ca: Path | None = None, client_auth: str | None = None
) -> ServerTls | None:
    """TLS as it is configured; None: in the clear. With a CA alone, clients' certificates are required.

    Raises:
        StartupError: the files are not fit, or one of them stands alone.
    """
    if client_auth is not None and client_ca is None:
        raise StartupError(
            f"--tls-client-auth {client_auth} has no CA to judge clients' certificates by",
            "--tls-client-ca FILE",
            ExitCode.CONFIGURATION,
        )
    if certificate is not None:
        return ServerTls(TlsFiles(certificate, key, client_ca, ClientAuth(client_auth or ClientAuth.REQUIRED)))
    for file in (key, client_ca):
        if file is not None:
            cause = f"{file} has no certificate to go with it"
            raise StartupError(cause, "--tls-cert FILE", ExitCode.CONFIGURATION)
    return None


def client_certificate(found: Mapping[str, Any] | None) -> ClientCertificate | None:
    """What getpeercert() has of a client; None: it showed none, or was not asked."""
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


def _no_password() -> str:
    """Instead of a question on the terminal."""
    raise ValueError("the key is encrypted")
