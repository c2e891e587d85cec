"""The reader of the recording peers, beside h11's client."""

import pytest

from tests.server.http1_reader import read_response
from tests.server.simulated_server import STREAM, SimulatedServer, answers, completion

FIXED = b"HTTP/1.1 404 Not Found\r\ncontent-length: 2\r\n\r\n{}"
CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nab\r\n0\r\n\r\n"


def answered(data: bytes) -> bytes:
    server = SimulatedServer()
    transport = server.send(data)
    server.close()
    return bytes(transport.received)


@pytest.mark.parametrize("fields", [{}, STREAM, {"max_tokens": "many"}])
def test_reads_what_h11_reads_however_much_has_come(fields: dict[str, object]) -> None:
    received = answered(completion(**fields))
    for end in range(len(received) + 1):
        response, known = read_response(received[:end]), answers(received[:end])
        found = [] if response is None else [(response.status, response.headers, response.body, response.is_complete)]
        assert found == [(answer.status, answer.headers, answer.body, answer.is_complete) for answer in known]
    assert found[0][3]


@pytest.mark.parametrize(
    "received",
    [
        FIXED + b"\n",
        CHUNKED + b"0",
        FIXED.replace(b"404", b"40"),
        FIXED.replace(b"404", b"604"),
        FIXED.replace(b"HTTP/1.1", b"HTTP/1.0"),
        FIXED.replace(b": ", b":"),
        FIXED.replace(b"content", b"con tent"),
        FIXED.replace(b"\r\n\r\n", b"\r\ncontent-length: 2\r\n\r\n"),
        CHUNKED.replace(b"\r\n\r\n2", b"\r\ncontent-length: 2\r\n\r\n2"),
        CHUNKED.replace(b"chunked", b"gzip"),
        CHUNKED.replace(b"2\r\nab", b"2\r\nabc"),
        CHUNKED.replace(b"2\r\nab", b"1\r\nab"),
        CHUNKED.replace(b"2\r\nab", b"2;x=y\r\nab"),
        CHUNKED.replace(b"2\r\nab", b"-2\r\nab"),
    ],
)
def test_refuses_what_is_no_response_or_more_than_one(received: bytes) -> None:
    with pytest.raises(AssertionError):
        read_response(received)
