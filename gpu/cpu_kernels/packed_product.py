"""Products with a prepacked matrix, by a kernel or by oneDNN. Thread: engine.

Both read the same memory: nothing is kept twice. oneDNN's layout is its own affair: of each shape one matrix is
compared with what the kernel expects, and where it differs oneDNN serves alone.
"""

import torch
from torch import Tensor

from gpu.cpu_kernels.products import BLOCK_OUTPUTS, Arguments, multiply_rows
from gpu.cpu_kernels.team import Kernel
from gpu.linear import Linear, ProductChoice, packed_linear
from gpu.tied_head import blocks_of, can_gather

PANEL_ROWS = 96  # at a time: with a part of a block they lie in a second-level cache


class PackedProduct:
    """One matrix's.

    Args:
        packed, weight: what pack() gave, in the layout that is known, and for what; the latter is not kept.
        bias: [out], or None.
    """

    def __init__(
        self, kernel: Kernel, choice: ProductChoice, packed: Tensor, weight: Tensor, bias: Tensor | None
    ) -> None:
        self._kernel = kernel
        self._choice = choice
        self._kept = (packed, bias)  # own the memory
        self._onednn = packed_linear(packed, weight, bias)
        self._num_out, num_in = weight.shape
        self._arguments = Arguments(
            weights=torch.ops.mkldnn.data_ptr(packed),
            bias=0 if bias is None else bias.data_ptr(),
            num_pairs=num_in // 2,
            num_blocks=self._num_out // BLOCK_OUTPUTS,
        )

    def __call__(self, x: Tensor) -> Tensor:
        """x: [tokens, in]; returns [tokens, out]."""
        if not self._choice.uses_kernel:
            return self._onednn(x)
        out = x.new_empty((x.shape[0], self._num_out))
        told, x_stride, out_stride = self._arguments, x.stride(0) * x.element_size(), self._num_out * x.element_size()
        told.x_stride = x_stride
        for first in range(0, x.shape[0], PANEL_ROWS):
            told.next_piece, told.num_rows = 0, min(PANEL_ROWS, x.shape[0] - first)
            told.x, told.out = x.data_ptr() + first * x_stride, out.data_ptr() + first * out_stride
            self._kernel(told, torch.get_num_threads())
        return out


class PackedProducts:
    """Makes the products of a model.

    Args:
        choice: shared by all of them.
    """

    def __init__(self, choice: ProductChoice) -> None:
        self._choice = choice
        self._kernel = Kernel(multiply_rows)
        self._is_known: dict[torch.Size, bool] = {}

    def __call__(self, packed: Tensor, weight: Tensor, bias: Tensor | None) -> Linear:
        if weight.shape not in self._is_known:
            self._is_known[weight.shape] = is_layout_known(packed, weight)
        if not self._is_known[weight.shape]:
            return packed_linear(packed, weight, bias)
        return PackedProduct(self._kernel, self._choice, packed, weight, bias)


def is_layout_known(packed: Tensor, weight: Tensor) -> bool:
    """Whether it is packed in blocks of 64 outputs, pairs of inputs side by side, bit by bit. weight: [out, in]"""
    if not can_gather(weight.shape):
        return False
    blocks = blocks_of(packed, weight.shape).view(torch.int32).squeeze(-1)  # [out / 64, in / 2, 64]
    pairs = weight.contiguous().view(torch.int32).view(len(blocks), BLOCK_OUTPUTS, -1)
    return all(torch.equal(block, pair.T) for block, pair in zip(blocks, pairs, strict=True))
