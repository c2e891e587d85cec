"""Whom proxies say they speak for: X-Forwarded-For, and Forwarded (RFC 7239). Pure; any thread.

Each proxy appends whom it had before it; what stands further left may be the client's own invention. Hence both are
read from their right end: nothing that a client has put before it changes how a proxy's own part is read.
"""

import re
from collections.abc import Iterator
from ipaddress import ip_address

from server.wire.messages import Headers
from server.wire.peer import Peer, plain_address

FORWARDED = "forwarded"
X_FORWARDED_FOR = "x-forwarded-for"

_MAX_HOPS = 32
_MAX_BYTES = 4096  # of the right end
# RFC 7239 §4: forwarded-element, the last one of a list
_PAIR = r"""[\w!#$%&'*+.^`|~-]+=(?:[^\s",;]+|"[^"]*")"""
_LAST_ELEMENT = re.compile(rf"(?:^|,)[ \t]*({_PAIR}(?:[ \t]*;[ \t]*{_PAIR})*)[ \t]*$", re.ASCII)
_FOR = re.compile(r"""(?:^|;)[ \t]*for=(?:"([^"]*)"|([^\s",;]+))""", re.ASCII | re.IGNORECASE)
_NODE = re.compile(r"(?:\[([^\]]*)\]|([^:\[\]]*))(?::(\d{1,5}))?", re.ASCII)


def hops(headers: Headers, name: str) -> Iterator[Peer | None]:
    """Whom the proxies had before them, the nearest proxy's first; None: it did not say, or nothing that is one.

    Args:
        name: FORWARDED or X_FORWARDED_FOR.
    """
    wanted = name.encode()
    text = ",".join(value.decode("latin-1") for key, value in headers if key == wanted)[-_MAX_BYTES:]
    elements = _forwarded_elements(text) if name == FORWARDED else reversed(text.split(",") if text else ())
    for _, element in zip(range(_MAX_HOPS), elements, strict=False):
        yield node_peer(element.strip())


def _forwarded_elements(text: str) -> Iterator[str]:
    """What each element says of `for`, from the right; the list ends where it cannot be read."""
    while (match := _LAST_ELEMENT.search(text)) is not None:
        found = _FOR.search(match[1])
        yield "" if found is None else found[1] or found[2] or ""
        text = text[: match.start()]


def node_peer(text: str) -> Peer | None:
    """An address as proxies write it, with a port or without; None: `unknown`, a made-up name, or no address at all."""
    bracketed, bare, port = None, text, None
    if (match := _NODE.fullmatch(text)) is not None:
        bracketed, bare, port = match.groups()
    try:
        return Peer(plain_address(ip_address(bracketed or bare)), int(port or 0))
    except ValueError:
        return None
