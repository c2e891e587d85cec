"""Products of few rows with a prepacked matrix, by a kernel; of many rows by oneDNN. Thread: engine.

Both read the same memory: nothing is kept twice. oneDNN's layout is its own affair: of each shape one matrix is
compared with what the kernel expects, and where it differs oneDNN serves alone.
"""

import torch
from torch import Tensor

from gpu.cpu_kernels.products import BLOCK_OUTPUTS, Arguments, multiply_rows
from gpu.cpu_kernels.team import Kernel
from gpu.linear import Linear, RowLimit, packed_linear
from gpu.tied_head import blocks_of, can_gather


class PackedProduct:
    """One matrix's.

    Args:
        packed, weight: what pack() gave, in the layout that is known, and for what; the latter is not kept.
        bias: [out], or None.
    """

    def __init__(self, kernel: Kernel, limit: RowLimit, packed: Tensor, weight: Tensor, bias: Tensor | None) -> None:
        self._kernel = kernel
        self._limit = limit
        self._kept = (packed, bias)  # own the memory
        self._many_rows = packed_linear(packed, weight, bias)
        self._num_out, num_in = weight.shape
        self._arguments = Arguments(
            weights=torch.ops.mkldnn.data_ptr(packed),
            bias=0 if bias is None else bias.data_ptr(),
            num_pairs=num_in // 2,
            num_blocks=self._num_out // BLOCK_OUTPUTS,
        )

    def __call__(self, x: Tensor) -> Tensor:
        """x: [tokens, in]; returns [tokens, out]."""
        num_rows = x.shape[0]
        if not 0 < num_rows <= self._limit.rows:
            return self._many_rows(x)
        out = x.new_empty((num_rows, self._num_out))
        told = self._arguments
        told.next_piece = 0
        told.x, told.x_stride, told.out = x.data_ptr(), x.stride(0) * x.element_size(), out.data_ptr()
        told.num_rows = num_rows
        self._kernel(told, torch.get_num_threads())
        return out


class PackedProducts:
    """Makes the products of a model.

    Args:
        limit: shared by all of them.
    """

    def __init__(self, limit: RowLimit) -> None:
        self._limit = limit
        self._kernel = Kernel(multiply_rows)
        self._is_known: dict[torch.Size, bool] = {}

    def __call__(self, packed: Tensor, weight: Tensor, bias: Tensor | None) -> Linear:
        if weight.shape not in self._is_known:
            self._is_known[weight.shape] = is_layout_known(packed, weight)
        if not self._is_known[weight.shape]:
            return packed_linear(packed, weight, bias)
        return PackedProduct(self._kernel, self._limit, packed, weight, bias)


def is_layout_known(packed: Tensor, weight: Tensor) -> bool:
    """Whether it is packed in blocks of 64 outputs, pairs of inputs side by side, bit by bit. weight: [out, in]"""
    if not can_gather(weight.shape):
        return False
    blocks = blocks_of(packed, weight.shape).view(torch.int32).squeeze(-1)  # [out / 64, in / 2, 64]
    pairs = weight.contiguous().view(torch.int32).view(len(blocks), BLOCK_OUTPUTS, -1)
    return all(torch.equal(block, pair.T) for block, pair in zip(blocks, pairs, strict=True))
