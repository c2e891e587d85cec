"""Every way in which a generation is called off, over both protocols: one path, and what it held is free at once."""

from collections.abc import Callable
from typing import Any

import pytest
from h2.errors import ErrorCodes

from core.plan import RunnerLimits
from core.types import Cancel, FinishReason
from server.wire.http2_frames import GOAWAY
from tests.server.fakes import MemoryTransport
from tests.server.http2_client import Http2Client, fields
from tests.server.raw_http2 import frame
from tests.server.simulated_server import (
    LIMITS,
    STREAM,
    TOKENIZER,
    SimulatedServer,
    answers,
    chat,
    completion,
    request,
    serving,
)

POST = fields(method="POST", path="/v1/completions")
LONG: dict[str, Any] = {"max_tokens": 100, **STREAM}


class Asked:
    """A completion that was asked for, and the hands to call it off with."""

    def __init__(self, server: SimulatedServer, **fields: Any) -> None:
        self.data = completion(**fields)
        self.other = server.connect()
        self.transport: MemoryTransport
        self.client: Http2Client


def ask_http1(server: SimulatedServer, **fields: Any) -> Asked:
    asked = Asked(server, **fields)
    asked.transport = server.send(asked.data)
    return asked


def ask_http2(server: SimulatedServer, **fields: Any) -> Asked:
    asked = Asked(server, **fields)
    asked.client = Http2Client(server.network)
    asked.transport = asked.client.transport
    asked.client.request(POST, asked.data.partition(b"\r\n\r\n")[2])
    return asked


def end_of_connection(asked: Asked) -> None:
    asked.transport.feed_eof()


def tcp_reset(asked: Asked) -> None:
    asked.transport.reset()


def rst_stream(asked: Asked) -> None:
    asked.client.h2.reset_stream(1, ErrorCodes.CANCEL)
    asked.transport.feed(asked.client.h2.data_to_send())


def goaway_with_an_error(asked: Asked) -> None:
    asked.transport.feed(goaway(ErrorCodes.INTERNAL_ERROR))


def goaway(code: ErrorCodes) -> bytes:
    """Of a client: the id is of pushed streams, of which there are none (RFC 9113 §6.8): it can be no lower."""
    return frame(GOAWAY, bytes(4) + code.to_bytes(4, "big"))


def delete(asked: Asked) -> None:
    asked.other.feed(request("DELETE", "/v1/requests/r1"))


WAYS = {
    "HTTP/1.1 end of connection": (ask_http1, end_of_connection),
    "HTTP/1.1 TCP reset": (ask_http1, tcp_reset),
    "HTTP/1.1 DELETE": (ask_http1, delete),
    "HTTP/2 RST_STREAM": (ask_http2, rst_stream),
    "HTTP/2 end of connection": (ask_http2, end_of_connection),
    "HTTP/2 TCP reset": (ask_http2, tcp_reset),
    "HTTP/2 GOAWAY with an error": (ask_http2, goaway_with_an_error),
    "HTTP/2 DELETE": (ask_http2, delete),
}
every_way = pytest.mark.parametrize(("ask", "call_off"), WAYS.values(), ids=WAYS.keys())
Ask = Callable[..., Asked]
CallOff = Callable[[Asked], None]


@every_way
@pytest.mark.parametrize("is_within_a_step", [False, True])
@pytest.mark.parametrize("num_steps", [0, 1, 2, 7])
def test_blocks_are_free_with_the_step_that_runs_when_it_is_called_off(
    server: SimulatedServer, ask: Ask, call_off: CallOff, num_steps: int, is_within_a_step: bool
) -> None:
    asked = ask(server, prompt=[5] * 40, n=2, **LONG)
    for _ in range(num_steps):
        assert server.step()
    if is_within_a_step:
        server.loop.call_later(0.005, call_off, asked)
    else:
        call_off(asked)
        server.loop.settle()
    server.step()
    server.check_idle()
    reasons = {message.reason for message in server.posted if isinstance(message, Cancel)}
    assert reasons == {FinishReason.CANCELLED}


@every_way
def test_at_most_two_tokens_are_drawn_after_it_is_called_off(
    server: SimulatedServer, ask: Ask, call_off: CallOff
) -> None:
    asked = ask(server, **LONG)
    for _ in range(5):
        server.step()
    num_drawn = server.stats.num_generated_tokens
    server.loop.call_later(0.005, call_off, asked)
    server.run()
    assert num_drawn > 0
    assert server.stats.num_generated_tokens - num_drawn <= 2


@every_way
def test_call_off_during_prefill_stops_at_the_chunks_end(ask: Ask, call_off: CallOff) -> None:
    num_chunks = 3
    with serving() as server:
        asked = ask(server, prompt=[5] * 150, **LONG)
        for _ in range(num_chunks - 1):
            server.step()
        server.loop.call_later(0.005, call_off, asked)
        server.run()
        assert server.stats.num_prompt_tokens == num_chunks * LIMITS.max_batch_tokens < 150
        assert server.stats.num_steps == num_chunks


ONE_AT_A_TIME = RunnerLimits(64, 4, 1, 16, 200, TOKENIZER.vocab_size)


@every_way
def test_waiting_request_has_the_slot_in_the_next_plan(ask: Ask, call_off: CallOff) -> None:
    with serving(limits=ONE_AT_A_TIME) as server:
        asked = ask(server, **LONG)
        server.step()
        waiting = server.send(completion(prompt=[6], max_tokens=3, **STREAM))
        for _ in range(4):
            server.step()
        assert server.stats.num_waiting == 1
        server.loop.call_later(0.005, call_off, asked)
        server.step()
        server.step()
        assert server.delivered[-1].request_ids == ["r2"]
        server.run()
        assert b"data: [DONE]" in waiting.received


@pytest.mark.parametrize("ask", [ask_http1, ask_http2])
def test_stop_string_takes_the_same_path_and_lets_the_next_one_in(ask: Ask) -> None:
    with serving() as server:
        text = server.ask(completion(max_tokens=40)).text()
    with serving(limits=ONE_AT_A_TIME) as server:
        ask(server, max_tokens=40, stop=text[8], **STREAM)
        waiting = server.send(completion(prompt=[6], max_tokens=3))
        server.run()
        (cancel,) = [message for message in server.posted if isinstance(message, Cancel)]
        assert cancel.reason is FinishReason.STOP
        first = [i for i, delivery in enumerate(server.delivered) if "r1" in delivery.request_ids]
        second = [i for i, delivery in enumerate(server.delivered) if "r2" in delivery.request_ids]
        assert second[0] <= first[-1] + 2  # the step in flight when the string was found, and then its own
        assert b'"finish_reason":"length"' in waiting.received


def test_goaway_without_an_error_calls_nothing_off(server: SimulatedServer) -> None:
    """A client says so that it opens no more streams, and reads the answers of those it has."""
    asked = ask_http2(server, max_tokens=20, **STREAM)
    server.step()
    asked.transport.feed(goaway(ErrorCodes.NO_ERROR))
    server.run()
    asked.client.exchange()
    assert asked.client.responses[1].is_complete


@every_way
def test_neighbours_say_what_they_say_alone(ask: Ask, call_off: CallOff) -> None:
    with serving() as server:
        alone = server.ask(chat(max_tokens=30)).text()
    with serving() as server:
        asked = ask(server, n=3, **LONG)
        neighbour = server.send(chat(max_tokens=30))
        for _ in range(6):
            server.step()
        call_off(asked)
        server.run()
        (answer,) = answers(bytes(neighbour.received))
        assert answer.text() == alone
