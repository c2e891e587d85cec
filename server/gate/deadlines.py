"""How long a request may take: to its first token, from one to the next, in all. Frozen; any thread.

The server has limits, a tenant may have others in their place, and a request may ask for less of either. What becomes
of who is late: server/generation.py.
"""

import math
from dataclasses import dataclass
from typing import Annotated

import msgspec

from core.errors import ServiceError

MAX_DEADLINE_MS = 7 * 24 * 3600 * 1000

_Milliseconds = Annotated[float, msgspec.Meta(ge=1, le=MAX_DEADLINE_MS)]


class DeadlineTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A tenant's deadlines, as its table says them; None: the server's."""

    ttft_ms: _Milliseconds | None = None
    inter_token_ms: _Milliseconds | None = None
    total_ms: _Milliseconds | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Deadlines:
    """Seconds; infinite: as long as it takes.

    Args:
        ttft_s, total_s: from the request's head to the first token, and to the end.
        inter_token_s: from one token of an answer to the next, less what its reader has kept it waiting.
        asked: names of those that the request itself asks for.
    """

    ttft_s: float = math.inf
    inter_token_s: float = math.inf
    total_s: float = math.inf
    asked: frozenset[str] = frozenset()

    def replaced_by(self, table: DeadlineTable) -> "Deadlines":
        """What a tenant has of its own stands in place of the server's."""
        return Deadlines(
            ttft_s=_seconds(table.ttft_ms, self.ttft_s),
            inter_token_s=_seconds(table.inter_token_ms, self.inter_token_s),
            total_s=_seconds(table.total_ms, self.total_s),
        )

    def narrowed_by(self, other: "Deadlines") -> "Deadlines":
        """The shorter of each.

        Args:
            other: what the request asks for.
        """
        asked = {name for name in NAMES if math.inf > getattr(other, name) <= getattr(self, name)}
        return Deadlines(
            asked=frozenset(asked),
            ttft_s=min(self.ttft_s, other.ttft_s),
            inter_token_s=min(self.inter_token_s, other.inter_token_s),
            total_s=min(self.total_s, other.total_s),
        )


NAMES = ("ttft_s", "inter_token_s", "total_s")
ANY_TIME = Deadlines()


class OwnDeadlineExceeded(ServiceError):
    """We were too slow for what the operator gives a request, not for what its client asks."""


def _seconds(value_ms: float | None, default_s: float) -> float:
    return default_s if value_ms is None else value_ms / 1e3
