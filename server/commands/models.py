"""`steploop models`: the models on this machine, what each needs, and whether it fits; and loading and fetching one.

Thread: main.
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TextIO
from urllib.parse import quote

from core.errors import ExitCode, StartupError
from server import engine_loader
from server.banner import configured_url
from server.commands.chat import client_of
from server.commands.command_line import given_value
from server.commands.console import MIN_FETCHED_BYTES, new_console, progress
from server.commands.hub import Hub, cached_models, environment_hub, fetch
from server.commands.tls_trust import check_trust_flags
from server.config import ServerConfig
from server.engine_loader import ModelFacts, describe_models
from server.model_files import models_below
from server.values import BadValueError, HubId, existing_directory, format_count, format_size, model_source

LOAD_TIMEOUT_S = 3600.0


def run(arguments: argparse.Namespace, config: ServerConfig) -> ExitCode:
    """Raises StartupError: a directory or the device asked for is missing; or see pull and switch."""
    if arguments.action is not None:
        if arguments.name is None:
            fix = f"steploop models {arguments.action} NAME"
            raise StartupError(f"the model to {arguments.action} is missing", fix, ExitCode.USAGE)
        print(pull(arguments.name) if arguments.action == "pull" else switch(arguments, config))
        return ExitCode.OK
    directories = [given_value("--dir", text, existing_directory, "DIRECTORY") for text in arguments.dir]
    embedded = (engine_loader.DEMO_NAME, engine_loader.DEMO_DIRECTORY)
    models = describe_models([embedded, *find_models(directories, environment_hub())], config.to_engine_config())
    if arguments.json:
        print(json.dumps([asdict(model) for model in models], indent=2, default=str))
    else:
        print_table(models, sys.stdout)
    return ExitCode.OK


def pull(name: str) -> str:
    """Fetch a hub's model; returns the directory.

    Raises:
        StartupError: the name is none of a hub's, or see fetch in server/commands/hub.py.
    """
    try:
        source = model_source(name)
    except BadValueError as error:
        raise StartupError(
            f"{name!r} must be {error.expected}", "steploop models pull ORG/NAME", ExitCode.USAGE
        ) from error
    if not isinstance(source, HubId):
        raise StartupError(f"{name} is already here", "name a hub's model as org/name", ExitCode.USAGE)
    with progress(sys.stderr, f"fetching {source}", True, MIN_FETCHED_BYTES) as report_bytes:
        return str(fetch(environment_hub(), source, report_bytes))


def switch(arguments: argparse.Namespace, config: ServerConfig) -> str:
    """Have a running server load or unload a model; returns what it is then.

    Raises:
        StartupError: the server cannot be reached, or refuses.
    """
    check_trust_flags(arguments)
    url = arguments.url or configured_url(config)
    if url is None:
        raise StartupError("no server is named", "--url URL", ExitCode.USAGE)
    client = client_of(url, arguments, config)
    path = f"/admin/models/{quote(arguments.name, safe='')}/{arguments.action}"
    with client.exchange("POST", path, timeout_s=LOAD_TIMEOUT_S) as answer:
        body = answer.read()
    if answer.status_code != 200:
        fix = "--api-key KEY with the right admin" if answer.status_code in (401, 403) else "steploop models --help"
        raise StartupError(client.refusal(answer.status_code, body).cause, fix, ExitCode.UNREACHABLE)
    return f"{arguments.name}: {json.loads(body)['status']['value']}"


def find_models(directories: Sequence[Path], hub: Hub) -> list[tuple[str, Path]]:
    """Names and paths of what looks like a model: in the directories, then in the hub's cache."""
    paths = [path for directory in directories for path in models_below(directory)]
    local: dict[str, Path] = {}
    for path in sorted(paths, key=lambda path: len(path.parts)):  # of several links to a model, the shortest
        local.setdefault(os.path.realpath(path), path)
    return [(str(path), path) for path in sorted(local.values())] + [
        (str(name), path) for name, path in cached_models(hub)
    ]


def print_table(models: Sequence[ModelFacts], stream: TextIO) -> None:
    """A row for each model, then the reasons of those that do not fit."""
    from rich.table import Table
    from rich.text import Text

    console = new_console(stream, 140)
    table = Table()
    table.add_column("Model", style="bold", overflow="fold")
    for title in ("Parameters", "Context", "Stored as", "Size", "Needs"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("Fits")
    table.add_column("Path", overflow="fold")
    for model in models:
        cells = (
            "" if model.num_parameters is None else format_count(model.num_parameters),
            "" if model.context is None else f"{model.context:,}",
            model.dtype or "",
            "" if model.size_bytes is None else format_size(model.size_bytes),
            "" if model.needed_bytes is None else format_size(model.needed_bytes),
        )
        fits = Text("yes", "green") if model.fits else Text("no", "red")
        path = str(model.path)
        table.add_row(Text(model.name), *cells, fits, Text("" if path == model.name else path))
    console.print(table)
    for model in models:
        if model.reason is not None:
            reason = model.reason.removeprefix(f"{model.path}: ")
            console.print(Text(f"{model.name}: {reason}"), soft_wrap=True)
