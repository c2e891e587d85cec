"""A random model on disk, and servers of it in processes of their own."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.certificates import make_certificate
from tests.e2e.server_process import ServerProcess, ready_server, start_server

MODEL = "small"  # a directory's name is its model's
API_KEY = "sk-e2e-key"


@pytest.fixture(scope="session")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.e2e.small_models import save_small_model

    return save_small_model(tmp_path_factory.mktemp("models") / MODEL)


@pytest.fixture(scope="session")
def server_process(small_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """One server for all tests that leave it as they found it."""
    with ready_server(tmp_path_factory.mktemp("server"), small_model, "--h2c-upgrade") as server:
        yield server


@pytest.fixture
def server(server_process: ServerProcess) -> Iterator[ServerProcess]:
    """The shared server, still serving and quiet after the test."""
    yield server_process
    server_process.wait_quiet()


@pytest.fixture(scope="session")
def strict_process(small_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    counts = ("--max-queue", "2", "--max-connections", "8", "--max-body", "16KiB")
    times = ("--head-timeout", "500ms", "--body-timeout", "500ms", "--idle-timeout", "1s", "--stall-timeout", "500ms")
    flags = ("--api-key", API_KEY, *counts, *times)
    with ready_server(tmp_path_factory.mktemp("strict"), small_model, *flags) as server:
        yield server


@pytest.fixture
def strict_server(strict_process: ServerProcess) -> Iterator[ServerProcess]:
    """A server with a key, small limits and short timeouts, quiet after the test."""
    yield strict_process
    strict_process.wait_quiet(API_KEY)


@pytest.fixture(scope="session")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server of the embedded model."""
    with ready_server(tmp_path_factory.mktemp("demo"), None) as server:
        yield server


@pytest.fixture(scope="session")
def tls_server(small_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ServerProcess, Path]]:
    """One over TLS, and its certificate; for tests that leave it as they found it."""
    directory = tmp_path_factory.mktemp("tls")
    certificate, key = make_certificate(directory)
    flags = ("--tls-cert", str(certificate), "--tls-key", str(key))
    with ready_server(directory / "server", small_model, *flags) as server:
        yield server, certificate


@pytest.fixture
def spawn(small_model: Path, tmp_path: Path) -> Iterator[Callable[..., ServerProcess]]:
    """Starts servers that a test may end as it likes; what is left of them is killed."""
    started: list[ServerProcess] = []

    def start(*flags: str, model: Path | None = small_model) -> ServerProcess:
        started.append(start_server(tmp_path / f"server{len(started)}", model, *flags))
        return started[-1]

    yield start
    for server in started:
        server.kill()
