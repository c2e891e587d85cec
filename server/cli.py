"""The `steploop` command: parses the command line, runs the command, and gives its exit code. Thread: main.

Each command imports what it needs when it runs: --help and --version load neither settings nor torch nor rich.
"""

import argparse
import logging
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib import import_module
from typing import TYPE_CHECKING, NoReturn, TextIO

from core.errors import ExitCode, StartupError
from server import __version__
from server.memory_limits import as_memory_error, check_address_space, check_memory_room

if TYPE_CHECKING:
    from server.config import ServerConfig
    from server.supervision import ServiceManager

logger = logging.getLogger(__name__)

# Command -> its summary, and the file of server/commands with run(arguments, config); serve and bench run here
COMMANDS = {
    "serve": ("serve a model over HTTP", None),
    "chat": ("talk to a model in the terminal", "chat"),
    "batch": ("run a file of requests, and write the answers beside it", "batch"),
    "bench": ("measure a server: steploop bench serve", None),
    "doctor": ("show what is installed, the machine's hardware, and whether the model can be served", "doctor"),
    "keys": ("create, list and revoke API keys", "keys"),
    "models": ("list the local models, the memory they need and whether they fit", "models"),
    "replay": ("run recorded requests again, and compare their tokens", "replay"),
    "usage": ("report usage from the ledger: tokens, prices and device time by day, model, key or tenant", "usage"),
}
ANSWERED_AT_ONCE = ("-h", "--help", "--version")
IMPORT_TORCH = ("serve", "doctor", "models")
BROKEN_PIPE = 141  # as shells report SIGPIPE


class CommandParser(argparse.ArgumentParser):
    """Reports an error in two lines, as all commands do, instead of a page of usage."""

    def error(self, message: str) -> NoReturn:
        raise StartupError(message, f"{self.prog} --help lists what there is", ExitCode.USAGE)


def name_commands() -> tuple[CommandParser, dict[str, CommandParser]]:
    """The parser of the command line, and those of its commands, which have no flags yet."""
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
        for name, (summary, _) in COMMANDS.items()
    }
    return parser, by_command


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line and give its exit code.

    Raises:
        SystemExit: argparse has printed --help or --version.
        KeyboardInterrupt: Ctrl-C, if the command does not handle it.
    """
    argv = sys.argv[1:] if argv is None else list(argv)
    try:
        try:
            return _run(argv)
        finally:
            sys.stdout.flush()  # here, where BrokenPipeError is handled
    except BrokenPipeError:  # the reader of our output has left; the interpreter's own flush must not fail again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except Exception as error:
        told = as_startup_error(error)
        lines = ["".join(traceback.format_exception(error)).rstrip()] if "--debug" in argv else []
        _report([*lines, f"error: {told.cause}", f"fix: {told.fix}"], argv)
        return int(told.exit_code)


def _run(argv: list[str]) -> int:
    if argv[:2] == ["bench", "serve"]:  # the load generator parses its own flags
        from bench.load import main as run_load_generator
        from server.commands.console import take_interrupts

        take_interrupts()
        return run_load_generator(argv[2:])
    parser, by_command = name_commands()
    if not argv:
        parser.print_help()
        return ExitCode.USAGE
    if argv[0] in ANSWERED_AT_ONCE:
        parser.parse_args(argv[:1])  # leaves by SystemExit
    from server.commands.command_line import add_flags, flags_given, refuse_unknown
    from server.config_sources import load_config
    from server.values import did_you_mean

    add_flags(by_command, "--help-all" in argv)
    if not argv[0].startswith("-") and argv[0] not in COMMANDS:
        parser.error(f"unknown command: {argv[0]}{did_you_mean(argv[0], COMMANDS)}")
    arguments, unknown = parser.parse_known_args(argv)
    name = arguments.command
    if unknown:
        refuse_unknown(getattr(arguments, "action_parser", by_command[name]), unknown[0])
    if name == "bench":
        by_command["bench"].error("what to measure? steploop bench serve --help")
    read = getattr(arguments, "reads", None)  # commands that need little work whatever is wrong with the rest
    config = load_config(flags_given(arguments), os.environ, finds_models=read is None, only=read)
    if name in IMPORT_TORCH:
        from gpu.host_memory import host_room_bytes

        check_address_space()
        check_memory_room(host_room_bytes())
    if name == "serve" and not arguments.estimate:
        return _serve(arguments, config)
    for warning in config.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    if name == "serve":
        from server.engine_loader import plan_facts

        for fact in plan_facts(config):
            print(f"{fact.name:<13}{fact.value}")
        return ExitCode.OK
    command = import_module(f"server.commands.{COMMANDS[name][1]}")
    return int(command.run(arguments, config))


def _serve(arguments: argparse.Namespace, config: "ServerConfig") -> int:
    from server.commands.command_line import flags_given
    from server.commands.versions import check_floors
    from server.config_sources import load_config
    from server.observing.logs import configure_logging, log_everything

    check_floors()
    log = configure_logging(config.log_level, config.log_format)
    log_everything()
    for warning in config.warnings:
        logger.warning(warning)
    flags = flags_given(arguments)
    try:
        return run_server(config, lambda finds_models: load_config(flags, os.environ, finds_models))
    finally:
        log.close()


def run_server(
    config: "ServerConfig", read_config: "Callable[[bool], ServerConfig]", manager: "ServiceManager | None" = None
) -> ExitCode:
    """
    Args:
        read_config, manager: see Server.

    Raises:
        StartupError: the server cannot start.
    """
    import faulthandler

    import uvloop

    from gpu import limit_arenas
    from server.engine_loader import engine_loader
    from server.process import serve

    limit_arenas()
    faulthandler.enable(_unblocking(sys.stderr))  # a watchdog ends a hanging process by SIGABRT: log its stacks
    return uvloop.run(serve(config, engine_loader(config), read_config, manager))


def _unblocking(stream: TextIO) -> int | TextIO:
    """The stream's file, opened for writing that does not wait for its reader; the stream itself if it is a socket."""
    try:
        return os.open(f"/proc/self/fd/{stream.fileno()}", os.O_WRONLY | os.O_APPEND | os.O_NONBLOCK)
    except OSError:  # a socket, as journald's, which always reads
        return stream


def as_startup_error(error: Exception) -> StartupError:
    """Any error as a cause and a fix."""
    from server.commands.versions import LISTED

    if isinstance(error, StartupError):
        return error
    if (refused := as_memory_error(error)) is not None:
        return refused
    if isinstance(error, ModuleNotFoundError) and error.name in LISTED:
        fix = f"{sys.executable} -m pip install {error.name}; steploop doctor lists what is needed"
        return StartupError(f"{error.name} is not installed", fix, ExitCode.VERSION)
    cause = f"this is a bug: {type(error).__name__}: {error}"
    return StartupError(cause, "run it again with --debug, and report the traceback", ExitCode.INTERNAL)


def _report(lines: list[str], argv: list[str]) -> None:
    """To stderr; for `serve` as a JSON record if --log-format asks for that."""
    log_format = None
    if argv[:1] == ["serve"] and "--estimate" not in argv:
        with suppress(ImportError):  # a missing dependency may be what we report
            from server.config_sources import wanted_log_format

            log_format = wanted_log_format(argv, os.environ)
    if log_format != "json":
        print("\n".join(lines), file=sys.stderr)
        return
    from server.observing.logs import configure_logging, tell

    log = configure_logging("info", "json")
    tell(lines, sys.stderr, logging.CRITICAL)
    log.close()
