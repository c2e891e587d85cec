"""A restart refuses no connection: its socket outlives the server, as a socket unit's does."""

import signal
import socket
import threading
from collections import Counter
from pathlib import Path

import pytest

from core.errors import ExitCode
from tests.deploy.conftest import Gate, Simulate
from tests.deploy.notify_socket import notify_socket
from tests.e2e.polling import wait_for
from tests.e2e.raw_http import RawClient, connected, post_bytes

STREAM = {"model": "small", "prompt": "hi", "stream": True, "max_tokens": 50, "ignore_eos": True}
NUM_CLIENTS = 4
NUM_RESTARTS = 3


class Client(threading.Thread):
    """Asks without a pause, each time on a connection of its own; what goes wrong is kept."""

    def __init__(self, port: int) -> None:
        super().__init__()
        self.is_told_to_end = False
        self.outcomes: Counter[int | str] = Counter()
        self._port = port

    def run(self) -> None:
        while not self.is_told_to_end:
            try:
                self.outcomes[self._ask()] += 1
            except Exception as error:  # a refused, reset or silent connection, a torn answer: all that must not be
                self.outcomes[repr(error)] += 1

    def _ask(self) -> int:
        with connected(self._port) as client:
            client.send(post_bytes("/v1/completions", STREAM, headers=("connection: close",)))
            answer = client.read_answer()
            assert answer.status != 200 or answer.body.endswith(b"data: [DONE]\n\n"), answer.body[-100:]
            return answer.status


class Load:
    """Clients at work. Gives up none of them."""

    def __init__(self, port: int) -> None:
        self._clients = [Client(port) for _ in range(NUM_CLIENTS)]
        for client in self._clients:
            client.start()

    @property
    def outcomes(self) -> Counter[int | str]:
        return sum((client.outcomes.copy() for client in self._clients), Counter())

    def wait_answers(self, num_more: int) -> None:
        num = self.outcomes[200] + num_more
        wait_for(lambda: self.outcomes[200] >= num, lambda: f"answers: {self.outcomes}")

    def end(self) -> None:
        for client in self._clients:
            client.is_told_to_end = True
        for client in self._clients:
            client.join()


@pytest.mark.slow
def test_every_connection_is_answered_over_restarts_under_load(simulate: Simulate) -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=1024) as listening:
        server = simulate(listening=listening)
        server.wait_ready()
        load = Load(listening.getsockname()[1])
        try:
            for _ in range(NUM_RESTARTS):
                load.wait_answers(20)
                server.send_signal(signal.SIGTERM)
                assert server.wait_exit() == ExitCode.OK, server.log
                server = simulate(listening=listening)
            load.wait_answers(20)
        finally:
            load.end()
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
