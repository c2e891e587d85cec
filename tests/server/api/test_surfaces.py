"""On every surface: text on the hot path, ends that are errors, and what the SDKs read of streams."""

import json
from typing import Any

import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types import Completion
from openai.types.chat import ChatCompletionChunk
from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter

from core.errors import ErrorKind, ServiceError
from core.types import FinishReason
from server.api import chat, completions, messages, responses
from server.api.replies import StreamReply, Surface
from server.wire import sse
from tests.server.api import wire

MESSAGES = [{"role": "user", "content": "Hi"}]
REQUESTS: list[tuple[Surface, dict[str, Any]]] = [
    (chat.SURFACE, {"messages": MESSAGES, "n": 2}),
    (chat.SURFACE, {"messages": MESSAGES, "n": 2, "stream_options": {"include_usage": True}}),
    (completions.SURFACE, {"prompt": ["a", "b"]}),
    (responses.SURFACE, {"input": "Hi"}),
    (messages.SURFACE, {"messages": MESSAGES, "max_tokens": 9}),
]


@pytest.mark.parametrize(("surface", "fields"), REQUESTS)
@given(texts=st.lists(st.text(min_size=1), min_size=1, max_size=3))
def test_text_alone_is_written_as_its_delta(surface: Surface, fields: dict[str, Any], texts: list[str]) -> None:
    call = wire.parse(surface, stream=True, **fields)
    choice = len(call.prompts) * call.num_sequences - 1
    as_text, as_delta = (surface.stream(call, wire.CONTEXT) for _ in range(2))
    for text in texts:
        written = as_text.text(choice, text)
        assert wire.read_events(written) == wire.read_events(as_delta.delta(choice, wire.say(text)))
        assert b"\n" not in written[:-2].replace(b"\ndata: ", b"")


@pytest.mark.parametrize("reason", [FinishReason.CANCELLED, FinishReason.DEADLINE, FinishReason.ERROR])
@pytest.mark.parametrize(("surface", "fields"), REQUESTS)
def test_a_reason_that_the_wire_lacks_is_not_written_and_makes_a_whole_answer_an_error(
    surface: Surface, fields: dict[str, Any], reason: FinishReason
) -> None:
    call = wire.parse(surface, stream=True, **fields)
    reply = surface.stream(call, wire.CONTEXT)
    assert reply.delta(0, wire.say("")) == reply.delta(0, wire.say("", reason)) == b""
    ((_, said),) = wire.read_events(reply.delta(0, wire.say("kept", reason)))
    assert "kept" in str(said)
    assert said.get("choices", [{"finish_reason": None}])[0]["finish_reason"] is None
    with pytest.raises(ServiceError):
        wire.whole(surface, call, (0, wire.say("a", reason)))


def sdk_call(client: openai.OpenAI, surface: Surface) -> Any:
    """The SDK's stream of a surface."""
    if surface is chat.SURFACE:
        return client.chat.completions.create(model="tiny", messages=MESSAGES, stream=True)  # type: ignore[call-overload]
    if surface is completions.SURFACE:
        return client.completions.create(model="tiny", prompt="a", stream=True)
    return client.responses.create(model="tiny", input="Hi", stream=True)


def text_of(event: Any) -> str:
    if hasattr(event, "choices"):
        choices = event.choices
        return "".join((one.delta.content if hasattr(one, "delta") else one.text) or "" for one in choices)
    return event.delta if event.type == "response.output_text.delta" else ""


each_surface = pytest.mark.parametrize("surface", [chat.SURFACE, completions.SURFACE, responses.SURFACE])
ASK: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}, "timings": True}


def stream_of(surface: Surface, **fields: Any) -> StreamReply:
    asks = {id(chat.SURFACE): {"messages": MESSAGES}, id(completions.SURFACE): {"prompt": "a"}}
    return surface.stream(wire.parse(surface, **asks.get(id(surface), {"input": "Hi"}), **ASK | fields), wire.CONTEXT)


@each_surface
def test_the_sdk_iterates_a_stream_with_keep_alives(surface: Surface) -> None:
    reply, text = stream_of(surface), 'a "b"\n\ndata: [DONE]\n\nevent: x\u2028é😀'
    events = reply.start() + sse.KEEP_ALIVE + reply.delta(0, wire.say(text)) + sse.KEEP_ALIVE
    events += reply.delta(0, wire.say("", FinishReason.STOP)) + reply.end(wire.USAGE, {})
    with wire.sdk_reading(events) as client:
        received = list(sdk_call(client, surface))
    assert "".join(map(text_of, received)) == text
    usage = received[-1].response.usage if surface is responses.SURFACE else received[-1].usage
    assert usage.total_tokens == 9


@pytest.mark.parametrize("surface", [chat.SURFACE, completions.SURFACE])
def test_the_sdk_raises_an_error_that_breaks_a_stream_off(surface: Surface) -> None:
    reply = stream_of(surface)
    events = reply.start() + reply.delta(0, wire.say("Hel"))
    events += reply.error(ServiceError(ErrorKind.ENGINE, "The engine failed.", "engine_error"))
    texts: list[str] = []
    with wire.sdk_reading(events) as client, pytest.raises(openai.APIError, match="The engine failed") as caught:
        texts.extend(map(text_of, sdk_call(client, surface)))
    assert "".join(texts) == "Hel"
    assert caught.value.code == "engine_error"
    assert not events.endswith(sse.DONE)


EVENT_TYPES: list[tuple[Surface, dict[str, Any], TypeAdapter[Any]]] = [
    (chat.SURFACE, {"n": 2, "logprobs": True, "top_logprobs": 2}, TypeAdapter(ChatCompletionChunk)),
    (completions.SURFACE, {"n": 2, "logprobs": 2}, TypeAdapter(Completion)),
    (responses.SURFACE, {"top_logprobs": 2, "metadata": {"a": "b"}}, TypeAdapter(ResponseStreamEvent)),
]


@pytest.mark.parametrize(("surface", "fields", "event_type"), EVENT_TYPES)
@pytest.mark.parametrize("reason", [FinishReason.STOP, FinishReason.LENGTH])
def test_every_event_is_of_the_sdks_type(
    surface: Surface, fields: dict[str, Any], event_type: TypeAdapter[Any], reason: FinishReason
) -> None:
    last = fields.get("n", 1) - 1
    said = [wire.say("x", None, wire.LOGPROBS[0]), wire.say("Hel é", reason, *wire.LOGPROBS)]
    deltas = [(choice, delta) for delta in said for choice in range(last + 1)]
    for _, data in wire.read_events(wire.stream(stream_of(surface, **fields), *deltas)):
        if data == "[DONE]":
            continue
        if (
            surface is completions.SURFACE
        ):  # its one type calls finish_reason and usage mandatory: no server's chunks do
            for choice in data["choices"]:
                choice["finish_reason"] = choice["finish_reason"] or "stop"
            data.pop("usage", None)
        event = event_type.validate_python(data, strict=True)
        data.pop("timings", None)
        assert json.loads(event.model_dump_json(exclude_unset=True, exclude={"timings"})) == data
