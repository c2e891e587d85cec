"""Products with a layer's matrices, plain and quantised, of one matrix or of one per expert: @triton.jit.

Thread: engine. A weight is [out, in] as it lies in memory; rows come in tiles of BLOCK_M, outputs of BLOCK_N, and
inputs are added BLOCK_K at a time, in order, in float32. A product may be cut along its inputs into parts, which
another kernel adds up in order: nothing is added atomically, and a row's sums are the same in any company that has the
same tiles.
"""

import triton
import triton.language as tl

PLAIN = tl.constexpr(0)  # weights of the rows' format
SCALED = tl.constexpr(1)  # integers or floats of 8 bits, and a scale per output
INT4 = tl.constexpr(2)  # see gpu/quantize.py: a scale and a zero per group of inputs
MIDDLE_INT4 = tl.constexpr(8)
ROW_GROUP = tl.constexpr(8)  # tiles of rows whose programs run side by side: they share the weights they read


@triton.jit
def _plain_part(x, rows, is_row, weights, outputs, first, end, num_in, BLOCK_M, BLOCK_N, BLOCK_K, IS_WHOLE, PRECISION):
    """float32 [BLOCK_M, BLOCK_N]: x's rows times outputs' weights, over inputs first to end.

    Args:
        rows, outputs: int64, where they begin.
        IS_WHOLE: num_in is a multiple of BLOCK_K.
    """
    total = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for start in range(first, end, BLOCK_K):
        inputs = start + tl.arange(0, BLOCK_K)
        if IS_WHOLE:
            left = tl.load(x + rows[:, None] + inputs[None, :], mask=is_row[:, None], other=0.0)
            right = tl.load(weights + outputs[:, None] + inputs[None, :])
        else:
            is_input = inputs < num_in
            left = tl.load(x + rows[:, None] + inputs[None, :], mask=is_row[:, None] & is_input[None, :], other=0.0)
            right = tl.load(weights + outputs[:, None] + inputs[None, :], mask=is_input[None, :], other=0.0)
        total = tl.dot(left, tl.trans(right.to(left.dtype)), total, input_precision=PRECISION)
    return total


@triton.jit
def _int4_part(
    x,
    rows,
    is_row,
    weights,
    scales,
    zeros,
    outputs,
    groups,
    first,
    end,
    BLOCK_M,
    BLOCK_N,
    BLOCK_K,
    GROUP,
    PRECISION,
):
    """As _plain_part. A row of weights is [num_in / 2] bytes, the even input low; groups are whole blocks of inputs.

    The integers are multiplied as they are, exact in any format; scale and zero come in once a block.

    Args:
        outputs, groups: int64, where an output's bytes and its scales begin.
    """
    total = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for start in range(first, end, BLOCK_K):
        pairs = tl.multiple_of(start // 2, BLOCK_K // 2) + tl.arange(0, BLOCK_K // 2)
        packed = tl.load(weights + outputs[:, None] + pairs[None, :])
        inputs = start + tl.arange(0, BLOCK_K)
        left = tl.load(x + rows[:, None] + inputs[None, :], mask=is_row[:, None], other=0.0)
        even, odd = tl.split(tl.reshape(left, [BLOCK_M, BLOCK_K // 2, 2]))
        low = ((packed & 15).to(tl.int8) - MIDDLE_INT4).to(even.dtype)
        high = ((packed >> 4).to(tl.int8) - MIDDLE_INT4).to(even.dtype)
        part = tl.dot(even, tl.trans(low), input_precision=PRECISION)
        part = tl.dot(odd, tl.trans(high), part, input_precision=PRECISION)
        group = groups + start // GROUP
        sums = tl.sum(left.to(tl.float32), 1)
        total += part * tl.load(scales + group).to(tl.float32)[None, :]
        total += sums[:, None] * tl.load(zeros + group).to(tl.float32)[None, :]
    return total


@triton.jit
def _part(
    x,
    rows,
    is_row,
    weights,
    scales,
    zeros,
    first_output,  # of the matrix, among all that lie behind each other
    outputs,
    first,
    end,
    num_in,
    row_stride,
    FORM,
    BLOCK_M,
    BLOCK_N,
    BLOCK_K,
    GROUP,
    IS_WHOLE,
    PRECISION,
):
    places = first_output + outputs  # int64
    if FORM == INT4:
        total = _int4_part(
            x,
            rows,
            is_row,
            weights,
            scales,
            zeros,
            places * row_stride,
            places * (num_in // GROUP),
            first,
            end,
            BLOCK_M,
            BLOCK_N,
            BLOCK_K,
            GROUP,
            PRECISION,
        )
    else:
        total = _plain_part(
            x,
            rows,
            is_row,
            weights,
            places * row_stride,
            first,
            end,
            num_in,
            BLOCK_M,
            BLOCK_N,
            BLOCK_K,
            IS_WHOLE,
            PRECISION,
        )
        if FORM == SCALED:
            total *= tl.load(scales + places).to(tl.float32)[None, :]
    return total


@triton.jit(do_not_specialize=["num_rows"])
def multiply(
    x,  # [rows, in], rows x_stride apart
    weights,  # [out, in], or as FORM says
    scales,
    zeros,
    bias,  # [out]; read where HAS_BIAS
    out,  # [rows, out]; SPLITS > 1: float32 [SPLITS, rows, out], without the bias
    num_rows,
    num_out,
    num_in,
    row_stride,  # of the weights, in what they are stored as
    x_stride,
    split_inputs,  # of a part: a multiple of BLOCK_K
    FORM: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SPLITS: tl.constexpr,
    GROUP: tl.constexpr,  # inputs that share a scale: INT4
    IS_WHOLE: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """x times the weights, transposed. Programs: a tile of rows and outputs; parts of the inputs."""
    num_row_tiles = tl.cdiv(num_rows, BLOCK_M)
    num_output_tiles = tl.cdiv(num_out, BLOCK_N)
    program = tl.program_id(0)
    group_programs = ROW_GROUP * num_output_tiles
    first_tile = program // group_programs * ROW_GROUP
    group_tiles = tl.minimum(num_row_tiles - first_tile, ROW_GROUP)
    row_tile = first_tile + program % group_programs % group_tiles
    output_tile = program % group_programs // group_tiles
    rows = (row_tile * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    outputs = output_tile * BLOCK_N + tl.arange(0, BLOCK_N)
    is_row, is_output = rows < num_rows, outputs < num_out
    split = tl.program_id(1)
    first = split * split_inputs
    total = _part(
        x,
        rows * x_stride,
        is_row,
        weights,
        scales,
        zeros,
        0,
        tl.where(is_output, outputs, 0).to(tl.int64),  # what is beyond reads the first, and is not written
        first,
        tl.minimum(first + split_inputs, num_in),
        num_in,
        row_stride,
        FORM,
        BLOCK_M,
        BLOCK_N,
        BLOCK_K,
        GROUP,
        IS_WHOLE,
        PRECISION,
    )
    if HAS_BIAS:
        if SPLITS == 1:
            total += tl.load(bias + outputs, mask=is_output, other=0.0).to(tl.float32)[None, :]
    places = (split * num_rows + rows[:, None]) * num_out + outputs[None, :]
    tl.store(out + places, total.to(out.dtype.element_ty), mask=is_row[:, None] & is_output[None, :])


@triton.jit(do_not_specialize=["num_rows"])
def add_splits(
    parts,  # float32 [SPLITS, rows, out]
    bias,
    out,  # [rows, out]
    num_rows,
    num_out,
    HAS_BIAS: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The parts of a product, in order, and the bias. Program: a row, and BLOCK of its outputs."""
    row = tl.program_id(0).to(tl.int64)
    outputs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_output = outputs < num_out
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for split in tl.static_range(SPLITS):
        total += tl.load(parts + (split * num_rows + row) * num_out + outputs, mask=is_output, other=0.0)
    if HAS_BIAS:
        total += tl.load(bias + outputs, mask=is_output, other=0.0).to(tl.float32)
    tl.store(out + row * num_out + outputs, total.to(out.dtype.element_ty), mask=is_output)


@triton.jit(do_not_specialize=["num_pairs"])
def multiply_by_expert(
    x,  # [pairs / SHARE, in]
    weights,  # [experts, out, in], or as FORM says
    scales,
    zeros,
    bias,  # [experts, out]; read where HAS_BIAS
    out,  # [pairs, out]
    pairs,  # int64 [pairs]: by expert
    ends,  # int64 [experts]: where each expert's end among them
    num_out,
    num_in,
    row_stride,  # of the weights, in what they are stored as
    num_experts,
    SHARE: tl.constexpr,  # pairs that have a row of x in common, behind each other
    FORM: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    GROUP: tl.constexpr,
    IS_WHOLE: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_E: tl.constexpr,  # >= num_experts
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Each pair of a token and an expert: the token's row times the expert's weights, transposed.

    Programs: a tile of outputs; a tile of one expert's pairs, the experts behind each other. There may be more programs
    than tiles.
    """
    experts = tl.arange(0, BLOCK_E)
    expert_ends = tl.load(ends + experts, mask=experts < num_experts, other=0)
    expert_starts = tl.load(ends + experts - 1, mask=(experts > 0) & (experts < num_experts), other=0)
    num_tiles = tl.where(experts < num_experts, tl.cdiv(expert_ends - expert_starts, BLOCK_M), 0)
    tile_ends = tl.cumsum(num_tiles, 0)
    tile = tl.program_id(1)
    if tile < tl.sum(num_tiles, 0):
        expert = tl.sum((tile_ends <= tile).to(tl.int64), 0)
        tiles_before = tl.sum(tl.where(experts < expert, num_tiles, 0), 0)
        end = tl.load(ends + expert)
        start = tl.load(ends + expert - 1, mask=expert > 0, other=0)
        places = start + (tile - tiles_before) * BLOCK_M + tl.arange(0, BLOCK_M)
        is_row = places < end
        pair = tl.load(pairs + places, mask=is_row, other=0)
        outputs = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
        is_output = outputs < num_out
        total = _part(
            x,
            pair // SHARE * num_in,
            is_row,
            weights,
            scales,
            zeros,
            expert * num_out,
            tl.where(is_output, outputs, 0).to(tl.int64),
            0,
            num_in,
            num_in,
            row_stride,
            FORM,
            BLOCK_M,
            BLOCK_N,
            BLOCK_K,
            GROUP,
            IS_WHOLE,
            PRECISION,
        )
        if HAS_BIAS:
            total += tl.load(bias + expert * num_out + outputs, mask=is_output, other=0.0).to(tl.float32)[None, :]
        places = pair[:, None] * num_out + outputs[None, :]
        tl.store(out + places, total.to(out.dtype.element_ty), mask=is_row[:, None] & is_output[None, :])


@triton.jit
def add_experts(
    found,  # [tokens, ACTIVE, width]
    shares,  # float32 [tokens, ACTIVE]
    out,  # [tokens, width]
    width,
    ACTIVE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """What a token's experts have found, by their shares, in order. Program: a token, and BLOCK of its columns."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_inside = columns < width
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for place in tl.static_range(ACTIVE):
        row = token * ACTIVE + place
        total += tl.load(shares + row) * tl.load(found + row * width + columns, mask=is_inside, other=0.0)
    tl.store(out + token * width + columns, total.to(out.dtype.element_ty), mask=is_inside)
