"""Steps in which every row decodes: the rows stay on the device, and what they compute may be a graph. Thread: engine.

Of such a step the host sends what has changed, in one copy: slots, positions and known tokens of its rows, and the
blocks that tables have grown by. All else is read on the device: tables, the tokens that slots drew last, what requests
ask of sampling. A step is therefore the same kernels on the same buffers, whatever its rows, and it is sent by Python
or by a graph of so many rows. The way of a step, in either case:

    forward: _bring_up (one copy: uploads.py) -> graphs.run -> _compute: fill_rows, Model.forward, DeviceSampler.launch
    draw:    what the step has not drawn itself

Rows that a graph has too many see nothing, draw nothing, and write to a block of their own.

Where something has to come between a step's logits and its draw, they are two graphs: rows with penalties, whose table
of tokens seen is made with the first of them, long after steps were captured; the same is to serve rows of which the
host decides what may be drawn. What the sampling kernel does not know is drawn by torch, behind the first of the two.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from core.config import BLOCK_SIZE
from core.plan import StepPlan
from gpu.attention import RaggedRows
from gpu.batch import DeviceBatch, SampledRows, fresh_blocks, rows_by_window
from gpu.block_tables import BlockTables
from gpu.decode_graphs import DecodeGraphs, Part, Progress, graph_sizes
from gpu.graphs import GraphRecorder
from gpu.kernels.device_rows import SpareBlocks, empty_rows, fill_rows, scatter_rows
from gpu.kernels.device_sampler import NO_SLOT, DeviceSampler
from gpu.kv_cache import KVCache
from gpu.model import Model
from gpu.sampler import Drawn, Sampler
from gpu.streams import Streams
from gpu.uploads import Uploads

CHANGES_PER_ROW = 4  # of tables, in one copy: a decode's is one in 16 steps; prompts' come in several copies


@dataclass(frozen=True, slots=True)
class DecodeStep:
    """A step that was sent.

    Args:
        sampled: its rows, without padding.
        logits: [rows, vocab], float32, until the next step is sent.
        is_drawn: by what computed it.
    """

    sampled: SampledRows
    logits: Tensor
    size: int
    is_drawn: bool


class DecodeSteps:
    """
    Args:
        max_rows: of a step.
    """

    def __init__(
        self,
        model: Model,
        cache: KVCache,
        sampler: Sampler,
        tables: BlockTables,
        streams: Streams,
        max_rows: int,
    ) -> None:
        device, num_slots = cache.tensor.device, len(tables.blocks)
        self._model, self._cache, self._sampler = model, cache, sampler
        self._kernel = sampler.kernel if isinstance(sampler.kernel, DeviceSampler) else None
        self._tables = tables
        self._spare = SpareBlocks(cache.scratch_block, cache.padding_block)
        tables.keep_changes()
        self._device_tables = torch.full((num_slots, tables.width), cache.scratch_block, device=device).int()
        self._step = torch.full((3, max_rows), NO_SLOT, dtype=torch.int32, device=device)  # see fill_rows
        drawn = self._kernel.rows if self._kernel is not None else self._step.new_empty((2, max_rows)).long()
        self._rows = empty_rows(max_rows, tables.width, drawn)
        self._offsets = torch.arange(max_rows + 1, dtype=torch.int32, device=device)
        self._logits = torch.empty((max_rows, model.config.vocab_size), device=device)
        self._uploads = Uploads(streams, (3 + 2 * CHANGES_PER_ROW + 1 + 2) * max_rows)
        self.graphs = DecodeGraphs(self._compute, self._pad, graph_sizes(max_rows))

    def knows(self, plan: StepPlan) -> bool:
        """Whether each row computes the one token that its sequence drew last, and draws the next."""
        if plan.sequence_starts or plan.prompt_targets or plan.num_tokens != plan.num_rows or not plan.samples.all():
            return False
        return bool((plan.starts >= self._tables.num_prompt_tokens[plan.slots]).all())

    def open_graphs(self, recorder: GraphRecorder, progress: Progress | None) -> None:
        """Send steps by graphs from now on.

        Args:
            progress: all that steps will need are captured now; None: each when it is needed.
        """
        self.graphs.recorder = recorder
        if progress is not None:
            self.graphs.capture_all(Part.FORWARD if self._kernel is None else Part.STEP, progress)

    def forward(self, plan: StepPlan) -> DecodeStep:
        """Compute a plan that it knows, and draw unless draw() must."""
        self._tables.grow(plan)
        order = np.argsort(-plan.starts, kind="stable")  # long contexts first: they take the longest
        slots = plan.slots[order]
        size = self.graphs.size_for(len(order))
        is_drawn = self._can_draw(slots) and not self._sampler.have_penalties(slots)
        if self._kernel is not None:
            self._kernel.start_slots()
        if not is_drawn and self._can_draw(slots):
            self.graphs.prepare(Part.DRAW, size)  # now: to capture it is to lose the rows
        part = Part.STEP if is_drawn else Part.FORWARD
        self.graphs.prepare(part, size)
        self._bring_up(plan, order, size)
        self.graphs.run(part, size)
        sampled = SampledRows(order, slots, plan.starts[order] + 1)
        return DecodeStep(sampled, self._logits[: len(order)], size, is_drawn)

    def draw(self, step: DecodeStep) -> Drawn:
        """A token per row. Comes before the next step's forward()."""
        slots = step.sampled.slots
        if not self._can_draw(slots):
            return self._sampler.sample(step.logits, slots, step.sampled.positions)
        assert self._kernel is not None
        if not step.is_drawn:
            self.graphs.run(Part.DRAW, step.size)
        token_ids, is_finite = (found[: len(slots)] for found in (self._kernel.token_ids, self._kernel.is_finite))
        return self._sampler.told(step.logits, token_ids, is_finite, slots)

    def _can_draw(self, slots: Any) -> bool:
        return self._kernel is not None and self._kernel.can_draw(slots)

    def _compute(self, part: Part, size: int) -> None:
        """What a graph holds: kernels alone, that read and write what stays where it is."""
        logits = self._logits[:size]
        if part is not Part.DRAW:
            fill_rows(
                self._rows.first(size),
                self._step[:, :size],
                self._device_tables,
                self._sampler.last_tokens,
                self._spare,
            )
            self._model.logits(self._model.forward(self._batch(size), self._cache), logits)
        if part is not Part.FORWARD:
            assert self._kernel is not None
            self._kernel.launch(logits)

    def _batch(self, size: int) -> DeviceBatch:
        """The first rows, as fill_rows leaves them. Of one step: the attention's layout is made by its first layer."""
        filled, all_rows = self._rows.first(size), np.arange(size)
        rows = RaggedRows(filled.tables, filled.ends, self._offsets[: size + 1], num_decodes=size, window=None)
        return DeviceBatch(
            token_ids=filled.token_ids,
            pending=None,
            positions=filled.positions,
            kv_slots=filled.kv_slots,
            attending=rows_by_window(rows, self._model.config.windows, self._tables.width * BLOCK_SIZE),
            asked_tokens=None,
            sampled_rows=all_rows,
            sampled_slots=all_rows,
            sampled_positions=all_rows,
            cleared_blocks=None,
            copy_sources=None,
            copy_targets=None,
        )

    def _bring_up(self, plan: StepPlan, order: Any, size: int) -> None:
        """Put on the device what the plan changes."""
        step = np.full((3, size), NO_SLOT, dtype=np.int32)
        step[:, : len(order)] = plan.slots[order], plan.starts[order], plan.token_ids[order]
        cleared = fresh_blocks(plan, self._tables).astype(np.int32)
        changes = self._tables.take_changes()
        room = self._uploads.room - step.size - len(cleared) - 2 * len(plan.copy_sources)
        while 2 * changes.shape[1] > room:
            first, changes = np.split(changes, [self._uploads.room // 2], 1)
            self._uploads.send((first[0], first[1]), self._change_tables)
        self._uploads.send((step, changes[0], changes[1], plan.copy_sources, plan.copy_targets, cleared), self._change)

    def _change(self, parts: list[Tensor]) -> None:
        """Launches nothing for what is empty, which most parts are in most steps."""
        step, places, blocks, sources, targets, cleared = parts
        if len(sources):
            self._cache.copy_blocks(sources.long(), targets.long())
        if len(places):
            self._change_tables([places, blocks])
        if len(cleared):
            self._cache.clear_blocks(cleared.long())
        rows = step.view(3, -1)
        self._step[:, : rows.shape[1]].copy_(rows)

    def _change_tables(self, parts: list[Tensor]) -> None:
        scatter_rows(self._device_tables.view(-1), *parts)

    def _pad(self) -> None:
        self._step.fill_(NO_SLOT)
        self._rows.drawn.fill_(NO_SLOT)  # where the draw is captured alone
