"""Matrices of GPTQ and AWQ checkpoints: several tensors of packed integers for each, to values, scales and zeros.

Pure tensor maths; which tensors belong together is checkpoint.py's. Sources: AutoGPTQ, nn_modules/qlinear, pack();
AutoAWQ, modules/linear/gemm.py, WQLinear_GEMM.from_linear. Thread: engine (at start).
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from core.errors import BadCheckpoint
from core.prequantized import PackedConfig
from gpu.quantize import MIDDLE_INT4

# name endings -> safetensors' names of their formats
PARTS = {"qweight": ("I32",), "qzeros": ("I32",), "scales": ("F16", "BF16", "F32"), "g_idx": ("I32",)}
NEEDED_PARTS = ("qweight", "qzeros", "scales")  # without g_idx neighbours are a group
# AWQ: of eight neighbouring outputs, the place of each among the nibbles
AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
INTEGER_BITS = 32


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
        """As QuantizedWeight has it: "values", unpacked; "scales" or "zeros": what the middle integer stands for.

        Args:
            group_size: inputs that share a scale there: of one group here, or all of several.
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
    scales = parts["scales"].float().T.contiguous()
    if packing.method == "awq":
        values, zeros = _awq_columns(parts["qweight"]), _awq_columns(parts["qzeros"])
    else:
        values = _fields(parts["qweight"], packing.bits).transpose(1, 2).flatten(0, 1)  # [in, out]
        zeros = _fields(parts["qzeros"], packing.bits).flatten(1)  # [groups, out]
    zeros = (zeros + packing.zero_offset) & (2**packing.bits - 1)  # kernels keep the field's bits: 15 + 1 is 0
    zeros = zeros.float().T.contiguous()
    groups = _groups(packing, parts.get("g_idx"), len(values), scales.shape[1], name)
    return UnpackedWeight(values.T.contiguous(), scales, zeros, groups)


def part_shapes(packing: PackedConfig, num_out: int, num_in: int) -> dict[str, tuple[int, ...]]:
    """Of all parts of a matrix."""
    fields = INTEGER_BITS // packing.bits
    num_groups = 1 if packing.group_size is None else -(-num_in // packing.group_size)
    qweight = (num_in, num_out // fields) if packing.method == "awq" else (num_in // fields, num_out)
    scales = (num_groups, num_out)
    return {"qweight": qweight, "qzeros": (num_groups, num_out // fields), "scales": scales, "g_idx": (num_in,)}


def matrix_shape(packing: PackedConfig, qweight: tuple[int, ...]) -> tuple[int, int]:
    """[out, in] of a matrix, from the shape of its packed integers."""
    rows, columns = qweight
    fields = INTEGER_BITS // packing.bits
    return (columns * fields, rows) if packing.method == "awq" else (columns, rows * fields)


def _fields(packed: Tensor, bits: int) -> Tensor:
    """The low bits first. packed: [n, m], int32 → [n, m, 32 / bits], uint8."""
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
    return BadCheckpoint(cause, "download the model's directory again, or name another with --model.")
