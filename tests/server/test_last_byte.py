"""A request is over when its last byte is out, or can never be: its access line comes then, once, whatever happens."""

from collections.abc import Callable

import pytest

from tests.server.fakes import MemoryTransport
from tests.server.raw_http2 import (
    INITIAL_WINDOW,
    PREFACE,
    get,
    rst,
    settings,
    window_update,
    wire,
)
from tests.server.simulated_server import STREAM, SimulatedServer, chat, request

MUCH = 2**20
ENDS: dict[str, Callable[[MemoryTransport], None]] = {
    "the client's window opens": lambda transport: transport.feed(wire([window_update(MUCH, stream=1)])),
    "the client resets the stream": lambda transport: transport.feed(wire([rst()])),
    "the client leaves": lambda transport: transport.feed_eof(),
    "the connection breaks": lambda transport: transport.reset(),
}


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "server.access"]


@pytest.mark.parametrize("end", ENDS)
def test_answer_behind_a_shut_window_is_over_when_it_opens_or_the_client_goes(
    end: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "server.access")
    server = SimulatedServer()
    transport = server.send(PREFACE + wire([settings((INITIAL_WINDOW, 0)), get(b"/v1/models")]))
    server.run_for(2)
    assert lines(caplog) == []
    ENDS[end](transport)
    server.run_for(0)
    (line,) = lines(caplog)
    assert line.startswith("GET /v1/models 200 2000.0ms")
    assert line.endswith("stages=last_flush:2000.00")
    server.close()
    assert len(lines(caplog)) == 1


@pytest.mark.parametrize("data", [request("GET", "/health"), chat(), chat(**STREAM)])
@pytest.mark.parametrize("leave", [MemoryTransport.feed_eof, MemoryTransport.reset])
def test_client_that_leaves_at_any_step_has_one_line(
    data: bytes, leave: Callable[[MemoryTransport], None], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "server.access")
    for num_steps in range(8):
        caplog.clear()
        server = SimulatedServer()
        transport = server.send(data)
        for _ in range(num_steps):
            server.step()
        leave(transport)
        server.close()
        assert len(lines(caplog)) == 1, num_steps
