"""The examples for nginx, haproxy and Envoy, run as they are: only addresses and files are put in their place."""

import os
import re
import shutil
import signal
import socket
import ssl
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tests.e2e.polling import wait_for

DEPLOY = Path(__file__).parents[2] / "deploy"


@dataclass
class Proxy:
    """What stands in front of a server."""

    port: int
    trust: ssl.SSLContext

    @property
    def url(self) -> str:
        return f"https://localhost:{self.port}"


def find(program: str) -> str | None:
    """Where it is, also where the path of a user does not lead."""
    return shutil.which(program, path=f"{os.environ['PATH']}:/usr/sbin:{Path(sys.executable).parent}")


@contextmanager
def running_proxy(name: str, directory: Path, server_port: int, agent_port: int) -> Iterator[Proxy]:
    """Start nginx, haproxy or Envoy with an example, and end it.

    Args:
        name: of the example.
        directory: has the certificate and its key, as make_certificate() writes them.
        server_port, agent_port: that the example is to ask.
    """
    port = _free_port()
    others = {"nginx.conf": _nginx_command, "envoy.yaml": _envoy_command}
    prepare = others.get(name) or partial(_haproxy_command, name, agent_port)
    log = directory / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            prepare(directory, port, server_port), stdout=output, stderr=subprocess.STDOUT, cwd=directory
        )
    try:
        wait_for(lambda: process.poll() is not None or _answers(port), lambda: f"{name}\n{log.read_text()}")
        assert process.poll() is None, log.read_text()
        yield Proxy(port, ssl.create_default_context(cafile=str(directory / "certificate.pem")))
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()


def _nginx_command(directory: Path, port: int, server_port: int) -> list[str]:
    changes = {
        r"127\.0\.0\.1:8000": f"127.0.0.1:{server_port}",
        r"listen 443": f"listen 127.0.0.1:{port}",
        r"/etc/nginx/llm\.pem": f"{directory}/certificate.pem",
        r"/etc/nginx/llm\.key": f"{directory}/key.pem",
    }
    (directory / "site.conf").write_text(_changed(DEPLOY / "nginx.conf", changes))
    paths = "".join(
        f"{kind}_temp_path {directory}/{kind};" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    main = directory / "main.conf"
    main.write_text(
        f"daemon off; worker_processes 1; pid {directory}/pid; error_log stderr;"
        f"events {{}} http {{ access_log off; {paths} include {directory}/site.conf; }}"
    )
    return [find("nginx") or "nginx", "-e", "stderr", "-p", str(directory), "-c", str(main)]


def _envoy_command(directory: Path, port: int, server_port: int) -> list[str]:
    changes = {
        r"port_value: 8000": f"port_value: {server_port}",
        r"address: 0\.0\.0\.0, port_value: 443": f"address: 127.0.0.1, port_value: {port}",
        r"/etc/envoy/llm\.pem": f"{directory}/certificate.pem",
        r"/etc/envoy/llm\.key": f"{directory}/key.pem",
    }
    (directory / "envoy.yaml").write_text(_changed(DEPLOY / "envoy.yaml", changes))
    flags = ["--disable-hot-restart", "--concurrency", "1", "-l", "warning"]
    return [find("envoy") or "envoy", "-c", str(directory / "envoy.yaml"), *flags]


def _haproxy_command(name: str, agent_port: int, directory: Path, port: int, server_port: int) -> list[str]:
    changes = {
        r"127\.0\.0\.1:8000": f"127.0.0.1:{server_port}",
        r"bind :443": f"bind 127.0.0.1:{port}",
        r"/etc/haproxy/llm\.pem": f"{directory}/both.pem",
    }
    if name == "haproxy.cfg":
        changes |= {
            r"agent-port 8001": f"agent-port {agent_port}",
            r"global\n": f"global\n    stats socket {directory}/s\n",
        }
    else:
        del changes[r"/etc/haproxy/llm\.pem"]
    both = directory / "both.pem"
    both.write_text((directory / "certificate.pem").read_text() + (directory / "key.pem").read_text())
    (directory / name).write_text(_changed(DEPLOY / name, changes))
    return [find("haproxy") or "haproxy", "-db", "-f", str(directory / name)]


def _changed(path: Path, changes: dict[str, str]) -> str:
    text = path.read_text()
    for pattern, new in changes.items():
        text, num_changes = re.subn(pattern, new, text)
        assert num_changes, (path, pattern)
    return text


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port: int = sock.getsockname()[1]
        return port


def _answers(port: int) -> bool:
    with socket.socket() as sock:
        return sock.connect_ex(("127.0.0.1", port)) == 0
