"""A GGUF file's quantised blocks, decoded by Triton: for the matmuls of matmul.py, and row by row. Thread: engine.

Blocks lie as gpu/blocks.py says, the same bytes as on a CPU: a word of four inputs' numbers of 64 adjacent outputs is
256 bytes side by side. A program reads such words, and scales for each group of inputs, and computes number * scale +
minimum in float32, each operation rounded once, as gpu/blocks.py does where it dequantises: the same bits. All is
read in words, scales too: what is smaller is not copied to shared memory beside the arithmetic.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpu.blocks import BLOCK_OUTPUTS, FORMATS, IQ4_NUMBERS, PackedBlocks
from gpu.kernels.sizes import DECODE_WARPS, DECODED_INPUTS, DECODED_OUTPUTS

OUTPUTS = tl.constexpr(BLOCK_OUTPUTS)
NIBBLES, TWOS, ONES = tl.constexpr(0x0F0F0F0F), tl.constexpr(0x03030303), tl.constexpr(0x01010101)
SPREAD_BITS = tl.constexpr(0x00204081)  # times four bits: one at the foot of each byte
# 2 ** 23 as float32, whose lowest bits count ones, and 2 ** 15, whose bits from the ninth on do: so a word's first and
# second byte become floats by one operation and an exact difference.
FIRST_BITS, FIRST_ZERO = tl.constexpr(0x4B000000), tl.constexpr(2.0**23)
SECOND_BITS, SECOND_ZERO = tl.constexpr(0x47000000), tl.constexpr(2.0**15)

# IQ4's numbers, four in each word
_IQ4 = bytes(number + FORMATS["IQ4_NL"].middle for number in IQ4_NUMBERS)
IQ4_0, IQ4_1, IQ4_2, IQ4_3 = (
    tl.constexpr(int.from_bytes(_IQ4[place : place + 4], "little", signed=True)) for place in range(0, 16, 4)
)
SIGN, HALF_OF_E2M1 = tl.constexpr(-(2**31)), tl.constexpr(2.0**127)


class BlockLayout(NamedTuple):
    """A format, as the kernels are compiled for it. Places are bytes in an output's own block, in the packed order.

    Args:
        SIZE: bytes of an output's block; ELEMENTS: its inputs.
        BITS: of a number in the words at LOW; a word's lowest bits are one quad of inputs, the next bits the quad
            BITS * UNIT / 8 further on; a unit has UNIT quads, in words of its own.
        HIGH: where further bits lie, by HIGHS: "", none; "word", one of 32 bits; "planes", bit n of eight words is
            that of the n-th 32 inputs; "pairs", Q6_K's.
        NUMBERS: "plain", unsigned; "iq4", indexes of IQ4_NUMBERS; "e2m1", floats of two bits of exponent and one of
            mantissa, which stand for half of what gpu/blocks.py has.
        GROUP: inputs that share a scale; SCALES: how they lie, see _scales; HAS_MINIMA: whether something is added.
        MIDDLE: the number that stands for zero.
    """

    SIZE: int
    ELEMENTS: int
    BITS: int
    UNIT: int
    LOW: int
    HIGHS: str
    HIGH: int
    NUMBERS: str
    GROUP: int
    SCALES: str
    HAS_MINIMA: bool
    MIDDLE: int


def _layout(
    name: str,
    bits: int,
    unit: int,
    low: int,
    scales: str = "half",
    highs: str = "",
    high: int = 0,
    numbers: str = "plain",
) -> BlockLayout:
    found = FORMATS[name]
    stored = (found.size_bytes, found.elements, bits, unit, low, highs, high, numbers)
    return BlockLayout(*stored, found.group, scales, found.has_minima, found.middle)


LAYOUTS = {
    "Q8_0": _layout("Q8_0", 8, 8, 2),
    "Q4_0": _layout("Q4_0", 4, 8, 2),
    "Q4_1": _layout("Q4_1", 4, 8, 4, "halves"),
    "Q5_0": _layout("Q5_0", 4, 8, 6, "half", "word", 2),
    "Q5_1": _layout("Q5_1", 4, 8, 8, "halves", "word", 4),
    "IQ4_NL": _layout("IQ4_NL", 4, 8, 2, numbers="iq4"),
    "IQ4_XS": _layout("IQ4_XS", 4, 8, 8, "iq4_xs", numbers="iq4"),
    "MXFP4": _layout("MXFP4", 4, 8, 1, "exponent", numbers="e2m1"),
    "Q2_K": _layout("Q2_K", 2, 32, 20, "q2_k"),
    "Q3_K": _layout("Q3_K", 2, 32, 46, "q3_k", "planes", 14),
    "Q4_K": _layout("Q4_K", 4, 16, 16, "k"),
    "Q5_K": _layout("Q5_K", 4, 16, 48, "k", "planes", 16),
    "Q6_K": _layout("Q6_K", 4, 32, 18, "q6_k", "pairs"),
}
"""Of a file's formats. int4 and int8 have kernels of their own."""


@triton.jit
def _numbers(words, at, unit, quad, layout):
    """int32 [quads, outputs]: four inputs' unsigned numbers in each.

    Args:
        words: int32 pointers [1, outputs], of a row of blocks, with each output's lane.
        at: [quads, 1], the blocks in it, in words.
        unit, quad: [quads, 1], of a block, and of the unit.
    """
    if layout.HIGHS == "pairs":  # of 8 quads' three words two have nibbles, and one pairs of high bits
        part, place = quad // 8, at + 16 * layout.LOW + OUTPUTS * (24 * unit + quad % 8 * 3)
        low = tl.load(words + place + OUTPUTS * (part % 2)) >> (part // 2 * 4)
        pairs = tl.load(words + place + OUTPUTS * 2) >> (2 * part)
        return (low & NIBBLES) | ((pairs & TWOS) << 4)
    num_words: tl.constexpr = layout.UNIT * layout.BITS // 8
    low = tl.load(words + at + 16 * layout.LOW + OUTPUTS * (unit * num_words + quad % num_words))
    if layout.BITS == 4:
        low = low >> (quad // num_words * 4) & NIBBLES
    elif layout.BITS == 2:
        low = low >> (quad // num_words * 2) & TWOS
    if layout.HIGHS == "word":
        bits = tl.load(words + at + 16 * layout.HIGH) >> (4 * quad)
        low |= ((bits & 15) * SPREAD_BITS & ONES) << 4
    elif layout.HIGHS == "planes":
        planes = tl.load(words + at + 16 * layout.HIGH + OUTPUTS * (quad % 8))
        low |= (planes >> (unit * (layout.UNIT // 8) + quad // 8) & ONES) << layout.BITS
    return low


@triton.jit
def _half(words, place, lanes):
    """float32 of a half, which each output has at this place, in words."""
    two = tl.load(words + place + lanes // 2) >> (lanes % 2 * 16)
    return two.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _octet(words, place, lanes):
    """Likewise an unsigned byte, as int32."""
    return tl.load(words + place + lanes // 4) >> (lanes % 4 * 8) & 255


@triton.jit
def _scales(words, at, group, lanes, layout):
    """float32 [sixteens, outputs]: of 16 inputs each, what numbers are multiplied by, and what HAS_MINIMA adds then.

    Args:
        words: int32 pointers [1, outputs], of a row of blocks; at: [sixteens, 1], the blocks in it, in words.
        group: [sixteens, 1], of their blocks.
        lanes: [1, outputs], of 64.
    Sources: see gpu/cpu_kernels/block_formats.py.
    """
    if layout.SCALES == "exponent":  # 2 ** (e - 128)
        exponent = _octet(words, at, lanes)
        bits = tl.where(exponent < 2, 0x00200000 << (exponent & 1), (exponent - 1) << 23)
        scale = bits.to(tl.float32, bitcast=True)
        return scale, scale
    scale = _half(words, at, lanes)
    if layout.SCALES == "half":
        return scale, scale
    if layout.SCALES == "halves":
        return scale, _half(words, at + 32, lanes)
    if layout.SCALES == "iq4_xs":
        low = tl.load(words + at + 64 + lanes) >> (4 * group)
        pairs = tl.load(words + at + 32 + lanes // 2) >> (lanes % 2 * 16 + 2 * group)
        scale *= ((low & 15 | (pairs & 3) << 4) - 32).to(tl.float32)
        return scale, scale
    if layout.SCALES == "q3_k":
        part, octet, place = group // 4, group % 4 * 8, at + 32 + lanes
        low = tl.load(words + place + OUTPUTS * (part % 2)) >> (octet + part // 2 * 4)
        pairs = tl.load(words + place + OUTPUTS * 2) >> (octet + 2 * part)
        scale *= ((low & 15 | (pairs & 3) << 4) - 32).to(tl.float32)
        return scale, scale
    if layout.SCALES == "q6_k":
        scale *= (_octet(words, at + 32 + 16 * group, lanes) << 24 >> 24).to(tl.float32)
        return scale, scale
    minimum = -_half(words, at + 32, lanes)
    if layout.SCALES == "q2_k":
        both = _octet(words, at + 64 + 16 * group, lanes)
        return (both & 15).to(tl.float32) * scale, (both >> 4).to(tl.float32) * minimum
    octet, place = group % 4 * 8, at + 64 + lanes
    low, high = tl.load(words + place) >> octet, tl.load(words + place + OUTPUTS) >> octet
    mixed = tl.load(words + place + OUTPUTS * 2) >> octet
    is_first = group < 4
    of_scale = tl.where(is_first, low & 63, mixed & 15 | (low >> 2 & 48))
    of_minimum = tl.where(is_first, high & 63, mixed >> 4 & 15 | (high >> 2 & 48))
    return of_scale.to(tl.float32) * scale, of_minimum.to(tl.float32) * minimum


@triton.jit
def _looked_up(indexes):
    """IQ4's numbers, unsigned. indexes: int32, 0 to 15."""
    word = tl.full(indexes.shape, IQ4_3, tl.int32)
    word = tl.where(indexes < 12, IQ4_2, word)
    word = tl.where(indexes < 8, IQ4_1, word)
    word = tl.where(indexes < 4, IQ4_0, word)
    return word >> ((indexes & 3) * 8) & 255


@triton.jit
def _weights(four, scale, minimum, layout, IS_SECOND: tl.constexpr):
    """Float32, of each word's first or second number."""
    if layout.NUMBERS == "e2m1":  # as float32's own first bits, whose exponent is 127 too small, once more for its half
        four = four << (20 if IS_SECOND else 28)
        number = (four & SIGN | four >> 6 & 0x01C00000).to(tl.float32, bitcast=True) * HALF_OF_E2M1
        return number * scale + 0.0  # so that the zero of either sign is +0.0, as a file's one is dequantised
    if layout.NUMBERS == "iq4":
        bits = _looked_up((four >> 8 if IS_SECOND else four) & 15) | FIRST_BITS
    elif IS_SECOND:
        bits = four & 0xFF00 | SECOND_BITS
    else:
        bits = four & 0xFF | FIRST_BITS
    zero: tl.constexpr = SECOND_ZERO if IS_SECOND and layout.NUMBERS == "plain" else FIRST_ZERO
    found = (bits.to(tl.float32, bitcast=True) - (zero + layout.MIDDLE)) * scale
    return found + minimum if layout.HAS_MINIMA else found


@triton.jit
def decoded(words, chunk_words, layout, outputs, start, to: tl.constexpr, BLOCK_K: tl.constexpr):
    """[BLOCK_K, outputs]: weights of BLOCK_K inputs, rounded to a format.

    Args:
        words: the packed blocks (see PackedBlocks) as int32; chunk_words: of a row of blocks of 64 outputs.
        layout: BlockLayout.
        outputs: int64 [outputs], of those that are packed.
        start: the first input: a multiple of BLOCK_K.
    """
    num_sixteens: tl.constexpr = BLOCK_K // 16
    num_quads: tl.constexpr = BLOCK_K // 4
    num_outputs: tl.constexpr = outputs.shape[0]
    block_words: tl.constexpr = layout.SIZE * 16
    block_units: tl.constexpr = layout.ELEMENTS // (4 * layout.UNIT)
    words, lanes = words + (outputs // OUTPUTS * chunk_words)[None, :], (outputs % OUTPUTS).to(tl.int32)[None, :]
    at, first = start // layout.ELEMENTS * block_words, start % layout.ELEMENTS  # 0 where a tile has whole blocks
    # All sixteens' first quads, then their second ones: so a thread has quads of the same inputs, which share scales.
    rows = tl.arange(0, num_quads)[:, None]
    quads = rows % num_sixteens * 4 + rows // num_sixteens
    # Written so that the compiler sees what does not depend on where the tile begins.
    units, of_unit = first // (4 * layout.UNIT) + quads // layout.UNIT, quads % layout.UNIT
    if num_quads < layout.UNIT:
        of_unit += first // 4 % layout.UNIT
    four = _numbers(words + lanes, at + units // block_units * block_words, units % block_units, of_unit, layout)
    sixteens = first + tl.arange(0, num_sixteens)[:, None] * 16
    of_sixteens = at + sixteens // layout.ELEMENTS * block_words
    scale, minimum = _scales(words, of_sixteens, sixteens % layout.ELEMENTS // layout.GROUP, lanes, layout)
    scale = tl.reshape(tl.broadcast_to(scale[None, :, :], [4, num_sixteens, num_outputs]), [num_quads, num_outputs])
    if layout.HAS_MINIMA:
        minimum = tl.broadcast_to(minimum[None, :, :], [4, num_sixteens, num_outputs])
        minimum = tl.reshape(minimum, [num_quads, num_outputs])
    last = four >> 16
    first_two = tl.join(
        _weights(four, scale, minimum, layout, False).to(to), _weights(four, scale, minimum, layout, True).to(to)
    )
    last_two = tl.join(
        _weights(last, scale, minimum, layout, False).to(to), _weights(last, scale, minimum, layout, True).to(to)
    )
    found = tl.reshape(tl.join(first_two, last_two), [4, num_sixteens, num_outputs, 2, 2])  # of two, two
    return tl.reshape(tl.permute(found, (1, 0, 4, 3, 2)), [BLOCK_K, num_outputs])


@triton.jit(do_not_specialize=["num_rows", "first"])
def decode_rows(
    indexes,  # integers [rows]; read where HAS_INDEXES
    words,
    out,  # [rows, in]
    first,  # of the rows, where they follow one another: a multiple of 64
    num_rows,
    num_in,
    chunk_words,
    LAYOUT: tl.constexpr,
    HAS_INDEXES: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Rows of a matrix of blocks. Program: BLOCK_N rows, and BLOCK_K of their inputs."""
    places = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_row = places < num_rows
    rows = first + places.to(tl.int64)
    if HAS_INDEXES:
        rows = tl.load(indexes + places, mask=is_row, other=0).to(tl.int64)
    start = tl.program_id(1) * BLOCK_K
    found = decoded(words, chunk_words, LAYOUT, rows, start, out.dtype.element_ty, BLOCK_K)
    inputs = start + tl.arange(0, BLOCK_K)
    tl.store(out + (places.to(tl.int64) * num_in)[None, :] + inputs[:, None], found, mask=is_row[None, :])


def whole_tile(num_in: int, most: int) -> int:
    """Inputs of a tile, a power of two of at most so many that divides a row."""
    return min(most, num_in & -num_in)


def read_rows(part: PackedBlocks, indexes: Tensor, dtype: torch.dtype) -> Tensor:
    """Some of its rows. indexes: integers [rows], of the matrix's outputs; returns [rows, in]."""
    out = torch.empty((len(indexes), part.num_in), dtype=dtype, device=part.packed.device)
    return _decode(part, indexes, 0, out)


def read_range(part: PackedBlocks, first: int, out: Tensor) -> Tensor:
    """Rows that follow one another, written to out: [rows, in]. first: a multiple of 64."""
    return _decode(part, None, first, out)


def _decode(part: PackedBlocks, indexes: Tensor | None, first: int, out: Tensor) -> Tensor:
    num_in, words = part.num_in, part.packed.view(torch.int32)
    tile = whole_tile(num_in, DECODED_INPUTS)
    if len(out):
        decode_rows[(-(-len(out) // DECODED_OUTPUTS), num_in // tile)](
            out if indexes is None else indexes,  # an address even where it is not read
            words,
            out,
            first,
            len(out),
            num_in,
            words.stride(-3),
            LAYOUT=LAYOUTS[part.format],
            HAS_INDEXES=indexes is not None,
            BLOCK_N=DECODED_OUTPUTS,
            BLOCK_K=tile,
            num_warps=DECODE_WARPS,
            enable_fp_fusion=False,
        )
    return out
