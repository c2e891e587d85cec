"""The settings of a client: each at the ends of its range and one past them."""

import pytest
from h2.errors import ErrorCodes

from server.wire.frame_gate import FrameRefused, read_settings
from tests.server.raw_http2 import ENABLE_PUSH, INITIAL_WINDOW, MAX_FRAME, MAX_LIST, MAX_STREAMS, TABLE_SIZE, settings

PROTOCOL = ErrorCodes.PROTOCOL_ERROR
ENABLE_CONNECT = 8


@pytest.mark.parametrize("code", [TABLE_SIZE, MAX_STREAMS, MAX_LIST])
def test_any_number_is_taken_for_a_size(code: int) -> None:
    payload = settings((code, 2**32 - 1)).content
    assert read_settings(payload) == (payload, [])


@pytest.mark.parametrize(
    ("code", "least", "most", "error"),
    [
        (ENABLE_PUSH, 0, 1, PROTOCOL),
        (INITIAL_WINDOW, 0, 2**31 - 1, ErrorCodes.FLOW_CONTROL_ERROR),
        (MAX_FRAME, 2**14, 2**24 - 1, PROTOCOL),
        (ENABLE_CONNECT, 0, 1, PROTOCOL),
    ],
)
def test_value_is_taken_at_the_ends_of_its_range_and_not_past_them(
    code: int, least: int, most: int, error: ErrorCodes
) -> None:
    for value in (least, most):
        payload = settings((code, value)).content
        assert read_settings(payload) == (payload, [])
    for value in {least - 1, most + 1} - {-1}:
        with pytest.raises(FrameRefused) as caught:
            read_settings(settings((code, value)).content)
        assert caught.value.code is error


def test_unknown_settings_are_left_out() -> None:
    known = settings((MAX_LIST, 5)).content
    assert read_settings(settings((0, 1), (7, 1), (MAX_LIST, 5), (9, 1), (0xFFFF, 1)).content) == (known, [])


def test_last_value_of_a_setting_holds_and_table_sizes_before_it_are_told() -> None:
    payload = settings((TABLE_SIZE, 7), (INITIAL_WINDOW, 1), (TABLE_SIZE, 5), (INITIAL_WINDOW, 2), (TABLE_SIZE, 9))
    assert read_settings(payload.content) == (settings((TABLE_SIZE, 9), (INITIAL_WINDOW, 2)).content, [7, 5])
