"""Functions in chat: what the prompt shows, what may be called, and calls as the SDK reads them."""

import contextlib
import json
import sys
from types import FrameType
from typing import Any

import msgspec
import pytest

from core.constraints import GrammarKind, json_schema
from core.errors import InvalidRequest
from core.marked_text import JsonText
from core.tool_detection import ToolStyle
from core.tool_formats import FORMATS as TOOL_FORMATS
from core.types import FinishReason
from server.api import history, responses
from server.api.chat import SURFACE
from server.api.fields import ChatPrompt, GenerationCall
from server.api.tools import MAX_TOOLS, call_constraint
from tests.call_counter import InstructionCounter
from tests.core.grammars import compiler
from tests.server.api import wire
from tests.server.api.wire import CONTEXT, DEFAULTS, read_events, say, sdk_reading

HERMES = ToolStyle("hermes", False, 2)
MESSAGES: Any = [{"role": "user", "content": "Hi"}]
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
NOW = {"type": "function", "function": {"name": "now"}}
DEEP_ARGUMENTS = '{"a": ' + "[" * 5000 + "]" * 5000 + "}"
CALLS = 'Let me see.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Köln"}}\n</tool_call>'
MORE_CALLS = CALLS + '\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'


def _strict(schema: dict[str, Any]) -> dict[str, Any]:
    parameters = {"properties": {"d": schema}, "required": ["d"], "additionalProperties": False}
    return {"type": "function", "function": {"name": "f", "strict": True, "parameters": parameters}}


def parsed(style: ToolStyle | None = HERMES, messages: Any = MESSAGES, **fields: Any) -> GenerationCall:
    body = json.dumps({"messages": messages, **fields}).encode()
    defaults = msgspec.structs.replace(DEFAULTS, tool_style=style)
    return SURFACE.parse(body, lambda model: (model or "tiny", defaults))


def refused(**fields: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        parsed(**fields)
    return caught.value


def prompt_of(call: GenerationCall) -> ChatPrompt:
    (prompt,) = call.prompts
    assert isinstance(prompt, ChatPrompt)
    return prompt


def test_tools_are_shown_in_the_prompt_with_what_templates_read() -> None:
    shown = prompt_of(parsed(tools=[WEATHER, NOW])).tools
    assert shown[0] == WEATHER
    assert shown[1]["function"]["name"] == "now"
    assert shown[1]["function"]["parameters"]["properties"] == {}


@pytest.mark.parametrize(
    ("choice", "names", "is_required"),
    [
        (None, ["get_weather", "now"], False),
        ("auto", ["get_weather", "now"], False),
        ("required", ["get_weather", "now"], True),
        ({"type": "function", "function": {"name": "now"}}, ["now"], True),
        (
            {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [NOW]}},
            ["now"],
            False,
        ),
        ({"type": "allowed_tools", "mode": "required", "tools": [{"name": "now"}]}, ["now"], True),
    ],
)
def test_the_choice_says_what_may_be_called(choice: Any, names: list[str], is_required: bool) -> None:
    tools = parsed(tools=[WEATHER, NOW], tool_choice=choice).tools
    assert tools is not None
    assert ([one.name for one in tools.functions], tools.is_required) == (names, is_required)


def test_none_leaves_tools_out() -> None:
    for fields in ({"tools": [WEATHER], "tool_choice": "none"}, {"tools": []}, {}):
        call = parsed(**fields)
        assert call.tools is None
        assert prompt_of(call).tools == ()


@pytest.mark.parametrize(
    ("is_parallel", "most_of_style", "expected"), [(None, 2, None), (True, 2, None), (False, 2, 1), (True, 1, 1)]
)
def test_one_call_at_a_time_where_asked_or_where_the_template_has_no_more(
    is_parallel: bool | None, most_of_style: int, expected: int | None
) -> None:
    style = ToolStyle("hermes", False, most_of_style)
    tools = parsed(style=style, tools=[NOW], parallel_tool_calls=is_parallel).tools
    assert tools is not None
    assert tools.most_calls == expected


def test_a_response_says_how_many_calls_it_may_have() -> None:
    for asked, expected in (({"max_tool_calls": 2}, 2), ({"max_tool_calls": 2, "parallel_tool_calls": False}, 1)):
        tools = response_call(**asked).tools
        assert tools is not None
        assert tools.most_calls == expected


def test_calls_are_held_from_where_the_model_begins_them() -> None:
    for choice, has_text in (("auto", True), ("required", False)):
        tools = parsed(tools=[WEATHER], tool_choice=choice).tools
        assert tools is not None
        spec = call_constraint(tools, {}, ())
        assert spec is not None
        assert spec.kind is GrammarKind.TAGGED
        assert ("start: TEXT" in spec.source) == has_text


def test_earlier_calls_and_results_are_as_templates_take_them() -> None:
    history = [
        *MESSAGES,
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Köln"}'}}
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
    ]
    of_objects, of_text = (
        prompt_of(parsed(style=ToolStyle("hermes", is_text, 2), messages=history)).messages for is_text in (False, True)
    )
    assert of_objects[1]["tool_calls"] == [
        {"type": "function", "id": "c1", "function": {"name": "get_weather", "arguments": {"city": "Köln"}}}
    ]
    assert of_text[1]["tool_calls"][0]["function"]["arguments"] == '{"city": "Köln"}'
    assert of_objects[2] == {"role": "tool", "content": "sunny", "tool_call_id": "c1", "name": "get_weather"}


def test_a_whole_answers_calls_are_read_by_the_sdk() -> None:
    call = parsed(tools=[WEATHER, NOW])
    answer = wire.whole(SURFACE, call, (0, say(MORE_CALLS[:40])), (0, say(MORE_CALLS[40:], FinishReason.STOP)))
    with sdk_reading(json.dumps(answer).encode()) as client:
        (choice,) = client.chat.completions.create(model="tiny", messages=MESSAGES).choices
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "Let me see.")
    calls: Any = choice.message.tool_calls
    assert [(one.type, one.function.name, one.function.arguments) for one in calls] == [
        ("function", "get_weather", '{"city": "Köln"}'),
        ("function", "now", "{}"),
    ]
    assert len({one.id for one in calls}) == 2


def streamed(call: GenerationCall, text: str, size: int, reason: FinishReason = FinishReason.STOP) -> bytes:
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    deltas = [(0, say(piece)) for piece in pieces] + [(0, say("", reason))]
    return wire.stream(SURFACE.stream(call, CONTEXT), *deltas)


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_a_stream_names_each_call_once_and_its_arguments_as_they_come(size: int) -> None:
    events = streamed(parsed(tools=[WEATHER, NOW], stream=True), MORE_CALLS, size)
    deltas = [event["choices"][0] for _, event in read_events(events)[:-1] if event["choices"]]
    assert "".join(one["delta"].get("content", "") for one in deltas) == "Let me see."
    pieces = [piece for one in deltas for piece in one["delta"].get("tool_calls", ())]
    begun = [piece for piece in pieces if "id" in piece]
    assert [(one["index"], one["type"], one["function"]) for one in begun] == [
        (0, "function", {"name": "get_weather", "arguments": ""}),
        (1, "function", {"name": "now", "arguments": ""}),
    ]
    for index, arguments in enumerate(['{"city": "Köln"}', "{}"]):
        assert "".join(one["function"]["arguments"] for one in pieces if one["index"] == index) == arguments
    assert [one["finish_reason"] for one in deltas if one["finish_reason"]] == ["tool_calls"]


def test_a_stream_is_what_the_whole_answer_says() -> None:
    call = parsed(tools=[WEATHER, NOW], stream=True)
    with sdk_reading(streamed(call, MORE_CALLS, 5)) as client:
        stream = client.chat.completions.create(model="tiny", messages=MESSAGES, stream=True)
        calls: dict[int, list[str]] = {}
        for chunk in stream:
            for piece in (chunk.choices[0].delta.tool_calls or ()) if chunk.choices else ():
                assert piece.function is not None
                calls.setdefault(piece.index, []).append(piece.function.arguments or "")
    whole = wire.whole(SURFACE, call, (0, say(MORE_CALLS, FinishReason.STOP)))["choices"][0]["message"]
    assert ["".join(parts) for parts in calls.values()] == [one["function"]["arguments"] for one in whole["tool_calls"]]


def test_a_call_that_is_cut_off_ends_for_length() -> None:
    call = parsed(tools=[WEATHER], stream=True)
    deltas = [event["choices"][0] for _, event in read_events(streamed(call, CALLS[:70], 4, FinishReason.LENGTH))[:-1]]
    assert [one["finish_reason"] for one in deltas if one["finish_reason"]] == ["length"]


@pytest.mark.parametrize(
    ("size", "text", "calls"),
    [
        (16, "Let me see.\n<too", []),  # as yet any text
        (24, "Let me see.", []),
        (50, "Let me see.", []),
        (71, "Let me see.", [("get_weather", '{"city": "')]),
        (len(CALLS) + 13, "Let me see.", [("get_weather", '{"city": "Köln"}')]),
        (len(CALLS) + 40, "Let me see.", [("get_weather", '{"city": "Köln"}')]),
    ],
)
def test_of_a_call_cut_off_by_length_no_mark_is_shown(size: int, text: str, calls: list[tuple[str, str]]) -> None:
    call = parsed(tools=[WEATHER, NOW], stream=True)
    cut = MORE_CALLS[:size]
    whole = wire.whole(SURFACE, call, (0, say(cut, FinishReason.LENGTH)))["choices"][0]
    assert (whole["message"]["content"] or "", whole["finish_reason"]) == (text, "length")
    found = [one["function"] for one in whole["message"].get("tool_calls", ())]
    assert [(one["name"], one["arguments"]) for one in found] == calls
    deltas = [event["choices"][0] for _, event in read_events(streamed(call, cut, 3, FinishReason.LENGTH))[:-1]]
    assert "".join(one["delta"].get("content", "") for one in deltas) == text
    stopped = wire.whole(SURFACE, call, (0, say(cut, FinishReason.STOP)))["choices"][0]["message"]
    assert calls or stopped["content"] == cut
    by_string = msgspec.structs.replace(say(cut, FinishReason.STOP), stop_string="x")
    assert (wire.whole(SURFACE, call, (0, by_string))["choices"][0]["message"]["content"] or "") == text


@pytest.mark.parametrize("arguments", ['{"city": "Kö', "[1]", "Köln", DEEP_ARGUMENTS])
def test_arguments_that_were_cut_off_are_taken_back_as_text(arguments: str) -> None:
    history = [*MESSAGES, {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}]
    for form, taken in (("hermes", arguments), ("xml", {"arguments": arguments})):
        message = prompt_of(parsed(style=ToolStyle(form, False, 2), messages=history)).messages[1]
        found = message["tool_calls"][0]["function"]["arguments"]
        assert (found, isinstance(found, JsonText)) == (taken, form == "hermes" and arguments.startswith("{"))


def test_mistrals_templates_get_ids_of_nine_characters() -> None:
    for given in ("a1b2c3d4e", "call_0123456789"):
        called = {"role": "assistant", "tool_calls": [{"id": given, "function": {"name": "f"}}]}
        result = {"role": "tool", "tool_call_id": given, "content": "x"}
        messages = prompt_of(parsed(style=ToolStyle("mistral", True, 2), messages=[called, result])).messages
        (call,) = messages[0]["tool_calls"]
        assert call["id"] == messages[1]["tool_call_id"]
        assert len(call["id"]) == 9
        assert (call["id"] == given) == (len(given) == 9)


def calling(*calls: tuple[str | None, str]) -> dict[str, Any]:
    """A turn with calls, by their ids and names."""
    made = [{"function": {"name": name}} | ({} if call_id is None else {"id": call_id}) for call_id, name in calls]
    return {"role": "assistant", "tool_calls": made}


def result(**fields: str) -> dict[str, Any]:
    return {"role": "tool", "content": "x", **fields}


ONE, TWO = result(tool_call_id="a"), result(tool_call_id="b")


@pytest.mark.parametrize(
    ("messages", "answered"),
    [
        ([calling(("a", "f"), ("b", "g")), TWO, ONE], [("b", "g"), ("a", "f")]),
        ([calling(("a", "f")), ONE, calling(("a", "g")), ONE], [("a", "f"), ("a", "g")]),  # ids that come again
        ([calling(("a", "f")), result()], [("a", "f")]),
        ([calling(("a", "f"), ("b", "g")), result(name="g"), ONE], [("b", "g"), ("a", "f")]),
        ([calling((None, "f"), (None, "g")), result(), result()], [(None, "f"), (None, "g")]),
        ([calling((None, "f"), (None, "f"), (None, "g")), result(name="g"), result()], [(None, "g"), (None, "f")]),
        ([calling(("a", "f")), calling(("b", "g")), result(), ONE], [("b", "g"), ("a", "f")]),
        ([calling(("", "f"), ("", "g")), result(tool_call_id=""), result()], [(None, "f"), (None, "g")]),  # as missing
    ],
)
def test_a_result_has_the_id_and_name_of_its_call(messages: Any, answered: list[tuple[str | None, str]]) -> None:
    results = [one for one in prompt_of(parsed(messages=messages)).messages if one["role"] == "tool"]
    assert [(one.get("tool_call_id"), one["name"]) for one in results] == answered


def test_results_find_their_calls_in_a_time_that_grows_with_their_number_alone() -> None:
    def instructions(num: int) -> int:
        messages = [calling(*[(None, "f")] * num), *[result(name="f")] * num]
        with InstructionCounter(lambda file: file == history.__file__) as counted:
            parsed(messages=messages)
        return counted.num_instructions

    assert instructions(400) < 10 * instructions(50)


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([calling(("a", "f")), TWO], "names no tool call"),
        ([TWO], "names no tool call"),
        ([result()], "names no tool call"),
        ([ONE, calling(("a", "f"))], "names no tool call"),
        ([calling(("a", "f")), ONE, ONE], "still lacks its result"),
        ([calling(("a", "f")), result(), result()], "still lacks its result"),
        ([calling(("a", "f")), result(name="g")], "names no tool call"),
        ([calling(("a", "f"), ("b", "f")), result(name="f")], "several tool calls lack"),
        ([calling(("a", "f"), ("b", "g")), result()], "several tool calls lack"),
    ],
)
def test_a_result_of_no_call_or_of_any_of_several_is_refused(messages: Any, words: str) -> None:
    error = refused(messages=messages)
    place = next(i for i in range(len(messages) - 1, -1, -1) if messages[i]["role"] == "tool")
    field = "name" if messages[place].get("name") == "g" else "tool_call_id"
    assert (error.param, words in error.message) == (f"messages[{place}].{field}", True)


@pytest.mark.parametrize("role", ["user", "system", "developer", "tool"])
def test_calls_are_an_assistants(role: str) -> None:
    error = refused(messages=[calling(("a", "f")), ONE | calling(("b", "f")) | {"role": role}])
    assert (error.param, "an assistant's" in error.message) == ("messages[1].tool_calls", True)


def test_functions_of_old_have_calls_of_old() -> None:
    functions = [WEATHER["function"], NOW["function"]]
    history = [
        *MESSAGES,
        {"role": "assistant", "content": None, "function_call": {"name": "now", "arguments": "{}"}},
        {"role": "function", "name": "now", "content": "noon"},
    ]
    call = parsed(functions=functions, messages=history, stream=True)
    shown = prompt_of(call)
    assert [tool["function"]["name"] for tool in shown.tools] == ["get_weather", "now"]
    assert shown.messages[1]["tool_calls"][0]["id"] == shown.messages[2]["tool_call_id"]
    assert shown.messages[2]["role"] == "tool"
    for choice, expected in (({"name": "now"}, (["now"], True)), ("auto", (["get_weather", "now"], False))):
        wishes = parsed(functions=functions, function_call=choice).tools
        assert wishes is not None
        assert ([one.name for one in wishes.functions], wishes.is_required, wishes.most_calls) == (*expected, 1)
    assert parsed(functions=functions, function_call="none").tools is None
    answer = wire.whole(SURFACE, call, (0, say(CALLS, FinishReason.STOP)))["choices"][0]
    assert answer["finish_reason"] == "function_call"
    assert answer["message"]["function_call"] == {"name": "get_weather", "arguments": '{"city": "Köln"}'}
    deltas = [event["choices"][0] for _, event in read_events(streamed(call, CALLS, 4))[:-1]]
    pieces = [one["delta"]["function_call"] for one in deltas if "function_call" in one["delta"]]
    assert [one.get("name") for one in pieces] == ["get_weather"] + [None] * (len(pieces) - 1)
    assert "".join(one["arguments"] for one in pieces) == '{"city": "Köln"}'
    assert deltas[-1]["finish_reason"] == "function_call"


def test_an_answer_without_calls_is_text() -> None:
    answer = wire.whole(SURFACE, parsed(tools=[NOW]), (0, say("It is <b>noon</b>.", FinishReason.STOP)))
    (choice,) = answer["choices"]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("stop", "It is <b>noon</b>.")
    assert "tool_calls" not in choice["message"]


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"tools": [NOW, NOW]}, "tools[1].function.name", "as that of an earlier tool"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name", "letters, digits"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name", "is missing"),
        ({"tools": [NOW] * (MAX_TOOLS + 1)}, "tools", "at most 128 entries"),
        ({"tools": [NOW], "tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice", "'x'"),
        ({"tools": [NOW], "tool_choice": "sometimes"}, "tool_choice", "must be"),
        (
            {"tools": [NOW], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}},
            "tool_choice",
            "no tool",
        ),
        ({"tool_choice": "required"}, "tool_choice", "needs tools"),
        ({"tools": [NOW], "style": None}, "tools", "does not support tools"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}]},
            "tools[0].function.parameters",
            '"type": "object"',
        ),
        (
            {
                "tools": [
                    {"type": "function", "function": {"name": "f", "strict": True, "parameters": {"not": {}}}},
                ]
            },
            "tools[0].function.parameters",
            "'not'",
        ),
        (
            {"tools": [_strict({"type": "array", "items": {"$ref": "#/$defs/no"}})]},
            "tools[0].function.parameters",
            "tools[0].function.parameters.properties.d.items.$ref is '#/$defs/no', which points to no schema",
        ),
        *(
            (
                {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"properties": properties}}}]},
                f"tools[0].function.parameters.properties{path}",
                words,
            )
            for properties, path, words in (
                (5, "", "object of schemas"),
                ({"a": 5}, ".a", "must be a schema"),
                ({"a": {"type": "strin"}}, ".a.type", "must be of array, boolean"),
                ({"a": {"type": ["string", {}]}}, ".a.type", "must be of array, boolean"),
                ({"a": {"enum": "x"}}, ".a.enum", "an array"),
                ({"a": {"items": {"anyOf": [True, 1]}}}, ".a.items.anyOf[1]", "must be a schema"),
                ({"a": {"$ref": "https://example.org/s.json"}}, ".a.$ref", "into the same schema"),
            )
        ),
        *(
            (
                {
                    "tools": [
                        NOW,
                        {"type": "function", "function": {"name": "f", "strict": is_strict, "parameters": schema}},
                    ]
                },
                "tools[1].function.parameters",
                f"tools[1].function.parameters.properties.x cannot be satisfied: {words}",
            )
            for is_strict in (True, False)
            for schema, words in (
                (
                    {"properties": {"x": {"type": "integer", "minimum": 5, "maximum": 1}}, "required": ["x"]},
                    "no number",
                ),
                ({"type": "object", "properties": {"x": {"$ref": "#"}}, "required": ["x"]}, "it requires itself"),
            )
        ),
        ({"functions": [NOW["function"]], "function_call": "sometimes"}, "function_call", "must be"),
        ({"functions": [NOW["function"]], "function_call": {"name": "x"}}, "function_call", "of one of functions"),
        ({"function_call": {"name": "x"}}, "function_call", "of one of functions"),
        ({"functions": [NOW["function"]] * 2}, "functions[1].name", "earlier tool"),
        ({"functions": [NOW["function"]], "tools": [NOW]}, "functions", "not both"),
    ],
)
def test_bad_tools_are_refused_by_name(fields: dict[str, Any], param: str, words: str) -> None:
    error = refused(**fields)
    assert error.param == param
    assert words in error.message


# Responses

FLAT = {"type": "function", **WEATHER["function"]}


def response_call(style: ToolStyle | None = HERMES, **fields: Any) -> GenerationCall:
    body = json.dumps({"input": "Hi", "tools": [FLAT, {"type": "function", "name": "now"}], **fields}).encode()
    defaults = msgspec.structs.replace(DEFAULTS, tool_style=style)
    return responses.SURFACE.parse(body, lambda model: (model or "tiny", defaults))


def test_a_response_has_text_and_calls_as_items_with_the_streamed_ids() -> None:
    call = response_call(stream=True)
    deltas = [(0, say(MORE_CALLS[at : at + 4])) for at in range(0, len(MORE_CALLS), 4)]
    reply = responses.SURFACE.stream(call, CONTEXT)
    events = read_events(wire.stream(reply, *deltas, (0, say("", FinishReason.STOP))))
    names = [name for name, _ in events]
    assert names[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert [event["sequence_number"] for _, event in events] == list(range(len(events)))
    final = events[-1][1]["response"]
    done = [event["item"] for name, event in events if name == "response.output_item.done"]
    assert final["output"] == done
    assert [(one["type"], one["status"]) for one in done] == [
        ("message", "completed"),
        ("function_call", "completed"),
        ("function_call", "completed"),
    ]
    for index, item in enumerate(done):
        pieces = [
            event["delta"] for name, event in events if str(name).endswith(".delta") and event["output_index"] == index
        ]
        text = item["arguments"] if index else item["content"][0]["text"]
        assert "".join(pieces) == text
    assert [one["arguments"] for one in done[1:]] == ['{"city": "Köln"}', "{}"]
    whole = wire.whole(responses.SURFACE, call, (0, say(MORE_CALLS, FinishReason.STOP)))
    assert whole["output"] == final["output"]


def test_a_streamed_response_is_read_by_the_sdk() -> None:
    reply = responses.SURFACE.stream(response_call(stream=True), CONTEXT)
    answer = wire.stream(reply, (0, say(CALLS)), (0, say("", FinishReason.STOP)))
    with sdk_reading(answer) as client, client.responses.stream(model="tiny", input="Hi") as stream:
        stream.until_done()
        message, called = stream.get_final_response().output
    assert (message.type, called.type) == ("message", "function_call")


def test_a_response_that_fails_closes_its_open_item() -> None:
    reply = responses.SURFACE.stream(response_call(stream=True), CONTEXT)
    events = read_events(reply.start() + reply.text(0, CALLS[:60]) + reply.error(refused(tools=[NOW, NOW])))
    assert [name for name, _ in events][-2:] == ["response.output_item.done", "response.failed"]
    assert events[-1][1]["response"]["output"][-1]["status"] == "incomplete"


def test_items_of_earlier_turns_become_one_message_of_the_assistant() -> None:
    call_item = {"type": "function_call", "call_id": "c1", "name": "get_weather", "arguments": '{"city": "Köln"}'}
    items = [
        {"role": "user", "content": "Hi"},
        *({"type": "reasoning", "content": [{"type": "reasoning_text", "text": text}]} for text in ("Hm.", "So.")),
        {"role": "assistant", "content": "Let me see."},
        {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "First."}]},
        call_item,
        {**call_item, "call_id": "c2", "name": "now", "arguments": ""},
        {"type": "function_call_output", "call_id": "c1", "output": "sunny"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "noon"}]},
    ]
    messages = prompt_of(response_call(input=items)).messages
    assert [one["role"] for one in messages] == ["user", "assistant", "tool", "tool"]
    assert (messages[1]["content"], messages[1]["reasoning_content"]) == ("Let me see.", "Hm.\nSo.\nFirst.")
    assert [one["function"] for one in messages[1]["tool_calls"]] == [
        {"name": "get_weather", "arguments": {"city": "Köln"}},
        {"name": "now", "arguments": {}},
    ]
    assert [(one["content"], one["name"]) for one in messages[2:]] == [("sunny", "get_weather"), ("noon", "now")]


@pytest.mark.parametrize(
    ("form", "cut_off", "rest"),
    [
        ("hermes", CALLS[: CALLS.index("Köln")], None),
        ("harmony", '<|channel|>commentary to=functions.get_weather<|message|>{"city": "', '"}'),
        (
            "harmony",
            "<|channel|>commentary to=functions.now<|message|>{}<|end|><|start|>assistant to=functions.f<|message|>{",
            "}",
        ),
    ],
)
def test_a_stop_string_within_a_call_is_no_end_of_calls(form: str, cut_off: str, rest: str | None) -> None:
    style = ToolStyle(form, False, 2)
    last = msgspec.structs.replace(say(cut_off, FinishReason.STOP), stop_string="Köln")
    (choice,) = wire.whole(SURFACE, parsed(style, tools=[WEATHER], stop=["Köln"]), (0, last))["choices"]
    assert choice["finish_reason"] == "stop"
    assert choice["message"]["tool_calls"]
    if rest is not None:  # a whole call whose end the model did not write
        last = say(cut_off + rest, FinishReason.STOP)
        (choice,) = wire.whole(SURFACE, parsed(style, tools=[WEATHER]), (0, last))["choices"]
        assert choice["finish_reason"] == "tool_calls"
    else:
        events = read_events(streamed(parsed(tools=[WEATHER]), cut_off, 5))[:-1]
        assert {event["choices"][0]["finish_reason"] for _, event in events} == {None, "stop"}


def source_of(call: GenerationCall) -> str:
    assert call.tools is not None
    spec = call_constraint(call.tools, {}, (), call.constraint)
    assert spec is not None
    return spec.source


def test_a_form_may_stand_in_the_place_of_calls() -> None:
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "boolean"}}}
    assert '| %json {"type": "boolean"' in source_of(parsed(tools=[NOW], response_format=form))
    required = source_of(parsed(tools=[NOW], response_format=form, tool_choice="required"))
    assert "boolean" not in required
    with pytest.raises(InvalidRequest, match="cannot be combined"):
        source_of(parsed(tools=[NOW], guided_regex="a+"))


@pytest.mark.parametrize("parameters", [None, {}, {"type": "object"}, {"type": "object", "properties": {}}])
def test_a_function_without_parameters_gets_none(parameters: Any) -> None:
    tool = {"type": "function", "function": {"name": "now", "parameters": parameters}}
    assert '"additionalProperties": false' in source_of(parsed(tools=[tool]))


@pytest.mark.parametrize("form", [*TOOL_FORMATS])
@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"type": "string", "pattern": "^(?!x)a"}, "pattern"),
        ({"type": "string", "enum": []}, "enum"),
        ({"enum": [], "const": []}, "enum"),
        ({"type": "object", "minProperties": {}, "required": [1, []]}, "minProperties"),
        ({"type": "array", "items": {"enum": [], "maxItems": -1}, "minItems": True}, "enum"),
        ({"type": ["integer", "null"], "exclusiveMinimum": True, "minimum": 3}, "exclusiveMinimum"),  # of draft 4
    ],
)
def test_what_cannot_be_held_of_a_lenient_tool_is_left_free(form: str, schema: Any, words: str) -> None:
    parameters = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    tools = parsed(style=ToolStyle(form, False, 2), tools=[tool]).tools
    assert tools is not None
    spec = call_constraint(tools, {}, ())
    assert spec.fallback is not None
    assert words not in spec.fallback.source
    compiler().compile(spec)


def test_variables_of_the_template_come_with_the_prompt() -> None:
    kwargs = {"enable_thinking": False}
    assert prompt_of(parsed(chat_template_kwargs=kwargs)).template_kwargs == kwargs
    assert prompt_of(response_call(chat_template_kwargs=kwargs)).template_kwargs == kwargs


def test_a_strict_function_is_held_as_a_schema_is() -> None:
    strict = _strict({"type": "string", "format": "date", "title": "Day"})
    held = json_schema({"type": "object", **strict["function"]["parameters"]}, "guided_json")
    for form in ("hermes", "xml", "gemma"):
        tools = parsed(ToolStyle(form, False, 2), tools=[strict, NOW]).tools
        assert tools is not None
        spec = call_constraint(tools, {}, ())
        assert json.loads(spec.schemas[0].source) == json.loads(held.source)
        assert "[1-9][0-9]{3}-" in spec.source
    tools = parsed(ToolStyle("xml", False, 2), tools=[NOW, _strict({"const": "</parameter>"})]).tools
    assert tools is not None
    with pytest.raises(InvalidRequest) as caught:
        call_constraint(tools, {}, ())
    place = "tools[1].function.parameters.properties.d"
    assert (caught.value.param, f"{place} has the keyword 'const'" in str(caught.value)) == (place, True)


def _many(schema: dict[str, Any], strict: bool | None) -> dict[str, Any]:
    """A schema a hundred times in a request: as functions, or (None) as tags."""
    if strict is None:
        tags = [{"begin": f"<t{i}>", "schema": schema, "end": "</t>"} for i in range(100)]
        return {"structured_outputs": {"structural_tag": {"structures": tags, "triggers": ["<t"]}}}
    functions = [{"name": f"f{i}", "parameters": schema, "strict": strict} for i in range(100)]
    return {"tools": [{"type": "function", "function": one} for one in functions]}


@pytest.mark.parametrize("strict", [False, True, None], ids=["functions", "strict", "tags"])
@pytest.mark.parametrize("name", ["alternatives", "counted", "references"])
def test_many_small_schemas_take_no_longer_to_check_than_one(name: str, strict: bool | None) -> None:
    """A hundred times 30 ms would hold the interpreter's lock for seconds. By counts of calls."""
    counted = {"properties": {key: {"type": "null"} for key in "abcdefg"}, "maxProperties": 6, "type": "object"}
    counted["additionalProperties"] = False
    deeper = [{"$ref": "#/$defs/d"}, {"items": {"$ref": "#/$defs/d"}}, {"items": {"items": {"$ref": "#/$defs/d"}}}]
    schema: dict[str, Any] = {
        "alternatives": {"allOf": [{"anyOf": [{}] * 6}] * 5},
        "counted": {"properties": {f"p{i}": counted for i in range(16)}},
        "references": {
            "$defs": {f"d{i}": json.loads(json.dumps({"anyOf": deeper}).replace("/d", f"/d{i + 1}")) for i in range(20)}
            | {"d20": {}},
            "properties": {"a": {"$ref": "#/$defs/d0"}},
        },
    }[name]
    num_calls = 0

    def count(frame: FrameType, event: str, _: Any) -> None:
        nonlocal num_calls
        num_calls += event == "call" and frame.f_code.co_filename.endswith(("constraints.py", "shortest_answer.py"))

    sys.setprofile(count)
    try:
        with contextlib.suppress(InvalidRequest):
            parsed(**_many(schema, strict))
    finally:
        sys.setprofile(None)
    assert num_calls < 600_000, num_calls
