"""Frames, valid and mutated, to our protocol and to h2's server: they take, reset and end alike, or as written here."""

from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.exceptions import ProtocolError
from hypothesis import given, settings
from hypothesis import strategies as st

from server.wire.http2 import Http2Protocol
from server.wire.http2_frames import CONTINUATION, DATA, HEADERS, PRIORITY, PUSH_PROMISE, RST_STREAM, WINDOW_UPDATE
from server.wire.limits import FrameLimits, HeadLimits, Http2Limits, Rate
from tests.server.raw_http2 import (
    ACK,
    END_HEADERS,
    END_STREAM,
    INITIAL_WINDOW,
    MAX_FRAME,
    PADDED,
    START,
    Frame,
    Seen,
    block,
    continuation,
    data,
    get,
    headers,
    literal,
    ping,
    post,
    priority,
    rst,
    table_size,
    window_update,
)
from tests.server.raw_http2 import settings as settings_frame

LIMITS = Http2Limits(frames=FrameLimits(resets=Rate(1000, 0), pings=Rate(1000, 0), settings=Rate(1000, 0)))
STREAMS = st.sampled_from([1, 1, 1, 3, 3, 5, 2])
# What is not here: GOAWAY, after which h2 hears nothing more.
FRAMES = st.one_of(
    st.builds(get, stream=STREAMS),
    st.builds(post, stream=STREAMS),
    st.builds(data, st.sampled_from([b"", b"x", bytes(16_384)]), st.sampled_from([0, END_STREAM]), STREAMS),
    st.builds(data, st.sampled_from([b"\0", b"\1xy", b"\3xy", b"\2xy"]), st.just(PADDED), STREAMS),
    st.builds(rst, stream=STREAMS),
    st.builds(window_update, st.sampled_from([0, 1, 2**31 - 1]), st.sampled_from([0, 1, 3, 5, 2])),
    st.builds(priority, st.sampled_from([0, 1, 3]), STREAMS),
    st.builds(ping, flags=st.sampled_from([0, ACK])),
    st.builds(
        settings_frame,
        st.tuples(
            st.sampled_from([1, 2, INITIAL_WINDOW, MAX_FRAME, 6, 99]),
            st.sampled_from([0, 1, 2, 16_384, 2**31 - 1, 2**31]),
        ),
    ),
    st.builds(settings_frame, flags=st.just(ACK)),
    st.builds(
        headers,
        st.sampled_from(
            [
                block(),
                block(without=b"path"),
                block((b"content-length", b"1"), method=b"POST"),
                block((b"X", b"1")),
                literal(b"x", b"1", 0x40),
                table_size(9) + block(),
                b"\xff",
                b"",
            ]
        ),
        st.sampled_from([END_HEADERS, END_HEADERS | END_STREAM, END_STREAM, 0]),
        STREAMS,
    ),
    st.builds(continuation, st.sampled_from([b"", block()]), st.sampled_from([0, END_HEADERS]), STREAMS),
    st.builds(Frame, st.integers(0, 11), st.binary(max_size=9), st.sampled_from([0, 1, 4, 5, 8, 0x20]), STREAMS),
)


TAKEN = "taken"
PROTOCOL, SIZE, CLOSED, COMPRESSION = (
    f"ends {code}" for code in ("PROTOCOL_ERROR", "FRAME_SIZE_ERROR", "STREAM_CLOSED", "COMPRESSION_ERROR")
)
RESET, RESET_SIZE, RESET_CLOSED = (f"taken {code}" for code in ("PROTOCOL_ERROR", "FRAME_SIZE_ERROR", "STREAM_CLOSED"))
ALTSVC, BLOCKED = 10, 11  # types that h2 knows
# What we do, what h2 does, and the frames on which both are meant.
DIFFERENCES = {
    # RFC 9113 §5.4.2, §8.1.1: the stream alone is at fault
    (RESET, PROTOCOL): {DATA, HEADERS, CONTINUATION, PRIORITY, WINDOW_UPDATE},
    (RESET_SIZE, SIZE): {PRIORITY},
    # §5.1, §5.4.2: what comes on a stream that has been reset is ignored, and not reset again
    (TAKEN, RESET_CLOSED): {DATA, HEADERS, CONTINUATION},
    (TAKEN, PROTOCOL): {HEADERS, CONTINUATION, PRIORITY, WINDOW_UPDATE},
    (TAKEN, SIZE): {PRIORITY, ALTSVC, BLOCKED},  # §5.5: types that we do not know are ignored, too
    # stricter: §6.4, an idle stream cannot be reset; §8.1.1, a declared length binds; §8.4, a client cannot push
    (PROTOCOL, TAKEN): {RST_STREAM, PUSH_PROMISE},
    (RESET, TAKEN): {HEADERS, CONTINUATION},
    # other codes: §4.3; a block that is interrupted, or not begun (§6.10), before what is wrong with the frame itself
    (COMPRESSION, PROTOCOL): {HEADERS, CONTINUATION},
    (PROTOCOL, CLOSED): {CONTINUATION},
    (PROTOCOL, RESET_CLOSED): {CONTINUATION},
    (PROTOCOL, SIZE): {DATA, PRIORITY, RST_STREAM, PUSH_PROMISE, WINDOW_UPDATE, ALTSVC, BLOCKED},
}


class Theirs:
    def __init__(self) -> None:
        self.connection = H2Connection(H2Configuration(client_side=False))
        self.connection.initiate_connection()
        self.connection.increment_flow_control_window(LIMITS.window_bytes - 65_535)
        self.seen = Seen()

    def hear(self, said: bytes) -> str:
        """What comes of it."""
        num_seen = len(self.seen.frames)
        try:
            self.connection.receive_data(said)
        except ProtocolError as error:
            return f"ends {error.error_code.name}"
        self.seen.add(self.connection.data_to_send())
        return outcome(self.seen, num_seen)


class Ours:
    def __init__(self) -> None:
        self.protocol = Http2Protocol(HeadLimits(), LIMITS, lambda: b"now")
        self.seen = Seen()

    def hear(self, said: bytes) -> str:
        num_seen = len(self.seen.frames)
        self.protocol.receive(said, 0.0)
        if self.protocol.has_failed:
            return f"ends {self.protocol.failed_with.name}"
        self.seen.add(b"".join(self.protocol.take_control()))
        return outcome(self.seen, num_seen)


def outcome(seen: Seen, num_before: int) -> str:
    new = Seen(seen.frames[num_before:])
    return " ".join(["taken", *(code.name for code in new.resets.values())])


@settings(deadline=None, max_examples=400)
@given(st.lists(FRAMES, max_size=12))
def test_h2_takes_and_refuses_what_we_do(frames: list[Frame]) -> None:
    ours, theirs = Ours(), Theirs()
    assert ours.hear(START) == theirs.hear(START)
    for frame in frames:
        said = frame.encode(0)
        verdicts = ours.hear(said), theirs.hear(said)
        if verdicts[0] != verdicts[1]:
            assert frame.kind in DIFFERENCES.get(verdicts, ()), (frame, verdicts)
            return
        if verdicts[0].startswith("ends"):
            return
