"""The app on the simulated server: routes, refusals, ids, readiness."""

from collections.abc import Callable
from hashlib import sha256
from typing import Any

import pytest

from core.errors import ErrorKind, ServiceError
from core.plan import RunnerLimits
from server import prompts
from server.gate.tenants import Limits, Tenant
from server.generation import OFFLOAD_BYTES
from tests.server.simulated_server import (
    LIMITS,
    MODEL,
    STREAM,
    TOKENIZER,
    SimulatedServer,
    answers,
    as_caller,
    ask,
    chat,
    completion,
    keyed_tenant,
    refusal_of,
    request,
    serving,
)


def refusal(data: bytes, method: str = "POST", **server: Any) -> tuple[int, str]:
    """Status and code."""
    answer = ask(data, method, **server)
    error = answer.json["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["message"]
    return answer.status, error["code"]


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (request("GET", "/v1/nothing"), (404, "not_found")),
        (request("GET", "/v1/models/"), (404, "not_found")),
        (request("GET", "/v1/models/large"), (404, "model_not_found")),
        (request("POST", "/tokenize", {"model": "large", "prompt": "a"}), (404, "model_not_found")),
        (request("DELETE", "/v1/requests/nobody%27s"), (404, "request_not_found")),
        (request("GET", "/v1/chat/completions"), (405, "method_not_allowed")),
        (request("POST", "/health", {}), (405, "method_not_allowed")),
        (request("POST", "/v1/completions", b"<a/>", "Content-Type: text/xml"), (415, "unsupported_media_type")),
        (request("POST", "/tokenize", b"a=b", "Content-Type: text/plain"), (415, "unsupported_media_type")),
        (request("POST", "/v1/completions", b"{"), (400, "invalid_json")),
        (request("POST", "/v1/completions", b" " * 100_001), (413, "body_too_large")),
        (chat(model="large"), (404, "model_not_found")),
        # What is known of another model is not what these are held against
        (chat(model="large", logit_bias={"99999": 1}), (404, "model_not_found")),
        (completion(model="large", prompt=[99_999]), (404, "model_not_found")),
        (
            request("POST", "/v1/responses", {"model": "large", "input": "a", "stop_token_ids": [99_999]}),
            (404, "model_not_found"),
        ),
        (request("POST", "/detokenize", {"model": "large", "tokens": [99_999]}), (404, "model_not_found")),
        (request("POST", "/detokenize", {"tokens": [99_999]}), (400, "invalid_value")),
        (chat(messages=[]), (400, "invalid_value")),
        (chat(n=9), (400, "invalid_value")),
        (completion(prompt=[7] * 200), (400, "context_length_exceeded")),
        (completion(prompt=[]), (400, "invalid_value")),
    ],
)
def test_refusals_have_their_status_and_code(data: bytes, expected: tuple[int, str]) -> None:
    assert refusal(data) == expected


@pytest.mark.parametrize("prefix", ["/", "/v1/models/", "/v1/requests/"])
@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE"])
def test_refusals_repeat_a_long_path_in_part(prefix: str, method: str) -> None:
    answer = ask(request(method, prefix + "a" * 4000))
    assert 400 <= answer.status < 500
    assert len(answer.json["error"]["message"]) < 1000


@pytest.mark.parametrize("fields", [{}, STREAM, {"max_tokens": 500}])
def test_more_min_tokens_than_the_context_leaves_are_refused(fields: dict[str, Any]) -> None:
    fields = {"max_tokens": None, **fields}  # the prompt has 18 tokens, the context 200
    answer = ask(chat(min_tokens=183, **fields))
    error = answer.json["error"]
    assert (answer.status, error["param"], error["code"]) == (400, "min_tokens", "context_length_exceeded")
    assert "leaves 182" in error["message"]
    assert ask(chat(min_tokens=182, **fields)).finish_reason() == "length"


LONG, TOO_LONG = "a step " * 200, "a step " * 12_000  # refused by its tokens, and by its characters


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/v1/responses", {"input": LONG}, "input"),
        ("/v1/responses", {"input": TOO_LONG}, "input"),
        ("/v1/responses", {"input": [{"role": "user", "content": LONG}]}, "input"),
        ("/v1/responses/input_tokens", {"input": TOO_LONG}, "input"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": LONG}]}, "messages"),
        ("/tokenize", {"messages": [{"role": "user", "content": TOO_LONG}]}, "messages"),
        ("/tokenize", {"prompt": TOO_LONG}, "prompt"),
        ("/v1/completions", {"prompt": LONG}, "prompt"),
        ("/v1/completions", {"prompt": ["a", TOO_LONG]}, "prompt[1]"),
    ],
)
def test_a_prompt_that_is_too_long_is_told_by_the_field_that_it_came_in(
    path: str, fields: dict[str, Any], param: str
) -> None:
    answer = ask(request("POST", path, {"model": MODEL, **fields}))
    error = answer.json["error"]
    assert (answer.status, error["param"], error["code"]) == (400, param, "context_length_exceeded")


def test_a_prompt_that_fills_the_context_is_told_that_an_answer_has_no_room() -> None:
    message = ask(completion(prompt=[7] * 200)).json["error"]["message"]
    assert "the prompt has 200 tokens, which leaves none for an answer." in message


@pytest.mark.parametrize(("most", "status"), [(60, 200), (59, 400)])
def test_logprobs_of_a_prompt_are_not_written_for_any_number_of_answers(
    monkeypatch: pytest.MonkeyPatch, most: int, status: int
) -> None:
    monkeypatch.setattr(prompts, "MOST_ECHOED", most)
    answer = ask(completion(prompt=[7] * 10, n=2, logprobs=2, echo=True, max_tokens=1))
    assert answer.status == status
    if status == 400:
        assert answer.json["error"]["param"] == "n"


def test_wrong_method_names_the_right_ones() -> None:
    assert ask(request("PUT", "/v1/completions", {})).headers["allow"] == "POST"
    assert ask(request("PUT", "/v1/models/small")).headers["allow"] == "GET, HEAD"


def test_more_choices_than_the_engine_has_room_for_are_refused() -> None:
    limits = RunnerLimits(64, 4, 2, 16, 200, TOKENIZER.vocab_size)
    answer = ask(chat(n=3), limits=limits)
    assert (answer.status, answer.json["error"]["param"]) == (400, "n")
    assert ask(chat(n=2), limits=limits).status == 200


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses", "/tokenize"])
@pytest.mark.parametrize("coding", ["gzip", "GZIP", "br, identity"])
def test_packed_body_is_refused_by_the_field_that_says_so(path: str, coding: str) -> None:
    answer = ask(request("POST", path, b"\x1f\x8b", f"Content-Encoding: {coding}"))
    error = answer.json["error"]
    assert (answer.status, error["code"], error["param"]) == (415, "unsupported_content_encoding", "content-encoding")


def test_bodies_with_a_json_type_or_none_that_are_not_packed_are_taken() -> None:
    for line in (
        "Content-Type: application/json; charset=utf-8",
        "Content-Type: application/problem+json",
        "X: y",
        "Content-Encoding: identity",
    ):
        assert ask(request("POST", "/tokenize", {"prompt": "The engine"}, line)).json["count"] > 0


@pytest.mark.parametrize("lines", [(), ("Authorization: Bearer wrong",), ("Authorization: Basic s3cret",)])
def test_key_is_asked_for_before_the_body_is_read(lines: tuple[str, ...]) -> None:
    server = SimulatedServer(keys=("s3cret",))
    (refused,) = answers(
        bytes(server.send(request("POST", "/v1/completions", None, "Content-Length: 90000", *lines)).received)
    )
    assert refusal_of(refused) == (401, "invalid_api_key")
    assert refused.headers["www-authenticate"] == "Bearer"
    server.close()


@pytest.mark.parametrize("sane", ["abc-1.2_3:4", "x" * 128])
@pytest.mark.parametrize("insane", ["", "x" * 129, "a b", "a<b>", "é", "a,b"])
def test_sane_request_id_is_echoed_and_another_replaced_by_ours(sane: str, insane: str) -> None:
    for theirs, shown in ((sane, sane), (insane, "r1")):
        answer = ask(request("GET", "/health", None, f"X-Request-Id: {theirs}"), "GET")
        assert answer.headers["x-request-id"] == shown


def test_slow_body_and_slow_head_are_the_same_error(server: SimulatedServer) -> None:
    slow = [server.send(b"GET / HT"), server.send(b"POST /tokenize HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\n")]
    server.run_for(31)
    errors = [answers(bytes(transport.received))[0].json["error"] for transport in slow]
    assert errors[0]["type"] == errors[1]["type"] == "timeout_error"
    assert errors[0]["code"] == errors[1]["code"] == "request_timeout"


@pytest.mark.parametrize(
    ("method", "path"),
    [
        *(("GET", path) for path in ("/metrics", "/health", "/ready", "/v1/models", "/nothing")),
        ("PUT", "/health"),
        ("POST", "/v1/chat/completions"),
    ],
)
def test_every_document_bears_an_id_and_where_time_went_and_is_not_to_be_kept(method: str, path: str) -> None:
    headers = ask(request(method, path), method).headers
    assert headers["x-request-id"] == "r1"
    assert "total;dur=" in headers["server-timing"]
    assert headers["cache-control"] == "no-store"


def test_head_request_gets_the_head_alone() -> None:
    answer = ask(request("HEAD", "/v1/models"), "HEAD")
    assert (answer.status, answer.body) == (200, b"")
    assert int(answer.headers["content-length"]) > 0


def test_models_are_shown() -> None:
    (model,) = ask(request("GET", "/v1/models"), "GET").json["data"]
    assert (model["id"], model["max_model_len"]) == (MODEL, 200)
    assert ask(request("GET", f"/v1/models/{MODEL}"), "GET").json == model


def test_tokens_go_there_and_back() -> None:
    text = "The engine thread: 你好"
    tokenized = ask(request("POST", "/tokenize", {"prompt": text, "return_token_strs": True})).json
    assert len(tokenized["token_strs"]) == tokenized["count"] == len(tokenized["tokens"])
    assert ask(request("POST", "/detokenize", {"tokens": tokenized["tokens"][1:]})).json["prompt"] == text
    messages = [{"role": "user", "content": "step"}]
    chat_ids = ask(request("POST", "/tokenize", {"messages": messages})).json
    assert chat_ids["count"] == ask(chat()).usage["prompt_tokens"]


def test_input_tokens_are_those_the_answer_bills() -> None:
    body = {"model": MODEL, "input": "step"}
    counted = ask(request("POST", "/v1/responses/input_tokens", body)).json
    whole = ask(request("POST", "/v1/responses", {**body, "max_output_tokens": 3})).json
    assert counted == {"object": "response.input_tokens", "input_tokens": whole["usage"]["input_tokens"]}


def test_no_more_ids_are_detokenized_than_a_context_holds() -> None:
    num_ids = LIMITS.max_model_len
    assert ask(request("POST", "/detokenize", {"tokens": [64] * num_ids})).status == 200
    longer = ask(request("POST", "/detokenize", {"tokens": [64] * (num_ids + 1)}))
    assert refusal_of(longer) == (400, "context_length_exceeded")
    assert longer.json["error"]["param"] == "tokens"
    assert ask(request("POST", "/detokenize", {"tokens": [64] * 4000})).status == 413  # without parsing it


@pytest.mark.parametrize("size", [1, OFFLOAD_BYTES])
def test_tokenizing_a_long_text_is_work_for_elsewhere(server: SimulatedServer, size: int) -> None:
    offloaded: list[Callable[[], Any]] = []

    async def offload(work: Callable[[], Any]) -> Any:
        offloaded.append(work)
        return work()

    server.generations.offload = offload
    assert server.ask(request("POST", "/tokenize", {"prompt": "^" * size})).json["count"] > 0
    num_ids = min(size, LIMITS.max_model_len)
    detokenized = server.ask(request("POST", "/detokenize", {"tokens": [64] * num_ids}))
    assert detokenized.json["prompt"] == "^" * num_ids
    assert len(offloaded) == (1 if size > 1 else 0)


def test_while_loading_probes_answer_and_the_rest_says_the_stage() -> None:
    server = SimulatedServer(is_ready=False)
    server.readiness.stage = "loading weights"
    refused = server.metrics.refused
    for data in (request("GET", "/ready"), chat(), request("GET", "/v1/models"), request("DELETE", "/v1/requests/a")):
        answer = server.ask(data)
        assert (answer.status, answer.json["error"]["code"]) == (503, "loading")
        assert "loading weights" in answer.json["error"]["message"]
        assert (answer.headers["retry-after"], answer.headers["retry-after-ms"]) == ("1", "1000")
    assert refused == {"loading": 3}, "a probe that is told no is no request refused"
    assert server.ask(request("GET", "/health"), "GET").status == 200
    assert server.ask(request("GET", "/metrics"), "GET").status == 200
    server.close()


def test_draining_refuses_new_requests_and_finishes_those_in_progress(server: SimulatedServer) -> None:
    transport = server.send(chat(**STREAM))
    server.step()
    server.readiness.is_draining = True
    assert refusal_of(server.ask(request("GET", "/ready"), "GET")) == (503, "draining")
    assert refusal_of(server.ask(chat())) == (503, "draining")
    server.run()
    assert answers(bytes(transport.received))[0].text() == ask(chat()).text()


def test_who_is_still_sending_is_told_of_the_end(server: SimulatedServer) -> None:
    whole = chat()
    for data in (whole, whole.replace(b"/v1/chat/completions", b"/tokenize"), chat(**STREAM)):
        transport = server.send(data[:-1])
        server.app.fail_all(ServiceError(ErrorKind.UNAVAILABLE, "Ending.", "draining", retry_after_s=5))
        server.loop.settle()
        (answer,) = answers(bytes(transport.received))
        assert refusal_of(answer) == (503, "draining")


def test_pipelined_requests_are_answered_in_order(server: SimulatedServer) -> None:
    transport = server.send(chat() + request("GET", "/health") + completion(**STREAM) + chat(n=9))
    server.run()
    found = answers(bytes(transport.received))
    assert [answer.status for answer in found] == [200, 200, 200, 400]
    assert found[0].text() == ask(chat()).text()
    assert found[2].text() == ask(completion()).text()


def test_paths_without_v1_are_the_same() -> None:
    body = {"messages": [{"role": "user", "content": "step"}], "max_tokens": 3}
    told = [ask(request("POST", path, body)).json for path in ("/v1/chat/completions", "/chat/completions")]
    assert told[0]["choices"] == told[1]["choices"]
    assert {one["model"] for one in told} == {MODEL}  # which need not be named: it is the one that there is
    assert ask(request("GET", "/models"), "GET").json == ask(request("GET", "/v1/models"), "GET").json
    assert [ask(request(method, "/ping"), method).status for method in ("GET", "POST")] == [200, 200]


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("/v1/chat/completion", "/v1/chat/completions"),
        ("/v2/chat/completions", "/v1/chat/completions"),
        ("/api/v1/completions/", "/v1/completions"),
        ("/v1/tokenize", "/tokenize"),
        ("/tokenise", "/tokenize"),
        ("/healthz", "/health"),
        ("/v1/embeddings", None),
        ("/x", None),
    ],
)
def test_a_path_that_is_not_here_is_told_what_was_meant(path: str, meant: str | None) -> None:
    message = ask(request("POST", path, {})).json["error"]["message"]
    assert (f"did you mean {meant}?" in message) == (meant is not None)
    assert ("did you mean" in message) == (meant is not None)
    assert "/admin" not in message


def test_the_tokenizer_is_told_as_evaluation_wants_it() -> None:
    info = ask(request("GET", "/tokenizer_info"), "GET").json
    assert {"bos_token", "eos_token", "pad_token", "chat_template", "model_max_length"} <= info.keys()
    assert info["model_max_length"] == 200
    text = "step"
    plain = ask(request("POST", "/tokenize", {"prompt": text, "add_special_tokens": False})).json["tokens"]
    assert plain == TOKENIZER.encode(text, add_special_tokens=False)


def test_what_tells_of_the_tokenizer_is_counted() -> None:
    with serving(tenants=(keyed_tenant("acme", "key", limits=Limits(requests_per_minute=1)),)) as server:
        asked = as_caller(request("GET", "/tokenizer_info"), "key")
        assert [server.ask(asked, "GET").status for _ in range(2)] == [200, 429]


@pytest.mark.parametrize("num_sequences", [1, 3])
def test_a_batch_of_256_prompts_is_one_request_that_leaves_nothing_behind(num_sequences: int) -> None:
    """Its tokens are reserved for each prompt and answer, and settled; one over the quota is refused whole."""
    limits = Limits(tokens_per_minute=60, burst_tokens=20_000, requests_per_minute=60)
    tenant = Tenant(name="acme", key_sha256=(sha256(b"k").hexdigest(),), limits=limits)
    server = SimulatedServer(tenants=(tenant,))
    fields: dict[str, Any] = {
        "max_tokens": 2,
        "n": num_sequences,
        "ignore_eos": True,
        "stop": [f"~{i}" for i in range(16)],
    }

    def batch(num_tokens: int) -> Any:
        data = completion(prompt=[[5 + i % 40] * num_tokens for i in range(256)], **fields)
        return server.ask(data.replace(b"Host: localhost", b"Host: localhost\r\nAuthorization: Bearer k", 1))

    assert (batch(100).status, batch(100).headers["x-ratelimit-remaining-tokens"]) == (429, "20000")
    answer = batch(8)
    assert answer.status == 200
    assert [choice["index"] for choice in answer.json["choices"]] == list(range(256 * num_sequences))
    assert answer.usage["completion_tokens"] == 2 * 256 * num_sequences
    assert answer.usage["prompt_tokens"] == 8 * 256
    server.close()


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("POST", "/v1/messages/batches", 404),
        ("GET", "/v1/messages", 405),
        ("POST", "/api/pull", 404),
        ("DELETE", "/api/chat", 405),
    ],
)
def test_refusals_have_the_form_of_the_surface_above_them(
    server: SimulatedServer, method: str, path: str, status: int
) -> None:
    answer = server.ask(request(method, path), method)
    assert (answer.status, "allow" in answer.headers) == (status, status == 405)
    if path.startswith("/api/"):
        assert isinstance(answer.json["error"], str)
        answer = server.ask(request(method, "/v1/complete", None, "anthropic-version: 2023-06-01"), method)
        assert answer.status == 404
    if answer.status == 404 or not path.startswith("/api/"):
        assert answer.json["type"] == "error"
        assert answer.json["request_id"] == answer.headers["request-id"]
