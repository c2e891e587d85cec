"""Weight loading, as seen on a terminal and in a log."""

import io

from server.commands.console import byte_progress, count_progress

MIB = 2**20
LOADING = "loading weights"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_elsewhere_each_tenth_is_one_line() -> None:
    stream = io.StringIO()
    with byte_progress(stream, LOADING, 64 * MIB) as report:
        for num_read in range(101):
            report(num_read * MIB, 100 * MIB)
    lines = stream.getvalue().splitlines()
    assert len(lines) == 10
    assert lines[0] == "loading weights: 10 % (10 MiB of 100 MiB)"
    assert lines[-1] == "loading weights: 100 % (100 MiB of 100 MiB)"


def test_a_jump_over_several_tenths_is_one_line() -> None:
    stream = io.StringIO()
    with byte_progress(stream, LOADING, 64 * MIB) as report:
        report(55 * MIB, 100 * MIB)
        report(100 * MIB, 100 * MIB)
    assert [line.split("(")[0] for line in stream.getvalue().splitlines()] == [
        "loading weights: 50 % ",
        "loading weights: 100 % ",
    ]


def test_on_a_terminal_a_bar_counts_bytes_and_goes_away() -> None:
    stream = Terminal()
    with byte_progress(stream, LOADING, 64 * MIB) as report:
        report(100 * MIB, 200 * MIB)
    assert "loading weights" in stream.getvalue()
    assert "\x1b[" in stream.getvalue()


def test_what_loads_in_a_blink_is_not_worth_a_word() -> None:
    stream = io.StringIO()
    with byte_progress(stream, LOADING, 64 * MIB) as report:
        report(10 * MIB, 10 * MIB)
    assert stream.getvalue() == ""


def test_what_is_counted_is_told_as_counts() -> None:
    stream = io.StringIO()
    with count_progress(stream, "capturing") as report:
        for num_done in range(1, 12):
            report(num_done, 11)
    lines = stream.getvalue().splitlines()
    assert len(lines) == 10
    assert (lines[0], lines[-1]) == ("capturing: 10 % (2 of 11)", "capturing: 100 % (11 of 11)")


def test_on_a_terminal_the_next_bar_comes_when_one_is_full() -> None:
    """Both are open, as while a model loads: a terminal shows one at a time."""
    stream = Terminal()
    with byte_progress(stream, LOADING, MIB) as report_bytes, count_progress(stream, "capturing") as report:
        report_bytes(100 * MIB, 100 * MIB)
        report(1, 2)
    assert "capturing" in stream.getvalue()
    assert "1/2" in stream.getvalue()
