"""Quantised weights kept on disk, so that the next start need not make them again. Thread: engine (at start).

One safetensors file per matrix, named by the SHA-256 of its numbers, their format and the scheme: whichever model they
came from, the same numbers give the same file. A file is written aside and renamed, and read only if its content has
the hash that it claims; a damaged one is made again. What cannot be written is not kept, with a warning.
"""

import hashlib
import logging
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from core.config import EngineConfig
from gpu.cache_files import cache_home
from gpu.quantize import QuantizedWeight, Weight, can_quantize, quantize

FOLDER = Path("steploop", "quantized")
SUFFIX = ".safetensors"
VERSION = "1"  # of what quantize() makes: another one, other names
CONTENT_HASH = "sha256"  # in the file's metadata

logger = logging.getLogger(__name__)


class QuantizeCache:
    """A directory of at most limit_bytes once trimmed; files used last stay longest."""

    def __init__(self, directory: Path, limit_bytes: int) -> None:
        self._directory = directory
        self._limit_bytes = limit_bytes
        self._is_writable = True

    def quantize(self, weight: Tensor, scheme: str) -> QuantizedWeight:
        """The weight quantised, from the cache where it is there; on the weight's device.

        On a GPU it is made: that reads it once at the memory's speed, and its hash would bring it back to the host.
        """
        if weight.device.type != "cpu":
            return quantize(weight, scheme)
        file = self._directory / f"{digest(weight, scheme)}{SUFFIX}"
        found = _read(file)
        if found is not None:
            return QuantizedWeight(weight.dtype, *found)
        quantized = quantize(weight, scheme)
        if self._is_writable:
            self._write(file, quantized)
        return quantized

    def trim(self) -> None:
        """Remove files, those used longest ago first, until the others fit; what others have removed is no surprise."""
        try:
            found = sorted((entry.stat().st_mtime, entry.stat().st_size, entry) for entry in self._directory.iterdir())
            excess = sum(size for _, size, _ in found) - self._limit_bytes
            for _, size, file in found:
                if excess <= 0:
                    return
                file.unlink(missing_ok=True)
                excess -= size
        except (FileNotFoundError, NotADirectoryError):
            return  # nothing was kept
        except OSError as error:
            logger.warning("the cache of quantised weights in %s is not trimmed: %s", self._directory, error)

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
            logger.warning("quantised weights are not kept in %s: %s", self._directory, error)


@contextmanager
def quantizing(engine: EngineConfig) -> Iterator[Callable[[Tensor], Weight] | None]:
    """What to do with each matrix while it loads, as the operator asks; None: nothing. Afterwards the cache is trimmed.

    A matrix whose rows cannot be stored so stays as it is.
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
    return cache_home() / FOLDER


def digest(weight: Tensor, scheme: str) -> str:
    """Of the numbers as loaded, in the rows' order that is served: 64 hexadecimal digits."""
    head = f"{VERSION} {scheme} {weight.dtype} {tuple(weight.shape)}\0"
    found = hashlib.sha256(head.encode())
    _add(found, weight)
    return found.hexdigest()


def _read(file: Path) -> tuple[Tensor, ...] | None:
    """Values, scales, and zeros where there are; None: not there, or not whole."""
    try:
        with safe_open(file, framework="pt") as reader:
            claimed = (reader.metadata() or {}).get(CONTENT_HASH)
            # copies: a mapped file that another process shortens would end this one
            parts = {name: reader.get_tensor(name).clone() for name in sorted(reader.keys())}
        if "values" not in parts or "scales" not in parts or claimed != _content_hash(parts):
            raise SafetensorError("its content has another hash than it claims")
        os.utime(file)
        return tuple(parts[name] for name in ("values", "scales", "zeros") if name in parts)
    except FileNotFoundError:
        return None
    except (SafetensorError, OSError) as error:
        logger.warning("%s is made again: %s", file, error)
        return None


def _parts(quantized: QuantizedWeight) -> dict[str, Tensor]:
    parts = {"values": quantized.values, "scales": quantized.scales, "zeros": quantized.zeros}
    return {name: part.contiguous() for name, part in parts.items() if part is not None}


def _content_hash(parts: dict[str, Tensor]) -> str:
    found = hashlib.sha256()
    for name in sorted(parts):
        found.update(f"{name} {parts[name].dtype} {tuple(parts[name].shape)}\0".encode())
        _add(found, parts[name])
    return found.hexdigest()


def _add(found: "hashlib._Hash", tensor: Tensor) -> None:
    if tensor.numel():
        content: Any = tensor.contiguous().view(-1).view(torch.uint8).cpu().numpy()
        found.update(content)
