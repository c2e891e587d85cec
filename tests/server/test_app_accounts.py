"""What the app counts and logs of requests, on the simulated server: refused, left, and behind proxies."""

import re
from ipaddress import ip_network

import pytest

from server.listening.clients import ClientRules
from server.observing.metrics import MAX_UNKNOWN_FIELDS, OTHER_FIELDS
from tests.server import raw_http2
from tests.server.fakes import MemoryTransport
from tests.server.simulated_engine import MortalRunner
from tests.server.simulated_server import (
    MODEL,
    STREAM,
    SimulatedServer,
    answers,
    ask,
    chat,
    completion,
    request,
    serving,
)
from tests.server.test_metrics import samples_of

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
    server: SimulatedServer,
    pieces: list[bytes],
    delay_s: float,
    expected: tuple[int, str, str, str],
    line: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", "server.access")
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


def test_a_head_that_never_ends_is_timed_from_its_first_byte_not_from_the_connections(
    server: SimulatedServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "server.access")
    transport = server.send(request("GET", "/health"))
    server.run_for(3)
    transport.feed(b"GET / HT")
    server.run_for(11)
    assert [record.getMessage().partition(" error=")[0] for record in caplog.records] == [
        "GET /health 200 0.0ms client=192.0.2.7:4242",
        "- - 408 10000.0ms",
    ]
    assert caplog.records[1].getMessage().endswith("stages=head:10000.00")


def test_a_head_refused_over_http2_is_timed_from_its_own_first_frame(
    server: SimulatedServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "server.access")
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


def test_a_head_that_never_ends_over_http2_is_accounted_for(
    server: SimulatedServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "server.access")
    transport = server.send(raw_http2.START)
    server.run_for(3)
    head = raw_http2.block()
    transport.feed(raw_http2.wire([raw_http2.headers(head, raw_http2.END_STREAM)]))
    silent = server.send(raw_http2.START[:30])  # asks for nothing
    server.run_for(11)
    assert [record.getMessage() for record in caplog.records] == [
        "- - 408 10000.0ms error=request_timeout http2=ENHANCE_YOUR_CALM client=192.0.2.7:4242 stages=head:10000.00"
    ]
    assert server.metrics.responses == {408: 1}
    server.run_for(3)
    assert transport.is_lost
    assert silent.is_lost


def metrics_of(server: SimulatedServer) -> dict[str, float]:
    return samples_of(server.ask(request("GET", "/metrics"), "GET").body)


def test_metrics_add_up(server: SimulatedServer) -> None:
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


def test_unknown_field_has_one_debug_line_and_no_name_that_may_be_text_or_a_key(
    server: SimulatedServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG", "server.observing.metrics")
    for _ in range(2):
        server.ask(request("POST", "/tokenize", {"prompt": "a", "mood\nforged": 1, "tone": 2, "sl-key": 3}))
    lines = [record.getMessage() for record in caplog.records if record.name == "server.observing.metrics"]
    others = "2 unknown fields are ignored, whose names are not shown"
    assert lines == ["the unknown field tone is ignored", others, others]
    assert server.metrics.unknown_fields == {"tone": 2, OTHER_FIELDS: 4}


def test_unknown_fields_of_any_number_take_bounded_room(server: SimulatedServer) -> None:
    for i in range(10):
        fields = {f"field-{i}-{j}": 1 for j in range(15)} | {"x" * 1000: 1}
        server.ask(request("POST", "/tokenize", {"prompt": "a"} | fields))
    lines = [line for line in metrics_of(server) if line.startswith("steploop_unknown_fields_total")]
    assert len(lines) == MAX_UNKNOWN_FIELDS + 1
    assert all(len(line) < 200 for line in lines)
    assert sum(server.metrics.unknown_fields.values()) == 160


def test_access_lines_say_how_it_ended(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "server.access")
    with serving(runner=MortalRunner) as server:
        server.ask(chat(max_tokens=1))
        server.ask(chat(**STREAM))
        lines = [record.getMessage() for record in caplog.records if record.name == "server.access"]
        assert re.fullmatch(
            r"POST /v1/chat/completions 200 \S+ms ttft=\S+ms prompt=18 cached=0 completion=1 finish=length"
            r" client=192.0.2.7:4242 stages=prefill:\S+",
            lines[0],
        )
        ending = r"cached=16 completion=2 finish=error error=engine_error client=192.0.2.7:4242"
        assert re.search(rf" 200 .* {ending} stages=prefill:\S+,decode:\S+$", lines[1])


def test_client_that_leaves_while_its_body_comes_is_a_499_but_no_generation_that_was_left(
    server: SimulatedServer,
) -> None:
    server.send(chat()[:-1]).feed_eof()
    server.run()
    assert server.metrics.responses == {499: 1}
    assert server.metrics.num_disconnects == 0
    page = server.ask(request("GET", "/metrics"), "GET").body.decode()
    (told,) = re.findall("# HELP steploop_disconnects_total (.*)", page)
    assert "Generations whose clients left" in told
    assert "499" in told


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
    with serving(clients=PROXIED) as simulated:
        transport = simulated.send(forwarded("/health", "X-Forwarded-For: 10.6.0.1"))
        transport.feed(forwarded("/health", "X-Forwarded-For: 10.7.0.1"))
        simulated.loop.settle()
        refused, served = answers(bytes(transport.received), "GET")
        assert (refused.status, refused.json["error"]["code"]) == (403, "permission_denied")
        assert "10.6.0.1" in refused.json["error"]["message"]
        assert served.status == 200


def test_requests_at_once_are_counted_by_client_behind_a_proxy() -> None:
    with serving(clients=PROXIED) as simulated:
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
