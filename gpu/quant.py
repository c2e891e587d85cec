"""Weights as 8- or 4-bit numbers with scales: quantise, dequantise, multiply, cache. Thread: engine.

int8: one scale per row (output channel), symmetric; on a CPU per 32 neighbours in a row, which is closer than half by
what 8 bits of activations cost there. fp8: a scale per row of floats with four bits of exponent and three of mantissa
(e4m3fn: arXiv:2209.05433), which follow small weights closer and large ones less. int4: a scale and a zero per
group of neighbours in a row, asymmetric. Scales and zeros are rounded to bfloat16 first, and the numbers chosen for the
rounded ones. A checkpoint's fp8 keeps its own scales, in float32, which may be of groups as well.

Only matrices of layers are quantised; embedding and head stay in the serving format. They are read by row or share
their numbers (tied), and an error in the head goes into every logit; norms, biases and routers are too small to matter.

Greedy agreement of the demonstration model with itself in bfloat16, over the held text: int8 98.4 %; int4 in groups of
32, 64 and 128: 79.0, 77.7 and 73.4 %; with the head quantised too 98.0 and 76.6 %.

Matmuls: the kernels of blocks (gpu/blocks.py) or Triton's where they support a matrix; otherwise it is dequantised a
slab at a time. Torch's own operators for int8 and int4 are not used: with float32 rows they took 1.2 to 30 times as
long as slabs for up to 4 rows, and for 16 as long (int8) or 32 times as long (int4): 4,864 x 896, one Zen 5 core.
"""

import hashlib
import logging
import math
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from core.config import EngineConfig
from core.errors import BadCheckpoint
from gpu.blocks import BlockWeight
from gpu.cache_files import cache_home
from gpu.linear import make_linear

# int4 takes the first that divides a row. Smaller groups are more exact: 64 cost 4.5 bits a weight, 32 cost 5.
GROUP_SIZES = (64, 32)
MAX_INT8 = 127
FP8 = torch.float8_e4m3fn
MAX_FP8 = 448.0
MAX_INT4 = 15
MIDDLE_INT4 = 8  # the integer that stands for the zero
LEAST_GROUP = 32  # inputs that share a scale: the fewest that a matrix instruction takes of each half of a byte
SLAB_ELEMENTS = 2**20  # quantised at once, as float32
SLAB_BYTES = 2**21  # of the weight, dequantised at once: what the second-level cache holds
DEVICE_SLAB_BYTES = 2**26  # the same on a device, where each slab costs launches
CACHE_FOLDER = Path("steploop", "quantized")
CACHE_SUFFIX = ".safetensors"
CACHE_VERSION = "2"  # changes with the results of quantize()
CONTENT_HASH = "sha256"  # in the file's metadata

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """A matrix, or a stack of them: weight = (value - middle) * scale + zero.

    Args:
        dtype: of the original weight, and of the rows that it multiplies.
        values: int8 and fp8: [..., out, in], int8 or float8_e4m3fn; int4: [..., out, in / 2], uint8, the even column in
            the low half.
        scales: int8 and fp8: [..., out, 1] or [..., out, in / group]; int4: [..., out, in / group]; bfloat16, float32
            for a checkpoint's fp8.
        zeros: int4: as scales; others: None.
    """

    dtype: torch.dtype
    values: Tensor
    scales: Tensor
    zeros: Tensor | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the matrix: [..., out, in]."""
        *rows, width = self.values.shape
        return (*rows, width if self.zeros is None else 2 * width)

    @property
    def group_size(self) -> int:
        return self.shape[-1] // self.scales.shape[-1]

    def __getitem__(self, index: int | slice) -> "QuantizedWeight":
        """Rows, or one matrix of a stack."""
        zeros = None if self.zeros is None else self.zeros[index]
        return QuantizedWeight(self.dtype, self.values[index], self.scales[index], zeros)


DeviceWeight = Tensor | QuantizedWeight
Weight = DeviceWeight | BlockWeight


def floats(weight: Weight) -> Tensor:
    """The weight, which must not be quantised."""
    assert isinstance(weight, Tensor)
    return weight


def group_size_of(scheme: str, num_in: int, device: torch.device) -> int | None:
    """How many inputs of a row of this length share a scale; None: int4 has no size that divides it."""
    if scheme == "int4":
        return next((size for size in GROUP_SIZES if num_in % size == 0), None)
    return LEAST_GROUP if scheme == "int8" and device.type == "cpu" and num_in % LEAST_GROUP == 0 else num_in


def prequantized_group(stored: int | None, num_in: int) -> int | None:
    """How many inputs share a scale once a checkpoint's row, or a rank's part of it, is loaded.

    Stored groups that do not divide the row, or that a part begins within, are cut into smaller ones.

    Args:
        stored: how many share one in the checkpoint; None: all of a row.
    Returns:
        None: groups would be too small for the kernels.
    """
    size = num_in if stored is None else math.gcd(stored, num_in)
    return size if stored is None or size % LEAST_GROUP == 0 else None


def can_quantize(scheme: str, num_in: int) -> bool:
    """Whether rows of this length can be stored in this scheme; others stay in the serving format."""
    return group_size_of(scheme, num_in, torch.device("cpu")) is not None


def stored_bytes(
    shape: tuple[int, ...], scheme: str, dtype: torch.dtype, device: torch.device, group_size: int | None = None
) -> int:
    """Upper bound of a quantised matrix, or a stack, ready to multiply.

    Args:
        group_size: a checkpoint's, of int4 or of fp8, whose scales are float32; None: quantize()'s.
    """
    num_in = shape[-1]
    if scheme == "fp8" and group_size is not None:
        return math.prod(shape[:-1]) * (num_in + num_in // group_size * torch.float32.itemsize)
    group_size = group_size or group_size_of(scheme, num_in, device)
    assert group_size is not None
    if scheme != "int4":
        return math.prod(shape[:-1]) * (num_in + num_in // group_size * dtype.itemsize)
    return math.prod(shape[:-1]) * (num_in // 2 + num_in // group_size * 2 * dtype.itemsize)


def quantize(weight: Tensor, scheme: str) -> QuantizedWeight:
    """Round to the scheme's nearest numbers. weight: [..., out, in], any float format, of a width that can_quantize.

    An int4 or int8 weight changes by at most half its scale, plus the rounding of the zero (2 ** -8 of it).

    Raises:
        BadCheckpoint: a number is not finite.
    """
    num_in = weight.shape[-1]
    rows = weight.reshape(-1, num_in)
    group_size = group_size_of(scheme, num_in, weight.device)
    assert group_size is not None
    parts = []
    for start, end in _slabs(rows.shape):
        groups = rows[start:end].float().view(end - start, -1, group_size)  # [rows, groups, group]
        if not groups.isfinite().all():
            raise BadCheckpoint("A weight to be quantised is not a finite number.", "serve it without --quantize.")
        parts.append(_FROM_GROUPS[scheme](groups))
    values, scales, *zeros = (torch.cat(part).view(*weight.shape[:-1], -1) for part in zip(*parts, strict=True))
    return QuantizedWeight(weight.dtype, values, scales, *zeros)


def dequantize(weight: QuantizedWeight, dtype: torch.dtype) -> Tensor:
    """The matrix, [..., out, in], computed in dtype, which rounds as matmuls in that format do."""
    if weight.zeros is None:
        groups = weight.values.to(dtype).view(*weight.scales.shape, -1)  # [..., out, groups, group]
        return groups.mul_(weight.scales.unsqueeze(-1)).flatten(-2)  # float32 scales are not rounded before
    values = unpack_nibbles(weight.values).view(torch.int8).sub_(MIDDLE_INT4).to(dtype)
    groups = values.view(*weight.scales.shape, weight.group_size)
    scales, zeros = weight.scales.to(dtype).unsqueeze(-1), weight.zeros.to(dtype).unsqueeze(-1)
    return torch.addcmul(zeros, groups, scales).flatten(-2)


def pack_nibbles(values: Tensor) -> Tensor:
    """[..., 2 * n] of 0 to 15 → [..., n] bytes, the even one low."""
    low, high = values.view(*values.shape[:-1], -1, 2).unbind(-1)
    return low | (high << 4)


def unpack_nibbles(packed: Tensor) -> Tensor:
    """[..., n] bytes → [..., 2 * n] of 0 to 15, uint8."""
    return torch.stack([packed & 15, packed >> 4], -1).flatten(-2)


def round_up_to_bfloat16(values: Tensor) -> Tensor:
    """The nearest bfloat16 that is not smaller. values: float32, not negative."""
    bits = values.contiguous().view(torch.int32)
    return ((bits + 0xFFFF) >> 16).to(torch.int16).view(torch.bfloat16)  # a float's first half is a bfloat16


def _to_int8(groups: Tensor) -> tuple[Tensor, Tensor]:
    scales = _usable(round_up_to_bfloat16(groups.abs().amax(-1) / MAX_INT8))  # [rows, 1]
    values = (groups / scales.float().unsqueeze(-1)).round_().clamp_(-MAX_INT8, MAX_INT8)
    return values.to(torch.int8).flatten(1), scales


def _to_fp8(groups: Tensor) -> tuple[Tensor, Tensor]:
    scales = _usable(round_up_to_bfloat16(groups.abs().amax(-1) / MAX_FP8))  # [rows, 1]
    return (groups / scales.float().unsqueeze(-1)).clamp_(-MAX_FP8, MAX_FP8).to(FP8).flatten(1), scales


def _to_int4(groups: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    low, high = groups.aminmax(dim=-1)
    scales = _usable(round_up_to_bfloat16((high - low) / MAX_INT4))  # [rows, groups]
    zeros = (low + MIDDLE_INT4 * scales.float()).bfloat16()
    values = (groups - zeros.float().unsqueeze(-1)) / scales.float().unsqueeze(-1)
    values = values.add_(MIDDLE_INT4).round_().clamp_(0, MAX_INT4).to(torch.uint8)
    return pack_nibbles(values.flatten(1)), scales, zeros


_FROM_GROUPS: dict[str, Callable[[Tensor], tuple[Tensor, ...]]] = {"int8": _to_int8, "fp8": _to_fp8, "int4": _to_int4}
"""float32 [rows, groups, group] to values, scales and perhaps zeros"""


def _usable(scales: Tensor) -> Tensor:
    """A scale of 0, of a group of equal weights, becomes 1: it would be divided by."""
    return scales.masked_fill_(scales == 0, 1.0)


def _slabs(shape: torch.Size) -> Iterator[tuple[int, int]]:
    num_rows, num_in = shape
    step = max(1, SLAB_ELEMENTS // num_in)
    return ((start, min(start + step, num_rows)) for start in range(0, num_rows, step))


class SlabLinear:
    """A matmul with any quantised weight on any device: dequantised a slab at a time, in the rows' format."""

    def __init__(self, weight: QuantizedWeight, bias: Tensor | None) -> None:
        slab_bytes = SLAB_BYTES if weight.values.device.type == "cpu" else DEVICE_SLAB_BYTES
        self._weight = weight
        self._bias = bias
        num_out, num_in = weight.shape
        self._step = max(1, slab_bytes // (num_in * weight.dtype.itemsize))
        self._num_out = num_out

    def __call__(self, x: Tensor) -> Tensor:
        """x: [tokens, in]; returns [tokens, out]."""
        result = x.new_empty((x.shape[0], self._num_out))
        for start in range(0, self._num_out, self._step):
            rows = slice(start, min(start + self._step, self._num_out))
            result[:, rows] = self._multiply(x, self._weight[rows])
        return result if self._bias is None else result.add_(self._bias)

    def _multiply(self, x: Tensor, weight: QuantizedWeight) -> Tensor:
        """Scales of whole outputs multiply the result, which saves a pass: the numbers are exact in any format."""
        has_output_scales = weight.zeros is None and weight.scales.shape[-1] == 1
        if has_output_scales and x.dtype != torch.float16:  # float16: unscaled sums would overflow
            return make_linear(weight.values.to(x.dtype), None)(x).mul_(weight.scales.T)
        return make_linear(dequantize(weight, x.dtype), None)(x)


class QuantizeCache:
    """A directory of quantised matrices, trimmed to limit_bytes; the least recently used files go first.

    One safetensors file per matrix, named by the SHA-256 of its numbers, their format and the scheme: the same numbers
    give the same file, whichever model they came from. A file is written under another name and renamed, and read only
    if its content has the hash that it claims; a damaged one is made again. What cannot be written is skipped, with a
    warning.
    """

    def __init__(self, directory: Path, limit_bytes: int) -> None:
        self._directory = directory
        self._limit_bytes = limit_bytes
        self._is_writable = True

    def quantize(self, weight: Tensor, scheme: str) -> QuantizedWeight:
        """The weight quantised, from the cache where possible; on the weight's device.

        On a GPU it is always made: that reads it once at the memory's speed; its hash would copy it to the host.
        """
        if weight.device.type != "cpu":
            return quantize(weight, scheme)
        file = self._directory / f"{digest(weight, scheme)}{CACHE_SUFFIX}"
        found = _read_cached(file)
        if found is not None:
            return QuantizedWeight(weight.dtype, *found)
        quantized = quantize(weight, scheme)
        if self._is_writable:
            self._write(file, quantized)
        return quantized

    def trim(self) -> None:
        """Remove the least recently used files until the others fit; another process may remove some too."""
        try:
            found = sorted((entry.stat().st_mtime, entry.stat().st_size, entry) for entry in self._directory.iterdir())
            excess = sum(size for _, size, _ in found) - self._limit_bytes
            for _, size, file in found:
                if excess <= 0:
                    return
                file.unlink(missing_ok=True)
                excess -= size
        except (FileNotFoundError, NotADirectoryError):
            return  # nothing was cached
        except OSError as error:
            logger.warning("the cache of quantized weights in %s cannot be trimmed: %s", self._directory, error)

    def _write(self, file: Path, quantized: QuantizedWeight) -> None:
        parts = _parts(quantized)
        try:
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            handle, aside = tempfile.mkstemp(dir=self._directory)
            os.close(handle)
            try:
                save_file(parts, aside, metadata={CONTENT_HASH: _content_hash(parts)})
                os.replace(aside, file)
            except BaseException:
                Path(aside).unlink(missing_ok=True)
                raise
        except (OSError, SafetensorError) as error:
            self._is_writable = False
            logger.warning("quantized weights cannot be cached in %s: %s", self._directory, error)


@contextmanager
def quantizing(engine: EngineConfig) -> Iterator[Callable[[Tensor], Weight] | None]:
    """What quantises each matrix while it loads, as configured; None: nothing does. Afterwards the cache is trimmed.

    A matrix whose rows the scheme cannot store stays as it is.
    """
    scheme = engine.quantize
    if scheme is None:
        yield None
        return
    cache = QuantizeCache(cache_directory(), engine.quantize_cache_bytes) if engine.quantize_cache_bytes else None
    make = quantize if cache is None else cache.quantize
    yield lambda weight: make(weight, scheme) if can_quantize(scheme, weight.shape[-1]) else weight
    if cache is not None:
        cache.trim()


def cache_directory() -> Path:
    return cache_home() / CACHE_FOLDER


def digest(weight: Tensor, scheme: str) -> str:
    """SHA-256 of the numbers as loaded, in the order of rows that is served: 64 hexadecimal digits."""
    head = f"{CACHE_VERSION} {scheme} {weight.dtype} {tuple(weight.shape)}\0"
    found = hashlib.sha256(head.encode())
    _add_numbers(found, weight)
    return found.hexdigest()


def _read_cached(file: Path) -> tuple[Tensor, ...] | None:
    """Values, scales, and zeros if there are any; None: no such file, or a damaged one."""
    try:
        with safe_open(file, framework="pt") as reader:
            claimed = (reader.metadata() or {}).get(CONTENT_HASH)
            # copies: if another process truncated a mapped file, this one would be killed
            parts = {name: reader.get_tensor(name).clone() for name in sorted(reader.keys())}
        if "values" not in parts or "scales" not in parts or claimed != _content_hash(parts):
            raise SafetensorError("its content has another hash than it claims")
        os.utime(file)
        return tuple(parts[name] for name in ("values", "scales", "zeros") if name in parts)
    except FileNotFoundError:
        return None
    except (SafetensorError, OSError) as error:
        logger.warning("%s is rebuilt: %s", file, error)
        return None


def _parts(quantized: QuantizedWeight) -> dict[str, Tensor]:
    parts = {"values": quantized.values, "scales": quantized.scales, "zeros": quantized.zeros}
    return {name: part.contiguous() for name, part in parts.items() if part is not None}


def _content_hash(parts: dict[str, Tensor]) -> str:
    found = hashlib.sha256()
    for name in sorted(parts):
        found.update(f"{name} {parts[name].dtype} {tuple(parts[name].shape)}\0".encode())
        _add_numbers(found, parts[name])
    return found.hexdigest()


def _add_numbers(found: "hashlib._Hash", tensor: Tensor) -> None:
    if tensor.numel():
        content: Any = tensor.contiguous().view(-1).view(torch.uint8).cpu().numpy()
        found.update(content)
