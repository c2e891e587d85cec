"""What RFC 9113 demands of a server for each frame in each state, as tables: one file for each of its sections."""

from tests.server.http2_cases import frame_types, framing, messages, streams, windows

CASES = (
    *framing.FORMAT,
    *streams.STATES,
    *streams.PRIORITIES,
    *frame_types.DATA_FRAMES,
    *frame_types.HEADER_FRAMES,
    *frame_types.RESETS,
    *frame_types.SETTINGS_FRAMES,
    *frame_types.CONNECTION_FRAMES,
    *windows.WINDOWS,
    *messages.MESSAGES,
)
