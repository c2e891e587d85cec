"""The model's thought: what a request asks of it, and the parser that tells it from the answer.

Thread: loop, or wherever a long body is parsed.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Protocol, TypeVar

import msgspec
from msgspec import Meta

from core.answer_parts import AnswerParser, HarmonyParser, Part, Text, ThoughtParser, ToolCallParser
from core.constraints import GrammarSpec
from core.errors import InvalidRequest
from core.thoughts import ThoughtStart
from core.tool_detection import ThoughtStyle
from core.tool_formats import FORMATS, HARMONY, THOUGHTS
from core.types import FinishReason
from server.api.tools import ToolWishes

T = TypeVar("T")


class ThoughtWishes(msgspec.Struct, frozen=True, kw_only=True):
    """
    Args:
        start: what the rendered prompt's end says.
        is_shown: the answer has the thought, apart from its content.
        most_tokens: of it, between its markers; None: any number.
    """

    style: ThoughtStyle
    start: ThoughtStart = ThoughtStart.FREE
    is_shown: bool = True
    most_tokens: int | None = None


EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
_HARMONY_EFFORTS = {"none": "low", "minimal": "low", "xhigh": "high", "max": "high"}  # it was trained on three
Budget = Annotated[int, Meta(ge=0, le=2**63 - 1)]


class ReasoningOptions(msgspec.Struct, frozen=True, kw_only=True):
    """`reasoning`, as OpenAI and OpenRouter have it. Summaries are not made."""

    effort: str | None = None
    max_tokens: Budget | None = None
    enabled: bool | None = None
    exclude: bool | None = None
    summary: str | None = None


class ThinkingOptions(msgspec.Struct, frozen=True, kw_only=True):
    """`thinking`, as Anthropic, GLM, DeepSeek and Kimi have it."""

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: Budget | None = None
    display: str | None = None

    @property
    def is_on(self) -> bool | None:
        """None: as the model has it."""
        return {"enabled": True, "disabled": False}.get(self.type)


class ThoughtFields(Protocol):
    """What the bodies of chat and responses have."""

    @property
    def reasoning_effort(self) -> str | None: ...
    @property
    def reasoning(self) -> ReasoningOptions | None: ...
    @property
    def thinking(self) -> ThinkingOptions | None: ...
    @property
    def enable_thinking(self) -> bool | None: ...
    @property
    def thinking_token_budget(self) -> int | None: ...
    @property
    def include_reasoning(self) -> bool | None: ...
    @property
    def chat_template_kwargs(self) -> dict[str, Any] | None: ...


def thought_wishes(
    fields: ThoughtFields, style: ThoughtStyle | None
) -> tuple[ThoughtWishes | None, dict[str, Any] | None]:
    """What the fields ask of the model's thought.

    Raises:
        InvalidRequest: an unknown effort, or two fields that contradict each other.

    Returns:
        None: the model has none; the chat template's variables.
    """
    reasoning, thinking = fields.reasoning or ReasoningOptions(), fields.thinking
    efforts = {"reasoning_effort": fields.reasoning_effort, "reasoning.effort": reasoning.effort}
    effort = _only(efforts)
    param = "reasoning_effort" if fields.reasoning_effort else "reasoning.effort"
    is_on = _only(
        {
            "enable_thinking": fields.enable_thinking,
            "thinking.type": None if thinking is None else thinking.is_on,
            "reasoning.enabled": reasoning.enabled,
            param: None if effort is None else effort != "none",
        }
    )
    most_tokens = _only(
        {
            "thinking_token_budget": fields.thinking_token_budget,
            "thinking.budget_tokens": None if thinking is None else thinking.budget_tokens,
            "reasoning.max_tokens": reasoning.max_tokens,
        }
    )
    is_hidden = fields.include_reasoning is False or reasoning.exclude is True
    return wishes_of(style, fields.chat_template_kwargs, is_on, effort, param, most_tokens, not is_hidden)


def wishes_of(
    style: ThoughtStyle | None,
    given: dict[str, Any] | None,
    is_on: bool | None = None,
    effort: str | None = None,
    param: str = "reasoning_effort",
    most_tokens: int | None = None,
    is_shown: bool = True,
) -> tuple[ThoughtWishes | None, dict[str, Any] | None]:
    """
    Args:
        given: variables of the template that the request names itself.
        is_on: None: as the template has it.
        param: the field that has the effort.

    Raises, Returns: as thought_wishes.
    """
    if effort is not None and effort not in EFFORTS:
        raise InvalidRequest(f"{param} must be one of {', '.join(EFFORTS)}.", param)
    if style is None:
        return None, given
    variables: dict[str, Any] = {}
    if is_on is not None and style.switch is not None:
        variables[style.switch] = is_on
    elif is_on is False:
        most_tokens = 0  # the template cannot turn it off
    if effort is not None and style.takes_effort and (effort != "none" or style.name == HARMONY):
        variables["reasoning_effort"] = _HARMONY_EFFORTS.get(effort, effort) if style.name == HARMONY else effort
    wishes = ThoughtWishes(style=style, is_shown=is_shown, most_tokens=most_tokens)
    return wishes, variables | (given or {}) or None


def _only(given: Mapping[str, T | None]) -> T | None:
    """The value that fields of one meaning have; None: none of them is given.

    Raises:
        InvalidRequest: two have different ones.
    """
    found = [(name, value) for name, value in given.items() if value is not None]
    for name, value in found[1:]:
        if value != found[0][1]:
            raise InvalidRequest(f"{name} contradicts {found[0][0]}. Send one of them.", name)
    return found[0][1] if found else None


def check_hidden(wishes: ThoughtWishes | None, param: str | None) -> None:
    """
    Args:
        param: the first field that asks for single tokens.

    Raises:
        InvalidRequest: the thought is to be left out, and its tokens are asked for.
    """
    if param is not None and wishes is not None and not wishes.is_shown:
        message = f"{param} requests the reasoning that include_reasoning: false leaves out. Send one of them."
        raise InvalidRequest(message, param)


def parts_of(
    parser: AnswerParser | None, text: str, reason: FinishReason | None, stop: str | int | None = None
) -> list[Part]:
    """What more of an answer's text says, all of it where the answer has ended for a reason.

    Args:
        parser: None: the text is the answer.
        stop: the request's stop string that has cut it, or a stop id that has ended it.
    """
    if parser is None:
        return [Text(text)] if text else []
    is_cut = reason is FinishReason.LENGTH or isinstance(stop, str)
    return parser.feed(text) + ([] if reason is None else parser.close(is_cut))


def answer_parser(
    thought: ThoughtWishes | None, tools: ToolWishes | None, constraint: GrammarSpec | None
) -> AnswerParser | None:
    """Of one choice; None: its text is the answer.

    Args:
        constraint: what holds the answer.
    """
    if thought is not None and thought.start is ThoughtStart.CLOSED:
        thought = None
    if thought is None and tools is None:
        return None
    is_shown, has_text = thought is None or thought.is_shown, tools is None or not tools.is_required
    if HARMONY in (thought and thought.style.name, tools and tools.style.format):
        return AnswerParser(None, HarmonyParser(constraint is not None), is_shown, has_text)
    thoughts, calls = None, None
    if thought is not None:
        thoughts = ThoughtParser(THOUGHTS[thought.style.name], thought.start is ThoughtStart.OPEN)
    if tools is not None:
        calls = ToolCallParser(FORMATS[tools.style.format], tools.schemas, tools.is_required)
    return AnswerParser(thoughts, calls, is_shown, has_text)
