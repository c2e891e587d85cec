"""Request bodies that come at once: what is held of them, and that each is complete in the end."""

import contextlib
from collections.abc import Iterator
from functools import partial

import pytest

from server.wire.http2_frames import WINDOW_UPDATE
from server.wire.limits import ConnectionLimits
from server.wire.stream import BodyRoom, HttpStream, IncomingBody
from tests.server.fakes import MemoryServer
from tests.server.memory_connection import answer
from tests.server.raw_http2 import data, post
from tests.server.raw_peer import MemoryPeer, respond

WINDOW = 65_535  # RFC 9113 §6.9.2
ROOM = 256 * 1024
BODY = 400 * 1000
PIECE = 10_000
BODY_S = ConnectionLimits().body_s
TRICKLE = 20_000  # more than body_bytes_per_s asks for in BODY_S


class Uploader(MemoryPeer):
    """Sends bodies as far as the windows let it."""

    def __init__(self, server: MemoryServer) -> None:
        super().__init__(server)
        self.num_sent: dict[int, int] = {}

    def window(self, stream: int) -> int:
        opened = sum(frame.number for frame in self.seen.of(WINDOW_UPDATE, stream))
        return WINDOW + opened - (self.num_sent.get(stream, 0) if stream else sum(self.num_sent.values()))

    def begin(self, *streams: int) -> None:
        for stream in streams:
            self.num_sent[stream] = 0
            self.feed(post(b"/read", stream).encode(0))

    def upload(self, stream: int, most: int = BODY) -> int:
        """So much of the body as may be sent. Returns what has been sent of it."""
        self.look()
        while (size := min(PIECE, most - self.num_sent[stream], self.window(stream), self.window(0))) > 0:
            self.num_sent[stream] += size
            self.feed(data(bytes(size), int(self.num_sent[stream] == BODY), stream).encode(0))
        return self.num_sent[stream]


@pytest.fixture
def server() -> Iterator[MemoryServer]:
    with contextlib.closing(MemoryServer(respond, ConnectionLimits(buffered_body_bytes=ROOM))) as server:
        yield server


STREAMS = tuple(range(1, 21, 2))


def test_bodies_beyond_the_room_wait_for_the_oldest_and_are_all_complete(server: MemoryServer) -> None:
    peer = Uploader(server)
    peer.begin(*STREAMS)
    for stream in STREAMS:
        peer.upload(stream, BODY - 1)
    assert peer.num_sent == {1: BODY - 1} | dict.fromkeys(STREAMS[1:], WINDOW)
    for stream in STREAMS:
        assert peer.upload(stream) == BODY
    assert peer.seen.statuses == dict.fromkeys(STREAMS, 200)
    assert all(peer.seen.body(stream) == b"%d" % BODY for stream in STREAMS)
    assert peer.window(0) > 0


def test_body_that_waits_for_room_is_not_called_slow_until_it_has_some(server: MemoryServer) -> None:
    peer = Uploader(server)
    peer.begin(1, 3)
    peer.upload(1, BODY - 5 * TRICKLE)
    peer.upload(3, BODY - 1)
    for _ in range(5):  # the oldest comes slowly, but fast enough
        peer.advance(BODY_S - 1)
        peer.upload(1, min(BODY - 1, peer.num_sent[1] + TRICKLE))
    assert not peer.seen.statuses
    peer.upload(1)
    assert peer.seen.statuses == {1: 200}
    peer.advance(BODY_S - 1)
    assert peer.upload(3) == BODY
    assert peer.seen.statuses == {1: 200, 3: 200}


@pytest.mark.parametrize("is_part", [False, True], ids=["of the whole", "of a part"])
def test_body_that_is_given_up_makes_room(is_part: bool) -> None:
    room = BodyRoom(ROOM)
    told: list[str] = []
    oldest, waiting = (
        IncomingBody("one", partial(told.append, name), pytest.fail, ConnectionLimits(), 0.0)
        for name in ("oldest", "waiting")
    )
    part = BodyRoom(2 * ROOM, room) if is_part else room
    part.open(oldest)
    room.open(waiting)
    part.add(oldest, ROOM)
    room.add(waiting, 1)
    assert (part.may_grow(oldest), room.may_grow(waiting)) == (True, False)
    part.close(oldest)
    assert told == ["waiting"]
    assert room.may_grow(waiting)
    assert room.num_buffered == 1


def test_whose_bodies_fill_the_room_and_stop_keeps_no_other_client_out() -> None:
    room = BodyRoom(ROOM)
    told: list[str] = []

    def begin(client: str, name: str) -> IncomingBody:
        body = IncomingBody(client, partial(told.append, name), pytest.fail, ConnectionLimits(), 0.0)
        room.open(body)
        return body

    stalled = [begin("greedy", str(i)) for i in range(5)]
    for body in stalled:
        room.add(body, ROOM // 4)
    first, second, last = begin("other", "first"), begin("other", "second"), begin("third", "last")
    assert [room.may_grow(body) for body in (*stalled[:2], first, second, last)] == [True, False, True, False, True]
    room.add(first, ROOM // 3 + 1)  # no more than its part
    assert not room.may_grow(first)
    assert room.may_grow(last)
    room.close(last)
    assert told == ["first"]  # the part is half of it now
    assert room.may_grow(first)
    room.close(first)
    assert told == ["first", "second"]
    room.close(stalled[0])
    assert told == ["first", "second", *"1234"]


def test_client_whose_bodies_stop_does_not_stop_anothers_upload() -> None:
    """By HTTP/1.1 and HTTP/2."""

    async def read(stream: HttpStream) -> None:
        client = (stream.request.header(b"x-client") or b"").decode()
        answer(stream, 200, b"%d" % len(await stream.read_body(2**20, client)))

    head = b"POST / HTTP/1.1\r\nHost: a\r\nX-Client: %s\r\nContent-Length: %d\r\n\r\n"
    with contextlib.closing(MemoryServer(read, buffered_body_bytes=ROOM)) as server:
        for _ in range(3):
            server.connect().feed(head % (b"greedy", BODY) + bytes(ROOM // 2))
        server.loop.settle()
        classic = server.connect()
        classic.feed(head % (b"other", BODY // 4) + bytes(10))
        server.loop.settle()
        assert not classic.is_reading_paused
        classic.feed(bytes(BODY // 4 - 10))
        server.loop.settle()
        assert b"%d" % (BODY // 4) in bytes(classic.received)
        peer = Uploader(server)
        peer.num_sent[1] = 0
        peer.feed(post(b"/", 1).encode(0))  # of a third client: it names none
        assert peer.upload(1, ROOM // 3) == ROOM // 3 > WINDOW


def test_full_server_takes_its_oldest_body_alone_whatever_connection_it_is_on() -> None:
    with contextlib.closing(MemoryServer(respond, buffered_body_bytes=ROOM)) as server:
        first, second = Uploader(server), Uploader(server)
        first.begin(1)
        second.begin(*STREAMS)
        first.upload(1, BODY - 5 * TRICKLE)
        num_taken = sum(second.upload(stream, BODY - 1) for stream in STREAMS)
        assert num_taken <= ConnectionLimits().http2.window_bytes
        classic = server.connect()
        classic.feed(b"POST /read HTTP/1.1\r\nHost: a\r\nContent-Length: 30000\r\n\r\n" + bytes(10))
        server.loop.settle()
        assert classic.is_reading_paused
        for _ in range(4):
            server.loop.advance(BODY_S - 1)
            first.upload(1, first.num_sent[1] + TRICKLE)
        assert first.upload(1) == BODY
        for stream in STREAMS:
            assert second.upload(stream) == BODY
        assert not classic.is_reading_paused
        classic.feed(bytes(29990))
        server.loop.settle()
        assert b"30000" in bytes(classic.received)
        assert second.seen.statuses == dict.fromkeys(STREAMS, 200)
