"""Requests that ask for what cannot be: status, code, the field at fault, and a connection that goes on."""

import json
from typing import Any

import pytest

from tests.e2e.conftest import API_KEY, MODEL
from tests.e2e.raw_http import RawAnswer, RawClient, ask, connected, post, post_bytes, request_bytes
from tests.e2e.server_process import ServerProcess

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
USER = [{"role": "user", "content": "hi"}]
IMAGE = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}]}]
DEEP = b"[" * 100 + b"]" * 100


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": USER} | fields


def completion(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": "hi"} | fields


def response(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "input": "hi"} | fields


def ask_on(client: RawClient, path: str, body: bytes) -> RawAnswer:
    client.send(request_bytes("POST", path, body))
    return client.read_answer()


BAD_BODIES = {
    "empty": b"",
    "NaN": b'{"model": "small", "messages": [], "temperature": NaN}',
    "a key twice": b'{"model": "small", "model": "other", "messages": []}',
    "not UTF-8": b'{"model": "\xff\xfe"}',
    "nested too deep": b'{"model": "small", "messages": ' + DEEP + b"}",
}


@pytest.mark.parametrize("body", BAD_BODIES.values(), ids=BAD_BODIES.keys())
def test_body_that_is_no_json_or_too_much_is_refused_and_the_connection_kept(
    server: ServerProcess, body: bytes
) -> None:
    with connected(server.port) as client:
        for path in (CHAT, COMPLETIONS, RESPONSES, "/tokenize"):
            answer = ask_on(client, path, body)
            code = "json_too_large" if body is BAD_BODIES["nested too deep"] else "invalid_json"
            assert (answer.status, answer.code, answer.error["param"]) == (400, code, None)


# path, body, code, param; the status is 400
BAD_FIELDS: list[tuple[str, dict[str, Any], str, str]] = [
    (CHAT, chat(messages=[]), "invalid_value", "messages"),
    (CHAT, chat(messages=[{"content": "hi"}]), "missing_required_parameter", "messages[0].role"),
    (CHAT, chat(messages=IMAGE), "unsupported_content_type", "messages[0].content[0].type"),
    (CHAT, chat(stream="yes"), "invalid_type", "stream"),
    (CHAT, chat(temperature=2.1), "invalid_value", "temperature"),
    (CHAT, chat(n=65), "invalid_value", "n"),
    (CHAT, chat(n=10**30), "invalid_value", "n"),
    (CHAT, chat(stop_token_ids=[10**6]), "invalid_value", "stop_token_ids[0]"),
    (CHAT, chat(logit_bias={"1000000": 1}), "invalid_value", "logit_bias[1000000]"),
    (CHAT, chat(response_format={"type": "json_schema"}), "missing_required_parameter", "response_format.json_schema"),
    (CHAT, chat(guided_json={"not": {}}), "invalid_value", "guided_json"),
    (CHAT, chat(guided_regex="(a"), "invalid_value", "guided_regex"),
    (CHAT, chat(tools=[{"type": "function", "function": {"name": "f"}}]), "unsupported_parameter", "tools"),
    (CHAT, chat(messages=[{"role": "user", "content": "hi " * 3000}]), "context_length_exceeded", "messages"),
    (COMPLETIONS, completion(prompt=["a", 1]), "invalid_value", "prompt"),
    (COMPLETIONS, completion(prompt=[[3], [10**12]]), "invalid_value", "prompt[1][0]"),
    (COMPLETIONS, completion(prompt=["a"] * 257), "invalid_value", "prompt"),
    (COMPLETIONS, completion(prompt=[5] * 2048), "context_length_exceeded", "prompt"),
    (COMPLETIONS, completion(prompt=["a", "hi " * 3000]), "context_length_exceeded", "prompt[1]"),
    (COMPLETIONS, completion(prompt="hi " * 30_000), "context_length_exceeded", "prompt"),
    (COMPLETIONS, completion(suffix="x"), "unsupported_parameter", "suffix"),
    (RESPONSES, response(input=7), "invalid_type", "input"),
    (RESPONSES, response(previous_response_id="resp_1"), "unsupported_parameter", "previous_response_id"),
    ("/tokenize", {"prompt": "hi " * 30_000}, "context_length_exceeded", "prompt"),
    ("/detokenize", {"model": MODEL, "tokens": [512]}, "invalid_value", "tokens[0]"),
]


@pytest.mark.parametrize(
    ("path", "body", "code", "param"), BAD_FIELDS, ids=[f"{path} {param} {code}" for path, _, code, param in BAD_FIELDS]
)
def test_bad_field_is_named_and_the_connection_kept(
    server: ServerProcess, path: str, body: dict[str, Any], code: str, param: str
) -> None:
    with connected(server.port) as client:
        for asked in (body, {"stream": True} | body):
            answer = ask_on(client, path, json.dumps(asked).encode())
            assert (answer.status, answer.code, answer.error["param"]) == (400, code, param)
        assert client.is_kept_open()


def test_too_long_a_prompt_is_told_both_counts(server: ServerProcess) -> None:
    message = post(server.port, COMPLETIONS, completion(prompt=[5] * 3000)).error["message"]
    assert "2048" in message
    assert "3000" in message


def test_large_texts_are_tokenized_as_small_ones_are(server: ServerProcess) -> None:
    ten, twenty, large = (post(server.port, "/tokenize", {"prompt": "cache step " * n}).json for n in (10, 20, 5000))
    assert large["count"] == ten["count"] + 499 * (twenty["count"] - ten["count"])
    batches = (large["tokens"][start : start + 2000] for start in range(0, large["count"], 2000))  # the context: 2048
    assert (
        "".join(post(server.port, "/detokenize", {"tokens": ids}).json["prompt"] for ids in batches)
        == "cache step " * 5000
    )


def test_prompt_that_leaves_room_for_one_token_gets_it(server: ServerProcess) -> None:
    answer = post(server.port, COMPLETIONS, completion(prompt=[5] * 2047, max_tokens=10, ignore_eos=True)).json
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 1


def test_unknown_model_is_told_what_is_served(server: ServerProcess) -> None:
    for path, body in ((CHAT, chat(model="gpt")), (COMPLETIONS, completion(model="gpt"))):
        answer = post(server.port, path, body)
        assert (answer.status, answer.code, answer.error["param"]) == (404, "model_not_found", "model")
        assert MODEL in answer.error["message"]


def test_unknown_fields_are_ignored_and_counted(server: ServerProcess) -> None:
    assert post(server.port, COMPLETIONS, completion(max_tokens=1, no_such_field=1)).status == 200
    assert 'field="no_such_field"} 1' in ask(server.port, "GET", "/metrics").body.decode()


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("GET", CHAT, "POST"),
        ("PUT", "/v1/models", "GET, HEAD"),
        ("POST", f"/v1/models/{MODEL}", "GET, HEAD"),
        ("PUT", "/v1/requests/x", "GET, HEAD, DELETE"),
    ],
)
def test_wrong_method_is_told_the_right_one(server: ServerProcess, method: str, path: str, allowed: str) -> None:
    answer = ask(server.port, method, path)
    assert (answer.status, answer.code, answer.headers["allow"]) == (405, "method_not_allowed", allowed)


def test_unknown_path_is_told_the_known_ones(server: ServerProcess) -> None:
    answer = ask(server.port, "GET", "/v1/images")
    assert (answer.status, answer.code) == (404, "not_found")
    assert CHAT in answer.error["message"]


def test_other_media_types_are_refused_before_the_body_is_read(server: ServerProcess) -> None:
    with connected(server.port) as client:
        client.send(
            b"POST /v1/completions HTTP/1.1\r\nhost: h\r\ncontent-type: text/plain\r\ncontent-length: 9\r\n\r\n"
        )
        answer = client.read_answer()
        assert (answer.status, answer.code) == (415, "unsupported_media_type")
        assert answer.headers["connection"] == "close"
        assert client.read_to_end() == b""


@pytest.mark.parametrize(
    "header", ["authorization: Bearer sk-wrong", "x-api-key: sk-wrong", "authorization: Basic c2s="]
)
def test_bad_key_is_refused_whatever_it_asks_for(strict_server: ServerProcess, header: str) -> None:
    for method, path in (("POST", CHAT), ("GET", "/v1/models"), ("GET", "/metrics"), ("DELETE", "/v1/requests/x")):
        with connected(strict_server.port) as client:
            client.send(request_bytes(method, path, headers=(header,)))
            answer = client.read_answer()
            assert (answer.status, answer.code) == (401, "invalid_api_key")
            assert answer.headers["www-authenticate"] == "Bearer"
            assert client.is_kept_open()


def test_full_queue_answers_at_once_when_to_come_back(strict_server: ServerProcess) -> None:
    long_one = completion(stream=True, ignore_eos=True, max_tokens=2000)
    with connected(strict_server.port) as first, connected(strict_server.port) as second:
        for client in (first, second):
            client.send(post_bytes(COMPLETIONS, long_one, api_key=API_KEY))
            assert client.read_head()[0] == 200
        answer = post(strict_server.port, COMPLETIONS, completion(), API_KEY)
        assert (answer.status, answer.code) == (503, "overloaded")
        assert int(answer.headers["retry-after"]) >= 1
        assert int(answer.headers["retry-after-ms"]) >= 1
