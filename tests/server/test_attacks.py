"""Attacks on a connection: the code that ends each, the bytes it makes us hold, the work it costs.

Work is counted, never timed: functions of ours and of the libraries entered for each frame of the attack, frames sent
back, handlers begun. Each attack goes on for ever; how many of its frames are read before the end is part of the table.
"""

import functools
import gc
import itertools
import multiprocessing
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any

import pytest
from h2.errors import ErrorCodes

from server.wire.http2_frames import GOAWAY, PRIORITY
from server.wire.stream import HttpStream
from tests.server.fakes import MemoryServer
from tests.server.raw_http2 import (
    ACK,
    END_HEADERS,
    END_STREAM,
    INITIAL_WINDOW,
    PADDED,
    START,
    TABLE_SIZE,
    Frame,
    Seen,
    block,
    continuation,
    data,
    get,
    headers,
    indexed,
    literal,
    ping,
    post,
    priority,
    rst,
    settings,
    table_size,
    text,
    window_update,
    wire,
)
from tests.server.raw_peer import MemoryPeer, respond

CALM = ErrorCodes.ENHANCE_YOUR_CALM
MOST_HELD_BYTES = 1024 * 1024  # by a connection, over what its setup holds
LARGEST = 16_384
TINY = indexed(2) + indexed(6) + indexed(4) + b"\x01" + text(b"a")  # RFC 7541 §A: a request of six bytes
COUNTED = ("/server/", "/hpack/")

Turns = Iterator[tuple[Frame | bytes, ...]]


def repeated(*frames: Frame) -> Turns:
    return itertools.repeat(frames)


def by_stream(*makers: Callable[[int], Frame], first: int = 5) -> Turns:
    """Each turn on a stream of its own."""
    return (tuple(make(stream) for make in makers) for stream in itertools.count(first, 2))


@dataclass(frozen=True)
class Attack:
    """
    Args:
        turns: the attack, endless; made anew for each test.
        num_turns: that are read before the connection ends, the one that ends it included.
        calls: functions entered for each frame, at most.
        setup: what an honest client may do; it is not counted.
        code: that the connection ends with; None: it goes on, and no more comes of it than before.
        sent: frames sent back for each frame of the attack, at most.
        handlers: begun by the attack, at most.
        reads: the peer reads what we send.
        drains: the connection has been told to end.
    """

    name: str
    turns: Callable[[], Turns]
    num_turns: int
    calls: int
    setup: tuple[Frame, ...] = ()
    code: ErrorCodes | None = CALM
    sent: float = 0
    handlers: int = 0
    reads: bool = True
    drains: bool = False

    def __str__(self) -> str:
        return self.name


@functools.cache
def is_counted(code: CodeType) -> bool:
    """It is a function of ours, or of HTTP/2's libraries."""
    name = code.co_filename
    return "/tests/" not in name and any(part in name for part in COUNTED)


class Victim:
    """A server, one connection to it that attacks, and what it costs.

    Attributes:
        answer: what an attack over HTTP/1.1 was told.
    """

    def __init__(self, reads: bool, start: bytes = START) -> None:
        self.answer = b""
        self.num_handlers = 0
        self.num_calls = 0
        self.num_sent = 0
        self.seen = Seen()
        self.server = MemoryServer(self._handle)
        self.transport = self.server.connect(reads)
        self.feed(start)
        self.begin()

    def begin(self) -> None:
        """Count from here."""
        gc.collect()
        gc.freeze()  # what was there before need not be looked through again, turn after turn
        self._base = tracemalloc.get_traced_memory()[0]
        self.num_handlers = self.num_calls = self.num_sent = 0

    async def _handle(self, stream: HttpStream) -> None:
        self.num_handlers += 1
        await respond(stream)

    @property
    def num_held(self) -> int:
        """Bytes that are held more than at the beginning, less what only waits for the collector (h2's errors do)."""
        gc.collect()
        return tracemalloc.get_traced_memory()[0] - self._base

    @property
    def is_over(self) -> bool:
        return self.transport.has_sent_eof or self.transport.is_lost

    def feed(self, frames: bytes) -> None:
        self.transport.feed(frames)
        if not tracemalloc.is_tracing():  # one measure at a time: each takes as long as all else
            sys.setprofile(self._count)
        self.server.loop.settle()
        sys.setprofile(None)
        self._hear()

    def read(self) -> None:
        """The peer reads at last."""
        self.transport.peer_read()
        self._hear()

    def drain(self) -> None:
        self._draining = self.server.loop.create_task(self.server.listener.drain(60))
        self.server.loop.settle()
        self._hear()

    def _count(self, frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            self.num_calls += is_counted(frame.f_code)

    def _hear(self) -> None:
        """Take what has been sent, and keep of it the connection's end alone."""
        self.transport.writes.clear()
        received = bytes(self.transport.received)
        self.transport.received.clear()
        if received.startswith(b"HTTP/1.1"):
            self.answer = received
            return
        heard = Seen()
        heard._decoder = self.seen._decoder
        heard.add(received)
        self.num_sent += len(heard.frames)
        self.seen.frames += [frame for frame in heard.frames if frame.kind == GOAWAY]


UPLOAD = (post(b"/later"),)  # that nobody reads, on stream 1


def malformed(stream: int) -> Frame:
    return headers(block(without=b"path"), stream=stream)


def overflow(stream: int) -> Frame:
    return window_update(2**31 - 1, stream)


def bomb() -> Turns:
    """One entry of 4 KiB in the table, and then an index of one byte for each repetition."""
    entry = literal(b"x", b"y" * 4063, 0x40)
    return iter([(get(stream=5),), (headers(TINY + entry, stream=7),), (headers(TINY + indexed(62) * 100, stream=9),)])


def large_lists() -> Turns:
    """Just not enough for a bomb, again and again: each is answered 431."""
    entry = literal(b"x", b"y" * 3000, 0x40)
    repeat = TINY + indexed(62) * 20
    return itertools.chain(
        [(headers(TINY + entry, stream=5),)], by_stream(lambda s: headers(repeat, stream=s), first=7)
    )


def unknown_settings() -> Turns:
    """Each frame has 32 that the connection has not had yet."""
    firsts = itertools.count(0x1000, 32)
    return ((settings(*[(code, 1) for code in range(first, first + 32)]),) for first in firsts)


def settings_up_and_down() -> Turns:
    """Each moves the windows of all streams."""
    return ((settings((INITIAL_WINDOW, 1 + turn % 2)),) for turn in itertools.count())


def small_pieces() -> Turns:
    """Bodies in pieces as small as their ratio to overhead allows, 64 a turn, on streams that change."""
    for stream in itertools.count(5, 2):
        yield (post(b"/later", stream),)
        for _ in range(15):
            yield (data(bytes(64), 0, stream),) * 64


def dribbled() -> Turns:
    """A head that comes byte by byte."""
    return ((bytes((octet,)),) for octet in headers(bytes(LARGEST)).encode(0))


def crumbs() -> Turns:
    """Open bodies, each with three cookies of one byte: put together they weigh 12 kB."""
    entry = literal(b"cookie", b"a" * 3900, 0x40)
    head = block(path=b"/read", method=b"POST")
    return itertools.chain(
        [(headers(head + entry + indexed(62) * 2, END_HEADERS, 5),)],
        by_stream(lambda s: headers(head + indexed(62) * 3, END_HEADERS, s), first=7),
    )


def long_paths() -> Turns:
    """Open requests for one path of 4 kB, which is one byte but for the first: most are refused."""
    entry = literal(b":path", b"/read?" + b"a" * 3900, 0x40)
    head = block(without=b"path", method=b"POST")
    return itertools.chain(
        [(headers(head + entry, END_HEADERS, 5),)],
        by_stream(lambda s: headers(head + indexed(62), END_HEADERS, s), first=7),
    )


def large_heads() -> Turns:
    return by_stream(lambda s: headers(block((b"x", b"y" * 15_000), path=b"/later"), stream=s))


def indexed_fields() -> Turns:
    """As many as a request may have, in as few bytes."""
    head = block(path=b"/later") + indexed(15) * 96  # RFC 7541 §A: accept-charset
    return by_stream(lambda s: headers(head, stream=s))


def wait(stream: int) -> Frame:
    return get(b"/wait", stream)


# The connection's ordinary use, to its limit
FULL = tuple(wait(stream) for stream in range(1, 513, 2))
FLOW = ErrorCodes.FLOW_CONTROL_ERROR

ATTACKS = (
    Attack("rapid reset", lambda: by_stream(wait, lambda s: rst(8, s)), 201, 120),
    Attack("made to reset by overflow", lambda: by_stream(wait, overflow), 201, 130, sent=0.5),
    Attack("made to reset by malformed requests", lambda: by_stream(malformed), 201, 230, sent=1),
    Attack(
        "made to reset by DATA behind the end", lambda: by_stream(wait, lambda s: data(b"x", 0, s)), 201, 140, sent=0.5
    ),
    Attack(
        "made to reset by increments of 0", lambda: by_stream(wait, lambda s: window_update(0, s)), 201, 140, sent=0.5
    ),
    Attack(
        "made to reset by short PRIORITY",
        lambda: by_stream(wait, lambda s: Frame(PRIORITY, b"", 0, s)),
        201,
        140,
        sent=0.5,
    ),
    Attack(
        "made to reset by trailers that do not end",
        lambda: by_stream(lambda s: post(b"/read", s), lambda s: headers(b"", END_HEADERS, s)),
        201,
        140,
        sent=0.5,
    ),
    Attack("rapid reset while draining", lambda: by_stream(wait, lambda s: rst(8, s)), 201, 120, drains=True, sent=0.5),
    Attack("made to reset while draining", lambda: by_stream(wait, overflow), 201, 130, drains=True, sent=0.5),
    Attack("CONTINUATION flood", lambda: repeated(continuation(b"", 0)), 9, 60, (headers(TINY, END_STREAM),)),
    Attack("CONTINUATION of much", lambda: repeated(continuation(bytes(LARGEST), 0)), 2, 60, (headers(TINY, 0),)),
    Attack("HPACK bomb", bomb, 3, 600, sent=2, handlers=2),
    Attack(
        "table resized again and again",
        lambda: by_stream(lambda stream: headers(table_size(0) * LARGEST, stream=stream)),
        1,
        120,
        code=ErrorCodes.COMPRESSION_ERROR,
    ),
    Attack("large header lists", large_lists, 100, 500, code=None, sent=2, handlers=1),
    Attack("crumbs of a cookie on open streams", crumbs, 256, 750, code=None, handlers=256),
    Attack("long paths on open streams", long_paths, 256, 750, code=None, sent=1, handlers=179),
    Attack("large heads on open streams", large_heads, 256, 250, code=None, sent=1, handlers=51),
    Attack("indexed fields on open streams", indexed_fields, 256, 1000, code=None, sent=1, handlers=81),
    Attack("head that is dribbled", dribbled, 1000, 50, code=None),
    Attack(
        "tiny requests without a window",
        lambda: by_stream(lambda s: headers(TINY, stream=s)),
        513,
        500,
        (settings((INITIAL_WINDOW, 0)),),
        sent=1,
        handlers=256,
    ),
    Attack(
        "large answers without a window",
        lambda: iter([tuple(get(b"/large", stream) for stream in range(5, 517, 2))]),
        1,
        500,
        (settings((INITIAL_WINDOW, 0)),),
        code=None,
        sent=0.5,
        handlers=60,
    ),
    Attack("more streams than advertised", lambda: by_stream(wait, first=513), 257, 300, FULL, sent=1),
    Attack("PING flood", lambda: repeated(ping()), 101, 100, sent=1),
    Attack("PING flood, unread", lambda: repeated(ping()), 101, 100, sent=1, reads=False),
    Attack("PING ACK flood", lambda: repeated(ping(flags=ACK)), 101, 80),
    Attack("SETTINGS flood", lambda: repeated(settings((INITIAL_WINDOW, 1))), 100, 130, sent=1),
    Attack("SETTINGS flood, unread", lambda: repeated(settings((INITIAL_WINDOW, 1))), 100, 130, sent=1, reads=False),
    Attack("SETTINGS flood on 256 streams", settings_up_and_down, 100, 2000, FULL, sent=1),
    Attack("SETTINGS ACK flood", lambda: repeated(settings(flags=ACK)), 100, 90),
    Attack("unknown settings", unknown_settings, 100, 130, sent=1),
    Attack(
        "encoder table of 4 GiB",
        lambda: by_stream(lambda s: get(stream=s)),
        100,
        400,
        (settings((TABLE_SIZE, 2**32 - 1)),),
        code=None,
        sent=2,
        handlers=100,
    ),
    Attack("empty DATA", lambda: repeated(data()), 1001, 100, UPLOAD),
    Attack("DATA of padding alone", lambda: repeated(data(b"\xff" + bytes(255), PADDED)), 1001, 120, UPLOAD, sent=0.1),
    Attack("PRIORITY flood", lambda: repeated(priority()), 1001, 60),
    Attack("WINDOW_UPDATE flood", lambda: repeated(window_update(1)), 1001, 80),
    Attack("WINDOW_UPDATE flood on a stream", lambda: repeated(window_update(1, 1)), 1001, 100, (wait(1),)),
    Attack("unknown frames", lambda: repeated(Frame(0x77, bytes(LARGEST))), 1001, 60),
    Attack("GOAWAY flood", lambda: repeated(Frame(GOAWAY, bytes(LARGEST))), 1001, 60),
    Attack(
        "window that is dribbled",
        lambda: repeated(window_update(1, 1)),
        1186,
        140,
        (settings((INITIAL_WINDOW, 0)), get(b"/much")),
        sent=1,
    ),
    Attack(
        "uploads that nobody reads",
        lambda: by_stream(lambda s: post(b"/later", s), lambda s: data(bytes(LARGEST), 0, s)),
        33,
        300,
        code=FLOW,
        sent=0.1,
        handlers=33,
    ),
    Attack("uploads in small pieces", small_pieces, 138, 80, code=FLOW, sent=0.1, handlers=9),
    Attack(
        "uploads to answered streams", lambda: repeated(data(bytes(LARGEST))), 200, 120, (post(b"/now"),), None, 0.6
    ),
)


def attack_with(attack: Attack, look: Callable[[Victim], None] = lambda victim: None) -> tuple[Victim, int, int]:
    """Turn after turn, until the connection ends or the turns do.

    Args:
        look: called after each.

    Returns:
        The victim, turns and frames.
    """
    victim = Victim(attack.reads)
    victim.feed(wire(attack.setup))
    if attack.drains:
        victim.drain()
    victim.begin()
    num_turns = num_frames = 0
    for turn in itertools.islice(attack.turns(), attack.num_turns):
        victim.feed(b"".join(frame if isinstance(frame, bytes) else frame.encode(0) for frame in turn))
        look(victim)
        num_turns += 1
        num_frames += len(turn)
        if victim.is_over:
            break
    if not attack.reads:
        victim.read()
    return victim, num_turns, num_frames


@pytest.mark.parametrize("attack", ATTACKS, ids=str)
def test_attack_ends_and_costs_little(attack: Attack) -> None:
    victim, num_turns, num_frames = attack_with(attack)
    assert (victim.seen.goaway, victim.is_over) == (attack.code, attack.code is not None)
    assert num_turns == attack.num_turns
    assert victim.num_calls <= attack.calls * num_frames
    assert victim.num_sent <= attack.sent * num_frames + 4  # the GOAWAY; unread so far, what the connection began with
    assert victim.num_handlers <= attack.handlers
    neighbour = MemoryPeer(victim.server)
    neighbour.send(get().encode(0))
    assert neighbour.seen.statuses == {1: 200}
    victim.server.close()


@pytest.mark.parametrize("chunk", [b"1\r\na\r\n", b"00001;a=b\r\na\r\n"], ids=["bare", "with an extension"])
def test_body_in_tiny_chunks_over_http1_ends_and_costs_little(chunk: bytes) -> None:
    """All of it comes in one read: how much of that is looked at is the table's number, and not the read's size."""
    victim = Victim(reads=True, start=b"POST /read HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n")
    victim.feed(chunk * 200_000)
    assert victim.is_over
    assert victim.answer.startswith(b"HTTP/1.1 400 ")
    assert victim.num_calls <= 6 * 1003 + 600  # of chunks that are read; of their turns, and of the answer
    victim.server.loop.advance(3.0)  # it is lingered for
    assert victim.transport.is_lost
    victim.server.close()


def most_held(name: str) -> int:
    """Bytes of the whole process, after each turn of the attack of this name."""
    attack = next(one for one in ATTACKS if one.name == name)
    held: list[int] = []
    tracemalloc.start()
    victim, *_ = attack_with(attack, lambda victim: held.append(victim.num_held))
    tracemalloc.stop()
    gc.unfreeze()
    victim.server.close()
    return max(held)


@pytest.fixture(scope="module")
def quiet_process() -> Iterator[ProcessPoolExecutor]:
    """Of its own: what other tests have left in this one may allocate while an attack is measured."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        yield pool


@pytest.mark.slow
@pytest.mark.parametrize("attack", ATTACKS, ids=str)
def test_attack_makes_us_hold_little(attack: Attack, quiet_process: ProcessPoolExecutor) -> None:
    assert quiet_process.submit(most_held, attack.name).result() <= MOST_HELD_BYTES
