"""Matrices in quantised blocks, of GGUF files or int4: formats, how blocks are dequantised and packed. Thread: engine.

A format's block holds 32 to 256 inputs of one output. Packed, the same bytes of 64 outputs lie together: each field of
a block (a float16 scale, a word of four bytes of numbers) 64 times, output by output, so that a register holds one
field of 16 outputs, and neighbouring threads of a GPU read words side by side. Nothing is converted and nothing grows;
only the signed bytes of Q8_0 get their sign bit turned, for instructions that multiply unsigned by signed bytes.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from core.config import EngineConfig, ModelConfig
from core.gguf import BLOCKS
from gpu.cpu_kernels.support import MIN_PARAMETERS, NO_FLAGS, has_needed_flags, why_no_numba
from gpu.device import DeviceChoice
from gpu.kernels.sizes import why_no_kernels

BLOCK_OUTPUTS = 64
PART_INPUTS = 256  # decoded at a time: the largest block
IN_FLOATS = "--activations bf16"


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """weight = scale * (unsigned number - middle) - minimum.

    Args:
        elements, size_bytes: of a block.
        fields: (bytes of one, how many, the first one's place in a file's block), in the order that they are packed in.
        group: inputs that share a scale: 16 or 32.
        most: the largest unsigned number.
        signed: where signed bytes begin, whose sign bit is turned; None: there are none.
    """

    elements: int
    size_bytes: int
    fields: tuple[tuple[int, int, int], ...]
    group: int
    middle: int
    most: int
    has_minima: bool = False
    signed: int | None = None


def _format(
    name: str, fields: tuple[tuple[int, int, int], ...], group: int, middle: int, most: int, **more: bool | int
) -> BlockFormat:
    elements, size_bytes = BLOCKS[name]
    assert sum(width * count for width, count, _ in fields) == size_bytes
    return BlockFormat(elements, size_bytes, fields, group, middle, most, **more)  # type: ignore[arg-type]


# ggml-common.h, kvalues_mxfp4: twice the numbers; kvalues_iq4nl
MXFP4_NUMBERS = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
IQ4_NUMBERS = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)

# Of each 128 inputs' quads: a word of nibbles of the first half, of the second, and of all four quarters' high bits.
Q6_K_WORDS = tuple(
    (4, 1, place + 4 * quad)
    for half in range(2)
    for quad in range(8)
    for place in (64 * half, 64 * half + 32, 128 + 32 * half)
)

INT4_FORMATS = {128: "INT4_128", 64: "INT4_64", 32: "INT4_32"}
"""By the inputs that share a scale and a zero, the largest first: those of QuantizedWeight."""

FORMATS = {
    **{
        name: BlockFormat(size, 4 + size // 2, ((2, 2, 0), (4, size // 8, 4)), 32, 8, 15, has_minima=True)
        for size, name in INT4_FORMATS.items()
    },
    "Q8_0": _format("Q8_0", ((2, 1, 0), (4, 8, 2)), 32, 128, 255, signed=2),
    "Q4_0": _format("Q4_0", ((2, 1, 0), (4, 4, 2)), 32, 8, 15),
    "Q4_1": _format("Q4_1", ((2, 2, 0), (4, 4, 4)), 32, 0, 15, has_minima=True),
    "Q5_0": _format("Q5_0", ((2, 1, 0), (4, 5, 2)), 32, 16, 31),
    "Q5_1": _format("Q5_1", ((2, 2, 0), (4, 5, 4)), 32, 0, 31, has_minima=True),
    "IQ4_NL": _format("IQ4_NL", ((2, 1, 0), (4, 4, 2)), 32, 128, 255),
    "IQ4_XS": _format("IQ4_XS", ((2, 2, 0), (4, 33, 4)), 32, 128, 255),
    "MXFP4": _format("MXFP4", ((1, 1, 0), (4, 4, 1)), 32, 12, 24),
    "Q2_K": _format("Q2_K", ((2, 2, 80), (1, 16, 0), (4, 16, 16)), 16, 0, 3, has_minima=True),
    "Q3_K": _format("Q3_K", ((2, 1, 108), (4, 3, 96), (4, 24, 0)), 16, 4, 7),
    "Q5_K": _format("Q5_K", ((2, 2, 0), (4, 43, 4)), 32, 0, 31, has_minima=True),
    "Q4_K": _format("Q4_K", ((2, 2, 0), (4, 35, 4)), 32, 0, 15, has_minima=True),
    "Q6_K": _format("Q6_K", ((2, 1, 208), (1, 16, 192), *Q6_K_WORDS), 16, 32, 63),
}
"""Formats that are multiplied as they are stored. Source: ggml-common.h; int4: half floats of a scale and of the zero,
then nibbles as Q4_0 has them."""


Field = tuple[int, int, int]
"""Of a file's block: (first byte, bits of a number, inputs of a unit). A unit's bytes have the lowest bits of its first
inputs, the next bits of the next ones, and so on."""
Scales = Callable[[Tensor], tuple[Tensor, Tensor | None]]
"""Blocks [blocks, bytes] to the scales of their groups, float32 [blocks, groups], and what is added; None: nothing"""


def _half(blocks: Tensor, first: int) -> Tensor:
    """A float16 of each block: float32 [blocks, 1]."""
    return blocks[:, first : first + 2].contiguous().view(torch.float16).float()


def _scale_and_minimum(blocks: Tensor) -> tuple[Tensor, Tensor | None]:
    return _half(blocks, 0), _half(blocks, 2)


def _exponent(blocks: Tensor) -> tuple[Tensor, Tensor | None]:
    """A byte e that stands for 2 ** (e - 127), of a table of twice the numbers."""
    exponents = blocks[:, :1].int() - 128
    return torch.ldexp(torch.ones_like(exponents, dtype=torch.float32), exponents), None


def _iq4_xs_scales(blocks: Tensor) -> tuple[Tensor, Tensor | None]:
    """Pairs of high bits of 8 scales, then their low halves; 32 is zero."""
    pairs, low = _unpacked(blocks, (2, 2, 4), 8), _unpacked(blocks, (4, 4, 2), 8)
    return (low | pairs << 4).float().sub_(32) * _half(blocks, 0), None


def _q2_k_scales(blocks: Tensor) -> tuple[Tensor, Tensor | None]:
    """16 bytes of a scale and a minimum each, scale of scales, scale of minima."""
    both = blocks[:, :16]
    return _half(blocks, 80) * (both & 15).float(), -(_half(blocks, 82) * (both >> 4).float())


def _q3_k_scales(blocks: Tensor) -> tuple[Tensor, Tensor | None]:
    """16 scales in 6 bits, their scale; 32 is zero."""
    low, high = _unpacked(blocks, (96, 4, 16), 16), _unpacked(blocks, (104, 2, 16), 16)
    return (low | high << 4).float().sub_(32) * _half(blocks, 108), None


def _k_scales(blocks: Tensor) -> tuple[Tensor, Tensor | None]:
    """Scale of scales, scale of minima, 8 of each in 6 bits. Source: ggml-quants.c, get_scale_min_k4."""
    low, high, mixed = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]  # [blocks, 4] each
    scales = torch.cat([low & 63, (mixed & 15) | ((low >> 2) & 48)], 1).float() * _half(blocks, 0)
    minima = torch.cat([high & 63, (mixed >> 4) | ((high >> 2) & 48)], 1).float() * _half(blocks, 2)
    return scales, -minima


def _q6_k_scales(blocks: Tensor) -> tuple[Tensor, Tensor | None]:
    return blocks[:, 192:208].view(torch.int8).float() * _half(blocks, 208), None


@dataclass(frozen=True, slots=True)
class StoredBlock:
    """How a format's block lies in a file.

    Args:
        low, high: the numbers' bits, and further ones above them.
        table: what each number stands for; None: itself less the format's middle, or a signed byte.
    """

    low: Field
    high: Field | None = None
    scales: Scales = lambda blocks: (_half(blocks, 0), None)
    table: tuple[int, ...] | None = None


STORED = {
    "Q8_0": StoredBlock((2, 8, 32)),
    "Q4_0": StoredBlock((2, 4, 32)),
    "Q4_1": StoredBlock((4, 4, 32), None, _scale_and_minimum),
    "Q5_0": StoredBlock((6, 4, 32), (2, 1, 8)),
    "Q5_1": StoredBlock((8, 4, 32), (4, 1, 8), _scale_and_minimum),
    "IQ4_NL": StoredBlock((2, 4, 32), table=IQ4_NUMBERS),
    "IQ4_XS": StoredBlock((8, 4, 32), None, _iq4_xs_scales, IQ4_NUMBERS),
    "MXFP4": StoredBlock((1, 4, 32), None, _exponent, MXFP4_NUMBERS),
    "Q2_K": StoredBlock((16, 2, 128), None, _q2_k_scales),
    "Q3_K": StoredBlock((32, 2, 128), (0, 1, 256), _q3_k_scales),
    "Q4_K": StoredBlock((16, 4, 64), None, _k_scales),
    "Q5_K": StoredBlock((48, 4, 64), (16, 1, 256), _k_scales),
    "Q6_K": StoredBlock((0, 4, 128), (128, 2, 128), _q6_k_scales),
}
"""By format. Source: ggml-quants.c, dequantize_row_*"""


def _unpacked(blocks: Tensor, field: Field, count: int) -> Tensor:
    """So many numbers of each block, [blocks, count], uint8."""
    first, bits, unit = field
    packed, mask = blocks[:, first : first + count * bits // 8], 2**bits - 1
    if bits == 8:
        return packed
    packed = packed.reshape(len(blocks), -1, unit * bits // 8)
    higher = [(packed >> shift).bitwise_and_(mask) for shift in range(bits, 8, bits)]
    return torch.stack([packed & mask, *higher], 2).view(len(blocks), -1)


def dequantise(name: str, blocks: Tensor) -> Tensor:
    """A file's blocks of a format, bytes [blocks, size_bytes] -> float32 [blocks, elements]."""
    stored, found = STORED[name], FORMATS[name]
    numbers = _unpacked(blocks, stored.low, found.elements)
    if stored.high is not None:
        numbers |= _unpacked(blocks, stored.high, found.elements) << stored.low[1]
    if stored.table is not None:
        values = torch.tensor(stored.table, dtype=torch.float32)[numbers.int()]
    elif found.signed is not None:
        values = numbers.view(torch.int8).float()
    else:
        values = numbers.float().sub_(found.middle) if found.middle else numbers.float()
    scales, added = stored.scales(blocks)
    groups = values.view(*scales.shape, -1).mul_(scales.unsqueeze(2))
    return (groups if added is None else groups.add_(added.unsqueeze(2))).view(values.shape)


@dataclass(frozen=True, slots=True)
class PackedBlocks:
    """Some outputs of a matrix, in one format.

    Args:
        packed: bytes [ceil(out / 64), inputs / elements, 64 * size_bytes]; missing outputs are zeros. On a GPU, of a
            stack: [matrices, ceil(out / 64), ...].
        num_out: of one matrix.
    """

    format: str
    packed: Tensor
    num_out: int

    @property
    def num_in(self) -> int:
        return self.packed.shape[-2] * FORMATS[self.format].elements

    @property
    def block_bytes(self) -> int:
        """Of 64 outputs."""
        return self.packed.shape[-2] * self.packed.shape[-1]


@dataclass(frozen=True, slots=True)
class BlockWeight:
    """A matrix of quantised blocks; its outputs are those of the parts, one after the other.

    Args:
        dtype: of the rows that it multiplies: bfloat16 or float32.
        num_stacked: it is a stack of so many matrices, of equally many parts each, or whose parts are stacks; None: one
            matrix.
    """

    dtype: torch.dtype
    parts: tuple[PackedBlocks, ...]
    num_stacked: int | None = None

    @property
    def shape(self) -> tuple[int, int]:
        return sum(part.num_out for part in self.parts), self.parts[0].num_in

    @property
    def device(self) -> torch.device:
        return self.parts[0].packed.device

    def __getitem__(self, index: int) -> "BlockWeight":
        """One matrix of a stack."""
        assert self.num_stacked is not None
        if self.parts[0].packed.dim() > 3:
            own = (PackedBlocks(part.format, part.packed[index], part.num_out) for part in self.parts)
            return BlockWeight(self.dtype, tuple(own))
        size = len(self.parts) // self.num_stacked
        return BlockWeight(self.dtype, self.parts[index * size : (index + 1) * size])


def write_packed(name: str, into: Tensor, rows: Tensor) -> None:
    """Pack a file's blocks, on any device.

    Args:
        into: see PackedBlocks.
        rows: bytes [out / 64, 64 * bytes of a row], as the file has them.
    """
    found, (num_chunks, num_blocks, _) = FORMATS[name], into.shape
    stored = rows.view(num_chunks, BLOCK_OUTPUTS, num_blocks, found.size_bytes)
    first = 0
    for width, count, place in found.fields:
        fields = stored[..., place : place + width * count].view(num_chunks, BLOCK_OUTPUTS, num_blocks, count, width)
        end = first + BLOCK_OUTPUTS * width * count
        packed = into[..., first:end].view(num_chunks, num_blocks, count, BLOCK_OUTPUTS, width)
        packed.copy_(fields.permute(0, 2, 3, 1, 4))
        if found.signed is not None and place >= found.signed:
            packed.bitwise_xor_(0x80)
        first = end


def why_not_in_place(model: ModelConfig, engine: EngineConfig, choice: DeviceChoice) -> str | None:
    """Why a file's blocks become floats while they load, as a phrase; None: they stay as they are stored."""
    if engine.quantize is not None:
        return f"--quantize {engine.quantize}"
    if engine.tensor_parallel > 1:
        return "--tensor-parallel"
    if choice.device.type == "cpu":
        return why_no_blocks(model, engine, choice.device, choice.dtype)
    return IN_FLOATS if engine.activations == "bf16" else why_no_kernels(model, choice)


def why_no_blocks(model: ModelConfig, engine: EngineConfig, device: torch.device, dtype: torch.dtype) -> str | None:
    """Why a CPU does not multiply matrices as blocks, as a phrase; None: it does files', and int8 and int4."""
    if device.type != "cpu":
        return "that is for CPUs"
    if engine.activations == "bf16":
        return IN_FLOATS
    if dtype not in (torch.bfloat16, torch.float32):
        return f"rows are {dtype}"
    if not has_needed_flags():
        return NO_FLAGS
    if model.num_parameters < MIN_PARAMETERS and engine.activations == "auto":
        return "the model is too small to repay loading the kernels"
    return why_no_numba()
