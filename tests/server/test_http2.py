"""The protocol's reading side: whatever comes, it answers with events or a GOAWAY."""

from hypothesis import given, settings
from hypothesis import strategies as st

from fuzz.http2 import check
from server.wire.http2 import read_request
from server.wire.limits import HeadLimits
from tests.server.http2_client import fields


@settings(deadline=None, max_examples=300)
@given(st.binary(max_size=300))
def test_no_input_is_more_than_a_refusal(data: bytes) -> None:
    """Arbitrary frames behind a good beginning, whole and split, read and answered: events, or a GOAWAY."""
    check(data)


def query_of(path: str) -> str:
    pairs = [(name.encode(), value.encode()) for name, value in fields(path=path)]
    return read_request(1, pairs, False, HeadLimits()).query


def test_a_path_that_is_said_again_takes_no_more_room_until_others_have_come() -> None:
    first = query_of("/read?asked")
    assert query_of("/read?asked") is first
    for number in range(100):
        query_of(f"/read?{number}")
    assert query_of("/read?asked") is not first
