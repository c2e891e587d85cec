"""Self-signed certificates, made by openssl: none lies in the repository."""

import shutil
import subprocess
from pathlib import Path

import pytest

needs_openssl = pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl: apt-get install openssl")


def make_certificate(directory: Path, name: str = "localhost") -> tuple[Path, Path]:
    """Write a certificate for `name` and 127.0.0.1, and its key; both are replaced where they exist."""
    directory.mkdir(parents=True, exist_ok=True)
    certificate, key = directory / "certificate.pem", directory / "key.pem"
    command = ["openssl", "req", "-x509", "-nodes", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"]
    command += ["-days", "2", "-subj", f"/CN={name}", "-addext", f"subjectAltName=DNS:{name},IP:127.0.0.1"]
    command += ["-out", str(certificate), "-keyout", str(key)]
    subprocess.run(command, check=True, capture_output=True)
    return certificate, key


def make_client_certificate(directory: Path, ca: tuple[Path, Path], subject: str, *names: str) -> tuple[Path, Path]:
    """Write a client's certificate that the CA (its certificate and key) has signed, and its key.

    Args:
        subject: as openssl takes it: "/O=Example/CN=router".
        names: as subjectAltName takes them: "URI:spiffe://example/router".
    """
    directory.mkdir(parents=True, exist_ok=True)
    certificate, key = directory / "client.pem", directory / "client-key.pem"
    command = ["openssl", "req", "-x509", "-nodes", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"]
    command += ["-days", "2", "-subj", subject, "-CA", str(ca[0]), "-CAkey", str(ca[1])]
    command += ["-addext", "basicConstraints=critical,CA:FALSE"]
    command += ["-addext", f"subjectAltName={','.join(names)}"] if names else []
    subprocess.run([*command, "-out", str(certificate), "-keyout", str(key)], check=True, capture_output=True)
    return certificate, key


def make_revocations(directory: Path, ca: tuple[Path, Path], *revoked: Path) -> Path:
    """Write the CA's certificate and the list of those certificates of its own that it has revoked, in one file."""
    database, settings, found = directory / "index.txt", directory / "ca.conf", directory / "revoked.pem"
    database.write_text("")
    settings.write_text(f"[ca]\ndefault_ca=own\n[own]\ndatabase={database}\ndefault_md=sha256\ndefault_crl_days=2\n")
    command = ["openssl", "ca", "-config", str(settings), "-cert", str(ca[0]), "-keyfile", str(ca[1])]
    for certificate in revoked:
        subprocess.run([*command, "-revoke", str(certificate)], check=True, capture_output=True)
    subprocess.run([*command, "-gencrl", "-out", str(found)], check=True, capture_output=True)
    found.write_bytes(ca[0].read_bytes() + found.read_bytes())
    return found
