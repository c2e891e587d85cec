"""Prequantized matrices of a checkpoint: to floats, or to what kernels read. Thread: engine (at start).

Integers (GPTQ, AWQ, compressed-tensors): several tensors of packed integers for each matrix become values, scales and
zeros. 8-bit floats (e4m3) have scales, under one of two names; weight_scale_inv and weight_scale are both factors of
the weight. Pure tensor maths: checkpoint.py finds the tensors of a matrix, core/prequantized.py reads config.json.

Sources: AutoGPTQ, nn_modules/qlinear, pack(); AutoAWQ, modules/linear/gemm.py, WQLinear_GEMM.from_linear;
compressed-tensors, compressors/pack_quantized, pack_to_int32().
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from core.errors import BadCheckpoint
from core.prequantized import Fp8Config, PackedConfig
from gpu.quant import FP8, MIDDLE_INT4, SLAB_ELEMENTS

# name endings -> safetensors' names of their formats
PARTS = {"qweight": ("I32",), "qzeros": ("I32",), "scales": ("F16", "BF16", "F32"), "g_idx": ("I32",)}
# compressed-tensors' names of the same, and a tensor that tells the shape
COMPRESSED = "compressed-tensors"
COMPRESSED_PARTS = {
    "weight_packed": "qweight",
    "weight_zero_point": "qzeros",
    "weight_scale": "scales",
    "weight_g_idx": "g_idx",
}
SHAPE_PART = ".weight_shape"
# AWQ: the nibble of each of eight neighbouring outputs
AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
INTEGER_BITS = 32
FP8_FORMAT = "F8_E4M3"  # safetensors' name
SCALES = ("_scale_inv", "_scale")  # behind the name of what they multiply
# Scales of activations, keys and values, which are not quantised here.
UNREAD_SCALES = tuple(f".{name}_scale" for name in ("input", "activation", "output", "q", "k", "v", "kv"))


@dataclass(frozen=True, slots=True)
class UnpackedWeight:
    """weight[out, in] = (value - zero) * scale, of the input's group.

    Args:
        values: [out, in], uint8.
        scales: [out, groups], float32.
        zeros: [out, groups], float32, whole numbers.
        groups: [in], the group of each input; None: neighbours, equally many each.
    """

    values: Tensor
    scales: Tensor
    zeros: Tensor
    groups: Tensor | None

    def floats(self, dtype: torch.dtype) -> Tensor:
        """[out, in]"""
        groups = self._input_groups
        return self.values.float().sub_(self.zeros[:, groups]).mul_(self.scales[:, groups]).to(dtype)

    def part(self, name: str, group_size: int) -> Tensor:
        """A field of QuantizedWeight: "values", unpacked; "scales"; or "zeros", what the middle integer stands for.

        Args:
            group_size: inputs that share a scale there: all or a part of one group here.
        """
        if name == "values":
            return self.values
        groups = self._input_groups[::group_size]
        scales = self.scales[:, groups]
        return scales if name == "scales" else (MIDDLE_INT4 - self.zeros[:, groups]) * scales

    @property
    def _input_groups(self) -> Tensor:
        """[in], the group of each."""
        num_in, num_groups = self.values.shape[1], self.scales.shape[1]
        return torch.arange(num_in) // (num_in // num_groups) if self.groups is None else self.groups


def unpack(packing: PackedConfig, parts: Mapping[str, Tensor], name: str) -> UnpackedWeight:
    """
    Args:
        parts: by PARTS' names, of the shapes of part_shapes.
        name: for the error.

    Raises:
        BadCheckpoint: an input is of no group, or g_idx contradicts desc_act.
    """
    if packing.method == COMPRESSED:
        return _unpack_rows(packing, parts, name)
    scales = parts["scales"].float().T.contiguous()
    if packing.method == "awq":
        values, zeros = _awq_columns(parts["qweight"]), _awq_columns(parts["qzeros"])
    else:
        values = _fields(parts["qweight"], packing.bits).transpose(1, 2).flatten(0, 1)  # [in, out]
        zeros = _fields(parts["qzeros"], packing.bits).flatten(1)  # [groups, out]
    # The kernels that wrote it wrap within the field: 15 + 1 is 0
    zeros = (zeros + packing.zero_offset) & (2**packing.bits - 1)
    zeros = zeros.float().T.contiguous()
    groups = _groups(packing, parts.get("g_idx"), len(values), scales.shape[1], name)
    return UnpackedWeight(values.T.contiguous(), scales, zeros, groups)


def _unpack_rows(packing: PackedConfig, parts: Mapping[str, Tensor], name: str) -> UnpackedWeight:
    """compressed-tensors': values are packed along a row's inputs, zeros along the outputs."""
    values, scales = _fields(parts["qweight"], packing.bits).flatten(1), parts["scales"].float()
    zeros = torch.full_like(scales, 2 ** (packing.bits - 1))
    if packing.has_zeros:
        zeros = _fields(parts["qzeros"], packing.bits).transpose(1, 2).flatten(0, 1)[: len(values)].float()
    groups = _groups(packing, parts.get("g_idx"), values.shape[1], scales.shape[1], name)
    return UnpackedWeight(values, scales, zeros, groups)


def part_shapes(packing: PackedConfig, num_out: int, num_in: int) -> dict[str, tuple[int, ...]]:
    """Shapes of all parts of a matrix."""
    fields = INTEGER_BITS // packing.bits
    num_groups = 1 if packing.group_size is None else -(-num_in // packing.group_size)
    if packing.method == COMPRESSED:
        qzeros, scales = (-(-num_out // fields), num_groups), (num_out, num_groups)
        return {"qweight": (num_out, num_in // fields), "qzeros": qzeros, "scales": scales, "g_idx": (num_in,)}
    qweight = (num_in, num_out // fields) if packing.method == "awq" else (num_in // fields, num_out)
    scales = (num_groups, num_out)
    return {"qweight": qweight, "qzeros": (num_groups, num_out // fields), "scales": scales, "g_idx": (num_in,)}


def matrix_shape(packing: PackedConfig, qweight: tuple[int, ...]) -> tuple[int, int]:
    """[out, in] of a matrix, from the shape of its packed integers."""
    rows, columns = qweight
    fields = INTEGER_BITS // packing.bits
    if packing.method == COMPRESSED:
        return rows, columns * fields
    return (columns * fields, rows) if packing.method == "awq" else (columns, rows * fields)


def _fields(packed: Tensor, bits: int) -> Tensor:
    """Unpack, the low bits first: [n, m], int32 → [n, m, 32 / bits], uint8."""
    octets = packed.contiguous().view(torch.uint8).view(*packed.shape, 4)
    return octets if bits == 8 else torch.stack([octets & 15, octets >> 4], -1).flatten(-2)


def _awq_columns(packed: Tensor) -> Tensor:
    """[n, m / 8], int32 → [n, m], uint8"""
    return _fields(packed, 4)[..., list(AWQ_PLACES)].flatten(1)


def _groups(packing: PackedConfig, stored: Tensor | None, num_in: int, num_groups: int, name: str) -> Tensor | None:
    size = packing.group_size or num_in
    neighbours = torch.arange(num_in) // size
    if stored is None or torch.equal(stored.long(), neighbours):
        return None if num_in % size == 0 else neighbours
    if not packing.has_order:
        raise _bad(f"{name}.g_idx names other groups than neighbours, but desc_act is not set.")
    if stored.min() < 0 or stored.max() >= num_groups:
        raise _bad(f"{name}.g_idx names groups that are not among the {num_groups} there are.")
    return stored.long()


def _bad(cause: str) -> BadCheckpoint:
    return BadCheckpoint(cause, "download the model's directory again, or name another.")


@dataclass(frozen=True, slots=True)
class Fp8Weight:
    """weight[out, in] = value * scale, of its block; or a stack of such.

    Args:
        values: [..., out, in], float8_e4m3fn.
        scales: float32, [..., row blocks, blocks of inputs]: see Fp8Config.
        block: (outputs, inputs) of one.
    """

    values: Tensor
    scales: Tensor
    block: tuple[int, int]

    @classmethod
    def of(cls, packing: Fp8Config, parts: Mapping[str, Tensor]) -> "Fp8Weight":
        """
        Args:
            parts: "weight" and its scale, of a shape that is_scale_of.
        """
        values = parts["weight"].view(FP8)
        (scales,) = (part.float() for name, part in parts.items() if name in SCALES)
        *stack, num_out, num_in = values.shape
        if packing.block is not None:
            return cls(values, scales, packing.block)
        scales = scales.reshape(*stack, -1, 1) if scales.numel() > 1 else scales.expand(*stack, 1, 1)
        return cls(values, scales, (num_out // max(1, scales.shape[-2]), num_in))

    def floats(self, dtype: torch.dtype) -> Tensor:
        """[..., out, in], rounded once."""
        num_in = self.values.shape[-1]
        group_size = math.gcd(self.block[1], num_in)
        scales, values = self.part("scales", group_size).flatten(0, -2), self.values.flatten(0, -2)
        found = torch.empty(values.shape, dtype=dtype)
        step = max(1, SLAB_ELEMENTS // num_in)
        for start in range(0, len(values), step):
            rows = slice(start, start + step)
            groups = values[rows].float().view(-1, scales.shape[1], group_size)
            found[rows] = groups.mul_(scales[rows].unsqueeze(-1)).flatten(1)
        return found.view(self.values.shape)

    def part(self, name: str, group_size: int) -> Tensor:
        """ "values": [..., out, in], bytes; "scales": float32 [..., out, in / group_size].

        Args:
            group_size: divides the inputs of a block, or all.
        """
        if name == "values":
            return self.values.view(torch.uint8)
        num_out, num_in = self.values.shape[-2:]
        columns = torch.arange(0, num_in, group_size) // self.block[1]
        return self.scales[..., columns].repeat_interleave(self.block[0], -2)[..., :num_out, :]


def is_scale_of(shape: tuple[int, ...], scale_shape: tuple[int, ...], packing: Fp8Config) -> bool:
    """Whether a tensor of scales is for a matrix [out, in], or a stack [..., out, in].

    Without blocks it may be one scale, one for each matrix of a stack, or one for each output, with or without
    dimensions of 1 at the end.
    """
    *stack, num_out, _ = shape
    if packing.block is not None:
        return scale_shape == _num_blocks(shape, packing.block)
    whole = ((), (1,), (1, 1), (*stack,), (*stack, 1), (*stack, 1, 1))
    return scale_shape in (*whole, (*stack, num_out), (*stack, num_out, 1))


def described_scales(shape: tuple[int, ...], packing: Fp8Config) -> str:
    """The shapes that is_scale_of accepts, for an error."""
    *stack, num_out, _ = shape
    if packing.block is not None:
        return f"{list(_num_blocks(shape, packing.block))}"
    return ", or ".join(["one", *([str(stack)] if stack else []), f"{[*stack, num_out, 1]}"])


def _num_blocks(shape: tuple[int, ...], block: tuple[int, int]) -> tuple[int, ...]:
    *stack, num_out, num_in = shape
    return (*stack, -(-num_out // block[0]), -(-num_in // block[1]))
