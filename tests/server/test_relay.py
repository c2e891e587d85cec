"""Models that upstreams answer for: what passes, what is counted, and what happens when one leaves."""

import asyncio
import contextlib
import gc
import itertools
import json
import random
import subprocess
import threading
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.errors import InvalidRequest, StartupError
from core.plan import StepPlan
from core.simulation import SimulatedRunner
from core.types import Pooling, SamplingParams
from server import relay, relayed
from server.api import chat as chat_api
from server.api import completions
from server.api.fields import GenerationCall, PoolingStyle
from server.api.replies import Surface, status_of
from server.config import ServerConfig
from server.gate.tenants import CLASSES, LOCAL_NAME, Deadlines, DeadlineTable, Limits, Tenant
from server.gate.text_rules import TextRule
from server.generation import Generation
from server.ledger.store import RowState
from server.listening.sockets import Bind, UnixAddress
from server.observing.timing import StageMarks
from server.process import Server
from server.relay import Relay, RelayHandle
from server.relayed import SURFACES as ALL
from server.relayed import Part, Passed, UpstreamAnswer, refusal_of
from server.upstream import pool
from server.upstream.exchange import AnswerHead, Outgoing, UpstreamFault
from server.upstream.pool import LeadingBlocks, leading_blocks
from server.upstream.settings import ModelSettings, UpstreamSettings
from server.wire.http2_frames import FRAME_HEADER, HEADERS, PREFACE
from server.wire.http2_heads import FieldEncoder
from tests.certificates import make_certificate
from tests.core.chat_templates import CHATML
from tests.core.small_tokenizers import byte_level
from tests.server import raw_http2
from tests.server.gateway import (
    ASKED,
    SURFACES,
    before,
    fronting,
    model,
    no_engine,
    relaying,
    saying,
    url_of,
    wait_until,
    whole,
)
from tests.server.inline_ledger import rows
from tests.server.running_server import LIMITS, Running, ask, closing, load_with, open_with, read_answer, serving
from tests.server.simulated_server import MODEL, STREAM, as_caller, chat, keyed_tenant, request, with_lines
from tests.server.test_llama_server import mark

pytestmark = pytest.mark.usefixtures("_keep_interpreter_settings")


def said(surface: str, answer: Any) -> Any:
    """What an answer says, without ids, times and names."""
    if surface == "messages":
        if "event-stream" not in answer.headers["content-type"]:
            return answer.json["stop_reason"], answer.json["usage"]["output_tokens"]
        (delta,) = (one for one in answer.events if one["type"] == "message_delta")
        return delta["delta"]["stop_reason"], delta["usage"]["output_tokens"], answer.events[-1]["type"]
    if surface != "responses":
        counts = answer.usage["prompt_tokens"], answer.usage["completion_tokens"]
        return answer.text(), answer.finish_reason(), counts
    whole = answer.events[-1]["response"] if "event-stream" in answer.headers["content-type"] else answer.json
    return whole["output"][0]["content"], whole["status"], whole["usage"]["output_tokens"]


@pytest.mark.parametrize("protocol", ["auto", "h2", "h1"])
async def test_an_answer_passes_as_the_upstream_gives_it(protocol: str) -> None:
    async with relaying(protocol=protocol) as gateway:
        for surface, ask_for in SURFACES.items():
            for stream in ({}, STREAM if surface in ("chat", "completions") else {"stream": True}):
                direct = await ask(gateway.upstreams[0].server, closing(ask_for(model=MODEL, **stream)))
                relayed = await gateway.ask(ask_for(**stream))
                assert (relayed.status, said(surface, relayed)) == (200, said(surface, direct))
                assert f'"model":"{ASKED}"'.encode() in relayed.body
                assert MODEL.encode() not in relayed.body
        assert gateway.pool.upstreams[0].connections[0].http.is_multiplexed == (protocol != "h1")


async def test_usage_is_shown_to_those_who_ask_and_the_id_is_the_gateways() -> None:
    async with relaying() as gateway:
        answer = await gateway.ask(SURFACES["chat"](stream=True))
        assert all(not event.get("usage") for event in answer.events[:-1])
        assert answer.events[-1] == "[DONE]"
        ids = {event["id"] for event in answer.events[:-1]}
        assert ids == {"chatcmpl-" + answer.headers["x-request-id"]}


async def test_fields_that_the_gateway_does_not_know_reach_the_upstream() -> None:
    async with relaying() as gateway:
        refused = await gateway.ask(SURFACES["chat"](temperature=9))
        assert (refused.status, refused.json["error"]["param"]) == (400, "temperature")
        assert gateway.server._metrics.num_generation_tokens == gateway.server._metrics.num_prompt_tokens == 0
        answer = await gateway.ask(SURFACES["chat"](return_token_ids=True))
        assert answer.json["prompt_token_ids"]


@pytest.mark.parametrize(
    ("fields", "status", "param", "code"),
    [
        ({"model": "nix"}, 404, "model", "model_not_found"),
        ({"model": 7}, 400, "model", "invalid_type"),
        ({"stream": "yes"}, 400, "stream", "invalid_type"),
        ({"max_tokens": 0}, 400, "max_tokens", "invalid_value"),
        ({"n": 65}, 400, "n", "invalid_value"),
        ({"stream_options": 3}, 400, "stream_options", "invalid_type"),
        ({"deadlines": {"ttft_ms": -1}}, 400, "deadlines.ttft_ms", "invalid_value"),
    ],
)
async def test_bad_fields_are_refused_with_their_path(
    fields: dict[str, Any], status: int, param: str, code: str
) -> None:
    async with relaying() as gateway:
        answer = await gateway.ask(SURFACES["chat"](**fields))
        error = answer.json["error"]
        assert (answer.status, error["param"], error["code"]) == (status, param, code), error


@pytest.mark.parametrize("trusted", [True, False])
async def test_a_prompts_logprobs_alone_pass(trusted: bool) -> None:
    async with relaying(trusted=trusted) as gateway:
        fields = {"max_tokens": 0, "logprobs": 1, "prompt": "one step"}
        answer = await gateway.ask(SURFACES["completions"](**fields, echo=True))
        assert (answer.status, answer.text(), answer.usage["completion_tokens"]) == (200, "one step", 0)
        refused = await gateway.ask(SURFACES["completions"](**fields))
        assert (refused.status, refused.json["error"]["param"]) == (400, "max_tokens")


async def test_all_models_are_listed_and_each_request_goes_to_its_own() -> None:
    async with relaying(1, True, aliases=("gpt-4o-mini",)) as gateway:
        listed = await gateway.ask(request("GET", "/v1/models"))
        assert [one["id"] for one in listed.json["data"]] == [MODEL, ASKED, "gpt-4o-mini"]
        for name in (MODEL, ASKED, "gpt-4o-mini"):
            answer = await gateway.ask(chat(model=name))
            assert (answer.status, answer.json["model"]) == (200, name)
        assert gateway.pool.upstreams[0].num_requests == 2
        nameless = await gateway.ask(chat(model=None))
        assert (nameless.status, nameless.json["error"]["code"]) == (400, "missing_required_parameter")


@pytest.mark.parametrize("protocol", ["h2", "h1"])
async def test_a_cancel_frees_the_upstream_and_keeps_http2s_connection(protocol: str) -> None:
    async with relaying(protocol=protocol, config={"total_deadline_s": 50.0}) as gateway:
        reader, writer = await open_with(gateway.server, SURFACES["chat"](stream=True, max_tokens=900))
        await reader.readuntil(b"data: ")
        assert gateway.num_running() == 1
        writer.transport.abort()
        await wait_until(lambda: gateway.num_running() == 0)
        upstream = gateway.pool.upstreams[0]
        assert upstream.num_active == 0
        (connection,) = upstream.connections
        await wait_until(lambda: connection.is_closed == (protocol == "h1"))
        assert (await gateway.ask(SURFACES["chat"]())).status == 200


@pytest.mark.parametrize("protocol", ["h2", "h1"])
async def test_hundreds_of_random_cancels_leave_nothing_on_either_side(protocol: str) -> None:
    async with relaying(protocol=protocol, max_requests=12) as gateway:
        dice = random.Random(3)

        async def leave() -> None:
            fields = {
                "stream": dice.random() < 0.8,
                "max_tokens": dice.choice((1, 40, 150)),
                "n": dice.choice((1, 1, 2)),
            }
            reader, writer = await open_with(gateway.server, SURFACES["chat"](**fields))
            for _ in range(dice.randrange(6)):
                await asyncio.sleep(0)
            await reader.read(dice.choice((0, 0, 1, 500, 3000)))
            writer.transport.abort()

        for _ in range(12):
            await asyncio.gather(*(leave() for _ in range(25)))
        (upstream,) = gateway.pool.upstreams
        await wait_until(lambda: not gateway.server._app.generations.active)  # type: ignore[union-attr]
        await wait_until(lambda: gateway.num_running() == 0)
        assert (upstream.num_active, upstream.num_waiting_tokens, gateway.pool.num_waiting) == (0, 0, 0)
        assert upstream.num_failures == 0  # the upstream did not take it for an attack
        await wait_until(lambda: sum(one.http.num_open for one in upstream.connections) == 0)
        assert (await gateway.ask(SURFACES["chat"]())).status == 200
        engine = gateway.upstreams[0].server._client
        assert engine is not None
        assert engine.stats.num_running == engine.stats.num_waiting == engine.stats.num_used_blocks == 0


@pytest.mark.parametrize("protocol", ["h2", "h1"])
async def test_a_slow_reader_pauses_the_decode_behind_the_gateway(protocol: str) -> None:
    async with relaying(protocol=protocol) as gateway:
        reader, writer = await open_with(gateway.server, SURFACES["chat"](stream=True, max_tokens=900, n=4))
        reader._transport.pause_reading()  # type: ignore[attr-defined]
        client = gateway.upstreams[0].server._client
        assert client is not None
        seen = -1
        while (num := client.stats.num_generated_tokens) != seen:
            seen = num
            await asyncio.sleep(0.3)
        if seen < 3600:  # otherwise the kernel's buffers held all of it
            assert gateway.num_running() == 1
        reader._transport.resume_reading()  # type: ignore[attr-defined]
        received = b""
        while b"[DONE]" not in received:
            received = received[-100:] + await reader.read(65536)
        writer.close()


async def test_quota_and_ledger_have_the_upstreams_usage(tmp_path: Path) -> None:
    tenant = keyed_tenant("acme", limits=Limits(tokens_per_minute=10_000))
    config = {"tenants": (tenant,), "ledger": tmp_path / "ledger.db"}
    async with relaying(config=config) as gateway:
        used = 0
        for fields in ({}, {"stream": True}, {"stream": True, "n": 2}):
            direct = await ask(gateway.upstreams[0].server, closing(chat(**fields | {"stream": False})))
            answer = await gateway.ask(as_caller(SURFACES["chat"](**fields), "acme"))
            assert answer.status == 200
            used += direct.usage["total_tokens"]
        (account, *_) = gateway.server._gate.quotas.accounts
        assert (account.num_reserved, account.num_active) == (0, 0)
        (pool,) = account.tokens
        usage = await gateway.ask(as_caller(request("GET", "/v1/usage?by=model"), "acme"))
        (line,) = usage.json["data"]
        assert (line["model"], line["prompt_tokens"] + line["completion_tokens"]) == (ASKED, used)
        assert pool._taken <= used * pool.SCALE


async def test_what_was_received_of_a_broken_answer_is_billed(tmp_path: Path) -> None:
    async with relaying(config={"ledger": tmp_path / "ledger.db"}) as gateway:
        reader, writer = await open_with(gateway.server, SURFACES["chat"](stream=True, max_tokens=900))
        for _ in range(5):
            await reader.readuntil(b"content")
        writer.transport.abort()
        await wait_until(lambda: not gateway.server._app.generations.active)  # type: ignore[union-attr]
        line = await gateway.usage()
        assert line["completion_tokens"] >= 3
        assert line["prompt_tokens"] > 0


async def test_a_cancelled_answer_is_billed_as_our_own_upstream_counted_it(tmp_path: Path) -> None:
    async with relaying(trusted=True, config={"ledger": tmp_path / "ledger.db"}) as gateway:
        counted = gateway.upstreams[0].server._metrics
        for num_events in (0, 1, 5):
            reader, writer = await open_with(gateway.server, SURFACES["chat"](stream=True, max_tokens=900))
            await wait_until(lambda: gateway.num_running() == 1)
            for _ in range(num_events):
                await reader.readuntil(b"content")
            writer.transport.abort()
            await wait_until(lambda: not gateway.server._app.generations.active)  # type: ignore[union-attr]
        while (line := await gateway.usage())["requests"] != 3:
            pass
        billed = line["prompt_tokens"], line["completion_tokens"]
        assert billed == (counted.num_prompt_tokens, counted.num_generation_tokens)


@pytest.mark.parametrize(
    ("rule", "status", "code"),
    [
        (TextRule(phrase="step", on="prompt"), 400, "content_filter"),
        (TextRule(phrase="elsewhere", on="prompt"), 200, None),
        (TextRule(phrase="elsewhere", on="answer"), 403, "permission_denied"),
    ],
)
async def test_text_rules_hold_or_the_request_is_refused(rule: TextRule, status: int, code: str | None) -> None:
    tenant = keyed_tenant("acme", text_rules=(rule,))
    async with relaying(config={"tenants": (tenant,)}) as gateway:
        for surface in SURFACES.values():
            body = {"prompt": "one step"} if surface is SURFACES["completions"] else {}
            answer = await gateway.ask(as_caller(surface(**body), "acme"))
            assert answer.status == status
            if code is not None:
                assert answer.json["error"]["code"] == code


@pytest.mark.parametrize(
    ("content", "counts"),
    [
        ("data: " + "word " * 300, True),
        ("data:image/png;base64," + "A" * 1500, True),  # a text
        ([{"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 1500}}], False),
        ([{"type": "input_image", "image_url": "data:image/svg+xml;base64," + "A" * 1500}], False),
        ([{"type": "image_url", "image_url": {"url": "data:image/png;base64," + "one word " * 200}}], True),
        ([{"type": "image_url", "image_url": {"url": "data:" + "A" * 1500}}], True),
    ],
)
def test_of_a_prompt_all_but_images_is_reserved(content: Any, counts: bool) -> None:
    fields = {"messages": [{"role": "user", "content": content}]}
    _, num_tokens = relayed.checked_prompt(fields, Tenant(name="acme"))
    assert (num_tokens > 500) == counts


async def test_a_gateway_describes_itself_and_has_no_tokenizer() -> None:
    async with relaying() as gateway, relaying(1, True) as both:
        for path, status in {
            "/version": 200,
            "/server_info": 200,
            "/tokenizer_info": 404,
            "/admin/engine": 404,
        }.items():
            assert (await gateway.ask(request("GET", path))).status == status
        info = (await gateway.ask(request("GET", "/model_info"))).json | (
            await gateway.ask(request("GET", "/server_info"))
        ).json
        assert (info["is_generation"], info["is_embedding"]) == (True, False)  # which is not known
        body = {"model": ASKED, "prompt": "step"}
        for asked in (gateway, both):  # another model's tokens would be wrong
            assert (await asked.ask(request("POST", "/tokenize", body))).status == 404
        assert (await both.ask(request("GET", "/server_info"))).json["served_model_name"] == MODEL


@pytest.mark.parametrize("trusted", [True, False])
async def test_class_and_deadlines_of_the_tenant_go_to_upstreams_of_our_own_alone(
    trusted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    bodies: list[dict[str, Any]] = []
    addressed = pool.Pool.addressed

    def recorded(self: pool.Pool, outgoing: Outgoing, upstream: pool.Upstream) -> Outgoing:
        bodies.extend([orjson.loads(outgoing.body)] if outgoing.body else [])
        return addressed(self, outgoing, upstream)

    monkeypatch.setattr(pool.Pool, "addressed", recorded)
    deadlines = DeadlineTable(ttft_ms=20_000, total_ms=30_000)
    tenant = keyed_tenant("acme", tenant_class="interactive", deadlines=deadlines)
    own = {"total_ms": 9_000, "inter_token_ms": 50_000}
    async with relaying(trusted=trusted, config={"tenants": (tenant,)}) as gateway:
        for fields in ({}, {"priority": 0, "deadlines": own}, {"priority": None, "deadlines": None}):
            assert (await gateway.ask(as_caller(SURFACES["chat"](**fields), "acme"))).status == 200
    told = [(one.get("priority"), one.get("deadlines")) for one in bodies]
    if not trusted:
        assert told == [(None, None), (0, own), (None, None)]
        return
    assert [priority for priority, _ in told] == [CLASSES["interactive"], 0, CLASSES["interactive"]]
    both = [{"ttft_ms": 20_000, "total_ms": 30_000}, {"ttft_ms": 20_000} | own]
    for (_, left), all_of_it in zip(told, [*both, both[0]], strict=True):
        assert left.keys() == all_of_it.keys()
        assert all(all_of_it[name] - 5_000 < left[name] <= all_of_it[name] for name in left)


def test_what_is_left_of_deadlines_is_never_nothing() -> None:
    assert Deadlines(ttft_s=2.0, inter_token_s=1.0).left_after(0.5) == {"ttft_ms": 1500, "inter_token_ms": 1000}
    assert Deadlines(total_s=2.0).left_after(3.0) == {"total_ms": 1}


async def test_the_trace_goes_on_at_the_upstream() -> None:
    async with relaying() as gateway:
        seen: list[Any] = []
        upstream = gateway.upstreams[0].server._app
        upstream.accounting.export = seen.append
        trace_id = "0af7651916cd43dd8448eb211c80319c"
        line = f"traceparent: 00-{trace_id}-b7ad6b7169203331-01"
        answer = await gateway.ask(with_lines(SURFACES["chat"](), line))
        await wait_until(lambda: bool(seen))
        span_id = answer.headers["traceresponse"].split("-")[2]
        assert (seen[0].trace.trace_id, seen[0].trace.parent_id) == (trace_id, span_id)
        assert seen[0].alias == answer.headers["x-request-id"]
        shown = await gateway.ask(request("GET", "/v1/requests/" + answer.headers["x-request-id"]))
        assert shown.json["model"] == ASKED


async def test_with_the_models_tokenizer_prompts_are_counted_before_they_go_out(tmp_path: Path) -> None:
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "max_position_embeddings": 1000}
    files = {
        "tokenizer.json": byte_level().to_str(),
        "config.json": config,
        "tokenizer_config.json": {"chat_template": CHATML},
    }
    for name, content in files.items():
        (tmp_path / name).write_bytes(content.encode() if isinstance(content, str) else orjson.dumps(content))
    async with relaying(tokenizer=str(tmp_path)) as gateway:
        relay = gateway.relay
        names = {"chatcmpl-": "chat", "cmpl-": "completions", "resp_": "responses", "msg_": "messages"}
        for surface in (one for one in ALL if one.prefix in names):
            data = SURFACES[names[surface.prefix]]()
            marks = StageMarks(lambda: 0.0)
            counted = relay.prepare(surface, data.split(b"\r\n\r\n", 1)[1], Tenant(name="t"), marks).prompt.num_tokens
            answer = await gateway.ask(data)
            told = answer.json["usage"]
            prompt = told.get("prompt_tokens") or told["input_tokens"] + told.get("cache_read_input_tokens", 0)
            assert counted == prompt
        image = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:abc"}}]}]
        assert (await gateway.ask(SURFACES["chat"](messages=image))).status == 400  # the upstream's word, not ours
    with pytest.raises(StartupError, match=r"the tokenizer of the model big cannot be used: .*does not exist"):
        Server(ServerConfig(models=(model("http://h:1", tokenizer="/nowhere"),)), no_engine, print)


@pytest.mark.parametrize("surface", [one for one in ALL if one.form in ("chunks", "names")])
async def test_an_upstream_is_told_that_an_answer_is_not_streamed(surface: Any) -> None:
    async with fronting(model("unix:/nowhere")) as front:
        relay = front.relay
        for given, said in (({}, False), ({"stream": None}, False), ({"stream": True}, True)):
            prepared = relay.prepare(surface, orjson.dumps(given), Tenant(name="t"), StageMarks(lambda: 0.0))
            assert orjson.loads(prepared.body)["stream"] is said


async def test_without_a_tokenizer_a_prompt_reserves_a_third_of_its_bytes_and_ids_as_they_are() -> None:
    async with fronting(model("unix:/nowhere")) as front:
        relay = front.relay
        image = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "a" * 999}}
        for surface, body, num_tokens in (
            (completions.SURFACE, {"prompt": "x" * 300}, 100),
            (completions.SURFACE, {"prompt": "é" * 300}, 200),
            (completions.SURFACE, {"prompt": [7, 8, 9]}, 3),
            (completions.SURFACE, {"prompt": ""}, 1),
            (chat_api.SURFACE, {"messages": [{"role": "user", "content": "x" * 296}]}, 100),
            (chat_api.SURFACE, {"messages": [], "tools": [{"name": "x" * 300}]}, 100),
            (chat_api.SURFACE, {"messages": [{"role": "user", "content": [image]}]}, 5),
        ):
            prepared = relay.prepare(surface, orjson.dumps(body), Tenant(name="t"), StageMarks(lambda: 0.0))
            assert prepared.prompt.num_tokens == num_tokens, body


async def test_a_body_goes_out_with_its_tenants_salt_and_class() -> None:
    models = model("unix:/nowhere", trusted=True), model("unix:/nowhere", name="others")
    body = orjson.dumps({"cache_salt": "x", "priority": 4, "resumable": True, "stream": True, "unknown": [1]})
    async with fronting(*models) as front:
        own, others = (front.server._app.served.others[one.name].reader for one in models)

        def sent(reader: Any, tenant: str) -> dict[str, Any]:
            marks = StageMarks(lambda: 0.0)
            prepared = reader.prepare(chat_api.SURFACE, body, Tenant(name=tenant), marks)
            return {**orjson.loads(prepared.body), **prepared.sent}

        told = {
            "model": MODEL,
            "priority": 0,
            "stream": True,
            "unknown": [1],
            "stream_options": {"include_usage": True},
        }
        assert sent(others, "acme") == told | {"cache_salt": "x"}
        salts = {tenant: sent(own, tenant)["cache_salt"] for tenant in ("acme", "other", LOCAL_NAME)}
        assert len(set(salts.values())) == 3
        assert salts[LOCAL_NAME] == "x"  # an open server's clients choose
        many = orjson.dumps({"prompt": ["a"] * 5000})
        with pytest.raises(InvalidRequest, match="prompt must have at most"):
            front.relay.prepare(completions.SURFACE, many, Tenant(name="acme"), StageMarks(lambda: 0.0))


@pytest.mark.parametrize("surface", ["chat", "completions", "messages"])
async def test_a_quota_that_runs_out_ends_a_stream_of_chunks_and_breaks_off_others(surface: str) -> None:
    tenant = keyed_tenant("acme", limits=Limits(tokens_per_day=700))
    async with relaying(config={"tenants": (tenant,)}) as gateway:
        answer = await gateway.ask(as_caller(SURFACES[surface](stream=True, max_tokens=900, ignore_eos=True), "acme"))
        if surface == "messages":
            assert (answer.events[-1]["type"], answer.events[-1]["error"]["type"]) == ("error", "rate_limit_error")
        else:
            *_, end, last, done = answer.events
            assert (end["choices"][0]["finish_reason"], done) == ("length", "[DONE]")
            assert last["steploop"]["ended_by"] == "tokens_per_day"
            assert {end["id"], last["id"]} == {answer.events[0]["id"]}
        await wait_until(lambda: gateway.num_running() == 0)
        (account, *_) = gateway.server._gate.quotas.accounts
        assert (account.num_reserved, account.num_active) == (0, 0)


async def test_a_document_reserves_what_it_may_take() -> None:
    tenant = keyed_tenant("acme", limits=Limits(tokens_per_minute=1000))
    async with relaying(config={"tenants": (tenant,)}) as gateway:
        for fields, status in (
            ({"max_tokens": 1000}, 429),
            ({"max_tokens": 12, "n": 90}, 400),
            ({"max_tokens": 12}, 200),
        ):
            answer = await gateway.ask(as_caller(SURFACES["chat"](**fields), "acme"))
            assert answer.status == status


async def test_surfaces_that_do_not_pass_are_refused() -> None:
    async with relaying() as gateway:
        asked = {"messages": [{"role": "user", "content": "step"}]}
        for path, fields in (("/api/chat", asked), ("/api/chat", {}), ("/infill", {"input_prefix": "a"})):
            assert (await gateway.ask(request("POST", path, {"model": ASKED} | fields))).status == 400


async def test_infill_and_counts_pass_to_servers_of_our_own() -> None:
    async with relaying(1, True, trusted=True) as gateway:
        there = gateway.upstreams[0].server
        mark(there._app.served)
        for path, body in {
            "/tokenize": {"prompt": "<fim_prefix>", "return_token_strs": True},  # not as the gateway's own model has it
            "/detokenize": {"tokens": [70, 71]},
            "/v1/responses/input_tokens": {"input": "step"},
            "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "step"}]},
        }.items():
            direct = await ask(there, closing(request("POST", path, {"model": MODEL} | body)))
            passed = await gateway.ask(request("POST", path, {"model": ASKED} | body))
            assert (passed.status, passed.body) == (200, direct.body), path
            wrong = await gateway.ask(request("POST", path, {"model": ASKED, "tokens": "a"}))
            assert wrong.json["error"]["type"] == "invalid_request_error"
        for name, direct in ((ASKED, there), (MODEL, gateway.server)):  # without a name: of the gateway's own model
            shown = await ask(direct, closing(request("GET", "/tokenizer_info")))
            assert (await gateway.ask(request("GET", f"/tokenizer_info?model={name}"))).body == shown.body
        assert (await gateway.ask(request("GET", "/tokenizer_info?model=none"))).status == 404
        counted = gateway.server._metrics
        fields = {"model": ASKED, "input_prefix": "a", "input_suffix": "b", "n_predict": 3, "seed": 7}
        whole = (await gateway.ask(request("POST", "/infill", fields))).json
        assert (whole["tokens_predicted"], whole["stop_type"], whole["model"]) == (3, "limit", ASKED)
        used = whole["tokens_evaluated"]
        assert (counted.num_prompt_tokens, counted.num_generation_tokens) == (used, 3)
        asked = ["content", "timings/prompt_n"]
        cut = await gateway.ask(request("POST", "/infill", fields | {"response_fields": asked}))
        assert list(cut.json) == asked
        streamed = await gateway.ask(request("POST", "/infill", fields | {"stream": True}))
        events = [orjson.loads(line[6:]) for line in streamed.body.split(b"\n\n")[:-1]]
        assert [one["stop"] for one in events] == [False] * (len(events) - 1) + [True]
        assert "".join(one["content"] for one in events) == whole["content"]
        assert (counted.num_prompt_tokens, counted.num_generation_tokens) == (3 * used, 9)


async def test_prompt_rules_hold_for_what_editors_send() -> None:
    rules = {"text_rules": (TextRule(phrase="secret", on="prompt"),)}
    async with relaying(trusted=True, config={"tenants": (keyed_tenant("acme", **rules),)}) as gateway:
        for named in ("input_prefix", "input_suffix", "input_extra"):
            text: Any = [{"text": "a secret"}] if named == "input_extra" else "a secret"
            body = {"model": ASKED, "input_prefix": "a", "input_suffix": "b"} | {named: text}
            refused = await gateway.ask(as_caller(request("POST", "/infill", body), "acme"))
            assert (refused.status, refused.json["error"]["param"]) == (400, named)


async def test_a_model_elsewhere_is_neither_loaded_nor_unloaded() -> None:
    async with relaying(trusted=True) as gateway:
        for fields, reason in (({}, "load"), ({"prompt": "", "keep_alive": 0}, "unload")):
            answer = await gateway.ask(request("POST", "/api/generate", {"model": ASKED + ":latest"} | fields))
            assert (answer.status, answer.json["model"], answer.json["done_reason"]) == (200, ASKED, reason)
        assert (await gateway.ask(request("POST", "/api/generate", {"model": ASKED, "prompt": "a"}))).status == 200


async def test_a_tenant_may_use_only_its_models() -> None:
    config = {"tenants": (keyed_tenant("acme", models=(MODEL,)), Tenant(name="other"))}
    async with relaying(1, True, config=config) as gateway:
        assert (await gateway.ask(as_caller(SURFACES["chat"](), "acme"))).status == 404
        assert (await gateway.ask(as_caller(chat(), "acme"))).status == 200


async def test_an_answer_that_breaks_off_ends_with_an_error_event() -> None:
    async with relaying() as gateway:
        reader, writer = await open_with(gateway.server, closing(SURFACES["chat"](stream=True, max_tokens=900)))
        head = await reader.readuntil(b"content")
        for connection in gateway.pool.upstreams[0].connections:
            connection.abort()
        rest = await reader.read()
        writer.close()
        assert b"200" in head
        last = rest.rsplit(b"data: ", 1)[1]
        assert orjson.loads(last.split(b"\n\n")[0])["error"]["code"] == "upstream_error"
        assert b"[DONE]" not in rest


async def test_without_an_upstream_there_is_a_503_until_one_comes(tmp_path: Path) -> None:
    path = tmp_path / "upstream.sock"
    async with fronting(model(f"unix:{path}")) as front:
        refused = await front.ask(SURFACES["chat"]())
        assert (refused.status, refused.json["error"]["code"]) == (503, "no_upstream")
        assert front.server._app.agent_line() == "down #no upstream"
        assert refused.headers["retry-after"] == "1"
        async with serving(binds=(Bind(UnixAddress(str(path))),)):
            (upstream,) = front.pool.upstreams
            await wait_until(lambda: upstream.is_healthy)
            answer = await front.ask(SURFACES["chat"]())
            assert answer.status == 200
            assert front.server._app.agent_line() == "up ready 100%"


async def test_an_upstream_over_tls_is_checked_by_its_ca_and_asked_with_the_key(tmp_path: Path) -> None:
    certificate, key = make_certificate(tmp_path)
    secret = tmp_path / "key"
    secret.write_text("sk-upstream\n")
    async with serving(tls_cert=certificate, tls_key=key, api_keys=("sk-upstream",)) as upstream:
        url = url_of(upstream, "https").replace("127.0.0.1", "localhost")
        trusted = model(url, tls_ca=str(certificate), api_key_file=str(secret))
        keyless = model(url, name="keyless", tls_ca=str(certificate))
        distrusted = model(url, name="distrusted", api_key_file=str(secret))
        async with fronting(trusted, keyless, distrusted) as front:
            codes = {ASKED: (200, None), "keyless": (502, "upstream_error"), "distrusted": (503, "no_upstream")}
            for name, expected in codes.items():
                answer = await front.ask(SURFACES["chat"](model=name))
                code = answer.json.get("error", {}).get("code")
                assert (answer.status, code) == expected
            (connection,) = front.pool.upstreams[0].connections
            assert connection.http.is_multiplexed


async def test_a_reload_reads_the_tls_files_again_or_all_stays_as_it_was(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files = make_certificate(tmp_path / "new")
    mine = make_certificate(tmp_path / "ours")
    encrypt = ["openssl", "ec", "-aes128", "-passout", "pass:x", "-in", mine[1]]
    encrypted = subprocess.run(encrypt, check=True, capture_output=True).stdout
    given = {"tls_ca": mine[0], "tls_cert": mine[0], "tls_key": mine[1]}
    async with serving(tls_cert=files[0], tls_key=files[1]) as upstream:
        url = url_of(upstream, "https").replace("127.0.0.1", "localhost")
        entry = model(url, **{name: str(path) for name, path in given.items()})
        async with fronting(entry) as front:
            (there,) = front.pool.upstreams
            assert "self-signed" in there.why_out
            ca = files[0].read_bytes()
            for bad, contents in (("tls_ca", b"no"), ("tls_key", files[1].read_bytes()), ("tls_key", encrypted)):
                good = given[bad].read_bytes()
                given[bad].write_bytes(contents)
                caplog.clear()
                reloaded(front.server, entry)
                assert "the models stay as they were" in caplog.text
                given[bad].write_bytes(good)
            assert "the key is encrypted" in caplog.text
            mine[0].write_bytes(mine[0].read_bytes() + ca)
            reloaded(front.server, entry)
            await wait_until(lambda: there.is_healthy)
            assert (await front.ask(SURFACES["chat"]())).status == 200


def test_refusals_of_upstreams_are_the_clients_only_where_it_is_the_cause() -> None:
    body = orjson.dumps({"error": {"message": "why", "code": "some_code", "param": "n"}})
    given = {400: 400, 422: 400, 413: 413, 401: 502, 404: 502, 429: 503, 500: 502, 503: 503, 529: 503}
    for status, told in given.items():
        for text in (body, b"", b"[]", b"nonsense", b'{"error":"why"}'):
            assert status_of(refusal_of(AnswerHead(status, ()), text, model("http://h:1"), "big")) == told


@pytest.mark.parametrize(
    ("there", "message", "told"),
    [
        ("emb", "The model 'emb' makes embeddings.", "The model 'big' makes embeddings."),
        ("chat", "chat needs messages: no model `chat`", "chat needs messages: no model `big`"),
        ("org/x-1", "no org/x-1.", "no big."),
        ("org/x-1", "no /srv/org/x-1-old", "no /srv/org/x-1-old"),
    ],
)
def test_a_refusal_bears_the_name_that_was_asked_for(there: str, message: str, told: str) -> None:
    body = orjson.dumps({"error": {"message": message}})
    assert str(refusal_of(AnswerHead(400, ()), body, model("http://h:1", upstream_model=there), "big")) == told


@pytest.mark.parametrize(
    ("detail", "told"),
    [
        ("prompt must be a string.", "prompt must be a string."),
        ([{"loc": ["body", "n"], "msg": "not an int"}, {"msg": "no"}, 7], "body.n: not an int; body: no"),
        *((bad, "The server behind this one refused the request, with the status 422.") for bad in ("", [], [{}], 7)),
    ],
)
def test_a_refusal_tells_the_detail_of_fastapis_servers(detail: Any, told: str) -> None:
    assert str(refusal_of(AnswerHead(422, ()), orjson.dumps({"detail": detail}), model("http://h:1"), "big")) == told


def test_a_refusal_for_a_context_that_is_full_bears_the_code_by_which_clients_know_it() -> None:
    told = {"code": 400, "message": "too long", "type": "exceed_context_size_error", "n_ctx": 512}
    error = refusal_of(AnswerHead(400, ()), orjson.dumps({"error": told}), model("http://h:1"), "big")
    assert (str(error), error.code) == ("too long", "context_length_exceeded")


# Upstreams that are not ours: what one says byte by byte.

_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n"


def _chunk(**choice: Any) -> bytes:
    return b"data: " + orjson.dumps({"id": "x", "model": "m", "choices": [{"index": 0, **choice}]}) + b"\n\n"


_MIXED_ENDS = b"".join(_chunk(delta={}, finish_reason=one)[:-1] + b"\r\n" for one in (None, "mixed"))


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        (_HEAD + _chunk(delta={"content": "a"}) + _chunk(delta={}, finish_reason="stop") + b"data: [DONE]\n\n", "stop"),
        (_HEAD + _chunk(delta={"content": "a"}, finish_reason="eos"), "eos"),  # no [DONE]
        (_HEAD + _chunk(delta={"content": "a"}), "upstream_error"),  # it ends in the middle
        (_HEAD + _chunk(delta={"content": "a"}) + b"data: {nonsense}\n\n", "upstream_error"),
        (_HEAD + _chunk(delta={"content": "a"}) + b'data: {"error":{"message":"out of memory"}}\n\n', "upstream_error"),
        (_HEAD + _chunk(delta={"content": "a"}) + _chunk(index=9, delta={}), "upstream_error"),
        (_HEAD + b'data: {"choices":[],"usage":{"prompt_tokens":1' + b"0" * 30 + b"}}\n\n", "upstream_error"),
        (_HEAD.replace(b"200 OK", b"500 No") + b'{"error":{"message":"no"}}', "upstream_error"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: nix\r\n\r\n", "upstream_error"),
        (b"SSH-2.0-nonsense\r\n\r\n", "upstream_error"),
        (b"", "upstream_error"),
        (b"HTTP/1.1 200 OK\r\n" + b"a: b\r\n" * 20_000, "upstream_error"),  # a head without end
        (_HEAD + b"data: " + b"x" * 9_000_000, "upstream_error"),  # an event without end
        (_HEAD.replace(b"connection: close", b"content-length: 999") + _chunk(text="a"), "upstream_error"),
        (_HEAD.replace(b"connection: close", b"content-length: 9\r\ncontent-length: 8") + b"data", "upstream_error"),
        (_HEAD.replace(b"connection: close", b"transfer-encoding: chunked") + b"ff\r\ndata", "upstream_error"),
        (_HEAD.replace(b"connection: close", b"transfer-encoding: chunked") + b"nix\r\n", "upstream_error"),
        (_HEAD + 2000 * _chunk(delta={"content": "a"}) + _chunk(delta={}, finish_reason="stop"), "upstream_error"),
        (whole(b"x" * 70_000, b"400 No"), "upstream_error"),  # a refusal larger than 64 KiB
        (_HEAD + _chunk(index=-1, delta={"content": "a"}), "upstream_error"),
        (_HEAD + _chunk(delta={"content": "a"}).replace(b'"a"', b'"\xe4"'), "upstream_error"),  # no UTF-8
        (_HEAD + b'data: {"choices":' + b"[" * 5_000 + b"\n\n", "upstream_error"),
        (_HEAD + b"\xef\xbb\xbf" + _chunk(delta={"content": "a"}, finish_reason="bom"), "bom"),
        (_HEAD + _MIXED_ENDS, "mixed"),
        (_HEAD + b"data: null\n\n" + _chunk(delta={}, finish_reason="null"), "null"),
        (_HEAD + b'data: {"choices":null,"usage":"none"}\n\n' + _chunk(delta={}, finish_reason="null"), "null"),
    ],
    ids=range(26),
)
async def test_whatever_an_upstream_says_the_client_gets_one_end(said: bytes, expected: str) -> None:
    async with before(said, speaks={"ends": True}, health="/health") as front:
        told = await front.ask(SURFACES["chat"](stream=True))
        if told.status == 200 and "event-stream" in told.headers["content-type"]:
            *_, last = [one for one in told.events if one != "[DONE]"]
            got = last["error"]["code"] if "error" in last else last["choices"][0]["finish_reason"]
        else:
            got = told.json["error"]["code"]
        assert (got, front.num_active) == (expected, [0])
        assert bool(front.pool.upstreams[0].num_failures) == (expected == "upstream_error")


@pytest.mark.parametrize(
    ("surface", "events"),
    [
        (
            "responses",
            [{"type": "response.output_text.delta"}, {"type": "response.failed", "response": {"error": "no"}}],
        ),
        ("messages", [{"type": "content_block_delta"}, {"type": "error", "error": {"message": "no"}}]),
    ],
)
async def test_an_error_among_named_events_ends_the_stream_as_the_surface_has_it(
    surface: str, events: list[dict[str, Any]]
) -> None:
    async with before(whole(b"".join(b"data: %b\n\n" % orjson.dumps(one) for one in events))) as front:
        first, last = (await front.ask(SURFACES[surface](stream=True))).events
        assert (first["type"], last["error"]["code"]) == (events[0]["type"], "upstream_error")
        assert last.get("type") == ("error" if surface == "messages" else None)
        assert front.pool.upstreams[0].num_failures == 1


@pytest.mark.parametrize("said", [b"H", b"HTTP/1.1 200", _HEAD, _HEAD + b"data: {", _HEAD + _chunk(text="a")])
async def test_an_upstream_that_falls_silent_holds_up_its_own_request_alone(said: bytes) -> None:
    async with saying(said) as silent, serving() as good:
        models = (model(silent, protocol="h1"), model(url_of(good), name="good"))
        async with fronting(*models) as front:
            held = await open_with(front.server, closing(SURFACES["chat"](deadlines={"total_ms": 300}, stream=True)))
            answer = await front.ask(SURFACES["chat"](model="good"))
            assert answer.status == 200
            late = await read_answer(*held)
            assert b"deadline_exceeded" in late.body
            (upstream,) = front.pool.upstreams
            assert (upstream.num_active, upstream.num_waiting_tokens) == (0, 0)
            await wait_until(lambda: not any(one.http.num_open for one in upstream.connections))


@pytest.mark.parametrize(
    ("said", "fields", "end", "moved"),
    [
        (_HEAD + _chunk(text="a"), {}, "upstream_error", 0),
        (_HEAD, {}, "upstream_error", 0),
        (b"", {"trusted": True}, "[DONE]", 1),  # others send their heads late
    ],
)
async def test_a_stream_of_which_nothing_comes_is_broken_off_and_its_upstream_has_failed(
    said: bytes, fields: dict[str, Any], end: str, moved: int
) -> None:
    async with saying(said, hangs=True) as silent, serving() as good:
        models = (model(silent, url_of(good), protocol="h1", silence_timeout="100ms", **fields),)
        async with fronting(*models) as front:
            pool = front.pool
            answer = await front.ask(SURFACES["chat"](stream=True))
            assert end.encode() in answer.body
            assert [one.num_failures for one in pool.upstreams] == [1, 0]
            assert front.num_active == [0, 0]
            assert pool.num_retries == moved


async def test_what_is_not_streamed_goes_elsewhere_once_nothing_comes_and_the_health_is_not_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pool, "PROBE_S", 0.05)
    monkeypatch.setattr(pool, "PROBE_EVERY_S", 0.05)
    async with saying(b"", hangs=True) as hung, serving() as good:
        models = (model(hung, url_of(good), protocol="h1", silence_timeout=0.2),)
        async with fronting(*models) as front:
            assert (await front.ask(SURFACES["chat"]())).status == 200
            assert front.num_active == [0, 0]
            assert front.pool.num_retries == 1


_LATE = {"message": "late", "code": "deadline_exceeded"}
_LATE_STREAMS: dict[str, list[dict[str, Any]]] = {
    "chat": [{"choices": [{"index": 0, "delta": {"content": "a"}}]}, {"error": _LATE}],
    "messages": [{"type": "content_block_delta"}, {"type": "error", "error": _LATE}],
    "responses": [
        {"type": "response.output_text.delta"},
        {"type": "response.failed", "response": {"error": {**_LATE, "code": "x", "type": _LATE["code"]}}},
    ],
}


@pytest.mark.parametrize("trusted", [True, False])
@pytest.mark.parametrize("surface", _LATE_STREAMS)
async def test_a_deadline_missed_within_a_stream_is_the_requests_where_one_of_our_own_says_so(
    surface: str, trusted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay, "TELL_S", 0.05)
    said = whole(b"".join(b"data: %b\n\n" % orjson.dumps(one) for one in _LATE_STREAMS[surface]))
    async with before(said, trusted=trusted) as front:
        *_, last = (await front.ask(SURFACES[surface](stream=True))).events
        assert last["error"]["code"] == ("deadline_exceeded" if trusted else "upstream_error")
        assert front.pool.upstreams[0].num_failures == (not trusted)


async def test_a_deadline_missed_within_lines_is_the_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay, "TELL_S", 0.05)
    lines = ({"response": "a", "done": False}, {"error": "late", "code": "deadline_exceeded"})
    async with before(whole(b"".join(orjson.dumps(one) + b"\n" for one in lines)), trusted=True) as front:
        answer = await front.ask(request("POST", "/api/generate", {"model": ASKED, "prompt": "a"}))
        *_, last = answer.body.splitlines()
        assert orjson.loads(last) == lines[-1]
        assert front.pool.upstreams[0].num_failures == 0


@pytest.mark.parametrize("deadline", ["ttft_ms", "total_ms"])
async def test_a_missed_deadline_of_an_upstream_of_our_own_is_the_requests(deadline: str, tmp_path: Path) -> None:
    goes_on = threading.Event()

    class HeldUp(SimulatedRunner):
        def forward(self, plan: StepPlan) -> StepPlan:
            goes_on.wait()
            return super().forward(plan)

    paths = [tmp_path / name for name in ("there.db", "here.db")]
    there = {"load": load_with(HeldUp), "ledger": paths[0]}
    fields: dict[str, Any] = {"trusted": True, "config": {"ledger": paths[1]}}
    async with relaying(1, False, there, **fields) as gateway:
        late = asyncio.create_task(gateway.ask(SURFACES["chat"](deadlines={deadline: 100})))
        (upstream,) = gateway.pool.upstreams
        active = gateway.upstreams[0].server._app.served.active
        await wait_until(lambda: bool(active))
        (generation,) = active.values()
        assert isinstance(generation, Generation)
        await wait_until(lambda: generation._error is not None or not upstream.num_active)  # whose clock is first
        goes_on.set()
        answer = await late
        assert (answer.status, answer.json["error"]["code"]) == (504, "deadline_exceeded")
        assert answer.headers["x-should-retry"] == "false"
        assert "0.1 s" in answer.json["error"]["message"]
        assert upstream.num_failures == 0
    (told,), (billed,) = map(rows, paths)
    assert told.prompt_tokens > 0
    assert (billed.prompt_tokens, billed.completion_tokens) == (told.prompt_tokens, told.completion_tokens)


async def test_a_504_of_anothers_is_its_failure() -> None:
    said = whole({"error": {"message": "late", "code": "deadline_exceeded"}}, b"504 Gateway Timeout")
    async with before(said) as front:
        answer = await front.ask(SURFACES["chat"]())
        assert (answer.status, answer.json["error"]["code"]) == (502, "upstream_error")
        assert front.pool.upstreams[0].num_failures == 1


@pytest.mark.parametrize(("waits", "trusted"), [(False, False), (True, False), (False, True)])
async def test_a_document_is_late_at_an_upstream_that_hangs_and_before_it(
    waits: bool, trusted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay, "TELL_S", 0.05)
    fields: dict[str, Any] = {"protocol": "h1", "max_requests": 1, "trusted": trusted}
    async with saying(b"", hangs=True) as hung, fronting(model(hung, **fields)) as front:
        (upstream,) = front.pool.upstreams
        if waits:
            _, first = await open_with(front.server, SURFACES["chat"]())
            await wait_until(lambda: upstream.num_active == 1)
        late = await front.ask(SURFACES["chat"](deadlines={"ttft_ms": 100}))
        assert (late.status, late.json["error"]["code"]) == (504, "deadline_exceeded")
        assert (upstream.num_active, front.pool.num_waiting) == (int(waits), 0)
        if waits:
            first.transport.abort()
            await wait_until(lambda: upstream.num_active == 0)


async def test_a_document_that_takes_longer_than_its_first_token_may_is_complete() -> None:
    goes_on = threading.Event()

    class Pausing(SimulatedRunner):
        num_steps = 0

        def forward(self, plan: StepPlan) -> StepPlan:
            self.num_steps += 1
            if self.num_steps == 4:
                goes_on.wait()
            return super().forward(plan)

    async with relaying(1, False, {"load": load_with(Pausing)}, trusted=True) as gateway:
        task = asyncio.create_task(gateway.ask(SURFACES["chat"](deadlines={"ttft_ms": 1000})))
        active = gateway.server._app.served.active
        await wait_until(lambda: bool(active))
        (generation,) = active.values()
        assert isinstance(generation, Generation)
        handle: Any = generation._handles[0]
        await wait_until(lambda: handle._late is not None and handle._late.done())
        goes_on.set()
        assert (await task).status == 200


async def test_a_request_that_goes_round_is_ended_after_a_few_gateways() -> None:
    async with fronting(model("http://127.0.0.1:9")) as a, fronting(model("http://127.0.0.1:9")) as b:
        for one, other in ((a, b), (b, a)):
            url = f"http://127.0.0.1:{other.server.listener.port}"
            reloaded(one.server, model(url, upstream_model=ASKED, trusted=True))
        for stream in (False, True):
            answer = await a.ask(SURFACES["chat"](stream=stream))
            assert (answer.status, answer.json["error"]["code"]) == (502, "upstream_loop")
            assert "leads back" in answer.json["error"]["message"]
        assert sum(one.pool.upstreams[0].num_requests for one in (a, b)) == 2 * relay.MAX_HOPS
        counted = await a.ask(request("POST", "/tokenize", {"model": ASKED, "prompt": "step"}))
        assert (counted.status, counted.json["error"]["code"]) == (502, "upstream_loop")
        assert (a.num_active, b.num_active) == ([0], [0])


async def test_a_reader_that_is_slow_is_no_silence_of_the_upstream() -> None:
    async with relaying() as gateway:
        held = await open_with(gateway.server, closing(SURFACES["chat"](stream=True, max_tokens=900)))
        active = gateway.server._app.served.active
        await wait_until(lambda: bool(active))
        (generation,) = active.values()
        assert isinstance(generation, Generation)
        (handle,) = generation._handles
        assert isinstance(handle, RelayHandle)
        await wait_until(lambda: handle._next_due() is not None)
        generation.pause()
        handle._heard_s = 0.0
        assert handle._next_due() is None
        generation.resume()
        due_s = handle._next_due()
        assert due_s is None or due_s > asyncio.get_running_loop().time()
        assert (await read_answer(*held)).events[-1] == "[DONE]"


_ANSWER = _HEAD + _chunk(delta={"content": "a"}) + _chunk(delta={}, finish_reason="stop")
_USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":1}}\n\n'
_CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    ("said", "again", "fields", "end"),
    [
        (b"", b"HTTP/1.1 103 Early Hints\r\n\r\n", {}, "upstream_error"),
        (b"", b"HTTP/1.1 103 Early Hints\r\n\r\n", {"stream": True}, "upstream_error"),
        (_HEAD, b": comment\n\n", {"stream": True}, "upstream_error"),
        (_HEAD, b"\n\n", {"stream": True}, "upstream_error"),
        (_HEAD, _USAGE, {"stream": True}, "upstream_error"),
        (_HEAD, _USAGE, STREAM, "upstream_error"),
        (_ANSWER + b"data: [DONE]\n\n", _USAGE, {"stream": True}, "[DONE]"),
        (_ANSWER + b"data: [DONE]\n\n", b": comment\n\n", {"stream": True}, "[DONE]"),
        (_ANSWER + b"data: [DONE]\n\n", b"a", {"stream": True}, "[DONE]"),
        (_CHUNKED, b"1\r\n{\r\n", {}, "pieces"),
        (_CHUNKED, b"1\r\nd\r\n", {"stream": True}, "pieces"),
    ],
    ids=range(11),
)
async def test_what_tells_nothing_is_bounded_and_nothing_follows_the_last_event(
    said: bytes, again: bytes, fields: dict[str, Any], end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay, "LINGER_S", 0.05)
    async with before(said, speaks={"again": again}) as front:
        answer = await front.ask(SURFACES["chat"](max_tokens=None, **fields))
        assert (end.encode() in answer.body, answer.body.count(b"data: [DONE]")) == (True, int(end == "[DONE]"))
        (upstream,) = front.pool.upstreams
        assert (upstream.num_active, upstream.num_failures) == (0, int(end != "[DONE]"))


@pytest.mark.parametrize(
    ("options", "counts"),
    [({}, []), ({"include_usage": True}, [3]), ({"include_usage": True, "continuous_usage_stats": True}, [3, 3])],
)
async def test_usage_beside_the_last_choice_is_shown_once_to_those_who_ask(
    options: dict[str, bool], counts: list[int]
) -> None:
    last = {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}], "usage": {"completion_tokens": 3}}
    said = _HEAD + _chunk(delta={"content": "a"}) + b"data: %b\n\ndata: [DONE]\n\n" % orjson.dumps(last)
    async with before(said) as front:
        answer = await front.ask(SURFACES["chat"](stream=True, stream_options=options))
    told = [one["usage"] for one in answer.events if one != "[DONE]" and one.get("usage")]
    assert [one["completion_tokens"] for one in told] == counts


@pytest.mark.parametrize(
    ("fields", "told"),
    [({}, set()), ({"timings": True}, {"timings"}), ({"context_policy": "drop_oldest_turns"}, {"context"})],
)
async def test_the_last_chunk_has_what_was_asked_for_and_its_usage_if_that_was(
    fields: dict[str, Any], told: set[str]
) -> None:
    async with relaying() as gateway:
        for shown in (set(), {"usage"}):
            options = {"stream_options": {"include_usage": True}} if shown else {}
            answer = await gateway.ask(SURFACES["chat"](stream=True, **fields, **options))
            chunks = [one for one in answer.events if one != "[DONE]" and not one["choices"]]
            assert [{"timings", "context", "usage"} & {name for name in one if one[name]} for one in chunks] == (
                [told | shown] if told | shown else []
            )


async def test_what_nobody_asked_for_beside_usage_makes_no_chunk() -> None:
    last = {"choices": [], "usage": {"completion_tokens": 1}, "timings": {"predicted_n": 1}}
    said = _ANSWER + b"data: %b\n\ndata: [DONE]\n\n" % orjson.dumps(last)
    async with before(said) as front:
        answer = await front.ask(SURFACES["chat"](stream=True))
    assert all(one == "[DONE]" or one["choices"] for one in answer.events)


_SETTINGS = raw_http2.settings()
_HEAD_3 = raw_http2.headers(FieldEncoder().encode([(b":status", b"200")]), raw_http2.END_HEADERS, 3)


@pytest.mark.parametrize(
    "frames",
    [
        [raw_http2.data(b"a", 0, 3)],  # before its head
        [_HEAD_3, _HEAD_3],
        [_HEAD_3, raw_http2.data(b"data: {", raw_http2.END_STREAM, 3)],
        [_HEAD_3, raw_http2.data(bytes(16_384), 0, 3), raw_http2.data(bytes(16_385), 0, 3)],
        [_HEAD_3, raw_http2.rst(2, 3)],
        [_HEAD_3, raw_http2.goaway(0, 1)],
        [raw_http2.headers(b"\xff" * 40, raw_http2.END_HEADERS, 3)],
        [raw_http2.headers(b"", 0, 3), *[raw_http2.continuation(bytes(99), 0, 3)] * 20],
        [raw_http2.headers(b"", 0, 3), raw_http2.ping()],
        [raw_http2.ping()] * 500,
        [raw_http2.window_update(2**31 - 1)],
        [_HEAD_3, *[raw_http2.data(b"", 0, 3)] * 6000],
        [_HEAD_3, *[raw_http2.window_update(1)] * 6000],
        [raw_http2.headers(FieldEncoder().encode([(b":status", b"103")]), raw_http2.END_HEADERS, 3)] * 8000,
    ],
    ids=range(14),
)
async def test_whatever_an_upstream_says_in_http2_its_request_ends(frames: list[raw_http2.Frame]) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(len(PREFACE))
        writer.write(raw_http2.wire([_SETTINGS]))
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                high, low, kind, flags, stream = FRAME_HEADER.unpack(await reader.readexactly(FRAME_HEADER.size))
                await reader.readexactly(high << 16 | low)
                if kind == HEADERS and flags & raw_http2.END_STREAM:  # asks for its health
                    block = FieldEncoder().encode([(b":status", b"200")])
                    flags = raw_http2.END_HEADERS | raw_http2.END_STREAM
                    writer.write(raw_http2.wire([raw_http2.headers(block, flags, stream)]))
                elif kind == HEADERS:
                    told.append(stream)
                    writer.write(raw_http2.wire([replace(one, stream=stream) if one.stream else one for one in frames]))
        writer.close()

    told: list[int] = []
    listening = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with listening:
        url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
        async with fronting(model(url, protocol="h2")) as front:
            answered = await front.ask(SURFACES["chat"](stream=True))
            assert told
            assert b"upstream_error" in answered.body
            assert front.pool.upstreams[0].num_active == 0


# Pools: which upstream answers when one does not.

_LOADING = b"HTTP/1.1 503 No\r\ncontent-length: 2\r\nretry-after: 7\r\n\r\n{}"
_BROKEN = b"HTTP/1.1 500 No\r\ncontent-length: 2\r\n\r\n{}"


@pytest.mark.parametrize(
    ("said", "budget", "status"),
    [
        (None, 64.0, 200),  # it cannot be connected to, or the connection is lost
        (b"", 64.0, 200),
        (_LOADING, 64.0, 200),
        (_BROKEN, 64.0, 502),  # it may have done something
        (b"SSH-2.0-nonsense\r\n\r\n", 64.0, 502),
        (b"", 0.5, 200),
        (_LOADING, 0.5, 503),
        *((_LOADING.replace(b"503", status), 64.0, 200) for status in (b"401", b"403", b"404", b"429", b"529")),
    ],
)
async def test_a_request_is_sent_elsewhere_once_if_that_is_safe(said: bytes | None, budget: float, status: int) -> None:
    async with saying(said) as bad, serving() as good:
        settings = model(bad, url_of(good), protocol="h1")
        async with fronting(settings) as front:
            pool = front.pool
            pool._retries = budget
            answer = await front.ask(SURFACES["chat"](stream=True))
            assert answer.status == status
            assert front.num_active == [0, 0]
            assert pool.upstreams[1].num_requests == (status == 200)
            page = (await front.ask(request("GET", "/metrics"))).body.decode()
            assert f'steploop_upstream_retries_total{{model_name="big",model="big"}} {int(status == 200)}' in page
            assert f'upstream="big {bad}"}} 1' in page


async def test_a_request_that_is_lost_waits_for_another_upstream_before_what_has_come_since() -> None:
    async with saying(b"") as bad, serving() as good, fronting(model(bad, url_of(good), max_requests=1)) as front:
        there = {one.upstream: one for one in (front.pool.take_slot(LeadingBlocks(1), 0, "t") for _ in range(2))}
        first = asyncio.create_task(front.ask(SURFACES["chat"](stream=True)))
        await wait_until(lambda: front.pool.num_waiting == 1)
        later = front.pool.take_slot(LeadingBlocks(1), 0, "t")
        there[front.pool.upstreams[0]].leave()
        await wait_until(lambda: front.pool.num_retries == 1)
        assert (front.num_active, front.pool.num_waiting) == ([1, 1], 1)
        later.leave()
        there[front.pool.upstreams[1]].leave()
        assert (await first).events[-1] == "[DONE]"
        assert front.num_active == [0, 0]


@pytest.mark.parametrize("code", ["draining", "loading", None])
async def test_an_upstream_that_ends_or_does_not_listen_is_out_at_once_and_costs_nobody_a_retry(
    code: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "PROBE_EVERY_S", 600.0)
    said = whole({"error": {"message": "not now", "code": code}}, b"503 No")
    async with (
        saying(said) as url,
        serving() as good,
        fronting(model(url if code else "unix:/nowhere", url_of(good), protocol="h1")) as front,
    ):
        bad, other = front.pool.upstreams
        for _ in range(pool.NUM_SUCCESSES):
            bad.note_probe(None, 0.0)
        front.pool._retries = 0.0
        told = await asyncio.gather(*(front.ask(SURFACES["chat"]()) for _ in range(5)))
        assert [one.status for one in told] == [200] * 5
        assert not bad.is_healthy
        assert bad.why_out.endswith("not now" if code else "No such file or directory")
        assert (await front.ask(SURFACES["chat"]())).status == 200
        assert other.num_requests == 6


async def test_an_upstream_that_has_too_much_to_do_rests_and_no_prompt_is_taken_to_be_there() -> None:
    prompt = "x" * 2000
    async with serving() as good, before(_LOADING.replace(b"503", b"429"), url_of(good)) as front:
        for _ in range(5):
            assert (await front.ask(SURFACES["completions"](prompt=prompt, max_tokens=2))).status == 200
        busy, other = front.pool.upstreams
        assert (busy.num_requests, busy.num_failures, other.num_requests) == (1, 0, 5)
        assert (bool(busy._known), bool(other._known)) == (False, True)
        other.is_healthy = False
        assert (await front.ask(SURFACES["completions"]())).status == 503
        assert busy.num_requests == 2  # there is no other


async def test_failures_in_a_burst_eject_once() -> None:
    async with serving() as one, serving() as other, fronting(model(url_of(one), url_of(other))) as front:
        (upstream, _) = front.pool.upstreams
        for _ in range(50):
            front.pool.note_outcome(upstream, False)
        assert upstream._ejection_s == 2 * pool.EJECTION_S


@pytest.mark.parametrize(("said", "asked"), [(_LOADING, 1), (b"", 2)])
async def test_where_there_is_no_other_a_lost_connection_is_tried_again_and_a_refusal_is_not(
    said: bytes, asked: int
) -> None:
    async with before(said) as front:
        answer = await front.ask(SURFACES["chat"]())
        assert answer.status == (503 if said else 502)
        assert front.pool.upstreams[0].num_requests == asked
        assert answer.json["error"]["message"].find("does not speak") == -1


@pytest.mark.parametrize(("said", "status"), [(None, 502), (b"", 502), (_LOADING, 503)])
async def test_a_count_that_fails_is_refused_and_leaves_nothing(said: bytes | None, status: int) -> None:
    async with before(said, trusted=True) as front:
        answer = await front.ask(request("POST", "/tokenize", {"model": ASKED, "prompt": "step"}))
        assert answer.status == status
        assert front.pool.upstreams[0].num_active == 0


@pytest.mark.parametrize(
    ("said", "status", "num_rows"),
    [
        (_LOADING, 503, 0),
        (_LOADING.replace(b"503", b"429"), 503, 0),
        (_LOADING.replace(b"503", b"400"), 400, 0),
        ("unix:/nowhere", 503, 0),
        (_BROKEN, 502, 1),
    ],
)
async def test_what_an_upstream_refuses_leaves_no_row(
    said: bytes | str, status: int, num_rows: int, tmp_path: Path
) -> None:
    async with saying(said if isinstance(said, bytes) else b"") as bad:
        entry = model(bad if isinstance(said, bytes) else said, protocol="h1")
        async with fronting(entry, ledger=tmp_path / "ledger.db") as front:
            for stream in (False, True):
                assert (await front.ask(SURFACES["chat"](stream=stream))).status == status
    states = [one.state for one in rows(tmp_path / "ledger.db")]
    assert states == [RowState.SETTLED] * 2 * num_rows


@pytest.mark.parametrize(
    ("said", "status", "by"),
    [
        (_BROKEN, 200, "other"),
        (_LOADING, 200, "other"),
        (b"", 200, "other"),
        *((_LOADING.replace(b"503", one), 200, "other") for one in (b"401", b"403", b"404", b"429", b"529")),
        (_LOADING.replace(b"503", b"400"), 400, None),  # the client's own fault
        (None, 200, "other"),
        (whole(b"<html>"), 200, "other"),
    ],
)
async def test_fallbacks_answer_before_the_first_byte_and_a_header_tells(
    said: bytes | None, status: int, by: str | None
) -> None:
    async with saying(said) as bad, serving() as good:
        models = (
            model(bad, protocol="h1", fallbacks=("nobody", "other")),
            model("unix:/nowhere", name="nobody"),
            model(url_of(good), name="other", trusted=True),
        )
        async with fronting(*models) as front:
            for stream in (False, True):
                answer = await front.ask(SURFACES["chat"](stream=stream))
                assert answer.status == status
                told = answer.headers.get("steploop-fallback")
                assert told == by
                if status == 200:
                    assert b'"model":"big"' in answer.body
            assert front.num_active == [0, 0, 0]


@pytest.mark.parametrize(("may_use", "status"), [((ASKED,), 502), ((ASKED, "alias"), 200), (None, 200)])
async def test_fallbacks_that_a_tenant_may_not_use_are_not_asked(may_use: tuple[str, ...] | None, status: int) -> None:
    tenant = keyed_tenant("acme", models=may_use)
    async with saying(_BROKEN) as bad, serving() as good:
        other = model(url_of(good), name="other", aliases=("alias",))
        models = model(bad, protocol="h1", fallbacks=("other",)), other
        async with fronting(*models, tenants=(tenant,)) as front:
            assert (await front.ask(as_caller(SURFACES["chat"](), "acme"))).status == status


@pytest.mark.parametrize("status", [b"401", b"403", b"404"])
async def test_an_upstream_that_refuses_our_key_or_knows_no_such_model_is_ejected(status: bytes) -> None:
    async with serving() as good, before(_LOADING.replace(b"503", status), url_of(good)) as front:
        told = [(await front.ask(SURFACES["chat"]())).status for _ in range(12)]
        assert told == [200] * 12
        assert pool.NUM_BAD_OUTCOMES <= front.pool.upstreams[0].num_failures < 12


@pytest.mark.parametrize(("said", "stream"), [(_BROKEN, False), (whole(b'data: {"error":"no"}\n\n'), True)])
async def test_an_upstream_whose_answers_fail_is_ejected_but_never_the_last(said: bytes, stream: bool) -> None:
    async with saying(said) as bad, serving() as good:
        for urls, num_failed in (((bad, url_of(good)), 5), ((bad,), 13)):
            async with fronting(model(*urls, protocol="h1")) as front:
                told = [(await front.ask(SURFACES["chat"](stream=stream))).status for _ in range(13)]
                assert told.count(502) == num_failed
                assert set(told[-3:]) == ({200} if num_failed == 5 else {502})


_PARTS = b'{"choices":[{"index":0,"message":{"content":"' + b"a" * 60_000


@pytest.mark.parametrize("max_tokens", [5, None])
@pytest.mark.parametrize(
    ("is_cut", "body", "num_tokens"),
    [
        (True, _PARTS, 20_015),
        (True, b' {"choices":', 4),
        (True, b"<html>" * 9_000, 0),
        (False, b"<html>" * 9_000, 0),
        (False, _PARTS, 0),
        (False, b'{"error":{"message":"failed"},"usage":{"completion_tokens":9}}', 0),
        (False, b'{"choices":[{"index":7}],"usage":{"prompt_tokens":9,"completion_tokens":800000000000000}}', 0),
    ],
)
async def test_of_a_whole_answer_that_fails_no_more_is_billed_than_was_asked_for(
    is_cut: bool, body: bytes, num_tokens: int, max_tokens: int | None, tmp_path: Path
) -> None:
    said = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n\r\n"
    async with before(
        said % (len(body) + is_cut) + body, speaks={"ends": True}, ledger=tmp_path / "ledger.db", max_model_len=9
    ) as front:
        answer = await front.ask(SURFACES["chat"](max_tokens=max_tokens, n=2))
        assert answer.status == 502
        line = await front.usage()
        assert line["completion_tokens"] == min(num_tokens, 2 * (max_tokens or 9))
        assert bool(line["prompt_tokens"]) == bool(num_tokens)


async def test_requests_beyond_max_requests_wait_here_and_go_out_in_turn() -> None:
    async with relaying(max_requests=1) as gateway:
        first = gateway.pool.take_slot(LeadingBlocks(1), 0, "t")
        streams = [await open_with(gateway.server, closing(SURFACES["chat"](stream=True))) for _ in range(4)]
        await wait_until(lambda: gateway.pool.num_waiting == 4)
        assert gateway.num_running() == 0
        first.leave()
        told = await asyncio.gather(*(read_answer(*one) for one in streams))
        assert [one.events[-1] for one in told] == ["[DONE]"] * 4


async def test_requests_beyond_what_http2_connections_take_wait_for_room_on_four() -> None:
    async with relaying(1, False, {"max_concurrent_streams": 2}, protocol="h2") as gateway:
        (upstream,) = gateway.pool.upstreams
        told = await asyncio.gather(*(gateway.ask(SURFACES["chat"](stream=True)) for _ in range(40)))
        assert [one.events[-1] for one in told] == ["[DONE]"] * 40
        assert upstream.num_failures == gateway.pool.num_retries == 0
        assert len(upstream.connections) <= pool.MAX_CONNECTIONS + 1  # one more for its health


@pytest.mark.parametrize("then", [b"\0\0\x08\x07" + bytes(13), b""], ids=["GOAWAY", "no streams"])
async def test_an_upstream_whose_connections_take_no_requests_is_out_and_not_asked_without_end(then: bytes) -> None:
    settings = b"\0\0\x06\x04" + bytes(5) + b"\0\3" + bytes(4)  # MAX_CONCURRENT_STREAMS is 0
    num_accepted = 0

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal num_accepted
        num_accepted += 1
        writer.write((b"\0\0\0\x04" + bytes(5) if then else settings) + then)
        with contextlib.suppress(ConnectionError):
            await reader.read()
        writer.close()

    async with await asyncio.start_server(accept, "127.0.0.1", 0) as listening:
        url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
        async with fronting(model(url, protocol="h2")) as front:
            (upstream,) = front.pool.upstreams
            await wait_until(lambda: upstream.has_been_asked)
            assert num_accepted <= 2 * (pool.MAX_CONNECTIONS + 2)
            answer = await front.ask(SURFACES["chat"]())
            assert (answer.status, answer.json["error"]["code"]) == (503, "no_upstream")
            assert "accept no requests" in upstream.why_out


def reloaded(server: Server, *models: ModelSettings) -> None:
    """As SIGHUP with another list."""
    server._read_config = lambda finds_models: replace(server._config, models=models)
    server._reload()


async def test_a_reload_takes_other_upstreams_and_streams_under_way_go_on(tmp_path: Path) -> None:
    def entry(*ports: Running, **fields: Any) -> ModelSettings:
        return model(
            upstreams=tuple(UpstreamSettings(url=url_of(one), weight=i) for i, one in enumerate(ports, 1)), **fields
        )

    async with (
        serving() as a,
        serving() as b,
        fronting(entry(a), model(url_of(a), name="old")) as front,
    ):
        server = front.server

        async def begin(name: str = ASKED) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
            opened = await open_with(server, closing(SURFACES["chat"](model=name, stream=True, max_tokens=300)))
            await opened[0].readuntil(b"content")
            return opened

        async def status(name: str = ASKED) -> int:
            return (await ask(server, closing(SURFACES["chat"](model=name)))).status

        pool, gone = server._pools
        (first,) = pool.upstreams
        streams = [await begin(), await begin("old")]
        reloaded(server, entry(b, a), model(url_of(b), name="new", aliases=("other",)))
        assert server._pools[0] is pool
        assert [one.settings.weight for one in pool.upstreams] == [1, 2]
        assert pool.upstreams[1] is first
        assert [await status(name) for name in (ASKED, "new", "other", "old")] == [200, 200, 200, 404]
        reloaded(server, entry(b), entry(b, name="new", upstream_model="nope"))  # more than its upstreams has changed
        assert [await status(), await status("new")] == [200, 502]
        before = first.num_requests
        assert await status() == 200
        assert first.num_requests == before
        for reader, writer in streams:
            assert b"[DONE]" in await reader.read()
            writer.close()
        await wait_until(lambda: gone.has_left and first not in (pool._watches or {}))
        await wait_until(lambda: not any(one.num_connections for one in (first, *gone.upstreams)))
        reloaded(server, entry(b, api_key_file=str(tmp_path / "none")))
        assert (await status(), await status("new")) == (200, 502)  # all as it was


async def test_one_of_our_own_holds_no_more_than_it_runs_and_one_refill() -> None:
    async with relaying(trusted=True) as gateway:
        most = 2 * LIMITS.max_sequences
        slots = [gateway.pool.take_slot(LeadingBlocks(1), 0, "t") for _ in range(most + 3)]
        assert (gateway.pool.upstreams[0].num_active, gateway.pool.num_waiting) == (most, 3)
        for slot in slots:
            slot.leave()


async def test_regions_are_tried_in_order_and_weights_share() -> None:
    async with serving() as near, serving() as far:
        weights = (UpstreamSettings(url=url_of(near), weight=3), UpstreamSettings(url=url_of(far), weight=1))
        regions = (UpstreamSettings(url=url_of(near), region="eu"), UpstreamSettings(url=url_of(far), region="us"))
        for upstreams, expected in ((weights, [6, 2]), (regions, [8, 0])):
            async with fronting(model(upstreams=upstreams)) as front:
                pool = front.pool
                slots = [pool.take_slot(LeadingBlocks(1), 0, "t") for _ in range(8)]
                assert front.num_active == expected
                for slot in slots:
                    slot.leave()
                assert [(one.num_active, one.num_waiting_tokens) for one in pool.upstreams] == [(0, 0)] * 2


async def test_a_tenant_stays_with_a_version_while_it_is_up(caplog: pytest.LogCaptureFixture) -> None:
    async with serving() as old, serving() as new, serving() as newer:
        versions = {"1": (old, 3), "2": (new, 1)}
        upstreams = tuple(
            UpstreamSettings(url=url_of(one), version=name, weight=weight) for name, (one, weight) in versions.items()
        )
        upstreams += (UpstreamSettings(url=url_of(newer), version="2", weight=1),)
        async with fronting(model(upstreams=upstreams, max_requests=100)) as front:
            pool, now_s = front.pool, asyncio.get_running_loop().time()
            of = {f"t{i}": pool.version_of(f"t{i}", now_s) for i in range(400)}
            assert 200 < sum(one == "1" for one in of.values()) < 280  # 3 of 5
            slots = [(tenant, pool.take_slot(LeadingBlocks(1), 0, tenant)) for tenant in ("t0", "t1", "t2", "t3") * 9]
            for tenant, slot in slots:
                assert slot.upstream is not None
                assert slot.upstream.settings.version == of[tenant]
                slot.leave()
            full = [pool.take_slot(LeadingBlocks(1), 0, next(t for t in of if of[t] == "1")) for _ in range(101)]
            assert full[100].upstream is None  # it waits for its version, and keeps no other waiting
            other = pool.take_slot(LeadingBlocks(1), 0, next(t for t in of if of[t] == "2"))
            assert other.upstream is not None
            for slot in (*full, other):
                slot.leave()
            pool.upstreams[0].is_healthy = False
            now = {tenant: pool.version_of(tenant, now_s) for tenant in of}
            assert set(now.values()) == {"2"}
            pool.upstreams[0].is_healthy, pool.upstreams[1].is_healthy = True, False
            assert {tenant: pool.version_of(tenant, now_s) for tenant in of} == of  # one of its two is still up
            with caplog.at_level("INFO", "server.access"):
                assert (await front.ask(SURFACES["chat"]())).status == 200
                page = (await front.ask(request("GET", "/metrics"))).body.decode()
            (line,) = (one for one in caplog.messages if "upstream=" in one)
            version = line.split("#")[1].split(" ")[0]
            assert version in ("1", "2")
            assert f'steploop_upstream_version_requests_total{{model_name="big",version="big {version}"}}' in page


async def test_a_conversation_stays_where_its_beginning_is() -> None:
    async with relaying(3) as gateway:
        histories = [f"{i}: " + "x" * 300 for i in range(4)]
        placed: list[set[int]] = [set() for _ in histories]
        for _ in range(3):
            for i, history in enumerate(histories):
                before = [one.num_requests for one in gateway.pool.upstreams]
                answer = await gateway.ask(SURFACES["completions"](prompt=history, max_tokens=4))
                after = [one.num_requests for one in gateway.pool.upstreams]
                placed[i].add(next(k for k in range(3) if after[k] > before[k]))
                histories[i] += answer.text() + " and more" * 9
        assert all(len(one) == 1 for one in placed)


async def test_one_prompt_for_all_is_spread_as_the_load_is_bounded() -> None:
    async with relaying(3) as gateway:
        prompt = leading_blocks("", ["y" * 5000], 1700)
        slots = [gateway.pool.take_slot(prompt, 0, "t") for _ in range(12)]
        assert max(one.num_active for one in gateway.pool.upstreams) <= 5
        for slot in slots:
            slot.leave()


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_is_freed_without_the_garbage_collector(stream: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    handles: list[weakref.ref[RelayHandle]] = []
    submit = Relay.submit

    def kept(relay: Relay, *arguments: Any) -> RelayHandle:
        handle = submit(relay, *arguments)
        handles.append(weakref.ref(handle))
        return handle

    monkeypatch.setattr(Relay, "submit", kept)
    async with relaying() as gateway:
        gc.disable()
        try:
            assert (await gateway.ask(SURFACES["chat"](stream=stream))).status == 200
            for _ in range(20):
                await asyncio.sleep(0)
            assert handles[0]() is None
        finally:
            gc.enable()


async def test_names_and_ids_are_ours_and_what_calls_hold_is_not_touched() -> None:
    call = {"type": "tool_use", "id": "t1", "name": "f", "input": {"model": "theirs", "id": "m1"}}
    said = whole({"content": [call], "model": "theirs.gguf", "id": "m1", "stop_reason": "tool_use"})
    async with before(said, upstream_model=None) as front:
        answer = await front.ask(SURFACES["messages"]())
        assert (answer.json["model"], answer.json["content"]) == (ASKED, [call])
        assert answer.json["id"] == "msg_" + answer.headers["x-request-id"]


async def test_messages_of_another_server_are_counted_from_their_first_and_last_event(tmp_path: Path) -> None:
    events: list[dict[str, Any]] = [
        {"type": "message_start", "message": {"id": "m1", "usage": {"input_tokens": 40, "cache_read_input_tokens": 2}}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "a"}},
        {"type": "message_delta", "delta": {"stop_reason": "max_tokens"}, "usage": {"output_tokens": 7}},
        {"type": "message_stop"},
    ]
    body = b"".join(b"event: %b\ndata: %b\n\n" % (one["type"].encode(), orjson.dumps(one)) for one in events)
    async with before(whole(body), ledger=tmp_path / "ledger.db") as front:
        answer = await front.ask(SURFACES["messages"](stream=True))
        assert [one["type"] for one in answer.events] == [one["type"] for one in events]
    (row,) = rows(tmp_path / "ledger.db")
    assert (row.prompt_tokens, row.cached_tokens, row.completion_tokens) == (42, 2, 7)


@pytest.mark.parametrize("trusted", [False, True])
async def test_of_messages_that_break_off_the_prompt_is_billed_as_told_and_the_text_that_came(
    trusted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay, "TELL_S", 0.05)
    told = {"input_tokens": 40, "output_tokens": 0}
    events: list[dict[str, Any]] = [{"type": "message_start", "message": {"id": "m1", "usage": told}}]
    events += [{"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "a"}}] * 3
    body = b"".join(b"data: %b\n\n" % orjson.dumps(one) for one in events)
    async with before(whole(body), trusted=trusted, ledger=tmp_path / "ledger.db") as front:
        assert b'"upstream_error"' in (await front.ask(SURFACES["messages"](stream=True))).body
    (row,) = rows(tmp_path / "ledger.db")
    assert (row.prompt_tokens, row.completion_tokens) == (40, 3)


_LONG = {"prompt": "x" * 300}
_FOUR = {"prompt": ["x" * 300] * 4}


@pytest.mark.parametrize(
    ("fields", "of_model", "words", "told", "billed"),
    [
        ({"max_tokens": 5}, {}, 1, (20, 5), (20, 5)),
        ({"max_tokens": 5, "n": 2}, {}, 1, (20, 900), (20, 10)),
        ({"max_tokens": 5, "best_of": 3}, {}, 1, (20, 900), (20, 15)),
        ({"max_tokens": None}, {"max_model_len": 9}, 1, (20, 900), (9, 9)),
        ({"max_tokens": None}, {}, 1, (10**9, 10**9), (16_481, 16_492)),  # what was sent and received, and 16,384
        ({"max_tokens": 5}, {"trusted": True}, 1, (20, 900), (20, 900)),
        # Of several answers, no less than has come
        (_FOUR | {"max_tokens": 30}, {}, 24, (100, 30), (400, 120)),  # as llama-server tells
        (_FOUR | {"max_tokens": 100}, {}, 24, (100, 30), (400, 120)),
        (_FOUR | {"max_tokens": 30}, {}, 24, (300, 90), (300, 90)),
        (_FOUR | {"max_tokens": 30, "echo": True}, {}, 24, (300, 3), (300, 3)),
        (_LONG | {"n": 4, "max_tokens": 30}, {}, 24, (90, 30), (90, 120)),
        (_LONG | {"max_tokens": 30}, {}, 24, (90, 3), (90, 3)),
        (_LONG | {"n": 4, "stream": True, "max_tokens": 30}, {}, 24, (90, 24), (90, 96)),
        (_LONG | {"n": 4, "stream": True, "max_tokens": 100}, {}, 24, (90, 100), (90, 100)),
        (_LONG | {"n": 4, "max_tokens": 30}, {}, 0, (90, 0), (90, 0)),
    ],
)
async def test_anothers_usage_is_billed_as_far_as_it_can_be_true(
    fields: dict[str, Any],
    of_model: dict[str, Any],
    words: int,
    told: tuple[int, int],
    billed: tuple[int, int],
    tmp_path: Path,
) -> None:
    shown = {"stream_options": {"include_usage": True}} if fields.get("stream") else {}
    num = fields.get("n", 1) * (4 if fields.get("prompt") == _FOUR["prompt"] else 1)
    usage = {"prompt_tokens": told[0], "completion_tokens": told[1]}
    said = whole({"choices": [{"index": i, "text": "word " * words} for i in range(num)], "usage": usage})
    if fields.get("stream"):
        events = [_chunk(index=i, text="word ") for i in range(num)] * words
        events += [_chunk(index=i, text="", finish_reason="stop") for i in range(num)]
        said = whole(b"".join(events) + b"data: %b\n\ndata: [DONE]\n\n" % orjson.dumps({"choices": [], "usage": usage}))
    async with before(said, ledger=tmp_path / "ledger.db", upstream_model=None, **of_model) as front:
        answer = await front.ask(SURFACES["completions"](**fields, **shown))
    (row,) = rows(tmp_path / "ledger.db")
    assert (row.prompt_tokens, row.completion_tokens) == billed
    assert (answer.usage["prompt_tokens"], answer.usage["completion_tokens"]) == billed


@pytest.mark.parametrize(
    ("of_model", "ends", "told", "billed"),
    [
        ({}, ("length", "length"), 40, 80),  # of the first alone, as llama-server tells
        ({}, ("length", "stop"), 40, 80),
        ({}, ("stop", "length"), 38, 78),
        ({}, ("length", "length"), 80, 80),
        ({}, ("stop", "stop"), 75, 75),
        ({"max_model_len": 100}, ("length", "length"), 20, 20),  # the context was full
        ({"trusted": True}, ("length", "length"), 40, 40),
    ],
)
async def test_of_two_answers_one_that_its_length_has_ended_has_as_many_tokens_as_it_may(
    of_model: dict[str, Any], ends: tuple[str, str], told: int, billed: int
) -> None:
    choices = [{"index": i, "text": "qcj bys" * 20, "finish_reason": end} for i, end in enumerate(ends)]
    usage = {"prompt_tokens": 90, "completion_tokens": told}
    async with before(whole({"choices": choices, "usage": usage}), **of_model) as front:
        answer = await front.ask(SURFACES["completions"](max_tokens=40, n=2))
    assert answer.usage["completion_tokens"] == billed


async def test_a_stream_of_counts_alone_that_fails_is_not_billed(tmp_path: Path) -> None:
    usage = orjson.dumps({"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 3}})
    async with before(
        _HEAD + b"data: %b\n\ndata: {nonsense}\n\n" % usage, speaks={"ends": True}, ledger=tmp_path / "ledger.db"
    ) as front:
        assert (await front.ask(SURFACES["chat"](stream=True))).status == 502
    (row,) = rows(tmp_path / "ledger.db")
    assert (row.prompt_tokens, row.completion_tokens) == (0, 0)


@pytest.mark.parametrize("bad", [-5, 10**30, "many"])
@pytest.mark.parametrize(
    ("surface", "events"),
    [
        ("chat", ["chat"]),
        ("chat", [_chunk(delta={"content": "a"}), _chunk(delta={}, finish_reason="stop"), "chat", b"data: [DONE]\n\n"]),
        ("responses", ["responses"]),
        (
            "messages",
            ["start", b'data: {"type":"content_block_delta"}\n\n', "end", b'data: {"type":"message_stop"}\n\n'],
        ),
    ],
    ids=["whole", "chat", "responses", "messages"],
)
async def test_usage_that_cannot_be_is_estimated_and_shown_to_nobody(
    surface: str, events: list[str | bytes], bad: Any, tmp_path: Path
) -> None:
    told: dict[str, Any] = {
        "chat": {"choices": [], "usage": {"prompt_tokens": bad, "completion_tokens": 2}},
        "responses": {"status": "completed", "output": [], "usage": {"input_tokens": 2, "output_tokens": bad}},
        "start": {"type": "message_start", "message": {"id": "m", "usage": {"input_tokens": bad, "output_tokens": 1}}},
        "end": {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": bad}},
    }
    is_stream = len(events) > 1
    if not is_stream:
        told["chat"]["choices"] = [{"index": 0, "message": {"content": "a"}, "finish_reason": "stop"}]
    pieces = (json.dumps(told[one]).encode() if isinstance(one, str) else one for one in events)
    body = b"".join(b"data: %b\n\n" % one if is_stream and not one.startswith(b"data") else one for one in pieces)
    async with before(whole(body), ledger=tmp_path / "ledger.db") as front:
        fields = (STREAM if surface == "chat" else {"stream": True}) if is_stream else {}
        answer = await front.ask(SURFACES[surface](**fields))
    assert answer.status == 200
    shown = [
        one.get("usage") or one.get("message", {}).get("usage")
        for one in (answer.events if is_stream else [answer.json])
        if one != "[DONE]"
    ]
    counts = [
        (one.get("prompt_tokens", one.get("input_tokens")), one.get("completion_tokens", one.get("output_tokens")))
        for one in shown
        if one
    ]
    (row,) = rows(tmp_path / "ledger.db")
    assert counts[-1] == (row.prompt_tokens, row.completion_tokens)
    assert all(0 < prompt < 20 and 0 <= completion <= 12 for prompt, completion in counts)


# Any bytes, without a connection.

VALUES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3) | st.just("stop")
NAMES = (
    *("type", "choices", "usage", "error", "response", "message", "delta", "done", "stop", "incomplete_details"),
    *("stop_reason", "index", "text", "finish_reason", "prompt_tokens", "input_tokens_details", "id", "model"),
)
KINDS = ("error", "message_delta", "message_stop", "response.completed", "response.failed", "response.x.delta")
OBJECTS = st.recursive(
    st.dictionaries(st.sampled_from(NAMES), VALUES | st.sampled_from(KINDS), max_size=4),
    lambda inner: st.dictionaries(st.sampled_from(NAMES), VALUES | inner | st.lists(inner, max_size=2), max_size=4),
    max_leaves=6,
)
EVENTS = st.lists(
    OBJECTS.map(lambda one: json.dumps(one).encode()) | st.binary(max_size=9) | st.just(b"[DONE]"), max_size=6
)
ENDS_OF_EVENTS = st.sampled_from([b"\n\n", b"\r\n\r\n", b"\r\r", b"\nevent: \xff\n\n", b"\n: comment\n\n"])


_CALL = GenerationCall(model="big", prompts=(), sampling=SamplingParams(max_tokens=5), is_stream=True, num_sequences=2)
_TWO = Passed(_CALL, chat_api.SURFACE, LeadingBlocks(0))


@pytest.mark.parametrize("surface", ALL, ids=lambda surface: surface.path)
@given(events=EVENTS, end=ENDS_OF_EVENTS)
@settings(max_examples=60, deadline=None)
def test_whatever_an_answer_says_it_is_read_or_a_fault_however_it_is_split(
    surface: Surface, events: list[bytes], end: bytes
) -> None:
    asked = Passed(_CALL, surface, LeadingBlocks(0))

    def read(pieces: list[bytes]) -> tuple[list[Part], str]:
        answer, parts = UpstreamAnswer(asked, "r1", False), list[Part]()
        try:
            for piece in pieces:
                parts += answer.push(piece)
        except UpstreamFault as fault:
            return parts, str(fault)
        return parts, str(answer.usage)

    begin, end = (b"", b"\n") if surface.form == "lines" else (b"data: ", end)
    data = b"".join(begin + event + end for event in events)
    whole = read([data])
    assert read([data[i : i + 1] for i in range(len(data))]) == whole
    assert all(choice in (0, 1) for part in whole[0] for choice in (*part.texts, *part.ends))
    answer = UpstreamAnswer(asked, "r1", False)
    answer.body += b"".join(events)
    with contextlib.suppress(UpstreamFault):
        answer.document()


CHUNKS = (  # of a text, for each %b, as servers write it
    b'{"id":"x","model":"m","choices":[{"index":0,"delta":{"content":%b},"finish_reason":null}],"usage":null}',
    b'{ "choices": [{"finish_reason": null, "index": null, "delta": {"content": %b}}], "id": "x", "model": "m" }',
    b'{"id":"x","choices":[{"index":1,"delta":{"role":"assistant","reasoning_content":%b}}]}',
    b'{"id":"x","choices":[{"index":0,"logprobs":{"content":[{"token":%b}]},"delta":{"content":%b}}]}',
    b'{"id":"x","choices":[{"index":0,"text":%b,"logprobs":null}],"model":"m"}',
    b'{"id":"x","choices":[{"index":0,"delta":{"tool_calls":[{"index":0,"function":{"arguments":%b}}]}}]}',
    b'{"id":"x","choices":[{"index":0,"delta":{"content":%b},"finish_reason":"stop"}]}',
    b'{"id":"x","choices":[{"index":0,"delta":{"content":%b}}],"usage":{"completion_tokens":1}}',
    b'{"id":%b,"choices":[{"index":0,"delta":{"content":"a"}}]}',
    b'{"id":"x","choices":[{"index":0,"delta":{"content":%b}}],"large":"' + b"x" * 4096 + b'"}',
)
WRITTEN = st.sampled_from(
    (
        *(
            b'"a"',
            b'"b"',
            b'""',
            b"null",
            b'","',
            b'":"',
            b'"\\n"',
            b'"\\u0041"',
            b'"\\ud800"',
            b'"id"',
            b'"assistant"',
        ),
        *(b'"\xc3\xa9\xe2\x80\xa8"', b'"\xe2\x82"', b'"a\tb"', b"[]", b'"a","text":"b"'),
        b'"%b"' % relayed.PROBE.encode(),
    )
)


@given(chunks=st.lists(st.sampled_from(CHUNKS), min_size=1, max_size=2), texts=st.lists(WRITTEN, max_size=9))
@settings(max_examples=300, deadline=None)
def test_an_event_is_read_alike_whatever_events_were_before_it(chunks: list[bytes], texts: list[bytes]) -> None:
    together = UpstreamAnswer(_TWO, "r1", False)
    for chunk, text in zip(itertools.cycle(chunks), texts, strict=False):
        data = b"data: %b\n\n" % chunk.replace(b"%b", text)
        try:
            expected = list(UpstreamAnswer(_TWO, "r1", False).push(data))
        except UpstreamFault:
            with pytest.raises(UpstreamFault):
                list(together.push(data))
            return
        assert list(together.push(data)) == expected


@pytest.mark.parametrize(
    ("chunk", "num_parsed"), [*zip(CHUNKS, (3, 3, 3, 9, 3, 6, 6, 6, 9, 6), strict=True)], ids=range(10)
)
def test_of_events_that_differ_in_their_text_alone_the_first_are_parsed(
    chunk: bytes, num_parsed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer, parsed, read = UpstreamAnswer(_TWO, "r1", False), list[bytes](), relayed._read_message
    monkeypatch.setattr(relayed, "_read_message", lambda data: read(parsed.append(data) or data))
    for i in range(6):
        list(answer.push(b"data: %b\n\n" % chunk.replace(b"%b", b'"word %d"' % i)))
    assert len(parsed) == num_parsed


def test_what_waits_for_the_end_is_bounded() -> None:
    sampling = SamplingParams(max_tokens=5)
    call = GenerationCall(model="m", prompts=(), sampling=sampling, includes_usage=True, is_stream=True)
    answer = UpstreamAnswer(Passed(call, ALL[0], LeadingBlocks(0)), "r1", False)
    last = b'data: {"choices":[],"usage":{"told":"%b"}}\n\n' % (b"x" * 3_000_000)
    assert [part.is_last for part in answer.push(last * 2)] == [True, True]
    with pytest.raises(UpstreamFault, match="last events are larger"):
        list(answer.push(last))


async def test_all_inputs_of_anothers_embeddings_are_billed(tmp_path: Path) -> None:
    body = b'{"object":"list","data":[],"usage":{"prompt_tokens":40,"total_tokens":40}}'
    async with before(
        whole(body),
        ledger=tmp_path / "ledger.db",
        max_model_len=9,
    ) as front:
        asked = {"model": ASKED, "input": ["step"] * 9}
        assert (await front.ask(request("POST", "/v1/embeddings", asked))).status == 200
    assert [row.prompt_tokens for row in rows(tmp_path / "ledger.db")] == [40]


async def test_embeddings_and_scores_pass_with_their_usage(tmp_path: Path) -> None:
    style = PoolingStyle(pooling=Pooling("last"), num_dims=8)
    upstream = {"load": load_with(pooling=style)}
    path = tmp_path / "ledger.db"
    async with relaying(1, False, upstream, trusted=True, config={"ledger": path}) as gateway:
        body = {"model": ASKED, "input": ["step", [4, 5]]}
        found = (await gateway.ask(request("POST", "/v1/embeddings", body))).json
        (own,) = gateway.upstreams
        direct = (await ask(own.server, closing(request("POST", "/v1/embeddings", body | {"model": MODEL})))).json
        assert found["data"] == direct["data"]
        assert (found["model"], found["usage"]["prompt_tokens"]) == (ASKED, direct["usage"]["prompt_tokens"])
        ranked = (
            await gateway.ask(request("POST", "/rerank", {"model": ASKED, "query": "a", "documents": ["a"]}))
        ).json
        assert ranked["results"][0]["relevance_score"] == pytest.approx(1.0)
        olds = (await gateway.ask(request("POST", "/api/embed", {"model": f"{ASKED}:latest", "input": "step"}))).json
        assert olds["embeddings"][0] == found["data"][0]["embedding"]
    told = [(row.prompt_tokens, row.completion_tokens) for row in rows(path)]
    assert told == [
        (found["usage"]["prompt_tokens"], 0),
        (ranked["usage"]["prompt_tokens"], 0),
        (olds["prompt_eval_count"], 0),
    ]
