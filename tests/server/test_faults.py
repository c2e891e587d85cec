"""A fault of ours at each stage of a request: that request is told, its neighbour goes on, nothing is left behind.

Each failpoint raises where its stage works, for the guilty request alone, whatever raises there in earnest.
"""

from collections.abc import Callable
from typing import Any

import pytest

from core.detokenizer import Detokenizer
from core.plan import StepOutput, StepPlan
from core.simulation import SimulatedRunner
from server.api.chat import ChatStream, ChatSurface
from server.gate.auth import Authenticator
from server.gate.quota import Quotas, Ticket
from server.lifecycle import PromptReader
from server.wire.stream import HttpStream
from tests.server.simulated_server import STREAM, TOKENIZER, SimulatedServer, answers, chat, request

GUILTY = "guilty"
GUILTY_ID = TOKENIZER.encode("\N{SNOWMAN}", add_special_tokens=False)[0]


class Fault(Exception):
    """Nobody's fault but ours."""


def guilty(**fields: Any) -> bytes:
    """A request whose prompt begins as the neighbour's does not."""
    message = {"role": "user", "content": f"\N{SNOWMAN} {GUILTY}"}
    return chat(messages=[message], **fields).replace(b"\r\n", f"\r\nx-request-id: {GUILTY}\r\n".encode(), 1)


def fail_at(monkeypatch: pytest.MonkeyPatch, owner: type, name: str, is_guilty: Callable[..., bool]) -> None:
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
LOOP_STAGES: dict[str, tuple[type, str, Callable[..., bool]]] = {
    "auth": (Authenticator, "identify", lambda _, asked, *__: is_named_guilty(asked)),
    "quota": (Quotas, "ticket_for", Once()),
    "body": (HttpStream, "read_body", lambda stream, *_: is_named_guilty(stream.request)),
    "validate": (ChatSurface, "parse", lambda _, body, *__: GUILTY.encode() in body),
    "template and tokenize": (PromptReader, "encode", lambda _, prompt, *__: GUILTY in str(prompt)),
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
    stage: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    server = SimulatedServer()
    untouched = [answer.text() for answer in ask_both(server)]
    owner, name, is_guilty = LOOP_STAGES[stage]
    fail_at(monkeypatch, owner, name, Once() if isinstance(is_guilty, Once) else is_guilty)
    found = ask_both(server)
    (broken,) = [answer for answer in found if not is_whole(answer)]
    check_told(broken)
    (whole,) = [(i, answer) for i, answer in enumerate(found) if is_whole(answer)]
    assert whole[1].text() == untouched[whole[0]]
    assert f"Fault: {owner.__name__}.{name}" in caplog.text
    server.close()  # no block, handle, answer, reservation or timer is left


class FaultyStage(SimulatedRunner):
    """Raises in one of a step's three calls where the guilty prompt is among its rows."""

    stage = ""

    def forward(self, plan: StepPlan) -> StepPlan:
        self._fail_in("forward", plan)
        return super().forward(plan)

    def sample(self, ticket: StepPlan) -> None:
        self._fail_in("sample", ticket)
        super().sample(ticket)

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
    assert server.app.state.accounting.recorder.failed(9)[0].record.error_code == "engine_error"
    server.close()


def test_fault_is_shown_to_the_admin_with_its_stage_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    server = SimulatedServer()
    fail_at(monkeypatch, *LOOP_STAGES["template and tokenize"])
    told = server.ask(guilty())
    assert (told.status, told.json["error"]["code"]) == (500, "internal_error")
    (failed,) = server.ask(request("GET", "/admin/requests"), "GET").json["failed"]
    assert (failed["status"], failed["error_code"]) == (500, "internal_error")
    assert failed["stages"][-2]["stage"] == "validate"
    assert server.metrics.refused == {"internal_error": 1}
    server.close()
