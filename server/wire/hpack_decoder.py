"""Header blocks of requests: hpack's decoder, behind a look at how they begin. Thread: loop. Sans-io.

hpack takes as many changes of the table's size as a block holds: one of 16 KiB, and nothing else in it, is 14 ms of
work, of which no limit on header lists knows.
"""

from collections.abc import Iterable
from typing import Any

from hpack import Decoder
from hpack.exceptions import HPACKDecodingError

MAX_SIZE_UPDATES = 2  # RFC 7541 §4.2: of several changes, the smallest and the last are signalled

_KIND_BITS, _SIZE_UPDATE = 0xE0, 0x20  # RFC 7541 §6.3
_PREFIX, _GOES_ON = 0x1F, 0x80  # RFC 7541 §5.1


class RequestDecoder(Decoder):
    """One connection's."""

    def decode(self, data: bytes, raw: bool = False) -> Iterable[Any]:
        """
        Raises:
            HPACKDecodingError: it begins with more than MAX_SIZE_UPDATES, or hpack finds it broken.
        """
        num_updates = position = 0
        while (end := _after_size_update(data, position)) > position:
            num_updates += 1
            if num_updates > MAX_SIZE_UPDATES:
                raise HPACKDecodingError("The table's size changes too often.")
            position = end
        return super().decode(data, raw)


def _after_size_update(data: bytes, position: int) -> int:
    """Where the size update that stands there ends; `position`: none does."""
    if position >= len(data) or data[position] & _KIND_BITS != _SIZE_UPDATE:
        return position
    is_long = data[position] & _PREFIX == _PREFIX
    position += 1
    while is_long and position < len(data):
        is_long = bool(data[position] & _GOES_ON)
        position += 1
    return position
