"""What an HTTP/2 header list must be to become a request. Thread: loop. Sans-io.

h2's own checks are switched off: they go through each byte in Python, let pass what HTTP/1.1 here refuses, and end the
connection where RFC 9113 §8.1.1 has only the stream at fault.
"""

import base64
import binascii
import functools
import re
from collections.abc import Iterable

from server.wire.http1_prefilter import HeadLimits, HeadRefused, is_authority
from server.wire.messages import Headers, HttpRequest

_NAME = re.compile(rb"[!#$%&'*+.^_`|~0-9a-z-]+")  # RFC 9113 §8.2: no upper case
_CONTROL = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")
_METHOD = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_PATH = re.compile(rb"/[\x21-\x22\x24-\x7e]*")  # no fragment
_LENGTH = re.compile(rb"[0-9]{1,19}")  # 19 digits: below 2**64
_PSEUDO = frozenset((b":method", b":scheme", b":authority", b":path"))
# RFC 9113 §8.2.2: connection-specific fields MUST be treated as malformed
_OF_CONNECTION = frozenset((b"connection", b"proxy-connection", b"keep-alive", b"transfer-encoding", b"upgrade"))
# Host is put first. Cookies mean nothing here, and put together (RFC 9113 §8.2.3) they would weigh more than was sent
_NOT_KEPT = frozenset((b"host", b"cookie"))
_OF_UPGRADE = (b"connection", b"upgrade", b"http2-settings")
_OF_PROXIES = frozenset((b"forwarded", b"via", b"x-forwarded-for"))
_SETTING_BYTES = 6
_NUM_PATHS_KEPT = 32
_FIELD_OVERHEAD_BYTES = 32  # RFC 9113 §6.5.2, SETTINGS_MAX_HEADER_LIST_SIZE


class Malformed(Exception):
    """RFC 9113 §8.1.1: a stream error of type PROTOCOL_ERROR."""


def read_request(
    stream_id: int, fields: Iterable[tuple[bytes, bytes]], has_body: bool, limits: HeadLimits
) -> HttpRequest:
    """The request that a header list says.

    Raises:
        Malformed: it is not a request.
        HeadRefused: it is one, and is answered with an error.
    """
    fields = list(fields)
    pseudo, headers = _split(fields)
    _check_fields(headers)
    _check_size(fields, limits)
    method, path = _target(pseudo)
    length = content_length(headers)
    if length and not has_body:
        raise Malformed  # RFC 9113 §8.1.1: the DATA frames must add up to it
    rest = (field for field in headers if field[0] not in _NOT_KEPT)
    headers = ((b"host", _authority(pseudo.get(b":authority"), headers)), *rest)
    route, query = _route_and_query(path)
    return HttpRequest(
        stream_id=stream_id,
        method=method.decode("ascii"),
        path=route,
        query=query,
        headers=headers,
        has_body=has_body,
        expects_continue=has_body
        and any(key == b"expect" and value.lower() == b"100-continue" for key, value in headers),
    )


@functools.lru_cache(_NUM_PATHS_KEPT)
def _route_and_query(path: bytes) -> tuple[str, str]:
    """The same strings, where an index of one byte says the path on each of many streams.

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
        raise HeadRefused(501, "CONNECT is for proxies, and this is none.")
    if path is None or not pseudo.get(b":scheme"):
        raise Malformed
    if _PATH.fullmatch(path) is None and not (path == b"*" and method == b"OPTIONS"):
        raise Malformed
    return method, path


def upgrade_settings(request: HttpRequest, max_settings: int) -> bytes | None:
    """The HTTP2-Settings of an HTTP/1.1 request that may be answered in HTTP/2, padded; None: it may not be.

    RFC 7540 §3.2, which RFC 9113 drops and stock Java clients send: `Upgrade: h2c`, and exactly one HTTP2-Settings.
    Not what shows that it has come through a proxy: one that hands the upgrade on (haproxy 2.6) would no longer see
    what its client asks for, and its rules would not hold. A proxy need not show itself: see --h2c-upgrade.
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
    return padded if len(payload) % _SETTING_BYTES == 0 and len(payload) <= max_settings * _SETTING_BYTES else None


def check_trailers(fields: Iterable[tuple[bytes, bytes]]) -> None:
    """
    Raises:
        Malformed: pseudo-fields, or what is no field, stand among them.
    """
    pseudo, headers = _split(fields)
    if pseudo:
        raise Malformed  # RFC 9113 §8.1
    _check_fields(headers)


def _split(fields: Iterable[tuple[bytes, bytes]]) -> tuple[dict[bytes, bytes], Headers]:
    """The pseudo-fields, each once and all before the others (RFC 9113 §8.3), and the others."""
    pseudo: dict[bytes, bytes] = {}
    headers: list[tuple[bytes, bytes]] = []
    for name, value in fields:
        if name not in _PSEUDO:
            headers.append((name, value))
        elif headers or name in pseudo:
            raise Malformed
        else:
            pseudo[name] = value
    return pseudo, tuple(headers)


def _check_fields(headers: Headers) -> None:
    """RFC 9113 §8.2.1, and as strictly as on HTTP/1.1: no control characters in values."""
    for name, value in headers:
        if _NAME.fullmatch(name) is None or name in _OF_CONNECTION:
            raise Malformed
        if value and (_CONTROL.search(value) or value[0] in b" \t" or value[-1] in b" \t"):
            raise Malformed
        if name == b"te" and value.lower() != b"trailers":  # RFC 9113 §8.2.2
            raise Malformed


def _check_size(fields: list[tuple[bytes, bytes]], limits: HeadLimits) -> None:
    size = sum(len(name) + len(value) + _FIELD_OVERHEAD_BYTES for name, value in fields)
    if size > limits.head_bytes:
        raise HeadRefused(431, f"The header fields are larger than {limits.head_bytes} bytes.")
    if len(fields) > limits.num_fields:
        raise HeadRefused(431, f"There are more than {limits.num_fields} header fields.")


def content_length(headers: Headers) -> int | None:
    """How long the body is said to be.

    Raises:
        Malformed: that is no number, or more than one.
    """
    lengths = [value for name, value in headers if name == b"content-length"]
    if not lengths:
        return None
    if len(lengths) > 1 or _LENGTH.fullmatch(lengths[0]) is None:
        raise Malformed
    return int(lengths[0])


def _authority(authority: bytes | None, headers: Headers) -> bytes:
    """RFC 9113 §8.3.1: what :authority and Host say must be the same, and one of them must say it."""
    hosts = [value for name, value in headers if name == b"host"]
    if len(hosts) > 1 or (authority is not None and hosts and hosts[0] != authority):
        raise Malformed
    value = authority if authority is not None else hosts[0] if hosts else b""
    if not value or not is_authority(value):
        raise Malformed
    return value
