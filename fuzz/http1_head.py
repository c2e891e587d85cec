"""Request heads of HTTP/1.1: one verdict however the bytes are split, and h11 reads alike what is taken."""

import h11

from server.wire.http1 import HeadReader, RequestHead
from server.wire.limits import HeadLimits
from server.wire.messages import HeadRefused

_LIMITS = HeadLimits()


def check(data: bytes) -> None:
    found = read(data, len(data) or 1)
    assert read(data, 1) == found
    if not isinstance(found, tuple):
        return
    head, section = found
    assert section.count(b"\n") == section.count(b"\r") == section.count(b"\r\n")
    assert b"\0" not in section
    assert len(section) <= _LIMITS.head_bytes
    _compare_with_h11(head, section)


def read(data: bytes, step: int, limits: HeadLimits = _LIMITS) -> tuple[RequestHead, bytes] | int | None:
    """The head that `data` begins with, and its bytes; the status that refuses it; None: it is incomplete.

    Args:
        step: bytes per read.
    """
    reader = HeadReader(limits)
    buffer = bytearray()
    try:
        for start in range(0, len(data), step):
            buffer += data[start : start + step]
            if (found := reader.read(buffer)) is not None:
                return found[0], bytes(buffer[: found[1]])
    except HeadRefused as refusal:
        assert refusal.status in (400, 414, 431)
        return refusal.status
    return None


def _compare_with_h11(head: RequestHead, section: bytes) -> None:
    """h11 is the more lenient: it takes whatever is taken here, and finds the same in it."""
    peer = h11.Connection(h11.SERVER, max_incomplete_event_size=len(section) + 1)
    peer.receive_data(section)
    request = peer.next_event()
    assert isinstance(request, h11.Request)
    assert (request.method, request.target) == (head.method, head.target)
    assert (request.http_version == b"1.0") == head.is_http10
    # h11 puts the coding's name in lower case
    ours = [(name, value.lower() if name == b"transfer-encoding" else value) for name, value in head.headers]
    assert list(request.headers) == ours
    after = peer.next_event()
    if head.length == 0:
        assert isinstance(after, h11.EndOfMessage)
    else:
        assert after is h11.NEED_DATA
        assert head.length == (None if b"transfer-encoding" in dict(ours) else int(dict(ours)[b"content-length"]))
    assert peer.trailing_data == (b"", False)
