"""Matrices that a checkpoint stores as 8-bit floats (e4m3) with scales: to floats, or to what kernels read.

Pure tensor maths; which tensors belong together is checkpoint.py's, how they are scaled core/prequantized.py's. Scales
are named by their meaning to who computes with them: weight_scale_inv and weight_scale are both multiplied by. Thread:
engine (at start).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from core.prequantized import Fp8Config
from gpu.quantize import FP8, SLAB_ELEMENTS

FP8_FORMAT = "F8_E4M3"  # safetensors' name
SCALES = ("weight_scale_inv", "weight_scale")
# Of activations, keys and values, which are not rounded here.
UNREAD_SCALES = tuple(f".{name}_scale" for name in ("input", "activation", "output", "q", "k", "v", "kv"))


@dataclass(frozen=True, slots=True)
class Fp8Weight:
    """weight[out, in] = value * scale, of its block.

    Args:
        values: [out, in], float8_e4m3fn.
        scales: float32, [row blocks, blocks of inputs]: see Fp8Config.
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
        num_out, num_in = values.shape
        if packing.block is not None:
            return cls(values, scales, packing.block)
        return cls(values, scales.reshape(-1, 1), (num_out // max(1, scales.numel()), num_in))

    def floats(self, dtype: torch.dtype) -> Tensor:
        """[out, in], rounded once."""
        num_out, num_in = self.values.shape
        group_size = math.gcd(self.block[1], num_in)
        scales, found = self.part("scales", group_size), torch.empty((num_out, num_in), dtype=dtype)
        step = max(1, SLAB_ELEMENTS // num_in)
        for start in range(0, num_out, step):
            rows = slice(start, start + step)
            groups = self.values[rows].float().view(-1, scales.shape[1], group_size)
            found[rows] = groups.mul_(scales[rows].unsqueeze(-1)).flatten(1)
        return found

    def part(self, name: str, group_size: int) -> Tensor:
        """ "values": [out, in], bytes; "scales": float32 [out, in / group_size].

        Args:
            group_size: divides the inputs of a block, or all.
        """
        if name == "values":
            return self.values.view(torch.uint8)
        num_out, num_in = self.values.shape
        columns = torch.arange(0, num_in, group_size) // self.block[1]
        return self.scales[:, columns].repeat_interleave(self.block[0], 0)[:num_out]


def is_scale_of(shape: tuple[int, ...], scale_shape: tuple[int, ...], packing: Fp8Config) -> bool:
    """Whether a tensor of scales is for a matrix [out, in]."""
    if packing.block is None:
        return scale_shape in ((), (1,), (1, 1), (shape[0],), (shape[0], 1))
    return scale_shape == _num_blocks(shape, packing.block)


def described_scales(shape: tuple[int, ...], packing: Fp8Config) -> str:
    """What is_scale_of takes."""
    return f"one, or {[shape[0], 1]}" if packing.block is None else f"{list(_num_blocks(shape, packing.block))}"


def _num_blocks(shape: tuple[int, ...], block: tuple[int, int]) -> tuple[int, ...]:
    return tuple(-(-size // of_block) for size, of_block in zip(shape, block, strict=True))
