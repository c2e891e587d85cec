"""Renders chat messages to a prompt by the model's chat template, as transformers does, with bounded work.

Templates come with the model, never with a request; but requests provide their input, and a model may not be trusted.
So they run in jinja2's immutable sandbox, on a budget (core/template_budget.py). No I/O; time is an argument.
Thread: loop, or the one that rendering is offloaded to: renders may run side by side.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Macro

from core.errors import InvalidRequest, context_overflow
from core.marked_text import Origin, joined, marked
from core.template_budget import Budget, BudgetedEnvironment, BudgetExceeded, TooMuchText, use_budget

# Texts have some 4 characters a token, seldom 8: more than this cannot fit the context.
MAX_OUTPUT_CHARS_PER_TOKEN = 16
MIN_OUTPUT_CHARS = 65_536  # for tiny contexts, where an error with the number of tokens is better
MAX_MADE_PER_OUTPUT = 8  # characters of all strings made on the way, per character of the largest output
MAX_OPERATIONS = 250_000  # turns, calls, filters: under a second of Python; 1,000 messages take some 16,000
_RESERVED = frozenset({"messages", "tools", "documents", "add_generation_prompt", "strftime_now"})
_MODEL_ROLES = frozenset({"assistant", "system", "developer"})
_REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")  # the first is what templates read

NO_TEMPLATE = (
    "This model has no chat template. Send a prompt to /v1/completions, or start the server with --chat-template FILE."
)


class ChatTemplateSyntaxError(Exception):
    """The template is broken. The message says where."""


def max_text_chars(context_limit: int) -> int:
    """Characters of the longest text that may fit a context: longer ones are refused before any work on them."""
    return max(MIN_OUTPUT_CHARS, MAX_OUTPUT_CHARS_PER_TOKEN * context_limit)


class ChatTemplate:
    """A model's chat templates, compiled.

    Args:
        sources: by name: "default", and perhaps "tool_use" for requests with tools. Empty: the model has none.
        special_tokens: variables of templates, e.g. {"bos_token": "<s>"}.
        context_limit: tokens of the model's context; it bounds the text.
        marks_content: mark the requests' text (core/marked_text.py), so that none of it becomes a control token.

    Raises:
        ChatTemplateSyntaxError
    """

    def __init__(
        self,
        sources: Mapping[str, str],
        special_tokens: Mapping[str, str],
        context_limit: int,
        marks_content: bool = True,
    ) -> None:
        self.sources = dict(sources)
        self._marks_content = marks_content
        self._special_tokens = dict(special_tokens)
        self._context_limit = context_limit
        self._max_output_chars = max_text_chars(context_limit)
        environment = _new_environment()
        self._templates = {name: self._compile(environment, name, text) for name, text in sources.items()}

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        now: datetime,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        template_kwargs: Mapping[str, Any] | None = None,
        param: str = "messages",
    ) -> str:
        """The prompt of a chat, special tokens written out: for Tokenizer.encode_chat.

        Args:
            messages: at least one; role, content and other fields that the template reads, as JSON values. As in
                transformers, a field that is None counts as absent, also content: an empty turn has the content "".
            now: for the template's strftime_now, in the time zone to show.
            tools: OpenAI's form, {"type": "function", "function": {...}}.
            template_kwargs: more variables, e.g. {"enable_thinking": False}, which override special tokens.
            param: the request's field with the messages, for errors.

        Raises:
            InvalidRequest: there is no template; it refuses the messages (in its own words), fails on them, or exceeds
                its budget; template_kwargs name a reserved variable.
        """
        template = self._choose(param, has_tools=tools is not None)
        if not messages:
            raise InvalidRequest(f"{param} is empty. Send at least one message.", param)
        extra = dict(template_kwargs or {})
        if taken := sorted(_RESERVED & extra.keys()):
            raise InvalidRequest(f"chat_template_kwargs may not set {', '.join(taken)}.", "chat_template_kwargs")
        variables = {
            **self._special_tokens,
            **self._marked(extra),
            "messages": [self._marked_message(_prepared(message)) for message in messages],
            "tools": None if tools is None else self._marked(list(tools)),
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
            "strftime_now": now.strftime,
        }
        return self._run(template, variables, param)

    def _marked(self, value: Any, origin: Origin = Origin.USER) -> Any:
        return marked(value, origin) if self._marks_content else value

    def _marked_message(self, message: dict[str, Any]) -> dict[str, Any]:
        """Mark each field but the role, which the template compares with its own words."""
        origin = Origin.MODEL if message.get("role") in _MODEL_ROLES else Origin.USER
        return {name: value if name == "role" else self._marked(value, origin) for name, value in message.items()}

    def user_turn(self) -> str:
        """A user's message as the template writes it; "" if it refuses one alone."""
        try:
            return self.render([{"role": "user", "content": "x"}], now=datetime.min, add_generation_prompt=False)
        except InvalidRequest:
            return ""

    def _choose(self, param: str, has_tools: bool) -> Template:
        if has_tools and "tool_use" in self._templates:
            return self._templates["tool_use"]
        if "default" in self._templates:
            return self._templates["default"]
        raise InvalidRequest(NO_TEMPLATE, param, "no_chat_template")

    def _run(self, template: Template, variables: Mapping[str, Any], param: str) -> str:
        """Whatever the template raises becomes an InvalidRequest."""
        try:
            with use_budget(self._new_budget()):
                return self._join(template, variables)
        except TooMuchText as error:
            but = f"in its chat template the messages come to more than {self._max_output_chars} characters"
            raise InvalidRequest(
                context_overflow(self._context_limit, but, "Shorten the messages."), param, "context_length_exceeded"
            ) from error
        except BudgetExceeded as error:
            raise InvalidRequest(f"The model's chat template exceeds its limits: {error}.", param) from error
        except TemplateError as error:
            raise InvalidRequest(f"The model's chat template refuses this: {error}", param) from error
        except Exception as error:  # a template's code may raise anything
            cause = f"{type(error).__name__}: {error}"
            raise InvalidRequest(f"The model's chat template fails on these messages: {cause}", param) from error

    def _join(self, template: Template, variables: Mapping[str, Any]) -> str:
        pieces: list[str] = []
        num_chars = 0
        for piece in template.generate(variables):
            pieces.append(piece)
            num_chars += len(piece)
            if num_chars > self._max_output_chars:
                raise TooMuchText
        return joined(pieces)

    def _compile(self, environment: BudgetedEnvironment, name: str, source: str) -> Template:
        try:
            with use_budget(self._new_budget()):  # constants are folded while compiling
                return environment.from_string(source)
        except TemplateError as error:
            line = getattr(error, "lineno", None)
            raise ChatTemplateSyntaxError(f"chat template {name!r}, line {line}: {error}") from error

    def _new_budget(self) -> Budget:
        return Budget(MAX_OPERATIONS, MAX_MADE_PER_OUTPUT * self._max_output_chars)


class _GenerationBlock(Extension):
    """{% generation %} marks the assistant's words for training; here they are only rendered."""

    tags = {"generation"}  # noqa: RUF012 (jinja2's own form)

    def parse(self, parser: Parser) -> nodes.CallBlock:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_render_body"), [], [], body, lineno=line)

    def _render_body(self, caller: Macro) -> str:
        text: str = caller()
        return text


def _new_environment() -> BudgetedEnvironment:
    """transformers' environment (utils/chat_template_utils.py): its white space rules, tojson and raise_exception."""
    environment = BudgetedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols])
    environment.replace_filter("tojson", _to_json)
    environment.globals["raise_exception"] = _raise_exception
    return environment


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """jinja2's own escapes HTML; models were trained on plain JSON."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _prepared(message: Mapping[str, Any]) -> dict[str, Any]:
    """As transformers passes messages to templates: without Nones, reasoning under the names that templates read."""
    fields = {key: value for key, value in message.items() if value is not None}
    reasoning = next((fields[name] for name in _REASONING_FIELDS if name in fields), None)
    if reasoning is None:
        return fields
    return {"thinking": reasoning, **fields, "reasoning_content": reasoning}
