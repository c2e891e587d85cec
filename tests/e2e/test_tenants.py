"""Tenants as their operator and their clients meet them: the command line, a real server, reloads, certificates."""

import signal
import ssl
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import httpx

from core.errors import ExitCode
from tests.certificates import make_certificate, make_client_certificate, needs_openssl
from tests.e2e.raw_http import TIMEOUT_S, ask
from tests.e2e.server_process import REPOSITORY, ServerProcess

TENANTS = """
[[tenants]]
name = "acme"
[[tenants]]
name = "other"
"""


def keys(config: Path, *words: str) -> str:
    """What `steploop keys` prints."""
    command = [sys.executable, "-m", "server", "keys", *words, "--config", str(config)]
    return subprocess.run(command, cwd=REPOSITORY, check=True, capture_output=True, text=True).stdout.strip()


def write_config(directory: Path, *settings: str) -> Path:
    path = directory / "steploop.toml"
    path.write_text("\n".join([f'keys_file = "{directory}/keys.json"', *settings, TENANTS]))
    return path


def test_keys_come_and_go_while_the_server_runs(spawn: Callable[..., ServerProcess], tmp_path: Path) -> None:
    config = write_config(tmp_path)
    first = keys(config, "create", "--tenant", "acme", "--label", "ci")
    server = spawn("--config", str(config))
    server.wait_ready()

    def status(key: str, path: str = "/v1/models") -> int:
        return ask(server.port, "GET", path, api_key=key).status

    assert (status(first), status("sl-no"), status(first, "/metrics")) == (200, 401, 403)
    second = keys(config, "create", "--tenant", "other", "--scope", "admin")
    assert status(second, "/metrics") == 401  # not yet
    keys(config, "revoke", first)
    server.send_signal(signal.SIGHUP)
    server.wait_log("reloaded: tenants=2 keys=2")
    assert (status(first), status(second), status(second, "/metrics")) == (401, 403, 200)
    listing = keys(config, "list")
    config.write_text(config.read_text().replace('name = "other"', 'name = "other"\nlimits = "none"'))
    server.send_signal(signal.SIGHUP)
    server.wait_log("the reload failed; everything but revocations stays as it was: [[tenants]] number 2, 'other',")
    assert (status(first), status(second, "/metrics")) == (401, 200)
    assert "revoked" in listing
    assert "ci" in listing
    for key in (first, second):
        assert key[:11] in listing
        assert key[11:] not in listing + server.log + (tmp_path / "keys.json").read_text()


@needs_openssl
def test_a_client_certificate_names_its_tenant(spawn: Callable[..., ServerProcess], tmp_path: Path) -> None:
    certificate, key = make_certificate(tmp_path / "tls")
    clients = [
        make_client_certificate(tmp_path / name, (certificate, key), f"/CN={name}", f"DNS:{name}.example")
        for name in ("acme", "stranger")
    ]
    (tmp_path / "keys.json").write_text('{"version": 1, "keys": []}')
    config = write_config(
        tmp_path, f'tls_cert = "{certificate}"', f'tls_key = "{key}"', f'tls_client_ca = "{certificate}"'
    )
    config.write_text(config.read_text().replace('"acme"', '"acme"\ncertificates = ["DNS:acme.example"]'))
    server = spawn("--config", str(config))
    server.wait_ready()
    statuses = []
    for files in clients:
        context = ssl.create_default_context(cafile=str(certificate))
        context.load_cert_chain(*files)
        with httpx.Client(http2=True, verify=context, timeout=TIMEOUT_S) as client:
            statuses.append(client.get(f"https://localhost:{server.port}/v1/models").status_code)
    assert statuses == [200, 401]
    server.wait_log("tenant=acme")


def test_a_keys_file_that_is_not_there_is_told_at_start(spawn: Callable[..., ServerProcess], tmp_path: Path) -> None:
    server = spawn("--keys-file", str(tmp_path / "keys.json"))
    assert server.wait_exit() == ExitCode.CONFIGURATION
    assert f"fix: steploop keys create --keys-file {tmp_path}/keys.json" in server.log
    assert "Traceback" not in server.log
