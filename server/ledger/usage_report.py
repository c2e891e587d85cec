"""What the ledger says was used, summed up. Reads the file on a connection of its own: nobody waits. Any thread."""

import sqlite3
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec
from msgspec import structs

from core.errors import ExitCode, StartupError
from server.gate.keys import AGE, AGE_UNITS
from server.ledger.records import Grouping
from server.ledger.store import APPLICATION_ID, BUSY_MS, SCHEMA_VERSION, is_damaged
from server.values import BadValueError

MICRO = 10**6


_GROUP_SQL = {
    Grouping.DAY: f"date(updated_us / {MICRO}, 'unixepoch')",  # UTC, as tokens_per_day
    Grouping.MODEL: "model",
    Grouping.KEY: "coalesce(key_id, '')",
    Grouping.TENANT: "tenant",
}


class UsageLine(msgspec.Struct, frozen=True):
    """The requests of one group, those in progress left out.

    Args:
        group: a date, the name of a model or tenant, or a key's id: "" where none was shown.
        price_micro: millionths of the currency.
        device_us, kv_block_us: see core.types.Cost.
    """

    group: str
    requests: int
    aborted: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    price_micro: int
    device_us: int
    kv_block_us: int


class UsageQuery(msgspec.Struct, frozen=True):
    """
    Args:
        tenant: None: all.
        since_us: requests that ended then or later.
    """

    by: Grouping = Grouping.DAY
    tenant: str | None = None
    since_us: int = 0


def read_usage(path: Path, query: UsageQuery) -> list[UsageLine]:
    """Sum up, in the order of the groups.

    Raises:
        StartupError: there is no such ledger, or it cannot be read.
    """
    group = _GROUP_SQL[query.by]
    sums = ", ".join(f"sum({name})" for name in UsageLine.__struct_fields__[3:])
    sql = (
        f"SELECT {group}, count(*), sum(state = 'aborted'), {sums} FROM requests"
        " WHERE state != 'reserved' AND updated_us >= ? AND (? IS NULL OR tenant = ?) GROUP BY 1 ORDER BY 1"
    )
    return [UsageLine(*row) for row in _select(path, sql, (query.since_us, query.tenant, query.tenant))]


def usage_objects(by: Grouping, lines: Sequence[UsageLine]) -> list[dict[str, object]]:
    """For JSON: the group under the name of what it is, e.g. "day"."""
    names = (by.value, *UsageLine.__struct_fields__[1:])
    return [dict(zip(names, structs.astuple(line), strict=True)) for line in lines]


def total(lines: Sequence[UsageLine]) -> UsageLine:
    """All of them as one."""
    columns = UsageLine.__struct_fields__[1:]
    return UsageLine("total", *(sum(getattr(line, name) for line in lines) for name in columns))


def since_value(text: str, now: datetime) -> int:
    """`7d`, `12h`, `30min` before now, or a date, or a date and time; UTC where no zone is said. In microseconds.

    Raises:
        BadValueError: it is none.
    """
    try:
        if (match := AGE.fullmatch(text.strip())) is not None:
            when = now - int(match[1]) * AGE_UNITS[match[2]]
        else:
            when = datetime.fromisoformat(text.strip())
            when = when if when.tzinfo else when.replace(tzinfo=UTC)
        return (when - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(microseconds=1)
    except (ValueError, OverflowError) as error:
        raise BadValueError("such as 7d, 12h, 30min, 2030-01-31 or 2030-01-31T12:00:00Z") from error


def _select(path: Path, sql: str, parameters: tuple[Any, ...]) -> list[Any]:
    fix = "--ledger FILE, the one that the server has"
    if not path.is_file():
        raise StartupError(f"there is no ledger {path}", fix, ExitCode.USAGE)
    try:
        connection = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", timeout=BUSY_MS / 1000, uri=True)
        try:
            found = tuple(
                connection.execute(f"PRAGMA {name}").fetchone()[0] for name in ("application_id", "user_version")
            )
            if found != (APPLICATION_ID, SCHEMA_VERSION):
                raise StartupError(f"{path} is no ledger that this version knows", fix, ExitCode.USAGE)
            return connection.execute(sql, parameters).fetchall()
        finally:
            connection.close()
    except sqlite3.Error as error:
        if is_damaged(path, error):
            fix = "--ledger FILE, the one that the server has; or a backup (docs/ledger.md, The way back)"
            raise StartupError(f"{path} is damaged, or not a ledger: {error}", fix, ExitCode.USAGE) from error
        fix = "read it as the user that the server runs as, or as root"
        raise StartupError(f"the ledger {path} cannot be read: {error}", fix, ExitCode.USAGE) from error
