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


@contextlib.contextmanager
def progress(stream: TextIO, what: str, is_bytes: bool = False, min_shown: int = 0) -> Iterator[ReportProgress]:
    """Give a function to report progress to: a terminal shows a bar until the end, other streams a line per tenth.

    Args:
        what: is done, e.g. "loading weights".
        is_bytes: reported numbers are bytes.
        min_shown: in all; less is not shown.
    """
    with contextlib.ExitStack() as stack:
        show: ReportProgress | None = None

        def report(num_done: int, num_total: int) -> None:
            nonlocal show
            if num_total < min_shown:
                return
            if show is None:
                is_terminal = stream.isatty()
                show = _bar(stream, what, is_bytes, stack) if is_terminal else _tenths(stream, what, is_bytes)
            show(num_done, num_total)

        yield report


def _bar(stream: TextIO, what: str, is_bytes: bool, stack: contextlib.ExitStack) -> ReportProgress:
    from rich import progress as rich
    from rich.console import Console

    numbers = (rich.DownloadColumn(binary_units=True), rich.TransferSpeedColumn())
    columns = numbers if is_bytes else (rich.MofNCompleteColumn(),)
    every = (rich.TextColumn(what), rich.BarColumn(), *columns, rich.TimeRemainingColumn())
    bar = stack.enter_context(rich.Progress(*every, console=Console(file=stream), transient=True))
    task = bar.add_task("", total=None)

    def show(num_done: int, num_total: int) -> None:
        bar.update(task, completed=num_done, total=num_total)
        if num_done == num_total:
            bar.stop()  # a terminal can show only one

    return show


def _tenths(stream: TextIO, what: str, is_bytes: bool) -> ReportProgress:
    """A line for each tenth that is reached; a jump over several tenths is one line."""
    num_shown = 0
    show_number: Callable[[int], str] = format_size if is_bytes else str

    def show(num_done: int, num_total: int) -> None:
        nonlocal num_shown
        num_tenths = 10 * num_done // num_total
        if num_tenths > num_shown:
            num_shown = num_tenths
            stream.write(f"{what}: {10 * num_tenths} % ({show_number(num_done)} of {show_number(num_total)})\n")
            stream.flush()

    return show
