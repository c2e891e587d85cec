"""The arithmetic of quotas: pools against the limits they stand for, tickets that race for them. Time is made up."""

import random
from datetime import UTC, datetime
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.errors import ErrorKind, ServiceError
from core.types import Request, SamplingParams, Usage
from server.gate.identity import Caller, make_directory
from server.gate.quota import (
    DAY_S,
    FIRST_TOKENS,
    MINUTE_NS,
    PERIODS_KEPT,
    PRUNED_ACCOUNTS,
    S_NS,
    Bucket,
    Moment,
    PeriodPool,
    Pool,
    Quotas,
    Ticket,
    format_reset,
    period_of,
)
from server.gate.tenants import Limits, Tenant

START = Moment(0, 100 * DAY_S)


def at(ns: int) -> Moment:
    return Moment(ns, START.unix_s + ns // S_NS)


class Time:
    """Now, as a test says it."""

    def __init__(self) -> None:
        self.ns = 0

    def __call__(self) -> Moment:
        return at(self.ns)


def request(num_prompt_tokens: int, max_tokens: int, num_sequences: int = 1) -> Request:
    return Request(
        request_id="r",
        prompt_ids=(7,) * num_prompt_tokens,
        sampling=SamplingParams(max_tokens=max_tokens),
        arrival_s=0.0,
        num_sequences=num_sequences,
    )


def tenant(limits: Limits | None = None, key_limits: Limits | None = None, discount: int = 0) -> Tenant:
    return Tenant(
        name="acme",
        limits=limits or Limits(),
        key_limits=key_limits or Limits(),
        cached_token_discount=discount,
    )


def refusal(ticket: Ticket, *requests: Request) -> ServiceError:
    """Of the request's entry, or of its tokens."""

    def ask() -> None:
        ticket.enter()
        ticket.reserve(requests)

    with pytest.raises(ServiceError) as caught:
        ask()
    assert (caught.value.kind, caught.value.code) == (ErrorKind.RATE_LIMITED, "rate_limit_exceeded")
    return caught.value


AMOUNTS = st.integers(1, 1000)
STEPS = st.lists(st.tuples(st.integers(0, 2 * MINUTE_NS), AMOUNTS, AMOUNTS), max_size=40)


@given(rate=AMOUNTS, capacity=AMOUNTS, steps=STEPS)
def test_a_bucket_gives_its_capacity_and_its_rate_and_not_a_token_more(
    rate: int, capacity: int, steps: list[tuple[int, int, int]]
) -> None:
    bucket = Bucket("tokens_per_minute", rate, capacity, START)
    ns = num_taken = 0
    for wait_ns, wanted, used in steps:
        ns += wait_ns
        if bucket.available(at(ns)) >= wanted:
            bucket.reserve(wanted, at(ns))
            bucket.settle(wanted, min(used, wanted), at(ns))
            num_taken += min(used, wanted)
        assert num_taken <= capacity + Fraction(rate * ns, MINUTE_NS)
        assert bucket.available(at(ns)) <= capacity


@given(rate=AMOUNTS, capacity=AMOUNTS, taken=AMOUNTS, wanted=AMOUNTS, ns=st.integers(0, MINUTE_NS))
def test_a_buckets_wait_is_exact_to_the_nanosecond(rate: int, capacity: int, taken: int, wanted: int, ns: int) -> None:
    bucket = Bucket("tokens_per_minute", rate, capacity, START)
    bucket.reserve(taken, at(ns))
    wait_ns = bucket.wait_ns(wanted, at(ns))
    assert (wait_ns is None) == (wanted > capacity)
    if wait_ns is None:
        return
    if wait_ns > 0:
        assert bucket.available(at(ns + wait_ns - 1)) < wanted
    assert bucket.available(at(ns + wait_ns)) >= wanted
    full_ns = bucket.full_ns(at(ns + wait_ns))
    assert bucket.available(at(ns + wait_ns + full_ns)) == capacity


@given(STEPS)
def test_how_often_a_bucket_is_asked_changes_nothing(steps: list[tuple[int, int, int]]) -> None:
    asked, left_alone = (Bucket("tokens_per_minute", 7, 10_000, START) for _ in range(2))
    ns = 0
    for wait_ns, wanted, _ in steps:
        for part in range(5):
            asked.available(at(ns + wait_ns * part // 5))
        ns += wait_ns
        for bucket in (asked, left_alone):
            bucket.reserve(wanted, at(ns))
    assert asked.wait_ns(10_000, at(ns)) == left_alone.wait_ns(10_000, at(ns))


def test_a_clock_that_steps_back_gives_nothing() -> None:
    bucket = Bucket("requests_per_minute", 60, 1, START)
    bucket.reserve(1, at(5 * S_NS))
    assert bucket.available(at(0)) == 0
    assert bucket.available(at(6 * S_NS)) == 1


def test_a_clock_that_leaps_forward_and_back_takes_no_day_away_and_gives_none() -> None:
    pool = PeriodPool("tokens_per_day", 100, 0, START)
    tomorrow, next_year = (Moment(days, START.unix_s + days * DAY_S) for days in (1, 365))
    pool.reserve(40, START)
    pool.settle(40, 40, START)
    assert pool.available(next_year) == 100
    pool.reserve(100, next_year)
    pool.settle(100, 90, next_year)
    assert pool.available(START) == 60  # as it was
    assert pool.available(tomorrow) == 100  # a new day, though one that seemed later was used up
    for leap in range(2, 50):
        pool.available(Moment(leap, START.unix_s + leap * DAY_S))
    assert len(pool._others) <= PERIODS_KEPT


def test_accounts_of_subjects_that_hold_nothing_are_forgotten() -> None:
    quotas = Quotas(lambda: START)
    tenant = Tenant(name="a", key_limits=Limits(tokens_per_day=1000, concurrent_requests=9))
    busy = quotas.ticket_for(Caller(tenant, key_id="sub:busy"))
    busy.enter()
    used = quotas.ticket_for(Caller(tenant, key_id="sub:used"))
    used.reserve([request(10, 10)])
    used.settle(Usage(10, 10))
    for i in range(3 * PRUNED_ACCOUNTS):
        quotas.ticket_for(Caller(tenant, key_id=f"sub:{i}"))
    assert len(quotas.accounts) <= PRUNED_ACCOUNTS + 2
    with pytest.raises(ServiceError):
        quotas.ticket_for(Caller(tenant, key_id="sub:used")).reserve([request(990, 1)])
    busy.leave()


def test_a_day_begins_anew_at_midnight_with_what_is_in_progress() -> None:
    pool = PeriodPool("tokens_per_day", 100, 0, START)
    pool.reserve(70, at(0))
    pool.settle(50, 40, at(S_NS))
    assert pool.available(at(S_NS)) == 40
    assert pool.wait_ns(40, at(S_NS)) == 0
    assert pool.wait_ns(41, at(S_NS)) == (DAY_S - 1) * S_NS
    assert pool.wait_ns(101, at(S_NS)) is None
    midnight = at(DAY_S * S_NS)
    assert pool.available(midnight) == 80
    pool.settle(20, 15, midnight)
    assert pool.available(midnight) == 85
    assert pool.full_ns(midnight) == DAY_S * S_NS
    assert pool.full_ns(at(2 * DAY_S * S_NS)) == 0


@pytest.mark.parametrize("burst", [None, 30])
def test_limits_that_change_keep_what_was_taken(burst: int | None) -> None:
    time = Time()
    quotas = Quotas(time)

    def limited(per_minute: int | None, per_day: int | None) -> Tenant:
        burst_tokens = burst if per_minute is not None else None
        return tenant(Limits(tokens_per_minute=per_minute, burst_tokens=burst_tokens, tokens_per_day=per_day))

    ticket = quotas.ticket_for(Caller(limited(60, 100)))
    ticket.reserve([request(10, 15)])
    (account,) = quotas.accounts

    def left() -> list[int]:
        return [pool.available(time()) for pool in account.tokens]

    assert left() == [(burst or 60) - 25, 75]
    quotas.apply(make_directory([limited(20, 50)]))
    assert left() == [(burst or 20) - 25, 25]
    quotas.apply(make_directory([limited(None, None)]))
    assert left() == []
    ticket.settle(Usage(10, 5))
    assert account.num_reserved == 0
    quotas.apply(make_directory([limited(None, 50)]))
    assert left() == [35]


def test_a_tenant_that_is_taken_away_and_comes_back_has_what_was_left() -> None:
    quotas = Quotas(Time())
    limited = tenant(Limits(tokens_per_day=100), Limits(tokens_per_day=60))
    ticket = quotas.ticket_for(Caller(limited, key_id="sl-1"))
    ticket.reserve([request(10, 15)])
    quotas.apply(make_directory([Tenant(name="other")]))
    ticket.settle(Usage(10, 5))
    quotas.apply(make_directory([limited]))
    again = quotas.ticket_for(Caller(limited, key_id="sl-1"))
    assert [pool.available(START) for account in quotas.accounts for pool in account.tokens] == [85, 45]
    assert "this needs 46, and 45 of 60 are left" in refusal(again, request(10, 36)).message


def test_a_refusal_takes_nothing_and_says_which_limit_and_when() -> None:
    time = Time()
    quotas = Quotas(time)
    caller = Caller(tenant(Limits(tokens_per_minute=60), Limits(tokens_per_minute=600)), key_id="sl-1")
    first = quotas.ticket_for(caller)
    first.enter()
    first.reserve([request(10, 30)])
    error = refusal(quotas.ticket_for(caller), request(10, 30))
    assert "The tenant acme is over its tokens_per_minute: this needs 40, and 20 of 60 are left" in error.message
    assert error.retry_after_s == 20
    assert "Try again in 20 s" in error.message
    assert [account.num_reserved for account in quotas.accounts] == [40, 40]
    too_much = refusal(quotas.ticket_for(caller), request(10, 51))
    assert too_much.retry_after_s is None
    assert "60 at once" in too_much.message
    time.ns = 20 * S_NS
    again = quotas.ticket_for(caller)
    again.enter()
    again.reserve([request(10, 30)])


def test_requests_and_concurrency_are_counted_by_tenant_and_by_key() -> None:
    time = Time()
    quotas = Quotas(time)
    limits = Limits(requests_per_minute=60, burst_requests=3)
    one, two = (Caller(tenant(limits, Limits(concurrent_requests=1)), key_id=key_id) for key_id in ("sl-1", "sl-2"))
    running = quotas.ticket_for(one)
    running.enter()
    assert (
        "The key sl-1 has 1 requests in progress, the most that concurrent_requests allows"
        in refusal(quotas.ticket_for(one)).message
    )
    quotas.ticket_for(two).enter()
    running.leave()
    running.leave()
    quotas.ticket_for(one).enter()
    error = refusal(quotas.ticket_for(one))
    assert "The tenant acme is over its requests_per_minute" in error.message
    assert error.retry_after_s == 1


def test_who_has_no_tokens_left_is_refused_at_the_door() -> None:
    quotas = Quotas(Time())
    caller = Caller(tenant(Limits(tokens_per_day=100)))
    ticket = quotas.ticket_for(caller)
    ticket.enter()
    ticket.reserve([request(50, 49)])
    error = refusal(quotas.ticket_for(caller))
    assert "tokens_per_day" in error.message
    assert error.retry_after_s == DAY_S


def test_only_the_first_tokens_of_long_answers_are_reserved() -> None:
    quotas = Quotas(Time())
    ticket = quotas.ticket_for(Caller(tenant(Limits(tokens_per_day=10_000))))
    ticket.reserve([request(10, 9_000, num_sequences=2), request(5, 20)])
    assert quotas.accounts[0].num_reserved == 10 + 2 * FIRST_TOKENS + 5 + 20


@pytest.mark.parametrize(("discount", "cost"), [(0, 30), (50, 26), (33, 28), (100, 21)])
def test_cached_tokens_count_less_at_settlement(discount: int, cost: int) -> None:
    quotas = Quotas(Time())
    ticket = quotas.ticket_for(Caller(tenant(Limits(tokens_per_day=100), discount=discount)))
    ticket.reserve([request(20, 60)])
    usage = Usage(num_prompt_tokens=20, num_completion_tokens=10, num_cached_tokens=9)
    ticket.settle(usage)
    ticket.settle(usage)
    assert quotas.accounts[0].tokens[0].available(START) == 100 - cost


class Race:
    """Requests of several keys, each at some point of its life; whatever is drawn next happens to one of them."""

    LIMITS = Limits(
        requests_per_minute=6_000, tokens_per_minute=90_000, burst_tokens=9_000, tokens_per_day=400_000,
        concurrent_requests=20,
    )  # fmt: skip
    KEY_LIMITS = Limits(tokens_per_minute=40_000, burst_tokens=5_000, concurrent_requests=12)

    def __init__(self, seed: int, does_time_pass: bool) -> None:
        self.random = random.Random(seed)
        self.time = Time()
        self.does_time_pass = does_time_pass
        self.quotas = Quotas(self.time)
        self.running: list[tuple[Ticket, int, list[int]]] = []  # tickets, prompts, tokens allowed and said
        self.settled = {None: 0, "sl-1": 0, "sl-2": 0, "sl-3": 0}
        self.num_ended = self.num_refused = 0

    def run(self, num_requests: int) -> None:
        while self.num_ended + self.num_refused < num_requests:
            if self.does_time_pass:
                self.time.ns += self.random.randrange(20_000_000)
            self.random.choice((self.begin, self.begin, self.say, self.say, self.say, self.end))()
            self.check()
        while self.running:
            self.end()
        self.check()

    def begin(self) -> None:
        key = self.random.choice(("sl-1", "sl-2", "sl-3"))
        ticket = self.quotas.ticket_for(Caller(tenant(self.LIMITS, self.KEY_LIMITS), key_id=key))
        num_prompt_tokens, max_tokens = self.random.randrange(1, 400), self.random.randrange(1, 2_000)
        try:
            ticket.enter()
            ticket.reserve([request(num_prompt_tokens, max_tokens)])
        except ServiceError:
            self.num_refused += 1
            ticket.settle(Usage(0, 0))
            ticket.leave()
            return
        self.running.append((ticket, num_prompt_tokens, [min(max_tokens, FIRST_TOKENS), 0]))

    def say(self) -> None:
        if self.running:
            ticket, _, tokens = self.random.choice(self.running)
            tokens[1] = self.random.randint(tokens[1], tokens[0])
            tokens[0] += 256 if ticket.top_up(256) is None else ticket.top_up_rest(256)

    def end(self) -> None:
        if self.running:
            ticket, num_prompt_tokens, tokens = self.running.pop(self.random.randrange(len(self.running)))
            usage = Usage(num_prompt_tokens, tokens[1])
            ticket.settle(usage)
            ticket.leave()
            for owner in (None, ticket.caller.key_id):
                self.settled[owner] += ticket.cost(usage)
            self.num_ended += 1

    def check(self) -> None:
        for account in self.quotas.accounts:
            key = None if "tenant" in account.owner else account.owner.split()[-1]
            mine = [one for one in self.running if key in (None, one[0].caller.key_id)]
            assert account.num_active == len(mine) <= (account.max_active or 0)
            assert account.num_reserved == sum(prompt + allowed for _, prompt, (allowed, _) in mine)
            for pool in account.tokens:
                self.check_pool(pool, self.settled[key], account.num_reserved)

    def check_pool(self, pool: Pool, num_settled: int, num_reserved: int) -> None:
        num_left = pool.available(self.time())
        assert num_left >= 0
        filled = Fraction(pool.rate * self.time.ns, MINUTE_NS) if isinstance(pool, Bucket) else 0
        assert num_settled + num_reserved <= pool.capacity + filled
        if not self.does_time_pass or isinstance(pool, PeriodPool):  # nothing flows in: what is gone is in the books
            assert pool.capacity - num_left == num_settled + num_reserved


@pytest.mark.parametrize("does_time_pass", [False, True], ids=["at once", "over time"])
@pytest.mark.parametrize("seed", range(3))
def test_thousands_that_race_never_pass_a_limit_and_every_token_is_in_the_books(
    seed: int, does_time_pass: bool
) -> None:
    race = Race(seed, does_time_pass)
    race.run(3_000)
    assert race.num_refused > 100
    assert race.num_ended > 10
    assert [(account.num_active, account.num_reserved) for account in race.quotas.accounts] == [(0, 0)] * 4


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0s"), (59, "59s"), (60, "1m0s"), (3_599, "59m59s"), (86_399, "23h59m59s")]
)
def test_a_reset_is_written_as_clients_parse_it(seconds: int, text: str) -> None:
    assert format_reset(seconds) == text


def utc(*date: int) -> int:
    return int(datetime(*date, tzinfo=UTC).timestamp())  # type: ignore[misc,arg-type]


@pytest.mark.parametrize(
    ("is_month", "at_s", "begins", "ends"),
    [
        (False, utc(2028, 2, 29, 23, 59, 59), utc(2028, 2, 29), utc(2028, 3, 1)),
        (True, utc(2028, 2, 29, 23, 59, 59), utc(2028, 2, 1), utc(2028, 3, 1)),
        (True, utc(2030, 12, 31), utc(2030, 12, 1), utc(2031, 1, 1)),
        (True, utc(2031, 1, 1), utc(2031, 1, 1), utc(2031, 2, 1)),
    ],
)
def test_days_and_months_are_those_of_the_calendar(is_month: bool, at_s: int, begins: int, ends: int) -> None:
    assert period_of(at_s, is_month) == (begins, ends)


def test_a_month_is_given_back_at_its_end_and_not_sooner() -> None:
    pool = PeriodPool("tokens_per_month", 100, 30, Moment(0, utc(2030, 1, 10)))
    now = Moment(0, utc(2030, 1, 31, 12))
    pool.reserve(70, now)
    assert (pool.available(now), pool.wait_ns(1, now)) == (0, 12 * 3600 * S_NS)
    after = Moment(0, utc(2030, 2, 1))
    assert pool.available(after) == 30  # what is in progress is settled in February
    pool.settle(70, 50, after)
    assert pool.available(after) == 50


def price_of(model: str, usage: Usage) -> int:
    """A tenth of a millionth for a token of a prompt, and a millionth for one of an answer; `free` costs nothing."""
    return 0 if model == "free" else (usage.num_prompt_tokens + 5) // 10 + usage.num_completion_tokens


def test_money_is_reserved_by_price_topped_up_and_settled_and_binds_no_free_model() -> None:
    time = Time()
    quotas = Quotas(time, cost_micro=price_of)
    caller = Caller(tenant(Limits(money_per_day=0.001)))  # 1,000 millionths
    ticket = quotas.ticket_for(caller)
    ticket.reserve([request(1000, 100_000)], "dear")  # 100 and 512
    (pool,) = quotas.accounts[0].money
    assert pool.available(time()) == 1000 - 100 - FIRST_TOKENS
    assert ticket.top_up(256) is None
    assert ticket.top_up(256) is not None
    assert ticket.top_up_rest(256) == 1000 - 100 - FIRST_TOKENS - 256
    assert not ticket.may_gain(MINUTE_NS)
    ticket.settle(Usage(1000, 890))
    assert pool.available(time()) == 10
    assert "x-budget-warning" in dict_of(ticket)
    error = refusal(quotas.ticket_for(caller), request(1000, 1))
    assert "money_per_day: this needs 0.000101, and 0.00001 of 0.001 are left" in error.message
    free = quotas.ticket_for(caller)
    free.reserve([request(1000, 100_000)], "free")
    assert not free.is_bounded
    free.settle(Usage(1000, 500))
    assert [one.num_used(time()) for one in quotas.accounts[0].periods] == [3390, 3390, 990, 990]


def dict_of(ticket: Ticket) -> dict[str, str]:
    return {name.decode(): value.decode() for name, value in ticket.headers()}
