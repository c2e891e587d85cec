"""Samples one token per row, all rows together, on the device; and scores a prompt's own tokens. Thread: engine.

gpu/sampling_rules.py defines what is sampled. Here are the settings that requests ask for, slot by slot, torch's
sampler on top of those rules, the interface of the kernels that replace it, and the way of tokens and logprobs to the
host.

Settings are written when a slot gets a new occupant, not per step; only the tokens seen and the last one change as
tokens are sampled. Logprobs are of the model's raw logits, before everything that changes them.
"""

import enum
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from core.plan import Int32Array, PromptTargets, SequenceStart, StepPlan
from core.repetition import TokenPenalties
from core.types import SamplingParams, TokenLogprobs
from gpu.device import to_device
from gpu.sampling_rules import (
    LEAST_TEMPERATURE,
    RareFilters,
    gumbel_noise,
    kept_range,
    lowest_kept,
    min_p_offset_of,
    penalise,
    row_keys,
    slope_of,
    xtc_chance,
)
from gpu.streams import Event, Streams

Int64Array = npt.NDArray[np.int64]
IntArray = npt.NDArray[np.signedinteger[Any]]
Listed = TypeVar("Listed", np.int64, np.float32)


class Feature(enum.IntFlag):
    """What a slot needs beyond an argmax."""

    NOISE = 1
    FILTERS = 2
    PENALTIES = 4
    BIAS = 8
    MIN_TOKENS = 16
    LOGPROBS = 32
    RARE = 64  # of sampling_rules.RareFilters: no LaunchedSampler has them


FORBIDDEN = -1e30  # a logit below BANNED ones, of which a whole row adds up to a finite number
MOST_XTC_THRESHOLD = 0.5  # with more no two tokens are as likely: XTC is off
ADJUSTED = Feature.PENALTIES | Feature.BIAS | Feature.MIN_TOKENS
HISTORY = Feature.PENALTIES  # depends on the tokens that the slot has sampled before


class Number(enum.IntEnum):
    """Columns of SamplingSlots.numbers."""

    FEATURES = 0  # of Feature
    TOP_K = 1  # at least 1; the vocabulary's size for all
    SEED = 2  # its 64 bits
    STOP_FROM = 3  # position from which stop ids may be sampled
    NUM_BIASES = 4
    NUM_STOP_IDS = 5


class Factor(enum.IntEnum):
    """Columns of SamplingSlots.factors."""

    INVERSE_TEMPERATURE = 0
    SLOPE = 1  # see sampling_rules.slope_of
    TOP_P = 2  # 1 for all
    MIN_P_OFFSET = 3  # see sampling_rules.min_p_offset_of
    REPETITION = 4
    PRESENCE = 5
    FREQUENCY = 6
    TYPICAL_P = 7
    SIGMAS = 8
    XTC_PROBABILITY = 9
    XTC_THRESHOLD = 10


@dataclass(frozen=True, slots=True)
class SeenTokens:
    """The tokens of a new sequence that has penalties.

    Args:
        counts: of each token: 2 * how often in the output, + 1 if in the prompt.
    """

    token_ids: Int64Array  # [some], each once
    counts: Int32Array  # [some]


class SamplingSlots:
    """The sampling settings of all slots, on the host; the tokens they sampled, on the device.

    Args:
        vocab_size: the logits' width.
        device: of last_tokens and seen.
    """

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device) -> None:
        self.numbers = np.zeros((num_slots, len(Number)), dtype=np.int64)
        self.factors = np.zeros((num_slots, len(Factor)), dtype=np.float32)
        self.num_logprobs = np.zeros(num_slots, dtype=np.int64)
        # [slots, as many as any slot has had]: a slot's own come first, and Number says how many
        self.bias_ids = np.zeros((num_slots, 0), dtype=np.int64)
        self.biases = np.zeros((num_slots, 0), dtype=np.float32)
        self.stop_ids = np.zeros((num_slots, 0), dtype=np.int64)
        self.last_tokens = torch.zeros(num_slots, dtype=torch.int64, device=device)  # that each slot sampled
        self.seen: Tensor | None = None  # int32 [slots, vocab]: see SeenTokens.counts
        self.vocab_size, self.device = vocab_size, device
        self._own_biases: list[tuple[tuple[int, float], ...]] = [()] * num_slots
        self._changed: set[int] = set()
        self._unwritten: dict[int, SeenTokens] = {}  # rows of `seen` that are still an earlier sequence's

    def start(self, start: SequenceStart) -> Feature:
        """Give the slot to a new sequence; returns what it needs."""
        slot, params = start.slot, start.sampling
        self._changed.add(slot)
        features = features_of(params)
        top_k = params.top_k if 0 < params.top_k < self.vocab_size else self.vocab_size
        stop_from = start.num_prompt_tokens + params.min_tokens
        seed = np.array(start.seed & 0xFFFFFFFFFFFFFFFF, dtype=np.uint64).view(np.int64)
        self.numbers[slot] = (features, top_k, seed, stop_from, 0, len(start.stop_ids))
        self.factors[slot] = (
            1 / max(params.temperature, LEAST_TEMPERATURE),
            slope_of(params.temperature),
            min(params.top_p, 1.0),
            min_p_offset_of(params.min_p, params.temperature),
            params.repetition_penalty,
            params.presence_penalty,
            params.frequency_penalty,
            params.typical_p,
            params.top_n_sigma,
            params.xtc_probability,
            params.xtc_threshold,
        )
        self.num_logprobs[slot] = params.num_logprobs or 0
        self._set_biases(slot, dict(params.logit_bias))
        self.stop_ids = _with_list(self.stop_ids, slot, start.stop_ids)
        self._own_biases[slot] = params.logit_bias
        if features & Feature.PENALTIES and params.repeat_last_n < 0:
            token_ids, num_prompt = np.array(start.token_ids, dtype=np.int64), start.num_prompt_tokens
            counts = 2 * np.bincount(token_ids[num_prompt:], minlength=self.vocab_size)
            counts[token_ids[:num_prompt]] += 1  # once each: an index that repeats adds once
            known = np.flatnonzero(counts)
            self._unwritten[slot] = SeenTokens(known, counts[known].astype(np.int32))
        return features

    def penalise(self, penalties: TokenPenalties) -> None:
        """Set what applies to the one token that the slot samples next."""
        slot = penalties.slot
        self._changed.add(slot)
        biases = dict(self._own_biases[slot])
        for token_id, penalty in penalties.dry.items():
            biases[token_id] = biases.get(token_id, 0.0) - penalty
        self._set_biases(slot, biases)
        if penalties.counts is not None:
            token_ids, counts = list(penalties.counts), list(penalties.counts.values())
            self._unwritten[slot] = SeenTokens(np.array(token_ids, np.int64), 2 * np.array(counts, np.int32))

    def _set_biases(self, slot: int, biases: dict[int, float]) -> None:
        self.numbers[slot, Number.NUM_BIASES] = len(biases)
        self.bias_ids = _with_list(self.bias_ids, slot, list(biases))
        self.biases = _with_list(self.biases, slot, list(biases.values()))

    def take_changed(self) -> set[int]:
        """The slots that have started since the last call."""
        changed, self._changed = self._changed, set()
        return changed

    def take_seen(self) -> dict[int, SeenTokens]:
        """Slot -> what its row of `seen` must hold, for the rows that do not hold it yet."""
        found, self._unwritten = self._unwritten, {}
        return found

    def reserve_seen(self) -> Tensor:
        """Make the table of tokens seen, if there is none yet: on a CPU most servers never need it."""
        if self.seen is None:
            self.seen = torch.zeros((len(self.numbers), self.vocab_size), dtype=torch.int32, device=self.device)
        return self.seen

    def write_seen(self) -> Tensor:
        """The table of tokens seen, brought up to date."""
        table = self.reserve_seen()
        for slot, seen in self.take_seen().items():
            row = torch.zeros(self.vocab_size, dtype=torch.int32)
            row[torch.from_numpy(seen.token_ids)] = torch.from_numpy(seen.counts)
            table[slot] = row.to(self.device)
        return table


def _with_list(table: npt.NDArray[Listed], slot: int, values: Any) -> npt.NDArray[Listed]:
    """The table with a slot's list written to its row; a wider copy where it has no room."""
    count, width = len(values), table.shape[1]
    if count > width:
        table = np.pad(table, ((0, 0), (0, (1 << (count - 1).bit_length()) - width)))
    table[slot, :count] = values
    return table


def features_of(params: SamplingParams) -> Feature:
    """What these need beyond an argmax."""
    features = Feature(0)
    if params.temperature > 0:
        features |= Feature.NOISE
        if params.typical_p < 1 or params.top_n_sigma > 0 or params.xtc_probability > 0:
            features |= Feature.RARE
        elif params.top_k > 0 or params.top_p < 1 or params.min_p > 0:
            features |= Feature.FILTERS
    if params.repetition_penalty != 1 or params.presence_penalty or params.frequency_penalty:
        features |= Feature.PENALTIES
    if params.logit_bias or params.dry_multiplier > 0:
        features |= Feature.BIAS
    if params.min_tokens > 0:
        features |= Feature.MIN_TOKENS
    if params.num_logprobs is not None:
        features |= Feature.LOGPROBS
    return features


@dataclass(frozen=True, slots=True)
class RequestedLogprobs:
    """Log probabilities that some rows ask for.

    Args:
        rows: index into the sampled rows.
        num_top: how many of the likeliest tokens each row asks for; most: the largest of these.
        find: starts to compute, on the device: the sampled tokens' [some], the likeliest [some, most], their ids.
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
    logprobs: RequestedLogprobs | None


@dataclass(frozen=True, slots=True)
class Masked:
    """Rows that may sample some tokens only.

    Args:
        rows: [masked], of the logits.
        masks: [masked, words], int32, contiguous: a bit for each token, see core.plan.Runner.sample.
    """

    rows: IntArray
    masks: Int32Array


@dataclass(frozen=True, slots=True)
class DraftRows:
    """Which rows verify drafts.

    Args:
        turns: [rows]: how many rows of its slot come before.
        next_ids: [rows]: the draft that the slot's next row follows; NO_DRAFT: there is none.
    """

    turns: IntArray
    next_ids: IntArray


NO_DRAFT = -1

SampleRows = Callable[[Tensor, IntArray, IntArray, Masked | None], tuple[Tensor, Tensor]]
"""A kernel that the host calls with float32 logits [rows, vocab], slots and positions of the tokens to sample.

Before everything else that changes logits, those that a mask forbids become FORBIDDEN. Returns token ids, int64 [rows],
and whether the logits are finite, bool [rows]. It reads the SamplingSlots it was made with, counts the tokens it
samples, and leaves the logits as they were.
"""


class LaunchedSampler(ABC):
    """A kernel that reads its rows and their slots' settings on the device: a step, or its CUDA graph, launches it.

    It reads the SamplingSlots it was made with, counts the tokens it samples, and writes last_tokens.

    Args:
        token_ids, is_finite: of the rows launched last.
        logprobs: of rows that ask for them, [at least rows, 3], float32: the sampled token's, and two numbers to
            subtract, one after the other, from any logit to have that token's.
    """

    token_ids: Tensor
    is_finite: Tensor
    logprobs: Tensor

    @abstractmethod
    def can_sample(self, slots: IntArray) -> bool:
        """Whether it has room for all that these slots ask for; if not, torch samples."""

    @abstractmethod
    def take_started(self) -> list[Int32Array]:
        """The settings of slots that have started since the last call, as integers; the first: which slots."""

    @abstractmethod
    def put_started(self, parts: list[Tensor]) -> None:
        """parts: what take_started returned last, on the device."""

    @abstractmethod
    def launch(self, logits: Tensor, rows: Tensor) -> None:
        """Sample a token per row. May be captured in a CUDA graph.

        Args:
            logits: [rows, vocab], float32, bfloat16 or float16, contiguous; not changed.
            rows: [2, at least rows]: slots, < 0 for padding, and positions of the tokens to sample.
        """


MakeSampler = Callable[[SamplingSlots], SampleRows | LaunchedSampler]
"""Makes a kernel that samples the same tokens as torch."""

# Elements sampled with noise at once: on a CPU their int64 fits a core's L2 cache, on a device it bounds the memory.
NOISE_CHUNK_CPU = 1 << 17
NOISE_CHUNK_CUDA = 1 << 24


class Sampler:
    """Samples the rows of a step by a kernel, or by torch.

    Args:
        vocab_size: the logits' width.
        make_kernel: None: torch samples.
        has_fixed_logprobs: torch computes logprobs even where a kernel samples: whether one does depends on the others.

    launched: the kernel that steps launch; None: call sample().
    """

    def __init__(
        self,
        num_slots: int,
        vocab_size: int,
        device: torch.device,
        make_kernel: MakeSampler | None = None,
        has_fixed_logprobs: bool = False,
    ) -> None:
        self._vocab_size = vocab_size
        self._has_fixed_logprobs = has_fixed_logprobs
        self._device = device
        self._chunk_rows = max(1, (NOISE_CHUNK_CPU if device.type == "cpu" else NOISE_CHUNK_CUDA) // vocab_size)
        self._settings = SamplingSlots(num_slots, vocab_size, device)
        kernel = None if make_kernel is None else make_kernel(self._settings)
        self.launched = kernel if isinstance(kernel, LaunchedSampler) else None
        self._called = None if isinstance(kernel, LaunchedSampler) else kernel

    @property
    def last_tokens(self) -> Tensor:
        """What each slot sampled last: int64 [slots]."""
        return self._settings.last_tokens

    def start(self, start: SequenceStart) -> None:
        """Give the slot to a new sequence."""
        self._settings.start(start)

    def penalise(self, penalties: TokenPenalties) -> None:
        """Set what applies to the one token that a slot samples next."""
        self._settings.penalise(penalties)

    def can_launch(self, slots: IntArray) -> bool:
        """Whether one launch samples the rows of all these slots."""
        return self.launched is not None and self.launched.can_sample(slots)

    def launched_tokens(self, logits: Tensor, slots: IntArray) -> Sampled:
        """What the last launch sampled."""
        kernel, num_rows = self.launched, len(slots)
        assert kernel is not None
        token_ids = kernel.token_ids[:num_rows]
        find = partial(_logprobs_with, kernel.logprobs[:num_rows], logits)
        if self._has_fixed_logprobs:
            find = partial(_logprobs, logits, token_ids)
        return Sampled(token_ids, kernel.is_finite[:num_rows], self._requested_logprobs(slots, find))

    def sample(
        self,
        logits: Tensor,
        slots: IntArray,
        positions: IntArray,
        masked: Masked | None = None,
        drafts: DraftRows | None = None,
    ) -> Sampled:
        """Sample a token per row, at once.

        Args:
            logits: [rows, vocab], float32; not changed.
            slots: [rows]
            positions: [rows], of the token to sample in its sequence.
            drafts: None: each slot has one row.
        """
        turns = None if drafts is None else np.where(self._has(slots, HISTORY), drafts.turns, 0)
        if drafts is None or turns is None or not turns.any():
            token_ids, is_finite = self._sample_at_once(logits, slots, positions, masked)
        else:
            token_ids, is_finite = self._sample_in_turn(logits, slots, positions, masked, turns, drafts.next_ids)
        self.last_tokens.index_copy_(0, self._ids(slots), token_ids)
        return Sampled(token_ids, is_finite, self._requested_logprobs(slots, partial(_logprobs, logits, token_ids)))

    def _sample_at_once(
        self, logits: Tensor, slots: IntArray, positions: IntArray, masked: Masked | None
    ) -> tuple[Tensor, Tensor]:
        """Returns: token ids, and whether the logits are finite."""
        if self._called is not None:
            return self._called(logits, slots, positions, masked)
        allowed = logits if masked is None else self._allowed(logits, masked)
        if (kernel := self.launched) is not None and kernel.can_sample(slots):
            kernel.launch(allowed, to_device(np.stack([slots, positions]), self._device))
            return kernel.token_ids[: len(slots)], kernel.is_finite[: len(slots)]
        is_finite = logits.sum(-1).isfinite()  # [rows]: any NaN or infinity makes the sum one
        return self._sample_rows(allowed, slots, positions), is_finite

    def _sample_in_turn(
        self,
        logits: Tensor,
        slots: IntArray,
        positions: IntArray,
        masked: Masked | None,
        turns: IntArray,
        next_ids: IntArray,
    ) -> tuple[Tensor, Tensor]:
        """As _sample_at_once, but a row counts the tokens that earlier rows of its slot have sampled.

        Rows behind a wrong draft are not sampled.
        """
        token_ids, is_finite = torch.zeros(len(slots), dtype=torch.int64), logits.sum(-1).isfinite()
        is_behind = np.zeros(len(self._settings.numbers), np.bool_)  # [slots]
        for turn in range(int(turns.max()) + 1):
            some = np.flatnonzero((turns == turn) & ~is_behind[slots])
            masked_of_some = None
            if masked is not None:
                places, index, of_some = np.intersect1d(masked.rows, some, return_indices=True)
                masked_of_some = Masked(of_some, masked.masks[index]) if len(places) else None
            found, _ = self._sample_at_once(logits[self._ids(some)], slots[some], positions[some], masked_of_some)
            token_ids[self._ids(some)] = found
            has_turns = some[self._has(slots[some], HISTORY)]
            is_right = (token_ids[self._ids(has_turns)].numpy() == next_ids[has_turns]) & is_finite[has_turns].numpy()
            is_behind[slots[has_turns[~is_right]]] = True
        return token_ids, is_finite

    def _allowed(self, logits: Tensor, masked: Masked) -> Tensor:
        """A copy of the logits: what a mask forbids is far below all that it allows. The masks are unpacked here."""
        rows, masks = self._ids(masked.rows), to_device(masked.masks, self._device)  # [masked, words]
        places = torch.arange(32, dtype=torch.int32, device=self._device)
        is_allowed = (masks.unsqueeze(2) >> places & 1).flatten(1)[:, : self._vocab_size]  # [masked, vocab]
        return logits.index_copy(0, rows, logits[rows].masked_fill_(is_allowed == 0, FORBIDDEN))

    def _requested_logprobs(
        self, slots: IntArray, find: Callable[..., tuple[Tensor, Tensor, Tensor]]
    ) -> RequestedLogprobs | None:
        """find: takes (rows, number of likeliest tokens)."""
        rows = np.flatnonzero(self._has(slots, Feature.LOGPROBS))
        if not len(rows):
            return None
        num_top: list[int] = self._settings.num_logprobs[slots[rows]].tolist()
        most = min(max(num_top), self._vocab_size)
        return RequestedLogprobs(rows, num_top, most, partial(find, rows, most))

    def _sample_rows(self, logits: Tensor, slots: IntArray, positions: IntArray) -> Tensor:
        """Each feature costs only the steps in which a row uses it: a step of greedy rows is one argmax."""
        features = self._numbers(slots, Number.FEATURES)
        used = int(np.bitwise_or.reduce(features, initial=0))
        adjusted = self._adjust(logits, slots, positions) if used & ADJUSTED else logits
        token_ids = adjusted.argmax(-1)  # [rows]
        noisy = np.flatnonzero(features & Feature.NOISE)
        for first in range(0, len(noisy), self._chunk_rows):
            some = noisy[first : first + self._chunk_rows]
            rows = self._ids(some)
            token_ids[rows] = self._sample_with_noise(adjusted[rows], slots[some], positions[some])
        penalised = np.flatnonzero(features & Feature.PENALTIES)
        if len(penalised):
            index = (self._ids(slots[penalised]), token_ids[self._ids(penalised)])
            counted = torch.full_like(index[0], 2, dtype=torch.int32)
            self._settings.write_seen().index_put_(index, counted, accumulate=True)
        return token_ids

    def _adjust(self, logits: Tensor, slots: IntArray, positions: IntArray) -> Tensor:
        """Stage 1 of sampling_rules.py, on a copy: [rows, vocab]."""
        adjusted, settings = logits.clone(), self._settings
        penalised = np.flatnonzero(self._numbers(slots, Number.FEATURES) & Feature.PENALTIES)
        if len(penalised):
            rows, of_rows = self._ids(penalised), slots[penalised]
            penalties = (
                self._factors(of_rows, each) for each in (Factor.REPETITION, Factor.PRESENCE, Factor.FREQUENCY)
            )
            adjusted[rows] = penalise(adjusted[rows], settings.write_seen()[self._ids(of_rows)], *penalties)
        of_biases = _entries(self._numbers(slots, Number.NUM_BIASES))
        places = self._places(slots, settings.bias_ids, of_biases)
        biases = to_device(settings.biases[slots[of_biases[0]], of_biases[1]], self._device)
        adjusted.index_put_(places, biases, accumulate=True)
        is_early = positions < self._numbers(slots, Number.STOP_FROM)
        forbidden = _entries(np.where(is_early, self._numbers(slots, Number.NUM_STOP_IDS), 0))
        adjusted[self._places(slots, settings.stop_ids, forbidden)] = float("-inf")
        return adjusted

    def _places(self, slots: IntArray, table: Int64Array, entries: tuple[IntArray, IntArray]) -> tuple[Tensor, Tensor]:
        """(rows, token ids) of list entries, (rows, columns of the table)."""
        rows, columns = entries
        return self._ids(rows), self._ids(table[slots[rows], columns])

    def _sample_with_noise(self, logits: Tensor, slots: IntArray, positions: IntArray) -> Tensor:
        """Stages 2 to 4 of sampling_rules.py, of rows with a temperature: [rows]."""
        scaled = logits * self._factors(slots, Factor.INVERSE_TEMPERATURE)  # [rows, vocab]
        keys = row_keys(self._numbers(slots, Number.SEED).view(np.uint64), positions)
        features = self._numbers(slots, Number.FEATURES)
        is_rare = features & Feature.RARE > 0
        top_k = self._ids(self._numbers(slots, Number.TOP_K)).unsqueeze(1)
        columns = (Factor.TOP_P, Factor.SLOPE, Factor.MIN_P_OFFSET)
        top_p, slope, offset = (self._factors(slots, each) for each in columns)
        if (features & Feature.FILTERS).any():
            lowest = lowest_kept(logits, top_k, top_p, slope, offset)
            lowest[self._ids(np.flatnonzero(is_rare))] = float("-inf")
            scaled = scaled.masked_fill_(logits < lowest, float("-inf"))
        for row in np.flatnonzero(is_rare).tolist():
            one = slice(row, row + 1)
            if not bool(logits[one].amax().isfinite()):  # its token means nothing
                continue
            rare = self._rare_filters(slots[row], keys[row])
            low, high = kept_range(logits[one], top_k[one], (top_p[one], slope[one], offset[one]), rare)
            scaled[one] = scaled[one].masked_fill((logits[one] < low) | (logits[one] > high), float("-inf"))
        token_ids = torch.arange(self._vocab_size, device=self._device)
        keys_there = to_device(keys.view(np.int64), self._device).unsqueeze(1)
        return scaled.add_(gumbel_noise(keys_there, token_ids)).argmax(-1)

    def _rare_filters(self, slot: int, key: np.uint64) -> RareFilters:
        """key: of its row, for XTC's chance."""
        factors = self._settings.factors[slot]
        chance, threshold = factors[Factor.XTC_PROBABILITY], float(factors[Factor.XTC_THRESHOLD])
        applies = threshold <= MOST_XTC_THRESHOLD and chance > 0 and xtc_chance(key) <= chance
        return RareFilters(
            float(factors[Factor.SIGMAS]), float(factors[Factor.TYPICAL_P]), threshold if applies else None
        )

    def _has(self, slots: IntArray, features: Feature) -> npt.NDArray[np.bool_]:
        """Whether each has any of the features: [some]."""
        found: npt.NDArray[np.bool_] = (self._numbers(slots, Number.FEATURES) & features) != 0
        return found

    def _numbers(self, slots: IntArray, column: Number) -> npt.NDArray[np.int64]:
        """[some]"""
        numbers: npt.NDArray[np.int64] = self._settings.numbers[slots, column]
        return numbers

    def _factors(self, slots: IntArray, column: Factor) -> Tensor:
        """[some, 1], to go with [some, vocab]."""
        return to_device(self._settings.factors[slots, column], self._device).unsqueeze(1)

    def _ids(self, values: Any) -> Tensor:
        return to_device(np.asarray(values, np.int64), self._device)


def _entries(counts: IntArray) -> tuple[IntArray, IntArray]:
    """(row, column) of every entry of lists of so many entries each."""
    return np.nonzero(np.arange(counts.max(initial=0)) < counts[:, None])  # type: ignore[return-value]


def _logprobs(logits: Tensor, token_ids: Tensor, rows: IntArray, most: int) -> tuple[Tensor, Tensor, Tensor]:
    """See RequestedLogprobs.find."""
    logprobs = _log_softmax(_some_of(logits, rows))  # [some, vocab]
    of_tokens = logprobs.gather(1, _some_of(token_ids, rows).unsqueeze(1)).squeeze(1)
    return of_tokens, *_likeliest(logprobs, most)


def _log_softmax(logits: Tensor) -> Tensor:
    """Of each row alike: a device adds a row up by where it begins among 16 bytes, which padding makes the same."""
    missing = -logits.shape[-1] % 4
    if not missing or not logits.is_cuda:
        return logits.log_softmax(-1)
    return F.pad(logits, (0, missing), value=float("-inf")).log_softmax(-1)[:, :-missing]


def _likeliest(found: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """The largest of each row and their ids, [rows, most]; equal ones by id, whatever others ask for.

    topk orders equal ones by how many it is asked for. To look for them would wait for a device, and a CPU takes ten
    times as long to make all numbers unlike.
    """
    if found.is_cuda:
        return likeliest_at_once(found, most)
    values, ids = found.topk(min(most + 1, found.shape[1]))  # one more: the last one asked for may have equals
    for row in (values[:, 1:] == values[:, :-1]).any(1).nonzero().flatten().tolist():
        some = (~(found[row] < values[row, most - 1])).nonzero().flatten()  # by id; NaN comes first, as in topk
        places = found[row, some].argsort(descending=True, stable=True)[:most]
        values[row, :most], ids[row, :most] = found[row, some[places]], some[places]
    return values[:, :most], ids[:, :most]


def likeliest_at_once(found: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """As _likeliest, by topk of integers that are ordered by number and then by id: no two are equal."""
    bits = (found + 0.0).view(torch.int32).long()  # 0.0 for -0.0
    ordered = bits ^ (bits >> 31 & 0x7FFFFFFF)
    places = torch.arange(found.shape[1], device=found.device)
    ids = 0xFFFFFFFF - ((ordered << 32 | 0xFFFFFFFF - places).topk(most).values & 0xFFFFFFFF)
    return found.gather(1, ids), ids


def _logprobs_with(made: Tensor, logits: Tensor, rows: IntArray, most: int) -> tuple[Tensor, Tensor, Tensor]:
    """The same from LaunchedSampler.logprobs."""
    made = _some_of(made, rows)  # [some, 3]
    if not most:
        return made[:, 0], made[:, :0], made[:, :0].long()
    top, top_ids = _likeliest(_some_of(logits, rows), most)  # [some, most]
    return made[:, 0], top - made[:, 1:2] - made[:, 2:], top_ids


def _some_of(found: Tensor, rows: IntArray) -> Tensor:
    """Some of its rows, without an index that would have to be copied to the device."""
    return found if len(rows) == len(found) else torch.stack([found[row] for row in rows.tolist()])


PIECE_BYTES = 32 * 1024**2  # of float32 logits, at most ...
PIECE_ROWS = 256  # ... and so many tokens: beyond, reading the head's weights is not what takes the time


def piece_rows(vocab_size: int) -> int:
    """Prompt tokens whose logits are computed at once."""
    return min(PIECE_ROWS, max(1, PIECE_BYTES // (4 * vocab_size)))


@dataclass(slots=True)
class PromptScores:
    """The logprobs of one step's prompt tokens, on the host once the event has come.

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

    def entries(self) -> Iterator[tuple[PromptTargets, int, list[TokenLogprobs] | None]]:
        """(targets, their slot, their logprobs, or None where the logits are not finite)."""
        first = 0
        for targets, slot in zip(self.targets, self.slots, strict=True):
            part = slice(first, first + len(targets.token_ids))
            is_finite = bool(self.logprobs[part].isfinite().all())
            yield targets, slot, self._entries_of(targets, part) if is_finite else None
            first = part.stop

    def _entries_of(self, targets: PromptTargets, part: slice) -> list[TokenLogprobs]:
        num_top = targets.num_top
        columns = (self.logprobs[part], self.top[part, :num_top], self.top_ids[part, :num_top])
        return [
            TokenLogprobs(token_id, logprob, tuple(zip(top_ids, top, strict=True)))
            for token_id, logprob, top, top_ids in zip(
                targets.token_ids, *(column.tolist() for column in columns), strict=True
            )
        ]


def scored_tokens(plan: StepPlan, first_tokens: Int32Array) -> Int32Array:
    """Which of the plan's tokens predict its targets, in the targets' order.

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
    """Compute the logprobs of the plan's targets, and start their copy to the host.

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
        logprobs = _log_softmax(logits_of(some))  # [some, vocab]
        found.append((logprobs.gather(1, token_ids.unsqueeze(1)).squeeze(1), *_likeliest(logprobs, most)))
    logprobs, top, top_ids = (_to_host(torch.cat(pieces), streams) for pieces in zip(*found, strict=True))
    slots = plan.slots[[one.row for one in targets]].tolist()
    return PromptScores(targets, slots, logprobs, top, top_ids, streams.current.record())


def _to_host(found: Tensor, streams: Streams) -> Tensor:
    copied = streams.pinned(found.nbytes).view(found.dtype).view(found.shape)
    streams.current.run(lambda: copied.copy_(found, non_blocking=True))
    return copied


NUM_BUFFERS = 2  # steps whose tokens may be on their way


@dataclass(slots=True)
class PendingTokens:
    """What one step sampled, on the host once the event has come."""

    token_ids: Tensor  # [rows], int64
    is_finite: Tensor  # [rows]
    requested: RequestedLogprobs | None
    logprobs: tuple[Tensor, ...]  # of RequestedLogprobs.find
    event: Event

    def wait(self) -> None:
        self.event.synchronize()

    def logprobs_by_row(self) -> dict[int, TokenLogprobs]:
        """By row among the sampled ones."""
        if self.requested is None:
            return {}
        rows, counts = self.requested.rows.tolist(), self.requested.num_top
        columns = (found.tolist() for found in self.logprobs)
        return {
            row: TokenLogprobs(
                token_id=int(self.token_ids[row]),
                logprob=logprob,
                top=tuple(zip(top_ids[:num_top], top[:num_top], strict=True)),
            )
            for row, num_top, logprob, top, top_ids in zip(rows, counts, *columns, strict=True)
        }


class TokensToHost:
    """Copies sampled tokens to the host, while they stay on the device for the next step.

    They come into one of two buffers in turn, behind an event: waiting for step N does not wait for N+1, which was sent
    after it. On a CPU everything is done when it is asked for, and nothing has to be waited for.

    Args:
        num_slots: rows of a step, at most.
    """

    def __init__(self, num_slots: int, streams: Streams) -> None:
        self._streams = streams
        self._buffers = [
            (self._host(num_slots, torch.int64), self._host(num_slots, torch.bool)) for _ in range(NUM_BUFFERS)
        ]

    def send(self, sampled: Sampled) -> PendingTokens:
        """Start the copy of what was sampled to the host."""
        self._buffers.reverse()
        token_ids, is_finite = (buffer[: len(sampled.token_ids)] for buffer in self._buffers[0])
        sources, targets, requested = [sampled.token_ids, sampled.is_finite], [token_ids, is_finite], sampled.logprobs
        if requested is not None:
            num_rows, size = len(requested.rows), len(requested.rows) * requested.most
            targets += [self._host(num_rows, torch.float32), self._host(size, torch.float32).view(num_rows, -1)]
            targets.append(self._host(size, torch.int64).view(num_rows, -1))

        def send() -> None:
            found = sources if requested is None else [*sources, *requested.find()]
            for source, target in zip(found, targets, strict=True):
                target.copy_(source, non_blocking=True)

        self._streams.current.run(send)
        return PendingTokens(token_ids, is_finite, requested, tuple(targets[2:]), self._streams.current.record())

    def _host(self, num_elements: int, dtype: torch.dtype) -> Tensor:
        return self._streams.pinned(num_elements * dtype.itemsize).view(dtype)
