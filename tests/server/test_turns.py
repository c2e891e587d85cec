"""However much comes in one read, others have their turn while it is understood."""

import pytest

from server.wire.limits import ConnectionLimits
from server.wire.messages import ResponseHead
from server.wire.stream import HttpStream
from tests.server.fakes import MemoryServer
from tests.server.raw_http2 import END_STREAM, START, block, data, headers, post, wire

LIMITS = ConnectionLimits()
PIECE = b"x" * 256
NUM_PIECES = 240  # one stream's window holds them
CHUNK = b"%x\r\n%b\r\n" % (len(PIECE), PIECE)
CHUNKED = b"POST /upload HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n" + CHUNK * NUM_PIECES + b"0\r\n\r\n"
FRAMED = START + wire([post(b"/upload"), *[data(PIECE)] * NUM_PIECES, data(b"", END_STREAM)])
NEIGHBOUR = b"GET /neighbour HTTP/1.1\r\nHost: a\r\n\r\n"


class Reader:
    """Answers with a body's length; notes each path as it is answered, and what had come of /upload by then."""

    def __init__(self) -> None:
        self.num_begun = 0
        self.uploads: list[HttpStream] = []
        self.answered: list[tuple[str, int]] = []

    @property
    def num_bytes(self) -> int:
        return sum(stream.num_body_bytes for stream in self.uploads)

    async def __call__(self, stream: HttpStream) -> None:
        self.num_begun += 1
        if stream.request.has_body:
            self.uploads.append(stream)
        body = await stream.read_body(2**24)
        self.answered.append((stream.request.path, self.num_bytes))
        stream.send_head(ResponseHead(200, ()))
        stream.send(b"%d bytes" % len(body))
        stream.end()


def growth(server: MemoryServer, reader: Reader) -> list[int]:
    """What came of the upload in each turn of the loop, until it is answered."""
    grown: list[int] = []
    num_before = 0

    def look() -> None:
        nonlocal num_before
        grown.append(reader.num_bytes - num_before)
        num_before = reader.num_bytes
        if not any(path == "/upload" for path, _ in reader.answered):
            server.loop.call_soon(look)

    server.loop.call_soon(look)
    server.loop.settle()
    return grown


@pytest.mark.parametrize("upload", [CHUNKED, FRAMED], ids=["HTTP/1.1", "HTTP/2"])
def test_body_in_small_pieces_is_understood_turn_by_turn_and_whole(upload: bytes) -> None:
    reader = Reader()
    server = MemoryServer(reader)
    peer, neighbour = server.connect(), server.connect()
    peer.feed(upload)
    neighbour.feed(NEIGHBOUR)
    grown = growth(server, reader)
    assert sum(grown) == NUM_PIECES * len(PIECE)
    seen_late, *rest = filter(None, grown)  # the handler begins a turn after its head has come
    assert seen_late <= 2 * LIMITS.pieces_per_turn * len(PIECE)
    assert max(rest) <= LIMITS.pieces_per_turn * len(PIECE)
    (first, num_bytes), (second, _) = reader.answered
    assert (first, second) == ("/neighbour", "/upload")
    assert num_bytes <= seen_late
    assert not peer.is_reading_paused
    assert b"%d bytes" % (NUM_PIECES * len(PIECE)) in peer.received
    server.close()


def test_nothing_more_is_read_while_pieces_wait_for_their_turn() -> None:
    server = MemoryServer(Reader())
    peer = server.connect()
    was_paused: list[bool] = []
    peer.feed(CHUNKED[:-5])
    server.loop.call_soon(lambda: was_paused.append(peer.is_reading_paused))
    server.loop.settle()
    assert was_paused == [True]
    assert not peer.is_reading_paused
    peer.feed(b"0\r\n\r\n")
    server.loop.settle()
    assert b"%d bytes" % (NUM_PIECES * len(PIECE)) in peer.received
    server.close()


def num_begun_by_turn(num_requests: int, num_bytes: int) -> list[int]:
    """Of requests that come in one read, each with so many bytes in a field."""
    begun: list[int] = []
    reader = Reader()
    server = MemoryServer(reader)
    peer = server.connect()
    head = block((b"x", b"y" * num_bytes))
    peer.feed(START + wire([headers(head, stream=2 * i + 1) for i in range(num_requests)]))

    def look() -> None:
        begun.append(reader.num_begun)
        if server.listener.num_open and reader.num_begun < num_requests:
            server.loop.call_soon(look)

    server.loop.call_soon(look)
    server.loop.settle()
    server.close()
    assert reader.num_begun == num_requests
    return [after - before for before, after in zip([0, *begun], begun, strict=False)]


@pytest.mark.parametrize(("num_bytes", "most"), [(0, 16), (450, 10), (4096, 1)])
def test_requests_of_one_read_are_begun_in_turns_the_fewer_the_larger_their_heads(num_bytes: int, most: int) -> None:
    assert max(num_begun_by_turn(40, num_bytes)) == most


@pytest.mark.parametrize("upload", [CHUNKED, FRAMED], ids=["HTTP/1.1", "HTTP/2"])
def test_peer_that_leaves_while_pieces_wait_leaves_nothing(upload: bytes) -> None:
    server = MemoryServer(Reader())
    peer = server.connect()
    peer.feed(upload)
    server.loop.call_soon(peer.reset)
    server.loop.settle()
    assert server.is_quiet()
    server.close()


def test_large_reads_are_one_a_turn() -> None:
    reader = Reader()
    server = MemoryServer(reader)
    peer = server.connect()
    size, num_reads = LIMITS.bytes_per_turn, 8
    peer.feed(b"POST /upload HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % (size * num_reads))
    for _ in range(num_reads):
        peer.feed(bytes(size))
    grown = growth(server, reader)
    assert max(grown) == size
    assert sum(grown) == size * num_reads
    server.close()


def test_what_follows_a_chunked_body_in_its_read_is_the_next_request() -> None:
    reader = Reader()
    server = MemoryServer(reader)
    peer = server.exchange(CHUNKED + NEIGHBOUR)
    assert [path for path, _ in reader.answered] == ["/upload", "/neighbour"]
    assert peer.received.count(b"HTTP/1.1 200 ") == 2
    server.close()
