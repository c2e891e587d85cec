"""From the configuration to the open ledger. Thread: loop, at start."""

import asyncio
import logging

from server.config import ServerConfig
from server.ledger import MICRO, Ledger
from server.ledger_journal import Journal, open_journal
from server.ledger_thread import LedgerThread
from server.lifecycle import Clock
from server.quota import DAY_S, UsedTokens

logger = logging.getLogger(__name__)


def open_ledger(
    config: ServerConfig, clock: Clock, loop: asyncio.AbstractEventLoop
) -> tuple[Ledger | None, UsedTokens]:
    """The ledger that is configured, and what it knows of the day.

    Raises:
        StartupError: see open_journal.
    """
    if config.ledger is None:
        if any(one.limits.tokens_per_day or one.key_limits.tokens_per_day for one in config.tenants):
            logger.warning("without --ledger FILE, tokens_per_day begins anew with each start of the server")
        return None, {}
    journal = open_journal(config.ledger, config.max_queue)
    used_today = used_of_day(journal, clock.unix())
    writer = LedgerThread(journal, loop)
    return Ledger(writer, config.prices, clock.unix, loop, config.ledger_keep_s), used_today


def used_of_day(journal: Journal, unix_s: float) -> UsedTokens:
    midnight_s = int(unix_s) // DAY_S * DAY_S
    return journal.used_since(midnight_s * MICRO)
