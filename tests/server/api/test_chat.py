import json
from typing import Any

import msgspec
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from core.types import Delta, FinishReason
from server.api.chat import SURFACE
from server.api.fields import ChatPrompt
from server.api.replies import StreamReply
from tests.server.api import wire
from tests.server.api.wire import CONTEXT, LOGPROBS, read_events, say, sdk_reading

MESSAGES: Any = [{"role": "user", "content": "Hi"}]
TIMINGS = {"queue_ms": 0.5}
USAGE_JSON = {
    "prompt_tokens": 7,
    "completion_tokens": 2,
    "total_tokens": 9,
    "prompt_tokens_details": {"cached_tokens": 4},
    "completion_tokens_details": {
        "reasoning_tokens": 0,
        "accepted_prediction_tokens": 0,
        "rejected_prediction_tokens": 0,
    },
}


def reply(**fields: Any) -> StreamReply:
    return SURFACE.stream(wire.parse(SURFACE, messages=MESSAGES, stream=True, **fields), CONTEXT)


def messages_of(messages: list[Any]) -> tuple[dict[str, Any], ...]:
    (prompt,) = wire.parse(SURFACE, messages=messages).prompts
    assert isinstance(prompt, ChatPrompt)
    return prompt.messages


def whole(*deltas: tuple[int, Delta], **fields: Any) -> Any:
    return wire.whole(SURFACE, wire.parse(SURFACE, messages=MESSAGES, **fields), *deltas, timings=TIMINGS)


def test_messages_become_what_templates_know() -> None:
    assert messages_of(
        [
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": "Ann"},
            {"role": "assistant", "content": "c", "reasoning": "d", "refusal": None},
            {"role": "assistant", "content": None, "reasoning_content": "e"},
        ]
    ) == (
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "a\nb", "name": "Ann"},
        {"role": "assistant", "content": "c", "reasoning_content": "d"},
        {"role": "assistant", "content": "", "reasoning_content": "e"},
    )


@pytest.mark.parametrize(
    ("message", "path", "told"),
    [
        ({"role": "king", "content": "a"}, "role", "must be one of system, "),
        ({"content": "a"}, "role", "is missing."),
        ({"role": "user"}, "content", "is missing."),
        ({"role": "user", "content": None}, "content", "only an assistant's message may have null."),
        ({"role": "user", "content": {"text": "a"}}, "content", "must be a string or an array or null"),
        ({"role": "user", "content": [{"type": "text"}]}, "content[0].text", "is missing."),
        ({"role": "user", "content": [{"type": "text", "text": None}]}, "content[0].text", "is null: send a string."),
        ({"role": "user", "content": [{"type": "image_url"}]}, "content[0].type", "are not supported"),
        ({"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "file"}]}, "content[1].type", "'file'"),
        ({"role": "assistant", "tool_calls": [{"id": "x"}]}, "tool_calls[0].function", "is missing"),
        ({"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}, "tool_calls", "does not support tools"),
        ({"role": "assistant", "audio": {"id": "x"}}, "audio", "is not supported"),
        ({"role": "user", "content": "a", "images": ["x"]}, "images", "is not supported"),
    ],
)
def test_a_message_that_cannot_be_read_is_named(message: dict[str, Any], path: str, told: str) -> None:
    error = wire.refusal(SURFACE, messages=[message])
    assert (error.param, told in error.message) == (f"messages[0].{path}", True)


def test_text_of_any_shape_is_taken() -> None:
    parts = ["a", *({"type": kind, "text": kind} for kind in ("text", "input_text", "output_text"))]
    content = [*parts, {"type": "refusal", "refusal": "no"}, {"text": "b"}]
    for given, text in ((content, "a\ntext\ninput_text\noutput_text\nno\nb"), (["a"], "a"), ([], "")):
        (prompt,) = wire.parse(SURFACE, messages=[{"role": "user", "content": given}]).prompts
        assert isinstance(prompt, ChatPrompt)
        assert prompt.messages[0]["content"] == text


def test_fields_of_a_message_that_ask_for_nothing_are_taken() -> None:
    plain = {"role": "assistant", "content": "a"}
    empty = {"tool_calls": [], "function_call": None, "audio": None, "images": [], "prefix": False, "partial": False}
    assert wire.parse(SURFACE, messages=[plain | empty]).prompts == wire.parse(SURFACE, messages=[plain]).prompts


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": None}, "messages"),
        ({}, "messages"),
        ({"messages": MESSAGES, "model": ""}, "model"),
        ({"messages": MESSAGES, "top_logprobs": 2}, "top_logprobs"),
        ({"messages": MESSAGES, "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"messages": MESSAGES, "prompt_logprobs": 21}, "prompt_logprobs"),
        ({"messages": MESSAGES, "prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    ],
)
def test_what_is_out_of_range_is_refused(fields: dict[str, Any], param: str) -> None:
    assert wire.refusal(SURFACE, **fields).param == param


@pytest.mark.parametrize(
    ("fields", "asked"),
    [
        ({"max_tokens": 9, "max_completion_tokens": 5}, {"max_tokens": 5}),
        ({"max_tokens": 9}, {"max_tokens": 9}),
        ({}, {"num_logprobs": None}),
        ({"logprobs": False}, {"num_logprobs": None}),
        ({"logprobs": True}, {"num_logprobs": 0}),
        ({"logprobs": True, "top_logprobs": 3}, {"num_logprobs": 3}),
    ],
)
def test_the_sampling_is_as_asked(fields: dict[str, Any], asked: dict[str, Any]) -> None:
    sampling = wire.parse(SURFACE, messages=MESSAGES, **fields).sampling
    assert {name: getattr(sampling, name) for name in asked} == asked


def test_a_stream_by_the_letter() -> None:
    events = read_events(wire.stream(reply(), (0, say("Hel")), (0, say("lo", FinishReason.STOP))))
    envelope = {
        "id": "chatcmpl-abc123",
        "object": "chat.completion.chunk",
        "created": 1_700_000_000,
        "model": "tiny",
        "system_fingerprint": "fp_1",
    }

    def chunk(delta: dict[str, str], reason: str | None = None, **more: Any) -> dict[str, Any]:
        return envelope | {"choices": [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason} | more]}

    assert events == [
        (None, chunk({"role": "assistant", "content": ""})),
        (None, chunk({"content": "Hel"})),
        (None, chunk({"content": "lo"})),
        (None, chunk({}, "stop", stop_reason=None)),
        (None, "[DONE]"),
    ]


def test_usage_is_null_until_its_own_chunk_and_timings_come_last_without_it_too() -> None:
    answer = reply(stream_options={"include_usage": True}, timings=True)
    *chunks, last, done = [data for _, data in read_events(wire.stream(answer, (0, say("Hi")), timings=TIMINGS))]
    assert [chunk["usage"] for chunk in chunks] == [None, None]
    assert (last["choices"], last["usage"], last["timings"]) == ([], USAGE_JSON, TIMINGS)
    assert done == "[DONE]"
    *_, last, _ = [data for _, data in read_events(wire.stream(reply(timings=True), timings=TIMINGS))]
    assert (last["choices"], last["timings"], "usage" in last) == ([], TIMINGS, False)


def test_logprobs_of_a_token_without_text_yet_are_written() -> None:
    ((_, data),) = read_events(reply(logprobs=True).delta(0, Delta(text="", num_tokens=2, logprobs=LOGPROBS)))
    assert [entry["token"] for entry in data["choices"][0]["logprobs"]["content"]] == ["Hel", " é"]


def test_the_sdks_stream_helper_assembles_all_choices() -> None:
    answer = reply(n=2, logprobs=True)
    deltas = [
        (1, say("one")),
        (0, Delta(text="zero", num_tokens=2, logprobs=LOGPROBS)),
        (1, say("", FinishReason.STOP)),
        (0, say("", FinishReason.STOP)),
    ]
    with (
        sdk_reading(wire.stream(answer, *deltas)) as client,
        client.chat.completions.stream(model="tiny", messages=MESSAGES, n=2) as events,
    ):
        kinds = [event.type for event in events]
        final = events.get_final_completion()
    assert [(choice.message.content, choice.finish_reason) for choice in final.choices] == [
        ("zero", "stop"),
        ("one", "stop"),
    ]
    assert final.choices[0].logprobs is not None
    assert [entry.token for entry in final.choices[0].logprobs.content or []] == ["Hel", " é"]
    assert kinds.count("content.delta") >= 2


def test_a_whole_answer_by_the_letter() -> None:
    answer = whole((0, say("Hel")), (0, say("lo", FinishReason.STOP)), timings=True)
    assert answer == {
        "id": "chatcmpl-abc123",
        "object": "chat.completion",
        "created": 1_700_000_000,
        "model": "tiny",
        "system_fingerprint": "fp_1",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Hello", "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
                "stop_reason": None,
            }
        ],
        "usage": USAGE_JSON,
        "timings": TIMINGS,
    }


def test_a_whole_answer_is_of_the_sdks_type() -> None:
    said = (0, say("Hello", FinishReason.STOP, *LOGPROBS)), (1, say("", FinishReason.LENGTH))
    data = whole(*said, n=2, logprobs=True, top_logprobs=2)
    completion = ChatCompletion.model_validate(data, strict=True)
    assert json.loads(completion.model_dump_json(exclude_unset=True)) == data
    logprobs = completion.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert [(entry.token, entry.logprob, entry.bytes) for entry in logprobs.content] == [
        ("Hel", -0.5, [72, 101, 108]),
        (" é", -9999.0, [32, 195, 169]),
    ]
    assert [(likely.token, likely.logprob) for likely in logprobs.content[1].top_logprobs] == [
        ("Hel", -0.25),
        ("lo", -1.5),
    ]


def test_ids_and_counts_of_tokens_are_told_where_they_are_asked_for() -> None:
    """As vLLM tells them, and without logprobs that nobody asked for."""
    asked = {"return_token_ids": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    call = wire.parse(SURFACE, messages=MESSAGES, stream=True, **asked)
    assert (call.sampling.num_logprobs, call.tokens.num_logprobs) == (0, None)
    context = msgspec.structs.replace(CONTEXT, prompt_ids=((7, 8),), prompt_lengths=(2,))
    last = Delta(text="", num_tokens=1, logprobs=(), stop_logprobs=LOGPROBS[1], finish_reason=FinishReason.STOP)
    deltas = (0, Delta(text="Hel", num_tokens=1, logprobs=LOGPROBS[:1])), (0, last)
    events = read_events(wire.stream(SURFACE.stream(call, context), *deltas))
    chunks = [data for _, data in events[:-2]]
    for chunk in chunks:
        ChatCompletionChunk.model_validate(chunk, strict=True)
    assert [chunk["choices"][0]["token_ids"] for chunk in chunks] == [[], [1], [3]]
    assert [chunk["choices"][0]["logprobs"] for chunk in chunks] == [None] * 3
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [0, 1, 2]
    assert [chunk["usage"]["total_tokens"] for chunk in chunks] == [2, 3, 4]
    assert [chunk.get("prompt_token_ids") for chunk in chunks] == [[7, 8], None, None]


def test_prompt_logprobs_are_vllms() -> None:
    call = wire.parse(SURFACE, messages=MESSAGES, prompt_logprobs=2, n=2)
    assert (call.sampling.num_prompt_logprobs, call.sampling.num_logprobs) == (2, 0)
    deltas = [Delta(text="", num_tokens=0, prompt_logprobs=(one,)) for one in LOGPROBS]
    said = say("Hello", FinishReason.STOP, *LOGPROBS)
    answer = wire.whole(SURFACE, call, *((i, delta) for delta in (*deltas, said) for i in range(2)))
    likely = {"logprob": -1.5, "rank": 2, "decoded_token": "lo"}
    assert answer["prompt_logprobs"] == [
        None,
        {"1": {"logprob": -0.5, "rank": 1, "decoded_token": "Hel"}, "2": likely},
        {
            "3": {"logprob": -9999.0, "rank": None, "decoded_token": " é"},
            "1": {"logprob": -0.25, "rank": 1, "decoded_token": "Hel"},
            "2": likely,
        },
    ]
    assert answer["choices"][0]["logprobs"] is None
