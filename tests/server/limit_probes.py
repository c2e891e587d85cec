"""Probes for test_limits: each does so much of something to a server in memory, and tells what comes of it."""

import contextlib
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from core.errors import ServiceError
from server.config import ServerConfig
from server.wire.http2_frames import GOAWAY
from server.wire.limits import ConnectionLimits, FrameLimits, Http2Limits, Rate
from tests.server.fakes import MemoryServer
from tests.server.http2_client import Http2Client
from tests.server.http2_client import fields as pseudo_fields
from tests.server.memory_connection import GET, Hold, answer, echo, responses
from tests.server.raw_http2 import (
    END_STREAM,
    INITIAL_WINDOW,
    MAX_STREAMS,
    Frame,
    block,
    continuation,
    data,
    get,
    headers,
    indexed,
    literal,
    ping,
    post,
    rst,
    settings,
    wire,
)
from tests.server.raw_peer import MemoryPeer, respond
from tests.server.simulated_server import LIMITS, SimulatedServer, completion, request

KiB, MiB = 1024, 1024 * 1024
CONNECTION = ConnectionLimits()
HTTP2 = Http2Limits()
FRAMES = FrameLimits()
PASSES = "passes"
CALM = "GOAWAY ENHANCE_YOUR_CALM"


@contextlib.contextmanager
def connected(limits: ConnectionLimits | None = None, handler: Any = respond, reads: bool = True) -> Any:
    """A client of a server, of which nothing may be left in the end."""
    server = MemoryServer(handler, limits)
    yield MemoryPeer(server, reads)
    server.close()


def outcome_of(frames: list[Frame], stream: int = 1) -> str:
    with connected() as peer:
        peer.feed(wire(frames))
        return str(peer.outcome(stream))


# Each takes an amount, and tells what comes of it.


def frame_of(num_bytes: int) -> str:
    return outcome_of([Frame(0x77, bytes(num_bytes))])


def streams_at_once(num_streams: int) -> str:
    """What the last of them gets."""
    streams = range(1, 2 * num_streams, 2)
    return outcome_of([get(b"/wait", stream) for stream in streams], streams[-1])


def streams_insisted_on(num_streams: int) -> str:
    """What becomes of the first of them."""
    return outcome_of([get(b"/wait", stream) for stream in range(1, 2 * num_streams, 2)])


def block_of(num_bytes: int, path: bytes) -> bytes:
    """Of four pseudo-fields and one more."""
    return next(one for n in range(num_bytes, 0, -1) if len(one := block((b"x", b"y" * n), path=path)) == num_bytes)


def heads_at_once(num_bytes: int) -> str:
    """What the last of 48 open requests gets, whose heads weigh so much together: a block, a path, five fields."""
    streams = range(1, 96, 2)
    share, rest = divmod(num_bytes, len(streams))
    first, last = block_of(share - 505, b"/wait"), block_of(share + rest - 505, b"/wait")
    return outcome_of([headers(last if stream == streams[-1] else first, stream=stream) for stream in streams], 95)


def header_block_of(num_bytes: int) -> str:
    whole = block_of(num_bytes, b"/now")
    pieces = [whole[start : start + 16_384] for start in range(0, num_bytes, 16_384)]
    rest = [continuation(piece, 0) for piece in pieces[1:]]
    return outcome_of([headers(pieces[0], END_STREAM), *rest[:-1], continuation(pieces[-1])])


def continuations(num_frames: int) -> str:
    return outcome_of([headers(block(), END_STREAM), *[continuation(b"", 0)] * (num_frames - 1), continuation(b"")])


def header_list_of(num_bytes: int) -> str:
    """RFC 9113 §6.5.2: 32 bytes a field, over name and value."""
    pseudo = sum(len(name) + len(value) + 32 for name, value in pseudo_fields(path="/now"))
    return outcome_of([headers(block((b"x", b"y" * (num_bytes - pseudo - 33))))])


def bomb_of(num_bytes: int) -> str:
    """As many bytes when decoded, of one entry in the table, repeated."""
    pseudo = sum(len(name) + len(value) + 32 for name, value in pseudo_fields(path="/now"))
    num_repeats, rest = divmod(num_bytes - pseudo, 4096)
    entry = literal(b"x", b"y" * 4063, 0x40)
    last = literal(b"x", b"y" * (rest - 33))
    return outcome_of([headers(block() + entry + indexed(62) * (num_repeats - 1) + last)])


def header_fields(num_fields: int, name: bytes = b"x") -> str:
    return outcome_of([headers(block(*[(name, b"y")] * (num_fields - 4)))])


def resets_by_peer(num_resets: int) -> str:
    return outcome_of(
        [frame for stream in range(1, 2 * num_resets, 2) for frame in (get(b"/wait", stream), rst(0, stream))]
    )


def resets_by_us(num_resets: int) -> str:
    """What becomes of a good request behind them."""
    streams = range(1, 2 * num_resets, 2)
    broken = [headers(block(without=b"path"), stream=stream) for stream in streams]
    return outcome_of([*broken, get(stream=streams[-1] + 2)], streams[-1] + 2)


def of_frames(frame: Frame, num_frames: int) -> str:
    return outcome_of([post(), *[frame] * num_frames])


def after_a_second(first: list[Frame], then: Callable[[int], list[Frame]], num_more: int) -> str:
    """The budget is used up, and fills for a second."""
    with connected() as peer:
        peer.feed(wire(first))
        assert peer.outcome() == PASSES
        peer.advance(1.0)
        peer.feed(wire(then(num_more)))
        return str(peer.outcome())


def pings_after(num_more: int) -> str:
    return after_a_second([ping()] * 100, lambda n: [ping()] * n, num_more)


def settings_after(num_more: int) -> str:
    return after_a_second([settings()] * 99, lambda n: [settings()] * n, num_more)


def resets_after(num_more: int) -> str:
    def pairs(first: int, num_pairs: int) -> list[Frame]:
        streams = range(first, first + 2 * num_pairs, 2)
        return [frame for stream in streams for frame in (get(b"/wait", stream), rst(0, stream))]

    return after_a_second(pairs(1, 200), lambda n: pairs(401, n), num_more)


def settings_entries(num_entries: int) -> str:
    return outcome_of([settings(*[(MAX_STREAMS, 1)] * num_entries)])


def control_output(limit_bytes: int, num_past: int) -> str:
    """As many answers to PINGs unread as fit below the limit, and more."""
    frames = FrameLimits(pings=Rate(10**6, 0))
    with connected(ConnectionLimits(http2=Http2Limits(frames=frames)), reads=False) as peer:
        pong_bytes = len(ping().encode(0))
        num_pongs = (limit_bytes - peer.transport.get_write_buffer_size()) // pong_bytes + num_past
        peer.feed(ping().encode(0) * num_pongs)
        if peer.transport.was_aborted:
            return "closed"
        return "reading pauses" if peer.transport.is_reading_paused else PASSES


def unsent_of_a_stream(num_bytes: int) -> str:
    hold = Hold()
    with connected(handler=hold) as peer:
        peer.feed(wire([settings((INITIAL_WINDOW, 0)), get()]))
        hold.streams[0].send(b"x" * num_bytes)
        peer.look()
        return "Pause" if hold.streams[0].is_blocked else PASSES


def stall_of(seconds: float) -> str:
    hold = Hold()
    with connected(handler=hold) as peer:
        peer.feed(wire([settings((INITIAL_WINDOW, 0)), get()]))
        hold.streams[0].send(b"x")
        peer.look()
        peer.advance(seconds)
        return str(peer.outcome())


def drain_of(seconds: float) -> str:
    """What becomes of a stream that goes on while the server drains."""
    with connected() as peer:
        peer.feed(get(b"/wait").encode(0))
        drain = peer.server.loop.create_task(peer.server.listener.drain(ServerConfig().drain_timeout_s))
        peer.advance(seconds)
        is_closed = peer.transport.was_aborted
        peer.transport.reset()
        peer.advance(5.0)
        assert drain.done()
        return "closed" if is_closed else PASSES


def http2_head_of(seconds: float) -> str:
    with connected() as peer:
        peer.feed(headers(block(), END_STREAM).encode(0))
        peer.advance(seconds)
        return str(peer.outcome())


def http2_body_of(num_bytes: int, at_s: float, seconds: float) -> str:
    """A body of which some comes once, and nothing more."""
    with connected(handler=unlimited) as peer:
        peer.feed(wire([post()]))
        peer.advance(at_s)
        peer.feed(wire([data(bytes(16_384))] * (num_bytes // 16_384) + [data(bytes(num_bytes % 16_384))]))
        peer.advance(seconds - at_s)
        return str(peer.outcome())


def http2_idle_for(seconds: float) -> str:
    with connected() as peer:
        peer.advance(seconds)
        if not peer.seen.of(GOAWAY):
            return PASSES
        peer.advance(3.0)  # it is told, and lingered for
        assert peer.transport.is_lost
        return "closed"


def requests_on_http2(num_requests: int) -> str:
    """Those that are answered, and whether the connection takes another."""
    with connected(handler=answer_at_once) as peer:
        for start in range(0, num_requests, 200):
            streams = range(2 * start + 1, 2 * min(start + 200, num_requests), 2)
            peer.feed(wire([get(stream=stream) for stream in streams]))
        assert len(peer.seen.statuses) == num_requests
        peer.advance(1.1)  # it is told
        return "closes after the last" if peer.transport.has_sent_eof else PASSES


async def answer_at_once(stream: Any) -> None:
    answer(stream, 200, b"")


async def unlimited(stream: Any) -> None:
    try:
        answer(stream, 200, b"%d" % len(await stream.read_body(16 * MiB)))
    except ServiceError:
        answer(stream, 408, b"")


def http1(data: bytes, seconds: float = 0.0, num_requests: int = 1) -> str:
    server = MemoryServer(echo)
    transport = server.exchange(data)
    server.loop.advance(seconds)
    is_closed = transport.is_lost
    received = bytes(transport.received)
    server.close()
    if not received:
        return "closed" if is_closed else PASSES
    found = responses(received, num_requests)
    assert len(found) == num_requests
    status = found[-1][0]
    return str(status) if status >= 400 else "closes after the last" if is_closed else PASSES


def http1_head_of(seconds: float) -> str:
    return http1(GET[:-1], seconds)


def http1_body_of(num_bytes: int, at_s: float, seconds: float) -> str:
    server = MemoryServer(unlimited)
    transport = server.exchange(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 9000000\r\n\r\n")
    server.loop.advance(at_s)
    transport.feed(bytes(num_bytes))
    server.loop.advance(seconds - at_s)
    received = bytes(transport.received)
    server.close()
    return str(responses(received)[0][0]) if received else PASSES


def tiny_chunks(num_chunks: int) -> str:
    """A whole body, a byte in each."""
    server = MemoryServer(respond)
    head = b"POST /read HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
    ((status, body),) = responses(bytes(server.exchange(head + b"1\r\na\r\n" * num_chunks + b"0\r\n\r\n").received))
    server.close()
    assert status != 200 or body == b"%d" % num_chunks
    return PASSES if status == 200 else str(status)


def http1_idle_for(seconds: float) -> str:
    return http1(b"", seconds)


def requests_on_http1(num_requests: int) -> str:
    return http1(GET * num_requests, 0.0, num_requests)


def asked(body: bytes | None = None, **changes: Any) -> str:
    """What the whole server answers to a completion, where the engine runs 64 sequences at once, as by default."""
    server = SimulatedServer(limits=replace(LIMITS, max_sequences=64, max_batch_tokens=64, num_blocks=256))
    sent = completion(**changes) if body is None else request("POST", "/v1/completions", body)
    given = server.ask(sent)
    server.close()
    return PASSES if given.status == 200 else str(given.status)


COMPLETION = {"model": "small", "prompt": "The engine", "seed": 7, "max_tokens": 1}


def body_of(num_bytes: int, over: str) -> str:
    """A good request that is filled up with spaces."""
    body = json.dumps(COMPLETION).encode().ljust(num_bytes)
    server = SimulatedServer()
    server.generations.max_body_bytes = ServerConfig().max_body_bytes
    if over == "HTTP/2":
        status = _http2_status(server, body)
    else:
        head = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\n"
        framed = b"Content-Length: %d\r\n\r\n%b" % (len(body), body)
        if over == "chunks":
            framed = b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
        status = server.ask(head + framed).status
    server.close()
    return PASSES if status == 200 else str(status)


def _http2_status(server: SimulatedServer, body: bytes) -> int:
    client = Http2Client(server.network)
    stream = client.request(pseudo_fields(method="POST", path="/v1/completions"), end=False)
    position = 0
    while position < len(body) and not client.responses[stream].headers:
        size = min(16_384, client.h2.local_flow_control_window(stream))
        client.h2.send_data(stream, body[position : position + size])
        position += size
        client.exchange()
    if not client.responses[stream].headers:
        client.h2.end_stream(stream)
        client.exchange()
        server.run()
        client.exchange()
    return client.responses[stream].status


def nested(depth: int) -> str:
    """The object itself counts."""
    deep = "[" * (depth - 1) + "]" * (depth - 1)
    return asked(json.dumps(COMPLETION).encode()[:-1] + f', "unknown": {deep}}}'.encode())
