"""A GGUF file's tensors as torch's, in Hugging Face's names and order of rows. Thread: engine (at start).

Formats that are not floats are dequantised a slab at a time: no more than one tensor of the serving dtype, and a slab,
is in memory beside the parameters. Parsing the header is core's.
"""

import math
import mmap
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from core.errors import BadCheckpoint
from core.gguf import BLOCKS, GgufTensor, parse_gguf
from core.gguf_model import hugging_face_tensors, is_norm_shifted, num_turned_heads

SLAB_BYTES = 8 * 2**20  # of blocks; as float32 eight times as much at most
K_ELEMENTS = 256  # of the K formats' blocks


class GgufReader:
    """Reads tensors by their Hugging Face names. A context manager, as safetensors' reader is.

    Args:
        dtype: what quantised tensors become; the others stay as they are.

    Raises:
        BadCheckpoint, UnsupportedModel: see core.gguf.parse_gguf.
    """

    def __init__(self, file: Path, dtype: torch.dtype = torch.float32) -> None:
        try:
            with file.open("rb") as opened:  # private: torch wants what it may write
                self._map = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY)
        except (OSError, ValueError) as error:
            raise BadCheckpoint(f"{file} cannot be read: {error}.", "download it again, or name another.") from error
        self._bytes = torch.from_numpy(np.frombuffer(self._map, np.uint8))
        header = parse_gguf(self._bytes.numpy().data, str(file))
        self._dtype = dtype
        self._metadata = header.metadata
        self.tensors = hugging_face_tensors(header)

    def __enter__(self) -> "GgufReader":
        return self

    def __exit__(self, *_: object) -> None:
        del self._bytes, self._map

    def release(self) -> None:
        """Give back the pages that were read: they come again from the file when they are asked for."""
        self._map.madvise(mmap.MADV_DONTNEED)

    def get_tensor(self, name: str) -> Tensor:
        """One tensor, of the shape that `tensors` says."""
        tensor = self._floats(self.tensors[name])
        if is_norm_shifted(name, self._metadata):
            tensor = tensor - 1
        heads = num_turned_heads(name, self._metadata)
        return tensor if heads is None else part_halves(tensor, heads)

    def _floats(self, found: GgufTensor) -> Tensor:
        content = self._bytes[found.offset : found.offset + found.size_bytes]
        if found.format in FLOATS:
            return _aligned(content).view(FLOATS[found.format]).view(found.shape)
        dequantise = DEQUANTISERS[found.format]
        block_elements, block_bytes = BLOCKS[found.format]
        blocks = content.view(-1, block_bytes)
        tensor = torch.empty(math.prod(found.shape), dtype=self._dtype)
        slab = SLAB_BYTES // block_bytes
        for start in range(0, len(blocks), slab):
            values = dequantise(blocks[start : start + slab])  # [blocks, elements]
            tensor[start * block_elements :][: values.numel()].copy_(values.view(-1))
        return tensor.view(found.shape)


def part_halves(rows: Tensor, num_heads: int) -> Tensor:
    """Reorder each head's rows from pairs side by side to (first half, second half), as Hugging Face has them.

    rows: [heads * head_dim, ...], also returned so. Source: convert_hf_to_gguf.py, LlamaModel.permute, undone.
    """
    heads = rows.view(num_heads, rows.shape[0] // num_heads // 2, 2, *rows.shape[1:])
    return heads.transpose(1, 2).reshape(rows.shape)


def dequantise_q8_0(blocks: Tensor) -> Tensor:
    """Scale, 32 signed bytes. blocks: [blocks, 34] bytes → [blocks, 32], float32; so the others, with their sizes."""
    return blocks[:, 2:].view(torch.int8).float().mul_(_halves(blocks[:, :2]))


def dequantise_q4_0(blocks: Tensor) -> Tensor:
    """Scale, 16 bytes: low nibbles are the first half, high ones the second; 8 is zero."""
    nibbles = torch.cat([blocks[:, 2:] & 15, blocks[:, 2:] >> 4], 1)
    return nibbles.float().sub_(8).mul_(_halves(blocks[:, :2]))


def dequantise_q5_0(blocks: Tensor) -> Tensor:
    """Scale, 32 fifth bits, then as Q4_0; 16 is zero."""
    nibbles = torch.cat([blocks[:, 6:] & 15, blocks[:, 6:] >> 4], 1)
    fifths = (blocks[:, 2:6].unsqueeze(2) >> torch.arange(8, dtype=torch.uint8)) & 1  # [blocks, 4, 8]
    return (nibbles | (fifths.flatten(1) << 4)).float().sub_(16).mul_(_halves(blocks[:, :2]))


def dequantise_q4_k(blocks: Tensor) -> Tensor:
    """Scales and minima of 8 parts, 256 nibbles: in each 32 bytes first all low, then all high.

    Source: ggml-quants.c, dequantize_row_q4_K.
    """
    return _scaled_parts(blocks, _k_nibbles(blocks[:, 16:]))


def dequantise_q5_k(blocks: Tensor) -> Tensor:
    """As Q4_K, with 32 bytes of fifth bits before the nibbles: bit n of them is of part n."""
    shifts = torch.arange(8, dtype=torch.uint8).view(8, 1)
    fifths = (blocks[:, 16:48].unsqueeze(1) >> shifts) & 1  # [blocks, 8, 32]
    return _scaled_parts(blocks, _k_nibbles(blocks[:, 48:]) | (fifths << 4))


def _k_nibbles(packed: Tensor) -> Tensor:
    """[blocks, 128] bytes → [blocks, 8, 32]"""
    packed = packed.reshape(-1, 4, 32)
    return torch.stack([packed & 15, packed >> 4], 2).view(-1, 8, 32)


def _scaled_parts(blocks: Tensor, quants: Tensor) -> Tensor:
    """Scale of scales, scale of minima, 8 of each in 6 bits. quants: [blocks, 8, 32] → [blocks, 256], float32.

    Source: ggml-quants.c, get_scale_min_k4.
    """
    low, high, mixed = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]  # [blocks, 4] each
    scales = torch.cat([low & 63, (mixed & 15) | ((low >> 2) & 48)], 1).float() * _halves(blocks[:, :2])
    minima = torch.cat([high & 63, (mixed >> 4) | ((high >> 2) & 48)], 1).float() * _halves(blocks[:, 2:4])
    return quants.float().mul_(scales.unsqueeze(2)).sub_(minima.unsqueeze(2)).view(-1, K_ELEMENTS)


def dequantise_q6_k(blocks: Tensor) -> Tensor:
    """128 bytes of low nibbles, 64 of high pairs of bits, 16 signed scales, their scale; 32 is zero.

    Source: ggml-quants.c, dequantize_row_q6_K: each half of 128 has 64 bytes of nibbles and 32 of pairs.
    """
    low = blocks[:, :128].reshape(-1, 2, 64)
    nibbles = torch.cat([low & 15, low >> 4], 2).view(-1, 2, 4, 32)
    pairs = blocks[:, 128:192].reshape(-1, 2, 32)
    high = torch.stack([(pairs >> shift) & 3 for shift in (0, 2, 4, 6)], 2)  # [blocks, 2, 4, 32]
    scales = blocks[:, 192:208].view(torch.int8).float() * _halves(blocks[:, 208:])
    values = (nibbles | (high << 4)).float().sub_(32).view(-1, 16, 16)
    return values.mul_(scales.unsqueeze(2)).view(-1, K_ELEMENTS)


FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
DEQUANTISERS: dict[str, Callable[[Tensor], Tensor]] = {
    "Q8_0": dequantise_q8_0,
    "Q4_0": dequantise_q4_0,
    "Q5_0": dequantise_q5_0,
    "Q4_K": dequantise_q4_k,
    "Q5_K": dequantise_q5_k,
    "Q6_K": dequantise_q6_k,
}


def _halves(two_bytes: Tensor) -> Tensor:
    """float16 columns as float32: [blocks, 2] bytes → [blocks, 1]."""
    return two_bytes.contiguous().view(torch.float16).float()


def _aligned(content: Tensor) -> Tensor:
    """As it is where its first byte may begin a float (a file's alignment may be one byte)."""
    return content if content.storage_offset() % 4 == 0 else content.clone()
