"""Rows of tables that stay on the device, by token or by the slot of a request. Thread: engine.

Token ids may be PENDING: what a token's slot drew last, which the host has not read yet.
"""

from dataclasses import dataclass

from torch import Tensor

from gpu.kernels.block_sizes import COLUMN_WARPS, COLUMNS, next_power_of_two
from gpu.kernels.request_rows import embed, gather, scatter


@dataclass(frozen=True, slots=True)
class LastTokens:
    """Where pending ids are looked up.

    Args:
        slots: [tokens], integers: each token's.
        token_ids: [slots], integers: what each has drawn last.
    """

    slots: Tensor
    token_ids: Tensor


def embed_rows(table: Tensor, token_ids: Tensor, last: LastTokens | None = None) -> Tensor:
    """Rows of a table [vocab, width]: [tokens, width].

    Args:
        token_ids: [tokens], integers.
        last: for those < 0; None: there are none.
    """
    width = table.shape[1]
    out = table.new_empty((len(token_ids), width))
    embed[_grid(len(token_ids), width)](
        token_ids,
        token_ids if last is None else last.slots,
        token_ids if last is None else last.token_ids,
        table,
        out,
        width,
        HAS_LAST=last is not None,
        BLOCK=_columns(width),
        num_warps=COLUMN_WARPS,
    )
    return out


def gather_rows(table: Tensor, slots: Tensor) -> Tensor:
    """table[slots]. table: [slots, ...], contiguous; slots: [rows], integers."""
    out = table.new_empty((len(slots), *table.shape[1:]))
    width = table.stride(0)
    gather[_grid(len(slots), width)](table, slots, out, width, BLOCK=_columns(width), num_warps=COLUMN_WARPS)
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


def _columns(width: int) -> int:
    return min(COLUMNS, next_power_of_two(width))


def _grid(num_rows: int, width: int) -> tuple[int, int]:
    return num_rows, -(-width // _columns(width))
