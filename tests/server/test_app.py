"""The app on the simulated server: routes, refusals, ids, readiness, metrics."""

import json
import re
from collections.abc import Callable
from ipaddress import ip_network
from typing import Any

import pytest

from core.errors import ErrorKind, ServiceError
from core.plan import DeviceError, RunnerLimits, StepOutput, StepPlan
from core.simulation import SimulatedRunner
from server.lifecycle import OFFLOAD_BYTES
from server.listening.client_gate import ClientRules
from server.observing.metrics import MAX_UNKNOWN_FIELDS
from tests.server import raw_http2
from tests.server.fakes import MemoryTransport
from tests.server.simulated_server import (
    MODEL,
    STREAM,
    TOKENIZER,
    Answer,
    SimulatedServer,
    answers,
    chat,
    completion,
    request,
)
from tests.server.test_metrics import samples_of


def ask(data: bytes, method: str = "POST", **server: Any) -> Answer:
    simulated = SimulatedServer(**server)
    answer = simulated.ask(data, method)
    simulated.close()
    return answer


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


def test_body_that_says_it_is_not_packed_is_taken() -> None:
    assert ask(request("POST", "/tokenize", {"prompt": "a"}, "Content-Encoding: identity")).status == 200


def test_bodies_with_a_json_type_or_none_are_taken() -> None:
    body = {"prompt": "The engine"}
    for line in ("Content-Type: application/json; charset=utf-8", "Content-Type: application/problem+json", "X: y"):
        assert ask(request("POST", "/tokenize", body, line)).json["count"] > 0


@pytest.mark.parametrize("line", ["Authorization: Bearer s3cret", "authorization: bearer s3cret", "X-Api-Key: s3cret"])
def test_key_is_taken_in_both_headers(line: str) -> None:
    assert ask(request("GET", "/v1/models", None, line), "GET", keys=("other", "s3cret")).status == 200


@pytest.mark.parametrize("lines", [(), ("Authorization: Bearer wrong",), ("Authorization: Basic s3cret",)])
@pytest.mark.parametrize("path", ["/v1/models", "/metrics", "/v1/chat/completions"])
def test_without_its_key_everything_but_probes_is_refused(path: str, lines: tuple[str, ...]) -> None:
    method = "POST" if path.endswith("completions") else "GET"
    answer = ask(request(method, path, None, *lines), method, keys=("s3cret",))
    assert (answer.status, answer.json["error"]["code"]) == (401, "invalid_api_key")
    assert answer.headers["www-authenticate"] == "Bearer"
    assert ask(request("GET", "/health"), "GET", keys=("s3cret",)).status == 200
    assert ask(request("GET", "/ready"), "GET", keys=("s3cret",)).status == 200


def test_key_is_asked_for_before_the_body_is_read() -> None:
    server = SimulatedServer(keys=("s3cret",))
    transport = server.send(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 90000\r\n\r\n")
    assert answers(bytes(transport.received))[0].status == 401
    server.close()


@pytest.mark.parametrize("shown", ["abc-1.2_3:4", "x" * 128])
def test_sane_request_id_is_echoed(shown: str) -> None:
    assert ask(request("GET", "/health", None, f"X-Request-Id: {shown}"), "GET").headers["x-request-id"] == shown


@pytest.mark.parametrize("theirs", ["", "x" * 129, "a b", "a<b>", "é", "a,b"])
def test_insane_request_id_is_replaced_by_ours(theirs: str) -> None:
    data = request("GET", "/health", None, f"X-Request-Id: {theirs}")
    assert ask(data, "GET").headers["x-request-id"] == "r1"


BROKEN_CHUNK = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nX-Request-Id: theirs\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    ("pieces", "delay_s", "expected", "line"),
    [
        ([b"G" * 9000], 0, (414, "invalid_request_error", "request_line_too_long", "r1"), "- - 414 0.0ms"),
        ([b"GET / HTTP/1.1\r\n\r\n"], 0, (400, "invalid_request_error", "malformed_request", "r1"), "- - 400 0.0ms"),
        (
            [b"CONNECT a:1 HTTP/1.1\r\nHost: a\r\n\r\n"],
            0,
            (501, "server_error", "not_implemented", "r1"),
            "- - 501 0.0ms",
        ),
        ([b"GET / HT"], 11, (408, "timeout_error", "request_timeout", "r1"), "- - 408 10000.0ms"),
        (
            [BROKEN_CHUNK, b"x\r\n"],
            0,
            (400, "invalid_request_error", "malformed_request", "theirs"),
            "POST /v1/completions 400 0.0ms",
        ),
        (
            [BROKEN_CHUNK + b"x\r\n"],
            0,
            (400, "invalid_request_error", "malformed_request", "theirs"),
            "POST /v1/completions 400 0.0ms",
        ),
    ],
)
def test_refusals_of_the_protocol_are_accounted_for_like_others(
    pieces: list[bytes],
    delay_s: float,
    expected: tuple[int, str, str, str],
    line: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", "server.access")
    server = SimulatedServer()
    transport = server.send(pieces[0])
    for piece in pieces[1:]:
        transport.feed(piece)
    server.run_for(delay_s)
    (answer,) = answers(bytes(transport.received))
    error = answer.json["error"]
    status, _, code, _ = expected
    assert (answer.status, error["type"], error["code"], answer.headers["x-request-id"]) == expected
    assert "total;dur=" in answer.headers["server-timing"]
    assert answer.headers["cache-control"] == "no-store"
    (told,) = [record.getMessage().partition(" stages=")[0] for record in caplog.records]
    assert told == f"{line} error={code} client=192.0.2.7:4242"
    assert server.metrics.responses == {status: 1}
    server.close()


def test_a_head_that_never_ends_is_timed_from_its_first_byte_not_from_the_connections(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", "server.access")
    server = SimulatedServer()
    transport = server.send(request("GET", "/health"))
    server.run_for(3)
    transport.feed(b"GET / HT")
    server.run_for(11)
    assert [record.getMessage().partition(" error=")[0] for record in caplog.records] == [
        "GET /health 200 0.0ms client=192.0.2.7:4242",
        "- - 408 10000.0ms",
    ]
    assert caplog.records[1].getMessage().endswith("stages=head:10000.00")
    server.close()


def test_a_head_refused_over_http2_is_timed_from_its_own_first_frame(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "server.access")
    server = SimulatedServer()
    transport = server.send(raw_http2.START)
    server.run_for(3)
    head = raw_http2.literal(b":method", b"CONNECT") + raw_http2.literal(b":authority", b"a:1")
    transport.feed(raw_http2.wire([raw_http2.headers(head[:5], raw_http2.END_STREAM)]))
    server.run_for(2)
    transport.feed(raw_http2.wire([raw_http2.continuation(head[5:])]))
    server.run_for(1)
    transport.feed(raw_http2.wire([raw_http2.headers(head, stream=3)]))
    server.run_for(0)
    lines = [record.getMessage().partition(" error=")[0] for record in caplog.records]
    assert lines == ["- - 501 2000.0ms", "- - 501 0.0ms"]
    server.close()


def test_a_head_that_never_ends_over_http2_is_accounted_for(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "server.access")
    server = SimulatedServer()
    transport = server.send(raw_http2.START)
    server.run_for(3)
    head = raw_http2.block()
    transport.feed(raw_http2.wire([raw_http2.headers(head, raw_http2.END_STREAM)]))
    silent = server.send(raw_http2.START[:30])  # asks for nothing
    server.run_for(11)
    assert [record.getMessage() for record in caplog.records] == [
        "- - 408 10000.0ms error=request_timeout client=192.0.2.7:4242 stages=head:10000.00"
    ]
    assert server.metrics.responses == {408: 1}
    server.run_for(3)
    assert transport.is_lost
    assert silent.is_lost
    server.close()


def test_slow_body_and_slow_head_are_the_same_error() -> None:
    server = SimulatedServer()
    slow = [server.send(b"GET / HT"), server.send(b"POST /tokenize HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\n")]
    server.run_for(31)
    errors = [answers(bytes(transport.received))[0].json["error"] for transport in slow]
    assert errors[0]["type"] == errors[1]["type"] == "timeout_error"
    assert errors[0]["code"] == errors[1]["code"] == "request_timeout"
    server.close()


def test_every_refusal_bears_a_request_id_and_where_time_went_if_any_did() -> None:
    for data in (request("GET", "/nothing"), chat(n=9), request("PUT", "/health")):
        headers = ask(data).headers
        assert headers["x-request-id"] == "r1"
        assert "total;dur=" in headers["server-timing"]


@pytest.mark.parametrize("path", ["/metrics", "/health", "/ready", "/v1/models"])
def test_every_document_says_where_time_went_and_is_not_to_be_kept(path: str) -> None:
    headers = ask(request("GET", path), "GET").headers
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


@pytest.mark.parametrize("size", [1, OFFLOAD_BYTES])
def test_tokenizing_a_long_text_is_work_for_elsewhere(size: int) -> None:
    server = SimulatedServer()
    offloaded: list[Callable[[], Any]] = []

    async def offload(work: Callable[[], Any]) -> Any:
        offloaded.append(work)
        return work()

    server.lifecycle.offload = offload
    assert server.ask(request("POST", "/tokenize", {"prompt": "^" * size})).json["count"] > 0
    assert server.ask(request("POST", "/detokenize", {"tokens": [64] * size})).json["prompt"] == "^" * size
    assert len(offloaded) == (2 if size > 1 else 0)
    server.close()


def test_while_loading_probes_answer_and_the_rest_says_the_stage() -> None:
    server = SimulatedServer(is_ready=False)
    server.readiness.stage = "loading weights"
    for data in (request("GET", "/ready"), chat(), request("GET", "/v1/models"), request("DELETE", "/v1/requests/a")):
        answer = server.ask(data)
        assert (answer.status, answer.json["error"]["code"]) == (503, "loading")
        assert "loading weights" in answer.json["error"]["message"]
        assert (answer.headers["retry-after"], answer.headers["retry-after-ms"]) == ("1", "1000")
    assert server.ask(request("GET", "/health"), "GET").status == 200
    assert server.ask(request("GET", "/metrics"), "GET").status == 200
    server.close()


def test_draining_refuses_new_requests_and_finishes_those_in_progress() -> None:
    server = SimulatedServer()
    transport = server.send(chat(**STREAM))
    server.step()
    server.readiness.is_draining = True
    assert refusal_of(server.ask(request("GET", "/ready"), "GET")) == (503, "draining")
    assert refusal_of(server.ask(chat())) == (503, "draining")
    server.run()
    assert answers(bytes(transport.received))[0].text() == ask(chat()).text()
    server.close()


def test_who_is_still_sending_is_told_of_the_end() -> None:
    server = SimulatedServer()
    whole = chat()
    for data in (whole, whole.replace(b"/v1/chat/completions", b"/tokenize"), chat(**STREAM)):
        transport = server.send(data[:-1])
        server.app.fail_all(ServiceError(ErrorKind.UNAVAILABLE, "Ending.", "draining", retry_after_s=5))
        server.loop.settle()
        (answer,) = answers(bytes(transport.received))
        assert refusal_of(answer) == (503, "draining")
    server.close()


def refusal_of(answer: Answer) -> tuple[int, str]:
    return answer.status, answer.json["error"]["code"]


def test_pipelined_requests_are_answered_in_order() -> None:
    server = SimulatedServer()
    transport = server.send(chat() + request("GET", "/health") + completion(**STREAM) + chat(n=9))
    server.run()
    found = answers(bytes(transport.received))
    assert [answer.status for answer in found] == [200, 200, 200, 400]
    assert found[0].text() == ask(chat()).text()
    assert found[2].text() == ask(completion()).text()
    server.close()


class MortalRunner(SimulatedRunner):
    """Its device is lost at the fifth step."""

    num_steps = 0

    def collect(self, ticket: StepPlan) -> StepOutput:
        self.num_steps += 1
        if self.num_steps == 5:
            raise DeviceError("fell off the bus")
        return super().collect(ticket)


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


class SickRunner(SimulatedRunner):
    """Every row that it samples is found broken."""

    def collect(self, ticket: StepPlan) -> StepOutput:
        output = super().collect(ticket)
        output.failed_rows.update((int(row), "The logits are not finite.") for row in output.rows)
        return output


@pytest.mark.parametrize("fields", [{}, STREAM, {"n": 3}])
def test_failed_row_is_a_500_while_no_token_has_been_sent(fields: dict[str, Any]) -> None:
    answer = ask(chat(**fields), runner=SickRunner)
    assert refusal_of(answer) == (500, "engine_error")
    assert answer.json["error"]["message"] == "The logits are not finite."


def test_fail_all_ends_streams_with_an_event_and_others_with_a_status() -> None:
    server = SimulatedServer()
    streamed, whole = server.send(chat(**STREAM)), server.send(chat())
    for _ in range(4):
        server.step()
    server.lifecycle.fail_all(ServiceError(ErrorKind.UNAVAILABLE, "Going.", "draining", retry_after_s=5))
    server.run()
    assert answers(bytes(streamed.received))[0].events[-1]["error"]["code"] == "draining"
    (answer,) = answers(bytes(whole.received))
    assert (refusal_of(answer), answer.headers["retry-after"]) == ((503, "draining"), "5")
    server.check_idle()
    server.close()


def metrics_of(server: SimulatedServer) -> dict[str, float]:
    return samples_of(server.ask(request("GET", "/metrics"), "GET").body)


def test_metrics_add_up() -> None:
    server = SimulatedServer()
    usages = [server.ask(data).usage for data in (chat(), chat(n=2, **STREAM), completion(prompt=[[5], [6]]))]
    server.ask(chat(n=9))
    server.ask(chat(fast_mode=1, mood='"\\\n'))
    left = server.send(chat(**STREAM))
    server.step()
    left.feed_eof()
    server.run()
    found = metrics_of(server)
    label = f'model_name="{MODEL}"'
    assert found[f'steploop_responses_total{{{label},status="200"}}'] == 4
    assert found[f'steploop_responses_total{{{label},status="400"}}'] == 1
    assert found[f'steploop_responses_total{{{label},status="499"}}'] == 1
    assert found[f"steploop_disconnects_total{{{label}}}"] == 1
    assert found[f'steploop_unknown_fields_total{{{label},field="fast_mode"}}'] == 1
    assert found[f'steploop_unknown_fields_total{{{label},field="mood"}}'] == 1
    num_tokens = sum(usage["completion_tokens"] for usage in usages) + 12 + 1  # that of the client that left
    assert found[f"vllm:generation_tokens_total{{{label}}}"] == num_tokens
    assert found[f'vllm:request_success_total{{{label},finished_reason="length"}}'] == 6
    assert found[f"vllm:time_to_first_token_seconds_count{{{label}}}"] == 5
    assert found[f"vllm:e2e_request_latency_seconds_count{{{label}}}"] == 5
    num_first = 1 + 2 + 2 + 1 + 1  # of each choice, all of which have said something
    assert found[f"vllm:inter_token_latency_seconds_count{{{label}}}"] <= num_tokens - num_first
    assert found[f"vllm:kv_cache_usage_perc{{{label}}}"] == 0
    assert found[f"steploop_steps_total{{{label}}}"] == server.stats.num_steps
    hits = (
        sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in usages)
        + 2 * usages[1]["prompt_tokens_details"]["cached_tokens"]
    )
    assert hits > 0
    for prefix in ("vllm:", "steploop_"):
        assert found[f"{prefix}prefix_cache_hits_total{{{label}}}"] == hits
        assert found[f"{prefix}prefix_cache_queries_total{{{label}}}"] == server.stats.num_cache_queries
    server.close()


def test_unknown_field_has_one_debug_line_whose_name_cannot_break_out(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG", "server.observing.metrics")
    server = SimulatedServer()
    for _ in range(2):
        server.ask(request("POST", "/tokenize", {"prompt": "a", "mood\nforged": 1, "tone": 2}))
    lines = [record.getMessage() for record in caplog.records if record.name == "server.observing.metrics"]
    assert sorted(line.split(" is ignored")[0] for line in lines) == [
        r"the unknown field mood\nforged",
        "the unknown field tone",
    ]
    server.close()


def test_unknown_fields_of_any_number_take_bounded_room() -> None:
    server = SimulatedServer()
    for i in range(10):
        fields = {f"field {i} {j} {'x' * 1000}": 1 for j in range(16)}
        server.ask(request("POST", "/tokenize", {"prompt": "a"} | fields))
    lines = [line for line in metrics_of(server) if line.startswith("steploop_unknown_fields_total")]
    assert len(lines) == MAX_UNKNOWN_FIELDS + 1
    assert all(len(line) < 200 for line in lines)
    assert sum(server.metrics.unknown_fields.values()) == 160
    server.close()


def test_access_lines_say_how_it_ended(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "server.access")
    server = SimulatedServer(runner=MortalRunner)
    server.ask(chat(max_tokens=1))
    server.ask(chat(**STREAM))
    lines = [record.getMessage() for record in caplog.records if record.name == "server.access"]
    assert re.fullmatch(
        r"POST /v1/chat/completions 200 \S+ms ttft=\S+ms prompt=18 cached=0 completion=1 finish=length"
        r" client=192.0.2.7:4242 stages=prefill:\S+",
        lines[0],
    )
    ending = (
        r"cached=16 completion=2 finish=error error=engine_error client=192.0.2.7:4242 stages=prefill:\S+,decode:\S+"
    )
    assert re.search(f" 200 .* {ending}$", lines[1])
    server.close()


@pytest.mark.parametrize("fields", [{}, STREAM])
@pytest.mark.parametrize("num_steps", [0, 1, 4])
def test_client_that_leaves_is_logged_and_counted_as_499(
    fields: dict[str, Any], num_steps: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "server.access")
    server = SimulatedServer()
    transport = server.send(chat(**fields))
    for _ in range(num_steps):
        server.step()
    transport.feed_eof()
    server.run()
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("POST /v1/chat/completions 499 ")
    assert server.metrics.responses == {499: 1}
    assert server.metrics.num_disconnects == 1
    server.close()


def test_client_that_leaves_while_its_body_comes_is_a_499_but_no_generation_that_was_left() -> None:
    server = SimulatedServer()
    server.send(chat()[:-1]).feed_eof()
    server.run()
    assert server.metrics.responses == {499: 1}
    assert server.metrics.num_disconnects == 0
    page = server.ask(request("GET", "/metrics"), "GET").body.decode()
    (told,) = re.findall("# HELP steploop_disconnects_total (.*)", page)
    assert "Generations whose clients left" in told
    assert "499" in told
    server.close()


def test_client_that_leaves_after_the_last_byte_has_had_its_answer() -> None:
    server = SimulatedServer()
    server.ask(chat(**STREAM))
    assert server.metrics.responses == {200: 1}
    server.close()


def test_error_events_are_one_json_line() -> None:
    server = SimulatedServer()
    transport = server.send(chat(**STREAM))
    for _ in range(4):
        server.step()
    server.lifecycle.fail_all(ServiceError(ErrorKind.UNAVAILABLE, "two\nlines\u2028", "draining"))
    server.run()
    block = answers(bytes(transport.received))[0].body.decode().split("\n\n")[-2]
    assert json.loads(block.removeprefix("data: "))["error"]["message"] == "two\nlines\u2028"
    server.close()


# Behind proxies.

PROXIED = ClientRules(
    trusted_proxies=(ip_network("192.0.2.0/24"),), deny=(ip_network("10.6.0.0/16"),), max_per_address=1
)


def forwarded(path: str, *lines: str) -> bytes:
    return request("GET", path, None, *lines)


def statuses(transport: MemoryTransport) -> list[int]:
    return [answer.status for answer in answers(bytes(transport.received))]


def test_the_client_that_a_trusted_proxy_names_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "server.access")
    ask(forwarded("/health", "X-Forwarded-For: 10.6.0.1, 10.0.0.1:99, 192.0.2.8"), "GET", clients=PROXIED)
    assert caplog.records[-1].getMessage().endswith(" client=10.0.0.1:99")
    ask(forwarded("/health", "X-Forwarded-For: 10.0.0.1"), "GET")
    assert caplog.records[-1].getMessage().endswith(" client=192.0.2.7:4242"), "nobody trusts it"


def test_a_denied_client_behind_a_proxy_gets_403_and_the_next_one_is_served() -> None:
    simulated = SimulatedServer(clients=PROXIED)
    transport = simulated.send(forwarded("/health", "X-Forwarded-For: 10.6.0.1"))
    transport.feed(forwarded("/health", "X-Forwarded-For: 10.7.0.1"))
    simulated.loop.settle()
    refused, served = answers(bytes(transport.received), "GET")
    assert (refused.status, refused.json["error"]["code"]) == (403, "permission_denied")
    assert "10.6.0.1" in refused.json["error"]["message"]
    assert served.status == 200
    simulated.close()


def test_requests_at_once_are_counted_by_client_behind_a_proxy() -> None:
    simulated = SimulatedServer(clients=PROXIED)
    one, other = "X-Forwarded-For: 10.0.0.1", "X-Forwarded-For: 10.0.0.2"
    running = simulated.send(
        request("POST", "/v1/completions", {"model": MODEL, "prompt": "The engine", "max_tokens": 50}, one)
    )
    again = simulated.send(forwarded("/health", one))
    assert statuses(again) == [429]
    assert b"retry-after: 1" in again.received
    neighbour = simulated.send(forwarded("/health", other))
    assert statuses(neighbour) == [200]
    simulated.run()
    assert statuses(running) == [200]
    again.feed(forwarded("/health", one))
    simulated.loop.settle()
    assert statuses(again) == [429, 200]
    simulated.close()
