"""Matmuls with int4 and int8 weights on a CPU, by avx512_bf16. Kernels: any thread, without the GIL; classes: engine.

Integers become bf16 in registers, exactly, and are multiplied so; scales and zeros come in once a group of inputs, on
float32 sums: sum(x * ((v - 8) * scale + zero)) = scale * sum(x * (v - 8)) + zero * sum(x). A piece of work is some
blocks of 64 outputs, read from memory once: tiles of rows find a block in the second-level cache. Matrices that
can_multiply refuses are dequantised in slabs (gpu/quant.py).
"""

import ctypes
from functools import cache
from itertools import chain

import numpy as np
import torch
from llvmlite import ir
from numba import carray, cfunc, njit, types
from numba.core import cgutils
from torch import Tensor

from gpu.cpu_kernels.matmul import (
    BLOCK_REGISTERS,
    MOST_TILE_ROWS,
    PAIR_BYTES,
    PART_PAIRS,
    STREAM_AHEAD,
    SUM_ROW_BYTES,
    PanelMatmul,
    clear_sums,
    multiply_part,
    write_block,
)
from gpu.cpu_kernels.team import Kernel, integers
from gpu.cpu_kernels.vectors import (
    BFLOATS,
    FLOAT,
    FLOATS,
    HALVES,
    LANES,
    REGISTER_BYTES,
    call,
    constant,
    emit_by_count,
    emit_products,
    keep,
    load,
    load_floats,
    load_widened,
    multiply_add,
    nothing,
    offset,
    operation,
    pointer,
    prefetch,
    spread,
    store,
    store_floats,
    take_next,
    total,
    zeros,
)
from gpu.device import use_huge_pages
from gpu.linear import BLOCK_OUTPUTS
from gpu.quant import FP8, MIDDLE_INT4, QuantizedWeight, unpack_nibbles

GROUP_BYTES = 2 * 2 * BLOCK_OUTPUTS  # of a group's scales and zeros, bf16, of a block
INT4_PAIR_BYTES, INT8_PAIR_BYTES = REGISTER_BYTES, 2 * REGISTER_BYTES  # of a pair of inputs, a block's outputs
PANEL_ROWS = 512  # at a time: their sums stay in a second-level cache
GROUP_STEP = 32  # inputs: groups are whole registers
# The end of a block prefetches the next one: a thread takes several short blocks, where there are many.
SHORT_BLOCK_BYTES, SHORT_BLOCKS, SHORT_PIECES = 64 * 1024, 4, 8


class Arguments(ctypes.Structure):
    """Of multiply_quantized. Addresses are of first elements."""

    _fields_ = integers(
        "next_piece",  # 0
        "x",  # bf16 [rows, 2 * num_pairs]
        "x_stride",  # bytes from row to row
        "values",  # [blocks, num_pairs, 64 (int4) or 128 (int8) bytes]
        "scales",  # bf16 [blocks, groups, scale and zero, 64]
        "bias",  # bf16 [blocks * 64]; 0: none
        "out",  # bf16 [rows, blocks * 64]
        "num_rows",
        "num_pairs",
        "num_blocks",
        "num_groups",
        "is_int4",  # or int8
        "piece_blocks",  # that a thread reads one after the other
        "num_threads",
    )


_ARGUMENTS = np.dtype(Arguments)


def _int4_columns(builder, at):
    """A pair of inputs' 64 outputs: the low halves of 32 bytes are 16 outputs, the high halves the next 16."""
    # An index counts modulo 32: with the table twice, the bit above a low half does no harm.
    table = [int.from_bytes(np.float32(n % 16 - MIDDLE_INT4).tobytes()[2:], "little") for n in range(2 * LANES)]
    table, four = ir.Constant(HALVES, table), ir.Constant(HALVES, [4] * 2 * LANES)
    columns = []
    for part in range(2):
        place = offset(builder, at, part * REGISTER_BYTES // 2)
        bytes_ = builder.zext(load(builder, place, ir.VectorType(ir.IntType(8), 2 * LANES)), HALVES)
        for index in (bytes_, builder.lshr(bytes_, four)):
            columns.append(call(builder, "llvm.x86.avx512.permvar.hi.512", HALVES, table, index))
    return columns


def _int8_columns(builder, at):
    """A pair of inputs' 64 outputs, in order."""
    columns = []
    for part in range(BLOCK_REGISTERS):
        place = offset(builder, at, part * REGISTER_BYTES // 2)
        values = load(builder, place, ir.VectorType(ir.IntType(8), 2 * LANES))
        columns.append(builder.fptrunc(builder.sitofp(values, ir.VectorType(FLOAT, 2 * LANES)), BFLOATS))
    return columns


def _make_tile(pair_bytes, columns_of):
    """Add the products of up to MOST_TILE_ROWS with a block to their sums."""

    @operation(nothing, *[types.int64] * 9)
    def tile(builder, num_rows, x, x_stride, values, scales, group_pairs, num_groups, x_sums, sums):
        """
        Args:
            x: address of bf16 [num_rows, inputs], rows x_stride bytes apart.
            values, scales: the block's.
            group_pairs, num_groups: of inputs.
            x_sums: address of float32 [num_rows, num_groups].
            sums: address of float32 [num_rows, 64].
        """
        arguments = (x, x_stride, values, scales, group_pairs, num_groups, x_sums, sums)
        emit_by_count(
            builder, num_rows, MOST_TILE_ROWS, lambda rows: _emit_tile(builder, rows, arguments, pair_bytes, columns_of)
        )

    return tile


def _emit_tile(builder, num_rows, arguments, pair_bytes, columns_of):
    x, x_stride, values, scales, group_pairs, num_groups, x_sums, sums = arguments
    registers = [[cgutils.alloca_once(builder, FLOATS) for _ in range(BLOCK_REGISTERS)] for _ in range(num_rows)]
    with cgutils.for_range(builder, num_groups) as groups:
        first = builder.mul(groups.index, group_pairs)
        first_values = builder.add(values, builder.mul(first, constant(pair_bytes)))

        def prefetched_columns_of(index):
            at = builder.add(first_values, builder.mul(index, constant(pair_bytes)))
            for line in range(0, pair_bytes, REGISTER_BYTES):
                prefetch.emit(builder, offset(builder, at, STREAM_AHEAD + line))
            return columns_of(builder, at)

        for register in chain.from_iterable(registers):
            builder.store(zeros.emit(builder), register)
        first_x = builder.add(x, builder.mul(first, constant(4)))
        rows = [builder.add(first_x, builder.mul(x_stride, constant(row))) for row in range(num_rows)]
        emit_products(builder, group_pairs, rows, registers, prefetched_columns_of)
        group_scales = builder.add(scales, builder.mul(groups.index, constant(GROUP_BYTES)))
        for column in range(BLOCK_REGISTERS):
            scale = load_widened.emit(builder, offset(builder, group_scales, column * REGISTER_BYTES // 2))
            zero = load_widened.emit(
                builder, offset(builder, group_scales, GROUP_BYTES // 2 + column * REGISTER_BYTES // 2)
            )
            for row in range(num_rows):
                of_row = builder.add(builder.mul(num_groups, constant(row)), groups.index)
                x_sum = load(builder, builder.add(x_sums, builder.mul(of_row, constant(4))), FLOAT)
                place = offset(builder, sums, row * SUM_ROW_BYTES + column * REGISTER_BYTES)
                products = builder.load(registers[row][column])
                total = multiply_add.emit(builder, products, scale, load(builder, place, FLOATS))
                store(builder, place, multiply_add.emit(builder, spread.emit(builder, x_sum), zero, total))


_int4_columns_tile, _int8_columns_tile = (
    _make_tile(INT4_PAIR_BYTES, _int4_columns),
    _make_tile(INT8_PAIR_BYTES, _int8_columns),
)


@njit(cache=True)
def _int4_tile(num_rows, x, x_stride, values, scales, group_pairs, num_groups, x_sums, sums):
    _int4_columns_tile(num_rows, x, x_stride, values, scales, group_pairs, num_groups, x_sums, sums)


@njit(cache=True)
def _int8_tile(num_rows, x, x_stride, values, scales, group_pairs, num_groups, x_sums, sums):
    _int8_columns_tile(num_rows, x, x_stride, values, scales, group_pairs, num_groups, x_sums, sums)


@njit(cache=True)
def _sum_groups(x, x_stride, num_rows, num_groups, group_size, x_sums):
    for row in range(num_rows):
        for group in range(num_groups):
            summed, first = zeros(), x + row * x_stride + 2 * group * group_size
            for at in range(first, first + 2 * group_size, 2 * LANES):
                summed = summed + load_widened(at)
            x_sums[row, group] = total(summed)


@operation(nothing, types.int64, types.int64)
def _widen_int8(builder, source, target):
    """int8 [128] to bf16 [128]."""
    for part, column in enumerate(_int8_columns(builder, source)):
        store(builder, offset(builder, target, part * REGISTER_BYTES), column)


@njit(cache=True)
def _multiply_widened(x, x_stride, values, scales, num_pairs, num_rows, sums, widened):
    """Multiply a block of int8, of which a part at a time becomes bf16 once for all rows."""
    for first in range(0, num_pairs, PART_PAIRS):
        some = min(PART_PAIRS, num_pairs - first)
        for pair in range(some):
            _widen_int8(values + (first + pair) * INT8_PAIR_BYTES, widened + pair * PAIR_BYTES)
        multiply_part(x + 4 * first, x_stride, widened, some, num_rows, sums, 0)
    for index in range(0, BLOCK_OUTPUTS, LANES):
        scale = load_widened(scales + 2 * index)
        for row in range(num_rows):
            at = sums + row * SUM_ROW_BYTES + 4 * index
            store_floats(at, load_floats(at) * scale)


@cfunc(types.void(types.int64), cache=True)
def multiply_quantized(arguments):
    """Take pieces until none is left: any number of threads at once. arguments: the address of Arguments."""
    args = carray(pointer(arguments), 1, _ARGUMENTS)[0]
    x, x_stride, num_rows, num_pairs = args.x, args.x_stride, args.num_rows, args.num_pairs
    num_blocks, num_groups, is_int4 = args.num_blocks, args.num_groups, args.is_int4
    num_tiles = (num_rows + MOST_TILE_ROWS - 1) // MOST_TILE_ROWS
    group_pairs = num_pairs // num_groups
    is_widened = not is_int4 and num_tiles > 1  # few rows' sums are the same without
    widened_bytes = PART_PAIRS * PAIR_BYTES if is_widened else 0
    memory = np.empty(num_rows * SUM_ROW_BYTES + widened_bytes + REGISTER_BYTES, dtype=np.uint8)
    widened = (memory.ctypes.data + REGISTER_BYTES - 1) // REGISTER_BYTES * REGISTER_BYTES
    sums = widened + widened_bytes
    x_sums = np.zeros((num_rows, num_groups), dtype=np.float32)
    if is_int4:
        _sum_groups(x, x_stride, num_rows, num_groups, 2 * group_pairs, x_sums)
    block_bytes = num_pairs * (INT4_PAIR_BYTES if is_int4 else INT8_PAIR_BYTES)
    block = take_next(arguments) * args.piece_blocks
    while block < num_blocks:
        clear_sums(sums, num_rows)
        values, scales = args.values + block * block_bytes, args.scales + block * num_groups * GROUP_BYTES
        if is_widened:
            _multiply_widened(x, x_stride, values, scales, num_pairs, num_rows, sums, widened)
        first = 0
        for tile in range(0 if is_widened else num_tiles):
            end = (tile + 1) * num_rows // num_tiles
            some, tile_x = end - first, x + first * x_stride
            tile_x_sums, tile_sums = x_sums.ctypes.data + 4 * first * num_groups, sums + first * SUM_ROW_BYTES
            if is_int4:
                _int4_tile(some, tile_x, x_stride, values, scales, group_pairs, num_groups, tile_x_sums, tile_sums)
            else:
                _int8_tile(some, tile_x, x_stride, values, scales, group_pairs, num_groups, tile_x_sums, tile_sums)
            first = end
        offset = 2 * block * BLOCK_OUTPUTS
        bias = args.bias + offset if args.bias else 0
        write_block(sums, num_rows, bias, args.out + offset, 2 * num_blocks * BLOCK_OUTPUTS)
        block += 1
        if block % args.piece_blocks == 0:
            block = take_next(arguments) * args.piece_blocks
    keep(memory)
    keep(x_sums)


def can_multiply(weight: QuantizedWeight) -> bool:
    """Whether the kernel supports the matrix: integers, whole blocks of outputs and registers of inputs."""
    num_out, num_in = weight.shape
    return (
        weight.dtype == torch.bfloat16
        and weight.values.dtype != FP8
        and num_out % BLOCK_OUTPUTS == 0
        and num_in % GROUP_STEP == 0
        and (weight.zeros is None or weight.group_size % GROUP_STEP == 0)
    )


class QuantizedMatmul(PanelMatmul):
    """
    Args:
        weight: one that it can_multiply; not kept.
        bias: [out], or None.
    """

    def __init__(self, weight: QuantizedWeight, bias: Tensor | None) -> None:
        num_out, num_in = weight.shape
        self._num_blocks = num_out // BLOCK_OUTPUTS
        values = _int8_blocks(weight.values) if weight.zeros is None else _int4_blocks(weight.values)
        scales = _scale_blocks(weight)
        use_huge_pages(values.data_ptr(), values.nbytes)
        arguments = Arguments(
            values=values.data_ptr(),
            scales=scales.data_ptr(),
            bias=0 if bias is None else bias.data_ptr(),
            num_pairs=num_in // 2,
            num_blocks=self._num_blocks,
            num_groups=weight.scales.shape[1],
            is_int4=weight.zeros is not None,
        )
        self._block_bytes = values.nbytes // max(1, self._num_blocks)
        super().__init__(_kernel(), arguments, num_out, PANEL_ROWS, values, scales, bias)

    def piece_blocks(self, num_rows: int, num_threads: int) -> int:
        has_many = self._num_blocks >= SHORT_BLOCKS * SHORT_PIECES * num_threads
        return SHORT_BLOCKS if has_many and self._block_bytes <= SHORT_BLOCK_BYTES else 1


@cache
def _kernel() -> Kernel:
    return Kernel(multiply_quantized)


def _int8_blocks(values: Tensor) -> Tensor:
    """[out, in] to [blocks, pairs of inputs, 64 outputs, 2]."""
    return values.view(-1, BLOCK_OUTPUTS, values.shape[1] // 2, 2).transpose(1, 2).contiguous()


def _int4_blocks(packed: Tensor) -> Tensor:
    """[out, in / 2] to [blocks, pairs of inputs, two parts, 16 outputs, 2], the next 16 outputs in the high halves."""
    found = packed.new_empty((packed.shape[0] // BLOCK_OUTPUTS, packed.shape[1], 2, 16, 2))
    for block, rows in zip(found, packed.view(-1, BLOCK_OUTPUTS, packed.shape[1]), strict=True):
        numbers = unpack_nibbles(rows).view(2, 2, 16, -1, 2)  # [part, half, outputs, pairs, 2]
        block.copy_((numbers[:, 0] | (numbers[:, 1] << 4)).permute(2, 0, 1, 3))
    return found


def _scale_blocks(weight: QuantizedWeight) -> Tensor:
    """[blocks, groups, scale and zero, 64], bf16."""
    zeros = torch.zeros_like(weight.scales) if weight.zeros is None else weight.zeros
    both = torch.stack([weight.scales, zeros]).bfloat16()  # [2, out, groups]
    return both.view(2, -1, BLOCK_OUTPUTS, both.shape[2]).permute(1, 3, 0, 2).contiguous()
