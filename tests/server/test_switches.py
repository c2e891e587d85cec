"""The tour's switches: what each changes in a simulation of the engine, and what the route refuses."""

from typing import Any

import pytest

from server.switches import Numbers, Outcome, Switch, compare
from tests.server.simulated_server import as_caller, keyed_tenant, refusal_of, request, serving

KEY = "s3cret"


def both(switch: Switch, **numbers: Any) -> tuple[Outcome, Outcome]:
    found = compare(Numbers(switch=switch, **numbers))
    return found.off, found.on


def test_a_request_of_continuous_batching_does_not_wait_for_a_batch_to_end() -> None:
    off, on = both(Switch.CONTINUOUS_BATCHING)
    assert (on.num_tokens, on.whole_ms) < (off.num_tokens + 1, 0.9 * off.whole_ms)
    assert on.mean_first_token_ms < 0.8 * off.mean_first_token_ms


def test_chunks_of_prompts_hold_others_tokens_up_for_less_long() -> None:
    off, on = both(Switch.CHUNKED_PREFILL, prompt_tokens=1024, gap_ms=50)
    assert on.p95_gap_ms < off.p95_gap_ms / 1.5
    assert on.num_tokens == off.num_tokens


def test_a_prefix_that_is_found_is_not_computed_again() -> None:
    off, on = both(Switch.PREFIX_CACHE, prompt_tokens=512)
    assert (off.num_cached_tokens, on.num_cached_tokens) == (0, 15 * 384)
    assert on.mean_first_token_ms < off.mean_first_token_ms


def test_predicted_tokens_that_are_right_come_in_fewer_steps() -> None:
    off, on = both(Switch.SPECULATION, num_requests=4)
    assert on.num_tokens == off.num_tokens
    assert on.num_steps < 0.75 * off.num_steps
    assert on.whole_ms < 0.9 * off.whole_ms


def test_two_replicas_end_sooner_than_one() -> None:
    off, on = both(Switch.SECOND_REPLICA)
    assert on.whole_ms < off.whole_ms
    assert len(on.requests) == len(off.requests) == 16


@pytest.mark.parametrize("switch", [Switch.CANCEL, Switch.SLOW_CLIENT])
def test_what_half_of_the_clients_do_does_not_hold_the_others_up(switch: Switch) -> None:
    off, on = both(switch)
    ends_ms = [sum(end for _, _, end in one.requests[::2]) for one in (off, on)]
    assert ends_ms[1] <= 1.02 * ends_ms[0]
    assert on.longest_gap_ms <= 1.02 * off.longest_gap_ms
    assert (on.num_tokens < off.num_tokens) is (switch is Switch.CANCEL)


def test_who_is_refused_at_once_under_overload_leaves_the_time_to_others() -> None:
    off, on = both(Switch.OVERLOAD, num_requests=40)
    num_served = [sum(first is not None for _, first, _ in one.requests) for one in (off, on)]
    assert (off.num_refused, on.num_late) == (0, 0)
    assert (num_served[0] + off.num_late, num_served[1] + on.num_refused) == (40, 40)
    assert num_served[1] > 1.5 * num_served[0]
    assert on.num_tokens > 1.5 * off.num_tokens
    assert all(first - arrival <= 200 for arrival, first, _ in on.requests if first is not None)
    assert sum(arrival == end for arrival, _, end in on.requests) == on.num_refused
    idle = both(Switch.OVERLOAD, gap_ms=200)
    assert idle[0] == idle[1]


def test_the_route_answers_operators_within_bounds() -> None:
    with serving(keys=(KEY,), tenants=(keyed_tenant("acme"),)) as server:

        def ask(body: Any, key: str = KEY) -> Any:
            return server.ask(as_caller(request("POST", "/admin/simulate", body), key))

        found = ask({"switch": "prefix_cache", "num_requests": 3, "answer_tokens": 2}).json
        assert found["on"]["num_cached_tokens"] == 2 * 192
        assert [len(found[side]["requests"]) for side in ("off", "on")] == [3, 3]
        for body, param in (
            ({}, "switch"),
            ({"switch": "magic"}, "switch"),
            ({"switch": "cancel", "num_requests": 65}, "num_requests"),
            ({"switch": "cancel", "num_requests": 64}, "answer_tokens"),
            ({"switch": "cancel", "num_requests": 64, "answer_tokens": 1, "prompt_tokens": 1000}, "prompt_tokens"),
            ({"switch": "cancel", "step_ms": 0}, "step_ms"),
            ({"switch": "cancel", "speed": 1}, "speed"),
        ):
            answer = ask(body)
            assert (answer.status, answer.json["error"]["param"]) == (400, param)
        assert refusal_of(ask({"switch": "cancel"}, "acme")) == (403, "permission_denied")
