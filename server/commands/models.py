"""`steploop models`: which models are here, what they need, and whether they fit. Reads headers only. Thread: main."""

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from core.config import EngineConfig
from core.errors import ExitCode, StartupError
from server import engine_loader
from server.commands.console import new_console
from server.commands.hub import Hub, cached_models, environment_hub
from server.config import ServerConfig
from server.model_files import check_tokenizer, is_gguf, parse_config, read_model_config
from server.values import BadValueError, existing_directory, format_count, format_size

if TYPE_CHECKING:
    from gpu.device import DeviceChoice

MAX_DEPTH = 2  # below a directory: org/name
WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth")  # the pickles to say that they are not served


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """One model, as far as it is understood.

    Args:
        name: what --model takes.
        size_bytes: of the stored tensors.
        context: tokens.
        dtype: what most of it is stored as.
        needed_bytes: to serve one sequence of the whole context.
        reason: why it does not fit, or cannot be served at all.
    """

    name: str
    path: Path
    size_bytes: int | None = None
    num_parameters: int | None = None
    context: int | None = None
    dtype: str | None = None
    needed_bytes: int | None = None
    fits: bool = False
    reason: str | None = None


def run(arguments: argparse.Namespace, config: ServerConfig) -> ExitCode:
    """
    Raises:
        StartupError: a directory or the device asked for is not there.
    """
    try:
        directories = [existing_directory(text) for text in arguments.dir]
    except BadValueError as error:
        fix = "name a directory of models" if error.proposal is None else f"--dir {error.proposal}"
        raise StartupError(f"--dir must be {error.expected}", fix, ExitCode.USAGE) from error
    embedded = (engine_loader.DEMO_NAME, engine_loader.DEMO_DIRECTORY)
    listed = describe([embedded, *find_models(directories, environment_hub())], config.to_engine_config())
    (print_json if arguments.json else print_table)(listed, sys.stdout)
    return ExitCode.OK


def describe(found: Sequence[tuple[str, Path]], engine: EngineConfig) -> list[ModelFacts]:
    """What each model is and needs, by name and path."""
    from gpu.device import choose_device, free_memory_bytes

    choice = choose_device(engine)
    free_bytes = free_memory_bytes(choice.device)
    return [_described(ModelFacts(name, path), engine, choice, free_bytes) for name, path in found]


def _described(facts: ModelFacts, engine: EngineConfig, choice: "DeviceChoice", free_bytes: int) -> ModelFacts:
    """A model's name and path, with all that its headers say."""
    from gpu.checkpoint import open_checkpoint
    from gpu.memory_plan import memory_needed
    from gpu.weights import check_checkpoint

    try:
        model = parse_config(facts.path, read_model_config(facts.path))
        checkpoint = open_checkpoint(facts.path, model.packing)
        model = check_checkpoint(checkpoint, model)
        check_tokenizer(facts.path)
        needed_bytes = memory_needed(model, engine, choice, checkpoint)
    except StartupError as error:
        return replace(facts, reason=error.cause)
    fits = needed_bytes <= free_bytes
    return replace(
        facts,
        size_bytes=checkpoint.size_bytes,
        num_parameters=model.num_parameters,
        context=model.max_position,
        dtype=checkpoint.main_format,
        needed_bytes=needed_bytes,
        fits=fits,
        reason=None if fits else f"{format_size(free_bytes)} free",
    )


def find_models(directories: Sequence[Path], hub: Hub) -> list[tuple[str, Path]]:
    """Names and paths of what looks like a model: in the directories, then in the hub's cache."""
    paths = [path for directory in directories for path in _models_below(directory, MAX_DEPTH)]
    local: dict[str, Path] = {}
    for path in sorted(paths, key=lambda path: len(path.parts)):  # links may lead to it in ways that are longer
        local.setdefault(os.path.realpath(path), path)
    return [(str(path), path) for path in sorted(local.values())] + [
        (str(name), path) for name, path in cached_models(hub)
    ]


def _models_below(path: Path, depth: int) -> Iterator[Path]:
    if is_gguf(path):
        yield path
    elif os.path.isdir(path):
        if os.path.isfile(path / "config.json") and any(any(path.glob(name)) for name in WEIGHTS):
            yield path
        if depth >= 0:
            for entry in _entries(path):
                if not entry.name.startswith("."):
                    yield from _models_below(entry, depth - 1)


def _entries(directory: Path) -> list[Path]:
    """None of what may not be looked into."""
    try:
        return sorted(directory.iterdir())
    except OSError:
        return []


def print_json(models: Sequence[ModelFacts], stream: TextIO) -> None:
    """A list of objects with ModelFacts' fields."""
    json.dump([asdict(model) for model in models], stream, indent=2, default=str)
    stream.write("\n")


def print_table(models: Sequence[ModelFacts], stream: TextIO) -> None:
    """A row a model, then why some do not fit."""
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
        fits = Text("yes", "green") if model.fits else Text("no", "red")
        table.add_row(Text(model.name), *_cells(model), fits, Text(str(model.path)))
    console.print(table)
    for model in models:
        if model.reason is not None:
            console.print(Text(f"{model.name}: {model.reason}"), soft_wrap=True)


def _cells(model: ModelFacts) -> tuple[str, ...]:
    """Parameters, context, dtype, size, memory needed."""
    return (
        "" if model.num_parameters is None else format_count(model.num_parameters),
        "" if model.context is None else f"{model.context:,}",
        model.dtype or "",
        "" if model.size_bytes is None else format_size(model.size_bytes),
        "" if model.needed_bytes is None else format_size(model.needed_bytes),
    )
