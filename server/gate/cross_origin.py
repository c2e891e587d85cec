"""What pages of other origins may do: CORS with its preflights, and nothing of an operator's. Thread: loop.

Sources: the Fetch standard, HTTP-CORS protocol; W3C Fetch Metadata. Credentials mode is not allowed: no key comes in a
cookie.
"""

import re
from urllib.parse import urlsplit

from core.errors import ErrorKind, ServiceError
from server.values import BadValueError
from server.wire.messages import Headers, HttpRequest, Peer

ANY_ORIGIN = "*"
METHODS = b"GET, POST, DELETE"
MAX_AGE_S = b"7200"  # Chromium's maximum
_READS = frozenset(("GET", "HEAD", "OPTIONS"))
_DEFAULT_PORTS = {"http": 80, "https": 443}
_FORWARDING = re.compile(
    rb"forwarded|via|cdn-loop|x-(?:original-)?forwarded-.*|x-(?:real|originating)-ip|x-envoy-.*|(?:.+-)?(?:client|connecting)-ip"
)
# Addresses, and names that nobody can register: RFC 6761, 6762, 8375, and ICANN's of 2018 and 2024
_PRIVATE_HOST = re.compile(
    rb"(?:\d{1,3}(?:\.\d{1,3}){3}|\[[\da-f:.]+\]|[^.:]*|.+\.(?:localhost|local|internal|home\.arpa|lan|home|corp))(?::\d{1,5})?",
    re.IGNORECASE,
)
_LOOPBACK_HOST = re.compile(rb"(?:localhost|127(?:\.\d{1,3}){3}|\[::1\])(?::\d{1,5})?", re.IGNORECASE)


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
        self._hosts = frozenset(origin.partition("//")[2].encode() for origin in origins)

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

    def check_page(self, request: HttpRequest) -> None:
        """Refuse pages of others a request that bears no key, and that any page could therefore send.

        Raises:
            ServiceError (permission): it changes something for a page of another origin; or a browser took the server
                for a public name that leads here (DNS rebinding).
        """
        origin, host = request.header(b"origin"), request.header(b"host") or b""
        if self._allows_any or origin in self._origins or not _is_pages(origin):
            return
        site = request.header(
            b"sec-fetch-site"
        )  # only where the page's origin is HTTPS or loopback: it is no rebound one
        if site is not None:
            is_allowed = site in (b"same-origin", b"none") or request.method in _READS
        elif origin is None:
            # Of what pages can read, browsers tell no origin. Node tells a language, too, and always the mode
            is_browsers = request.header(b"accept-language") is not None and request.header(b"sec-fetch-mode") is None
            is_allowed = not is_browsers or self._is_known(host)
        elif origin == b"http://" + host:
            is_allowed = self._is_known(host)
        else:
            is_allowed = origin == b"https://" + host or request.method in _READS
        if not is_allowed:
            told = (origin or b"http://" + host).decode("ascii", "replace")
            remedy = ANY_ORIGIN if origin == b"null" else told
            message = (
                f"Pages of {told} may not send requests to this server without a key. To allow it, the operator sets"
                f" --cors-origin {remedy} (docs/deploy.md)."
            )
            raise ServiceError(ErrorKind.PERMISSION, message, "permission_denied")

    def _is_known(self, host: bytes) -> bool:
        """Nobody else's name leads here by it."""
        return host in self._hosts or _PRIVATE_HOST.fullmatch(host) is not None


def _is_pages(origin: bytes | None) -> bool:
    """Not of an app or an extension: no page has an origin of their schemes."""
    return origin is None or origin == b"null" or origin.startswith((b"http://", b"https://"))


def is_operators(request: HttpRequest, peer: Peer, trusts_proxies: bool) -> bool:
    """Whether a request without a key, to a server without keys, is of the operator on this machine.

    It is not where a proxy on this machine may have sent it; nor where a page of another site may have: by a name of
    its own that leads here (DNS rebinding), or across origins where CORS lets it.
    """
    if trusts_proxies or peer.address is None or not peer.address.is_loopback:
        return False
    hosts = [value for name, value in request.headers if name == b"host"]
    if len(hosts) != 1 or _LOOPBACK_HOST.fullmatch(hosts[0]) is None:
        return False
    if request.is_http10 or any(_FORWARDING.fullmatch(name) for name, _ in request.headers):
        return False  # nginx asks in HTTP/1.0 unless it is told otherwise, and no browser does
    origin, site = request.header(b"origin"), request.header(b"sec-fetch-site")
    is_own = origin is None or origin in (b"http://" + hosts[0], b"https://" + hosts[0])
    return is_own and site in (None, b"same-origin", b"none")
