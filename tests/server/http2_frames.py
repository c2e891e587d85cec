"""HTTP/2 frames by hand, for what no well-behaved client sends."""

RST_STREAM, SETTINGS, PING, GOAWAY = 3, 4, 6, 7  # RFC 9113 §6


def frame(kind: int, payload: bytes = b"", flags: int = 0, stream_id: int = 0) -> bytes:
    """One frame, its payload of any length."""
    return len(payload).to_bytes(3, "big") + bytes((kind, flags)) + stream_id.to_bytes(4, "big") + payload
