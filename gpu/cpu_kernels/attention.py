"""Attention straight over block tables on a CPU, of decodes and prompts, by AVX2. Thread: engine; kernels: any.

A piece of work is some new tokens of a row with the query heads of some KV heads. The context is taken in chunks of 64
tokens of one KV head. Scores, and sums of values, are matmuls of few rows with 64 outputs over pairs of inputs, as keys
and values lie in the cache (gpu/kv_cache.py); the next chunk's are prefetched meanwhile. Those in 8 bits are multiplied
as integers: queries, and shares times the values' scales, become int16 by the largest of their row, and scores are
multiplied by the keys' scales. A matmul row here is one query head of one token. Sums are rescaled when a larger score
comes (online softmax, arXiv:1805.02867).

A decode (a row of one new token) takes its context in splits, merged in their order, and several neighbouring KV heads
at once: each is prefetched while the one before it is computed. Where rows do not divide evenly among the threads,
pieces are single splits (flash decoding), and the thread that ends a row's last split merges them: the sums are the
same to the last bit either way. A prompt's piece has one KV head and is not split.
"""

import ctypes
import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from core.config import BLOCK_SIZE
from gpu.attention import RaggedRows, Scores
from gpu.cpu_kernels.compiled import carray, kernel, njit, types
from gpu.cpu_kernels.matmul import MOST_TILE_ROWS, SUM_ROW_BYTES, clear_sums
from gpu.cpu_kernels.team import Kernel, integers
from gpu.cpu_kernels.vectors import (
    INT64,
    LANES,
    REGISTER_BYTES,
    absolute,
    clear_outside,
    constant,
    emit_by_count,
    emit_integer_products,
    emit_products,
    exp2_to_126,
    first_lane,
    hide_outside,
    keep,
    larger,
    load,
    load_floats,
    load_integer,
    load_integers,
    load_pairs,
    load_sums,
    load_widened,
    multiply_add,
    multiply_subtract,
    nothing,
    offset,
    operation,
    pointer,
    prefetch,
    rounded,
    spread,
    spread_float,
    spread_largest,
    store_floats,
    store_halves,
    store_pairs,
    store_rounded,
    take_next,
    total,
    zeros,
)
from gpu.kv_cache import LayerKV
from gpu.linear import BLOCK_OUTPUTS

CHUNK_TOKENS = BLOCK_OUTPUTS  # of context
CHUNK_BLOCKS = CHUNK_TOKENS // BLOCK_SIZE
BLOCK_PAIRS = BLOCK_SIZE // 2
PLACES_BYTES = 8 * CHUNK_BLOCKS
SHARE_ROW_BYTES = 2 * CHUNK_TOKENS
TOP_ROW_BYTES = 2 * REGISTER_BYTES
SPLIT_TOKENS = 512  # of context
PROMPT_ROWS = 96  # of a piece: their sums lie in a second-level cache
PIECE_BYTES = 2048  # of a token's keys in neighbouring heads, taken by one thread: memory gives their blocks sooner
EVEN = 1.25  # rows whose longest is up to so many times the mean
ROWS_PER_THREAD = 4  # with so many, one row left over keeps the other threads waiting for little
MOST_INT16 = np.float32(32767)  # 512 products with int8 are below 2 ** 31
LEAST = np.float32(2**-100)  # that a row's largest is taken to be
MINUS_INFINITY = np.float32(-np.inf)
ONE = np.float32(1)
LOG2_E = math.log2(math.e)
NO_WINDOW = NO_SPLIT = 1 << 62  # tokens


@njit(cache=True)
def _num_parts(head_dim):
    """Parts of 64 dimensions; the last may be incomplete."""
    return (head_dim + BLOCK_OUTPUTS - 1) // BLOCK_OUTPUTS


@njit(cache=True)
def _chunk_room(num_rows):
    """Bytes of _attend_chunk's (places, scores, shares, scales), whole registers each."""
    return 4 * PLACES_BYTES, num_rows * SUM_ROW_BYTES, num_rows * SHARE_ROW_BYTES, 2 * SUM_ROW_BYTES + 4 * num_rows


@njit(cache=True)
def _query_bytes(head_dim, num_rows):
    """Of a KV head's query: bf16, or int16 and then what one stands for in each row, float32; whole registers."""
    return (num_rows * (2 * head_dim + 4) + REGISTER_BYTES - 1) // REGISTER_BYTES * REGISTER_BYTES


@njit(cache=True)
def _sums_bytes(head_dim, num_rows):
    return num_rows * _num_parts(head_dim) * SUM_ROW_BYTES


@njit(cache=True)
def _clear(target, num_bytes):
    for index in range(0, num_bytes, REGISTER_BYTES):
        store_floats(target + index, zeros())


def _make_products(emit_products, load_columns, column_bytes):
    """Kernels that multiply a few rows with a chunk's blocks, and prefetch as much of what is computed next.

    Args:
        emit_products: of bf16, or of int16, whose sums are int32.
        load_columns: emits a register of pairs of these from column_bytes of a block.
    """

    def emit_rows(builder, num_rows, x, x_stride, num_pairs, sums, columns_of):
        rows = [builder.add(x, builder.mul(x_stride, constant(row))) for row in range(num_rows)]
        places = [
            [offset(builder, sums, row * SUM_ROW_BYTES + column * REGISTER_BYTES) for column in range(CHUNK_BLOCKS)]
            for row in range(num_rows)
        ]
        emit_products(builder, num_pairs, rows, places, columns_of)

    @operation(nothing, *[types.int64] * 6)
    def multiply_keys(builder, num_rows, query, head_dim, places, ahead, scores):
        """Add to the scores of four blocks' keys, and prefetch four others.

        Args:
            places: see _set_places.
            ahead: bytes from a block's place there to that of one to prefetch.
        """
        own = [load(builder, offset(builder, places, 8 * block), INT64) for block in range(CHUNK_BLOCKS)]
        places = builder.add(places, ahead)
        following = [load(builder, offset(builder, places, 8 * block), INT64) for block in range(CHUNK_BLOCKS)]

        def columns_of(index, columns):
            place = builder.mul(index, constant(column_bytes))
            for column in columns:
                prefetch.emit(builder, builder.add(following[column], place))
            return [load_columns(builder, builder.add(own[column], place)) for column in columns]

        def emit(rows):
            stride, num_pairs = builder.mul(head_dim, constant(2)), builder.lshr(head_dim, constant(1))
            emit_rows(builder, rows, query, stride, num_pairs, scores, columns_of)

        emit_by_count(builder, num_rows, MOST_TILE_ROWS, emit)

    @operation(nothing, *[types.int64] * 8)
    def multiply_values(builder, num_rows, shares, head_dim, places, ahead, num_blocks, part, sums):
        """Add to the sums of 64 numbers of some blocks' values, and prefetch as much of others.

        Args:
            shares: of the blocks' tokens.
            part: which 64 numbers.
        """

        def columns_of(index, columns):
            block = builder.add(places, builder.and_(index, constant(-BLOCK_PAIRS)))
            pair = builder.mul(builder.and_(index, constant(BLOCK_PAIRS - 1)), head_dim)
            place = builder.add(builder.mul(pair, constant(column_bytes // LANES)), within)
            own, following = (
                builder.add(load(builder, one, INT64), place) for one in (block, builder.add(block, ahead))
            )
            for column in columns:
                if column * column_bytes % REGISTER_BYTES == 0:
                    prefetch.emit(builder, offset(builder, following, column * column_bytes))
            return [load_columns(builder, offset(builder, own, column * column_bytes)) for column in columns]

        def emit(rows):
            num_pairs = builder.mul(num_blocks, constant(BLOCK_PAIRS))
            emit_rows(builder, rows, shares, constant(SHARE_ROW_BYTES), num_pairs, sums, columns_of)

        within = builder.mul(part, constant(BLOCK_OUTPUTS // LANES * column_bytes))
        emit_by_count(builder, num_rows, MOST_TILE_ROWS, emit)

    return multiply_keys, multiply_values


_multiply_keys, _multiply_values = _make_products(emit_products, load_pairs.emit, REGISTER_BYTES)
_multiply_int8_keys, _multiply_int8_values = _make_products(
    emit_integer_products, load_integers.emit, REGISTER_BYTES // 2
)


@njit(cache=True)
def _set_places(places, source, step, chunk, next_source, following):
    """Addresses of a head's blocks in a chunk, and of those that are computed next; of none the last again.

    Args:
        places: int64 [2, 4].
        source: keys, or values, of the head in the cache's first block; step: from block to block.
        chunk, following: see _attend_chunk.
    """
    table, num_blocks = chunk
    next_table, num_next = following
    found = carray(pointer(places), 2 * CHUNK_BLOCKS, np.int64)
    for block in range(CHUNK_BLOCKS):
        found[block] = source + load_integer(table + 8 * min(block, num_blocks - 1)) * step
        found[CHUNK_BLOCKS + block] = found[block]
        if num_next:
            at = load_integer(next_table + 8 * min(block, num_next - 1))
            found[CHUNK_BLOCKS + block] = next_source + at * step


@njit(cache=True)
def _load_scales(places, num_blocks, head_dim, scales):
    """Of keys, or values; zeros where there is no block."""
    _clear(scales, SUM_ROW_BYTES)
    for block in range(num_blocks):
        at = load_integer(places + 8 * block) + BLOCK_SIZE * head_dim
        store_floats(scales + block * REGISTER_BYTES, load_floats(at))


@njit(cache=True)
def _score(query, places, head_dim, num_rows, is_int8, scores):
    """Scores of a chunk's keys. Where there is no block they are another's. The first rows prefetch."""
    clear_sums(scores, num_rows)
    num_tiles, first = (num_rows + MOST_TILE_ROWS - 1) // MOST_TILE_ROWS, 0
    for tile in range(num_tiles):
        end, ahead = (tile + 1) * num_rows // num_tiles, 0 if tile else PLACES_BYTES
        of_rows, into = query + 2 * first * head_dim, scores + first * SUM_ROW_BYTES
        if is_int8:
            _multiply_int8_keys(end - first, of_rows, head_dim, places, ahead, into)
        else:
            _multiply_keys(end - first, of_rows, head_dim, places, ahead, into)
        first = end


@njit(cache=True)
def _add_values(shares, places, num_blocks, head_dim, num_rows, sums, part_bytes):
    """Add a chunk's values times the shares to the sums. The first rows prefetch."""
    num_tiles = (num_rows + MOST_TILE_ROWS - 1) // MOST_TILE_ROWS
    for part in range(_num_parts(head_dim)):
        first = 0
        for tile in range(num_tiles):
            end, ahead = (tile + 1) * num_rows // num_tiles, 0 if tile else PLACES_BYTES
            of_rows, into = shares + first * SHARE_ROW_BYTES, sums + part * part_bytes + first * SUM_ROW_BYTES
            _multiply_values(end - first, of_rows, head_dim, places, ahead, num_blocks, part, into)
            first = end


@njit(cache=True)
def _add_int8_values(shares, places, num_blocks, head_dim, num_rows, sums, part_bytes, room, steps):
    """The same of values in 8 bits.

    Args:
        room: for int32 [rows, 64].
        steps: float32 [rows]: what one of a row's shares stands for.
    """
    num_tiles = (num_rows + MOST_TILE_ROWS - 1) // MOST_TILE_ROWS
    for part in range(_num_parts(head_dim)):
        first = 0
        for tile in range(num_tiles):
            end, ahead = (tile + 1) * num_rows // num_tiles, 0 if tile else PLACES_BYTES
            clear_sums(room, end - first)
            of_rows = shares + first * SHARE_ROW_BYTES
            _multiply_int8_values(end - first, of_rows, head_dim, places, ahead, num_blocks, part, room)
            for row in range(first, end):
                at, by = sums + part * part_bytes + row * SUM_ROW_BYTES, spread_float(steps + 4 * row)
                for index in range(0, SUM_ROW_BYTES, REGISTER_BYTES):
                    found = load_sums(room + (row - first) * SUM_ROW_BYTES + index)
                    store_floats(at + index, multiply_add(found, by, load_floats(at + index)))
            first = end


@njit(cache=True)
def _store_int16(target, x, by):
    store_halves(target, rounded(x * by))


@njit(cache=True)
def _round_row(source, target, num_numbers):
    """Write bf16 as int16; returns what one stands for."""
    largest = zeros()
    for index in range(0, num_numbers, LANES):
        largest = larger(absolute(load_widened(source + 2 * index)), largest)
    most = larger(spread_largest(largest), spread(LEAST))
    by = spread(MOST_INT16) / most
    for index in range(0, num_numbers, LANES):
        _store_int16(target + 2 * index, load_widened(source + 2 * index), by)
    return first_lane(most) / MOST_INT16


@njit(cache=True)
def _store_float(at, value):
    carray(pointer(at), 1, np.float32)[0] = value


@njit(cache=True)
def _copy_query(source, query, place, shape, is_int8):
    """A token's heads beside the other tokens'.

    Args:
        source: bf16 [per_kv, head_dim].
        query: of the KV head, see _query_bytes.
        place: (the token, of how many); shape: (per_kv, head_dim).
    """
    (token, num_tokens), (per_kv, head_dim) = place, shape
    width, steps = 2 * head_dim, query + num_tokens * per_kv * 2 * head_dim
    for row in range(token * per_kv, (token + 1) * per_kv):
        if is_int8:
            _store_float(steps + 4 * row, _round_row(source, query + row * width, head_dim))
        else:
            for at in range(0, width, REGISTER_BYTES):
                store_pairs(query + row * width + at, load_pairs(source + at))
        source += width


@njit(cache=True)
def _scale_scores(scores, num_rows, steps, scales):
    """Turn int32 into float32. steps: float32 [rows]: what one of a row's query stands for; scales: of the keys."""
    for row in range(num_rows):
        by = spread_float(steps + 4 * row)
        for column in range(0, SUM_ROW_BYTES, REGISTER_BYTES):
            at = scores + row * SUM_ROW_BYTES + column
            store_floats(at, load_sums(at) * (load_floats(scales + column) * by))


@njit(cache=True)
def _raise_top(scores, scale, first, end, top):
    """Raise one row's largest score to that of a chunk, if larger; returns the factor for the earlier sums.

    Args:
        scores: float32 [64], unscaled; those outside first..end are not seen.
        top: see _share.
    """
    s0, s1 = load_floats(scores), load_floats(scores + REGISTER_BYTES)
    s2, s3 = load_floats(scores + 2 * REGISTER_BYTES), load_floats(scores + 3 * REGISTER_BYTES)
    if first > 0 or end < CHUNK_TOKENS:
        s0, s1 = hide_outside(s0, first, end), hide_outside(s1, first - LANES, end - LANES)
        s2 = hide_outside(s2, first - 2 * LANES, end - 2 * LANES)
        s3 = hide_outside(s3, first - 3 * LANES, end - 3 * LANES)
    before = load_floats(top)
    now = larger(spread_largest(larger(larger(s0, s1), larger(s2, s3))) * spread(scale), before)
    factor = spread(ONE)
    if first_lane(now) > first_lane(before):
        factor = exp2_to_126(before - now)
        store_floats(top, now)
        share_sum = top + REGISTER_BYTES
        store_floats(share_sum, load_floats(share_sum) * factor)
    return factor


@njit(cache=True)
def _share_row(scores, scale, first, end, top, shares, value_scales, step):
    """One row's scores to exp2(score * scale - largest), as bf16; zero outside first..end.

    Args:
        value_scales: address of float32 [64], which the shares that are stored are multiplied by, as int16; 0: they are
            stored as they are.
        step: address of what one of these integers stands for, written.
    """
    by, now = spread(scale), load_floats(top)
    s0 = exp2_to_126(multiply_subtract(load_floats(scores), by, now))
    s1 = exp2_to_126(multiply_subtract(load_floats(scores + REGISTER_BYTES), by, now))
    s2 = exp2_to_126(multiply_subtract(load_floats(scores + 2 * REGISTER_BYTES), by, now))
    s3 = exp2_to_126(multiply_subtract(load_floats(scores + 3 * REGISTER_BYTES), by, now))
    if first > 0 or end < CHUNK_TOKENS:
        s0, s1 = clear_outside(s0, first, end), clear_outside(s1, first - LANES, end - LANES)
        s2 = clear_outside(s2, first - 2 * LANES, end - 2 * LANES)
        s3 = clear_outside(s3, first - 3 * LANES, end - 3 * LANES)
    share_sum = top + REGISTER_BYTES
    store_floats(share_sum, load_floats(share_sum) + ((s0 + s1) + (s2 + s3)))
    if value_scales:
        s0, s1 = s0 * load_floats(value_scales), s1 * load_floats(value_scales + REGISTER_BYTES)
        s2 = s2 * load_floats(value_scales + 2 * REGISTER_BYTES)
        s3 = s3 * load_floats(value_scales + 3 * REGISTER_BYTES)
        most = larger(spread_largest(larger(larger(s0, s1), larger(s2, s3))), spread(LEAST))
        by = spread(MOST_INT16) / most
        _store_int16(shares, s0, by)
        _store_int16(shares + 2 * LANES, s1, by)
        _store_int16(shares + 4 * LANES, s2, by)
        _store_int16(shares + 6 * LANES, s3, by)
        _store_float(step, first_lane(most) / MOST_INT16)
        return
    store_rounded(shares, s0)
    store_rounded(shares + 2 * LANES, s1)
    store_rounded(shares + 4 * LANES, s2)
    store_rounded(shares + 6 * LANES, s3)


@njit(cache=True)
def _rescale(sums, num_parts, part_bytes, factor):
    for part in range(num_parts):
        for index in range(0, SUM_ROW_BYTES, REGISTER_BYTES):
            at = sums + part * part_bytes + index
            store_floats(at, load_floats(at) * factor)


@njit(cache=True)
def _share(scores, shares, sums, tops, scale, place, shape, window, sizes, value_scales):
    """Turn all rows' scores into shares, and rescale the earlier sums.

    First all the largest scores, then all the shares: one row's operations wait for each other, several rows' overlap.

    Args:
        tops: float32 [rows, 2, 16]: the largest scaled score so far, in every lane; sums of shares, lane by lane.
        place, shape: see _attend_chunk.
        sizes: (parts, bytes of all rows' sums of one part).
        value_scales: see _share_row; behind them the rows' steps.
    """
    num_tokens, per_kv, _ = shape
    num_parts, part_bytes = sizes
    num_rows = num_tokens * per_kv
    seen = place[1] + 1 - place[0]  # of the chunk, by the first token
    for row in range(num_rows):
        of_row = seen + row // per_kv
        if of_row > 0 and of_row - window < CHUNK_TOKENS:
            top = tops + row * TOP_ROW_BYTES
            factor = _raise_top(scores + row * SUM_ROW_BYTES, scale, of_row - window, of_row, top)
            if first_lane(factor) != ONE:
                _rescale(sums + row * SUM_ROW_BYTES, num_parts, part_bytes, factor)
    for row in range(num_rows):
        of_row, target = seen + row // per_kv, shares + row * SHARE_ROW_BYTES
        step = value_scales + SUM_ROW_BYTES + 4 * row
        if of_row <= 0 or of_row - window >= CHUNK_TOKENS:  # it sees nothing here
            _clear(target, SHARE_ROW_BYTES)
            if value_scales:
                _store_float(step, np.float32(0))
            continue
        source, top = scores + row * SUM_ROW_BYTES, tops + row * TOP_ROW_BYTES
        _share_row(source, scale, of_row - window, of_row, top, target, value_scales, step)


@njit(cache=True)
def _clear_tops(tops, num_rows):
    for row in range(num_rows):
        store_floats(tops + row * TOP_ROW_BYTES, spread(MINUS_INFINITY))
        store_floats(tops + row * TOP_ROW_BYTES + REGISTER_BYTES, zeros())


@njit(cache=True)
def _merge(sums, tops, other_sums, other_tops, num_rows, head_dim):
    """Add the sums and tops of the same rows over other chunks to these."""
    num_parts, part_bytes = _num_parts(head_dim), num_rows * SUM_ROW_BYTES
    for row in range(num_rows):
        top, other = tops + row * TOP_ROW_BYTES, other_tops + row * TOP_ROW_BYTES
        before, came = load_floats(top), load_floats(other)
        now = larger(before, came)
        of_these, of_others = exp2_to_126(before - now), exp2_to_126(came - now)
        store_floats(top, now)
        _add_scaled(top + REGISTER_BYTES, of_these, other + REGISTER_BYTES, of_others)
        for part in range(num_parts):
            at = part * part_bytes + row * SUM_ROW_BYTES
            for index in range(at, at + SUM_ROW_BYTES, REGISTER_BYTES):
                _add_scaled(sums + index, of_these, other_sums + index, of_others)


@njit(cache=True)
def _add_scaled(target, of_target, source, of_source):
    store_floats(target, load_floats(target) * of_target + load_floats(source) * of_source)


@njit(cache=True)
def _write(sums, tops, num_tokens, per_kv, head_dim, out, out_stride):
    """Divide the sums by the sums of shares, and round. out: of this KV head's first query head."""
    part_bytes = num_tokens * per_kv * SUM_ROW_BYTES
    for row in range(num_tokens * per_kv):
        by = spread(ONE / total(load_floats(tops + row * TOP_ROW_BYTES + REGISTER_BYTES)))
        target = out + row // per_kv * out_stride + row % per_kv * 2 * head_dim
        for index in range(0, head_dim, LANES):
            source = sums + index // BLOCK_OUTPUTS * part_bytes + row * SUM_ROW_BYTES + 4 * (index % BLOCK_OUTPUTS)
            store_rounded(target + 2 * index, load_floats(source) * by)


@njit(cache=True)
def _attend_chunk(query, keys, values, strides, chunk, following, place, shape, window, scale, room, sums, tops):
    """Add a chunk's tokens to the sums of some rows of one KV head.

    What is computed next is prefetched line by line as this is multiplied: all at once would stall it.

    Args:
        query: bf16 [tokens * per_kv, head_dim]; see _query_bytes.
        keys, values: of this KV head in the cache's first block; strides: see _attend_span.
        chunk: (address of the chunk's part of the block table: int64 each; how many blocks).
        following: (keys, values, chunk) of what is computed next.
        place: positions of the chunk's first token and of the rows' first token.
        shape: (tokens, per_kv, head_dim)
        room: addresses of _chunk_room's parts.
        sums: float32 [parts, rows, 64]; tops: see _share.
    """
    num_tokens, per_kv, head_dim = shape
    of_keys, scores, shares, scales = room
    step, head_bytes = strides
    num_rows, num_blocks = num_tokens * per_kv, chunk[1]
    is_int8, of_values, value_scales = head_bytes != 2 * BLOCK_SIZE * head_dim, of_keys + 2 * PLACES_BYTES, 0
    _set_places(of_keys, keys, step, chunk, following[0], following[2])
    _set_places(of_values, values, step, chunk, following[1], following[2])
    _score(query, of_keys, head_dim, num_rows, is_int8, scores)
    if is_int8:
        value_scales = scales + SUM_ROW_BYTES
        _load_scales(of_keys, num_blocks, head_dim, scales)
        _load_scales(of_values, num_blocks, head_dim, value_scales)
        _scale_scores(scores, num_rows, query + num_rows * 2 * head_dim, scales)
    num_parts, part_bytes = _num_parts(head_dim), num_rows * SUM_ROW_BYTES
    _share(scores, shares, sums, tops, scale, place, shape, window, (num_parts, part_bytes), value_scales)
    if is_int8:
        steps = value_scales + SUM_ROW_BYTES
        _add_int8_values(shares, of_values, num_blocks, head_dim, num_rows, sums, part_bytes, scores, steps)
    else:
        _add_values(shares, of_values, num_blocks, head_dim, num_rows, sums, part_bytes)


@njit(cache=True)
def _head_bytes(num_rows, head_dim):
    """Of one KV head's result: sums, then tops, as of _attend_chunk."""
    return _sums_bytes(head_dim, num_rows) + num_rows * TOP_ROW_BYTES


@njit(cache=True)
def _attend_span(query, keys, values, strides, table, seen, end_block, shape, position, window, scale, room, found):
    """Some tokens' heads of some KV heads over some of the context, chunk by chunk.

    Args:
        query: of each KV head, see _query_bytes.
        keys, values: of the first of these KV heads in the cache's first block.
        strides: bytes from block to block, and from head to head.
        table: int64 [blocks]; seen: first and end of the positions.
        end_block: up to which blocks are prefetched.
        shape: (KV heads, tokens, per_kv, head_dim)
        position: of the first of the tokens.
        room: see _attend_chunk; found: _head_bytes for each KV head, written.
    """
    num_heads, num_tokens, per_kv, head_dim = shape
    num_rows = num_tokens * per_kv
    of_sums, of_head = _sums_bytes(head_dim, num_rows), _head_bytes(num_rows, head_dim)
    for head in range(num_heads):
        clear_sums(found + head * of_head, num_rows * _num_parts(head_dim))
        _clear_tops(found + head * of_head + of_sums, num_rows)
    for chunk in range(seen[0] // CHUNK_TOKENS * CHUNK_TOKENS, seen[1], CHUNK_TOKENS):
        blocks, num_left = table + 8 * (chunk // BLOCK_SIZE), end_block - chunk // BLOCK_SIZE
        num_blocks = min(CHUNK_BLOCKS, num_left)
        for head in range(num_heads):
            at = head * strides[1]
            num_next = max(0, min(CHUNK_BLOCKS, num_left - CHUNK_BLOCKS))
            following = keys, values, (blocks + 8 * CHUNK_BLOCKS, num_next)
            if head + 1 < num_heads:
                following = keys + at + strides[1], values + at + strides[1], (blocks, num_blocks)
            _attend_chunk(
                query + head * _query_bytes(head_dim, num_rows),
                keys + at,
                values + at,
                strides,
                (blocks, num_blocks),
                following,
                (chunk, position),
                (num_tokens, per_kv, head_dim),
                window,
                scale,
                room,
                found + head * of_head,
                found + head * of_head + of_sums,
            )


@njit(cache=True)
def _merge_heads(found, other, num_heads, num_rows, head_dim):
    of_sums, of_head = _sums_bytes(head_dim, num_rows), _head_bytes(num_rows, head_dim)
    for at in range(0, num_heads * of_head, of_head):
        _merge(found + at, found + at + of_sums, other + at, other + at + of_sums, num_rows, head_dim)


# What a thread computes at a time; int64 each.
PIECE = np.dtype(
    [
        (name, np.int64)
        for name in (
            "row",  # of the block tables
            "token",  # the first, among the batch's
            "num_tokens",
            "position",  # of the first token
            "head",  # the first KV head
            "num_heads",
            "split_tokens",  # of context: a split's; NO_SPLIT: all is one
            "unit",  # the split, among all rows'; pieces of several splits: any
            "first_unit",  # of the row's
            "num_units",  # splits of the row that are pieces of their own; 1: this piece is all of them
        )
    ]
)


class Arguments(ctypes.Structure):
    """Of attend_pieces. Addresses are of first elements."""

    _fields_ = (
        *integers(
            "next_piece",  # 0
            "pieces",  # PIECE [num_pieces], the longest first
            "num_pieces",
            "query",  # bf16 [tokens, heads, head_dim]
            "query_stride",  # bytes from token to token
            "keys",  # see BlockwiseKV
            "values",
            "head_bytes",  # from head to head
            "tables",  # int64 [rows, table_width]
            "table_width",
            "window",  # the latest tokens that a token sees, itself among them
            "out",  # bf16 [tokens, heads * head_dim]
            "num_kv_heads",
            "per_kv",
            "head_dim",
            "most_rows",  # query heads of one KV head in a piece
            "most_heads",  # KV heads of a piece
            "found",  # [units, kv_heads] x _head_bytes of one token, where splits are pieces
            "counts",  # int64 [units, kv_heads], there: how many of a row's splits have ended, 0 at first and at last
        ),
        ("scale", ctypes.c_float),  # of scores, log2(e) included
    )


_ARGUMENTS = np.dtype(Arguments)


@kernel()
def attend_pieces(arguments):
    """Take pieces until none is left: any number of threads at once. arguments: the address of Arguments."""
    args = carray(pointer(arguments), 1, _ARGUMENTS)[0]
    pieces = carray(pointer(args.pieces), args.num_pieces, PIECE)
    num_kv_heads, per_kv, head_dim, window = args.num_kv_heads, args.per_kv, args.head_dim, args.window
    head_bytes, width = args.head_bytes, 2 * per_kv * head_dim
    sizes, is_int8 = _chunk_room(args.most_rows), head_bytes != 2 * BLOCK_SIZE * head_dim
    query_bytes = args.most_heads * _query_bytes(head_dim, args.most_rows)
    found_bytes = args.most_heads * _head_bytes(args.most_rows, head_dim)
    size = query_bytes + sizes[0] + sizes[1] + sizes[2] + sizes[3] + 2 * found_bytes
    memory = np.empty(size + 2 * REGISTER_BYTES, dtype=np.uint8)
    query = (memory.ctypes.data + REGISTER_BYTES - 1) // REGISTER_BYTES * REGISTER_BYTES
    places = query + query_bytes
    scores = places + sizes[0]
    shares = scores + sizes[1]
    scales = shares + sizes[2]
    of_piece = (scales + sizes[3] + REGISTER_BYTES - 1) // REGISTER_BYTES * REGISTER_BYTES
    of_split = of_piece + found_bytes
    index = take_next(arguments)
    while index < args.num_pieces:
        piece = pieces[index]
        head, num_heads, num_tokens, position = piece.head, piece.num_heads, piece.num_tokens, piece.position
        num_rows, token_query = num_tokens * per_kv, args.query + piece.token * args.query_stride + head * width
        for each in range(num_heads):
            for token in range(num_tokens):
                source = token_query + token * args.query_stride + each * width
                target = query + each * _query_bytes(head_dim, num_rows)
                _copy_query(source, target, (token, num_tokens), (per_kv, head_dim), is_int8)
        first, end = max(0, position + 1 - window), position + num_tokens
        split, end_split = first // piece.split_tokens, (end - 1) // piece.split_tokens + 1
        of_head = _head_bytes(num_rows, head_dim)
        found, unit_bytes = of_piece, num_kv_heads * of_head
        if piece.num_units > 1:
            split += piece.unit - piece.first_unit
            end_split = split + 1
            found = args.found + piece.unit * unit_bytes + head * of_head
        for number in range(split, end_split):
            span_end = min(end, (number + 1) * piece.split_tokens)
            _attend_span(
                query,
                args.keys + head * head_bytes,
                args.values + head * head_bytes,
                (num_kv_heads * head_bytes, head_bytes),
                args.tables + 8 * piece.row * args.table_width,
                (max(first, number * piece.split_tokens), span_end),
                ((span_end if piece.num_units > 1 else end) + BLOCK_SIZE - 1) // BLOCK_SIZE,
                (num_heads, num_tokens, per_kv, head_dim),
                position,
                window,
                args.scale,
                (places, scores, shares, scales),
                found if number == split else of_split,
            )
            if number > split:
                _merge_heads(found, of_split, num_heads, num_rows, head_dim)
        is_done = True
        if piece.num_units > 1:
            count = take_next(args.counts + 8 * (piece.first_unit * num_kv_heads + head))
            is_done = count == piece.num_units - 1
            if is_done:
                counts = carray(pointer(args.counts), (piece.first_unit + 1, num_kv_heads), np.int64)
                counts[piece.first_unit, head] = 0  # as the next layer finds it
                found = args.found + piece.first_unit * unit_bytes + head * of_head
                for number in range(1, piece.num_units):
                    _merge_heads(found, found + number * unit_bytes, num_heads, num_rows, head_dim)
        if is_done:
            out = args.out + (piece.token * num_kv_heads + head) * width
            for each in range(num_heads):
                at = found + each * of_head
                tops = at + _sums_bytes(head_dim, num_rows)
                _write(at, tops, num_tokens, per_kv, head_dim, out + each * width, num_kv_heads * width)
        index = take_next(arguments)
    keep(memory)


class PagedAttention:
    """AttentionKernels with as many threads as torch has."""

    index_dtype = torch.int64
    are_own_tokens_alone = True
    prompt_tile = 1  # it computes the new tokens alone

    def __init__(self) -> None:
        self._kernel = Kernel(attend_pieces)

    def reserve(self, num_decodes: int, context: int, num_heads: int, kv: LayerKV) -> None:
        """See AttentionKernels: a step's room is its own."""

    def attend(self, query: Tensor, kv: LayerKV, rows: RaggedRows, scores: Scores) -> Tensor:
        """See AttentionKernels. query: bf16; a token's heads lie together. scores: are plain."""
        num_tokens, num_heads, head_dim = query.shape
        num_kv_heads = kv.keys.shape[1]
        out = query.new_empty((num_tokens, num_heads * head_dim))
        arguments = Arguments(
            query=query.data_ptr(),
            query_stride=query.stride(0) * query.element_size(),
            keys=kv.keys.data_ptr(),
            values=kv.values.data_ptr(),
            head_bytes=kv.keys.stride(1) * kv.keys.element_size(),
            window=NO_WINDOW if rows.window is None else rows.window,
            out=out.data_ptr(),
            num_kv_heads=num_kv_heads,
            per_kv=num_heads // num_kv_heads,
            head_dim=head_dim,
            scale=(head_dim**-0.5 if scores.scale is None else scores.scale) * LOG2_E,
            **self.aim(rows, (num_kv_heads, num_heads // num_kv_heads, head_dim)),
        )
        self._kernel(arguments, torch.get_num_threads())
        return out

    def aim(self, rows: RaggedRows, shape: tuple[int, int, int]) -> dict[str, int]:
        """Arguments that say what rows see, alike in layers that see as far. shape: KV heads, per_kv, head_dim."""
        pieces = rows.layout
        if not isinstance(pieces, Pieces):
            pieces = rows.layout = divide(rows, *shape, torch.get_num_threads())
        found = dict(zip(("pieces", "found", "counts"), pieces.places, strict=True))
        found |= {"num_pieces": len(pieces.table), "most_heads": pieces.most_heads}
        found |= {"tables": rows.tables.data_ptr(), "table_width": rows.tables.stride(0)}
        return found | {"most_rows": pieces.most_tokens * shape[1]}


@dataclass(frozen=True, slots=True, eq=False)
class Pieces:
    """What threads take at a time; the same in all layers of a step that see as far.

    Args:
        table: PIECE [pieces].
        found: bytes: the results of splits that are pieces, until they are merged.
        counts: int64 [splits, KV heads]: how many have ended; zeros before and after each use.
    """

    table: npt.NDArray[np.void]
    most_tokens: int
    most_heads: int
    found: npt.NDArray[np.uint8]
    counts: npt.NDArray[np.int64]
    places: tuple[int, int, int]  # addresses of these three


def divide(rows: RaggedRows, num_kv_heads: int, per_kv: int, head_dim: int, num_threads: int) -> Pieces:
    """Prompts in tiles, their last ones first; then decodes, whole or in splits."""
    ends, offsets, num_decodes = rows.ends.tolist(), rows.offsets.tolist(), rows.num_decodes
    pieces: list[tuple[int, ...]] = []
    tile_tokens = max(1, PROMPT_ROWS // per_kv)
    for row in range(num_decodes, len(ends)):
        num_new = offsets[row + 1] - offsets[row]
        for first in reversed(range(0, num_new, tile_tokens)):
            token, position, num_tokens = offsets[row] + first, ends[row] - num_new + first, num_new - first
            tile = (row, token, min(tile_tokens, num_tokens), position)
            pieces += [(*tile, head, 1, NO_SPLIT, 0, 0, 1) for head in range(num_kv_heads)]
    num_heads, num_splits = divide_decodes(ends[:num_decodes], rows.window, num_kv_heads, head_dim, num_threads)
    first_unit = 0
    for row, count in enumerate(num_splits):
        tile = (row, row, 1, ends[row] - 1)
        pieces += [
            (*tile, head, num_heads, SPLIT_TOKENS, unit, first_unit, count)
            for unit in range(first_unit, first_unit + count)
            for head in range(0, num_kv_heads, num_heads)
        ]
        first_unit += count
    num_units = first_unit if first_unit > num_decodes else 0
    most_tokens = max((piece[2] for piece in pieces), default=1)
    table, found = np.array(pieces, PIECE), np.empty(num_units * num_kv_heads * _head_bytes(per_kv, head_dim), np.uint8)
    counts = np.zeros((num_units, num_kv_heads), np.int64)
    places = table.ctypes.data, found.ctypes.data, counts.ctypes.data
    return Pieces(table, most_tokens, num_heads, found, counts, places)


def divide_decodes(
    ends: list[int], window: int | None, num_kv_heads: int, head_dim: int, num_threads: int
) -> tuple[int, list[int]]:
    """(KV heads of a piece, a divisor of theirs; into how many pieces each row's context is cut).

    Rows are whole where the longest is a small part of a thread's share. KV heads: as many as PIECE_BYTES hold, unless
    few pieces would not divide evenly among the threads.
    """
    lengths = [end if window is None else min(end, window) for end in ends]
    longest, num_tokens, num_splits = max(lengths, default=0), sum(lengths), [1] * len(ends)
    is_even = num_threads == 1 or longest * len(lengths) <= EVEN * num_tokens
    if num_threads > 1 and longest * num_threads * ROWS_PER_THREAD > num_tokens and max(ends) > SPLIT_TOKENS:
        num_splits, is_even = (
            [
                -(-end // SPLIT_TOKENS) - (end - length) // SPLIT_TOKENS
                for end, length in zip(ends, lengths, strict=True)
            ],
            False,
        )

    def suits(num_heads: int) -> bool:
        num_pieces = sum(num_splits) * num_kv_heads // num_heads
        divides = num_pieces >= ROWS_PER_THREAD * num_threads or (is_even and num_pieces % num_threads == 0)
        return divides and num_kv_heads % num_heads == 0

    most = min(num_kv_heads, PIECE_BYTES // (2 * head_dim))
    return next((count for count in range(most, 1, -1) if suits(count)), 1), num_splits
