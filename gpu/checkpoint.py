"""A model's tensors in files: safetensors of a Hugging Face directory, or a GGUF file. Thread: engine (at start).

Reads these only: no pickle, no code from the directory, no file outside it.
"""

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from core.errors import BadCheckpoint
from core.fp8_config import Fp8Config
from core.gguf import SUFFIX as GGUF_SUFFIX
from core.packed_config import PackedConfig
from gpu.fp8_weights import FP8_FORMAT, SCALES, UNREAD_SCALES, Fp8Weight, described_scales, is_scale_of
from gpu.gguf import GgufReader
from gpu.packed_weights import NEEDED_PARTS, PARTS, UnpackedWeight, matrix_shape, part_shapes, unpack
from gpu.streams import Fill
from gpu.targets import Target

PICKLES = (".bin", ".pt", ".pth")  # checkpoints of these are not read: they can run code
SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
# safetensors' names of the formats that convert to ours without loss of meaning
FLOAT_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
BYTES = "U8"
INTEGERS = "I32"
PACKED_SUFFIXES = ("_blocks", "_scales")  # mxfp4
# Buffers that old checkpoints carry; computed here instead.
BUFFER_SUFFIXES = (
    *(f".rotary_emb.{name}" for name in ("inv_freq", "cos_cached", "sin_cached")),
    ".masked_bias",
    ".position_ids",
)
MASK_SUFFIXES = (".attn.bias", ".self_attn.bias", ".attention.bias")  # causal masks: [1, 1, tokens, tokens]
# Pages of a mapped file count as resident until it is let go: at most so many are held beside the parameters, and
# those of one tensor.
RELEASE_BYTES = 64 * 1024**2
NAMED_AT_MOST = 5  # tensors in one error message

Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes total), as loading goes."""
Cut = Callable[[str, torch.Tensor, tuple[int, ...]], torch.Tensor]
"""See gpu.parallel.ranks.Shard.cut."""


@dataclass(frozen=True, slots=True)
class TensorHeader:
    """What a file's header says of one tensor.

    Args:
        parts: of a matrix that is packed: what it is made of, by the ends of their names; it lies in all their files.
    """

    file: Path
    shape: tuple[int, ...]
    format: str
    size_bytes: int
    parts: Mapping[str, "TensorHeader"] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A directory's tensors, or a GGUF file's, by Hugging Face's names; nothing of their data read yet.

    Args:
        packing: of those that have parts.
    """

    path: Path
    tensors: dict[str, TensorHeader] = field(default_factory=dict)
    packing: PackedConfig | Fp8Config | None = None

    @property
    def size_bytes(self) -> int:
        return sum(tensor.size_bytes for tensor in self.tensors.values())

    @property
    def main_format(self) -> str:
        """What most of the bytes are stored as."""
        sizes: Counter[str] = Counter()
        for tensor in self.tensors.values():
            sizes[tensor.format] += tensor.size_bytes
        return sizes.most_common(1)[0][0] if sizes else "nothing"


def open_checkpoint(path: Path, packing: PackedConfig | Fp8Config | None = None) -> Checkpoint:
    """Read the headers of a directory's safetensors, or of a GGUF file: names, shapes, formats, sizes.

    Args:
        packing: as config.json says: what quantised matrices are made of appears as the matrix.

    Raises:
        BadCheckpoint: no safetensors, a bad index, a file that is missing or malformed, a format that is not a float.
        UnsupportedModel: a GGUF file in a format that is not read.
    """
    if path.is_file():
        return _open_gguf(path)
    checkpoint = _open_directory(path, isinstance(packing, Fp8Config))
    if packing is None:
        return checkpoint
    return _with_fp8(checkpoint, packing) if isinstance(packing, Fp8Config) else _with_packed(checkpoint, packing)


def _with_packed(checkpoint: Checkpoint, packing: PackedConfig) -> Checkpoint:
    tensors = dict(checkpoint.tensors)
    for module in [name.removesuffix(".qweight") for name in checkpoint.tensors if name.endswith(".qweight")]:
        parts = {part: tensors.pop(f"{module}.{part}") for part in PARTS if f"{module}.{part}" in tensors}
        missing = [f"{module}.{part}" for part in NEEDED_PARTS if part not in parts]
        if missing:
            raise bad_checkpoint(f"{checkpoint.path}: {module} is packed, but without {named_tensors(missing)}.")
        tensors[f"{module}.weight"] = _matrix(packing, module, parts)
    return Checkpoint(checkpoint.path, tensors, packing)


def _with_fp8(checkpoint: Checkpoint, packing: Fp8Config) -> Checkpoint:
    tensors = {name: found for name, found in checkpoint.tensors.items() if not name.endswith(UNREAD_SCALES)}
    for name, values in checkpoint.tensors.items():
        if values.format != FP8_FORMAT:
            continue
        module = name.removesuffix(".weight")
        scales = [scale for scale in SCALES if f"{module}.{scale}" in tensors]
        if module == name or len(values.shape) != 2 or len(scales) != 1:
            raise bad_checkpoint(
                f"{values.file}: {name} is stored as {FP8_FORMAT}, but is no matrix with a {' or a '.join(SCALES)}."
            )
        scale = tensors.pop(f"{module}.{scales[0]}")
        if scale.format not in FLOAT_BYTES or not is_scale_of(values.shape, scale.shape, packing):
            found, asked = f"{list(scale.shape)} as {scale.format}", described_scales(values.shape, packing)
            raise bad_checkpoint(
                f"{scale.file}: {module}.{scales[0]} is {found}; config.json and its weight ask for {asked}."
            )
        parts = {"weight": values, scales[0]: scale}
        size_bytes = values.size_bytes + scale.size_bytes
        tensors[name] = TensorHeader(values.file, values.shape, FP8_FORMAT, size_bytes, parts)
    return Checkpoint(checkpoint.path, tensors, packing)


def _matrix(packing: PackedConfig, module: str, parts: dict[str, TensorHeader]) -> TensorHeader:
    qweight = parts["qweight"]
    if len(qweight.shape) != 2:
        raise bad_checkpoint(
            f"{qweight.file}: {module}.qweight has the shape {list(qweight.shape)}, which no matrix has."
        )
    shape = matrix_shape(packing, qweight.shape)
    expected = part_shapes(packing, *shape)
    for name, header in parts.items():
        if header.shape != expected[name] or header.format not in PARTS[name]:
            found = f"{list(header.shape)} as {header.format}"
            raise bad_checkpoint(
                f"{header.file}: {module}.{name} is {found}; its qweight asks for {list(expected[name])}."
            )
    size_bytes = sum(header.size_bytes for header in parts.values())
    return TensorHeader(qweight.file, shape, f"{packing.method.upper()} {packing.bits} bit", size_bytes, parts)


def _open_gguf(file: Path) -> Checkpoint:
    with GgufReader(file) as reader:
        headers = {
            name: TensorHeader(file, found.shape, found.format, found.size_bytes)
            for name, found in reader.tensors.items()
        }
    return Checkpoint(file, headers)


def _open_directory(directory: Path, has_fp8: bool) -> Checkpoint:
    listed = _listed_tensors(directory)
    tensors: dict[str, TensorHeader] = {}
    for file in sorted(set(listed.values())) if listed else [directory / SINGLE_FILE]:
        with open_safetensors(file) as reader:
            for name in reader.keys():  # noqa: SIM118  (not a dict)
                if listed.get(name, file) == file:
                    tensors[name] = _header(reader, name, file, has_fp8)
    missing = sorted(listed.keys() - tensors.keys())
    if missing:
        raise bad_checkpoint(
            f"{directory / INDEX_FILE} lists tensors that their files do not hold: {named_tensors(missing)}."
        )
    return Checkpoint(directory, tensors)


class TensorSource:
    """Reads tensors into their targets, and tells how far it is; a context manager.

    Args:
        dtype: what numbers become that are not stored as floats.
        fill: how a tensor gets into its target.
        cut: which part of one is wanted, by its name and the part's shape; None: all of each.
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
        self._progress(0, self.checkpoint.size_bytes)
        return self

    def __exit__(self, *error: object) -> None:
        for reader in self._readers.values():
            reader.__exit__(None, None, None)

    def fill(self, wanted: dict[str, Target]) -> None:
        """Scales follow all that they multiply."""
        for name in sorted(wanted, key=lambda name: wanted[name].is_scale):
            header = self.checkpoint.tensors[name]
            # no name for it: its pages are to go
            self._fill(wanted[name], self._part(name, self.numbers(name), wanted[name].shape))
            self._advance(header)

    def fill_parts(self, wanted: Sequence[dict[str, Target]], group_size: int) -> None:
        """Of quantised matrices: values, scales and perhaps zeros, each with targets of its own by the same names.

        Args:
            group_size: inputs that share a scale in the targets.
        """
        for name in wanted[0]:
            self._fill_parts_of(name, [targets[name] for targets in wanted], group_size)
            self._advance(self.checkpoint.tensors[name])

    def _fill_parts_of(self, name: str, targets: Sequence[Target], group_size: int) -> None:
        unpacked = self.unpacked(name)
        for part, target in zip(("values", "scales", "zeros"), targets, strict=False):
            self._fill(target, self._part(name, unpacked.part(part, group_size), target.shape))

    def _part(self, name: str, tensor: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        return tensor if self._cut is None else self._cut(name, tensor, shape)

    def numbers(self, name: str) -> torch.Tensor:
        """As floats, or in a format that a target reads."""
        return self.unpacked(name).floats(self._dtype) if self.checkpoint.tensors[name].parts else self.tensor(name)

    def tensor(self, name: str) -> torch.Tensor:
        """As it is stored."""
        tensor: torch.Tensor = self._reader(self.checkpoint.tensors[name].file).get_tensor(name)
        return tensor

    def unpacked(self, name: str) -> UnpackedWeight | Fp8Weight:
        """A matrix that has parts."""
        assert self.checkpoint.packing is not None
        module, found = name.removesuffix(".weight"), self.checkpoint.tensors[name]
        parts = {part: self._reader(header.file).get_tensor(f"{module}.{part}") for part, header in found.parts.items()}
        packing = self.checkpoint.packing
        if isinstance(packing, Fp8Config):
            return Fp8Weight.of(packing, parts)
        return unpack(packing, parts, f"{found.file}: {module}")

    def finish(self) -> None:
        """Tensors that nobody wanted count as done, too."""
        self._progress(self.checkpoint.size_bytes, self.checkpoint.size_bytes)

    def _advance(self, header: TensorHeader) -> None:
        """A tensor was read: let its pages go with those before it, now and then."""
        self._held_bytes += header.size_bytes
        if self._held_bytes >= RELEASE_BYTES:
            self._release()
        self._done_bytes += header.size_bytes
        self._progress(self._done_bytes, self.checkpoint.size_bytes)

    def _release(self) -> None:
        """A GGUF file stays open: its header takes long to parse."""
        self._held_bytes = 0
        for file, reader in list(self._readers.items()):
            if isinstance(reader, GgufReader):
                reader.release()
            else:
                self._readers.pop(file).__exit__(None, None, None)

    def _reader(self, file: Path) -> Any:
        if file not in self._readers:
            reader = GgufReader(file, self._dtype) if file.suffix == GGUF_SUFFIX else open_safetensors(file)
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
        # A plain name: an index may not lead out of its directory.
        if file != Path(file).name or file in ("", ".", "..") or "\\" in file or not file.endswith(".safetensors"):
            raise bad_checkpoint(f"{index_file} names {file!r}, which is not a safetensors file of its own directory.")
    if not listed:
        raise bad_checkpoint(f"{index_file} lists no tensors.")
    return {name: directory / file for name, file in listed.items()}


def _no_weights(directory: Path) -> BadCheckpoint:
    names = sorted(path.name for path in directory.iterdir())
    safetensors = [name for name in names if name.endswith(".safetensors")]
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


def _header(reader: Any, name: str, file: Path, has_fp8: bool) -> TensorHeader:
    part = reader.get_slice(name)
    shape, number_format = tuple(part.get_shape()), str(part.get_dtype())
    is_packed = number_format == BYTES and name.endswith(PACKED_SUFFIXES)
    is_packed = is_packed or (number_format == INTEGERS and name.endswith(tuple(f".{part}" for part in PARTS)))
    supported = (*FLOAT_BYTES, FP8_FORMAT) if has_fp8 else tuple(FLOAT_BYTES)
    if number_format not in supported and not is_packed and not is_buffer(name, shape):
        beside = "" if has_fp8 else f", and {FP8_FORMAT} where config.json has a quantization_config that says so"
        raise bad_checkpoint(
            f"{file}: {name} is stored as {number_format}; supported are {', '.join(supported)}{beside}."
        )
    number_bytes = {**FLOAT_BYTES, BYTES: 1, INTEGERS: 4, FP8_FORMAT: 1}.get(number_format, 0)
    size_bytes = number_bytes * int(torch.Size(shape).numel())
    return TensorHeader(file, shape, number_format, size_bytes)


def is_buffer(name: str, shape: tuple[int, ...]) -> bool:
    """Whether a tensor that no parameter wants is none: it may be left out."""
    return name.endswith(BUFFER_SUFFIXES) or (name.endswith(MASK_SUFFIXES) and len(shape) == 4)


def named_tensors(names: list[str]) -> str:
    more = f" and {len(names) - NAMED_AT_MOST} more" if len(names) > NAMED_AT_MOST else ""
    return ", ".join(names[:NAMED_AT_MOST]) + more


def bad_checkpoint(cause: str) -> BadCheckpoint:
    return BadCheckpoint(cause, "download the model again, or name another with --model.")
