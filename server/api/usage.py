"""GET /v1/usage: what the caller's tenant used, from the ledger."""

from datetime import datetime
from urllib.parse import parse_qs

from core.errors import ErrorKind, InvalidRequest, ServiceError
from server.ledger.records import Grouping
from server.ledger.usage_report import UsageLine, UsageQuery, since_value, usage_objects
from server.values import BadValueError, did_you_mean
from server.wire import sse

DEFAULT_SINCE = "30d"
_KNOWN = ("by", "since")
_GROUPINGS = (Grouping.DAY, Grouping.MODEL, Grouping.KEY)


def parse_usage(query: str, tenant: str, now: datetime) -> UsageQuery:
    """
    Raises:
        InvalidRequest: naming the parameter.
    """
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
