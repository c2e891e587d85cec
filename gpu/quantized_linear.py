"""Products with quantised weights: torch's operators where rows are few, dequantised slabs where they are many.

One Zen 5 core, 9,728 x 896, beside prepacked bfloat16 (1.1 ms at one row): the int4 operator takes 0.43 of its time at
one row, 0.5 at two, 1.3 at four, 3 at 32; the int8 operator 1.1 to 1.5 at one and 2 to 3 from four. Dequantising adds
10 ms (int4) or 2 ms (int8) whatever the rows: as much as the product itself at 64 rows, a fifth of it at 512. Whole
steps of a 0.5B body: int4 2.2 times as fast as bfloat16 at one row, 1.4 at four, 0.6 at 16. So int4 is for few rows;
int8 halves the memory and makes nothing faster. Where cpu_kernels/ knows a matrix, its kernel serves instead.

The operators are torch's own but not public: they are tried at start, and where they fail or differ, slabs serve.
Thread: engine.
"""

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from gpu.quantize import BLOCK_ROWS, MIDDLE_INT4, OPERATOR_GROUPS, QuantizedWeight, dequantize, quantize, unpack_nibbles

INT4_ROWS = 32  # beyond so many, slabs are faster
INT8_ROWS = 5
SLAB_BYTES = 2**21  # of a dequantised part of the weight: what the second-level cache holds
DEVICE_SLAB_BYTES = 2**26  # likewise on a device, where each part costs launches
HALF_BLOCK = BLOCK_ROWS // 2
LOW_HALVES = 0x0F0F0F0F0F0F0F0F  # of eight bytes


class SlabLinear:
    """Any quantised weight on any device: dequantised a slab at a time, in the rows' format."""

    def __init__(self, weight: QuantizedWeight, bias: Tensor | None) -> None:
        slab_bytes = SLAB_BYTES if weight.values.device.type == "cpu" else DEVICE_SLAB_BYTES
        self._weight = weight
        self._bias = bias
        num_out, num_in = weight.shape
        self._step = max(1, slab_bytes // (num_in * weight.dtype.itemsize))
        self._num_out = num_out

    def __call__(self, x: Tensor) -> Tensor:
        """x: [tokens, in]; returns [tokens, out]."""
        result = x.new_empty((x.shape[0], self._num_out))
        for start in range(0, self._num_out, self._step):
            rows = slice(start, min(start + self._step, self._num_out))
            result[:, rows] = self._product(x, self._weight[rows])
        return result if self._bias is None else result.add_(self._bias)

    def _product(self, x: Tensor, weight: QuantizedWeight) -> Tensor:
        """Scales of outputs, and numbers that are exact in any format: scaling the result saves a pass."""
        has_output_scales = weight.zeros is None and weight.scales.shape[-1] == 1
        if has_output_scales and x.dtype != torch.float16:  # where unscaled sums would be too large
            return F.linear(x, weight.values.to(x.dtype)).mul_(weight.scales.T)
        return F.linear(x, dequantize(weight, x.dtype))


class Int8Linear(SlabLinear):
    """Few rows: torch's operator, which reads the integers as they are stored."""

    def __init__(self, weight: QuantizedWeight, bias: Tensor | None) -> None:
        super().__init__(weight, bias)
        self._scales = weight.scales.flatten().to(weight.dtype)  # [out]

    def __call__(self, x: Tensor) -> Tensor:
        if x.shape[0] > INT8_ROWS:
            return super().__call__(x)
        result: Tensor = torch.ops.aten._weight_int8pack_mm(x, self._weight.values, self._scales)
        return result if self._bias is None else result.add_(self._bias)


class Int4Linear:
    """Keeps the weight as torch's operator reads it, and dequantises from that layout where rows are many.

    Blocks of 64 outputs; for each input 32 bytes: outputs 0 to 31 in the low halves, 32 to 63 in the high ones.
    Source: torch's int4mm_kernel.cpp, weight_to_int4pack_kernel, for AVX-512.
    """

    def __init__(self, weight: QuantizedWeight, bias: Tensor | None) -> None:
        assert weight.zeros is not None
        self._num_out, self._num_in = weight.shape
        self._group_size = weight.group_size
        self._bias = bias
        missing = -self._num_out % BLOCK_ROWS
        self._packed = _pack(F.pad(weight.values, (0, 0, 0, missing)))  # [blocks * 64, in / 2]
        pairs = F.pad(torch.stack([weight.scales, weight.zeros], -1), (0, 0, 0, 0, 0, missing))
        self._scales_zeros = pairs.to(weight.dtype).transpose(0, 1).contiguous()  # [groups, blocks * 64, 2]

    def __call__(self, x: Tensor) -> Tensor:
        """x: [tokens, in]; returns [tokens, out]."""
        if x.shape[0] <= INT4_ROWS:
            result: Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(
                x.contiguous(), self._packed, self._group_size, self._scales_zeros
            )
        else:
            result = self._by_slabs(x)
        result = result[:, : self._num_out]
        return result if self._bias is None else result.add_(self._bias)

    def _by_slabs(self, x: Tensor) -> Tensor:
        num_blocks = self._packed.shape[0] // BLOCK_ROWS
        step = max(1, SLAB_BYTES // (BLOCK_ROWS * self._num_in * x.element_size()))
        result = x.new_empty((x.shape[0], num_blocks * BLOCK_ROWS))
        for first in range(0, num_blocks, step):
            last = min(first + step, num_blocks)
            result[:, first * BLOCK_ROWS : last * BLOCK_ROWS] = x @ self._dequantized(first, last)
        return result

    def _dequantized(self, first: int, last: int) -> Tensor:
        """Blocks first to last, transposed: [in, outputs]."""
        num_blocks, num_groups = last - first, self._num_in // self._group_size
        pairs = self._scales_zeros[:, first * BLOCK_ROWS : last * BLOCK_ROWS]
        by_half = pairs.view(num_groups, num_blocks, 2, HALF_BLOCK, 2)  # [groups, blocks, 2, 32, 2]
        scales, zeros = by_half[..., 0].contiguous(), by_half[..., 1].contiguous()
        packed = self._packed[first * BLOCK_ROWS : last * BLOCK_ROWS].view(-1).view(torch.int64)  # eight at a time
        result = scales.new_empty((num_groups, self._group_size, num_blocks, 2, HALF_BLOCK))
        for half, bits in enumerate((packed & LOW_HALVES, (packed >> 4).bitwise_and_(LOW_HALVES))):
            values = bits.view(torch.int8).sub_(MIDDLE_INT4).to(scales.dtype)
            values = values.view(num_blocks, num_groups, self._group_size, HALF_BLOCK).permute(1, 2, 0, 3)
            half_scales, half_zeros = scales[:, None, :, half], zeros[:, None, :, half]  # [groups, 1, blocks, 32]
            torch.addcmul(half_zeros, values, half_scales, out=result[..., half, :])
        return result.view(self._num_in, num_blocks * BLOCK_ROWS)


def _pack(values: Tensor) -> Tensor:
    """As the operator reads them, a slab at a time: it wants int32. values: [blocks * 64, in / 2], see quantize."""
    packed = torch.empty_like(values)
    step = max(1, SLAB_BYTES // values[:BLOCK_ROWS].numel()) * BLOCK_ROWS
    for start in range(0, len(values), step):
        slab = unpack_nibbles(values[start : start + step]).to(torch.int32)
        packed[start : start + step] = torch.ops.aten._convert_weight_to_int4pack_for_cpu(slab, 1)
    return packed


def make_quantized_linear(weight: QuantizedWeight, bias: Tensor | None) -> SlabLinear | Int8Linear | Int4Linear:
    """A product with weight [out, in], plus bias [out] or None."""
    if weight.values.device.type == "cpu":
        if weight.values.dtype == torch.int8 and has_int8_operator(weight.dtype):
            return Int8Linear(weight, bias)
        if weight.zeros is not None and weight.group_size in OPERATOR_GROUPS and has_int4_operator(weight.dtype):
            return Int4Linear(weight, bias)
    return SlabLinear(weight, bias)


@cache
def has_int8_operator(dtype: torch.dtype) -> bool:
    """Whether this torch has it for such rows, and it gives the product."""
    return _works(Int8Linear, "int8", dtype, INT8_ROWS)


@cache
def has_int4_operator(dtype: torch.dtype) -> bool:
    """Whether this torch has it for such rows, with the layout that is known here."""
    return _works(Int4Linear, "int4", dtype, INT4_ROWS)


def _works(kind: type[Int8Linear] | type[Int4Linear], scheme: str, dtype: torch.dtype, most_rows: int) -> bool:
    """Small integers: exact in any order."""
    weight = (torch.arange(128 * 64).mul(7).remainder(16) - 8).view(128, 64).float()
    weight[:, 0], weight[:, 32] = -8, 7  # all of a group's integers: its scale is 1
    x = (torch.arange(3 * 64).remainder(5) - 2).view(3, 64).to(dtype)
    try:
        quantized = quantize(weight.to(dtype), scheme)
        linear = kind(quantized, None)
        want = F.linear(x.float(), dequantize(quantized, torch.float32))
        many = x.repeat(most_rows, 1)
        few_match = torch.allclose(linear(x).float(), want, rtol=0.01, atol=0.05)
        return few_match and torch.allclose(linear(many)[:3].float(), want, rtol=0.01, atol=0.05)
    except (AttributeError, RuntimeError):  # not in this build, or with another signature
        return False
