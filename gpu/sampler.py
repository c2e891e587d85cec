"""Samples one token per row, all rows together, on the device; and scores a prompt's own tokens. Thread: engine.

A token is argmax(logits / temperature + Gumbel noise), which needs no softmax (Gumbel, 1954); the noise depends on
(seed, position, token id) alone (sampling_rules.py), never on the row or its neighbours.

Order of effects: penalties, logit_bias, min_tokens, then top_k, top_p (of what top_k kept) and min_p, then temperature.
Tokens tied with the last one kept are kept. Logprobs are of the model's raw logits, before all of these.

A kernel samples a row in one go. What is here in torch's operators is its reference, and serves where there is none:
each feature costs only the steps in which a row uses it, and a step of greedy rows is one argmax. Both sample the same
tokens.

What a request asks for stays in its slot (SamplingSlots), written when the slot gets a new occupant, not per step; only
the tokens seen and the last one change as tokens are sampled.
"""

import enum
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from core.plan import Int32Array, PromptTargets, SequenceStart, StepPlan
from core.types import SamplingParams, TokenLogprobs
from gpu.device import to_device
from gpu.sampling_rules import LEAST_TEMPERATURE, Filters, gumbel_argmax, least_of, row_keys, slope_of
from gpu.streams import Event, Streams

Int64Array = npt.NDArray[np.int64]
Float32Array = npt.NDArray[np.float32]


class Feature(enum.IntFlag):
    """What a slot needs beyond an argmax."""

    NOISE = 1
    FILTERS = 2
    PENALTIES = 4
    BIAS = 8
    MIN_TOKENS = 16
    LOGPROBS = 32


ADJUSTED = Feature.PENALTIES | Feature.BIAS | Feature.MIN_TOKENS


class Number(enum.IntEnum):
    """Columns of SamplingSlots.numbers."""

    FEATURES = 0  # of Feature
    TOP_K = 1  # at least 1; the vocabulary's size for all
    SEED = 2  # its 64 bits
    FREE_FROM = 3  # position from which stop ids may be drawn
    NUM_BIASES = 4
    NUM_STOP_IDS = 5


class Factor(enum.IntEnum):
    """Columns of SamplingSlots.factors."""

    INVERSE_TEMPERATURE = 0
    SLOPE = 1  # see sampling_rules.slope_of
    TOP_P = 2  # infinity for all
    LEAST = 3  # see sampling_rules.least_of
    REPETITION = 4
    PRESENCE = 5
    FREQUENCY = 6


class Address(enum.IntEnum):
    """Columns of SamplingSlots.addresses: of first elements on the host; of tokens known, how many."""

    BIAS_IDS = 0  # int64
    BIASES = 1  # float32
    STOP_IDS = 2  # int64
    KNOWN_IDS = 3  # int64, each once: of prompt and output, where there are penalties
    NUM_KNOWN = 4  # grows as tokens are drawn
    KNOWN_ROOM = 5


@dataclass(frozen=True, slots=True)
class SeenTokens:
    """
    Args:
        counts: of each: 2 * how often in the output, + 1 if in the prompt.
    """

    token_ids: Int64Array  # [some], each once
    counts: Int32Array  # [some]


class SamplingSlots:
    """Of all slots.

    Args:
        vocab_size: the logits' width.
        device: of the tokens drawn last, and the table of tokens seen.
    """

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device) -> None:
        self.numbers = np.zeros((num_slots, len(Number)), dtype=np.int64)
        self.factors = np.zeros((num_slots, len(Factor)), dtype=np.float32)
        self.addresses = np.zeros((num_slots, len(Address)), dtype=np.int64)
        self.bias_ids: list[Int64Array] = [np.empty(0, dtype=np.int64)] * num_slots
        self.biases: list[Float32Array] = [np.empty(0, dtype=np.float32)] * num_slots
        self.stop_ids: list[Int64Array] = [np.empty(0, dtype=np.int64)] * num_slots
        self.known_ids: list[Int64Array] = [np.empty(0, dtype=np.int64)] * num_slots
        self.num_logprobs = np.zeros(num_slots, dtype=np.int64)
        self.last_tokens = torch.zeros(num_slots, dtype=torch.int64, device=device)  # what each slot drew last
        self.seen: Tensor | None = None  # int32 [slots, vocab]: 2 * how often in the output, + 1 if in the prompt
        self.vocab_size, self.device = vocab_size, device
        self._changed: set[int] = set()
        self._seen_at_start: dict[int, SeenTokens] = {}  # of slots whose rows are another's still

    def start(self, start: SequenceStart) -> Feature:
        """Give the slot to a new sequence; returns what it needs."""
        slot, params = start.slot, start.sampling
        self._changed.add(slot)
        features = features_of(params)
        top_k = params.top_k if 0 < params.top_k < self.vocab_size else self.vocab_size
        free_from = start.num_prompt_tokens + params.min_tokens
        seed = np.array(start.seed & 0xFFFFFFFFFFFFFFFF, dtype=np.uint64).view(np.int64)
        self.numbers[slot] = (features, top_k, seed, free_from, len(params.logit_bias), len(start.stop_ids))
        self.factors[slot] = (
            1 / max(params.temperature, LEAST_TEMPERATURE),
            slope_of(params.temperature),
            params.top_p if params.top_p < 1 else np.inf,
            least_of(params.min_p, params.temperature),
            params.repetition_penalty,
            params.presence_penalty,
            params.frequency_penalty,
        )
        self.bias_ids[slot] = np.array([token_id for token_id, _ in params.logit_bias], dtype=np.int64)
        self.biases[slot] = np.array([bias for _, bias in params.logit_bias], dtype=np.float32)
        self.stop_ids[slot] = np.array(start.stop_ids, dtype=np.int64)
        self.num_logprobs[slot] = params.num_logprobs or 0
        self.known_ids[slot] = np.empty(0, dtype=np.int64)
        num_known = self._see(start) if features & Feature.PENALTIES else 0
        bias_ids, biases, stop_ids = self.bias_ids[slot], self.biases[slot], self.stop_ids[slot]
        known_ids = self.known_ids[slot]
        self.addresses[slot] = (
            bias_ids.ctypes.data,
            biases.ctypes.data,
            stop_ids.ctypes.data,
            known_ids.ctypes.data,
            num_known,
            len(known_ids),
        )
        return features

    def take_changed(self) -> set[int]:
        """The slots that have started since it was asked before."""
        changed, self._changed = self._changed, set()
        return changed

    def take_seen(self) -> dict[int, "SeenTokens"]:
        """Slot -> what its row of the table is to hold, and nothing else, where that is not there yet."""
        found, self._seen_at_start = self._seen_at_start, {}
        return found

    def reserve_seen(self) -> Tensor:
        """Make the table of tokens seen, where there is none yet: where a CPU computes, most servers never need it."""
        if self.seen is None:
            self.seen = torch.zeros((len(self.numbers), self.vocab_size), dtype=torch.int32, device=self.device)
        return self.seen

    def write_seen(self) -> Tensor:
        """The table of tokens seen, up to date."""
        table = self.reserve_seen()
        for slot, seen in self.take_seen().items():
            row = torch.zeros(self.vocab_size, dtype=torch.int32)
            row[torch.from_numpy(seen.token_ids)] = torch.from_numpy(seen.counts)
            table[slot] = row.to(self.device)
        return table

    def _see(self, start: SequenceStart) -> int:
        """Note all tokens known; returns how many different ones there are."""
        token_ids = np.array(start.token_ids, dtype=np.int64)
        seen = 2 * np.bincount(token_ids[start.num_prompt_tokens :], minlength=self.vocab_size)
        seen[token_ids[: start.num_prompt_tokens]] += 1  # once each: an index that repeats adds once
        known = np.flatnonzero(seen)
        room = min(self.vocab_size, len(known) + start.sampling.max_tokens + 1)
        self.known_ids[start.slot] = np.empty(room, dtype=np.int64)
        self.known_ids[start.slot][: len(known)] = known
        self._seen_at_start[start.slot] = SeenTokens(known, seen[known].astype(np.int32))
        return len(known)


def features_of(params: SamplingParams) -> Feature:
    """What these need beyond an argmax."""
    features = Feature(0)
    if params.temperature > 0:
        features |= Feature.NOISE
        if params.top_k > 0 or params.top_p < 1 or params.min_p > 0:
            features |= Feature.FILTERS
    if params.repetition_penalty != 1 or params.presence_penalty or params.frequency_penalty:
        features |= Feature.PENALTIES
    if params.logit_bias:
        features |= Feature.BIAS
    if params.min_tokens > 0:
        features |= Feature.MIN_TOKENS
    if params.num_logprobs is not None:
        features |= Feature.LOGPROBS
    return features


IntArray = npt.NDArray[np.signedinteger[Any]]

NOISE_CHUNK_CPU = 1 << 17  # elements of noise computed at once: its int64 fits a core's L2 cache
NOISE_CHUNK_CUDA = 1 << 24


@dataclass(frozen=True, slots=True)
class AskedLogprobs:
    """Log probabilities that some rows ask for.

    Args:
        rows: index into the sampled rows.
        num_top: how many of the likeliest each one asks for; most: the most that any of them does.
        find: starts to compute, on the device: of the sampled token [some], of the likeliest [some, most], their ids.
    """

    rows: IntArray  # [some]
    num_top: list[int]  # [some]
    most: int
    find: Callable[[], tuple[Tensor, Tensor, Tensor]]


@dataclass(slots=True)
class Sampled:
    """What was sampled, still on the device."""

    token_ids: Tensor  # [rows]
    is_finite: Tensor  # [rows]: False: the logits are broken and the token means nothing
    logprobs: AskedLogprobs | None


SampleRows = Callable[[Tensor, IntArray, IntArray], tuple[Tensor, Tensor]]
"""A kernel that the host calls with float32 logits [rows, vocab], slots and positions of the tokens to sample.

Returns token ids, int64 [rows], and whether the logits are finite, bool [rows]. It is bound to the slots that it reads,
counts what it samples, and leaves the logits as they were.
"""


class LaunchedSampler(ABC):
    """A kernel that reads its rows, and what their slots ask for, on the device: a step launches it, or its graph does.

    It is bound to the slots that it reads, counts what it samples, and notes what slots sampled last.

    Args:
        token_ids, is_finite: of the rows that were launched last.
        logprobs: of those that ask for them, [rows at least, 3], float32: the sampled token's, and what to subtract
            from any logit, one after the other, to have that token's.
    """

    token_ids: Tensor
    is_finite: Tensor
    logprobs: Tensor

    @abstractmethod
    def can_sample(self, slots: IntArray) -> bool:
        """Whether it has room for all that these ask for; torch samples where it has not."""

    @abstractmethod
    def take_started(self) -> list[Int32Array]:
        """What slots that have started since ask for, as integers; the first: which slots."""

    @abstractmethod
    def put_started(self, parts: list[Tensor]) -> None:
        """parts: what take_started gave last, on the device."""

    @abstractmethod
    def launch(self, logits: Tensor, rows: Tensor) -> None:
        """Sample a token per row. May be captured in a CUDA graph.

        Args:
            logits: [rows, vocab], float32, bfloat16 or float16, contiguous; not changed.
            rows: [2, at least rows]: slots, < 0 for padding, and positions of the tokens to sample.
        """


MakeSampler = Callable[[SamplingSlots], SampleRows | LaunchedSampler]
"""A kernel that samples what slots ask for, the same tokens as torch"""


class Sampler:
    """Sampling state of all slots.

    Args:
        vocab_size: the logits' width.
        make_kernel: None: torch samples.

    launched: the kernel that steps launch; None: sample() has to be called.
    """

    def __init__(
        self, num_slots: int, vocab_size: int, device: torch.device, make_kernel: MakeSampler | None = None
    ) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._asked = SamplingSlots(num_slots, vocab_size, device)
        kernel = None if make_kernel is None else make_kernel(self._asked)
        self.launched = kernel if isinstance(kernel, LaunchedSampler) else None
        self._called = None if isinstance(kernel, LaunchedSampler) else kernel

    @property
    def last_tokens(self) -> Tensor:
        """What each slot sampled last: int64 [slots]."""
        return self._asked.last_tokens

    def start(self, start: SequenceStart) -> None:
        """Give the slot to a new sequence."""
        self._asked.start(start)

    def can_launch(self, slots: IntArray) -> bool:
        """Whether a launch samples all rows of these."""
        return self.launched is not None and self.launched.can_sample(slots)

    def launched_tokens(self, logits: Tensor, slots: IntArray) -> Sampled:
        """What was sampled by the last launch."""
        kernel = self.launched
        assert kernel is not None
        find = partial(_logprobs_with, kernel.logprobs[: len(slots)], logits)
        return Sampled(
            kernel.token_ids[: len(slots)], kernel.is_finite[: len(slots)], self._asked_logprobs(slots, find)
        )

    def sample(self, logits: Tensor, slots: IntArray, positions: IntArray) -> Sampled:
        """Sample a token per row, here and now.

        Args:
            logits: [rows, vocab], float32; not changed.
            slots: [rows]
            positions: [rows], of the token to sample in its sequence.
        """
        if self._called is not None:
            token_ids, is_finite = self._called(logits, slots, positions)
        else:
            is_finite = logits.sum(-1).isfinite()  # [rows]: any NaN or infinity makes the sum one
            token_ids = self._draw_rows(logits, slots, positions)
        self.last_tokens.index_copy_(0, self._ids(slots), token_ids)
        return Sampled(token_ids, is_finite, self._asked_logprobs(slots, partial(_logprobs, logits, token_ids)))

    def _asked_logprobs(
        self, slots: IntArray, find: Callable[..., tuple[Tensor, Tensor, Tensor]]
    ) -> AskedLogprobs | None:
        """find: with (rows, most likely ones asked for)."""
        rows = np.flatnonzero(self._numbers(slots, Number.FEATURES) & Feature.LOGPROBS)
        if not len(rows):
            return None
        num_top: list[int] = self._asked.num_logprobs[slots[rows]].tolist()
        most = min(max(num_top), self._vocab_size)
        return AskedLogprobs(rows, num_top, most, partial(find, rows, most))

    def _draw_rows(self, logits: Tensor, slots: IntArray, positions: IntArray) -> Tensor:
        features = self._numbers(slots, Number.FEATURES)  # [rows]
        used = int(np.bitwise_or.reduce(features, initial=0))
        adjusted = self._adjust(logits, slots, positions, features) if used & ADJUSTED else logits
        token_ids = adjusted.argmax(-1)  # [rows]
        if used & Feature.NOISE:
            noisy = np.flatnonzero(features & Feature.NOISE)
            self._draw(adjusted, token_ids, noisy, slots, positions)
        if used & Feature.PENALTIES:
            self._count_drawn(token_ids, slots, np.flatnonzero(features & Feature.PENALTIES))
        return token_ids

    def _adjust(self, logits: Tensor, slots: IntArray, positions: IntArray, features: IntArray) -> Tensor:
        """Penalties, logit_bias and min_tokens, on a copy: [rows, vocab]."""
        adjusted, asked = logits.clone(), self._asked
        penalised = np.flatnonzero(features & Feature.PENALTIES)
        if len(penalised):
            self._penalise(adjusted, penalised, slots)
        biased = np.flatnonzero(features & Feature.BIAS)
        if len(biased):
            rows, token_ids = self._pairs(biased, [asked.bias_ids[slot] for slot in slots[biased]])
            biases = np.concatenate([asked.biases[slot] for slot in slots[biased]])
            adjusted.index_put_((rows, token_ids), torch.from_numpy(biases).to(self._device), accumulate=True)
        is_early = positions < self._numbers(slots, Number.FREE_FROM)
        forbidden = np.flatnonzero((features & Feature.MIN_TOKENS > 0) & is_early)
        if len(forbidden):
            adjusted[self._pairs(forbidden, [asked.stop_ids[slot] for slot in slots[forbidden]])] = float("-inf")
        return adjusted

    def _penalise(self, adjusted: Tensor, penalised: IntArray, slots: IntArray) -> None:
        """Sources: repetition, arXiv:1909.05858 section 4.1; presence and frequency, OpenAI's API reference."""
        table, row_slots = self._asked.write_seen(), slots[penalised]
        repetition, presence, frequency = (
            self._factors(row_slots, factor) for factor in (Factor.REPETITION, Factor.PRESENCE, Factor.FREQUENCY)
        )  # [some, 1] each
        rows, seen = self._ids(penalised), table[self._ids(row_slots)]
        logits, counts = adjusted[rows], seen >> 1  # [some, vocab]
        repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
        logits = torch.where(seen > 0, repeated, logits)
        adjusted[rows] = logits - frequency * counts - presence * (counts > 0)

    def _draw(self, adjusted: Tensor, token_ids: Tensor, noisy: IntArray, slots: IntArray, positions: IntArray) -> None:
        """Put drawn tokens in place of the argmax, in the rows with a temperature."""
        noisy_slots = slots[noisy]
        rows = self._ids(noisy)
        scaled = adjusted[rows] * self._factors(noisy_slots, Factor.INVERSE_TEMPERATURE)  # [noisy, vocab]
        filtered = np.flatnonzero(self._numbers(noisy_slots, Number.FEATURES) & Feature.FILTERS)
        if len(filtered):
            some = adjusted[self._ids(noisy[filtered])]
            is_dropped = some < self._filters(noisy_slots[filtered]).lowest_kept(some)
            scaled[self._ids(filtered)] = scaled[self._ids(filtered)].masked_fill_(is_dropped, float("-inf"))
        seeds = self._numbers(noisy_slots, Number.SEED).view(np.uint64)
        keys = torch.from_numpy(row_keys(seeds, positions[noisy]).view(np.int64)).to(self._device).unsqueeze(1)
        chunk = NOISE_CHUNK_CPU if self._device.type == "cpu" else NOISE_CHUNK_CUDA
        num_rows = max(1, chunk // self._vocab_size)
        parts = zip(torch.split(scaled, num_rows), torch.split(keys, num_rows), strict=True)
        token_ids[rows] = torch.cat([gumbel_argmax(some, some_keys) for some, some_keys in parts])

    def _filters(self, slots: IntArray) -> Filters:
        return Filters(
            self._ids(self._numbers(slots, Number.TOP_K)),
            self._factors(slots, Factor.TOP_P),
            self._factors(slots, Factor.SLOPE),
            self._factors(slots, Factor.LEAST),
        )

    def _count_drawn(self, token_ids: Tensor, slots: IntArray, penalised: IntArray) -> None:
        assert self._asked.seen is not None
        index = (self._ids(slots[penalised]), token_ids[self._ids(penalised)])
        self._asked.seen.index_put_(index, torch.full_like(index[0], 2, dtype=torch.int32), accumulate=True)

    def _numbers(self, slots: IntArray, column: Number) -> npt.NDArray[np.int64]:
        """[some]"""
        numbers: npt.NDArray[np.int64] = self._asked.numbers[slots, column]
        return numbers

    def _factors(self, slots: IntArray, column: Factor) -> Tensor:
        """[some, 1], to go with [some, vocab]."""
        return to_device(self._asked.factors[slots, column], self._device).unsqueeze(1)

    def _pairs(self, rows: IntArray, lists: list[npt.NDArray[np.int64]]) -> tuple[Tensor, Tensor]:
        """Each row with each token of its list."""
        counts = [len(some) for some in lists]
        return self._ids(np.repeat(rows, counts)), self._ids(np.concatenate(lists))

    def _ids(self, values: Any) -> Tensor:
        return to_device(np.asarray(values, np.int64), self._device)


def _logprobs(logits: Tensor, token_ids: Tensor, rows: IntArray, most: int) -> tuple[Tensor, Tensor, Tensor]:
    """See AskedLogprobs."""
    logprobs = _some_of(logits, rows).log_softmax(-1)  # [some, vocab]
    drawn = logprobs.gather(1, _some_of(token_ids, rows).unsqueeze(1)).squeeze(1)
    return drawn, *logprobs.topk(most)


def _logprobs_with(made: Tensor, logits: Tensor, rows: IntArray, most: int) -> tuple[Tensor, Tensor, Tensor]:
    """The same with what a kernel has made: see LaunchedSampler."""
    made = _some_of(made, rows)  # [some, 3]
    if not most:
        return made[:, 0], made[:, :0], made[:, :0].long()
    top, top_ids = _some_of(logits, rows).topk(most)  # [some, most]
    return made[:, 0], top - made[:, 1:2] - made[:, 2:], top_ids


def _some_of(found: Tensor, rows: IntArray) -> Tensor:
    """Rows of it, without numbers of theirs that would have to be copied to the device."""
    return found if len(rows) == len(found) else torch.stack([found[row] for row in rows.tolist()])


PIECE_BYTES = 32 * 1024**2  # of float32 logits, at most ...
PIECE_ROWS = 256  # ... and so many tokens: reading the head's weights is not what takes the time then


def piece_rows(vocab_size: int) -> int:
    """Tokens whose logits are there at once."""
    return min(PIECE_ROWS, max(1, PIECE_BYTES // (4 * vocab_size)))


@dataclass(slots=True)
class PromptScores:
    """What one step tells of prompts, on the host once the event has come.

    Args:
        slots: of the targets' rows.
    """

    targets: list[PromptTargets]
    slots: list[int]
    logprobs: Tensor  # [tokens of all targets], float32
    top: Tensor  # [tokens, most asked for], float32, likeliest first
    top_ids: Tensor  # [tokens, most asked for]
    event: Event

    def wait(self) -> None:
        self.event.synchronize()

    def told(self) -> Iterator[tuple[PromptTargets, int, list[TokenLogprobs] | None]]:
        """Of each target, with its slot; None: the logits are not finite."""
        first = 0
        for targets, slot in zip(self.targets, self.slots, strict=True):
            part = slice(first, first + len(targets.token_ids))
            is_finite = bool(self.logprobs[part].isfinite().all())
            yield targets, slot, self._entries(targets, part) if is_finite else None
            first = part.stop

    def _entries(self, targets: PromptTargets, part: slice) -> list[TokenLogprobs]:
        num_top = targets.num_top
        columns = (self.logprobs[part], self.top[part, :num_top], self.top_ids[part, :num_top])
        return [
            TokenLogprobs(token_id, logprob, tuple(zip(top_ids, top, strict=True)))
            for token_id, logprob, top, top_ids in zip(
                targets.token_ids, *(column.tolist() for column in columns), strict=True
            )
        ]


def scored_tokens(plan: StepPlan, first_tokens: Int32Array) -> Int32Array:
    """Of the plan's tokens, those whose next ones its targets name, in their order.

    Args:
        first_tokens: [rows]: index of each row's first token.
    """
    parts = [
        np.arange(len(targets.token_ids), dtype=np.int32) + first_tokens[targets.row] + targets.first
        for targets in plan.prompt_targets
    ]
    return np.concatenate(parts) if parts else np.empty(0, dtype=np.int32)


def score(
    hidden: Tensor, plan: StepPlan, logits_of: Callable[[Tensor], Tensor], vocab_size: int, streams: Streams
) -> PromptScores:
    """Start what the plan's targets ask for on its way to the host.

    Args:
        hidden: [tokens of all targets, hidden]
        logits_of: [tokens, hidden] -> [tokens, vocab], float32
    """
    targets = plan.prompt_targets
    most = min(max(one.num_top for one in targets), vocab_size)
    all_ids = np.array(list(chain.from_iterable(one.token_ids for one in targets)), dtype=np.int64)
    wanted = to_device(all_ids, hidden.device)
    found: list[tuple[Tensor, ...]] = []
    num_rows = piece_rows(vocab_size)
    for some, token_ids in zip(torch.split(hidden, num_rows), torch.split(wanted, num_rows), strict=True):
        logprobs = logits_of(some).log_softmax(-1)  # [some, vocab]
        found.append((logprobs.gather(1, token_ids.unsqueeze(1)).squeeze(1), *logprobs.topk(most)))
    logprobs, top, top_ids = (_to_host(torch.cat(pieces), streams) for pieces in zip(*found, strict=True))
    slots = plan.slots[[one.row for one in targets]].tolist()
    return PromptScores(targets, slots, logprobs, top, top_ids, streams.current.record())


def _to_host(found: Tensor, streams: Streams) -> Tensor:
    kept = streams.pinned(found.nbytes).view(found.dtype).view(found.shape)
    streams.current.run(lambda: kept.copy_(found, non_blocking=True))
    return kept


NUM_BUFFERS = 2  # steps whose tokens may be on their way


@dataclass(slots=True)
class OnTheirWay:
    """What one step sampled, on the host once the event has come."""

    token_ids: Tensor  # [rows], int64
    is_finite: Tensor  # [rows]
    asked: AskedLogprobs | None
    logprobs: tuple[Tensor, ...]  # what `asked` finds
    event: Event

    def wait(self) -> None:
        self.event.synchronize()

    def told(self) -> dict[int, TokenLogprobs]:
        """Row among the sampled ones -> its logprobs."""
        if self.asked is None:
            return {}
        logprobs, top, top_ids = (found.tolist() for found in self.logprobs)
        return {
            row: TokenLogprobs(
                token_id=int(self.token_ids[row]),
                logprob=logprobs[index],
                top=tuple(zip(top_ids[index][:num_top], top[index][:num_top], strict=True)),
            )
            for index, (row, num_top) in enumerate(zip(self.asked.rows.tolist(), self.asked.num_top, strict=True))
        }


class TokensToHost:
    """Sampled tokens on their way to the host, while they stay on the device for the next step.

    They come down into one of two buffers in turn, behind an event: who waits for step N does not wait for N+1, which
    was sent after it. On a CPU all is done when it is asked for, and there is nothing to wait for.

    Args:
        num_slots: rows of a step, at most.
    """

    def __init__(self, num_slots: int, streams: Streams) -> None:
        self._streams = streams
        self._buffers = [
            (self._host(num_slots, torch.int64), self._host(num_slots, torch.bool)) for _ in range(NUM_BUFFERS)
        ]

    def send(self, sampled: Sampled) -> OnTheirWay:
        """Start the way of what was sampled to the host."""
        self._buffers.reverse()
        token_ids, is_finite = (buffer[: len(sampled.token_ids)] for buffer in self._buffers[0])
        sources, targets, asked = [sampled.token_ids, sampled.is_finite], [token_ids, is_finite], sampled.logprobs
        if asked is not None:
            num_rows, size = len(asked.rows), len(asked.rows) * asked.most
            targets += [self._host(num_rows, torch.float32), self._host(size, torch.float32).view(num_rows, -1)]
            targets.append(self._host(size, torch.int64).view(num_rows, -1))

        def send() -> None:
            found = sources if asked is None else [*sources, *asked.find()]
            for source, target in zip(found, targets, strict=True):
                target.copy_(source, non_blocking=True)

        self._streams.current.run(send)
        return OnTheirWay(token_ids, is_finite, asked, tuple(targets[2:]), self._streams.current.record())

    def _host(self, num_elements: int, dtype: torch.dtype) -> Tensor:
        return self._streams.pinned(num_elements * dtype.itemsize).view(dtype)
