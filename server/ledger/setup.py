"""From the configuration to the open ledger. Thread: loop, at start."""

import asyncio
import logging
from typing import NamedTuple

from server.clock import Clock
from server.config import ServerConfig
from server.gate.quota import DAY_S, UsedTokens
from server.ledger.idempotency import Idempotency
from server.ledger.journal import Journal, open_journal
from server.ledger.ledger import MICRO, Ledger
from server.ledger.thread import LedgerThread, Writer

MAX_SPILLED = 32_768  # requests that the spill journal has room for: 64 MiB

logger = logging.getLogger(__name__)


class OpenLedger(NamedTuple):
    """
    Args:
        ledger: None: none is configured.
        used_today: what it knows of the day.
        idempotency: with the answers that it has.
    """

    ledger: Ledger | None
    used_today: UsedTokens
    idempotency: Idempotency


def open_ledger(config: ServerConfig, clock: Clock, loop: asyncio.AbstractEventLoop) -> OpenLedger:
    """The ledger that is configured, and what is made of it.

    Raises:
        StartupError: see open_journal.
    """
    if config.ledger is None:
        if any(one.limits.tokens_per_day or one.key_limits.tokens_per_day for one in config.tenants):
            logger.warning("without --ledger FILE, tokens_per_day begins anew with each start of the server")
        return OpenLedger(None, {}, Idempotency(clock.unix))
    journal = open_journal(config.ledger, min(config.max_queue, MAX_SPILLED))
    return opened(journal, LedgerThread(journal, loop), config, clock, loop)


def opened(
    journal: Journal, writer: Writer, config: ServerConfig, clock: Clock, loop: asyncio.AbstractEventLoop
) -> OpenLedger:
    """What is read of the journal is read now: it is the writer's from then on."""
    midnight_s = int(clock.unix()) // DAY_S * DAY_S
    used_today, answers = journal.used_since(midnight_s * MICRO), journal.answers()
    assert config.ledger is not None
    ledger = Ledger(config.ledger, writer, config.prices, clock.unix, loop, config.ledger_keep_s)
    return OpenLedger(ledger, used_today, Idempotency(clock.unix, answers, ledger.keep, ledger.forget))
