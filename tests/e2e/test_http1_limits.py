"""The limits on bodies that hold by default, kept and passed by one, on a real server."""

import json

from tests.e2e.conftest import MODEL
from tests.e2e.raw_http import connected, request_bytes
from tests.e2e.server_process import ServerProcess

PATH = "/v1/completions"
COMPLETION = {"model": MODEL, "prompt": "hi", "max_tokens": 1}
BODY_BYTES = 8 * 1024 * 1024
DEPTH = 64


def nested(depth: int) -> bytes:
    """A good request with a field of its own that is nested like this; the object itself is the first level."""
    inner = "[" * (depth - 1) + "]" * (depth - 1)
    return f'{json.dumps(COMPLETION)[:-1]}, "metadata": {inner}}}'.encode()


def answer_to(server: ServerProcess, request: bytes) -> tuple[int, str | None]:
    """Status and code."""
    with connected(server.port) as client:
        client.send(request)
        answer = client.read_answer()
        return answer.status, None if answer.status == 200 else answer.code


def chunked(body: bytes) -> bytes:
    fields = ("content-type: application/json", "transfer-encoding: chunked")
    return request_bytes("POST", PATH, headers=fields) + b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)


def test_body_of_8_mib_is_taken_and_one_byte_more_is_not(server: ServerProcess) -> None:
    body = json.dumps(COMPLETION).encode().ljust(BODY_BYTES)
    too_large = (413, "body_too_large")
    assert answer_to(server, request_bytes("POST", PATH, body)) == (200, None)
    assert answer_to(server, request_bytes("POST", PATH, headers=(f"content-length: {BODY_BYTES + 1}",))) == too_large
    assert answer_to(server, chunked(body)) == (200, None)
    assert answer_to(server, chunked(body + b" ")) == too_large


def test_json_64_deep_is_read_and_one_deeper_is_not(server: ServerProcess) -> None:
    assert answer_to(server, request_bytes("POST", PATH, nested(DEPTH)))[1] != "invalid_json"
    assert answer_to(server, request_bytes("POST", PATH, nested(DEPTH + 1))) == (400, "invalid_json")
