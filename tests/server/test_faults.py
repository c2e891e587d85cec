"""A fault of ours at each stage of a request: that request is told, its neighbour goes on, nothing is left behind.

Each failpoint raises where its stage works, for the guilty request alone, whatever raises there in earnest.
"""

import asyncio
import contextlib
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from core.detokenizer import Detokenizer
from core.errors import ErrorKind, ExitCode, ServiceError
from core.plan import Int32Array, StepOutput, StepPlan
from core.simulation import CostModel, SimulatedRunner
from server.api import chat as chat_surface
from server.api.chat import ChatStream
from server.engine_client import RequestHandle
from server.gate.identity import Authenticator
from server.gate.quota import Quotas, Ticket
from server.gate.tenants import Limits, Tenant
from server.generation import Generation
from server.ledger.ledger import Entry
from server.ledger.store import LedgerStore, RowState
from server.listening.listener import Listener
from server.observing.accounting import Accounting
from server.observing.metrics import Histogram, Metrics
from server.output import StreamedOutput, WholeOutput
from server.prompts import PromptReader
from server.supervision import EngineWatch, Supervision
from server.wire.http1_exchanges import Http1Exchanges
from server.wire.http2_exchanges import Http2Exchanges
from server.wire.http2_streams import Responses as Http2Response
from server.wire.limits import ConnectionLimits
from server.wire.stream import HttpStream
from tests.server.fakes import OPERATOR, MemoryServer
from tests.server.inline_ledger import rows
from tests.server.raw_peer import respond
from tests.server.recording_peers import Call, Http1Caller, Http2Caller
from tests.server.running_server import Running, ask, closing, load_with, run
from tests.server.simulated_server import MODEL, STREAM, TOKENIZER, SimulatedServer, answers, chat, request

GUILTY = "guilty"
GUILTY_ID = TOKENIZER.encode("\N{SNOWMAN}", add_special_tokens=False)[0]


class Fault(Exception):
    """Nobody's fault but ours."""


def guilty(**fields: Any) -> bytes:
    """A request whose prompt begins as the neighbour's does not."""
    message = {"role": "user", "content": f"\N{SNOWMAN} {GUILTY}"}
    return chat(messages=[message], **fields).replace(b"\r\n", f"\r\nx-request-id: {GUILTY}\r\n".encode(), 1)


def fail_at(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, is_guilty: Callable[..., bool]) -> None:
    work = getattr(owner, name)

    def fail(*args: Any, **kwargs: Any) -> Any:
        if is_guilty(*args):
            raise Fault(f"{owner.__name__}.{name}")
        return work(*args, **kwargs)

    monkeypatch.setattr(owner, name, fail)


def is_named_guilty(named: Any) -> bool:
    return bool(named.header(b"x-request-id") == GUILTY.encode())


class Once:
    """True for the first that asks."""

    has_been = False

    def __call__(self, *args: object) -> bool:
        is_first, self.has_been = not self.has_been, True
        return is_first


# Stage -> where it fails, and for whom. Where nothing tells the guilty one, the first to come there is it.
LOOP_STAGES: dict[str, tuple[Any, str, Callable[..., bool]]] = {
    "auth": (Authenticator, "identify", lambda _, asked, *__: is_named_guilty(asked)),
    "quota": (Quotas, "ticket_for", Once()),
    "body": (HttpStream, "read_body", lambda stream, *_: is_named_guilty(stream.request)),
    "validate": (chat_surface, "read_body", lambda body, *_: GUILTY.encode() in body),
    "template and tokenize": (PromptReader, "_rendered", lambda _, prompt, *__: GUILTY in str(prompt)),
    "reserve": (Ticket, "reserve", Once()),
    "detokenize": (Detokenizer, "push_token", Once()),
    "events": (ChatStream, "text", Once()),
    "settle": (Ticket, "settle", Once()),
    "end of the answer": (ChatStream, "end", Once()),
}


def ask_both(server: SimulatedServer) -> list[Any]:
    """The answers to the guilty one and to its neighbour, who came just after it."""
    transports = [server.send(guilty(**STREAM)), server.send(chat(**STREAM))]
    server.run()
    return [(answers(bytes(transport.received)) or [None])[0] for transport in transports]


def is_whole(answer: Any) -> bool:
    return answer is not None and answer.is_complete and answer.status == 200 and answer.events[-1] == "[DONE]"


def check_told(answer: Any) -> None:
    """As a status before the head, as an event after it; or, where not even that can be written, as a broken stream."""
    if answer is None or not answer.is_complete:
        return
    error = answer.json["error"] if answer.status == 500 else answer.events[-1]["error"]
    assert error["code"] in ("internal_error", "engine_error")


@pytest.mark.parametrize("stage", LOOP_STAGES)
def test_fault_on_the_loop_ends_one_request_and_leaves_nothing(
    server: SimulatedServer, stage: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    untouched = [answer.text() for answer in ask_both(server)]
    owner, name, is_guilty = LOOP_STAGES[stage]
    fail_at(monkeypatch, owner, name, Once() if isinstance(is_guilty, Once) else is_guilty)
    found = ask_both(server)
    (broken,) = [answer for answer in found if not is_whole(answer)]
    check_told(broken)
    (whole,) = [(i, answer) for i, answer in enumerate(found) if is_whole(answer)]
    assert whole[1].text() == untouched[whole[0]]
    assert f"Fault: {owner.__name__}.{name}" in caplog.text


class FaultyStage(SimulatedRunner):
    """Raises in one of a step's three calls where the guilty prompt is among its rows."""

    stage = ""

    def forward(self, plan: StepPlan) -> StepPlan:
        self._fail_in("forward", plan)
        return super().forward(plan)

    def sample(self, ticket: StepPlan, masks: Int32Array | None = None) -> None:
        self._fail_in("sample", ticket)
        super().sample(ticket, masks)

    def collect(self, ticket: StepPlan) -> StepOutput:
        self._fail_in("collect", ticket)
        return super().collect(ticket)

    def _fail_in(self, stage: str, plan: StepPlan) -> None:
        if stage == self.stage and GUILTY_ID in plan.token_ids:
            raise Fault(f"in {stage}")


@pytest.mark.parametrize("stage", ["forward", "sample", "collect"])
def test_fault_in_a_step_is_the_guilty_ones_alone(stage: str) -> None:
    server = SimulatedServer(runner=type("Runner", (FaultyStage,), {"stage": stage}))
    untouched = (healthy := SimulatedServer()).ask(chat(**STREAM)).text()
    healthy.close()
    told, neighbour = ask_both(server)
    assert (told.status, told.json["error"]["code"]) == (500, "engine_error")
    assert (neighbour.text(), neighbour.events[-1]) == (untouched, "[DONE]")
    assert server.app.accounting.recorder.failed(9)[0].record.error_code == "engine_error"
    server.close()


def test_fault_is_shown_to_the_admin_with_its_stage_and_counted(
    server: SimulatedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_at(monkeypatch, *LOOP_STAGES["template and tokenize"])
    server.network.peer = OPERATOR
    told = server.ask(guilty())
    assert (told.status, told.json["error"]["code"]) == (500, "internal_error")
    (failed,) = server.ask(request("GET", "/admin/requests"), "GET").json["failed"]
    assert (failed["status"], failed["error_code"]) == (500, "internal_error")
    assert failed["stages"][-2]["stage"] == "validate"
    assert server.metrics.refused == {"internal_error": 1}


class Nth:
    """True once, when it is asked so often."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __call__(self, *args: object) -> bool:
        self.number -= 1
        return self.number == 0


# Wherever the loop, or one party's work on it, calls another's; (owner, method) -> how many times it must have been
# called before it fails. The first of each is the beginning, where there is most to be undone.
CALLED_OUT: dict[tuple[type, str], tuple[int, ...]] = {
    (Listener, "opened"): (1, 3),
    (Http1Exchanges, "receive"): (1, 3),
    (Http1Exchanges, "flush"): (1, 2, 9),
    (Http1Exchanges, "set_blocked"): (1, 2),
    (Http1Exchanges, "next_due"): (1, 4, 20),
    (Http1Exchanges, "on_due"): (1,),
    (Http1Exchanges, "end_of_peer"): (1,),
    (Http2Exchanges, "receive"): (1, 3),
    (Http2Exchanges, "flush"): (1, 2, 9),
    (Http2Exchanges, "next_due"): (1, 9),
    (Http2Exchanges, "on_due"): (1,),
    (Http2Exchanges, "end_of_peer"): (1,),
    (Http2Exchanges, "_wait_turn"): (1, 3),
    (HttpStream, "set_blocked"): (1, 2),
    (HttpStream, "read_body"): (1, 5),
    (HttpStream, "send_head"): (1, 3),
    (HttpStream, "send"): (1, 4),
    (HttpStream, "end"): (1, 3),
    (Generation, "pause"): (1, 2),
    (Generation, "resume"): (1,),
    (Generation, "on_text"): (1, 5),
    (Generation, "on_delta"): (1, 3),
    (Generation, "_end_decode"): (1, 4),
    (Generation, "_settle_quota"): (1, 4),
    (Generation, "_submit"): (1, 4),
    (Generation, "_settle"): (1, 4),
    (Generation, "_settle_ledger"): (1, 4),
    (Generation, "_close_books"): (1, 4),
    (Generation, "_cancel"): (1,),
    (Generation, "_complete"): (1, 4),
    (Generation, "on_engine_mark"): (1, 4),
    (Generation, "on_mark"): (1, 4),
    (Generation, "on_begin"): (1, 5),
    (Generation, "text_writer"): (1, 3),
    (RequestHandle, "on_token"): (1, 9),
    (RequestHandle, "on_chunk"): (1, 4),
    (StreamedOutput, "_open"): (1, 2),
    (StreamedOutput, "text_writer"): (1, 3),
    (StreamedOutput, "complete"): (1, 3),
    (StreamedOutput, "break_off"): (1,),
    (WholeOutput, "complete"): (1,),
    (Generation, "_release"): (1, 3),
    (Generation, "_next_due"): (1, 5),
    (Generation, "_discount_pause"): (1,),
    (Generation, "_on_due"): (1,),
    (Ticket, "reserve"): (1, 3),
    (Ticket, "settle"): (1, 4),
    (Entry, "reserve"): (1, 3),
    (Entry, "settle"): (1, 4),
    (Entry, "_settled"): (1, 4),
    (Entry, "running_row"): (1, 2),
    (LedgerStore, "_apply"): (1, 5, 8),
    (Accounting, "close"): (1, 4),
    (Histogram, "observe"): (1, 7, 30),
    (Http2Response, "take_data"): (1, 5),
    (Http2Response, "num_unsent"): (1, 20),
}
STALL_S = 5.0
QUOTA = Limits(tokens_per_day=10**6)
TENANT = Tenant(name="acme", limits=QUOTA, key_sha256=(sha256(b"acme").hexdigest(),))


def ask_for(number: int, **fields: Any) -> Call:
    body = {"model": MODEL, "prompt": f"The engine {number}", "seed": number, "max_tokens": 12, "ignore_eos": True}
    return Call(method="POST", path="/v1/completions", key="acme", body=body | fields)


class Crowd:
    """Clients of all kinds at one time, on one server with a ledger and quotas.

    Attributes:
        callers: who read and stay: their calls are answered.
        others: who read late or never, leave, send half a body, or are in a hurry.
    """

    def __init__(self, ledger: Path) -> None:
        self.ledger = ledger
        limits = ConnectionLimits(unsent_bytes=2048, stall_s=STALL_S, body_s=2.0, idle_s=60.0)
        self.server = SimulatedServer(
            ledger=ledger, tenants=(TENANT,), connection_limits=limits, cost=CostModel(fixed_s=0.01, token_s=0.0005)
        )
        self.faults: list[dict[str, Any]] = []
        self.server.loop.set_exception_handler(lambda loop, context: self.faults.append(context))
        self.callers: list[Http1Caller | Http2Caller] = []
        self.others: list[Http1Caller | Http2Caller] = []

    def run(self) -> None:
        server = self.server
        slow = self._http1(ask_for(1, stream=True, max_tokens=150), reads=False)
        shut = self._http2([ask_for(i, stream=True, max_tokens=60) for i in range(2, 4)], window=100)
        shut.transport.feed(b"")
        self.callers = [
            self._http1(ask_for(10, stream=True)),
            self._http2([ask_for(11, stream=True), ask_for(12), ask_for(13, stream=True, n=2)]),
            self._http1(ask_for(14, max_tokens=30)),
            self._http2([ask_for(15, stream=True, max_tokens=30)]),
        ]
        leaving = self._http1(ask_for(20, stream=True, max_tokens=100))
        resetting = self._http2([ask_for(21, stream=True, max_tokens=100), ask_for(22, stream=True, max_tokens=20)])
        cut = ask_for(23, stream=True)
        cut.is_cut = True
        hurried = ask_for(24, stream=True, max_tokens=100, deadlines={"total_ms": 300})
        self.others = [slow, shut, leaving, resetting, self._http1(cut), self._http1(hurried)]
        server.run_for(0.2)
        leaving.leave("eof")
        resetting.reset(resetting.calls[0]) if not resetting.is_over else None
        server.run_for(3.0)
        slow.transport.peer_reads = True
        slow.transport.peer_read()
        server.run_for(STALL_S + 20.0)
        for caller in (*self.callers, *self.others):
            caller.finish()

    def _http1(self, call: Call, reads: bool = True) -> Http1Caller:
        caller = Http1Caller(self.server.connect(reads))
        caller.ask(call)
        return caller

    def _http2(self, calls: list[Call], window: int = 2**30) -> Http2Caller:
        caller = Http2Caller(self.server.connect(), window)
        for call in calls:
            caller.ask(call)
        return caller

    def answers(self) -> list[list[tuple[str, ...] | None]]:
        """By connection and request: what was said, or None where the answer is not whole."""
        return [[self._told(call) for call in caller.calls] for caller in self.callers]

    def _told(self, call: Call) -> tuple[str, ...] | None:
        if not call.is_whole or call.answer is None or call.answer.status != 200:
            return None
        return tuple(call.answer.text(choice) for choice in range((call.body or {}).get("n", 1)))

    def end(self) -> None:
        """Everybody leaves, and nothing may be held for anybody; each request is in the ledger once, and settled."""
        for caller in (*self.callers, *self.others):
            caller.leave("reset")
        self.server.run_for(60.0)
        self.server.close()
        found = rows(self.ledger)
        assert {row.state for row in found} == {RowState.SETTLED}
        assert len({row.request_id for row in found}) == len(found)


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[list[tuple[str, ...] | None]]:
    """What the crowd is told where nothing fails: everything."""
    crowd = Crowd(tmp_path_factory.mktemp("crowd") / "ledger.db")
    crowd.run()
    crowd.end()
    assert not crowd.faults
    assert all(told is not None for connection in crowd.answers() for told in connection)
    return crowd.answers()


@pytest.mark.parametrize(
    ("place", "number"),
    [(place, number) for place, numbers in CALLED_OUT.items() for number in numbers],
    ids=lambda one: f"{one[0].__name__}.{one[1]}" if isinstance(one, tuple) else str(one),
)
def test_fault_costs_one_connection_or_request_whoever_calls_it(
    place: tuple[type, str],
    number: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
    expected: list[list[tuple[str, ...] | None]],
) -> None:
    crowd = Crowd(tmp_path / "ledger.db")
    guilty = Nth(number)
    fail_at(monkeypatch, *place, guilty)
    crowd.run()
    crowd.end()
    assert guilty.number <= 0, "it is not called so often"
    logged = caplog.text + "".join(repr(fault.get("exception")) for fault in crowd.faults)
    assert f"{place[0].__name__}.{place[1]}" in logged
    harmed = [i for i, told in enumerate(crowd.answers()) if told != expected[i]]
    assert len(harmed) <= 1, f"connections {harmed} are harmed"
    for i in harmed:
        assert all(told in (None, before) for told, before in zip(crowd.answers()[i], expected[i], strict=True))


def test_answer_that_cannot_be_broken_off_at_the_end_keeps_no_other_from_its_own(
    server: SimulatedServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    transports = [server.send(chat(**STREAM)) for _ in range(3)]
    for _ in range(4):
        server.step()
    fail_at(monkeypatch, Generation, "fail", Once())
    server.generations.fail_all(ServiceError(ErrorKind.UNAVAILABLE, "Going.", "draining"))
    server.run()
    ends = [answers(bytes(transport.received))[0].events[-1] for transport in transports]
    assert [end == "[DONE]" or end["error"]["code"] for end in ends] == [True, "draining", "draining"]
    assert "Fault: Generation.fail" in caplog.text


def test_body_that_is_let_on_in_vain_costs_its_own_connection(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fail_at(monkeypatch, Http1Exchanges, "_let_body_on", Once())
    with contextlib.closing(MemoryServer(respond, buffered_body_bytes=1000)) as server:
        head = b"POST /read HTTP/1.1\r\nHost: a\r\nContent-Length: 3000\r\n\r\n"
        oldest, guilty, other = (server.exchange(head + bytes(2000)) for _ in range(3))
        assert (guilty.is_reading_paused, other.is_reading_paused) == (True, True)
        oldest.feed(bytes(1000))
        server.loop.settle()
        assert b" 200 " in oldest.received
        other.feed(bytes(1000))
        server.loop.settle()
        assert b" 200 " in other.received
        assert guilty.was_aborted
        assert "Fault: Http1Exchanges._let_body_on" in caplog.text


# What only a process with sockets and threads has to call: (owner, method) -> how many answers it may cost
CALLED_OUT_OF_A_PROCESS: dict[tuple[type, str], int] = {
    (Listener, "admit"): 1,
    (Listener, "opened"): 1,
    (Http1Exchanges, "receive"): 1,
    (Http1Exchanges, "flush"): 1,
    (Http1Exchanges, "end_of_peer"): 0,
    (Supervision, "on_step"): 0,
    (Supervision, "on_beat"): 0,
    (EngineWatch, "tick"): 0,
    (Metrics, "observe_step"): 0,
}


@pytest.mark.usefixtures("_keep_interpreter_settings")
@pytest.mark.parametrize("place", CALLED_OUT_OF_A_PROCESS, ids=lambda place: f"{place[0].__name__}.{place[1]}")
def test_fault_costs_one_connection_of_a_process_and_not_its_end(
    place: tuple[type, str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    guilty = Once()

    async def scenario() -> None:
        monkeypatch.setattr("server.supervision.TICK_S", 0.01)
        running = Running(load_with())
        server = running.server
        await server.wait_ready()
        fail_at(monkeypatch, *place, guilty)
        lost = 0
        while lost + guilty.has_been == 0 or lost < CALLED_OUT_OF_A_PROCESS[place]:
            try:
                await ask(server, closing(chat(**STREAM)))
            except (ValueError, ConnectionError):  # no answer came
                lost += 1
        assert lost == CALLED_OUT_OF_A_PROCESS[place]
        found = await asyncio.gather(*(ask(server, closing(chat(**STREAM))) for _ in range(4)))
        assert all(map(is_whole, found))
        server.stop(5)
        assert await running.exit is ExitCode.OK
        assert server.listener.num_open == 0

    run(scenario)
    assert f"Fault: {place[0].__name__}.{place[1]}" in caplog.text
