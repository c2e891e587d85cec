"""Compiles what holds an answer (core/constraints.py) for a model's vocabulary, and follows it token by token.

llguidance computes which tokens may come next. A `Grammar` is frozen and
shared by requests; each sequence has a `GrammarState` of its own. No I/O. Thread: compilation wherever it is offloaded
to, states the engine's.
"""

import json
import re
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from weakref import WeakSet

import msgspec
import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from core.client_grammars import GbnfReader, check_client_grammar, repeats
from core.constraints import (
    ENFORCED,
    FORMATS,
    NO_CONTROL,
    WHITESPACE,
    Allowance,
    GrammarKind,
    GrammarSpec,
    check_answerable,
    escapes_in,
    keywords_of,
    place_in,
)
from core.errors import InvalidRequest
from core.token_bytes import TokenBytes

JsonObject = Mapping[str, Any]
Int32Array = npt.NDArray[np.int32]


def _limits(most_items: int) -> LLParserLimits:
    """Args: most_items: of the parser, for a mask."""
    return LLParserLimits(
        initial_lexer_fuel=1_000_000,  # 250 ms to compile
        step_lexer_fuel=100_000,  # some 5 ms a token
        step_max_items=most_items,
        max_lexer_states=50_000,
        max_grammar_size=200_000,
        verbose_errors=False,
    )


# Objects of 480 optional properties need 40,000 items with 152,000 words, in 1 ms. Where a grammar may be read in many
# ways, an item costs the more the longer the answer is: 1,500 take 5 ms, 10,000 seconds.
LIMITS, GRAMMAR_LIMITS = _limits(50_000), _limits(1_500)
# Beginnings of answers that are tried when a grammar is compiled, to find most of those that become too complex
NUM_PROBES, PROBE_TOKENS = 3, 24
MOST_ALONE = 8  # states that have a matcher of their own: each may take a hundred megabytes
# Tokens that are allowed together, without being walked, where the text may go on with any of a kind and a length
_TEXT = r'[^"\\\x00-\x1F\x7F]'
SLICES = ["[a-zA-Z0-9]{1,22}", f"{_TEXT}{{1,10}}", f"{_TEXT}{{1,30}}", f"{_TEXT}+"]
MAX_SHOWN = 500  # characters of the library's words, which repeat what they refuse
_ITEMS = "Too many items"  # of the parser, which every answer has for itself
_MISPLACED = re.compile("doesn't satisfy the grammar|out of range")
_PLACE = re.compile(r"^(?:at )?(\d+)\((\d+)\): ")
_DRAWN = re.compile(r"regex parse error:\n {4}(?P<shown>.*)\n {4}(?P<before> *)\^+\nerror: (?P<why>.*)")
# What it says of a keyword's value
_SHOWN = {
    "pattern": ("parse error:\n    {}\n", "in regex /{}/"),
    "patternProperties": ("parse error:\n    {}\n", "in regex /{}/", "regexes /{}/"),
    "multipleOf": ("Value for 'multipleOf'",),
}
MAX_DIGITS = 200
_DIGITS = b"0123456789"
# A number as far as it goes, with an exponent or very long
_LONG_NUMBER = re.compile(rb"[\s:,\[=(>]-?[0-9.]+[eE][+-]?([0-9]*)\Z|(?:[\s:,\[=(>]-?|\A)[0-9.]{%d,}\Z" % MAX_DIGITS)
_TOO_LARGE = re.compile(rb"[eE][+-]?[0-9]{3}")
_UNSATISFIABLE = "nsatisfiable"
_UNIMPLEMENTED = re.compile(r"Unimplemented keys: \[(.*)\]")


class NumberBounds:
    """Keeps numbers finite: JSON has no bound on their digits, and those who read it have. Thread: any.

    A number has MAX_DIGITS digits, but where it cannot end there, and two of an exponent.
    """

    def __init__(self, token_bytes: Sequence[bytes], num_words: int) -> None:
        self._token_bytes = tokens = TokenBytes.of(token_bytes)
        self._letter = next((i for i, one in enumerate(tokens) if one == b"q"), None)  # never in a number
        is_allowed = np.ones((3, num_words * 32), np.bool_)  # by the most digits that they may begin with
        for token_id, one in tokens.beginning_with(_DIGITS).items():
            is_allowed[: len(one) - len(one.lstrip(_DIGITS)), token_id] = False
        self._with_digits = [_packed(bits) for bits in is_allowed]
        large = {tokens.at(match.start()) for match in _TOO_LARGE.finditer(tokens.joined)}
        large = {token_id for token_id in large if _TOO_LARGE.search(tokens[token_id])}
        self._finite = None
        if large:
            is_finite = np.ones(num_words * 32, np.bool_)
            is_finite[[*large]] = False
            self._finite = _packed(is_finite)

    def narrow(self, mask: Int32Array, token_ids: Sequence[int]) -> None:
        """mask: of the token behind these."""
        if self._letter is None or mask[self._letter >> 5] >> (self._letter & 31) & 1:
            return
        found, last = None, self._token_bytes[token_ids[-1]] if token_ids else b""
        if last and last[-1] in b"0123456789eE+-.":
            few = self._text(token_ids, 8)
            found = _LONG_NUMBER.search(few if few.strip(b"0123456789eE+-.") else self._text(token_ids, MAX_DIGITS + 8))
        allowed = self._finite
        if found is not None:
            allowed = self._with_digits[0 if found[1] is None else max(0, 2 - len(found[1]))]
        if allowed is not None and (narrowed := mask[: len(allowed)] & allowed[: len(mask)]).any():
            mask[: len(allowed)] = narrowed

    def _text(self, token_ids: Sequence[int], most: int) -> bytes:
        """Of the last, behind a blank where they are all."""
        return b" " * (len(token_ids) <= most) + b"".join(map(self._token_bytes.__getitem__, token_ids[-most:]))


def _packed(bits: npt.NDArray[np.bool_]) -> Int32Array:
    return np.packbits(bits, bitorder="little").view(np.int32)


def allow(words: Any, token_id: int) -> None:
    if token_id // 32 < len(words):
        words[token_id // 32] |= np.uint32(1 << token_id % 32)


def forbid(words: Any, token_id: int) -> None:
    if token_id // 32 < len(words):
        words[token_id // 32] &= np.uint32(~(1 << token_id % 32) & 0xFFFFFFFF)


class GrammarState:
    """One sequence's. Thread: engine.

    Attributes:
        num_accepted: tokens.
    """

    def __init__(self, grammar: "Grammar") -> None:
        self.num_accepted = 0
        self._matcher = grammar.matcher.deep_copy()
        self._num_words = grammar.num_words
        self._numbers = grammar.numbers
        self._anew = grammar.anew
        self._token_ids: list[int] = []  # accepted

    @property
    def fault(self) -> str | None:
        """Why the sequence cannot go on: the library's limits are exceeded, or a token came that may not."""
        return self._matcher.get_error() if self._matcher.is_error() else None

    @property
    def is_too_complex(self) -> bool:
        """The fault is the library's limits, not a token that may not come."""
        return self.fault is not None and _MISPLACED.search(self.fault) is None

    def fill_mask(self, mask: Int32Array) -> None:
        """Which tokens may come next: a bit each, the lowest of the first word is token 0's. After a fault any may.

        Args:
            mask: [words], contiguous; as wide as the logits.
        """
        self._fill(mask)
        if self._goes_on_alone():
            self._fill(mask)
        if self._numbers is not None:
            self._numbers.narrow(mask, self._token_ids)

    def _fill(self, mask: Int32Array) -> None:
        if not self._matcher.is_error():
            if len(mask) == self._num_words:
                self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
            else:
                found = np.frombuffer(self._matcher.compute_bitmask(), np.int32)[: len(mask)]
                mask[: len(found)] = found
                mask[len(found) :] = 0
        if self._matcher.is_error():
            mask[:] = -1

    def accept(self, token_id: int) -> None:
        """The token has been sampled. A fault if it may not come here."""
        self._matcher.consume_token(token_id)
        self._token_ids.append(token_id)
        self.num_accepted += 1
        self._goes_on_alone()

    def _goes_on_alone(self) -> bool:
        """After a fault of the lexer's limits: whether it goes on in a matcher of its own.

        Copies of a matcher share their lexer's states, and the limits count them together: what others have answered
        would end this answer.
        """
        if self._anew is None or not self.is_too_complex or _ITEMS in (self.fault or ""):
            return False
        make, self._anew = self._anew, None
        if (matcher := make(self)) is None:
            return False
        matcher.consume_tokens(self._token_ids)
        self._matcher = matcher
        return not matcher.is_error()

    def takes(self, token_id: int) -> bool:
        """Whether the token may come next."""
        return bool(self._matcher.validate_tokens([token_id]) == 1)

    def roll_back(self, num_tokens: int) -> None:
        """The last tokens were not sampled after all."""
        self._matcher.rollback(num_tokens)
        self.num_accepted -= num_tokens
        del self._token_ids[self.num_accepted :]

    def forced(self) -> list[int]:
        """Tokens that have to come next, as the tokenizer writes their text, none of them accepted yet.

        Not those at the end that another text behind them could join.
        """
        token_ids = self._matcher.compute_ff_tokens()
        return list(token_ids[: self._matcher.validate_tokens(token_ids)]) if token_ids else []

    @property
    def is_free(self) -> bool:
        """Anything may come from here on."""
        return False

    @property
    def is_complete(self) -> bool:
        """The answer may end here."""
        return bool(self._matcher.is_accepting())

    @property
    def has_ended(self) -> bool:
        """Nothing but the end may come."""
        return bool(self._matcher.is_stopped())


@dataclass(frozen=True, slots=True)
class Grammar:
    """Compiled, for one model's vocabulary.

    Args:
        anew: compiles it again for a state that is to share nothing with others; None: there are too many such, or
            compiling takes long.
        numbers: of JSON in the answer.
    """

    matcher: LLMatcher
    num_words: int
    anew: Callable[[GrammarState], LLMatcher | None] | None = None
    numbers: NumberBounds | None = None

    def start(self) -> GrammarState:
        return GrammarState(self)

    def after(self, token_ids: Sequence[int]) -> "Grammar | None":
        """What holds the rest of an answer that begins with these tokens; None: no answer begins so."""
        begun, anew = list(token_ids), self.anew

        def begun_anew(state: GrammarState) -> LLMatcher | None:
            if (matcher := None if anew is None else anew(state)) is not None:
                matcher.consume_tokens(begun)
            return matcher

        matcher = self.matcher.deep_copy()
        return replace(self, matcher=matcher, anew=begun_anew) if matcher.consume_tokens(begun) else None


class Vocabulary(msgspec.Struct, frozen=True):
    """A model's.

    Args:
        token_bytes: of each id; b"": none.
        special_ids: of control tokens.
        eos_ids: any of which ends an answer; none: answers end where nothing more may come.
    """

    token_bytes: Sequence[bytes]
    special_ids: Collection[int]
    eos_ids: Sequence[int]


class GrammarCompiler:
    """
    Args:
        encode: ids of a text, without special tokens.
        most_tokens: that an answer can have; it may be set until the first grammar is compiled.
        slices: each makes some masks quicker, and takes as much memory as a vocabulary.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        encode: Callable[[str], Sequence[int]],
        most_tokens: int | None = None,
        slices: Sequence[str] = SLICES,
    ) -> None:
        token_bytes, special_ids, eos_ids = vocabulary.token_bytes, vocabulary.special_ids, vocabulary.eos_ids
        self._vocabulary = vocabulary
        self.most_tokens = most_tokens
        if not eos_ids:  # the library needs one: a token beyond the model's
            token_bytes, special_ids = [*token_bytes, b"<|end|>"], [*special_ids, len(token_bytes)]
            eos_ids = [len(token_bytes) - 1]
        self._num_words = -(-len(token_bytes) // 32)
        self._numbers = NumberBounds(token_bytes, self._num_words)
        self._alone = WeakSet[GrammarState]()
        tokens = TokenBytes.of(token_bytes)
        self._longest = int(tokens.lengths.max())  # token's
        self._punctuation = [i for i, one in tokens.beginning_with(b'"{}[]:,').items() if len(one) == 1]
        self._tokenizer = LLTokenizer(
            TokenizerWrapper(_Tokenizer([*tokens], special_ids, eos_ids[0], encode)),
            len(token_bytes),
            list(eos_ids),
            [*slices],
        )

    def prepare(self) -> None:
        """Get ready for the first grammar, without waiting for it."""

    def compile(self, spec: GrammarSpec) -> Grammar:
        """Raises InvalidRequest: it cannot be read, contradicts itself, cannot be enforced, or is over the limits."""
        if spec.kind in (GrammarKind.LARK, GrammarKind.GBNF):
            check_client_grammar(spec)
        if self.most_tokens is not None:
            allowance, most_characters = Allowance(), self.most_tokens * self._longest
            for one in (spec, *spec.schemas):
                if one.kind is GrammarKind.JSON_SCHEMA:
                    check_answerable(json.loads(one.source), one.param, allowance, most_characters)
        return self._compile_checked(spec)

    def _compile_checked(self, spec: GrammarSpec) -> Grammar:
        """Raises InvalidRequest: it cannot be held, nor its fallback."""
        try:
            return self._compile(spec)
        except InvalidRequest:
            if spec.fallback is None:
                raise
            return self._compile(spec.fallback)

    def _compile(self, spec: GrammarSpec) -> Grammar:
        source, lark = spec.source, ""
        match spec.kind:
            case GrammarKind.JSON_SCHEMA:  # joined as text: to read and write it again would hold the GIL for long
                inner = _schema_grammar(source)
            case GrammarKind.REGEX:
                inner = json.loads(LLMatcher.grammar_from_regex(source))["grammars"][0]["lark_grammar"]
                inner = f'{{"lark_grammar": {json.dumps(inner)}'
            case GrammarKind.TAGGED:
                inner = f'{{"lark_grammar": {json.dumps(source)}'
            case GrammarKind.LARK | GrammarKind.GBNF:
                lark = source if spec.kind is GrammarKind.LARK else GbnfReader(source, spec.param).in_lark()
                inner = f'{{"lark_grammar": {json.dumps(lark)}'
        grammars = f"{inner}}}"
        if spec.frame:
            grammars = f'{{"lark_grammar": {json.dumps(spec.frame)}}}, {inner}, "name": "answer"}}'
        text = f'{{"grammars": [{grammars}]}}'
        limits = GRAMMAR_LIMITS if repeats(lark) else LIMITS
        make = partial(LLMatcher, self._tokenizer, text, log_level=0, limits=limits)
        matcher = make()
        if matcher.is_error():
            for one in spec.schemas:
                self._compile_within(one, spec.param)
            if spec.kind is GrammarKind.JSON_SCHEMA and _UNSATISFIABLE in matcher.get_error():
                schema = json.loads(source)
                raise InvalidRequest(self._contradiction(schema, spec.param, schema), spec.param)
            raise InvalidRequest(_refusal(spec, matcher.get_error()), spec.param)

        def anew(state: GrammarState) -> LLMatcher | None:
            if len(self._alone) >= MOST_ALONE:
                return None
            self._alone.add(state)
            return make()

        has_json = spec.kind in (GrammarKind.JSON_SCHEMA, GrammarKind.TAGGED)
        grammar = Grammar(matcher, self._num_words, anew, self._numbers if has_json else None)
        self._probe(grammar, spec.param)
        return grammar

    def _compile_within(self, schema: GrammarSpec, param: str) -> None:
        """Raises InvalidRequest: the schema cannot be held by itself either."""
        try:
            self._compile(schema)
        except InvalidRequest as error:
            is_path = schema.param.startswith((f"{param}.", f"{param}["))
            raise InvalidRequest(
                str(error) if is_path else f"{param}: {error}", schema.param if is_path else param
            ) from None

    def _contradiction(self, schema: JsonObject, path: str, root: JsonObject) -> str:
        """Tells of the innermost schema of one that no value fits."""
        definitions = {name: root[name] for name in ("$defs", "definitions") if name in root}
        properties = schema.get("properties", {})
        inner = [(f"{path}.properties.{name}", properties.get(name)) for name in schema.get("required", ())]
        for place, one in [*inner, (f"{path}.items", schema.get("items"))]:
            if isinstance(one, dict):
                text = f'{{"grammars": [{_schema_grammar(json.dumps(definitions | one))}}}]}}'
                if _UNSATISFIABLE in LLMatcher(self._tokenizer, text, log_level=0, limits=LIMITS).get_error():
                    return self._contradiction(one, place, root)
        held = ((name, value) for name, value in schema.items() if name in ENFORCED - {"type"})
        names = ["format" if value in FORMATS.values() else name for name, value in held]
        return f"{path} cannot be satisfied: no value fits its {' and '.join(names)}. Correct the schema."

    def _probe(self, grammar: Grammar, param: str) -> None:
        """Follow the grammar along some answers of punctuation, where alternatives begin.

        Raises:
            InvalidRequest: no answer begins, or its first tokens are over the limits already.
        """
        mask = np.zeros(self._num_words, np.int32)
        for first in range(NUM_PROBES):
            state = grammar.start()
            for turn in range(first, first + PROBE_TOKENS):
                state.fill_mask(mask)
                fault = state.fault
                if not state.num_accepted and (not mask.any() or (fault is not None and _ITEMS not in fault)):
                    raise InvalidRequest(f"{param} cannot be satisfied: no first token is allowed. Correct it.", param)
                if fault is not None:
                    message = f"{param} is too complex to follow. Use fewer optional properties, or fewer alternatives."
                    raise InvalidRequest(message, param)
                choices = [token_id for token_id in self._punctuation if mask[token_id >> 5] >> (token_id & 31) & 1]
                if not choices:
                    choices = np.unpackbits(mask.view(np.uint8), bitorder="little").nonzero()[0][:1].tolist()
                if state.has_ended or not choices:
                    break
                state.accept(choices[turn % len(choices)])


def _schema_grammar(source: str) -> str:
    """The library's form of a schema, but for the bracket that closes it."""
    options = json.dumps({"whitespace_pattern": WHITESPACE, "json_allowed_escapes": escapes_in(source)})
    return f'{{"json_schema": {{"x-guidance": {options}{", " if source != "{}" else ""}{source[1:]}'


def _refusal(spec: GrammarSpec, error: str) -> str:
    """The library's words, with the path where they name a keyword."""
    error = error.partition("\n\n")[0].strip()[:MAX_SHOWN]
    if spec.kind is GrammarKind.JSON_SCHEMA:
        return _schema_refusal(spec, error)
    if spec.kind is GrammarKind.LARK:
        error = _PLACE.sub(r"line \1, column \2: ", error)
    else:  # the library was given what is written here: the client's text has no such place
        error = _PLACE.sub("", re.sub(r"\n *\d+ \|.*", "", error, flags=re.DOTALL))
        error = re.sub(r"^invalid regex .* \(in regex\): ", "", error, flags=re.DOTALL)
    return f"{spec.param} cannot be used: {_with_column(error, spec.source)}"


def _schema_refusal(spec: GrammarSpec, error: str) -> str:
    if error == "schema too large":
        return f"{spec.param} is too large after its schemas are merged. Shorten allOf and $ref."
    unknown, is_one_of = _UNIMPLEMENTED.search(error), error.startswith("oneOf constraints are not supported")
    if not unknown and not is_one_of:
        path, pattern = _place_of(error, spec)
        return f"{path} cannot be used: {_with_column(error, pattern)}"
    names = json.loads(f"[{unknown[1]}]") if unknown else ["oneOf"]
    found = keywords_of(json.loads(spec.source), spec.param)
    places = [f"{path}.{keyword}" for path, keyword, _ in found if keyword in names]
    if unknown:
        return f"{' and '.join(places)} cannot be enforced together with the keywords beside it. Leave it out."
    return (
        f"{' or '.join(places[:3])} cannot be enforced, as more than one of its schemas may fit. Use anyOf, or give"
        " each a required property with a constant of its own."
    )


def _with_column(error: str, pattern: str) -> str:
    """The library's words about an expression, whose place they draw: with line and column."""
    found = _DRAWN.search(error)
    if found is None or found["shown"] != pattern.replace("\n", "\\n"):
        return error
    offset = len(found["before"])
    pattern, offset = pattern.replace(f"[^{NO_CONTROL}", "[^"), len(pattern[:offset].replace(f"[^{NO_CONTROL}", "[^"))
    for at, character in enumerate(pattern[:offset]):
        offset -= character == "\n" and at < offset
    return f"{place_in(pattern, offset)}: {found['why']}"


def _place_of(error: str, spec: GrammarSpec) -> tuple[str, str]:
    """The path of the keyword that the library's words repeat, and what they repeat."""
    for path, keyword, value in keywords_of(json.loads(spec.source), spec.param):
        for one in value if keyword == "patternProperties" else (value,):
            for words in _SHOWN.get(keyword, ()):
                if words.format(str(one).replace("\n", "\\n")) in error:
                    return f"{path}.{keyword}", str(one)
    return spec.param, ""


class GrammarCache:
    """Compiled grammars, the least recently used dropped first. Thread: loop.

    Tenants share them. Where it is full, the tenant that brought most of them loses one.
    """

    def __init__(self, capacity: int = 256) -> None:
        self._capacity = capacity
        self._grammars: OrderedDict[tuple[str, ...], tuple[str, Grammar]] = OrderedDict()  # with their tenants

    def find(self, spec: GrammarSpec) -> Grammar | None:
        if spec.key not in self._grammars:
            return None
        self._grammars.move_to_end(spec.key)
        return self._grammars[spec.key][1]

    def keep(self, spec: GrammarSpec, tenant: str, grammar: Grammar) -> None:
        self._grammars[spec.key] = (tenant, grammar)
        if len(self._grammars) > self._capacity:
            counts = Counter(owner for owner, _ in self._grammars.values())
            largest = max(counts, key=counts.__getitem__)
            del self._grammars[next(key for key, (owner, _) in self._grammars.items() if owner == largest)]

    def drop(self, spec: GrammarSpec) -> None:
        """Forget one that has grown past the limits: it holds a hundred megabytes."""
        self._grammars.pop(spec.key, None)


class _Tokenizer:
    """What LLTokenizer asks of one."""

    bos_token_id = None

    def __init__(
        self,
        token_bytes: Sequence[bytes],
        special_ids: Collection[int],
        eos_id: int,
        encode: Callable[[str], Sequence[int]],
    ) -> None:
        self.tokens, self.special_token_ids, self.eos_token_id = token_bytes, sorted(special_ids), eos_id
        self._encode = encode

    def __call__(self, text: bytes | str) -> list[int]:
        return [*self._encode(text.decode() if isinstance(text, bytes) else text)]
