"""DATA framed by hand, against h2 as the peer: what it receives is what was sent, and its windows agree with ours."""

import pytest
from h2 import events
from h2.config import H2Configuration
from h2.connection import H2Connection
from hypothesis import given, settings
from hypothesis import strategies as st

from server.connection_limits import Http2Limits
from server.http1_prefilter import HeadLimits
from server.http2 import Http2Protocol
from server.http2_data import OutgoingBody, h2_is_as_known, next_frame
from server.messages import HttpRequest, ResponseHead
from server.response_fields import ResponseError
from tests.server.http2_client import fields
from tests.server.http2_pair import HEAD, Pair, take_step

STEPS = st.one_of(
    st.tuples(st.just("open")),
    st.tuples(st.just("send"), st.integers(0, 7), st.integers(0, 40_000)),
    st.tuples(st.just("end"), st.integers(0, 7)),
    st.tuples(st.just("end with trailers"), st.integers(0, 7)),
    st.tuples(st.just("peer resets"), st.integers(0, 7)),
    st.tuples(st.just("we reset"), st.integers(0, 7)),
    st.tuples(st.just("stream window"), st.integers(0, 7), st.integers(1, 50_000)),
    st.tuples(st.just("window"), st.integers(1, 50_000)),
    st.tuples(st.just("initial window"), st.sampled_from([0, 1, 1000, 65_535, 100_000])),
    st.tuples(st.just("frame size"), st.sampled_from([16_384, 20_000, 2**24 - 1])),
    st.tuples(st.just("table size"), st.sampled_from([0, 100, 4096, 2**32 - 1])),
    st.tuples(st.just("priority"), st.integers(0, 7)),
)


@settings(deadline=None, max_examples=200)
@given(steps=st.lists(STEPS, max_size=40), by_hand=st.booleans(), limit_bytes=st.sampled_from([1, 20_000, 2**30]))
def test_peer_receives_what_was_sent_and_its_windows_agree(
    steps: list[tuple[str, int, int]], by_hand: bool, limit_bytes: int
) -> None:
    pair = Pair(by_hand)
    for step in steps:
        take_step(pair, *step)
        pair.exchange(limit_bytes)
        pair.check()
    pair.finish()


def test_no_stream_waits_for_another_to_end() -> None:
    pair = Pair()
    pair.open_windows()
    ids = [pair.open() for _ in range(5)]
    pair.exchange()
    for stream_id in ids:
        pair.send(stream_id, b"x" * 50_000)
    sent = [stream_id for _ in range(5) for stream_id in pair.server.take_data(20_000).sent]
    assert sent == [*ids, *ids]


def test_h2_here_is_the_h2_that_is_known() -> None:
    assert h2_is_as_known()


def test_h2_that_does_more_than_the_windows_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    send_data = H2Connection.send_data

    def counting(self: H2Connection, *arguments: object) -> None:
        send_data(self, *arguments)  # type: ignore[arg-type]
        self.max_outbound_frame_size += 1

    monkeypatch.setattr(H2Connection, "send_data", counting)
    assert not h2_is_as_known.__wrapped__()


@pytest.mark.parametrize("size", [1, 255, 16_384])
def test_frame_by_hand_is_h2s_frame(size: int) -> None:
    frames = []
    for by_hand in (True, False):
        pair = Pair()
        stream_id = pair.open()
        pair.exchange()
        stream = pair.server._h2.streams[stream_id]
        body = OutgoingBody()
        body.append(b"x" * size)
        frames.append(next_frame(pair.server._h2, stream, body, by_hand))
        assert stream.outbound_flow_control_window == 65_535 - size
        assert next_frame(pair.server._h2, stream, body, by_hand) == b""
    assert frames[0] == frames[1]
    assert len(frames[0]) == 9 + size


@given(st.lists(st.binary(max_size=20), max_size=10), st.lists(st.integers(0, 30), max_size=20))
def test_body_is_taken_in_any_pieces(chunks: list[bytes], sizes: list[int]) -> None:
    body = OutgoingBody()
    for chunk in chunks:
        body.append(chunk)
    whole = b"".join(chunks)
    for size in sizes:
        taken = body.take(size)
        assert taken == whole[:size]
        whole = whole[size:]
        assert body.num_unsent == len(whole)


# What the application may not send.


def test_wrong_answers_are_ours_to_find() -> None:
    pair = Pair()
    stream_id = pair.client.get_next_available_stream_id()
    pair.client.send_headers(stream_id, fields(), end_stream=True)
    (request,) = pair.server.receive(pair.client.data_to_send(), 0.0)
    assert isinstance(request, HttpRequest)
    server = pair.server
    with pytest.raises(ResponseError):
        server.send_data(stream_id, b"x")
    with pytest.raises(ResponseError):
        server.send_end(stream_id)
    for head in (
        ResponseHead(101, ()),
        ResponseHead(200, ((b"Upper", b"x"),)),
        ResponseHead(200, ((b"x", b"a\r\nb"),)),
        ResponseHead(200, ((b"transfer-encoding", b"chunked"),)),
        ResponseHead(200, ((b"content-length", b"1"), (b"content-length", b"1"))),
    ):
        with pytest.raises(ResponseError):
            server.send_head(stream_id, head)
    server.send_head(stream_id, ResponseHead(200, ((b"content-length", b"2"),)))
    with pytest.raises(ResponseError):
        server.send_head(stream_id, HEAD)
    server.send_data(stream_id, b"x")
    with pytest.raises(ResponseError):
        server.send_end(stream_id)
    with pytest.raises(ResponseError):
        server.send_data(stream_id, b"xy")


@pytest.mark.parametrize("trailers", [((b"content-length", b"1"),), ((b":status", b"200"),), ((b"X", b"1"),)])
def test_wrong_trailers_are_ours_to_find(trailers: tuple[tuple[bytes, bytes], ...]) -> None:
    pair = Pair()
    stream_id = pair.open()
    with pytest.raises(ResponseError):
        pair.server.send_end(stream_id, trailers)


def test_fields_of_the_connection_are_left_out_and_ids_not_indexed() -> None:
    pair = Pair()
    stream_id = pair.client.get_next_available_stream_id()
    pair.client.send_headers(stream_id, fields(), end_stream=True)
    pair.server.receive(pair.client.data_to_send(), 0.0)
    headers = ((b"connection", b"close"), (b"x-request-id", b"1"), (b"x", b"y"))
    pair.server.send_head(stream_id, ResponseHead(200, headers))
    received = pair.client.receive_data(b"".join(pair.server.take_control()))
    response = next(event for event in received if isinstance(event, events.ResponseReceived))
    assert list(response.headers or ()) == [
        (b":status", b"200"),
        (b"date", b"now"),
        (b"x-request-id", b"1"),
        (b"x", b"y"),
    ]
    table = [name for name, _ in pair.server._h2.encoder.header_table.dynamic_entries]
    assert b"x" in table
    assert b"x-request-id" not in table


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
            if isinstance(event, HttpRequest) and event.stream_id in protocol._streams:
                protocol.send_head(event.stream_id, HEAD)
                protocol.send_data(event.stream_id, b"answer")
                protocol.send_end(event.stream_id)
        protocol.take_control()
        protocol.take_data(2**20)
