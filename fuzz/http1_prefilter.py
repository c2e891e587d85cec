"""The strict gate on heads: one verdict however the bytes are split, and what it lets through h11 reads alike.

A plain head, which passes neither of them, is one that both read as it is read.
"""

import h11

from server.wire.http1 import Framing, LineScanner, check_head, read_head, read_plain_head
from server.wire.limits import HeadLimits
from server.wire.messages import HeadRefused

_LIMITS = HeadLimits()


def check(data: bytes) -> None:
    end = _end_of_head(data, len(data) or 1)
    assert _end_of_head(data, 1) == end
    plain = read_plain_head(bytearray(data), _LIMITS)
    if plain is not None:
        assert isinstance(end, int)
        assert plain == (read_head(data[:end]), end)
    if not isinstance(end, int) or end < 0:
        return
    head = data[:end]
    try:
        framing, length = check_head(head)
    except HeadRefused as refusal:
        assert refusal.status == 400
        return
    assert head.count(b"\n") == head.count(b"\r") == head.count(b"\r\n")
    assert b"\0" not in head
    assert len(head) <= _LIMITS.head_bytes
    _compare_with_h11(head, framing, length)


def _end_of_head(data: bytes, step: int) -> int | str:
    """Where it ends; -1: not here; or the status that refuses it."""
    scanner = LineScanner(_LIMITS)
    buffer = bytearray()
    try:
        for start in range(0, len(data), step):
            buffer += data[start : start + step]
            end = scanner.scan(buffer)
            if end is not None:
                return end
    except HeadRefused as refusal:
        assert refusal.status in (400, 414, 431)
        return f"refused with {refusal.status}"
    return -1


def _compare_with_h11(head: bytes, framing: Framing, length: int) -> None:
    peer = h11.Connection(h11.SERVER, max_incomplete_event_size=len(head) + 1)
    peer.receive_data(head)
    try:
        request = peer.next_event()
    except h11.RemoteProtocolError:
        return
    assert isinstance(request, h11.Request)
    names = [line.partition(b":")[0].lower() for line in head.split(b"\r\n")[1:-2]]
    assert [name for name, _ in request.headers] == names
    fields = dict(request.headers)
    assert (framing is Framing.CHUNKED) == (b"transfer-encoding" in fields)
    assert length == int(fields.get(b"content-length", b"0"))
    after = peer.next_event()
    if framing is Framing.NONE:
        assert isinstance(after, h11.EndOfMessage)
    else:
        assert after is h11.NEED_DATA
    assert peer.trailing_data == (b"", False)
