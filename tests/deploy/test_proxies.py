"""nginx and haproxy in front of a real server, as the examples have them, asked over TLS by HTTP/2."""

import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from core.errors import ExitCode
from tests.certificates import needs_openssl
from tests.deploy.conftest import Gate, Simulate
from tests.deploy.proxies import Proxy, running_proxy
from tests.e2e.polling import wait_for
from tests.e2e.server_process import ServerProcess

STREAM = {"model": "small", "prompt": "hi", "stream": True, "max_tokens": 5000, "ignore_eos": True}
TIMEOUT_S = 60.0
PROXIES = [
    pytest.param(name, marks=pytest.mark.skipif(shutil.which(name) is None, reason=f"needs {name}: apt-get install"))
    for name in ("nginx", "haproxy")
]
pytestmark = needs_openssl


@pytest.fixture
def gate(gates: Path) -> Gate:
    return Gate(gates / "step")


@pytest.fixture
def server(gate: Gate, simulate: Simulate) -> ServerProcess:
    """One whose steps are counted out."""
    server = simulate()
    server.wait_ready()
    return server


@pytest.fixture(params=PROXIES)
def proxy(request: pytest.FixtureRequest, server: ServerProcess, tmp_path: Path) -> Iterator[Proxy]:
    with running_proxy(request.param, tmp_path / "proxy", server.port) as proxy:
        wait_for(lambda: httpx.get(f"{proxy.url}/ready", verify=proxy.trust).status_code == 200, lambda: "the proxy")
        yield proxy


@pytest.fixture
def client(proxy: Proxy) -> Iterator[httpx.Client]:
    with httpx.Client(http1=False, http2=True, verify=proxy.trust, timeout=TIMEOUT_S, base_url=proxy.url) as client:
        yield client


def test_events_pass_while_the_next_are_not_yet_computed(client: httpx.Client, gate: Gate) -> None:
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


def test_client_that_leaves_is_cancelled(client: httpx.Client, gate: Gate, server: ServerProcess) -> None:
    with gate.opened() as permit:
        permit(8)
        with client.stream("POST", "/v1/completions", json=STREAM) as response:
            next(response.iter_lines())
            client.close()  # the connection: httpx resets no stream of HTTP/2 whose response is closed
        server.wait_metric("steploop_disconnects_total", 1)
    server.wait_metric("vllm:num_requests_running", 0)
    assert server.metrics()["vllm:generation_tokens_total"] < 20, "the engine had leave to compute all 5000"


def test_drain_lets_streams_end_and_says_503_to_others(
    proxy: Proxy, client: httpx.Client, gate: Gate, server: ServerProcess
) -> None:
    with gate.opened() as permit:
        permit(8)
        with client.stream("POST", "/v1/completions", json=STREAM | {"max_tokens": 24}) as response:
            lines = response.iter_lines()
            next(lines)
            server.send_signal(signal.SIGTERM)
            server.wait_log("shutting down")
            late = httpx.post(f"{proxy.url}/v1/completions", json=STREAM, verify=proxy.trust, timeout=TIMEOUT_S)
            assert late.status_code == 503
            permit(16)
            assert [line for line in lines if line][-1] == "data: [DONE]"
    assert server.wait_exit() == ExitCode.OK
    assert httpx.get(f"{proxy.url}/ready", verify=proxy.trust).status_code in (502, 503)
