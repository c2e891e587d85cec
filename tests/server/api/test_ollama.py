"""Ollama's API: its options, and answers as lines, streamed as whole."""

import itertools
import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.errors import ErrorKind, InvalidRequest, ServiceError
from core.tool_detection import ToolStyle
from core.types import FinishReason
from server.api.fields import ChatPrompt, GenerationCall, TextPrompt
from server.api.ollama import CHAT, ERRORS, GENERATE, context_of
from server.api.replies import Surface
from tests.server.api import wire

STYLED = msgspec.structs.replace(wire.DEFAULTS, tool_style=ToolStyle("hermes", has_text_arguments=False, most_calls=2))
MESSAGES = [{"role": "user", "content": "Hi"}]
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
TIMINGS = {"total": 3.0, "prefill": 1.0, "decode": 0.75, "detokenize": 0.25}


def parse(surface: Surface = CHAT, **fields: Any) -> GenerationCall:
    asked = {"model": "tiny:latest", **({"messages": MESSAGES} if surface is CHAT else {"prompt": "Hi"})} | fields
    return surface.parse(json.dumps(asked).encode(), lambda model: (model or "tiny", STYLED))


def prompt(surface: Surface = CHAT, **fields: Any) -> Any:
    (prompt,) = parse(surface, **fields).prompts
    return list(prompt.messages) if isinstance(prompt, ChatPrompt) else prompt


def test_options_are_the_fields_of_other_surfaces() -> None:
    options = {"temperature": 0.5, "num_predict": 5, "stop": ["a"], "repeat_penalty": 1.5, "num_ctx": 99, "seed": 3}
    call = parse(options=options)
    assert (call.model, call.is_stream, call.sampling.max_tokens, call.sampling.stop) == ("tiny", True, 5, ("a",))
    assert (call.sampling.temperature, call.sampling.repetition_penalty, call.sampling.seed) == (0.5, 1.5, 3)
    assert not parse(stream=False, options={"num_predict": -1}).is_stream
    for unbounded in (-1, -2, 0):
        assert parse(options={"num_predict": unbounded}).sampling == parse().sampling
    assert parse(format="json").constraint == parse(format={"type": "object"}).constraint != parse().constraint
    assert parse(options={"unheard_of": 1}).unknown_fields == ("unheard_of",)


@pytest.mark.parametrize(
    ("options", "counts_as"),
    [
        ({"temperature": 7.5}, {"temperature": 7.5}),
        ({"temperature": -1}, {"temperature": 0.0}),
        ({"top_p": 1.5, "min_p": -0.5, "typical_p": 3}, {"top_p": 1.0, "min_p": 0.0, "typical_p": 1.0}),
        ({"top_p": 0, "min_p": 2, "typical_p": 0}, {"top_p": 1e-6, "min_p": 1.0, "typical_p": 1e-6}),
    ],
)
def test_options_beyond_a_range_count_as_its_end(options: dict[str, Any], counts_as: dict[str, float]) -> None:
    sampling = parse(options=options).sampling
    assert {name: getattr(sampling, name) for name in counts_as} == counts_as


def test_turns_and_prompts_become_the_templates_messages() -> None:
    call = {"function": {"name": "look", "arguments": {"at": 1}}}
    turns = [
        *MESSAGES,
        {"role": "assistant", "content": "", "thinking": "Hm.", "tool_calls": [call]},
        {"role": "tool", "content": "seen", "tool_name": "look"},
    ]
    assert prompt(messages=turns) == [
        *MESSAGES,
        {"role": "assistant", "content": "", "reasoning_content": "Hm.", "tool_calls": [{"type": "function", **call}]},
        {"role": "tool", "content": "seen", "name": "look"},
    ]
    assert prompt(GENERATE, system="S") == [{"role": "system", "content": "S"}, {"role": "user", "content": "Hi"}]
    assert prompt(GENERATE, raw=True) == TextPrompt("Hi")
    assert prompt(GENERATE, template="", system="") == prompt(GENERATE)  # as Ollama's own client, in Go, sends them
    assert prompt(GENERATE, suffix="!") == TextPrompt("Hi", suffix="!")


@pytest.mark.parametrize("said", ["", "Hello", "é\u2028🙂\x00", "a" * 1000])
def test_a_context_goes_on_from_an_answer(said: str) -> None:
    turns: list[dict[str, Any]] = [{"role": "user", "content": "Hi"}]
    answer = wire.whole(GENERATE, parse(GENERATE), (0, wire.say(said, FinishReason.STOP)), timings=TIMINGS)
    assert max(answer["context"]) < 2**53
    turns += [{"role": "assistant", "content": said}, {"role": "user", "content": "And?"}]
    assert prompt(GENERATE, prompt="And?", context=answer["context"]) == turns
    begun = prompt(GENERATE, prompt="And?", context=answer["context"], system="S")
    assert begun == [{"role": "system", "content": "S"}, *turns]
    assert prompt(GENERATE, context=[]) == turns[:1]
    raw = wire.whole(GENERATE, parse(GENERATE, raw=True), (0, wire.say(said, FinishReason.STOP)), timings=TIMINGS)
    assert "context" not in raw


def test_logprobs_come_with_their_text_or_behind_it() -> None:
    call, (one, other) = parse(logprobs=True, top_logprobs=2), wire.LOGPROBS
    deltas = (0, wire.say("Hel", None, one)), (0, wire.say("", None, other)), (0, wire.say("", FinishReason.STOP))
    whole = wire.whole(CHAT, call, *deltas, timings=TIMINGS)
    lines = [json.loads(line) for line in wire.stream(CHAT.stream(call, wire.CONTEXT), *deltas).splitlines()]
    assert [entry["token"] for entry in whole["logprobs"]] == ["Hel", " é"]
    assert [len(line.get("logprobs", ())) for line in lines] == [1, 1]
    assert [entry for line in lines for entry in line["logprobs"]] == whole["logprobs"]
    assert len(whole["logprobs"][0]["top_logprobs"]) == 2


@pytest.mark.parametrize(
    ("surface", "fields", "param"),
    [
        (CHAT, {"messages": []}, "messages"),
        (CHAT, {"messages": [{"role": "user", "images": ["x"]}]}, "messages[0].images"),
        (CHAT, {"messages": [{"role": "tool", "content": "x", "tool_name": "zz"}]}, "messages[0].tool_name"),
        (CHAT, {"options": {"mirostat": 2}}, "mirostat"),
        (CHAT, {"options": {"repeat_penalty": 0}}, "repeat_penalty"),
        (CHAT, {"options": {"model": "x"}}, "options"),
        (CHAT, {"options": 5}, "options"),
        (CHAT, {"format": "yaml"}, "format"),
        (GENERATE, {"prompt": None}, "prompt"),
        (GENERATE, {"context": [1]}, "context"),
        (GENERATE, {"context": [128047779836730, -1]}, "context"),
        (GENERATE, {"context": [128047779836730, 5]}, "context"),
        (GENERATE, {"context": [128047779836730], "raw": True}, "context"),
        (CHAT, {"top_logprobs": 2}, "top_logprobs"),
        (CHAT, {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ],
)
def test_bad_input_is_refused(surface: Surface, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse(surface, **fields)
    assert caught.value.param == param


CALL = '<tool_call>\n{"name": "look", "arguments": {"at": "é"}}\n</tool_call>\n'
LOOKED = [{"function": {"name": "look", "arguments": {"at": "é"}}}]
ANSWERS: list[tuple[Surface, bool, str, FinishReason, dict[str, Any]]] = [
    (CHAT, False, "Hi é", FinishReason.STOP, {"message": {"role": "assistant", "content": "Hi é"}}),
    (CHAT, True, "", FinishReason.STOP, {"message": {"role": "assistant", "content": ""}}),
    (
        CHAT,
        True,
        "I look." + CALL + CALL[:50],  # the second call is cut short
        FinishReason.LENGTH,
        {"message": {"role": "assistant", "content": "I look.", "tool_calls": LOOKED}},
    ),
    (GENERATE, False, "Hi", FinishReason.LENGTH, {"response": "Hi"}),
]


@pytest.mark.parametrize(("surface", "has_tools", "said", "reason", "fields"), ANSWERS)
@given(st.data())
def test_what_is_streamed_is_what_the_whole_answer_says(
    surface: Surface, has_tools: bool, said: str, reason: FinishReason, fields: dict[str, Any], data: st.DataObject
) -> None:
    call = parse(surface, **({"tools": [TOOL]} if has_tools else {}))
    cuts = sorted(data.draw(st.sets(st.integers(0, len(said)), max_size=6)) | {0, len(said)})
    deltas = [(0, wire.say(said[a:b])) for a, b in itertools.pairwise(cuts)] + [(0, wire.say("", reason))]
    whole = wire.whole(surface, call, *deltas, timings=TIMINGS)
    lines = wire.stream(surface.stream(call, wire.CONTEXT), *deltas, timings=TIMINGS).splitlines()
    *parts, last = map(json.loads, lines)
    assert not any(part["done"] for part in parts)
    joined: dict[str, Any] = {}
    for part in parts:
        for name, value in (part["message"] if surface is CHAT else {"response": part["response"]}).items():
            joined[name] = value if name == "role" else joined.get(name, type(value)()) + value
    shown = {"role": "assistant", "content": ""} | joined if surface is CHAT else joined
    context = {"context": context_of([*MESSAGES, {"role": "assistant", "content": said}])}
    fields = fields | ({} if surface is CHAT else context)
    assert {**last, **({"message": shown} if surface is CHAT else shown)} == whole
    assert {name: whole[name] for name in fields} == fields
    assert whole == fields | {
        "model": "tiny",
        "created_at": "2023-11-14T22:13:29.500000Z",
        "done": True,
        "done_reason": "length" if reason is FinishReason.LENGTH else "stop",
        "total_duration": 3_000_000,
        "load_duration": 0,
        "prompt_eval_count": 7,
        "prompt_eval_duration": 1_000_000,
        "eval_count": 2,
        "eval_duration": 1_000_000,
    }


def test_an_error_is_a_message_whole_and_in_a_stream() -> None:
    error, told = ServiceError(ErrorKind.UNAVAILABLE, "Wait.", "overloaded"), {"error": "Wait.", "code": "overloaded"}
    assert (ERRORS.status(error), json.loads(ERRORS.body(error, "r"))) == (503, told)
    assert json.loads(CHAT.stream(parse(), wire.CONTEXT).error(error)) == told
