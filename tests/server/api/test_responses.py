import json
from typing import Any

import msgspec
import pytest
from openai.types.responses import Response, ResponseInputItemParam, ResponseStreamEvent
from pydantic import TypeAdapter

from core.errors import ErrorKind, InvalidRequest, ServiceError
from core.tool_detection import ToolStyle
from core.types import Delta, FinishReason
from server.api.fields import ChatPrompt
from server.api.replies import StreamReply
from server.api.responses import SURFACE
from tests.server.api import wire
from tests.server.api.wire import CONTEXT, LOGPROBS, read_events, say, sdk_reading

STYLED = msgspec.structs.replace(wire.DEFAULTS, tool_style=ToolStyle("hermes", has_text_arguments=False, most_calls=2))
INPUT_ITEM: TypeAdapter[Any] = TypeAdapter(ResponseInputItemParam)
EVENT_TYPE: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
OPENING = [
    "response.created",
    "response.in_progress",
    "response.output_item.added",
    "response.content_part.added",
]
CLOSING = ["response.output_text.done", "response.content_part.done", "response.output_item.done"]
USAGE_JSON = {
    "input_tokens": 7,
    "input_tokens_details": {"cached_tokens": 4, "cache_write_tokens": 0},
    "output_tokens": 2,
    "output_tokens_details": {"reasoning_tokens": 0},
    "total_tokens": 9,
}


def reply(**fields: Any) -> StreamReply:
    return SURFACE.stream(wire.parse(SURFACE, **{"input": "Hi", "stream": True} | fields), CONTEXT)


def whole(delta: Delta, **fields: Any) -> Any:
    return wire.whole(SURFACE, wire.parse(SURFACE, input="Hi", **fields), (0, delta), timings={"queue_ms": 0.5})


def prompt(**fields: Any) -> tuple[dict[str, Any], ...]:
    (chat,) = wire.parse(SURFACE, **fields).prompts
    assert isinstance(chat, ChatPrompt)
    return chat.messages


def test_a_string_is_the_users_message_after_the_instructions() -> None:
    assert prompt(input="Hi") == ({"role": "user", "content": "Hi"},)
    assert prompt(input="Hi", instructions="Be brief.") == (
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
    )


def test_a_conversation_is_taken_with_our_own_items_in_it() -> None:
    ours = whole(say("Hello", FinishReason.STOP))["output"]
    assert prompt(
        input=[
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
            *ours,
            {"type": "message", "role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
        ]
    ) == (
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "a\nb"},
        {"role": "assistant", "content": "Hello"},
        {"role": "assistant", "content": "No."},
    )


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": 5}, "input"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"role": "user", "content": None}]}, "input[0].content"),
        ({"input": [{"content": "a"}]}, "input[0].role"),
        ({"input": [{"role": "x", "content": "a"}]}, "input[0].role"),
        ({"input": [{"type": "function_call_output", "call_id": "c", "output": "o"}]}, "input[0].call_id"),
        ({"input": [{"type": "computer_call"}]}, "input[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0].content[0].text"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_tokens": 5, "max_output_tokens": 6}, "max_tokens"),
        ({"include": ["reasoning.encrypted_content", "usage"]}, "include[1]"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"metadata": {str(i): "" for i in range(17)}}, "metadata"),
        ({"metadata": {"k" * 65: "v"}}, "metadata"),
        ({"metadata": {"k": "v" * 513}}, "metadata"),
        ({"metadata": {"k": 1}}, "metadata[k]"),
    ],
)
def test_what_cannot_be_answered_is_refused(fields: dict[str, Any], param: str) -> None:
    assert wire.refusal(SURFACE, **{"input": "Hi"} | fields).param == param


def test_logprobs_are_asked_for_in_two_ways() -> None:
    include = ["message.output_text.logprobs"]
    asked: list[dict[str, Any]] = [
        {"include": include},
        {"include": include, "top_logprobs": 2},
        {"top_logprobs": 2},
        {"top_logprobs": 0},
    ]
    assert [wire.parse(SURFACE, input="Hi", **fields).sampling.num_logprobs for fields in asked] == [0, 2, 2, None]


def test_a_stream_has_the_full_order_of_events() -> None:
    events = read_events(wire.stream(reply(), (0, say("Hel")), (0, say("")), (0, say("lo", FinishReason.STOP))))
    names = [name for name, _ in events]
    assert names == [*OPENING, *["response.output_text.delta"] * 2, *CLOSING, "response.completed"]
    assert [data["type"] for _, data in events] == names
    assert [data["sequence_number"] for _, data in events] == list(range(10))
    assert events[4][1] == {
        "type": "response.output_text.delta",
        "item_id": "msg_abc123",
        "output_index": 0,
        "content_index": 0,
        "logprobs": [],
        "sequence_number": 4,
        "delta": "Hel",
    }
    item = {
        "id": "msg_abc123",
        "type": "message",
        "status": "completed",
        "role": "assistant",
        "content": [{"type": "output_text", "text": "Hello", "annotations": [], "logprobs": []}],
    }
    assert events[-2][1]["item"] == item
    response = events[-1][1]["response"]
    assert (response["status"], response["output"], response["usage"]) == ("completed", [item], USAGE_JSON)
    assert response["id"] == events[0][1]["response"]["id"] == "resp_abc123"


def test_logprobs_of_all_deltas_are_repeated_at_the_end() -> None:
    delta = Delta(text="Hel é", num_tokens=2, logprobs=LOGPROBS)
    events = [data for _, data in read_events(wire.stream(reply(top_logprobs=2), (0, delta), (0, delta)))]
    tokens = [[entry["token"] for entry in data["logprobs"]] for data in (events[4], events[6])]
    assert tokens == [["Hel", " é"], ["Hel", " é"] * 2]
    assert events[-1]["response"]["output"][0]["content"][0]["logprobs"] == events[6]["logprobs"]


def test_the_sdks_stream_helper_gives_the_final_response() -> None:
    answer = reply(top_logprobs=2)
    delta = Delta(text="Hel é", num_tokens=2, logprobs=LOGPROBS, finish_reason=FinishReason.STOP)
    with (
        sdk_reading(wire.stream(answer, (0, say("Oh. ")), (0, delta))) as client,
        client.responses.stream(model="tiny", input="Hi") as events,
    ):
        final = events.until_done().get_final_response()
    assert final.output_text == "Oh. Hel é"
    assert final.usage is not None
    assert final.usage.total_tokens == 9


def test_too_few_tokens_make_it_incomplete_streamed_and_whole() -> None:
    events = read_events(wire.stream(reply(max_output_tokens=1), (0, say("Hel", FinishReason.LENGTH))))
    name, data = events[-1]
    assert name == "response.incomplete"
    for response in (data["response"], whole(say("Hel", FinishReason.LENGTH), max_output_tokens=1)):
        assert response["status"] == response["output"][0]["status"] == "incomplete"
        assert response["incomplete_details"] == {"reason": "max_output_tokens"}
        assert response["max_output_tokens"] == 1
        assert response["usage"] == USAGE_JSON


def test_a_failure_closes_the_item_and_fails_the_response() -> None:
    answer = reply()
    events = answer.start() + answer.delta(0, say("Hel", FinishReason.ERROR))
    events += answer.error(ServiceError(ErrorKind.ENGINE, "The engine failed.", "engine_error"))
    read = read_events(events)
    assert [name for name, _ in read] == [*OPENING, "response.output_text.delta", *CLOSING, "response.failed"]
    for _, data in read:
        EVENT_TYPE.validate_python(data, strict=True)
    response = read[-1][1]["response"]
    assert response["status"] == "failed"
    assert (response["error"]["code"], response["error"]["message"]) == ("server_error", "The engine failed.")
    assert response["output"][0]["content"][0]["text"] == "Hel"
    assert response["output"][0]["status"] == "incomplete"
    with sdk_reading(events) as client:
        received = list(client.responses.create(model="tiny", input="Hi", stream=True))
    assert received[-1].type == "response.failed"


def test_the_sdk_reads_a_whole_answer() -> None:
    data = whole(say("Hello", FinishReason.STOP, *LOGPROBS), top_logprobs=2, temperature=0.25, timings=True)
    assert data.pop("timings") == {"queue_ms": 0.5}
    response = Response.model_validate(data, strict=True)
    # OpenAI's answers have them, the SDK's type does not
    assert response.model_extra == {"store": False, "presence_penalty": 0.0, "frequency_penalty": 0.0}
    assert json.loads(response.model_dump_json(exclude_unset=True)) == data
    with sdk_reading(json.dumps(data).encode()) as client:
        read = client.responses.create(model="tiny", input="Hi")
    assert (read.output_text, read.status, read.temperature, read.top_p) == ("Hello", "completed", 0.25, 0.9)


# What Open Responses demands of a response object, null or not
DEMANDED = """
    id object created_at completed_at status incomplete_details model previous_response_id instructions output error
    tools tool_choice truncation parallel_tool_calls text top_p presence_penalty frequency_penalty top_logprobs
    temperature reasoning user usage max_output_tokens max_tool_calls store background service_tier metadata
    safety_identifier prompt_cache_key
"""


def test_a_response_has_every_key_that_open_responses_demands() -> None:
    asked = {"user": "u", "safety_identifier": "s", "prompt_cache_key": "k", "max_tool_calls": 2}
    data = whole(say("Hello", FinishReason.STOP), presence_penalty=0.5, **asked)
    assert data.keys() >= set(DEMANDED.split())
    assert {name: data[name] for name in asked} == asked
    assert (data["presence_penalty"], data["completed_at"]) == (0.5, 1_700_000_009)
    assert whole(say("Hello", FinishReason.LENGTH))["completed_at"] is None
    for _, event in read_events(wire.stream(reply(), (0, say("Hi", FinishReason.STOP)))):
        if "response" in event:
            assert event["response"].keys() >= set(DEMANDED.split())


def test_reasoning_items_are_the_thought_of_the_message_behind_them() -> None:
    thought = {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "no"}]}
    said = [
        {"role": "user", "content": "Hi"},
        thought | {"content": [{"type": "reasoning_text", "text": "Greet."}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Hello"}]},
        thought | {"content": None, "encrypted_content": "gAAA"},
        {"role": "user", "content": "Again"},
    ]
    (prompt,) = wire.parse(SURFACE, input=said).prompts
    assert isinstance(prompt, ChatPrompt)
    assert prompt.messages == (
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello", "reasoning_content": "Greet."},
        {"role": "user", "content": "Again"},
    )
    assert wire.refusal(SURFACE, input=[thought]).param == "input"


def told(*items: dict[str, Any]) -> list[dict[str, Any]]:
    """The messages that items behind the user's become where the template has calls."""
    body = json.dumps({"input": [{"role": "user", "content": "Hi"}, *items]}).encode()
    (chat,) = SURFACE.parse(body, lambda model: ("tiny", STYLED)).prompts
    assert isinstance(chat, ChatPrompt)
    return list(chat.messages[1:])


ACTION = {"type": "exec", "command": ["ls"], "env": {}}
PATCH = {"type": "update_file", "path": "a.py", "diff": "@@"}
RAN = [
    {"stdout": "a.py", "stderr": "no b.py", "outcome": {"type": "exit", "exit_code": 2}},
    {"stdout": "", "stderr": "", "outcome": {"type": "exit", "exit_code": 0}},
    {"stdout": "c", "stderr": "", "outcome": {"type": "timeout"}},
]
LOOKED_FOR = {"type": "search", "query": "panda", "sources": [{"type": "url", "url": "https://p.example"}]}
IN_FILE = {"file_id": "f1", "filename": "a.md", "score": 0.5, "text": "Bears."}


@pytest.mark.parametrize(
    ("call", "output", "name", "arguments", "found"),
    [
        (
            {"type": "custom_tool_call", "call_id": "c1", "name": "apply_patch", "input": "*** Begin Patch"},
            {"type": "custom_tool_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "Done!"}]},
            "apply_patch",
            {"input": "*** Begin Patch"},
            "Done!",
        ),
        (
            {"type": "local_shell_call", "id": "l1", "call_id": "c1", "status": "completed", "action": ACTION},
            {"type": "local_shell_call_output", "id": "c1", "output": "a.py"},
            "local_shell",
            ACTION,
            "a.py",
        ),
        (
            {"type": "shell_call", "call_id": "c1", "action": {"commands": ["ls"], "timeout_ms": None}},
            {"type": "shell_call_output", "call_id": "c1", "output": RAN},
            "shell",
            {"commands": ["ls"]},
            "a.py\nno b.py\nexit code 2\nc\ntimeout",
        ),
        (
            {"type": "apply_patch_call", "call_id": "c1", "status": "completed", "operation": PATCH},
            {"type": "apply_patch_call_output", "call_id": "c1", "status": "failed"},
            "apply_patch",
            PATCH,
            "failed",
        ),
    ],
)
def test_a_call_of_any_tool_is_a_call_and_its_output_its_result(
    call: dict[str, Any], output: dict[str, Any], name: str, arguments: dict[str, Any], found: str
) -> None:
    for item in (call, output):
        INPUT_ITEM.validate_python(item)
    called, result = told(call, output)
    assert [one["function"] for one in called["tool_calls"]] == [{"name": name, "arguments": arguments}]
    assert result == {"role": "tool", "content": found, "tool_call_id": "c1", "name": name}
    with pytest.raises(InvalidRequest) as caught:
        told(output)
    assert caught.value.param == "input[1].call_id"


@pytest.mark.parametrize(
    ("item", "name", "arguments", "found"),
    [
        (
            {"type": "web_search_call", "id": "w1", "status": "completed", "action": LOOKED_FOR},
            "web_search",
            {"type": "search", "query": "panda"},
            "https://p.example",
        ),
        (
            {"type": "file_search_call", "id": "f1", "status": "completed", "queries": ["bear"], "results": [IN_FILE]},
            "file_search",
            {"queries": ["bear"]},
            "a.md\nBears.",
        ),
        (
            {
                "type": "code_interpreter_call",
                "id": "i1",
                "status": "completed",
                "container_id": "x",
                "code": "print(7)",
                "outputs": [{"type": "logs", "logs": "7"}],
            },
            "code_interpreter",
            {"code": "print(7)"},
            "7",
        ),
        (
            {
                "type": "mcp_call",
                "id": "m1",
                "server_label": "s",
                "name": "look",
                "arguments": '{"at": "x"}',
                "error": {"type": "http_error", "code": 502, "message": "Bad gateway"},
            },
            "look",
            {"at": "x"},
            "Bad gateway",
        ),
        ({"type": "web_search_call", "status": "failed"}, "web_search", {}, "failed"),
    ],
)
def test_what_another_servers_tool_found_is_a_result(
    item: dict[str, Any], name: str, arguments: dict[str, Any], found: str
) -> None:
    textless: list[dict[str, Any]] = [
        {"type": "mcp_list_tools", "id": "l1", "server_label": "s", "tools": []},
        {"type": "compaction", "encrypted_content": "gAAA"},
    ]
    for one in (*textless, item)[: 3 if "id" in item else 2]:
        INPUT_ITEM.validate_python(one)
    called, result, _ = told(*textless, item, {"role": "assistant", "content": "So."})
    assert [one["function"] for one in called["tool_calls"]] == [{"name": name, "arguments": arguments}]
    assert (result["role"], result["content"], result["name"]) == ("tool", found, name)
    assert prompt(input=[{"role": "user", "content": "Hi"}, item]) == ({"role": "user", "content": "Hi"},)


def test_images_and_missing_fields_of_calls_are_refused_by_name() -> None:
    call = {"type": "custom_tool_call", "call_id": "c1", "name": "look", "input": ""}
    image = {"type": "custom_tool_call_output", "call_id": "c1", "output": [{"type": "input_image"}]}
    drawn = {"type": "code_interpreter_call", "outputs": [{"type": "image", "url": "data:image/png;base64,iVBO"}]}
    for items, param in (
        ((call, image), "input[2].output[0].type"),
        ((drawn,), "input[1].outputs[0].type"),
        ((call, image | {"call_id": None}), "input[2].call_id"),
        ((call | {"name": None},), "input[1].name"),
        ((call, {"type": "shell_call_output", "call_id": "c2", "output": []}), "input[2].call_id"),
    ):
        with pytest.raises(InvalidRequest) as caught:
            told(*items)
        assert caught.value.param == param
