"""Tile sizes of Triton's kernels, and which models and devices they support. Imports no triton. Any thread.

Nothing here depends on a step's number of rows, except which of two tiles a matmul takes (with --deterministic there is
one), and nothing on the device: a row's sums are cut in the same way in any company, and on any machine. Shared memory
holds tiles of operands that are being loaded: 227 KiB a multiprocessor on Hopper. bench/ tunes these sizes on a device.
"""

from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

import torch

from core.config import BLOCK_SIZE, ModelConfig
from gpu.attention import Scores
from gpu.device import DeviceChoice

NEEDED_CAPABILITY = (8, 0)  # Ampere: bfloat16, and copies to shared memory beside the arithmetic
FP8_CAPABILITY = (8, 9)  # Ada: before, Triton converts no e4m3
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# One program sums a row in its registers.
MAX_HIDDEN_SIZE = 65_536
MAX_HEAD_DIM = 512

LAST = 1 << 30

# (width of a row, at most; warps): 8 to 16 numbers a thread
ROW_WARPS = ((256, 1), (1024, 2), (2048, 4), (8192, 8), (LAST, 16))
COLUMNS = 1024  # of a row, by one program, where its columns are independent of each other
COLUMN_WARPS = 4
HEAD_NUMBERS = 1024  # of heads that one program norms and rotates, at most, unless they are normed together
HEAD_WARPS = 4


@dataclass(frozen=True, slots=True)
class MatmulTile:
    """Rows, outputs and inputs of a matmul that a program multiplies at a time.

    Args:
        num_warps, num_stages: of the compiled kernel; a stage holds a tile of both operands in shared memory.
    """

    rows: int
    outputs: int
    inputs: int
    num_warps: int
    num_stages: int


SMALL_ROWS = 16  # the fewest that a matrix instruction takes
# By bits of a weight: few rows are bound by reading it, many by arithmetic.
SMALL_TILES = {
    32: MatmulTile(SMALL_ROWS, 32, 64, 4, 3),
    16: MatmulTile(SMALL_ROWS, 64, 128, 4, 4),
    8: MatmulTile(SMALL_ROWS, 64, 128, 4, 4),
    4: MatmulTile(SMALL_ROWS, 64, 128, 4, 4),
}
LARGE_TILES = {
    32: MatmulTile(32, 32, 32, 4, 2),
    16: MatmulTile(128, 128, 64, 8, 3),
    8: MatmulTile(128, 128, 64, 8, 3),
    4: MatmulTile(64, 64, 64, 8, 3),  # wider ones want more registers than a thread has
}
# With --deterministic, of any number of rows: one row's weights are read as fast as a small tile reads them, and the
# instructions that multiply 64 rows are as many as one row can hide behind that on an A100 or newer.
FIXED_TILES = {
    32: MatmulTile(SMALL_ROWS, 32, 64, 4, 3),
    16: MatmulTile(64, 128, 64, 4, 3),
    8: MatmulTile(64, 128, 64, 4, 3),
    4: MatmulTile(64, 64, 64, 8, 3),
}
# A file's blocks, by rows of halves: for few rows, for many, and for any number with --deterministic. 64 outputs lie
# together, and 256 inputs at most. Decoding takes registers and integer instructions, for each tile of rows anew: a
# small tile, compiled for an H100, 80 to 168 registers a thread and 7 (Q8_0) to 12 (Q4_K) instructions a weight, of
# IQ4 20. Not measured on a device yet: bench/gpu_blocks.py has others.
SMALL_BLOCK_TILE = MatmulTile(SMALL_ROWS, 64, 128, 4, 3)
LARGE_BLOCK_TILE = MatmulTile(128, 64, 128, 8, 2)
FIXED_BLOCK_TILE = MatmulTile(64, 64, 128, 4, 3)
DECODED_OUTPUTS, DECODED_INPUTS, DECODE_WARPS = 64, 64, 4  # by one program of decode_rows
SPLIT_ROWS = 256  # whose parts are added at a time: they take float32 numbers beside the result
# 8 bits with scales of groups: a group's sums take registers beside the total's, which a wider tile does not have.
LARGE_GROUPED_TILE = MatmulTile(128, 64, 64, 8, 3)
# Two programs for each multiprocessor of an H200 (132). A matmul with fewer tiles of outputs is cut along its inputs as
# well, into at most MAX_SPLITS parts of at least MIN_SPLIT_INPUTS.
FULL_DEVICE_PROGRAMS = 264
MAX_SPLITS = 16
MIN_SPLIT_INPUTS = 256


def next_power_of_two(number: int) -> int:
    return 1 << max(0, number - 1).bit_length()


def row_warps(width: int) -> int:
    """Warps of a program that sums over a row."""
    return next(warps for most, warps in ROW_WARPS if width <= most)


def heads_at_once(num_heads: int, num_kv_heads: int, head_dim: int, are_together: bool) -> int:
    """Heads of one program, a power of two. are_together: one norm covers all heads."""
    most = next_power_of_two(max(num_heads, num_kv_heads))
    return most if are_together else min(most, max(1, HEAD_NUMBERS // next_power_of_two(head_dim)))


def splits_for(num_out: int, num_in: int, tile: MatmulTile) -> int:
    """Into how many parts a matmul's inputs are cut: a power of two, of the matrix's shape alone."""
    num_tiles = -(-num_out // tile.outputs)
    splits = 1
    while (
        splits < MAX_SPLITS
        and num_tiles * splits * 2 <= FULL_DEVICE_PROGRAMS * 3 // 2
        and num_in >= splits * 2 * MIN_SPLIT_INPUTS
    ):
        splits *= 2
    return splits


def split_inputs(num_in: int, splits: int, tile: MatmulTile) -> int:
    """Inputs of one part, in whole tiles."""
    return -(-num_in // (splits * tile.inputs)) * tile.inputs


@dataclass(frozen=True, slots=True)
class Tiles:
    """Sizes of the attention kernels.

    Args:
        decode_tokens: keys and values read at a time, in a split.
        extend_rows: query heads times tokens of a tile: rows of a matmul.
        extend_tokens: keys and values read at a time, in a tile.
        num_warps: the same for both: decodes run in either launch, and are rounded alike.
        num_stages: of the pipeline: tables, keys and values, matmuls.
        least_split: tokens of a split, enough that reading them outweighs a program's start and merging.
    """

    decode_tokens: int
    extend_rows: int
    extend_tokens: int
    num_warps: int
    num_stages: int
    least_split: int = 256


# (padded head_dim, at most; tiles): chosen to fit shared memory and registers, not yet tuned on a device. With bfloat16
# heads of 128, decodes take 39 KB and 85 registers a thread on an H200, prompts 99 KB and 186.
_OF_HALVES = (
    (64, Tiles(128, 128, 64, 8, 3)),
    (128, Tiles(64, 128, 64, 8, 3)),
    (256, Tiles(32, 64, 32, 8, 3)),
    (512, Tiles(16, 32, 16, 8, 3)),
)
_OF_FLOATS = (  # twice the bytes, and three matmuls instead of one
    (128, Tiles(32, 32, 32, 8, 3)),
    (256, Tiles(16, 32, 16, 8, 3)),
)
# decode_tokens over keys and values in 8 bits: half the bytes, so that more are in flight, and no registers for what
# they become.
_OF_INTEGERS = ((128, 128), (256, 64), (512, 32))
LEAST_INTEGERS = 32  # inputs of a matmul of integers
# Splits of a row, over all KV heads: about two programs a multiprocessor when the row is alone.
PROGRAMS_PER_ROW = 256
LEAST_SPLITS, MOST_SPLITS = 16, 128  # bounds of that maximum, whatever the KV heads
LEAST_ROWS = 16  # of a matmul
SCHEDULED_ROWS = 256  # at a time
MERGED_NUMBERS = 4096  # at a time: 32 a thread


@dataclass(frozen=True, slots=True)
class KernelShape:
    """A model's heads, and how its attention is cut.

    Args:
        most_splits: of one row: a power of two.
        dtype: of queries, and of keys and values, unless these are in_8_bits.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    tiles: Tiles
    most_splits: int
    in_8_bits: bool = False

    @property
    def heads(self) -> tuple[int, int, int]:
        return self.num_heads, self.num_kv_heads, self.head_dim

    @property
    def per_kv(self) -> int:
        return self.num_heads // self.num_kv_heads

    @property
    def tile_tokens(self) -> int:
        """New tokens of a tile."""
        return self.tiles.extend_rows // self.per_kv

    def splits_of(self, num_seen: int) -> int:
        """Upper bound of the splits of a context of so many tokens."""
        return min(self.most_splits, -(-num_seen // self.tiles.least_split))

    def constants(self, has_window: bool, scores: Scores) -> dict[str, Any]:
        """Of decode and extend_and_decode."""
        return {
            "KV_HEADS": self.num_kv_heads,
            "PER_KV": self.per_kv,
            "HEAD_DIM": self.head_dim,
            "D_PAD": max(next_power_of_two(self.head_dim), LEAST_INTEGERS if self.in_8_bits else LEAST_ROWS),
            "BLOCK": BLOCK_SIZE,
            "LEAST": self.tiles.least_split,
            "MOST_SPLITS": self.most_splits,
            "HAS_WINDOW": has_window,
            "HAS_CAP": scores.cap is not None,
            "HAS_SINKS": scores.sinks is not None,
            "IN_8_BITS": self.in_8_bits,
            "PRECISION": "tf32x3",  # of float32's matmuls: three on tensor cores, which lose next to nothing
        }

    @property
    def decode_constants(self) -> dict[str, Any]:
        return {"M": max(next_power_of_two(self.per_kv), LEAST_ROWS), "KV_TOKENS": self.tiles.decode_tokens}

    @property
    def extend_constants(self) -> dict[str, Any]:
        of_decodes = {f"DECODE_{name}": value for name, value in self.decode_constants.items()}
        tiles = self.tiles
        return {"M": tiles.extend_rows, "TILE_TOKENS": self.tile_tokens, "KV_TOKENS": tiles.extend_tokens, **of_decodes}

    @property
    def launch(self) -> dict[str, int]:
        return {"num_warps": self.tiles.num_warps, "num_stages": self.tiles.num_stages}

    @property
    def merge_constants(self) -> dict[str, Any]:
        heads_pad, dim_pad = next_power_of_two(self.per_kv), next_power_of_two(self.head_dim)
        return {
            "KV_HEADS": self.num_kv_heads,
            "PER_KV": self.per_kv,
            "HEADS_PAD": heads_pad,
            "HEAD_DIM": self.head_dim,
            "D_PAD": dim_pad,
            "SPLITS_PAD": self.most_splits,
            "AT_A_TIME": max(1, MERGED_NUMBERS // (heads_pad * dim_pad)),
        }

    @property
    def schedule_constants(self) -> dict[str, Any]:
        """Of lay_out_step, but for HAS_WINDOW."""
        return {
            "TILE_TOKENS": self.tile_tokens,
            "KV_TOKENS": self.tiles.decode_tokens,
            "BLOCK": BLOCK_SIZE,
            "LEAST": self.tiles.least_split,
            "MOST_SPLITS": self.most_splits,
            "ROWS": SCHEDULED_ROWS,
        }


def kernel_shape(
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    tiles: Tiles | None = None,
    in_8_bits: bool = False,
) -> KernelShape:
    """tiles: None: those of the table."""
    most = min(max(PROGRAMS_PER_ROW // next_power_of_two(num_kv_heads), LEAST_SPLITS), MOST_SPLITS)
    tiles = tiles or tiles_for(head_dim, dtype, in_8_bits)
    return KernelShape(num_heads, num_kv_heads, head_dim, dtype, tiles, most, in_8_bits)


def max_head_dim(dtype: torch.dtype) -> int:
    return (_OF_FLOATS if dtype == torch.float32 else _OF_HALVES)[-1][0]


def tiles_for(head_dim: int, dtype: torch.dtype, in_8_bits: bool = False) -> Tiles:
    """
    Raises:
        ValueError: the head is larger than max_head_dim.
    """
    for most, tiles in _OF_FLOATS if dtype == torch.float32 else _OF_HALVES:
        if head_dim <= most:
            tokens = next(tokens for most, tokens in _OF_INTEGERS if head_dim <= most)
            return replace(tiles, decode_tokens=tokens) if in_8_bits else tiles
    raise ValueError(f"heads of {head_dim}: at most {max_head_dim(dtype)} in {dtype}")


def why_no_kernels(config: ModelConfig, choice: DeviceChoice) -> str | None:
    """Why the kernels cannot serve, as a phrase; None: they can."""
    if choice.device.type != "cuda" or choice.dtype not in DTYPES:
        return f"{choice.dtype_name} on {choice.device.type}: the kernels support floats on CUDA"
    if find_spec("triton") is None:
        return "triton is not installed"
    if torch.version.hip is not None:
        return "this torch is for ROCm, on which the kernels are not tested"
    capability = torch.cuda.get_device_capability(choice.device)
    if capability < NEEDED_CAPABILITY:
        least, found = (".".join(map(str, pair)) for pair in (NEEDED_CAPABILITY, capability))
        return f"compute capability {found}: the kernels need {least}"
    return why_not_this_model(config)


def knows_fp8(device: torch.device) -> bool:
    """Whether kernels read 8-bit floats there."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= FP8_CAPABILITY


def why_not_this_model(config: ModelConfig) -> str | None:
    """Why the kernels do not support the model, as a phrase; None: they do."""
    if len(config.kinds) > 1 or config.inputs is not None:
        return "the kernels support layers of one size, without inputs of their own"
    if config.head_dim % 2 or config.head_dim > MAX_HEAD_DIM:
        return f"heads of {config.head_dim}: the kernels support even ones of up to {MAX_HEAD_DIM}"
    if config.hidden_size > MAX_HIDDEN_SIZE:
        return f"a width of {config.hidden_size:,}: the kernels support up to {MAX_HIDDEN_SIZE:,}"
    return None


def why_no_attention(config: ModelConfig, dtype: torch.dtype) -> str | None:
    """Why the attention kernels cannot serve where the others do, as a phrase; None: they can."""
    if config.latent is not None:
        return "the kernels do not support latent attention"
    if config.head_dim > max_head_dim(dtype):
        return f"heads of {config.head_dim} in {str(dtype)[6:]}: the kernels support up to {max_head_dim(dtype)}"
    per_kv, most = config.num_heads // config.num_kv_heads, tiles_for(config.head_dim, dtype).extend_rows
    if per_kv > most:
        return f"{per_kv} heads share a key: the kernels support up to {most}"
    return None
