"""Peers that break HTTP, dribble, leave at every point or test the server's patience, over raw sockets."""

import itertools

import pytest

from tests.e2e.conftest import API_KEY, MODEL
from tests.e2e.raw_http import RawClient, ask, connected, post_bytes, request_bytes
from tests.e2e.server_process import ServerProcess

COMPLETIONS = "/v1/completions"
COMPLETION = {"model": MODEL, "prompt": "hi", "max_tokens": 4, "temperature": 0}
STREAM = COMPLETION | {"stream": True, "max_tokens": 2000, "ignore_eos": True}


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


SMUGGLED = (
    b"POST /v1/completions HTTP/1.1\r\nhost: h\r\ncontent-length: 10\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n"
    b"GET /health HTTP/1.1\r\nhost: h\r\n\r\n"
)


@pytest.mark.parametrize(
    ("data", "status", "code"),
    [
        (SMUGGLED, 400, "malformed_request"),
        (b"GET /health HTTP/1.1\nhost: h\n\n", 400, "malformed_request"),
        (b"GET /" + b"a" * 9000 + b" HTTP/1.1\r\n", 414, "request_line_too_long"),
    ],
    ids=["both lengths", "bare line feeds", "long line"],
)
def test_refused_head_gets_one_answer_and_the_connection_is_closed(
    server: ServerProcess, data: bytes, status: int, code: str
) -> None:
    """What else is refused: tests/server/http1_framing_cases.toml."""
    with connected(server.port) as client:
        client.send(data)
        answer = client.read_answer()
        assert (answer.status, answer.code, answer.headers["connection"]) == (status, code, "close")
        assert client.read_to_end() == b"", "nothing after it was taken for another request"


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


def test_every_answer_bears_an_id_the_clients_own_if_it_is_sane(server: ServerProcess) -> None:
    for sent, is_kept in (("my-id.7", True), ("a b", False), ("x" * 200, False)):
        with connected(server.port) as client:
            client.send(request_bytes("GET", "/nowhere", headers=(f"x-request-id: {sent}",)))
            assert (client.read_answer().headers["x-request-id"] == sent) is is_kept
