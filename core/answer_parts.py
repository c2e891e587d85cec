"""What an answer's text consists of: the model's reasoning, text for the reader, and tool calls.

Parsers turn text into events as it arrives, however it is cut. They lose no text: what turns out to be no call is text.
No I/O. Thread: loop.
"""

import contextlib
import json
import math
import re
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from core.constraints import json_text, pointed
from core.tool_formats import (
    JsonArguments,
    JsonCall,
    LiteralArguments,
    NamedCall,
    TaggedArguments,
    ThoughtMarkers,
    ToolFormat,
)

Schema = Mapping[str, Any]
Step = Generator[None, None, Any]  # yields where it needs more text
Emit = Callable[[str], object]

WHITESPACE = " \t\r\n"
NAME = re.compile(r"[^\s<>{}()\[\]\"'=,:;|]+")
_ANYTHING = re.compile(r"(?s).+")
_RECIPIENT = re.compile(r" to=([^\s<]+)")
_MAX_NAME_CHARS = 256
_TYPE_NAMES = {
    str: "string",
    int: "integer",
    float: "number",
    bool: "boolean",
    type(None): "null",
    list: "array",
    dict: "object",
}
_JSON_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_JSON_SCALAR = re.compile(r"[^\s,:{}\[\]\"]+")
_LITERAL_SCALAR = re.compile(r"[A-Za-z0-9_.+\-]+")
_IN_JSON_STRING = re.compile(r'[^"\\]+')
_IN_JSON = re.compile(r'[^"{}\[\]]+')
# The same where a mark ends the value: what is no JSON leaves the mark to be found
_IN_STRICT_STRING, _IN_STRICT_JSON = re.compile(r'[^"\\\x00-\x1f]+'), re.compile(r'[^"{}\[\]<]+')
_WORDS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "v": "\v", "a": "\a", "0": "\0", "\n": ""}
_HEX_DIGITS = {"x": 2, "u": 4, "U": 8}


@dataclass(frozen=True, slots=True)
class Text:
    """Part of the answer's text."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Part of the model's thought."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegin:
    """A call has begun.

    Args:
        id: as the model wrote it; None: the format has none.
    """

    index: int
    name: str
    id: str | None = None


@dataclass(frozen=True, slots=True)
class Arguments:
    """More of a call's arguments, which together are JSON text."""

    index: int
    text: str


Part = Text | Reasoning | CallBegin | Arguments


class _Mismatch(Exception):
    """The text is not what the format says."""


class _Cut(Exception):
    """The text ends here."""


class Parser:
    """Turns an answer's text, as it arrives, into events: `_parse` of a subclass says how.

    `_parse` is a generator that yields where it needs more text, so that it makes no difference how the text is cut.
    """

    def __init__(self) -> None:
        self._text = ""  # from `_uncertain_from` on, or from `_at`
        self._at = 0  # consumed before this
        self._uncertain_from: int | None = None  # where what may still turn out to be plain text begins
        self._is_complete = False
        self._is_cut = False
        self._is_in_arguments = False  # where they are cut, what there is of a mark or a bare value is none of them
        self.num_unshown = 0  # characters at the end that no event has: of a call that was cut off before its arguments
        self._events: list[Part] = []
        self._run = self._parse()
        next(self._run, None)

    def feed(self, text: str) -> list[Part]:
        """What more of the text says."""
        start = self._at if self._uncertain_from is None else self._uncertain_from
        self._text = self._text[start:] + text
        self._at -= start
        if self._uncertain_from is not None:
            self._uncertain_from = 0
        return self._advance()

    def close(self, is_cut: bool = False) -> list[Part]:
        """No more text comes.

        Args:
            is_cut: the model had more to write. What it had begun of a call is then no text, and its arguments are a
                beginning of those that it would have written.
        """
        self._is_complete, self._is_cut = True, is_cut
        return self._advance()

    def _advance(self) -> list[Part]:
        next(self._run, None)
        events, self._events = self._events, []
        return events

    def _parse(self) -> Step:
        raise NotImplementedError

    def _emit(self, event: Part) -> None:
        """Neighbours of one kind are one event."""
        last = self._events[-1] if self._events else None
        if not isinstance(event, CallBegin) and not event.text:
            return
        if isinstance(event, CallBegin) or last is None or isinstance(last, CallBegin) or _key(last) != _key(event):
            self._events.append(event)
        else:
            self._events[-1] = replace(event, text=last.text + event.text)

    def _emit_text(self, text: str) -> None:
        self._emit(Text(text))

    # Reading: each waits for the text it needs, and raises _Cut where the text is complete.

    @property
    def _cuts_arguments(self) -> bool:
        return self._is_cut and self._is_in_arguments

    def _more(self) -> Step:
        if self._is_complete:
            raise _Cut
        yield

    def _peek(self, num: int = 1) -> Step:
        """The next characters, not consumed."""
        while len(self._text) - self._at < num:
            yield from self._more()
        return self._text[self._at : self._at + num]

    def _skip_whitespace(self) -> Step:
        while (yield from self._peek()) in WHITESPACE:
            self._at += 1

    def _starts_with(self, literal: str, num_skipped: int = 0) -> Step:
        """Whether the literal comes after so many characters; nothing is consumed."""
        while True:
            rest = self._text[self._at + num_skipped : self._at + num_skipped + len(literal)]
            if rest == literal:
                return True
            if not literal.startswith(rest):
                return False
            if self._is_complete and not (self._cuts_arguments or (self._is_cut and self._uncertain_from is not None)):
                return False
            yield from self._more()

    def _take(self, *literals: str, num_skipped: int = 0) -> Step:
        """Consume the one of the literals that comes next; None: none of them does."""
        for literal in literals:
            if (yield from self._starts_with(literal, num_skipped)):
                self._at += num_skipped + len(literal)
                return literal
        return None

    def _take_after_whitespace(self, *literals: str) -> Step:
        """Likewise, with the white space before it; where none comes that is not consumed either."""
        num = 0
        while (yield from self._peek(num + 1))[num] in WHITESPACE:
            num += 1
        return (yield from self._take(*literals, num_skipped=num))

    def _expect(self, *literals: str) -> Step:
        if (found := (yield from self._take_after_whitespace(*literals))) is None:
            raise _Mismatch
        return found

    def _matching(self, pattern: re.Pattern[str]) -> Step:
        """Consume the characters that match, once the first that does not has come."""
        while True:
            match = pattern.match(self._text, self._at)
            end = match.end() if match else self._at
            if end < len(self._text) or (self._is_complete and not self._cuts_arguments):
                break
            yield from self._more()
        found, self._at = self._text[self._at : end], end
        return found

    def _pass(self, pattern: re.Pattern[str], emit: Emit) -> Step:
        """Emit the characters that match as they come, up to the first that does not."""
        while True:
            if match := pattern.match(self._text, self._at):
                emit(match[0])
                self._at = match.end()
            if self._at < len(self._text):
                return
            yield from self._more()

    def _until(self, literals: Sequence[str], emit: Emit, drops_cut: bool = False) -> Step:
        """Emit the text before the first of the literals as it comes; returns that one, consumed.

        Args:
            drops_cut: where the answer is cut within one of the literals, what there is of it is no text.
        """
        pattern = re.compile("|".join(map(re.escape, literals)))
        while True:
            match = pattern.search(self._text, self._at)
            end = match.start() if match else len(self._text)
            if match is None and (not self._is_complete or (drops_cut and self._is_cut) or self._cuts_arguments):
                end -= _num_held(self._text[self._at :], literals)
            if end > self._at:
                emit(self._text[self._at : end])
            if match is not None:
                self._at = match.end()
                return match[0]
            self._at = end
            yield from self._more()

    def _raw_string(self, emit: Emit, characters: re.Pattern[str] = _IN_JSON_STRING) -> Step:
        emit('"')
        self._at += 1
        while True:
            yield from self._pass(characters, emit)
            char = yield from self._peek()
            if char == '"':
                emit('"')
                self._at += 1
                return
            if char != "\\":
                raise _Mismatch
            emit((yield from self._peek(2)))
            self._at += 2


class ThoughtParser(Parser):
    """A thought between markers, then the answer, as text.

    Line breaks next to the markers are the template's.

    Args:
        is_open: the prompt has begun the thought.
    """

    def __init__(self, markers: ThoughtMarkers, is_open: bool) -> None:
        self._markers = markers
        self._is_open = is_open
        self._line_breaks = ""
        super().__init__()

    def _parse(self) -> Step:
        markers = self._markers
        self._uncertain_from = 0
        try:
            if self._is_open:
                yield from self._take_after_whitespace(markers.begin)  # once more, as some models do
            elif (yield from self._take_after_whitespace(markers.begin)) is None:
                raise _Mismatch
            self._uncertain_from = None
            yield from self._skip_line_breaks()
            yield from self._until((markers.end,), self._emit_thought, drops_cut=True)
            self._line_breaks = ""
            yield from self._skip_line_breaks()
        except _Mismatch:
            self._at, self._uncertain_from = 0, None
        except _Cut:
            is_text = self._uncertain_from is not None and not self._is_open
            is_marker = self._at < len(self._text)  # of the end, cut
            self._emit(Text(self._text) if is_text else Reasoning("" if is_marker else self._line_breaks))
            self._at = len(self._text)
        with contextlib.suppress(_Cut):
            yield from self._pass(_ANYTHING, self._emit_text)

    def _skip_line_breaks(self) -> Step:
        while (yield from self._peek()) == "\n":
            self._at += 1

    def _emit_thought(self, text: str) -> None:
        """Line breaks wait for what follows them: the thought's last are not its own."""
        text = self._line_breaks + text
        thought = text.rstrip("\n")
        self._line_breaks = text[len(thought) :]
        self._emit(Reasoning(thought))


class HarmonyParser(Parser):
    """gpt-oss's channels: `<|channel|>analysis<|message|>...<|end|>` is a thought, `final` the text, and a message `to`
    a function a call.

    What precedes a call in the commentary channel is text. Messages to other tools than functions are thoughts.

    Args:
        ends_with_final: nothing comes behind the channel final: its text may have marks that are spelled.
    """

    def __init__(self, ends_with_final: bool = False) -> None:
        self.num_calls = 0
        self.num_complete = 0  # of these: by their brackets, where the token that ends one is not in the text
        self._depth = 0  # of these
        self._ends_with_final = ends_with_final
        super().__init__()

    def _parse(self) -> Step:
        ends = ("<|end|>", "<|call|>", "<|return|>", "<|start|>")
        emit: Emit = self._emit_text
        try:
            while True:
                self._uncertain_from = self._at
                header: list[str] = []
                if (yield from self._is_header()):
                    yield from self._until(("<|message|>",), header.append)
                self._uncertain_from = None
                emit, is_call = self._emitter(words := "".join(header))
                if self._ends_with_final and "<|channel|>final" in words:
                    yield from self._pass(_ANYTHING, emit)
                begins, outside = ((*ends, '"'), partial(self._emit_counted, emit)) if is_call else (ends, emit)
                while (yield from self._until(begins, outside)) == '"':  # marks within a string are its text
                    self._at -= 1
                    yield from self._raw_string(emit)
                self.num_complete = self.num_calls
        except _Cut:
            if not (self._is_cut or self._depth):
                self.num_complete = self.num_calls
            if self._uncertain_from is None:
                emit(self._text[self._at :])  # a backslash
            elif self._is_cut:
                self.num_unshown = len(self._text) - self._uncertain_from
            else:
                self._emit_text(self._text[self._uncertain_from :])

    def _is_header(self) -> Step:
        """Whether a message begins with one; a model may forget it."""
        for begin in ("<|start|>", "<|channel|>", "assistant", " to="):
            if (yield from self._starts_with(begin)):
                return True
        return False

    def _emitter(self, header: str) -> tuple[Emit, bool]:
        """What becomes of the message with that header, and whether it is a call."""
        recipient = _RECIPIENT.search(header)
        if recipient is not None and recipient[1].startswith("functions."):
            index = self.num_calls
            self._emit(CallBegin(index, recipient[1].removeprefix("functions.")))
            self.num_calls, self._depth = index + 1, 0
            return lambda text: self._emit(Arguments(index, text)), True
        if recipient is not None or "<|channel|>analysis" in header:
            return lambda text: self._emit(Reasoning(text)), False
        return self._emit_text, False

    def _emit_counted(self, emit: Emit, text: str) -> None:
        """Of a call, what is between strings."""
        emit(text)
        self._depth += sum(1 if char in "{[" else -1 for char in text if char in "{}[]")
        if not self._depth and text.rstrip()[-1:] in ("}", "]"):
            self.num_complete = self.num_calls


class ToolCallParser(Parser):
    """Text and calls of an answer without its thought.

    Args:
        schemas: of the parameters of each function that the request offers, by name.
        only_calls: the answer is calls and nothing else.
    """

    def __init__(self, form: ToolFormat, schemas: Mapping[str, Schema], only_calls: bool = False) -> None:
        self.num_calls = 0
        self.num_complete = 0  # of these
        self._format = form
        self._only_calls = only_calls
        self._is_next = False  # a call of the section has gone before
        self._schemas = schemas
        super().__init__()

    def _emit_arguments(self, text: str) -> None:
        self._emit(Arguments(self.num_calls - 1, text))

    def _begin_call(self, name: str, call_id: str | None = None) -> None:
        self._uncertain_from = None
        self._emit(CallBegin(self.num_calls, name, call_id))
        self.num_calls += 1

    # The answer

    def _parse(self) -> Step:
        begins = self._format.begins
        triggers = [self._format.before + one for one in begins if self._format.before] + list(begins)
        try:
            begin = "" if self._format.opens_answer else (yield from self._until(triggers, self._emit_text))
            while True:
                trigger: str | None = begin
                while trigger is not None and (yield from self._section(trigger)):
                    trigger = yield from self._take_after_whitespace(*begins)
                begin = yield from self._until(triggers, self._emit_text, drops_cut=self.num_calls > 0)
        except _Cut:
            rest = self._text[self._at if self._uncertain_from is None else self._uncertain_from :]
            if self._uncertain_from is None or (self._is_cut and self._has_begun_call(triggers)):
                self.num_unshown = len(rest)
            else:
                self._emit_text(rest)

    def _has_begun_call(self, triggers: Sequence[str]) -> bool:
        is_marked = self._text.startswith(tuple(triggers), self._uncertain_from or 0)
        return is_marked or self._only_calls or self._is_next

    def _section(self, trigger: str) -> Step:
        """Its calls, after what begins it. False: what begins here, or goes on, is text."""
        self._uncertain_from, self._is_next = self._at - len(trigger), False
        try:
            yield from self._calls(trigger.removeprefix(self._format.before))
        except _Mismatch:
            self._is_in_arguments = False
            if self._uncertain_from is None:
                return False
            self._at, self._uncertain_from = self._uncertain_from, None
            if self._text.startswith(trigger, self._at):
                self._emit_text(trigger)
                self._at += len(trigger)
            return False
        return True

    def _calls(self, begin: str) -> Step:
        brackets = self._format.brackets
        if brackets is None:
            yield from self._call(begin)
        else:
            if brackets.begin:
                yield from self._expect(brackets.begin)
            yield from self._call(begin)
            opening = "" if brackets.separator else getattr(self._format.call, "begin", "")
            while (taken := (yield from self._take_after_whitespace(opening or brackets.separator))) is not None:
                self._uncertain_from, self._is_next = self._at - len(taken), True
                yield from self._call(opening or begin)
            if brackets.end:
                yield from self._expect(brackets.end)
        if self._format.end:
            yield from self._take_after_whitespace(self._format.end)

    def _call(self, begin: str) -> Step:
        call = self._format.call
        if isinstance(call, JsonCall):
            yield from self._json_call(begin)
            self.num_complete += 1
        else:
            yield from self._named_call(call, begin)

    def _check_name(self, name: str, begin: str) -> None:
        """Without a marker only the name of a known function tells a call from text."""
        if not name or len(name) > _MAX_NAME_CHARS or not (begin or name in self._schemas):
            raise _Mismatch

    def _json_call(self, begin: str) -> Step:
        yield from self._expect("{")
        name: str | None = None
        call_id: str | None = None
        arguments: list[str] | None = None  # that come before the name
        has_begun = has_type = False
        separator = ","
        while separator == ",":
            key = yield from self._json_string()
            yield from self._expect(":")
            yield from self._skip_whitespace()
            if not begin and name is None and not has_type and key != "name":
                # What no mark begins is a call in these shapes alone: grammars hold no other
                if key != "type" or (yield from self._json_string()) != "function":
                    raise _Mismatch
                has_type = True
            elif key == "name" and name is None:
                name = yield from self._json_string()
                self._check_name(name, begin)
            elif key in ("arguments", "parameters") and arguments is None and not has_begun:
                if name is not None:
                    self._begin_call(name, call_id)
                    has_begun = True
                    yield from self._json_arguments(self._emit_arguments)
                else:
                    arguments = []
                    yield from self._json_arguments(arguments.append)
            elif key == "id" and (yield from self._starts_with('"')):
                call_id = yield from self._json_string()
            else:
                yield from self._json_value(list[str]().append)
            separator = yield from self._expect(",", "}")
        if name is None:
            raise _Mismatch
        if not has_begun:
            self._begin_call(name, call_id)
            self._emit_arguments("".join(arguments or ["{}"]))

    def _named_call(self, call: NamedCall, begin: str) -> Step:
        if call.begin and begin != call.begin:
            yield from self._expect(call.begin)
        yield from self._skip_whitespace()
        name = yield from self._matching(NAME)
        yield from self._peek()  # a name that the end cuts off is none
        self._check_name(name, begin)
        call_id = None
        if call.id_begin is not None and (yield from self._take(call.id_begin)):
            call_id = yield from self._matching(NAME)
        if call.name_end.strip():
            yield from self._expect(call.name_end.strip())
        self._begin_call(name, call_id)
        schema = self._schemas.get(name, {})
        self._is_in_arguments = True
        match call.arguments:
            case JsonArguments():
                yield from self._skip_whitespace()
                yield from self._json_arguments(self._emit_arguments)
            case TaggedArguments():
                yield from self._tagged_arguments(call.arguments, schema)
            case LiteralArguments():
                yield from self._literal_arguments(call.arguments, schema)
        self._is_in_arguments = False
        self.num_complete += 1
        if call.end:
            yield from self._take_after_whitespace(call.end)

    # Arguments as JSON

    def _json_arguments(self, emit: Emit) -> Step:
        """An object; some models write it as a string, or null for none."""
        if (yield from self._starts_with('"')):
            parts: list[str] = []
            yield from self._decoded_string(lambda text: [one(text) for one in (emit, parts.append)])
            if not parts:
                emit("{}")
        elif (yield from self._take("null")):
            emit("{}")
        else:
            yield from self._json_value(emit)

    def _json_value(
        self, emit: Emit, between: re.Pattern[str] = _IN_JSON, characters: re.Pattern[str] = _IN_JSON_STRING
    ) -> Step:
        """Passed on as written.

        Args:
            between: what is between strings and brackets.
            characters: of strings.
        """
        depth = 0
        while True:
            if depth:
                yield from self._pass(between, emit)
            char = yield from self._peek()
            if char == '"':
                yield from self._raw_string(emit, characters)
            elif char in "{}[]":
                emit(char)
                self._at += 1
                depth += 1 if char in "{[" else -1
            elif depth:
                raise _Mismatch
            else:
                scalar = yield from self._matching(_JSON_SCALAR)
                if not scalar:
                    raise _Mismatch
                emit(scalar)
            if depth < 0:
                raise _Mismatch
            if depth == 0:
                return

    def _json_string(self) -> Step:
        parts: list[str] = []
        yield from self._skip_whitespace()
        yield from self._decoded_string(parts.append)
        return "".join(parts)

    def _decoded_string(self, emit: Emit) -> Step:
        """What a JSON string says."""
        yield from self._expect('"')
        while True:
            yield from self._pass(_IN_JSON_STRING, emit)
            if (yield from self._take('"')):
                return
            escape = yield from self._peek(2)
            if escape[1] == "u":
                escape = yield from self._peek(6)
                if escape[2:4].lower() in ("d8", "d9", "da", "db"):
                    escape = yield from self._peek(12)
            try:
                emit(json.loads(f'"{escape}"').encode("utf-8", "replace").decode())
            except ValueError:
                raise _Mismatch from None
            self._at += len(escape)

    # Arguments between markers

    def _tagged_arguments(self, form: TaggedArguments, schema: Schema) -> Step:
        start = "{"
        while (yield from self._take_after_whitespace(form.key_begin)):
            key: list[str] = []
            yield from self._until((form.key_end,), key.append)
            if form.value_begin:
                yield from self._expect(form.value_begin)
            name = "".join(key).strip()
            self._emit_arguments(f"{start}{json_text(name)}: ")
            yield from self._tagged_value(form, parameter_types(schema, name))
            start = ", "
        self._emit_arguments("{}" if start == "{" else "}")

    def _tagged_value(self, form: TaggedArguments, types: frozenset[str]) -> Step:
        ends = [form.value_end]
        if form.has_newlines:
            ends.append("\n" + form.value_end)
            yield from self._take("\n")
        if types <= {"string"}:
            self._emit_arguments('"')
            yield from self._until(ends, lambda text: self._emit_arguments(json_text(text)[1:-1]))
            self._emit_arguments('"')
            return
        value = (yield from self._tagged_json(form, types)) if types & {"array", "object"} else None
        if value is None:
            parts: list[str] = []
            try:
                yield from self._until(ends, parts.append)
            except _Cut:
                if not self._is_cut:
                    self._emit_arguments("".join(parts))
                raise
            value = typed("".join(parts), types)
        self._emit_arguments(value)

    def _tagged_json(self, form: TaggedArguments, types: frozenset[str]) -> Step:
        """An array or object, consumed with the mark behind it: marks in its strings are text. None: it is neither."""
        self._uncertain_from, parts = self._at, list[str]()
        try:
            yield from self._skip_whitespace()
            if (yield from self._peek()) in "[{":
                yield from self._json_value(parts.append, _IN_STRICT_JSON, _IN_STRICT_STRING)
                yield from self._expect(form.value_end)
                if (value := typed("".join(parts), types))[0] in "[{":
                    self._uncertain_from = None
                    return value
        except _Mismatch:
            pass
        except _Cut:
            if self._is_cut:
                self._uncertain_from = None
                raise
        self._at, self._uncertain_from = self._uncertain_from or 0, None
        return None

    # Arguments as literals

    def _literal_arguments(self, form: LiteralArguments, schema: Schema) -> Step:
        positional = iter(schema.get("properties", {}))
        start = "{"
        while not (yield from self._take_after_whitespace(form.end)):
            if start != "{":
                yield from self._expect(",")
                if (yield from self._take_after_whitespace(form.end)):
                    break
            yield from self._skip_whitespace()
            word = yield from self._matching(NAME)
            if word and (yield from self._take_after_whitespace(form.assign)):
                self._emit_arguments(f"{start}{json_text(word)}: ")
                yield from self._literal(form, self._emit_arguments)
            else:
                if (name := next(positional, None)) is None:
                    raise _Mismatch
                self._emit_arguments(f"{start}{json_text(name)}: ")
                if word:
                    self._emit_arguments(_literal_scalar(word))
                else:
                    yield from self._literal(form, self._emit_arguments)
            start = ", "
        self._emit_arguments("{}" if start == "{" else "}")

    def _literal(self, form: LiteralArguments, emit: Emit) -> Step:
        """A value, as JSON."""
        yield from self._skip_whitespace()
        if (quote := (yield from self._take(*form.quotes))) is not None:
            emit('"')
            yield from self._literal_string(quote, form.has_escapes, lambda text: emit(json_text(text)[1:-1]))
            emit('"')
        elif (opening := (yield from self._take("[", "(", "{"))) is not None:
            yield from self._literal_collection(form, opening, emit)
        else:
            word = yield from self._matching(_LITERAL_SCALAR)
            if not word:
                raise _Mismatch
            emit(_literal_scalar(word))

    def _literal_collection(self, form: LiteralArguments, opening: str, emit: Emit) -> Step:
        closing = {"[": "]", "(": ")", "{": "}"}[opening]
        emit("{" if opening == "{" else "[")
        start = ""
        while not (yield from self._take_after_whitespace(closing)):
            if start:
                yield from self._expect(",")
                if (yield from self._take_after_whitespace(closing)):
                    break
            emit(start)
            if opening == "{":
                key: list[str] = []
                yield from self._literal(form, key.append)
                text = "".join(key)
                emit((text if text.startswith('"') else json_text(text)) + ": ")
                yield from self._expect(":")
            yield from self._literal(form, emit)
            start = ", "
        emit("}" if opening == "{" else "]")

    def _literal_string(self, quote: str, has_escapes: bool, emit: Emit) -> Step:
        literals = (quote, "\\") if has_escapes else (quote,)
        while (yield from self._until(literals, emit)) != quote:
            char: str = yield from self._peek()
            num_digits = _HEX_DIGITS.get(char, 0)
            escape = yield from self._peek(1 + num_digits)
            try:
                meant = chr(int(escape[1:], 16)) if num_digits else _ESCAPES.get(char, char)
            except (ValueError, OverflowError):
                raise _Mismatch from None
            emit(meant.encode("utf-8", "replace").decode())
            self._at += len(escape)


class AnswerParser:
    """One answer's parts.

    Args:
        thought: None: the model does not think, or what it writes of it is text.
        tools: None: the request offers none.
        shows_thought: otherwise it is left out.
        shows_text: otherwise there is none: what is not thought or call is a mark that was cut.
    """

    def __init__(
        self,
        thought: ThoughtParser | None,
        tools: "ToolCallParser | HarmonyParser | None",
        shows_thought: bool = True,
        shows_text: bool = True,
    ) -> None:
        self._thought = thought
        self._tools = tools
        self._hidden = (() if shows_thought else (Reasoning,)) + (() if shows_text else (Text,))

    @property
    def has_complete_calls(self) -> bool:
        """There are calls, and each of them is complete: a stop string may end an answer within one."""
        return self._tools is not None and 0 < self._tools.num_calls == self._tools.num_complete

    @property
    def num_unshown(self) -> int:
        """As Parser.num_unshown."""
        return 0 if self._tools is None else self._tools.num_unshown

    def feed(self, text: str) -> list[Part]:
        return self._parts([Text(text)] if self._thought is None else self._thought.feed(text))

    def close(self, is_cut: bool = False) -> list[Part]:
        """As Parser.close."""
        found = self._parts([] if self._thought is None else self._thought.close(is_cut))
        return found + ([] if self._tools is None else self._shown(self._tools.close(is_cut)))

    def _parts(self, events: list[Part]) -> list[Part]:
        tools = self._tools
        if tools is not None:
            events = [part for one in events for part in (tools.feed(one.text) if isinstance(one, Text) else [one])]
        return self._shown(events)

    def _shown(self, events: list[Part]) -> list[Part]:
        return [one for one in events if not isinstance(one, self._hidden)] if self._hidden else events


def _num_held(text: str, literals: Sequence[str]) -> int:
    """How much of the text's end may be the beginning of one of the literals."""
    longest = min(len(text), max(map(len, literals)) - 1)
    return next((num for num in range(longest, 0, -1) if any(one.startswith(text[-num:]) for one in literals)), 0)


def _key(event: Part) -> tuple[type[Part], int]:
    return type(event), getattr(event, "index", 0)


def _literal_scalar(word: str) -> str:
    """A literal without quotes, as JSON: what is no number and no constant is a string."""
    if word in _WORDS:
        return _WORDS[word]
    if _JSON_NUMBER.fullmatch(word) and math.isfinite(float(word)):
        return word
    try:
        return json_text(int(word))
    except ValueError:
        pass
    try:
        number = float(word)
    except ValueError:
        return json_text(word)
    return json_text(number) if math.isfinite(number) else json_text(word)


def parameter_types(schema: Schema, name: str) -> frozenset[str]:
    """The JSON types that a parameter may have; empty: its schema does not say."""
    joined = _joined(schema, schema)
    named = [one["properties"][name] for one in joined if name in one.get("properties", ())]
    others = [one.get("additionalProperties") for one in joined]
    return frozenset[str]().union(*(_types(one, schema) for one in named or others))


def _types(schema: Any, root: Schema) -> frozenset[str]:
    found: set[str] = set()
    for one in _joined(schema, root):
        declared = one.get("type")
        found.update([declared] if isinstance(declared, str) else declared or ())
        if one.get("nullable") is True and declared:
            found.add("null")
        for value in (*one.get("enum", ()), *((one["const"],) if "const" in one else ())):
            found.add(_TYPE_NAMES.get(type(value), "null"))
    return frozenset(found)


def _joined(schema: Any, root: Schema) -> list[Schema]:
    """A schema, and those that it refers to or combines, each once."""
    found, waiting = dict[int, Schema](), [schema]
    for one in waiting:
        if isinstance(one, Mapping) and id(one) not in found:
            found[id(one)] = one
            waiting += [each for key in ("anyOf", "oneOf", "allOf") for each in one.get(key, ())]
            if isinstance(pointer := one.get("$ref"), str) and pointer.startswith("#/"):
                waiting.append(pointed(root, pointer))
    return list(found.values())


def typed(text: str, types: frozenset[str]) -> str:
    """A value written bare, as JSON of one of the types where it can be read so; otherwise as a string."""
    bare = text.strip()
    value = _WORDS.get(bare, bare)
    try:
        parsed = json.loads(value, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        return json_text(text)
    kind = _TYPE_NAMES[type(parsed)]
    if kind == "string":  # strings are written bare: its quotes are its own
        return json_text(text)
    if kind in types or (kind == "integer" and "number" in types):
        return value
    if kind == "number" and "integer" in types and parsed.is_integer():  # not of infinity: 1e999
        return json_text(int(parsed))
    return json_text(text)


def _refuse_constant(name: str) -> None:
    raise ValueError(name)
