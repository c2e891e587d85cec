"""Draws one token per row, all rows together, on the device. Thread: engine.

What a request asks for stays in its slot; each feature costs only the steps in which a row uses it, and a step of
greedy rows is one argmax. A token is drawn as argmax(logits / temperature + Gumbel noise), which needs no softmax
(Gumbel, 1954); the noise depends on (seed, position, token id) alone (noise.py), never on the row or its neighbours.

Order of effects: penalties, logit_bias, min_tokens, temperature, then top_k, top_p (of what top_k kept) and min_p.
Tokens tied with the last one kept are kept. Logprobs are of the model's raw logits, before all of these.
"""

import enum
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from core.plan import SequenceStart
from core.types import SamplingParams
from gpu.noise import GumbelArgmax, gumbel_noise, row_keys

IntArray = npt.NDArray[np.signedinteger[Any]]
FloatArray = npt.NDArray[np.float32]

SHORTLIST = 256  # candidates sorted first; nearly always enough to decide top_k, top_p and min_p
SHORTLIST_GROWTH = 16
SORTED_WHOLE = 4096  # vocabularies up to here are sorted whole: a second look would cost more
NOISE_CHUNK_CPU = 1 << 17  # elements of noise computed at once: its int64 fits a core's L2 cache
NOISE_CHUNK_CUDA = 1 << 24


class Feature(enum.IntFlag):
    """What a slot needs beyond an argmax."""

    NOISE = 1
    FILTERS = 2
    PENALTIES = 4
    BIAS = 8
    MIN_TOKENS = 16
    LOGPROBS = 32


@dataclass(slots=True)
class Filters:
    """What to keep of some rows. The largest logit always is."""

    top_k: Tensor  # [rows], at least 1; the vocabulary's size for all
    top_p: Tensor  # [rows, 1]; infinity for all: a rounded sum reaches 1 too early
    min_p: Tensor  # [rows, 1]

    def lowest_kept(self, logits: Tensor, size: int = SHORTLIST) -> Tensor:
        """The smallest logit that is kept in each row: [rows, 1].

        Args:
            logits: [rows, vocab]
            size: of the shortlist; rows for which it is too short are tried again with a longer one.
        """
        vocab_size = logits.shape[1]
        if vocab_size <= max(size, SORTED_WHOLE):
            return self._lowest(logits.sort(descending=True).values, logits)
        shortlist = logits.topk(size).values  # [rows, size]
        limits = self._lowest(shortlist, logits)
        # What lies behind the shortlist may be kept too, or count in the mass that top_p is a share of.
        is_beyond = (self.top_k > size) & (self.top_k < vocab_size)
        too_short = (is_beyond | (limits <= shortlist[:, -1:]).squeeze(1)).nonzero().squeeze(1)
        if len(too_short):
            filters = Filters(self.top_k[too_short], self.top_p[too_short], self.min_p[too_short])
            limits[too_short] = filters.lowest_kept(logits[too_short], size * SHORTLIST_GROWTH)
        return limits

    def _lowest(self, ordered: Tensor, logits: Tensor) -> Tensor:
        """ordered: [rows, some], the largest logits, descending; its last is the answer where it is too short."""
        last_k = (self.top_k - 1).clamp_(max=ordered.shape[1] - 1).unsqueeze(1)  # [rows, 1]
        limit_k = ordered.gather(1, last_k)  # [rows, 1]
        # The mass that top_p is a share of: of what top_k keeps, ties included; without top_k, of all.
        limits = torch.where(self.top_k.unsqueeze(1) < logits.shape[1], limit_k, float("-inf"))
        mass = logits.masked_fill(logits < limits, float("-inf")).logsumexp(-1, keepdim=True)
        probs = (ordered - mass).exp_()  # [rows, some]
        is_kept = (probs.cumsum(-1) - probs < self.top_p) & (probs >= self.min_p * probs[:, :1])
        last = (is_kept.sum(-1, keepdim=True) - 1).clamp_(min=0)  # [rows, 1]: what is kept is a prefix
        return torch.maximum(ordered.gather(1, last), limit_k)


@dataclass(slots=True)
class RowLogprobs:
    """Log probabilities of some rows, still on the device."""

    rows: IntArray  # [some]: index into the drawn rows
    num_top: list[int]  # [some]: how many of top each one asked for
    drawn: Tensor  # [some]
    top: Tensor  # [some, most asked for], likeliest first
    top_ids: Tensor  # [some, most asked for]


@dataclass(slots=True)
class Drawn:
    """What was drawn, still on the device."""

    token_ids: Tensor  # [rows]
    is_finite: Tensor  # [rows]: False: the logits are broken and the token means nothing
    logprobs: RowLogprobs | None


class Sampler:
    """Sampling state of all slots.

    Args:
        vocab_size: the logits' width.
        kernel: draws by noise; None: torch does.
    """

    def __init__(
        self, num_slots: int, vocab_size: int, device: torch.device, kernel: GumbelArgmax | None = None
    ) -> None:
        self._kernel = kernel
        self._vocab_size = vocab_size
        self._device = device
        self._params: list[SamplingParams | None] = [None] * num_slots
        self._stop_ids: list[tuple[int, ...]] = [()] * num_slots
        self._features = np.zeros(num_slots, dtype=np.int64)
        self._num_prompt_tokens = np.zeros(num_slots, dtype=np.int64)
        self._seeds = np.zeros(num_slots, dtype=np.uint64)
        self._temperature = np.zeros(num_slots, dtype=np.float32)
        self._top_k = np.zeros(num_slots, dtype=np.int64)
        self._top_p = np.ones(num_slots, dtype=np.float32)
        self._min_p = np.zeros(num_slots, dtype=np.float32)
        self._penalties = np.zeros((num_slots, 3), dtype=np.float32)  # repetition, presence, frequency
        self._counts: Tensor | None = None  # [slots, vocab], int32: of each token in the output
        self._in_prompt: Tensor | None = None  # [slots, vocab], bool
        self._vocab_ids = torch.arange(vocab_size, device=device)  # [vocab]

    def start(self, start: SequenceStart) -> None:
        """Give the slot to a new sequence."""
        slot, params = start.slot, start.sampling
        features = _features(params)
        self._params[slot], self._stop_ids[slot], self._features[slot] = params, start.stop_ids, features
        self._num_prompt_tokens[slot] = start.num_prompt_tokens
        self._seeds[slot] = start.seed & 0xFFFFFFFFFFFFFFFF
        self._temperature[slot] = params.temperature
        self._top_k[slot] = params.top_k if 0 < params.top_k < self._vocab_size else self._vocab_size
        self._top_p[slot] = params.top_p if params.top_p < 1 else np.inf
        self._min_p[slot] = params.min_p
        self._penalties[slot] = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
        if features & Feature.PENALTIES:
            self._count_known_tokens(start)

    def sample(self, logits: Tensor, slots: IntArray, positions: IntArray) -> Drawn:
        """Draw a token per row.

        Args:
            logits: [rows, vocab], float32; not changed.
            slots: [rows]
            positions: [rows], of the token to draw in its sequence.
        """
        features = self._features[slots]  # [rows]
        used = int(np.bitwise_or.reduce(features, initial=0))
        is_finite = logits.sum(-1).isfinite()  # [rows]: any NaN or infinity makes the sum one
        adjusted = self._adjust(logits, slots, positions, features) if used & ADJUSTED else logits
        token_ids = adjusted.argmax(-1)  # [rows]
        if used & Feature.NOISE:
            noisy = np.flatnonzero(features & Feature.NOISE)
            self._draw(adjusted, token_ids, noisy, slots, positions)
        if used & Feature.PENALTIES:
            self._count_drawn(token_ids, slots, np.flatnonzero(features & Feature.PENALTIES))
        logprobs = None
        if used & Feature.LOGPROBS:
            logprobs = self._logprobs(logits, token_ids, slots, np.flatnonzero(features & Feature.LOGPROBS))
        return Drawn(token_ids, is_finite, logprobs)

    def _adjust(self, logits: Tensor, slots: IntArray, positions: IntArray, features: IntArray) -> Tensor:
        """Penalties, logit_bias and min_tokens, on a copy: [rows, vocab]."""
        adjusted = logits.clone()
        penalised = np.flatnonzero(features & Feature.PENALTIES)
        if len(penalised):
            self._penalise(adjusted, penalised, slots)
        biases = [
            (row, token_id, bias)
            for row in np.flatnonzero(features & Feature.BIAS).tolist()
            for token_id, bias in self._asked(int(slots[row])).logit_bias
        ]
        if biases:
            rows, token_ids, values = zip(*biases, strict=True)
            index = (self._ids(rows), self._ids(token_ids))
            adjusted.index_put_(index, torch.tensor(values, device=self._device), accumulate=True)
        forbidden = [
            (row, token_id)
            for row in np.flatnonzero(features & Feature.MIN_TOKENS).tolist()
            if positions[row] - self._num_prompt_tokens[slots[row]] < self._asked(int(slots[row])).min_tokens
            for token_id in self._stop_ids[slots[row]]
        ]
        if forbidden:
            rows, token_ids = zip(*forbidden, strict=True)
            adjusted[self._ids(rows), self._ids(token_ids)] = float("-inf")
        return adjusted

    def _penalise(self, adjusted: Tensor, penalised: IntArray, slots: IntArray) -> None:
        """Sources: repetition, arXiv:1909.05858 section 4.1; presence and frequency, OpenAI's API reference."""
        assert self._counts is not None
        assert self._in_prompt is not None
        rows, row_slots = self._ids(penalised), self._ids(slots[penalised])
        repetition, presence, frequency = self._column(self._penalties[slots[penalised]]).unbind(1)  # [some, 1] each
        logits, counts = adjusted[rows], self._counts[row_slots]  # [some, vocab]
        is_drawn = counts > 0
        repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
        logits = torch.where(is_drawn | self._in_prompt[row_slots], repeated, logits)
        adjusted[rows] = logits - frequency * counts - presence * is_drawn

    def _draw(self, adjusted: Tensor, token_ids: Tensor, noisy: IntArray, slots: IntArray, positions: IntArray) -> None:
        """Put drawn tokens in place of the argmax, in the rows with a temperature."""
        noisy_slots = slots[noisy]
        rows = self._ids(noisy)
        scaled = adjusted[rows] / self._column(self._temperature[noisy_slots])  # [noisy, vocab]
        keys = row_keys(self._seeds[noisy_slots], positions[noisy]).view(np.int64)
        device_keys = self._column(keys)  # [noisy, 1]
        filtered = np.flatnonzero(self._features[noisy_slots] & Feature.FILTERS)
        if len(filtered):
            self._filter(scaled, filtered, noisy_slots[filtered])
        token_ids[rows] = self._gumbel_argmax(scaled, device_keys)

    def _filter(self, scaled: Tensor, filtered: IntArray, slots: IntArray) -> None:
        """Set to -inf what top_k, top_p and min_p drop. A shortlist decides, and where it is too short, a full sort."""
        rows = self._ids(filtered)
        some = scaled[rows]  # [filtered, vocab]
        limits = Filters(
            self._ids(self._top_k[slots]), self._column(self._top_p[slots]), self._column(self._min_p[slots])
        ).lowest_kept(some)
        scaled[rows] = some.masked_fill_(some < limits, float("-inf"))

    def _gumbel_argmax(self, scaled: Tensor, keys: Tensor) -> Tensor:
        """scaled: [rows, vocab], keys: [rows, 1]; returns [rows]."""
        if self._kernel is not None:
            return self._kernel(scaled, keys)
        chunk = NOISE_CHUNK_CPU if self._device.type == "cpu" else NOISE_CHUNK_CUDA
        num_rows = max(1, chunk // self._vocab_size)
        parts = [
            gumbel_noise(some_keys, self._vocab_ids).add_(some).argmax(-1)
            for some, some_keys in zip(torch.split(scaled, num_rows), torch.split(keys, num_rows), strict=True)
        ]
        return torch.cat(parts)

    def _logprobs(self, logits: Tensor, token_ids: Tensor, slots: IntArray, asked: IntArray) -> RowLogprobs:
        rows = self._ids(asked)
        num_top = [self._asked(slot).num_logprobs or 0 for slot in slots[asked].tolist()]
        logprobs = logits[rows].log_softmax(-1)  # [some, vocab]
        drawn = logprobs.gather(1, token_ids[rows].unsqueeze(1)).squeeze(1)
        top, top_ids = logprobs.topk(min(max(num_top), self._vocab_size))
        return RowLogprobs(asked, num_top, drawn, top, top_ids)

    def _count_known_tokens(self, start: SequenceStart) -> None:
        """Tables are made when the first request with penalties comes: most servers never need them."""
        shape = (len(self._params), self._vocab_size)
        if self._counts is None or self._in_prompt is None:
            self._counts = torch.zeros(shape, dtype=torch.int32, device=self._device)
            self._in_prompt = torch.zeros(shape, dtype=torch.bool, device=self._device)
        known = self._ids(start.token_ids)
        drawn = known[start.num_prompt_tokens :]
        self._counts[start.slot] = torch.bincount(drawn, minlength=self._vocab_size)
        self._in_prompt[start.slot] = False
        self._in_prompt[start.slot, known[: start.num_prompt_tokens]] = True

    def _count_drawn(self, token_ids: Tensor, slots: IntArray, penalised: IntArray) -> None:
        assert self._counts is not None
        index = (self._ids(slots[penalised]), token_ids[self._ids(penalised)])
        self._counts.index_put_(index, torch.ones_like(index[0], dtype=torch.int32), accumulate=True)

    def _asked(self, slot: int) -> SamplingParams:
        params = self._params[slot]
        assert params is not None, f"slot {slot} was never started"
        return params

    def _ids(self, values: Any) -> Tensor:
        return torch.as_tensor(values, dtype=torch.int64, device=self._device)

    def _column(self, values: npt.NDArray[Any]) -> Tensor:
        """[rows, ...] to the device as [rows, ..., 1], to go with [rows, vocab]."""
        return torch.from_numpy(values).to(self._device, non_blocking=True).unsqueeze(-1)


ADJUSTED = Feature.PENALTIES | Feature.BIAS | Feature.MIN_TOKENS


def _features(params: SamplingParams) -> Feature:
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
