"""The protocol's reading side: whatever comes, it answers with events or a GOAWAY."""

from h2.config import H2Configuration
from h2.connection import H2Connection
from hypothesis import given, settings
from hypothesis import strategies as st

from server.wire.http2 import Http2Protocol, read_request
from server.wire.limits import HeadLimits, Http2Limits
from server.wire.messages import HttpRequest
from tests.server.http2_client import fields
from tests.server.http2_pair import HEAD


@settings(deadline=None)
@given(st.binary(max_size=300), st.lists(st.integers(1, 30), max_size=10))
def test_no_input_is_more_than_a_refusal(data: bytes, cuts: list[int]) -> None:
    """Arbitrary bytes behind a good beginning: events or a GOAWAY, nothing else."""
    client = H2Connection(H2Configuration(client_side=True))
    client.initiate_connection()
    client.send_headers(1, fields(method="POST"))
    protocol = Http2Protocol(HeadLimits(), Http2Limits(), lambda: b"now")
    protocol.receive(client.data_to_send(), 0.0)
    for cut in [*cuts, len(data)]:
        protocol.receive(data[:cut], 0.0)
        data = data[cut:]


FRAMES = st.builds(
    lambda kind, flags, stream_id, payload: (
        len(payload).to_bytes(3, "big") + bytes((kind, flags)) + stream_id.to_bytes(4, "big") + payload
    ),
    st.integers(0, 10),
    st.integers(0, 255),
    st.integers(0, 6),
    st.one_of(st.binary(max_size=20), st.just(b"\x82\x86\x84\x41\x01a"), st.just(bytes(4)), st.just(bytes(8))),
)


@settings(deadline=None, max_examples=300)
@given(st.lists(FRAMES, max_size=20))
def test_no_frames_are_more_than_a_refusal(frames: list[bytes]) -> None:
    client = H2Connection(H2Configuration(client_side=True))
    client.initiate_connection()
    client.send_headers(1, fields(method="POST"))
    protocol = Http2Protocol(HeadLimits(), Http2Limits(), lambda: b"now")
    protocol.receive(client.data_to_send(), 0.0)
    for frame in frames:
        for event in protocol.receive(frame, 0.0):
            if isinstance(event, HttpRequest) and event.stream_id in protocol.responses.streams:
                protocol.responses.send_head(event.stream_id, HEAD)
                protocol.responses.send_data(event.stream_id, b"answer")
                protocol.responses.send_end(event.stream_id)
        protocol.take_control()
        protocol.take_data(2**20)


def query_of(path: str) -> str:
    pairs = [(name.encode(), value.encode()) for name, value in fields(path=path)]
    return read_request(1, pairs, False, HeadLimits()).query


def test_a_path_that_is_said_again_takes_no_more_room_until_others_have_come() -> None:
    first = query_of("/read?asked")
    assert query_of("/read?asked") is first
    for number in range(100):
        query_of(f"/read?{number}")
    assert query_of("/read?asked") is not first
