"""Quotas: the requests, tokens and money that each tenant and each of its keys may use. Thread: loop.

Tokens are reserved before the work in all pools that limit a request, or in none; topped up while the answer continues
(`Allowance`); and settled to the actual usage. Whole numbers throughout; time is an argument; nothing runs in the
background. The ledger has the usage of the day and the month before the process started. The x-ratelimit-* fields of
an answer show what is left.
"""

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from calendar import timegm
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

from core.errors import ErrorKind, ServiceError
from core.types import Demand, Usage
from server.gate.identity import Caller, Directory
from server.gate.tenants import Limits, Tenant
from server.wire.messages import Headers

logger = logging.getLogger(__name__)

S_NS = 10**9
MINUTE_NS = 60 * S_NS
DAY_S = 86_400
PERIODS_KEPT = 4  # other days' and months' use: a clock may be set wrong, and be set right again
PERIOD_LIMITS = ("tokens_per_day", "tokens_per_month", "money_per_day", "money_per_month")  # of Limits
WARN_AT = (0.8, 1.0)  # of a budget: in headers, metrics and the log
MOST_BUDGETS = 2000  # that metrics show
MILLION = MICRO = 10**6
PRUNED_ACCOUNTS = 1024  # at twice as many as were left the last time, untouched accounts are dropped
FIRST_TOKENS = 512  # of each sequence's answer, reserved before the work
TOP_UP_TOKENS = 256
LEAST_TOKENS = 2  # a prompt's and an answer's: without them, the body need not be sent
CONCURRENCY_RETRY_S = 1.0  # when another request ends is not known
NEVER = 2**63  # tokens: a mark that no sequence reaches
AHEAD_TOKENS = 32  # a third of a second at 100 tokens/s of a stream: the loop is seldom later
MAX_WAIT_S = 10.0
MAX_WAIT_NS = round(MAX_WAIT_S * S_NS)
LEAST_RETRY_S = 1
POLL_S = 1.0  # between attempts to top up a paused answer: other requests settle at any time

# By name of PERIOD_LIMITS, and by tenant and key; None: all of the tenant's. Tokens, or millionths of the currency
Used = Mapping[str, Mapping[tuple[str, str | None], int]]
CostMicro = Callable[[str, Usage], int]  # of a model's usage, in millionths of the currency


class Moment(NamedTuple):
    """The current time, on two clocks.

    Args:
        ns: monotonic.
        unix_s: for the calendar day.
    """

    ns: int
    unix_s: int


class Pool(ABC):
    """A limit from which requests take and to which they return, in parts of 1 / SCALE."""

    __slots__ = ("_num_reserved", "_taken", "capacity", "name")
    SCALE = 1
    is_money = False

    def __init__(self, name: str, capacity: int) -> None:
        self.name = name
        self.capacity = capacity
        self._taken = 0  # reserved or used
        self._num_reserved = 0  # of it, not in parts

    def available(self, now: Moment) -> int:
        """Below 0 where more was used than reserved, or the limit was lowered."""
        self._advance(now)
        return (self.capacity * self.SCALE - self._taken) // self.SCALE

    def is_untouched(self, now: Moment) -> bool:
        self._advance(now)
        return self._taken == 0

    def shown(self, num: int) -> str:
        return f"{num}"

    def reserve(self, num: int, now: Moment) -> None:
        self._advance(now)
        self._taken += num * self.SCALE
        self._num_reserved += num

    def settle(self, num_reserved: int, num_used: int, now: Moment) -> None:
        """Count what was used in place of a reservation."""
        self._advance(now)
        self._taken = max(0, self._taken + (num_used - num_reserved) * self.SCALE)
        self._num_reserved -= num_reserved

    def wait_ns(self, num: int, now: Moment) -> int | None:
        """Time until so much is available if nobody else takes any; None: never."""
        if num > self.capacity:
            return None
        self._advance(now)
        missing = self._taken - (self.capacity - num) * self.SCALE
        return self._gain_ns(missing, now) if missing > 0 else 0

    def full_ns(self, now: Moment) -> int:
        wait_ns = self.wait_ns(self.capacity, now)
        assert wait_ns is not None
        return wait_ns

    @abstractmethod
    def _advance(self, now: Moment) -> None:
        """Account for the time that has passed."""

    @abstractmethod
    def _gain_ns(self, missing: int, now: Moment) -> int:
        """Time until so many more parts are available."""


class Bucket(Pool):
    """Full at first; refills by `rate` a minute. In parts of 1 / MINUTE_NS: a nanosecond adds `rate`, unrounded."""

    __slots__ = ("_at_ns", "rate")
    SCALE = MINUTE_NS

    def __init__(self, name: str, rate: int, capacity: int, now: Moment) -> None:
        super().__init__(name, capacity)
        self.rate = rate
        self._at_ns = now.ns

    def resize(self, rate: int, capacity: int, now: Moment) -> None:
        """What has been taken stays taken."""
        self._advance(now)
        self.rate, self.capacity = rate, capacity

    def _advance(self, now: Moment) -> None:
        if now.ns > self._at_ns:
            self._taken = max(0, self._taken - (now.ns - self._at_ns) * self.rate)
            self._at_ns = now.ns

    def _gain_ns(self, missing: int, now: Moment) -> int:
        return -(-missing // self.rate)


class PeriodPool(Pool):
    """A budget of a calendar day or month, UTC. A request that runs past the end counts where it is settled.

    Args:
        name: one of PERIOD_LIMITS; money is in millionths of the currency.
        num_used: used until then.
    """

    __slots__ = ("_begins_s", "_ends_s", "_is_month", "_others", "_told", "is_money")

    def __init__(self, name: str, capacity: int, num_used: int, at: Moment) -> None:
        super().__init__(name, capacity)
        self.is_money = name.startswith("money")
        self._is_month = name.endswith("month")
        self._taken = num_used
        self._begins_s, self._ends_s = period_of(at.unix_s, self._is_month)
        self._others: dict[int, int] = {}  # what was used in other periods, by their beginning
        self._told = 0.0  # the part of it that was warned of

    @property
    def is_bounded(self) -> bool:
        return self.capacity < NEVER

    def num_used(self, now: Moment) -> int:
        self._advance(now)
        return self._taken - self._num_reserved

    def used_part(self, now: Moment) -> float:
        return self.num_used(now) / self.capacity

    def is_near(self, now: Moment) -> bool:
        """Whether a share in WARN_AT has been used."""
        return self.is_bounded and self.used_part(now) >= WARN_AT[0]

    def ends_s(self, now: Moment) -> int:
        """Unix time."""
        self._advance(now)
        return self._ends_s

    def news(self, now: Moment) -> float | None:
        """The share in WARN_AT that its use has reached since the last call; None: no new one."""
        part = self.used_part(now)
        reached = max((one for one in WARN_AT if part >= one), default=0.0)
        told, self._told = self._told, reached
        return reached if reached > told else None

    def shown(self, num: int) -> str:
        return f"{num / MICRO:.6f}".rstrip("0").rstrip(".") if self.is_money else f"{num}"

    def _advance(self, now: Moment) -> None:
        if not self._begins_s <= now.unix_s < self._ends_s:
            self._others[self._begins_s] = self._taken - self._num_reserved
            self._begins_s, self._ends_s = period_of(now.unix_s, self._is_month)
            self._taken, self._told = self._others.pop(self._begins_s, 0) + self._num_reserved, 0.0
            if len(self._others) > PERIODS_KEPT:
                del self._others[next(iter(self._others))]

    def _gain_ns(self, missing: int, now: Moment) -> int:
        return (self._ends_s - now.unix_s) * S_NS


def period_of(unix_s: int, is_month: bool) -> tuple[int, int]:
    """When the day or month begins and ends, in unix time; UTC."""
    if not is_month:
        begins_s = unix_s // DAY_S * DAY_S
        return begins_s, begins_s + DAY_S
    year, month = time.gmtime(unix_s)[:2]
    following = (year + 1, 1) if month == 12 else (year, month + 1)
    begins_s, ends_s = (timegm((*one, 1, 0, 0, 0)) for one in ((year, month), following))
    return begins_s, ends_s


class Shortage(NamedTuple):
    """A pool that has less than requested.

    Args:
        wait_ns: until it has; None: it never will.
        is_least: the requested number is the minimum of any request, because the body is not read yet.
    """

    account: "QuotaAccount"
    pool: Pool
    num_wanted: int
    num_available: int
    wait_ns: int | None
    is_least: bool = False

    def error(self) -> ServiceError:
        owner, limit = self.account.owner, self.pool.name
        shown, most = self.pool.shown, self.pool.shown(self.pool.capacity)
        wanted = f"this needs {'at least ' if self.is_least else ''}{shown(self.num_wanted)}"
        if self.wait_ns is None:
            message = (
                f"{owner} may use at most {most} at once ({limit}), and {wanted}."
                " Ask for fewer max_tokens, shorten the prompt, or ask the operator for more."
            )
            return ServiceError(ErrorKind.RATE_LIMITED, message, "rate_limit_exceeded")
        wait_s = self.wait_ns / S_NS
        message = (
            f"{owner} is over its {limit}: {wanted}, and {shown(max(0, self.num_available))} of"
            f" {most} are left. Try again in {-(-self.wait_ns // S_NS)} s."
        )
        return ServiceError(ErrorKind.RATE_LIMITED, message, "rate_limit_exceeded", retry_after_s=wait_s)


class QuotaAccount:
    """The pools of one tenant, or of one key.

    Attributes:
        owner: as messages name it.
        num_active: requests in progress.
        num_reserved: their tokens.
        requests: pool of requests; None: unlimited.
        periods: usage of the day and the month, limited or not.
        tokens, money: pools; each limits every request.
    """

    def __init__(self, owner: str, limits: Limits, now: Moment, periods: tuple[PeriodPool, ...]) -> None:
        self.owner = owner
        self.num_active = 0
        self.num_reserved = 0
        self.requests: Bucket | None = None
        self.tokens: tuple[Pool, ...] = ()
        self.money: tuple[Pool, ...] = ()
        self.periods = periods
        self._minute: Bucket | None = None
        self.apply(limits, now)

    def apply(self, limits: Limits, now: Moment) -> None:
        """Put limits in force; what has been taken stays taken."""
        self.max_active = limits.concurrent_requests
        self.requests = _resized(
            self.requests, "requests_per_minute", limits.requests_per_minute, limits.burst_requests, now
        )
        self._minute = _resized(self._minute, "tokens_per_minute", limits.tokens_per_minute, limits.burst_tokens, now)
        for pool in self.periods:
            limit = getattr(limits, pool.name)
            pool.capacity = NEVER if limit is None else round(limit * MICRO) if pool.is_money else limit
        bounded = [pool for pool in self.periods if pool.is_bounded]
        minutes = () if self._minute is None else (self._minute,)
        self.tokens = (*minutes, *(pool for pool in bounded if not pool.is_money))
        self.money = tuple(pool for pool in bounded if pool.is_money)

    def is_untouched(self, now: Moment) -> bool:
        """Whether a new account would allow no more."""
        pools: list[Pool] = [pool for pool in (self.requests, self._minute) if pool is not None]
        pools += [pool for pool in self.periods if pool.is_bounded]
        return not (self.num_active or self.num_reserved) and all(pool.is_untouched(now) for pool in pools)

    def warn(self, now: Moment) -> None:
        """Log each budget whose use has just reached a share in WARN_AT."""
        for pool in self.periods:
            if pool.is_bounded and (part := pool.news(now)) is not None:
                used, most = pool.shown(pool.num_used(now)), pool.shown(pool.capacity)
                text = "%s has used %.0f %% of its %s: %s of %s"
                logger.warning(text, self.owner, part * 100, pool.name, used, most)

    def check_concurrency(self) -> None:
        if self.max_active is not None and self.num_active >= self.max_active:
            message = (
                f"{self.owner} has {self.max_active} requests in progress, the most that concurrent_requests allows."
                " Wait for one to end."
            )
            code = "rate_limit_exceeded"
            raise ServiceError(ErrorKind.RATE_LIMITED, message, code, retry_after_s=CONCURRENCY_RETRY_S)


def _resized(old: Bucket | None, name: str, rate: int | None, burst: int | None, now: Moment) -> Bucket | None:
    if rate is None:
        return None
    if old is None:
        return Bucket(name, rate, burst or rate, now)
    old.resize(rate, burst or rate, now)
    return old


@dataclass(slots=True, eq=False, repr=False)
class Ticket:
    """One request and the accounts that limit it: enter, reserve, top_up, settle, leave. Raises only rate_limited.

    Args:
        clock: read at each call.
        cost_micro: what a usage of a model costs, in millionths of the currency.
    """

    caller: Caller
    _accounts: Sequence[QuotaAccount]
    _clock: Callable[[], Moment]
    _cost_micro: CostMicro = lambda model, usage: 0
    num_reserved: int = 0  # tokens
    _price: Callable[[Usage], int] = lambda usage: 0
    _micro_reserved: int = 0
    _held: tuple[tuple[QuotaAccount, tuple[Pool, ...]], ...] = ()  # the pools as of its reservation
    _is_in: bool = False

    def enter(self, needs_tokens: bool = True) -> None:
        """Count the request, before its body is read; a refused one is not counted.

        Args:
            needs_tokens: it will reserve tokens.
        """
        now = self._clock()
        tokens = [(account, pool) for account in self._accounts for pool in account.tokens if needs_tokens]
        requests = [(account, account.requests) for account in self._accounts if account.requests is not None]
        shortages = _shortages(tokens, LEAST_TOKENS, now, is_least=True) + _shortages(requests, 1, now)
        if shortages:
            raise _longest(shortages).error()
        for account in self._accounts:
            account.check_concurrency()
        for account in self._accounts:
            account.num_active += 1
        for _, pool in requests:
            pool.reserve(1, now)
        self._is_in = True

    def give_back(self) -> None:
        """The server was too full for the request, so it does not count. To be called once, before leave."""
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

    def reserve(self, requests: Iterable[Demand], model: str = "") -> None:
        """Reserve the prompts and the first tokens of each sequence, and the most that they can cost.

        A refused request reserves nothing.
        """
        self._price, num_prompt, num_first = partial(self._cost_micro, model), 0, 0
        for one in requests:
            num_prompt += one.num_prompt_tokens
            num_first += one.num_sequences * _first_tokens(one)
        is_priced = any(account.money for account in self._accounts) and self._most_micro(MILLION, MILLION) > 0
        self._held = tuple(
            (account, (*account.tokens, *(account.money if is_priced else ()))) for account in self._accounts
        )
        shortage = self.top_up(num_first, num_prompt)
        if shortage is not None:
            raise shortage.error()

    @property
    def is_bounded(self) -> bool:
        """Whether any pool limits its tokens or their price."""
        return any(pools for _, pools in self._held)

    def top_up(self, num: int, num_prompt: int = 0) -> Shortage | None:
        """Reserve so many more tokens in all pools; or none, and return the pool that lacks them longest."""
        has_money = any(pool.is_money for _, pools in self._held for pool in pools)
        now, micro = self._clock(), self._most_micro(num_prompt, num) if has_money else 0
        num += num_prompt
        pools = [(account, pool) for account, pools in self._held for pool in pools if micro or not pool.is_money]
        shortages = _shortages([one for one in pools if not one[1].is_money], num, now)
        shortages += _shortages([one for one in pools if one[1].is_money], micro, now)
        if shortages:
            return _longest(shortages)
        self.num_reserved += num
        self._micro_reserved += micro
        for account, _ in self._held:
            account.num_reserved += num
        for _, pool in pools:
            pool.reserve(micro if pool.is_money else num, now)
        return None

    def _most_micro(self, num_prompt: int, num_completion: int) -> int:
        """The most that so many tokens can cost: all of the prompt's may be cached, or none."""
        prompts = (Usage(num_prompt, 0, num_cached_tokens=num_cached) for num_cached in (0, num_prompt))
        return max(map(self._price, prompts)) + self._price(Usage(0, num_completion))

    def top_up_rest(self, most: int, num_parts: int = 1) -> int:
        """Reserve a part of what is left, rounded up, after a top-up failed. Returns the number of tokens."""
        now, price = self._clock(), self._price(Usage(0, MILLION))
        pools = [pool for _, pools in self._held for pool in pools]
        left = min((pool.available(now) for pool in pools if not pool.is_money), default=most)
        if price:
            left = min([left, *(pool.available(now) * MILLION // price for pool in pools if pool.is_money)])
        num = min(most, -(-left // num_parts))
        return num if num > 0 and self.top_up(num) is None else 0

    def may_gain(self, within_ns: int) -> bool:
        """Whether there may be one more token by then: pools refill, or other requests return some."""
        now = self._clock()

        def refills(pool: Pool) -> bool:
            wait_ns = pool.wait_ns(1, now)
            return wait_ns is not None and wait_ns <= within_ns

        return all(
            account.num_reserved > self.num_reserved or all(map(refills, pools)) for account, pools in self._held
        )

    def wait_ns(self, shortage: Shortage) -> int | None:
        """The error for the shortage, as of now."""
        return shortage.pool.wait_ns(shortage.num_wanted, self._clock())

    def settle(self, usage: Usage) -> None:
        """Count what was used instead of what was reserved. Idempotent."""
        if not self._held:
            return
        now, num_used, micro_used = self._clock(), self.cost(usage), self._price(usage)
        for account, pools in self._held:
            account.num_reserved -= self.num_reserved
            for pool in (*pools, *(one for one in account.periods if one not in pools)):
                is_held = pool in pools
                if pool.is_money:
                    pool.settle(is_held * self._micro_reserved, micro_used, now)
                else:
                    pool.settle(is_held * self.num_reserved, num_used, now)
            account.warn(now)
        self._held, self.num_reserved, self._micro_reserved = (), 0, 0

    def cost(self, usage: Usage) -> int:
        """Tokens that count against the limits: cached ones of the prompt at the tenant's discount."""
        discount = usage.num_cached_tokens * self.caller.tenant.cached_token_discount // 100
        return usage.num_prompt_tokens + usage.num_completion_tokens - discount

    def headers(self) -> Headers:
        """x-ratelimit-*, for requests and tokens, of the pool that has least left; and x-budget-warning."""
        now, found = self._clock(), []
        requests = [account.requests for account in self._accounts if account.requests is not None]
        tokens = [pool for account in self._accounts for pool in account.tokens]
        for kind, pools in (("requests", requests), ("tokens", tokens)):
            if pools:
                pool = min(pools, key=lambda one: one.available(now))
                left, reset = max(0, pool.available(now)), format_reset(-(-pool.full_ns(now) // S_NS))
                values = {"limit": pool.capacity, "remaining": left, "reset": reset}
                found += [(f"x-ratelimit-{name}-{kind}".encode(), f"{one}".encode()) for name, one in values.items()]
        near = [
            f"{pool.name}={pool.used_part(now):.0%};reset={format_reset(pool.ends_s(now) - now.unix_s)}"
            for account in self._accounts
            for pool in account.periods
            if pool.is_near(now)
        ]
        if near:
            found.append((b"x-budget-warning", ", ".join(near).encode()))
        return tuple(found)


def _shortages(
    pools: Iterable[tuple[QuotaAccount, Pool]], num: int, now: Moment, is_least: bool = False
) -> list[Shortage]:
    return [
        Shortage(account, pool, num, left, pool.wait_ns(num, now), is_least)
        for account, pool in pools
        if (left := pool.available(now)) < num
    ]


def _longest(shortages: Sequence[Shortage]) -> Shortage:
    """When it is over, all are."""
    return max(shortages, key=lambda shortage: (shortage.wait_ns is None, shortage.wait_ns or 0))


def format_reset(seconds: int) -> str:
    """`6m0s`, as clients parse it: Go's format, in whole seconds."""
    minutes, seconds = divmod(seconds, 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}h{minutes}m{seconds}s"
    return f"{minutes}m{seconds}s" if minutes else f"{seconds}s"


class Quotas:
    """The accounts of all callers so far, by tenant and key.

    Args:
        used: in this day and month, before the process started.
        cost_micro: see Ticket.
    """

    def __init__(
        self, clock: Callable[[], Moment], used: Used | None = None, cost_micro: CostMicro = lambda model, usage: 0
    ) -> None:
        self._clock = clock
        self._started = clock()
        self._used = used or {}
        self._cost_micro = cost_micro
        self._accounts: dict[tuple[str, str | None], QuotaAccount] = {}
        self._most_accounts = PRUNED_ACCOUNTS

    def ticket_for(self, caller: Caller) -> Ticket:
        tenant = caller.tenant
        accounts = [self.account_of(tenant)]
        if caller.key_id is not None:
            owner = f"The {'key' if caller.subject is None else 'JWT subject'} {caller.key_id}"
            accounts.append(self._account(owner, (tenant.name, caller.key_id), tenant.key_limits))
        return Ticket(caller, accounts, self._clock, self._cost_micro)

    @property
    def accounts(self) -> tuple[QuotaAccount, ...]:
        return tuple(self._accounts.values())

    def account_of(self, tenant: Tenant) -> QuotaAccount:
        return self._account(f"The tenant {tenant.name}", (tenant.name, None), tenant.limits)

    def of_keys(self) -> dict[str, dict[str, QuotaAccount]]:
        """The accounts of keys that were used, by tenant and the key's id."""
        found: dict[str, dict[str, QuotaAccount]] = defaultdict(dict)
        for (name, key_id), account in self._accounts.items():
            if key_id is not None:
                found[name][key_id] = account
        return found

    def now(self) -> Moment:
        return self._clock()

    def budgets(self) -> dict[tuple[str, ...], float]:
        """The used part of tenants' budgets, and of those of keys that are near their end: by tenant, key, limit."""
        now, found = self._clock(), dict[tuple[str, ...], float]()
        for (name, key_id), account in self._accounts.items():
            for pool in account.periods if len(found) < MOST_BUDGETS else ():
                if pool.is_bounded and (key_id is None or pool.is_near(now)):
                    found[name, key_id or "", pool.name] = round(pool.used_part(now), 4)
        return found

    def apply(self, directory: Directory) -> None:
        """Put the directory's limits in force, for requests in progress too.

        A removed tenant keeps its accounts: if it comes back, it has what was left.
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
                self._prune()
            periods = tuple(
                PeriodPool(name, NEVER, self._used.get(name, {}).get(place, 0), self._started) for name in PERIOD_LIMITS
            )
            account = self._accounts[place] = QuotaAccount(owner, limits, self._clock(), periods)
        return account

    def _prune(self) -> None:
        """Issuers of JWTs may name any number of subjects."""
        now = self._clock()
        self._accounts = {
            place: one for place, one in self._accounts.items() if place[1] is None or not one.is_untouched(now)
        }
        self._most_accounts = max(PRUNED_ACCOUNTS, 2 * len(self._accounts))


class Pausable(Protocol):
    """The methods of an answer that its allowance calls."""

    def pause(self) -> None: ...

    def resume(self) -> None: ...

    def end_early(self) -> None:
        """End all unfinished choices, as if at their max_tokens."""


class Allowance:
    """Reserves the next tokens of an answer's choices while it continues, and pauses it when none are left.

    A choice never sends a token that was not reserved. It requests more AHEAD_TOKENS before its reserved ones run out,
    and when they have, so tokens in flight at a pause are still reserved. If less than a top-up is left, the choices
    share that. The answer is paused until there is a whole top-up, for MAX_WAIT_S at most; then it takes what is left,
    continues, and ends when nothing remains. If nothing can come by then, as with a daily limit, it is not paused.

    Args:
        ticket: has the reservation of the requests.
        requests: in the order of their choices.
    """

    def __init__(
        self, answer: Pausable, ticket: Ticket, requests: Sequence[Demand], loop: asyncio.AbstractEventLoop
    ) -> None:
        self._answer = answer
        self._ticket = ticket
        self._loop = loop
        self._max = [one.max_tokens for one in requests for _ in range(one.num_sequences)]  # by choice
        self._allowed = [_first_tokens(one) for one in requests for _ in range(one.num_sequences)]
        self._num_choices = len(self._max)  # that have not ended
        self._short: dict[int, None] = {}  # choices that wait for a top-up, in order
        self._shortage: Shortage | None = None  # the last
        self._timer: asyncio.TimerHandle | None = None
        self._give_up_s = 0.0
        self._has_waited = False  # in vain: it is not paused again before a whole top-up
        self._has_ended = False

    @property
    def extras(self) -> dict[str, Any]:
        """The message in the answer's last chunk, if the quota ended it. To be read once it is settled."""
        if not self._has_ended or self._shortage is None:
            return {}
        wait_ns = self._ticket.wait_ns(self._shortage)  # what the answer gave back shortens it
        retry_after_s = None if wait_ns is None else max(LEAST_RETRY_S, -(-wait_ns // S_NS))
        limit = self._shortage.pool.name
        message = f"{self._shortage.account.owner} has used up its {limit}: the answer ends here."
        return {"steploop": {"ended_by": limit, "message": message, "retry_after_s": retry_after_s}}

    def on_mark(self, choice: int, num_tokens: int) -> int:
        """A choice has so many tokens: 0, or at least its mark. Returns its next mark; may pause or end it."""
        if self._has_ended:
            return NEVER
        mark = self._next_mark(choice)
        if num_tokens < mark:  # it has been topped up since its mark was set
            return mark
        if self._try_top_up(choice) or self._try_take_rest(choice):
            return self._next_mark(choice)
        if num_tokens >= self._allowed[choice]:
            self._end()
            return NEVER
        if not self._has_waited and self._ticket.may_gain(MAX_WAIT_NS):
            self._pause(choice)
        return self._allowed[choice]

    def drop(self, choice: int) -> None:
        """The choice has ended. To be called once."""
        self._num_choices -= 1
        if choice in self._short:
            del self._short[choice]
            if not self._short and self._timer is not None:
                self.close()
                self._answer.resume()

    def close(self) -> None:
        """Cancel the timer. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _next_mark(self, choice: int) -> int:
        allowed = self._allowed[choice]
        return NEVER if allowed == self._max[choice] else allowed - AHEAD_TOKENS

    def _wanted(self, choice: int) -> int:
        return min(TOP_UP_TOKENS, self._max[choice] - self._allowed[choice])

    def _try_top_up(self, choice: int) -> bool:
        num = self._wanted(choice)
        shortage = self._ticket.top_up(num)
        if shortage is not None:
            self._shortage = shortage
            return False
        self._allowed[choice] += num
        self._has_waited = False
        return True

    def _try_take_rest(self, choice: int) -> bool:
        num = self._ticket.top_up_rest(self._wanted(choice), self._num_choices)
        self._allowed[choice] += num
        return num > 0

    def _pause(self, choice: int) -> None:
        self._short[choice] = None
        if self._timer is None:
            self._answer.pause()
            self._give_up_s = self._loop.time() + MAX_WAIT_S
            self._poll_later()

    def _poll_later(self) -> None:
        assert self._shortage is not None
        wait_s = POLL_S if self._shortage.wait_ns is None else min(self._shortage.wait_ns / S_NS, POLL_S)
        self._timer = self._loop.call_at(min(self._loop.time() + wait_s, self._give_up_s), self._poll)

    def _poll(self) -> None:
        try:
            self._go_on_if_possible()
        except Exception:  # a bug of ours must not leave the answer paused: nothing else would resume it
            logger.exception("an answer cannot be topped up, and ends")
            self._end()

    def _go_on_if_possible(self) -> None:
        for choice in list(self._short):
            if not self._try_top_up(choice):
                break
            del self._short[choice]
        if self._short and self._loop.time() < self._give_up_s:
            self._poll_later()
            return
        self._has_waited = bool(self._short)
        for choice in self._short:
            self._try_take_rest(choice)
        self._short.clear()
        self._timer = None
        self._answer.resume()

    def _end(self) -> None:
        self.close()
        self._has_ended = True
        self._answer.end_early()


def _first_tokens(request: Demand) -> int:
    """The tokens that each of its sequences reserves before the first one."""
    return request.max_tokens if request.counts_late else min(request.max_tokens, FIRST_TOKENS)
