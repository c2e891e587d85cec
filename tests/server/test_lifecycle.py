"""Generations of the whole server that do not go their way: clients that leave, deletes, a full queue, any history."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.errors import ErrorKind, ServiceError
from core.plan import RunnerLimits
from core.types import Cancel, FinishReason, Submit
from server.gate.tenants import LOCAL_NAME
from server.generation import OFFLOAD_BYTES
from tests.server.fakes import MemoryTransport
from tests.server.simulated_engine import at_once, late_by, token_by_token
from tests.server.simulated_server import (
    LIMITS,
    STREAM,
    TOKENIZER,
    Answer,
    SimulatedServer,
    answers,
    chat,
    completion,
    request,
)


@contextmanager
def serving(**arguments: Any) -> Iterator[SimulatedServer]:
    """A server whose end is checked: nothing is held for anybody."""
    with closing(SimulatedServer(**arguments)) as server:
        yield server


def whole_text(data: bytes) -> str:
    with serving() as server:
        return server.ask(data).text()


def the_answer(transport: MemoryTransport) -> Answer:
    (answer,) = answers(bytes(transport.received))
    return answer


# Clients that leave


@pytest.mark.parametrize("leave", [MemoryTransport.feed_eof, MemoryTransport.reset])
@pytest.mark.parametrize("fields", [{}, STREAM, {"n": 2}, {"prompt": [[5] * 40, [6]]}])
@pytest.mark.parametrize("num_steps", range(8))
def test_client_that_leaves_frees_its_blocks_within_a_step(
    num_steps: int, fields: dict[str, Any], leave: Callable[[MemoryTransport], None]
) -> None:
    with serving() as server:
        transport = server.send(completion(prompt=[5] * 40) if not fields else completion(**fields))
        for _ in range(num_steps):
            assert server.step()
        leave(transport)
        server.loop.settle()
        server.step()
        server.check_idle()
        assert server.metrics.num_disconnects == 1
        assert server.metrics.responses == {499: 1}


def test_client_that_leaves_while_its_step_is_computed_is_noticed_by_that_step() -> None:
    with serving() as server:
        transport = server.send(chat(**STREAM))
        server.step()
        server.loop.call_later(0.005, transport.feed_eof)
        server.step()
        server.check_idle()


@pytest.mark.parametrize("data", [chat(max_tokens=3), chat(max_tokens=3, **STREAM)])
def test_client_may_leave_before_any_byte_of_its_request(data: bytes) -> None:
    for num_bytes in range(len(data)):
        with serving() as server:
            transport = server.send(data[:num_bytes])
            transport.feed_eof()
            server.run()
            server.check_idle()
            assert not [message for message in server.posted if isinstance(message, Submit)]


@pytest.mark.parametrize("fields", [{}, STREAM])
def test_client_may_leave_after_any_byte_of_its_answer(fields: dict[str, Any]) -> None:
    data = chat(max_tokens=4, **fields)
    with serving() as server:
        transport = server.send(data)
        server.run()
        num_bytes = len(transport.received)
    for num_read in (*range(250), *range(250, num_bytes + 1, 13)):
        with serving() as server:
            transport = server.send(data, peer_reads=False)
            while server.step():
                transport.peer_read(max(0, num_read - len(transport.received)))
                if len(transport.received) == num_read:
                    transport.reset()
            server.run()
            server.check_idle()


def test_client_that_leaves_while_its_prompt_is_tokenized_elsewhere_is_not_submitted() -> None:
    with serving() as server:
        gate: asyncio.Future[None] = server.loop.create_future()

        async def offload(work: Callable[[], Any]) -> Any:
            await gate
            return work()

        server.generations.offload = offload
        transport = server.send(completion(prompt="x", stop="y" * 1024, user="z" * OFFLOAD_BYTES))
        assert not server.posted
        transport.feed_eof()
        server.loop.settle()
        assert server.network.listener.num_handlers == 0
        assert not server.posted


def test_large_body_is_prepared_elsewhere_and_answered_the_same() -> None:
    with serving() as server:
        answer = server.ask(completion(user="z" * OFFLOAD_BYTES))
    assert answer.text() == whole_text(completion())


def test_task_that_is_cancelled_lets_go_of_its_request() -> None:
    with serving() as server:
        server.send(chat(**STREAM))
        for _ in range(4):
            server.step()
        server.loop.run(_drain_at_once(server))
        server.run()
        server.check_idle()


async def _drain_at_once(server: SimulatedServer) -> None:
    """As Listener.drain does with handlers that outlive everything."""
    tasks = [task for task in asyncio.all_tasks(server.loop) if task is not asyncio.current_task()]
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)


# DELETE


@pytest.mark.parametrize("num_steps", range(6))
@pytest.mark.parametrize("prefix", ["", "chatcmpl-"])
def test_deleted_whole_answer_is_a_499(num_steps: int, prefix: str) -> None:
    with serving() as server:
        transport = server.send(chat())
        for _ in range(num_steps):
            server.step()
        deleted = server.send(request("DELETE", f"/v1/requests/{prefix}r1"))
        assert the_answer(deleted).status == 200
        server.step()
        server.check_idle()
        answer = the_answer(transport)
        assert (answer.status, answer.json["error"]["code"]) == (499, "request_cancelled")
        again = server.ask(request("DELETE", "/v1/requests/r1"))
        assert (again.status, again.json["error"]["code"]) == (404, "request_not_found")


def test_deleted_stream_keeps_what_was_said_and_ends_with_an_error_event() -> None:
    with serving() as server:
        transport = server.send(chat(max_tokens=100, **STREAM))
        for _ in range(8):
            server.step()
        server.send(request("DELETE", "/v1/requests/r1"))
        answer = the_answer(transport)
        assert answer.is_complete
        assert answer.events[-1]["error"]["code"] == "request_cancelled"
        server.step()
        server.check_idle()
        assert answer.text()
        assert whole_text(chat(max_tokens=100)).startswith(answer.text())
        (kept,) = [message.num_tokens_kept for message in server.posted if isinstance(message, Cancel)]
        assert server.metrics.num_generation_tokens == kept == 7


@pytest.mark.parametrize("asked", [{}, {"n": 3}, {"prompt": ["One", "Two"]}])
@pytest.mark.parametrize("num_steps", [0, 8])
def test_second_delete_finds_no_request_though_the_engine_has_not_heard_of_the_first(
    asked: dict[str, Any], num_steps: int
) -> None:
    with serving() as server:
        transport = server.send(completion(max_tokens=100, **asked, **STREAM))
        for _ in range(num_steps):
            server.step()
        delete = request("DELETE", "/v1/requests/r1")
        assert [the_answer(server.send(delete)).status for _ in range(3)] == [200, 404, 404]
        server.run()
        assert b"request_cancelled" in transport.received


def test_deleted_stream_without_a_token_yet_is_a_499() -> None:
    with serving() as server:
        transport = server.send(chat(**STREAM))
        server.send(request("DELETE", "/v1/requests/r1"))
        server.run()
        assert the_answer(transport).status == 499


def test_connection_goes_on_after_a_deleted_answer() -> None:
    with serving() as server:
        transport = server.send(chat(**STREAM) + chat())
        for _ in range(5):
            server.step()
        server.send(request("DELETE", "/v1/requests/r1"))
        server.run()
        first, second = answers(bytes(transport.received))
        assert first.events[-1]["error"]["code"] == "request_cancelled"
        assert second.text() == whole_text(chat())


# The queue


def test_full_queue_refuses_before_the_body_is_read() -> None:
    with serving(max_requests=2) as server:
        first = [server.send(chat()), server.send(chat(**STREAM))]
        refused = server.send(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 90000\r\n\r\n")
        answer = the_answer(refused)
        assert (answer.status, answer.json["error"]["code"]) == (503, "overloaded")
        assert answer.headers["retry-after"] == "1"
        server.run()
        assert [the_answer(transport).status for transport in first] == [200, 200]
        assert server.ask(chat()).status == 200


def test_bodies_that_come_together_do_not_pass_the_queues_limit() -> None:
    data = chat()
    with serving(max_requests=2) as server:
        transports = [server.send(data[:-1]) for _ in range(5)]
        for transport in transports:
            transport.feed(data[-1:])
        server.run()
        assert sorted(the_answer(transport).status for transport in transports) == [200, 200, 503, 503, 503]


def test_request_whose_body_comes_after_the_farewell_is_refused_as_those_before_it() -> None:
    data = chat(**STREAM)
    with serving() as server:
        begun, uploading = server.send(data), server.send(data[:-1])
        server.step()
        server.generations.fail_all(ServiceError(ErrorKind.UNAVAILABLE, "Ending.", "draining", retry_after_s=5))
        uploading.feed(data[-1:])
        server.run()
        assert len([message for message in server.posted if isinstance(message, Submit)]) == 1
        for transport in (begun, uploading):
            answer = the_answer(transport)
            assert answer.is_complete
            error = answer.events[-1]["error"] if answer.status == 200 else answer.json["error"]
            assert error["code"] == "draining"


# Any history

TEXT = whole_text(completion(max_tokens=40))

Case = dict[str, Any]

fields_of_requests = st.fixed_dictionaries(
    {"max_tokens": st.integers(1, 40), "n": st.integers(1, 3), "seed": st.integers(0, 3)},
    optional={
        "stop": st.sampled_from([TEXT[5:8], TEXT[10], "e", "never"]),
        "stream": st.just(True),
        "ignore_eos": st.just(False),
        "prompt": st.sampled_from([[5] * 30, [[7] * 3, [8] * 20], "step"]),
        "logprobs": st.integers(0, 2),
    },
)
cases = st.fixed_dictionaries(
    {
        "fields": fields_of_requests,
        "arrival_s": st.floats(0, 0.5),
        "fate": st.sampled_from(["stay", "stay", "leave", "reset", "delete", "slow", "never reads"]),
        "after_s": st.floats(0, 0.5),
    }
)


def play(server: SimulatedServer, number: int, case: Case, transports: dict[int, MemoryTransport]) -> None:
    """Have one request come, and its fate after it."""
    fate = case["fate"]

    def come() -> None:
        reads = fate not in ("slow", "never reads")
        transport = server.network.dial(reads)
        transport.feed(completion(**case["fields"]))
        transports[number] = transport
        request_id = f"r{len(transports)}"
        server.loop.call_later(case["after_s"], meet_fate, transport, request_id)

    def meet_fate(transport: MemoryTransport, request_id: str) -> None:
        if fate == "leave":
            transport.feed_eof()
        elif fate == "reset":
            transport.reset()
        elif fate == "delete":
            server.generations.cancel(request_id, LOCAL_NAME)
        elif fate == "slow":
            transport.peer_reads = True
            transport.peer_read()

    server.loop.call_later(case["arrival_s"], come)


SCARCE = RunnerLimits(32, 4, 6, 16, 100, TOKENIZER.vocab_size)  # with preemptions


@settings(max_examples=100, deadline=None)
@given(
    history=st.lists(cases, min_size=1, max_size=6),
    limits=st.sampled_from([LIMITS, SCARCE]),
    schedule=st.sampled_from([at_once, token_by_token, late_by(0.03)]),
)
def test_every_request_gets_exactly_one_answer_or_its_client_has_left(
    history: list[Case], limits: Any, schedule: Any
) -> None:
    server = SimulatedServer(limits=limits, schedule=schedule)
    transports: dict[int, MemoryTransport] = {}
    for number, case in enumerate(history):
        play(server, number, case, transports)
    server.run_for(1.5)
    server.run_for(60)  # who never reads is cut off
    for number, case in enumerate(history):
        transport = transports[number]
        if case["fate"] == "never reads" and not transport.is_lost:
            transport.peer_read()
            server.loop.settle()
        found = answers(bytes(transport.received))
        if case["fate"] in ("stay", "slow"):
            (answer,) = found
            assert (answer.status, answer.is_complete) == (200, True)
            check_answer(answer, case["fields"])
        else:
            assert len(found) <= 1
    server.check_idle()
    assert sum(server.metrics.responses.values()) == len(history)
    server.close()


def check_answer(answer: Answer, fields: dict[str, Any]) -> None:
    num_choices = fields["n"] * (2 if isinstance(fields.get("prompt"), list) and len(fields["prompt"]) == 2 else 1)
    for choice in range(num_choices):
        assert answer.finish_reason(choice) in ("stop", "length")
        if "stop" in fields:
            assert fields["stop"] not in answer.text(choice)
    if not fields.get("stream"):
        assert answer.usage["completion_tokens"] <= num_choices * fields["max_tokens"]
    else:
        assert answer.events[-1] == "[DONE]"


def test_cancel_reasons_tell_the_engine_who_ended_it() -> None:
    with serving() as server:
        server.ask(completion(max_tokens=40, stop=TEXT[5:8]))
        transport = server.send(chat(**STREAM))
        server.step()
        transport.feed_eof()
        server.run()
        reasons = [message.reason for message in server.posted if isinstance(message, Cancel)]
        assert reasons == [FinishReason.STOP, FinishReason.CANCELLED]
