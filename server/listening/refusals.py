"""Connections that were turned away: counted by reason, and told in a line now and then. Thread: loop."""

import logging
from collections import Counter
from collections.abc import Callable

from server.wire.peer import Peer

logger = logging.getLogger(__name__)

LOG_INTERVAL_S = 10.0

MAX_CONNECTIONS = "max_connections"
MAX_PER_ADDRESS = "max_per_address"
DENIED = "denied"
UNTRUSTED_PROXY = "untrusted_proxy"
PROXY_HEADER = "proxy_header"
HANDSHAKE = "tls_handshake"
SHUTDOWN = "shutdown"

_EXPLANATIONS = {
    MAX_CONNECTIONS: "--max-connections are open",
    MAX_PER_ADDRESS: "--max-connections-per-address are open from there",
    DENIED: "--allow and --deny do not let it come",
    UNTRUSTED_PROXY: "a bind with proxy: takes connections from --trusted-proxies alone",
    PROXY_HEADER: "its PROXY protocol header is missing, malformed or late",
    HANDSHAKE: "the TLS handshake failed",
    SHUTDOWN: "the server is shutting down",
}


class Refusals:
    """
    Args:
        now: seconds, from anywhere.

    Attributes:
        counts: by reason.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self.counts: Counter[str] = Counter(dict.fromkeys(_EXPLANATIONS, 0))
        self._now = now
        self._told: dict[str, tuple[float, int]] = {}  # when a reason was told last, and its count then

    def add(self, reason: str, peer: Peer) -> None:
        """Count one. The first of a reason is told, and then one line a LOG_INTERVAL_S tells of all since."""
        self.counts[reason] += 1
        count, now = self.counts[reason], self._now()
        since, told = self._told.get(reason, (-LOG_INTERVAL_S, 0))
        if now - since < LOG_INTERVAL_S:
            return
        self._told[reason] = now, count
        number = "a connection" if count - told == 1 else f"{count - told} connections"
        level = logging.INFO if reason == HANDSHAKE else logging.WARNING  # health checks by TCP alone end there
        logger.log(level, "%s refused, the last from %s: %s", number, peer, _EXPLANATIONS[reason])
