"""A plan's columns to the tensors of one step, and the block tables between steps, on the host. Thread: engine.

Tokens are put in an order of their own: first those that a sequence has sampled itself, longest context first, each
attending alone; then prompts, row by row, in tiles. A token's matmuls have the same shapes whoever shares the step and
however its prompt was cut into chunks, so that it is rounded the same way.

The tokens that slots sampled last stay on the device for the next step, and come down to the host into one of two
buffers in turn, behind an event: who waits for step N does not wait for N+1, which was sent after it.
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from core.config import BLOCK_SIZE
from core.plan import PENDING, Int32Array, StepPlan
from gpu.attention import AttentionKernels, HostRows, IntArray, RaggedRows
from gpu.device import to_device
from gpu.kv_cache import num_blocks_for
from gpu.sampler import AskedLogprobs, Drawn, RowLogprobs, scored_tokens
from gpu.streams import Event, Streams


class BlockTables:
    """Of all slots, on the host.

    Args:
        scratch_block: is where a sequence has no block yet.
    """

    def __init__(self, max_sequences: int, max_model_len: int, scratch_block: int) -> None:
        self.width = num_blocks_for(max_model_len)
        self.scratch_block = scratch_block
        self.blocks = np.full((max_sequences, self.width), scratch_block, dtype=np.int64)  # [slots, width]
        self.num_prompt_tokens = np.zeros(max_sequences, dtype=np.int64)  # [slots]
        self._changes: list[Int32Array] | None = None

    def grow(self, plan: StepPlan) -> None:
        """Reset the slots that start, and note the plan's new blocks."""
        for start in plan.sequence_starts:
            self.blocks[start.slot] = self.scratch_block
            self.num_prompt_tokens[start.slot] = start.num_prompt_tokens
        self.blocks[plan.table_slots, plan.table_positions] = plan.table_blocks
        if self._changes is not None and len(plan.table_slots):
            places = plan.table_slots * np.int32(self.width) + plan.table_positions
            self._changes.append(np.stack([places, plan.table_blocks]))

    def of(self, slot: int) -> IntArray:
        """The blocks of a slot, in order."""
        table = self.blocks[slot]
        found: IntArray = table[table != self.scratch_block]
        return found

    def keep_changes(self) -> None:
        """From now on, for who asks for them: a copy of the tables."""
        self._changes = []

    def take_changes(self) -> Int32Array:
        """Since it was asked before: (place in all tables end to end, its block now), [2, changes]; each place once."""
        assert self._changes is not None
        found = np.concatenate([np.empty((2, 0), np.int32), *self._changes], 1)
        self._changes = []
        _, lasts = np.unique(found[0, ::-1], return_index=True)
        return found[:, found.shape[1] - 1 - lasts]


@dataclass(slots=True)
class PendingTokens:
    """Tokens of a batch that its plan leaves to the device."""

    tokens: Tensor  # [pending]: index into the batch's tokens
    slots: Tensor  # [pending]: whose last drawn token it is


@dataclass(frozen=True, slots=True)
class SampledRows:
    """Rows of a step that draw, in the order of their logits."""

    rows: IntArray  # [sampled]: the plan's row
    slots: IntArray  # [sampled]
    positions: IntArray  # [sampled]: of the token that is drawn


@dataclass(slots=True)
class DeviceBatch:
    """One step's inputs. Tokens and rows are in the batch's order."""

    token_ids: Tensor  # [tokens]; PENDING until it was filled in
    pending: PendingTokens | None
    positions: Tensor  # [tokens], float32: what RoPE multiplies
    kv_slots: Tensor  # [tokens]: block * 16 + offset, where each token's keys and values go
    attending: dict[int | None, RaggedRows]  # by the window of a layer
    # [sampled + scored]: whose logits are wanted: each sampling row's last, then those of targets; None: all, in order
    asked_tokens: Tensor | None
    sampled_rows: IntArray  # [sampled]: the plan's row
    sampled_slots: IntArray  # [sampled]
    sampled_positions: IntArray  # [sampled]: position of the token that is drawn
    cleared_blocks: Tensor | None  # [cleared]: get their first token, and not their last
    copy_sources: Tensor | None  # [copies]
    copy_targets: Tensor | None  # [copies]

    @property
    def sampled(self) -> SampledRows:
        return SampledRows(self.sampled_rows, self.sampled_slots, self.sampled_positions)


class BatchBuilder:
    """Builds batches, and keeps block tables between them.

    Args:
        scratch_block: pads tables.
        windows: of the model's layers: how many tokens one sees, itself counted in; None: all before it.
        attention: gets the step's rows.
    """

    def __init__(
        self,
        max_sequences: int,
        max_model_len: int,
        scratch_block: int,
        device: torch.device,
        attention: AttentionKernels,
        windows: tuple[int | None, ...] = (None,),
    ) -> None:
        self._attention = attention
        self._windows = windows
        self._max_model_len = max_model_len
        self._device = device
        self.tables = BlockTables(max_sequences, max_model_len, scratch_block)
        self._tables = self.tables.blocks  # [slots, blocks of a sequence]
        self._num_prompt_tokens = self.tables.num_prompt_tokens  # [slots]

    def blocks_of(self, slot: int) -> Tensor:
        """The blocks in a slot's table, in order."""
        return self._to_device(self.tables.of(slot))

    def build(self, plan: StepPlan) -> DeviceBatch:
        """Reset the slots that start, let tables grow, and lay out the step."""
        self.tables.grow(plan)
        ends = plan.starts + plan.lengths  # [rows]: context after this step
        row_of = np.repeat(np.arange(plan.num_rows), plan.lengths)  # [tokens]
        tokens_before = np.cumsum(plan.lengths) - plan.lengths  # [rows]
        positions = plan.starts[row_of] + np.arange(plan.num_tokens) - tokens_before[row_of]  # [tokens]
        order, num_own = self._token_order(plan, row_of, positions)
        slots, positions = plan.slots[row_of][order], positions[order]  # in the batch's order from here on
        num_others = np.bincount(row_of[order[num_own:]], minlength=plan.num_rows)  # [rows]
        extended = np.flatnonzero(num_others)
        others = (plan.slots[extended], plan.starts[extended], (plan.starts + num_others)[extended])
        own = (slots[:num_own], positions[:num_own] + 1)
        place = np.empty_like(order)
        place[order] = np.arange(plan.num_tokens)
        token_ids = plan.token_ids[order]
        blocks = self._tables[slots, positions // BLOCK_SIZE]  # [tokens]
        sampled = np.flatnonzero(plan.samples)
        last_tokens = tokens_before + plan.lengths - 1  # [rows]
        has_copies = len(plan.copy_sources) > 0
        return DeviceBatch(
            token_ids=self._to_device(token_ids),
            pending=self._pending(token_ids, slots),
            positions=self._to_device(positions.astype(np.float32)),
            kv_slots=self._to_device(blocks * BLOCK_SIZE + positions % BLOCK_SIZE),
            attending=rows_by_window(self._rows(own, others), self._windows, self._max_model_len),
            asked_tokens=self._to_device(
                place[np.concatenate([last_tokens[sampled], scored_tokens(plan, tokens_before)])]
            ),
            sampled_rows=sampled,
            sampled_slots=plan.slots[sampled],
            sampled_positions=ends[sampled],
            cleared_blocks=self._cleared_blocks(plan),
            copy_sources=self._to_device(plan.copy_sources.astype(np.int64)) if has_copies else None,
            copy_targets=self._to_device(plan.copy_targets.astype(np.int64)) if has_copies else None,
        )

    def _pending(self, token_ids: IntArray, slots: IntArray) -> PendingTokens | None:
        tokens = np.flatnonzero(token_ids == PENDING)
        if not len(tokens):
            return None
        return PendingTokens(self._to_device(tokens), self._to_device(slots[tokens].astype(np.int64)))

    def _token_order(self, plan: StepPlan, row_of: IntArray, positions: IntArray) -> tuple[IntArray, int]:
        """Own tokens first, longest context first, then prompts as they come: (order, number of own tokens).

        Where attention wants own tokens of a row together, they count as a prompt's.
        """
        is_own = positions >= self._num_prompt_tokens[plan.slots[row_of]]
        if not self._attention.are_own_tokens_alone:
            is_own &= plan.lengths[row_of] == 1
        own = np.flatnonzero(is_own)
        own = own[np.argsort(-positions[own], kind="stable")]
        return np.concatenate([own, np.flatnonzero(~is_own)]), len(own)

    def _rows(self, own: tuple[IntArray, IntArray], others: tuple[IntArray, IntArray, IntArray]) -> RaggedRows:
        """Who attends to what.

        Args:
            own: slots of own tokens, and the lengths of their contexts.
            others: slots, and the positions from which to which they compute tokens.
        """
        slots, starts, ends = others
        all_slots, all_ends = np.concatenate([own[0], slots]), np.concatenate([own[1], ends])
        offsets = np.cumsum(np.concatenate([[0], np.ones_like(own[1]), ends - starts]))
        tables = self._tables[all_slots, : num_blocks_for(int(all_ends.max(initial=0)))]
        host = HostRows(tables, all_ends, offsets, self.tables.scratch_block)

        def on_device(part: npt.NDArray[Any]) -> Tensor:
            return self._to_device(part).to(self._attention.index_dtype)

        columns = on_device(tables), on_device(all_ends), on_device(offsets)
        return RaggedRows(*columns, num_decodes=len(own[0]), window=None, host=host)

    def _cleared_blocks(self, plan: StepPlan) -> Tensor | None:
        blocks = fresh_blocks(plan, self.tables)
        return self._to_device(blocks) if len(blocks) else None

    def _to_device(self, array: npt.NDArray[Any]) -> Tensor:
        return to_device(array, self._device)


def fresh_blocks(plan: StepPlan, tables: BlockTables) -> IntArray:
    """Blocks whose first token is written now but whose last is not: the rest still has another's content."""
    ends = plan.starts + plan.lengths
    last_block = (ends - 1) // BLOCK_SIZE
    is_fresh = (last_block * BLOCK_SIZE >= plan.starts) & (ends % BLOCK_SIZE != 0)
    found: IntArray = tables.blocks[plan.slots[is_fresh], last_block[is_fresh]]
    return found


def rows_by_window(
    rows: RaggedRows, windows: tuple[int | None, ...], max_model_len: int
) -> dict[int | None, RaggedRows]:
    """By the window of a layer: those that hide nothing share their rows."""
    hiding = {window: window if window and window < max_model_len else None for window in windows}
    found = {window: replace(rows, window=window) for window in set(hiding.values())}
    return {window: found[hidden] for window, hidden in hiding.items()}


NUM_BUFFERS = 2  # steps whose tokens may be on their way


@dataclass(slots=True)
class OnTheirWay:
    """What one step drew, on the host once the event has come."""

    token_ids: Tensor  # [rows], int64
    is_finite: Tensor  # [rows]
    logprobs: RowLogprobs | None
    event: Event

    def wait(self) -> None:
        self.event.synchronize()


class DrawnTokens:
    """
    Args:
        num_slots: rows of a step, at most.
        last_tokens: what each slot drew last, on the device: int64 [slots].
    """

    def __init__(self, num_slots: int, streams: Streams, last_tokens: Tensor) -> None:
        self._streams = streams
        self._last_tokens = last_tokens
        self._buffers = [
            (self._host(num_slots, torch.int64), self._host(num_slots, torch.bool)) for _ in range(NUM_BUFFERS)
        ]

    def fill_pending(self, batch: DeviceBatch) -> None:
        """Put the tokens that slots drew last where the plan asked for them."""
        if batch.pending is not None:
            last = self._last_tokens[batch.pending.slots].to(batch.token_ids.dtype)
            batch.token_ids.index_copy_(0, batch.pending.tokens, last)

    def send(self, drawn: Drawn) -> OnTheirWay:
        """Start the way of what was drawn to the host."""
        self._buffers.reverse()
        token_ids, is_finite = (buffer[: len(drawn.token_ids)] for buffer in self._buffers[0])
        self._send(drawn.token_ids, token_ids)
        self._send(drawn.is_finite, is_finite)
        logprobs = None if drawn.logprobs is None else self._sent(drawn.logprobs)
        return OnTheirWay(token_ids, is_finite, logprobs, self._streams.current.record())

    def _sent(self, asked: AskedLogprobs) -> RowLogprobs:
        num_rows, size = len(asked.rows), len(asked.rows) * asked.most
        drawn, top = self._host(num_rows, torch.float32), self._host(size, torch.float32).view(num_rows, -1)
        kept = (drawn, top, self._host(size, torch.int64).view(num_rows, -1))

        def send() -> None:
            for source, target in zip(asked.find(), kept, strict=True):
                target.copy_(source, non_blocking=True)

        self._streams.current.run(send)
        return RowLogprobs(asked.rows, asked.num_top, *kept)

    def _send(self, source: Tensor, target: Tensor) -> None:
        self._streams.current.run(lambda: target.copy_(source, non_blocking=True))

    def _host(self, num_elements: int, dtype: torch.dtype) -> Tensor:
        return self._streams.pinned(num_elements * dtype.itemsize).view(dtype)
