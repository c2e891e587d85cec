"""Rows of tables that stay on the device, by token or by the slot of a request. Thread: engine."""

import torch
from torch import Tensor

from core.config import BLOCK_SIZE
from gpu.kernels.request_rows import clear, embed, lay_out_tables, lay_out_tokens, scatter
from gpu.kernels.sizes import COLUMN_WARPS, COLUMNS, next_power_of_two
from gpu.rows import DeviceTables, RowOperators, StepInputs, StepTokens

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


class DeviceRows(RowOperators):
    """RowOperators whose results lie where they always lie, of padding too: a graph may hold them."""

    def __init__(self, tables: DeviceTables, num_rows: int, num_tokens: int) -> None:
        super().__init__(tables, num_rows, num_tokens)
        blocks = tables.blocks
        self._tokens = StepTokens(
            token_ids=blocks.new_zeros(num_tokens, dtype=torch.int64),
            positions=blocks.new_zeros(num_tokens, dtype=torch.float32),
            kv_slots=blocks.new_zeros(num_tokens, dtype=torch.int64),
        )
        self._row_tables = blocks.new_zeros((num_rows, blocks.shape[1]), dtype=torch.int32)

    def tokens_of(self, inputs: StepInputs) -> StepTokens:
        tables, step, tokens = self._tables, inputs.tokens, self._tokens
        num_tokens = step.shape[1]
        assert step.is_contiguous()
        lay_out_tokens[(-(-num_tokens // TOKENS),)](
            step,
            tables.blocks,
            tables.last_tokens,
            tokens.token_ids,
            tokens.positions,
            tokens.kv_slots,
            num_tokens,
            tables.blocks.shape[1],
            tables.padding,
            BLOCK_TOKENS=BLOCK_SIZE,
            BLOCK=TOKENS,
            num_warps=COLUMN_WARPS,
        )
        return StepTokens(tokens.token_ids[:num_tokens], tokens.positions[:num_tokens], tokens.kv_slots[:num_tokens])

    def tables_of(self, inputs: StepInputs, num_blocks: int) -> Tensor:
        tables, num_rows, width = self._tables, len(inputs.slots), self._row_tables.shape[1]
        lay_out_tables[_grid(num_rows, width)](
            inputs.slots,
            inputs.ends,
            tables.blocks,
            self._row_tables,
            width,
            tables.scratch,
            BLOCK_TOKENS=BLOCK_SIZE,
            BLOCK=_columns(width),
            num_warps=COLUMN_WARPS,
        )
        return self._row_tables[:num_rows, :num_blocks]

    def change_tables(self, places: Tensor, blocks: Tensor) -> None:
        scatter_rows(self._tables.blocks.view(-1), places, blocks)

    def clear_blocks(self, cache: Tensor, blocks: Tensor) -> None:
        """In one launch: torch takes one for each 2 GiB that a cache's layers lie apart."""
        num_blocks, width = cache.shape[2], cache.stride(2)
        size = min(CLEARED_COLUMNS, next_power_of_two(width))
        grid = (len(blocks), cache.shape[0] * cache.shape[1], -(-width // size))
        clear[grid](cache, blocks, num_blocks, width, BLOCK=size, num_warps=COLUMN_WARPS)


def _columns(width: int) -> int:
    return min(COLUMNS, next_power_of_two(width))


def _grid(num_rows: int, width: int) -> tuple[int, int]:
    return num_rows, -(-width // _columns(width))
