"""Weights as 8- or 4-bit numbers with scales: quantise and dequantise. Pure tensor maths, on the tensor's device.

int8: one scale per row (output channel), symmetric. fp8: the same of floats with four bits of exponent and three of
mantissa (e4m3fn: arXiv:2209.05433), which follow small weights closer and large ones less. int4: a scale and a zero per
group of neighbours in a row, asymmetric. Scales and zeros are bfloat16, and the numbers are chosen for the rounded
ones. What a checkpoint stores as fp8 keeps its own scales, in float32, which may be of groups as well.

Only matrices of layers are quantised: embedding and head stay in the serving format. They are read by row or share
their numbers (tied), and an error in the head goes into every logit; norms, biases and routers are too small to matter.
Thread: engine.

Greedy agreement of the demonstration model with itself in bfloat16, over the held text: int8 98.4 %; int4 in groups of
32, 64 and 128: 79.0, 77.7 and 73.4 %; with the head quantised too 98.0 and 76.6 %.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from core.errors import BadCheckpoint

# Of int4, the first that divides a row. Smaller ones follow the weights closer: 64 costs 4.5 bits a weight, 32 costs 5.
GROUP_SIZES = (64, 32)
MAX_INT8 = 127
FP8 = torch.float8_e4m3fn
MAX_FP8 = 448.0
MAX_INT4 = 15
MIDDLE_INT4 = 8  # the integer that stands for the zero
LEAST_GROUP = 32  # inputs that share a scale: the least that a matrix instruction takes of each half of a byte
BLOCK_ROWS = 64  # outputs that torch's int4 operator keeps together
OPERATOR_GROUPS = (256, 128, 64, 32)  # inputs that may share a scale there
SLAB_ELEMENTS = 2**20  # quantised at once: what is float32 beside the weight


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """A matrix, or a stack of them: weight = (value - middle) * scale + zero.

    Args:
        dtype: of the weight that it was, and of the rows that it multiplies.
        values: int8 and fp8: [..., out, in], int8 or float8_e4m3fn; int4: [..., out, in / 2], uint8, the even column in
            the low half.
        scales: int8: [..., out, 1]; fp8: likewise, or [..., out, in / group]; int4: [..., out, in / group]; bfloat16,
            a checkpoint's of fp8 float32.
        zeros: int4: as scales; others: None.
    """

    dtype: torch.dtype
    values: Tensor
    scales: Tensor
    zeros: Tensor | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the matrix: [..., out, in]."""
        *rows, width = self.values.shape
        return (*rows, width if self.zeros is None else 2 * width)

    @property
    def group_size(self) -> int:
        return self.shape[-1] // self.scales.shape[-1]

    def __getitem__(self, index: int | slice) -> "QuantizedWeight":
        """Rows, or one matrix of a stack."""
        zeros = None if self.zeros is None else self.zeros[index]
        return QuantizedWeight(self.dtype, self.values[index], self.scales[index], zeros)


Weight = Tensor | QuantizedWeight


def floats(weight: Weight) -> Tensor:
    """A weight that is not quantised: not yet, or never."""
    assert isinstance(weight, Tensor)
    return weight


def group_size_of(num_in: int) -> int | None:
    """Of int4 rows so long; None: no size divides them."""
    return next((size for size in GROUP_SIZES if num_in % size == 0), None)


def kept_group(stored: int | None, num_in: int) -> int | None:
    """Inputs of a checkpoint's row, or of the part of it that a rank has, that share a scale once it is loaded.

    Stored groups that do not divide the row, or within which a part begins, are cut into smaller ones.

    Args:
        stored: inputs that share one in the checkpoint; None: all of a row.
    Returns:
        None: they would be too small for kernels.
    """
    size = num_in if stored is None else math.gcd(stored, num_in)
    return size if stored is None or size % LEAST_GROUP == 0 else None


def split_groups(weight: QuantizedWeight) -> QuantizedWeight:
    """The same int4 weight in groups that torch's operator reads, where its own are a multiple of those."""
    assert weight.zeros is not None
    repeats = weight.group_size // operator_group_size(weight.group_size)
    scales, zeros = (part.repeat_interleave(repeats, -1) for part in (weight.scales, weight.zeros))
    return QuantizedWeight(weight.dtype, weight.values, scales, zeros)


def operator_group_size(group_size: int) -> int:
    """The largest that torch's int4 operator reads and that divides this one; itself where none does."""
    return next((size for size in OPERATOR_GROUPS if group_size % size == 0), group_size)


def can_quantize(scheme: str, num_in: int) -> bool:
    """Whether rows so long can be stored so; those that cannot stay in the serving format."""
    return scheme != "int4" or group_size_of(num_in) is not None


def stored_bytes(shape: tuple[int, ...], scheme: str, dtype: torch.dtype, group_size: int | None = None) -> int:
    """Of a quantised matrix, or a stack, ready to multiply: an upper bound.

    int4's operator wants outputs in blocks of 64, and scales and zeros in dtype; int8's wants a copy of its scales.

    Args:
        group_size: of a checkpoint's int4 or fp8, whose scales are float32; None: of what quantize() makes.
    """
    *stack, num_out, num_in = shape
    if scheme == "fp8" and group_size is not None:
        return math.prod(stack) * num_out * (num_in + num_in // group_size * torch.float32.itemsize)
    if scheme != "int4":
        return math.prod(stack) * num_out * (num_in + 2 + dtype.itemsize)
    group_size = group_size or group_size_of(num_in)
    assert group_size is not None
    padded = -(-num_out // BLOCK_ROWS) * BLOCK_ROWS
    return math.prod(stack) * padded * (num_in // 2 + num_in // group_size * 2 * dtype.itemsize)


def quantize(weight: Tensor, scheme: str) -> QuantizedWeight:
    """Round to the nearest integers. weight: [..., out, in], any float format, of a width that can_quantize.

    A weight moves by at most half its scale, and as much as the zero's rounding (2 ** -8 of it).

    Raises:
        BadCheckpoint: a number is not finite.
    """
    num_in = weight.shape[-1]
    rows = weight.reshape(-1, num_in)
    group_size = group_size_of(num_in) if scheme == "int4" else num_in
    assert group_size is not None
    parts = []
    for start, end in _slabs(rows.shape):
        groups = rows[start:end].float().view(end - start, -1, group_size)  # [rows, groups, group]
        if not groups.isfinite().all():
            raise BadCheckpoint("A weight to be quantised is not a finite number.", "serve it without --quantize.")
        parts.append(_FROM_GROUPS[scheme](groups))
    values, scales, *zeros = (torch.cat(part).view(*weight.shape[:-1], -1) for part in zip(*parts, strict=True))
    return QuantizedWeight(weight.dtype, values, scales, *zeros)


def dequantize(weight: QuantizedWeight, dtype: torch.dtype) -> Tensor:
    """The matrix again, [..., out, in]: computed in dtype, which rounds as products in that format do."""
    if weight.zeros is None:
        groups = weight.values.to(dtype).view(*weight.scales.shape, -1)  # [..., out, groups, group]
        return groups.mul_(weight.scales.unsqueeze(-1)).flatten(-2)  # float32 scales are not rounded first
    values = unpack_nibbles(weight.values).view(torch.int8).sub_(MIDDLE_INT4).to(dtype)
    groups = values.view(*weight.scales.shape, weight.group_size)
    scales, zeros = weight.scales.to(dtype).unsqueeze(-1), weight.zeros.to(dtype).unsqueeze(-1)
    return torch.addcmul(zeros, groups, scales).flatten(-2)


def pack_nibbles(values: Tensor) -> Tensor:
    """[..., 2 * n] of 0 to 15 → [..., n] bytes, the even one low."""
    low, high = values.view(*values.shape[:-1], -1, 2).unbind(-1)
    return low | (high << 4)


def unpack_nibbles(packed: Tensor) -> Tensor:
    """[..., n] bytes → [..., 2 * n] of 0 to 15, uint8."""
    return torch.stack([packed & 15, packed >> 4], -1).flatten(-2)


def round_up_to_bfloat16(values: Tensor) -> Tensor:
    """The nearest bfloat16 that is not smaller. values: float32, not negative."""
    bits = values.contiguous().view(torch.int32)
    return ((bits + 0xFFFF) >> 16).to(torch.int16).view(torch.bfloat16)  # a float's first half is a bfloat16


def _to_int8(groups: Tensor) -> tuple[Tensor, Tensor]:
    scales = _usable(round_up_to_bfloat16(groups.abs().amax(-1) / MAX_INT8))  # [rows, 1]
    values = (groups / scales.float().unsqueeze(-1)).round_().clamp_(-MAX_INT8, MAX_INT8)
    return values.to(torch.int8).flatten(1), scales


def _to_fp8(groups: Tensor) -> tuple[Tensor, Tensor]:
    scales = _usable(round_up_to_bfloat16(groups.abs().amax(-1) / MAX_FP8))  # [rows, 1]
    return (groups / scales.float().unsqueeze(-1)).clamp_(-MAX_FP8, MAX_FP8).to(FP8).flatten(1), scales


def _to_int4(groups: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    low, high = groups.aminmax(dim=-1)
    scales = _usable(round_up_to_bfloat16((high - low) / MAX_INT4))  # [rows, groups]
    zeros = (low + MIDDLE_INT4 * scales.float()).bfloat16()
    values = (groups - zeros.float().unsqueeze(-1)) / scales.float().unsqueeze(-1)
    values = values.add_(MIDDLE_INT4).round_().clamp_(0, MAX_INT4).to(torch.uint8)
    return pack_nibbles(values.flatten(1)), scales, zeros


_FROM_GROUPS: dict[str, Callable[[Tensor], tuple[Tensor, ...]]] = {
    "int8": _to_int8,
    "fp8": _to_fp8,
    "int4": _to_int4,
}
"""float32 [rows, groups, group] to values, scales and perhaps zeros"""


def _usable(scales: Tensor) -> Tensor:
    """All weights of a group alike: any scale does, but what is divided by."""
    return scales.masked_fill_(scales == 0, 1.0)


def _slabs(shape: torch.Size) -> Iterator[tuple[int, int]]:
    num_rows, num_in = shape
    step = max(1, SLAB_ELEMENTS // num_in)
    return ((start, min(start + step, num_rows)) for start in range(0, num_rows, step))
