"""Recurrent layers: the states of all sequences, and what the layers compute with them. Thread: engine.

A slot has two states. A step's row reads the one that was left at the row's first position and writes the other, so
that a step which failed can be computed again. Beside them lie the states that core/kv_cache.py keeps at block borders,
and one of zeros, from which sequences start.

A prompt is computed in blocks of 16 tokens that begin at multiples of 16, however it is cut into chunks that end
there; a sequence's own tokens one by one. So a token is rounded in the same way in any company.
"""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from core.config import BLOCK_SIZE, ModelConfig, RecurrentConfig
from core.plan import StateSave, StepPlan
from gpu.attention import IntArray
from gpu.kv_cache import zeros
from gpu.parameters import RecurrentWeights

NO_POSITION = -1
_VALUES = 16  # to whose multiples states are padded: see read_states
DELTA_EPS = 1e-6  # of queries' and keys' lengths: Qwen3-Next's modeling file


def bytes_per_state(config: ModelConfig, dtype: torch.dtype) -> int:
    """Of one sequence at one position, all layers; 0: the model has no recurrent layers."""
    own = config.recurrence
    if own is None:
        return 0
    memory = int(np.prod(own.memory_shape)) * torch.float32.itemsize
    return config.num_recurrent_layers * ((own.taps - 1) * own.channels * dtype.itemsize + memory)


@dataclass(frozen=True, slots=True)
class LayerStates:
    """One layer's states: the last inputs of its convolution, and its memory."""

    inputs: Tensor  # [states, taps - 1, channels]
    memory: Tensor  # [states, heads, key_dim, value_dim], float32


class States:
    """All states: two of each slot, then those kept at block borders, then zeros.

    Args:
        num_kept: at block borders.
    """

    def __init__(
        self, config: ModelConfig, num_slots: int, num_kept: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        own = config.recurrence
        assert own is not None, "it has recurrent layers"
        self._first_kept, self._zero = 2 * num_slots, 2 * num_slots + num_kept
        shape = (config.num_recurrent_layers, self._zero + 1)
        self._inputs = zeros((*shape, own.taps - 1, own.channels), dtype, device)
        self._memory = zeros((*shape, *own.memory_shape), torch.float32, device)
        self.layers = [LayerStates(*views) for views in zip(self._inputs, self._memory, strict=True)]
        self._positions = np.full((num_slots, 2), NO_POSITION, np.int64)  # after how many tokens each was left

    def rows_of(self, plan: StepPlan, num_own: int, tokens: IntArray, lengths: IntArray) -> "RecurrentRows":
        """Which states a step reads and writes; from now on its rows count as computed.

        Args:
            num_own, lengths: see StepLayout; tokens: [3, tokens], slots and positions first.
        """
        slots, starts, ends = plan.slots, plan.starts, plan.starts + plan.lengths
        is_there = self._positions[slots] == starts[:, None]  # [rows, 2]
        reads, writes = 2 * slots + is_there.argmax(1), 2 * slots + 1 - is_there.argmax(1)
        read_by_slot = dict(zip(slots.tolist(), reads.tolist(), strict=True))
        elsewhere = np.flatnonzero((starts == 0) | ~is_there.any(1) | np.isin(slots, list(plan.state_reads)))
        for row in elsewhere.tolist():
            slot = int(slots[row])
            read_by_slot[slot] = self._found(plan.state_reads.get(slot), int(starts[row]))
        is_read = set(read_by_slot.values())
        for row in elsewhere.tolist():  # it may write either; a sequence that had the slot before may have a reader yet
            writes[row] = next(one for one in (2 * slots[row], 2 * slots[row] + 1) if one not in is_read)
            left = self._positions[slots[row]]
            left[left == ends[row]] = NO_POSITION
        self._positions.reshape(-1)[writes] = ends
        write_by_slot = dict(zip(slots.tolist(), writes.tolist(), strict=True))
        rows, saves = RecurrentRows(self), defaultdict[int, list[tuple[StateSave, int]]](list)
        for save in plan.state_saves:
            slot, place = int(slots[save.row]), self._first_kept + save.kept
            saves[slot].append((save, place))
            if save.position == starts[save.row]:
                rows.copies.append((read_by_slot[slot], place))
        first, firsts = num_own, dict(zip(slots.tolist(), starts.tolist(), strict=True))
        for length in lengths.tolist():
            slot = int(tokens[0, first])
            start = firsts[slot]
            own = [(save.position, kept) for save, kept in saves[slot] if start < save.position <= start + length]
            rows.runs.append(Run(first, first + length, start, read_by_slot[slot], write_by_slot[slot], own))
            read_by_slot[slot], firsts[slot] = write_by_slot[slot], start + length
            first += length
        own_slots, turns = tokens[0, :num_own], tokens[1, :num_own].astype(np.int64)
        turns -= np.array([firsts[slot] for slot in own_slots.tolist()], np.int64)
        for turn in range(int(turns.max(initial=-1)) + 1):
            places = np.flatnonzero(turns == turn)
            chosen = own_slots[places].tolist()
            written = [write_by_slot[slot] for slot in chosen]
            read = written if turn else [read_by_slot[slot] for slot in chosen]
            device = self._inputs.device
            of_tokens = slice(0, num_own) if len(places) == num_own else torch.from_numpy(places).to(device)
            rows.add_wave(of_tokens, places.tolist(), read, written)
        return rows

    def _found(self, source: int | None, start: int) -> int:
        """Where a row reads that does not go on from its slot's own state; see StepPlan.state_reads."""
        if source is not None and source >= 0:
            return self._first_kept + source
        if start == 0:
            return self._zero
        assert source is not None, "a row starts where its slot has no state"
        (parity,) = np.flatnonzero(self._positions[~source] == start).tolist()
        return 2 * ~source + int(parity)

    def copy(self, source: int, target: int) -> None:
        """All layers."""
        self._inputs[:, target] = self._inputs[:, source]
        self._memory[:, target] = self._memory[:, source]


@dataclass(frozen=True, slots=True)
class Run:
    """Tokens of a prompt, which lie end to end in the step.

    Args:
        saves: (position, state to write when all before that position is computed).
    """

    first: int
    end: int
    start: int  # the first token's position
    read: int
    write: int
    saves: list[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Wave:
    """Tokens of as many sequences, each computed by itself."""

    tokens: Tensor | slice  # [some], indexes
    reads: Tensor  # [some]
    writes: Tensor  # [some]


@dataclass(slots=True)
class RecurrentRows:
    """A step's tokens, for recurrent layers: runs are computed first, then waves, one after the other.

    Args:
        copies: (state, place among those kept), to make before anything is computed.
        singles: the waves' tokens: token, state read, state written. They may be computed one after the other: no
            sequence writes a state that another reads in the same step.
    """

    states: States
    runs: list[Run] = field(default_factory=list)
    waves: list[Wave] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    singles: list[tuple[int, int, int]] = field(default_factory=list)

    def add_wave(self, tokens: Tensor | slice, places: list[int], reads: list[int], writes: list[int]) -> None:
        """tokens: the same as places, on the device."""
        device = self.states.layers[0].memory.device
        self.waves.append(Wave(tokens, *(torch.tensor(one, device=device) for one in (reads, writes))))
        self.singles += zip(places, reads, writes, strict=True)

    def copy_states(self) -> None:
        for source, target in self.copies:
            self.states.copy(source, target)


class Convolution:
    """Each channel's sum of its last `taps` inputs, weighted, in float32. weight: [taps, channels], float32."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight, self._bias = weight, None if bias is None else bias.float()

    def __call__(self, x: Tensor, rows: RecurrentRows, kept: Tensor) -> Tensor:
        """
        Args:
            x: [tokens, channels].
            kept: of LayerStates.
        Returns:
            [tokens, channels], of x's format.
        """
        out = torch.empty_like(x)
        num_before = kept.shape[1]
        for run in rows.runs:
            seen = torch.cat([kept[run.read], x[run.first : run.end]])  # [taps - 1 + tokens, channels]
            out[run.first : run.end] = self._sum(seen.unfold(0, num_before + 1, 1).movedim(-1, 0))
            for position, state in [*run.saves, (run.start + run.end - run.first, run.write)]:
                kept[state] = seen[position - run.start : position - run.start + num_before]
        for wave in rows.waves:
            seen = torch.cat([kept[wave.reads], x[wave.tokens].unsqueeze(1)], 1)  # [some, taps, channels]
            out[wave.tokens] = self._sum(seen.movedim(1, 0))
            kept[wave.writes] = seen[:, 1:]
        return out

    def _sum(self, seen: Tensor) -> Tensor:
        """seen: [taps, some, channels]."""
        total = seen[0].float() * self._weight[0]
        for tap in range(1, len(seen)):
            total = total.add_(seen[tap].float() * self._weight[tap])
        total = total if self._bias is None else total.add_(self._bias)
        return total.to(seen.dtype)


class ShortConvolution:
    """LFM2's: two gates around a convolution."""

    def __init__(self, weights: RecurrentWeights) -> None:
        self._convolve = Convolution(weights.convolution, weights.convolution_bias)

    def __call__(self, taken: Tensor, rows: RecurrentRows, layer: int) -> Tensor:
        """See Recurrence; taken: both gates and the channels."""
        before, after, channels = taken.chunk(3, 1)
        return self._convolve(before * channels, rows, rows.states.layers[layer].inputs).mul_(after)


def _silu(x: Tensor) -> Tensor:
    """In float32. A CPU computes what fills no vector by another function: in double both round to the same."""
    return F.silu(x.float()) if x.is_cuda else F.silu(x.double()).float()


class _Scan:
    """Memories that each token reads by its query and changes by its key, after they have forgotten some.

    A block of a prompt's tokens is a few matmuls, by the WY representation of arXiv:2412.06464, section 3.3, where what
    a token adds depends on what the memory holds for its key, and by arXiv:2405.21060, section 6, where it does not.
    """

    def __init__(self, config: RecurrentConfig, weights: RecurrentWeights) -> None:
        self._config = config
        self._convolve = Convolution(weights.convolution, weights.convolution_bias)
        assert weights.decay is not None
        assert weights.step_bias is not None
        self._rate, self._step_bias = weights.decay.double().exp(), weights.step_bias.double()
        self._later = torch.ones(BLOCK_SIZE, BLOCK_SIZE, dtype=torch.bool, device=self._rate.device).triu(1)

    def _read(self, tokens: "Tokens", rows: RecurrentRows, memory: Tensor) -> Tensor:
        """What tokens read: [tokens, heads, value_dim]. memory: of LayerStates."""
        out = torch.empty_like(tokens.value)
        for run in rows.runs:
            out[run.first : run.end] = self._scan(tokens.of(slice(run.first, run.end)), run, memory)
        for wave in rows.waves:
            out[wave.tokens] = _recur(tokens.of(wave.tokens), wave, memory)
        return out

    def _convolved(self, channels: Tensor, rows: RecurrentRows, states: LayerStates) -> Tensor:
        """[tokens, channels], float32, rounded to the model's format."""
        return _silu(self._convolve(channels.contiguous(), rows, states.inputs)).to(channels.dtype).float()

    def _steps(self, step: Tensor) -> Tensor:
        """How far each token goes: [tokens, heads]. In double precision it is the same in any company once rounded."""
        return F.softplus(step.double() + self._step_bias)

    def _by_head(self, x: Tensor) -> Tensor:
        """[tokens, key heads * key_dim] to [tokens, heads, key_dim], each key head for all that share it."""
        own = self._config
        shared, keys = own.num_heads // own.num_key_heads, x.reshape(len(x), own.num_key_heads, own.key_dim)
        return keys.repeat(1, shared, 1) if own.is_tiled else keys.repeat_interleave(shared, 1)

    def _scan(self, tokens: "Tokens", run: Run, memory: Tensor) -> Tensor:
        """A prompt's tokens in blocks; padding at both ends adds nothing and does not decay.

        memory: of LayerStates. Returns [tokens, heads, value_dim].
        """
        first, num_tokens = run.start % BLOCK_SIZE, run.end - run.first
        padding = (first, -(first + num_tokens) % BLOCK_SIZE)

        def blocks(x: Tensor) -> Tensor:
            """[tokens, heads, ...] to [heads, blocks, 16, ...]"""
            padded = F.pad(x, (0, 0) * (x.dim() - 1) + padding)
            return padded.view(-1, BLOCK_SIZE, *x.shape[1:]).movedim(2, 0).contiguous()

        query, key, value = blocks(tokens.query), blocks(tokens.key), blocks(tokens.value)
        decay = blocks(tokens.decay).cumsum(-1)
        pairs = (decay.unsqueeze(-1) - decay.unsqueeze(-2)).masked_fill_(self._later, -torch.inf).exp_()
        since, left = decay.exp().unsqueeze(-1), (decay[..., -1:] - decay).exp().unsqueeze(-1)
        turned = key.transpose(-1, -2)
        new, reading = value, query * since
        if tokens.strength is not None:
            strength = blocks(tokens.strength).unsqueeze(-1)
            stronger = key * strength
            solved = torch.linalg.solve_triangular(
                (stronger @ turned).mul_(pairs),
                torch.cat([value * strength, stronger * since], -1),
                upper=False,
                unitriangular=True,
            )
            new, seen = solved.split_with_sizes([value.shape[-1], key.shape[-1]], -1)
            reading = torch.cat([reading, seen], -2)
        within, writing = (query @ turned).mul_(pairs), (key * left).transpose(-1, -2)
        kept, state, out = dict(run.saves), memory[run.read], torch.empty_like(value)
        for block in range(value.shape[1]):
            found = reading[:, block] @ state  # [heads, 16 or 2 * 16, value_dim]
            added = new[:, block]
            if tokens.strength is not None:
                added = added - found[:, BLOCK_SIZE:]
            out[:, block] = found[:, :BLOCK_SIZE] + within[:, block] @ added
            state = state * since[:, block, -1:] + writing[:, block] @ added
            border = run.start - first + (block + 1) * BLOCK_SIZE
            if border in kept:
                memory[kept[border]] = state
        memory[run.write] = state
        return out.flatten(1, 2).transpose(0, 1)[first : first + num_tokens]


class DeltaNet(_Scan):
    """Gated DeltaNet: linear attention whose memory forgets, and corrects what it holds for a key.

    Source: arXiv:2412.06464, section 3.
    """

    def __init__(self, config: RecurrentConfig, weights: RecurrentWeights) -> None:
        super().__init__(config, weights)
        assert weights.norm is not None
        self._norm = weights.norm

    def __call__(self, taken: Tensor, rows: RecurrentRows, layer: int) -> Tensor:
        """See Recurrence; taken: the channels, then gates of the output, strengths, steps."""
        own, states = self._config, rows.states.layers[layer]
        channels, gate, strength, step = taken.split_with_sizes(own.input_sizes, 1)
        key_size = own.num_key_heads * own.key_dim
        mixed = self._convolved(channels, rows, states)
        query, key, value = mixed.split_with_sizes([key_size, key_size, own.output_size], 1)
        tokens = Tokens(
            self._by_head(self._normed(query)) * own.key_dim**-0.5,
            self._by_head(self._normed(key)),
            value.reshape(len(taken), own.num_heads, own.value_dim),
            (-self._rate * self._steps(step)).float(),
            strength.double().sigmoid().float(),
        )
        normed = F.rms_norm(self._read(tokens, rows, states.memory), self._norm.shape, self._norm, own.eps)
        return normed.flatten(1).mul_(_silu(gate)).to(taken.dtype)

    def _normed(self, x: Tensor) -> Tensor:
        """x: [tokens, key heads * key_dim], also returned so, each head of length 1."""
        heads = x.reshape(len(x), -1, self._config.key_dim)
        return (heads * torch.rsqrt((heads * heads).sum(-1, keepdim=True) + DELTA_EPS)).flatten(1)


class StateSpace(_Scan):
    """Mamba-2's mixer: a memory that forgets, to which tokens add by their keys, whatever it holds.

    Source: arXiv:2405.21060, section 7; its B, C and x are keys, queries and values here.
    """

    def __init__(self, config: RecurrentConfig, weights: RecurrentWeights) -> None:
        super().__init__(config, weights)
        assert weights.skip is not None
        self._skip, self._norm = weights.skip, weights.norm

    def __call__(self, taken: Tensor, rows: RecurrentRows, layer: int) -> Tensor:
        """See Recurrence; taken: gates of the output, the channels, steps."""
        own, states = self._config, rows.states.layers[layer]
        gate, channels, step = taken.split_with_sizes(own.input_sizes, 1)
        key_size = own.num_key_heads * own.key_dim
        mixed = self._convolved(channels, rows, states)
        value, key, query = mixed.split_with_sizes([own.output_size, key_size, key_size], 1)
        value = value.reshape(len(taken), own.num_heads, own.value_dim)
        steps = self._steps(step)
        tokens = Tokens(
            self._by_head(query), self._by_head(key), value * steps.float().unsqueeze(-1), (-self._rate * steps).float()
        )
        found = self._read(tokens, rows, states.memory).add_(value * self._skip.unsqueeze(-1))
        return self._gated(found.flatten(1), gate).to(taken.dtype)

    def _gated(self, found: Tensor, gate: Tensor) -> Tensor:
        """Gate and norm what was read. Both: [tokens, heads * value_dim]; also returned so, float32."""
        own = self._config
        if self._norm is None or not own.is_normed_first:
            found = found.mul_(_silu(gate))
        if self._norm is None:
            return found
        groups = found.view(len(found), own.num_key_heads, -1)
        normed = F.rms_norm(groups, groups.shape[2:], None, own.eps).flatten(1).mul_(self._norm)
        return normed.mul_(_silu(gate)) if own.is_normed_first else normed


@dataclass(frozen=True, slots=True)
class Tokens:
    """What tokens read from memories and write to them, float32.

    strength: how much of the difference to what the memory holds for the key is added; None: the value is.
    """

    query: Tensor  # [tokens, heads, key_dim]
    key: Tensor  # [tokens, heads, key_dim]
    value: Tensor  # [tokens, heads, value_dim]
    decay: Tensor  # [tokens, heads], logarithms
    strength: Tensor | None = None  # [tokens, heads]

    def of(self, chosen: Tensor | slice) -> "Tokens":
        strength = None if self.strength is None else self.strength[chosen]
        return Tokens(self.query[chosen], self.key[chosen], self.value[chosen], self.decay[chosen], strength)


def _recur(tokens: Tokens, wave: Wave, memory: Tensor) -> Tensor:
    """Each token by itself. memory: of LayerStates. Returns [tokens, heads, value_dim]."""
    states = memory[wave.reads].mul_(tokens.decay.double().exp().float()[..., None, None])
    added = tokens.value
    if tokens.strength is not None:
        found = read_states(tokens.key, states)
        added = (added - found).mul_(tokens.strength.unsqueeze(-1))
    states.addcmul_(tokens.key.unsqueeze(-1), added.unsqueeze(-2))
    memory[wave.writes] = states
    return read_states(tokens.query, states)


def read_states(vectors: Tensor, states: Tensor) -> Tensor:
    """Each vector times its state, the same bits at any place and in any company.

    Where values do not fill vectors, torch's batched product rounds by a slice's place: they are padded.

    Args:
        vectors: [tokens, heads, key_dim]. states: [tokens, heads, key_dim, value_dim].

    Returns:
        [tokens, heads, value_dim]
    """
    value_dim = states.shape[-1]
    if num_missing := -value_dim % _VALUES:
        states = F.pad(states, (0, num_missing))
    return (vectors.unsqueeze(-2) @ states).squeeze(-2)[..., :value_dim]


Recurrence = Callable[[Tensor, RecurrentRows, int], Tensor]
"""What a layer's first matrix gives, [tokens, RecurrentConfig.input_size], to what its second one takes, [tokens,
output_size]; the number is the layer's in States.layers"""

_KINDS: dict[str, Callable[[RecurrentConfig, RecurrentWeights], Recurrence]] = {
    "conv": lambda _, weights: ShortConvolution(weights),
    "linear_attention": DeltaNet,
    "mamba": StateSpace,
}


def make_recurrence(config: RecurrentConfig, weights: RecurrentWeights) -> Recurrence:
    return _KINDS[config.kind](config, weights)
