"""The reader of the recording peers, beside h11's client."""

import pytest

from tests.server.http1_reader import read_response
from tests.server.simulated_server import STREAM, SimulatedServer, answers, completion


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
