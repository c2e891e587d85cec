"""What attention's kernels are compiled for: sizes of tiles as data, to be tuned on a device. Thread: any.

Shared memory holds tiles of keys and values on their way, and a tile of queries: 227 KiB a multiprocessor on Hopper.
What is here depends on the model and on constants alone: where a context is split is the same on any device.
"""

from dataclasses import dataclass
from typing import Any

import torch

from core.config import BLOCK_SIZE
from gpu.scores import Scores


@dataclass(frozen=True, slots=True)
class Tiles:
    """
    Args:
        decode_tokens: of keys and values at a time, in a split.
        extend_rows: query heads times tokens of a tile: rows of a product.
        extend_tokens: of keys and values at a time, in a tile.
        num_warps: the same for both: decodes are computed in either's launch, and rounded alike.
        num_stages: of the pipeline: tables, keys and values, products.
        least_split: tokens of a split: reading them outweighs a program's start, and merging.
    """

    decode_tokens: int
    extend_rows: int
    extend_tokens: int
    num_warps: int
    num_stages: int
    least_split: int = 256


# Padded head_dim, at most -> tiles: chosen by what shared memory and registers hold, and not tuned on a device yet.
# An H200 then takes, of bfloat16 heads of 128, 39 KB and 85 registers a thread for decodes, 99 KB and 186 for prompts.
_OF_HALVES = (
    (64, Tiles(128, 128, 64, 8, 3)),
    (128, Tiles(64, 128, 64, 8, 3)),
    (256, Tiles(32, 64, 32, 8, 3)),
    (512, Tiles(16, 32, 16, 8, 3)),
)
_OF_FLOATS = (  # twice the bytes, and three products for one
    (128, Tiles(32, 32, 32, 8, 3)),
    (256, Tiles(16, 32, 16, 8, 3)),
)
# Splits of a row, of all KV heads together: about two programs a multiprocessor when it is alone.
PROGRAMS_A_ROW = 256
LEAST_SPLITS, MOST_SPLITS = 16, 128  # that a row's context is cut into, at most, whatever its KV heads
LEAST_ROWS = 16  # of a product
SCHEDULED_ROWS = 256  # at a time
MERGED_NUMBERS = 4096  # at a time: 32 a thread


@dataclass(frozen=True, slots=True)
class KernelShape:
    """A model's heads, and how its attention is cut.

    Args:
        most_splits: of one row: a power of two.
        dtype: of queries, keys and values.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    tiles: Tiles
    most_splits: int

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
        """That a context of so many tokens is cut into, at most."""
        return min(self.most_splits, -(-num_seen // self.tiles.least_split))

    def constants(self, has_window: bool, scores: Scores) -> dict[str, Any]:
        """Of decode and extend_and_decode."""
        return {
            "KV_HEADS": self.num_kv_heads,
            "PER_KV": self.per_kv,
            "HEAD_DIM": self.head_dim,
            "D_PAD": max(padded(self.head_dim), LEAST_ROWS),
            "BLOCK": BLOCK_SIZE,
            "LEAST": self.tiles.least_split,
            "MOST_SPLITS": self.most_splits,
            "HAS_WINDOW": has_window,
            "HAS_CAP": scores.cap is not None,
            "HAS_SINKS": scores.sinks is not None,
            "PRECISION": "tf32x3",  # of float32's products: three of tensor cores', which lose next to nothing
        }

    @property
    def decode_constants(self) -> dict[str, Any]:
        return {"M": max(padded(self.per_kv), LEAST_ROWS), "KV_TOKENS": self.tiles.decode_tokens}

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
        heads_pad, dim_pad = padded(self.per_kv), padded(self.head_dim)
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
    num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, tiles: Tiles | None = None
) -> KernelShape:
    """tiles: None: those of the table."""
    most = min(max(PROGRAMS_A_ROW // padded(num_kv_heads), LEAST_SPLITS), MOST_SPLITS)
    return KernelShape(num_heads, num_kv_heads, head_dim, dtype, tiles or tiles_for(head_dim, dtype), most)


def max_head_dim(dtype: torch.dtype) -> int:
    return (_OF_FLOATS if dtype == torch.float32 else _OF_HALVES)[-1][0]


def tiles_for(head_dim: int, dtype: torch.dtype) -> Tiles:
    """
    Raises:
        ValueError: the head is larger than max_head_dim.
    """
    for most, tiles in _OF_FLOATS if dtype == torch.float32 else _OF_HALVES:
        if head_dim <= most:
            return tiles
    raise ValueError(f"heads of {head_dim}: at most {max_head_dim(dtype)} in {dtype}")


def padded(number: int) -> int:
    """The next power of two."""
    return 1 << max(number - 1, 0).bit_length()
