"""PROXY protocol's header: the same however it is split, never a byte beyond it, never more held than is taken."""

from server.listening.clients import MAX_BYTES, ProxyHeader, ProxyHeaderParser, ProxyProtocolError

_SIGNATURE = b"\r\n\r\n\x00\r\nQUIT\n"
_HEAD_BYTES = 16


def check(data: bytes) -> None:
    """The signature is put before it: it has no part in what can go wrong behind it."""
    _check(data)
    _check(_SIGNATURE + data)


def _check(said: bytes) -> None:
    header, num_taken = _parse(said, len(said) or 1)
    for step in (1, 5):
        assert _parse(said, step)[0] == header
    assert num_taken <= _HEAD_BYTES + MAX_BYTES
    if isinstance(header, ProxyHeader):
        assert said.startswith(_SIGNATURE)
        assert num_taken == _HEAD_BYTES + int.from_bytes(said[14:16], "big")


def _parse(said: bytes, step: int) -> tuple[ProxyHeader | str | None, int]:
    """The header, "refused", or None while it is incomplete; and how many bytes it has taken."""
    parser = ProxyHeaderParser()
    position = 0
    while position < len(said):
        piece = said[position : position + min(step, parser.num_wanted)]
        position += len(piece)
        try:
            header = parser.receive(piece)
        except ProxyProtocolError:
            return "refused", position
        if header is not None:
            assert parser.num_wanted == 0
            return header, position
    return None, position
