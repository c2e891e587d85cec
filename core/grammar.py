"""Grammars that hold an answer to a JSON schema, a regular expression, a list of choices or a client's own grammar.

llguidance computes which tokens may come next. Here a request's constraint is checked, so that a refusal names the path
and the keyword, and compiled within limits. A `Grammar` is frozen and shared by requests; each sequence has a
`GrammarState` of its own. No I/O. Thread: compilation wherever it is offloaded to, states the engine's.
"""

import json
import re
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper
from llguidance.gbnf_to_lark import gbnf_to_lark

from core.errors import InvalidRequest

Int32Array = npt.NDArray[np.int32]

MAX_SOURCE_BYTES = 512 * 1024
MAX_DEPTH = 64
MAX_CHOICES = 4096
# 250 ms to compile, 5 ms a token at most
LIMITS = LLParserLimits(
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=200_000,
    step_max_items=50_000,
    max_lexer_states=50_000,
    max_grammar_size=200_000,
)
# Between the tokens of JSON: nothing, a blank, or a line break with its indentation. Models that loop would otherwise
# fill their context with blanks.
JSON_OPTIONS = {"whitespace_pattern": r"[ ]|\n[ ]{0,24}|\n\t{0,12}"}
ANNOTATIONS = frozenset(
    re.findall(
        r"\S+",
        "$schema $id $anchor $comment $defs definitions title description default examples deprecated readOnly"
        " writeOnly contentMediaType contentEncoding discriminator example externalDocs xml",
    )
)
ENFORCED = frozenset(
    re.findall(
        r"\S+",
        "type enum const anyOf oneOf allOf $ref items prefixItems minItems maxItems properties additionalProperties"
        " patternProperties required minProperties maxProperties minLength maxLength pattern format minimum maximum"
        " exclusiveMinimum exclusiveMaximum multipleOf",
    )
)
_TIME = r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,9})?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
_DATE = (
    r"[1-9][0-9]{3}-"
    r"((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)|02-(0[1-9]|1[0-9]|2[0-8]))"
)
# What a format is held by: the library's own dates have 29 February in any year, its times leap seconds at any hour,
# and some of its texts no limit
FORMATS: Mapping[str, Mapping[str, Any]] = {
    "date": {"pattern": f"^{_DATE}$"},
    "date-time": {"pattern": f"^{_DATE}T{_TIME}$"},
    "time": {"pattern": f"^{_TIME}$"},
    "email": {"format": "email", "maxLength": 254},
    "hostname": {"format": "hostname", "maxLength": 253},
    "uri": {"format": "uri", "maxLength": 2048},
    **{name: {"format": name} for name in ("duration", "ipv4", "ipv6", "uuid")},
}
_SCHEMAS_BY_NAME = ("properties", "patternProperties", "$defs", "definitions")
_SCHEMA_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_SCHEMAS = ("items", "additionalProperties")
_UNIMPLEMENTED = re.compile(r"Unimplemented keys: \[(.*)\]")


class GrammarKind(StrEnum):
    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    LARK = "grammar"


@dataclass(frozen=True, slots=True)
class GrammarSpec:
    """What holds an answer, not compiled yet.

    Args:
        source: a JSON schema as canonical JSON, a regular expression, or a grammar in Lark's notation.
        param: the request's field that it came in, for refusals.
    """

    kind: GrammarKind
    source: str
    param: str


ANY_OBJECT: Mapping[str, Any] = {"type": "object"}


def json_schema(schema: object, param: str) -> GrammarSpec:
    """
    Raises:
        InvalidRequest: it is no schema, is too large or too deep, or has a keyword that cannot be enforced.
    """
    if not isinstance(schema, dict | bool):
        raise InvalidRequest(f"{param} must be a JSON schema: an object.", param)
    for path, keyword, value in _keywords(schema, param, 0):
        if keyword not in ANNOTATIONS | ENFORCED:
            hint = "Leave it out." if keyword.startswith("x-") else "It cannot be enforced. Leave it out."
            raise InvalidRequest(f"{path} has the keyword {keyword!r}. {hint}", param)
        if keyword == "$ref" and not (isinstance(value, str) and value.startswith("#")):
            raise InvalidRequest(f"{path}.$ref must point into the same schema, as '#/$defs/NAME' does.", param)
        if keyword == "format" and value not in FORMATS:
            raise InvalidRequest(f"{path}.format must be one of {', '.join(sorted(FORMATS))}, or left out.", param)
    source = json.dumps(_with_formats(schema), ensure_ascii=False, separators=(",", ":"))
    return _bounded(GrammarSpec(GrammarKind.JSON_SCHEMA, source, param))


def regex(pattern: str, param: str) -> GrammarSpec:
    """The whole answer matches. Raises InvalidRequest: it is too long."""
    return _bounded(GrammarSpec(GrammarKind.REGEX, pattern, param))


def choice(texts: Sequence[str], param: str) -> GrammarSpec:
    """The answer is one of the texts. Raises InvalidRequest: there is none, or too many."""
    if not texts or len(texts) > MAX_CHOICES:
        raise InvalidRequest(f"{param} must have 1 to {MAX_CHOICES} choices.", param)
    return _bounded(GrammarSpec(GrammarKind.REGEX, "|".join(map(_escaped, texts)), param))


def lark(grammar: str, param: str) -> GrammarSpec:
    """Lark's notation, or GBNF, which is translated. Raises InvalidRequest: it is too long."""
    is_gbnf = re.search(r"^\s*root\s*::=", grammar, re.MULTILINE) is not None
    if is_gbnf:
        try:
            grammar = gbnf_to_lark(grammar)
        except Exception as error:
            raise InvalidRequest(f"{param} cannot be read as GBNF: {error}", param) from error
    return _bounded(GrammarSpec(GrammarKind.LARK, grammar, param))


def _bounded(spec: GrammarSpec) -> GrammarSpec:
    if len(spec.source.encode()) > MAX_SOURCE_BYTES:
        raise InvalidRequest(f"{spec.param} is larger than {MAX_SOURCE_BYTES // 1024} KiB.", spec.param)
    return spec


def _escaped(text: str) -> str:
    return re.sub(r"[^\w ]", lambda match: f"\\x{{{ord(match[0]):x}}}", text)


def _keywords(schema: Any, path: str, depth: int) -> Iterator[tuple[str, str, Any]]:
    """Each keyword of a schema and of those in it, with the path of the schema that has it.

    Raises InvalidRequest: it is too deep, or no schema.
    """
    if isinstance(schema, bool):
        return
    if depth > MAX_DEPTH:
        raise InvalidRequest(f"{path} is nested deeper than {MAX_DEPTH} levels.", path.partition(".")[0])
    if not isinstance(schema, dict):
        raise InvalidRequest(f"{path} must be a schema: an object, true or false.", path.partition(".")[0])
    for keyword, value in schema.items():
        yield path, keyword, value
        at = f"{path}.{keyword}"
        if keyword in _SCHEMAS_BY_NAME:
            if not isinstance(value, dict):
                raise InvalidRequest(f"{at} must be an object of schemas.", path.partition(".")[0])
            for name, one in value.items():
                yield from _keywords(one, f"{at}.{name}", depth + 1)
        elif keyword in _SCHEMA_LISTS:
            if not isinstance(value, list) or not value:
                raise InvalidRequest(f"{at} must be a list of schemas.", path.partition(".")[0])
            for i, one in enumerate(value):
                yield from _keywords(one, f"{at}[{i}]", depth + 1)
        elif keyword in _SCHEMAS:
            yield from _keywords(value, at, depth + 1)


def _with_formats(schema: Any) -> Any:
    """Each format as what it is held by."""
    if not isinstance(schema, dict):
        return schema
    made = dict(schema)
    for keyword, value in schema.items():
        if keyword in _SCHEMAS_BY_NAME:
            made[keyword] = {name: _with_formats(one) for name, one in value.items()}
        elif keyword in _SCHEMA_LISTS:
            made[keyword] = [_with_formats(one) for one in value]
        elif keyword in _SCHEMAS:
            made[keyword] = _with_formats(value)
    if "format" in made:
        held_by = FORMATS[made.pop("format")]
        if made.keys() & held_by.keys():
            made["allOf"] = [*made.get("allOf", ()), {"type": "string", **held_by}]
        else:
            made |= held_by
    return made


class GrammarState:
    """One sequence's. Thread: engine.

    Attributes:
        num_accepted: tokens.
    """

    def __init__(self, matcher: LLMatcher) -> None:
        self.num_accepted = 0
        self._matcher = matcher

    @property
    def fault(self) -> str | None:
        """Why the sequence cannot go on: the library's limits are exceeded, or a token came that may not."""
        return self._matcher.get_error() if self._matcher.is_error() else None

    def fill_mask(self, mask: Int32Array) -> None:
        """Which tokens may come next: a bit each, the lowest of the first word is token 0's. After a fault any may.

        Args:
            mask: [words], contiguous; as wide as the logits.
        """
        found = np.frombuffer(self._matcher.compute_bitmask(), np.int32)[: len(mask)]
        mask[: len(found)] = found
        mask[len(found) :] = 0
        if self._matcher.is_error():
            mask[:] = -1

    def accept(self, token_id: int) -> None:
        """The token has been sampled. A fault if it may not come here."""
        self._matcher.consume_token(token_id)
        self.num_accepted += 1

    def roll_back(self, num_tokens: int) -> None:
        """The last tokens were not sampled after all."""
        self._matcher.rollback(num_tokens)
        self.num_accepted -= num_tokens

    def forced(self) -> list[int]:
        """Tokens that have to come next, none of them accepted yet."""
        return list(self._matcher.compute_ff_tokens())

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
    """Compiled, for one model's vocabulary."""

    matcher: LLMatcher
    num_words: int

    def start(self) -> GrammarState:
        return GrammarState(self.matcher.deep_copy())


class GrammarCompiler:
    """
    Args:
        token_bytes: of each id; b"": none.
        special_ids: of control tokens.
        eos_ids: any of which ends an answer; none: answers end where nothing more may come.
        encode: ids of a text, without special tokens.
    """

    def __init__(
        self,
        token_bytes: Sequence[bytes],
        special_ids: Collection[int],
        eos_ids: Sequence[int],
        encode: Callable[[str], Sequence[int]],
    ) -> None:
        if not eos_ids:  # the library needs one: a token beyond the model's
            token_bytes, special_ids = [*token_bytes, b"<|end|>"], [*special_ids, len(token_bytes)]
            eos_ids = [len(token_bytes) - 1]
        self._num_words = -(-len(token_bytes) // 32)
        self._tokenizer = LLTokenizer(
            TokenizerWrapper(_Vocabulary(token_bytes, special_ids, eos_ids, encode)), len(token_bytes), list(eos_ids)
        )

    def compile(self, spec: GrammarSpec) -> Grammar:
        """
        Raises:
            InvalidRequest: it cannot be read, contradicts itself, cannot be enforced, or is over the limits.
        """
        source = spec.source
        match spec.kind:
            case GrammarKind.JSON_SCHEMA:
                options: Any = JSON_OPTIONS  # the library's type for them is behind
                text = LLMatcher.grammar_from_json_schema(source, overrides=options)
            case GrammarKind.REGEX:
                text = LLMatcher.grammar_from_regex(source)
            case GrammarKind.LARK:
                text = LLMatcher.grammar_from_lark(source)
        matcher = LLMatcher(self._tokenizer, text, log_level=0, limits=LIMITS)
        if matcher.is_error():
            raise InvalidRequest(_refusal(spec, matcher.get_error()), spec.param)
        return Grammar(matcher, self._num_words)


def _refusal(spec: GrammarSpec, error: str) -> str:
    """The library's words, with the path where they name a keyword."""
    error = error.partition("\n\n")[0].strip()
    if spec.kind is GrammarKind.JSON_SCHEMA and (found := _UNIMPLEMENTED.search(error)):
        names = json.loads(f"[{found[1]}]")
        places = [f"{path}.{key}" for path, key, _ in _keywords(json.loads(spec.source), spec.param, 0) if key in names]
        return f"{' and '.join(places)} cannot be enforced together with what stands beside it. Leave it out."
    return f"{spec.param} cannot be used: {error}"


class GrammarCache:
    """Compiled grammars, the least recently used dropped first. Thread: loop.

    Tenants share them. Where it is full, the tenant that brought most of them loses one.
    """

    def __init__(self, capacity: int = 256) -> None:
        self._capacity = capacity
        self._grammars: OrderedDict[tuple[GrammarKind, str], tuple[str, Grammar]] = OrderedDict()  # with their tenants

    def find(self, spec: GrammarSpec) -> Grammar | None:
        key = (spec.kind, spec.source)
        if key not in self._grammars:
            return None
        self._grammars.move_to_end(key)
        return self._grammars[key][1]

    def keep(self, spec: GrammarSpec, tenant: str, grammar: Grammar) -> None:
        self._grammars[spec.kind, spec.source] = (tenant, grammar)
        if len(self._grammars) > self._capacity:
            counts = Counter(owner for owner, _ in self._grammars.values())
            largest = max(counts, key=counts.__getitem__)
            del self._grammars[next(key for key, (owner, _) in self._grammars.items() if owner == largest)]


class _Vocabulary:
    """What LLTokenizer asks of a tokenizer."""

    bos_token_id = None

    def __init__(
        self,
        tokens: Sequence[bytes],
        special_ids: Collection[int],
        eos_ids: Sequence[int],
        encode: Callable[[str], Sequence[int]],
    ) -> None:
        self.tokens = list(tokens)
        self.special_token_ids = sorted(special_ids)
        self.eos_token_id = eos_ids[0]
        self._encode = encode

    def __call__(self, text: bytes | str) -> list[int]:
        return list(self._encode(text.decode() if isinstance(text, bytes) else text))
