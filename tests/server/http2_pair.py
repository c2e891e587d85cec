"""Our protocol and h2's client, joined without a network, and what may happen between them."""

from functools import partial

from h2 import events
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.settings import SettingCodes

from server.wire.http2 import Http2Protocol
from server.wire.limits import FrameLimits, HeadLimits, Http2Limits, Rate
from server.wire.messages import Http2ErrorCode, ResponseHead, TextFrame, TextWriter
from tests.server.http2_client import fields

HEAD = ResponseHead(200, ())


class _Utf8(dict[str, bytes]):
    def __missing__(self, text: str) -> bytes:
        return text.encode()


PLAIN = TextFrame(b"", _Utf8(), b"")  # texts as they are
NO_LIMITS = Http2Limits(frames=FrameLimits(settings=Rate(10**6, 0), resets=Rate(10**6, 0), num_overhead_frames=10**6))


class Pair:
    """Both ends of the connection."""

    def __init__(self) -> None:
        self.server = Http2Protocol(HeadLimits(), NO_LIMITS, lambda: b"now")
        self.client = H2Connection(H2Configuration(client_side=True))
        self.client.initiate_connection()
        self.sent: dict[int, bytes] = {}
        self.received: dict[int, bytes] = {}
        self.ended: set[int] = set()
        self._writers: dict[int, TextWriter] = {}
        self.exchange()

    def open(self) -> int:
        stream_id = self.client.get_next_available_stream_id()
        self.client.send_headers(stream_id, fields(), end_stream=True)
        self.exchange()
        self.server.responses.send_head(stream_id, HEAD)
        self.sent[stream_id] = self.received[stream_id] = b""
        return stream_id

    def send(self, stream_id: int, data: bytes) -> None:
        self.server.responses.send_data(stream_id, data)
        self.sent[stream_id] += data

    def say(self, stream_id: int, data: bytes) -> None:
        """As send, by the stream's writer."""
        if stream_id not in self._writers:
            self._writers[stream_id] = self.server.responses.text_writer(
                stream_id, PLAIN, partial(self._send_data, stream_id), lambda: True
            )
        self._writers[stream_id](data.decode())
        self.sent[stream_id] += data

    def _send_data(self, stream_id: int, data: bytes) -> None:
        self.server.responses.send_data(stream_id, data)

    def exchange(self, limit_bytes: int = 2**30) -> None:
        """Everything crosses, both ways, until nothing is left to cross."""
        while True:
            to_server = self.client.data_to_send()
            self.server.receive(to_server, 0.0)
            assert not self.server.has_failed
            output = self.server.take_control()
            output += self.server.take_data(limit_bytes).frames
            if not to_server and not output:
                return
            for event in self.client.receive_data(b"".join(output)):
                if isinstance(event, events.DataReceived):
                    self.received[event.stream_id] += event.data
                elif isinstance(event, events.StreamEnded):
                    self.ended.add(event.stream_id)

    def check(self) -> None:
        """Each stream has received what was sent, up to where its windows are shut."""
        ours, theirs = self.server.responses, self.client
        assert ours.window == theirs.inbound_flow_control_window
        for stream_id, stream in ours.streams.items():
            window = theirs.streams[stream_id].inbound_flow_control_window
            assert stream.window == window
            sent, received = self.sent[stream_id], self.received[stream_id]
            assert received == sent[: len(received)]
            assert len(stream.data) == len(sent) - len(received)
            if len(received) < len(sent):
                assert min(window, theirs.inbound_flow_control_window) <= 0

    def open_windows(self) -> None:
        """For more than all steps of one history send."""
        self.client.update_settings({SettingCodes.INITIAL_WINDOW_SIZE: 2**24})
        self.exchange()
        self.client.increment_flow_control_window(2**24)
        self.exchange()

    def finish(self) -> None:
        """All answers come to their end, once the windows let them."""
        live = list(self.server.responses.streams)
        for stream_id, stream in self.server.responses.streams.items():
            if not stream.is_ending:
                self.server.responses.send_end(stream_id)
        self.open_windows()
        assert not self.server.responses.streams
        for stream_id in live:
            assert self.received[stream_id] == self.sent[stream_id]
            assert stream_id in self.ended


STEP_NAMES = (
    "open",
    "send",
    "end",
    "end with trailers",
    "peer resets",
    "we reset",
    "stream window",
    "window",
    "initial window",
    "frame size",
    "table size",
    "priority",
    "say",
)


def take_step(pair: Pair, name: str, number: int = 0, amount: int = 0) -> None:
    """One of STEP_NAMES.

    Args:
        number: which of the live streams; of "window" and the settings, the value.
        amount: bytes.
    """
    live = [stream_id for stream_id, stream in pair.server.responses.streams.items() if not stream.is_ending]
    if name == "open":
        pair.open()
    elif name == "window":
        pair.client.increment_flow_control_window(number)
    elif name == "initial window":
        pair.client.update_settings({SettingCodes.INITIAL_WINDOW_SIZE: number})
    elif name == "frame size":
        pair.client.update_settings({SettingCodes.MAX_FRAME_SIZE: number})
    elif name == "table size":
        pair.client.update_settings({SettingCodes.HEADER_TABLE_SIZE: number})
    elif live:
        stream_id = live[number % len(live)]
        if name == "send":
            pair.send(stream_id, bytes([65 + stream_id % 26]) * amount)
        elif name == "say":
            pair.say(stream_id, bytes([65 + stream_id % 26]) * amount)
        elif name == "end" and pair.server.responses.streams[stream_id].window >= 0:
            # RFC 9113 §6.9.1: an empty frame needs no window; h2's client takes one that is negative for an error
            pair.server.responses.send_end(stream_id)
        elif name == "end with trailers":
            pair.server.responses.send_end(stream_id, ((b"x-sum", b"1"),))
        elif name == "peer resets":
            pair.client.reset_stream(stream_id)
        elif name == "we reset":
            pair.server.reset(stream_id, Http2ErrorCode.CANCEL)
        elif name == "stream window":
            pair.client.increment_flow_control_window(amount, stream_id)
        elif name == "priority":
            pair.client.prioritize(stream_id, weight=5)
