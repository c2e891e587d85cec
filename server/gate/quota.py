"""How much each tenant and each of its keys may ask for, counted exactly. Thread: loop.

Tokens are reserved before the work, in all pools that bound a request or in none, topped up while it says more, and
settled to what it has used. Whole numbers throughout; time is an argument; nothing runs in the background.
The ledger knows what a day's pools have given before the process started. Answers tell what is left: x-ratelimit-*.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from core.errors import ErrorKind, ServiceError
from core.types import Request, Usage
from server.gate.identity import Caller, Directory
from server.gate.tenants import Limits
from server.wire.messages import Headers

_PREFIX = b"x-ratelimit-"
S_NS = 10**9
MINUTE_NS = 60 * S_NS
PRUNED_ACCOUNTS = 1024  # at twice as many as after the last time, those that hold nothing are forgotten
DAY_S = 86_400
FIRST_TOKENS = 512  # of each sequence's answer that are reserved before the work
TOP_UP_TOKENS = 256
DAYS_KEPT = 4  # that a clock has left: it may have been set wrong, and be set right again
LEAST_TOKENS = 2  # a prompt's and an answer's: who has less need not send the body
CONCURRENCY_RETRY_S = 1.0  # when one of the others ends, nobody knows


UsedTokens = Mapping[tuple[str, str | None], int]  # by tenant and key; None: all of the tenant's


class Moment(NamedTuple):
    """Now.

    Args:
        ns: monotonic.
        unix_s: for the days.
    """

    ns: int
    unix_s: int


class Bucket:
    """Fills by `rate` a minute up to its capacity, with which it starts.

    The level is kept in parts of 1 / MINUTE_NS: a nanosecond adds `rate` of them, and nothing is ever rounded.
    """

    __slots__ = ("_at_ns", "_level", "capacity", "name", "rate")

    def __init__(self, name: str, rate: int, capacity: int, now: Moment) -> None:
        self.name = name
        self.rate = rate
        self.capacity = capacity
        self._level = capacity * MINUTE_NS
        self._at_ns = now.ns

    def available(self, now: Moment) -> int:
        """Below 0 where more was used than reserved."""
        self._fill(now)
        return self._level // MINUTE_NS

    def reserve(self, num: int, now: Moment) -> None:
        self._fill(now)
        self._level -= num * MINUTE_NS

    def settle(self, num_reserved: int, num_used: int, now: Moment) -> None:
        """Take back a reservation, and count what was used of it."""
        self._fill(now)
        self._level = min(self.capacity * MINUTE_NS, self._level + (num_reserved - num_used) * MINUTE_NS)

    def wait_ns(self, num: int, now: Moment) -> int | None:
        """Until so much is available if nobody else comes; None: it never will be."""
        if num > self.capacity:
            return None
        self._fill(now)
        return max(0, -((self._level - num * MINUTE_NS) // self.rate))

    def full_ns(self, now: Moment) -> int:
        """Until it is as full as it gets."""
        wait_ns = self.wait_ns(self.capacity, now)
        assert wait_ns is not None
        return wait_ns

    def resize(self, rate: int, capacity: int, now: Moment) -> None:
        """What has been taken stays taken."""
        self._fill(now)
        self._level += (capacity - self.capacity) * MINUTE_NS
        self.rate, self.capacity = rate, capacity

    def _fill(self, now: Moment) -> None:
        if now.ns > self._at_ns:
            self._level = min(self.capacity * MINUTE_NS, self._level + (now.ns - self._at_ns) * self.rate)
            self._at_ns = now.ns


class DayPool:
    """So much a calendar day, UTC. What is in progress at midnight counts on the day on which it is settled.

    Args:
        num_used: of it already, at that moment.
    """

    __slots__ = ("_day", "_num_reserved", "_num_used", "_other_days", "capacity", "name")

    def __init__(self, name: str, capacity: int, num_used: int, at: Moment) -> None:
        self.name = name
        self.capacity = capacity
        self._day = at.unix_s // DAY_S
        self._num_used = num_used
        self._other_days: dict[int, int] = {}  # what was used of them
        self._num_reserved = 0

    def available(self, now: Moment) -> int:
        self._turn(now)
        return self.capacity - self._num_used - self._num_reserved

    def reserve(self, num: int, now: Moment) -> None:
        self._turn(now)
        self._num_reserved += num

    def settle(self, num_reserved: int, num_used: int, now: Moment) -> None:
        self._turn(now)
        self._num_reserved -= num_reserved
        self._num_used += num_used

    def wait_ns(self, num: int, now: Moment) -> int | None:
        if num > self.capacity:
            return None
        return 0 if num <= self.available(now) else self._until_midnight_ns(now)

    def full_ns(self, now: Moment) -> int:
        return 0 if self.available(now) == self.capacity else self._until_midnight_ns(now)

    def is_touched(self, now: Moment) -> bool:
        """Some of this day was used, or is reserved."""
        self._turn(now)
        return bool(self._num_used or self._num_reserved)

    def _until_midnight_ns(self, now: Moment) -> int:
        return (DAY_S - now.unix_s % DAY_S) * S_NS

    def _turn(self, now: Moment) -> None:
        day = now.unix_s // DAY_S
        if day != self._day:
            self._other_days[self._day] = self._num_used
            self._day, self._num_used = day, self._other_days.pop(day, 0)
            if len(self._other_days) > DAYS_KEPT:
                del self._other_days[next(iter(self._other_days))]


Pool = Bucket | DayPool  # what requests take from, and give back to


class Shortage(NamedTuple):
    """A pool that has less than was asked for.

    Args:
        wait_ns: None: it never holds so much.
        is_least: it was asked for what every request needs, before the body said how much this one does.
    """

    account: "QuotaAccount"
    pool: Pool
    num_wanted: int
    num_available: int
    wait_ns: int | None
    is_least: bool = False

    def error(self) -> ServiceError:
        owner, limit = self.account.owner, self.pool.name
        wanted = f"this asks for {'at least ' if self.is_least else ''}{self.num_wanted}"
        if self.wait_ns is None:
            message = (
                f"{owner} may take {self.pool.capacity} at once by its {limit}, and {wanted}."
                " Ask for fewer max_tokens, shorten the prompt, or ask the operator for more."
            )
            return ServiceError(ErrorKind.RATE_LIMITED, message, "rate_limit_exceeded")
        wait_s = self.wait_ns / S_NS
        message = (
            f"{owner} is over its {limit}: {wanted}, and {max(0, self.num_available)} of"
            f" {self.pool.capacity} are left. Try again in {-(-self.wait_ns // S_NS)} s."
        )
        return ServiceError(ErrorKind.RATE_LIMITED, message, "rate_limit_exceeded", retry_after_s=wait_s)


class QuotaAccount:
    """One tenant's pools, or one key's.

    Attributes:
        owner: as messages say it.
        num_active: requests in progress.
        num_reserved: tokens, of those.
        requests: None: unlimited.
        tokens: each of these bounds every request.
    """

    def __init__(self, owner: str, limits: Limits, now: Moment, day: DayPool) -> None:
        self.owner = owner
        self._day = day
        self.num_active = 0
        self.num_reserved = 0
        self.requests: Bucket | None = None
        self.tokens: tuple[Pool, ...] = ()
        self.apply(limits, now)

    def apply(self, limits: Limits, now: Moment) -> None:
        """These are the limits from now on; what has been taken stays taken."""
        self.max_active = limits.concurrent_requests
        self.requests = _bucket(
            self.requests, "requests_per_minute", limits.requests_per_minute, limits.burst_requests, now
        )
        minute = next((pool for pool in self.tokens if isinstance(pool, Bucket)), None)
        minute = _bucket(minute, "tokens_per_minute", limits.tokens_per_minute, limits.burst_tokens, now)
        if limits.tokens_per_day is not None:
            self._day.capacity = limits.tokens_per_day
        day = None if limits.tokens_per_day is None else self._day
        self.tokens = tuple(pool for pool in (minute, day) if pool is not None)

    def is_full(self, now: Moment) -> bool:
        """A new one in its place would allow no more."""
        pools = (*self.tokens, *(() if self.requests is None else (self.requests,)))
        return not (self.num_active or self.num_reserved or self._day.is_touched(now)) and all(
            pool.available(now) >= pool.capacity for pool in pools
        )

    def error_of_concurrency(self) -> ServiceError:
        message = f"{self.owner} has its concurrent_requests, {self.max_active}, in progress. Wait for one to end."
        return ServiceError(ErrorKind.RATE_LIMITED, message, "rate_limit_exceeded", retry_after_s=CONCURRENCY_RETRY_S)


def _bucket(old: Bucket | None, name: str, rate: int | None, burst: int | None, now: Moment) -> Bucket | None:
    if rate is None:
        return None
    if old is None:
        return Bucket(name, rate, burst or rate, now)
    old.resize(rate, burst or rate, now)
    return old


class Ticket:
    """One request's way through the accounts that bound it: enter, reserve, top_up, settle, leave; or give_back.

    Args:
        clock: read at each step.
    """

    __slots__ = ("_accounts", "_clock", "_held", "_is_in", "_num_reserved", "caller")

    def __init__(self, caller: Caller, accounts: Sequence[QuotaAccount], clock: Callable[[], Moment]) -> None:
        self.caller = caller
        self._accounts = accounts
        self._clock = clock
        self._held: tuple[tuple[QuotaAccount, tuple[Pool, ...]], ...] = ()  # as they were when it was reserved
        self._num_reserved = 0
        self._is_in = False

    def enter(self, needs_tokens: bool = True) -> None:
        """Count the request, before its body is read.

        Args:
            needs_tokens: it will reserve some.

        Raises:
            ServiceError: rate_limited; nothing is counted then.
        """
        now = self._clock()
        tokens = [(account, pool) for account in self._accounts for pool in account.tokens if needs_tokens]
        requests = [(account, account.requests) for account in self._accounts if account.requests is not None]
        shortages = _shortages(tokens, LEAST_TOKENS, now, is_least=True)
        self._refuse(shortages + _shortages(requests, 1, now))
        for account in self._accounts:
            if account.max_active is not None and account.num_active >= account.max_active:
                raise account.error_of_concurrency()
        for account in self._accounts:
            account.num_active += 1
            if account.requests is not None:
                account.requests.reserve(1, now)
        self._is_in = True

    def give_back(self) -> None:
        """The server did not take the request: it does not count. To be called once, and before leave."""
        if self._is_in:
            now = self._clock()
            for account in self._accounts:
                if account.requests is not None:
                    account.requests.settle(1, 0, now)

    def leave(self) -> None:
        """The request is over. Idempotent."""
        if self._is_in:
            self._is_in = False
            for account in self._accounts:
                account.num_active -= 1

    def reserve(self, requests: Iterable[Request]) -> None:
        """Hold what these need at first: prompts, and the first tokens of each sequence.

        Raises:
            ServiceError: rate_limited; nothing is held then.
        """
        num = sum(
            len(one.prompt_ids) + one.num_sequences * min(one.sampling.max_tokens, FIRST_TOKENS) for one in requests
        )
        self._held = tuple((account, account.tokens) for account in self._accounts)
        self._refuse(self._try_add(num))

    @property
    def num_reserved(self) -> int:
        """Tokens that it holds."""
        return self._num_reserved

    @property
    def is_bounded(self) -> bool:
        """There are pools that what it says is taken from."""
        return any(pools for _, pools in self._held)

    def top_up(self, num: int) -> Shortage | None:
        """Hold so many more; or say what lacks, and hold no more."""
        shortages = self._try_add(num)
        return _worst(shortages) if shortages else None

    def top_up_rest(self, most: int, num_parts: int = 1) -> int:
        """Hold a part of what is left, rounded up, where all of it is less than wanted.

        Returns: how many more it holds.
        """
        now = self._clock()
        left = min(pool.available(now) for _, pools in self._held for pool in pools)
        num = min(most, -(-left // num_parts))
        return num if num > 0 and not self._try_add(num) else 0

    def may_gain(self, within_ns: int) -> bool:
        """Whether there may be a token more by then: pools fill, or others of their accounts give back."""
        now = self._clock()

        def fills(pool: Pool) -> bool:
            wait_ns = pool.wait_ns(1, now)
            return wait_ns is not None and wait_ns <= within_ns

        return all(account.num_reserved > self._num_reserved or all(map(fills, pools)) for account, pools in self._held)

    def wait_ns(self, shortage: Shortage) -> int | None:
        """As the shortage's, by now."""
        return shortage.pool.wait_ns(shortage.num_wanted, self._clock())

    def settle(self, usage: Usage) -> None:
        """Give back what was held, and count what was used instead. Idempotent."""
        now, num_used = self._clock(), self.cost(usage)
        for account, pools in self._held:
            account.num_reserved -= self._num_reserved
            for pool in pools:
                pool.settle(self._num_reserved, num_used, now)
        self._held, self._num_reserved = (), 0

    def cost(self, usage: Usage) -> int:
        """Tokens as they count: those of the prompt that were cached, at the tenant's discount."""
        discount = usage.num_cached_tokens * self.caller.tenant.cached_token_discount // 100
        return usage.num_prompt_tokens + usage.num_completion_tokens - discount

    def tightest_requests(self) -> tuple[Pool, Moment] | None:
        return self._tightest([account.requests for account in self._accounts if account.requests is not None])

    def tightest_tokens(self) -> tuple[Pool, Moment] | None:
        """The pool that has least left, and now; None: there are none."""
        return self._tightest([pool for account in self._accounts for pool in account.tokens])

    def _tightest(self, pools: Sequence[Pool]) -> tuple[Pool, Moment] | None:
        if not pools:
            return None
        now = self._clock()
        return min(pools, key=lambda pool: pool.available(now)), now

    def _try_add(self, num: int) -> list[Shortage]:
        """All of it in all pools, or nothing in any."""
        now = self._clock()
        shortages = _shortages([(account, pool) for account, pools in self._held for pool in pools], num, now)
        if not shortages:
            self._num_reserved += num
            for account, pools in self._held:
                account.num_reserved += num
                for pool in pools:
                    pool.reserve(num, now)
        return shortages

    def _refuse(self, shortages: Sequence[Shortage]) -> None:
        if shortages:
            raise _worst(shortages).error()


def _shortages(
    pools: Iterable[tuple[QuotaAccount, Pool]], num: int, now: Moment, is_least: bool = False
) -> list[Shortage]:
    """Of the pools that have less than so much."""
    found = []
    for account, pool in pools:
        num_available = pool.available(now)
        if num_available < num:
            found.append(Shortage(account, pool, num, num_available, pool.wait_ns(num, now), is_least))
    return found


def _worst(shortages: Sequence[Shortage]) -> Shortage:
    """The one that lasts longest: when it is over, all are."""
    return max(shortages, key=lambda shortage: (shortage.wait_ns is None, shortage.wait_ns or 0))


class Quotas:
    """The accounts of all who have come, by tenant and key.

    Args:
        clock: now.
        used_today: tokens, before the process started.
    """

    def __init__(self, clock: Callable[[], Moment], used_today: UsedTokens | None = None) -> None:
        self._clock = clock
        self._started = clock()
        self._used_today = used_today or {}
        self._accounts: dict[tuple[str, str | None], QuotaAccount] = {}
        self._most_accounts = PRUNED_ACCOUNTS

    def ticket_for(self, caller: Caller) -> Ticket:
        tenant = caller.tenant
        accounts = [self._account(f"The tenant {tenant.name}", (tenant.name, None), tenant.limits)]
        if caller.key_id is not None:
            owner = f"The {'key' if caller.subject is None else 'JWT subject'} {caller.key_id}"
            accounts.append(self._account(owner, (tenant.name, caller.key_id), tenant.key_limits))
        return Ticket(caller, accounts, self._clock)

    @property
    def accounts(self) -> tuple[QuotaAccount, ...]:
        return tuple(self._accounts.values())

    def apply(self, directory: Directory) -> None:
        """Its limits are in force from now on, for those in progress too.

        Who is in it no more may come back, and has then what was left: names of one configuration after the other are
        few.
        """
        now = self._clock()
        for (name, key_id), account in self._accounts.items():
            tenant = directory.tenants.get(name)
            if tenant is not None:
                account.apply(tenant.limits if key_id is None else tenant.key_limits, now)

    def _account(self, owner: str, place: tuple[str, str | None], limits: Limits) -> QuotaAccount:
        account = self._accounts.get(place)
        if account is None:
            if len(self._accounts) >= self._most_accounts:
                self._forget()
            day = DayPool("tokens_per_day", 0, self._used_today.get(place, 0), self._started)
            account = self._accounts[place] = QuotaAccount(owner, limits, self._clock(), day)
        return account

    def _forget(self) -> None:
        """Issuers of JWTs may name any number of subjects."""
        now = self._clock()
        self._accounts = {place: account for place, account in self._accounts.items() if not account.is_full(now)}
        self._most_accounts = max(PRUNED_ACCOUNTS, 2 * len(self._accounts))


def limit_headers(ticket: Ticket) -> Headers:
    """What the ticket's accounts hold now."""
    return _fields(b"requests", ticket.tightest_requests()) + _fields(b"tokens", ticket.tightest_tokens())


def _fields(kind: bytes, found: tuple[Pool, Moment] | None) -> Headers:
    if found is None:
        return ()
    pool, now = found
    values = {
        b"limit": pool.capacity,
        b"remaining": max(0, pool.available(now)),
        b"reset": format_reset(-(-pool.full_ns(now) // S_NS)),
    }
    return tuple((_PREFIX + name + b"-" + kind, str(value).encode()) for name, value in values.items())


def format_reset(seconds: int) -> str:
    """`6m0s`, as clients parse it: Go's way, in whole seconds."""
    minutes, seconds = divmod(seconds, 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}h{minutes}m{seconds}s"
    return f"{minutes}m{seconds}s" if minutes else f"{seconds}s"
