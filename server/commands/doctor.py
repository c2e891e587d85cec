"""`steploop doctor`: what is installed, what the machine has, what would be served. Thread: main.

A fact that would keep `serve` from starting carries the error.
"""

import argparse
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import NamedTuple, TextIO

from core.errors import ExitCode, StartupError
from server.commands.console import new_console
from server.commands.hub import NotFetched
from server.commands.versions import LISTED, NOT_EVERYWHERE, VersionOf, check_floors, installed_version, versions
from server.config import ServerConfig
from server.engine_loader import Fact, machine_facts, measure_anew, plan_facts, quality_facts
from server.listening.sockets import Bind, PassedAddress, TcpAddress, open_binds

TRIAL_BACKLOG = 1


class Section(NamedTuple):
    title: str
    facts: tuple[Fact, ...]


def run(arguments: argparse.Namespace, config: ServerConfig) -> int:
    if arguments.measure:
        measure_anew(config, _report)
    sections = [
        version_section(),
        Section("Machine", machine_facts(config)),
        serving_section(lambda: plan_facts(config), config.all_binds()),
    ]
    if arguments.quality:
        sections.append(quality_section(lambda: quality_facts(config, _report)))
    print_report(sections, sys.stdout)
    return exit_code(sections)


def _report(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def version_section(version_of: VersionOf = installed_version) -> Section:
    """Installed versions. A missing dependency, or one below its security floor, is an error."""
    facts = []
    for name, version in versions(version_of):
        is_missing = name in LISTED and name not in NOT_EVERYWHERE and version == "missing"
        missing = StartupError(f"{name} is not installed", f"{sys.executable} -m pip install {name}", ExitCode.VERSION)
        facts.append(Fact(name, version, missing if is_missing else None))

    def check() -> str:
        check_floors(version_of)
        return "held"

    return Section("Versions", (*facts, _attempt("security floors", check)))


def quality_section(find: Callable[[], Iterable[Fact]]) -> Section:
    """What quantizing costs, and why the rest cannot be measured: no error, as `serve` measures nothing."""
    facts: list[Fact] = []
    try:
        for fact in find():  # what was measured before an error is told
            facts.append(fact)
    except StartupError as error:
        facts.append(Fact("not measured", str(error)))
    return Section("Quality", tuple(facts))


def serving_section(find: Callable[[], tuple[Fact, ...]], binds: Sequence[Bind]) -> Section:
    """What `serve` would serve with these settings, and whether it could listen.

    Args:
        find: raises StartupError if the model is missing or does not fit, NotFetched if `serve` would fetch it.
    """
    try:
        facts = find()
    except NotFetched as error:
        facts = (Fact("model", error.cause),)
    except StartupError as error:
        facts = (Fact("model", "cannot be served", error),)
    return Section("Would be served", (*facts, *(_attempt("address", partial(try_bind, bind)) for bind in binds)))


def try_bind(bind: Bind) -> str:
    """Listen there for a moment. Raises StartupError: it cannot be listened on."""
    address = bind.address
    if isinstance(address, PassedAddress):
        return f"{address}, passed by systemd"
    for listening in open_binds([bind], [], TRIAL_BACKLOG):
        listening.close()
    if isinstance(address, TcpAddress) and not address.port:
        return f"{address.host}, on a free port"
    return f"{address} is free"


def _attempt(name: str, find: Callable[[], str]) -> Fact:
    try:
        return Fact(name, find())
    except StartupError as error:
        return Fact(name, "no", error)


def exit_code(sections: Sequence[Section]) -> int:
    """The exit code that `serve` would end with: the first error's, or 0."""
    codes = [fact.error.exit_code for section in sections for fact in section.facts if fact.error is not None]
    return codes[0] if codes else ExitCode.OK


def print_report(sections: Sequence[Section], stream: TextIO) -> None:
    """A table for each section, then each error once with its fix, then the verdict."""
    from rich.table import Table
    from rich.text import Text

    console = new_console(stream)
    for section in sections:
        table = Table(title=section.title, title_justify="left", show_header=False, min_width=60)
        table.add_column(style="bold", no_wrap=True)
        table.add_column(overflow="fold")
        for fact in section.facts:
            table.add_row(Text(fact.name), Text(fact.value, style="" if fact.error is None else "red"))
        console.print(table)
    errors = [fact.error for section in sections for fact in section.facts if fact.error is not None]
    for told in dict.fromkeys(f"error: {error.cause}\nfix: {error.fix}" for error in errors):
        console.print(Text(told), soft_wrap=True)
    console.print("serve would refuse to start" if errors else "serve would start")
