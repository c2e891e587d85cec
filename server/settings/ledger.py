"""What is written down of each request, and for how long. Thread: main, at start; frozen after that."""

from dataclasses import dataclass
from pathlib import Path

from server.settings.option import Group
from server.values import file_value

DAY_S = 86_400.0

_SERVER = Group("server")


@dataclass(frozen=True)
class LedgerSettings:
    """What is written down of each request, and for how long."""

    ledger: Path | None = _SERVER.setting(
        "ledger",
        None,
        file_value,
        "FILE",
        "write down there what each request used, durably: steploop usage shows it, and the day's quotas go on"
        " from it after a restart (default: nothing is written)",
    )
    ledger_keep_s: float = _SERVER.duration(
        "ledger-keep", 400 * DAY_S, (DAY_S, 36_500 * DAY_S), "requests of the ledger that ended longer ago are deleted"
    )
