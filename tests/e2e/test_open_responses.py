"""The text cases of the Open Responses compliance suite, by its published types and the openai package's.

https://github.com/openresponses/openresponses: what a response, its items and the events of its stream must have. The
model plays the part that each case needs.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from tests.core.answer_texts import Call
from tests.e2e.replay import MODEL, Play, playing, written_calls, written_text
from tests.server.running_server import run

spec = pytest.importorskip("openresponses_types.types", reason="needs openresponses-types: pip install -e '.[test]'")

WEATHER: Call = ("get_weather", {"location": "San Francisco, CA"})
TOOLS = [
    {
        "type": "function",
        "name": "get_weather",
        "description": "The weather of a place.",
        "parameters": {"type": "object", "properties": {"location": {"type": "string"}}, "required": ["location"]},
    }
]
HELLO = "Hello, Alice!"
ALICE = [
    {"type": "message", "role": "user", "content": "My name is Alice."},
    {"type": "message", "role": "assistant", "content": "Hello Alice! How can I help you?"},
]


def user(text: Any) -> dict[str, Any]:
    return {"type": "message", "role": "user", "content": text}


def answer(prompt: str) -> str:
    """A call where the prompt has a question for it and no result."""
    if "weather" in prompt and "function_call" not in prompt and "21 degrees" not in prompt:
        return written_calls("hermes", [WEATHER])
    return written_text("hermes", HELLO)


CASES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "basic text": ({"input": [user("Say hello in exactly 3 words.")]}, ["message"]),
    "a string": ({"input": "Count from 1 to 5."}, ["message"]),
    "system prompt": (
        {"input": [{"type": "message", "role": "system", "content": "Be a pirate."}, user("Hi")]},
        ["message"],
    ),
    "instructions": (
        {
            "input": [{"type": "message", "role": "developer", "content": "Be kind."}, user("Hi")],
            "instructions": "Be brief.",
        },
        ["message"],
    ),
    "multi-turn": ({"input": [*ALICE, user("What is my name?")]}, ["message"]),
    "tool call": ({"input": [user("What's the weather in San Francisco?")], "tools": TOOLS}, ["function_call"]),
    "forced tool call": (
        {"input": [user("The weather?")], "tools": TOOLS, "tool_choice": {"type": "function", "name": "get_weather"}},
        ["function_call"],
    ),
    "tool's result": (
        {
            "input": [
                user("What's the weather in San Francisco?"),
                {"type": "function_call", "call_id": "c1", "name": "get_weather", "arguments": json.dumps(WEATHER[1])},
                {"type": "function_call_output", "call_id": "c1", "output": "21 degrees"},
            ],
            "tools": TOOLS,
        },
        ["message"],
    ),
    "parameters repeated": (
        {
            "input": "Hi",
            "metadata": {"k": "v"},
            "user": "u",
            "safety_identifier": "s",
            "prompt_cache_key": "p",
            "temperature": 0,
            "top_p": 0.5,
            "presence_penalty": 1,
            "truncation": "auto",
            "max_tool_calls": 2,
            "parallel_tool_calls": False,
            "reasoning": {"effort": "low"},
            "service_tier": "auto",
            "store": False,
        },
        ["message"],
    ),
    "cut off": ({"input": "Hi", "max_output_tokens": 2}, ["message"]),
}
SDK_EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
EVENTS = {  # by the type that each tells
    next(iter(kind.model_fields["type"].annotation)).value: kind
    for name, kind in vars(spec).items()
    if re.fullmatch("Response.+StreamingEvent", name)
}


def scene(told: Callable[[httpx.AsyncClient], Any], play: Play = answer, **settings: Any) -> None:
    async def scenario() -> None:
        async with playing("hermes", play, **settings) as running:
            url = f"http://127.0.0.1:{running.server.listener.port}"
            async with httpx.AsyncClient(base_url=url) as client:
                await told(client)

    run(scenario)


async def respond(client: httpx.AsyncClient, body: dict[str, Any], streams: bool) -> dict[str, Any]:
    """The response, checked with all events that led to it."""
    answer = await client.post("/v1/responses", json={"model": MODEL, **body, "stream": streams})
    assert answer.status_code == 200, answer.text
    if not streams:
        return checked(answer.json())
    blocks = [dict(line.split(": ", 1) for line in block.split("\n")) for block in answer.text.split("\n\n")[:-1]]
    events = [json.loads(block["data"]) for block in blocks]
    assert [event["type"] for event in events] == [block["event"] for block in blocks]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    for event in events:
        EVENTS[event["type"]].model_validate(event)
        SDK_EVENT.validate_python(event)
    opened = [event["item"]["id"] for event in events if event["type"] == "response.output_item.added"]
    closed = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert closed == events[-1]["response"]["output"]
    assert [item["id"] for item in closed] == opened
    for item in closed:
        parts = [event["delta"] for event in events if event.get("item_id") == item["id"] and "delta" in event]
        assert "".join(parts) == (item["arguments"] if "arguments" in item else item["content"][0]["text"])
    return checked(events[-1]["response"])


def checked(response: dict[str, Any]) -> dict[str, Any]:
    spec.ResponseResource.model_validate(response)
    Response.model_validate(response)
    return response


@pytest.mark.parametrize("case", CASES)
def test_a_case_of_the_suite_whole_and_streamed(case: str) -> None:
    body, kinds = CASES[case]

    async def told(client: httpx.AsyncClient) -> None:
        found = [await respond(client, body, streams) for streams in (False, True)]
        for response in found:
            assert [item["type"] for item in response["output"]] == kinds
            assert response["status"] == ("incomplete" if case == "cut off" else "completed")
            for name in (
                "metadata",
                "user",
                "safety_identifier",
                "prompt_cache_key",
                "top_p",
                "truncation",
                "max_tool_calls",
            ):
                assert name not in body or response[name] == body[name]
            if kinds == ["function_call"]:
                assert json.loads(response["output"][0]["arguments"]) == WEATHER[1]
        one, other = ([strip(item) for item in response["output"]] for response in found)
        assert one == other

    scene(told)


def strip(item: dict[str, Any]) -> dict[str, Any]:
    """Without what each answer has of its own."""
    return {name: value for name, value in item.items() if name not in ("id", "call_id")}


def test_a_history_that_is_kept_and_items_by_reference(tmp_path: Path) -> None:
    async def told(client: httpx.AsyncClient) -> None:
        asked = {"input": [user("What's the weather in San Francisco?")], "tools": TOOLS}
        first = await respond(client, asked, streams=False)
        (call,) = first["output"]
        result = {"type": "function_call_output", "call_id": call["call_id"], "output": "21 degrees"}
        for streams in (False, True):
            goes_on = {"previous_response_id": first["id"], "input": [result], "tools": TOOLS}
            second = await respond(client, goes_on, streams)
            assert (second["previous_response_id"], second["store"]) == (first["id"], True)
            refers = {"input": [*asked["input"], {"type": "item_reference", "id": call["id"]}, result], "tools": TOOLS}
            third = await respond(client, refers, streams)
            assert third["usage"]["input_tokens"] == second["usage"]["input_tokens"]
            assert third["output"][0]["content"] == second["output"][0]["content"]

    scene(told, ledger=tmp_path / "ledger.db", store_responses_s=3600.0)
