"""Remembers as which ids a chat's turns were computed, so that the turns that follow begin with the same ids.

A model cuts its text into tokens otherwise than a tokenizer would, where it is sampled and where a grammar forces it.
Where a rendered chat begins with a remembered one, prompt and answer, character by character, its ids are taken from
there and only the rest is tokenized: the prefix cache finds all of it, and long chats are tokenized once. An empty
thought that the template writes before an answer, and that was not in the prompt, is not there either. A long chat that
has been tokenized is known, too, up to each control token that its template wrote: the same chat again, or one that
begins alike, is tokenized from the last of them on. Only texts of one cache domain meet. No I/O. Thread: the loop adds;
any may look up.
"""

from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
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
MOST_IDS = 4 * 2**20  # of all turns and chats: 16 MiB, and as much again where all are chats with many beginnings
MOST_UNLEARNED = 64  # chats that were tokenized and are not kept yet: of 32k tokens 8 MiB
LEAST_CHARS = 4096  # of a chat whose beginnings are kept: a shorter one is tokenized in a millisecond
IDS_APART = 64  # two beginnings of a chat, at least: each takes 250 bytes
MOST_TRIED = 8  # of those that a chat begins with, longest first: whose characters may be others'
_NO_IDS: Int32Array = np.empty(0, np.int32)
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


@dataclass(slots=True, eq=False)
class _Chat:
    """A chat that was tokenized. Its first three fields do not change.

    Args:
        digest: of its longest beginning.
        nums_ids: of its beginnings, by their digests.
        num_left: of them, that no later chat has taken over. Thread: loop.
    """

    digest: bytes
    ids: Int32Array
    nums_ids: dict[bytes, int]
    num_left: int = 0


class TurnMemory:
    """
    Args:
        most_ids: kept. Where there are more, the domain that has most of them loses its oldest turn or chat.
        least_chars: of a chat whose beginnings are kept.

    Attributes:
        keeps_answers: otherwise the ids of a chat are those of its text, whatever was answered before.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        most_ids: int = MOST_IDS,
        most_turns: int = MOST_TURNS,
        least_chars: int = LEAST_CHARS,
    ) -> None:
        self.keeps_answers = True
        self._tokenizer = tokenizer
        self._most_ids, self._most_turns, self._least_chars = most_ids, most_turns, least_chars
        self._turns: dict[Domain, OrderedDict[bytes, _Turn | _Chat]] = {}  # by their digests, oldest first
        self._num_ids: dict[Domain, int] = {}
        self._chats: dict[bytes, _Chat] = {}  # by the digests of their beginnings, which the domain is part of
        self._tokenized: deque[tuple[Domain, _Chat]] = deque(maxlen=MOST_UNLEARNED)  # that learn() has not heard of

    def encode(self, text: str, domain: Domain) -> list[int]:
        """The ids of a rendered chat: as Tokenizer.encode_chat, but for what is remembered.

        Raises:
            InvalidRequest: as encode_chat.
        """
        turn = self._longest(text, domain)
        start, begun = (0, _NO_IDS) if turn is None else (turn.num_chars, turn.ids)
        is_kept = len(text) >= self._least_chars
        control = self._tokenizer.control_of(text) if is_kept else []
        digests = _digests_of_beginnings(text, [one.start for one in control if one.may_cut and one.start], domain)
        known = ((at, chat) for at, digest in reversed(digests.items()) if (chat := self._chats.get(digest)))
        num_chars, chat = next(known, (0, None))
        same = _NO_IDS if chat is None else chat.ids[: chat.nums_ids[digests[num_chars]]]
        if num_chars > start:
            start, begun = num_chars, same
        try:
            ids = [*begun.tolist(), *self._tokenizer.encode_chat(text[start:])]
        except InvalidRequest:  # it names a place in the rest
            return self._tokenizer.encode_chat(text)
        if chat is not None and num_chars == next(reversed(digests)):
            self._tokenized.append((domain, chat))
        elif nums_ids := self._beginnings(ids, len(begun), [one for one in control if one.start >= start], digests):
            longest = next(iter(nums_ids))
            if chat is not None and np.array_equal(begun[: len(same)], same):
                nums_ids |= {digest: num for digest, num in chat.nums_ids.items() if num <= len(same)}
            self._tokenized.append((domain, _Chat(longest, np.array(ids, np.int32), nums_ids)))
        return ids

    def _beginnings(
        self, ids: list[int], num_begun: int, control: Sequence[ControlToken], digests: dict[int, bytes]
    ) -> dict[bytes, int]:
        """How many ids the beginnings of a chat have, the longest first; none, where that cannot be told.

        Args:
            num_begun: ids, before ...
            control: ... the control tokens that its rest has.
            digests: of the beginnings, by their characters.
        """
        found = dict[bytes, int]()
        places = self._tokenizer.places_of_control(ids, num_begun) if control else []
        if [ids[at] for at in places] != [one.id for one in control]:
            return found
        last = len(ids) + IDS_APART
        for at, token in zip(reversed(places), reversed(control), strict=True):
            if token.start in digests and (not found or at <= last - IDS_APART):
                found[digests[token.start]] = last = at
        return found

    def _longest(self, text: str, domain: Domain) -> _Turn | None:
        """The text is read once, however many turns end as it does at their length."""
        turns = [one for one in tuple(self._turns.get(domain, {}).values()) if isinstance(one, _Turn)]
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
        self.learn()
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
        placed = tuple(one._replace(start=one.start + start, stop=one.stop + start) for one in control)
        turn = _Turn(
            num_chars=len(whole),
            num_prompt_chars=len(begun.text),
            num_thought_chars=len(thought),
            end=whole[-_END_CHARS:],
            digest=blake2b(whole.encode("utf-8", "surrogatepass"), digest_size=32).digest(),
            origins=_digest_of_origins(begun.text),
            control=placed,
            ids=ids,
        )
        self._put(begun.domain, turn)

    def learn(self) -> None:
        """Keep what has been tokenized since the last time, wherever that was. Thread: loop."""
        while self._tokenized:
            domain, chat = self._tokenized.popleft()
            kept = self._turns.get(domain, OrderedDict())
            if kept.get(chat.digest) is chat:
                kept.move_to_end(chat.digest)
                continue
            self._put(domain, chat)
            chat.num_left = len(chat.nums_ids)
            for digest in chat.nums_ids:
                if (before := self._chats.get(digest)) is not None:
                    before.num_left -= 1
                    if not before.num_left:
                        self._forget(domain, before.digest)
                self._chats[digest] = chat

    def _put(self, domain: Domain, turn: _Turn | _Chat) -> None:
        self._forget(domain, turn.digest)
        self._turns.setdefault(domain, OrderedDict())[turn.digest] = turn
        self._num_ids[domain] = self._num_ids.get(domain, 0) + len(turn.ids)
        while sum(self._num_ids.values()) > self._most_ids or sum(map(len, self._turns.values())) > self._most_turns:
            largest = max(self._num_ids, key=self._num_ids.__getitem__)
            self._forget(largest, next(iter(self._turns[largest])))

    def clear(self) -> None:
        for kept in (self._turns, self._num_ids, self._chats, self._tokenized):
            kept.clear()

    def _forget(self, domain: Domain, digest: bytes) -> None:
        turns = self._turns.get(domain, OrderedDict())
        if (turn := turns.pop(digest, None)) is None:
            return
        self._num_ids[domain] -= len(turn.ids)
        for one in turn.nums_ids if isinstance(turn, _Chat) else ():
            if self._chats.get(one) is turn:
                del self._chats[one]
        if not turns:
            del self._turns[domain], self._num_ids[domain]


def _digests_of_beginnings(text: str, ends: Sequence[int], domain: Domain) -> dict[int, bytes]:
    """By their ends: of each beginning's characters, and of who wrote them."""
    plain, origins = str.__str__(text), text.origins if isinstance(text, MarkedText) else bytes(len(text))
    spelled, written, start = blake2b(repr(domain).encode(), digest_size=16), blake2b(digest_size=16), 0
    found: dict[int, bytes] = {}
    for end in ends:
        spelled.update(plain[start:end].encode("utf-8", "surrogatepass"))
        written.update(origins[start:end])
        found[end], start = spelled.digest() + written.digest(), end
    return found


def _digest_of_origins(text: str) -> bytes:
    origins = text.origins if isinstance(text, MarkedText) else bytes(len(text))
    return blake2b(origins, digest_size=32).digest()
