"""Operators' routes for tenants and keys: who may ask, how much, and what they have used. Thread: loop.

Keys are changed in the keys file, as `steploop keys` does, and are in force once the answer is out. Limits are changed
in this process alone: the next reload or start takes those of the configuration.
"""

import logging
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from typing import Annotated, Any, Literal, TypeVar
from urllib.parse import parse_qs

import msgspec
from msgspec import Meta

from core.errors import ErrorKind, InvalidRequest, ServiceError, StartupError
from server.api.decoding import decode, page_of
from server.app import App, Exchange, Handler, Operation, Route
from server.gate.identity import (
    COMMON_SCOPES,
    KeyRecord,
    Scope,
    ShownKey,
    create_key,
    expiry_value,
    label_value,
    read_keys,
    revoke_key,
    tenant_value,
)
from server.gate.quota import MICRO, S_NS, Moment, Pool, QuotaAccount, Quotas
from server.gate.tenants import Limits, Tenant
from server.values import BadValueError

logger = logging.getLogger(__name__)

T = TypeVar("T")

BODY_BYTES = 16_384
DEFAULT_LISTED, MOST_LISTED = 100, 1000  # tenants
MAX_KEYS = 100  # of a tenant's: those that have spent most this month


class NewKey(msgspec.Struct, frozen=True, kw_only=True):
    """What POST /admin/keys takes; `expires` as `steploop keys create --expires` has it."""

    tenant: str | None = None
    label: str = ""
    scopes: tuple[Scope, ...] = COMMON_SCOPES
    expires: str | None = None


class NewLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What PATCH /admin/tenants/NAME takes; None: as they are."""

    limits: Limits | None = None
    key_limits: Limits | None = None


class CreatedKey(ShownKey, frozen=True, kw_only=True):
    """key: shown only now."""

    key: str


class KeyList(msgspec.Struct, frozen=True, kw_only=True):
    object: Literal["list"]
    data: list[ShownKey]


class PoolState(msgspec.Struct, frozen=True, kw_only=True):
    """What is left of a limit. Money in the currency of [prices]."""

    limit: float
    left: float
    full_in_s: float


class AccountState(msgspec.Struct, frozen=True, kw_only=True):
    """
    Args:
        used, left: by the limit's name.
        is_near: limits of a day or a month that are 80 % used.
    """

    num_active: int
    used: dict[str, float]
    left: dict[str, PoolState]
    is_near: list[str]


class KeyState(AccountState, frozen=True, kw_only=True):
    id: str


class TenantState(AccountState, frozen=True, kw_only=True):
    """
    Args:
        limits, key_limits: those that are set.
        keys: that were used, MAX_KEYS at most.
    """

    name: str
    tenant_class: str = msgspec.field(name="class")
    share: int
    limits: dict[str, float]
    key_limits: dict[str, float]
    keys: list[KeyState]


class TenantList(msgspec.Struct, frozen=True, kw_only=True):
    """has_more: behind the last of these; `after` takes its name."""

    object: Literal["list"]
    data: list[TenantState]
    has_more: bool
    has_keys_file: bool


# Keys.


async def list_keys(exchange: Exchange) -> None:
    records, now = await _of_keys_file(exchange, read_keys), _now(exchange.server)
    _send(exchange, KeyList(object="list", data=[record.public(now) for record in records]))


async def make_key(exchange: Exchange) -> None:
    asked, now = await body_of(exchange, NewKey), _now(exchange.server)
    tenant = _value("tenant", lambda: tenant_value(asked.tenant, exchange.server.gate.directory.tenants.values()))
    label = _value("label", lambda: label_value(asked.label))
    expires = None if asked.expires is None else _value("expires", partial(expiry_value, asked.expires, now))
    if not asked.scopes:
        raise InvalidRequest(f"scopes must name some of {', '.join(Scope)}.", "scopes")
    terms: dict[str, Any] = {"label": label, "scopes": tuple(dict.fromkeys(asked.scopes)), "expires": expires}
    key, record = await _of_keys_file(exchange, lambda path: create_key(path, now, tenant, **terms))
    _put_in_force(exchange, record, "created")
    _send(exchange, CreatedKey(**msgspec.structs.asdict(record.public(now)), key=key), status=201)


async def end_key(exchange: Exchange) -> None:
    prefix, now = exchange.argument, _now(exchange.server)
    if not any(record.prefix == prefix for record in await _of_keys_file(exchange, read_keys)):
        message = "No key of the keys file has this prefix. GET /admin/keys lists them."
        raise ServiceError(ErrorKind.NOT_FOUND, message, "key_not_found")
    record = await _of_keys_file(exchange, lambda path: revoke_key(path, prefix, now))
    _put_in_force(exchange, record, "revoked")
    _send(exchange, record.public(now))


def _put_in_force(exchange: Exchange, record: KeyRecord, what: str) -> None:
    server = exchange.server
    try:
        server.gate.take_keys()
    except StartupError as error:
        raise _file_error(error) from error
    server.end_revoked()
    logger.info("the key %s of %s is %s, as %s asks", record.prefix, record.tenant, what, exchange.request.path)


async def _of_keys_file(exchange: Exchange, work: Callable[[Any], T]) -> T:
    """What `work` does with the file's path, on another thread: it waits for a lock and for the disk.

    Raises:
        ServiceError: there is no keys file, or it cannot be read or written.
    """
    server = exchange.server
    if (path := server.gate.keys_file) is None:
        message = "This server has no keys file. Start it with --keys-file FILE (docs/tenants.md)."
        raise ServiceError(ErrorKind.NOT_FOUND, message, "no_keys_file")
    try:
        return await server.offload(lambda: work(path))
    except StartupError as error:
        raise _file_error(error) from error


def _file_error(error: StartupError) -> ServiceError:
    return ServiceError(ErrorKind.CONFLICT, f"{error.cause}. {error.fix}.", "keys_file_unusable")


# Tenants.


async def list_tenants(exchange: Exchange) -> None:
    """Each tenant's limits, what is left of them, and what it and its keys have used of this day and month.

    By ?find=, a part of the name; a page of them by ?after= and ?limit=.
    """
    gate, query = exchange.server.gate, parse_qs(exchange.request.query)
    after, limit = page_of(query, MOST_LISTED, DEFAULT_LISTED)
    wanted = query.get("find", [""])[0].casefold()
    if after is not None and after not in gate.directory.tenants:
        raise InvalidRequest("after must be the name of a tenant.", "after")
    names = list(gate.directory.tenants)
    names = names[names.index(after) + 1 :] if after is not None else names
    found = [name for name in names if wanted in name.casefold()]
    of_keys = gate.quotas.of_keys()
    shown = [_shown_tenant(gate.quotas, gate.directory.tenants[name], of_keys[name]) for name in found[:limit]]
    has_keys_file = gate.keys_file is not None
    _send(exchange, TenantList(object="list", data=shown, has_more=len(found) > limit, has_keys_file=has_keys_file))


async def change_limits(exchange: Exchange) -> None:
    gate = exchange.server.gate
    before = gate.directory.tenants.get(exchange.argument)
    if before is None:
        message = f"There is no such tenant. Known: {', '.join(gate.directory.tenants)}."
        raise ServiceError(ErrorKind.NOT_FOUND, message, "tenant_not_found")
    asked = await body_of(exchange, NewLimits)
    before = gate.directory.tenants.get(before.name, before)  # it may have changed meanwhile
    limits, key_limits = asked.limits or before.limits, asked.key_limits or before.key_limits
    tenant = msgspec.structs.replace(before, limits=limits, key_limits=key_limits)
    try:
        gate.take_tenant(tenant)
    except StartupError as error:
        raise InvalidRequest(f"{error.cause}. {error.fix}.", "limits") from error
    logger.info("the limits of %s are changed until the configuration is read again", tenant.name)
    _send(exchange, _shown_tenant(gate.quotas, tenant, gate.quotas.of_keys()[tenant.name]))


def _shown_tenant(quotas: Quotas, tenant: Tenant, keys: dict[str, QuotaAccount]) -> TenantState:
    now = quotas.now()
    by_use = sorted(keys, key=lambda key_id: -keys[key_id].periods[-1].num_used(now))
    return TenantState(
        name=tenant.name,
        tenant_class=tenant.tenant_class,
        share=tenant.share,
        limits=_set(tenant.limits),
        key_limits=_set(tenant.key_limits),
        keys=[KeyState(id=key_id, **_shown_account(keys[key_id], now)) for key_id in by_use[:MAX_KEYS]],
        **_shown_account(quotas.account_of(tenant), now),
    )


def _shown_account(account: QuotaAccount, now: Moment) -> dict[str, Any]:
    """The fields of AccountState."""
    buckets = [*account.tokens, *account.money, *(() if account.requests is None else (account.requests,))]
    return {
        "num_active": account.num_active,
        "used": {pool.name: _in_units(pool, pool.num_used(now)) for pool in account.periods},
        "left": {pool.name: _shown_pool(pool, now) for pool in buckets},
        "is_near": [one.name for one in account.periods if one.is_near(now)],
    }


def _shown_pool(pool: Pool, now: Moment) -> PoolState:
    return PoolState(
        limit=_in_units(pool, pool.capacity),
        left=_in_units(pool, pool.available(now)),
        full_in_s=round(pool.full_ns(now) / S_NS, 1),
    )


def _in_units(pool: Pool, num: int) -> float:
    return num / MICRO if pool.is_money else num


def _set(limits: Limits) -> dict[str, float]:
    return {name: value for name, value in msgspec.structs.asdict(limits).items() if value is not None}


# Bodies and answers.


async def body_of(exchange: Exchange, shape: type[T]) -> T:
    body = await exchange.stream.read_body(BODY_BYTES, exchange.known_caller.sharing_name)
    asked, unknown = decode(body, shape, {})
    if unknown:
        raise InvalidRequest(f"Unknown field {unknown[0][:64]!r}. Leave it out.", unknown[0][:64])
    return asked


def _value(name: str, read: Callable[[], T]) -> T:
    try:
        return read()
    except BadValueError as error:
        end = "" if error.expected.endswith("?") else "."
        raise InvalidRequest(f"{name} must be {error.expected}{end}", name) from error


def _send(exchange: Exchange, shown: msgspec.Struct, status: int = 200) -> None:
    exchange.send(msgspec.json.encode(shown) + b"\n", status)


def _now(server: App) -> datetime:
    return datetime.fromtimestamp(server.clock.unix(), UTC)


def _route(handler: Handler, summary: str, *body: Any, **more: Any) -> Route:
    return Route(handler, Scope.ADMIN, needs_model=False, operation=Operation(summary, *body, **more))


_NEW_KEY = {"tenant": "acme", "label": "CI"}
ROUTES = {
    "/admin/keys": {
        "GET": _route(list_keys, "The keys of the keys file, without the keys themselves", answer=KeyList),
        "POST": _route(make_key, "Create a key", NewKey, None, _NEW_KEY, CreatedKey, status=201),
    },
    "/admin/tenants": {
        "GET": _route(
            list_tenants,
            "Tenants, their limits and what they have used",
            answer=TenantList,
            query={"find": str, "after": str, "limit": Annotated[int, Meta(ge=1, le=MOST_LISTED)]},
        )
    },
    "/admin/keys/{prefix}": {"DELETE": _route(end_key, "Revoke a key", answer=ShownKey)},
    "/admin/tenants/{tenant}": {
        "PATCH": _route(
            change_limits,
            "Change a tenant's limits until the configuration is read again",
            NewLimits,
            None,
            {"limits": {"requests_per_minute": 60}},
            TenantState,
        )
    },
}
