"""An answer's bytes as they pass, to be said again. Thread: loop."""

from functools import partial

from server.wire.messages import Headers, Peer, ResponseHead, TextFrame, TextWriter
from server.wire.stream import HttpStream, StreamCarrier, WrittenCallback

KEPT_HEADERS = (b"content-type", b"x-accel-buffering")  # the others are each response's own


class Recording:
    """Implements server.stream.StreamCarrier between a stream and its connection.

    Args:
        max_bytes: of a body; a longer one is not remembered.

    Attributes:
        is_whole: all of the answer has been sent, and is here.
    """

    def __init__(self, carrier: StreamCarrier, max_bytes: int) -> None:
        self.status = 0
        self.headers: Headers = ()
        self.body = bytearray()
        self.is_whole = False
        self._carrier = carrier
        self._max_bytes = max_bytes
        self._is_too_long = False

    @property
    def peer(self) -> Peer:
        return self._carrier.peer

    def start_body(self, stream: HttpStream) -> None:
        self._carrier.start_body(stream)

    def write_head(self, stream: HttpStream, head: ResponseHead) -> None:
        self.status = head.status
        self.headers = tuple(field for field in head.headers if field[0] in KEPT_HEADERS)
        self._carrier.write_head(stream, head)

    def write_data(self, stream: HttpStream, data: bytes) -> None:
        self._is_too_long |= len(self.body) + len(data) > self._max_bytes
        if self._is_too_long:
            self.body.clear()
        else:
            self.body += data
        self._carrier.write_data(stream, data)

    def text_writer(self, stream: HttpStream, frame: TextFrame) -> TextWriter:
        return partial(stream.send_text, frame)

    def write_end(self, stream: HttpStream, trailers: Headers) -> None:
        self.is_whole = not self._is_too_long
        self._carrier.write_end(stream, trailers)

    def call_once_written(self, stream: HttpStream, callback: WrittenCallback) -> None:
        self._carrier.call_once_written(stream, callback)
