"""CORS: which origins' pages may read answers, and the answers to their preflights. Thread: loop.

Source: the Fetch standard, HTTP-CORS protocol. Credentials mode is not allowed: no key comes in a cookie.
"""

from urllib.parse import urlsplit

from server.values import BadValueError
from server.wire.messages import Headers, HttpRequest

ANY_ORIGIN = "*"
METHODS = b"GET, POST, DELETE"
MAX_AGE_S = b"7200"  # Chromium's maximum
_DEFAULT_PORTS = {"http": 80, "https": 443}


def origin_value(text: str) -> str:
    """An origin as browsers send it, or *. Raises BadValueError."""
    expected = "* or an origin as browsers send it, such as https://app.example.com or http://localhost:3000"
    if text == ANY_ORIGIN:
        return text
    try:
        parts = urlsplit(text.strip())
        port = parts.port
    except ValueError as error:
        raise BadValueError(expected) from error
    if parts.scheme not in _DEFAULT_PORTS or not parts.hostname or "@" in parts.netloc or not text.isascii():
        raise BadValueError(expected, f"https://{text}" if text and "/" not in text and text.isascii() else None)
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    origin = f"{parts.scheme}://{host}"
    if port is not None and port != _DEFAULT_PORTS[parts.scheme]:
        origin += f":{port}"
    if parts.path not in ("", "/") or parts.query or parts.fragment:
        raise BadValueError(expected, origin)
    return origin


class CrossOrigin:
    """Without origins (from origin_value()) no CORS fields are sent, and pages of other origins can read nothing."""

    def __init__(self, origins: tuple[str, ...] = ()) -> None:
        self._origins = frozenset(origin.encode() for origin in origins)
        self._allows_any = ANY_ORIGIN in origins

    def headers(self, request: HttpRequest) -> Headers:
        """For every answer to the request."""
        if self._allows_any:
            return ((b"access-control-allow-origin", b"*"), (b"access-control-expose-headers", b"*"))
        if not self._origins:
            return ()
        vary = (b"vary", b"origin")  # in refusals too: a cache must not mix them up
        origin = request.header(b"origin")
        if origin is None or origin not in self._origins:
            return (vary,)
        return ((b"access-control-allow-origin", origin), (b"access-control-expose-headers", b"*"), vary)

    def preflight_headers(self, request: HttpRequest) -> Headers | None:
        """For the answer to a preflight; None: the request is not a preflight, or its origin is not allowed."""
        if request.method != "OPTIONS" or request.header(b"access-control-request-method") is None:
            return None
        origin = request.header(b"origin")
        if origin is None or not (self._allows_any or origin in self._origins):
            return None
        named = request.header(b"access-control-request-headers")
        allowed = () if named is None else ((b"access-control-allow-headers", named),)  # * excludes authorization
        return ((b"access-control-allow-methods", METHODS), *allowed, (b"access-control-max-age", MAX_AGE_S))
