"""The paged KV cache: keys and values of all sequences, in blocks of 16 tokens. Thread: engine.

The scheduler decides which sequence has which block (core/kv_cache.py). One extra block, the scratch block, stays zero
for ever: it pads the block tables of shorter rows. Where batches are padded with rows, another extra block takes what
padding writes, and is never read.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from core.config import BLOCK_SIZE, ModelConfig


@dataclass(frozen=True, slots=True)
class LayerKV:
    """One layer's views of the cache. With latent attention, values are the first numbers of keys."""

    both: Tensor  # [2 or 1, blocks + 1 or 2, 16, kv_heads, head_dim]
    keys: Tensor  # [(blocks + 1 or 2) * 16, kv_heads, head_dim]
    values: Tensor  # [(blocks + 1 or 2) * 16, kv_heads, head_dim or latent.rank]


class KVCache:
    """The paged cache.

    Args:
        num_blocks: blocks the scheduler may use, 0..num_blocks-1.
        has_padding: batches are padded with rows.

    Attributes:
        layers: those that attend.
    """

    def __init__(
        self,
        config: ModelConfig,
        num_blocks: int,
        dtype: torch.dtype,
        device: torch.device,
        has_padding: bool = False,
    ) -> None:
        self.num_blocks = num_blocks
        self.scratch_block, self.padding_block = num_blocks, num_blocks + 1
        blocks = (num_blocks + 1 + has_padding, BLOCK_SIZE, config.num_kv_heads, config.head_dim)
        self.tensor = zeros((config.num_attention_layers, config.num_cached, *blocks), dtype, device)
        value_dim = config.head_dim if config.latent is None else config.latent.rank
        self.layers = [
            LayerKV(layer, layer[0].flatten(0, 1), layer[-1].flatten(0, 1)[..., :value_dim])
            for layer in self.tensor.unbind(0)  # [2 or 1, blocks + 1 or 2, 16, kv_heads, head_dim]
        ]

    def copy_blocks(self, sources: Tensor, targets: Tensor) -> None:
        """Copy whole blocks, all layers: sources[i] to targets[i]; no target is also a source. Both: [copies]."""
        self.tensor.index_copy_(2, targets, self.tensor.index_select(2, sources))

    def make_finite(self, blocks: Tensor) -> None:
        """Zero what is NaN or infinite in these blocks, all layers; other sequences may share the rest."""
        found = self.tensor.index_select(2, blocks)
        self.tensor.index_copy_(2, blocks, found.nan_to_num_(0.0, 0.0, 0.0))


def bytes_per_token(config: ModelConfig, dtype: torch.dtype) -> int:
    """Keys and values of one token, all layers."""
    return config.num_cached * config.num_attention_layers * config.kv_size * dtype.itemsize


def bytes_per_block(config: ModelConfig, dtype: torch.dtype) -> int:
    return BLOCK_SIZE * bytes_per_token(config, dtype)


def num_blocks_for(num_tokens: int) -> int:
    """Blocks of one sequence of so many tokens."""
    return -(-num_tokens // BLOCK_SIZE)


def num_blocks_within(memory_bytes: int, config: ModelConfig, dtype: torch.dtype) -> int:
    """Usable blocks that fit beside the scratch block; may be 0."""
    return max(0, memory_bytes // bytes_per_block(config, dtype) - 1)


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros. On a CPU by numpy, whose zeroed pages cost nothing until they are used."""
    if device.type != "cpu" or 0 in shape:
        return torch.zeros(shape, dtype=dtype, device=device)
    raw = np.zeros(int(np.prod(shape)) * dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(raw).view(dtype).view(shape)
