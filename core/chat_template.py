"""Renders chat messages to a prompt by the model's chat template, as transformers does, with bounded work.

Templates come with the model, never with a request; but requests provide their input, and a model may not be trusted.
So templates run in jinja2's immutable sandbox, which keeps them from Python's internals, and on a budget, which keeps
them from looping or growing without end. Each turn of a loop or macro, each literal list and each `~` of a template is
instrumented before it is compiled, and calls, filters and operators are intercepted. What could grow by a product (`*`,
replace, join, format, indent) is measured beforehand; what grows by a sum is counted afterwards. So time and memory
exceed the budget by a constant factor at most; it is not a clock. The same hooks keep the marks of strings
(core/marked_text.py). No I/O; time is an argument.
Thread: loop, or the one that rendering is offloaded to: renders may run side by side.
"""

import json
import re
from collections.abc import Callable, ItemsView, Iterator, KeysView, Mapping, Sequence, ValuesView
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import datetime
from functools import partial, wraps
from typing import Any

from jinja2 import Template, TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from core.errors import ContextLengthExceeded, InvalidRequest
from core.marked_text import MarkedText, Origin, joined, json_texts, marked, tracked, unmarked, written

# Texts have some 4 characters a token, seldom 8: more than this cannot fit the context.
MAX_OUTPUT_CHARS_PER_TOKEN = 16
MIN_OUTPUT_CHARS = 65_536  # for tiny contexts, where an error with the number of tokens is better
MAX_MADE_PER_OUTPUT = 8  # characters of all strings made on the way, per character of the largest output
MAX_OPERATIONS = 250_000  # turns, calls, filters: under a second of Python; 1,000 messages take some 16,000
_RESERVED = frozenset({"messages", "tools", "documents", "add_generation_prompt", "strftime_now"})
_MODEL_ROLES = frozenset({"assistant", "system", "developer"})
_REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")  # the first is what templates read

MAX_INT_BITS = 4096
MAX_WIDTH = 10_000  # a number given to a method of strings, or to a filter that pads
MAX_INDENT = 64  # characters put before each of many lines
_ITEMS_PER_OPERATION = 4  # of lists and dicts
# In a format: a width or precision over 9,999, or one from an argument
_LONG_WIDTH = {
    "%": re.compile(r"%(?:\([^)]*\))?[-+ #0]*(?:\*|[0-9]{5}|[0-9]*\.(?:\*|[0-9]{5}))"),
    "{": re.compile(r"\{[^{}]*:[^{}]*(?:[0-9]{5}|\{)"),
}
# They grow, and serve no prompt
_REFUSED_METHODS = frozenset({"encode", "expandtabs", "maketrans", "to_bytes", "translate"})
_INDENTING_FILTERS = frozenset({"indent", "tojson", "wordwrap"})
_PADDING_FILTERS = frozenset({"batch", "center", "round", "slice"})
# Filters that write out the whole of a list or dict
_WRITING_FILTERS = frozenset({"join", "pprint", "string", "tojson", "urlencode", "xmlattr", "safe", "e", "escape"})
# Filters that pass on what they are given, or call one method of it. The results of others may have lost marks
_FAITHFUL_FILTERS = frozenset(
    {"attr", "d", "default", "first", "join", "last", "lower", "max", "min", "random", "replace", "reverse", "string"}
    | {"tojson", "trim", "upper"}
)
_CONTAINERS = (list, tuple, set, frozenset, KeysView, ValuesView, ItemsView)

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
        self.marks_content = marks_content
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
        documents: Sequence[Mapping[str, Any]] | None = None,
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
            documents: to answer from, as the template takes them: often {"title": "...", "text": "..."} each.
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
            "documents": None if documents is None else self._marked(list(documents)),
            "add_generation_prompt": add_generation_prompt,
            "strftime_now": now.strftime,
        }
        return self._run(template, variables, param)

    def _marked(self, value: Any, origin: Origin = Origin.USER) -> Any:
        return marked(value, origin) if self.marks_content else value

    def _marked_message(self, message: dict[str, Any]) -> dict[str, Any]:
        """Mark each field but the role, which the template compares with its own words."""
        origin = Origin.MODEL if message.get("role") in _MODEL_ROLES else Origin.USER
        origins = {"tool_calls": max(origin, Origin.CALL)}
        return {
            name: value if name == "role" else self._marked(value, origins.get(name, origin))
            for name, value in message.items()
        }

    def user_turn(self) -> str:
        """A user's message as the template writes it; "" if it refuses one alone."""
        try:
            return self.render([{"role": "user", "content": "x"}], now=datetime.min, add_generation_prompt=False)
        except InvalidRequest:
            return ""

    @property
    def shows_documents(self) -> bool:
        return any("documents" in source for source in self.sources.values())

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
            raise ContextLengthExceeded(self._context_limit, but, param, "Shorten the messages.") from error
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

    def _compile(self, environment: "BudgetedEnvironment", name: str, source: str) -> Template:
        try:
            with use_budget(self._new_budget()):  # constants are folded while compiling
                return environment.from_string(source)
        except TemplateError as error:
            line = getattr(error, "lineno", None)
            raise ChatTemplateSyntaxError(f"chat template {name!r}, line {line}: {error}") from error

    def _new_budget(self) -> "Budget":
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


def _new_environment() -> "BudgetedEnvironment":
    """transformers' environment (utils/chat_template_utils.py): its white space rules, tojson and raise_exception."""
    environment = BudgetedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols])
    environment.replace_filter("tojson", _to_json)
    environment.globals["raise_exception"] = _raise_exception
    return environment


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """jinja2's own escapes HTML; models were trained on plain JSON."""
    text = json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    for cut in json_texts(value):
        text = text.replace(json.dumps(cut, ensure_ascii=ensure_ascii), str.__str__(cut))
    return text


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _prepared(message: Mapping[str, Any]) -> dict[str, Any]:
    """As transformers passes messages to templates: without Nones, reasoning under the names that templates read."""
    fields = {key: value for key, value in message.items() if value is not None}
    reasoning = next((fields[name] for name in _REASONING_FIELDS if name in fields), None)
    if reasoning is None:
        return fields
    return {"thinking": reasoning, **fields, "reasoning_content": reasoning}


class BudgetExceeded(SecurityError):
    """A template does more than any honest one."""


class TooMuchText(BudgetExceeded):
    """More text than the budget has: usually more than fits the model's context."""

    def __init__(self) -> None:
        super().__init__("it builds too much text")


class Budget:
    """What is left to one render.

    Args:
        num_operations: turns of loops, calls, filters, and items looked at.
        num_chars: characters of all strings made on the way.
    """

    __slots__ = ("num_chars", "num_operations")

    def __init__(self, num_operations: int, num_chars: int) -> None:
        self.num_operations = num_operations
        self.num_chars = num_chars

    def spend(self, num_operations: int, num_chars: int = 0) -> None:
        self.num_operations -= num_operations
        self.num_chars -= num_chars
        if self.num_operations < 0:
            raise BudgetExceeded("it takes too many operations (a loop without end, or far too many messages)")
        if self.num_chars < 0:
            raise TooMuchText

    def check(self, num_chars: int) -> None:
        """Refuse to make so many characters, before they are made."""
        if num_chars > self.num_chars:
            raise TooMuchText

    def written_chars(self, value: Any) -> int:
        """About as many as str() or JSON of the value has; looking at items costs operations."""
        num_chars = 0
        for item in self._walk(value):
            num_chars += len(item) if isinstance(item, str) else 8
            self.check(num_chars)
        return num_chars

    def spend_made(self, value: Any) -> None:
        """Count a value just made: a string by its length, a list or dict by all that is in it, as a tree."""
        self.spend(1, len(value) if isinstance(value, str | bytes) else 0)
        if isinstance(value, range):
            self.spend(len(value) // _ITEMS_PER_OPERATION)
        elif isinstance(value, (dict, *_CONTAINERS)):
            for _ in self._walk(value):
                pass

    def _walk(self, value: Any) -> Iterator[Any]:
        pending = [value]
        num_seen = 0
        while pending:
            item = pending.pop()
            yield item
            if isinstance(item, dict):
                pending.extend(item.keys())
                pending.extend(item.values())
            elif isinstance(item, _CONTAINERS):
                pending.extend(item)
            num_seen += 1
            if num_seen % _ITEMS_PER_OPERATION == 0:
                self.spend(1)


_budget: ContextVar[Budget] = ContextVar("template budget")


@contextmanager
def use_budget(budget: Budget) -> Iterator[None]:
    """Count everything that templates do in this context against the budget."""
    token = _budget.set(budget)
    try:
        yield
    finally:
        _budget.reset(token)


class BudgetedEnvironment(ImmutableSandboxedEnvironment):
    """To be used within `use_budget` only, compiling included."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, **options: Any) -> None:
        super().__init__(finalize=_spend_output, **options)
        # The instrumented tree calls these by name
        self.spend_turn, self.spend_value, self.concatenate = _spend_turn, _spend_value, _concatenate
        self.concat = joined  # type: ignore[method-assign]  # jinja2's own is an attribute
        self.globals["namespace"] = _Namespace
        self.globals["dict"] = _Dict()
        self.globals.pop("lipsum")
        for name, function in list(self.filters.items()):
            self.replace_filter(name, function)

    def replace_filter(self, name: str, function: Callable[..., Any]) -> None:
        self.filters[name] = _budgeted_filter(name, function)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree: nodes.Template = _Instrument().visit(super()._parse(source, name, filename))
        return tree.set_environment(self)  # type: ignore[return-value]  # it returns its own self

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if isinstance(obj, str | bytes | int) and attr in _REFUSED_METHODS:
            return False
        return super().is_safe_attribute(obj, attr, value)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        if __obj is _spend_turn or __obj is _spend_value or __obj is _concatenate:
            return __obj(*args)
        owner, name = getattr(__obj, "__self__", None), getattr(__obj, "__name__", "")
        again = None
        if isinstance(owner, str):
            args = _check_method(owner, name, args)

            def again(owner: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
                return getattr(owner, name)(*args, **kwargs)

        result = super().call(__context, __obj, *args, **kwargs)
        if not isinstance(__obj, Macro):  # a macro's text is the template's own, and joined with marks
            result = tracked(result, (owner, args, kwargs), again)
        return _spend_value(result)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None
        template: str = value.__self__

        def formatted(*args: Any, **kwargs: Any) -> str:
            _check_format(template, "{", [args, kwargs])
            again = None if isinstance(template, MarkedText) else lambda _, args, kwargs: wrapped(*args, **kwargs)
            formatted: str = tracked(wrapped(*args, **kwargs), (template, args, kwargs), again)
            return formatted

        return formatted

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "*":
            _check_product(left, right)
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            _check_int(left.bit_length() * abs(right))
        elif operator == "%" and isinstance(left, str):
            _check_format(left, "%", right)
        operation = partial(super().call_binop, context, operator)
        return _spend_value(tracked(operation(left, right), (left, right), operation))


class _Namespace(Namespace):
    """As transformers': without underscored names. Its repr is constant, so that namespaces may hold each other."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # `self` may be a keyword
        self, *rest = args
        attributes = dict(*rest, **kwargs)
        for name in attributes:
            _check_name(name)
        Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)

    def __repr__(self) -> str:
        return "<Namespace>"


class _Dict:
    """`dict` as templates may call it, without the type's own attributes."""

    fromkeys = dict.fromkeys

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)


class _Instrument(NodeTransformer):
    """Inserts the counting into a template's tree."""

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802
        if node.test is not None:
            node.test = nodes.And(_call("spend_turn", node, nodes.Const(0)), node.test, lineno=node.lineno)
        return self.visit_Macro(node)

    def visit_Macro(self, node: nodes.For | nodes.Macro) -> nodes.Node:  # noqa: N802
        """Count one turn of its body, with the characters that it writes itself; inner bodies count their own."""
        num_chars = sum(len(data.data) for part in node.body for data in _template_data(part))
        self.generic_visit(node)
        turn = _call("spend_turn", node, nodes.Const(num_chars))
        node.body.insert(0, nodes.ExprStmt(turn, lineno=node.lineno))
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return _call("concatenate", node, *node.nodes)

    def visit_List(self, node: nodes.List) -> nodes.Node:  # noqa: N802
        return self._spend(node, node.items)

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:  # noqa: N802
        return self._spend(node, [pair.value for pair in node.items])

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:  # noqa: N802
        return self._spend(node, node.items) if node.ctx == "load" else node

    def _spend(self, node: nodes.Expr, items: list[nodes.Expr]) -> nodes.Node:
        if all(isinstance(item, nodes.Const) for item in items):
            return node
        self.generic_visit(node)
        return _call("spend_value", node, node)


def _template_data(node: nodes.Node) -> Iterator[nodes.TemplateData]:
    if isinstance(node, nodes.TemplateData):
        yield node
    elif not isinstance(node, nodes.For | nodes.Macro):
        for child in node.iter_child_nodes():
            yield from _template_data(child)


def _call(name: str, at: nodes.Node, *arguments: nodes.Expr) -> nodes.Call:
    callee = nodes.EnvironmentAttribute(name)
    return nodes.Call(callee, list(arguments), [], None, None, lineno=at.lineno)


def _spend_turn(num_chars: int) -> bool:
    _budget.get().spend(1, num_chars)
    return True


def _spend_value(value: Any) -> Any:
    _budget.get().spend_made(value)
    return value


def _spend_output(value: Any) -> Any:
    """jinja2's finalize, called for every `{{ value }}`."""
    budget = _budget.get()
    budget.spend(1, len(value) if isinstance(value, str) else budget.written_chars(value))
    return written(value)


def _concatenate(*values: Any) -> str:
    """`a ~ b`: as jinja2's own, in an environment without autoescape."""
    budget = _budget.get()
    budget.spend(1, sum(map(budget.written_chars, values)))
    return joined(map(written, values))


def _budgeted_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    subject_at = 1 if hasattr(function, "jinja_pass_arg") else 0

    @wraps(function)
    def filtered(*args: Any, **kwargs: Any) -> Any:
        leading, (subject, *rest) = args[:subject_at], args[subject_at:]
        budget = _budget.get()
        if name == "join" and not isinstance(subject, str | Mapping):
            subject = list(subject)
        if name in _WRITING_FILTERS:
            budget.check(budget.written_chars(subject))
        _check_filter(name, subject, rest, kwargs)

        def operation(subject: Any, rest: list[Any], kwargs: dict[str, Any]) -> Any:
            return function(*leading, subject, *rest, **kwargs)

        result = operation(subject, rest, kwargs)
        if name not in _FAITHFUL_FILTERS:
            result = unmarked(result)
        return _spend_value(tracked(result, (subject, rest, kwargs), operation))

    return filtered


def _check_filter(name: str, subject: Any, args: list[Any], kwargs: dict[str, Any]) -> None:
    options = [*args, *kwargs.values()]
    if name == "join":
        _check_join(subject, [option for option in options if isinstance(option, str)])
    elif name == "replace":
        _check_replace(str(subject), **{**dict(zip(("old", "new"), args, strict=False)), **kwargs})
    elif name == "format":
        _check_format(str(subject), "%", [args, kwargs])
    elif name in _INDENTING_FILTERS:
        _check_widths([option for option in options if name != "wordwrap"], MAX_INDENT)
        if _budget.get().written_chars([option for option in options if not isinstance(option, int)]) > MAX_INDENT:
            raise BudgetExceeded(f"it puts more than {MAX_INDENT} characters around each item or line")
    elif name in _PADDING_FILTERS:
        _check_widths(options, MAX_WIDTH)


def _check_method(owner: str, name: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Check a string's method. Returns its arguments, a join's items as a list: measuring uses a generator up."""
    if name == "join" and args:
        items = list(args[0])
        _check_join(items, [owner])
        return (items, *args[1:])
    if name == "replace":
        _check_replace(owner, *args)
    _check_widths(args, MAX_WIDTH)
    return args


def _check_join(items: Any, separators: list[str]) -> None:
    budget = _budget.get()
    budget.check(budget.written_chars(items) + len(items) * max(map(len, separators), default=0))


def _check_replace(text: str, old: Any = "", new: Any = "", count: Any = None) -> None:
    old, new = str(old), str(new)
    _budget.get().check(len(text) + text.count(old) * max(0, len(new) - len(old)))


def _check_format(template: str, mark: str, arguments: Any) -> None:
    if _LONG_WIDTH[mark].search(template):
        raise BudgetExceeded("it formats with a width that is too large")
    budget = _budget.get()
    budget.check(len(template) + template.count(mark) * budget.written_chars(arguments))


def _check_widths(values: Any, limit: int) -> None:
    for value in values:
        if isinstance(value, int | float) and abs(value) > limit:
            raise BudgetExceeded(f"it uses the number {value:.17g}, over {limit}, as a width or a count")


def _check_product(left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int):
        _check_int(left.bit_length() + right.bit_length())
        return
    for sequence, times in ((left, right), (right, left)):
        if isinstance(sequence, str | bytes | list | tuple) and isinstance(times, int):
            _budget.get().check(len(sequence) * times)


def _check_int(num_bits: int) -> None:
    if num_bits > MAX_INT_BITS:
        raise BudgetExceeded(f"it computes a number of more than {MAX_INT_BITS} bits")


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"namespaces may not have the attribute {name!r}")
