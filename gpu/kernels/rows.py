"""Looks up a step's rows and tokens in tables on a CUDA device, as gpu/rows.py does: kernels and their launches.

A table is [slots, width] of any numbers; a step has some of its slots, in an order of its own. Thread: engine.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from core.config import BLOCK_SIZE
from gpu.kernels.sizes import COLUMN_WARPS, COLUMNS, next_power_of_two
from gpu.rows import DeviceTables, RowOperators, StepInputs, StepTokens


@triton.jit
def embed(
    token_ids,  # [tokens], integers
    table,  # [vocab, width]
    out,  # [tokens, width]
    width,
    BLOCK: tl.constexpr,
):
    """Rows of the embedding. Program: a token, and BLOCK of its columns."""
    token = tl.program_id(0).to(tl.int64)
    token_id = tl.load(token_ids + token).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_inside = columns < width
    tl.store(out + token * width + columns, tl.load(table + token_id * width + columns, mask=is_inside), mask=is_inside)


@triton.jit(do_not_specialize_on_alignment=["slots", "rows"])
def scatter(table, slots, rows, width, BLOCK: tl.constexpr):
    """table[slots[i]] = rows[i]; a slot < 0 is left out, and no slot comes twice.

    Program: a row, and BLOCK of its columns.
    """
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slots + row).to(tl.int64)
    if slot >= 0:
        is_inside = columns < width
        found = tl.load(rows + row * width + columns, mask=is_inside)
        tl.store(table + slot * width + columns, found, mask=is_inside)


@triton.jit(do_not_specialize_on_alignment=["blocks"])
def clear(
    cache,  # [parts, num_blocks, width]
    blocks,  # [some], integers
    num_blocks,
    width,
    BLOCK: tl.constexpr,
):
    """Zero some blocks of all parts. Program: a block, a part, and BLOCK of its columns there."""
    block = tl.load(blocks + tl.program_id(0)).to(tl.int64)
    columns = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    place = (tl.program_id(1).to(tl.int64) * num_blocks + block) * width
    tl.store(cache + place + columns, tl.zeros([BLOCK], cache.dtype.element_ty), mask=columns < width)


@triton.jit(do_not_specialize_on_alignment=["slots", "ends", "tables", "row_tables"])
def lay_out_tables(
    slots,  # int32 [rows], < 0: padding
    ends,  # int32 [rows]: one past the last new token's position; 0: padding
    tables,  # [slots, table_stride]: blocks, from a row's first; of these, width
    row_tables,  # int32 [rows, width], written: scratch_block beyond a row's end
    width,
    table_stride,
    scratch_block,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Block tables of a step's rows. Program: a row, and BLOCK columns of its table."""
    row = tl.program_id(0).to(tl.int64)
    # Padding reads some row, and drops it
    table = tables + tl.maximum(tl.load(slots + row).to(tl.int64), 0) * table_stride
    num_used = tl.cdiv(tl.load(ends + row), BLOCK_TOKENS)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_inside = columns < width
    blocks = tl.load(table + columns, mask=is_inside, other=0)
    tl.store(row_tables + row * width + columns, tl.where(columns < num_used, blocks, scratch_block), mask=is_inside)


@triton.jit(do_not_specialize=["num_tokens"], do_not_specialize_on_alignment=["step", "window_slots"])
def lay_out_tokens(
    step,  # int32 [3, num_tokens]: of each token its slot (< 0: padding), its position, and its id, or < 0: what the
    # slot sampled last
    tables,  # [slots, width]: blocks; with window blocks [slots, 2 * width]
    last_tokens,  # int64 [slots]
    token_ids,  # int64 [num_tokens], written, as are all below
    positions,  # float32 [num_tokens]
    kv_slots,  # int64 [num_tokens]: where a token's keys and values go
    window_slots,  # int64 [num_tokens]: the same in window blocks; not written where there are none
    num_tokens,
    width,
    padding_block,
    padding_window,
    HAS_WINDOWS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Token ids, positions and cache slots of a step's tokens. Program: BLOCK tokens."""
    tokens = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_inside = tokens < num_tokens
    slot = tl.load(step + tokens, mask=is_inside, other=-1).to(tl.int64)
    is_real = slot >= 0
    position = tl.load(step + num_tokens + tokens, mask=is_real, other=0).to(tl.int64)
    token = tl.load(step + 2 * num_tokens + tokens, mask=is_real, other=0).to(tl.int64)
    last = tl.load(last_tokens + slot, mask=is_real & (token < 0), other=0)
    table_stride = 2 * width if HAS_WINDOWS else width
    entries = tables + slot * table_stride + position // BLOCK_TOKENS
    block = tl.load(entries, mask=is_real, other=0).to(tl.int64)
    tl.store(token_ids + tokens, tl.where(token < 0, last, token), mask=is_inside)
    tl.store(positions + tokens, position.to(tl.float32), mask=is_inside)
    place = tl.where(is_real, block, padding_block) * BLOCK_TOKENS + position % BLOCK_TOKENS
    tl.store(kv_slots + tokens, place, mask=is_inside)
    if HAS_WINDOWS:
        block = tl.load(entries + width, mask=is_real, other=0).to(tl.int64)
        place = tl.where(is_real, block, padding_window) * BLOCK_TOKENS + position % BLOCK_TOKENS
        tl.store(window_slots + tokens, place, mask=is_inside)


TOKENS = 128  # of a program of lay_out_tokens
CLEARED_COLUMNS = 4096  # of a program of clear


def embed_rows(table: Tensor, token_ids: Tensor) -> Tensor:
    """Rows of a table [vocab, width]: [tokens, width]. token_ids: [tokens], integers."""
    width = table.shape[1]
    out = table.new_empty((len(token_ids), width))
    embed[_grid(len(token_ids), width)](token_ids, table, out, width, BLOCK=_columns(width), num_warps=COLUMN_WARPS)
    return out


def scatter_rows(table: Tensor, slots: Tensor, rows: Tensor) -> None:
    """table[slots] = rows, without padding, whose slot is < 0; no slot comes twice.

    Args:
        table: [slots, ...]; rows: [rows, ...]; both contiguous, of one format.
    """
    assert rows.dtype == table.dtype
    assert rows.is_contiguous()
    assert table.is_contiguous()
    width = table.stride(0)
    scatter[_grid(len(slots), width)](table, slots, rows, width, BLOCK=_columns(width), num_warps=COLUMN_WARPS)


class DeviceRows(RowOperators):
    """RowOperators with fixed addresses of their results, padding included, so that a graph may hold them."""

    def __init__(self, tables: DeviceTables, num_rows: int, num_tokens: int) -> None:
        super().__init__(tables, num_rows, num_tokens)
        blocks, num_kinds = tables.blocks, len(tables.kinds)
        self._token_ids = blocks.new_zeros(num_tokens, dtype=torch.int64)
        self._positions = blocks.new_zeros(num_tokens, dtype=torch.float32)
        self._kv_slots = blocks.new_zeros((num_kinds, num_tokens), dtype=torch.int64)
        self._row_tables = blocks.new_zeros((num_kinds, num_rows, tables.width), dtype=torch.int32)

    def tokens_of(self, inputs: StepInputs) -> StepTokens:
        tables, step, kv_slots = self._tables, inputs.tokens, self._kv_slots
        num_tokens = step.shape[1]
        assert step.is_contiguous()
        lay_out_tokens[(-(-num_tokens // TOKENS),)](
            step,
            tables.blocks,
            tables.last_tokens,
            self._token_ids,
            self._positions,
            kv_slots[0],
            kv_slots[-1],
            num_tokens,
            tables.width,
            tables.kinds[0] + 1,
            tables.kinds[-1] + 1,
            HAS_WINDOWS=len(kv_slots) > 1,
            BLOCK_TOKENS=BLOCK_SIZE,
            BLOCK=TOKENS,
            num_warps=COLUMN_WARPS,
        )
        columns = (self._token_ids, self._positions, *kv_slots)
        return StepTokens(*(column[:num_tokens] for column in columns))

    def tables_of(self, inputs: StepInputs, num_blocks: int) -> list[Tensor]:
        tables, num_rows, width = self._tables, len(inputs.slots), self._tables.width
        kinds = zip(tables.of_kinds, self._row_tables, tables.kinds, strict=True)
        for blocks, row_tables, scratch in kinds:
            lay_out_tables[_grid(num_rows, width)](
                inputs.slots,
                inputs.ends,
                blocks,
                row_tables,
                width,
                blocks.stride(0),
                scratch,
                BLOCK_TOKENS=BLOCK_SIZE,
                BLOCK=_columns(width),
                num_warps=COLUMN_WARPS,
            )
        return [row_tables[:num_rows, :num_blocks] for row_tables in self._row_tables]

    def change_tables(self, places: Tensor, blocks: Tensor) -> None:
        scatter_rows(self._tables.blocks.view(-1), places, blocks)

    def clear_blocks(self, cache: Tensor, blocks: Tensor) -> None:
        """In one launch: torch takes one for each 2 GiB of distance between layers."""
        num_blocks, width = cache.shape[2], cache.stride(2)
        size = min(CLEARED_COLUMNS, next_power_of_two(width))
        grid = (len(blocks), cache.shape[0] * cache.shape[1], -(-width // size))
        clear[grid](cache, blocks, num_blocks, width, BLOCK=size, num_warps=COLUMN_WARPS)


def _columns(width: int) -> int:
    return min(COLUMNS, next_power_of_two(width))


def _grid(num_rows: int, width: int) -> tuple[int, int]:
    return num_rows, -(-width // _columns(width))
