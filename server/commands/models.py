"""`steploop models`: the models on this machine, what each needs, and whether it fits. Thread: main."""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TextIO

from core.errors import ExitCode, StartupError
from server import engine_loader
from server.commands.console import new_console
from server.commands.hub import Hub, cached_models, environment_hub
from server.config import ServerConfig
from server.engine_loader import ModelFacts, describe_models
from server.model_files import models_below
from server.values import BadValueError, existing_directory, format_count, format_size


def run(arguments: argparse.Namespace, config: ServerConfig) -> ExitCode:
    """
    Raises:
        StartupError: a directory or the device asked for is missing.
    """
    try:
        directories = [existing_directory(text) for text in arguments.dir]
    except BadValueError as error:
        fix = "name a directory of models" if error.proposal is None else f"--dir {error.proposal}"
        raise StartupError(f"--dir must be {error.expected}", fix, ExitCode.USAGE) from error
    embedded = (engine_loader.DEMO_NAME, engine_loader.DEMO_DIRECTORY)
    models = describe_models([embedded, *find_models(directories, environment_hub())], config.to_engine_config())
    if arguments.json:
        print(json.dumps([asdict(model) for model in models], indent=2, default=str))
    else:
        print_table(models, sys.stdout)
    return ExitCode.OK


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
        table.add_row(Text(model.name), *cells, fits, Text(str(model.path)))
    console.print(table)
    for model in models:
        if model.reason is not None:
            console.print(Text(f"{model.name}: {model.reason}"), soft_wrap=True)
