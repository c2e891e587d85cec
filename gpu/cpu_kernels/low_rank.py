"""Products of LoRA adapters on a CPU, by AVX-512. Kernel: any thread, without the GIL; the rest: engine.

One call adds the products of all adapters at a layer's matrix. A piece of work is up to six rows of one adapter: these
times A, rounded to bf16, times B, added to the rows. B's zeros, where matrices are fused, are neither kept nor
multiplied. A row's sums are the same to the last bit in any company.

16 rows of 16 adapters of rank 16, beside torch's matmuls for one adapter after the other: docs/models.md.
"""

import ctypes
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from gpu.cpu_kernels.compiled import carray, kernel, njit
from gpu.cpu_kernels.matmul import MOST_TILE_ROWS, PAIR_BYTES, STREAM_AHEAD, SUM_ROW_BYTES, clear_sums, make_tile
from gpu.cpu_kernels.team import Kernel, integers
from gpu.cpu_kernels.vectors import (
    LANES,
    REGISTER_BYTES,
    keep,
    load_floats,
    load_integer,
    load_pairs,
    load_widened,
    pointer,
    store_floats,
    store_pairs,
    store_rounded,
    take_next,
    zeros,
)
from gpu.linear import BLOCK_OUTPUTS

PAIR_LANES = 2 * LANES  # bf16 numbers of a register
HEAD_INTEGERS, BLOCK_INTEGERS = 2, 3  # of a packed product's table: see PackedLowRank
INTEGER_BYTES = 8

_down_tile, _up_tile = make_tile(1, 1), make_tile(PAIR_BYTES // REGISTER_BYTES)


class Arguments(ctypes.Structure):
    """Of add_products. Addresses are of first elements."""

    _fields_ = integers(
        "next_piece",  # 0
        "x",  # bf16 [rows, 2 * num_pairs]
        "x_stride",  # bytes from row to row
        "y",  # bf16 [rows, blocks * 64]
        "y_stride",
        "rows",  # int64: all adapters' rows, an adapter's in ascending order
        "pieces",  # int64 [pieces, 3]: first and end in rows, index of the adapter
        "products",  # int64 [adapters]: addresses of tables, see PackedLowRank; 0: it adds nothing here
        "num_pieces",
        "num_pairs",
        "num_blocks",
        "most_ranks",  # of any product
    )


_ARGUMENTS = np.dtype(Arguments)


@njit(cache=True)
def _multiply_down(num_rows, x, x_stride, weights, num_pairs, sums):
    _down_tile(num_rows, x, x_stride, weights, num_pairs, sums, weights + STREAM_AHEAD, 4)


@njit(cache=True)
def _multiply_up(num_rows, x, x_stride, weights, num_pairs, sums):
    _up_tile(num_rows, x, x_stride, weights, num_pairs, sums, weights + STREAM_AHEAD, 4 * PAIR_BYTES // REGISTER_BYTES)


@njit(cache=True)
def _add_piece(table, x, x_stride, num_pairs, rows, num_rows, y, y_stride, num_blocks, sums, inner):
    """Some rows of one adapter.

    Args:
        x: of these rows alone.
        rows: address of their indexes in y.
        sums: room for float32 [num_rows, 64].
        inner: room for bf16 [num_rows, ranks].
    """
    num_ranks, down = load_integer(table), load_integer(table + INTEGER_BYTES)
    for first in range(0, num_ranks, LANES):
        for row in range(num_rows):
            store_floats(sums + row * REGISTER_BYTES, zeros())
        _multiply_down(num_rows, x, x_stride, down + 4 * first * num_pairs, num_pairs, sums)
        for row in range(num_rows):
            store_rounded(inner + 2 * (row * num_ranks + first), load_floats(sums + row * REGISTER_BYTES))
    for block in range(num_blocks):
        entry = table + INTEGER_BYTES * (HEAD_INTEGERS + BLOCK_INTEGERS * block)
        up, first_pair = load_integer(entry), load_integer(entry + INTEGER_BYTES)
        num_used = load_integer(entry + 2 * INTEGER_BYTES)
        if num_used == 0:
            continue
        clear_sums(sums, num_rows)
        _multiply_up(num_rows, inner + 4 * first_pair, 2 * num_ranks, up, num_used, sums)
        for row in range(num_rows):
            at = y + load_integer(rows + INTEGER_BYTES * row) * y_stride + 2 * block * BLOCK_OUTPUTS
            for index in range(0, BLOCK_OUTPUTS, LANES):
                added = load_floats(sums + row * SUM_ROW_BYTES + 4 * index)
                store_rounded(at + 2 * index, load_widened(at + 2 * index) + added)


@njit(cache=True)
def _gather(x, x_stride, rows, num_rows, row_bytes, into):
    for row in range(num_rows):
        source = x + load_integer(rows + INTEGER_BYTES * row) * x_stride
        for at in range(0, row_bytes, REGISTER_BYTES):
            store_pairs(into + row * row_bytes + at, load_pairs(source + at))


@kernel()
def add_products(arguments):
    """Take pieces until none is left: any number of threads at once. arguments: the address of Arguments."""
    args = carray(pointer(arguments), 1, _ARGUMENTS)[0]
    row_bytes = 4 * args.num_pairs
    memory = np.empty(MOST_TILE_ROWS * (SUM_ROW_BYTES + row_bytes + 2 * args.most_ranks), dtype=np.uint8)
    sums = memory.ctypes.data
    gathered = sums + MOST_TILE_ROWS * SUM_ROW_BYTES
    inner = gathered + MOST_TILE_ROWS * row_bytes
    piece = take_next(arguments)
    while piece < args.num_pieces:
        at = args.pieces + 3 * INTEGER_BYTES * piece
        first, end = load_integer(at), load_integer(at + INTEGER_BYTES)
        table = load_integer(args.products + INTEGER_BYTES * load_integer(at + 2 * INTEGER_BYTES))
        if table:
            rows, num_rows = args.rows + INTEGER_BYTES * first, end - first
            row = load_integer(rows)
            x, x_stride = args.x + row * args.x_stride, args.x_stride
            if load_integer(rows + INTEGER_BYTES * (num_rows - 1)) - row >= num_rows:  # others lie between them
                _gather(args.x, args.x_stride, rows, num_rows, row_bytes, gathered)
                x, x_stride = gathered, row_bytes
            _add_piece(
                table, x, x_stride, args.num_pairs, rows, num_rows, args.y, args.y_stride, args.num_blocks, sums, inner
            )
        piece = take_next(arguments)
    keep(memory)


class PackedLowRank:
    """An adapter's product at one matrix, as the kernel reads it.

    Its table: ranks, address of A; of each block of 64 outputs the address of B, and which pairs of ranks it has:
    the first, and how many.

    Args:
        down: bf16 [ranks, in], with in a multiple of 32.
        up: bf16 [out, ranks], scaled, with out a multiple of 64.
    """

    def __init__(self, down: Tensor, up: Tensor) -> None:
        missing = -len(down) % LANES
        self.num_ranks = len(down) + missing
        blocks = F.pad(down, (0, 0, 0, missing)).view(-1, LANES, down.shape[1] // 2, 2)
        self._down = blocks.transpose(1, 2).contiguous()  # [ranks / 16, in / 2, 16, 2]
        pairs = F.pad(up, (0, missing)).view(-1, BLOCK_OUTPUTS, self.num_ranks // 2, 2).transpose(1, 2)
        is_used = pairs.ne(0).flatten(2).any(2)  # [out / 64, ranks / 2]
        used = [(int(found[0]), int(found[-1]) + 1) if len(found := one.nonzero()) else (0, 0) for one in is_used]
        self._up = torch.cat([pairs[block, first:end].flatten() for block, (first, end) in enumerate(used)])
        sizes = np.array([end - first for first, end in used])
        table = np.empty(HEAD_INTEGERS + BLOCK_INTEGERS * len(used), dtype=np.int64)
        table[:HEAD_INTEGERS] = self.num_ranks, self._down.data_ptr()
        entries = table[HEAD_INTEGERS:].reshape(-1, BLOCK_INTEGERS)
        entries[:, 0] = self._up.data_ptr() + PAIR_BYTES * (np.cumsum(sizes) - sizes)
        entries[:, 1], entries[:, 2] = [first for first, _ in used], sizes
        self._table = table
        self.address = int(table.ctypes.data)
        self.nbytes = self._down.nbytes + self._up.nbytes


class PackedRowGroups:
    """Which rows have which adapter, as the kernel reads it. groups: an adapter's rows each, in ascending order."""

    def __init__(self, groups: Sequence[np.ndarray]) -> None:
        self.rows = np.concatenate(groups)
        pieces, start = list[tuple[int, int, int]](), 0
        for index, rows in enumerate(groups):
            num_pieces = -(-len(rows) // MOST_TILE_ROWS)
            ends = [start + number * len(rows) // num_pieces for number in range(num_pieces + 1)]
            pieces += [(first, end, index) for first, end in pairwise(ends)]
            start += len(rows)
        self.pieces = np.array(pieces)


class LowRankKernel:
    """Adds adapters' products. For one thread at a time."""

    def __init__(self) -> None:
        self._kernel = Kernel(add_products)

    def pack(self, down: Tensor, up: Tensor) -> PackedLowRank | None:
        """See PackedLowRank; None: they are of another type, or of sizes that the kernel does not take."""
        is_taken = down.dtype == up.dtype == torch.bfloat16 and not (
            len(up) % BLOCK_OUTPUTS or down.shape[1] % PAIR_LANES
        )
        return PackedLowRank(down, up) if is_taken else None

    def add(self, y: Tensor, x: Tensor, products: Sequence[PackedLowRank | None], groups: PackedRowGroups) -> None:
        """Add to y [rows, out] what each group's adapter makes of x [rows, in]. products: of the groups, in order."""
        addresses = np.array([0 if one is None else one.address for one in products])
        arguments = Arguments(
            x=x.data_ptr(),
            x_stride=x.stride(0) * x.element_size(),
            y=y.data_ptr(),
            y_stride=y.stride(0) * y.element_size(),
            rows=groups.rows.ctypes.data,
            pieces=groups.pieces.ctypes.data,
            products=addresses.ctypes.data,
            num_pieces=len(groups.pieces),
            num_pairs=x.shape[1] // 2,
            num_blocks=y.shape[1] // BLOCK_OUTPUTS,
            most_ranks=max(one.num_ranks for one in products if one is not None),
        )
        self._kernel(arguments, min(torch.get_num_threads(), len(groups.pieces)))
