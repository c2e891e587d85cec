"""How far a download, the loading or the capture of graphs is: a bar on a terminal, a line per tenth elsewhere.

What takes a blink (loading the embedded model) is not worth a word. Thread: engine.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, TextIO

from server.values import format_size

if TYPE_CHECKING:
    from rich.progress import Progress

MIN_LOADED_BYTES = 64 * 2**20  # worth showing: a tenth of a second of reading
MIN_FETCHED_BYTES = 2**20

ReportBytes = Callable[[int, int], None]  # (bytes read so far, bytes in all)
ReportCount = Callable[[int, int], None]  # (done so far, in all)


@contextlib.contextmanager
def byte_progress(stream: TextIO, what: str, min_shown_bytes: int) -> Iterator[ReportBytes]:
    """Give a function to call on the way; the bar is gone, or its last line written, at the end.

    Args:
        what: is done, e.g. "loading weights".
        min_shown_bytes: less than these in all are not shown.
    """
    with contextlib.ExitStack() as stack:
        show: ReportBytes | None = None

        def report(num_read: int, num_total: int) -> None:
            nonlocal show
            if num_total < min_shown_bytes:
                return
            if show is None:
                show = _bar(stream, what, stack) if stream.isatty() else TenthLines(stream, what, format_size).report
            show(num_read, num_total)

        yield report


@contextlib.contextmanager
def count_progress(stream: TextIO, what: str) -> Iterator[ReportCount]:
    """As byte_progress, of things that are counted."""
    with contextlib.ExitStack() as stack:
        show: ReportCount | None = None

        def report(num_done: int, num_total: int) -> None:
            nonlocal show
            if show is None:
                show = _count_bar(stream, what, stack) if stream.isatty() else TenthLines(stream, what, str).report
            show(num_done, num_total)

        yield report


def _bar(stream: TextIO, what: str, stack: contextlib.ExitStack) -> ReportBytes:
    from rich.console import Console  # 60 ms, which a server without a terminal need not pay
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (
        TextColumn(what),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    return _shown(Progress(*columns, console=Console(file=stream), transient=True), stack)


def _count_bar(stream: TextIO, what: str, stack: contextlib.ExitStack) -> ReportCount:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return _shown(Progress(*columns, console=Console(file=stream), transient=True), stack)


def _shown(bar: "Progress", stack: contextlib.ExitStack) -> ReportCount:
    stack.enter_context(bar)
    task = bar.add_task("", total=None)

    def show(num_done: int, num_total: int) -> None:
        bar.update(task, completed=num_done, total=num_total)
        if num_done == num_total:
            bar.stop()  # a terminal shows one at a time

    return show


class TenthLines:
    """One line for each tenth that is reached, the last at 100 %; a jump over several tenths is one line."""

    def __init__(self, stream: TextIO, what: str, show: Callable[[int], str]) -> None:
        self._what = what
        self._show = show
        self._stream = stream
        self._num_tenths = 0

    def report(self, num_read: int, num_total: int) -> None:
        num_tenths = 10 * num_read // num_total
        if num_tenths > self._num_tenths:
            self._num_tenths = num_tenths
            sizes = f"{self._show(num_read)} of {self._show(num_total)}"
            self._stream.write(f"{self._what}: {10 * num_tenths} % ({sizes})\n")
            self._stream.flush()
