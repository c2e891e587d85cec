"""The report: tables and pictures out of result files, whatever bench wrote them."""

from pathlib import Path

import pytest

from bench.report import NOTE_CHARS, draw_table, main, plot_series, table_markdown, write_report
from bench.results import Plot, Table, format_cell, write_result

TABLE = Table(
    "CPU per token",
    ("server", "streams", "us"),
    (("a", 64, 5.4), ("a", 1, 2.0), ("b|c", 1, 15.9), ("b|c", 64, None)),
    Plot("streams", "us", "server"),
    "Tokens are " + "very " * 30 + "small.",
)


@pytest.fixture
def result_file(tmp_path: Path) -> Path:
    path = tmp_path / "frontend.json"
    write_result(path, "frontend", "python -m bench.frontend", [TABLE])
    return path


def test_a_table_is_markdown_with_figures_to_the_right() -> None:
    assert table_markdown(TABLE) == [
        "| server | streams | us |",
        "| --- | ---: | ---: |",
        "| a | 64 | 5.4 |",
        "| a | 1 | 2 |",
        "| b\\|c | 1 | 15.9 |",
        "| b\\|c | 64 | - |",
    ]


def test_a_plot_has_a_line_per_series_in_order_of_x_without_missing_figures() -> None:
    assert plot_series(TABLE) == {"a": [(1.0, 2.0), (64.0, 5.4)], "b|c": [(1.0, 15.9)]}


def test_figures_keep_the_digits_that_mean_something() -> None:
    assert [format_cell(cell) for cell in (None, 0.01234, 15.94, 1234.5, 1234, "x")] == [
        "-", "0.0123", "15.9", "1,234", "1,234", "x"
    ]  # fmt: skip


def test_a_report_without_pictures_has_the_tables_and_the_machine(result_file: Path, tmp_path: Path) -> None:
    page = write_report([result_file], tmp_path / "out", draws=False)
    text = page.read_text()
    assert "| a | 64 | 5.4 |" in text
    assert f"\n\n{TABLE.note}\n" in text
    assert "    python -m bench.frontend\n" in text
    assert "![" not in text
    assert [path.name for path in page.parent.iterdir()] == ["report.md"]


def test_a_picture_says_what_its_figures_do_not() -> None:
    shown = draw_table(TABLE).get_supxlabel()
    assert " ".join(shown.split()) == TABLE.note
    assert max(map(len, shown.splitlines())) <= NOTE_CHARS < len(TABLE.note)


def test_a_report_with_pictures_links_each(result_file: Path, tmp_path: Path) -> None:
    page = write_report([result_file], tmp_path / "out", draws=True)
    assert "![CPU per token](frontend-cpu-per-token.png)" in page.read_text()
    assert (page.parent / "frontend-cpu-per-token.png").read_bytes().startswith(b"\x89PNG")


def test_a_file_of_someone_else_is_a_cause_and_a_fix(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "other.json"
    path.write_text('{"kind": 1}')
    assert main([str(path), "--out", str(tmp_path)]) == 2
    assert "Fix: " in capsys.readouterr().err
