"""What tests of connections in memory are given."""

from collections.abc import Callable, Iterator

import pytest

from server.wire.connection_limits import ConnectionLimits
from server.wire.stream import HttpStream
from tests.server.fakes import MemoryServer
from tests.server.memory_connection import Serve


@pytest.fixture
def serve() -> Iterator[Serve]:
    servers: list[MemoryServer] = []

    def start(handler: Callable[[HttpStream], object], limits: ConnectionLimits | None = None) -> MemoryServer:
        servers.append(MemoryServer(handler, limits))  # type: ignore[arg-type] # any handler, also a failing one
        return servers[-1]

    yield start
    for server in servers:
        server.close()
