"""Responses against h2 as the peer: what it receives is what was sent, and its windows agree with ours."""

from functools import partial

import pytest
from h2 import events
from h2.errors import ErrorCodes
from h2.settings import SettingCodes
from hypothesis import given, settings
from hypothesis import strategies as st

from server.wire.http2_frames import FRAME_HEADER, HEADER_BYTES
from server.wire.http2_streams import PIECE_BYTES, PIECES_BYTES, Http2Stream
from server.wire.messages import HttpRequest, ResponseError, ResponseHead
from tests.server.http2_client import fields
from tests.server.http2_pair import HEAD, PLAIN, Pair, take_step

STEPS = st.one_of(
    st.tuples(st.just("open")),
    st.tuples(st.just("send"), st.integers(0, 7), st.integers(0, 40_000)),
    st.tuples(st.just("say"), st.integers(0, 7), st.integers(1, PIECE_BYTES + 1)),
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
@given(
    steps=st.lists(STEPS, min_size=10, max_size=40),
    limit_bytes=st.sampled_from([1, 20_000, 2**30]),
)
def test_peer_receives_what_was_sent_and_its_windows_agree(steps: list[tuple[str, int, int]], limit_bytes: int) -> None:
    """What is said waits for the step behind it."""
    pair = Pair()
    for _ in range(3):
        pair.open()
    for step in steps:
        take_step(pair, *step)
        if step[0] != "say":
            pair.exchange(limit_bytes)
            pair.check()
    pair.finish()


def ids_of(streams: list[Http2Stream]) -> list[int]:
    return [stream.id for stream in streams]


def stream_ids(frames: list[bytes]) -> list[int]:
    """Whose they are, in order."""
    data, found = b"".join(frames), []
    while data:
        high, low, _, _, stream_id = FRAME_HEADER.unpack_from(data)
        found.append(stream_id)
        data = data[HEADER_BYTES + (high << 16 | low) :]
    return found


def test_pieces_go_with_one_frame_each_in_the_order_of_their_streams() -> None:
    pair = Pair()
    ids = [pair.open() for _ in range(3)]
    pair.exchange()
    for stream_id in (ids[2], ids[0], ids[1]):
        pair.say(stream_id, b"x" * 10)
    output = pair.server.take_data(2**30)
    assert (stream_ids(output.frames), output.num_bytes, output.has_more) == ([ids[2], ids[0], ids[1]], 3 * 19, False)
    assert not pair.server.take_data(2**30).frames


def test_piece_that_the_connection_has_no_window_for_keeps_its_turn() -> None:
    pair = Pair()
    first, second, third = (pair.open() for _ in range(3))
    pair.exchange()
    pair.server.responses.window = 1000
    for stream_id in (first, second, third):
        pair.say(stream_id, b"x" * 600)
    output = pair.server.take_data(2**30)
    assert (stream_ids(output.frames), ids_of(output.held)) == ([first, second], [third, second])
    pair.say(first, b"y" * 10)
    pair.server.responses.window = 600
    assert stream_ids(pair.server.take_data(2**30).frames) == [third]


def test_pieces_that_are_not_taken_yet_are_none_of_a_stream_that_is_reset() -> None:
    pair = Pair()
    ids = [pair.open() for _ in range(3)]
    pair.exchange()
    window = pair.server.responses.window
    for stream_id in (*ids, ids[1]):
        pair.say(stream_id, b"x" * 10)
    pair.server.reset(ids[1], ErrorCodes.CANCEL)
    pair.say(ids[2], b"y" * 7)
    output = pair.server.take_data(2**30)
    assert stream_ids(output.frames) == [ids[0], ids[2], ids[2]]
    assert output.num_bytes == 10 + 10 + 7 + 3 * 9
    assert pair.server.responses.window == window - 27


def test_no_piece_goes_before_others_whose_turn_it_is_nor_beyond_what_one_write_takes() -> None:
    pair = Pair()
    pair.open_windows()
    first, second, third = (pair.open() for _ in range(3))
    pair.exchange()
    pair.send(first, b"x" * 10)
    pair.send(second, b"y" * 10)
    assert stream_ids(pair.server.take_data(1).frames) == [first]
    pair.say(third, b"z" * 10)
    assert stream_ids(pair.server.take_data(2**30).frames) == [second, third]
    for _ in range(PIECES_BYTES // PIECE_BYTES):
        pair.say(first, b"x" * PIECE_BYTES)
    pair.say(second, b"y")
    assert pair.server.responses.num_unsent(second) == 1
    assert stream_ids(pair.server.take_data(2**30).frames)[-2:] == [first, second]


def test_no_piece_is_framed_while_the_transport_takes_nothing() -> None:
    pair = Pair()
    stream_id = pair.open()
    pair.exchange()
    write = pair.server.responses.text_writer(stream_id, PLAIN, partial(pair.send, stream_id), lambda: False)
    write("12345")
    assert pair.server.responses.num_unsent(stream_id) == 5


def test_writer_leaves_to_send_what_is_no_piece() -> None:
    pair = Pair()
    ids = [pair.open() for _ in range(3)]
    counted = pair.client.get_next_available_stream_id()
    pair.client.send_headers(counted, fields(), end_stream=True)
    pair.exchange()
    pair.server.responses.send_head(counted, ResponseHead(200, ((b"content-length", b"9"),)))
    left: list[bytes] = []
    plain, ended, reset, of_counted = (
        pair.server.responses.text_writer(stream_id, PLAIN, left.append, lambda: True) for stream_id in (*ids, counted)
    )
    pair.server.responses.send_end(ids[1])
    pair.server.reset(ids[2], ErrorCodes.CANCEL)
    for write, text in ((ended, "1"), (reset, "2"), (of_counted, "3"), (plain, "4"), (plain, "5")):
        write(text)
    plain("6" * (PIECE_BYTES + 1))
    assert left == [b"1", b"2", b"3", b"6" * (PIECE_BYTES + 1)]


def test_piece_that_its_stream_has_no_window_for_waits_alone() -> None:
    pair = Pair()
    shut, open_ = pair.open(), pair.open()
    pair.exchange()
    pair.server.responses.streams[shut].window = 9
    pair.say(shut, b"x" * 10)
    pair.say(open_, b"y" * 10)
    output = pair.server.take_data(2**30)
    assert (stream_ids(output.frames), ids_of(output.held)) == (
        [open_, shut],
        [shut],
    )  # of the piece went what had room
    assert pair.server.responses.num_unsent(shut) == 1
    output = pair.server.take_data(2**30)
    assert (output.sent, output.held) == ([], [])  # until its window opens


def test_piece_goes_before_the_acknowledgement_of_a_smaller_window() -> None:
    """RFC 9113 §6.9.2: from then on the peer holds us to it."""
    pair = Pair()
    stream_id = pair.open()
    pair.exchange()
    pair.say(stream_id, b"x")
    pair.client.update_settings({SettingCodes.INITIAL_WINDOW_SIZE: 0})
    pair.exchange()
    pair.check()
    pair.finish()


def test_no_stream_waits_for_another_to_end() -> None:
    pair = Pair()
    pair.open_windows()
    ids = [pair.open() for _ in range(5)]
    pair.exchange()
    for stream_id in ids:
        pair.send(stream_id, b"x" * 50_000)
    sent = [stream.id for _ in range(5) for stream in pair.server.take_data(20_000).sent]
    assert sent == [*ids, *ids]


# What the application may not send.


def test_wrong_answers_are_ours_to_find() -> None:
    pair = Pair()
    stream_id = pair.client.get_next_available_stream_id()
    pair.client.send_headers(stream_id, fields(), end_stream=True)
    (request,) = pair.server.receive(pair.client.data_to_send(), 0.0)
    assert isinstance(request, HttpRequest)
    server = pair.server
    with pytest.raises(ResponseError):
        server.responses.send_data(stream_id, b"x")
    with pytest.raises(ResponseError):
        server.responses.send_end(stream_id)
    for head in (
        ResponseHead(101, ()),
        ResponseHead(200, ((b"Upper", b"x"),)),
        ResponseHead(200, ((b"x", b"a\r\nb"),)),
        ResponseHead(200, ((b"transfer-encoding", b"chunked"),)),
        ResponseHead(200, ((b"connection", b"close"),)),
        ResponseHead(200, ((b"content-length", b"1"), (b"content-length", b"1"))),
    ):
        with pytest.raises(ResponseError):
            server.responses.send_head(stream_id, head)
    server.responses.send_head(stream_id, ResponseHead(200, ((b"content-length", b"2"),)))
    with pytest.raises(ResponseError):
        server.responses.send_head(stream_id, HEAD)
    server.responses.send_data(stream_id, b"x")
    with pytest.raises(ResponseError):
        server.responses.send_end(stream_id)
    with pytest.raises(ResponseError):
        server.responses.send_data(stream_id, b"xy")


@pytest.mark.parametrize("trailers", [((b"content-length", b"1"),), ((b":status", b"200"),), ((b"X", b"1"),)])
def test_wrong_trailers_are_ours_to_find(trailers: tuple[tuple[bytes, bytes], ...]) -> None:
    pair = Pair()
    stream_id = pair.open()
    with pytest.raises(ResponseError):
        pair.server.responses.send_end(stream_id, trailers)


def test_date_is_added_and_ids_are_not_indexed() -> None:
    pair = Pair()
    stream_id = pair.client.get_next_available_stream_id()
    pair.client.send_headers(stream_id, fields(), end_stream=True)
    pair.server.receive(pair.client.data_to_send(), 0.0)
    headers = ((b"x-request-id", b"1"), (b"x", b"y"))
    pair.server.responses.send_head(stream_id, ResponseHead(200, headers))
    received = pair.client.receive_data(b"".join(pair.server.take_control()))
    response = next(event for event in received if isinstance(event, events.ResponseReceived))
    assert list(response.headers or ()) == [
        (b":status", b"200"),
        (b"date", b"now"),
        (b"x-request-id", b"1"),
        (b"x", b"y"),
    ]
    table = [name for name, _ in pair.server.responses.encoder.table.dynamic_entries]
    assert b"x" in table
    assert b"x-request-id" not in table
