"""Attention of one new token per row, straight over block tables: the kernel. Thread: any, without the GIL.

A piece of work is some KV heads of a row, as many as it takes to read a few whole cache lines of each token: their
query heads share each key and value that is read (chunks.py).
"""

import ctypes

import numpy as np
from numba import cfunc, njit, types

from core.config import BLOCK_SIZE
from gpu.cpu_kernels.blocks import SHAPES_BYTES, clear_sums, release_tiles, shape_tiles
from gpu.cpu_kernels.chunks import (
    CHUNK_BLOCKS,
    CHUNK_TOKENS,
    TOP_ROW_BYTES,
    attend_chunk,
    chunk_room,
    clear_tops,
    num_parts_of,
    sums_bytes,
    write,
)
from gpu.cpu_kernels.emit import REGISTER_BYTES
from gpu.cpu_kernels.vectors import keep, load_float, load_integer, take_next


class Arguments(ctypes.Structure):
    """What the kernel is told, in the order in which it reads. Addresses are of first elements."""

    _fields_ = (
        ("next_piece", ctypes.c_int64),  # 0
        ("query", ctypes.c_int64),  # bf16 [rows, heads, head_dim]
        ("query_stride", ctypes.c_int64),  # bytes from row to row
        ("keys", ctypes.c_int64),  # bf16 [blocks * 16, kv_heads, head_dim]
        ("values", ctypes.c_int64),
        ("tables", ctypes.c_int64),  # int64 [rows, table_width]
        ("table_width", ctypes.c_int64),
        ("ends", ctypes.c_int64),  # int64 [rows]: one past the last position
        ("window", ctypes.c_int64),  # tokens that one sees, itself counted in
        ("out", ctypes.c_int64),  # bf16 [rows, heads * head_dim]
        ("num_rows", ctypes.c_int64),
        ("num_kv_heads", ctypes.c_int64),
        ("per_kv", ctypes.c_int64),
        ("head_dim", ctypes.c_int64),
        ("piece_heads", ctypes.c_int64),  # KV heads, a divisor of theirs
        ("scale", ctypes.c_float),  # of scores, log2(e) counted in
    )


@njit(cache=True)
def _attend_piece(query, keys, values, stride, table, first, end, shape, scale, room, sums, tops, shapes):
    """Some KV heads of one row, chunk by chunk.

    Args:
        query: bf16 [heads, per_kv, head_dim].
        keys, values: of the first of these KV heads in the cache's first slot; stride: bytes from slot to slot.
        table: int64 [blocks]; first, end: the positions that are seen.
        shape: (heads, per_kv, head_dim)
        room, shapes: see attend_chunk; sums, tops: there, for each head.
    """
    num_heads, per_kv, head_dim = shape
    end_block = (end + BLOCK_SIZE - 1) // BLOCK_SIZE
    head_sums, head_tops = sums_bytes(head_dim, per_kv), per_kv * TOP_ROW_BYTES
    clear_sums(sums, num_heads * per_kv * num_parts_of(head_dim))
    clear_tops(tops, num_heads * per_kv)
    for chunk in range(first // CHUNK_TOKENS * CHUNK_TOKENS, end, CHUNK_TOKENS):
        num_left = end_block - chunk // BLOCK_SIZE
        for head in range(num_heads):
            attend_chunk(
                query + head * 2 * per_kv * head_dim,
                keys + head * 2 * head_dim,
                values + head * 2 * head_dim,
                stride,
                table + 8 * (chunk // BLOCK_SIZE),
                (min(CHUNK_BLOCKS, num_left), max(0, min(CHUNK_BLOCKS, num_left - CHUNK_BLOCKS))),
                (chunk, end - 1),
                (1, per_kv, head_dim),
                end - first,
                scale,
                room,
                sums + head * head_sums,
                tops + head * head_tops,
                shapes,
            )


@cfunc(types.void(types.int64), cache=True)
def attend(arguments):
    """Take pieces until none is left: any number of threads at once. arguments: the address of Arguments."""
    query, query_stride = load_integer(arguments + 8), load_integer(arguments + 16)
    keys, values = load_integer(arguments + 24), load_integer(arguments + 32)
    tables, table_width = load_integer(arguments + 40), load_integer(arguments + 48)
    ends, window = load_integer(arguments + 56), load_integer(arguments + 64)
    out, num_rows = load_integer(arguments + 72), load_integer(arguments + 80)
    num_kv_heads, per_kv = load_integer(arguments + 88), load_integer(arguments + 96)
    head_dim, piece_heads = load_integer(arguments + 104), load_integer(arguments + 112)
    scale = load_float(arguments + 120)
    head_sums, head_tops = sums_bytes(head_dim, per_kv), per_kv * TOP_ROW_BYTES
    sizes = chunk_room(head_dim, per_kv)
    size = sizes[0] + sizes[1] + sizes[2] + sizes[3] + piece_heads * (head_sums + head_tops) + SHAPES_BYTES
    memory = np.empty(size + REGISTER_BYTES, dtype=np.uint8)
    turned = (memory.ctypes.data + REGISTER_BYTES - 1) // REGISTER_BYTES * REGISTER_BYTES
    paired = turned + sizes[0]
    scores = paired + sizes[1]
    shares = scores + sizes[2]
    sums = shares + sizes[3]
    tops, width = sums + piece_heads * head_sums, 2 * per_kv * head_dim
    shapes = tops + piece_heads * head_tops
    row_pieces = num_kv_heads // piece_heads
    shape_tiles(shapes, per_kv)
    piece = take_next(arguments)
    while piece < num_rows * row_pieces:
        row, first_head = piece // row_pieces, piece % row_pieces * piece_heads
        end = load_integer(ends + 8 * row)
        _attend_piece(
            query + row * query_stride + first_head * width,
            keys + 2 * first_head * head_dim,
            values + 2 * first_head * head_dim,
            2 * num_kv_heads * head_dim,
            tables + 8 * row * table_width,
            max(0, end - window),
            end,
            (piece_heads, per_kv, head_dim),
            scale,
            (turned, paired, scores, shares),
            sums,
            tops,
            shapes,
        )
        for head in range(piece_heads):
            into = out + (row * num_kv_heads + first_head + head) * width
            write(sums + head * head_sums, tops + head * head_tops, 1, per_kv, head_dim, into, 0)
        piece = take_next(arguments)
    release_tiles()
    keep(memory)
