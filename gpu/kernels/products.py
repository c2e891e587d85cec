"""Products with a layer's matrices, plain and quantised, of one matrix or of one per expert: @triton.jit.

Thread: engine. A weight is [out, in] as it lies in memory; rows come in tiles of BLOCK_M, outputs of BLOCK_N, and
inputs are added BLOCK_K at a time, in order, in float32. A product may be cut along its inputs into parts, which
another kernel adds up in order: nothing is added atomically, and a row's sums are the same in any company that has the
same tiles.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

PLAIN = tl.constexpr(0)  # weights of the rows' format
SCALED = tl.constexpr(1)  # integers or floats of 8 bits, and a scale per output
INT4 = tl.constexpr(2)  # see gpu/quantize.py: a scale and a zero per group of inputs
GROUPED = tl.constexpr(3)  # numbers of 8 bits, and a scale per group of inputs
MIDDLE_INT4 = tl.constexpr(8)
ROW_GROUP = tl.constexpr(8)  # tiles of rows whose programs run side by side: they share the weights they read


class Matrices(NamedTuple):
    """One or more, behind each other, and how they are stored and multiplied.

    Args:
        weights: [outputs of all, num_in], or as FORM says; rows row_stride apart, in what they are stored as.
        scales, zeros: of an output, or of each of its groups; read where FORM has any.
        bias: [outputs of all]; read where HAS_BIAS.
        GROUP: inputs that share a scale: INT4, GROUPED.
        IS_WHOLE: num_in is a multiple of BLOCK_K.
    """

    weights: Any
    scales: Any
    zeros: Any
    bias: Any
    num_out: Any
    num_in: Any
    row_stride: Any
    FORM: Any
    HAS_BIAS: Any
    GROUP: Any
    IS_WHOLE: Any
    PRECISION: Any


@triton.jit
def _plain_part(
    x, rows, is_row, matrices, places, first, end,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """float32 [BLOCK_M, BLOCK_N]: x's rows times outputs' weights, over inputs first to end.

    Args:
        rows: int64 [BLOCK_M], where they begin.
        places: int64 [BLOCK_N], the outputs, among those of all matrices.
    """
    outputs = places * matrices.row_stride
    total = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for start in range(first, end, BLOCK_K):
        inputs = start + tl.arange(0, BLOCK_K)
        left_places, right_places = x + rows[:, None] + inputs[None, :], outputs[:, None] + inputs[None, :]
        if matrices.IS_WHOLE:
            left = tl.load(left_places, mask=is_row[:, None], other=0.0)
            right = tl.load(matrices.weights + right_places)
        else:
            is_input = (inputs < matrices.num_in)[None, :]
            left = tl.load(left_places, mask=is_row[:, None] & is_input, other=0.0)
            right = tl.load(matrices.weights + right_places, mask=is_input, other=0.0)
        total = tl.dot(left, tl.trans(right.to(left.dtype)), total, input_precision=matrices.PRECISION)
    return total


@triton.jit
def _int4_part(
    x, rows, is_row, matrices, places, first, end,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """As _plain_part. A row of weights is [num_in / 2] bytes, the even input low; groups are whole blocks of inputs.

    The integers are multiplied as they are, exact in any format; scale and zero come in once a block.
    """
    outputs, groups = places * matrices.row_stride, places * (matrices.num_in // matrices.GROUP)
    total = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for start in range(first, end, BLOCK_K):
        pairs = tl.multiple_of(start // 2, BLOCK_K // 2) + tl.arange(0, BLOCK_K // 2)
        packed = tl.load(matrices.weights + outputs[:, None] + pairs[None, :])
        inputs = start + tl.arange(0, BLOCK_K)
        left = tl.load(x + rows[:, None] + inputs[None, :], mask=is_row[:, None], other=0.0)
        even, odd = tl.split(tl.reshape(left, [BLOCK_M, BLOCK_K // 2, 2]))
        low = ((packed & 15).to(tl.int8) - MIDDLE_INT4).to(even.dtype)
        high = ((packed >> 4).to(tl.int8) - MIDDLE_INT4).to(even.dtype)
        part = tl.dot(even, tl.trans(low), input_precision=matrices.PRECISION)
        part = tl.dot(odd, tl.trans(high), part, input_precision=matrices.PRECISION)
        group = groups + start // matrices.GROUP
        sums = tl.sum(left.to(tl.float32), 1)
        total += part * tl.load(matrices.scales + group).to(tl.float32)[None, :]
        total += sums[:, None] * tl.load(matrices.zeros + group).to(tl.float32)[None, :]
    return total


@triton.jit
def _grouped_part(
    x, rows, is_row, matrices, places, first, end,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """As _plain_part. Groups are whole blocks of inputs: their scale comes in once a block."""
    outputs, groups = places * matrices.row_stride, places * (matrices.num_in // matrices.GROUP)
    total = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for start in range(first, end, BLOCK_K):
        inputs = start + tl.arange(0, BLOCK_K)
        left = tl.load(x + rows[:, None] + inputs[None, :], mask=is_row[:, None], other=0.0)
        right = tl.load(matrices.weights + outputs[:, None] + inputs[None, :])
        part = tl.dot(left, tl.trans(right.to(left.dtype)), input_precision=matrices.PRECISION)
        scales = tl.load(matrices.scales + groups + start // matrices.GROUP)
        total += part * scales.to(tl.float32)[None, :]
    return total


@triton.jit
def _multiply_tile(
    x, rows, is_row, matrices, first_output, outputs, first, end,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """As _plain_part, with the scales of whatever form.

    Args:
        first_output: of the matrix, among those of all.
        outputs: [BLOCK_N], of the matrix: what is beyond reads the first.
    """
    places = first_output + tl.where(outputs < matrices.num_out, outputs, 0).to(tl.int64)
    if matrices.FORM == INT4:
        total = _int4_part(x, rows, is_row, matrices, places, first, end, BLOCK_M, BLOCK_N, BLOCK_K)
    elif matrices.FORM == GROUPED:
        total = _grouped_part(x, rows, is_row, matrices, places, first, end, BLOCK_M, BLOCK_N, BLOCK_K)
    else:
        total = _plain_part(x, rows, is_row, matrices, places, first, end, BLOCK_M, BLOCK_N, BLOCK_K)
        if matrices.FORM == SCALED:
            total *= tl.load(matrices.scales + places).to(tl.float32)[None, :]
    return total


@triton.jit
def _store_tile(total, out, rows, is_row, matrices, first_output, outputs, HAS_BIAS: tl.constexpr):
    """Behind out's rows, num_out apart; with the bias, or, of parts of a product, without."""
    is_output = outputs < matrices.num_out
    if HAS_BIAS:
        bias = tl.load(matrices.bias + first_output + outputs, mask=is_output, other=0.0)
        total += bias.to(tl.float32)[None, :]
    places = rows[:, None] * matrices.num_out + outputs[None, :]
    tl.store(out + places, total.to(out.dtype.element_ty), mask=is_row[:, None] & is_output[None, :])


@triton.jit
def _multiply_split(
    x, x_stride, matrices, out, num_rows, split_inputs,
    SPLITS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One program of multiply."""
    num_row_tiles = tl.cdiv(num_rows, BLOCK_M)
    num_output_tiles = tl.cdiv(matrices.num_out, BLOCK_N)
    program = tl.program_id(0)
    group_programs = ROW_GROUP * num_output_tiles
    first_tile = program // group_programs * ROW_GROUP
    group_tiles = tl.minimum(num_row_tiles - first_tile, ROW_GROUP)
    row_tile = first_tile + program % group_programs % group_tiles
    output_tile = program % group_programs // group_tiles
    rows = (row_tile * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    outputs = output_tile * BLOCK_N + tl.arange(0, BLOCK_N)
    is_row = rows < num_rows
    split = tl.program_id(1)
    first = split * split_inputs
    end = tl.minimum(first + split_inputs, matrices.num_in)
    total = _multiply_tile(
        x, rows * x_stride, is_row, matrices, 0, outputs, first, end, BLOCK_M, BLOCK_N, BLOCK_K
    )  # fmt: skip
    _store_tile(total, out, split * num_rows + rows, is_row, matrices, 0, outputs, matrices.HAS_BIAS and SPLITS == 1)


@triton.jit(do_not_specialize=["num_rows"])
def multiply(
    x,  # [rows, in], rows x_stride apart
    weights,
    scales,
    zeros,
    bias,
    out,  # [rows, out]; SPLITS > 1: float32 [SPLITS, rows, out], without the bias
    num_rows,
    num_out,
    num_in,
    row_stride,
    x_stride,
    split_inputs,  # of a part: a multiple of BLOCK_K
    FORM: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SPLITS: tl.constexpr,
    GROUP: tl.constexpr,
    IS_WHOLE: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """x times the weights, transposed. Programs: a tile of rows and outputs; parts of the inputs. See Matrices."""
    _multiply_split(
        x, x_stride,
        Matrices(
            weights, scales, zeros, bias, num_out, num_in, row_stride, FORM, HAS_BIAS, GROUP, IS_WHOLE, PRECISION
        ),
        out, num_rows, split_inputs, SPLITS, BLOCK_M, BLOCK_N, BLOCK_K,
    )  # fmt: skip


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


@triton.jit
def _multiply_pairs(
    x, matrices, out, pairs, ends, num_experts,
    SHARE: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One program of multiply_by_expert."""
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
        first_output = expert * matrices.num_out
        total = _multiply_tile(
            x, pair // SHARE * matrices.num_in, is_row, matrices, first_output, outputs, 0, matrices.num_in,
            BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip
        _store_tile(total, out, pair, is_row, matrices, first_output, outputs, matrices.HAS_BIAS)


@triton.jit(do_not_specialize=["num_pairs"])
def multiply_by_expert(
    x,  # [pairs / SHARE, in]
    weights,  # of the experts, behind each other
    scales,
    zeros,
    bias,
    out,  # [pairs, out]
    pairs,  # int64 [pairs]: by expert
    ends,  # int64 [experts]: where each expert's end among them
    num_out,
    num_in,
    row_stride,
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
    """Each pair of a token and an expert: the token's row times the expert's weights, transposed. See Matrices.

    Programs: a tile of outputs; a tile of one expert's pairs, the experts behind each other. There may be more programs
    than tiles.
    """
    _multiply_pairs(
        x,
        Matrices(
            weights, scales, zeros, bias, num_out, num_in, row_stride, FORM, HAS_BIAS, GROUP, IS_WHOLE, PRECISION
        ),
        out, pairs, ends, num_experts, SHARE, BLOCK_E, BLOCK_M, BLOCK_N, BLOCK_K,
    )  # fmt: skip


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
