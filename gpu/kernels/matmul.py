"""Matmuls with a layer's matrices on a CUDA device, plain and quantised, one or one per expert. Thread: engine.

A weight is [out, in] as it lies in memory, or a file's blocks, of which a tile is decoded to the rows' format: what is
added, in which order, is the same as of the matrix dequantised. Rows come in tiles of BLOCK_M, outputs of BLOCK_N, and
inputs are added BLOCK_K at a time, in order, in float32. A matmul may be cut along its inputs into parts, which another
kernel adds up in order: nothing is added atomically.

A row's sums depend on the matrix's shape and on the tile alone, and there are two tiles: of SMALL_ROWS, and a larger
one for more. So all steps of up to SMALL_ROWS round a row alike, and all larger ones do; the two may differ, because
the instructions of other tiles may add in another order. cuBLAS, which multiplies plain matrices for many rows, chooses
its kernel, tiles and splits anew for each number of rows. With --deterministic there is one tile for any number of
rows, and one way to cut the inputs, so that a row is the same to the last bit in any company: prompts are multiplied by
a smaller tile than they would be, and few rows by a larger one.

A layer's experts take two launches, without the host. The router's choices are sorted by expert on the device; each
expert's rows come in tiles of their own. The number of tiles is bounded by the rows alone, so that a graph can hold it.
"""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from core.config import ExpertsConfig
from gpu.blocks import BLOCK_OUTPUTS, BlockWeight
from gpu.kernels.block_formats import LAYOUTS, BlockLayout, decoded, read_range, read_rows, whole_tile
from gpu.kernels.sizes import (
    COLUMN_WARPS,
    COLUMNS,
    FIXED_BLOCK_TILE,
    FIXED_TILES,
    LARGE_BLOCK_TILE,
    LARGE_GROUPED_TILE,
    LARGE_TILES,
    SMALL_BLOCK_TILE,
    SMALL_ROWS,
    SMALL_TILES,
    SPLIT_ROWS,
    MatmulTile,
    knows_fp8,
    next_power_of_two,
    split_inputs,
    splits_for,
)
from gpu.layers import Gated, shares_of
from gpu.linear import Linear
from gpu.parameters import ExpertWeights
from gpu.quant import DEVICE_SLAB_BYTES, FP8, LEAST_GROUP, DeviceWeight, Weight

# How weights are stored: in the rows' format; in 8 bits, integers or floats, with a scale per output; in 4 bits, with a
# scale and a zero per group of inputs (gpu/quant.py); in 8 bits with a scale per group of inputs; in a file's blocks.
PLAIN, SCALED, INT4, GROUPED, BLOCKS = range(5)
_SCALED, _INT4, _GROUPED, _BLOCKS = (tl.constexpr(form) for form in (SCALED, INT4, GROUPED, BLOCKS))
MIDDLE_INT4 = tl.constexpr(8)
ROW_GROUP = tl.constexpr(8)  # tiles of rows whose programs run side by side: they share the weights they read
OUTPUTS = tl.constexpr(BLOCK_OUTPUTS)
HALF_BITS = 16
PRECISION = "ieee"  # of float32: not rounded to fewer bits first


class StoredMatrices(NamedTuple):
    """One or more matrices, one after the other in memory, and how they are stored and multiplied.

    Args:
        weights: [outputs of all, num_in], or as FORM says; rows row_stride apart, in what they are stored as. Of
            blocks: words, of 64 outputs in a row.
        scales, zeros: of an output, or of each of its groups; read where FORM has any.
        bias: [outputs of all]; read where HAS_BIAS.
        GROUP: inputs that share a scale: INT4, GROUPED.
        IS_WHOLE: num_in is a multiple of BLOCK_K.
        LAYOUT: of blocks.
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
    LAYOUT: Any
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
def _blocks_part(
    x, rows, is_row, matrices, matrix, outputs, first, end,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """As _plain_part. outputs: [BLOCK_N], of this matrix, which has blocks of 64 outputs."""
    num_chunks = tl.cdiv(matrices.num_out, OUTPUTS)
    chunks = tl.minimum(outputs // OUTPUTS, num_chunks - 1).to(tl.int64) + matrix * num_chunks
    packed = chunks * OUTPUTS + outputs % OUTPUTS
    total = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for start in range(first, end, BLOCK_K):
        inputs = start + tl.arange(0, BLOCK_K)
        left = tl.load(x + rows[:, None] + inputs[None, :], mask=is_row[:, None], other=0.0)
        right = decoded(matrices.weights, matrices.row_stride, matrices.LAYOUT, packed, start, left.dtype, BLOCK_K)
        total = tl.dot(left, right, total, input_precision=matrices.PRECISION)
    return total


@triton.jit
def _multiply_tile(
    x, rows, is_row, matrices, matrix, outputs, first, end,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """As _plain_part, of any form, with its scales.

    Args:
        matrix: which of them.
        outputs: [BLOCK_N], of the matrix; those beyond its end read the first, or others of its blocks.
    """
    if matrices.FORM == _BLOCKS:
        return _blocks_part(x, rows, is_row, matrices, matrix, outputs, first, end, BLOCK_M, BLOCK_N, BLOCK_K)
    places = matrix * matrices.num_out + tl.where(outputs < matrices.num_out, outputs, 0).to(tl.int64)
    if matrices.FORM == _INT4:
        total = _int4_part(x, rows, is_row, matrices, places, first, end, BLOCK_M, BLOCK_N, BLOCK_K)
    elif matrices.FORM == _GROUPED:
        total = _grouped_part(x, rows, is_row, matrices, places, first, end, BLOCK_M, BLOCK_N, BLOCK_K)
    else:
        total = _plain_part(x, rows, is_row, matrices, places, first, end, BLOCK_M, BLOCK_N, BLOCK_K)
        if matrices.FORM == _SCALED:
            total *= tl.load(matrices.scales + places).to(tl.float32)[None, :]
    return total


@triton.jit
def _store_tile(total, out, out_stride, rows, is_row, matrices, matrix, outputs, HAS_BIAS: tl.constexpr):
    """Store to out's rows, out_stride apart; a part of a matmul has no bias."""
    is_output = outputs < matrices.num_out
    if HAS_BIAS:
        bias = tl.load(matrices.bias + matrix * matrices.num_out + outputs, mask=is_output, other=0.0)
        total += bias.to(tl.float32)[None, :]
    places = rows[:, None] * out_stride + outputs[None, :]
    tl.store(out + places, total.to(out.dtype.element_ty), mask=is_row[:, None] & is_output[None, :])


@triton.jit
def _multiply_split(
    x, x_stride, matrices, out, out_stride, num_rows, split_inputs,
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
    has_bias: tl.constexpr = matrices.HAS_BIAS and SPLITS == 1
    _store_tile(total, out, out_stride, split * num_rows + rows, is_row, matrices, 0, outputs, has_bias)


@triton.jit(do_not_specialize=["num_rows"])
def multiply(
    x,  # [rows, in], rows x_stride apart
    weights,
    scales,
    zeros,
    bias,
    out,  # [rows, out], rows out_stride apart; SPLITS > 1: float32 [SPLITS, rows, out], without the bias
    num_rows,
    num_out,
    num_in,
    row_stride,
    x_stride,
    out_stride,
    split_inputs,  # of a part: a multiple of BLOCK_K
    FORM: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SPLITS: tl.constexpr,
    GROUP: tl.constexpr,
    IS_WHOLE: tl.constexpr,
    LAYOUT: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """x times the weights, transposed. Programs: a tile of rows and outputs; parts of the inputs."""
    _multiply_split(
        x, x_stride,
        StoredMatrices(
            weights, scales, zeros, bias, num_out, num_in, row_stride,
            FORM, HAS_BIAS, GROUP, IS_WHOLE, LAYOUT, PRECISION,
        ),
        out, out_stride, num_rows, split_inputs, SPLITS, BLOCK_M, BLOCK_N, BLOCK_K,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_rows"])
def add_splits(
    parts,  # float32 [SPLITS, rows, out]
    bias,
    out,  # [rows, out], rows out_stride apart
    num_rows,
    num_out,
    out_stride,
    HAS_BIAS: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Add the parts of a matmul, in order, and the bias. Program: a row, and BLOCK of its outputs."""
    row = tl.program_id(0).to(tl.int64)
    outputs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_output = outputs < num_out
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for split in tl.static_range(SPLITS):
        total += tl.load(parts + (split * num_rows + row) * num_out + outputs, mask=is_output, other=0.0)
    if HAS_BIAS:
        total += tl.load(bias + outputs, mask=is_output, other=0.0).to(tl.float32)
    tl.store(out + row * out_stride + outputs, total.to(out.dtype.element_ty), mask=is_output)


@triton.jit
def _multiply_pairs(
    x, matrices, out, out_stride, pairs, ends, num_experts,
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
        total = _multiply_tile(
            x, pair // SHARE * matrices.num_in, is_row, matrices, expert, outputs, 0, matrices.num_in,
            BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip
        _store_tile(total, out, out_stride, pair, is_row, matrices, expert, outputs, matrices.HAS_BIAS)


@triton.jit(do_not_specialize=["num_pairs"])
def multiply_by_expert(
    x,  # [pairs / SHARE, in]
    weights,  # of the experts, one after the other
    scales,
    zeros,
    bias,
    out,  # [pairs, out], rows out_stride apart
    pairs,  # int64 [pairs]: by expert
    ends,  # int64 [experts]: where each expert's end among them
    num_out,
    num_in,
    row_stride,
    out_stride,
    num_experts,
    SHARE: tl.constexpr,  # consecutive pairs that have the same row of x
    FORM: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    GROUP: tl.constexpr,
    IS_WHOLE: tl.constexpr,
    LAYOUT: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_E: tl.constexpr,  # >= num_experts
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Each pair of a token and an expert: the token's row times the expert's weights, transposed. See StoredMatrices.

    Programs: a tile of outputs; a tile of one expert's pairs, expert after expert. There may be more programs than
    tiles.
    """
    _multiply_pairs(
        x,
        StoredMatrices(
            weights, scales, zeros, bias, num_out, num_in, row_stride,
            FORM, HAS_BIAS, GROUP, IS_WHOLE, LAYOUT, PRECISION,
        ),
        out, out_stride, pairs, ends, num_experts, SHARE, BLOCK_E, BLOCK_M, BLOCK_N, BLOCK_K,
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
    """Add the outputs of a token's experts by their shares, in order. Program: a token, and BLOCK of its columns."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_inside = columns < width
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for place in tl.static_range(ACTIVE):
        row = token * ACTIVE + place
        total += tl.load(shares + row) * tl.load(found + row * width + columns, mask=is_inside, other=0.0)
    tl.store(out + token * width + columns, total.to(out.dtype.element_ty), mask=is_inside)


@dataclass(frozen=True, slots=True)
class Matrix:
    """A weight, or a stack of them, as the kernels read it.

    Args:
        form: PLAIN, SCALED, INT4, GROUPED or BLOCKS.
        values: [..., out, in], or as the form says; scales and zeros are values where the form has none.
        num_bits: of a weight; of blocks those of the rows' format.
        group: inputs that share a scale.
        bias: [..., out], or None.
        is_fixed: one tile serves any number of rows.
        layout: of blocks.
        only_tile: for any number of rows, to be measured; None: those of sizes.py.
    """

    form: int
    values: Tensor
    scales: Tensor
    zeros: Tensor
    num_out: int
    num_in: int
    num_bits: int
    group: int
    bias: Tensor | None = None
    is_fixed: bool = False
    layout: BlockLayout | None = None
    only_tile: MatmulTile | None = None

    @property
    def has_groups(self) -> bool:
        return self.form in (INT4, GROUPED)

    def tile(self, num_rows: int) -> MatmulTile:
        """For so many rows of a step."""
        tiles = FIXED_TILES if self.is_fixed else SMALL_TILES if num_rows <= SMALL_ROWS else LARGE_TILES
        found = self.only_tile or tiles[self.num_bits]
        if self.form == BLOCKS:
            if self.num_bits == HALF_BITS and self.only_tile is None:
                few_or_many = SMALL_BLOCK_TILE if tiles is SMALL_TILES else LARGE_BLOCK_TILE
                found = FIXED_BLOCK_TILE if tiles is FIXED_TILES else few_or_many
            return replace(found, inputs=whole_tile(self.num_in, found.inputs))
        if not self.has_groups:
            return found
        if self.form == GROUPED and tiles is LARGE_TILES:
            found = LARGE_GROUPED_TILE
        inputs = found.inputs
        while self.group % inputs:
            inputs //= 2
        return replace(found, inputs=inputs)

    def launch(self, tile: MatmulTile) -> dict[str, Any]:
        """What multiply and multiply_by_expert both take."""
        more = {} if self.layout is None else {"enable_fp_fusion": False}  # decoded as gpu/blocks.py rounds
        return more | {
            "weights": self.values,
            "scales": self.scales,
            "zeros": self.zeros,
            "bias": self.values if self.bias is None else self.bias,  # an address even where it is not read
            "num_out": self.num_out,
            "num_in": self.num_in,
            "row_stride": self.values.stride(-2 if self.layout is None else -3),
            "FORM": self.form,
            "HAS_BIAS": self.bias is not None,
            "GROUP": self.group if self.has_groups else 1,
            "IS_WHOLE": self.num_in % tile.inputs == 0,
            "LAYOUT": self.layout,
            "PRECISION": PRECISION,
            "BLOCK_M": tile.rows,
            "BLOCK_N": tile.outputs,
            "BLOCK_K": tile.inputs,
            "num_warps": tile.num_warps,
            "num_stages": tile.num_stages,
        }


def can_multiply(weight: Weight) -> bool:
    """Whether the kernels know how it is stored, on its device."""
    if isinstance(weight, BlockWeight):
        is_stack = weight.parts[0].packed.dim() > 3
        return is_stack == (weight.num_stacked is not None) and all(part.format in LAYOUTS for part in weight.parts)
    if isinstance(weight, Tensor):
        return weight.is_contiguous()
    if weight.values.dtype == FP8 and not knows_fp8(weight.values.device):
        return False
    parts = [part for part in (weight.values, weight.scales, weight.zeros) if part is not None]
    are_outputs_scaled = weight.zeros is None and weight.scales.shape[-1] == 1
    return all(part.is_contiguous() for part in parts) and (are_outputs_scaled or weight.group_size % LEAST_GROUP == 0)


def stored_as(weight: Weight) -> tuple[str, int]:
    """(the name of its format, its bytes)."""
    if isinstance(weight, BlockWeight):
        return " + ".join(part.format for part in weight.parts), sum(part.packed.nbytes for part in weight.parts)
    if isinstance(weight, Tensor):
        return str(weight.dtype).removeprefix("torch."), weight.nbytes
    if weight.zeros is not None:
        return f"int4 by {weight.group_size}", weight.values.nbytes
    groups = "" if weight.scales.shape[-1] == 1 else f" by {weight.group_size}"
    return str(weight.values.dtype).removeprefix("torch.") + groups, weight.values.nbytes


def as_matrix(weight: DeviceWeight, bias: Tensor | None, is_fixed: bool = False) -> Matrix:
    """Of a weight that it can_multiply; shares its memory."""
    num_out, num_in = weight.shape[-2:]
    if isinstance(weight, Tensor):
        stored = PLAIN, weight, weight, weight, num_out, num_in, 8 * weight.element_size(), num_in
        return Matrix(*stored, bias, is_fixed)
    values, scales, zeros = weight.values, weight.scales, weight.zeros
    if zeros is not None:
        return Matrix(INT4, values, scales, zeros, num_out, num_in, 4, weight.group_size, bias, is_fixed)
    form = SCALED if scales.shape[-1] == 1 else GROUPED
    return Matrix(form, values, scales, scales, num_out, num_in, 8, weight.group_size, bias, is_fixed)


def as_matrices(weight: Weight, bias: Tensor | None, is_fixed: bool = False) -> list[Matrix]:
    """Of a weight, or a stack, that it can_multiply: the matrices that its outputs come from, one after the other."""
    if not isinstance(weight, BlockWeight):
        return [as_matrix(weight, bias, is_fixed)]
    biases: list[Tensor | None] = [None] * len(weight.parts)
    if bias is not None:
        biases = [part.contiguous() for part in bias.split([part.num_out for part in weight.parts], -1)]
    found, num_bits = list[Matrix](), 8 * weight.dtype.itemsize
    for part, own in zip(weight.parts, biases, strict=True):
        words, layout = part.packed.view(torch.int32), LAYOUTS[part.format]
        sizes = part.num_out, part.num_in, num_bits, layout.GROUP
        found.append(Matrix(BLOCKS, words, words, words, *sizes, own, is_fixed, layout))
    return found


class Matmul:
    """
    Args:
        weight: [out, in], one that it can_multiply.
        bias: [out], or None.
        is_fixed, only_tile: see Matrix.
    """

    def __init__(
        self, weight: Weight, bias: Tensor | None, is_fixed: bool = False, only_tile: MatmulTile | None = None
    ) -> None:
        found = as_matrices(weight, bias, is_fixed)
        self._matrices = [replace(matrix, only_tile=only_tile) for matrix in found] if only_tile else found
        self._sizes = [matrix.num_out for matrix in self._matrices]

    def __call__(self, x: Tensor) -> Tensor:
        """x: [tokens, in]; returns [tokens, out]."""
        out = x.new_empty((x.shape[0], sum(self._sizes)))
        if not len(out):
            return out
        if x.stride(1) != 1:
            x = x.contiguous()
        for matrix, columns in zip(self._matrices, out.split(self._sizes, 1), strict=True):
            self._multiply_by(matrix, x, columns)
        return out

    def _multiply_by(self, matrix: Matrix, x: Tensor, out: Tensor) -> None:
        """Write to out, [rows, out]."""
        num_rows = x.shape[0]
        tile = matrix.tile(num_rows)
        is_cut = matrix.is_fixed or num_rows <= SMALL_ROWS
        splits = splits_for(matrix.num_out, matrix.num_in, tile) if is_cut else 1
        step = num_rows if splits == 1 else SPLIT_ROWS
        for rows, results in zip(x.split(step), out.split(step), strict=True):
            self._multiply(matrix, rows, results, tile, splits)

    def _multiply(self, matrix: Matrix, x: Tensor, out: Tensor, tile: MatmulTile, splits: int) -> None:
        num_rows = x.shape[0]
        parts = out if splits == 1 else out.new_empty((splits, *out.shape), dtype=torch.float32)
        num_tiles = -(-num_rows // tile.rows) * -(-matrix.num_out // tile.outputs)
        multiply[(num_tiles, splits)](
            x=x,
            out=parts,
            num_rows=num_rows,
            x_stride=x.stride(0),
            out_stride=parts.stride(-2),
            split_inputs=split_inputs(matrix.num_in, splits, tile),
            SPLITS=splits,
            **matrix.launch(tile),
        )
        if splits > 1:
            add_splits[(num_rows, -(-matrix.num_out // COLUMNS))](
                parts,
                out if matrix.bias is None else matrix.bias,  # an address even where it is not read
                out,
                num_rows,
                matrix.num_out,
                out.stride(0),
                HAS_BIAS=matrix.bias is not None,
                SPLITS=splits,
                BLOCK=COLUMNS,
                num_warps=COLUMN_WARPS,
            )


class DecodedMatmul:
    """A matmul with blocks by torch: a slab of them is decoded to the rows' format at a time.

    Args:
        weight: one that it can_multiply.
        bias: [out], or None.
    """

    def __init__(self, weight: BlockWeight, bias: Tensor | None) -> None:
        self._weight, self._bias = weight, bias
        slab = DEVICE_SLAB_BYTES // (weight.shape[1] * weight.dtype.itemsize)
        self._step = max(BLOCK_OUTPUTS, slab // BLOCK_OUTPUTS * BLOCK_OUTPUTS)

    def __call__(self, x: Tensor) -> Tensor:
        """x: [tokens, in]; returns [tokens, out]."""
        num_out, num_in = self._weight.shape
        out, place = x.new_empty((x.shape[0], num_out)), 0
        for part in self._weight.parts:
            for first in range(0, part.num_out, self._step):
                some = min(self._step, part.num_out - first)
                slab = read_range(part, first, x.new_empty((some, num_in)))
                torch.mm(x, slab.T, out=out[:, place : place + some])
                place += some
        return out if self._bias is None else out.add_(self._bias)


class BlockRows:
    """Rows of a matrix of blocks, of one part, as an embedding takes them."""

    def __init__(self, weight: BlockWeight) -> None:
        (self._part,), self._dtype = weight.parts, weight.dtype

    def __call__(self, indexes: Tensor) -> Tensor:
        """indexes: [n]; returns [n, in]."""
        return read_rows(self._part, indexes, self._dtype)


def can_group(weights: ExpertWeights) -> bool:
    """Whether the kernels know how the experts are stored."""
    return can_multiply(weights.gate_up) and can_multiply(weights.down)


class GroupedExperts:
    """See gpu.layers.Experts.

    Args:
        weights: such as it can_group.
        router: hidden -> experts.
        is_fixed: see Matrix.
    """

    def __init__(
        self, config: ExpertsConfig, weights: ExpertWeights, gated: Gated, router: Linear, is_fixed: bool = False
    ) -> None:
        self._config = config
        self._router, self._choice_bias = router, weights.choice_bias
        self._gated = gated
        self._gate_up = as_matrices(weights.gate_up, weights.gate_up_bias, is_fixed)
        self._down = as_matrices(weights.down, weights.down_bias, is_fixed)
        self._experts = torch.arange(config.num_experts, device=weights.router.device)

    def __call__(self, x: Tensor) -> Tensor:
        """x: [tokens, hidden], normed; also returned so."""
        num_active, num_tokens = self._config.num_active, x.shape[0]
        if not num_tokens:
            return x
        shares, chosen = shares_of(self._router(x), self._config, self._choice_bias)
        by_expert, pairs = chosen.flatten().sort(stable=True)  # [tokens * active]: expert, index of (token, choice)
        ends = torch.searchsorted(by_expert, self._experts, right=True)  # [experts]: where each one's pairs end
        inner = self._multiply(x, self._gate_up, pairs, ends, num_active)
        found = self._multiply(self._gated(inner), self._down, pairs, ends, 1)
        out = torch.empty_like(x)
        add_experts[(num_tokens, -(-x.shape[1] // COLUMNS))](
            found, shares, out, x.shape[1], ACTIVE=num_active, BLOCK=COLUMNS, num_warps=COLUMN_WARPS
        )
        return out

    def _multiply(self, x: Tensor, matrices: list[Matrix], pairs: Tensor, ends: Tensor, share: int) -> Tensor:
        """[pairs, out], in the order of (token, choice).

        Args:
            x: [pairs / share, in].
            pairs, ends: see multiply_by_expert.
        """
        sizes = [matrix.num_out for matrix in matrices]
        out = x.new_empty((len(pairs), sum(sizes)))
        for matrix, columns in zip(matrices, out.split(sizes, 1), strict=True):
            self._multiply_by(matrix, x, columns, pairs, ends, share)
        return out

    def _multiply_by(self, matrix: Matrix, x: Tensor, out: Tensor, pairs: Tensor, ends: Tensor, share: int) -> None:
        """Write to out, [pairs, out]."""
        num_experts, num_pairs = self._config.num_experts, len(pairs)
        # The number of tokens chooses the tile, as for a single matrix: experts share their rows alike in any company.
        tile = matrix.tile(SMALL_ROWS if num_pairs <= SMALL_ROWS * self._config.num_active else SMALL_ROWS + 1)
        multiply_by_expert[(-(-matrix.num_out // tile.outputs), most_tiles(num_pairs, num_experts, tile.rows))](
            x=x,
            out=out,
            pairs=pairs,
            ends=ends,
            out_stride=out.stride(0),
            num_experts=num_experts,
            SHARE=share,
            BLOCK_E=next_power_of_two(num_experts),
            **matrix.launch(tile),
        )


def most_tiles(num_pairs: int, num_experts: int, rows: int) -> int:
    """Tiles of so many rows that pairs can fill, however they fall: each expert's last may be partly empty."""
    return num_pairs // rows + min(num_pairs, num_experts)
