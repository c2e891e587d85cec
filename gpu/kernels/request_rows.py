"""Rows of tables on the device, by the slots of requests: @triton.jit. Thread: engine.

A table is [slots, width] of any numbers; a batch is some of its slots, in an order of its own.
"""

import triton
import triton.language as tl


@triton.jit
def embed(
    token_ids,  # [tokens], integers; < 0: the one that the token's slot drew last
    slots,  # [tokens], integers; read where HAS_LAST
    last_tokens,  # [slots], integers; read where HAS_LAST
    table,  # [vocab, width]
    out,  # [tokens, width]
    width,
    HAS_LAST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Rows of the embedding. Program: a token, and BLOCK of its columns."""
    token = tl.program_id(0).to(tl.int64)
    token_id = tl.load(token_ids + token).to(tl.int64)
    if HAS_LAST:
        if token_id < 0:
            token_id = tl.load(last_tokens + tl.load(slots + token)).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_inside = columns < width
    tl.store(out + token * width + columns, tl.load(table + token_id * width + columns, mask=is_inside), mask=is_inside)


@triton.jit
def gather(table, slots, out, width, BLOCK: tl.constexpr):
    """out[i] = table[slots[i]]. Program: a row of out, and BLOCK of its columns."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_inside = columns < width
    source = tl.load(slots + row).to(tl.int64) * width
    tl.store(out + row * width + columns, tl.load(table + source + columns, mask=is_inside), mask=is_inside)


@triton.jit
def scatter(table, slots, rows, width, BLOCK: tl.constexpr):
    """table[slots[i]] = rows[i]; a slot < 0 is left out, and no slot comes twice. Program: as gather's."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slots + row).to(tl.int64)
    if slot >= 0:
        is_inside = columns < width
        found = tl.load(rows + row * width + columns, mask=is_inside)
        tl.store(table + slot * width + columns, found, mask=is_inside)
