"""Remembers as which ids a chat's turns were computed, so that the turns that follow begin with the same ids.

A model cuts its text into tokens otherwise than a tokenizer would, where it is sampled and where a grammar forces it.
Where a rendered chat begins with a remembered one, prompt and answer, character by character, its ids are taken from
there and only the rest is tokenized: the prefix cache finds all of it, and long chats are tokenized once. An empty
thought that the template writes before an answer, and that was not in the prompt, is not there either. Only texts of
one cache domain meet. No I/O. Thread: the loop adds; any may look up.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from hashlib import blake2b

import numpy as np

from core.errors import InvalidRequest
from core.marked_text import MarkedText, Origin
from core.plan import Int32Array
from core.tokenizer import ControlToken, Tokenizer

Domain = tuple[str, str]  # a request's cache_domain and cache_salt

EMPTY_THOUGHT = "<think>\n\n</think>\n\n"  # as Qwen 3's template writes it before an answer that has none
MOST_TURNS = 1024
MOST_IDS = 4 * 2**20  # of all turns: 16 MiB
MOST_TRIED = 8  # of those that a chat begins with, longest first: whose characters may be others'
_END_CHARS = 32  # of a turn, that are compared before the whole is


@dataclass(frozen=True, slots=True)
class Begun:
    """A rendered prompt and its ids: what an answer goes on with.

    Args:
        may_think: an answer of it may have a thought: where it has none, the template may write an empty one.
        num_unshown: how much of an answer's end clients are not shown, if it was cut there, and cannot send back.
    """

    domain: Domain
    text: str
    ids: Int32Array
    may_think: bool = False
    num_unshown: Callable[[str], int] | None = None


@dataclass(frozen=True, slots=True)
class _Turn:
    """A prompt and its answer.

    Args:
        num_chars: of both.
        num_prompt_chars: of these.
        num_thought_chars: between the two, that were not computed: the template's.
        end: its last characters.
        digest: of its text.
        origins: of the prompt, as a digest.
        control: the control tokens of the answer.
        ids: of both.
    """

    num_chars: int
    num_prompt_chars: int
    num_thought_chars: int
    end: str
    digest: bytes
    origins: bytes
    control: tuple[ControlToken, ...]
    ids: Int32Array


class TurnMemory:
    """
    Args:
        most_ids: kept. Where there are more, the domain that has most of them loses its oldest turn.
    """

    def __init__(self, tokenizer: Tokenizer, most_ids: int = MOST_IDS, most_turns: int = MOST_TURNS) -> None:
        self._tokenizer = tokenizer
        self._most_ids, self._most_turns = most_ids, most_turns
        self._turns: dict[Domain, OrderedDict[bytes, _Turn]] = {}  # by their texts' digests, oldest first
        self._num_ids: dict[Domain, int] = {}

    def encode(self, text: str, domain: Domain) -> list[int]:
        """The ids of a rendered chat: as Tokenizer.encode_chat, but for what is remembered.

        Raises:
            InvalidRequest: as encode_chat.
        """
        if (turn := self._longest(text, domain)) is not None:
            with suppress(InvalidRequest):  # it would name a place in the rest
                return [*turn.ids.tolist(), *self._tokenizer.encode_chat(text[turn.num_chars :])]
        return self._tokenizer.encode_chat(text)

    def _longest(self, text: str, domain: Domain) -> _Turn | None:
        """The text is read once, however many turns end as it does at their length."""
        turns = tuple(self._turns.get(domain, {}).values())
        ended = [one for one in turns if text.startswith(one.end, one.num_chars - len(one.end))]
        plain, running, start, same = str.__str__(text), blake2b(digest_size=32), 0, list[_Turn]()
        for turn in sorted(ended, key=lambda one: one.num_chars):
            running.update(plain[start : turn.num_chars].encode("utf-8", "surrogatepass"))
            start = turn.num_chars
            if running.digest() == turn.digest:
                same.append(turn)
        return next((one for one in same[: -MOST_TRIED - 1 : -1] if self._begins(one, text)), None)

    def _begins(self, turn: _Turn, text: str) -> bool:
        """Whether the characters of a chat that begins with that turn were written by whoever wrote them there."""
        start, end = turn.num_prompt_chars, turn.num_chars
        said = start + turn.num_thought_chars
        if not self._tokenizer.may_cut(text, end) or _digest_of_origins(text[:start]) != turn.origins:
            return False
        origins = text.origins if isinstance(text, MarkedText) else bytes(end)
        is_others = any(origins[start:said]) or Origin.USER in origins[said:end]
        return not is_others and self._tokenizer.may_have(text, slice(said, end), turn.control)

    def add(self, begun: Begun, answer_ids: Sequence[int], cut_text: str = "") -> None:
        """Remember a prompt with its answer.

        Args:
            answer_ids: without the id that ends it.
            cut_text: the end of their text, that is left out: of the id in which it begins, the rest is tokenized.
        """
        if cut_text:
            answer_ids = self._tokenizer.without_end(answer_ids, cut_text)
        if (answer := self._tokenizer.spelled(answer_ids)) is None or not answer_ids:
            return
        ids = np.append(begun.ids, np.array(answer_ids, np.int32))
        self._keep(begun, "", *answer, ids)
        if begun.may_think and not answer[0].startswith(EMPTY_THOUGHT[:7]):
            self._keep(begun, EMPTY_THOUGHT, *answer, ids)
        if begun.num_unshown is not None and (num := begun.num_unshown(text := answer[0])):
            shown = text[:-num].rstrip()
            self.add(replace(begun, num_unshown=None), answer_ids, text[len(shown) :])

    def _keep(self, begun: Begun, thought: str, text: str, control: Sequence[ControlToken], ids: Int32Array) -> None:
        start, whole = len(begun.text) + len(thought), str.__str__(begun.text) + thought + text
        placed = tuple(ControlToken(at + start, end + start, token_id) for at, end, token_id in control)
        turn = _Turn(
            num_chars=len(whole),
            num_prompt_chars=len(begun.text),
            num_thought_chars=len(thought),
            end=whole[-_END_CHARS:],
            digest=_digest(whole),
            origins=_digest_of_origins(begun.text),
            control=placed,
            ids=ids,
        )
        domain = begun.domain
        self._forget(domain, turn.digest)
        self._turns.setdefault(domain, OrderedDict())[turn.digest] = turn
        self._num_ids[domain] = self._num_ids.get(domain, 0) + len(turn.ids)
        while sum(self._num_ids.values()) > self._most_ids or sum(map(len, self._turns.values())) > self._most_turns:
            largest = max(self._num_ids, key=self._num_ids.__getitem__)
            self._forget(largest, next(iter(self._turns[largest])))

    def clear(self) -> None:
        self._turns.clear()
        self._num_ids.clear()

    def _forget(self, domain: Domain, digest: bytes) -> None:
        turns = self._turns.get(domain, OrderedDict())
        if (turn := turns.pop(digest, None)) is None:
            return
        self._num_ids[domain] -= len(turn.ids)
        if not turns:
            del self._turns[domain], self._num_ids[domain]


def _digest(text: str) -> bytes:
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=32).digest()


def _digest_of_origins(text: str) -> bytes:
    origins = text.origins if isinstance(text, MarkedText) else bytes(len(text))
    return blake2b(origins, digest_size=32).digest()
