"""HTTP/2 over the real connection, on a virtual-time loop and a network in memory, with h2 as the peer."""

import asyncio
import contextlib
import itertools

import pytest
from h2.errors import ErrorCodes
from hypothesis import given, settings
from hypothesis import strategies as st

from core.errors import ErrorKind, ServiceError
from server.wire.http2_frames import SETTINGS
from server.wire.limits import ConnectionLimits, FrameLimits, Http2Limits
from server.wire.stream import HttpStream
from tests.server.fakes import MemoryServer
from tests.server.http2_client import INITIAL_WINDOW, POST, Http2Client, fields
from tests.server.memory_connection import STREAMED, Hold, Serve, answer, echo, stream_back
from tests.server.raw_http2 import END_STREAM, data, frame, get, rst, window_update, wire
from tests.server.raw_http2 import post as raw_post
from tests.server.raw_http2 import settings as raw_settings
from tests.server.raw_peer import MemoryPeer, respond


def test_request_is_answered(serve: Serve) -> None:
    client = Http2Client(serve(echo))
    first = client.request(fields(path="/one?query"))
    second = client.request(POST, b"body")
    assert client.responses[first].body == b"/one"
    assert client.responses[first].headers == {
        ":status": "200",
        "content-length": "4",
        "date": "Thu, 01 Jan 1970 00:00:00 GMT",
    }
    assert client.responses[second].body == b"/body"
    assert client.responses[second].is_complete
    assert client.goaways == []


def test_preface_is_recognised_byte_by_byte(serve: Serve) -> None:
    server = serve(echo)
    client = Http2Client(server)
    wire = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(SETTINGS)
    transport = server.exchange(*(wire[i : i + 1] for i in range(len(wire))))
    assert bytes(transport.received[:5]) == bytes(client.transport.received[:5])
    assert not transport.is_lost


@pytest.mark.parametrize("wrong", [b"PRI / HTTP/2.0\r\n", b"PRI * HTTP/2.0\r\n\r\nXX\r\n\r\n"])
def test_wrong_preface_is_a_wrong_request(serve: Serve, wrong: bytes) -> None:
    assert serve(echo).exchange(wrong + b"\r\n").received.startswith(b"HTTP/1.1 400")


def test_all_streams_of_a_step_are_one_write(serve: Serve) -> None:
    hold = Hold()
    server = serve(hold)
    client = Http2Client(server)
    ids = [client.request() for _ in range(16)]
    num_writes = len(client.transport.writes)
    for stream in hold.streams:
        stream.send(b"token")
    server.listener.batch.flush_all()
    assert client.transport.writes[num_writes:] == [b"".join(frame(0, b"token", 0, stream_id) for stream_id in ids)]


def test_streams_take_turns_by_frames(serve: Serve) -> None:
    hold = Hold()
    client = Http2Client(serve(hold, ConnectionLimits(unsent_bytes=2**20)))
    for _ in range(2):
        client.request()
    num_bytes = len(client.transport.received)
    for stream in hold.streams:
        stream.send(b"x" * 30_000)
    client.exchange()
    data = bytes(client.transport.received[num_bytes:])
    order = []
    while data:
        order.append(data[8])
        data = data[9 + int.from_bytes(data[:3], "big") :]
    assert order[:4] == [1, 3, 1, 3]


def test_reset_cancels_its_stream_only(serve: Serve) -> None:
    hold = Hold()
    client = Http2Client(serve(hold))
    first, second = client.request(), client.request()
    client.h2.reset_stream(first, ErrorCodes.CANCEL)
    client.exchange()
    assert hold.told == ["gone"]
    hold.streams[0].send(b"dropped")
    hold.streams[1].send(b"kept")
    hold.end(1)
    client.exchange()
    assert client.responses[second].body == b"kept"
    assert client.responses[second].is_complete
    assert hold.told == ["gone"]


def test_reset_before_the_handler_listens_cancels_it(serve: Serve) -> None:
    server = serve(echo)
    client = Http2Client(server)
    stream_id = client.request(POST, b"x", end=False)
    assert server.listener.num_handlers == 1
    client.h2.reset_stream(stream_id)
    client.exchange()
    assert server.listener.num_handlers == 0


def test_stream_is_blocked_past_its_share_and_unblocked_below_a_quarter_of_it(serve: Serve) -> None:
    hold = Hold()
    client = Http2Client(serve(hold), reads=False, settings={INITIAL_WINDOW: 0})
    stream_id = client.request()
    other = client.request()
    hold.streams[0].send(b"x" * 16_384)
    client.exchange()
    assert hold.told == []
    hold.streams[0].send(b"x")
    client.exchange()
    assert hold.told == ["blocked"]
    client.h2.increment_flow_control_window(12_288, stream_id)
    client.exchange()
    assert hold.told == ["blocked"]
    client.h2.increment_flow_control_window(1, stream_id)
    client.exchange()
    assert hold.told == ["blocked", "unblocked"]
    hold.streams[1].send(b"y")
    client.h2.increment_flow_control_window(1, other)
    client.exchange()
    assert client.responses[other].body == b"y"


def test_share_shrinks_with_the_number_of_streams(serve: Serve) -> None:
    hold = Hold()
    client = Http2Client(serve(hold), settings={INITIAL_WINDOW: 0})
    for _ in range(256):
        client.request()
    for stream in hold.streams:
        stream.send(b"x" * 2049)
    client.exchange()
    assert hold.told == ["blocked"] * 256


def test_transport_that_takes_nothing_blocks_all_streams(serve: Serve) -> None:
    hold = Hold()
    client = Http2Client(serve(hold))
    ids = [client.request() for _ in range(2)]
    client.transport.peer_reads = False
    hold.streams[0].send(b"x" * 20_000)
    client.exchange()
    assert hold.told == ["blocked"] * 2
    hold.streams[1].send(b"y")
    client.exchange()
    client.transport.peer_reads = True
    client.transport.peer_read()
    client.exchange()
    assert hold.told == ["blocked"] * 2 + ["unblocked"] * 2
    assert [client.responses[i].body for i in ids] == [b"x" * 20_000, b"y"]


@pytest.mark.parametrize(("every_s", "num_bytes", "is_enough"), [(29, 15_000, True), (1.5, 1, False), (1, 499, False)])
def test_slow_reader_defers_the_stall_by_500_bytes_per_second(
    serve: Serve, every_s: float, num_bytes: int, is_enough: bool
) -> None:
    hold = Hold()
    client = Http2Client(serve(hold), reads=False, settings={INITIAL_WINDOW: 0})
    stream_id = client.request()
    hold.streams[0].send(b"x" * 60_000)
    client.exchange()
    for _ in range(int(59 / every_s)):
        client.advance(every_s)
        if client.responses[stream_id].reset is None:
            client.h2.increment_flow_control_window(num_bytes, stream_id)
        client.exchange()
    assert client.responses[stream_id].reset is (None if is_enough else ErrorCodes.CANCEL)


def test_reader_of_the_last_bytes_has_read_enough(serve: Serve) -> None:
    hold = Hold()
    client = Http2Client(serve(hold), reads=False, settings={INITIAL_WINDOW: 0})
    stream_id = client.request()
    for _ in range(3):
        hold.streams[0].send(b"x")
        client.exchange()
        client.advance(29)
        client.h2.increment_flow_control_window(1, stream_id)
        client.exchange()
    assert client.responses[stream_id].reset is None
    assert client.responses[stream_id].body == b"xxx"


# Bodies.


def test_body_nobody_reads_shuts_the_window(serve: Serve) -> None:
    started = asyncio.Event()

    async def late(stream: HttpStream) -> None:
        await started.wait()
        answer(stream, 200, b"%d" % len(await stream.read_body(2**20)))

    client = Http2Client(serve(late))
    stream_id = client.request(POST, end=False)
    while size := min(16_384, client.h2.local_flow_control_window(stream_id)):
        client.h2.send_data(stream_id, b"x" * size)
        client.exchange()
    started.set()
    client.exchange()
    assert client.h2.local_flow_control_window(stream_id) == 65_535
    client.h2.end_stream(stream_id)
    client.exchange()
    assert client.responses[stream_id].body == b"65535"


def test_early_answer_ends_the_upload_without_an_error(serve: Serve) -> None:
    async def refuse(stream: HttpStream) -> None:
        answer(stream, 401, b"no")

    client = Http2Client(serve(refuse))
    ids = []
    for _ in range(300):  # more than the budget of resets: these are not the peer's fault
        stream_id = client.begin(POST, b"x" * 1000, end=False)
        client.h2.send_data(stream_id, b"x" * 1000)
        ids.append(stream_id)
        client.exchange()
        client.advance(0.1)
    assert all(client.responses[i].status == 401 for i in ids)
    client.advance(2.1)  # none of them goes on
    assert all(client.responses[i].reset is ErrorCodes.NO_ERROR for i in ids)
    assert client.goaways == []


def test_uploads_that_are_answered_early_count_until_they_end(serve: Serve) -> None:
    """RFC 9113 §5.1.2: streams in either of the half-closed states do."""
    peer = MemoryPeer(serve(respond, ConnectionLimits(http2=Http2Limits(num_streams=2))))
    peer.feed(wire([raw_post(b"/now"), raw_post(b"/now", 3)]))
    peer.feed(get(stream=5).encode(0))
    assert (peer.seen.statuses, peer.seen.resets) == ({1: 200, 3: 200}, {5: ErrorCodes.REFUSED_STREAM})
    peer.feed(wire([data(b"x", END_STREAM), rst(stream=3)]))
    for streams in ((7, 9), (11,)):
        peer.feed(wire([get(stream=stream) for stream in streams]))
    assert peer.seen.statuses == dict.fromkeys((1, 3, 7, 9, 11), 200)
    assert peer.seen.resets == {5: ErrorCodes.REFUSED_STREAM}


def test_upload_that_is_answered_early_may_go_on_to_its_end(serve: Serve) -> None:
    """RFC 9113 §8.1 lets us break it off; but curl and httpx, while they send, would not read the answer."""

    async def refuse(stream: HttpStream) -> None:
        answer(stream, 413, b"no")

    client = Http2Client(serve(refuse))
    stream_id = client.begin(POST, end=False)
    for _ in range(30):  # seven windows
        client.h2.send_data(stream_id, bytes(16_000))
        client.exchange()
    client.h2.end_stream(stream_id)
    client.exchange()
    client.advance(5)
    response = client.responses[stream_id]
    assert (response.status, response.body, response.reset) == (413, b"no", None)
    assert client.goaways == []


def test_upload_that_is_answered_early_has_its_limit(serve: Serve) -> None:
    async def refuse(stream: HttpStream) -> None:
        answer(stream, 413, b"no")

    limits = ConnectionLimits(http2=Http2Limits(early_bytes=32_000))
    client = Http2Client(serve(refuse, limits))
    stream_id = client.request(POST, end=False)
    client.h2.send_data(stream_id, bytes(16_000))
    client.h2.send_data(stream_id, bytes(16_000))
    client.exchange()
    assert client.responses[stream_id].reset is None
    client.h2.send_data(stream_id, b"x")
    client.exchange()
    assert client.responses[stream_id].reset is ErrorCodes.NO_ERROR


def test_upload_that_had_to_wait_for_room_may_go_on_when_it_is_refused(serve: Serve) -> None:
    hold: list[HttpStream] = []

    async def refuse(stream: HttpStream) -> None:
        hold.append(stream)
        try:
            await stream.read_body(100_000)
        except ServiceError:
            answer(stream, 413, b"no")

    client = Http2Client(serve(refuse, ConnectionLimits(buffered_body_bytes=1000)))
    oldest = client.begin(POST, b"x" * 2000, end=False)
    second = client.begin(POST, end=False)
    for _ in range(4):  # nearly all of its window, which is not opened again
        client.h2.send_data(second, bytes(16_000))
    client.exchange()
    hold[1].fail_body(ServiceError(ErrorKind.BODY_TOO_LARGE, "no", "no"))
    client.exchange()
    assert client.responses[second].status == 413
    client.h2.send_data(second, bytes(16_000))
    client.h2.send_data(second, bytes(16_000), end_stream=True)
    client.exchange()
    assert client.responses[second].reset is None
    client.h2.reset_stream(oldest)
    client.exchange()


def test_frames_in_flight_after_an_early_answer_are_forgiven(serve: Serve) -> None:
    async def refuse(stream: HttpStream) -> None:
        answer(stream, 401, b"no")

    client = Http2Client(serve(refuse))
    client.request(POST, end=False)
    client.send(frame(0, b"x" * 100, 0, 1) * 250)
    assert client.goaways == []
    assert client.responses[client.request()].status == 401


async def add_up(stream: HttpStream) -> None:
    stream.send_head(STREAMED)
    stream.send(b"x" * 100_000)
    stream.end(((b"x-sum", b"1"),))


def test_trailers_follow_the_body_of_a_client_that_takes_them(serve: Serve) -> None:
    client = Http2Client(serve(add_up))
    stream_id = client.request([*fields(), ("te", "trailers")])
    response = client.responses[stream_id]
    assert (len(response.body), response.trailers, response.is_complete) == (100_000, {"x-sum": "1"}, True)


@pytest.mark.parametrize("headers", [fields(), [*fields(method="HEAD"), ("te", "trailers")]])
def test_trailers_are_kept_from_everyone_else(serve: Serve, headers: list[tuple[str, str]]) -> None:
    client = Http2Client(serve(add_up))
    response = client.responses[client.request(headers)]
    assert (response.trailers, response.is_complete) == (None, True)


# Any history.


def sizes_within(window: int) -> st.SearchStrategy[tuple[int, list[int]]]:
    """(window, sizes of bodies): a window of one byte is an exchange for each."""
    most = 6000 if window > 1 else 1200  # more than the server sends at once
    return st.tuples(st.just(window), st.lists(st.integers(0, most), min_size=1, max_size=5))


@settings(deadline=None)
@given(
    window_and_sizes=st.sampled_from([1, 100, 65_535]).flatmap(sizes_within),
    cuts=st.lists(st.integers(1, 60), min_size=1, max_size=12),
)
def test_any_cut_of_the_input_and_any_window_gives_the_same_bytes(
    window_and_sizes: tuple[int, list[int]], cuts: list[int]
) -> None:
    window, sizes = window_and_sizes

    limits = ConnectionLimits(http2=Http2Limits(frames=FrameLimits(num_overhead_frames=10**6)))
    with contextlib.closing(MemoryServer(stream_back, limits)) as server:
        client = Http2Client(server, settings={INITIAL_WINDOW: window})
        ids = [client.begin(POST, bytes([65 + n]) * size) for n, size in enumerate(sizes)]
        wire = client.h2.data_to_send()
        for turn in itertools.count():
            cut = cuts[turn % len(cuts)] * 20
            client.transport.feed(wire[:cut])
            server.loop.advance(0.0005)
            client.read()
            wire = wire[cut:] + client.h2.data_to_send()
            if not wire:
                break
        client.advance(1)
        got = [(client.responses[i].status, client.responses[i].body) for i in ids]
        assert got == [(200, bytes([65 + n]) * size) for n, size in enumerate(sizes)]
        assert all(client.responses[i].is_complete for i in ids)


@pytest.mark.parametrize("ending", ["window", "reset"])
def test_answers_that_nobody_reads_keep_further_handlers_from_beginning(ending: str) -> None:
    streams = range(1, 513, 2)
    with contextlib.closing(MemoryServer(respond)) as server:
        peer = MemoryPeer(server)
        peer.feed(raw_settings((INITIAL_WINDOW, 0)).encode(0))
        peer.feed(wire(get(b"/large", stream) for stream in streams))
        assert len(peer.seen.statuses) == 256 * 1024 // 10_000 + 1
        begun = tuple(peer.seen.statuses)
        if ending == "window":
            peer.feed(wire([window_update(2**24), *(window_update(10_000, stream) for stream in streams)]))
            assert peer.seen.statuses == dict.fromkeys(streams, 200)
            assert all(len(peer.seen.body(stream)) == 10_000 for stream in streams)
        else:
            peer.feed(wire(rst(stream=stream) for stream in begun[:10]))
            assert len(peer.seen.statuses) == len(begun) + 10
