"""The app on a simulated engine that fails: what its clients are told."""

from typing import Any

import pytest

from server.app import App, Exchange
from tests.server.simulated_engine import MortalRunner, SickRunner
from tests.server.simulated_server import (
    STREAM,
    SimulatedServer,
    answers,
    ask,
    chat,
    completion,
    refusal_of,
)


def test_lost_device_ends_every_request_with_an_error_and_refuses_more() -> None:
    server = SimulatedServer(runner=MortalRunner)
    begun = server.send(chat(**STREAM))
    whole = server.send(chat())
    server.step()
    server.step()
    server.step()
    waiting = server.send(completion(prompt=[7] * 100, **STREAM))
    server.run()
    last = answers(bytes(begun.received))[0].events[-1]
    assert last["error"]["code"] == "engine_error"
    assert refusal_of(answers(bytes(whole.received))[0]) == (500, "engine_error")
    assert refusal_of(answers(bytes(waiting.received))[0]) == (500, "engine_error")
    later = server.send(chat(**STREAM))
    server.loop.settle()
    assert refusal_of(answers(bytes(later.received))[0]) == (500, "engine_error")
    server.loop.advance(100)  # no timer of the refused stream may be left
    assert server.metrics.responses == {200: 1, 500: 3}
    server.close()


@pytest.mark.parametrize("fields", [{}, STREAM, {"n": 3}])
def test_failed_row_is_a_500_while_no_token_has_been_sent(fields: dict[str, Any]) -> None:
    answer = ask(chat(**fields), runner=SickRunner)
    assert refusal_of(answer) == (500, "engine_error")
    assert answer.json["error"]["message"] == "The logits are not finite."


def test_path_of_what_cannot_be_answered_bears_no_key_into_the_log_and_forges_no_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def fail(app: App, exchange: Exchange) -> None:
        raise RuntimeError("planted")

    monkeypatch.setattr(App, "_dispatch", fail)
    answer = ask(b"GET /v1/requests/sl-abcdefghPLANTEDSECRET%0aFORGED HTTP/1.1\r\nhost: a\r\n\r\n", "GET")
    assert refusal_of(answer) == (500, "internal_error")
    assert "GET /v1/requests/sl-***\\nFORGED cannot" in caplog.text
    assert "PLANTED" not in caplog.text.replace("planted", "")
