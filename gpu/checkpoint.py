"""Reads a model's tensors: a Hugging Face directory's safetensors, or a GGUF file. Thread: engine (at start).

Reads nothing else: no pickle, no code from the directory, no file outside it. A GGUF file's tensors get Hugging Face's
names and order of rows; quantised ones are dequantised a slab at a time, so that beside the parameters only one tensor
in the serving dtype and a slab are in memory. core/gguf.py parses the header.
"""

import hashlib
import json
import math
import mmap
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from torch import Tensor

from core.errors import BadCheckpoint
from core.gguf import BLOCKS, GgufFile, GgufTensor, parse_gguf
from core.gguf_model import hugging_face_tensors, is_decay, is_norm_shifted, num_turned_heads
from core.prequantized import Fp8Config, PackedConfig, Packing
from gpu.blocks import BLOCK_OUTPUTS, PackedBlocks, dequantise, write_packed
from gpu.parameters import Target
from gpu.prequantized import (
    COMPRESSED,
    COMPRESSED_PARTS,
    FP8_FORMAT,
    PARTS,
    SCALES,
    SHAPE_PART,
    UNREAD_SCALES,
    Fp8Weight,
    UnpackedWeight,
    described_scales,
    is_scale_of,
    matrix_shape,
    part_shapes,
    unpack,
)
from gpu.streams import Fill

PICKLES = (".bin", ".pt", ".pth")  # never read: they can run code
SUFFIX = ".safetensors"
SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
FLOAT_FORMATS = ("F64", "F32", "F16", "BF16")  # safetensors' names
HEADER_BYTES = 8  # of the length of a file's header
BYTES = "U8"
INTEGERS = "I32"
PACKED_SUFFIXES = ("_blocks", "_scales")  # mxfp4
# Buffers that old checkpoints store; they are computed here instead.
BUFFER_SUFFIXES = (
    *(f".rotary_emb.{name}" for name in ("inv_freq", "cos_cached", "sin_cached")),
    ".masked_bias",
    ".position_ids",
)
# Of models of texts and images: the language model's names, and what is left out.
TEXT_PREFIXES = {
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "model.language_model.": "model.",
    "backbone.embeddings.": "model.embed_tokens.",  # these three: Nemotron-H
    "backbone.norm_f.": "model.norm.",
    "backbone.": "model.",
}
OTHER_TOWERS = tuple(
    f"{outer}{name}."
    for outer in ("", "model.")
    for name in (
        *("vision_tower", "vision_model", "visual", "multi_modal_projector", "vision_embedder"),
        *("audio_tower", "embed_vision", "embed_audio"),
    )
)
MASK_SUFFIXES = (".attn.bias", ".self_attn.bias", ".attention.bias")  # causal masks: [1, 1, tokens, tokens]
# A mapped file's pages count as resident until it is closed: at most so many stay beside the parameters and one tensor.
RELEASE_BYTES = 64 * 1024**2
DIGEST_SPOTS, DIGEST_BYTES = 256, 4096
NAMED_AT_MOST = 5  # tensors in one error message

Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes total), as loading goes."""
Cut = Callable[[str, torch.Tensor, tuple[int, ...]], torch.Tensor]
"""See gpu.parallel.ranks.Shard.cut."""
GGUF_SLAB_BYTES = 8 * 2**20  # of blocks; as float32 at most eight times as much
FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class TensorHeader:
    """What a file's header says about one tensor.

    Args:
        name: in its file.
        offset: of its first byte in the file; None: it is not stored as plain numbers in a row.
        parts: the tensors that a prequantized matrix is made of, by the last part of their names.
    """

    file: Path
    shape: tuple[int, ...]
    format: str
    size_bytes: int
    name: str
    parts: Mapping[str, "TensorHeader"] = field(default_factory=dict)
    offset: int | None = None


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The tensors of a directory or a GGUF file, by Hugging Face's names; their data is not read yet.

    Args:
        packing: how the tensors with parts are stored.
        gguf: a GGUF file's header.
    """

    path: Path
    tensors: dict[str, TensorHeader] = field(default_factory=dict)
    packing: Packing | None = None
    gguf: GgufFile | None = None

    @property
    def size_bytes(self) -> int:
        return sum(tensor.size_bytes for tensor in self.tensors.values())

    @property
    def files(self) -> list[Path]:
        headers = self.tensors.values()
        parts = (part for header in headers for part in header.parts.values())
        return sorted({header.file for header in (*headers, *parts)})

    @property
    def main_format(self) -> str:
        """The format of most bytes."""
        sizes: Counter[str] = Counter()
        for tensor in self.tensors.values():
            sizes[tensor.format] += tensor.size_bytes
        return sizes.most_common(1)[0][0] if sizes else "nothing"


def sampled_digest(path: Path, packing: Packing | None = None) -> str:
    """Of the weights: of each file's size, and of what is at up to DIGEST_SPOTS places of it, a megabyte in all.

    Another model, another training of it, another rounding have another one; an edit of a few numbers may not.

    Args, Raises: as open_checkpoint.
    """
    found = hashlib.sha256()
    for one in open_checkpoint(path, packing).files if path.is_dir() else [path]:
        with one.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            found.update(size.to_bytes(8, "little"))
            for start in range(0, size, max(DIGEST_BYTES, size // DIGEST_SPOTS)):
                file.seek(start)
                found.update(file.read(DIGEST_BYTES))
    return found.hexdigest()


def open_checkpoint(path: Path, packing: Packing | None = None) -> Checkpoint:
    """Read the headers of a directory's safetensors, or of a GGUF file: names, shapes, formats, sizes.

    Args:
        packing: from config.json: a prequantized matrix's tensors appear as one.

    Raises:
        BadCheckpoint: no safetensors, a bad index, a missing or malformed file, or an unsupported format.
        UnsupportedModel: a GGUF file in an unsupported format.
    """
    if path.is_file():
        return _open_gguf(path)
    checkpoint = _open_directory(path, isinstance(packing, Fp8Config))
    if packing is None:
        return checkpoint
    return _with_fp8(checkpoint, packing) if isinstance(packing, Fp8Config) else _with_packed(checkpoint, packing)


def _with_packed(checkpoint: Checkpoint, packing: PackedConfig) -> Checkpoint:
    unread = (SHAPE_PART, *UNREAD_SCALES)
    tensors = {name: found for name, found in checkpoint.tensors.items() if not name.endswith(unread)}
    parts_of = COMPRESSED_PARTS if packing.method == COMPRESSED else {part: part for part in PARTS}
    first = f".{next(iter(parts_of))}"
    for module in [name.removesuffix(first) for name in tensors if name.endswith(first)]:
        own = {part: name for name, part in parts_of.items()}
        parts = {part: tensors.pop(f"{module}.{name}") for part, name in own.items() if f"{module}.{name}" in tensors}
        # Without g_idx neighbours are a group
        needed = ("qweight", "qzeros", "scales") if packing.has_zeros else ("qweight", "scales")
        missing = [f"{module}.{own[part]}" for part in needed if part not in parts]
        if missing:
            raise bad_checkpoint(f"{checkpoint.path}: {module} is packed, but without {named_tensors(missing)}.")
        tensors[f"{module}.weight"] = _matrix(packing, module, parts)
    return Checkpoint(checkpoint.path, tensors, packing)


def _with_fp8(checkpoint: Checkpoint, packing: Fp8Config) -> Checkpoint:
    tensors = {name: found for name, found in checkpoint.tensors.items() if not name.endswith(UNREAD_SCALES)}
    for name, values in checkpoint.tensors.items():
        if values.format != FP8_FORMAT:
            continue
        scales = [scale for scale in SCALES if f"{name}{scale}" in tensors]
        if len(values.shape) not in (2, 3) or len(scales) != 1:
            asked = " or a ".join(f"{name}{scale}" for scale in SCALES)
            raise bad_checkpoint(f"{values.file}: {name} is stored as {FP8_FORMAT}, but is no matrix with a {asked}.")
        scale = tensors.pop(f"{name}{scales[0]}")
        if scale.format not in FLOAT_FORMATS or not is_scale_of(values.shape, scale.shape, packing):
            found, asked = f"{list(scale.shape)} as {scale.format}", described_scales(values.shape, packing)
            raise BadCheckpoint(
                f"{scale.file}: {name}{scales[0]} is {found}; config.json and its weight ask for {asked}.",
                f"store the scales so, in {', '.join(FLOAT_FORMATS)}, or name the plain model with --quantize fp8.",
            )
        parts = {"weight": values, scales[0]: scale}
        size_bytes = values.size_bytes + scale.size_bytes
        tensors[name] = TensorHeader(values.file, values.shape, FP8_FORMAT, size_bytes, name, parts)
    return Checkpoint(checkpoint.path, tensors, packing)


def _matrix(packing: PackedConfig, module: str, parts: dict[str, TensorHeader]) -> TensorHeader:
    qweight = parts["qweight"]
    if len(qweight.shape) != 2:
        raise bad_checkpoint(
            f"{qweight.file}: {qweight.name} has the shape {list(qweight.shape)}, not that of a matrix."
        )
    shape = matrix_shape(packing, qweight.shape)
    expected = part_shapes(packing, *shape)
    for name, header in parts.items():
        if header.shape != expected[name] or header.format not in PARTS[name]:
            found = f"{list(header.shape)} as {header.format}"
            raise bad_checkpoint(
                f"{header.file}: {header.name} is {found}; {qweight.name} asks for {list(expected[name])}."
            )
    size_bytes = sum(header.size_bytes for header in parts.values())
    stored_as = f"{packing.method.upper()} {packing.bits} bit"
    return TensorHeader(qweight.file, shape, stored_as, size_bytes, module, parts)


def _open_gguf(file: Path) -> Checkpoint:
    with GgufReader(file) as reader:
        headers = {
            name: TensorHeader(file, found.shape, found.format, found.size_bytes, name)
            for name, found in reader.tensors.items()
        }
        return Checkpoint(file, headers, gguf=reader.header)


def _open_directory(directory: Path, has_fp8: bool) -> Checkpoint:
    listed = _listed_tensors(directory)
    tensors: dict[str, TensorHeader] = {}
    for file in sorted(set(listed.values())) if listed else [directory / SINGLE_FILE]:
        for header in _safetensors_headers(file):
            if listed.get(header.name, file) == file and not header.name.startswith(OTHER_TOWERS):
                _check_format(header, has_fp8)
                tensors[text_name(header.name)] = header
    wanted = {name: text_name(name) for name in listed if not name.startswith(OTHER_TOWERS)}
    missing = sorted(name for name, own in wanted.items() if own not in tensors)
    if missing:
        raise bad_checkpoint(
            f"{directory / INDEX_FILE} lists tensors that their files do not contain: {named_tensors(missing)}."
        )
    if "embed_tokens.weight" in tensors:  # written by a model without a head
        ends = ("lm_head.", "score.")
        tensors = {name if name.startswith(ends) else f"model.{name}": header for name, header in tensors.items()}
    return Checkpoint(directory, tensors)


def text_name(name: str) -> str:
    """A tensor's usual name, in a model that has its language model alone."""
    for prefix, own in TEXT_PREFIXES.items():
        if name.startswith(prefix):
            return own + name.removeprefix(prefix)
    return name


class TensorSource:
    """Reads tensors into their targets, and reports progress; a context manager, which may be entered again.

    Args:
        dtype: what quantised numbers become.
        fill: copies a tensor into its target.
        cut: takes a rank's part of a tensor; None: the whole tensor.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        dtype: torch.dtype,
        progress: Progress,
        fill: Fill = Target.fill,
        cut: Cut | None = None,
    ) -> None:
        self.checkpoint = checkpoint
        self._fill = fill
        self._cut = cut
        self._dtype = dtype
        self._progress = progress
        self._done_bytes = 0
        self._held_bytes = 0
        self._readers: dict[Path, Any] = {}

    def __enter__(self) -> "TensorSource":
        self._progress(self._done_bytes, self.checkpoint.size_bytes)
        return self

    def __exit__(self, *error: object) -> None:
        for reader in self._readers.values():
            reader.__exit__(None, None, None)
        self._readers.clear()

    def fill(self, wanted: dict[str, Target]) -> None:
        """Fill these; scales after what they multiply."""
        for name in sorted(wanted, key=lambda name: wanted[name].is_scale):
            header = self.checkpoint.tensors[name]
            if not self._read(header, wanted[name]):
                # the tensor gets no name, so that its pages can be released
                self._fill(wanted[name], self._part(name, self.numbers(name), wanted[name].shape))
            self._advance(header)

    def _read(self, header: TensorHeader, target: Target) -> bool:
        """Read what is stored as it is served straight into its target; mapping the file takes ten times as long.

        Returns: False: it is not stored so, or has another way to its target.
        """
        into, offset = target.into, header.offset
        if self._fill is not Target.fill or self._cut is not None or target.write is not None or offset is None:
            return False
        if FLOATS.get(header.format) != into.dtype or not into.is_contiguous():
            return False
        wanted = into.view(-1).view(torch.uint8).numpy().data
        with header.file.open("rb", buffering=0) as file:
            while len(wanted):
                num_read = os.preadv(file.fileno(), [wanted], offset)
                if not num_read:
                    raise bad_checkpoint(f"{header.file} ends within {header.name}: it has changed.")
                wanted, offset = wanted[num_read:], offset + num_read
        target.finish()
        return True

    def fill_parts(self, name: str, targets: Mapping[str, Target], group_size: int) -> None:
        """Fill what a quantised matrix is made of: "values", "scales" and perhaps "zeros".

        Args:
            group_size: inputs that share a scale in the targets.
        """
        unpacked = self.unpacked(name)
        for part, target in targets.items():
            self._fill(target, self._part(name, unpacked.part(part, group_size), target.shape))
        del unpacked  # it holds pages of the file
        self._advance(self.checkpoint.tensors[name])

    def _part(self, name: str, tensor: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        return tensor if self._cut is None else self._cut(name, tensor, shape)

    def numbers(self, name: str) -> torch.Tensor:
        """A tensor as floats, or as bytes that its target decodes."""
        return self.unpacked(name).floats(self._dtype) if self.checkpoint.tensors[name].parts else self.tensor(name)

    def tensor(self, name: str) -> torch.Tensor:
        """A tensor as it is stored."""
        found = self.checkpoint.tensors[name]
        tensor: torch.Tensor = self._reader(found.file).get_tensor(found.name)
        return tensor

    def blocks(self, name: str, target: Target) -> PackedBlocks:
        """A GGUF file's quantised matrix, its rows in the target's order, packed for a CPU."""
        from gpu.cpu_kernels.block_matmul import pack_blocks  # compiles for seconds, once

        header = self.checkpoint.tensors[name]
        packed = pack_blocks(header.format, self._rows_of_blocks(name, target))
        self._advance(header)
        return packed

    def fill_blocks(self, name: str, target: Target, into: Tensor) -> None:
        """The same, packed on a device. into: see PackedBlocks."""
        header, rows = self.checkpoint.tensors[name], self._rows_of_blocks(name, target)
        if missing := len(into) * BLOCK_OUTPUTS - len(rows):
            rows = F.pad(rows, (0, 0, 0, missing))
        self._fill(Target(into, write=partial(write_packed, header.format)), rows.view(len(into), -1))
        del rows  # it may hold pages of the file
        self._advance(header)

    def _rows_of_blocks(self, name: str, target: Target) -> Tensor:
        """Bytes [out, bytes of a row], in the target's order."""
        stored: Tensor = self._reader(self.checkpoint.tensors[name].file).get_blocks(name)
        if target.head_dim is None and target.arrange is None:
            return stored
        into = torch.empty_like(stored)
        replace(target, into=into).fill(stored)
        return into

    def unpacked(self, name: str) -> UnpackedWeight | Fp8Weight:
        """A prequantized matrix."""
        assert self.checkpoint.packing is not None
        module, found = name.removesuffix(".weight"), self.checkpoint.tensors[name]
        parts = {part: self._reader(header.file).get_tensor(header.name) for part, header in found.parts.items()}
        packing = self.checkpoint.packing
        if isinstance(packing, Fp8Config):
            return Fp8Weight.of(packing, parts)
        return unpack(packing, parts, f"{found.file}: {module}")

    def finish(self) -> None:
        """Report that all is done: tensors that were not needed count too."""
        self._progress(self.checkpoint.size_bytes, self.checkpoint.size_bytes)

    def _advance(self, header: TensorHeader) -> None:
        """A tensor was read: release pages now and then."""
        self._held_bytes += header.size_bytes
        if self._held_bytes >= RELEASE_BYTES:
            self._release()
        self._done_bytes += header.size_bytes
        self._progress(self._done_bytes, self.checkpoint.size_bytes)

    def _release(self) -> None:
        """GGUF files stay open."""
        self._held_bytes = 0
        for file, reader in list(self._readers.items()):
            if isinstance(reader, GgufReader):
                reader.release()
            else:
                self._readers.pop(file).__exit__(None, None, None)

    def _reader(self, file: Path) -> Any:
        if file not in self._readers:
            is_gguf, header = file.suffix != SUFFIX, self.checkpoint.gguf
            reader = GgufReader(file, self._dtype, header) if is_gguf else open_safetensors(file)
            self._readers[file] = reader.__enter__()
        return self._readers[file]


def _listed_tensors(directory: Path) -> dict[str, Path]:
    """The index's tensors and their files; empty when the directory has the single file instead."""
    index_file = directory / INDEX_FILE
    if (directory / SINGLE_FILE).exists():
        return {}
    if not index_file.exists():
        raise _no_weights(directory)
    try:
        weight_map = json.loads(index_file.read_bytes())["weight_map"]
        listed = {str(name): str(file) for name, file in weight_map.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise bad_checkpoint(f"{index_file} is not an index with a weight_map ({error}).") from error
    for file in set(listed.values()):
        # An index may not lead out of its directory.
        if file != Path(file).name or file in ("", ".", "..") or "\\" in file or not file.endswith(SUFFIX):
            raise bad_checkpoint(f"{index_file} names {file!r}, which is not a safetensors file of its own directory.")
    if not listed:
        raise bad_checkpoint(f"{index_file} lists no tensors.")
    return {name: directory / file for name, file in listed.items()}


def _no_weights(directory: Path) -> BadCheckpoint:
    names = sorted(path.name for path in directory.iterdir())
    safetensors = [name for name in names if name.endswith(SUFFIX)]
    pickles = [name for name in names if name.endswith(PICKLES)]
    held = f"; it holds {named_tensors(safetensors + pickles)}" if safetensors or pickles else ""
    pickled = ", and pickled weights, which can run code, are not read" if pickles and not safetensors else ""
    cause = f"{directory} has neither {SINGLE_FILE} nor {INDEX_FILE}{held}{pickled}."
    if safetensors or not any(name.startswith("pytorch_model") for name in pickles):
        return bad_checkpoint(cause)
    fix = (
        "only safetensors and GGUF are read: convert it, with transformers: "
        f"AutoModelForCausalLM.from_pretrained({str(directory)!r})"
        f".save_pretrained({str(directory)!r}, safe_serialization=True)"
    )
    return BadCheckpoint(cause, fix)


def open_safetensors(file: Path) -> Any:  # safetensors ships no types
    try:
        return safe_open(file, framework="pt")
    except FileNotFoundError as error:
        raise bad_checkpoint(f"{file} is missing.") from error
    except (SafetensorError, OSError) as error:
        raise bad_checkpoint(f"{file} is not a whole safetensors file ({error}).") from error


def _safetensors_headers(file: Path) -> Iterator[TensorHeader]:
    """Source: safetensors' README, Format."""
    with open_safetensors(file), file.open("rb") as opened:  # the first checks it
        size_bytes = int.from_bytes(opened.read(HEADER_BYTES), "little")
        header = json.loads(opened.read(size_bytes))
    for name, told in header.items():
        if name != "__metadata__":
            first, end = told["data_offsets"]
            offset = HEADER_BYTES + size_bytes + first
            yield TensorHeader(file, tuple(told["shape"]), told["dtype"], end - first, name, offset=offset)


def _check_format(header: TensorHeader, has_fp8: bool) -> None:
    """Raises BadCheckpoint: it is none that is read."""
    name, number_format = header.name, header.format
    is_packed = number_format == BYTES and name.endswith(PACKED_SUFFIXES)
    integers = tuple(f".{part}" for part in (*PARTS, *COMPRESSED_PARTS))
    is_packed = is_packed or (number_format == INTEGERS and name.endswith(integers)) or name.endswith(SHAPE_PART)
    supported = (*FLOAT_FORMATS, FP8_FORMAT) if has_fp8 else FLOAT_FORMATS
    if number_format not in supported and not is_packed and not is_buffer(name, header.shape):
        beside = "" if has_fp8 else f", and {FP8_FORMAT} where config.json has a quantization_config that says so"
        raise bad_checkpoint(
            f"{header.file}: {name} is stored as {number_format}; supported are {', '.join(supported)}{beside}."
        )


def is_buffer(name: str, shape: tuple[int, ...]) -> bool:
    """Whether a tensor that is no parameter may be ignored."""
    return name.endswith(BUFFER_SUFFIXES) or (name.endswith(MASK_SUFFIXES) and len(shape) == 4)


def named_tensors(names: list[str]) -> str:
    more = f" and {len(names) - NAMED_AT_MOST} more" if len(names) > NAMED_AT_MOST else ""
    return ", ".join(names[:NAMED_AT_MOST]) + more


def bad_checkpoint(cause: str) -> BadCheckpoint:
    return BadCheckpoint(cause, "download the model again, or name another.")


class GgufReader:
    """Reads tensors by their Hugging Face names. A context manager, as safetensors' reader is.

    Args:
        dtype: what quantised tensors become; the others stay as they are.
        header: of an earlier reader of the file; None: it is parsed.

    Raises:
        BadCheckpoint, UnsupportedModel: see core.gguf.parse_gguf.
    """

    def __init__(self, file: Path, dtype: torch.dtype = torch.float32, header: GgufFile | None = None) -> None:
        try:
            with file.open("rb") as opened:  # a private mapping: torch wants writable memory
                self._map = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY)
        except (OSError, ValueError) as error:
            raise BadCheckpoint(f"{file} cannot be read: {error}.", "download it again, or name another.") from error
        self._bytes = torch.from_numpy(np.frombuffer(self._map, np.uint8))
        self.header = header or parse_gguf(self._bytes.numpy().data, str(file), has_tokenizer=False)
        self._dtype = dtype
        self._metadata = self.header.metadata
        self.tensors = hugging_face_tensors(self.header)

    def __enter__(self) -> "GgufReader":
        return self

    def __exit__(self, *_: object) -> None:
        del self._bytes, self._map

    def release(self) -> None:
        """Release the pages that were read; the file is read again where they are needed."""
        self._map.madvise(mmap.MADV_DONTNEED)

    def get_tensor(self, name: str) -> Tensor:
        """One tensor, of its shape in `tensors`."""
        tensor = self._floats(self.tensors[name])
        if is_norm_shifted(name, self._metadata):
            tensor = tensor - 1
        if is_decay(name, self._metadata):
            tensor = tensor.neg().log()
        return self._in_order(name, tensor)

    def get_blocks(self, name: str) -> Tensor:
        """A quantised matrix as it is stored: [out, bytes of a row]."""
        found = self.tensors[name]
        return self._in_order(name, self._content(found).view(found.shape[0], -1))

    def _in_order(self, name: str, rows: Tensor) -> Tensor:
        heads = num_turned_heads(name, self._metadata)
        return rows if heads is None else part_halves(rows, heads)

    def _content(self, found: GgufTensor) -> Tensor:
        return self._bytes[found.offset : found.offset + found.size_bytes]

    def _floats(self, found: GgufTensor) -> Tensor:
        content = self._content(found)
        if found.format in FLOATS:
            is_aligned = content.storage_offset() % 4 == 0  # a file's alignment may be one byte
            return (content if is_aligned else content.clone()).view(FLOATS[found.format]).view(found.shape)
        block_elements, block_bytes = BLOCKS[found.format]
        blocks = content.view(-1, block_bytes)
        tensor = torch.empty(math.prod(found.shape), dtype=self._dtype)
        slab = GGUF_SLAB_BYTES // block_bytes
        for start in range(0, len(blocks), slab):
            values = dequantise(found.format, blocks[start : start + slab])  # [blocks, elements]
            tensor[start * block_elements :][: values.numel()].copy_(values.view(-1))
        return tensor.view(found.shape)


def part_halves(rows: Tensor, num_heads: int) -> Tensor:
    """Reorder each head's rows from pairs side by side to (first half, second half), as Hugging Face has them.

    rows: [heads * head_dim, ...], also returned so. Source: convert_hf_to_gguf.py, LlamaModel.permute, undone.
    """
    heads = rows.view(num_heads, rows.shape[0] // num_heads // 2, 2, *rows.shape[1:])
    return heads.transpose(1, 2).reshape(rows.shape)
