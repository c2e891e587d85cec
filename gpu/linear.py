"""Products with a weight matrix: plain, by oneDNN in float32 on a CPU, or prepacked for bf16 there. Thread: engine.

Prepacking stores a weight in the layout that oneDNN's kernels read: a decode step of a 0.5B body took 20.6 ms so,
against 44.9 with F.linear (one Zen 5 core). In float32 it reads a weight as it lies as fast, and adds a row's numbers
in one order in any company, as MKL, behind F.linear, does not. The operators are torch's own but not public: they are
tried at start, and where they fail or differ F.linear serves.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gpu.device import cpu_flags, use_huge_pages

Linear = Callable[[Tensor], Tensor]
"""[tokens, in] -> [tokens, out]"""


MakeProduct = Callable[[Tensor, Tensor, Tensor | None], Linear]
"""(what pack() gave, for which weight [out, in], bias [out] or None) -> the product, which does not keep the weight"""


MOST_WHOLE_INPUTS = 1024
COMPANY_ROWS = 16
MOST_PADDED_ROWS = 16


@dataclass(slots=True)
class ProductChoice:
    """Whether a kernel multiplies, or oneDNN: for all products of a model, and any rows, as they round differently.

    Args:
        is_open: whether it is to be measured; not where oneDNN's rounding depends on how many rows there are.
    """

    uses_kernel: bool
    is_open: bool = True


def make_linear(weight: Tensor, bias: Tensor | None, product: MakeProduct | None) -> Linear:
    """A product with weight [out, in], plus bias [out] or None.

    Args:
        product: makes it of a packed copy of the weight; None: nothing is packed.
    """
    if product is not None:
        return product(pack(weight), weight, bias)
    if weight.dtype == torch.float32 and has_onednn(torch.float32, weight.device):
        return onednn_linear(weight, bias)
    linear = partial(F.linear, weight=weight, bias=bias)
    return _in_company(linear, 0) if weight.device.type == "cpu" and weight.dtype == torch.bfloat16 else linear


def pack(weight: Tensor) -> Tensor:
    """A weight [out, in] as oneDNN's kernels read it: an opaque tensor."""
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, 1)
    use_huge_pages(torch.ops.mkldnn.data_ptr(packed), torch.ops.mkldnn._nbytes(packed))
    return packed


def packed_linear(packed: Tensor, weight: Tensor, bias: Tensor | None) -> Linear:
    """See MakeProduct."""
    return onednn_linear(packed, bias)


def onednn_linear(weight: Tensor, bias: Tensor | None) -> Linear:
    """oneDNN's product. weight: what pack() gave, or as it lies, [out, in]."""
    product: Any = torch.ops.mkldnn._linear_pointwise.default

    def linear(x: Tensor) -> Tensor:
        num_rows, missing = x.shape[0], num_padding_rows(x.shape[0])
        result: Tensor = product(F.pad(x, (0, 0, 0, missing)) if missing else x, weight, bias, "none", [], "")
        return result[:num_rows] if missing else result

    return _in_company(linear)


def num_padding_rows(num_rows: int) -> int:
    """Zeros that follow more than 16 rows, an eighth at most: oneDNN compiles a primitive for each number of rows.

    Compiling costs a small model more than the zeros do, and what is freed of primitives leaves holes in the heap.
    """
    return -num_rows % min(MOST_PADDED_ROWS, 1 << max(0, num_rows.bit_length() - 4))


def keeps_rows() -> bool:
    """Whether oneDNN rounds a row of bf16 the same however many there are: by AMX it does not."""
    return "amx_bf16" not in cpu_flags()


def _in_company(linear: Linear, most_whole: int = MOST_WHOLE_INPUTS) -> Linear:
    """Rows of many inputs sixteen at a time, where oneDNN divides the inputs by how many rows and threads there are.

    Measured with AMX: up to 1,280 inputs any rows from two on come out the same of a packed matrix, of 1,408 not; of
    any, and of a plain one, sixteen do, with one thread and with two.

    Args:
        most_whole: inputs of which rows may come together.
    """
    if keeps_rows():
        return _never_alone(linear)

    def in_panels(x: Tensor) -> Tensor:
        if x.shape[1] <= most_whole:
            return never_alone(x)
        if x.shape[0] == COMPANY_ROWS:
            return linear(x)
        missing = -x.shape[0] % COMPANY_ROWS
        panels = F.pad(x, (0, 0, 0, missing)).view(-1, COMPANY_ROWS, x.shape[1])
        return torch.cat([linear(panel) for panel in panels])[: x.shape[0]]

    never_alone = _never_alone(linear)
    return in_panels


def _never_alone(linear: Linear) -> Linear:
    """One row is computed as two: oneDNN has a kernel of its own for one, which adds in another order.

    From two rows on a row's product is the same to the last bit, however many there are (measured with avx512_bf16);
    four cost what one does.
    """

    def in_company(x: Tensor) -> Tensor:
        return linear(x) if x.shape[0] > 1 else linear(x.expand(2, -1).contiguous())[:1]

    return in_company


def can_pack(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether products are to be prepacked: it is worth it, and they can be."""
    return dtype == torch.bfloat16 and has_onednn(dtype, device)


@cache
def has_onednn(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether oneDNN's products are there, and give what F.linear gives."""
    if device.type != "cpu" or not torch._C._has_mkldnn:
        return False
    weight = (torch.arange(64 * 64).remainder(7) - 3).view(64, 64).to(dtype)  # small integers: exact in any order
    x = (torch.arange(3 * 64).remainder(5) - 2).view(3, 64).to(dtype)
    try:
        stored = pack(weight) if dtype == torch.bfloat16 else weight
        return torch.equal(onednn_linear(stored, None)(x), F.linear(x, weight))
    except (AttributeError, RuntimeError):  # not in this build, or with another signature
        return False
