"""Parses GGUF headers: bytes → metadata and a table of tensors. No I/O: the caller maps the file. Any thread.

Every count, length and offset is checked against the bytes that are there before anything is read or allocated, so that
a truncated or hostile file is an error that says where. The `gguf` package reads the same, but trusts counts (an array
longer than its file is read to the end of memory) and builds two arrays for each string: a vocabulary of 150,000 and
its merges took it 11 to 13 s and 560 MB, and take 0.1 to 0.25 s here.
Source: github.com/ggml-org/ggml, docs/gguf.md.
"""

import math
import struct
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from core.errors import BadCheckpoint, UnsupportedModel

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_METADATA = 2**16  # fields; real files have under 100
MAX_TENSORS = 2**20
MAX_ITEMS = 2**24  # of one array; the largest vocabulary known is 2**18
MAX_NAME_BYTES = 2**16
PLAIN_BYTES = 24  # of a list's texts, on average with their lengths: real ones have 15 to 20
MAX_DIMENSIONS = 4
TOKENIZER_PREFIX = "tokenizer."

# Formats that are dequantised here: name -> (elements of a block, bytes of a block)
BLOCKS = {
    "F32": (1, 4),
    "F16": (1, 2),
    "BF16": (1, 2),
    "Q8_0": (32, 34),
    "Q4_0": (32, 18),
    "Q4_1": (32, 20),
    "Q5_0": (32, 22),
    "Q5_1": (32, 24),
    "IQ4_NL": (32, 18),
    "IQ4_XS": (256, 136),
    "MXFP4": (32, 17),
    "Q2_K": (256, 84),
    "Q3_K": (256, 110),
    "Q4_K": (256, 144),
    "Q5_K": (256, 176),
    "Q6_K": (256, 210),
}
# ggml.h, enum ggml_type
_TYPES = (
    "F32 F16 Q4_0 Q4_1 Q4_2 Q4_3 Q5_0 Q5_1 Q8_0 Q8_1 Q2_K Q3_K Q4_K Q5_K Q6_K Q8_K IQ2_XXS IQ2_XS IQ3_XXS IQ1_S IQ4_NL "
    "IQ3_S IQ2_S IQ4_XS I8 I16 I32 I64 F64 IQ1_M BF16"
)
_TYPE_NAMES = dict(enumerate(_TYPES.split())) | {34: "TQ1_0", 35: "TQ2_0"}
_TYPE_NAMES |= dict(enumerate(("MXFP4", "NVFP4", "Q1_0", "Q2_0"), 39))
# Value types: gguf.md, enum gguf_metadata_value_type
_STRING, _ARRAY, _BOOL = 8, 9, 7
_SCALARS = {0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "<u1"}
_SCALARS |= {10: "<u8", 11: "<i8", 12: "<f8"}
_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One tensor of the file.

    Args:
        shape: as in torch, rows first (the file's order is reversed).
        format: a name in BLOCKS.
        offset: of its first byte, from the file's start.
    """

    shape: tuple[int, ...]
    format: str
    offset: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class GgufFile:
    """A file's header."""

    metadata: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, GgufTensor] = field(default_factory=dict)


def parse_gguf(content: memoryview, name: str, has_tokenizer: bool = True) -> GgufFile:
    """Read a file's header.

    Args:
        content: the whole file; only the header's bytes are touched.
        name: of the file, for messages.
        has_tokenizer: False: the tokenizer's lists are left empty: they are most of a header's time and memory.

    Raises:
        BadCheckpoint: not GGUF, or incomplete.
        UnsupportedModel: a tensor's format is not dequantised here, or the file is one of several parts, of another
            version, or big-endian.
    """
    cursor = _Cursor(content, name)
    if cursor.take(4, "magic") != MAGIC:
        raise cursor.bad("it does not begin with GGUF")
    version = cursor.u32("version")
    if version not in VERSIONS:
        is_big = int.from_bytes(version.to_bytes(4, "little"), "big") in VERSIONS
        kind = "big-endian" if is_big else f"of version {version}; {' and '.join(map(str, VERSIONS))} are read"
        fix = "convert the model again with today's llama.cpp, little-endian, or name another."
        raise UnsupportedModel(f"{name} is a GGUF file that is {kind}.", fix)
    num_tensors = cursor.count("tensors", MAX_TENSORS, 24)
    num_fields = cursor.count("metadata fields", MAX_METADATA, 13)
    metadata: dict[str, Any] = {}
    for _ in range(num_fields):
        key = cursor.text("a metadata key", MAX_NAME_BYTES)
        if key in metadata:
            raise cursor.bad(f"{key} is there twice")
        metadata[key] = cursor.value(key, has_tokenizer or not key.startswith(TOKENIZER_PREFIX))
    if metadata.get("split.count", 1) not in (0, 1):
        raise UnsupportedModel(
            f"{name} is one of {metadata['split.count']} parts; only whole files are supported.",
            "merge them: llama-gguf-split --merge FIRST_PART WHOLE.gguf",
        )
    return GgufFile(metadata, _read_tensors(cursor, num_tensors, _alignment(cursor, metadata)))


def _alignment(cursor: "_Cursor", metadata: dict[str, Any]) -> int:
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or not 0 < alignment <= 2**20 or alignment & (alignment - 1):
        raise cursor.bad(f"general.alignment is {alignment!r}, not a power of two")
    return alignment


def _read_tensors(cursor: "_Cursor", num_tensors: int, alignment: int) -> dict[str, GgufTensor]:
    """Offsets count from the table's end, aligned, so the whole table is read first. No two tensors overlap."""
    listed: dict[str, tuple[tuple[int, ...], int, int]] = {}
    for _ in range(num_tensors):
        name = cursor.text("a tensor's name", MAX_NAME_BYTES)
        if name in listed:
            raise cursor.bad(f"tensor {name} is there twice")
        num_dimensions = cursor.u32(f"{name}'s dimensions")
        if not 0 < num_dimensions <= MAX_DIMENSIONS:
            raise cursor.bad(f"tensor {name} has {num_dimensions} dimensions")
        sizes = [cursor.u64(f"{name}'s dimensions") for _ in range(num_dimensions)]
        listed[name] = (tuple(reversed(sizes)), cursor.u32(f"{name}'s type"), cursor.u64(f"{name}'s offset"))
    start = -(-cursor.position // alignment) * alignment
    end, found = start, dict[str, GgufTensor]()
    for name, (shape, type_id, offset) in sorted(listed.items(), key=lambda item: item[1][2]):
        found[name] = tensor = _tensor(cursor, name, shape, type_id, start + offset)
        if tensor.offset < end or tensor.offset % alignment:
            raise cursor.bad(f"tensor {name} overlaps another, or does not begin at a multiple of {alignment} bytes")
        end = tensor.offset + tensor.size_bytes
    return found


def _tensor(cursor: "_Cursor", name: str, shape: tuple[int, ...], type_id: int, offset: int) -> GgufTensor:
    format_name = _TYPE_NAMES.get(type_id, f"type {type_id}")
    if format_name not in BLOCKS:
        raise UnsupportedModel(
            f"{cursor.name}: tensor {name} is stored as {format_name}; supported are {', '.join(BLOCKS)}.",
            "use a file of the model in one of these, such as Q8_0 or Q4_K_M.",
        )
    block_elements, block_bytes = BLOCKS[format_name]
    if 0 in shape:
        raise cursor.bad(f"tensor {name} has the shape {list(shape)}")
    if shape[-1] % block_elements:
        raise UnsupportedModel(
            f"{cursor.name}: tensor {name} has rows of {shape[-1]} numbers, {format_name} blocks of {block_elements}.",
            "quantize the model anew: llama-quantize takes another format for such rows.",
        )
    size_bytes = math.prod(shape) // block_elements * block_bytes
    if offset + size_bytes > cursor.size:
        raise cursor.bad(f"tensor {name} would end at byte {offset + size_bytes}, the file at {cursor.size}")
    return GgufTensor(shape, format_name, offset, size_bytes)


class _Cursor:
    """Reads on from a position, never past the end."""

    def __init__(self, content: memoryview, name: str) -> None:
        self._content = content
        self.name = name
        self.size = len(content)
        self.position = 0

    def bad(self, cause: str) -> BadCheckpoint:
        return BadCheckpoint(f"{self.name} is not a whole GGUF file: {cause}.", "download it again, or name another.")

    def take(self, num_bytes: int, what: str) -> bytes:
        self._need(num_bytes, what)
        self.position += num_bytes
        return bytes(self._content[self.position - num_bytes : self.position])

    def u32(self, what: str) -> int:
        return int(_U32.unpack(self.take(4, what))[0])

    def u64(self, what: str) -> int:
        return int(_U64.unpack(self.take(8, what))[0])

    def count(self, what: str, limit: int, min_bytes: int) -> int:
        """A number of items that follow, of at least min_bytes each."""
        number = self.u64(f"the number of {what}")
        if number > limit:
            raise self.bad(f"it claims {number} {what}, over the {limit} of any model known")
        self._need(number * min_bytes, f"{number} {what}")
        return number

    def text(self, what: str, limit: int | None = None) -> str:
        num_bytes = self.u64(what)
        if limit is not None and num_bytes > limit:
            raise self.bad(f"{what} of {num_bytes} bytes at byte {self.position}")
        try:
            return self.take(num_bytes, what).decode()
        except UnicodeDecodeError as error:
            raise self.bad(f"{what} at byte {self.position - num_bytes} is not UTF-8") from error

    def value(self, key: str, keeps_lists: bool = True) -> Any:
        value_type = self.u32(key)
        if value_type == _STRING:
            return self.text(key)
        if value_type == _ARRAY:
            return self._array(key, keeps_lists)
        value = self._scalars(key, value_type, 1)[0]
        # the intended decimal: 1e-05, not 9.999999747378752e-06
        return float(str(np.float32(value))) if _SCALARS[value_type] == "<f4" else value

    def _array(self, key: str, is_kept: bool) -> list[Any]:
        item_type = self.u32(key)
        if item_type == _STRING:
            return self._texts(key, self.count(f"items of {key}", MAX_ITEMS, 8), is_kept)
        found = self._scalars(key, item_type, self.count(f"items of {key}", MAX_ITEMS, 1))
        return found if is_kept else []

    def _texts(self, key: str, number: int, is_kept: bool) -> list[str]:
        """A vocabulary and its merges are half a million strings."""
        if (found := self._plain_texts(number, is_kept)) is not None:
            return found
        content, position, found = self._content, self.position, []
        try:
            for _ in range(number):
                start = position + 8
                position = start + _U64.unpack_from(content, position)[0]
                if position > self.size:
                    raise self.bad(f"it ends within {key}")
                if is_kept:
                    found.append(str(content[start:position], "utf-8"))
        except UnicodeDecodeError as error:
            raise self.bad(f"an item of {key} is not UTF-8") from error
        except struct.error as error:
            raise self.bad(f"it ends within {key}") from error
        self.position = position
        return found

    def _plain_texts(self, number: int, is_kept: bool) -> list[str] | None:
        """The texts that follow, all at once; None: they must be read one by one, as they are not all plain.

        Plain texts have no NUL and under 64 KiB: six zeros tell where a length is.
        """
        content = np.frombuffer(self._content, np.uint8)[self.position :][: number * PLAIN_BYTES]
        zeros = content == 0
        for distance in (1, 2, 2):
            zeros = zeros[:-distance] & zeros[distance:]  # two, four, six of them
        places = np.flatnonzero(zeros) - 2
        places = places[np.append(np.diff(places) > 1, True)[: len(places)]][:number]  # the last of places side by side
        if len(places) < max(number, 1):
            return None
        low, high = (content[places + at].astype(np.int64) for at in range(2))
        ends = places + _U64.size + low + 256 * high
        if places[0] or (places[1:] != ends[:-1]).any() or ends[-1] > len(content):
            return None
        texts = [""]
        if is_kept:
            is_text = np.ones(ends[-1], np.bool_)
            is_text[places[:, None] + np.arange(_U64.size - 1)] = False  # a length's last zero is before its text
            try:
                texts = content[: ends[-1]][is_text].tobytes().decode().split("\0")
            except UnicodeDecodeError:
                return None
            if len(texts) != number + 1:
                return None
        self.position += int(ends[-1])
        return texts[1:]

    def _scalars(self, key: str, value_type: int, number: int) -> list[Any]:
        code = _SCALARS.get(value_type)
        if code is None:
            raise self.bad(f"{key} has the value type {value_type}, which is unknown or nested")
        dtype = np.dtype(code)
        values = np.frombuffer(self.take(number * dtype.itemsize, key), dtype).tolist()
        return [bool(value) for value in values] if value_type == _BOOL else values

    def _need(self, num_bytes: int, what: str) -> None:
        if num_bytes > self.size - self.position:
            raise self.bad(f"it ends within {what}, at byte {self.size}")
