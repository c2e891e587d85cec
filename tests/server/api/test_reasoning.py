"""What requests ask of a model's thought, in the words of several vendors."""

import json
from typing import Any

import msgspec
import pytest

from core.errors import InvalidRequest
from core.tool_detection import ThoughtStyle
from server.api import chat, responses
from server.api.fields import ChatPrompt, GenerationCall
from server.api.replies import Surface
from tests.server.api.wire import DEFAULTS

QWEN3 = ThoughtStyle("think", "enable_thinking", False)
R1 = ThoughtStyle("think", None, False)
GPT_OSS = ThoughtStyle("harmony", None, True)
SEED = ThoughtStyle("seed", None, True)


def parsed(style: ThoughtStyle | None, surface: Surface = chat.SURFACE, **fields: Any) -> GenerationCall:
    prompt: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}]}
    body = json.dumps((prompt if surface is chat.SURFACE else {"input": "Hi"}) | fields).encode()
    defaults = msgspec.structs.replace(DEFAULTS, thought_style=style)
    return surface.parse(body, lambda model: ("tiny", defaults))


def variables_of(call: GenerationCall) -> dict[str, Any] | None:
    (prompt,) = call.prompts
    assert isinstance(prompt, ChatPrompt)
    return prompt.template_kwargs


@pytest.mark.parametrize("surface", [chat.SURFACE, responses.SURFACE])
@pytest.mark.parametrize(
    ("style", "fields", "variables", "most_tokens"),
    [
        (QWEN3, {}, None, None),
        (QWEN3, {"reasoning_effort": "none"}, {"enable_thinking": False}, None),
        (QWEN3, {"reasoning": {"effort": "none", "summary": "auto"}}, {"enable_thinking": False}, None),
        (QWEN3, {"reasoning_effort": "low"}, {"enable_thinking": True}, None),
        (QWEN3, {"thinking": {"type": "disabled"}}, {"enable_thinking": False}, None),
        (QWEN3, {"thinking": {"type": "enabled", "budget_tokens": 9}}, {"enable_thinking": True}, 9),
        (QWEN3, {"enable_thinking": False}, {"enable_thinking": False}, None),
        (QWEN3, {"reasoning": {"enabled": False}}, {"enable_thinking": False}, None),
        (QWEN3, {"reasoning": {"max_tokens": 0}}, None, 0),
        (QWEN3, {"thinking_token_budget": 5, "reasoning": {"max_tokens": 5}}, None, 5),
        (QWEN3, {"thinking_budget": 5}, None, 5),
        (QWEN3, {"reasoning_budget": -1}, None, None),
        (
            QWEN3,
            {"reasoning_effort": "low", "chat_template_kwargs": {"enable_thinking": False, "x": 1}},
            {"enable_thinking": False, "x": 1},
            None,
        ),
        (R1, {"reasoning_effort": "high"}, None, None),
        (R1, {"reasoning_effort": "none"}, None, 0),
        (GPT_OSS, {"reasoning_effort": "minimal"}, {"reasoning_effort": "low"}, None),
        (GPT_OSS, {"reasoning": {"effort": "xhigh"}}, {"reasoning_effort": "high"}, None),
        (GPT_OSS, {"reasoning_effort": "max"}, {"reasoning_effort": "high"}, None),
        (SEED, {"reasoning": {"effort": "max"}}, {"reasoning_effort": "max"}, None),
        (GPT_OSS, {"reasoning_effort": "none"}, {"reasoning_effort": "low"}, 0),
        (SEED, {"reasoning_effort": "medium"}, {"reasoning_effort": "medium"}, None),
        (None, {"reasoning_effort": "high", "thinking_token_budget": 5}, None, None),
        (None, {"chat_template_kwargs": {"x": 1}}, {"x": 1}, None),
    ],
)
def test_the_words_of_vendors_become_the_templates(
    surface: Surface,
    style: ThoughtStyle | None,
    fields: dict[str, Any],
    variables: dict[str, Any] | None,
    most_tokens: int | None,
) -> None:
    call = parsed(style, surface, **fields)
    assert variables_of(call) == variables
    assert (None if call.thought is None else call.thought.most_tokens) == most_tokens


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"reasoning_effort": "extreme"}, "reasoning_effort"),
        ({"reasoning": {"effort": "extreme"}}, "reasoning.effort"),
        ({"reasoning_effort": "low", "reasoning": {"effort": "high"}}, "reasoning.effort"),
        ({"reasoning_effort": "none", "enable_thinking": True}, "reasoning_effort"),
        ({"thinking": {"type": "perhaps"}}, "thinking.type"),
        ({"thinking_token_budget": -1}, "thinking_token_budget"),
        ({"thinking_token_budget": 1, "reasoning": {"max_tokens": 2}}, "reasoning.max_tokens"),
        ({"include_reasoning": False, "logprobs": True}, "logprobs"),
        ({"include_reasoning": False, "return_token_ids": True}, "return_token_ids"),
        ({"reasoning_format": "none"}, "reasoning_format"),
    ],
)
def test_contradictions_and_unknown_words_are_refused(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parsed(QWEN3, **fields)
    assert caught.value.param == param
