"""Linear layers: plain torch; on a CPU, oneDNN for float32 and prepacked weights for bf16. Thread: engine.

Prepacking stores a weight in the layout that oneDNN's kernels read: with it a decode step of a 0.5B body took 20.6 ms,
with F.linear 44.9 (one Zen 5 core). In float32 oneDNN reads a plain weight as fast, and adds a row's numbers in one
order in any company, which MKL, behind F.linear, does not. The operators are torch's own but not public: they are tried
at start, and where they fail or differ F.linear serves.

Tied embeddings are stored once: rows are gathered from the prepacked head. oneDNN packs a bfloat16 matrix in blocks of
64 outputs with pairs of inputs side by side. That layout is its own affair: where the gathered rows differ by a bit
from what was packed, the plain embedding is stored as well.
"""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gpu.device import cpu_flags, huge_pages, use_huge_pages

Linear = Callable[[Tensor], Tensor]
"""[tokens, in] -> [tokens, out]"""

Embed = Callable[[Tensor], Tensor]
"""token ids [tokens] -> [tokens, hidden]"""

BLOCK_OUTPUTS = 64  # of a matrix that oneDNN packs
CHECKED_ROWS = 4096  # at a time
MOST_WHOLE_INPUTS = 1024
COMPANY_ROWS = 16
MOST_PADDED_ROWS = 16
MOST_FEW_ROWS = 16  # on a device: another kernel may multiply more rows
PLAIN_NAMES = ("bfloat16", "float16", "float32")
# Of one shape's matrices, measured in turn: more than a device's cache holds (an H200 has 50 MB), so that all are read.
PROBE_BYTES = 256 * 1024**2


@dataclass(slots=True)
class Served:
    """Whether the kernel or torch computes the matmuls of one shape: for few rows, and for many."""

    few: bool
    many: bool

    def __str__(self) -> str:
        names = {True: "kernel", False: "torch"}
        return f"{names[self.few]} up to {MOST_FEW_ROWS} rows, {names[self.many]} beyond"


class ChosenMatmul:
    """One matrix's matmul. served: shared by all of its shape."""

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
        matmuls: those to measure (gpu/tune.py), of size_bytes in all.
    """

    served: Served
    num_in: int
    has_many: bool
    size_bytes: int = 0
    matmuls: list[ChosenMatmul] = field(default_factory=list)


class MatmulChoices:
    """A model's matmuls on a device where both a kernel and torch can compute them, by shape.

    One of them serves all numbers of few rows, and one all of many: the two round differently.
    """

    def __init__(self) -> None:
        self.shapes: dict[str, MatmulShape] = {}

    def make(self, name: str, kernel: Linear, torchs: Linear, size: tuple[int, int], size_bytes: int) -> ChosenMatmul:
        """One matrix's matmul.

        Args:
            name: of its format. Until they are measured, the kernel serves quantised matrices and torch plain ones. For
                many rows torch always serves plain ones: they are bound by arithmetic, which cuBLAS does best.
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


def make_linear(weight: Tensor, bias: Tensor | None, *, is_packed: bool = False) -> Linear:
    """A matmul with weight [out, in], plus bias [out] or None.

    Args:
        is_packed: keep a packed copy instead of the weight.
    """
    if is_packed:
        return onednn_linear(pack(weight), bias)
    if weight.dtype == torch.float32 and has_onednn(torch.float32, weight.device):
        return onednn_linear(weight, bias)
    linear = partial(F.linear, weight=weight, bias=bias)
    return _in_company(linear, 0) if weight.device.type == "cpu" and weight.dtype == torch.bfloat16 else linear


def pack(weight: Tensor) -> Tensor:
    """A weight [out, in] as oneDNN's kernels read it: an opaque tensor."""
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, 1)
    use_huge_pages(torch.ops.mkldnn.data_ptr(packed), torch.ops.mkldnn._nbytes(packed))
    return packed


def onednn_linear(weight: Tensor, bias: Tensor | None) -> Linear:
    """oneDNN's matmul. weight: what pack() returned, or plain [out, in]."""
    matmul: Any = torch.ops.mkldnn._linear_pointwise.default

    def linear(x: Tensor) -> Tensor:
        num_rows, missing = x.shape[0], num_padding_rows(x.shape[0])
        result: Tensor = matmul(F.pad(x, (0, 0, 0, missing)) if missing else x, weight, bias, "none", [], "")
        return result[:num_rows] if missing else result

    return _in_company(linear)


def num_padding_rows(num_rows: int) -> int:
    """Rows of zeros that are added to more than 16 rows, an eighth at most.

    oneDNN compiles a primitive for each number of rows. Compiling costs a small model more than the zeros do, and freed
    primitives leave holes in the heap.
    """
    return -num_rows % min(MOST_PADDED_ROWS, 1 << max(0, num_rows.bit_length() - 4))


def keeps_rows() -> bool:
    """Whether a row of bf16 is rounded the same however many there are.

    With AMX it is not, nor with AVX-512 without bf16: on two threads torch divides the inputs by the number of rows.
    """
    return "amx_bf16" not in cpu_flags() and ("avx512_bf16" in cpu_flags() or "avx512f" not in cpu_flags())


def _in_company(linear: Linear, most_whole: int = MOST_WHOLE_INPUTS) -> Linear:
    """The same bits for a row in any company: unless keeps_rows, rows of many inputs go sixteen at a time.

    With AMX oneDNN divides the inputs by the number of rows and threads. Measured there, with one thread and with two:
    two or more rows have the same results with a packed matrix of up to 1,280 inputs, but not with 1,408; sixteen have
    them with any matrix, packed or plain. With AVX-512 without bf16 (Cascade Lake) sixteen have them with all measured
    but 64 outputs of 4,864 inputs, packed.

    Args:
        most_whole: inputs up to which any number of rows goes at once.
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
    """Compute one row as two: oneDNN has a special kernel for one, which adds in another order.

    From two rows on a row's result is the same to the last bit, however many there are (measured with avx512_bf16);
    four rows cost what one does.
    """

    def in_company(x: Tensor) -> Tensor:
        return linear(x) if x.shape[0] > 1 else linear(x.expand(2, -1).contiguous())[:1]

    return in_company


def can_pack(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether matrices are prepacked: it pays and works."""
    return dtype == torch.bfloat16 and has_onednn(dtype, device)


@cache
def has_onednn(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether oneDNN's matmuls are in this build, and agree with F.linear."""
    if device.type != "cpu" or not torch._C._has_mkldnn:
        return False
    weight = (torch.arange(64 * 64).remainder(7) - 3).view(64, 64).to(dtype)  # small integers: exact in any order
    x = (torch.arange(3 * 64).remainder(5) - 2).view(3, 64).to(dtype)
    try:
        stored = pack(weight) if dtype == torch.bfloat16 else weight
        return torch.equal(onednn_linear(stored, None)(x), F.linear(x, weight))
    except (AttributeError, RuntimeError):  # not in this build, or with another signature
        return False


def make_tied(embedding: Tensor, *, is_packed: bool) -> tuple[Embed, Linear]:
    """Embedding and head of one matrix [vocab, hidden]; its plain form is dropped where rows can be read when packed.

    Args:
        is_packed: see make_linear.
    """
    if not is_packed:
        return _plain(embedding), make_linear(embedding, None)
    packed = pack(embedding)
    rows = PackedRows(blocks_of(packed, embedding.shape), packed) if is_whole(packed, embedding.shape) else None
    is_same = rows is not None and all(
        torch.equal(
            rows(torch.arange(first, min(first + CHECKED_ROWS, len(embedding)))), embedding[first:][:CHECKED_ROWS]
        )
        for first in range(0, len(embedding), CHECKED_ROWS)
    )
    return rows if rows is not None and is_same else _plain(embedding), onednn_linear(packed, None)


def can_gather(shape: torch.Size | tuple[int, ...]) -> bool:
    """Whether a matrix [out, in] can be packed without padding, so that its rows can be read."""
    return shape[0] % BLOCK_OUTPUTS == 0 and shape[1] % BLOCK_OUTPUTS == 0


def is_whole(packed: Tensor, shape: torch.Size) -> bool:
    """Whether a packed matrix of a shape has no padding; its layout may still differ from blocks_of."""
    return can_gather(shape) and torch.ops.mkldnn._nbytes(packed) == shape.numel() * 2


def blocks_of(packed: Tensor, shape: torch.Size) -> Tensor:
    """The memory of a packed matrix that is_whole, as [out / 64, in / 2, 64, 2]; the matrix must outlive it."""
    size_bytes = shape.numel() * 2
    memory = (ctypes.c_uint8 * size_bytes).from_address(torch.ops.mkldnn.data_ptr(packed))
    return torch.frombuffer(memory, dtype=torch.bfloat16).view(
        shape[0] // BLOCK_OUTPUTS, shape[1] // 2, BLOCK_OUTPUTS, 2
    )


def in_blocks(weight: Tensor) -> Tensor:
    """The same layout, packed here. weight: [out, in] that can_gather, bfloat16; returns [out / 64, in / 2, 64, 2]."""
    num_blocks, num_pairs = weight.shape[0] // BLOCK_OUTPUTS, weight.shape[1] // 2
    packed = huge_pages.empty((num_blocks, num_pairs, BLOCK_OUTPUTS, 2), weight.dtype)
    pairs = weight.contiguous().view(torch.int32).view(num_blocks, BLOCK_OUTPUTS, num_pairs)
    packed.view(torch.int32).squeeze(-1).copy_(pairs.transpose(1, 2))
    use_huge_pages(packed.data_ptr(), packed.nbytes)
    return packed


class PackedRows:
    """Rows of a prepacked matrix. blocks: see blocks_of; owner: of their memory."""

    def __init__(self, blocks: Tensor, owner: Tensor | None = None) -> None:
        self._blocks, self._owner = blocks, owner

    def __call__(self, rows: Tensor) -> Tensor:
        """rows: [n], integers; returns [n, in]."""
        return self._blocks[rows // BLOCK_OUTPUTS, :, rows % BLOCK_OUTPUTS].flatten(1)


def _plain(embedding: Tensor) -> Embed:
    return lambda token_ids: F.embedding(token_ids, embedding)
