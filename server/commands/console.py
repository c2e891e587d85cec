"""What a terminal shows and sends: tables, the progress of downloads and loading, Ctrl-C.

rich is imported where something is drawn with it: it takes 60 ms. Thread: main; of progress, the engine's.
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

MIN_LOADED_BYTES = 64 * 2**20  # worth showing: a tenth of a second of reading
MIN_FETCHED_BYTES = 2**20

ReportProgress = Callable[[int, int], None]  # (done so far, in all)


def new_console(stream: TextIO | None = None, plain_width: int = 120) -> "Console":
    """A console that leaves a reader's going to its caller: rich's own ends the process with code 1.

    Args:
        stream: None: stdout.
        plain_width: columns, where it is no terminal.
    """
    from rich.console import Console

    class QuietConsole(Console):
        def on_broken_pipe(self) -> NoReturn:
            raise BrokenPipeError

    stream = sys.stdout if stream is None else stream
    return QuietConsole(file=stream, highlight=False, width=None if stream.isatty() else plain_width)


def take_interrupts() -> None:
    """From here on Ctrl-C raises KeyboardInterrupt: what runs now knows what to do with it."""
    if threading.current_thread() is threading.main_thread():  # Python lets no other set it
        signal.signal(signal.SIGINT, signal.default_int_handler)


@contextlib.contextmanager
def byte_progress(stream: TextIO, what: str, min_shown_bytes: int) -> Iterator[ReportProgress]:
    """Give a function to call on the way: a terminal gets a bar, which is gone at the end, all else a line per tenth.

    Args:
        what: is done, e.g. "loading weights".
        min_shown_bytes: what has less in all takes a blink and is not shown.
    """
    with _progress(stream, what, min_shown_bytes, _byte_columns, format_size) as report:
        yield report


@contextlib.contextmanager
def count_progress(stream: TextIO, what: str) -> Iterator[ReportProgress]:
    """As byte_progress, of things that are counted."""
    with _progress(stream, what, 0, _count_columns, str) as report:
        yield report


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


def _byte_columns() -> "tuple[ProgressColumn, ...]":
    from rich.progress import DownloadColumn, TransferSpeedColumn

    return DownloadColumn(binary_units=True), TransferSpeedColumn()


def _count_columns() -> "tuple[ProgressColumn, ...]":
    from rich.progress import MofNCompleteColumn

    return (MofNCompleteColumn(),)


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
            bar.stop()  # a terminal shows one at a time

    return show


def _tenths(stream: TextIO, what: str, show_number: Callable[[int], str]) -> ReportProgress:
    """One line for each tenth that is reached, the last at 100 %; a jump over several tenths is one line."""
    num_shown = 0

    def show(num_done: int, num_total: int) -> None:
        nonlocal num_shown
        num_tenths = 10 * num_done // num_total
        if num_tenths > num_shown:
            num_shown = num_tenths
            stream.write(f"{what}: {10 * num_tenths} % ({show_number(num_done)} of {show_number(num_total)})\n")
            stream.flush()

    return show
