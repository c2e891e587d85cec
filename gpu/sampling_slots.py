"""What each slot's request asks of sampling, as columns that kernels read. Thread: engine.

Written when a slot gets a new occupant, not per step; only the tokens seen and the last one change as they are drawn.
The table of tokens seen lies on the device: what a start brings to it is kept until somebody reads it, or copies it up
with what else the step needs.
Lists are as long as a request makes them: `addresses` tells a kernel on the host where they lie.
"""

import enum
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from core.plan import Int32Array, SequenceStart
from core.types import SamplingParams
from gpu.filters import LEAST_TEMPERATURE, least_of, slope_of

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
    SLOPE = 1  # see filters.slope_of
    TOP_P = 2  # infinity for all
    LEAST = 3  # see filters.least_of
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
