"""x-ratelimit-*: what is left to a caller, as every answer to a request that counts bears it (API.md). Thread: loop."""

from server.gate.quota import S_NS, Moment, Pool, Ticket
from server.wire.messages import Headers

_PREFIX = b"x-ratelimit-"


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
