"""The load generator: its parsers, its figures, and its counts against a small server in the same process."""

import asyncio
import itertools
import json
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from bench.client import CONNECTION_CLOSED, ERROR_EVENT, NO_END, BadResponse, ResponseParser, SseParser
from bench.load import (
    CALIBRATION_WORDS,
    CannotRun,
    LoadConfig,
    LoadResult,
    LoadRun,
    check_result_file,
    loopback_address,
    poisson_arrivals,
    random_prompts,
    result_tables,
    run_on_fast_loop,
    words_for_tokens,
)
from bench.results import command_line, percentile, read_result, summarize, write_result
from core.errors import ExitCode
from server.cli import main
from tests.certificates import make_certificate, needs_openssl

CHUNKED = (
    b"HTTP/1.1 100 Continue\r\n\r\n"
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    b"5\r\nhello\r\n1a;name=value\r\n, a chunk with \r\n inside..\r\n0\r\nx-trailer: 1\r\n\r\n"
)
CHUNKED_BODY = b"hello, a chunk with \r\n inside.."
SIZED = b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 4\r\nConnection: close\r\n\r\nbusy"
EVENTS = (
    b": a comment\n\ndata: one\n\nevent: message\ndata:two\n\n\n\r\ndata: three\r\nid: 7\r\n\r\ndata: a\n"
    b"data: b\r\n\r\ndata: four\r\rretry: 10\n\ndata: [DONE]\n\ndata: never ended\n"
)


def feed_response(*pieces: bytes) -> tuple[ResponseParser, bytes]:
    parser = ResponseParser()
    return parser, b"".join([parser.feed(piece) for piece in pieces])


def bytewise(data: bytes) -> list[bytes]:
    return [data[i : i + 1] for i in range(len(data))]


@pytest.mark.parametrize(("data", "status", "body"), [(CHUNKED, 200, CHUNKED_BODY), (SIZED, 503, b"busy")])
def test_response_whole_equals_byte_by_byte_and_cut_in_two_anywhere(data: bytes, status: int, body: bytes) -> None:
    for pieces in ([data], bytewise(data), *([data[:i], data[i:]] for i in range(1, len(data)))):
        parser, found = feed_response(*pieces)
        assert parser.is_complete
        assert parser.head is not None
        assert (parser.head.status, found) == (status, body)


def test_response_keeps_what_comes_after_its_end_and_may_end_with_the_connection() -> None:
    parser, body = feed_response(SIZED + b"more")
    assert (body, parser.surplus, parser.head and parser.head.keeps_alive) == (b"busy", b"more", False)
    parser, body = feed_response(b"HTTP/1.1 200 OK\r\n\r\n", b"to the ", b"end")
    assert (body, parser.is_complete) == (b"to the end", False)
    parser.feed_eof()
    assert parser.is_complete


@pytest.mark.parametrize("cut", [3, 40, len(CHUNKED) - 1])
def test_response_cut_short_is_an_error(cut: int) -> None:
    parser, _ = feed_response(CHUNKED[:cut])
    with pytest.raises(BadResponse, match="closed in the middle"):
        parser.feed_eof()


@pytest.mark.parametrize(
    "data",
    [
        b"HTTP/2 200 OK\r\n\r\n",
        b"HTTP/1.1 OK\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nno colon\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n-1\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nabc\r\n",
        b"x" * 17_000,
    ],
)
def test_nonsense_is_an_error_whole_and_byte_by_byte(data: bytes) -> None:
    for pieces in ([data], bytewise(data)):
        with pytest.raises(BadResponse):
            feed_response(*pieces)


def test_events_whole_equal_byte_by_byte() -> None:
    expected = [b"one", b"two", b"three", b"a\nb", b"four", b"[DONE]"]
    assert SseParser().feed(EVENTS) == expected
    parser = SseParser()
    assert list(itertools.chain.from_iterable(parser.feed(byte) for byte in bytewise(EVENTS))) == expected


def test_an_endless_event_is_an_error() -> None:
    with pytest.raises(BadResponse):
        SseParser().feed(b"data: " + b"x" * 2_000_000)


def test_percentiles_are_linear_between_neighbours_and_of_nothing_there_are_none() -> None:
    values = [40.0, 10.0, 30.0, 20.0]
    assert [percentile(values, q) for q in (0, 50, 100)] == [10.0, 25.0, 40.0]
    assert percentile(values, 95) == pytest.approx(38.5)
    assert percentile([], 50) is summarize([]).p99 is None
    figures = summarize([float(i) for i in range(101)])
    assert (figures.count, figures.mean, figures.p95, figures.max) == (101, 50.0, 95.0, 100.0)


def test_poisson_arrivals_repeat_with_the_seed_and_keep_the_rate() -> None:
    first, again, other = (list(itertools.islice(poisson_arrivals(50.0, seed), 20_000)) for seed in (1, 1, 2))
    assert first == again
    assert first != other
    assert first == sorted(first)
    assert first[-1] == pytest.approx(400.0, rel=0.03)


def test_words_for_tokens_inverts_the_servers_count() -> None:
    calibration = [(words, 9 + 3 * words) for words in CALIBRATION_WORDS]
    assert words_for_tokens(309, calibration) == 100
    assert words_for_tokens(1, calibration) == 1
    assert len(next(random_prompts(100, seed=0)).split()) == 100


# The server that the load goes to: it counts words as tokens.


class FakeServer:
    """Keep-alive HTTP/1.1 with one canned behaviour per request number; records what it was asked."""

    def __init__(self, behave: Callable[[int], str]) -> None:
        self.requests: list[dict[str, object]] = []
        self.heads: list[bytes] = []
        self.num_connections = 0
        self.port = 0
        self._behave = behave

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        try:
            while not writer.is_closing():
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
                self.answer(writer, head, await reader.readexactly(length))
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            return
        finally:
            writer.close()

    def answer(self, writer: asyncio.StreamWriter, head: bytes, body: bytes) -> None:
        self.heads.append(head)
        if head.startswith(b"GET /v1/models "):
            write_whole(writer, "200 OK", {"object": "list", "data": [{"id": "fake"}]})
            return
        request = json.loads(body)
        self.requests.append(request)
        behaviour = self._behave(len(self.requests) - 1)
        if behaviour == "refuse":
            write_whole(writer, "429 Too Many Requests", {"error": {"message": "slow down"}})
            return
        self.write_stream(writer, request, behaviour)

    def write_stream(self, writer: asyncio.StreamWriter, request: dict[str, object], behaviour: str) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        is_chat = "messages" in request
        num_tokens = int(str(request["max_tokens"]))
        events: list[object] = [{"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}]
        for _ in range(num_tokens):
            events.append({"choices": [{"delta": {"content": "w "}} if is_chat else {"text": "w "}]})
        if behaviour == "error":
            events = [*events[:2], {"error": {"message": "engine fault", "code": "engine_error"}}]
        elif behaviour != "no end":
            events.append({"choices": [{"delta": {}, "finish_reason": "length"}]})
            usage = {"prompt_tokens": num_words(request), "completion_tokens": num_tokens}
            events.append({"choices": [], "usage": usage})
        for i, event in enumerate(events):
            write_chunk(writer, b"data: " + json.dumps(event).encode() + b"\n\n")
            if behaviour == "cut" and i == 2:
                writer.close()
                return
        write_chunk(writer, b"data: [DONE]\n\n")
        write_chunk(writer, b"")
        if behaviour == "close after":  # though it never said so
            writer.close()


def num_words(request: dict[str, object]) -> int:
    return len(json.dumps(request.get("prompt") or request.get("messages")).split())


def write_whole(writer: asyncio.StreamWriter, status: str, answer: object) -> None:
    body = json.dumps(answer).encode()
    head = f"HTTP/1.1 {status}\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)


def write_chunk(writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(b"%x\r\n%b\r\n" % (len(data), data))


@asynccontextmanager
async def fake_server(
    behave: Callable[[int], str] = lambda number: "answer", tls: ssl.SSLContext | None = None
) -> AsyncIterator[FakeServer]:
    fake = FakeServer(behave)
    server = await asyncio.start_server(fake.serve, "127.0.0.1", 0, ssl=tls)
    fake.port = server.sockets[0].getsockname()[1]
    try:
        yield fake
    finally:
        server.close()
        await server.wait_closed()


def run_against(behave: Callable[[int], str], **settings: object) -> tuple[FakeServer, LoadResult]:
    async def measure() -> tuple[FakeServer, LoadResult]:
        async with fake_server(behave) as fake:
            config = LoadConfig(host="127.0.0.1", port=fake.port, **settings)  # type: ignore[arg-type]
            return fake, await LoadRun(config).measure()

    return run_on_fast_loop(measure())


def test_closed_loop_counts_requests_tokens_and_latencies() -> None:
    fake, result = run_against(lambda number: "answer", concurrency=3, num_requests=20, max_tokens=7)
    assert (result.num_done, result.num_failed, len(fake.requests)) == (20, 0, 20)
    assert (result.num_tokens, result.num_events) == (140, 140)
    assert result.ttft_s.count == result.end_to_end_s.count == 20
    assert result.inter_token_s.count == 20 * 6
    assert fake.num_connections == 3 + 1  # one looked at the models before
    assert fake.requests[0]["model"] == "fake"
    assert fake.requests[0]["stream"] is True


def test_open_loop_sends_every_arrival() -> None:
    _, result = run_against(lambda number: "answer", rate=2000.0, num_requests=50, max_tokens=3, endpoint="completions")
    assert (result.num_done, result.num_tokens, result.send_delay_s.count) == (50, 150, 50)


def test_open_loop_stops_at_its_duration() -> None:
    rate, duration_s = 2000.0, 0.05
    _, result = run_against(
        lambda number: "answer", rate=rate, duration_s=duration_s, num_requests=10_000, max_tokens=1
    )
    assert result.num_done == sum(1 for _ in itertools.takewhile(lambda t: t < duration_s, poisson_arrivals(rate, 0)))


def test_failures_are_counted_by_kind_and_the_rest_goes_on() -> None:
    kinds = ["answer", "refuse", "error", "cut", "no end"]
    fake, result = run_against(lambda number: kinds[number % 5], concurrency=1, num_requests=20, max_tokens=4)
    assert result.num_done == 4
    assert result.failures == {"http_429": 4, ERROR_EVENT: 4, CONNECTION_CLOSED: 4, NO_END: 4}
    assert "slow down" in result.failure_examples["http_429"]
    assert "engine fault" in result.failure_examples[ERROR_EVENT]
    assert result.end_to_end_s.count == 4
    assert len(fake.requests) == 20


def test_a_kept_connection_that_was_closed_is_replaced_without_a_failure() -> None:
    fake, result = run_against(lambda number: "close after", concurrency=1, num_requests=6, max_tokens=2)
    assert (result.num_done, result.num_failed) == (6, 0)
    assert len(fake.requests) == 6


def test_prompts_of_a_given_length_are_calibrated_on_the_servers_count() -> None:
    fake, result = run_against(lambda number: "answer", concurrency=1, num_requests=2, prompt_tokens=200, max_tokens=1)
    assert result.num_prompt_tokens == sum(num_words(request) for request in fake.requests[-2:])
    assert [num_words(request) for request in fake.requests[-2:]] == [200, 200]
    assert fake.requests[-1]["messages"] != fake.requests[-2]["messages"]


def test_settings_reach_the_request() -> None:
    settings = {"ignore_eos": True, "temperature": 0.5, "model": "m"}
    fake, _ = run_against(lambda number: "answer", num_requests=1, max_tokens=2, api_key="secret", **settings)
    assert fake.requests[0].items() >= settings.items()
    assert b"authorization: Bearer secret\r\n" in fake.heads[0]


def bench_serve(*words: str) -> int:
    return main(["bench", "serve", *words])


def test_a_result_that_could_not_be_written_is_refused_before_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = tmp_path / "no such" / "x.json"
    for path, cause, fix in (
        (missing, f"there is no directory {missing.parent}", f"mkdir -p '{missing.parent}'"),
        (tmp_path, "is a directory", f"--json {tmp_path / 'load.json'}"),
    ):
        assert bench_serve("--url", "http://127.0.0.1:1", "--json", str(path)) == ExitCode.USAGE  # no server is asked
        told = capsys.readouterr().err.splitlines()
        assert cause in told[0]
        assert fix in told[1]
    assert not missing.parent.exists()


def test_a_result_goes_where_one_may_write_and_into_the_results_that_there_are_not_yet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bench.load.RESULTS_DIR", tmp_path / "results")
    check_result_file(tmp_path / "results" / "x.json")
    check_result_file(tmp_path / "x.json")
    monkeypatch.setattr("os.access", lambda path, mode: path != tmp_path)  # root may write everywhere
    with pytest.raises(CannotRun, match="cannot be written"):
        check_result_file(tmp_path / "x.json")


def test_no_server_is_a_cause_and_a_fix(capsys: pytest.CaptureFixture[str]) -> None:
    async def free_port() -> int:
        async with fake_server() as fake:
            return fake.port

    port = asyncio.run(free_port())
    assert bench_serve("--url", f"http://127.0.0.1:{port}") == ExitCode.UNREACHABLE
    error, fix = capsys.readouterr().err.splitlines()
    assert error.startswith(f"error: No server at http://127.0.0.1:{port}")
    assert fix.startswith("fix: start one with `steploop serve`")


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["--url", "ftp://127.0.0.1"], ExitCode.USAGE),
        (["--insecure"], ExitCode.USAGE),
        (["--url", "https://127.0.0.1:1", "--cacert", "/nowhere/at/all"], ExitCode.USAGE),
        (["--url", "http://192.0.2.1"], ExitCode.USAGE),
        (["--concurency", "2"], ExitCode.USAGE),
        (["--requests", "0"], ExitCode.USAGE),
        (["--model", "m", "--prompt-file", "/nowhere/at/all"], ExitCode.CONFIGURATION),
    ],
)
def test_a_refusal_has_the_exit_code_of_the_table(
    words: list[str], code: ExitCode, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench_serve(*words) == code
    error, fix = capsys.readouterr().err.splitlines()
    assert error.startswith("error: ")
    assert fix.startswith("fix: ")


async def served_bench(behave: Callable[[int], str], *words: str) -> int:
    """The exit code of a bench against a fake server; it runs in a thread, for it has a loop of its own."""
    async with fake_server(behave) as fake:
        return await asyncio.to_thread(bench_serve, "--url", f"http://127.0.0.1:{fake.port}", *words)


def test_the_result_names_the_command_that_was_typed(tmp_path: Path) -> None:
    path = tmp_path / "load.json"
    words = ("--requests", "1", "--api-key", "secret", "--json", str(path))
    assert asyncio.run(served_bench(lambda number: "answer", *words)) == ExitCode.OK
    command = read_result(path).command
    assert command.startswith("steploop bench serve --url http://127.0.0.1:")
    assert command.endswith(f" --requests 1 --api-key '***' --json {path}")


def test_failed_requests_are_told_by_the_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--requests", "2", "--max-tokens", "1")
    assert asyncio.run(served_bench(lambda number: "answer", *words)) == ExitCode.OK
    kinds = ["answer", "refuse"]
    assert asyncio.run(served_bench(lambda number: kinds[number], *words)) == ExitCode.UNREACHABLE
    assert "http_429, for example: " in capsys.readouterr().err


def test_other_machines_are_refused_unless_allowed() -> None:
    for url, found in {
        "http://127.0.0.1:8000": ("127.0.0.1", 8000),
        "http://[::1]:9": ("::1", 9),
        "https://127.0.0.1": ("127.0.0.1", 443),
        "127.0.0.1:9": ("127.0.0.1", 9),
    }.items():
        assert loopback_address(url, is_remote_allowed=False) == found
    with pytest.raises(CannotRun, match="another machine") as caught:
        loopback_address("http://192.0.2.1:8000", is_remote_allowed=False)
    assert "--allow-remote" in caught.value.fix
    assert loopback_address("http://192.0.2.1:8000", is_remote_allowed=True) == ("192.0.2.1", 8000)


@needs_openssl
def test_over_tls_a_certificate_is_trusted_that_was_named_or_any_when_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    certificate, key = make_certificate(tmp_path)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate, key)

    async def bench_over_tls(*words: str) -> int:
        async with fake_server(tls=context) as fake:
            words = ("--url", f"https://localhost:{fake.port}", "--requests", "2", "--concurrency", "2", *words)
            return await asyncio.to_thread(bench_serve, *words)

    assert asyncio.run(bench_over_tls("--cacert", str(certificate))) == ExitCode.OK
    assert asyncio.run(bench_over_tls("--insecure")) == ExitCode.OK
    capsys.readouterr()
    assert asyncio.run(bench_over_tls()) == ExitCode.UNREACHABLE
    error, fix = capsys.readouterr().err.splitlines()
    assert "a certificate that is not trusted: self-signed certificate" in error
    assert "--cacert" in fix
    assert "--insecure" in fix


def test_a_result_file_reads_back_and_bears_no_key(tmp_path: Path) -> None:
    _, result = run_against(lambda number: "refuse", num_requests=1, api_key="secret")
    config = LoadConfig(host="127.0.0.1", port=1, api_key="secret")
    tables = result_tables(config, result)
    command = command_line("steploop bench serve", ["--api-key", "secret", "--api-key=secret"])
    path = tmp_path / "new" / "load.json"
    written = write_result(path, "load", command, tables, config.shown())
    assert read_result(path) == written
    assert "secret" not in path.read_text()
    assert [table.title for table in written.tables] == ["Throughput", "Latency, ms", "Failures"]
