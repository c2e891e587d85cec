"""How far a download or the loading is: a bar in bytes on a terminal, a line per tenth elsewhere. Thread: engine."""

import contextlib
from collections.abc import Callable, Iterator
from typing import TextIO

from server.values import format_size

ReportBytes = Callable[[int, int], None]  # (bytes read so far, bytes in all)


@contextlib.contextmanager
def byte_progress(stream: TextIO, what: str) -> Iterator[ReportBytes]:
    """Give a function to call on the way; the bar is gone, or its last line written, at the end.

    Args:
        what: is done, e.g. "loading weights".
    """
    if not stream.isatty():
        yield TenthLines(stream, what).report
        return
    from rich.console import Console  # 60 ms, which a server without a terminal need not pay
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (
        TextColumn(what),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(file=stream), transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda num_read, num_total: bar.update(task, completed=num_read, total=num_total)


class TenthLines:
    """One line for each tenth that is reached, the last at 100 %; a jump over several tenths is one line."""

    def __init__(self, stream: TextIO, what: str) -> None:
        self._what = what
        self._stream = stream
        self._num_tenths = 0

    def report(self, num_read: int, num_total: int) -> None:
        num_tenths = 10 if num_total == 0 else 10 * num_read // num_total
        if num_tenths > self._num_tenths:
            self._num_tenths = num_tenths
            sizes = f"{format_size(num_read)} of {format_size(num_total)}"
            self._stream.write(f"{self._what}: {10 * num_tenths} % ({sizes})\n")
            self._stream.flush()
