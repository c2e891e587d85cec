"""What a streamed token costs the loop, counted and never timed: functions of ours entered, and writes."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from core.plan import RunnerLimits, StepOutput, StepPlan
from core.simulation import SimulatedRunner
from tests.call_counter import CallCounter
from tests.server.fakes import MemoryTransport
from tests.server.http2_client import INITIAL_WINDOW, Http2Client, fields
from tests.server.simulated_server import MODEL, TOKENIZER, VOCAB_SIZE, SimulatedServer, request

NUM_STREAMS = 64
NUM_STEPS = 8  # that are counted
LIMITS = RunnerLimits(
    num_blocks=NUM_STREAMS * 32,
    block_size=4,
    max_sequences=NUM_STREAMS,
    max_batch_tokens=2048,
    max_model_len=128,
    vocab_size=VOCAB_SIZE,
)
TOKEN_ID = TOKENIZER.full_table.token_bytes.index(b"a")
WINDOW = 2**30  # a client that has room for all
COUNTED = ("/server/", "/core/detokenizer.py")


class OneToken(SimulatedRunner):
    """Draws the same id for ever: whole characters, and no end."""

    def collect(self, ticket: StepPlan) -> StepOutput:
        output = super().collect(ticket)
        output.token_ids[:] = TOKEN_ID
        return output


def is_counted(path: str) -> bool:
    return "/tests/" not in path and any(part in path for part in COUNTED)


Start = Callable[[SimulatedServer, dict[str, Any]], list[MemoryTransport]]


def over_http1(server: SimulatedServer, body: dict[str, Any]) -> list[MemoryTransport]:
    """Each stream on a connection of its own."""
    head = ("POST", "/v1/chat/completions")
    return [server.send(request(*head, body)) for _ in range(NUM_STREAMS)]


def over_http2(num_connections: int) -> Start:
    """The streams on so many connections, in equal parts."""

    def start(server: SimulatedServer, body: dict[str, Any]) -> list[MemoryTransport]:
        clients = [Http2Client(server.network, settings={INITIAL_WINDOW: WINDOW}) for _ in range(num_connections)]
        for client in clients:
            client.h2.increment_flow_control_window(WINDOW)
            for _ in range(NUM_STREAMS // num_connections):
                client.begin(fields(method="POST", path="/v1/chat/completions"), json.dumps(body).encode())
            client.exchange()
        return [client.transport for client in clients]

    return start


@dataclass
class Cost:
    """Of each token, and of each step of NUM_STREAMS tokens."""

    calls_per_token: float
    writes_per_step: float
    slices_per_step: float


def measure(start: Start, surface: dict[str, Any]) -> Cost:
    """Of steps in the midst of all streams."""
    server = SimulatedServer(limits=LIMITS, runner=OneToken)
    transports = start(server, {"model": MODEL, "stream": True, "max_tokens": 4 * NUM_STEPS} | surface)
    while server.stats.num_generated_tokens < NUM_STEPS * NUM_STREAMS:
        server.step()
    num_tokens = server.stats.num_generated_tokens
    num_writes = sum(len(transport.writes) for transport in transports)
    with CallCounter(is_counted) as counter:
        for _ in range(NUM_STEPS):
            server.step()
    assert server.stats.num_generated_tokens - num_tokens == NUM_STEPS * NUM_STREAMS
    num_writes = sum(len(transport.writes) for transport in transports) - num_writes
    server.close()
    return Cost(
        calls_per_token=counter.calls.total() / (NUM_STEPS * NUM_STREAMS),
        writes_per_step=num_writes / NUM_STEPS,
        slices_per_step=counter.calls["EngineClient._deliver_slice"] / NUM_STEPS,
    )


CHAT = {"messages": [{"role": "user", "content": "step"}]}


@pytest.mark.parametrize(
    ("start", "surface", "calls_per_token", "writes_per_step", "slices_per_step"),
    [
        pytest.param(over_http1, CHAT, 1.5, 64, 4, id="HTTP/1.1"),
        pytest.param(over_http2(1), CHAT, 1.5, 1, 1, id="HTTP/2"),
        pytest.param(over_http2(1), CHAT | {"stop": ["xx", "\n"]}, 1.5, 1, 1, id="HTTP/2, stop strings"),
        pytest.param(over_http2(8), CHAT, 3.1, 8, 1, id="HTTP/2, 8 connections"),
    ],
)
def test_token_costs_so_many_calls_and_a_step_so_many_writes_and_slices(
    start: Start, surface: dict[str, Any], calls_per_token: float, writes_per_step: int, slices_per_step: int
) -> None:
    """Before raising a bound: hoist what is new out of the token's path, into the slice's or the step's."""
    cost = measure(start, surface)
    assert cost.calls_per_token <= calls_per_token
    assert cost.writes_per_step == writes_per_step
    assert cost.slices_per_step == slices_per_step
