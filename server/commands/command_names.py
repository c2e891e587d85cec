"""The commands by name, and the parser that knows no more: `steploop --help` and `--version` are answered out of it.

Imports no settings: reading their tables takes longer than Python takes to start. Thread: main.
"""

import argparse
from typing import NoReturn

from core.errors import ExitCode, StartupError
from server import __version__

COMMANDS = {
    "serve": "serve a model over HTTP",
    "chat": "talk to a model in the terminal",
    "bench": "measure a server: steploop bench serve",
    "doctor": "say what is installed, what the machine has, and what would be served",
    "keys": "create, list and revoke API keys",
    "models": "list the models that are here, what they need and whether they fit",
    "usage": "say what the ledger has: tokens, prices and device time by day, model, key or tenant",
}
ANSWERED_AT_ONCE = ("-h", "--help", "--version")


class CommandParser(argparse.ArgumentParser):
    """Refuses in the two lines that every refusal here has, instead of a page of usage."""

    def error(self, message: str) -> NoReturn:
        raise StartupError(message, f"{self.prog} --help shows what there is", ExitCode.USAGE)


def name_commands() -> tuple[CommandParser, dict[str, CommandParser]]:
    """The parser of the whole command line, and its commands' own by name, which have no flags yet."""
    parser = CommandParser(
        prog="steploop",
        description="An LLM inference server in one process: one event loop, one step loop.",
        epilog="steploop COMMAND --help says more. Start with: steploop serve",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"steploop {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")
    by_command = {
        name: commands.add_parser(
            name,
            help=summary,
            description=f"{summary[0].upper()}{summary[1:]}.",
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        for name, summary in COMMANDS.items()
    }
    return parser, by_command
