"""Matmuls with a weight matrix: plain, by oneDNN in float32 on a CPU, or prepacked for bf16 there. Thread: engine.

Prepacking stores a weight in the layout that oneDNN's kernels read: a decode step of a 0.5B body took 20.6 ms so,
against 44.9 with F.linear (one Zen 5 core). In float32 it reads a weight as it lies as fast, and adds a row's numbers
in one order in any company, as MKL, behind F.linear, does not. The operators are torch's own but not public: they are
tried at start, and where they fail or differ F.linear serves.

Tied embeddings are kept once: rows are gathered from the prepacked head. oneDNN packs a matrix of bfloat16 in blocks of
64 outputs, of which pairs of inputs lie side by side. That is its own affair: where what is gathered is not, bit by
bit, what was packed, the plain embedding is kept as well.
"""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gpu.device import cpu_flags, use_huge_pages

Linear = Callable[[Tensor], Tensor]
"""[tokens, in] -> [tokens, out]"""


MakeMatmul = Callable[[Tensor, Tensor, Tensor | None], Linear]
"""(what pack() gave, for which weight [out, in], bias [out] or None) -> the matmul, which does not keep the weight"""


Embed = Callable[[Tensor], Tensor]
"""token ids [tokens] -> [tokens, hidden]"""

BLOCK_OUTPUTS = 64  # of a matrix that oneDNN packs
CHECKED_ROWS = 4096  # at a time
MOST_WHOLE_INPUTS = 1024
COMPANY_ROWS = 16
MOST_PADDED_ROWS = 16
MOST_FEW_ROWS = 16  # on a device: more may be multiplied by another kernel
PLAIN_NAMES = ("bfloat16", "float16", "float32")
# Of one shape's matrices, in turn: more than a device's cache keeps (an H200 has 50 MB), so that they are read anew.
PROBE_BYTES = 256 * 1024**2


@dataclass(slots=True)
class Served:
    """Which computes the matmuls of one shape on a device: whether the kernel, or torch."""

    few: bool
    many: bool

    def __str__(self) -> str:
        names = {True: "kernel", False: "torch"}
        return f"{names[self.few]} up to {MOST_FEW_ROWS} rows, {names[self.many]} beyond"


class ChosenMatmul:
    """One matrix's. served: is shared by all of its shape."""

    def __init__(self, kernel: Linear, torchs: Linear, served: Served) -> None:
        self.kernel = kernel
        self.torchs = torchs
        self._served = served

    def __call__(self, x: Tensor) -> Tensor:
        """x: [tokens, in]; returns [tokens, out]."""
        is_kernel = self._served.few if x.shape[0] <= MOST_FEW_ROWS else self._served.many
        return self.kernel(x) if is_kernel else self.torchs(x)


@dataclass(slots=True)
class MatmulShape:
    """Matrices of one shape, stored alike.

    Args:
        has_many: whether the kernel may serve many rows.
        matmuls: to be measured (gpu/tune.py), of size_bytes in all.
    """

    served: Served
    num_in: int
    has_many: bool
    size_bytes: int = 0
    matmuls: list[ChosenMatmul] = field(default_factory=list)


class MatmulChoices:
    """A model's matmuls on a device that has kernels beside torch's, by shape.

    A shape is served in one way for few rows and in one for many, whatever their number: the two round differently.
    """

    def __init__(self) -> None:
        self.shapes: dict[str, MatmulShape] = {}

    def make(self, name: str, kernel: Linear, torchs: Linear, size: tuple[int, int], size_bytes: int) -> ChosenMatmul:
        """One matrix's.

        Args:
            name: of how it is stored. Those that torch only knows dequantised are the kernel's until they are measured,
                others torch's; plain ones are torch's for many rows, always: there it is bound by arithmetic, and its
                own is the best there is.
            size: (out, in).
            size_bytes: of the matrix.
        """
        is_quantized = name not in PLAIN_NAMES
        key = f"{name} {size[0]} x {size[1]}"
        shape = self.shapes.setdefault(key, MatmulShape(Served(is_quantized, is_quantized), size[1], is_quantized))
        matmul = ChosenMatmul(kernel, torchs, shape.served)
        if not shape.matmuls or shape.size_bytes < PROBE_BYTES:
            shape.matmuls.append(matmul)
            shape.size_bytes += size_bytes
        return matmul


def make_linear(weight: Tensor, bias: Tensor | None, matmul: MakeMatmul | None) -> Linear:
    """A matmul with weight [out, in], plus bias [out] or None.

    Args:
        matmul: makes it of a packed copy of the weight; None: nothing is packed.
    """
    if matmul is not None:
        return matmul(pack(weight), weight, bias)
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
    """See MakeMatmul."""
    return onednn_linear(packed, bias)


def onednn_linear(weight: Tensor, bias: Tensor | None) -> Linear:
    """oneDNN's matmul. weight: what pack() gave, or as it lies, [out, in]."""
    matmul: Any = torch.ops.mkldnn._linear_pointwise.default

    def linear(x: Tensor) -> Tensor:
        num_rows, missing = x.shape[0], num_padding_rows(x.shape[0])
        result: Tensor = matmul(F.pad(x, (0, 0, 0, missing)) if missing else x, weight, bias, "none", [], "")
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

    From two rows on a row's result is the same to the last bit, however many there are (measured with avx512_bf16);
    four cost what one does.
    """

    def in_company(x: Tensor) -> Tensor:
        return linear(x) if x.shape[0] > 1 else linear(x.expand(2, -1).contiguous())[:1]

    return in_company


def can_pack(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether matrices are to be prepacked: it is worth it, and they can be."""
    return dtype == torch.bfloat16 and has_onednn(dtype, device)


@cache
def has_onednn(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether oneDNN's matmuls are there, and give what F.linear gives."""
    if device.type != "cpu" or not torch._C._has_mkldnn:
        return False
    weight = (torch.arange(64 * 64).remainder(7) - 3).view(64, 64).to(dtype)  # small integers: exact in any order
    x = (torch.arange(3 * 64).remainder(5) - 2).view(3, 64).to(dtype)
    try:
        stored = pack(weight) if dtype == torch.bfloat16 else weight
        return torch.equal(onednn_linear(stored, None)(x), F.linear(x, weight))
    except (AttributeError, RuntimeError):  # not in this build, or with another signature
        return False


def make_tied(embedding: Tensor, matmul: MakeMatmul | None) -> tuple[Embed, Linear]:
    """Embedding and head of one matrix [vocab, hidden]; packed, it is kept no more where it can be read so, too.

    Args:
        matmul: see make_linear.
    """
    if matmul is None:
        return _plain(embedding), make_linear(embedding, None, None)
    packed = pack(embedding)
    rows = PackedRows(packed, embedding.shape) if is_whole(packed, embedding.shape) else None
    is_same = rows is not None and all(
        torch.equal(
            rows(torch.arange(first, min(first + CHECKED_ROWS, len(embedding)))), embedding[first:][:CHECKED_ROWS]
        )
        for first in range(0, len(embedding), CHECKED_ROWS)
    )
    return rows if rows is not None and is_same else _plain(embedding), matmul(packed, embedding, None)


def can_gather(shape: torch.Size | tuple[int, ...]) -> bool:
    """Whether a matrix [out, in] can be packed without padding: rows may be found in it then."""
    return shape[0] % BLOCK_OUTPUTS == 0 and shape[1] % BLOCK_OUTPUTS == 0


def is_whole(packed: Tensor, shape: torch.Size) -> bool:
    """Whether a packed matrix of a shape has no padding, and may lie as blocks_of has it: oneDNN does as it likes."""
    return can_gather(shape) and torch.ops.mkldnn._nbytes(packed) == shape.numel() * 2


def blocks_of(packed: Tensor, shape: torch.Size) -> Tensor:
    """The memory of a packed matrix that is_whole, as [out / 64, in / 2, 64, 2]; the matrix must outlive it."""
    size_bytes = shape.numel() * 2
    memory = (ctypes.c_uint8 * size_bytes).from_address(torch.ops.mkldnn.data_ptr(packed))
    return torch.frombuffer(memory, dtype=torch.bfloat16).view(
        shape[0] // BLOCK_OUTPUTS, shape[1] // 2, BLOCK_OUTPUTS, 2
    )


class PackedRows:
    """Rows of a prepacked matrix that is_whole. shape: (out, in)."""

    def __init__(self, packed: Tensor, shape: torch.Size) -> None:
        self._packed = packed  # owns the memory
        self._blocks = blocks_of(packed, shape)

    def __call__(self, rows: Tensor) -> Tensor:
        """rows: [n], integers; returns [n, in]."""
        return self._blocks[rows // BLOCK_OUTPUTS, :, rows % BLOCK_OUTPUTS].flatten(1)


def _plain(embedding: Tensor) -> Embed:
    return lambda token_ids: F.embedding(token_ids, embedding)
