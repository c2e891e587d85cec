"""No log line, at any level and in either format, bears a prompt, a completion, a key or a query."""

import io
from typing import Any

import pytest

from core.detokenizer import Detokenizer
from core.simulation import SimulatedRunner
from server.api import chat as chat_surface
from server.observing.logs import configure_logging
from tests.server.simulated_engine import MortalRunner, SickRunner
from tests.server.simulated_server import MODEL, STREAM, SimulatedServer, chat, completion, request, serving, with_lines
from tests.server.test_faults import Once, fail_at

PROMPT, KEY, WRONG_KEY, QUERY = "planted-prompt", "sl-planted-key", "sl-planted-wrong", "planted-query"


def with_key(data: bytes, key: str = KEY) -> bytes:
    return with_lines(data, f"Authorization: Bearer {key}")


def messages(**fields: object) -> bytes:
    return chat(messages=[{"role": "user", "content": PROMPT}], max_tokens=40, **fields)


REQUESTS = [
    messages(),
    messages(**STREAM),
    messages(stop=[PROMPT], logprobs=True, unknown_field=PROMPT),
    completion(prompt=PROMPT, echo=True),
    completion(prompt=[PROMPT, PROMPT], stop=PROMPT, user=PROMPT),
    request("POST", "/tokenize", {"prompt": PROMPT}),
    request("POST", "/v1/responses", {"model": MODEL, "input": PROMPT, "max_output_tokens": 3}),
    # what is refused, for each kind of reason
    request("POST", "/v1/chat/completions", f'{{"messages": "{PROMPT}'.encode()),
    messages(temperature=PROMPT),
    messages(model=PROMPT),
    completion(prompt=PROMPT * 500),
    request("GET", f"/v1/models?{QUERY}"),
    request("GET", f"/admin/requests?slowest={QUERY}"),
    request("GET", f"/v1/nowhere?key={QUERY}"),
    request("GET", f"/v1/requests/{KEY}"),
    request("GET", f"/v1/nowhere%2f{KEY.replace('-', '%2d')}/x"),
    request("POST", "/tokenize", {"prompt": "a", PROMPT + " ": 1, KEY: 1}),
]


def ask_everything(server: SimulatedServer) -> list[str]:
    """What was said in the answers."""
    said = []
    for data in REQUESTS:
        answer = server.ask(with_key(data), "GET" if data.startswith(b"GET") else "POST")
        if answer.status == 200 and b"choices" in answer.body:
            said.append(answer.text() if data.find(b"/chat/") > 0 else answer.body.decode())
        server.ask(with_key(data, WRONG_KEY), "GET" if data.startswith(b"GET") else "POST")
    leaving = server.send(with_key(messages(**STREAM)))
    server.step()
    leaving.feed_eof()
    server.run()
    return said


@pytest.mark.usefixtures("_restore_loggers")
@pytest.mark.parametrize("log_format", ["text", "json"])
@pytest.mark.parametrize("runner", [SimulatedRunner, SickRunner, MortalRunner])
def test_planted_strings_are_in_no_log(runner: type[SimulatedRunner], log_format: str) -> None:
    log = io.StringIO()
    handler = configure_logging("debug", log_format, log)
    with serving(runner=runner, keys=(KEY,)) as server:
        said = ask_everything(server)
    handler.close()
    written = log.getvalue()
    assert written.count("\n") >= 2 * len(REQUESTS)
    for planted in (PROMPT, KEY, WRONG_KEY, QUERY):
        assert planted not in written
    assert said or runner is not SimulatedRunner
    assert not any(text and text in written for text in said)


@pytest.mark.usefixtures("_restore_loggers")
@pytest.mark.parametrize(("owner", "name"), [(chat_surface, "read_body"), (Detokenizer, "push_token")])
def test_traceback_of_a_fault_tells_no_text(owner: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    log = io.StringIO()
    handler = configure_logging("debug", "json", log)
    with serving(keys=(KEY,)) as server:
        fail_at(monkeypatch, owner, name, Once())
        server.ask(with_key(messages(**STREAM)))
    handler.close()
    assert "Traceback" in log.getvalue()
    assert PROMPT not in log.getvalue()
    assert KEY not in log.getvalue()
