"""Attention of a row of many new tokens, straight over its block table: the kernel. Thread: any, without the GIL.

A piece of work is one KV head of some tokens: their query heads share each key and value (chunks.py).
"""

import ctypes

import numpy as np
from numba import cfunc, njit, types

from core.config import BLOCK_SIZE
from gpu.cpu_kernels.blocks import ATTENTION_ROWS, SHAPES_BYTES, clear_sums, release_tiles, shape_tiles
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
from gpu.cpu_kernels.vectors import keep, load_float, load_integer, load_pairs, store_pairs, take_next


class Arguments(ctypes.Structure):
    """What the kernel is told, in the order in which it reads. Addresses are of first elements."""

    _fields_ = (
        ("next_piece", ctypes.c_int64),  # 0
        ("query", ctypes.c_int64),  # bf16 [tokens, heads, head_dim]
        ("query_stride", ctypes.c_int64),  # bytes from token to token
        ("keys", ctypes.c_int64),  # bf16 [blocks * 16, kv_heads, head_dim]
        ("values", ctypes.c_int64),
        ("table", ctypes.c_int64),  # int64 [blocks of the context]
        ("start", ctypes.c_int64),  # position of the first token
        ("num_tokens", ctypes.c_int64),
        ("window", ctypes.c_int64),  # tokens that one sees, itself counted in
        ("out", ctypes.c_int64),  # bf16 [tokens, heads * head_dim]
        ("num_kv_heads", ctypes.c_int64),
        ("per_kv", ctypes.c_int64),
        ("head_dim", ctypes.c_int64),
        ("scale", ctypes.c_float),  # of scores, log2(e) counted in
    )


@njit(cache=True)
def _copy_query(query, stride, num_tokens, row_bytes, target):
    for token in range(num_tokens):
        for index in range(0, row_bytes, REGISTER_BYTES):
            store_pairs(target + token * row_bytes + index, load_pairs(query + token * stride + index))


@njit(cache=True)
def _attend_piece(
    query, keys, values, stride, table, position, num_tokens, shape, window, scale, room, sums, tops, shapes
):
    """Some tokens' heads of one KV head, chunk by chunk of what they see.

    Args:
        query: bf16 [tokens * per_kv, head_dim].
        keys, values: of this KV head in the cache's first slot; stride: bytes from slot to slot.
        position: of the first of the tokens.
        shape: (per_kv, head_dim)
        room, sums, tops, shapes: see attend_chunk.
    """
    end = position + num_tokens
    end_block = (end + BLOCK_SIZE - 1) // BLOCK_SIZE
    num_rows = num_tokens * shape[0]
    shape_tiles(shapes, num_rows)
    clear_sums(sums, num_rows * num_parts_of(shape[1]))
    clear_tops(tops, num_rows)
    for chunk in range(max(0, position + 1 - window) // CHUNK_TOKENS * CHUNK_TOKENS, end, CHUNK_TOKENS):
        num_left = end_block - chunk // BLOCK_SIZE
        attend_chunk(
            query,
            keys,
            values,
            stride,
            table + 8 * (chunk // BLOCK_SIZE),
            (min(CHUNK_BLOCKS, num_left), max(0, min(CHUNK_BLOCKS, num_left - CHUNK_BLOCKS))),
            (chunk, position),
            (num_tokens, shape[0], shape[1]),
            window,
            scale,
            room,
            sums,
            tops,
            shapes,
        )


@cfunc(types.void(types.int64), cache=True)
def attend_many(arguments):
    """Take pieces until none is left, the longest first: any number of threads at once.

    arguments: the address of Arguments.
    """
    query, query_stride = load_integer(arguments + 8), load_integer(arguments + 16)
    keys, values, table = load_integer(arguments + 24), load_integer(arguments + 32), load_integer(arguments + 40)
    start, num_tokens = load_integer(arguments + 48), load_integer(arguments + 56)
    window, out, num_kv_heads = load_integer(arguments + 64), load_integer(arguments + 72), load_integer(arguments + 80)
    per_kv, head_dim = load_integer(arguments + 88), load_integer(arguments + 96)
    scale = load_float(arguments + 104)
    most_tokens = max(1, ATTENTION_ROWS // per_kv)
    most_rows = most_tokens * per_kv
    sizes = chunk_room(head_dim, most_rows)
    copy_bytes, of_sums = 2 * most_rows * head_dim, sums_bytes(head_dim, most_rows)
    size = copy_bytes + sizes[0] + sizes[1] + sizes[2] + sizes[3] + of_sums + most_rows * TOP_ROW_BYTES + SHAPES_BYTES
    memory = np.empty(size + REGISTER_BYTES, dtype=np.uint8)
    copied = (memory.ctypes.data + REGISTER_BYTES - 1) // REGISTER_BYTES * REGISTER_BYTES
    turned = copied + copy_bytes
    paired = turned + sizes[0]
    scores = paired + sizes[1]
    shares = scores + sizes[2]
    room, sums = (turned, paired, scores, shares), shares + sizes[3]
    tops = sums + of_sums
    shapes = tops + most_rows * TOP_ROW_BYTES
    width = 2 * per_kv * head_dim
    num_tiles = (num_tokens + most_tokens - 1) // most_tokens
    piece = take_next(arguments)
    while piece < num_tiles * num_kv_heads:
        first, head = (num_tiles - 1 - piece // num_kv_heads) * most_tokens, piece % num_kv_heads
        some = min(most_tokens, num_tokens - first)
        _copy_query(query + first * query_stride + head * width, query_stride, some, width, copied)
        _attend_piece(
            copied,
            keys + 2 * head * head_dim,
            values + 2 * head * head_dim,
            2 * num_kv_heads * head_dim,
            table,
            start + first,
            some,
            (per_kv, head_dim),
            window,
            scale,
            room,
            sums,
            tops,
            shapes,
        )
        write(
            sums,
            tops,
            some,
            per_kv,
            head_dim,
            out + first * num_kv_heads * width + head * width,
            num_kv_heads * width,
        )
        piece = take_next(arguments)
    release_tiles()
    keep(memory)
