"""Peers that break HTTP, dribble, leave at every point or test the server's patience, over raw sockets."""

import itertools
import json

import pytest

from tests.e2e.conftest import API_KEY, MODEL
from tests.e2e.raw_http import RawClient, ask, connected, post_bytes, request_bytes
from tests.e2e.server_process import ServerProcess

COMPLETIONS = "/v1/completions"
COMPLETION = {"model": MODEL, "prompt": "hi", "max_tokens": 4, "temperature": 0}
STREAM = COMPLETION | {"stream": True, "max_tokens": 2000, "ignore_eos": True}
HOST = b"host: h\r\n"
TEN = b"content-length: 10\r\n"
CHUNKED = b"transfer-encoding: chunked\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\n"

BROKEN = {
    "both lengths": POST + HOST + TEN + CHUNKED + b"\r\n0\r\n\r\nGET /health HTTP/1.1\r\nhost: h\r\n\r\n",
    "two lengths": POST + HOST + TEN + b"content-length: 11\r\n\r\n0123456789",
    "a list of lengths": POST + HOST + b"content-length: 10, 10\r\n\r\n0123456789",
    "a signed length": POST + HOST + b"content-length: +10\r\n\r\n0123456789",
    "a coding before chunked": POST + HOST + b"transfer-encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
    "a coding that looks like chunked": POST + HOST + b"transfer-encoding: xchunked\r\n\r\n0\r\n\r\n",
    "a space before the colon": POST + HOST + b"transfer-encoding : chunked\r\n\r\n0\r\n\r\n",
    "a folded line": POST + HOST + b"x-a: 1\r\n b\r\n\r\n",
    "bare line feeds": b"GET /health HTTP/1.1\nhost: h\n\n",
    "a carriage return within": b"GET /health HTTP/1.1\r\nhost: h\rx: y\r\n\r\n",
    "a NUL in a value": b"GET /health HTTP/1.1\r\nhost: h\r\nx: a\x00b\r\n\r\n",
    "no host": b"GET /health HTTP/1.1\r\n\r\n",
    "two hosts": b"GET /health HTTP/1.1\r\nhost: a\r\nhost: b\r\n\r\n",
    "HTTP/2.0 in the line": b"GET /health HTTP/2.0\r\nhost: h\r\n\r\n",
    "HTTP/1.0 with chunks": b"POST /v1/completions HTTP/1.0\r\nhost: h\r\n" + CHUNKED + b"\r\n0\r\n\r\n",
    "no HTTP at all": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
    "a chunk size that is none": POST + HOST + CHUNKED + b"\r\nxyz\r\n",
    "a chunk longer than its size": POST + HOST + CHUNKED + b"\r\n2\r\nabc\r\n0\r\n\r\n",
    "a negative chunk": POST + HOST + CHUNKED + b"\r\n-1\r\n",
}


@pytest.mark.parametrize("data", BROKEN.values(), ids=BROKEN.keys())
def test_malformed_request_gets_one_400_and_the_connection_is_closed(server: ServerProcess, data: bytes) -> None:
    with connected(server.port) as client:
        client.send(data)
        answer = client.read_answer()
        assert (answer.status, answer.code) == (400, "malformed_request")
        assert answer.headers["connection"] == "close"
        assert client.read_to_end() == b"", "nothing after it was taken for another request"


@pytest.mark.parametrize(
    ("data", "status", "code"),
    [
        (b"GET /" + b"a" * 9000 + b" HTTP/1.1\r\n", 414, "request_line_too_long"),
        (b"GET / HTTP/1.1\r\nx: " + b"a" * 17000, 431, "headers_too_large"),
        (b"GET / HTTP/1.1\r\n" + b"x: y\r\n" * 101 + b"\r\n", 431, "headers_too_large"),
        (b"CONNECT a:1 HTTP/1.1\r\nhost: a:1\r\n\r\n", 501, "not_implemented"),
    ],
    ids=["line", "head", "fields", "connect"],
)
def test_head_over_a_limit_is_refused(server: ServerProcess, data: bytes, status: int, code: str) -> None:
    with connected(server.port) as client:
        client.send(data)
        answer = client.read_answer()
        assert (answer.status, answer.code) == (status, code)
        assert client.read_to_end() == b""


def test_declared_body_over_the_limit_is_refused_before_it_is_sent(strict_server: ServerProcess) -> None:
    head = request_bytes(
        "POST", COMPLETIONS, headers=("content-length: 20000", "expect: 100-continue"), api_key=API_KEY
    )
    with connected(strict_server.port) as client:
        client.send(head)
        status, _ = client.read_head()
        assert status == 413, "no 100 Continue before it"
        assert client.read_to_end().endswith(b"}")


def test_chunked_body_over_the_limit_is_refused_when_it_passes_it(strict_server: ServerProcess) -> None:
    head = request_bytes("POST", COMPLETIONS, headers=("transfer-encoding: chunked",), api_key=API_KEY)
    with connected(strict_server.port) as client:
        client.send(head + (b"1000\r\n" + b" " * 4096 + b"\r\n") * 5)
        answer = client.read_answer()
        assert (answer.status, answer.code) == (413, "body_too_large")
        assert client.read_to_end() == b""


def test_body_of_the_limits_size_is_taken(strict_server: ServerProcess) -> None:
    body = json.dumps(COMPLETION).encode().ljust(16 * 1024)
    assert ask(strict_server.port, "POST", COMPLETIONS, body, API_KEY).status == 200


@pytest.mark.parametrize(
    "begun",
    [
        b"GET /hea",
        request_bytes("POST", COMPLETIONS, headers=("content-length: 100",), api_key=API_KEY) + b"{",
        request_bytes("POST", COMPLETIONS, headers=("transfer-encoding: chunked",), api_key=API_KEY) + b"1\r\n{",
    ],
    ids=["head", "counted body", "chunked body"],
)
def test_request_that_never_ends_is_answered_408_and_closed(strict_server: ServerProcess, begun: bytes) -> None:
    with connected(strict_server.port) as client:
        client.send(begun)
        answer = client.read_answer()
        assert (answer.status, answer.code) == (408, "request_timeout")
        assert answer.headers["connection"] == "close"
        assert client.read_to_end() == b""


def test_connection_without_a_request_is_closed_without_an_answer(strict_server: ServerProcess) -> None:
    with connected(strict_server.port) as client:
        assert client.read_to_end() == b""


def test_connection_over_the_cap_is_closed_and_the_others_go_on(strict_server: ServerProcess) -> None:
    clients: list[RawClient] = []
    try:
        for _ in range(100):  # the connection of who asked before may still be counted
            clients.append(RawClient(strict_server.port))
            if not clients[-1].is_kept_open():
                clients.pop().close()
            if len(clients) == 8:
                break
        with connected(strict_server.port) as ninth:
            assert not ninth.is_kept_open()
        assert clients[7].is_kept_open()
    finally:
        for client in clients:
            client.close()


LARGE = STREAM | {"user": "u" * 500_000}


@pytest.mark.parametrize(
    ("content", "cuts"),
    [
        (STREAM, [*range(0, len(post_bytes(COMPLETIONS, STREAM)) + 1, 3), None]),
        (LARGE, [1_000, 100_000, -1, None]),
    ],
    ids=["any byte", "while a large body is read or prepared"],
)
def test_client_that_leaves_in_the_midst_of_its_request_leaves_nothing_behind(
    server: ServerProcess, content: dict[str, object], cuts: list[int | None]
) -> None:
    request = post_bytes(COMPLETIONS, content)
    for num_bytes, is_reset in itertools.product(cuts, (False, True)):
        with connected(server.port) as client:
            client.send(request[:num_bytes])
            if is_reset:
                client.reset()
    server.wait_quiet()
    assert ask(server.port, "GET", "/ready").status == 200


def test_client_that_leaves_after_any_byte_of_its_answer_leaves_nothing_behind(server: ServerProcess) -> None:
    request = post_bytes(COMPLETIONS, STREAM)
    for num_bytes in [*range(1, 8), *range(8, 1200, 47)]:
        with connected(server.port) as client:
            client.send(request)
            client.read_exactly(num_bytes)
    server.wait_quiet()
    assert ask(server.port, "GET", "/ready").status == 200


@pytest.mark.parametrize("num_bytes", [0, 10, 60, -3], ids=["nothing", "line", "head", "body"])
def test_half_closed_socket_is_a_client_that_left(server: ServerProcess, num_bytes: int) -> None:
    with connected(server.port) as client:
        client.send(post_bytes(COMPLETIONS, COMPLETION)[:num_bytes])
        client.half_close()
        assert client.read_to_end() == b""


def test_request_byte_by_byte_is_the_same_request(server: ServerProcess) -> None:
    request = post_bytes(COMPLETIONS, COMPLETION)
    texts = set()
    for pieces in ([request], [request[i : i + 1] for i in range(len(request))]):
        with connected(server.port) as client:
            for piece in pieces:
                client.send(piece)
            texts.add(client.read_answer().json["choices"][0]["text"])
            assert client.is_kept_open()
    assert len(texts) == 1


def test_pipelined_requests_are_answered_in_order_on_one_connection(server: ServerProcess) -> None:
    requests = [
        request_bytes("GET", "/health"),
        post_bytes(COMPLETIONS, COMPLETION | {"stream": True}),
        request_bytes("HEAD", "/v1/models"),
        post_bytes(COMPLETIONS, {}),
        post_bytes(COMPLETIONS, COMPLETION),
        request_bytes("GET", "/nowhere"),
    ]
    with connected(server.port) as client:
        client.send(b"".join(requests))
        assert client.read_answer().json == {"status": "ok"}
        assert client.read_answer().body.endswith(b"data: [DONE]\n\n")
        head = client.read_answer(has_body=False)
        assert head.status == 200
        assert int(head.headers["content-length"]) > 0
        assert client.read_answer().status == 400
        assert client.read_answer().json["usage"]["completion_tokens"] == 4
        assert client.read_answer().status == 404
        assert client.is_kept_open()


def test_chunked_request_is_read_like_a_counted_one(server: ServerProcess) -> None:
    body = json.dumps(COMPLETION).encode()
    chunks = b"".join(b"%x;a=b\r\n%b\r\n" % (len(piece), piece) for piece in (body[:1], body[1:30], body[30:]))
    with connected(server.port) as client:
        client.send(POST + HOST + CHUNKED + b"\r\n" + chunks + b"0\r\nx-trailer: 1\r\n\r\n")
        assert client.read_answer().status == 200
        assert client.is_kept_open()


def test_http10_stream_ends_with_the_connection(server: ServerProcess) -> None:
    request = post_bytes(COMPLETIONS, COMPLETION | {"stream": True}).replace(b"HTTP/1.1", b"HTTP/1.0")
    with connected(server.port) as client:
        client.send(request)
        answer = client.read_answer()
        assert answer.status == 200
        assert "transfer-encoding" not in answer.headers
        assert answer.headers["connection"] == "close"
        assert answer.body.endswith(b"data: [DONE]\n\n")


def test_client_that_asks_for_close_gets_it(server: ServerProcess) -> None:
    with connected(server.port) as client:
        client.send(request_bytes("GET", "/health", headers=("connection: close",)))
        answer = client.read_answer()
        assert (answer.status, answer.headers["connection"]) == (200, "close")
        assert client.read_to_end() == b""


def test_every_answer_bears_an_id_the_clients_own_if_it_is_sane(server: ServerProcess) -> None:
    for sent, is_kept in (("my-id.7", True), ("a b", False), ("x" * 200, False)):
        with connected(server.port) as client:
            client.send(request_bytes("GET", "/nowhere", headers=(f"x-request-id: {sent}",)))
            assert (client.read_answer().headers["x-request-id"] == sent) is is_kept


def test_slow_reader_pauses_its_own_stream_and_loses_nothing(server: ServerProcess) -> None:
    asked = STREAM | {"max_tokens": 700, "stream_options": {"include_usage": True}}
    with connected(server.port, receive_buffer_bytes=4096) as slow:
        slow.send(post_bytes(COMPLETIONS, asked))
        server.wait_metric("steploop_requests_paused", 1)
        assert ask(server.port, "POST", COMPLETIONS, json.dumps(COMPLETION).encode()).status == 200
        answer = slow.read_answer()
        assert answer.body.endswith(b"data: [DONE]\n\n")
        assert b'"completion_tokens":700' in answer.body
