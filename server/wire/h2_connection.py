"""h2's connection, set up as a server's; what it must not decide is taken from it. Thread: loop. Sans-io.

The methods with an underscore that are replaced here are h2's own, of the versions it is pinned to; that they are still
what this file takes them for is tried by tests/server/test_http2_conformance.py.
"""

from collections import OrderedDict
from collections.abc import Iterable
from typing import Any

from h2.config import H2Configuration
from h2.connection import AllowedStreamIDs, H2Connection
from h2.errors import ErrorCodes
from h2.events import Event, RequestReceived, StreamEnded, StreamReset, TrailersReceived
from h2.exceptions import ProtocolError, StreamIDTooLowError
from h2.settings import SettingCodes, Settings
from h2.stream import H2Stream, StreamInputs
from hpack.exceptions import HPACKError, OversizedHeaderListError
from hyperframe.frame import Frame, RstStreamFrame

from server.wire.connection_limits import Http2Limits
from server.wire.frame_gate import FRAME_HEADER, SETTINGS
from server.wire.hpack_decoder import RequestDecoder
from server.wire.hpack_encoder import ResponseEncoder
from server.wire.http1_prefilter import HeadLimits

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


class _H2(H2Connection):
    MAX_CLOSED_STREAMS = NUM_REMEMBERED_STREAMS

    def __init__(self, config: H2Configuration) -> None:
        super().__init__(config)
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


def new_h2_connection(head: HeadLimits, limits: Http2Limits, upgrade: bytes | None) -> tuple[H2Connection, bytes]:
    """The connection, and what it says first.

    Args:
        upgrade: see Http2Protocol.

    Raises:
        h2.exceptions.ProtocolError: see Http2Protocol.
    """
    connection = _H2(
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
