"""Anthropic's messages: their blocks as the template's messages, answers as blocks, streamed as whole."""

import itertools
import json
from typing import Any

import msgspec
import pytest
from anthropic.types import Message, RawMessageStreamEvent
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from core.errors import ErrorKind, InvalidRequest, ServiceError
from core.tool_detection import ToolStyle
from core.types import Delta, FinishReason
from server.api.fields import ChatPrompt, GenerationCall
from server.api.messages import ERRORS, SURFACE, parse_count
from tests.server.api import wire

EVENT: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)
ASKED: dict[str, Any] = {"model": "tiny", "max_tokens": 9, "messages": [{"role": "user", "content": "Hi"}]}
STYLED = msgspec.structs.replace(wire.DEFAULTS, tool_style=ToolStyle("hermes", has_text_arguments=False, most_calls=2))
TOOL = {"name": "look", "input_schema": {"type": "object", "properties": {"at": {"type": "string"}}}}
CALL = {"type": "tool_use", "id": "t1", "name": "look", "input": {"at": "x"}}


def parse(**fields: Any) -> GenerationCall:
    body = {name: value for name, value in (ASKED | fields).items() if value is not None}
    return SURFACE.parse(json.dumps(body).encode(), lambda model: (model or "tiny", STYLED))


def prompt(**fields: Any) -> list[dict[str, Any]]:
    (chat,) = parse(**fields).prompts
    assert isinstance(chat, ChatPrompt)
    return list(chat.messages)


def text(content: str) -> dict[str, Any]:
    return {"type": "text", "text": content}


def result(content: Any, of: str = "t1") -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": of, "content": content}


def test_blocks_become_the_templates_messages() -> None:
    thought = {"type": "thinking", "thinking": "Hm.", "signature": ""}
    history = [
        {"role": "user", "content": [text("a"), {**text("b"), "cache_control": {"type": "ephemeral"}}]},
        {"role": "assistant", "content": [thought, text("I look."), CALL, CALL | {"id": "t2"}]},
        {"role": "user", "content": [result([text("one"), text("two")]), result(None, "t2"), text("Go on.")]},
        {"role": "user", "content": "Please."},
    ]
    function = {"name": "look", "arguments": {"at": "x"}}
    assert prompt(messages=history, system=[text("Be brief.")], tools=[TOOL]) == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "a\nb"},
        {
            "role": "assistant",
            "content": "I look.",
            "reasoning_content": "Hm.",
            "tool_calls": [{"type": "function", "id": name, "function": function} for name in ("t1", "t2")],
        },
        {"role": "tool", "content": "one\ntwo", "tool_call_id": "t1", "name": "look"},
        {"role": "tool", "content": "", "tool_call_id": "t2", "name": "look"},
        {"role": "user", "content": "Go on.\nPlease."},
    ]


def test_what_a_server_tool_found_is_a_result_of_a_call() -> None:
    """Of another server's history: what it has encrypted stays away, and so do the calls where there is no form."""
    found = {"type": "web_search_result", "title": "Pandas", "url": "https://p.example", "encrypted_content": "Eo8"}
    turn = [
        text("I search."),
        {"type": "server_tool_use", "id": "s1", "name": "web_search", "input": {"query": "panda"}},
        {"type": "web_search_tool_result", "tool_use_id": "s1", "content": [found, found | {"url": None}]},
        text("A bear."),
        {"type": "server_tool_use", "id": "s2", "name": "code", "input": {}},
        {
            "type": "code_execution_tool_result",
            "tool_use_id": "s2",
            "content": {"type": "code_execution_result", "stdout": "7", "stderr": "", "return_code": 0, "content": []},
        },
        {"type": "server_tool_use", "id": "s3", "name": "web_search", "input": {}},
        {
            "type": "web_search_tool_result",
            "tool_use_id": "s3",
            "content": {"type": "web_search_tool_result_error", "error_code": "max_uses_exceeded"},
        },
        text("Seven."),
    ]
    history = [*ASKED["messages"], {"role": "assistant", "content": turn}, *ASKED["messages"]]
    told = [(one["role"], one["content"], len(one.get("tool_calls", ()))) for one in prompt(messages=history)]
    assert told[1:-1] == [
        ("assistant", "I search.", 1),
        ("tool", "Pandas\nhttps://p.example\nPandas", 0),
        ("assistant", "A bear.", 1),
        ("tool", "7", 0),
        ("assistant", "", 1),
        ("tool", "max_uses_exceeded", 0),
        ("assistant", "Seven.", 0),
    ]
    body = json.dumps(ASKED | {"messages": history}).encode()
    (plain,) = SURFACE.parse(body, lambda model: ("tiny", wire.DEFAULTS)).prompts
    assert isinstance(plain, ChatPrompt)
    assert [one["content"] for one in plain.messages[1:-1]] == ["I search.\nA bear.\nSeven."]


def test_pages_references_to_tools_and_summaries_are_the_text_they_have() -> None:
    """What Anthropic's own tools, its tool search and its compaction leave in a history."""
    page = {
        "type": "document",
        "title": "Panda",
        "source": {"type": "text", "media_type": "text/plain", "data": "Bear"},
    }
    scan = {"type": "document", "title": "Scan", "source": {"type": "base64", "data": "JVBE"}}
    named = {"type": "tool_reference", "tool_name": "look"}
    searched = {"type": "tool_search_tool_search_result", "tool_references": [named]}
    turn = [
        {"type": "compaction", "content": "We spoke of bears.", "encrypted_content": "Eo8"},
        {"type": "compaction", "content": None},
        *({"type": "server_tool_use", "id": f"s{i}", "name": "web_fetch", "input": {}} for i in range(3)),
        {
            "type": "web_fetch_tool_result",
            "tool_use_id": "s0",
            "content": {"type": "web_fetch_result", "content": page},
        },
        {
            "type": "web_fetch_tool_result",
            "tool_use_id": "s1",
            "content": {"type": "web_fetch_result", "content": scan},
        },
        {"type": "tool_search_tool_result", "tool_use_id": "s2", "content": searched},
        CALL,
    ]
    history = [
        *ASKED["messages"],
        {"role": "assistant", "content": turn},
        {"role": "user", "content": [result([named])]},
    ]
    told = [(one["role"], one["content"]) for one in prompt(messages=history)][1:]
    assert told == [
        ("assistant", "We spoke of bears."),
        ("tool", "Panda\nBear"),
        ("tool", "Scan"),
        ("tool", "look"),
        ("assistant", ""),
        ("tool", "look"),
    ]


def test_a_billing_header_is_left_out_and_documents_are_text() -> None:
    billing = text("x-anthropic-billing-header: cc_version=2.1; cch=abc12;")
    for source in (
        {"type": "text", "media_type": "text/plain", "data": "D"},
        {"type": "content", "content": "D"},
        {"type": "content", "content": [text("D")]},
    ):
        document = {"type": "document", "title": "T", "source": source}
        system, user = prompt(system=[billing, text("S")], messages=[{"role": "user", "content": [document]}])
        assert (system["content"], user["content"]) == ("S", "T\nD")
    found = {"type": "search_result", "title": "T", "source": "https://example.com", "content": [text("D")]}
    assert prompt(messages=[{"role": "user", "content": [found]}])[0]["content"] == "T\nD"
    header = billing["text"]
    for of_header in ([billing], header, f"\n{header}\n", [text(f"\n{header}\n{header}")]):
        assert len(prompt(system=of_header)) == 1
    for around in (
        f"{header}\nS",
        f"\n\n{header}\n{header}\nS",
        [text(f"\n {header}\nS")],
        [text("S"), billing],
        [text(f"{header}\r\nS"), text(header)],
    ):
        assert [one["content"] for one in prompt(system=around)] == ["S", "Hi"]
    assert prompt(system=f"S {header}")[0]["content"] == f"S {header}"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        (
            {
                "messages": [
                    {"role": "assistant", "content": [CALL]},
                    {
                        "role": "user",
                        "content": [result([text("a"), {"type": "image", "source": {"type": "url"}}], "t1")],
                    },
                ]
            },
            "messages[1].content[0].content[1].type",
        ),
        *(
            (
                {"messages": [{"role": "user", "content": [{"type": "document", "source": source}]}]},
                f"messages[0].content[0].{param}",
            )
            for source, param in (
                ({"type": "text"}, "source.data"),
                ({"type": "base64", "data": "x"}, "type"),
                ({"type": "content", "content": [{"type": "image"}]}, "source.content[0].type"),
            )
        ),
        ({"messages": [{"role": "user", "content": [result("x", "lost")]}]}, "messages[0].content[0].tool_use_id"),
        (
            {
                "messages": [
                    {"role": "assistant", "content": [CALL]},
                    {"role": "user", "content": [text("a"), result("x"), result("x")]},
                ]
            },
            "messages[1].content[2].tool_use_id",
        ),
        ({"messages": [{"role": "assistant", "content": [CALL | {"input": 5}]}]}, "messages[0].content[0].input"),
        ({"tools": [{"name": "look"}]}, "tools[0].input_schema"),
        ({"tools": [TOOL, TOOL]}, "tools[1].name"),
        ({"tools": [TOOL | {"input_schema": {"type": "array"}}]}, "tools[0].input_schema"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "other"}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"output_config": {"format": {"type": "json_schema", "schema": 5}}}, "output_config.format.schema"),
        ({"stop_sequences": ["a"] * 17}, "stop"),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
        ({"n": 2}, "n"),
    ],
)
def test_bad_input_names_its_place(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse(**fields)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("choice", "is_required", "most"),
    [
        (None, False, None),
        ({"type": "auto", "disable_parallel_tool_use": True}, False, 1),
        ({"type": "any"}, True, None),
        ({"type": "tool", "name": "look"}, True, None),
    ],
)
def test_a_tool_choice_is_held(choice: Any, is_required: bool, most: int | None) -> None:
    server_tool = {"type": "web_search_20250305", "name": "web_search"}  # dropped: it is no function
    tools = parse(tools=[TOOL, server_tool], tool_choice=choice).tools
    assert tools is not None
    assert [one.name for one in tools.functions] == ["look"]
    assert (tools.is_required, tools.most_calls) == (is_required, most)
    assert parse(tools=[TOOL], tool_choice={"type": "none"}).tools is None


CUT = 'I look.<tool_call>\n{"name": "look", "arguments": {"at": "é'
ANSWERS: dict[str, tuple[str, FinishReason, str | None, list[dict[str, Any]], str]] = {
    "text": ("Hi é", FinishReason.STOP, None, [text("Hi é")], "end_turn"),
    "nothing": ("", FinishReason.STOP, None, [text("")], "end_turn"),
    "cut": ("Hi", FinishReason.LENGTH, None, [text("Hi")], "max_tokens"),
    "stopped": ("Hi", FinishReason.STOP, "END", [text("Hi")], "stop_sequence"),
    "called": (
        CUT + '"}}\n</tool_call>\n<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>',
        FinishReason.STOP,
        None,
        [text("I look."), {"type": "tool_use", "input": {"at": "é"}}, {"type": "tool_use", "input": {}}],
        "tool_use",
    ),
    "cut call": (
        CUT,
        FinishReason.LENGTH,
        None,
        [text("I look."), {"type": "tool_use", "input": {"incomplete_arguments": '{"at": "é'}}],
        "max_tokens",
    ),
}


def test_arguments_that_are_too_deep_to_read_stay_text() -> None:
    deep = '{"at": ' + "[" * 5000
    said = CUT.removesuffix('{"at": "é') + deep + "]" * 5000 + "}}\n</tool_call>"
    last = Delta(text="", num_tokens=1, finish_reason=FinishReason.STOP)
    block = wire.whole(SURFACE, parse(tools=[TOOL]), (0, wire.say(said)), (0, last))["content"][-1]
    assert block["input"]["incomplete_arguments"].startswith(deep)


@pytest.mark.parametrize("has_tools", [False, True])
@pytest.mark.parametrize("name", ANSWERS)
@given(st.data())
def test_what_is_streamed_is_what_the_whole_answer_says(name: str, has_tools: bool, data: st.DataObject) -> None:
    said, reason, stop_string, blocks, stop_reason = ANSWERS[name]
    call = parse(stream=True, tools=[TOOL] if has_tools else None)
    if not has_tools and "call" in name:
        blocks, stop_reason = [text(said)], "end_turn" if reason is FinishReason.STOP else "max_tokens"
    if has_tools and not said:  # where an answer may be of many blocks, none has begun
        blocks = []
    cuts = sorted(data.draw(st.sets(st.integers(0, len(said)), max_size=6)) | {0, len(said)})
    last = Delta(text="", num_tokens=1, finish_reason=reason, stop_string=stop_string)
    deltas = [(0, wire.say(said[a:b])) for a, b in itertools.pairwise(cuts)] + [(0, last)]
    context = msgspec.structs.replace(wire.CONTEXT, prompt_lengths=(7,))
    whole = wire.whole(SURFACE, call, *deltas, context=context)
    events = wire.read_events(wire.stream(SURFACE.stream(call, context), *deltas))
    assert all(name == event["type"] for name, event in events)
    streamed = assembled([EVENT.validate_python(event) for _, event in events])
    Message.model_validate(whole)
    assert [{key: block[key] for key in kind} for kind, block in zip(blocks, whole["content"], strict=True)] == blocks
    assert (whole["stop_reason"], whole["stop_sequence"]) == (stop_reason, stop_string)
    assert whole["usage"] == {
        "input_tokens": 3,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 4,
        "output_tokens": 2,
        "output_tokens_details": {"thinking_tokens": 0},
    }
    assert streamed == whole


def assembled(events: list[Any]) -> dict[str, Any]:
    """The message, as a client of the stream puts it together; the order of events is checked."""
    first, *rest = events
    assert (first.type, rest[-2].type, rest[-1].type) == ("message_start", "message_delta", "message_stop")
    assert first.message.usage.input_tokens == 7
    content: list[dict[str, Any]] = []
    open_texts: list[str] | None = None
    for event in rest[:-2]:
        match event.type:
            case "content_block_start":
                assert (event.index, open_texts) == (len(content), None)
                content.append(event.content_block.model_dump(exclude_unset=True))
                open_texts = []
            case "content_block_delta":
                assert event.index == len(content) - 1
                assert open_texts is not None
                delta = event.delta
                open_texts.append(delta.text if delta.type == "text_delta" else delta.partial_json)
            case "content_block_stop":
                assert open_texts is not None
                joined, open_texts, block = "".join(open_texts), None, content[-1]
                if block["type"] == "text":
                    block["text"] = joined
                else:
                    cut = {"incomplete_arguments": joined}
                    block["input"] = json.loads(joined or "{}") if joined.endswith("}") or not joined else cut
    assert open_texts is None
    ending = rest[-2]
    message: dict[str, Any] = first.message.model_dump(exclude_unset=True)
    return message | {
        "content": content,
        "stop_reason": ending.delta.stop_reason,
        "stop_sequence": ending.delta.stop_sequence,
        "usage": ending.usage.model_dump(exclude_unset=True),
    }


@pytest.mark.parametrize(
    ("kind", "status", "name"),
    [
        (ErrorKind.UNAVAILABLE, 529, "overloaded_error"),
        (ErrorKind.RATE_LIMITED, 429, "rate_limit_error"),
        (ErrorKind.BODY_TOO_LARGE, 413, "request_too_large"),
    ],
)
def test_errors_have_their_envelope_whole_and_in_a_stream(kind: ErrorKind, status: int, name: str) -> None:
    error = ServiceError(kind, "Wait.", "busy")
    assert ERRORS.status(error) == status
    shown = json.loads(ERRORS.body(error, "r1"))
    assert (shown["type"], shown["error"]["type"], shown["error"]["message"]) == ("error", name, "Wait.")
    assert shown["request_id"] == "r1"
    ((event, data),) = wire.read_events(SURFACE.stream(parse(stream=True), wire.CONTEXT).error(error))
    assert (event, data["error"]) == ("error", shown["error"])
    assert {one for one in ErrorKind if ERRORS.status(ServiceError(one, "", "")) < 400} == set()


def test_tokens_are_counted_without_a_length() -> None:
    body = json.dumps({"model": "tiny", "messages": ASKED["messages"]}).encode()
    assert parse_count(body, lambda model: ("tiny", STYLED)).prompts == parse().prompts
