"""HTTP/2 frames from a fuzzer's bytes: any frame can be said in few bytes, and lengths agree with payloads."""

import struct

from server.wire.http2_frames import FRAME_HEADER, PREFACE, SETTINGS, WINDOW_UPDATE

# What the length byte says from here on: so many zeros, at and beyond what frames are limited to
_LARGE = (255, 256, 257, 1_000, 4_096, 8_192, 16_383, 16_384, 16_385)
_FIRST_LARGE = 256 - len(_LARGE)
_NUM_KINDS = WINDOW_UPDATE + 3  # CONTINUATION, and one that is not known
_NUM_STREAMS = 8
_IS_REPEATED = 0xC0
_MAX_BYTES = 2**17  # of all frames: beyond every limit on what is held
_DESCRIPTION = struct.Struct("5B")  # kind, flags, stream, repetition, length
_EMPTY_SETTINGS = FRAME_HEADER.pack(0, 0, SETTINGS, 0, 0)


def stream_of_frames(data: bytes) -> bytes:
    """What a client says, preface first. The first byte 0: the rest as it is; else: descriptions of frames."""
    if data[:1] == b"\0":
        return data[1:]
    said = bytearray(PREFACE + _EMPTY_SETTINGS)
    position = 1
    while position + _DESCRIPTION.size <= len(data) and len(said) <= _MAX_BYTES:
        kind, flags, stream, repetition, length = _DESCRIPTION.unpack_from(data, position)
        position += _DESCRIPTION.size
        if length >= _FIRST_LARGE:
            payload = bytes(_LARGE[length - _FIRST_LARGE])
        else:
            payload = data[position : position + length]
            position += length
        said += frame(kind % _NUM_KINDS, flags, stream % _NUM_STREAMS, payload) * _times(repetition)
    return bytes(said[:_MAX_BYTES])


def _times(repetition: int) -> int:
    return 4 * (repetition - _IS_REPEATED) + 1 if repetition >= _IS_REPEATED else 1


def frame(kind: int, flags: int, stream_id: int, payload: bytes) -> bytes:
    return FRAME_HEADER.pack(len(payload) >> 16, len(payload) & 0xFFFF, kind, flags, stream_id) + payload
