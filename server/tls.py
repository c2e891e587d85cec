"""The certificate, and the TLS it is served with. Thread: loop.

TLS 1.2 with forward secrecy and authenticated ciphers only (RFC 9113 §9.2.2 lists the others), and TLS 1.3.
"""

import ssl
from pathlib import Path

from core.errors import ExitCode, StartupError

HANDSHAKE_S = 5.0
ALPN = ("h2", "http/1.1")

_CIPHERS = "ECDHE+AESGCM:ECDHE+CHACHA20"  # of TLS 1.2; those of 1.3 are all fit


class ServerTls:
    """A certificate that can be replaced while connections live on the old one.

    Args:
        certificate: PEM, with its chain.
        key: PEM; None: it stands in the certificate's file.
    """

    def __init__(self, certificate: Path, key: Path | None) -> None:
        """
        Raises:
            StartupError: the files are no certificate and its key.
        """
        self._certificate = certificate
        self._key = key
        self.context = self._load()

    def reload(self) -> None:
        """Serve new connections with what the files hold now. Those that are open keep what they have.

        Raises:
            StartupError: the files are not fit; nothing has changed.
        """
        self._load()
        self.context.load_cert_chain(self._certificate, self._key, password=_no_password)

    def _load(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_ciphers(_CIPHERS)
        context.options |= ssl.OP_NO_RENEGOTIATION | ssl.OP_NO_COMPRESSION
        context.set_alpn_protocols(list(ALPN))
        try:
            context.load_cert_chain(self._certificate, self._key, password=_no_password)
        except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
            raise self._refusal(error) from error
        return context

    def _refusal(self, error: OSError | ValueError) -> StartupError:
        files = f"{self._certificate}" if self._key is None else f"{self._certificate} and {self._key}"
        reason = (isinstance(error, OSError) and (getattr(error, "reason", None) or error.strerror)) or str(error)
        return StartupError(
            f"{files} cannot be served with: {reason}",
            "--tls-cert with the certificate and its chain, --tls-key with its key, not encrypted, in PEM",
            ExitCode.CONFIGURATION,
        )


def server_tls(certificate: Path | None, key: Path | None) -> ServerTls | None:
    """TLS as it is configured; None: in the clear.

    Raises:
        StartupError: the files are not fit, or there is a key alone.
    """
    if certificate is not None:
        return ServerTls(certificate, key)
    if key is not None:
        raise StartupError(f"{key} has no certificate to go with it", "--tls-cert FILE", ExitCode.CONFIGURATION)
    return None


def _no_password() -> str:
    """Instead of a question on the terminal."""
    raise ValueError("the key is encrypted")
