"""Steps whose rows stay on the device, and what they compute may be a graph. Thread: engine.

Steps in which every row decodes are always of this kind; those with chunks of prompts beside, where a graph serves
them: without one, batch.py lays them out for as many tokens as they have.

Of such a step the host sends what has changed, in one copy: slots, positions and known tokens of its rows, and the
blocks that tables have grown by. All else is read on the device: tables, the tokens that slots drew last, what requests
ask of sampling. A step is therefore the same kernels on the same buffers, whatever its rows, and it is sent by Python
or by a graph of its shape. The way of a step, in either case:

    forward: _bring_up (one copy: uploads.py) -> graphs.run -> _compute: _fill, Model.forward, DeviceSampler.launch
    draw:    what the step has not drawn itself

Rows that a graph has too many see nothing, draw nothing, and write to a block of their own; so do tokens of prompts.
Where prompts' tokens begin and end is read on the device too: attention's grid has room for as many tiles as the tokens
of the shape can make, and those that they do not make end at once. What attention leaves of a token that is padding is
any number, and goes no further than its own row.

Where something has to come between a step's logits and its draw, they are two graphs: rows with penalties, whose table
of tokens seen is made with the first of them, long after steps were captured; the same is to serve rows of which the
host decides what may be drawn. What the sampling kernel does not know is drawn by torch, behind the first of the two.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from core.config import BLOCK_SIZE
from core.plan import StepPlan
from gpu.attention import RaggedRows
from gpu.batch import DeviceBatch, SampledRows, fresh_blocks, rows_by_window
from gpu.block_tables import BlockTables, IntArray
from gpu.kernels.device_rows import SpareBlocks, empty_rows, fill_rows, fill_tokens, scatter_rows
from gpu.kernels.device_sampler import DeviceSampler
from gpu.kv_cache import KVCache
from gpu.model import Model
from gpu.sampler import Drawn, Sampler
from gpu.step_graphs import Part, StepGraphs
from gpu.step_inputs import NO_SLOT, KnownPlan, StepInputs, inputs_in, num_inputs, step_inputs
from gpu.step_shapes import StepShape, StepShapes
from gpu.streams import Streams
from gpu.uploads import Uploads

CHANGES_PER_ROW = 4  # of tables, in one copy: a decode's is one in 16 steps; prompts' come in several copies


@dataclass(frozen=True, slots=True)
class SentStep:
    """A step that was sent.

    Args:
        sampled: its rows that draw, without padding.
        logits: of these, [rows, vocab], float32, until the next step is sent.
        num_rows: that logits were computed of, with padding.
        is_drawn: by what computed it.
    """

    sampled: SampledRows
    logits: Tensor
    num_rows: int
    is_drawn: bool


class DeviceSteps:
    """
    Args:
        shapes: that steps are padded to, where there are graphs.
    """

    def __init__(
        self,
        model: Model,
        cache: KVCache,
        sampler: Sampler,
        tables: BlockTables,
        streams: Streams,
        shapes: StepShapes,
    ) -> None:
        device, num_slots, max_rows = cache.tensor.device, len(tables.blocks), shapes.decodes[-1]
        self._model, self._cache, self._sampler = model, cache, sampler
        self._kernel = sampler.kernel if isinstance(sampler.kernel, DeviceSampler) else None
        self._tables = tables
        self._spare = SpareBlocks(cache.scratch_block, cache.padding_block)
        tables.keep_changes()
        self._device_tables = torch.full((num_slots, tables.width), cache.scratch_block, device=device).int()
        all_shapes = [StepShape(max_rows), *shapes.chunks]
        most_inputs = max(map(num_inputs, all_shapes))
        self._inputs = torch.full((most_inputs,), NO_SLOT, dtype=torch.int32, device=device)  # see StepInputs
        drawn = self._kernel.rows if self._kernel is not None else self._inputs.new_empty((2, max_rows)).long()
        most_tokens = max(shape.num_tokens for shape in all_shapes)
        self._rows = empty_rows(max_rows, most_tokens, tables.width, drawn)
        self._offsets = torch.arange(max_rows + 1, dtype=torch.int32, device=device)
        self._logits = torch.empty((max_rows, model.config.vocab_size), device=device)
        self._uploads = Uploads(streams, most_inputs + (2 * CHANGES_PER_ROW + 1 + 2) * max_rows)
        usual = Part.FORWARD if self._kernel is None else Part.STEP
        self.graphs = StepGraphs(self._compute, self._pad, shapes, usual)

    def read(self, plan: StepPlan) -> KnownPlan | None:
        """What can be sent from here; None: the plan asks for logprobs of prompts, or has prompts and no graph."""
        if plan.prompt_targets:
            return None
        num_prompt_tokens = self._tables.num_prompt_tokens[plan.slots]
        for start in plan.sequence_starts:  # the tables do not know them yet
            num_prompt_tokens[plan.slots == start.slot] = start.num_prompt_tokens
        is_own = (plan.lengths == 1) & plan.samples & (plan.starts >= num_prompt_tokens)
        own = np.flatnonzero(is_own)
        own = own[np.argsort(-plan.starts[own], kind="stable")]
        known = KnownPlan(plan, own, np.flatnonzero(~is_own))
        return known if self._padded(known) is not None else None

    def _padded(self, known: KnownPlan) -> StepShape | None:
        if not len(known.prompts):
            return self.graphs.of_decodes(len(known.own))
        return self.graphs.of_chunks(known.shape, len(known.drawn))

    def forward(self, known: KnownPlan) -> SentStep:
        """Compute what read() has given, and draw unless draw() must."""
        shape, sampled = self._padded(known), known.sampled
        assert shape is not None, "it was read as one that can be sent"
        self._tables.grow(known.plan)
        is_drawn = self._can_draw(sampled.slots) and not self._sampler.have_penalties(sampled.slots)
        if self._kernel is not None:
            self._kernel.start_slots()
        if not is_drawn and self._can_draw(sampled.slots):
            self.graphs.prepare(Part.DRAW, StepShape(shape.num_rows))  # now: to capture it is to lose the rows
        part = Part.STEP if is_drawn else Part.FORWARD
        self.graphs.prepare(part, shape)
        self._bring_up(known, shape)
        self.graphs.run(part, shape)
        return SentStep(sampled, self._logits[: len(sampled.rows)], shape.num_rows, is_drawn)

    def draw(self, step: SentStep) -> Drawn:
        """A token per row. Comes before the next step's forward()."""
        slots = step.sampled.slots
        if not self._can_draw(slots):
            return self._sampler.sample(step.logits, slots, step.sampled.positions)
        assert self._kernel is not None
        if not step.is_drawn:
            self.graphs.run(Part.DRAW, StepShape(step.num_rows))
        token_ids, is_finite = (found[: len(slots)] for found in (self._kernel.token_ids, self._kernel.is_finite))
        return self._sampler.told(step.logits, token_ids, is_finite, slots)

    def _can_draw(self, slots: IntArray) -> bool:
        return self._kernel is not None and self._kernel.can_draw(slots)

    def _compute(self, part: Part, shape: StepShape) -> None:
        """What a graph holds: kernels alone, that read and write what stays where it is."""
        logits = self._logits[: shape.num_rows]
        if part is not Part.DRAW:
            inputs = inputs_in(self._inputs, shape)
            self._fill(inputs, shape)
            self._model.logits(self._model.forward(self._batch(inputs, shape), self._cache), logits)
        if part is not Part.FORWARD:
            assert self._kernel is not None
            self._kernel.launch(logits)

    def _fill(self, inputs: StepInputs, shape: StepShape) -> None:
        rows = self._rows.first(shape.num_rows, shape.num_tokens)
        tables, last_tokens = self._device_tables, self._sampler.last_tokens
        fill_rows(rows, inputs.rows, tables, last_tokens, self._spare)
        if shape.num_prompts:
            fill_tokens(rows, shape.num_decodes, inputs.tokens, tables, last_tokens, self._spare)
            rows.drawn.copy_(inputs.drawn)

    def _batch(self, inputs: StepInputs, shape: StepShape) -> DeviceBatch:
        """The first rows, as _fill leaves them. Of one step: the attention's layout is made by its first layer."""
        filled, all_rows = self._rows.first(shape.num_rows, shape.num_tokens), np.arange(shape.num_rows)
        offsets = inputs.offsets if shape.num_prompts else self._offsets[: shape.num_rows + 1]
        rows = RaggedRows(filled.tables, filled.ends, offsets, num_decodes=shape.num_decodes, window=None)
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
        changes = self._tables.take_changes()
        room = self._uploads.room - inputs.size - len(cleared) - 2 * len(plan.copy_sources)
        while 2 * changes.shape[1] > room:
            first, changes = np.split(changes, [self._uploads.room // 2], 1)
            self._uploads.send((first[0], first[1]), self._change_tables)
        parts = (inputs, changes[0], changes[1], plan.copy_sources, plan.copy_targets, cleared)
        self._uploads.send(parts, self._change)

    def _change(self, parts: list[Tensor]) -> None:
        """Launches nothing for what is empty, which most parts are in most steps."""
        inputs, places, blocks, sources, targets, cleared = parts
        if len(sources):
            self._cache.copy_blocks(sources.long(), targets.long())
        if len(places):
            self._change_tables([places, blocks])
        if len(cleared):
            self._cache.clear_blocks(cleared.long())
        self._inputs[: len(inputs)].copy_(inputs)

    def _change_tables(self, parts: list[Tensor]) -> None:
        scatter_rows(self._device_tables.view(-1), *parts)

    def _pad(self, shape: StepShape) -> None:
        self._uploads.send([step_inputs(None, shape)], lambda parts: self._inputs[: len(parts[0])].copy_(parts[0]))
        self._rows.drawn.fill_(NO_SLOT)  # where the draw is captured alone
