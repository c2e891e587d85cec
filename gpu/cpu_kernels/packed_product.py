"""Products with a prepacked matrix, by a kernel or by oneDNN. Thread: engine.

Both read the same memory: nothing is kept twice. oneDNN's layout is its own affair: of each shape one matrix is
compared with what the kernel expects, and where it differs oneDNN serves alone, or, where oneDNN is no choice, a copy.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from gpu.cpu_kernels.layout import BLOCK_OUTPUTS, STEP_PAIRS
from gpu.cpu_kernels.products import Arguments, multiply_rows
from gpu.cpu_kernels.team import Kernel
from gpu.linear import Linear, ProductChoice, packed_linear
from gpu.tied_head import blocks_of, is_whole

PANEL_ROWS = 256  # at a time
# Of a panel's x: so much stays in a second-level cache from block to block. Of more, a part does, and is read for all
# blocks of a piece, of which there are at most so many.
KEPT_BYTES = 768 * 1024
MOST_PIECE_BLOCKS = 8


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
        self._num_out, self._num_in = weight.shape
        self._arguments = Arguments(
            weights=torch.ops.mkldnn.data_ptr(packed) if packed.is_mkldnn else packed.data_ptr(),
            bias=0 if bias is None else bias.data_ptr(),
            num_pairs=self._num_in // 2,
            num_blocks=self._num_out // BLOCK_OUTPUTS,
        )

    def __call__(self, x: Tensor) -> Tensor:
        """x: [tokens, in]; returns [tokens, out]."""
        if not self._choice.uses_kernel:
            return self._onednn(x)
        out = x.new_empty((x.shape[0], self._num_out))
        told, x_stride, out_stride = self._arguments, x.stride(0) * x.element_size(), self._num_out * x.element_size()
        told.x_stride, num_threads = x_stride, torch.get_num_threads()
        told.num_threads = num_threads
        for first in range(0, x.shape[0], PANEL_ROWS):
            told.next_piece, told.num_rows = 0, min(PANEL_ROWS, x.shape[0] - first)
            told.piece_blocks = self._piece_blocks(told.num_rows, num_threads)
            told.x, told.out = x.data_ptr() + first * x_stride, out.data_ptr() + first * out_stride
            self._kernel(told, num_threads)
        return out

    def _piece_blocks(self, num_rows: int, num_threads: int) -> int:
        """As many for each thread."""
        if 2 * num_rows * self._num_in <= KEPT_BYTES:
            return 1
        num_blocks = self._num_out // BLOCK_OUTPUTS
        rounds = -(-num_blocks // (num_threads * MOST_PIECE_BLOCKS))
        return -(-num_blocks // (num_threads * rounds))


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
        if self._is_known[weight.shape]:
            return PackedProduct(self._kernel, self._choice, packed, weight, bias)
        return packed_linear(packed, weight, bias) if self._choice.is_open else self._padded(weight, bias)

    def _padded(self, weight: Tensor, bias: Tensor | None) -> Linear:
        """The kernel's product, of a copy in the layout that it knows."""
        num_out, num_in = weight.shape
        missing = -num_in % (2 * STEP_PAIRS)
        weight = F.pad(weight, (0, missing, 0, -num_out % BLOCK_OUTPUTS))
        if bias is not None:
            bias = F.pad(bias, (0, len(weight) - num_out))
        packed = weight.view(-1, BLOCK_OUTPUTS, weight.shape[1] // 2, 2).transpose(1, 2).contiguous()
        product = PackedProduct(self._kernel, self._choice, packed, weight, bias)
        if missing:
            return lambda x: product(F.pad(x, (0, missing)))[:, :num_out]
        return product if num_out == len(weight) else lambda x: product(x)[:, :num_out]


def is_layout_known(packed: Tensor, weight: Tensor) -> bool:
    """Whether it is packed in blocks of 64 outputs, pairs of inputs side by side, bit by bit. weight: [out, in]"""
    if not is_whole(packed, weight.shape):
        return False
    blocks = blocks_of(packed, weight.shape).view(torch.int32).squeeze(-1)  # [out / 64, in / 2, 64]
    pairs = weight.contiguous().view(torch.int32).view(len(blocks), BLOCK_OUTPUTS, -1)
    return all(torch.equal(block, pair.T) for block, pair in zip(blocks, pairs, strict=True))
