"""What is written down of each request, and for how long. Thread: main, at start; frozen after that."""

from dataclasses import dataclass, field
from pathlib import Path

from server.settings.option import Setting
from server.values import duration_between, file_value, format_duration

DAY_S = 86_400.0


@dataclass(frozen=True)
class LedgerSettings:
    """What is written down of each request, and for how long."""

    ledger: Path | None = field(
        default=None,
        metadata=Setting(
            name="ledger",
            parse=file_value,
            metavar="FILE",
            help="write down there what each request used, durably: steploop usage shows it, and the day's quotas go on"
            " from it after a restart (default: nothing is written)",
            group="server",
        ),
    )
    ledger_keep_s: float = field(
        default=400 * DAY_S,
        metadata=Setting(
            name="ledger-keep",
            parse=duration_between(DAY_S, 36_500 * DAY_S),
            metavar="TIME",
            help="requests of the ledger that ended longer ago are deleted",
            group="server",
            show=format_duration,
        ),
    )
