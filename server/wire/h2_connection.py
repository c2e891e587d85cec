"""An h2 connection for servers: what h2 decides wrongly is overridden, and what it does slowly replaced. Thread: loop.

The methods with an underscore that are replaced here are h2's own, of the versions it is pinned to; that they are still
what this file takes them for is tried by tests/server/test_http2_conformance.py. Responses are framed by hand: DATA in
0.3 µs where h2 takes 4, heads in half its time. This is the only place that writes h2's private state; `h2_is_as_known`
tries at start whether that state is what it was when this was written. Where it is not, every frame goes through h2.
"""

import enum
import functools
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from h2.config import H2Configuration
from h2.connection import AllowedStreamIDs, ConnectionInputs, H2Connection
from h2.errors import ErrorCodes
from h2.events import Event, RequestReceived, StreamEnded, StreamReset, TrailersReceived
from h2.exceptions import ProtocolError, StreamIDTooLowError
from h2.settings import SettingCodes, Settings
from h2.stream import H2Stream, StreamInputs, StreamState
from hpack import Decoder, Encoder
from hpack.exceptions import HPACKDecodingError, HPACKError, OversizedHeaderListError
from hpack.hpack import encode_integer
from hpack.table import HeaderTable
from hyperframe.frame import Frame, RstStreamFrame

from server.wire.frame_gate import (
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    FRAME_HEADER,
    HEADER_BYTES,
    HEADERS,
    SETTINGS,
)
from server.wire.limits import HeadLimits, Http2Limits
from server.wire.messages import TextFrame, TextWriter

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


_VARYING = (
    b"content-length",
    b"openai-processing-ms",
    b"retry-after",
    b"retry-after-ms",
    b"server-timing",
    b"steploop-usage",
    b"x-ratelimit-remaining-requests",
    b"x-ratelimit-remaining-tokens",
    b"x-ratelimit-reset-requests",
    b"x-ratelimit-reset-tokens",
    b"x-request-id",
)
_NEVER_INDEXED = 0x10
_SHORT = tuple(bytes((size,)) for size in range(127))  # RFC 7541 §5.1: what fits into a prefix of 7 bits


def _length(size: int) -> bytes:
    """RFC 7541 §5.2, without Huffman's bit."""
    return _SHORT[size] if size < len(_SHORT) else bytes(encode_integer(size, 7))


def _name_of_literal(name: bytes) -> bytes:
    """RFC 7541 §6.2.3: its index where the static table has one, or the name itself."""
    index, _ = HeaderTable.STATIC_TABLE_MAPPING.get(name, (0, {}))
    prefix = encode_integer(index, 4)
    prefix[0] |= _NEVER_INDEXED
    return bytes(prefix) if index else bytes(prefix) + _length(len(name)) + name


_LITERAL_NAMES = {name: _name_of_literal(name) for name in _VARYING}


class ResponseEncoder(Encoder):
    """One connection's. Its table and what it tells of its size are hpack's."""

    def __init__(self) -> None:
        super().__init__()
        self._said: dict[tuple[bytes, bytes], bytes] = {}  # fields that the tables have, as these are now

    @property
    def header_table_size(self) -> int:
        return self.header_table.maxsize

    @header_table_size.setter
    def header_table_size(self, value: int) -> None:
        self._said.clear()
        self.header_table.maxsize = value
        if self.header_table.resized:
            self.table_size_changes.append(value)

    def encode(self, headers: Iterable[Any], huffman: bool = False) -> bytes:
        """
        Args:
            headers: (name, value) each, in bytes.
            huffman: there is none, whatever is asked.
        """
        block: list[bytes] = []
        if self.header_table.resized:
            block.append(self._encode_table_size_change())
            self.header_table.resized = False
        said = self._said
        for field in headers:
            name, value = field
            if name in _LITERAL_NAMES:
                size = len(value)
                block += (_LITERAL_NAMES[name], _SHORT[size] if size < 127 else _length(size), value)
            else:
                block.append(said.get(field) or self._say(field))
        return b"".join(block)

    def _say(self, field: tuple[bytes, bytes]) -> bytes:
        """What was not said since the table has changed."""
        found = self.header_table.search(*field)
        if found is None or found[2] is None:
            self._said.clear()  # what is put in front of them moves the others
            return self.add(field, False)
        indexed = self._said[field] = self._encode_indexed(found[0])
        return indexed


NUM_REMEMBERED_STREAMS = 1024  # that have ended

_LEAST_FRAME_BYTES = 16_384  # RFC 9113 §6.5.2, which is also what a peer takes us to take
_DEFAULT_WINDOW = 65_535  # RFC 9113 §6.9.2
_TABLE_BYTES = 4096  # RFC 9113 §6.5.2, the initial value: a peer may lower it, not raise it
_UNLIMITED = 2**31
_MAX_CLOSED_STREAMS_KEPT = 64  # as objects, 3 KB each; forgetting them costs a look at all streams


class _H2Stream(H2Stream):
    """A stream whose requests are judged by http2_head and http2.

    RFC 9113 §8.1.1: of a malformed request the stream is at fault; h2 would end the connection, and does not count a
    body that ends with trailers.
    """

    def receive_headers(
        self, headers: Iterable[Any], end_stream: bool, header_encoding: bool | str | None
    ) -> tuple[list[Frame], list[Event]]:
        events = self.state_machine.process_input(StreamInputs.RECV_HEADERS)
        event = events[0]
        if isinstance(event, TrailersReceived) and not end_stream:  # RFC 9113 §8.1: malformed
            code = ErrorCodes.PROTOCOL_ERROR
            return self.reset_stream(code), [StreamReset(stream_id=self.stream_id, error_code=code, remote_reset=False)]
        assert isinstance(event, RequestReceived | TrailersReceived)
        event.headers = list(headers)
        if end_stream:
            ended = self.state_machine.process_input(StreamInputs.RECV_END_STREAM)
            assert isinstance(ended[0], StreamEnded)
            event.stream_ended = ended[0]
            events += ended
        return [], events

    def _track_content_length(self, length: int, end_stream: bool) -> None:
        """http2 does, trailers included."""


class ServerConnection(H2Connection):
    MAX_CLOSED_STREAMS = NUM_REMEMBERED_STREAMS

    def __init__(self, config: H2Configuration) -> None:
        super().__init__(config)
        self.new_resets: list[int] = []  # streams; to be taken by whoever takes the data
        self._reset_streams: OrderedDict[int, None] = OrderedDict()  # by us
        self._num_streams_kept = 0  # when the closed ones were last forgotten

    @property
    def open_inbound_streams(self) -> int:
        """0: http2 counts them. h2 asks before each new stream, and goes through them all to forget the closed."""
        if len(self.streams) > self._num_streams_kept + _MAX_CLOSED_STREAMS_KEPT:
            self._open_streams(1)
            self._num_streams_kept = len(self.streams)
        return 0

    def _begin_new_stream(self, stream_id: int, allowed_ids: AllowedStreamIDs) -> H2Stream:
        """A stream of our class from the beginning: given it later, its attributes would be six times as slow."""
        if stream_id <= self.highest_inbound_stream_id:
            raise StreamIDTooLowError(stream_id, self.highest_inbound_stream_id)
        if stream_id % 2 != int(allowed_ids):
            raise ProtocolError(f"A client cannot open stream {stream_id}.")
        stream = _H2Stream(
            stream_id, self.config, self.local_settings.initial_window_size, self.remote_settings.initial_window_size
        )
        stream.max_outbound_frame_size = self.max_outbound_frame_size
        self.streams[stream_id] = stream
        self.highest_inbound_stream_id = stream_id
        return stream

    def _prepare_for_sending(self, frames: list[Any]) -> None:
        """RFC 9113 §5.4.2: no second RST_STREAM for what was on its way when the first was sent."""
        for frame in frames:
            if isinstance(frame, RstStreamFrame):
                if frame.stream_id in self._reset_streams:
                    frames = [other for other in frames if other is not frame]
                else:
                    self.new_resets.append(frame.stream_id)
                self._reset_streams[frame.stream_id] = None
                if len(self._reset_streams) > NUM_REMEMBERED_STREAMS:
                    self._reset_streams.popitem(last=False)
        super()._prepare_for_sending(frames)

    def _terminate_connection(self, error_code: ErrorCodes) -> None:
        """http2 writes the GOAWAY, with the last stream that was acted on."""


def code_of(error: ProtocolError) -> ErrorCodes:
    """The error that the connection ends with. RFC 9113 §4.3: h2 has no COMPRESSION_ERROR."""
    cause = error.__cause__
    if isinstance(cause, HPACKError) and not isinstance(cause, OversizedHeaderListError):
        return ErrorCodes.COMPRESSION_ERROR
    return error.error_code


def new_h2_connection(head: HeadLimits, limits: Http2Limits, upgrade: bytes | None) -> tuple[ServerConnection, bytes]:
    """The connection, and what it says first.

    Args:
        upgrade: see Http2Protocol.

    Raises:
        h2.exceptions.ProtocolError: see Http2Protocol.
    """
    connection = ServerConnection(
        H2Configuration(
            client_side=False,
            validate_inbound_headers=False,
            normalize_inbound_headers=False,
            validate_outbound_headers=False,
            normalize_outbound_headers=False,
        )
    )
    advertised = {
        SettingCodes.MAX_CONCURRENT_STREAMS: limits.num_streams,
        SettingCodes.MAX_HEADER_LIST_SIZE: head.head_bytes,
    }
    if limits.frames.frame_bytes > _LEAST_FRAME_BYTES:
        advertised[SettingCodes.MAX_FRAME_SIZE] = limits.frames.frame_bytes
    # h2 would end the connection over one stream too many; refusing it is ours
    local = Settings(client=False, initial_values={SettingCodes.MAX_CONCURRENT_STREAMS: _UNLIMITED})
    connection.local_settings = local
    connection.max_inbound_frame_size = limits.frames.frame_bytes
    connection.encoder = ResponseEncoder()
    connection.decoder = RequestDecoder()
    connection.decoder.max_header_list_size = limits.list_bytes
    if upgrade is None:
        connection.initiate_connection()
    else:
        connection.initiate_upgrade_connection(upgrade)
    connection.clear_outbound_data_buffer()
    payload = b"".join(code.to_bytes(2, "big") + value.to_bytes(4, "big") for code, value in advertised.items())
    settings = FRAME_HEADER.pack(0, len(payload), SETTINGS, 0, 0) + payload
    connection.increment_flow_control_window(limits.window_bytes - _DEFAULT_WINDOW)
    return connection, settings + connection.data_to_send()


def clamp_encoder(connection: H2Connection, passed_over: int | None = None) -> None:
    """The peer's SETTINGS_HEADER_TABLE_SIZE is how much we may use of its memory, and of ours.

    RFC 7541 §4.2: of several changes the smallest and the last are signalled. hpack 4.2 signals all of them, also
    such as the last one forbids, and none when the last one is said twice.

    Args:
        passed_over: a size that h2 was not told, because another followed in the same frame.
    """
    encoder = connection.encoder
    changes = encoder.table_size_changes + ([] if passed_over is None else [passed_over])
    if changes:
        size = min(encoder.header_table_size, _TABLE_BYTES)
        least = min(*changes, size)
        encoder.header_table_size = least  # evicts what the peer has evicted
        encoder.header_table_size = size
        encoder.table_size_changes = [least, size] if least < size else [size]
        encoder.header_table.resized = True


_SENDING = (StreamState.HALF_CLOSED_REMOTE, StreamState.OPEN)  # the usual one first: found by identity
_SEND_FINAL, _SEND_INFORMATIONAL = StreamInputs.SEND_HEADERS, StreamInputs.SEND_INFORMATIONAL_HEADERS
_LENGTH_BYTES = 3  # RFC 9113 §4.1: of a frame, ahead of all else in its header
PIECE_BYTES = 1024  # of a body, and so many at most: any frame has room for it
_LENGTHS = tuple(size.to_bytes(_LENGTH_BYTES, "big") for size in range(PIECE_BYTES + 1))
_PARTS = 4  # that a piece's frame is kept in until it is written


class OutgoingBody:
    """What a stream still has to send of its body. Thread: loop.

    Attributes:
        data: unsent; bounded, because it blocks its stream.
        h2: the stream, with its window.
        frame_end: of each DATA frame's header, behind the length.
        num_partly_sent: bytes that were taken while more was there.
        is_ending: nothing follows what is there.
        takes_pieces: it has begun, has not ended, and its length was not declared.
    """

    __slots__ = ("data", "frame_end", "h2", "is_ending", "num_partly_sent", "takes_pieces")

    def __init__(self, stream: H2Stream) -> None:
        self.h2 = stream
        self.frame_end = FRAME_HEADER.pack(0, 0, DATA, 0, stream.stream_id)[_LENGTH_BYTES:]
        self.data = bytearray()
        self.num_partly_sent = 0
        self.is_ending = False
        self.takes_pieces = False

    def take(self, size: int) -> bytes:
        """The next bytes, so many or fewer; b"" when there are none."""
        taken = bytes(self.data[:size])
        del self.data[:size]
        if self.data:
            self.num_partly_sent += len(taken)
        return taken


def frame_head(
    connection: H2Connection, stream: H2Stream, fields: Sequence[tuple[bytes, bytes]], is_final: bool
) -> bytes:
    """HEADERS, and CONTINUATION where they are longer than a frame; h2's states are what they were if h2 had sent them.

    Args:
        is_final: the status is 200 or above. Trailers are h2's to send.
    """
    connection.state_machine.process_input(ConnectionInputs.SEND_HEADERS)
    stream.state_machine.process_input(_SEND_FINAL if is_final else _SEND_INFORMATIONAL)
    block = connection.encoder.encode(fields)
    most = connection.max_outbound_frame_size
    kind, frames = HEADERS, b""
    while len(block) > most:
        frames += FRAME_HEADER.pack(most >> 16, most & 0xFFFF, kind, 0, stream.stream_id) + block[:most]
        kind, block = CONTINUATION, block[most:]
    size = len(block)
    return frames + FRAME_HEADER.pack(size >> 16, size & 0xFFFF, kind, END_HEADERS, stream.stream_id) + block


def frame_next(connection: H2Connection, body: OutgoingBody, frames: list[bytes], by_hand: bool) -> int:
    """Append a DATA frame of as much of the body as the windows and the frame size let through; its size, 0: none.

    It does not end its stream. h2's windows are what they were if h2 had sent it.

    Args:
        by_hand: h2_is_as_known.
    """
    stream = body.h2
    connection_window = connection.outbound_flow_control_window
    stream_window = stream.outbound_flow_control_window
    # RFC 9113 §6.9.2: windows may be negative
    size = min(len(body.data), connection_window, stream_window, connection.max_outbound_frame_size)
    if size <= 0:
        return 0
    assert stream.state_machine.state in _SENDING
    data = body.take(size)
    if by_hand:
        connection.outbound_flow_control_window = connection_window - size
        stream.outbound_flow_control_window = stream_window - size
        frames += (size.to_bytes(_LENGTH_BYTES, "big"), body.frame_end, data)
    else:
        connection.send_data(stream.stream_id, data)
        frames.append(connection.data_to_send())
    return HEADER_BYTES + size


class PieceFrames:
    """DATA frames of the texts that most steps are of: small, whole, one of each stream; made as they are said.

    They wait for take(), and go before what else the streams have to send. h2's windows are the streams' at once, and
    the connection's after take(), what they were if h2 had sent them.

    Args:
        limit_bytes: of the payloads until take().

    Attributes:
        frames: each as its length, the rest of its header with the text's head, the text, and its tail.
    """

    def __init__(self, connection: H2Connection, limit_bytes: int) -> None:
        self._connection = connection
        self._limit_bytes = limit_bytes
        self.frames: list[bytes] = []
        self._has_room = False  # it is known, since the last take()
        self._room = self._most = 0  # bytes that may be said until take(), and might at first

    def writer(
        self, body: OutgoingBody, frame: TextFrame, send: Callable[[bytes], None], begin: Callable[[], bool]
    ) -> TextWriter:
        """Says texts on a stream, one call each.

        Args:
            send: takes what is no such piece: it is long, or has no window, or others have their turn before it.
            begin: called before the first piece since take(), and has to see that there is another. False: pieces
                have to wait.
        """
        stream, frames, (head, encoded, tail) = body.h2, self.frames, frame
        start, num_more = body.frame_end + head, len(head) + len(tail)

        def write(text: str) -> None:
            if not self._has_room:
                self._find_room(begin())
            said = encoded[text]
            size = len(said) + num_more
            window = stream.outbound_flow_control_window
            if size > self._room or size > window or size > PIECE_BYTES or body.data or not body.takes_pieces:
                send(head + said + tail)
                return
            self._room -= size
            stream.outbound_flow_control_window = window - size
            frames.extend((_LENGTHS[size], start, said, tail))

        return write

    def _find_room(self, is_free: bool) -> None:
        self._has_room = True
        window = self._connection.outbound_flow_control_window
        self._room = self._most = max(0, min(window, self._limit_bytes)) if is_free else 0

    def take(self, frames: list[bytes]) -> int:
        """Append the frames; their bytes."""
        num_sent = self._most - self._room
        self._connection.outbound_flow_control_window -= num_sent
        self._has_room = False
        self._room = self._most = 0
        frames += self.frames
        num_frames = len(self.frames) // _PARTS
        self.frames.clear()
        return num_sent + HEADER_BYTES * num_frames

    def forget(self, body: OutgoingBody) -> None:
        """The stream has been reset: nothing of it may follow."""
        frames = self.frames
        for i in reversed(range(0, len(frames), _PARTS)):
            if frames[i + 1].startswith(body.frame_end):
                self._room += int.from_bytes(frames[i], "big")
                del frames[i : i + _PARTS]


def last_frame(connection: H2Connection, body: OutgoingBody, by_hand: bool) -> bytes:
    """The DATA frame that ends the stream; b"": the rest of the body does not fit into one.

    h2's windows and states are what they were if h2 had sent it. RFC 9113 §6.9.1: an empty one needs no window.

    Args:
        by_hand: h2_is_as_known.
    """
    size = len(body.data)
    stream = body.h2
    window = min(connection.outbound_flow_control_window, stream.outbound_flow_control_window)
    if size > connection.max_outbound_frame_size or (size and size > window):
        return b""
    if not by_hand:
        connection.send_data(stream.stream_id, body.take(size), end_stream=True)
        return connection.data_to_send()
    assert stream.state_machine.state in _SENDING
    stream.state_machine.process_input(StreamInputs.SEND_END_STREAM)
    connection.outbound_flow_control_window -= size
    stream.outbound_flow_control_window -= size
    return FRAME_HEADER.pack(size >> 16, size & 0xFFFF, DATA, END_STREAM, stream.stream_id) + body.take(size)


@functools.cache
def h2_is_as_known() -> bool:
    """Whether h2 makes the frames that we make, and is left as we leave it."""
    theirs, ours = _connection_with_stream(), _connection_with_stream()
    for connection in (theirs, ours):  # short frames, so that the heads go on in CONTINUATION
        connection.max_outbound_frame_size = connection.streams[1].max_outbound_frame_size = 16
    body = OutgoingBody(ours.streams[1])

    def is_same(frames: bytes) -> bool:
        return frames == theirs.data_to_send() and _state_of(ours) == _state_of(theirs)

    for status in (b"103", b"200"):
        fields = [(b":status", status), (b"probe", b"\\" * 20)]
        theirs.send_headers(1, fields)
        if not is_same(frame_head(ours, ours.streams[1], fields, is_final=status == b"200")):
            return False
    for is_last in (False, True):
        theirs.send_data(1, b"probe", is_last)
        body.data += b"probe"
        frames: list[bytes] = []
        if is_last:
            frames.append(last_frame(ours, body, by_hand=True))
        else:
            frame_next(ours, body, frames, by_hand=True)
        if not is_same(b"".join(frames)):
            return False
    return True


def _connection_with_stream() -> H2Connection:
    """A server's connection on which stream 1 has been asked for."""
    client = H2Connection(H2Configuration(client_side=True))
    client.initiate_connection()
    client.send_headers(1, [(":method", "GET"), (":scheme", "http"), (":path", "/"), (":authority", "a")], True)
    server = H2Connection(H2Configuration(client_side=False))
    server.initiate_connection()
    server.receive_data(client.data_to_send())
    server.clear_outbound_data_buffer()
    return server


def _state_of(connection: H2Connection) -> dict[str, Any]:
    """All plain values that the connection and its stream 1 hold."""
    stream = connection.streams[1]
    owners = {"connection": connection, "stream": stream}
    machines = {"connection.machine": connection.state_machine, "stream.machine": stream.state_machine}
    return {
        f"{owner}.{name}": value
        for owner, holder in {**owners, **machines}.items()
        for name, value in vars(holder).items()
        if value is None or isinstance(value, int | str | bytes | enum.Enum)
    }
