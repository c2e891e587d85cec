"""HTTP/2's field sections: HPACK both ways, and the requests they carry. Sans-io. Thread: loop.

The hpack library decodes; responses are encoded here, which takes half of hpack's time. A request is judged as
strictly as on HTTP/1.1. A malformed one is a stream error (RFC 9113 §8.1.1), and one past a limit is answered.
"""

import base64
import binascii
import functools
import re
from collections.abc import Iterable, Sequence

from hpack import Decoder
from hpack.exceptions import HPACKDecodingError, HPACKError, OversizedHeaderListError
from hpack.hpack import decode_integer, encode_integer
from hpack.table import HeaderTable

from server.wire.http2_frames import SETTING_BYTES
from server.wire.limits import HeadLimits
from server.wire.messages import (
    CONTENT_LENGTH,
    FIELD_NAME,
    FIELD_VALUE,
    ConnectionFault,
    HeadRefused,
    Http2ErrorCode,
    HttpRequest,
    is_authority,
)

Fields = list[tuple[bytes, bytes]]

_METHOD = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_PATH = re.compile(rb"/[\x21-\x22\x24-\x7e]*")  # no fragment
_PSEUDO = frozenset((b":method", b":scheme", b":authority", b":path"))
# RFC 9113 §8.2.2: connection-specific fields MUST be treated as malformed
_OF_CONNECTION = frozenset((b"connection", b"proxy-connection", b"keep-alive", b"transfer-encoding", b"upgrade"))
# Host is put first. Cookies mean nothing here, and joined (RFC 9113 §8.2.3) they would weigh more than was received
_NOT_KEPT = frozenset((b"host", b"cookie"))
_NUM_PATHS_KEPT = 32
_FIELD_OVERHEAD_BYTES = 32  # RFC 9113 §6.5.2, SETTINGS_MAX_HEADER_LIST_SIZE


class Malformed(Exception):
    """RFC 9113 §8.1.1: a stream error of type PROTOCOL_ERROR."""


def read_request(stream_id: int, fields: Fields, has_body: bool, limits: HeadLimits) -> HttpRequest:
    """The request in a decoded field section.

    Raises:
        Malformed: it is not a request.
        HeadRefused: it is answered with an error.
    """
    pseudo, headers = _split(fields)
    _check_fields(headers)
    size = sum([len(name) + len(value) for name, value in fields]) + _FIELD_OVERHEAD_BYTES * len(fields)
    if size > limits.head_bytes:
        raise HeadRefused(431, f"The header fields are larger than {limits.head_bytes} bytes.")
    if len(fields) > limits.num_fields:
        raise HeadRefused(431, f"There are more than {limits.num_fields} header fields.")
    method, path = _target(pseudo)
    if content_length(headers) and not has_body:
        raise Malformed  # RFC 9113 §8.1.1: the DATA frames must add up to it
    route, query = _route_and_query(path)
    host = _authority(pseudo.get(b":authority"), headers)
    return HttpRequest(
        stream_id=stream_id,
        method=method.decode("ascii"),
        path=route,
        query=query,
        headers=((b"host", host), *[field for field in headers if field[0] not in _NOT_KEPT]),
        has_body=has_body,
        expects_continue=has_body
        and any(name == b"expect" and value.lower() == b"100-continue" for name, value in headers),
    )


@functools.lru_cache(_NUM_PATHS_KEPT)
def _route_and_query(path: bytes) -> tuple[str, str]:
    """Shares the strings among streams that name the path by an index of one byte.

    Not sys.intern, which in Python 3.12.0 to 3.12.5 keeps them for ever (CPython issue 113993).
    """
    route, _, query = path.decode("ascii").partition("?")
    return route, query


def _target(pseudo: dict[bytes, bytes]) -> tuple[bytes, bytes]:
    """Method and path (RFC 9113 §8.3.1)."""
    method, path = pseudo.get(b":method"), pseudo.get(b":path")
    if method is None or _METHOD.fullmatch(method) is None:
        raise Malformed
    if method == b"CONNECT":
        if pseudo.keys() != {b":method", b":authority"}:
            raise Malformed  # RFC 9113 §8.5
        raise HeadRefused(501, "CONNECT is not supported.")
    if path is None or not pseudo.get(b":scheme"):
        raise Malformed
    if _PATH.fullmatch(path) is None and not (path == b"*" and method == b"OPTIONS"):
        raise Malformed
    return method, path


def check_trailers(fields: Fields) -> None:
    """Raises Malformed: there are pseudo-fields (RFC 9113 §8.1), or a field is malformed."""
    pseudo, headers = _split(fields)
    if pseudo:
        raise Malformed
    _check_fields(headers)


def _split(fields: Fields) -> tuple[dict[bytes, bytes], Fields]:
    """The pseudo-fields, each once and all before the others (RFC 9113 §8.3), and the others."""
    pseudo: dict[bytes, bytes] = {}
    headers: Fields = []
    for name, value in fields:
        if name not in _PSEUDO:
            headers.append((name, value))
        elif headers or name in pseudo:
            raise Malformed
        else:
            pseudo[name] = value
    return pseudo, headers


def _check_fields(headers: Fields) -> None:
    """RFC 9113 §8.2.1, and as strictly as on HTTP/1.1: no control characters in values."""
    for name, value in headers:
        if FIELD_NAME.fullmatch(name) is None or name in _OF_CONNECTION:
            raise Malformed
        if FIELD_VALUE.fullmatch(value) is None or value != value.strip(b" \t"):
            raise Malformed
        if name == b"te" and value.lower() != b"trailers":  # RFC 9113 §8.2.2
            raise Malformed


def content_length(headers: Iterable[tuple[bytes, bytes]]) -> int | None:
    """The declared length of the body. Raises Malformed: that is no number, or more than one."""
    lengths = [value for name, value in headers if name == b"content-length"]
    if not lengths:
        return None
    if len(lengths) > 1 or CONTENT_LENGTH.fullmatch(lengths[0]) is None:
        raise Malformed
    return int(lengths[0])


def _authority(authority: bytes | None, headers: Fields) -> bytes:
    """RFC 9113 §8.3.1: one of :authority and Host is required; if both are there, they must be equal."""
    hosts = [value for name, value in headers if name == b"host"]
    if len(hosts) > 1 or (authority is not None and hosts and hosts[0] != authority):
        raise Malformed
    value = authority if authority is not None else hosts[0] if hosts else b""
    if not value or not is_authority(value):
        raise Malformed
    return value


_OF_UPGRADE = (b"connection", b"upgrade", b"http2-settings")
_OF_PROXIES = frozenset((b"forwarded", b"via", b"x-forwarded-for"))


def upgrade_settings(request: HttpRequest, max_settings: int) -> bytes | None:
    """The SETTINGS payload of an HTTP/1.1 request that may be answered in HTTP/2; None: it may not be.

    RFC 7540 §3.2, which RFC 9113 drops and stock Java clients send: `Upgrade: h2c`, and exactly one HTTP2-Settings.
    A request that shows it came through a proxy is not upgraded: a proxy that forwards the upgrade (haproxy 2.6) would
    no longer see what its client asks for, and its rules would not hold. Not every proxy shows: see --h2c-upgrade.
    """
    if any(name in _OF_PROXIES for name, _ in request.headers):
        return None
    fields = {name: [value for key, value in request.headers if key == name] for name in _OF_UPGRADE}
    tokens = {part.strip(b" \t") for value in fields[b"connection"] for part in value.lower().split(b",")}
    settings = fields[b"http2-settings"]
    if fields[b"upgrade"] != [b"h2c"] or len(settings) != 1 or not tokens >= {b"upgrade", b"http2-settings"}:
        return None
    padded = settings[0] + b"=" * (-len(settings[0]) % 4)
    try:
        payload = base64.b64decode(padded, altchars=b"-_", validate=True)
    except binascii.Error:
        return None
    return payload if len(payload) % SETTING_BYTES == 0 and len(payload) <= max_settings * SETTING_BYTES else None


# HPACK (RFC 7541).

_TABLE_BYTES = 4096  # RFC 9113 §6.5.2, the initial value: a peer may lower that of our encoder, not raise it
_MAX_SIZE_UPDATES = 2  # RFC 7541 §4.2: of several changes, the smallest and the last are signalled
_KIND_BITS, _SIZE_UPDATE = 0xE0, 0x20  # RFC 7541 §6.3
_PREFIX, _GOES_ON = 0x1F, 0x80  # RFC 7541 §5.1
_HUFFMAN = 0x80  # RFC 7541 §5.2
_INDEXED, _INCREMENTAL, _NEVER_INDEXED = 0x80, 0x40, 0x10  # RFC 7541 §6.1, §6.2.1, §6.2.3


class FieldDecoder:
    """One connection's decoder."""

    def __init__(self, list_bytes: int) -> None:
        """list_bytes: of a decoded field section; a larger one is taken for an attack."""
        self._decoder = Decoder(list_bytes)
        self._list_bytes = list_bytes

    def decode(self, block: bytes) -> Fields:
        """
        Raises:
            ConnectionFault: COMPRESSION_ERROR (RFC 9113 §4.3), or ENHANCE_YOUR_CALM for a list that is too large.
        """
        try:
            plain = self._decode_plain(block)
            if plain is not None:
                return plain
            _check_size_updates(block)
            return [(name, value) for name, value in self._decoder.decode(block, raw=True)]
        except OversizedHeaderListError as error:
            raise ConnectionFault(Http2ErrorCode.ENHANCE_YOUR_CALM, "The header list is too large.") from error
        except (HPACKError, IndexError, TypeError) as error:
            raise ConnectionFault(Http2ErrorCode.COMPRESSION_ERROR, "The header block cannot be decoded.") from error

    def _decode_plain(self, block: bytes) -> Fields | None:
        """A block that leaves the table as it is, without Huffman's code: most of FieldEncoder's. None: another.

        It takes a third of hpack's time.
        """
        get, position, fields, num_left = self._decoder.header_table.get_by_index, 0, Fields(), self._list_bytes
        while position < len(block):
            kind = block[position]
            if kind > _INDEXED:
                index, position = _read_integer(block, position, 7)
                name, value = get(index)
            elif kind < _SIZE_UPDATE:
                index, position = _read_integer(block, position, 4)
                strings = []
                for _ in range(1 if index else 2):
                    if position >= len(block) or block[position] & _HUFFMAN:
                        return None
                    size, position = _read_integer(block, position, 7)
                    strings.append(block[position : position + size])
                    position += size
                name, value = get(index)[0] if index else strings[0], strings[-1]
            else:
                return None
            num_left -= len(name) + len(value) + _FIELD_OVERHEAD_BYTES
            if num_left < 0:
                return None
            fields.append((name, value))
        return fields if position == len(block) else None


def _read_integer(block: bytes, position: int, prefix_bits: int) -> tuple[int, int]:
    """And where it ends."""
    value = block[position] & (most := (1 << prefix_bits) - 1)
    if value < most:
        return value, position + 1
    value, num_bytes = decode_integer(block[position:], prefix_bits)
    return value, position + num_bytes


def _check_size_updates(block: bytes) -> None:
    """Refuse a block that begins with more than _MAX_SIZE_UPDATES: hpack takes any number, each at a cost."""
    position = num_updates = 0
    while position < len(block) and block[position] & _KIND_BITS == _SIZE_UPDATE:
        num_updates += 1
        if num_updates > _MAX_SIZE_UPDATES:
            raise HPACKDecodingError("The table's size changes too often.")
        is_long = block[position] & _PREFIX == _PREFIX
        position += 1
        while is_long and position < len(block):
            is_long = bool(block[position] & _GOES_ON)
            position += 1


_VARYING = (  # from message to message: they would only push others out of the table
    b"content-length",
    b"openai-processing-ms",
    b"retry-after",
    b"retry-after-ms",
    b"server-timing",
    b"steploop-usage",
    b"traceparent",
    b"x-ratelimit-remaining-requests",
    b"x-ratelimit-remaining-tokens",
    b"x-ratelimit-reset-requests",
    b"x-ratelimit-reset-tokens",
    b"x-request-id",
)


def _integer(value: int, prefix_bits: int, first: int = 0) -> bytes:
    """RFC 7541 §5.1, behind the bits of `first`."""
    encoded = encode_integer(value, prefix_bits)
    encoded[0] |= first
    return bytes(encoded)


_SHORT = tuple(bytes((size,)) for size in range(127))  # RFC 7541 §5.1: what fits into a prefix of 7 bits


def _string(value: bytes) -> bytes:
    """RFC 7541 §5.2, without Huffman coding."""
    size = len(value)
    return (_SHORT[size] if size < 127 else _integer(size, 7)) + value


def _literal_name(name: bytes) -> bytes:
    """RFC 7541 §6.2.3: its index where the static table has one, or the name itself."""
    index, _ = HeaderTable.STATIC_TABLE_MAPPING.get(name, (0, {}))
    return _integer(index, 4, _NEVER_INDEXED) + (b"" if index else _string(name))


_LITERAL_NAMES = {name: _literal_name(name) for name in _VARYING}


class FieldEncoder:
    """One connection's encoder. Its dynamic table is hpack's.

    Attributes:
        table: public for tests.
    """

    def __init__(self) -> None:
        self.table = HeaderTable()
        self._indexed: dict[tuple[bytes, bytes], bytes] = {}  # fields that the tables have, at their present indices
        self._sizes_to_signal: list[int] = []

    def resize(self, sizes: Sequence[int]) -> None:
        """Obey the peer's SETTINGS_HEADER_TABLE_SIZE, with all values since the last call, and never pass _TABLE_BYTES.

        RFC 7541 §4.2: of several changes, the smallest and the last are signalled with the next block.
        """
        size = min(sizes[-1], _TABLE_BYTES)
        least = min(*sizes, *self._sizes_to_signal, size)
        if least == size == self.table.maxsize and not self._sizes_to_signal:
            return
        self._indexed.clear()
        self.table.maxsize = least  # evicts what the peer has evicted
        self.table.maxsize = size
        self._sizes_to_signal = [least, size] if least < size else [size]

    def encode(self, fields: Iterable[tuple[bytes, bytes]]) -> bytes:
        block: list[bytes] = []
        if self._sizes_to_signal:
            block += [_integer(size, 5, _SIZE_UPDATE) for size in self._sizes_to_signal]
            self._sizes_to_signal = []
        indexed = self._indexed
        for field in fields:
            name, value = field
            if name in _LITERAL_NAMES:
                size = len(value)
                block += (_LITERAL_NAMES[name], _SHORT[size] if size < 127 else _integer(size, 7), value)
            else:
                block.append(indexed.get(field) or self._look_up(field))
        return b"".join(block)

    def _look_up(self, field: tuple[bytes, bytes]) -> bytes:
        name, value = field
        found = self.table.search(name, value)
        if found is not None and found[2] is not None:
            encoded = self._indexed[field] = _integer(found[0], 7, _INDEXED)
            return encoded
        self._indexed.clear()  # a new entry moves the indices of all others
        self.table.add(name, value)
        head = b"\x40" + _string(name) if found is None else _integer(found[0], 6, _INCREMENTAL)
        return head + _string(value)
