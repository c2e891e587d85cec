"""bench.lag: what is posted, and a short run beside a real server."""

import json

import pytest
import uvloop

from bench import lag, null_server


def test_bodies_of_the_lag_bench_are_as_long_as_they_say() -> None:
    assert len(lag.long_text()) == lag.BODY_BYTES
    assert lag.BODY_BYTES - 2048 < len(lag.long_ids()) <= lag.BODY_BYTES
    messages = json.loads(lag.many_messages())["messages"]
    assert len(messages) * 4 < null_server.MAX_MODEL_LEN


@pytest.mark.slow
def test_lag_is_noted_while_long_bodies_are_posted() -> None:
    name, posted_per_s, *waits = uvloop.run(lag.measure(lag.CASES[3], 0.5))
    assert name == "4,080 messages"
    assert float(posted_per_s or 0) > 0
    assert len(waits) == 6
    assert all(float(wait or 0) > 0 for wait in waits)
