import pytest

from core.queue import TenantShares
from core.sequence import OVER_SHARE_S
from server.gate.admission import SharedRoom


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
    assert len(shares._heap) == 1


def test_coming_and_going_leaves_one_entry_per_tenant() -> None:
    shares = TenantShares()
    shares.enter("stays")
    for _ in range(100):
        tenant = shares.enter("goes")
        tenant.charge(1.0)
        shares.leave(tenant)
    assert len(shares._heap) == 2


def test_refund_is_used_up_before_the_counter_grows_again() -> None:
    tenant = TenantShares().enter("a")
    tenant.charge(5.0)
    tenant.prepaid_s = 5.0
    tenant.refund(3.0)
    assert (tenant.counter_s, tenant.served_s, tenant.had_s) == (5.0, 2.0, 0.0)
    tenant.charge(4.0)
    assert (tenant.counter_s, tenant.served_s) == (6.0, 6.0)


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


def test_a_tenant_alone_has_all_of_the_room_and_others_find_some_of_what_is_left() -> None:
    room = SharedRoom(16)
    room.take("a", 16)
    assert not room.exceeds_share("a", 0)
    assert room.lacks(1) == 1
    assert room.borrower() == "a"
    assert not room.exceeds_share("b", 1)
    room.give("a", 4)
    assert room.borrower() is None
    room.take("b", 1)
    assert room.exceeds_share("a", 1)
    assert not room.exceeds_share("b", 1)
    assert room.exceeds_share("b", 3)  # of the 4 that a leaves


def test_what_one_has_borrowed_counts_for_nothing_in_what_others_may_hold() -> None:
    room = SharedRoom(16)
    room.take("a", 15)
    room.take("b", 1)
    assert not room.exceeds_share("b", 2)
    assert room.exceeds_share("b", 3)


@pytest.mark.parametrize("num_tenants", [2, 5, 40])
def test_however_many_take_all_they_may_there_is_room_for_one_who_comes(num_tenants: int) -> None:
    room = SharedRoom(1024)
    for _ in range(1024):
        for tenant in range(num_tenants):
            name = str(tenant)
            if not room.exceeds_share(name, 1) and (room.lacks(1) <= 0):
                room.take(name, 1)
    assert not room.exceeds_share("new", 1)
    assert room.lacks(1) <= 0
    assert min(room.held.values()) >= 0.9 * max(room.held.values()) - 1 or num_tenants == 2


def test_who_has_left_holds_nothing() -> None:
    room = SharedRoom(4)
    room.take("a", 3)
    room.give("a", 3)
    assert (room.total, room.held) == (0, {})
