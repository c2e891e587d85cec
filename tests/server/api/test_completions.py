import json
from typing import Any

import openai
import pytest
from openai.types import Completion

from core.errors import ErrorKind, ServiceError
from core.types import Delta, FinishReason, TokenLogprobs
from server.api.completions import CompletionsSurface, CompletionStream
from server.api.surface import Choice, IdsPrompt, ReplyContext, TextPrompt
from tests.server.api import wire
from tests.server.api.wire import CONTEXT, LOGPROBS, USAGE, VOCAB_SIZE, WORDS, read_events, say, sdk_reading

SURFACE = CompletionsSurface()
ECHO_CONTEXT = ReplyContext(
    reply_id="abc123",
    created_s=1_700_000_000,
    model="tiny",
    token_str=WORDS.__getitem__,
    token_bytes=lambda token_id: WORDS[token_id].encode(),
    prompt_texts=("First", "Second"),
)
OLD_LOGPROBS = {
    "tokens": ["Hel", " é"],
    "token_logprobs": [-0.5, -9999.0],
    "top_logprobs": [{"Hel": -0.5, "lo": -1.5}, {"Hel": -0.25, "lo": -1.5, " é": -9999.0}],
    "text_offset": [0, 3],
}


def reply(context: ReplyContext = CONTEXT, prompt: Any = "Hi", **fields: Any) -> CompletionStream:
    return SURFACE.stream_reply(wire.parse(SURFACE, prompt=prompt, stream=True, **fields), context)


def whole(*choices: Choice, context: ReplyContext = CONTEXT, prompt: Any = "Hi", **fields: Any) -> Any:
    call = wire.parse(SURFACE, prompt=prompt, **fields)
    return json.loads(
        SURFACE.whole_reply(
            call, context, choices, USAGE, wire.extras_of({"queue_ms": 0.5} if call.wants_timings else None)
        )
    )


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("Hi", (TextPrompt("Hi"),)),
        (["a", "b"], (TextPrompt("a"), TextPrompt("b"))),
        ([1, 0, VOCAB_SIZE - 1], (IdsPrompt((1, 0, VOCAB_SIZE - 1)),)),
        ([[1, 2], [3]], (IdsPrompt((1, 2)), IdsPrompt((3,)))),
        (["a"] * 16, (TextPrompt("a"),) * 16),
        ([5] * 100, (IdsPrompt((5,) * 100),)),
    ],
)
def test_a_prompt_has_four_forms(prompt: Any, prompts: Any) -> None:
    assert wire.parse(SURFACE, prompt=prompt).prompts == prompts


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt[0]"),
        ({"prompt": [[1], []]}, "prompt[1]"),
        ({"prompt": ["a"] * 17}, "prompt"),
        ({"prompt": [[1]] * 17}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": [[1], "a"]}, "prompt"),
        ({"prompt": [1, VOCAB_SIZE]}, "prompt[1]"),
        ({"prompt": [[1], [2, -1]]}, "prompt[1][1]"),
        ({"prompt": [2**70]}, "prompt[0]"),
        ({"prompt": [True]}, "prompt[0]"),
        ({"prompt": [[1.5]]}, "prompt[0][0]"),
        ({"prompt": "a", "logprobs": 21}, "logprobs"),
        ({"prompt": "a", "logprobs": 1, "echo": True}, "logprobs"),
        ({"prompt": "a", "best_of": 2}, "best_of"),
        ({"prompt": "a", "suffix": "b"}, "suffix"),
    ],
)
def test_what_cannot_be_completed_is_refused(fields: dict[str, Any], param: str) -> None:
    assert wire.refusal(SURFACE, **fields).param == param


def test_the_defaults_are_openais() -> None:
    call = wire.parse(SURFACE, prompt="Hi", best_of=1, suffix="")
    assert call.sampling.max_tokens == 16
    assert call.sampling.num_logprobs is None
    assert not call.echo


def test_a_stream_by_the_letter() -> None:
    answer = reply(stream_options={"include_usage": True}, timings=True)
    deltas = [(0, say("Hel")), (0, say("")), (0, say("lo", FinishReason.LENGTH))]
    *chunks, last, done = [data for _, data in read_events(wire.stream(answer, *deltas, timings={"queue_ms": 1.0}))]
    envelope = {"id": "cmpl-abc123", "object": "text_completion", "created": 1_700_000_000, "model": "tiny"}
    assert chunks == [
        envelope | {"choices": [{"index": 0, "text": text, "logprobs": None, "finish_reason": why}], "usage": None}
        for text, why in (("Hel", None), ("lo", "length"))
    ]
    assert (last["choices"], last["usage"]["total_tokens"], last["timings"]) == ([], 9, {"queue_ms": 1.0})
    assert done == "[DONE]"


def test_every_chunk_and_the_whole_answer_are_of_the_sdks_type() -> None:
    # The SDK has one type for both and calls finish_reason and usage mandatory, which no server's chunks keep.
    data = whole(Choice(0, "Hel é", FinishReason.STOP, list(LOGPROBS)), logprobs=2)
    completion = Completion.model_validate(data, strict=True)
    assert json.loads(completion.model_dump_json(exclude_unset=True)) == data
    finished = read_events(reply().delta(0, say("a", FinishReason.STOP)))[0][1]
    assert json.loads(Completion.model_validate(finished, strict=True).model_dump_json(exclude_unset=True)) == finished


def test_the_sdk_iterates_a_stream_of_several_prompts() -> None:
    answer = reply(prompt=["a", "b"], n=2)
    deltas = [(choice, say(f"<{choice}>", FinishReason.STOP)) for choice in (3, 1, 0, 2)]
    with sdk_reading(wire.stream(answer, *deltas)) as client:
        chunks = list(client.completions.create(model="tiny", prompt=["a", "b"], n=2, stream=True))
    assert [(chunk.choices[0].index, chunk.choices[0].text) for chunk in chunks] == [
        (3, "<3>"),
        (1, "<1>"),
        (0, "<0>"),
        (2, "<2>"),
    ]


def test_the_sdk_raises_an_error_that_breaks_a_stream_off() -> None:
    answer = reply()
    events = answer.delta(0, say("a")) + answer.error(ServiceError(ErrorKind.ENGINE, "It failed.", "engine_error"))
    with sdk_reading(events) as client:
        stream = client.completions.create(model="tiny", prompt="a", stream=True)
        assert next(stream).choices[0].text == "a"
        with pytest.raises(openai.APIError, match="It failed"):
            next(stream)


def test_an_echo_comes_before_the_text_of_each_choice() -> None:
    answer = reply(ECHO_CONTEXT, ["x", "y"], n=2, echo=True)
    texts = [(data["choices"][0]["index"], data["choices"][0]["text"]) for _, data in read_events(answer.start())]
    assert texts == [(0, "First"), (1, "First"), (2, "Second"), (3, "Second")]
    assert reply().start() == b""

    choices = [Choice(i, f" {i}", FinishReason.STOP) for i in range(4)]
    data = whole(*choices, context=ECHO_CONTEXT, prompt=["x", "y"], n=2, echo=True)
    assert [choice["text"] for choice in data["choices"]] == ["First 0", "First 1", "Second 2", "Second 3"]


def test_old_logprobs_are_parallel_lists() -> None:
    data = whole(Choice(0, "Hel é", FinishReason.STOP, list(LOGPROBS)), logprobs=2)
    assert data["choices"][0]["logprobs"] == OLD_LOGPROBS


def test_offsets_go_on_over_the_chunks_of_a_stream() -> None:
    answer = reply(logprobs=2, n=2)
    delta = Delta(text="Hel é", num_tokens=2, logprobs=LOGPROBS)
    offsets = [
        read_events(answer.delta(choice, delta))[0][1]["choices"][0]["logprobs"]["text_offset"] for choice in (0, 1, 0)
    ]
    assert offsets == [[0, 3], [0, 3], [5, 8]]


def test_tokens_amid_a_character_begin_where_it_does() -> None:
    pieces = [b"a", b"\xf0\x9f", b"\x98", b"\x80", b"b"]  # a, an emoji of three tokens, b
    context = ReplyContext(
        reply_id="abc123",
        created_s=1_700_000_000,
        model="tiny",
        token_str=lambda token_id: pieces[token_id].decode("utf-8", "replace"),
        token_bytes=pieces.__getitem__,
    )
    logprobs = [TokenLogprobs(token_id=i, logprob=-1.0, top=()) for i in range(len(pieces))]
    data = whole(Choice(0, "a\U0001f600b", FinishReason.STOP, logprobs), context=context, logprobs=0)
    assert data["choices"][0]["logprobs"]["text_offset"] == [0, 1, 1, 1, 2]
    answer = reply(context, logprobs=0)
    events = b"".join(answer.delta(0, Delta(text="x", num_tokens=1, logprobs=(token,))) for token in logprobs)
    offsets = [event["choices"][0]["logprobs"]["text_offset"] for _, event in read_events(events)]
    assert offsets == [[0], [1], [1], [1], [2]]


@pytest.mark.parametrize("reason", [FinishReason.CANCELLED, FinishReason.DEADLINE, FinishReason.ERROR])
def test_a_reason_that_the_wire_lacks_is_not_written(reason: FinishReason) -> None:
    assert reply().delta(0, say("", reason)) == b""
    ((_, data),) = read_events(reply().delta(0, say("kept", reason)))
    assert (data["choices"][0]["text"], data["choices"][0]["finish_reason"]) == ("kept", None)
    with pytest.raises(ServiceError):
        whole(Choice(0, "a", reason))


def test_timings_are_in_the_whole_answer_when_asked_for() -> None:
    assert whole(Choice(0, "a", FinishReason.STOP), timings=True)["timings"] == {"queue_ms": 0.5}
    assert "timings" not in whole(Choice(0, "a", FinishReason.STOP))
