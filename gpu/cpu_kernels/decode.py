"""Attention of one new token per row, straight over block tables: the kernel. Thread: any, without the GIL.

A piece of work is some KV heads of a row, as many as it takes to read a few whole cache lines of each token: their
query heads share each key and value that is read (chunks.py). The context is taken in splits, which are merged in
their order: a piece is all of a row's splits, or, where rows do not divide evenly among the threads, one of them
(flash decoding), and who ends the last merges them. Sums are the same to the last bit either way.
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
    merge,
    num_parts_of,
    sums_bytes,
    write,
)
from gpu.cpu_kernels.emit import REGISTER_BYTES
from gpu.cpu_kernels.vectors import keep, load_float, load_integer, take_next

SPLIT_TOKENS = 512  # of context


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
        ("first_splits", ctypes.c_int64),  # int64 [rows + 1]: splits of the rows before; 0: a piece is all of a row's
        ("found", ctypes.c_int64),  # [splits, kv_heads] x head_bytes, where pieces are splits
        ("counts", ctypes.c_int64),  # int64 [rows, kv_heads / piece_heads], there: how many have ended, 0 at first
        ("scale", ctypes.c_float),  # of scores, log2(e) counted in
    )


@njit(cache=True)
def head_bytes(per_kv, head_dim):
    """Of what is found for one KV head: sums, and then tops, as of attend_chunk."""
    return sums_bytes(head_dim, per_kv) + per_kv * TOP_ROW_BYTES


@njit(cache=True)
def _attend_split(query, keys, values, stride, table, seen, end_block, shape, scale, room, found, shapes):
    """Some KV heads of one row over some of its context, chunk by chunk.

    Args:
        query: bf16 [heads, per_kv, head_dim].
        keys, values: of the first of these KV heads in the cache's first slot; stride: bytes from slot to slot.
        table: int64 [blocks]; seen: first and end of the positions.
        end_block: up to which blocks are read, by this piece: the next chunk's are asked for.
        shape: (heads, per_kv, head_dim)
        room, shapes: see attend_chunk; found: head_bytes for each head.
    """
    num_heads, per_kv, head_dim = shape
    first, end = seen
    of_sums, of_head = sums_bytes(head_dim, per_kv), head_bytes(per_kv, head_dim)
    for head in range(num_heads):
        clear_sums(found + head * of_head, per_kv * num_parts_of(head_dim))
        clear_tops(found + head * of_head + of_sums, per_kv)
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
                found + head * of_head,
                found + head * of_head + of_sums,
                shapes,
            )


@njit(cache=True)
def _attend_splits(query, keys, values, stride, table, seen, splits, shape, scale, room, found, of_split, shapes):
    """The same over some splits of the context, which are merged.

    Args:
        seen: first and end of the positions, of all splits; splits: first and end of those to attend to.
        of_split: head_bytes for each head, of use here.
    """
    end_block = (min(seen[1], splits[1] * SPLIT_TOKENS) + BLOCK_SIZE - 1) // BLOCK_SIZE
    for split in range(splits[0], splits[1]):
        into = found if split == splits[0] else of_split
        part = max(seen[0], split * SPLIT_TOKENS), min(seen[1], (split + 1) * SPLIT_TOKENS)
        _attend_split(query, keys, values, stride, table, part, end_block, shape, scale, room, into, shapes)
        if split > splits[0]:
            _merge_heads(found, of_split, shape)


@njit(cache=True)
def _merge_heads(found, other, shape):
    num_heads, per_kv, head_dim = shape
    of_sums, of_head = sums_bytes(head_dim, per_kv), head_bytes(per_kv, head_dim)
    for at in range(0, num_heads * of_head, of_head):
        merge(found + at, found + at + of_sums, other + at, other + at + of_sums, per_kv, head_dim)


@njit(cache=True)
def _write_heads(found, shape, out):
    num_heads, per_kv, head_dim = shape
    of_sums, of_head = sums_bytes(head_dim, per_kv), head_bytes(per_kv, head_dim)
    for head in range(num_heads):
        at = found + head * of_head
        write(at, at + of_sums, 1, per_kv, head_dim, out + head * 2 * per_kv * head_dim, 0)


@njit(cache=True)
def _row_of(first_splits, split):
    row = 0
    while load_integer(first_splits + 8 * (row + 1)) <= split:
        row += 1
    return row


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
    first_splits, found = load_integer(arguments + 120), load_integer(arguments + 128)
    counts, scale = load_integer(arguments + 136), load_float(arguments + 144)
    of_head, sizes = head_bytes(per_kv, head_dim), chunk_room(head_dim, per_kv)
    size = sizes[0] + sizes[1] + sizes[2] + sizes[3] + 2 * piece_heads * of_head + SHAPES_BYTES
    memory = np.empty(size + REGISTER_BYTES, dtype=np.uint8)
    turned = (memory.ctypes.data + REGISTER_BYTES - 1) // REGISTER_BYTES * REGISTER_BYTES
    paired = turned + sizes[0]
    scores = paired + sizes[1]
    shares = scores + sizes[2]
    of_piece = shares + sizes[3]
    of_split = of_piece + piece_heads * of_head
    shapes = of_split + piece_heads * of_head
    shape, room, width = (piece_heads, per_kv, head_dim), (turned, paired, scores, shares), 2 * per_kv * head_dim
    num_groups, split_bytes = num_kv_heads // piece_heads, num_kv_heads * of_head
    num_units = load_integer(first_splits + 8 * num_rows) if first_splits else num_rows
    shape_tiles(shapes, per_kv)
    piece = take_next(arguments)
    while piece < num_units * num_groups:
        unit, group = piece // num_groups, piece % num_groups
        row = _row_of(first_splits, unit) if first_splits else unit
        first_head, end = group * piece_heads, load_integer(ends + 8 * row)
        first = max(0, end - window)
        split, end_split, into = first // SPLIT_TOKENS, (end + SPLIT_TOKENS - 1) // SPLIT_TOKENS, of_piece
        num_splits, first_unit = end_split - split, unit
        if first_splits:
            first_unit = load_integer(first_splits + 8 * row)
            split += unit - first_unit
            end_split = split + 1
            into = found + unit * split_bytes + first_head * of_head
        _attend_splits(
            query + row * query_stride + first_head * width,
            keys + 2 * first_head * head_dim,
            values + 2 * first_head * head_dim,
            2 * num_kv_heads * head_dim,
            tables + 8 * row * table_width,
            (first, end),
            (split, end_split),
            shape,
            scale,
            room,
            into,
            of_split,
            shapes,
        )
        if first_splits == 0:
            _write_heads(into, shape, out + (row * num_kv_heads + first_head) * width)
        elif take_next(counts + 8 * (row * num_groups + group)) == num_splits - 1:
            into = found + first_unit * split_bytes + first_head * of_head
            for number in range(1, num_splits):
                _merge_heads(into, into + number * split_bytes, shape)
            _write_heads(into, shape, out + (row * num_kv_heads + first_head) * width)
        piece = take_next(arguments)
    release_tiles()
    keep(memory)
