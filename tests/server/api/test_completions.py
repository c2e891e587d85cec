import json
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from openai.types import Completion

from core.types import Delta, FinishReason, TokenLogprobs
from server.api.completions import SURFACE
from server.api.fields import IdsPrompt, TextPrompt
from server.api.replies import ReplyContext, StreamReply
from tests.server.api import wire
from tests.server.api.wire import CONTEXT, LOGPROBS, VOCAB_SIZE, read_events, say, sdk_reading

ECHO_CONTEXT = msgspec.structs.replace(CONTEXT, prompt_texts=("First", "Second"))
LEGACY_LOGPROBS = {
    "tokens": ["Hel", " é"],
    "token_logprobs": [-0.5, -9999.0],
    "top_logprobs": [{"Hel": -0.5, "lo": -1.5}, {"Hel": -0.25, "lo": -1.5, " é": -9999.0}],
    "text_offset": [0, 3],
}


def reply(context: ReplyContext = CONTEXT, prompt: Any = "Hi", **fields: Any) -> StreamReply:
    return SURFACE.stream(wire.parse(SURFACE, prompt=prompt, stream=True, **fields), context)


def whole(*deltas: tuple[int, Delta], context: ReplyContext = CONTEXT, prompt: Any = "Hi", **fields: Any) -> Any:
    return wire.whole(SURFACE, wire.parse(SURFACE, prompt=prompt, **fields), *deltas, context=context)


def told(logprobs: Sequence[TokenLogprobs]) -> Delta:
    """Of a prompt's tokens."""
    return Delta(text="", num_tokens=0, prompt_logprobs=tuple(logprobs))


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
        ({"prompt": ["a"] * 257}, "prompt"),
        ({"prompt": [[1]] * 257}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": [[1], "a"]}, "prompt"),
        ({"prompt": [1, VOCAB_SIZE]}, "prompt[1]"),
        ({"prompt": [[1], [2, -1]]}, "prompt[1][1]"),
        ({"prompt": [2**70]}, "prompt[0]"),
        ({"prompt": [True]}, "prompt[0]"),
        ({"prompt": [[1.5]]}, "prompt[0][0]"),
        ({"prompt": "a", "logprobs": 21}, "logprobs"),
        ({"prompt": "a", "logprobs": 21, "echo": True}, "logprobs"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens"),
        ({"prompt": "a", "max_tokens": 0, "echo": False}, "max_tokens"),
        ({"prompt": "a", "max_tokens": -1, "echo": True}, "max_tokens"),
        ({"prompt": "a", "best_of": 65}, "best_of"),
        ({"prompt": "a", "n": 2, "best_of": 1}, "best_of"),
        ({"prompt": ["a"], "suffix": "b"}, "suffix"),
        ({"prompt": "a", "suffix": "b", "echo": True}, "suffix"),
    ],
)
def test_what_cannot_be_completed_is_refused(fields: dict[str, Any], param: str) -> None:
    assert wire.refusal(SURFACE, **fields).param == param


def test_a_stream_by_the_letter() -> None:
    answer = reply(stream_options={"include_usage": True}, timings=True)
    deltas = [(0, say("Hel")), (0, say("")), (0, say("lo", FinishReason.LENGTH))]
    *chunks, last, done = [data for _, data in read_events(wire.stream(answer, *deltas, timings={"queue_ms": 1.0}))]
    envelope = {"id": "cmpl-abc123", "object": "text_completion", "created": 1_700_000_000, "model": "tiny"}
    envelope["system_fingerprint"] = "fp_1"
    assert chunks == [
        envelope | {"choices": [{"index": 0, "text": text, "logprobs": None} | why], "usage": None}
        for text, why in (
            ("Hel", {"finish_reason": None}),
            ("lo", {"finish_reason": "length", "stop_reason": None}),
        )
    ]
    assert (last["choices"], last["usage"]["total_tokens"], last["timings"]) == ([], 9, {"queue_ms": 1.0})
    assert done == "[DONE]"


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


def test_an_echo_comes_before_the_text_of_each_choice() -> None:
    answer = reply(ECHO_CONTEXT, ["x", "y"], n=2, echo=True)
    texts = [(data["choices"][0]["index"], data["choices"][0]["text"]) for _, data in read_events(answer.start())]
    assert texts == [(0, "First"), (1, "First"), (2, "Second"), (3, "Second")]
    assert reply().start() == b""

    said = [(i, say(f" {i}", FinishReason.STOP)) for i in range(4)]
    data = whole(*said, context=ECHO_CONTEXT, prompt=["x", "y"], n=2, echo=True)
    assert [choice["text"] for choice in data["choices"]] == ["First 0", "First 1", "Second 2", "Second 3"]


@pytest.mark.parametrize(
    ("fields", "asked"),
    [
        ({"best_of": 1, "suffix": ""}, (16, None, None)),  # OpenAI's defaults
        ({"echo": True, "logprobs": 3, "max_tokens": 0}, (0, 3, 3)),
        ({"echo": True}, (16, None, None)),
        ({"logprobs": 3}, (16, 3, None)),
    ],
)
def test_an_echo_asks_for_the_logprobs_of_the_prompt_and_may_be_all(fields: dict[str, Any], asked: Any) -> None:
    sampling = wire.parse(SURFACE, prompt="Hi", **fields).sampling
    assert (sampling.max_tokens, sampling.num_logprobs, sampling.num_prompt_logprobs) == asked


PIECES = {0: b"<s>", 1: b"Hel", 2: b"lo", 3: b" \xc3", 4: b"\xa9", 5: b"<end>"}
PROMPT_CONTEXT = msgspec.structs.replace(
    CONTEXT,
    token_str=lambda token_id: PIECES[token_id].decode("utf-8", "replace"),
    token_bytes=PIECES.__getitem__,
    prompt_texts=("Hello é", "lo<end>lo"),
    prompt_ids=((0, 1, 2, 3, 4), (2, 5, 2)),
    special_ids={0, 5},
)


def scored(token_id: int) -> TokenLogprobs:
    return TokenLogprobs(token_id, -float(token_id), ((1, -1.0), (2, -2.0)))


def test_an_echoed_prompt_stands_first_in_the_lists() -> None:
    """Its BOS is not in the text; what is sampled goes on where the prompt ends; the id that ends it says nothing."""
    end = msgspec.structs.replace(say("Hel", FinishReason.STOP, scored(1)), stop_logprobs=scored(5))
    prompt = told([scored(i) for i in (1, 2, 3, 4)])
    data = whole((0, prompt), (0, end), context=PROMPT_CONTEXT, echo=True, logprobs=2)["choices"][0]
    assert data["text"] == "Hello éHel"
    assert data["logprobs"] == {
        "tokens": ["<s>", "Hel", "lo", "bytes: \\xc3", "bytes:\\xa9", "Hel", "<end>"],
        "token_logprobs": [None, -1.0, -2.0, -3.0, -4.0, -1.0, -5.0],
        "top_logprobs": [
            None,
            {"Hel": -1.0, "lo": -2.0},
            {"Hel": -1.0, "lo": -2.0},
            {"Hel": -1.0, "lo": -2.0, "bytes: \\xc3": -3.0},
            {"Hel": -1.0, "lo": -2.0, "bytes:\\xa9": -4.0},
            {"Hel": -1.0, "lo": -2.0},
            {"Hel": -1.0, "lo": -2.0, "<end>": -5.0},
        ],
        "text_offset": [0, 0, 3, 5, 6, 7, 10],
    }


def test_special_ids_take_the_room_that_the_text_gives_them() -> None:
    deltas = [(1, told([scored(5), scored(2)])), *((i, say("", FinishReason.LENGTH)) for i in range(2))]
    fields: dict[str, Any] = {"prompt": ["x", "y"], "echo": True, "logprobs": 0, "max_tokens": 0}
    shown = whole(*deltas, context=PROMPT_CONTEXT, **fields)
    assert shown["choices"][1]["logprobs"]["text_offset"] == [0, 2, 7]
    hidden = msgspec.structs.replace(PROMPT_CONTEXT, prompt_texts=("", "lolo"))
    shown = whole(*deltas, context=hidden, **fields)
    assert shown["choices"][1]["logprobs"]["text_offset"] == [0, 2, 2]


@pytest.mark.parametrize("cuts", [(), (1,), (1, 2, 3)])
def test_a_stream_says_of_the_prompt_what_the_whole_answer_says(cuts: tuple[int, ...]) -> None:
    prompt = [scored(i) for i in (1, 2, 3, 4)]
    sampled, last = [scored(1), scored(2)], scored(5)
    deltas = [
        *(told(prompt[first:end]) for first, end in zip((0, *cuts), (*cuts, 4), strict=True)),
        Delta(text="Hel", num_tokens=1, logprobs=(sampled[0],)),
        Delta(text="lo", num_tokens=2, logprobs=(sampled[1],), stop_logprobs=last, finish_reason=FinishReason.STOP),
    ]
    fields: dict[str, Any] = {"echo": True, "logprobs": 2, "n": 2}
    both = [(i, delta) for delta in deltas for i in range(2)]
    events = read_events(wire.stream(reply(PROMPT_CONTEXT, **fields), *both))
    answer = whole(*both, context=PROMPT_CONTEXT, **fields)
    for choice in range(2):
        chunks = [event["choices"][0] for _, event in events[:-1] if event["choices"][0]["index"] == choice]
        assert "".join(chunk["text"] for chunk in chunks) == answer["choices"][choice]["text"]
        lists = {name: [item for c in chunks for item in c["logprobs"][name]] for name in LEGACY_LOGPROBS}
        assert lists == answer["choices"][choice]["logprobs"]


def test_legacy_logprobs_are_parallel_lists() -> None:
    data = whole((0, say("Hel é", FinishReason.STOP, *LOGPROBS)), logprobs=2)
    assert data["choices"][0]["logprobs"] == LEGACY_LOGPROBS
    completion = Completion.model_validate(data, strict=True)
    assert json.loads(completion.model_dump_json(exclude_unset=True)) == data


def test_offsets_go_on_over_the_chunks_of_a_stream() -> None:
    answer = reply(logprobs=2, n=2)
    delta = Delta(text="Hel é", num_tokens=2, logprobs=LOGPROBS)
    offsets = [
        read_events(answer.delta(choice, delta))[0][1]["choices"][0]["logprobs"]["text_offset"] for choice in (0, 1, 0)
    ]
    assert offsets == [[0, 3], [0, 3], [5, 8]]


def test_tokens_amid_a_character_begin_where_it_does() -> None:
    pieces = [b"a", b"\xf0\x9f", b"\x98", b"\x80", b"b"]  # a, an emoji of three tokens, b
    context = msgspec.structs.replace(CONTEXT, token_bytes=pieces.__getitem__)
    logprobs = [TokenLogprobs(token_id=i, logprob=-1.0, top=()) for i in range(len(pieces))]
    data = whole((0, say("a\U0001f600b", FinishReason.STOP, *logprobs)), context=context, logprobs=0)
    assert data["choices"][0]["logprobs"]["text_offset"] == [0, 1, 1, 1, 2]
    answer = reply(context, logprobs=0)
    events = b"".join(answer.delta(0, Delta(text="x", num_tokens=1, logprobs=(token,))) for token in logprobs)
    offsets = [event["choices"][0]["logprobs"]["text_offset"] for _, event in read_events(events)]
    assert offsets == [[0], [1], [1], [1], [2]]


def test_prompts_times_n_are_bounded() -> None:
    ask: dict[str, Any] = {"prompt": ["a"] * 256}
    assert len(wire.parse(SURFACE, **ask, n=16).prompts) == 256
    assert wire.refusal(SURFACE, **ask, n=17).param == "n"


def test_ids_are_told_of_each_prompt() -> None:
    call = wire.parse(SURFACE, prompt=["First", "Second"], stream=True, return_token_ids=True)
    context = msgspec.structs.replace(CONTEXT, prompt_ids=((7,), (8, 9)))
    last = Delta(text="Hel", num_tokens=1, logprobs=LOGPROBS[:1], finish_reason=FinishReason.LENGTH)
    reply = SURFACE.stream(call, context)
    chunks = [data["choices"][0] for _, data in read_events(reply.start() + reply.delta(1, last))]
    assert [(one["prompt_token_ids"], one["token_ids"]) for one in chunks] == [([7], []), ([8, 9], []), (None, [1])]
    assert all(one["logprobs"] is None for one in chunks)
    answer = wire.whole(SURFACE, call, (0, last), (1, last), context=context)
    assert [(one["prompt_token_ids"], one["token_ids"]) for one in answer["choices"]] == [([7], [1]), ([8, 9], [1])]
