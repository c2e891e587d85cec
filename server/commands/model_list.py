"""`steploop models`: which models are here, what they need, and whether they fit. Thread: main.

Facts come in as they are found (server/cli.py asks gpu for its own); nothing here imports torch.
"""

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from server.commands.console import new_console
from server.commands.hub_cache import Hub, cached_models
from server.commands.model_files import is_gguf
from server.values import format_count, format_size

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
    listed = [{name: getattr(model, name) for name in ModelFacts.__slots__} for model in models]
    json.dump(listed, stream, indent=2, default=str)
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
