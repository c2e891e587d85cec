"""Sends steps: copies a step's changes to the device at once, then replays a CUDA graph or runs Python. Thread: engine.

The host sends only what has changed, in one copy: the slots, positions and known tokens of the step's rows, the
sampling settings of requests that start, and new blocks of the tables. The tables, and the tokens that slots sampled
last, stay on the device. So every step runs the same kernels on the same buffers: a graph of a shape that it is padded
to sends them, or Python does:

    forward: lay_out (order the tokens) -> _bring_up (one copy) -> a graph, or _send: rows, Model, sampling
    sample:  what forward has not sampled

Tokens are reordered: first the sequences' own, which they sampled themselves, longest context first, each attending
alone; then prompts, row by row, in tiles. A token's matmuls have the same shapes whatever else is in the step and
however its prompt is cut into chunks, so it is rounded the same way.

Padding rows and tokens attend to nothing, sample nothing, and write to the padding block. The bounds of prompts are
read on the device too: attention's grid has room for as many tiles as the shape's tokens can fill, and unused tiles end
at once. Attention leaves undefined numbers for padding tokens, which stay in their own rows.

Steps without graphs: those that return logprobs or vectors of prompts, and those with rows that have adapters. Behind
masks of grammars the sampling kernel is launched by itself; torch samples settings that it does not support, such as
too many biases. It handles all usual settings in one form: no request makes it compile or capture anything.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from core.config import BLOCK_SIZE, Sight
from core.plan import Int32Array, StepPlan
from gpu.adapters import AdaptedRows, SlotAdapters
from gpu.attention import HostRows, IntArray, RaggedRows, rows_in_chunks
from gpu.kv_cache import KVCache, copy_blocks, num_blocks_for
from gpu.memory_plan import MemoryPlan
from gpu.model import Batch, Model
from gpu.pooling import Pooled, Pooler, pooled_tokens
from gpu.recurrence import RecurrentRows, States
from gpu.rows import MOST_STATES, NO_SLOT, DeviceTables, LastStates, StepInputs
from gpu.sampler import NO_DRAFT, DraftRows, Masked, PromptScores, Sampled, Sampler, score, scored_tokens
from gpu.step_graphs import StepGraphs
from gpu.step_shapes import StepShape, StepShapes
from gpu.streams import StagedCopies, Streams

INT_BYTES = 4
CHANGES_PER_ROW = 4  # new blocks that a usual copy has room for: a decode needs one in 16 steps
NOTHING = np.empty(0, dtype=np.int32)


class BlockTables:
    """The blocks of each slot's sequence, in order, on the host; plans bring the differences.

    Args:
        scratch_block: stands where a sequence has no block yet.
        scratch_window: the same of window blocks, whose tables lie behind the others; None: there are none.
    """

    def __init__(
        self, max_sequences: int, max_model_len: int, scratch_block: int, scratch_window: int | None = None
    ) -> None:
        self.width = num_blocks_for(max_model_len)
        self.scratch_block, self.scratch_window = scratch_block, scratch_window
        scratch = [scratch_block] if scratch_window is None else [scratch_block, scratch_window]
        self._empty = np.repeat(np.array(scratch, np.int64), self.width)
        self.blocks = np.tile(self._empty, (max_sequences, 1))  # [slots, width, or twice that]
        self.num_prompt_tokens = np.zeros(max_sequences, dtype=np.int64)  # [slots]

    def grow(self, plan: StepPlan) -> None:
        """Reset the slots that start, and add the plan's new blocks."""
        for start in plan.sequence_starts:
            self.blocks[start.slot] = self._empty
            self.num_prompt_tokens[start.slot] = start.num_prompt_tokens
        places, blocks = self._changes(plan)
        self.blocks.reshape(-1)[places] = blocks

    def changes(self, plan: StepPlan) -> tuple[Int32Array, Int32Array]:
        """(place, its new block) of the plan's changes, each place once; places count through all tables end to end."""
        places, blocks = self._changes(plan)
        _, lasts = np.unique(places[::-1], return_index=True)
        lasts = len(places) - 1 - lasts
        return places[lasts], blocks[lasts]

    def _changes(self, plan: StepPlan) -> tuple[Int32Array, Int32Array]:
        """The same in the order of the plan."""
        places, blocks = plan.table_slots * np.int32(self.blocks.shape[1]) + plan.table_positions, plan.table_blocks
        if self.scratch_window is not None:
            places, blocks = places + np.int32(self.width) * (blocks < 0), np.where(blocks < 0, ~blocks, blocks)
        return places, blocks

    def of(self, slot: int) -> IntArray:
        """A slot's blocks, in order, then its window blocks, as ~b."""
        found, has_block = self.blocks[slot], self.blocks[slot] != self._empty
        own, behind = found[: self.width][has_block[: self.width]], found[self.width :][has_block[self.width :]]
        return np.concatenate([own, ~behind])

    def rows_of(self, layout: "StepLayout", are_windows: bool = False) -> HostRows:
        """What each row attends to, for attention that reads it on the host."""
        first, scratch = self.width * are_windows, self.scratch_window if are_windows else self.scratch_block
        assert scratch is not None, "there are window blocks"
        tables = self.blocks[layout.slots, first : first + num_blocks_for(int(layout.ends.max(initial=0)))]
        offsets = np.concatenate([np.arange(layout.num_own + 1), layout.num_own + np.cumsum(layout.lengths)])
        return HostRows(tables, layout.ends, offsets, scratch)

    def fresh_blocks(self, plan: StepPlan) -> IntArray:
        """Blocks that the step begins but does not fill: the rest still has an earlier sequence's content. With ~b."""
        ends = plan.starts + plan.lengths
        last_block = (ends - 1) // BLOCK_SIZE
        is_fresh = (last_block * BLOCK_SIZE >= plan.starts) & (ends % BLOCK_SIZE != 0)
        slots, places = plan.slots[is_fresh], last_block[is_fresh]
        found: IntArray = self.blocks[slots, places]
        if self.scratch_window is None:
            return found
        return np.concatenate([found, ~self.blocks[slots, places + self.width]])


@dataclass(frozen=True, slots=True)
class SampledRows:
    """The rows that sample, in the order of their logits."""

    rows: IntArray  # [sampled]: the plan's row
    slots: IntArray  # [sampled]
    positions: IntArray  # [sampled]: the sampled token's
    drafts: DraftRows | None = None

    @property
    def order(self) -> IntArray:
        """Which come first in the plan: its rows, and a row's positions."""
        return np.lexsort((self.positions, self.rows))


@dataclass(frozen=True, slots=True)
class StepLayout:
    """A step's rows and tokens in the order of computation: own tokens, a row each, then prompts.

    Args:
        slots, ends: [rows]; ends: one past the last new token's position.
        lengths: [prompts], tokens of each.
        tokens: [3, tokens]: see StepInputs.
        asked: indexes of the tokens whose last hidden states are needed: of rows that sample, then of prompts' targets,
            then of pooled rows, then `kept`; None: all tokens, in order.
        kept: indexes of the tokens whose states go to LastStates.
    """

    num_own: int
    slots: IntArray
    ends: IntArray
    lengths: IntArray
    tokens: Int32Array
    asked: IntArray | None
    sampled: SampledRows
    kept: IntArray

    @property
    def shape(self) -> StepShape:
        """Without padding."""
        return StepShape(self.num_own, len(self.lengths), self.tokens.shape[1] - self.num_own)


def lay_out(plan: StepPlan, num_prompt_tokens: IntArray, are_own_alone: bool, keeps: bool = False) -> StepLayout:
    """
    Args:
        num_prompt_tokens: [slots]
        are_own_alone: several own tokens of a sequence are rows of one token each. False: they count as a prompt.
        keeps: last hidden states are kept, of a row's MOST_STATES last tokens, or of its prompt's.
    """
    lengths, ends = plan.lengths, plan.starts + plan.lengths
    num_tokens = plan.num_tokens
    before = row_of = np.arange(plan.num_rows, dtype=np.int64)  # [rows]: tokens before it; [tokens]: its row
    positions = plan.starts
    if num_tokens > plan.num_rows:
        before = np.cumsum(lengths) - lengths
        row_of = np.repeat(row_of, lengths)
        positions = np.arange(num_tokens) + (plan.starts - before)[row_of]
    is_own = positions >= num_prompt_tokens[plan.slots[row_of]]
    if not are_own_alone:
        is_own &= ((lengths == 1) & plan.samples)[row_of]
    own = np.flatnonzero(is_own)
    own = own[np.argsort(-positions[own], kind="stable")]
    others = np.flatnonzero(~is_own)
    order = np.concatenate([own, others])
    place = np.empty_like(order)
    place[order] = np.arange(num_tokens)
    num_others = np.bincount(row_of[others], minlength=plan.num_rows)  # [rows]
    prompts = np.flatnonzero(num_others)
    sampled = np.flatnonzero(plan.samples)
    drafts, num_left = None, np.zeros_like(sampled)  # [sampled]: the row's tokens after it
    if plan.num_drafts:
        counts = [1 + plan.num_drafts.get(row, 0) for row in sampled.tolist()]
        sampled = np.repeat(sampled, counts)
        turns = np.concatenate([np.arange(count) for count in counts])
        num_left = np.repeat(counts, counts) - 1 - turns
        follow = np.append(plan.token_ids, NO_DRAFT)[(before + lengths)[sampled] - num_left]
        drafts = DraftRows(turns, np.where(num_left > 0, follow, NO_DRAFT))
    lasts, ends_sampled = place[(before + lengths)[sampled] - 1 - num_left], ends[sampled] - num_left
    by_place = np.argsort(lasts)
    sampled, lasts, ends_sampled = sampled[by_place], lasts[by_place], ends_sampled[by_place]
    if drafts is not None:
        drafts = DraftRows(drafts.turns[by_place], drafts.next_ids[by_place])
    asked, kept = None, order[:0]
    if keeps:
        first_kept = np.maximum(num_prompt_tokens[plan.slots], ends) - MOST_STATES  # [rows]
        kept = np.flatnonzero((positions >= first_kept[row_of])[order])
    if len(prompts) or plan.prompt_targets or len(sampled) < num_tokens:
        first_tokens = before.astype(np.int32)
        more = place[scored_tokens(plan, first_tokens)], place[pooled_tokens(plan, first_tokens)]
        asked = np.concatenate([lasts, *more, kept])
    slots, positions = plan.slots[row_of[order]], positions[order]
    return StepLayout(
        num_own=len(own),
        slots=np.concatenate([slots[: len(own)], plan.slots[prompts]]),
        ends=np.concatenate([positions[: len(own)] + 1, (plan.starts + num_others)[prompts]]),
        lengths=num_others[prompts],
        tokens=np.stack([slots, positions.astype(np.int32), plan.token_ids[order]]),
        asked=asked,
        sampled=SampledRows(sampled, plan.slots[sampled], ends_sampled, drafts),
        kept=kept,
    )


def part_sizes(shape: StepShape, num_asked: int) -> list[int]:
    """Sizes of StepInputs' fields, which lie end to end: their places depend on the shape alone."""
    rows = shape.num_rows
    return [rows, rows, rows + 1, num_asked, 2 * rows, 3 * shape.num_tokens]


def num_inputs(shape: StepShape, num_asked: int) -> int:
    return sum(part_sizes(shape, num_asked))


def inputs_in(piece: Tensor, shape: StepShape, num_asked: int) -> StepInputs:
    """StepInputs as views of one piece."""
    sizes = part_sizes(shape, num_asked)
    slots, ends, offsets, asked, sampled, tokens = torch.split(piece[: sum(sizes)], sizes)
    return StepInputs(slots, ends, offsets, asked, sampled.view(2, -1), tokens.view(3, -1))


def pack(layout: StepLayout | None, shape: StepShape, num_asked: int, samples: bool = True) -> Int32Array:
    """StepInputs in one piece, padded to a shape: all of it without a layout, the rows that sample if not `samples`."""
    sizes, num_decodes = part_sizes(shape, num_asked), shape.num_decodes
    piece = np.full(sum(sizes), NO_SLOT, dtype=np.int32)
    parts = (piece[end - size : end] for size, end in zip(sizes, accumulate(sizes), strict=True))
    slots, ends, offsets, asked, sampled, tokens = parts
    sampled, tokens = sampled.reshape(2, -1), tokens.reshape(3, -1)
    ends[:] = asked[:] = 0
    offsets[:] = np.minimum(np.arange(shape.num_rows + 1), num_decodes)
    if layout is None:
        return piece
    own, rows = layout.num_own, len(layout.slots)
    for found, kept in ((slots, layout.slots), (ends, layout.ends)):
        found[:own], found[num_decodes : num_decodes + rows - own] = kept[:own], kept[own:]
    tokens[:, :own] = layout.tokens[:, :own]
    if rows > own:
        num_prompt_tokens = int(layout.lengths.sum())
        tokens[:, num_decodes : num_decodes + num_prompt_tokens] = layout.tokens[:, own:]
        offsets[num_decodes + 1 :] = num_decodes + num_prompt_tokens
        offsets[num_decodes + 1 : num_decodes + 1 + rows - own] = num_decodes + np.cumsum(layout.lengths)
    if layout.asked is not None:
        asked[: len(layout.asked)] = np.where(layout.asked < own, layout.asked, layout.asked + (num_decodes - own))
    if samples:
        sampled[:, : len(layout.sampled.rows)] = layout.sampled.slots, layout.sampled.positions
    return piece


@dataclass(slots=True)
class SentStep:
    """A step under way.

    Args:
        sampled: without padding.
        logits: of these rows, [rows, vocab], float32; the next step overwrites them.
        is_sampled: the step has sampled them itself.
        masked_rows: see StepPlan.
        scores: logprobs of prompts' targets.
        pooled: vectors of prompts.
    """

    sampled: SampledRows
    logits: Tensor
    is_sampled: bool
    masked_rows: list[int]
    scores: PromptScores | None = None
    pooled: Pooled | None = None


class Steps:
    """Sends steps over a cache, and keeps the block tables.

    Args:
        memory: the plan, with the settings that it was made for.
        shapes: what steps with graphs are padded to.
        states: of recurrent layers; None: there are none.

    Attributes:
        last_states: None: they are not kept.
    """

    def __init__(
        self,
        model: Model,
        sampler: Sampler,
        streams: Streams,
        memory: MemoryPlan,
        shapes: StepShapes,
        cache: KVCache,
        states: States | None = None,
    ) -> None:
        self._states = states
        self.last_states: LastStates | None = None
        self._model, self._sampler, self._streams, self._cache = model, sampler, streams, cache
        self._operators = operators = model.operators
        self._sights = model.config.sights
        engine, device, attention = memory.engine, cache.device, operators.attention
        max_rows, max_tokens = shapes.decodes[-1], engine.max_batch_tokens
        scratch_window = cache.num_window_blocks if cache.window_tensors else None
        self.tables = BlockTables(engine.max_sequences, memory.max_model_len, cache.scratch_block, scratch_window)
        self._adapters = SlotAdapters(device)
        self._pooler = Pooler(model.normed, model.logits, model.score)
        self._is_host = streams.is_host
        blocks = torch.from_numpy(self.tables.blocks)
        if not self._is_host:
            blocks = blocks.to(device, torch.int32, copy=True)
        on_device = DeviceTables(blocks, self._sampler.last_tokens, cache.scratch_block, scratch_window)
        self._are_own_alone = attention.are_own_tokens_alone or operators.is_deterministic
        largest = StepShape(max_tokens if self._are_own_alone else max_rows, 0, max_tokens)
        all_shapes = [*shapes.chunks, largest]
        sizes = largest.num_rows, max(shape.num_tokens for shape in all_shapes)
        self._rows = operators.make_rows(on_device, *sizes)
        most_inputs = max(num_inputs(shape, shape.num_rows + max_tokens) for shape in all_shapes)
        self._inputs = torch.full((most_inputs,), NO_SLOT, dtype=torch.int32, device=device)
        self._samples = operators.ranks is None or operators.ranks.rank == 0
        self._logits: Tensor | None = None  # where graphs write them
        if operators.has_device_rows and operators.ranks is None:
            self._logits = torch.empty((max_rows, model.config.vocab_size), device=device)
        usual_inputs = num_inputs(StepShape(max_rows, 0, 0), 0) + (2 * CHANGES_PER_ROW + 1 + 2) * max_rows
        self._copies = StagedCopies(streams, INT_BYTES * usual_inputs)
        self.graphs = StepGraphs(self._compute_padded, self._pad, shapes)

    def forward(self, plan: StepPlan, wants_all: bool = False) -> SentStep:
        """Compute a step, and sample if the sampling kernel can.

        Args:
            wants_all: compute the logits of all tokens, in the order of the layout; sample nothing.
        """
        self.tables.grow(plan)
        self._adapters.start(plan.sequence_starts)
        if self.last_states is not None:
            for start in plan.sequence_starts:
                self.last_states.clear(start.slot)
        keeps = self.last_states is not None and not wants_all
        layout = lay_out(plan, self.tables.num_prompt_tokens, self._are_own_alone, keeps)
        if wants_all:
            layout = replace(layout, asked=None)
        samples = self._samples and not (wants_all or plan.masked_rows)
        samples = samples and self._sampler.can_launch(layout.sampled.slots)
        adapted = self._adapters.rows_of(layout.tokens[0], layout.asked)
        is_usual = not (plan.prompt_targets or plan.pooled_rows or wants_all or adapted)
        is_usual &= layout.asked is None or layout.shape.num_prompts > 0  # graphs of decodes sample every row
        padded = self.graphs.of(layout.shape) if is_usual else None
        num_asked = 0 if layout.asked is None else len(layout.asked)
        if padded is not None:
            self.graphs.prepare(padded)
            num_asked = _num_asked(padded)
        self._bring_up(plan, pack(layout, padded or layout.shape, num_asked, samples))
        num_logits = layout.shape.num_tokens if wants_all else len(layout.sampled.rows)
        logits = self._inputs[:0] if self._logits is None or wants_all else self._logits[:num_logits]
        step = SentStep(layout.sampled, logits, samples, plan.masked_rows)
        if padded is not None:
            work = partial(self._replay, padded)
        else:
            rows = [self.tables.rows_of(layout)]
            if self.tables.scratch_window is not None:
                rows.append(self.tables.rows_of(layout, are_windows=True))
            recurrent = None
            if self._states is not None:
                recurrent = self._states.rows_of(plan, layout.num_own, layout.tokens, layout.lengths)
            work = partial(self._send, step, plan, layout, num_logits, rows, adapted, recurrent)
        self._streams.current.run(work)
        return step

    def sample(self, step: SentStep, masks: Int32Array | None = None) -> Sampled:
        """A token per row; call it before the next step's forward().

        Args:
            masks: see Runner.sample.
        """
        rows = step.sampled
        if step.is_sampled:
            return self._sampler.launched_tokens(step.logits, rows.slots)
        masked = None
        if masks is not None:
            order = rows.order
            masked = Masked(order[np.isin(rows.rows[order], step.masked_rows)], masks)
        return self._sampler.sample(step.logits, rows.slots, rows.positions, masked, rows.drafts)

    def _replay(self, shape: StepShape) -> None:
        if not self.graphs.replay(shape):
            self._compute_padded(shape)

    def _compute_padded(self, shape: StepShape) -> None:
        """What a graph captures: kernels that read and write buffers which stay where they are."""
        assert self._logits is not None, "graphs need rows on the device"
        num_asked = _num_asked(shape)
        inputs, logits = inputs_in(self._inputs, shape, num_asked), self._logits[: shape.num_rows]
        hidden = self._hidden(inputs, shape, self.tables.width, inputs.asked if num_asked else None, None)
        self._model.logits(hidden, logits)
        if self._sampler.launched is not None:
            self._sampler.launched.launch(logits, inputs.sampled)

    def _send(
        self,
        step: SentStep,
        plan: StepPlan,
        layout: StepLayout,
        num_logits: int,
        rows: list[HostRows],
        adapted: AdaptedRows | None,
        recurrent: RecurrentRows | None,
    ) -> None:
        """Send the step as it is, by Python."""
        shape, num_asked = layout.shape, 0 if layout.asked is None else len(layout.asked)
        inputs, num_blocks = inputs_in(self._inputs, shape, num_asked), num_blocks_for(int(layout.ends.max(initial=1)))
        asked = None if layout.asked is None else inputs.asked
        hidden = self._hidden(inputs, shape, num_blocks, asked, rows, adapted, recurrent)
        if self.last_states is not None and len(layout.kept):
            slots, positions = layout.tokens[:2, layout.kept].astype(np.int64)
            num_before = len(hidden) - len(layout.kept)
            self.last_states.put(slots, positions, hidden[num_before:])
            hidden = hidden[: num_before or None]
        out = self._logits[:num_logits] if self._logits is not None and num_logits == len(step.logits) else None
        step.logits = self._model.logits(hidden[:num_logits], out)
        if step.is_sampled and (kernel := self._sampler.launched) is not None:
            kernel.launch(step.logits, inputs.sampled)
        if plan.prompt_targets:
            vocab_size = self._model.config.vocab_size
            num_targets = sum(len(one.token_ids) for one in plan.prompt_targets)
            targets, hidden = hidden[num_logits : num_logits + num_targets], hidden[num_targets:]
            step.scores = score(targets, plan, self._model.logits, vocab_size, self._streams)
        if plan.pooled_rows:
            step.pooled = self._pooler.pool(hidden[num_logits:], plan)

    def _hidden(
        self,
        inputs: StepInputs,
        shape: StepShape,
        num_blocks: int,
        asked: Tensor | None,
        host: list[HostRows] | None,
        adapted: AdaptedRows | None = None,
        recurrent: RecurrentRows | None = None,
    ) -> Tensor:
        """
        Args:
            num_blocks: of the longest context, at least.
            host: the rows on the host, as RowOperators.tables_of has them; None: in a graph.
        """
        dtype, tables = self._operators.attention.index_dtype, self._rows.tables_of(inputs, num_blocks)
        ends, offsets = inputs.ends.to(dtype), inputs.offsets.to(dtype)
        on_host: Sequence[HostRows | None] = host or [None] * len(tables)
        rows, *behind = (
            RaggedRows(table.to(dtype), ends, offsets, num_decodes=shape.num_decodes, window=None, host=one)
            for table, one in zip(tables, on_host, strict=True)
        )
        attending = rows_by_sight(rows, self._sights, self.tables.width * BLOCK_SIZE, *behind)
        batch = Batch(self._rows.tokens_of(inputs), attending, asked, adapted, recurrent)
        return self._model.forward(batch, self._cache)

    def _bring_up(self, plan: StepPlan, inputs: Int32Array) -> None:
        """Copy what the plan changes to the device, at once."""
        cache, cleared = self._cache, self.tables.fresh_blocks(plan).astype(np.int32)
        places, blocks = (NOTHING, NOTHING) if self._is_host else self.tables.changes(plan)
        launched = self._sampler.launched
        started = [] if launched is None else launched.take_started()
        changed = zip(*map(cache.parts_of, (plan.copy_sources, plan.copy_targets, cleared)), strict=True)
        parts = (inputs, places, blocks, *(part for kind in changed for part in kind), *started)
        self._copies.send_integers(parts, self._change)

    def _change(self, parts: list[Tensor]) -> None:
        """Apply the changes on the device; most parts are empty in most steps, and launch nothing."""
        (inputs, places, blocks), started = parts[:3], parts[3 + 3 * len(self._cache.kinds) :]
        if len(places):
            self._rows.change_tables(places, blocks)
        for index, tensors in enumerate(self._cache.kinds):
            sources, targets, cleared = parts[3 + 3 * index : 6 + 3 * index]
            for tensor in tensors:
                if len(sources):
                    copy_blocks(tensor, sources.long(), targets.long())
                if len(cleared):
                    self._rows.clear_blocks(tensor, cleared)
        if started and len(started[0]) and (kernel := self._sampler.launched) is not None:
            kernel.put_started(started)
        self._inputs[: len(inputs)].copy_(inputs)

    def _pad(self, shape: StepShape) -> None:
        piece = pack(None, shape, _num_asked(shape))
        self._copies.send_integers([piece], lambda parts: self._inputs[: len(parts[0])].copy_(parts[0]))


def _num_asked(shape: StepShape) -> int:
    """StepInputs.asked of a padded shape; without prompts it is empty: all tokens are asked for, in order."""
    return shape.num_rows if shape.num_prompts else 0


def rows_by_sight(
    rows: RaggedRows, sights: tuple[Sight, ...], max_model_len: int, behind: RaggedRows | None = None
) -> dict[Sight, RaggedRows]:
    """Windows and chunks that hide nothing share their rows with those that have none.

    Args:
        behind: the rows over window blocks, for the other windows and chunks.
    """
    found: dict[Sight, RaggedRows] = {}
    by_sight = {}
    for sight in sights:
        window = sight.window if sight.window and sight.window < max_model_len else None
        chunk = sight.chunk if sight.chunk and sight.chunk < max_model_len else None
        seen = replace(sight, window=window, chunk=chunk)
        if seen not in found:
            own = rows if behind is None or (window is None and chunk is None) else behind
            found[seen] = replace(own, window=window) if chunk is None else rows_in_chunks(own, chunk)
        by_sight[sight] = found[seen]
    return by_sight
