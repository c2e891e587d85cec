"""Steps whose rows stay on the device, and what they compute may be a graph. Thread: engine.

All steps are of this kind, but for those that tell logprobs of prompts (batch.py lays these out).

Of a step the host sends what has changed, in one copy: slots, positions and known tokens of its rows, what requests
that start ask of sampling, and the blocks that tables have grown by. All else is read on the device: tables, and the
tokens that slots drew last. A step is therefore the same kernels on the same buffers, whatever its rows, and it is sent
by a graph of a shape that it is padded to, or by Python as it is. The way of a step, in either case:

    forward: _bring_up (one copy) -> a graph, or _compute: _fill, Model.forward, DeviceSampler.launch
    draw:    what the step has not drawn itself

Rows that a graph has too many see nothing, draw nothing, and write to a block of their own; so do tokens of prompts.
Where prompts' tokens begin and end is read on the device too: attention's grid has room for as many tiles as the tokens
of the shape can make, and those that they do not make end at once. What attention leaves of a token that is padding is
any number, and goes no further than its own row.

What the sampling kernel does not know, as more biases than it has room for, is drawn by torch: such a step has no
graph. All that requests may ask for by default it knows, in one form: nothing is compiled or captured for the first of
them that asks for something.

"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from core.config import BLOCK_SIZE
from core.plan import Int32Array, StepPlan
from gpu.attention import IntArray, RaggedRows
from gpu.batch import BlockTables, DeviceBatch, SampledRows, fresh_blocks, rows_by_window
from gpu.kernels.device_rows import SpareBlocks, clear_blocks, empty_rows, fill_rows, fill_tokens, scatter_rows
from gpu.kernels.sampler import DeviceSampler, StartedSlots
from gpu.kv_cache import KVCache, num_blocks_for
from gpu.model import Model
from gpu.sampler import Drawn, Sampler
from gpu.step_graphs import StepGraphs
from gpu.step_shapes import StepShape, StepShapes
from gpu.streams import StagedCopies, Streams

NO_SLOT = -1  # of padding


@dataclass(frozen=True, slots=True)
class KnownPlan:
    """A plan of rows that decode, and of prompts.

    Args:
        own: rows whose one token their sequences drew last; they draw the next. Long contexts first: they take the
            longest.
        prompts: the others, in the plan's order.
    """

    plan: StepPlan
    own: IntArray
    prompts: IntArray

    @property
    def shape(self) -> StepShape:
        """Without padding."""
        return StepShape(len(self.own), len(self.prompts), int(self.plan.lengths[self.prompts].sum()))

    @property
    def drawn(self) -> IntArray:
        """Rows that draw, in the order of their logits."""
        return np.concatenate([self.own, self.prompts[self.plan.samples[self.prompts]]])

    @property
    def sampled(self) -> SampledRows:
        rows = self.drawn
        return SampledRows(rows, self.plan.slots[rows], (self.plan.starts + self.plan.lengths)[rows])


@dataclass(frozen=True, slots=True)
class StepInputs:
    """Parts of one piece of integers; without prompts, the first alone."""

    rows: Any  # [3, rows]: slot, the last new token's position, its id or < 0: what the slot drew last
    tokens: Any  # [3, prompt tokens]: of each its slot, its position, and its id or < 0
    offsets: Any  # [rows + 1]: where a row's tokens begin
    asked: Any  # [rows]: index of the token that a drawing row draws behind; any for padding
    drawn: Any  # [2, rows]: slots and positions of the tokens that are drawn


def num_inputs(shape: StepShape) -> int:
    return sum(_sizes(shape))


def _sizes(shape: StepShape) -> list[int]:
    rows = shape.num_rows
    return [3 * rows, 3 * shape.num_prompt_tokens, rows + 1, rows, 2 * rows] if shape.num_prompts else [3 * rows]


def inputs_in(piece: Tensor, shape: StepShape) -> StepInputs:
    """Views of a step's part of it."""
    parts = [*torch.split(piece[: num_inputs(shape)], _sizes(shape))]
    return _shaped(parts + [piece[:0]] * (5 - len(parts)))


def _shaped(parts: Sequence[Any]) -> StepInputs:
    rows, tokens, offsets, asked, drawn = parts
    return StepInputs(rows.reshape(3, -1), tokens.reshape(3, -1), offsets, asked, drawn.reshape(2, -1))


def step_inputs(known: KnownPlan | None, shape: StepShape) -> Int32Array:
    """In one piece.

    Args:
        known: None: all is padding.
        shape: that it is padded to.
    """
    piece = np.full(num_inputs(shape), NO_SLOT, dtype=np.int32)
    parts = np.split(piece, np.cumsum(_sizes(shape))[:-1])
    found = _shaped(parts + [piece[:0]] * (5 - len(parts)))
    if shape.num_prompts:
        found.offsets[:] = np.minimum(np.arange(shape.num_rows + 1), shape.num_decodes)
        found.asked[:] = 0
    if known is not None:
        _fill(found, known, shape)
    return piece


def _fill(inputs: StepInputs, known: KnownPlan, shape: StepShape) -> None:
    plan, own, prompts = known.plan, known.own, known.prompts
    tokens_before = np.cumsum(plan.lengths) - plan.lengths  # [rows of the plan]
    inputs.rows[:, : len(own)] = plan.slots[own], plan.starts[own], plan.token_ids[tokens_before[own]]
    if not shape.num_prompts:
        return
    lengths, ends = plan.lengths[prompts], (plan.starts + plan.lengths)[prompts]
    last = shape.num_decodes + np.cumsum(lengths)  # one past each prompt's tokens
    inputs.rows[:2, shape.num_decodes : shape.num_decodes + len(prompts)] = plan.slots[prompts], ends - 1
    inputs.offsets[shape.num_decodes + 1 :] = last[-1]
    inputs.offsets[shape.num_decodes + 1 : shape.num_decodes + 1 + len(prompts)] = last
    row = np.repeat(np.arange(len(prompts)), lengths)  # [prompt tokens]
    index = np.arange(len(row)) - (last - lengths - shape.num_decodes)[row]  # in its row
    of_plan = prompts[row]
    inputs.tokens[:, : len(row)] = (
        plan.slots[of_plan],
        plan.starts[of_plan] + index,
        plan.token_ids[tokens_before[of_plan] + index],
    )
    sampled = known.sampled
    inputs.asked[: len(sampled.rows)] = np.concatenate([np.arange(len(own)), last[plan.samples[prompts]] - 1])
    inputs.drawn[:, : len(sampled.rows)] = sampled.slots, sampled.positions


INT_BYTES = 4
CHANGES_PER_ROW = 4  # of tables, in a usual copy: a decode's is one in 16 steps
NOTHING_STARTED = StartedSlots([], [], [])


@dataclass(frozen=True, slots=True)
class SentStep:
    """A step that was sent.

    Args:
        sampled: its rows that draw, without padding.
        logits: of these, [rows, vocab], float32, until the next step is sent.
        is_drawn: by what computed it.
    """

    sampled: SampledRows
    logits: Tensor
    is_drawn: bool


class DeviceSteps:
    """
    Args:
        shapes: that steps are padded to, where there are graphs.
        max_tokens: of a step.
    """

    def __init__(
        self,
        model: Model,
        cache: KVCache,
        sampler: Sampler,
        tables: BlockTables,
        streams: Streams,
        shapes: StepShapes,
        max_tokens: int,
    ) -> None:
        device, num_slots, max_rows = cache.tensor.device, len(tables.blocks), shapes.decodes[-1]
        self._model, self._cache, self._sampler, self._streams = model, cache, sampler, streams
        self._kernel = sampler.kernel if isinstance(sampler.kernel, DeviceSampler) else None
        self._tables = tables
        self._spare = SpareBlocks(cache.scratch_block, cache.padding_block)
        tables.keep_changes()
        self._device_tables = torch.full((num_slots, tables.width), cache.scratch_block, device=device).int()
        all_shapes = [StepShape(max_rows), StepShape(0, max_rows, max_tokens), *shapes.chunks]
        most_inputs = max(map(num_inputs, all_shapes))
        self._inputs = torch.full((most_inputs,), NO_SLOT, dtype=torch.int32, device=device)  # see StepInputs
        drawn = self._kernel.rows if self._kernel is not None else self._inputs.new_empty((2, max_rows)).long()
        most_tokens = max(shape.num_tokens for shape in all_shapes)
        self._rows = empty_rows(max_rows, most_tokens, tables.width, drawn)
        self._offsets = torch.arange(max_rows + 1, dtype=torch.int32, device=device)
        self._logits = torch.empty((max_rows, model.config.vocab_size), device=device)
        self._copies = StagedCopies(streams, INT_BYTES * (most_inputs + (2 * CHANGES_PER_ROW + 1 + 2) * max_rows))
        has_kernel = self._kernel is not None
        self.graphs = StepGraphs(lambda shape: self._compute(shape, tables.width, has_kernel), self._pad, shapes)

    def read(self, plan: StepPlan) -> KnownPlan | None:
        """What can be sent from here; None: the plan asks for logprobs of prompts."""
        if plan.prompt_targets:
            return None
        num_prompt_tokens = self._tables.num_prompt_tokens[plan.slots]
        for start in plan.sequence_starts:  # the tables do not know them yet
            num_prompt_tokens[plan.slots == start.slot] = start.num_prompt_tokens
        is_own = (plan.lengths == 1) & plan.samples & (plan.starts >= num_prompt_tokens)
        own = np.flatnonzero(is_own)
        own = own[np.argsort(-plan.starts[own], kind="stable")]
        return KnownPlan(plan, own, np.flatnonzero(~is_own))

    def forward(self, known: KnownPlan) -> SentStep:
        """Compute what read() has given, and draw unless draw() must."""
        plan, sampled, shape = known.plan, known.sampled, known.shape
        is_drawn = self._can_draw(sampled.slots)
        padded = self.graphs.of(shape) if is_drawn or self._kernel is None else None
        if padded is not None:
            self.graphs.prepare(padded)
        self._tables.grow(plan)
        self._bring_up(known, padded or shape)
        num_blocks = num_blocks_for(int((plan.starts + plan.lengths).max(initial=1)))
        if padded is None:
            send = partial(self._compute, shape, num_blocks, is_drawn)
        else:
            send = partial(self._replay, padded, num_blocks, is_drawn)
        self._streams.current.run(send)
        return SentStep(sampled, self._logits[: len(sampled.rows)], is_drawn)

    def draw(self, step: SentStep) -> Drawn:
        """A token per row. Comes before the next step's forward()."""
        slots = step.sampled.slots
        if not step.is_drawn:
            return self._sampler.sample(step.logits, slots, step.sampled.positions)
        assert self._kernel is not None
        token_ids, is_finite = (found[: len(slots)] for found in (self._kernel.token_ids, self._kernel.is_finite))
        return self._sampler.told(step.logits, token_ids, is_finite, slots, self._kernel.logprobs[: len(slots)])

    def _can_draw(self, slots: IntArray) -> bool:
        return self._kernel is not None and self._kernel.can_draw(slots)

    def _replay(self, shape: StepShape, num_blocks: int, draws: bool) -> None:
        if not self.graphs.replay(shape):
            self._compute(shape, num_blocks, draws)

    def _compute(self, shape: StepShape, num_blocks: int, draws: bool) -> None:
        """What a graph holds: kernels alone, that read and write what stays where it is.

        Args:
            num_blocks: of the longest context, at least.
        """
        inputs, logits = inputs_in(self._inputs, shape), self._logits[: shape.num_rows]
        self._fill(inputs, shape)
        self._model.logits(self._model.forward(self._batch(inputs, shape, num_blocks), self._cache), logits)
        if draws:
            assert self._kernel is not None
            self._kernel.launch(logits)

    def _fill(self, inputs: StepInputs, shape: StepShape) -> None:
        rows = self._rows.first(shape.num_rows, shape.num_tokens)
        tables, last_tokens = self._device_tables, self._sampler.last_tokens
        fill_rows(rows, inputs.rows, tables, last_tokens, self._spare)
        if shape.num_prompts:
            fill_tokens(rows, shape.num_decodes, inputs.tokens, tables, last_tokens, self._spare)
            rows.drawn.copy_(inputs.drawn)

    def _batch(self, inputs: StepInputs, shape: StepShape, num_blocks: int) -> DeviceBatch:
        """The first rows, as _fill leaves them. Of one step: the attention's layout is made by its first layer."""
        filled, all_rows = self._rows.first(shape.num_rows, shape.num_tokens), np.arange(shape.num_rows)
        offsets = inputs.offsets if shape.num_prompts else self._offsets[: shape.num_rows + 1]
        tables = filled.tables[:, :num_blocks]
        rows = RaggedRows(tables, filled.ends, offsets, num_decodes=shape.num_decodes, window=None)
        return DeviceBatch(
            token_ids=filled.token_ids,
            pending=None,
            positions=filled.positions,
            kv_slots=filled.kv_slots,
            attending=rows_by_window(rows, self._model.config.windows, self._tables.width * BLOCK_SIZE),
            asked_tokens=inputs.asked if shape.num_prompts else None,
            sampled_rows=all_rows,
            sampled_slots=all_rows,
            sampled_positions=all_rows,
            cleared_blocks=None,
            copy_sources=None,
            copy_targets=None,
        )

    def _bring_up(self, known: KnownPlan, shape: StepShape) -> None:
        """Put on the device what the plan changes."""
        plan, inputs = known.plan, step_inputs(known, shape)
        cleared = fresh_blocks(plan, self._tables).astype(np.int32)
        places, blocks = self._tables.take_changes()
        started = NOTHING_STARTED if self._kernel is None else self._kernel.take_started()
        parts = (inputs, places, blocks, plan.copy_sources, plan.copy_targets, cleared, *started.parts)
        self._copies.send_integers(parts, partial(self._change, started))

    def _change(self, started: StartedSlots, parts: list[Tensor]) -> None:
        """Launches nothing for what is empty, which most parts are in most steps."""
        inputs, places, blocks, sources, targets, cleared, *of_started = parts
        if len(sources):
            self._cache.copy_blocks(sources.long(), targets.long())
        if len(places):
            scatter_rows(self._device_tables.view(-1), places, blocks)
        if len(cleared):
            clear_blocks(self._cache.tensor, cleared)
        if started.slots:
            assert self._kernel is not None
            self._kernel.put_started(started, of_started)
        self._inputs[: len(inputs)].copy_(inputs)

    def _pad(self, shape: StepShape) -> None:
        self._copies.send_integers(
            [step_inputs(None, shape)], lambda parts: self._inputs[: len(parts[0])].copy_(parts[0])
        )
