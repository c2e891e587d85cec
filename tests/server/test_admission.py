"""Who may join the queue: bounds, early refusals, expected waits, and what is told to those who are sent away."""

import asyncio
import math
from collections.abc import Callable
from ipaddress import ip_network
from typing import Any

import pytest

from core.errors import ServiceError
from core.outlook import Outlook
from core.plan import RunnerLimits
from core.queue import AGEING_S
from core.types import EngineStats, Request, SamplingParams, Submit
from server.gate.admission import (
    LEAST_MARGIN,
    LEAST_RETRY_S,
    MOST_MARGIN,
    PATIENCE_S,
    Admission,
    Contender,
    Place,
    QueueLimits,
    SharedRoom,
    backlog_of,
)
from server.gate.tenants import DeadlineTable, Limits
from server.generation import OFFLOAD_BYTES
from server.listening.clients import ClientRules
from tests.server.fakes import PEER, MemoryTransport
from tests.server.simulated_server import (
    STREAM,
    TOKENIZER,
    Answer,
    SimulatedServer,
    as_caller,
    completion,
    keyed_tenant,
    request,
    serving,
    the_answer,
    with_lines,
)

ONE_AT_A_TIME = RunnerLimits(64, 4, 1, 16, 200, TOKENIZER.vocab_size)
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\n%sContent-Length: %d\r\n\r\n"


def code(answer: Answer) -> tuple[int, str]:
    return answer.status, answer.json["error"]["code"]


def measured(server: SimulatedServer) -> None:
    """Let the cost model learn."""
    server.ask(completion(max_tokens=30))


def num_submitted(server: SimulatedServer) -> int:
    return len([message for message in server.posted if isinstance(message, Submit)])


# Bounds


def test_prompts_that_wait_are_bounded_in_tokens() -> None:
    with serving(limits=ONE_AT_A_TIME, max_queue_tokens=60) as server:
        first = server.send(completion(max_tokens=30))
        server.step()
        waiting = server.send(completion(prompt=[5] * 40))
        refused = server.send(completion(prompt=[5] * 30))
        short = server.send(completion(prompt=[5] * 20))
        assert code(the_answer(refused)) == (503, "overloaded")
        assert (
            "has 40 of at most 60 prompt tokens waiting, and this request has 30. Try"
            in the_answer(refused).json["error"]["message"]
        )
        early = server.send(HEAD % (b"", 50))
        assert code(the_answer(early)) == (503, "overloaded")  # its body has not come
        assert "has 60 of at most 60 prompt tokens waiting. Try" in the_answer(early).json["error"]["message"]
        server.run()
        assert [the_answer(one).status for one in (first, waiting, short)] == [200, 200, 200]


@pytest.mark.parametrize(
    ("bound", "fields"),
    [({"max_queue_tokens": 10}, {"prompt": [5] * 40}), ({"max_queue_bytes": 100}, {"user": "z" * OFFLOAD_BYTES})],
)
def test_a_single_prompt_or_body_may_be_larger_than_the_bound(bound: dict[str, int], fields: dict[str, Any]) -> None:
    with serving(**bound) as server:
        assert server.ask(completion(**fields)).status == 200


def test_bodies_that_wait_to_be_tokenized_are_bounded() -> None:
    with serving(max_queue_bytes=2 * OFFLOAD_BYTES) as server:
        gate: asyncio.Future[None] = server.loop.create_future()

        async def offload(work: Callable[[], Any]) -> Any:
            await gate
            return work()

        server.generations.offload = offload
        large = {"user": "z" * OFFLOAD_BYTES}
        first = server.send(completion(**large))
        second = server.send(request("POST", "/tokenize", {"prompt": "step", **large}))
        assert code(the_answer(second)) == (503, "overloaded")
        early = server.send(HEAD % (b"", 2 * OFFLOAD_BYTES))
        assert code(the_answer(early)) == (503, "overloaded")
        small = server.send(completion(max_tokens=1))
        gate.set_result(None)
        server.run()
        assert [the_answer(one).status for one in (first, small)] == [200, 200]
        assert server.ask(request("POST", "/tokenize", {"prompt": "step", **large})).status == 200


def test_each_refused_is_told_a_time_at_which_there_will_be_room_for_it() -> None:
    """Sixty come at once and come back when they were told to: hardly any has to come a third time."""
    with serving(limits=ONE_AT_A_TIME, max_requests=2) as server:
        server.ask(completion(max_tokens=30))  # the cost model learns
        due = [(server.loop.time(), rival) for rival in range(60)]
        num_tries = [0] * 60
        end_s = due[0][0] + 600
        while due and server.loop.time() < end_s:
            when_s, rival = due.pop(0)
            server.run_until(lambda when_s=when_s: server.loop.time() >= when_s, when_s)  # type: ignore[misc]
            num_tries[rival] += 1
            transport = server.send(completion(prompt=[rival + 1] * 8, max_tokens=40))
            if transport.received:
                refused = the_answer(transport)
                assert code(refused) == (503, "overloaded")
                assert f"Try again in {refused.headers['retry-after']} s" in refused.json["error"]["message"]
                due.append((server.loop.time() + float(refused.headers["retry-after-ms"]) / 1e3, rival))
                due.sort()
        assert not due
        assert sum(tries <= 2 for tries in num_tries) >= 54
        assert max(num_tries) <= 4


# Shares


def keyed(name: str, **fields: Any) -> bytes:
    return as_caller(completion(**fields), name)


FLOOD_AND_LIGHT = (keyed_tenant("flood"), keyed_tenant("light"))
UNREAD = {"max_tokens": 180, "n": 2, **STREAM}
FEW_BLOCKS_EACH = RunnerLimits(1024, 4, 8, 16, 200, TOKENIZER.vocab_size)


def fill_with_unread(server: SimulatedServer, name: str, num: int) -> list[MemoryTransport]:
    """So many streams of a tenant's, whose reader has stopped; all are paused."""
    flood = [server.send(keyed(name, seed=i, **UNREAD), peer_reads=False) for i in range(num)]
    server.run_until(lambda: server.stats.num_paused == num)
    return flood


def test_paused_streams_of_one_tenant_leave_room_for_another() -> None:
    with serving(limits=FEW_BLOCKS_EACH, tenants=FLOOD_AND_LIGHT, max_requests=16) as server:
        flood = fill_with_unread(server, "flood", 16)
        light = [server.send(keyed("light", prompt=[i + 1] * 4)) for i in range(2)]
        assert server.generations.admission.num_requests == 16
        server.run_until(lambda: all(one.received and the_answer(one).is_complete for one in light))
        assert [the_answer(one).status for one in light] == [200, 200]
        assert server.stats.num_paused == 14  # those that were paused first had to go, and no more than it took
        for transport in flood:
            transport.peer_read()
            transport.peer_reads = True
        server.run()
        errors = [event["error"] for one in flood for event in the_answer(one).events if "error" in event]
        assert [error["code"] for error in errors] == ["overloaded"] * 2
        reasons = [the_answer(one).finish_reason() for one in flood]
        assert reasons.count("length") == 14


def test_paused_streams_go_for_the_tenants_own_requests_too_once_their_reader_has_stopped_for_a_while() -> None:
    with serving(limits=FEW_BLOCKS_EACH, tenants=FLOOD_AND_LIGHT[:1], max_requests=4) as server:
        fill_with_unread(server, "flood", 4)
        assert code(the_answer(server.send(keyed("flood")))) == (503, "overloaded")
        server.run_for(PATIENCE_S)
        served = server.send(keyed("flood"))
        server.run_until(lambda: bool(served.received) and the_answer(served).is_complete)
        assert the_answer(served).status == 200


def test_what_one_tenant_has_above_its_part_it_gives_back_when_others_ask() -> None:
    bounded = [keyed_tenant(name, limits=Limits(requests_per_minute=60)) for name in ("flood", "light")]
    with serving(limits=ONE_AT_A_TIME, tenants=tuple(bounded), max_requests=16) as server:
        flood = [server.send(keyed("flood", prompt=[i + 1] * 4, max_tokens=30)) for i in range(16)]
        server.step()
        light = [server.send(keyed("light", prompt=[i + 50] * 4)) for i in range(4)]
        more = server.send(keyed("flood"))
        server.run()
        bucket = server.gate.quotas._accounts["flood", None].requests
        assert bucket is not None
        assert bucket.capacity - bucket.available(server.gate.quotas._clock()) <= 13  # who had to go counts for nothing
        assert [the_answer(one).status for one in flood] == [200] * 13 + [503] * 3  # the latest, not what has begun
        assert [the_answer(one).status for one in light] == [200, 200, 200, 503]
        assert code(the_answer(more)) == (503, "overloaded")
        assert (
            "gives one tenant at most 75% of what other tenants leave free" in the_answer(more).json["error"]["message"]
        )


def test_tokens_and_bytes_are_bounded_by_share_likewise() -> None:
    with serving(limits=ONE_AT_A_TIME, tenants=FLOOD_AND_LIGHT, max_queue_tokens=100) as server:
        server.send(keyed("other_than_flood", max_tokens=1))
        first = server.send(keyed("flood", max_tokens=100))
        server.step()
        flood = [server.send(keyed("flood", prompt=[i + 1] * 45, max_tokens=2)) for i in range(2)]
        light = server.send(keyed("light", prompt=[60] * 20))
        server.run()
        assert [the_answer(one).status for one in (first, *flood, light)] == [200, 200, 503, 200]
    with serving(tenants=FLOOD_AND_LIGHT, max_queue_bytes=2000) as server:
        flood = [server.send(keyed("flood", prompt=[i + 1] * 4, user="z" * 700)) for i in range(2)]
        light = server.send(keyed("light", user="z" * 700))
        server.run()
        assert [the_answer(one).status for one in (*flood, light)] == [200, 503, 200]


BEHIND_PROXY = ClientRules(trusted_proxies=(ip_network(f"{PEER.address}/32"),))


def of(address: str, **fields: Any) -> bytes:
    return with_lines(completion(**fields), f"X-Forwarded-For: {address}")


def test_where_nobody_says_who_he_is_each_network_has_its_share() -> None:
    with serving(limits=ONE_AT_A_TIME, max_requests=8, clients=BEHIND_PROXY) as server:
        flood = [
            server.send(of(f"2001:db8::{i + 1:x}", prompt=[i + 1] * 4, max_tokens=30))  # one /64
            for i in range(8)
        ]
        others = [server.send(of(address)) for address in ("2001:db8:0:1::1", "192.0.2.7")]
        server.run()
        assert [the_answer(one).status for one in flood] == [200] * 6 + [503] * 2
        assert [the_answer(one).status for one in others] == [200, 200]


def test_the_engine_shares_by_network_too_where_nobody_says_who_he_is() -> None:
    with serving(limits=ONE_AT_A_TIME, clients=BEHIND_PROXY) as server:
        flood = [server.send(of("192.0.2.1", prompt=[i + 1] * 4, max_tokens=30)) for i in range(8)]
        server.step()
        light = server.send(of("192.0.2.7", max_tokens=2))
        server.run_until(lambda: bool(light.received))
        assert sum(bool(one.received) for one in flood) < 3
        server.run()


# Deadlines


@pytest.mark.parametrize("how", [{}, STREAM])
def test_deadline_that_cannot_be_met_is_refused_at_once(how: dict[str, Any]) -> None:
    with serving(limits=ONE_AT_A_TIME) as server:
        measured(server)
        busy = server.send(completion(max_tokens=150))
        for _ in range(5):
            server.step()
        before = num_submitted(server)
        refused = the_answer(server.send(completion(deadlines={"ttft_ms": 200}, **how)))
        assert code(refused) == (503, "deadline_unattainable")
        assert "is expected in" in refused.json["error"]["message"]
        assert "is in 200 ms" in refused.json["error"]["message"]
        assert int(refused.headers["retry-after"]) >= 1
        assert num_submitted(server) == before
        patient = server.send(completion(deadlines={"ttft_ms": 60_000}, **how))
        server.run()
        assert (the_answer(busy).status, the_answer(patient).status) == (200, 200)


@pytest.mark.parametrize(("ttft_ms", "status"), [(300, 200), (5, 503)], ids=["thought too slow", "less than a step"])
def test_idle_server_refuses_only_what_cannot_be_in_time(ttft_ms: int, status: int) -> None:
    with serving() as server:
        measured(server)
        server.generations.admission.margin = MOST_MARGIN
        answer = server.ask(completion(prompt=[5] * 100, deadlines={"ttft_ms": ttft_ms}))
        assert answer.status == status
        assert status == 200 or code(answer) == (503, "deadline_unattainable")


def test_tenants_deadline_refuses_before_the_body_is_read() -> None:
    hurried, other = (
        keyed_tenant(name, deadlines=DeadlineTable(ttft_ms=ttft_ms))
        for name, ttft_ms in (("hurried", 50), ("other", None))
    )
    with serving(limits=ONE_AT_A_TIME, tenants=(hurried, other)) as server:
        busy = server.send(keyed("other", max_tokens=150))
        for _ in range(30):
            server.step()
        refused = server.send(HEAD % (b"x-api-key: hurried\r\n", 50))
        assert code(the_answer(refused)) == (503, "deadline_unattainable")
        server.run()
        assert the_answer(busy).status == 200


def test_flood_of_one_tenant_refuses_nobody_elses_requests() -> None:
    limits = RunnerLimits(64, 4, 8, 16, 200, TOKENIZER.vocab_size)
    with serving(limits=limits, tenants=FLOOD_AND_LIGHT) as server:
        for i in range(40):
            server.send(keyed("flood", prompt=[i] * 60, max_tokens=4, deadlines={"ttft_ms": 60_000}))
        for _ in range(30):
            server.step()
        in_time = {"deadlines": {"ttft_ms": 1500}}
        refused = server.send(keyed("flood", prompt=[50] * 60, max_tokens=4, **in_time))
        served = server.send(keyed("light", prompt=[5] * 10, max_tokens=4, **in_time))
        server.run()
        assert code(the_answer(refused)) == (503, "deadline_unattainable")
        assert the_answer(served).status == 200


# Rooms that tenants share


def test_a_tenant_alone_has_all_of_the_room_and_others_find_some_of_what_is_left() -> None:
    room = SharedRoom(16)
    room.take("a", 16)
    assert not room.exceeds_share("a", 0)
    assert room.missing(1) == 1
    assert room.borrower() == "a"
    assert not room.exceeds_share("b", 1)
    room.take("a", -1)
    room.take("b", 1)
    assert [room.exceeds_share("b", num) for num in (2, 3)] == [False, True]  # what "a" has borrowed does not count
    room.take("a", -3)
    assert room.borrower() is None
    assert room.exceeds_share("a", 1)
    assert [room.exceeds_share("b", num) for num in (1, 3)] == [False, True]  # of the 4 that "a" leaves
    room.take("a", -12)
    room.take("b", -1)
    assert (room.total, room.held) == (0, {})


@pytest.mark.parametrize("num_tenants", [2, 5, 40])
def test_however_many_take_all_they_may_there_is_room_for_one_who_comes(num_tenants: int) -> None:
    room = SharedRoom(1024)
    for _ in range(1024):
        for tenant in range(num_tenants):
            name = str(tenant)
            if not room.exceeds_share(name, 1) and (room.missing(1) <= 0):
                room.take(name, 1)
    assert not room.exceeds_share("new", 1)
    assert room.missing(1) <= 0
    assert min(room.held.values()) >= 0.9 * max(room.held.values()) - 1 or num_tenants == 2


# The order of lines


def make_request(
    name: str,
    tenant: str,
    priority: int = 0,
    deadline_s: float | None = None,
    share: int = 1,
    max_tokens: int = 1,
) -> Request:
    return Request(
        request_id=name,
        prompt_ids=(1,) * 10,
        sampling=SamplingParams(max_tokens=max_tokens),
        arrival_s=0.0,
        tenant=tenant,
        share=share,
        priority=priority,
        deadline_s=deadline_s,
    )


def queue_of(
    *requests: Request,
    stats: Callable[[], EngineStats] = EngineStats,
    clock: Callable[[], float] = lambda: 0.0,
) -> tuple[Admission, list[Place]]:
    limits = QueueLimits(max_requests=1000, max_tokens=10_000, max_bytes=10_000)
    admission = Admission(limits, stats, clock)
    places = []
    for one in requests:
        place = admission.enter(one.tenant, 1)
        place.admit([one], math.inf, 0.0)
        places.append(place)
    return admission, places


SIX_AND_THREE = (
    *(make_request(f"a{i}", "a") for i in range(6)),
    *(make_request(f"b{i}", "b", priority=1) for i in range(3)),
)
A_HAS_SHARE_3 = (*(make_request(f"a{i}", "a", share=3) for i in range(9)), make_request("b", "b"))
ONE_IS_DUE = (make_request("a", "a"), make_request("b", "a", deadline_s=5.0))


@pytest.mark.parametrize(
    ("waiting", "contender", "num_ahead"),
    [
        (SIX_AND_THREE, Contender(0, "a", 1, False), 9),  # its own, and those of higher classes
        (SIX_AND_THREE, Contender(0, "c", 1, False), 1 + 3),  # of another tenant a fair share
        (SIX_AND_THREE, Contender(0, "c", 2, False), 1 + 3),
        (SIX_AND_THREE, Contender(1, "b", 1, False), 3),
        (SIX_AND_THREE, Contender(2, "c", 1, False), 0),
        (A_HAS_SHARE_3, Contender(0, "b", 1, False), 1 + 6),
        (ONE_IS_DUE, Contender(0, "a", 1, True), 1),  # deadlines pass those without
        (ONE_IS_DUE, Contender(0, "a", 1, False), 2),
    ],
)
def test_what_is_ahead_follows_class_share_and_deadlines(
    waiting: tuple[Request, ...], contender: Contender, num_ahead: int
) -> None:
    admission, _ = queue_of(*waiting)
    assert admission.estimate(contender, backlog_of(1, 1), 1.0).position == num_ahead


def test_position_counts_what_came_before_in_the_same_line() -> None:
    _, places = queue_of(*(make_request(name, "a") for name in "abcd"))
    places[1].leave(0.0)
    assert [view and view.position for view in (place.view() for place in places)] == [0, None, 1, 2]


def test_a_request_with_its_first_token_or_that_left_is_no_longer_ahead() -> None:
    admission, (first, second, _) = queue_of(*(make_request(name, "a") for name in "abc"))
    first.on_first_token(0, 1.0)
    second.leave(1.0)
    num_ahead = admission.estimate(Contender(0, "a", 1, False), backlog_of(1, 1), 1.0).position
    assert (num_ahead, admission.num_decoding, admission.num_requests) == (1, 1, 2)
    first.on_choice_end()
    first.leave(2.0)
    assert (admission.num_decoding, admission.num_requests, admission.num_bytes) == (0, 1, 1)


# How long it takes

STEP_S = 0.1


def measured_stats(tokens_left: float = 100.0, first_left: float = 100.0) -> EngineStats:
    """Steps of 0.1 s, and as much again for each token of a prompt."""
    return EngineStats(
        outlook=Outlook(
            step_cost_s=(STEP_S, STEP_S, 0.0, 0.0, 0.0),
            max_sequences=8,
            max_batch_tokens=64,
            num_kv_tokens=1000,
            inter_token_target=None,
            tokens_left=tokens_left,
            first_left=first_left,
        )
    )


def expected_s(place: Place) -> float:
    view = place.view()
    assert view is not None
    assert view.expected_s is not None
    return view.expected_s


@pytest.mark.parametrize("gap", [1, 4])
def test_higher_classes_hold_one_back_for_no_longer_than_age_lets_them(gap: int) -> None:
    flood = (make_request(f"a{i}", "a", priority=gap) for i in range(300))
    admission, _ = queue_of(*flood, stats=measured_stats)
    for i in range(3):
        place = admission.enter("b", 1)
        bound_s = (i + 1) * (gap * AGEING_S + 5.0)  # each one's prompt takes 1.2 s
        place.admit([make_request(f"b{i}", "b")], bound_s, 0.0)
        assert (i + 1) * gap * AGEING_S < expected_s(place) < bound_s
    late = admission.enter("b", 1)
    with pytest.raises(ServiceError, match="expected in"):
        late.admit([make_request("b3", "b")], 3 * gap * AGEING_S, 0.0)
    with pytest.raises(ServiceError, match="expected in"):
        admission.enter("a", 1).admit([make_request("a", "a", priority=gap)], 50.0, 0.0)


@pytest.mark.parametrize(
    ("num_decoding", "tokens_left", "first_left", "told_s"),
    [
        (0, 128, 500, LEAST_RETRY_S),
        (2, 128, 1998, 64 * STEP_S),
        (2, 872, 1000, 436 * STEP_S),
        (2, 872, 15, 15 * STEP_S),
    ],
)
def test_refused_by_those_that_run_are_told_when_the_first_of_them_is_expected_to_end(
    num_decoding: int, tokens_left: float, first_left: float, told_s: float
) -> None:
    admission, places = queue_of(
        make_request("a", "a"), make_request("b", "a"), stats=lambda: measured_stats(tokens_left, first_left)
    )
    for place in places[:num_decoding]:
        place.on_first_token(0, 0.0)
    with pytest.raises(ServiceError) as refusal:
        admission.check("a", 10_000)
    assert refusal.value.code == "overloaded"
    assert refusal.value.retry_after_s == pytest.approx(told_s)


def test_refused_are_told_how_fast_places_came_free_of_late() -> None:
    now_s = 0.0
    admission, places = queue_of(*(make_request(f"a{i}", "a") for i in range(12)), clock=lambda: now_s)

    def told_s() -> float | None:
        with pytest.raises(ServiceError) as refusal:
            admission.check("a", 10_000)
        return refusal.value.retry_after_s

    assert told_s() == LEAST_RETRY_S
    for place in places[:11]:
        now_s += 3.0
        place.leave(now_s)
    assert told_s() == pytest.approx(3.0)
    now_s += 70.0  # that was another rush
    assert told_s() == LEAST_RETRY_S


@pytest.mark.parametrize(
    ("priority", "num_waiting", "margin"), [(4, 300, MOST_MARGIN), (1, 1, 1.0)], ids=["bounded by age", "short backlog"]
)
def test_higher_classes_are_waited_for_as_long_as_they_take_or_age_allows(
    priority: int, num_waiting: int, margin: float
) -> None:
    waiting = (make_request(f"a{i}", "a", priority=priority) for i in range(num_waiting))
    admission, _ = queue_of(*waiting, stats=measured_stats)
    admission.margin = margin
    allowed_s = 5.0 + (priority * AGEING_S if num_waiting > 1 else 0.0)
    admission.enter("b", 1).admit([make_request("b", "b")], allowed_s, 0.0)


def test_nothing_is_expected_before_steps_were_measured() -> None:
    _, (place,) = queue_of(make_request("a", "a"))
    assert place.view() == (0, None, None)


def test_margin_settles_where_one_in_ten_is_late_and_has_bounds() -> None:
    """Of waits from 0.1 to 2 times the estimate, evenly: at 1.8 times, within the last step or two."""
    admission, _ = queue_of()
    for i in range(4000):
        admission.note_wait(is_late=(i * 7 % 19 + 1) / 9.5 > admission.margin)
    assert 1.6 < admission.margin < 2.2
    for is_late, bound in ((True, MOST_MARGIN), (False, LEAST_MARGIN)):
        for _ in range(1000):
            admission.note_wait(is_late)
        assert admission.margin == bound
