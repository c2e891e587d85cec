"""Draws one token per row, all rows together, on the device. Thread: engine.

What a request asks for stays in its slot (sampling_slots.py). A token is drawn as argmax(logits / temperature + Gumbel
noise), which needs no softmax (Gumbel, 1954); the noise depends on (seed, position, token id) alone (noise.py), never
on the row or its neighbours.

Order of effects: penalties, logit_bias, min_tokens, then top_k, top_p (of what top_k kept) and min_p (filters.py), then
temperature. Tokens tied with the last one kept are kept. Logprobs are of the model's raw logits, before all of these.

A kernel draws a row in one go. What is here in torch's operators is its reference, and serves where there is none: each
feature costs only the steps in which a row uses it, and a step of greedy rows is one argmax. Both draw the same tokens.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from core.plan import SequenceStart
from gpu.device import to_device
from gpu.filters import Filters
from gpu.noise import gumbel_argmax, row_keys
from gpu.sampling_slots import ADJUSTED, Factor, Feature, Number, SamplingSlots

IntArray = npt.NDArray[np.signedinteger[Any]]

NOISE_CHUNK_CPU = 1 << 17  # elements of noise computed at once: its int64 fits a core's L2 cache
NOISE_CHUNK_CUDA = 1 << 24


@dataclass(slots=True)
class RowLogprobs:
    """Log probabilities of some rows, still on the device."""

    rows: IntArray  # [some]: index into the drawn rows
    num_top: list[int]  # [some]: how many of top each one asked for
    drawn: Tensor  # [some]
    top: Tensor  # [some, most asked for], likeliest first
    top_ids: Tensor  # [some, most asked for]


@dataclass(frozen=True, slots=True)
class AskedLogprobs:
    """Log probabilities that some rows ask for.

    Args:
        most: likeliest tokens that any of them asks for.
        find: starts to compute what RowLogprobs has of them: (drawn, top, top_ids).
    """

    rows: IntArray  # [some]
    num_top: list[int]  # [some]
    most: int
    find: Callable[[], tuple[Tensor, Tensor, Tensor]]

    def found(self) -> RowLogprobs:
        return RowLogprobs(self.rows, self.num_top, *self.find())


@dataclass(slots=True)
class Drawn:
    """What was drawn, still on the device."""

    token_ids: Tensor  # [rows]
    is_finite: Tensor  # [rows]: False: the logits are broken and the token means nothing
    logprobs: AskedLogprobs | None


class DrawRows(Protocol):
    """A kernel that does what _draw_rows does. It is bound to the slots that it reads, and counts what it draws.

    Args:
        keeps_last: notes what slots draw last, too.
    """

    keeps_last: bool

    @property
    def logprobs(self) -> Tensor | None:
        """Of the rows that were drawn last and ask for them, [rows at least, 3], float32; None: torch computes them.

        The drawn token's, and what to subtract from any logit, one after the other, to have that token's.
        """
        ...

    def can_draw(self, slots: IntArray) -> bool:
        """Whether it knows all that these ask for; torch draws where it does not."""
        ...

    def __call__(self, logits: Tensor, slots: IntArray, positions: IntArray) -> tuple[Tensor, Tensor]:
        """(token ids: int64 [rows], whether the logits are finite: bool [rows]); logits are as before afterwards."""
        ...


@dataclass(slots=True)
class SamplerChoice:
    """Who draws: a kernel, or torch, as measured; both draw the same."""

    make_kernel: Callable[[SamplingSlots], DrawRows]
    uses_kernel: bool = True


class Sampler:
    """Sampling state of all slots.

    Args:
        vocab_size: the logits' width.
        choice: None: there is no kernel.
    """

    def __init__(
        self, num_slots: int, vocab_size: int, device: torch.device, choice: SamplerChoice | None = None
    ) -> None:
        self._choice = choice
        self._vocab_size = vocab_size
        self._device = device
        self._asked = SamplingSlots(num_slots, vocab_size, device)
        self.kernel = None if choice is None else choice.make_kernel(self._asked)

    @property
    def _uses_kernel(self) -> bool:
        return self._choice is not None and self._choice.uses_kernel

    @property
    def last_tokens(self) -> Tensor:
        """What each slot drew last: int64 [slots]."""
        return self._asked.last_tokens

    def start(self, start: SequenceStart) -> None:
        """Give the slot to a new sequence."""
        self._asked.start(start)

    def sample(self, logits: Tensor, slots: IntArray, positions: IntArray) -> Drawn:
        """Draw a token per row.

        Args:
            logits: [rows, vocab], float32; not changed.
            slots: [rows]
            positions: [rows], of the token to draw in its sequence.
        """
        if self.kernel is not None and self._uses_kernel and self.kernel.can_draw(slots):
            token_ids, is_finite = self.kernel(logits, slots, positions)
            has_kept, logprobs = self.kernel.keeps_last, self.kernel.logprobs
        else:
            is_finite = logits.sum(-1).isfinite()  # [rows]: any NaN or infinity makes the sum one
            token_ids = self._draw_rows(logits, slots, positions)
            has_kept, logprobs = False, None
        if not has_kept:
            self.last_tokens.index_copy_(0, self._ids(slots), token_ids)
        return self.told(logits, token_ids, is_finite, slots, logprobs)

    def told(
        self, logits: Tensor, token_ids: Tensor, is_finite: Tensor, slots: IntArray, logprobs: Tensor | None
    ) -> Drawn:
        """What was drawn, with the logprobs that these slots ask for.

        Args:
            logprobs: the kernel's, see DrawRows.
        """
        features = self._numbers(slots, Number.FEATURES)  # [rows]
        rows = np.flatnonzero(features & Feature.LOGPROBS)
        if not len(rows):
            return Drawn(token_ids, is_finite, None)
        num_top: list[int] = self._asked.num_logprobs[slots[rows]].tolist()
        most = min(max(num_top), self._vocab_size)
        if logprobs is None:
            find = partial(_logprobs, logits, token_ids, rows, most)
        else:
            find = partial(_logprobs_with, logprobs, logits, rows, most)
        return Drawn(token_ids, is_finite, AskedLogprobs(rows, num_top, most, find))

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
    """The same with what a kernel has made: see DrawRows."""
    made = _some_of(made, rows)  # [some, 3]
    if not most:
        return made[:, 0], made[:, :0], made[:, :0].long()
    top, top_ids = _some_of(logits, rows).topk(most)  # [some, most]
    return made[:, 0], top - made[:, 1:2] - made[:, 2:], top_ids


def _some_of(found: Tensor, rows: IntArray) -> Tensor:
    """Rows of it, without numbers of theirs that would have to be copied to the device."""
    return found if len(rows) == len(found) else torch.stack([found[row] for row in rows.tolist()])
