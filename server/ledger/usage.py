"""Prices of tokens, from [prices] of the TOML file, and usage summed up from the ledger. Any thread.

For GET /v1/usage and `steploop usage`. Whole numbers throughout. The ledger is read on a connection of its own.
"""

import sqlite3
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import msgspec
from msgspec import structs

from core.errors import ErrorKind, ExitCode, InvalidRequest, ServiceError, StartupError
from core.types import Usage
from server.gate.identity import read_moment
from server.ledger.store import APPLICATION_ID, MICRO, SCHEMA_VERSION, Grouping, is_damaged, open_to_read
from server.values import BadValueError, did_you_mean
from server.wire import sse

DEFAULT_SINCE = "30d"
_KNOWN = ("by", "since")
MILLION = 10**6
ANY_MODEL = "*"
SAMPLE = (
    '[prices."Qwen3-0.6B"] with prompt = 0.05, cached = 0.01, completion = 0.20: of your currency, per million tokens'
)
MAX_PRICE = 10**6


class ModelPrice(msgspec.Struct, frozen=True):
    """Millionths of the currency per million tokens.

    Args:
        cached: of prompt tokens in the prefix cache.
    """

    prompt: int = 0
    cached: int = 0
    completion: int = 0

    def cost_micro(self, usage: Usage) -> int:
        """Millionths of the currency, rounded half up."""
        num_computed = usage.num_prompt_tokens - usage.num_cached_tokens
        cost = num_computed * self.prompt + usage.num_cached_tokens * self.cached
        return (cost + usage.num_completion_tokens * self.completion + MILLION // 2) // MILLION


FREE = ModelPrice()


class Prices(msgspec.Struct, frozen=True):
    """By the model's name; ANY_MODEL for the others."""

    by_model: tuple[tuple[str, ModelPrice], ...] = ()

    def cost_micro(self, model: str, usage: Usage) -> int:
        by_model = dict(self.by_model)
        return by_model.get(model, by_model.get(ANY_MODEL, FREE)).cost_micro(usage)


NO_PRICES = Prices()


def parse_prices(table: Any, path: Path) -> Prices:
    """[prices] of the TOML file at `path`. Raises StartupError, which names the model and the field."""
    if not isinstance(table, Mapping):
        raise StartupError(f"prices in {path} is not a table", SAMPLE)
    return Prices(tuple((model, _parse_model(model, fields, path)) for model, fields in table.items()))


def _parse_model(model: str, fields: Any, path: Path) -> ModelPrice:
    where = f"[prices.{model!r}] in {path}"
    if not isinstance(fields, Mapping):
        raise StartupError(f"{where} is not a table", SAMPLE)
    known = ModelPrice.__struct_fields__
    for name, value in fields.items():
        if name not in known:
            raise StartupError(f"{where} has {name!r}", f"known: {', '.join(known)}")
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= MAX_PRICE:
            cause = f"{name} of {where} is {value!r}, and must be a number from 0 to {MAX_PRICE:,}"
            raise StartupError(cause, SAMPLE)
    prices = {name: int(Decimal(str(value)) * MILLION) for name, value in fields.items()}
    return ModelPrice(**({"cached": prices.get("prompt", 0)} | prices))


_GROUP_SQL = {
    Grouping.DAY: f"date(updated_us / {MICRO}, 'unixepoch')",  # UTC, as tokens_per_day
    Grouping.MODEL: "model",
    Grouping.KEY: "coalesce(key_id, '')",
    Grouping.TENANT: "tenant",
}


class UsageLine(msgspec.Struct, frozen=True):
    """The ended requests of one group.

    Args:
        group: a date, the name of a model or tenant, or a key's id: "" for requests without a key.
        price_micro: millionths of the currency.
        device_us, kv_block_us: see core.types.Cost.
    """

    group: str
    requests: int
    aborted: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    reasoning_tokens: int
    price_micro: int
    device_us: int
    kv_block_us: int


class UsageQuery(msgspec.Struct, frozen=True):
    """
    Args:
        tenant: None: all.
        since_us: of requests that ended then or later.
    """

    by: Grouping = Grouping.DAY
    tenant: str | None = None
    since_us: int = 0


def read_usage(path: Path, query: UsageQuery) -> list[UsageLine]:
    """In the order of the groups. Raises StartupError if there is no such ledger or it cannot be read."""
    group = _GROUP_SQL[query.by]
    sums = ", ".join(f"sum({name})" for name in UsageLine.__struct_fields__[3:])
    sql = (
        f"SELECT {group}, count(*), sum(state = 'aborted'), {sums} FROM requests"
        " WHERE state != 'reserved' AND updated_us >= ? AND (? IS NULL OR tenant = ?) GROUP BY 1 ORDER BY 1"
    )
    return [UsageLine(*row) for row in _select(path, sql, (query.since_us, query.tenant, query.tenant))]


def usage_objects(by: Grouping, lines: Sequence[UsageLine]) -> list[dict[str, object]]:
    """For JSON; the group's field bears its kind, e.g. "day"."""
    names = (by.value, *UsageLine.__struct_fields__[1:])
    return [dict(zip(names, structs.astuple(line), strict=True)) for line in lines]


def total(lines: Sequence[UsageLine]) -> UsageLine:
    columns = UsageLine.__struct_fields__[1:]
    return UsageLine("total", *(sum(getattr(line, name) for line in lines) for name in columns))


def since_value(text: str, now: datetime) -> int:
    """`7d`, `12h`, `30min` ago, or a date, or a date and time; UTC by default. Raises BadValueError.

    Returns: microseconds since 1970.
    """
    when = read_moment(text, now, -1, "such as 7d, 12h, 30min, 2030-01-31 or 2030-01-31T12:00:00Z")
    return (when - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(microseconds=1)


def _select(path: Path, sql: str, parameters: tuple[Any, ...]) -> list[Any]:
    fix = "--ledger FILE, the one that the server has"
    if not path.is_file():
        raise StartupError(f"there is no ledger {path}", fix, ExitCode.USAGE)
    try:
        with open_to_read(path) as connection:
            found = tuple(
                connection.execute(f"PRAGMA {name}").fetchone()[0] for name in ("application_id", "user_version")
            )
            if found != (APPLICATION_ID, SCHEMA_VERSION):
                raise StartupError(f"{path} is not a ledger of this version", fix, ExitCode.USAGE)
            return connection.execute(sql, parameters).fetchall()
    except sqlite3.Error as error:
        if is_damaged(path, error):
            fix = "--ledger FILE, the one that the server has; or a backup (docs/ledger.md, Restoring a backup)"
            raise StartupError(f"{path} is damaged, or not a ledger: {error}", fix, ExitCode.USAGE) from error
        fix = "read it as the user that the server runs as, or as root"
        raise StartupError(f"the ledger {path} cannot be read: {error}", fix, ExitCode.USAGE) from error


_GROUPINGS = (Grouping.DAY, Grouping.MODEL, Grouping.KEY)


def parse_usage(query: str, tenant: str, now: datetime) -> UsageQuery:
    """Of GET /v1/usage. Raises InvalidRequest, which names the parameter."""
    fields = parse_qs(query, keep_blank_values=True)
    for name in fields:
        if name not in _KNOWN:
            raise InvalidRequest(f"There is no parameter {name[:64]!r}. Known: {', '.join(_KNOWN)}.", name[:64])
    by, since = fields.get("by", [Grouping.DAY])[-1], fields.get("since", [DEFAULT_SINCE])[-1]
    if by not in _GROUPINGS:
        message = f"by must be one of {', '.join(_GROUPINGS)}{did_you_mean(by[:64], _GROUPINGS)}"
        raise InvalidRequest(message, "by")
    try:
        return UsageQuery(Grouping(by), tenant, since_value(since, now))
    except BadValueError as error:
        raise InvalidRequest(f"since must be {error.expected}", "since") from error


def usage_reply(query: UsageQuery, lines: list[UsageLine]) -> bytes:
    data = usage_objects(query.by, lines)
    return sse.json_line({"object": "usage", "tenant": query.tenant, "by": query.by.value, "data": data})


NO_LEDGER = ServiceError(
    ErrorKind.NOT_FOUND, "This server keeps no ledger. Ask the operator to start it with --ledger FILE.", "no_ledger"
)
