"""`steploop usage`: what the ledger records. Thread: main."""

import argparse
import csv
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import partial

import msgspec

from core.errors import ExitCode, StartupError
from server.commands.command_line import given_value
from server.commands.console import new_console
from server.config import ServerConfig
from server.ledger.store import MICRO, Grouping
from server.ledger.usage import UsageLine, UsageQuery, read_usage, since_value, total, usage_objects

NO_KEY = "(no key)"


def run(arguments: argparse.Namespace, config: ServerConfig) -> ExitCode:
    """Raises StartupError: an argument is invalid, or there is no ledger."""
    if config.ledger is None:
        fix = "--ledger FILE, STEPLOOP_LEDGER=FILE or ledger in the TOML file that --config names"
        raise StartupError("no ledger is named", fix, ExitCode.USAGE)
    if config.tenants and arguments.tenant not in (None, *(tenant.name for tenant in config.tenants)):
        print(f"note: the configuration has no tenant {arguments.tenant}", file=sys.stderr)
    since_us = 0
    if arguments.since is not None:
        since_us = given_value("--since", arguments.since, partial(since_value, now=datetime.now(UTC)), "30d")
    query = UsageQuery(Grouping(arguments.by), arguments.tenant, since_us)
    lines = read_usage(config.ledger, query)
    if not lines:
        print(f"{config.ledger} has no matching records", file=sys.stderr)
    if arguments.json:
        print(msgspec.json.format(msgspec.json.encode(usage_objects(query.by, lines))).decode())
    elif arguments.csv:
        _print_csv(query.by, lines)
    elif lines:
        _print_table(query.by, lines)
    return ExitCode.OK


def _print_csv(by: Grouping, lines: Sequence[UsageLine]) -> None:
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow([by.value, *UsageLine.__struct_fields__[1:]])
    writer.writerows(msgspec.structs.astuple(line) for line in lines)


def _print_table(by: Grouping, lines: Sequence[UsageLine]) -> None:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, show_footer=len(lines) > 1)
    cells = [_cells(line) for line in lines]
    footer = _cells(total(lines))
    heads = (
        by.value,
        "requests",
        "aborted",
        "prompt",
        "cached",
        "completion",
        "reasoning",
        "price",
        "device s",
        "block s",
    )
    for i, (head, foot) in enumerate(zip(heads, footer, strict=True)):
        table.add_column(head, foot, justify="left" if i == 0 else "right", no_wrap=True)
    for row in cells:
        table.add_row(*row)
    new_console(plain_width=160).print(table)


def _cells(line: UsageLine) -> tuple[str, ...]:
    tokens = (line.prompt_tokens, line.cached_tokens, line.completion_tokens, line.reasoning_tokens)
    counts = (line.requests, line.aborted, *tokens)
    seconds = (line.device_us, line.kv_block_us)
    return (
        line.group or NO_KEY,
        *(f"{count:,}" for count in counts),
        f"{line.price_micro / MICRO:,.6f}",
        *(f"{us / MICRO:,.3f}" for us in seconds),
    )
