"""Rows of tables on the device, by the slots of requests: @triton.jit. Thread: engine.

A table is [slots, width] of any numbers; a batch is some of its slots, in an order of its own.
"""

import triton
import triton.language as tl


@triton.jit
def embed(
    token_ids,  # [tokens], integers
    table,  # [vocab, width]
    out,  # [tokens, width]
    width,
    BLOCK: tl.constexpr,
):
    """Rows of the embedding. Program: a token, and BLOCK of its columns."""
    token = tl.program_id(0).to(tl.int64)
    token_id = tl.load(token_ids + token).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_inside = columns < width
    tl.store(out + token * width + columns, tl.load(table + token_id * width + columns, mask=is_inside), mask=is_inside)


@triton.jit(do_not_specialize_on_alignment=["slots", "rows"])
def scatter(table, slots, rows, width, BLOCK: tl.constexpr):
    """table[slots[i]] = rows[i]; a slot < 0 is left out, and no slot comes twice.

    Program: a row, and BLOCK of its columns.
    """
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slots + row).to(tl.int64)
    if slot >= 0:
        is_inside = columns < width
        found = tl.load(rows + row * width + columns, mask=is_inside)
        tl.store(table + slot * width + columns, found, mask=is_inside)


@triton.jit(do_not_specialize_on_alignment=["blocks"])
def clear(
    cache,  # [parts, num_blocks, width]
    blocks,  # [some], integers
    num_blocks,
    width,
    BLOCK: tl.constexpr,
):
    """Zero some blocks of all parts. Program: a block, a part, and BLOCK of its columns there."""
    block = tl.load(blocks + tl.program_id(0)).to(tl.int64)
    columns = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    place = (tl.program_id(1).to(tl.int64) * num_blocks + block) * width
    tl.store(cache + place + columns, tl.zeros([BLOCK], cache.dtype.element_ty), mask=columns < width)


@triton.jit
def lay_out_tables(
    slots,  # int32 [rows], < 0: padding
    ends,  # int32 [rows]: one past the last new token's position; 0: padding
    tables,  # [slots, width]: blocks, from a row's first
    row_tables,  # int32 [rows, width], written: scratch_block beyond a row's end
    width,
    scratch_block,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Block tables of rows, from what stays on the device. Program: a row, and BLOCK columns of its table."""
    row = tl.program_id(0).to(tl.int64)
    table = tables + tl.maximum(tl.load(slots + row).to(tl.int64), 0) * width  # padding reads another's, and drops it
    num_used = tl.cdiv(tl.load(ends + row), BLOCK_TOKENS)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_inside = columns < width
    blocks = tl.load(table + columns, mask=is_inside, other=0)
    tl.store(row_tables + row * width + columns, tl.where(columns < num_used, blocks, scratch_block), mask=is_inside)


@triton.jit(do_not_specialize=["num_tokens"])
def lay_out_tokens(
    step,  # int32 [3, num_tokens]: of each token its slot (< 0: padding), its position, and its id, or < 0: what the
    # slot sampled last
    tables,  # [slots, width]: blocks
    last_tokens,  # int64 [slots]
    token_ids,  # int64 [num_tokens], written, as are all below
    positions,  # float32 [num_tokens]
    kv_slots,  # int64 [num_tokens]: where a token's keys and values go
    num_tokens,
    width,
    padding_block,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """What tokens read, from what stays on the device. Program: BLOCK tokens."""
    tokens = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_inside = tokens < num_tokens
    slot = tl.load(step + tokens, mask=is_inside, other=-1).to(tl.int64)
    is_real = slot >= 0
    position = tl.load(step + num_tokens + tokens, mask=is_real, other=0).to(tl.int64)
    token = tl.load(step + 2 * num_tokens + tokens, mask=is_real, other=0).to(tl.int64)
    last = tl.load(last_tokens + slot, mask=is_real & (token < 0), other=0)
    block = tl.load(tables + slot * width + position // BLOCK_TOKENS, mask=is_real, other=0).to(tl.int64)
    tl.store(token_ids + tokens, tl.where(token < 0, last, token), mask=is_inside)
    tl.store(positions + tokens, position.to(tl.float32), mask=is_inside)
    place = tl.where(is_real, block, padding_block) * BLOCK_TOKENS + position % BLOCK_TOKENS
    tl.store(kv_slots + tokens, place, mask=is_inside)
