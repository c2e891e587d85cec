"""Servers without a model in processes of their own, and gates that hold their engine."""

import os
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.polling import wait_for
from tests.e2e.raw_http import connected, post_bytes
from tests.e2e.server_process import ServerProcess, start_process


class Gate:
    """A FIFO at which an engine stops."""

    def __init__(self, path: Path) -> None:
        os.mkfifo(path)
        self._path = path

    @contextmanager
    def held(self) -> Iterator[Callable[[int], object]]:
        """From when the engine has come to it until it may go on. Gives a function that lets it take so many steps."""
        fd = wait_for(self._open, lambda: f"the engine at {self._path.name}")
        try:
            yield lambda num_steps: os.write(fd, b"." * num_steps)
        finally:
            os.close(fd)

    @contextmanager
    def opened(self) -> Iterator[Callable[[int], object]]:
        """From now on the engine goes as far as the function given lets it; without limit after the end."""
        fd = os.open(self._path, os.O_RDWR)  # which does not wait for the engine
        try:
            yield lambda num_steps: os.write(fd, b"." * num_steps)
        finally:
            os.close(fd)

    def _open(self) -> int | None:
        try:
            return os.open(self._path, os.O_WRONLY | os.O_NONBLOCK)
        except OSError:  # ENXIO: nobody reads
            return None


class Knocking:
    """Clients that ask again and again while within, each time on a new connection.

    Attributes:
        outcomes: statuses, and errors: connections refused, reset or silent, and torn answers.
    """

    def __init__(self, port: int, body: dict[str, Any], num_clients: int = 1) -> None:
        self.outcomes: Counter[int | str] = Counter()
        self._port = port
        self._body = body
        self._is_told_to_end = False
        self._threads = [threading.Thread(target=self._run) for _ in range(num_clients)]

    def _run(self) -> None:
        while not self._is_told_to_end:
            try:
                self.outcomes[self._ask()] += 1
            except Exception as error:
                self.outcomes[repr(error)] += 1

    def _ask(self) -> int:
        with connected(self._port) as client:
            client.send(post_bytes("/v1/completions", self._body, headers=("connection: close",)))
            answer = client.read_answer()
            if answer.status == 200 and self._body.get("stream"):
                assert answer.body.endswith(b"data: [DONE]\n\n"), answer.body[-100:]
            return answer.status

    def __enter__(self) -> "Knocking":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._is_told_to_end = True
        for thread in self._threads:
            thread.join()

    def wait_for_answers(self, num_more: int) -> None:
        num = self.outcomes[200] + num_more
        wait_for(lambda: self.outcomes[200] >= num, lambda: f"answers: {self.outcomes}")


@pytest.fixture
def gates(tmp_path: Path) -> Path:
    directory = tmp_path / "gates"
    directory.mkdir()
    return directory


Simulate = Callable[..., ServerProcess]


@pytest.fixture
def simulate(gates: Path, tmp_path: Path) -> Iterator[Simulate]:
    """Starts servers that a test may end as it likes; what is left of them is killed."""
    started: list[ServerProcess] = []

    def start(
        *flags: str, gates: Path = gates, listening: socket.socket | None = None, **environment: str
    ) -> ServerProcess:
        directory = tmp_path / f"server{len(started)}"
        module = "tests.deploy.simulated_process"
        where = ("--port", "0") if listening is None and "--bind" not in flags else ()
        started.append(
            start_process(directory, module, str(gates), *where, *flags, environment=environment, listening=listening)
        )
        return started[-1]

    yield start
    for server in started:
        server.kill()
