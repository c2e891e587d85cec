"""bench.lag and bench.memory: what they send, what they tell, and a short run beside a real server."""

import json
from itertools import islice

import pytest
import uvloop

from bench import lag, memory, null_server


def test_bodies_of_the_lag_bench_are_as_long_as_they_say() -> None:
    assert len(lag.long_text()) == lag.BODY_BYTES
    assert lag.BODY_BYTES * 0.7 < len(lag.long_ids()) <= lag.BODY_BYTES
    messages = json.loads(lag.many_messages())["messages"]
    assert len(messages) * 4 < null_server.MAX_MODEL_LEN
    first = [json.loads(body) for body in islice(lag.forms(1), 40)]
    assert len({json.dumps(one) for one in first if "tools" not in one}) >= 30, (
        "those that can be compiled are new each time"
    )
    assert any("guided_json" in one for one in first)


@pytest.mark.slow
def test_lag_is_noted_while_long_bodies_are_posted() -> None:
    name, posted_per_s, *waits = uvloop.run(lag.measure("4,080 messages", 0.5)).values()
    assert name == "4,080 messages"
    assert float(posted_per_s or 0) > 0
    assert len(waits) == 9
    assert all(float(wait or 0) > 0 for wait in waits[:6])
    assert all(float(wait or 0) >= 0 for wait in waits[6:]), "what was computed can be less than the clock shows"


def test_memory_beyond_the_cache_and_the_promise_is_told() -> None:
    looks = [memory.Look(0, 0.0, 0.0, 250 * 10**6)]
    looks += [memory.Look(count, 1.0, 1.0, size * 10**6) for count, size in ((10, 656), (20, 657))]
    assert [row[0::5] for row in memory.table_of_looks(looks, "t").rows] == [(0, "yes"), (10, "yes"), (20, "no")]


@pytest.mark.slow
def test_a_mixed_load_is_answered_and_its_memory_looked_at() -> None:
    looks = memory.measure(memory.DEMO_MODEL, 12, 60.0, None)
    assert [look.num_requests for look in looks] == [0, 2, 4, 6, 8, 10, 12]
    assert all(look.size_bytes > 10**7 for look in looks)
