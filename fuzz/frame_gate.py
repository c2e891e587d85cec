"""The gate on raw frames: the same verdict and bytes however they are split, and none through that break its limits."""

from collections import Counter

from fuzz.frames import stream_of_frames
from server.wire.frame_gate import (
    CONTINUATION,
    FRAME_HEADER,
    GOAWAY,
    HEADER_BYTES,
    HEADERS,
    PING,
    PREFACE,
    PUSH_PROMISE,
    RST_STREAM,
    SETTINGS,
    FrameGate,
)
from server.wire.limits import FrameLimits

_NUM_READS = 2_000  # at most, so that an input takes no longer than it is worth
_END_HEADERS = 0x4
_LIMITS = FrameLimits()
_BURSTS = {PING: _LIMITS.pings.burst, SETTINGS: _LIMITS.settings.burst, RST_STREAM: _LIMITS.resets.burst}


def check(data: bytes) -> None:
    said = stream_of_frames(data)
    whole = _outcome(said, len(said) or 1)
    for least_step in (1, 3):
        assert _outcome(said, max(least_step, len(said) // _NUM_READS)) == whole
    _check_passed(whole[0])


def _outcome(said: bytes, step: int) -> tuple[bytes, int | None, int | None, int | None]:
    gate = FrameGate(_LIMITS)
    passed = b"".join(gate.receive(said[start : start + step], 0.0) for start in range(0, len(said), step))
    if not passed.startswith(PREFACE):
        passed = b""  # h2 gets nothing to go by
    if gate.refusal is not None:
        assert gate.receive(b"more", 0.0) == b""
        return passed, gate.refusal.code, gate.goaway_code, None
    return passed, None, gate.goaway_code, gate.pending_head


def _check_passed(passed: bytes) -> None:
    """Nothing but whole frames, the last perhaps cut off, each as it may be."""
    position = len(PREFACE)
    counts: Counter[int] = Counter()
    block_stream = block_bytes = num_continuations = 0
    while position + HEADER_BYTES <= len(passed):
        high, low, kind, flags, stream_id = FRAME_HEADER.unpack_from(passed, position)
        length = high << 16 | low
        stream_id &= 0x7FFFFFFF
        assert length <= _LIMITS.frame_bytes
        assert kind not in (GOAWAY, PUSH_PROMISE)
        assert counts or kind == SETTINGS
        counts[kind] += 1
        if block_stream:
            assert (kind, stream_id) == (CONTINUATION, block_stream)
            block_bytes += length
            num_continuations += 1
            assert block_bytes <= _LIMITS.header_block_bytes
            assert num_continuations <= _LIMITS.num_continuations
        elif kind == HEADERS:
            block_stream, block_bytes, num_continuations = stream_id, length, 0
        if flags & _END_HEADERS and kind in (HEADERS, CONTINUATION):
            block_stream = 0
        position += HEADER_BYTES + length
    assert all(counts[kind] <= burst for kind, burst in _BURSTS.items())
