"""Result files as one markdown page and PNG plots: `python -m bench.report [FILE...] [--out DIR]`.

Every table of a result file becomes a table, and every table that has a plot a picture, whatever bench wrote it.
Pictures need matplotlib (`make bench` installs it); without it the page has the tables alone, and stderr says so.
"""

import argparse
import re
import sys
import textwrap
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from bench.results import RESULTS_DIR, ResultFile, Table, format_cell, read_result

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NOTE_CHARS = 105  # in a line below a picture


def result_markdown(result: ResultFile, pictures: Sequence[str | None]) -> str:
    """One run's section.

    Args:
        pictures: per table, the file to show below it, relative to the page; None for none.
    """
    machine = result.machine
    packages = ", ".join(
        f"{name} {version}" for name, version in machine.packages.items() if version != "not installed"
    )
    lines = [
        f"## {result.kind}, {result.created[:10]}",
        "",
        f"    {result.command}",
        "",
        f"{machine.cpu}, {machine.num_cores} cores (load {machine.load_average:g} when written), {machine.system}, "
        f"{machine.python}; commit {machine.git_commit}; {packages}.",
        "",
    ]
    for table, picture in zip(result.tables, pictures, strict=True):
        lines += [f"### {table.title}", "", *table_markdown(table), ""]
        if table.note:
            lines += [table.note, ""]
        if picture is not None:
            lines += [f"![{table.title}]({picture})", ""]
    return "\n".join(lines)


def table_markdown(table: Table) -> list[str]:
    """The lines of a table, its first column to the left, figures to the right."""
    rule = ["---"] + ["---:"] * (len(table.columns) - 1)
    cells = [[format_cell(cell).replace("|", "\\|") for cell in row] for row in table.rows]
    return [f"| {' | '.join(row)} |" for row in [list(table.columns), rule, *cells]]


def plot_series(table: Table) -> dict[str, list[tuple[float, float]]]:
    """The lines of the table's plot: per series its points, by x. Rows without figures are left out."""
    assert table.plot is not None
    x, y = table.columns.index(table.plot.x), table.columns.index(table.plot.y)
    name = None if table.plot.series is None else table.columns.index(table.plot.series)
    series: dict[str, list[tuple[float, float]]] = {}
    for row in table.rows:
        at, figure = row[x], row[y]
        if isinstance(at, int | float) and isinstance(figure, int | float):
            series.setdefault("" if name is None else str(row[name]), []).append((float(at), float(figure)))
    return {label: sorted(points) for label, points in series.items()}


def draw_table(table: Table) -> "Figure":
    """
    Raises:
        ImportError: matplotlib is not installed.
    """
    from matplotlib.figure import Figure  # without pyplot: no display, no global state

    assert table.plot is not None
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for label, points in plot_series(table).items():
        axes.plot([x for x, _ in points], [y for _, y in points], marker="o", label=label)
    axes.set(title=table.title, xlabel=table.plot.x, ylabel=table.plot.y)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    if table.plot.series is not None:
        axes.legend()
    if table.note:
        figure.supxlabel(textwrap.fill(table.note, NOTE_CHARS), fontsize="small")
    return figure


def write_report(files: Sequence[Path], directory: Path, draws: bool) -> Path:
    """Write `report.md` and the pictures into `directory`; files come in the order given.

    Raises:
        msgspec.MsgspecError, OSError: as read_result.
    """
    directory.mkdir(parents=True, exist_ok=True)
    sections = []
    for path in files:
        result = read_result(path)
        pictures: list[str | None] = []
        for table in result.tables:
            if table.plot is None or not draws:
                pictures.append(None)
                continue
            name = f"{path.stem}-{re.sub('[^a-z0-9]+', '-', table.title.lower()).strip('-')}.png"
            draw_table(table).savefig(directory / name, dpi=120)
            pictures.append(name)
        sections.append(result_markdown(result, pictures))
    page = directory / "report.md"
    page.write_text("# What was measured\n\n" + "\n".join(sections), encoding="utf-8")
    return page


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: 2 when a file is missing or none of ours."""
    parser = argparse.ArgumentParser(prog="python -m bench.report", description=__doc__)
    parser.add_argument("files", nargs="*", type=Path, help="default: all of bench/results")
    parser.add_argument("--out", type=Path, default=RESULTS_DIR, help="where report.md and the pictures go")
    arguments = parser.parse_args(argv)
    files = arguments.files or sorted(RESULTS_DIR.glob("*.json"))
    draws = find_spec("matplotlib") is not None
    if not draws:
        fix = f"{sys.executable} -m pip install matplotlib"
        print(f"bench.report: no pictures, matplotlib is missing\nFix: {fix}", file=sys.stderr)
    try:
        page = write_report(files, arguments.out, draws)
    except (OSError, msgspec.MsgspecError) as error:
        print(f"bench.report: {error}\nFix: give files that a bench has written with --json", file=sys.stderr)
        return 2
    print(f"written to {page}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
