"""Drafts by a smaller model of the same vocabulary: core.drafts.DraftModel over a ModelRunner. Thread: engine.

It keeps keys and values of its own for the sequences that it has lately drafted for, in its own slots and blocks. Each
time it first computes what it lacks of a sequence, then samples one token after another, with the sequence's settings
and seed: the target's noise, so that it samples what the target will wherever the two models agree. What it computed of
drafts that were refused is computed over. A sequence that begins as another of its domain did copies those blocks.
"""

import time
from collections.abc import Callable, Hashable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace

import numpy as np

from core.config import BLOCK_SIZE, EngineConfig, ModelConfig
from core.drafter import num_common
from core.drafts import DraftWish, plain_sampling
from core.errors import StartupError
from core.plan import SequenceStart, make_plan
from core.sequence import Sequence
from core.types import SamplingParams
from gpu.device import choose_device
from gpu.kv_cache import bytes_per_block, num_blocks_for
from gpu.memory_plan import draft_room
from gpu.runner import ModelRunner

FADING = 0.9  # of measured times, a step
LEAST_MEASURED = 16  # tokens that it lacked, for a step to tell what one costs
COMPARED = 512  # tokens at a time


@dataclass(slots=True, eq=False)
class Shifted:
    """A sequence as the model's own head reads it (gpu/mtp.py): the tokens behind that at `first`, of source's."""

    source: Sequence
    first: int
    token_ids: list[int]
    num_prompt_tokens: int
    sampling: SamplingParams
    seed: int
    stop_ids: tuple[int, ...]


Drafted = Sequence | Shifted
"""A sequence as a draft model reads it"""


@dataclass(slots=True, eq=False)
class Draftee:
    """What a draft model has of a sequence.

    Args:
        sequence: it may have ended: its blocks are still copied.
        num_sent: blocks that the runner knows of.
        token_ids: whose keys and values are computed.
        num_sure: of these, tokens that the sequence is known to have.
        used: in which call it last was asked for.
    """

    sequence: Drafted
    domain: Hashable
    slot: int
    used: int
    blocks: list[int] = field(default_factory=list)
    num_sent: int = 0
    token_ids: list[int] = field(default_factory=list)
    num_sure: int = 0

    @property
    def is_started(self) -> bool:
        return self.num_sent > 0


Rows = dict[int, tuple[Draftee, int, list[int]]]
"""By wish: who, and from which position on it computes which tokens."""


class DraftRunner:
    """
    Args:
        runner: of the draft model; nobody else steps it.
        vocab_size: the target's.
    """

    name = "model"

    def __init__(self, runner: ModelRunner, vocab_size: int, clock: Callable[[], float] = time.perf_counter) -> None:
        limits = runner.limits
        self.runner, self.max_model_len = runner, limits.max_model_len
        self.vocab_size = min(vocab_size, limits.vocab_size)
        rows = [(row.end - row.start, row.took_s) for row in limits.timed_rows]
        timed = [took_s / length for length, took_s in rows if length >= LEAST_MEASURED]
        decodes = [took_s for length, took_s in rows if length == 1]
        self.token_s = float(np.median(decodes)) if decodes else 0.0
        self.prompt_token_s = float(np.median(timed)) if timed else self.token_s
        self._clock = clock
        self._known: dict[Drafted, Draftee] = {}
        self._free_slots, self._free_blocks = list(range(limits.max_sequences)), list(range(limits.num_blocks))
        self._num_calls = 0

    def clear(self) -> None:
        for one in list(self._known.values()):
            self._forget(one)

    def read(self, sequence: Sequence) -> Drafted | None:
        """The sequence as the model reads it; None: it cannot now."""
        return sequence

    def num_behind(self, sequence: Sequence, domain: Hashable) -> int:
        if (drafted := self.read(sequence)) is None:
            return 0
        one = self._known.get(drafted)
        if one is not None:
            return len(drafted.token_ids) - self._num_known(one, drafted.token_ids)
        return len(drafted.token_ids) - self._donor(drafted.token_ids, domain)[1]

    def propose(self, wishes: Seq[DraftWish]) -> tuple[list[list[int]], float, float]:
        self._num_calls += 1
        began_s = self._clock()
        drafts: list[list[int]] = [[] for _ in wishes]
        copies: list[tuple[int, int]] = []
        rows: Rows = {}
        budget = self.runner.limits.max_batch_tokens
        for index, wish in enumerate(wishes):
            if budget < 1 or (drafted := self.read(wish.sequence)) is None:
                continue
            if (one := self._draftee(drafted, wish, copies)) is None:
                continue
            token_ids = drafted.token_ids
            start = self._num_known(one, token_ids)
            behind = token_ids[start : start + budget]
            if max(behind) >= self.vocab_size:  # padding of the target's vocabulary, which has no text
                self._forget(one)
                continue
            budget -= len(behind)
            one.num_sure = start + len(behind)
            rows[index] = one, start, behind
        num_behind = sum(len(behind) for _, _, behind in rows.values())
        sampled = self._step(rows, wishes, copies)
        caught_up_s = self._clock() - began_s
        if num_behind >= LEAST_MEASURED:
            self.prompt_token_s += (1 - FADING) * (caught_up_s / num_behind - self.prompt_token_s)
        while sampled:
            for index, token_id in sampled.items():
                drafts[index].append(token_id)
            rows = {
                index: (one := rows[index][0], len(one.sequence.token_ids) + len(drafts[index]) - 1, [token_id])
                for index, token_id in sampled.items()
                if len(drafts[index]) < wishes[index].length and token_id < self.vocab_size
            }
            step_s = self._clock()
            sampled = self._step(rows, wishes, [])
            if rows:
                self.token_s += (1 - FADING) * (self._clock() - step_s - self.token_s)
        if num_behind <= len(wishes) * LEAST_MEASURED:  # the usual one or two tokens: a part of drafting
            return _within(drafts, self.vocab_size), 0.0, self._clock() - began_s
        return _within(drafts, self.vocab_size), caught_up_s, self._clock() - began_s - caught_up_s

    def _step(self, rows: Rows, wishes: Seq[DraftWish], copies: list[tuple[int, int]]) -> dict[int, int]:
        """Compute these tokens; the token that follows each row, where it reaches what the wish knows and drafts."""
        if not rows:
            return {}
        starts: list[SequenceStart] = []
        tables: list[tuple[int, int, int]] = []
        computed: list[tuple[int, int, list[int], bool]] = []
        for index, (one, start, token_ids) in rows.items():
            sequence, end = one.sequence, start + len(token_ids)
            if not one.is_started:
                starts.append(_start_of(sequence, one.slot))
            tables += [(one.slot, place, one.blocks[place]) for place in range(one.num_sent, len(one.blocks))]
            one.num_sent = len(one.blocks)
            one.token_ids[start:] = token_ids
            samples = wishes[index].length > 0 and end >= len(sequence.token_ids)
            computed.append((one.slot, start, token_ids, samples))
        ticket = self.runner.forward(make_plan(computed, tables, copies, sequence_starts=starts))
        self.runner.sample(ticket)
        output = self.runner.collect(ticket)
        for row in output.failed_rows:
            self._forget(list(rows.values())[row][0])
        indexes = list(rows)
        return {indexes[row]: token for row, token in zip(output.rows.tolist(), output.token_ids.tolist(), strict=True)}

    def _num_known(self, one: Draftee, token_ids: list[int]) -> int:
        """How many of the sequence's tokens it has; never the last, whose logits are needed."""
        one.num_sure += num_common(one.token_ids[one.num_sure :], token_ids[one.num_sure :])
        return min(one.num_sure, len(token_ids) - 1)

    def _donor(self, token_ids: list[int], domain: Hashable) -> tuple[Draftee | None, int]:
        """Who has most of these tokens in whole blocks, and how many."""
        best: tuple[Draftee | None, int] = (None, 0)
        for one in self._known.values():
            if one.domain == domain and one.is_started:
                num = 0
                while (some := token_ids[num : num + COMPARED]) == one.token_ids[num : num + COMPARED] and some:
                    num += len(some)
                num += num_common(one.token_ids[num : num + COMPARED], some)
                num = min(num, len(token_ids) - 1) // BLOCK_SIZE * BLOCK_SIZE
                best = max(best, (one, num), key=lambda found: found[1])
        return best

    def _draftee(self, sequence: Drafted, wish: DraftWish, copies: list[tuple[int, int]]) -> Draftee | None:
        """The wish's, with a slot and blocks for all that it may compute; None: there is no room."""
        one = self._known.get(sequence)
        num_blocks = num_blocks_for(len(sequence.token_ids) + wish.length)
        if one is None:
            donor, num_shared = self._donor(sequence.token_ids, wish.domain)
            others = (other for other in self._known.values() if other.domain == wish.domain)
            if donor is None and any(not other.is_started for other in others):
                return None  # it may begin alike: the next call knows
            if donor is not None:
                donor.used = self._num_calls
            if not self._make_room(num_blocks, 1):
                return None
            one = self._known[sequence] = Draftee(sequence, wish.domain, self._free_slots.pop(), self._num_calls)
            one.blocks = [self._free_blocks.pop() for _ in range(num_blocks)]
            if donor is not None:
                copies += zip(donor.blocks[: num_shared // BLOCK_SIZE], one.blocks, strict=False)
                one.token_ids, one.num_sure = donor.token_ids[:num_shared], num_shared
        one.used = self._num_calls
        if not self._make_room(num_blocks - len(one.blocks), 0):
            return None
        one.blocks += [self._free_blocks.pop() for _ in range(num_blocks - len(one.blocks))]
        return one

    def _make_room(self, num_blocks: int, num_slots: int) -> bool:
        """Forget those that were not asked for lately until so much is free. False: that is not enough."""
        while len(self._free_blocks) < num_blocks or len(self._free_slots) < num_slots:
            idle = [one for one in self._known.values() if one.used < self._num_calls]
            if not idle:
                return False
            self._forget(min(idle, key=lambda one: one.used))
        return True

    def _forget(self, one: Draftee) -> None:
        del self._known[one.sequence]
        self._free_slots.append(one.slot)
        self._free_blocks += one.blocks


def _start_of(sequence: Drafted, slot: int) -> SequenceStart:
    prompt = tuple(sequence.token_ids[: sequence.num_prompt_tokens])
    return SequenceStart(slot, prompt, len(prompt), plain_sampling(sequence.sampling), sequence.seed, sequence.stop_ids)


def _within(drafts: list[list[int]], vocab_size: int) -> list[list[int]]:
    """Up to the first id that the target does not have."""
    return [draft[: next((i for i, one in enumerate(draft) if one >= vocab_size), len(draft))] for draft in drafts]


def draft_settings(engine: EngineConfig, model: ModelConfig, draft: ModelConfig) -> EngineConfig:
    """The draft model's own settings of the engine.

    Args:
        model: the target's.

    Raises:
        StartupError: the device verifies no drafts.
    """
    choice = choose_device(engine)
    if choice.device.type != "cpu":
        raise StartupError(f"--draft on {choice.device}: drafts are verified on a CPU", "leave --draft out")
    longest = min(engine.max_model_len or model.max_position, model.max_position, draft.max_position)
    num_sequences, num_blocks = draft_room(engine, longest)
    return replace(
        engine,
        max_model_len=longest,
        max_sequences=num_sequences,
        kv_memory_bytes=(num_blocks + 1) * bytes_per_block(draft, choice.dtype),
        has_window_blocks=False,
        quantize=None,
        mtp=False,
        kv_offload_bytes=0,
        kv_offload_dir=None,
        kv_offload_dir_bytes=None,
        max_loras=0,
        deterministic=False,
    )
