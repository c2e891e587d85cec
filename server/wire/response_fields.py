"""What a response's header fields may be, whichever protocol carries them. Thread: loop."""

import email.utils
import re
from collections.abc import Callable

from server.wire.messages import ResponseHead

_NAME = re.compile(rb"[!#$%&'*+.^_`|~0-9a-z-]+")
_VALUE = re.compile(rb"[\t\x20-\x7e\x80-\xff]*")


class ResponseError(Exception):
    """The answer given to the protocol is not one it can send: our own bug, never the peer's."""


class HttpDate:
    """The Date field's value, made once a second. RFC 9110 §6.6.1: an origin server with a clock sends it.

    Args:
        wall_clock: seconds since the epoch.
    """

    def __init__(self, wall_clock: Callable[[], float]) -> None:
        self._wall_clock = wall_clock
        self._second = -1
        self._value = b""

    def __call__(self) -> bytes:
        second = int(self._wall_clock())
        if second != self._second:
            self._second = second
            self._value = email.utils.formatdate(second, usegmt=True).encode()
        return self._value


def check_fields(head: ResponseHead) -> int | None:
    """Refuse what would break the framing or split the response; return the content-length.

    Raises:
        ResponseError: framing fields or bytes that are not the application's to send.
    """
    length: int | None = None
    for name, value in head.headers:
        if _NAME.fullmatch(name) is None or _VALUE.fullmatch(value) is None:
            raise ResponseError(f"The header {name!r} cannot be sent: its name or its value has bytes it must not.")
        if name == b"transfer-encoding":
            raise ResponseError("How a body is framed is the protocol's to choose.")
        if name == b"content-length":
            # RFC 9110 §8.6: none in 1xx and 204
            if length is not None or not value.isdigit() or head.status < 200 or head.status == 204:
                raise ResponseError("This content-length cannot be sent.")
            length = int(value)
    return length
