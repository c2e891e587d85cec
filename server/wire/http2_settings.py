"""The SETTINGS that a client sends: what values they may have, and what h2 need not see. Thread: loop. Sans-io.

h2 makes a table of a frame's settings: of one that comes twice it sees the last value, whatever the first was. And it
keeps every setting that it does not know, some hundred bytes each, as long as the connection lives.
"""

import struct

from h2.errors import ErrorCodes

_SETTING = struct.Struct(">HL")  # RFC 9113 §6.5.1
_TABLE_SIZE = 1
_ANY = range(2**32)
_IS = range(2)
# RFC 9113 §6.5.2, RFC 8441 §3: the values that each may have, and the error of those that it may not
_KNOWN = {
    _TABLE_SIZE: (_ANY, ErrorCodes.NO_ERROR),
    2: (_IS, ErrorCodes.PROTOCOL_ERROR),  # ENABLE_PUSH
    3: (_ANY, ErrorCodes.NO_ERROR),  # MAX_CONCURRENT_STREAMS
    4: (range(2**31), ErrorCodes.FLOW_CONTROL_ERROR),  # INITIAL_WINDOW_SIZE
    5: (range(2**14, 2**24), ErrorCodes.PROTOCOL_ERROR),  # MAX_FRAME_SIZE
    6: (_ANY, ErrorCodes.NO_ERROR),  # MAX_HEADER_LIST_SIZE
    8: (_IS, ErrorCodes.PROTOCOL_ERROR),  # ENABLE_CONNECT_PROTOCOL
}


class InvalidSetting(Exception):
    """A connection error of this code."""

    def __init__(self, code: ErrorCodes, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


def read_settings(payload: bytes) -> tuple[bytes, list[int]]:
    """The payload with each known setting once, at its last value, and the table sizes that were replaced in it.

    RFC 9113 §6.5.3: values are processed in their order; unknown settings are ignored.

    Args:
        payload: of whole settings.

    Raises:
        InvalidSetting: a value is none that its setting may have.
    """
    settings: dict[int, int] = {}
    replaced: list[int] = []
    for code, value in _SETTING.iter_unpack(payload):
        if code not in _KNOWN:
            continue
        allowed, error = _KNOWN[code]
        if value not in allowed:
            raise InvalidSetting(error, f"Setting {code} cannot be {value}.")
        if code == _TABLE_SIZE and code in settings:
            replaced.append(settings[code])
        settings[code] = value
    return b"".join(_SETTING.pack(code, value) for code, value in settings.items()), replaced
