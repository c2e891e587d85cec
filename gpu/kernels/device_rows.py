"""Rows of tables that stay on the device, by token or by the slot of a request. Thread: engine."""

from dataclasses import dataclass

import torch
from torch import Tensor

from core.config import BLOCK_SIZE
from gpu.kernels.block_sizes import COLUMN_WARPS, COLUMNS, next_power_of_two
from gpu.kernels.request_rows import embed, lay_out_rows, scatter


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


@dataclass(frozen=True, slots=True)
class DecodingRows:
    """What a step of decodes reads, at addresses that stay: of all rows there may be, or of the first ones.

    Args:
        drawn: slots, < 0 for padding, and positions of the tokens that are drawn.
    """

    token_ids: Tensor  # int64 [rows]
    positions: Tensor  # float32 [rows]
    kv_slots: Tensor  # int64 [rows]
    ends: Tensor  # int32 [rows]
    tables: Tensor  # int32 [rows, blocks of a sequence]
    drawn: Tensor  # int64 [2, rows]

    def first(self, num_rows: int) -> "DecodingRows":
        return DecodingRows(
            self.token_ids[:num_rows],
            self.positions[:num_rows],
            self.kv_slots[:num_rows],
            self.ends[:num_rows],
            self.tables[:num_rows],
            self.drawn[:, :num_rows],
        )


def empty_rows(num_rows: int, width: int, drawn: Tensor) -> DecodingRows:
    """Not filled in yet. width: blocks of a sequence; drawn: [2, at least num_rows], to be written."""
    device = drawn.device
    return DecodingRows(
        token_ids=torch.zeros(num_rows, dtype=torch.int64, device=device),
        positions=torch.zeros(num_rows, device=device),
        kv_slots=torch.zeros(num_rows, dtype=torch.int64, device=device),
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


def fill_rows(rows: DecodingRows, step: Tensor, tables: Tensor, last_tokens: Tensor, spare: SpareBlocks) -> None:
    """
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


def _columns(width: int) -> int:
    return min(COLUMNS, next_power_of_two(width))


def _grid(num_rows: int, width: int) -> tuple[int, int]:
    return num_rows, -(-width // _columns(width))
