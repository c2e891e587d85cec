"""The paged KV cache: keys and values of all sequences, in blocks of 16 tokens. Thread: engine.

Where CPU kernels attend, a block of a head lies together as they read it, in pairs: [head_dim / 2, 16 tokens, 2]
numbers of keys, [8, head_dim, 2] of values by pairs of tokens. So a token is laid out once, not in each step that reads
it. In 8 bits (--kv-dtype int8) each token's key and value of a head are integers with a scale of their own, so that
they do not depend on what else is computed. A block of a head lies together then, too, as a GPU multiplies it: [16,
head_dim] integers of keys, [head_dim, 16] of values (or pairs), and 16 scales in float32.

The scheduler decides which sequence has which block (core/kv_cache.py). Layers with windows may have window blocks, of
which there are fewer; then a block has the other layers only. Window block b is ~b where both kinds are meant.

One extra block, the scratch block, stays zero for ever: it pads the block tables of shorter rows. Where batches are
padded with rows, another extra block takes what padding writes, and is never read.
"""

import math
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from core.config import BLOCK_SIZE, EngineConfig, ModelConfig
from core.errors import StartupError
from core.plan import Int32Array
from gpu.device import DeviceChoice

Blocks = TypeVar("Blocks", Tensor, Int32Array)
INT8 = torch.int8
SCALE_BYTES = 4
MOST = 127.0  # of an integer


@dataclass(frozen=True, slots=True)
class LayerKV:
    """One layer's views of the cache. With latent attention, values are the first numbers of keys."""

    both: Tensor  # [2 or 1, blocks + 1 or 2, 16, kv_heads, head_dim]
    keys: Tensor  # [(blocks + 1 or 2) * 16, kv_heads, head_dim]
    values: Tensor  # [(blocks + 1 or 2) * 16, kv_heads, head_dim or latent.rank]
    has_windows: bool = False  # its blocks are window blocks
    is_paired: bool = False  # see BlockwiseKV
    key_scales: Tensor | None = None  # in 8 bits: float32 [blocks + 1 or 2, kv_heads, 16]
    value_scales: Tensor | None = None

    @property
    def is_int8(self) -> bool:
        return self.key_scales is not None

    @property
    def head_dim(self) -> int:
        return self.both.shape[-1] - (SCALE_BYTES if self.is_int8 else 0)

    def write(self, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store tokens. slots: [tokens]; keys and values: [tokens, kv_heads, head_dim]."""
        self.keys.index_copy_(0, slots, keys)
        self.values.index_copy_(0, slots, values)

    def read(self, blocks: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Keys and values of blocks [rows, n], each [rows, kv_heads, n * 16, head_dim]; values: perhaps narrower."""
        both = self.both.index_select(1, blocks.flatten())  # [2 or 1, rows * n, 16, kv_heads, head_dim]
        both = both.view(len(both), blocks.shape[0], -1, *both.shape[3:]).transpose(2, 3)
        return both[0], both[-1][..., : self.values.shape[-1]]


class BlockwiseKV(LayerKV):
    """By blocks of a head, in pairs, in 8 bits or both: see above.

    keys, values: [blocks + 1 or 2, kv_heads, numbers of a block].
    """

    def write(self, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        blocks, places = slots // BLOCK_SIZE, slots % BLOCK_SIZE
        parts = (keys, self.keys, self.key_scales), (values, self.values, self.value_scales)
        for numbers, into, scales in parts:
            if scales is not None:
                numbers = numbers.float()
                most = numbers.abs().amax(-1)  # [tokens, kv_heads]
                top = torch.full_like(most, MOST)  # by a number CUDA would divide as by its inverse
                scales[blocks, :, places] = most / top
                numbers = (numbers * (top / most).nan_to_num_(0, 0, 0).unsqueeze(-1)).round_().to(INT8)
            stored = self._arranged(into, into is self.keys)
            if self.is_paired and into is self.keys:
                stored[blocks, :, :, places] = numbers.reshape(*numbers.shape[:2], -1, 2)
            elif self.is_paired:
                stored[blocks, :, places // 2, :, places % 2] = numbers
            elif into is self.keys:
                stored[blocks, :, places] = numbers
            else:
                stored[blocks, :, :, places] = numbers

    def read(self, blocks: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        def read_one(stored: Tensor, scales: Tensor | None, is_key: bool) -> Tensor:
            which = blocks.flatten()
            numbers = self._arranged(stored.index_select(0, which), is_key)  # of [rows * n, kv_heads]
            if self.is_paired:
                numbers = numbers.permute((0, 1, 3, 2, 4) if is_key else (0, 1, 2, 4, 3))
            elif not is_key:
                numbers = numbers.transpose(2, 3)
            numbers = numbers.reshape(*numbers.shape[:2], BLOCK_SIZE, self.head_dim)
            if scales is not None:
                numbers = numbers * scales.index_select(0, which).unsqueeze(-1)
            return numbers.to(dtype).view(*blocks.shape, *numbers.shape[1:]).transpose(1, 2).flatten(2, 3)

        return read_one(self.keys, self.key_scales, True), read_one(self.values, self.value_scales, False)

    def _arranged(self, stored: Tensor, is_key: bool) -> Tensor:
        """The numbers of blocks [blocks, kv_heads, numbers and scales] as they lie."""
        head_dim = self.head_dim
        shape: tuple[int, ...] = (BLOCK_SIZE, head_dim) if is_key else (head_dim, BLOCK_SIZE)
        if self.is_paired:
            shape = (head_dim // 2, BLOCK_SIZE, 2) if is_key else (BLOCK_SIZE // 2, head_dim, 2)
        return stored[..., : BLOCK_SIZE * head_dim].view(*stored.shape[:2], *shape)


class KVCache:
    """The paged cache.

    Args:
        num_blocks: blocks the scheduler may use, 0..num_blocks-1.
        has_padding: batches are padded with rows.
        windows: see MemoryPlan; empty: there are no window blocks.
        is_paired: see Operators.pairs_kv.

    Attributes:
        tensors: one for each size of heads: [layers, 2 or 1, blocks + 1 or 2, 16, kv_heads, head_dim].
        window_tensors: the same of layers with window blocks.
        layers: those that cache.
    """

    def __init__(
        self,
        config: ModelConfig,
        num_blocks: int,
        dtype: torch.dtype,
        device: torch.device,
        has_padding: bool = False,
        windows: tuple[int | None, ...] = (),
        num_window_blocks: int = 0,
        is_paired: bool = False,
    ) -> None:
        self.num_blocks, self.num_window_blocks = num_blocks, num_window_blocks
        self.is_paired = is_paired
        self.scratch_block = num_blocks
        rank, are_behind = None if config.latent is None else config.latent.rank, [one is not None for one in windows]
        sizes = [(*size, bool(are_behind) and are_behind[index]) for index, size in enumerate(config.cached_heads)]
        kinds = {}
        for size in dict.fromkeys(sizes):
            num = (num_window_blocks if size[2] else num_blocks) + 1 + has_padding
            blocks = (num, BLOCK_SIZE, size[0], _width(size[1], dtype))
            kinds[size] = zeros((sizes.count(size), config.num_cached, *blocks), dtype, device)
        self.tensors = [tensor for size, tensor in kinds.items() if not size[2]]
        self.window_tensors = [tensor for size, tensor in kinds.items() if size[2]]
        found = {size: iter(tensor.unbind(0)) for size, tensor in kinds.items()}
        self.layers = [_layer_kv(next(found[size]), *size, rank, is_paired) for size in sizes]

    @property
    def device(self) -> torch.device:
        return self.tensors[0].device

    @property
    def dtype(self) -> torch.dtype:
        return self.tensors[0].dtype

    @property
    def kinds(self) -> list[list[Tensor]]:
        """The tensors of blocks, and those of window blocks, if there are any."""
        return [self.tensors, self.window_tensors] if self.window_tensors else [self.tensors]

    def parts_of(self, blocks: Blocks) -> list[Blocks]:
        """Blocks and window blocks, in the order of `kinds`."""
        return [blocks[blocks >= 0], ~blocks[blocks < 0]] if self.window_tensors else [blocks]

    def read_blocks(self, blocks: Tensor) -> Tensor:
        """Whole blocks, all layers: [blocks, numbers of a block]."""
        found = [tensor.index_select(2, blocks).movedim(2, 0).flatten(1) for tensor in self.tensors]
        return found[0] if len(found) == 1 else torch.cat(found, 1)

    def write_blocks(self, blocks: Tensor, numbers: Tensor) -> None:
        """Write what read_blocks returned."""
        first = 0
        for tensor in self.tensors:
            shape = (*tensor.shape[:2], *tensor.shape[3:])
            own = numbers[:, first : first + math.prod(shape)].contiguous()
            tensor.index_copy_(2, blocks, own.view(len(own), *shape).movedim(0, 2))
            first += own.shape[1]

    def make_finite(self, blocks: Tensor) -> None:
        """Zero what is NaN or infinite in these blocks, all layers; other sequences may share the rest."""
        for tensors, own in zip(self.kinds, self.parts_of(blocks), strict=True):
            for tensor in tensors:
                found = tensor.index_select(2, own)
                if found.dtype == INT8:
                    head_bytes = BLOCK_SIZE * found.shape[-1]
                    scales = found.view(-1, head_bytes)[:, head_bytes - BLOCK_SIZE * SCALE_BYTES :].view(torch.float32)
                    scales.nan_to_num_(0.0, 0.0, 0.0)
                else:
                    found.nan_to_num_(0.0, 0.0, 0.0)
                tensor.index_copy_(2, own, found)


def copy_blocks(tensor: Tensor, sources: Tensor, targets: Tensor) -> None:
    """Copy whole blocks of one of a cache's tensors: sources[i] to targets[i]; no target is also a source."""
    tensor.index_copy_(2, targets, tensor.index_select(2, sources))


def _layer_kv(
    layer: Tensor, num_kv_heads: int, head_dim: int, has_windows: bool, latent_rank: int | None, is_paired: bool
) -> LayerKV:
    """layer: [2 or 1, blocks + 1 or 2, 16, kv_heads, width]."""
    if is_paired or layer.dtype == INT8:
        return blockwise(layer, is_paired, has_windows)
    values = layer[-1].flatten(0, 1)[..., : latent_rank or head_dim]
    return LayerKV(layer, layer[0].flatten(0, 1), values, has_windows)


def blockwise(layer: Tensor, is_paired: bool, has_windows: bool = False) -> BlockwiseKV:
    """layer: [2, blocks, 16, kv_heads, head_dim], or in 8 bits with room for scales; not what lies in it."""
    heads = (layer.shape[1], layer.shape[3], -1)
    keys, values = layer[0].view(heads), layer[1].view(heads)
    if layer.dtype != INT8:
        return BlockwiseKV(layer, keys, values, has_windows, is_paired)
    scales = [both[..., -BLOCK_SIZE * SCALE_BYTES :].view(torch.float32) for both in (keys, values)]
    return BlockwiseKV(layer, keys, values, has_windows, is_paired, *scales)


def layer_bytes(config: ModelConfig, dtype: torch.dtype) -> list[int]:
    """Keys and values of one token, in each layer that caches."""
    token_bytes = config.num_cached * dtype.itemsize
    return [token_bytes * num_heads * _width(head_dim, dtype) for num_heads, head_dim in config.cached_heads]


def bytes_per_token(config: ModelConfig, dtype: torch.dtype) -> int:
    """Keys and values of one token, all layers."""
    return sum(layer_bytes(config, dtype))


def _width(head_dim: int, dtype: torch.dtype) -> int:
    """Of a token's key or value of one head, with its scale."""
    return head_dim + (SCALE_BYTES if dtype == INT8 else 0)


def kv_dtype_of(config: ModelConfig, engine: EngineConfig, choice: DeviceChoice) -> torch.dtype:
    """What keys and values are stored in: int8, or the serving format.

    Raises:
        StartupError: --kv-dtype cannot be kept.
    """
    if engine.kv_dtype == "auto":
        return choice.dtype
    why = None
    if config.latent is not None:
        why = "latent attention needs its cache in the format of --dtype"
    elif config.head_dim % 2:
        why = f"heads of {config.head_dim} numbers are not pairs"
    if why is not None:
        raise StartupError(f"--kv-dtype {engine.kv_dtype} is not supported here: {why}.", "start without --kv-dtype.")
    return INT8


def bytes_per_block(config: ModelConfig, dtype: torch.dtype) -> int:
    return BLOCK_SIZE * bytes_per_token(config, dtype)


def num_blocks_for(num_tokens: int) -> int:
    """Blocks of one sequence of so many tokens."""
    return -(-num_tokens // BLOCK_SIZE)


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros. On a CPU by numpy, whose zeroed pages cost nothing until they are used."""
    if device.type != "cpu" or 0 in shape:
        return torch.zeros(shape, dtype=dtype, device=device)
    raw = np.zeros(int(np.prod(shape)) * dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(raw).view(dtype).view(shape)
