"""Prompts that do not fit, through the whole server: what is left out is told, in the answer and in the ledger."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from core.chat_template import ChatTemplate
from core.context_policy import Policy
from tests.core.chat_templates import CHATML
from tests.server.inline_ledger import rows
from tests.server.simulated_server import (
    LIMITS,
    STREAM,
    TOKENIZER,
    as_caller,
    ask,
    chat,
    completion,
    keyed_tenant,
    request,
    serving,
)

SYSTEM = {"role": "system", "content": "be kind"}
LAST = {"role": "user", "content": "and now?"}
HISTORY: Any = [
    SYSTEM,
    *({"role": role, "content": f"{i} {'word ' * 6}"} for i in range(12) for role in ("user", "assistant")),
    LAST,
]
OLDEST = {"context_policy": "drop_oldest_turns"}


def told(answer: Any) -> Any:
    if answer.headers["content-type"] == "application/json":
        return answer.json.get("context")
    found = [one["context"] for one in answer.events if isinstance(one, dict) and "context" in one]
    return found[-1] if found else None


@pytest.mark.parametrize("fields", [{}, STREAM])
def test_a_chat_that_does_not_fit_loses_its_oldest_turns(fields: dict[str, Any], tmp_path: Path) -> None:
    with serving(ledger=tmp_path / "ledger.db") as server:
        refused = server.ask(chat(messages=HISTORY))
        assert (refused.status, refused.json["error"]["code"]) == (400, "context_length_exceeded")
        answer = server.ask(chat(messages=HISTORY, **OLDEST, **fields))
        context = told(answer)
        gone = [one["message"] for one in context["dropped"]]
        assert gone == list(range(1, 1 + len(gone)))
        assert (context["policy"], context["kept_tokens"]) == ("drop_oldest_turns", answer.usage["prompt_tokens"])
        assert context["kept_tokens"] <= LIMITS.max_model_len - 12
        kept = [one for i, one in enumerate(HISTORY) if i not in gone]
        same = server.ask(chat(messages=kept))
        assert (same.text(), same.usage["prompt_tokens"], told(same)) == (answer.text(), context["kept_tokens"], None)
        short = server.ask(chat(**OLDEST))
        assert told(short) == {
            "policy": "drop_oldest_turns",
            "dropped": [],
            "kept_tokens": short.usage["prompt_tokens"],
        }
    noted = [row.context and json.loads(row.context) for row in rows(tmp_path / "ledger.db")]
    assert noted == [context, None, told(short)]


def test_a_tenants_policy_holds_where_a_request_has_none_and_responses_truncation_is_one() -> None:
    tenant = keyed_tenant("acme", "key", context_policy=Policy.MIDDLE)
    with serving(tenants=(tenant,)) as server:
        first = told(server.ask(as_caller(chat(messages=HISTORY), "key")))
        assert first["policy"] == "middle"
        assert first["dropped"][0]["message"] == 3  # behind the first turn
        assert server.ask(as_caller(chat(messages=HISTORY, context_policy="error"), "key")).status == 400
        for truncation, policy in (("auto", "drop_oldest_turns"), ("disabled", None)):
            body = {"model": "small", "input": HISTORY, "truncation": truncation, "max_output_tokens": 12}
            answer = server.ask(as_caller(request("POST", "/v1/responses", body | {"ignore_eos": True}), "key"))
            assert answer.status == (200 if policy else 400)
            if policy is not None:
                assert (answer.json["context"]["policy"], answer.json["truncation"]) == (policy, "auto")
        long, short = list(range(40, 140)) * 3, list(range(40, 50))
        answer = server.ask(as_caller(completion(prompt=[long, short]), "key"))
        (cut,) = told(answer)["dropped"]
        assert (cut["prompt"], cut["tokens"][0]) == (0, (LIMITS.max_model_len - 12) // 2)
        start, end = cut["tokens"]
        assert answer.usage["prompt_tokens"] == len(long) - (end - start) + len(short) == told(answer)["kept_tokens"]
        same = server.ask(as_caller(completion(prompt=[long[:start] + long[end:], short]), "key"))
        assert same.text() == answer.text()


@pytest.mark.parametrize(
    ("policy", "param"),
    [
        ("oldest", "context_policy"),
        ({"type": "middle", "keep": 3}, "context_policy.keep"),
        ({"budgets": {"turns": 5}}, "context_policy.type"),
        ({"type": "middle", "budgets": {"turns": -1}}, "context_policy.budgets.turns"),
    ],
)
def test_a_policy_that_is_none_is_refused(policy: Any, param: str) -> None:
    answer = ask(chat(context_policy=policy))
    assert (answer.status, answer.json["error"]["param"]) == (400, param)


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses"])
@pytest.mark.parametrize("messages", [HISTORY[1:], HISTORY[1:3]])
@pytest.mark.parametrize("policy", [None, *Policy])
def test_counts_are_what_is_billed(path: str, messages: Any, policy: Policy | None) -> None:
    """By the request's policy, or its tenant's."""
    is_messages = path == "/v1/messages"
    fields = {"messages": messages, "max_tokens": 12} if is_messages else {"input": messages, "max_output_tokens": 12}
    body = {"model": "small", **fields} | ({} if policy is None else {"context_policy": policy})
    with serving(tenants=(keyed_tenant("acme", "key", context_policy=Policy.DROP_OLDEST_TURNS),)) as server:
        counted_at = f"{path}/count_tokens" if is_messages else f"{path}/input_tokens"
        counted = server.ask(as_caller(request("POST", counted_at, body), "key")).json["input_tokens"]
        answer = server.ask(as_caller(request("POST", path, body), "key"))
        leaves_turns_out = policy in (None, Policy.DROP_OLDEST_TURNS, Policy.MIDDLE)
        assert answer.status == (200 if leaves_turns_out or len(messages) < 3 else 400)
        if answer.status == 400:  # the whole is counted
            assert counted > LIMITS.max_model_len
            return
        usage = answer.json["usage"]
        assert counted == usage["input_tokens"] + usage.get("cache_read_input_tokens", 0)


def test_what_no_policy_can_make_fit_is_refused() -> None:
    long = [SYSTEM, *HISTORY[1:3], {"role": "user", "content": "word " * 400}]
    for policy in Policy:
        answer = ask(chat(messages=long, context_policy=policy))
        assert (answer.status, answer.json["error"]["code"]) == (400, "context_length_exceeded")


@pytest.mark.parametrize("stream", [True, False])
def test_every_surface_tells_what_was_left_out(stream: bool) -> None:
    with serving() as server:
        asked = {"model": "small", "stream": stream, **OLDEST}
        chats = {"messages": HISTORY[1:], "max_tokens": 12}
        for path, body in (
            ("/v1/messages", chats),
            ("/api/chat", chats),
            ("/api/generate", {"prompt": "and now?", "max_tokens": 12}),
            ("/v1/responses", {"input": HISTORY, "max_output_tokens": 12}),
            ("/completion", {"prompt": [50] * 500, "context_policy": "middle"}),
        ):
            answer = server.ask(request("POST", path, asked | body))
            assert answer.status == 200
            assert b'"kept_tokens"' in answer.body, path


def test_documents_have_a_budget_of_their_own(tmp_path: Path) -> None:
    """The lowest go, by their scores; the answer is that of the prompt without them, and the ledger has it."""
    showing = "{% for one in documents or [] %}[{{ one.text }}]{% endfor %}" + CHATML
    documents = [{"id": f"d{score}", "score": score, "text": f"{score} {'word ' * 6}"} for score in (2, 0, 3, 1)]
    room = round(2.5 * len(TOKENIZER.encode(documents[0]["text"])))
    with serving(ledger=tmp_path / "ledger.db") as server:
        own = server.generations.known_own
        template = ChatTemplate({"default": showing}, {}, LIMITS.max_model_len)
        server.generations.own = own._replace(reader=replace(own.reader, chat_template=template))
        policy = {"type": "drop_lowest_documents", "budgets": {"documents": room}}
        answer = server.ask(chat(documents=documents, context_policy=policy))
        context = told(answer)
        assert context["dropped"] == [{"document": "d0"}, {"document": "d1"}]
        as_text = [one | {"score": str(one["score"])} for one in documents]
        assert server.ask(chat(documents=as_text, context_policy=policy)).json["context"] == answer.json["context"]
        for bad in ("high", True, []):
            refused = server.ask(chat(documents=[documents[0] | {"score": bad}], context_policy=policy))
            assert refused.json["error"]["param"] == "documents[0].score"
        same = server.ask(chat(documents=[documents[0], documents[2]]))
        assert (same.text(), same.usage["prompt_tokens"]) == (answer.text(), context["kept_tokens"])
    assert [row.context and json.loads(row.context) for row in rows(tmp_path / "ledger.db")] == [context, context, None]
