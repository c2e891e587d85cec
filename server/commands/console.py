"""Terminal output of the commands: tables and progress; and Ctrl-C. Thread: main; for progress, the engine's.

rich takes 60 ms to import: the functions that draw import it.
"""

import contextlib
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NoReturn, TextIO

from server.values import format_size

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import ProgressColumn

MIN_LOADED_BYTES = 64 * 2**20  # shown from here on: a tenth of a second of reading
MIN_FETCHED_BYTES = 2**20

ReportProgress = Callable[[int, int], None]  # (done so far, in all)


def new_console(stream: TextIO | None = None, plain_width: int = 120) -> "Console":
    """A console that raises BrokenPipeError; rich's own exits with code 1.

    Args:
        stream: None: stdout.
        plain_width: columns, if it is not a terminal.
    """
    from rich.console import Console

    class QuietConsole(Console):
        def on_broken_pipe(self) -> NoReturn:
            raise BrokenPipeError

    stream = sys.stdout if stream is None else stream
    return QuietConsole(file=stream, highlight=False, width=None if stream.isatty() else plain_width)


def take_interrupts() -> None:
    """From here on Ctrl-C raises KeyboardInterrupt, instead of ending the process (server/__main__.py)."""
    if threading.current_thread() is threading.main_thread():  # others cannot set a signal handler
        signal.signal(signal.SIGINT, signal.default_int_handler)


def byte_progress(stream: TextIO, what: str, min_shown: int) -> contextlib.AbstractContextManager[ReportProgress]:
    """Give a function to report progress to: a terminal shows a bar until the end, other streams a line per tenth.

    Args:
        what: is done, e.g. "loading weights".
        min_shown: bytes in all; less takes no time and is not shown.
    """

    def columns() -> "tuple[ProgressColumn, ...]":
        from rich.progress import DownloadColumn, TransferSpeedColumn

        return DownloadColumn(binary_units=True), TransferSpeedColumn()

    return _progress(stream, what, min_shown, columns, format_size)


def count_progress(stream: TextIO, what: str) -> contextlib.AbstractContextManager[ReportProgress]:
    """As byte_progress, for things that are counted."""

    def columns() -> "tuple[ProgressColumn, ...]":
        from rich.progress import MofNCompleteColumn

        return (MofNCompleteColumn(),)

    return _progress(stream, what, 0, columns, str)


@contextlib.contextmanager
def _progress(
    stream: TextIO,
    what: str,
    min_shown: int,
    columns: Callable[[], "tuple[ProgressColumn, ...]"],
    show_number: Callable[[int], str],
) -> Iterator[ReportProgress]:
    with contextlib.ExitStack() as stack:
        show: ReportProgress | None = None

        def report(num_done: int, num_total: int) -> None:
            nonlocal show
            if num_total < min_shown:
                return
            if show is None:
                show = _bar(stream, what, columns(), stack) if stream.isatty() else _tenths(stream, what, show_number)
            show(num_done, num_total)

        yield report


def _bar(
    stream: TextIO, what: str, columns: "tuple[ProgressColumn, ...]", stack: contextlib.ExitStack
) -> ReportProgress:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    every = (TextColumn(what), BarColumn(), *columns, TimeRemainingColumn())
    bar = stack.enter_context(Progress(*every, console=Console(file=stream), transient=True))
    task = bar.add_task("", total=None)

    def show(num_done: int, num_total: int) -> None:
        bar.update(task, completed=num_done, total=num_total)
        if num_done == num_total:
            bar.stop()  # a terminal can show only one

    return show


def _tenths(stream: TextIO, what: str, show_number: Callable[[int], str]) -> ReportProgress:
    """A line for each tenth that is reached; a jump over several tenths is one line."""
    num_shown = 0

    def show(num_done: int, num_total: int) -> None:
        nonlocal num_shown
        num_tenths = 10 * num_done // num_total
        if num_tenths > num_shown:
            num_shown = num_tenths
            stream.write(f"{what}: {10 * num_tenths} % ({show_number(num_done)} of {show_number(num_total)})\n")
            stream.flush()

    return show
