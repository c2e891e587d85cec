"""Grammars that clients send, in Lark's notation or GBNF: what is refused, by place, and GBNF written in Lark's.

core/grammar.py compiles them. No I/O. Thread: any.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, zip_longest

from core.constraints import (
    MAX_INTERSECTED,
    MAX_REPEATED,
    MAX_SHOWN,
    GrammarKind,
    GrammarSpec,
    bounded,
    json_text,
    place_in,
)
from core.errors import InvalidRequest

MAX_GRAMMAR_BYTES = 128 * 1024
MAX_RULES = 500
NO_END = "no text of the rule {} has an end, as it needs itself. Give it an alternative that does not."
MAX_BRACKETS = 64  # open at once, in a grammar
# Of grammars, where brackets stand for themselves: texts, classes or expressions, and comments. Unclosed ones are found
# as well, and nothing is tried twice: expressions that backtrack over a client's text would take minutes, with the GIL.
_GBNF_TEXTS = re.compile(r'"(?:[^"\\]++|\\.)*"?|\[(?:[^\]\\]++|\\.)*\]?|#[^\r\n]*+', re.DOTALL)
_LARK_TEXTS = re.compile(r'"(?:[^"\\\n]++|\\.)*"?|/(?!/)(?:[^/\\\n]++|\\.)+/?|(?://|#)[^\n]*+')
# Of Lark's: tokens of the model by name or id, other grammars, and attributes of rules that no text shows, or that take
# text out of the answer
_LARK_REFUSED = re.compile(
    r"<[^>\n]*>?|%json\b|@\w+|\b(?:temperature|stop|stop_capture)\s*=|(?:(?<=\w\[)|(?<=,))\s*+capture\b"
    r"|(?<=%llguidance)\s*\{[^}]*[^\s}][^}]*\}?"
)
_LARK_HEAD = re.compile(r"^[ \t]*+[?!]?(?P<name>\w++)(?:\.\d+)?(?:\[[^\]\n]*\])?[ \t]*+:(?!:)", re.MULTILINE)
_LARK_PARTS = re.compile(r"->\s*\w+|'|\w+|[()\[\]|?*+]|(?:~|\{)\s*\d+")
_RULE = re.compile(r"^[ \t]*+[?!]?[\w.\-]++[^\n:]*+:", re.MULTILINE)
_GBNF_ROOT = re.compile(r"^[ \t]*+root\s*+::=", re.MULTILINE)
MAX_TOKEN_SHOWN = 40  # characters
_GBNF_TOKENS = re.compile(
    r"""(?P<blank>\s+|\#[^\r\n]*)|(?P<name>[\w-]+)|(?P<defines>::=)|(?P<text>"(?:[^"\\]|\\.)*")|(?P<set>\[(?:[^\]\\]|\\.)*\])"""
    r"""|(?P<count>[*+?]|\{\s*\d{1,9}\s*(?:,\s*(?:\d{1,9}\s*)?)?\})|(?P<mark>[()|.])|(?P<unknown>(?s:.))""",
    re.DOTALL,
)
_GBNF_CHARACTER = re.compile(
    r"\\(?:x(?P<x>[\da-fA-F]{2})|u(?P<u>[\da-fA-F]{4})|U(?P<U>[\da-fA-F]{8})|(?P<plain>[nrt\"\\\[\]-]))|(?P<self>[^\\])",
    re.DOTALL,
)
_PLAIN = {"n": "\n", "r": "\r", "t": "\t"}


def client_grammar(source: str, param: str) -> GrammarSpec:
    """In Lark's notation, or in GBNF, which has a rule for root. Raises InvalidRequest: it is too long."""
    if len(source.encode()) > MAX_GRAMMAR_BYTES:
        raise InvalidRequest(f"{param} is larger than {MAX_GRAMMAR_BYTES // 1024} KiB.", param)
    is_gbnf = _GBNF_ROOT.search(source) is not None
    return bounded(GrammarSpec(GrammarKind.GBNF if is_gbnf else GrammarKind.LARK, source, param))


def check_client_grammar(spec: GrammarSpec) -> None:
    """Raises InvalidRequest: it has too much, no end, or what cannot be enforced. It may keep the GIL for 30 ms."""
    source, param, is_gbnf = spec.source, spec.param, spec.kind is GrammarKind.GBNF
    if len(_RULE.findall(source)) > MAX_RULES:
        raise InvalidRequest(f"{param} has more than {MAX_RULES} rules.", param)
    if source.count("&") + source.count("~") > MAX_INTERSECTED:
        raise InvalidRequest(f"{param} has more than {MAX_INTERSECTED} of & and ~.", param)
    texts = _GBNF_TEXTS if is_gbnf else _LARK_TEXTS
    blanked = texts.sub(_blank, source)
    if not is_gbnf and (found := _LARK_REFUSED.search(blanked)):
        offset = found.end() - len(found[0].lstrip())
        word, place = source[offset : found.end()][:MAX_SHOWN], place_in(source, offset)
        why = "Send a schema by itself." if word == "%json" else "Leave it out."
        raise InvalidRequest(f"{param}: {place}: {word!r} cannot be used: answers are text. {why}", param)
    heads = [] if is_gbnf else [*_LARK_HEAD.finditer(blanked)]
    for name in endless(dict(_lark_rules(blanked, heads))):
        offset = next(head.start("name") for head in heads if head["name"] == name)
        raise InvalidRequest(f"{param}: {place_in(source, offset)}: {NO_END.format(name)}", param)
    steps = (1 if bracket in "([{" else -1 for bracket in re.findall(r"[(\[{)\]}]", blanked))
    if max(accumulate(steps), default=0) > MAX_BRACKETS:
        raise InvalidRequest(f"{param} has more than {MAX_BRACKETS} brackets open at once.", param)


def _blank(text: re.Match[str]) -> str:
    """As long, without what may look like rules and brackets: ' for a text, nothing for a comment."""
    first = " " if text[0].startswith(("//", "#")) else "'"
    return first + "\n".join(" " * len(line) for line in text[0][1:].split("\n"))


def _lark_rules(blanked: str, heads: Sequence[re.Match[str]]) -> Iterator[tuple[str, list[str]]]:
    """Each rule with its parts, for `endless`; those with what is not understood here have none."""
    for head, behind in zip_longest(heads, heads[1:]):
        body = blanked[head.end() : behind.start() if behind else None].partition("\n%")[0]
        is_known = not re.search("[%@:]|-(?!>)", body)
        yield head["name"], [part[0] for part in _LARK_PARTS.finditer(body)] if is_known else []


def repeats(source: str) -> bool:
    """Whether a rule in Lark's notation needs itself or repeats a part: answers may be read in ever more ways."""
    blanked = _LARK_TEXTS.sub(_blank, source)
    found = dict(_lark_rules(blanked, [*_LARK_HEAD.finditer(blanked)]))
    rules = {name: parts for name, parts in found.items() if not name.isupper()}  # others are expressions
    if any(not parts or any(part[0] in "*+~{" for part in parts) for parts in rules.values()):
        return True
    known = set[str]()
    while more := {name for name, parts in rules.items() if rules.keys() & {*parts} <= known} - known:
        known |= more
    return len(known) < len(rules)


def endless(rules: Mapping[str, Sequence[str]]) -> list[str]:
    """Rules that no text satisfies, as each of their alternatives needs one of them.

    Args:
        rules: by name, with their parts: names, brackets, bars, and counts with the least first. Others are texts.
    """
    alternatives: list[tuple[str, list[str]]] = []  # with the rules that they need; a bracket is a rule of its own
    for name, parts in rules.items():
        opened: list[tuple[str, list[str]]] = [(name, [])]
        last = ""  # the rule that came last
        for i, part in enumerate(parts):
            rule, needed = opened[-1]
            if part in ("(", "["):
                opened.append((f"{name}({i}", []))
            elif part == "|" or (part in (")", "]") and len(opened) > 1):
                alternatives.append(opened.pop())
                if part == "|":
                    opened.append((rule, []))
                elif part == ")":
                    opened[-1][1].append(rule)
            elif re.match(r"[?*]|[~{]\s*0", part) and needed and needed[-1] == last:
                needed.pop()
            elif part in rules:
                needed.append(part)
            last = opened[-1][1][-1] if opened[-1][1] and (part in rules or part == ")") else ""
        alternatives += opened
    users: dict[str, list[int]] = {}
    for number, (_, needed) in enumerate(alternatives):
        for one in needed:
            users.setdefault(one, []).append(number)
    missing = [len(needed) for _, needed in alternatives]
    ready, ended = [rule for rule, needed in alternatives if not needed], set[str]()
    while ready:
        if (rule := ready.pop()) not in ended:
            ended.add(rule)
            for number in users.get(rule, ()):
                missing[number] -= 1
                if not missing[number]:
                    ready.append(alternatives[number][0])
    return [name for name in rules if name not in ended]


class GbnfReader:
    """Reads llama.cpp's notation, https://github.com/ggml-org/llama.cpp/tree/master/grammars, and writes it in Lark's.

    Rules that do not hold themselves become terminals: one regular expression each, which takes as much as it can. A
    rule ends where the next one begins.
    """

    def __init__(self, source: str, param: str) -> None:
        self._source, self._param = source, param
        self._tokens: list[tuple[str, str, int]] = []
        for token in _GBNF_TOKENS.finditer(source):
            if token.lastgroup != "blank":
                self._tokens.append((token.lastgroup or "", token[0], token.start()))
            if token.lastgroup == "unknown":  # here it is refused: what follows would be read over and over
                break
        self._tokens += [("end", "", len(source))] * 2
        self._at = 0
        # A rule's name is behind a NUL here
        self._written: list[str] = []  # of the rule that is read: Lark
        self._rules: dict[str, list[str]] = {}
        self._defined: dict[str, int] = {}  # with where
        self._used: dict[str, int] = {}  # with where they stand first

    def in_lark(self) -> str:
        """Raises InvalidRequest: it cannot be read; names the line and the column."""
        while self._tokens[self._at][0] != "end":
            _, name, offset = self._take("name")
            self._take("defines")
            if "\0" + name in self._rules:
                raise self._refusal(f"the rule {name} is defined twice", offset)
            self._defined["\0" + name] = offset
            self._written = []
            self._alternatives()
            if self._tokens[self._at][0] != "end" and not self._is_rule():
                raise self._unexpected("a rule's name and ::=")
            self._rules["\0" + name] = self._written
        for name, offset in {**self._used, "\0root": 0}.items():
            if name not in self._rules:
                raise self._refusal(f"there is no rule {name[1:]}", offset)
        for name in endless(self._rules):
            raise self._refusal(NO_END.format(name.removeprefix("\0")).rstrip("."), self._defined[name])
        terminals = self._terminals()
        names = {name: f"{'T' if name in terminals else 't'}{i}" for i, name in enumerate(self._rules)}
        lines = ["%llguidance {}", "start: " + names["\0root"]]
        for name, written in self._rules.items():
            parts = (names.get(part, part) for part in written)
            lines.append(f"{names[name]}: {' '.join(parts)}")
        return "\n".join(lines)

    def _terminals(self) -> set[str]:
        """Rules that hold neither themselves nor one that does."""
        holds = {name: self._rules.keys() & set(written) for name, written in self._rules.items()}
        found: set[str] = set()
        while more := {name for name, held in holds.items() if held <= found} - found:
            found |= more
        return found

    def _alternatives(self) -> int:
        """Returns: characters, at most."""
        most = self._sequence()
        while self._tokens[self._at][1] == "|":
            self._at += 1
            self._written.append("|")
            most = max(most, self._sequence())
        return most

    def _sequence(self) -> int:
        num_characters, first = 0, len(self._written)
        while not self._is_rule():
            kind, token, offset = self._tokens[self._at]
            begin, size = len(self._written), 1
            match kind, token:
                case "name", _:
                    self._used.setdefault("\0" + token, offset)
                    self._written.append("\0" + token)
                case "text", _:
                    text = "".join(self._characters(token[1:-1], offset + 1))
                    size = len(text)
                    self._written.append(json_text(text))
                case "set", _:
                    self._written.append(self._set(token, offset))
                case "mark", ".":
                    self._written.append("/(?s:.)/")
                case "mark", "(":
                    self._at += 1
                    self._written.append("(")
                    size = self._alternatives()
                    if self._tokens[self._at][1] != ")":
                        raise self._unexpected(f"the ) of the ( at {place_in(self._source, offset)}")
                    self._written.append(")")
                case _:
                    break
            self._at += 1
            while self._tokens[self._at][0] == "count":
                size *= self._count(begin)
                if size > MAX_REPEATED:
                    message = f"more than {MAX_REPEATED} characters are repeated by counts"
                    raise self._refusal(message, self._tokens[self._at - 1][2])
            num_characters += size
        if len(self._written) == first:
            self._written.append('""')
        return num_characters

    def _count(self, begin: int) -> int:
        """Repeats what was written from `begin` on. Returns: how often, at most, as far as it counts."""
        _, token, offset = self._take("count")
        counts = [int(one) for one in re.findall(r"\d+", token)]
        if counts:
            least, most = counts[0], counts[-1] if counts[1:] or "," not in token else None
            if most is not None and most < least:
                raise self._refusal(f"{token} ends below its start", offset)
            token = f"{{{least},{'' if most is None else most}}}"
        self._written.insert(begin, "(")
        self._written += [")", token]
        return max([1, *counts])

    def _set(self, token: str, offset: int) -> str:
        """A class of characters, in a regular expression's notation."""
        is_other = token.startswith("[^")
        begin = offset + 1 + is_other
        characters = list(self._characters(token[1 + is_other : -1], begin))
        is_escaped = [part[0][0] == "\\" for part in _GBNF_CHARACTER.finditer(token[1 + is_other : -1])]
        written, i = "", 0
        while i < len(characters):
            low = high = characters[i]
            if i + 2 < len(characters) and characters[i + 1] == "-" and not is_escaped[i + 1]:
                high = characters[i + 2]
                i += 2
            if high < low:
                raise self._refusal(f"the range {low}-{high} ends below its start", offset)
            written += f"\\x{{{ord(low):x}}}-\\x{{{ord(high):x}}}"
            i += 1
        if not written and not is_other:
            raise self._refusal("no character is between [ and ]", offset)
        return f"/[{'^' * is_other}{written}]/" if written else "/(?s:.)/"

    def _characters(self, text: str, offset: int) -> Iterator[str]:
        """offset: of the text in the source."""
        at = 0
        while at < len(text):
            found = _GBNF_CHARACTER.match(text, at)
            code = found and (found["x"] or found["u"] or found["U"])
            number = int(code, 16) if code else 0
            if found is None or number > 0x10FFFF or 0xD800 <= number < 0xE000:
                message = f"{text[at : at + 10]!r} does not begin with a character's escape"
                raise self._refusal(f"{message}: \\n, \\r, \\t, \\xNN, \\uNNNN or \\UNNNNNNNN", offset + at)
            yield chr(number) if code else found["self"] or _PLAIN.get(found["plain"], found["plain"])
            at = found.end()

    def _is_rule(self) -> bool:
        return self._tokens[self._at][0] == "name" and self._tokens[self._at + 1][0] == "defines"

    def _take(self, kind: str) -> tuple[str, str, int]:
        token = self._tokens[self._at]
        if token[0] != kind:
            raise self._unexpected({"name": "a rule's name", "defines": "::="}[kind])
        self._at += 1
        return token

    def _unexpected(self, expected: str) -> InvalidRequest:
        kind, token, offset = self._tokens[self._at]
        found = "it ends" if kind == "end" else f"it has {token[:MAX_TOKEN_SHOWN]!r}"
        if token in ('"', "["):
            found += ", which is not closed"
        return self._refusal(f"{found} where {expected} must be", offset)

    def _refusal(self, why: str, offset: int) -> InvalidRequest:
        return InvalidRequest(
            f"{self._param} cannot be read as GBNF: {place_in(self._source, offset)}: {why}.", self._param
        )
