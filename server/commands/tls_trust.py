"""The server certificates that `steploop chat` and `steploop bench serve` trust. Thread: main."""

import argparse
import ssl
from pathlib import Path
from urllib.parse import urlsplit

from core.errors import ExitCode, StartupError
from server.values import with_scheme


def add_trust_flags(parser: argparse.ArgumentParser) -> None:
    trust = parser.add_mutually_exclusive_group()
    trust.add_argument(
        "--cacert",
        dest="ca_file",
        type=Path,
        metavar="FILE",
        help="with https: PEM file of trusted certificate authorities",
    )
    trust.add_argument("--insecure", dest="takes_any", action="store_true", help="with https: accept any certificate")


def check_trust_flags(arguments: argparse.Namespace) -> None:
    """Raises StartupError: --url is not https."""
    is_tls = arguments.url is not None and urlsplit(with_scheme(arguments.url)).scheme == "https"
    if not is_tls and (arguments.ca_file is not None or arguments.takes_any):
        flag = "--insecure" if arguments.takes_any else "--cacert"
        raise StartupError(f"{flag} is for https, and --url is not https", "--url https://HOST:PORT", ExitCode.USAGE)


def client_context(ca_file: Path | None = None, is_verified: bool = True) -> ssl.SSLContext:
    """
    Args:
        ca_file: certificate authorities, PEM; None: those that the system trusts.
        is_verified: False: take any certificate.

    Raises:
        StartupError: the file has no certificate.
    """
    try:
        context = ssl.create_default_context(cafile=ca_file)
    except OSError as error:
        cause = f"--cacert {ca_file} cannot be used: {error}"
        raise StartupError(cause, "give a file of certificates in PEM", ExitCode.USAGE) from error
    context.set_alpn_protocols(["http/1.1"])
    if not is_verified:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


def refused_certificate(url: str, error: ssl.SSLCertVerificationError | str) -> StartupError:
    """The error for a server whose certificate is not trusted."""
    reason = error if isinstance(error, str) else error.verify_message
    fix = "--cacert FILE, with the certificate of its authority, or --insecure to accept any"
    return StartupError(f"{url} has a certificate that is not trusted: {reason}", fix, ExitCode.UNREACHABLE)
