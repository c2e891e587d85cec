"""The client towards upstreams: its settings, HTTP/2 from its side, and which upstream takes a request."""

import asyncio
import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.errors import StartupError
from server.config_sources import load_config
from server.upstream import pool
from server.upstream.connection import BYTES_A_TURN, Connection, address_of
from server.upstream.exchange import AnswerHead, ConnectionLost, Exchange, Outgoing, UpstreamFault, WholeAnswer
from server.upstream.http2 import OUR_RESETS, Http2
from server.upstream.pool import Access, Pool
from server.upstream.settings import ModelSettings, UpstreamSettings, keep_alive_of
from server.wire.http2_frames import END_STREAM, FRAME_HEADER, RST_STREAM, WINDOW_UPDATE
from server.wire.http2_heads import FieldEncoder
from server.wire.limits import FrameLimits
from server.wire.messages import ConnectionFault, Http2ErrorCode
from tests.server import raw_http2
from tests.server.given_settings import toml_flag
from tests.server.pool_day import PoolDay, RoundRobin
from tests.server.virtual_loop import VirtualTimeLoop

GOOD = '[[models]]\nname = "a"\nupstreams = [{ url = "http://h:1" }]\n'
LOCAL = f'[[models]]\nname = "a"\npath = "{Path(__file__).parent}"\n'


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('[models]\nname = "a"', "is not a list of tables"),
        ('[[models]]\nname = "a"', "path or upstreams is missing"),
        (GOOD + 'path = "x"', "exclude each other"),
        (GOOD + "keep_alive = 0", "for a model with a path"),
        (LOCAL + "trusted = true", "trusted is for upstreams"),
        *((LOCAL + f"keep_alive = {bad}", 'a time such as "10m"') for bad in ('"soon"', "-2", '"-5min"', '"inf"')),
        ('keep_alive = "-5min"\n' + LOCAL, "-1 (stay)"),
        (LOCAL + 'aliases = "b"', 'correct it, as in: aliases = ["gpt-4o-mini"]'),
        (LOCAL + "trusted = true", 'correct it, as in: [[models]] with name = "qwen3-4b" and path'),
        (LOCAL + "settings = { port = 1 }", "has the setting 'port'"),
        (LOCAL + "settings = { max_model_len = 1 }", "max_model_len"),
        (LOCAL.replace("path = ", 'path = "/no" #'), "path of the model 'a'"),
        (LOCAL.replace("path = ", 'path = "/no" #'), "in / path = org/name, FILE.gguf"),
        (GOOD + 'colour = "red"', "known: name, path"),
        (GOOD.replace("url", "uri"), "known: url, weight"),
        (GOOD + GOOD, "two models of the name 'a'"),
        (GOOD + 'aliases = ["a"]', "two models of the name 'a'"),
        (GOOD + 'aliases = ["b\\nc"]', "control characters"),
        (GOOD.replace("http://", "http://\\u0000"), "control characters"),
        (GOOD + 'protocol = "h3"', "protocol"),
        (GOOD + 'fallbacks = ["a"]', "not another of [[models]]"),
        (GOOD + 'fallbacks = ["b"]', "not another of [[models]]"),
        (GOOD + 'health = "ready"', "must be a path"),
        (GOOD + "max_requests = 0", "max_requests"),
        (GOOD + 'silence_timeout = "soon"', "silence_timeout is 'soon', but must be a duration"),
        (LOCAL + "silence_timeout = 9", "silence_timeout is for upstreams"),
        (LOCAL + 'health = "/health"', "health is for upstreams"),
        (LOCAL + "max_model_len = 1", "max_model_len"),
        (GOOD + 'tls_ca = "x"', "https:// upstreams"),
        (GOOD + 'tls_key = "x"', "tls_key also needs tls_cert"),
        (GOOD.replace('" }', '", weight = 0 }'), "no upstream has a weight"),
        (GOOD.replace('" }', '" }, { url = "http://h:1" }'), "named twice"),
        (GOOD.replace("http://h:1", "ftp://h"), "must be http://HOST:PORT"),
        (GOOD.replace("http://h:1", "http://u:p@h"), "must be http://HOST:PORT"),
        (GOOD.replace("http://h:1", "http://h:99999"), "is not valid"),
        (GOOD.replace("http://h:1", "http://h:1/v1"), "must end before /v1"),
        (GOOD.replace("http://h:1", "unix:relative"), "must be http://HOST:PORT"),
    ],
)
def test_models_that_cannot_be_meant_are_refused(text: str, told: str, tmp_path: Path) -> None:
    with pytest.raises(StartupError) as caught:
        load_config(toml_flag(tmp_path, text), {})
    assert told in f"{caught.value.cause} {caught.value.fix}"


@pytest.mark.parametrize("given", ["max_model_len = 64", "settings = { max_model_len = 64 }"])
def test_the_context_of_a_model_that_is_started_is_its_process(given: str, tmp_path: Path) -> None:
    (process,) = load_config(toml_flag(tmp_path, LOCAL + given), {}).own_models
    assert process.max_model_len == 64


def test_settings_of_models_that_are_started_warn_where_there_is_none(tmp_path: Path) -> None:
    text = 'models_memory = "1GiB"\nkeep_alive = "1min"\n'
    assert load_config(toml_flag(tmp_path, text + LOCAL), {}).warnings == ()
    warnings = load_config(toml_flag(tmp_path, text + GOOD), {}).warnings
    assert [one.split(" in ")[0] for one in warnings] == ["models_memory", "keep_alive"], warnings


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        ("10m", 600),
        ("1h30m", 5400),
        (0, 0),
        ("0", 0),
        (-1, math.inf),
        ("-1", math.inf),
        ("-1s", math.inf),
        (1.5, 1.5),
        (1e-5, 1e-5),
    ],
)
def test_keep_alive_is_read_as_ollama_reads_it(value: str | float, seconds: float) -> None:
    assert keep_alive_of(value) == seconds


def test_a_directory_of_models_names_each_by_its_path_there(tmp_path: Path) -> None:
    for name in ("org/one", "two"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "config.json").touch()
        (tmp_path / name / "model.safetensors").touch()
    (tmp_path / "three.gguf").touch()
    flags = {
        "models_dir": str(tmp_path),
        "max_sequences": "7",
        "kv_offload_bytes": "1GiB",
        "kv_offload_dir": str(tmp_path),
    }
    config = load_config(flags, {})
    assert not config.has_engine
    assert sorted(one.name for one in config.models) == ["org/one", "three", "two"]
    one = config.own_models[[one.name for one in config.models].index("org/one")]
    assert (one.served_model_name, one.max_sequences, one.model) == ("org/one", 7, tmp_path / "org/one")
    assert one.kv_offload_dir == tmp_path / "org%2Fone"


def test_a_gateway_has_no_engine_unless_a_model_is_named(tmp_path: Path) -> None:
    flags = toml_flag(tmp_path, GOOD)
    assert not load_config(flags, {}).has_engine
    assert load_config(flags | {"model": str(tmp_path)}, {}).has_engine
    assert load_config({}, {}).has_engine


def test_the_example_is_taken() -> None:
    config = load_config({"config_file": str(Path(__file__).parents[2] / "deploy" / "gateway.toml")}, {})
    assert [model.name for model in config.models] == ["llama-70b", "qwen3-4b"]


def test_an_upstream_forgets_the_ends_of_prompts_before_their_beginnings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "MAX_KNOWN", 8)
    (upstream, *_) = PoolDay(1, 1).pool.upstreams
    first, second = (pool.LeadingBlocks(600, 100, tuple(range(start, start + 6))) for start in (0, 100))
    for prompt in (first, second):
        upstream.learn(prompt)
    assert (upstream.num_new_tokens(first), upstream.num_new_tokens(second)) == (400, 0)


def test_the_log_tells_once_why_upstreams_are_out_and_each_ten_seconds_that_none_is_in(
    caplog: pytest.LogCaptureFixture,
) -> None:
    day = PoolDay(1, 1)
    (upstream,) = day.pool.upstreams
    for _ in range(2):
        caplog.clear()
        for i in range(12):
            upstream.note_probe(("it hangs", "it cannot be connected to")[i % 2], 0.0)
        told = [one.getMessage().split(": ")[-1] for one in caplog.records]
        assert told == ["it hangs", "it cannot be connected to"]
        for _ in range(pool.NUM_SUCCESSES):
            upstream.note_probe(None, 0.0)
    upstream.note_probe("it hangs", 0.0)
    upstream.is_healthy = False
    caplog.clear()
    for at_s in (0.0, 1.0, 9.0, 10.0, 11.0):
        day.loop.now_s = at_s
        for _ in range(3):
            assert day.pool.take_slot(pool.LeadingBlocks(1), 0, "t").granted.exception() is not None
    assert len(caplog.records) == 2


def test_an_idle_upstream_that_hangs_is_out_after_as_many_seconds_as_probes() -> None:
    loop = VirtualTimeLoop()
    day = Pool(ModelSettings(name="m", upstreams=(UpstreamSettings(url="http://h:1"),), protocol="h2"), loop, Access())
    (upstream,) = day.upstreams

    async def wait_out() -> None:
        connection = Connection(upstream.address, b"h2")
        FakeTransport(connection).feed(raw_http2.wire([SETTINGS]))
        upstream.connections.append(connection)
        upstream.note_probe(None, loop.time())
        day.start()
        while upstream.is_healthy:
            await asyncio.sleep(pool.PROBE_EVERY_S / 2)
        await day.close()

    loop.run_until_complete(wait_out())
    assert loop.time() <= pool.NUM_FAILURES * pool.PROBE_EVERY_S + pool.PROBE_EVERY_S / 2
    assert "not answered within 1 s" in upstream.why_out
    loop.close()


def test_a_request_at_an_upstream_of_our_own_that_hangs_is_lost_soon() -> None:
    class Transport(FakeTransport):
        def abort(self) -> None:
            self._connection.connection_lost(None)

    loop = VirtualTimeLoop()
    entry = ModelSettings(name="m", upstreams=(UpstreamSettings(url="http://h:1"),), protocol="h2", trusted=True)
    day = Pool(entry, loop, Access())
    (upstream,) = day.upstreams

    async def wait_lost() -> None:
        connection, answer = Connection(upstream.address, b"h2"), WholeAnswer(100)
        Transport(connection).feed(raw_http2.wire([SETTINGS]))
        upstream.connections.append(connection)
        upstream.note_probe(None, loop.time())
        connection.http.send(Outgoing(b"POST", b"/", (), b"{}"), answer)
        day.start()
        with pytest.raises(ConnectionLost):
            await answer.done
        await day.close()

    loop.run_until_complete(wait_lost())
    assert pool.HUNG_S <= loop.time() <= pool.HUNG_S + 2 * pool.PROBE_EVERY_S < entry.silence_s
    loop.close()


def test_conversations_find_their_beginnings_and_nothing_is_left_after_upstreams_came_and_went() -> None:
    figures = []
    for pool_type in (Pool, RoundRobin):
        day = PoolDay(1, 8, pool_type)
        day.run(0.3, 7200.0)
        figures.append(day.figures())
    ours, other = figures
    assert ours.num_answers + ours.num_lost > 2000
    assert ours.hit_ratio >= 0.9 > other.hit_ratio
    assert ours.median_ttft_s <= 0.5 * other.median_ttft_s


# HTTP/2, the client's side.

SETTINGS = raw_http2.settings()


def head(stream: int = 1, flags: int = 0, status: bytes = b"200") -> raw_http2.Frame:
    block = FieldEncoder().encode([(b":status", status)])
    return raw_http2.headers(block, raw_http2.END_HEADERS | flags, stream)


class Client:
    """The protocol, and what it writes and tells."""

    def __init__(self, num_requests: int = 1, body: bytes = b"") -> None:
        self.out: list[bytes] = []
        self.told: list[tuple[int, str]] = []
        self.http = Http2(self.out.append, lambda: 0.0, [(b":scheme", b"http"), (b":authority", b"a")])
        self.out.clear()
        self.exchanges = [self.send(body) for _ in range(num_requests)]

    def send(self, body: bytes = b"") -> Exchange:
        client, number = self, len(self.out)

        class Reader:
            def on_head(self, head: AnswerHead) -> None:
                client.told.append((number, f"head {head.status}"))

            def on_data(self, data: bytes) -> None:
                client.told.append((number, f"data {data.decode()}"))

            def on_end(self, fault: UpstreamFault | None) -> None:
                client.told.append((number, f"end {fault}"))

        return self.http.send(Outgoing(b"POST", b"/", (), body), Reader())

    def receive(self, *frames: raw_http2.Frame) -> None:
        self.http.receive(raw_http2.wire(list(frames)))

    def written(self) -> list[tuple[int, int, int, bytes]]:
        """Since the last call: frames_of."""
        self.http.flush()
        data = b"".join(self.out)
        self.out.clear()
        return frames_of(data)


def frames_of(data: bytes) -> list[tuple[int, int, int, bytes]]:
    """Kind, flags, stream and payload of each frame."""
    found = []
    while data:
        high, low, kind, flags, stream = FRAME_HEADER.unpack_from(data)
        end = FRAME_HEADER.size + (high << 16 | low)
        found.append((kind, flags, stream, data[FRAME_HEADER.size : end]))
        data = data[end:]
    return found


WHOLE = [(0, "head 200"), (0, "data a"), (0, "end None")]
SESSIONS: dict[str, tuple[list[raw_http2.Frame], list[tuple[int, str]]]] = {
    "whole": ([head(), raw_http2.data(b"a"), raw_http2.data(b"", END_STREAM)], WHOLE),
    "interim": ([head(status=b"103"), head(), raw_http2.data(b"a", END_STREAM)], WHOLE),
    "trailers": ([head(), raw_http2.data(b"a"), head(1, END_STREAM)], WHOLE),
    "reset": ([head(), raw_http2.rst(2)], [WHOLE[0], (0, "end it has reset the stream, with code 2")]),
    "goaway": (
        [raw_http2.goaway(0, 1)],
        [(1, "end it accepts no more requests on this connection")],
    ),
    "two": (
        [head(3), head(1), raw_http2.ping(), raw_http2.data(b"a", END_STREAM, 3)],
        [(1, "head 200"), (0, "head 200"), (1, "data a"), (1, "end None")],
    ),
    "no status": ([raw_http2.headers(b"", raw_http2.END_HEADERS)], [(0, "end its answer has no status")]),
    "no head": ([head(1, END_STREAM, b"103")], [(0, "end its answer has no head")]),
    "two heads": ([head(), head()], [WHOLE[0], (0, "end its answer has two heads")]),
}


@pytest.mark.parametrize("name", SESSIONS)
def test_an_upstreams_bytes_mean_the_same_however_they_are_split(name: str) -> None:
    frames, expected = SESSIONS[name]
    data = raw_http2.wire([SETTINGS, *frames])
    whole, bytewise = Client(2), Client(2)
    whole.http.receive(data)
    for i in range(len(data)):
        bytewise.http.receive(data[i : i + 1])
    assert whole.told == bytewise.told == expected
    assert whole.written() == bytewise.written()


@pytest.mark.parametrize(
    ("frames", "code"),
    [
        ([raw_http2.ping()], Http2ErrorCode.PROTOCOL_ERROR),
        ([SETTINGS, head(9)], Http2ErrorCode.PROTOCOL_ERROR),
        ([SETTINGS, head(2)], Http2ErrorCode.PROTOCOL_ERROR),
        ([SETTINGS, raw_http2.data(b"a")], Http2ErrorCode.PROTOCOL_ERROR),
        ([SETTINGS, raw_http2.continuation(b"")], Http2ErrorCode.PROTOCOL_ERROR),
        ([SETTINGS, raw_http2.headers(b"", 0), raw_http2.ping()], Http2ErrorCode.PROTOCOL_ERROR),
        (
            [SETTINGS, raw_http2.headers(b"", 0), *[raw_http2.continuation(b"", 0)] * 9],
            Http2ErrorCode.ENHANCE_YOUR_CALM,
        ),
        ([SETTINGS, raw_http2.headers(b"\xff" * 9, raw_http2.END_HEADERS)], Http2ErrorCode.COMPRESSION_ERROR),
        ([SETTINGS, raw_http2.window_update(0)], Http2ErrorCode.PROTOCOL_ERROR),
        ([SETTINGS, raw_http2.window_update(2**31 - 1)], Http2ErrorCode.FLOW_CONTROL_ERROR),
        ([SETTINGS, *[raw_http2.ping()] * 101], Http2ErrorCode.ENHANCE_YOUR_CALM),
        ([SETTINGS, head(), *[raw_http2.data(bytes(16_384))] * 3], Http2ErrorCode.FLOW_CONTROL_ERROR),
        ([SETTINGS, head(), raw_http2.data(bytes(16_385))], Http2ErrorCode.FRAME_SIZE_ERROR),
    ],
)
def test_what_an_upstream_must_not_send_ends_the_connection(
    frames: list[raw_http2.Frame], code: Http2ErrorCode
) -> None:
    client = Client()
    client.exchanges[0].pause()
    with pytest.raises(ConnectionFault) as caught:
        client.receive(*frames)
    assert caught.value.code is code
    assert (client.http.is_closing, client.http.room) == (True, 0)


class FakeTransport(asyncio.Transport):
    """Of a socket from which a connection reads as the loop would."""

    def __init__(self, connection: Connection) -> None:
        super().__init__()
        self._connection, self._unread, self._reads = connection, b"", True
        connection.connection_made(self)

    def write(self, data: Any) -> None: ...
    def close(self) -> None: ...
    def abort(self) -> None: ...
    def pause_reading(self) -> None:
        self._reads = False

    def resume_reading(self) -> None:
        self._reads = True
        self.feed()

    def feed(self, data: bytes = b"") -> None:
        self._unread += data
        while self._unread and self._reads:
            buffer = memoryview(self._connection.get_buffer(-1))
            num = min(len(buffer), len(self._unread))
            buffer[:num], self._unread = self._unread[:num], self._unread[num:]
            self._connection.buffer_updated(num)

    def is_closing(self) -> bool:
        return False

    def get_write_buffer_size(self) -> int:
        return 0


FRAGMENTS = {
    b"http/1.1": (
        *(b"HTTP/1.1 200 OK\r\n", b"HTTP/1.1 100 Continue\r\n\r\n", b"content-length: 3\r\n", b"\r\n", b"abc"),
        *(
            b"transfer-encoding: chunked\r\n",
            b"3\r\nabc\r\n",
            b"0\r\n\r\n",
            b"connection: close\r\n",
            b"HTTP/1.0 200\r\n",
        ),
    ),
    b"h2": tuple(
        raw_http2.wire([one])
        for one in (
            *(SETTINGS, head(), head(3), head(1, END_STREAM), raw_http2.data(b"a"), raw_http2.data(b"", END_STREAM)),
            *(raw_http2.data(b"b", END_STREAM, 3), raw_http2.rst(7), raw_http2.goaway(0, 1), raw_http2.ping()),
            *(raw_http2.headers(b"", 0), raw_http2.continuation(b""), raw_http2.window_update(9, 3)),
        )
    ),
}


@pytest.mark.parametrize("protocol", FRAGMENTS)
@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_every_request_ends_once_whatever_comes(protocol: bytes, data: st.DataObject) -> None:
    """Also in the order head, body, end; and no byte raises."""
    pieces = data.draw(st.lists(st.sampled_from(FRAGMENTS[protocol]) | st.binary(max_size=20), max_size=12))
    said = (raw_http2.wire([SETTINGS]) if protocol == b"h2" else b"") + b"".join(pieces)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(said)), max_size=6)))
    told: list[str] = []

    class Reader:
        def on_head(self, head: AnswerHead) -> None:
            assert not told
            told.append("head")

        def on_data(self, data: bytes) -> None:
            assert told[-1] in ("head", "data")
            told.append("data")

        def on_end(self, fault: UpstreamFault | None) -> None:
            assert fault is not None or told[-1] in ("head", "data")
            assert "end" not in told
            told.append("end")

    async def feed() -> None:
        connection = Connection(address_of("http://h:1", None, (protocol,)), protocol)
        transport = FakeTransport(connection)
        if protocol == b"h2":
            transport.feed(raw_http2.wire([SETTINGS]))
        connection.http.send(Outgoing(b"POST", b"/", (), b"{}"), Reader())
        for start, end in pairwise([0, *cuts, len(said)]):
            if end > start:
                transport.feed(said[start:end])
        connection.connection_lost(None)
        assert told[-1] == "end"
        assert connection.http.num_open == 0

    asyncio.run(feed())


@pytest.mark.parametrize("protocol", [b"http/1.1", b"h2"])
def test_a_flood_is_read_in_shares_and_no_further_than_its_reader(protocol: bytes) -> None:
    """The loop's other work comes between; all arrives."""
    piece, num = b"x" * 100, 400
    chunked = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + (b"64\r\n" + piece + b"\r\n") * num
    said = chunked if protocol != b"h2" else raw_http2.wire([SETTINGS, head(), *[raw_http2.data(piece)] * num])
    received: list[int] = []

    class Reader:
        def on_head(self, head: AnswerHead) -> None: ...
        def on_data(self, data: bytes) -> None:
            received.append(len(data))

        def on_end(self, fault: UpstreamFault | None) -> None:
            assert sum(received) == num * len(piece)

    async def feed() -> None:
        connection = Connection(address_of("http://h:1", None, (protocol,)), protocol)
        transport = FakeTransport(connection)
        if protocol == b"h2":
            transport.feed(raw_http2.wire([SETTINGS]))
        exchange = connection.http.send(Outgoing(b"POST", b"/", (), b"{}"), Reader())
        transport.feed(said)
        for _ in range(3):
            before = sum(received)
            assert 0 < before < num * len(piece)
            await asyncio.sleep(0)
            assert 0 < sum(received) - before <= BYTES_A_TURN
        if protocol != b"h2":  # there, the window of each stream holds it
            exchange.pause()
            before = sum(received)
            for _ in range(9):
                await asyncio.sleep(0)
            assert sum(received) == before
            exchange.resume()
        while sum(received) < num * len(piece):
            await asyncio.sleep(0)
        connection.connection_lost(None)
        assert not connection.http.num_open

    asyncio.run(feed())


def test_http1_is_recognized_by_its_first_bytes() -> None:
    with pytest.raises(ConnectionFault, match="does not begin with SETTINGS"):
        Client(0).http.receive(b"HTTP/1.1 400 Bad Request\r\n\r\n")


def test_a_body_goes_out_as_the_windows_let_it() -> None:
    client = Client(0)
    client.receive(SETTINGS)
    client.written()
    client.send(bytes(100_000))
    sent = sum(len(payload) for kind, _, _, payload in client.written() if kind == 0)
    assert sent == 65_535
    client.receive(raw_http2.window_update(10**6), raw_http2.window_update(10**6, 1))
    *_, (kind, flags, stream, _) = client.written()
    assert (kind, flags & END_STREAM, stream) == (0, END_STREAM, 1)


def test_a_streams_window_opens_as_it_is_read_and_not_before() -> None:
    client = Client()
    (exchange,) = client.exchanges
    exchange.pause()
    client.receive(SETTINGS, head(), raw_http2.data(b"x" * 16_384), raw_http2.data(b"x" * 16_384))
    assert all(kind != WINDOW_UPDATE for kind, *_ in client.written())
    exchange.resume()
    assert [(kind, stream) for kind, _, stream, _ in client.written()] == [(WINDOW_UPDATE, 1)]


def test_a_connection_takes_no_more_requests_before_its_resets_are_too_many_for_the_server() -> None:
    client = Client(0)
    client.receive(SETTINGS)
    while client.http.room:
        client.send().cancel()
    resets = [kind for kind, *_ in client.written() if kind == RST_STREAM]
    assert len(resets) == OUR_RESETS.burst + 1 < FrameLimits().resets.burst


def test_a_cancel_is_a_reset_and_later_frames_are_ignored() -> None:
    client = Client()
    client.receive(SETTINGS, head())
    client.written()
    for _ in range(2):
        client.exchanges[0].cancel()
    ((kind, _, stream, payload),) = client.written()
    assert (kind, stream, int.from_bytes(payload, "big")) == (RST_STREAM, 1, Http2ErrorCode.CANCEL)
    client.receive(raw_http2.data(b"late", END_STREAM))
    assert client.told == [(0, "head 200")]
    assert not client.http.is_closing


OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nab"


@pytest.mark.parametrize(
    ("pieces", "is_kept"),
    [
        ((OK,), True),
        ((b"HTTP/1.1 100 Continue\r\n\r\n" + OK,), True),
        ((OK + OK,), False),
        ((OK + b"HTT",), False),
        ((OK, b"HTT"), False),
        ((OK, OK), False),
        ((OK, b"\r\n"), False),
    ],
)
def test_http1_connections_that_say_more_than_an_answer_get_no_further_request(
    pieces: tuple[bytes, ...], is_kept: bool
) -> None:
    """The next request's answer would be what is left of this one's."""
    ends: list[UpstreamFault | None] = []

    class Reader:
        def on_head(self, head: AnswerHead) -> None: ...
        def on_data(self, data: bytes) -> None: ...
        def on_end(self, fault: UpstreamFault | None) -> None:
            ends.append(fault)

    async def feed() -> None:
        connection = Connection(address_of("http://h:1", None, (b"http/1.1",)), b"http/1.1")
        transport = FakeTransport(connection)
        connection.http.send(Outgoing(b"POST", b"/", (), b"{}"), Reader())
        for piece in pieces:
            transport.feed(piece)
        assert connection.http.room == int(is_kept)

    asyncio.run(feed())
    assert ends == [None]
