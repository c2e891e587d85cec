"""Progress, as seen on a terminal and in a log."""

import io

import pytest

from server.commands.console import progress

MIB = 2**20


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("steps_mib", "total_mib", "lines"),
    [
        (range(101), 100, [f"loading: {10 * i} % ({10 * i} MiB of 100 MiB)" for i in range(1, 11)]),
        ([55, 100], 100, ["loading: 50 % (55 MiB of 100 MiB)", "loading: 100 % (100 MiB of 100 MiB)"]),
        ([10], 10, []),  # so little takes no time
    ],
)
def test_a_log_gets_a_line_for_each_tenth(steps_mib: list[int], total_mib: int, lines: list[str]) -> None:
    stream = io.StringIO()
    with progress(stream, "loading", True, 64 * MIB) as report:
        for num_read in steps_mib:
            report(num_read * MIB, total_mib * MIB)
    assert stream.getvalue().splitlines() == lines


def test_what_is_counted_is_told_as_counts() -> None:
    stream = io.StringIO()
    with progress(stream, "capturing") as report:
        for num_done in range(1, 12):
            report(num_done, 11)
    lines = stream.getvalue().splitlines()
    assert len(lines) == 10
    assert (lines[0], lines[-1]) == ("capturing: 10 % (2 of 11)", "capturing: 100 % (11 of 11)")


def test_a_terminal_shows_bars_one_after_the_other() -> None:
    stream = Terminal()
    with progress(stream, "loading", True, MIB) as report_bytes, progress(stream, "capturing") as report:
        report_bytes(100 * MIB, 100 * MIB)
        report(1, 2)
    for shown in ("loading", "capturing", "1/2", "\x1b["):
        assert shown in stream.getvalue()
