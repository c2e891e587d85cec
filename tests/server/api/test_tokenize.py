import json
from typing import Any

import pytest

from core.errors import InvalidRequest
from core.tool_detection import ToolStyle
from server.api.fields import ChatPrompt, TextPrompt
from server.api.tokenize import detokenize_reply, parse_detokenize, parse_tokenize, tokenize_reply


def body(**fields: Any) -> bytes:
    return json.dumps(fields).encode()


def test_a_prompt_is_text_or_goes_through_the_template() -> None:
    wire, prompt, unknown = parse_tokenize(body(prompt="Hi", model="m", more=1))
    assert (prompt, wire.model, unknown) == (TextPrompt("Hi"), "m", ("more",))
    wire, prompt, _ = parse_tokenize(body(messages=[{"role": "user", "content": "Hi"}], return_token_strs=True))
    assert (prompt, wire.model) == (ChatPrompt(({"role": "user", "content": "Hi"},)), None)
    assert wire.return_token_strs


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "prompt"),
        ({"prompt": "a", "messages": []}, "prompt"),
        ({"messages": []}, "messages"),
        ({"prompt": 3}, "prompt"),
        ({"messages": [{"role": "user", "content": "a"}], "add_special_tokens": True}, "add_special_tokens"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ],
)
def test_what_cannot_be_tokenized_is_refused(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_tokenize(body(**fields))
    assert caught.value.param == param


def test_the_reply_counts() -> None:
    assert json.loads(tokenize_reply([5, 6], 2048, ["a", "b"])) == {
        "count": 2,
        "max_model_len": 2048,
        "tokens": [5, 6],
        "token_strs": ["a", "b"],
    }
    assert json.loads(tokenize_reply([], 2048, None)) == {
        "count": 0,
        "max_model_len": 2048,
        "tokens": [],
        "token_strs": None,
    }


def test_ids_come_back_as_text() -> None:
    wire, unknown = parse_detokenize(body(tokens=[0, 9], model="m", extra=True))
    assert (wire.tokens, wire.model, unknown) == ([0, 9], "m", ("extra",))
    assert json.loads(detokenize_reply("a\u2028\ud800")) == {"prompt": "a\u2028\ufffd"}


def test_tools_are_part_of_the_prompt() -> None:
    tool = {"type": "function", "function": {"name": "look"}}
    asked = body(messages=[{"role": "user", "content": "Hi"}], tools=[tool])
    _, prompt, _ = parse_tokenize(asked, ToolStyle("hermes", has_text_arguments=False, most_calls=2))
    assert isinstance(prompt, ChatPrompt)
    assert [one["function"]["name"] for one in prompt.tools] == ["look"]
    with pytest.raises(InvalidRequest, match="does not support tools"):
        parse_tokenize(asked)
