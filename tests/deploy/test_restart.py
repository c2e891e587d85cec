"""A restart refuses no connection: its socket outlives the server, as a socket unit's does."""

import signal
import socket
from pathlib import Path

import pytest

from core.errors import ExitCode
from tests.deploy.conftest import Gate, Knocking, Simulate
from tests.deploy.notify_socket import notify_socket
from tests.e2e.raw_http import RawClient, post_bytes

STREAM = {"model": "small", "prompt": "hi", "stream": True, "max_tokens": 50, "ignore_eos": True}
NUM_CLIENTS = 4
NUM_RESTARTS = 3


@pytest.mark.slow
def test_every_connection_is_answered_over_restarts_under_load(simulate: Simulate) -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=1024) as listening:
        server = simulate(listening=listening)
        server.wait_ready()
        with Knocking(listening.getsockname()[1], STREAM, NUM_CLIENTS) as load:
            for _ in range(NUM_RESTARTS):
                load.wait_for_answers(20)
                server.send_signal(signal.SIGTERM)
                assert server.wait_exit() == ExitCode.OK, server.log
                server = simulate(listening=listening)
            load.wait_for_answers(20)
        assert set(load.outcomes) <= {200, 503}, f"{load.outcomes}; 503: while the next one loads"


def test_who_connects_during_a_drain_waits_for_the_next_server(simulate: Simulate, gates: Path, tmp_path: Path) -> None:
    gate = Gate(gates / "step")
    with socket.create_server(("127.0.0.1", 0)) as listening, notify_socket(tmp_path / "notify") as manager:
        port = listening.getsockname()[1]
        first = simulate(listening=listening, NOTIFY_SOCKET=manager.address)
        manager.receive_until("READY")
        streaming = RawClient(port)
        streaming.send(post_bytes("/v1/completions", STREAM))
        with gate.held():
            first.send_signal(signal.SIGTERM)
            manager.receive_until("STOPPING")
            late = RawClient(port)
            late.send(post_bytes("/v1/completions", STREAM))
        assert streaming.read_answer().body.endswith(b"data: [DONE]\n\n")
        assert first.wait_exit() == ExitCode.OK
        second = simulate(listening=listening, NOTIFY_SOCKET=manager.address)
        answer = late.read_answer()
        assert answer.status in (200, 503), "503: it was asked while it loads"
        second.wait_log("POST /v1/completions")  # written once the answer is out
        assert first.log.count("POST /v1/completions") == 1
        streaming.close()
        late.close()
