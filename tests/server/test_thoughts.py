"""Thoughts, through the whole server: apart from the answer, counted, however their tokens are cut."""

import random
from typing import Any

import pytest
from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter

from tests.server.simulated_server import Answer, chat, request
from tests.server.thinking_server import TOKENIZER, ids_of, thinking

EVENT_TYPE: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
STREAM = {"stream": True, "stream_options": {"include_usage": True}}
OFF = {"chat_template_kwargs": {"enable_thinking": False}}


def ask_for(**fields: Any) -> bytes:
    return chat(**{"max_tokens": 200, "ignore_eos": False, "seed": 1} | fields)


def message_of(answer: Answer) -> dict[str, Any]:
    """Streamed or whole: what the message has."""
    if answer.headers["content-type"] == "application/json":
        message = answer.json["choices"][0]["message"]
        calls = [call["function"] for call in message.get("tool_calls", ())]
        assert message.get("reasoning") == message.get("reasoning_content")
        return {"thought": message.get("reasoning") or "", "text": message["content"] or "", "calls": calls}
    found: dict[str, Any] = {"thought": "", "text": "", "calls": []}
    for event in answer.events:
        for choice in event["choices"] if isinstance(event, dict) else ():
            delta = choice["delta"]
            assert delta.get("reasoning") == delta.get("reasoning_content")
            found["thought"] += delta.get("reasoning", "")
            found["text"] += delta.get("content", "")
            for call in delta.get("tool_calls", ()):
                if "id" in call:
                    found["calls"].append({"name": call["function"]["name"], "arguments": ""})
                found["calls"][-1]["arguments"] += call["function"]["arguments"] if "id" not in call else ""
    return found


def cuts_of(text: str) -> list[list[int]]:
    """Its tokens: as the tokenizer has them, character by character, and at random places."""
    rng, pieces = random.Random(len(text)), [""]
    for char in text:
        if rng.random() < 0.4:
            pieces.append("")
        pieces[-1] += char
    return [ids_of(text), *([one for piece in some for one in ids_of(piece)] for some in (text, pieces))]


def num_thought_tokens(ids: list[int], end: str) -> int:
    """Tokens up to the one that completes the text that ends the thought."""
    texts = (TOKENIZER.decode(ids[:num], skip_special_tokens=False) for num in range(len(ids) + 1))
    return next((num for num, text in enumerate(texts) if end in text), len(ids))


THINK, END = "</think>", "<|end|>"
HARMONY = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>Yes"


@pytest.mark.parametrize(
    ("template", "fields", "text", "thought", "said"),
    [
        ("qwen3", {}, "<think>\nhm\n</think>\n\nYes.", "hm", "Yes."),
        ("qwen3", {}, "Yes <think>.", "", "Yes <think>."),
        ("qwen3", OFF, "<think> Yes.", "", "<think> Yes."),
        ("r1", {}, "hm, é\n</think>\n\nYes.", "hm, é", "Yes."),
        ("r1", {}, "hm and no end", "hm and no end", ""),
        ("harmony", {}, HARMONY, "hm", "Yes"),
    ],
)
def test_a_thought_is_apart_from_the_answer_and_counted(
    template: str, fields: dict[str, Any], text: str, thought: str, said: str
) -> None:
    with thinking(template) as server:
        for ids in cuts_of(text)[: 1 if template == "harmony" else 3]:
            for more in ({}, STREAM, {"logprobs": True}, STREAM | {"logprobs": True}, {"stop": ["Nothing"]}):
                answer = server.ask(ask_for(**fields, **more), ids)
                assert message_of(answer) == {"thought": thought, "text": said, "calls": []}
                assert answer.finish_reason() == "stop"
                expected = num_thought_tokens(ids, END if template == "harmony" else THINK) if thought else 0
                usage = answer.usage
                assert usage["completion_tokens"] == len(ids) + 1
                assert usage["completion_tokens_details"]["reasoning_tokens"] == expected
                if not (said or more):
                    assert answer.json["choices"][0]["message"]["content"] is None


@pytest.mark.parametrize("max_tokens", range(1, 14))
def test_an_answer_cut_off_in_its_thought_counts_what_came(max_tokens: int) -> None:
    ids = ids_of("<think>\nhm, so\n</think>\n\nYes, no.")
    end = num_thought_tokens(ids, THINK)
    with thinking() as server:
        whole, streamed = (server.ask(ask_for(max_tokens=max_tokens, **more), ids) for more in ({}, STREAM))
        assert message_of(whole) == message_of(streamed)
        for answer in (whole, streamed):
            assert answer.finish_reason() == "length"
            details = answer.usage["completion_tokens_details"]
            assert details["reasoning_tokens"] == min(max_tokens, end)


@pytest.mark.parametrize("text", ["<think>a b</think>\n\na b c", "a b c", "<b c"])
def test_stop_strings_are_searched_behind_the_thought(text: str) -> None:
    with thinking() as server:
        for ids in cuts_of(text):
            for stop in ("b", "<b", "think"):
                answer = server.ask(ask_for(stop=[stop]), ids)
                expected = text.rpartition("\n")[2]
                assert message_of(answer)["text"] == expected.partition(stop)[0]
                assert message_of(answer)["thought"] == ("a b" if "</think>" in text else "")


def test_completions_are_text_as_it_comes() -> None:
    body = {"model": "small", "prompt": "x", "max_tokens": 50}
    with thinking("r1") as server:
        answer = server.ask(request("POST", "/v1/completions", body), "hm</think>Yes")
        assert answer.text() == "hm</think>Yes"
        assert answer.usage["completion_tokens_details"]["reasoning_tokens"] == 0


@pytest.mark.parametrize("more", [{}, {"top_logprobs": 1}])
@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_response_has_the_thought_as_an_item_of_its_own(is_streamed: bool, more: dict[str, Any]) -> None:
    body = {"model": "small", "input": "x", "max_output_tokens": 50, "stream": is_streamed} | more
    with thinking("r1") as server:
        for ids in cuts_of("hm\n</think>\n\nYes"):
            answer = server.ask(request("POST", "/v1/responses", body), ids)
            events = [(event["type"], event) for event in answer.events] if is_streamed else []
            response = events[-1][1]["response"] if is_streamed else answer.json
            thought, message = response["output"]
            assert (thought["type"], message["type"]) == ("reasoning", "message")
            assert thought["content"] == [{"type": "reasoning_text", "text": "hm"}]
            assert message["content"][0]["text"] == "Yes"
            assert bool(message["content"][0]["logprobs"]) == bool(more)
            details = response["usage"]["output_tokens_details"]
            assert details["reasoning_tokens"] == num_thought_tokens(ids, THINK)
            if is_streamed:
                check_events(events, thought, message)


def check_events(events: list[tuple[str, Any]], thought: Any, message: Any) -> None:
    """Items one after the other, each begun, told, and done as the final response has it."""
    for _, event in events:
        EVENT_TYPE.validate_python(event)
    assert [event["sequence_number"] for _, event in events] == list(range(len(events)))
    for item, name, text in ((thought, "reasoning_text", "hm"), (message, "output_text", "Yes")):
        own = [
            (kind, event)
            for kind, event in events
            if item["id"] in (event.get("item_id"), event.get("item", {}).get("id"))
        ]
        assert [kind for kind, _ in own if "delta" not in kind] == [
            "response.output_item.added",
            "response.content_part.added",
            f"response.{name}.done",
            "response.content_part.done",
            "response.output_item.done",
        ]
        assert "".join(event["delta"] for kind, event in own if kind == f"response.{name}.delta") == text
        assert own[-1][1]["item"] == item
