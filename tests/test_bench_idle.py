"""The measurement of idle connections, on a few of them, against a real server."""

import pytest

from bench.idle import measure_all, percentile
from tests.certificates import needs_openssl


@pytest.mark.slow
@needs_openssl
def test_both_kinds_are_measured_while_they_come_and_once_they_idle() -> None:
    found = measure_all(60, 60)
    assert [(one.kind, one.num_connections) for one in found] == [("HTTP/1.1", 60), ("HTTP/2 over TLS", 60)]
    for one in found:
        assert [len(waits_ms) for waits_ms in one.waits_ms.values()] == [2, 200, 1000]


def test_percentile_is_a_value_that_was_seen() -> None:
    assert percentile([3.0, 1.0, 2.0], 0.99) == 3.0
    assert percentile([3.0, 1.0, 2.0], 0.5) == 2.0
