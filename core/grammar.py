"""Compiles what holds an answer (core/constraints.py) for a model's vocabulary, and follows it token by token.

llguidance computes which tokens may come next. A `Grammar` is frozen and shared by requests; each sequence has a
`GrammarState` of its own. No I/O. Thread: compilation wherever it is offloaded to, states the engine's.
"""

import json
import re
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper
from llguidance.gbnf_to_lark import gbnf_to_lark

from core.constraints import WHITESPACE, GrammarKind, GrammarSpec, keywords_of
from core.errors import InvalidRequest

Int32Array = npt.NDArray[np.int32]

# 250 ms to compile, 5 ms a token at most
LIMITS = LLParserLimits(
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=200_000,
    step_max_items=50_000,
    max_lexer_states=50_000,
    max_grammar_size=200_000,
    verbose_errors=False,
)
# Beginnings of answers that are tried when a grammar is compiled, to find most of those that become too complex
NUM_PROBES, PROBE_TOKENS = 3, 24
JSON_OPTIONS = {"whitespace_pattern": WHITESPACE}
MAX_SHOWN = 500  # characters of the library's words, which repeat what they refuse
_MISPLACED = re.compile("doesn't satisfy the grammar|out of range")
_UNIMPLEMENTED = re.compile(r"Unimplemented keys: \[(.*)\]")


class GrammarState:
    """One sequence's. Thread: engine.

    Attributes:
        num_accepted: tokens.
    """

    def __init__(self, matcher: LLMatcher, num_words: int) -> None:
        self.num_accepted = 0
        self._matcher = matcher
        self._num_words = num_words

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
        if self._matcher.is_error():
            mask[:] = -1
            return
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
        self.num_accepted += 1

    def takes(self, token_id: int) -> bool:
        """Whether the token may come next."""
        return bool(self._matcher.validate_tokens([token_id]) == 1)

    def roll_back(self, num_tokens: int) -> None:
        """The last tokens were not sampled after all."""
        self._matcher.rollback(num_tokens)
        self.num_accepted -= num_tokens

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
    """Compiled, for one model's vocabulary."""

    matcher: LLMatcher
    num_words: int

    def start(self) -> GrammarState:
        return GrammarState(self.matcher.deep_copy(), self.num_words)


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
        self._punctuation = [i for i, one in enumerate(token_bytes) if len(one) == 1 and one in b'"{}[]:,']
        self._tokenizer = LLTokenizer(
            TokenizerWrapper(_Vocabulary(token_bytes, special_ids, eos_ids, encode)), len(token_bytes), list(eos_ids)
        )

    def compile(self, spec: GrammarSpec) -> Grammar:
        """
        Raises:
            InvalidRequest: it cannot be read, contradicts itself, cannot be enforced, or is over the limits.
        """
        try:
            return self._compile(spec)
        except InvalidRequest:
            if spec.fallback is None:
                raise
            return self.compile(spec.fallback)

    def _compile(self, spec: GrammarSpec) -> Grammar:
        source = spec.source
        match spec.kind:
            case GrammarKind.JSON_SCHEMA:
                options: Any = JSON_OPTIONS  # the library's type for them is behind
                text = LLMatcher.grammar_from_json_schema(source, overrides=options)
            case GrammarKind.REGEX:
                text = LLMatcher.grammar_from_regex(source)
            case GrammarKind.LARK | GrammarKind.TAGGED:
                text = LLMatcher.grammar_from_lark(source)
            case GrammarKind.GBNF:
                try:
                    text = LLMatcher.grammar_from_lark(gbnf_to_lark(source))
                except Exception as error:  # the translator's own
                    raise InvalidRequest(f"{spec.param} cannot be read as GBNF: {error}", spec.param) from error
        matcher = LLMatcher(self._tokenizer, text, log_level=0, limits=LIMITS)
        if matcher.is_error():
            raise InvalidRequest(_refusal(spec, matcher.get_error()), spec.param)
        grammar = Grammar(matcher, self._num_words)
        self._probe(grammar, spec.param)
        return grammar

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
                if not state.num_accepted and (state.fault is not None or not mask.any()):
                    raise InvalidRequest(f"{param} cannot be satisfied: no answer begins so.", param)
                if state.fault is not None:
                    message = f"{param} is too complex to follow. Use fewer optional properties, or fewer alternatives."
                    raise InvalidRequest(message, param)
                choices = [token_id for token_id in self._punctuation if mask[token_id >> 5] >> (token_id & 31) & 1]
                if not choices:
                    choices = np.unpackbits(mask.view(np.uint8), bitorder="little").nonzero()[0][:1].tolist()
                if state.has_ended or not choices:
                    break
                state.accept(choices[turn % len(choices)])


def _refusal(spec: GrammarSpec, error: str) -> str:
    """The library's words, with the path where they name a keyword."""
    error = error.partition("\n\n")[0].strip()[:MAX_SHOWN]
    if spec.kind is GrammarKind.JSON_SCHEMA and (found := _UNIMPLEMENTED.search(error)):
        names = json.loads(f"[{found[1]}]")
        found_keys = keywords_of(json.loads(spec.source), spec.param, 0)
        places = [f"{path}.{key}" for path, key, _ in found_keys if key in names]
        return f"{' and '.join(places)} cannot be enforced together with what stands beside it. Leave it out."
    if spec.kind is GrammarKind.TAGGED:
        error = re.sub(r"^at \d+\(\d+\): |\n   \d+ \|.*", "", error, flags=re.DOTALL)
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
