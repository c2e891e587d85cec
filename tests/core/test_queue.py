import math

import pytest

from core.queue import AGEING_S, TenantShares, WaitingQueue, aged_class
from core.sequence import OVER_SHARE_S, Sequence, SequenceGroup, Tenant
from core.types import TOP_CLASS
from tests.fakes import make_request

LOCAL = Tenant("local")


def waiting(
    name: str,
    arrival_s: float = 0.0,
    priority: int = 0,
    tenant: Tenant = LOCAL,
    num_prompt_tokens: int = 6,
    latest_start_s: float = math.inf,
) -> Sequence:
    request = make_request(name, num_prompt_tokens, arrival_s=arrival_s, priority=priority)
    return SequenceGroup(request, tenant, int(arrival_s), 0, latest_start_s).add((), 100)


def queue_of(*sequences: Sequence) -> WaitingQueue:
    queue = WaitingQueue()
    for sequence in sequences:
        queue.add(sequence, 0.0)
    return queue


def drain(queue: WaitingQueue, now: float = 0.0) -> list[str]:
    names = []
    while (found := queue.head(now)) is not None:
        names.append(found[0].request_id)
        queue.admit(found[0], now)
    assert len(queue) == 0
    return names


def test_classes_go_before_arrivals() -> None:
    queue = queue_of(waiting("low", 0, -1), waiting("late", 2), waiting("early", 1), waiting("high", 3, 2))
    assert drain(queue) == ["high", "early", "late", "low"]


def test_tenant_that_has_had_least_goes_first_whoever_came_first() -> None:
    flood, light = Tenant("flood", counter_s=5.0), Tenant("light", counter_s=4.0)
    queue = queue_of(*(waiting(f"f{i}", i, tenant=flood) for i in range(3)), waiting("l", 9, tenant=light))
    found = queue.head(0.0)
    assert found is not None
    assert found[0].request_id == "l"
    light.charge(2.0)  # while they wait
    assert drain(queue) == ["f0", "f1", "f2", "l"]


def test_short_prompt_passes_a_long_one_that_came_a_little_earlier() -> None:
    long = waiting("long", 0.0, num_prompt_tokens=4096)
    assert drain(queue_of(long, waiting("soon", 1.9), waiting("later", 2.1))) == ["soon", "long", "later"]


def test_request_that_is_nearly_due_goes_first_in_its_class() -> None:
    greedy = Tenant("greedy", counter_s=OVER_SHARE_S)
    sequences = [waiting("first"), waiting("due", 1, tenant=greedy, latest_start_s=50.0), waiting("high", 2, 1)]
    assert drain(queue_of(*sequences), now=48.0)[-2:] == ["first", "due"]
    assert drain(queue_of(*sequences), now=49.0)[-2:] == ["due", "first"]


def test_deadlines_do_not_let_a_tenant_pass_one_that_has_had_much_less() -> None:
    flood, light = Tenant("flood"), Tenant("light")
    due = [waiting(f"due{i}", i, tenant=flood, latest_start_s=1.0) for i in range(50)]
    queue = queue_of(*due, waiting("light", 60, tenant=light))
    num_before = 0
    while (found := queue.head(5.0)) is not None and found[0].tenant is flood:
        queue.admit(found[0], 5.0)
        flood.charge(0.3)
        num_before += 1
    assert num_before == int(OVER_SHARE_S / 0.3) + 1
    assert drain(queue, 5.0)[0] == "light"


def test_due_tenant_over_its_share_does_not_hide_another_that_is_due() -> None:
    flood, other, light = Tenant("flood", counter_s=9.0), Tenant("other", counter_s=1.0), Tenant("light")
    sequences = [
        waiting("flood", 0, tenant=flood, latest_start_s=1.0),
        waiting("other", 1, tenant=other, latest_start_s=2.0),
        waiting("light", 2, tenant=light),
    ]
    assert drain(queue_of(*sequences), now=5.0) == ["other", "light", "flood"]


def test_tenant_that_was_forgotten_and_returns_waits_by_its_new_counter() -> None:
    gone, back, other = Tenant("a"), Tenant("a", counter_s=9.0), Tenant("b", counter_s=5.0)
    early = waiting("early", 0, tenant=gone)
    queue = queue_of(early)
    queue.remove(early)
    for sequence in (waiting("late", 1, tenant=back), waiting("other", 2, tenant=other)):
        queue.add(sequence, 0.0)
    assert drain(queue) == ["other", "late"]


def test_removed_sequences_are_gone_and_come_back_to_their_place() -> None:
    a, b, c = (waiting(name, i) for i, name in enumerate("abc"))
    queue = queue_of(a, b, c)
    queue.remove(b)
    queue.remove(b)
    assert len(queue) == 2
    queue.add(b, 0.0)
    assert drain(queue) == ["a", "b", "c"]


def test_class_rises_by_one_for_each_time_span_without_an_admission() -> None:
    assert [aged_class(-1, age_s) for age_s in (-5.0, 0.0, AGEING_S - 0.1, AGEING_S, 3.5 * AGEING_S)] == [
        -1,
        -1,
        -1,
        0,
        2,
    ]
    assert aged_class(0, 1e9) == TOP_CLASS + 1
    assert aged_class(TOP_CLASS, 1e9) == TOP_CLASS


@pytest.mark.parametrize("priority", range(-4, 5))
def test_waiting_class_is_next_within_its_bound_while_the_top_class_never_runs_dry(priority: int) -> None:
    queue = queue_of(waiting("low", 0, priority))
    queue.add(waiting("top0", 1, TOP_CLASS), 0.0)
    served_s = None
    for second in range(1, 200):
        found = queue.head(float(second))
        assert found is not None
        if found[0].request_id == "low":
            served_s = second
            break
        queue.admit(found[0], float(second))
        queue.add(waiting(f"top{second}", second, TOP_CLASS), float(second))
    assert served_s is not None
    assert served_s <= AGEING_S * (TOP_CLASS + 1 - priority)


def test_admission_takes_the_age_of_its_class_back() -> None:
    queue = queue_of(waiting("l0", 0, -1), waiting("l1", 1, -1), waiting("h0", 2), waiting("h1", 3))
    now = 1.5 * AGEING_S
    assert drain(queue, now) == ["h0", "l0", "h1", "l1"]  # the first admission leaves the other class older
    queue = queue_of(waiting("l0", 0, -1), waiting("l1", 1, -1))
    queue.add(waiting("h0", 2), now)
    queue.add(waiting("h1", 3), now)
    assert drain(queue, now) == ["l0", "h0", "h1", "l1"]


# Tenants' accounts


def test_new_and_idle_tenants_are_lifted_to_the_least_of_those_that_were_active() -> None:
    shares = TenantShares()
    busy, busier = shares.enter("busy"), shares.enter("busier")
    busy.charge(3.0)
    busier.charge(5.0)
    assert shares.enter("new").counter_s == 3.0
    idle = shares.enter("idle")
    idle.charge(1.0)
    shares.leave(idle)
    busy.charge(10.0)
    busier.charge(10.0)
    shares.enter("new").charge(20.0)
    assert shares.enter("idle").counter_s == 13.0


def test_who_leaves_with_more_than_the_others_comes_back_with_it() -> None:
    shares = TenantShares()
    shares.enter("light")
    heavy = shares.enter("heavy")
    heavy.charge(7.0)
    shares.leave(heavy)
    assert shares.enter("heavy").counter_s == 7.0


def test_after_all_have_left_everyone_starts_alike() -> None:
    shares = TenantShares()
    a, b = shares.enter("a"), shares.enter("b")
    a.charge(1.0)
    b.charge(4.0)
    shares.leave(b)
    shares.leave(a)
    assert shares.enter("a").counter_s == shares.enter("c").counter_s == 4.0
    assert {tenant.name for tenant in shares.tenants()} == {"a", "c"}


def test_idle_tenants_are_forgotten_once_they_would_be_lifted() -> None:
    shares = TenantShares()
    shares.enter("stays")
    for number in range(1000):
        tenant = shares.enter(f"t{number}")
        tenant.charge(1.0)
        shares.leave(tenant)
    shares.enter("stays").charge(2.0)
    shares.least_s()
    assert [tenant.name for tenant in shares.tenants()] == ["stays"]
    assert len(shares._by_counter._heap) == 1


def test_coming_and_going_leaves_one_entry_per_tenant() -> None:
    shares = TenantShares()
    shares.enter("stays")
    for _ in range(100):
        tenant = shares.enter("goes")
        tenant.charge(1.0)
        shares.leave(tenant)
    assert len(shares._by_counter._heap) == 2


def test_a_share_divides_what_is_charged_and_what_is_refunded_alike() -> None:
    tenant = TenantShares().enter("a", 2)
    tenant.charge(6.0)
    tenant.prepaid_s = 6.0
    assert tenant.had_s == 0.0
    tenant.refund(4.0)
    assert (tenant.counter_s, tenant.served_s, tenant.credit_s, tenant.had_s) == (3.0, 2.0, 2.0, 0.0)
    tenant.prepaid_s = 0.0
    tenant.charge(6.0)
    assert (tenant.counter_s, tenant.served_s, tenant.had_s) == (4.0, 8.0, 4.0)


def test_who_has_had_more_gives_way_where_it_runs_more_or_is_far_ahead() -> None:
    shares = TenantShares()
    ahead, behind = shares.enter("ahead"), shares.enter("behind")
    ahead.num_running, behind.num_running = 3, 1
    assert not ahead.gives_way_to(behind)
    ahead.charge(0.01)
    assert ahead.gives_way_to(behind)
    ahead.num_running = 2
    assert not ahead.gives_way_to(behind)
    ahead.charge(OVER_SHARE_S)
    assert ahead.gives_way_to(behind)
    assert not behind.gives_way_to(ahead)
