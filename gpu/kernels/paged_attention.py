"""Attention over block tables by Triton's kernels: what gpu/attention.py calls. Thread: engine.

One launch a layer for all rows of a step, and a second one that merges where a context may be split. What a row gets
does not depend on the others: splits are cut by its own length (attention_tiles.py), and only who computes them is
decided by the step's load (attention_schedule.py). That costs one float32 sum of values per split and query head,
written and read again: 3 to 6 % of the bytes of the split's keys and values, for 4 to 8 query heads a KV head.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from core.config import BLOCK_SIZE
from gpu.attention import TILE_TOKENS, RaggedRows
from gpu.kernels.attention_schedule import lay_out_step
from gpu.kernels.attention_tiles import KernelShape, Tiles, kernel_shape
from gpu.kernels.decode_attention import decode, merge
from gpu.kernels.extend_attention import extend_and_decode
from gpu.kv_cache import LayerKV
from gpu.scores import Scores

LOG2_E = math.log2(math.e)
PROGRAMS_A_MULTIPROCESSOR = 2  # that decode: as registers leave room for, 85 in each of 256 threads


@dataclass(slots=True)
class _Layout:
    """Who computes what in a step: made for its first layer.

    Args:
        most_tiles: that there may be.
        most_splits: that one row may have.
    """

    splits: Tensor  # int32
    split_offsets: Tensor  # int32 [decodes + 1]
    tiles: Tensor  # int32
    num_tiles: Tensor  # int32 [1]
    most_tiles: int
    most_splits: int


@dataclass(slots=True)
class _Parts:
    """What splits have found, until they are merged: float32."""

    outs: Tensor  # [splits * heads * head_dim]
    tops: Tensor  # [splits * heads]
    totals: Tensor  # [splits * heads]


class PagedAttention:
    """AttentionKernels of a CUDA device. Not for two streams at once: what splits find lies in one place.

    Args:
        num_programs: that decode, at most; None: as many as the device has room for.
        tiles: to try others; None: as attention_tiles.py says.
    """

    index_dtype = torch.int32
    are_own_tokens_alone = False  # several of a row share its keys
    prompt_tile = TILE_TOKENS

    def __init__(self, num_programs: int | None = None, tiles: Tiles | None = None) -> None:
        self._num_programs = num_programs
        self._tiles = tiles
        self._shape: KernelShape | None = None
        self._parts: list[_Parts] = []

    def reserve(self, num_decodes: int, context: int, num_heads: int, kv: LayerKV) -> None:
        """See AttentionKernels."""
        shape = kernel_shape(num_heads, kv.keys.shape[1], kv.keys.shape[2], kv.keys.dtype, self._tiles)
        self._parts_for(num_decodes * shape.splits_of(context) * num_heads, shape, kv.keys.device)

    def attend(self, query: Tensor, kv: LayerKV, rows: RaggedRows, scores: Scores) -> Tensor:
        """See AttentionKernels. query: of the cache's format; a token's heads lie together."""
        shape = self._shape_of(query, kv)
        layout = rows.layout
        if not isinstance(layout, _Layout):
            layout = rows.layout = _lay_out(rows, shape, query.shape[0] - rows.num_decodes)
        parts = self._parts_for(rows.num_decodes * layout.most_splits * shape.num_heads, shape, query.device)
        out = query.new_empty((query.shape[0], shape.num_heads * shape.head_dim))
        scale = shape.head_dim**-0.5 if scores.scale is None else scores.scale
        factor = (scale if scores.cap is None else 1.0) * LOG2_E  # what a cap leaves is scaled already
        num_items = rows.num_decodes * layout.most_splits * shape.num_kv_heads
        num_programs = min(num_items, self._programs(query.device))
        inputs = (query, query.stride(0), kv.keys, kv.values, rows.tables, rows.tables.stride(0), rows.ends)
        found = (layout.splits, layout.split_offsets, scores.sinks, parts.outs, parts.tops, parts.totals, out)
        numbers = (rows.window or 0, scale, factor, scores.cap or 0.0)
        constants = shape.constants(rows.window is not None, scores)
        if layout.most_tiles:
            counts = (rows.num_decodes, num_programs)
            tiles = (rows.offsets, layout.tiles, layout.num_tiles)
            extend_and_decode[(layout.most_tiles * shape.num_kv_heads + num_programs,)](
                *counts, *inputs, *tiles, *found, *numbers, **constants, **shape.extend_constants, **shape.launch
            )
        else:
            decode[(num_programs,)](
                rows.num_decodes,
                num_programs,
                *inputs,
                *found,
                *numbers,
                **constants,
                **shape.decode_constants,
                **shape.launch,
            )
        if rows.num_decodes and layout.most_splits > 1:
            merge[(rows.num_decodes, shape.num_kv_heads)](
                layout.split_offsets, parts.outs, parts.tops, parts.totals, out, factor, **shape.merge_constants
            )
        return out

    def _parts_for(self, size: int, shape: KernelShape, device: torch.device) -> _Parts:
        """size: splits of all rows, times heads. What is outgrown stays: graphs that were captured keep its address."""
        known = 0 if not self._parts else self._parts[-1].tops.numel()
        if not self._parts or known < size:
            size = max(size, 2 * known, 1)
            widths = (shape.head_dim, 1, 1)
            self._parts.append(_Parts(*(torch.empty(size * n, dtype=torch.float32, device=device) for n in widths)))
        return self._parts[-1]

    def _shape_of(self, query: Tensor, kv: LayerKV) -> KernelShape:
        heads = (query.shape[1], kv.keys.shape[1], query.shape[2])
        if self._shape is None or self._shape.heads != heads:
            self._shape = kernel_shape(*heads, query.dtype, self._tiles)
        return self._shape

    def _programs(self, device: torch.device) -> int:
        if self._num_programs is None:
            properties = torch.cuda.get_device_properties(device)
            self._num_programs = PROGRAMS_A_MULTIPROCESSOR * properties.multi_processor_count
        return self._num_programs


def _lay_out(rows: RaggedRows, shape: KernelShape, num_new: int) -> _Layout:
    """num_new: tokens of the rows that do not decode."""
    num_rows, width = rows.tables.shape
    num_extends = num_rows - rows.num_decodes
    num_blocks = width if rows.window is None else min(width, rows.window // BLOCK_SIZE + 2)
    most_splits = shape.splits_of(num_blocks * BLOCK_SIZE)
    most_tiles = num_new // shape.tile_tokens + num_extends

    def empty(size: int) -> Tensor:
        return torch.empty(size, dtype=torch.int32, device=rows.ends.device)

    layout = _Layout(
        splits=empty(max(1, rows.num_decodes * most_splits)),
        split_offsets=empty(rows.num_decodes + 1),
        tiles=empty(max(1, most_tiles)),
        num_tiles=empty(1),
        most_tiles=most_tiles,
        most_splits=most_splits,
    )
    lay_out_step[(1,)](
        rows.ends,
        rows.offsets,
        layout.splits,
        layout.split_offsets,
        layout.tiles,
        layout.num_tiles,
        rows.num_decodes,
        num_rows,
        rows.window or 0,
        HAS_WINDOW=rows.window is not None,
        **shape.schedule_constants,
    )
    return layout
