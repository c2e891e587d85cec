"""The model's thought: what a request asks of it, and the parser that tells it from the answer.

Thread: loop, or wherever a long body is parsed.
"""

import msgspec

from core.answer_parts import AnswerParser, HarmonyParser, Part, ThoughtParser, ToolCallParser
from core.thoughts import ThoughtStart
from core.tool_detection import ThoughtStyle
from core.tool_formats import FORMATS, HARMONY, THOUGHTS
from core.types import FinishReason
from server.api.tools import ToolWishes


class ThoughtWishes(msgspec.Struct, frozen=True, kw_only=True):
    """
    Args:
        start: what the rendered prompt's end says.
        is_shown: the answer has the thought, apart from its content.
    """

    style: ThoughtStyle
    start: ThoughtStart = ThoughtStart.FREE
    is_shown: bool = True


def thought_wishes(style: ThoughtStyle | None) -> ThoughtWishes | None:
    """What a request says of the model's thought; None: the model has none."""
    return None if style is None else ThoughtWishes(style=style)


def parts_of(parser: AnswerParser, text: str, reason: FinishReason | None) -> list[Part]:
    """What more of an answer's text says, all of it where the answer has ended for a reason."""
    return parser.feed(text) + ([] if reason is None else parser.close(is_cut=reason is FinishReason.LENGTH))


def answer_parser(thought: ThoughtWishes | None, tools: ToolWishes | None) -> AnswerParser | None:
    """Of one choice; None: its text is the answer."""
    if thought is not None and thought.start is ThoughtStart.CLOSED:
        thought = None
    if thought is None and tools is None:
        return None
    is_shown = thought is None or thought.is_shown
    if HARMONY in (thought and thought.style.name, tools and tools.style.format):
        return AnswerParser(None, HarmonyParser(), is_shown)
    thoughts, calls = None, None
    if thought is not None:
        thoughts = ThoughtParser(THOUGHTS[thought.style.name], thought.start is ThoughtStart.OPEN)
    if tools is not None:
        calls = ToolCallParser(FORMATS[tools.style.format], tools.schemas, tools.is_required)
    return AnswerParser(thoughts, calls, is_shown)
