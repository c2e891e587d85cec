"""Products with quantised matrices by a kernel, of any number of rows. Thread: engine.

Beside torch's operators and slabs (gpu/quantized_linear.py), which serve where this does not.
"""

from functools import cache

import torch
from torch import Tensor

from gpu.cpu_kernels.layout import BLOCK_OUTPUTS
from gpu.cpu_kernels.quantized_products import Arguments, multiply_quantized
from gpu.cpu_kernels.team import Kernel
from gpu.device import use_huge_pages
from gpu.quantize import FP8, QuantizedWeight, unpack_nibbles

PANEL_ROWS = 512  # at a time: their sums stay in a second-level cache
GROUP_STEP = 32  # inputs: groups are whole registers
# At a block's end the next one is asked for: of short blocks a thread takes several, where there are many.
SHORT_BLOCK_BYTES, SHORT_BLOCKS, SHORT_PIECES = 64 * 1024, 4, 8


def can_multiply(weight: QuantizedWeight) -> bool:
    """Whether the kernel knows such a matrix: integers, whole blocks of outputs and registers of inputs."""
    num_out, num_in = weight.shape
    return (
        weight.dtype == torch.bfloat16
        and weight.values.dtype != FP8
        and num_out % BLOCK_OUTPUTS == 0
        and num_in % GROUP_STEP == 0
        and (weight.zeros is None or weight.group_size % GROUP_STEP == 0)
    )


class QuantizedProduct:
    """One matrix's.

    Args:
        weight: one that it can_multiply; not kept.
        bias: [out], or None.
    """

    def __init__(self, kernel: Kernel, weight: QuantizedWeight, bias: Tensor | None) -> None:
        self._kernel = kernel
        self._num_out, num_in = weight.shape
        num_blocks = self._num_out // BLOCK_OUTPUTS
        values = _int8_blocks(weight.values) if weight.zeros is None else _int4_blocks(weight.values)
        scales = _scale_blocks(weight)
        self._kept = (values, scales, bias)  # own the memory
        use_huge_pages(values.data_ptr(), values.nbytes)
        self._arguments = Arguments(
            values=values.data_ptr(),
            scales=scales.data_ptr(),
            bias=0 if bias is None else bias.data_ptr(),
            num_pairs=num_in // 2,
            num_blocks=num_blocks,
            num_groups=weight.scales.shape[1],
            is_int4=weight.zeros is not None,
        )
        self._block_bytes = values.nbytes // max(1, num_blocks)

    def __call__(self, x: Tensor) -> Tensor:
        """x: [tokens, in]; returns [tokens, out]."""
        out = x.new_empty((x.shape[0], self._num_out))
        told, x_stride, out_stride = self._arguments, x.stride(0) * x.element_size(), self._num_out * x.element_size()
        told.x_stride, num_threads = x_stride, torch.get_num_threads()
        told.piece_blocks = self._piece_blocks(num_threads)
        for first in range(0, x.shape[0], PANEL_ROWS):
            told.next_piece, told.num_rows = 0, min(PANEL_ROWS, x.shape[0] - first)
            told.x, told.out = x.data_ptr() + first * x_stride, out.data_ptr() + first * out_stride
            self._kernel(told, num_threads)
        return out

    def _piece_blocks(self, num_threads: int) -> int:
        num_blocks = self._num_out // BLOCK_OUTPUTS
        has_many = num_blocks >= SHORT_BLOCKS * SHORT_PIECES * num_threads
        return SHORT_BLOCKS if has_many and self._block_bytes <= SHORT_BLOCK_BYTES else 1


@cache
def _kernel() -> Kernel:
    return Kernel(multiply_quantized)


def make_product(weight: QuantizedWeight, bias: Tensor | None) -> QuantizedProduct:
    """With one that it can_multiply."""
    return QuantizedProduct(_kernel(), weight, bias)


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
