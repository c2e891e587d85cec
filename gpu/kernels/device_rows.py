"""Rows of tables that stay on the device, by token or by the slot of a request. Thread: engine."""

from dataclasses import dataclass

import torch
from torch import Tensor

from core.config import BLOCK_SIZE
from gpu.kernels.request_rows import clear, embed, lay_out_rows, lay_out_tokens, scatter
from gpu.kernels.sizes import COLUMN_WARPS, COLUMNS, next_power_of_two

TOKENS = 128  # that a program lays out
CLEARED_COLUMNS = 4096  # by a program


def embed_rows(table: Tensor, token_ids: Tensor) -> Tensor:
    """Rows of a table [vocab, width]: [tokens, width]. token_ids: [tokens], integers."""
    width = table.shape[1]
    out = table.new_empty((len(token_ids), width))
    embed[_grid(len(token_ids), width)](token_ids, table, out, width, BLOCK=_columns(width), num_warps=COLUMN_WARPS)
    return out


def scatter_rows(table: Tensor, slots: Tensor, rows: Tensor) -> None:
    """table[slots] = rows, without those whose slot is < 0: padding; no slot comes twice.

    Args:
        table: [slots, ...]; rows: [rows, ...]; both contiguous, of one format.
    """
    assert rows.dtype == table.dtype
    assert rows.is_contiguous()
    assert table.is_contiguous()
    width = table.stride(0)
    scatter[_grid(len(slots), width)](table, slots, rows, width, BLOCK=_columns(width), num_warps=COLUMN_WARPS)


def clear_blocks(cache: Tensor, blocks: Tensor) -> None:
    """KVCache.clear_blocks in one launch: torch takes one for each 2 GiB that a cache's layers lie apart.

    Args:
        cache: [layers, 2, blocks, 16, kv_heads, head_dim], contiguous.
        blocks: [cleared], integers; at least one.
    """
    num_blocks, width = cache.shape[2], cache.stride(2)
    size = min(CLEARED_COLUMNS, next_power_of_two(width))
    grid = (len(blocks), cache.shape[0] * cache.shape[1], -(-width // size))
    clear[grid](cache, blocks, num_blocks, width, BLOCK=size, num_warps=COLUMN_WARPS)


@dataclass(frozen=True, slots=True)
class StepRows:
    """What a step reads, at addresses that stay: of all rows and tokens there may be, or of the first ones.

    Rows that decode are their tokens, and come first.

    Args:
        drawn: slots, < 0 for padding, and positions of the tokens that are drawn.
    """

    token_ids: Tensor  # int64 [tokens]
    positions: Tensor  # float32 [tokens]
    kv_slots: Tensor  # int64 [tokens]
    ends: Tensor  # int32 [rows]
    tables: Tensor  # int32 [rows, blocks of a sequence]
    drawn: Tensor  # int64 [2, rows]

    def first(self, num_rows: int, num_tokens: int) -> "StepRows":
        return StepRows(
            self.token_ids[:num_tokens],
            self.positions[:num_tokens],
            self.kv_slots[:num_tokens],
            self.ends[:num_rows],
            self.tables[:num_rows],
            self.drawn[:, :num_rows],
        )


def empty_rows(num_rows: int, num_tokens: int, width: int, drawn: Tensor) -> StepRows:
    """Not filled in yet.

    Args:
        num_tokens: at least num_rows.
        width: blocks of a sequence.
        drawn: [2, at least num_rows], to be written.
    """
    device = drawn.device
    return StepRows(
        token_ids=torch.zeros(num_tokens, dtype=torch.int64, device=device),
        positions=torch.zeros(num_tokens, device=device),
        kv_slots=torch.zeros(num_tokens, dtype=torch.int64, device=device),
        ends=torch.zeros(num_rows, dtype=torch.int32, device=device),
        tables=torch.zeros((num_rows, width), dtype=torch.int32, device=device),
        drawn=drawn,
    )


@dataclass(frozen=True, slots=True)
class SpareBlocks:
    """
    Args:
        scratch: pads tables, and is never written.
        padding: takes the keys and values of padding, and is never read.
    """

    scratch: int
    padding: int


def fill_rows(rows: StepRows, step: Tensor, tables: Tensor, last_tokens: Tensor, spare: SpareBlocks) -> None:
    """Of each row all that is asked of its last token, as if it drew behind it; of rows that decode, that is all.

    Args:
        step: int32 [3, rows]: slot (< 0: padding), position and token of each; a token < 0 is what the slot drew last.
        tables: int32 [slots, blocks of a sequence], contiguous.
        last_tokens: int64 [slots].
    """
    num_rows, width = rows.tables.shape
    lay_out_rows[_grid(num_rows, width)](
        step,
        step.stride(0),
        tables,
        last_tokens,
        rows.token_ids,
        rows.positions,
        rows.kv_slots,
        rows.ends,
        rows.tables,
        rows.drawn[0],
        rows.drawn[1],
        width,
        spare.scratch,
        spare.padding,
        BLOCK_TOKENS=BLOCK_SIZE,
        BLOCK=_columns(width),
        num_warps=COLUMN_WARPS,
    )


def fill_tokens(
    rows: StepRows, first: int, step: Tensor, tables: Tensor, last_tokens: Tensor, spare: SpareBlocks
) -> None:
    """Tokens from `first` on: what fill_rows has put there is overwritten.

    Args:
        step: int32 [3, tokens], contiguous: slot (< 0: padding), position and token of each, as for rows.
        tables, last_tokens: see fill_rows.
    """
    num_tokens, width = step.shape[1], rows.tables.shape[1]
    assert step.is_contiguous()
    lay_out_tokens[(-(-num_tokens // TOKENS),)](
        step,
        tables,
        last_tokens,
        rows.token_ids[first:],
        rows.positions[first:],
        rows.kv_slots[first:],
        num_tokens,
        width,
        spare.padding,
        BLOCK_TOKENS=BLOCK_SIZE,
        BLOCK=TOKENS,
        num_warps=COLUMN_WARPS,
    )


def _columns(width: int) -> int:
    return min(COLUMNS, next_power_of_two(width))


def _grid(num_rows: int, width: int) -> tuple[int, int]:
    return num_rows, -(-width // _columns(width))
