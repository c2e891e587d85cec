"""The flags and help of each command, mostly from the table of settings. Thread: main."""

import argparse
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NoReturn, TypeVar

from core.errors import ExitCode, StartupError
from server.commands.tls_trust import add_trust_flags
from server.config import OPTIONS, Option
from server.gate.tenants import LOCAL_NAME
from server.ledger.store import Grouping
from server.values import BadValueError, did_you_mean

T = TypeVar("T")

EXAMPLES = {
    "serve": """\
examples:
  steploop serve                                  the embedded demonstration model on http://127.0.0.1:8000
  steploop serve --model ~/models/Qwen3-0.6B      a Hugging Face directory
  steploop serve --model Qwen/Qwen3-0.6B          fetched from the hub, where it is not here yet
  steploop serve --model Qwen3-0.6B-Q8_0.gguf     a GGUF file
  steploop serve --model DIR --estimate           the memory plan, without loading anything
  STEPLOOP_API_KEY=secret steploop serve --host 0.0.0.0 --tls-cert chain.pem --tls-key key.pem
  steploop serve --config steploop.toml --max-model-len 8192""",
    "chat": """\
examples:
  steploop chat                                   with the server on this machine, or one that it starts itself
  steploop chat -q "What is a KV cache?"          one answer on stdout, figures on stderr
  echo "What is a token?" | steploop chat -q -
  steploop chat --url https://host:8443 --api-key KEY
  steploop chat --model ~/models/Qwen3-0.6B       in this process, even if a server is running""",
    "batch": """\
examples:
  steploop batch requests.jsonl                   in this process, by the embedded model
  steploop batch requests.jsonl --model DIR
  steploop batch requests.jsonl --url https://host:8443 --api-key KEY --window 2h

Answers are in requests.output.jsonl, errors in requests.error.jsonl. Ctrl-C stops; the same command continues.
Exit codes: 0: all lines are answered; 1: some have failed.""",
    "doctor": """\
examples:
  steploop doctor
  steploop doctor --model DIR --device cuda       would this be served?
  steploop doctor --model DIR --quality           what would --quantize cost?""",
    "keys": """\
examples:
  steploop keys create --keys-file keys.json                         a key of the tenant local
  steploop keys create --config steploop.toml --tenant acme --label ci --expires 90d
  KEY=$(steploop keys create --keys-file keys.json --scope admin)    stdout is the key and nothing else
  steploop keys list --keys-file keys.json
  steploop keys revoke sl-3fK9xQ2a --keys-file keys.json

A key is shown once, when it is created; the file keeps its SHA-256. A running server reads the file again on SIGHUP:
systemctl reload steploop, or kill -HUP and its process id.""",
    "models": """\
examples:
  steploop models                                 the embedded one, and those in the Hugging Face cache
  steploop models --dir ~/models --json           also those in or below a directory; as JSON
  steploop models pull Qwen/Qwen3-0.6B            fetch one into the cache
  steploop models load qwen3-4b                   on a running server that starts models on request
  steploop models unload qwen3-4b --url https://host:8443 --api-key KEY""",
    "replay": """\
examples:
  steploop serve --model DIR --deterministic --record records --record-bodies
  steploop replay records --model DIR             with the model in this process, and the server's settings
  steploop replay records --url http://host:8000 --api-key KEY
  steploop replay records --model DIR --anyway    would another version, or other settings, give the same?

Exit codes: 0: all tokens are the same; 1: some differ; 9: none differ, but some requests cannot be compared.""",
    "usage": """\
examples:
  steploop usage --ledger ledger.db               by day, all tenants
  steploop usage --config steploop.toml --tenant acme --since 2030-01-01 --by model
  steploop usage --ledger ledger.db --since 30d --by tenant --csv > usage.csv

Days are in UTC. Requests in progress are not counted. Prices are in the currency of [prices] (docs/ledger.md).""",
}
SOURCES = """\
settings:
  Each --some-name is also STEPLOOP_SOME_NAME in the environment and some_name in the TOML file of --config.
  Flags win over the environment, the environment over the file. Sizes: 512MiB, 2GiB. Times: 500ms, 10s, 5min."""
# Other servers' flags, whose names are not similar to ours
OTHERS_FLAGS = {
    "-c": "--config",
    "-f": "--config",
    "-m": "--model",
    "-p": "--port",
    "--config-file": "--config",
    "--ctx-size": "--max-model-len",
    "--file": "--config",
    "--settings": "--config",
}
CHAT_FIELDS = {option.field_name for option in OPTIONS if option.section in ("model", "engine")} | {
    "config_file",
    "api_keys",
}
MAX_IN_USAGE = 10  # options that the usage line names
USAGE_FIELDS = ("config_file", "ledger")
KEYS_FIELDS = ("config_file", "keys_file")
TENANTS = ("tenants",)


def add_flags(by_command: Mapping[str, argparse.ArgumentParser], shows_all: bool = False) -> None:
    """Give each command's parser its flags, examples and exit codes.

    Args:
        shows_all: help lists the rare settings too.
    """
    for name, examples in EXAMPLES.items():
        by_command[name].epilog = _epilog(name, examples)
        by_command[name].set_defaults(shows_all=shows_all)
    _add_serve(by_command["serve"])
    _add_chat(by_command["chat"])
    _add_doctor(by_command["doctor"])
    _add_models(by_command["models"])
    _add_keys(by_command["keys"])
    _add_usage(by_command["usage"])
    _add_replay(by_command["replay"])
    _add_batch(by_command["batch"])
    by_command["bench"].add_argument(
        "what", choices=["serve"], nargs="?", help="the load generator: see its own --help"
    )


def _add_serve(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--estimate", action="store_true", help="print the memory plan and exit; loads no weights")
    _add_options(parser, OPTIONS)


def _add_doctor(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--quality",
        action="store_true",
        help="load the model, plain and quantized (--quantize SCHEME, or every scheme), and compare how well they"
        " predict a text",
    )
    parser.add_argument(
        "--measure",
        action="store_true",
        help="load the model and measure again which numbers of threads and kernels are fastest (on a CPU)",
    )
    _add_options(parser, OPTIONS)


def _add_models(parser: argparse.ArgumentParser) -> None:
    actions = ("load", "unload", "pull")
    parser.add_argument("action", choices=actions, nargs="?", help="act on one model, instead of listing all")
    parser.add_argument("name", nargs="?", metavar="NAME", help="the model; to pull: org/name[@revision]")
    parser.add_argument(
        "--url", help="server that loads or unloads it (default: the one that these settings would start)"
    )
    add_trust_flags(parser)
    parser.add_argument(
        "--dir",
        action="append",
        default=[],
        metavar="DIR",
        help="look in this directory too, two levels down; may be repeated",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    to_ask = ("config_file", "host", "port", "api_keys")
    _add_options(parser, [one for one in OPTIONS if one.section == "engine" or one.field_name in to_ask])


def _add_keys(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", title="actions", required=True)
    create = actions.add_parser("create", help="create a key and show it once", allow_abbrev=False)
    create.add_argument(
        "--tenant", metavar="NAME", help=f"tenant of the key, one of [[tenants]] (default without any: {LOCAL_NAME})"
    )
    create.add_argument("--label", metavar="TEXT", default="", help="what the key is for; keys list shows it")
    create.add_argument(
        "--expires",
        metavar="WHEN",
        help="when the key expires: in 90d, 12h or 30min, or on a date such as 2030-01-31 (default: never)",
    )
    create.add_argument(
        "--scope",
        action="append",
        metavar="RIGHT",
        help="inference: generate, tokenize, list models, cancel; usage: read the tenant's usage; metrics: /metrics;"
        " admin: that, and the server itself. May be repeated [inference and usage]",
    )
    listing = actions.add_parser("list", help="list the keys, without their secrets", allow_abbrev=False)
    listing.add_argument("--json", action="store_true", help="print JSON")
    revoke = actions.add_parser("revoke", help="revoke a key", allow_abbrev=False)
    revoke.add_argument("prefix", metavar="PREFIX", help="the key's beginning, as keys list shows it")
    for action in (create, listing, revoke):
        _add_options(action, [option for option in OPTIONS if option.field_name in KEYS_FIELDS])
        action.set_defaults(action_parser=action, reads=KEYS_FIELDS + (TENANTS if action is create else ()))


def _add_usage(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tenant", metavar="NAME", help="show only this tenant")
    parser.add_argument(
        "--since",
        metavar="WHEN",
        help="count requests that ended in the last 30d or 12h, or since a date such as 2030-01-31",
    )
    parser.add_argument(
        "--by",
        choices=[grouping.value for grouping in Grouping],
        default=Grouping.DAY.value,
        help="print a line for each of these",
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--csv", action="store_true", help="print CSV: prices in millionths, times in microseconds")
    form.add_argument("--json", action="store_true", help="print JSON, likewise")
    _add_options(parser, [option for option in OPTIONS if option.field_name in USAGE_FIELDS])
    parser.set_defaults(reads=USAGE_FIELDS + TENANTS)


def _add_replay(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "records", nargs="+", type=Path, metavar="FILE", help="file written by --record, or its directory"
    )
    parser.add_argument("--request", metavar="ID", help="replay only this request")
    parser.add_argument("--url", help="server to ask (default: the model is served in this process)")
    parser.add_argument(
        "--anyway", action="store_true", help="compare even if the model, the settings or the version differ"
    )
    add_trust_flags(parser)
    _add_options(parser, [option for option in OPTIONS if option.field_name in CHAT_FIELDS])


def _add_batch(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", type=Path, metavar="FILE", help="requests, one per line, in the format of /v1/batches")
    parser.add_argument("--url", help="server to ask (default: the model is served in this process)")
    parser.add_argument("--window", metavar="TIME", default="24h", help="completion window [24h]")
    add_trust_flags(parser)
    _add_options(parser, [option for option in OPTIONS if option.field_name in CHAT_FIELDS])


def _add_chat(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-q", "--question", metavar="TEXT", help="ask this, print the answer and exit; - reads it from stdin"
    )
    parser.add_argument(
        "--url",
        help="server to talk to (default: the one that these settings would start, if it is up; otherwise the model"
        " is served in this process)",
    )
    add_trust_flags(parser)
    _add_options(parser, [option for option in OPTIONS if option.field_name in CHAT_FIELDS])


def _add_options(parser: argparse.ArgumentParser, options: Sequence[Option]) -> None:
    """Add these settings, by section. --help leaves rare ones out, --help-all lists all."""
    shows_all = parser.get_default("shows_all")
    parser.add_argument("--debug", action="store_true", help="show tracebacks")
    if len(options) > MAX_IN_USAGE:
        parser.usage = "%(prog)s [options]"
    if any(option.is_rare for option in options):
        parser.add_argument("--help-all", action="help", help="show this help with rarely needed settings")
    for heading in dict.fromkeys(option.section for option in options):
        section = parser.add_argument_group(heading)
        for option in options:
            if option.section == heading:
                _add_option(section, option, _help(option) if shows_all or not option.is_rare else argparse.SUPPRESS)


def _add_option(section: argparse._ArgumentGroup, option: Option, text: str) -> None:
    dest = option.field_name
    if option.is_switch:
        section.add_argument(option.flag, dest=dest, action="store_const", const="true", help=text)
    else:
        action = "append" if option.is_list else "store"
        section.add_argument(option.flag, dest=dest, metavar=option.metavar, action=action, help=text)


def _help(option: Option) -> str:
    text = option.help.replace("%", "%%")
    return f"{text} [{option.show(option.default)}]" if option.default not in (None, (), False) else text


def _epilog(command: str, examples: str) -> str:
    codes = "\n".join(f"  {code:>3}  {code.meaning}" for code in ExitCode)
    codes += "\n  130  Ctrl-C, before there was anything to stop"
    return "\n\n".join([examples, SOURCES] + ([f"exit codes:\n{codes}"] if command == "serve" else []))


def refuse_unknown(parser: argparse.ArgumentParser, word: str) -> NoReturn:
    if parser.prog.endswith(" chat") and not word.startswith("-"):
        raise StartupError(f"unknown argument: {word}", f"steploop chat -q {shlex.quote(word)}", ExitCode.USAGE)
    if parser.prog.endswith(" serve") and not word.startswith("-"):
        flag = "--config" if word.endswith(".toml") else "--model"
        raise StartupError(f"unknown argument: {word}", f"steploop serve {flag} {shlex.quote(word)}", ExitCode.USAGE)
    name = word.partition("=")[0]
    if name in OTHERS_FLAGS:
        parser.error(f"unknown argument: {name}; did you mean {OTHERS_FLAGS[name]}?")
    flags = [flag for action in parser._actions for flag in action.option_strings if flag.startswith("--")]
    parser.error(f"unknown argument: {name}{did_you_mean(name, flags) if name.startswith('-') else ''}")


def given_value(flag: str, text: str, parse: Callable[[str], T], sample: str) -> T:
    """What a flag says that is none of the settings. Raises StartupError: it cannot be parsed."""
    try:
        return parse(text)
    except BadValueError as error:
        cause = f"{flag} is {text!r}: it must be {error.expected}"
        raise StartupError(cause, f"{flag} {error.proposal or sample}", ExitCode.USAGE) from error


def flags_given(arguments: argparse.Namespace) -> dict[str, str | list[str]]:
    given = vars(arguments)
    names = [option.field_name for option in OPTIONS]
    return {name: given[name] for name in names if given.get(name) is not None}
