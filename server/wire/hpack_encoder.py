"""Field sections of responses: hpack's encoder, which remembers how it has said a field. Thread: loop. Sans-io.

Most fields of an answer are those of the answer before it, and are in the peer's table: they are said as they were,
until the table changes. Those whose values differ from answer to answer are never put into it, where they would only
push out the others (RFC 7541 §6.2.3: literals never indexed). Literals go as they are: Huffman's code (§5.2,
optional) saves 30 bytes for a tenth of an answer.
"""

from collections.abc import Iterable
from typing import Any

from hpack import Encoder
from hpack.hpack import encode_integer
from hpack.table import HeaderTable

_VARYING = (
    b"content-length",
    b"openai-processing-ms",
    b"retry-after",
    b"retry-after-ms",
    b"server-timing",
    b"steploop-usage",
    b"x-ratelimit-remaining-requests",
    b"x-ratelimit-remaining-tokens",
    b"x-ratelimit-reset-requests",
    b"x-ratelimit-reset-tokens",
    b"x-request-id",
)
_NEVER_INDEXED = 0x10
_SHORT = tuple(bytes((size,)) for size in range(127))  # RFC 7541 §5.1: what fits into a prefix of 7 bits


def _length(size: int) -> bytes:
    """RFC 7541 §5.2, without Huffman's bit."""
    return _SHORT[size] if size < len(_SHORT) else bytes(encode_integer(size, 7))


def _name_of_literal(name: bytes) -> bytes:
    """RFC 7541 §6.2.3: its index where the static table has one, or the name itself."""
    index, _ = HeaderTable.STATIC_TABLE_MAPPING.get(name, (0, {}))
    prefix = encode_integer(index, 4)
    prefix[0] |= _NEVER_INDEXED
    return bytes(prefix) if index else bytes(prefix) + _length(len(name)) + name


_LITERAL_NAMES = {name: _name_of_literal(name) for name in _VARYING}


class ResponseEncoder(Encoder):
    """One connection's. Its table and what it tells of its size are hpack's."""

    def __init__(self) -> None:
        super().__init__()
        self._said: dict[tuple[bytes, bytes], bytes] = {}  # fields that the tables have, as these are now

    @property
    def header_table_size(self) -> int:
        return self.header_table.maxsize

    @header_table_size.setter
    def header_table_size(self, value: int) -> None:
        self._said.clear()
        self.header_table.maxsize = value
        if self.header_table.resized:
            self.table_size_changes.append(value)

    def encode(self, headers: Iterable[Any], huffman: bool = False) -> bytes:
        """
        Args:
            headers: (name, value) each, in bytes.
            huffman: there is none, whatever is asked.
        """
        block: list[bytes] = []
        if self.header_table.resized:
            block.append(self._encode_table_size_change())
            self.header_table.resized = False
        said = self._said
        for field in headers:
            name, value = field
            if name in _LITERAL_NAMES:
                size = len(value)
                block += (_LITERAL_NAMES[name], _SHORT[size] if size < 127 else _length(size), value)
            else:
                block.append(said.get(field) or self._say(field))
        return b"".join(block)

    def _say(self, field: tuple[bytes, bytes]) -> bytes:
        """What was not said since the table has changed."""
        found = self.header_table.search(*field)
        if found is None or found[2] is None:
            self._said.clear()  # what is put in front of them moves the others
            return self.add(field, False)
        indexed = self._said[field] = self._encode_indexed(found[0])
        return indexed
