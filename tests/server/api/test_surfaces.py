"""What holds on every surface: how text is written on the hot path, and how a sequence ends that did not end well."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.errors import ServiceError
from core.types import FinishReason
from server.api import chat, completions, responses
from server.api.replies import Surface
from tests.server.api import wire

MESSAGES = [{"role": "user", "content": "Hi"}]
REQUESTS: list[tuple[Surface, dict[str, Any]]] = [
    (chat.SURFACE, {"messages": MESSAGES, "n": 2}),
    (chat.SURFACE, {"messages": MESSAGES, "n": 2, "stream_options": {"include_usage": True}}),
    (completions.SURFACE, {"prompt": ["a", "b"]}),
    (responses.SURFACE, {"input": "Hi"}),
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
