"""PROXY protocol's header: refused or understood by its first bytes, never longer than is taken; any names a client."""

from server.listening.clients import (
    MAX_PROXY_BYTES,
    PROXY_HEAD_BYTES,
    ProxyProtocolError,
    num_behind_proxy_head,
    proxied_client,
)

_SIGNATURE = b"\r\n\r\n\x00\r\nQUIT\n"


def check(data: bytes) -> None:
    """The signature is put before it: it has no part in what can go wrong behind it."""
    _check(data)
    _check(_SIGNATURE + data)


def _check(said: bytes) -> None:
    head = said[:PROXY_HEAD_BYTES]
    if len(head) < PROXY_HEAD_BYTES:
        return
    try:
        num_bytes = num_behind_proxy_head(head)
    except ProxyProtocolError:
        return
    assert head.startswith(_SIGNATURE)
    assert num_bytes == int.from_bytes(head[14:], "big") <= MAX_PROXY_BYTES
    proxied_client(head, said[PROXY_HEAD_BYTES:].ljust(num_bytes, b"\0")[:num_bytes])
