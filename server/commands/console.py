"""Where tables are printed. Thread: main."""

import sys
from typing import TYPE_CHECKING, NoReturn, TextIO

if TYPE_CHECKING:
    from rich.console import Console


def new_console(stream: TextIO | None = None, plain_width: int = 120) -> "Console":
    """A console that leaves a reader's going to its caller: rich's own ends the process with code 1.

    Args:
        stream: None: stdout.
        plain_width: columns, where it is no terminal.
    """
    from rich.console import Console  # 60 ms, which other commands need not pay

    class QuietConsole(Console):
        def on_broken_pipe(self) -> NoReturn:
            raise BrokenPipeError

    stream = sys.stdout if stream is None else stream
    return QuietConsole(file=stream, highlight=False, width=None if stream.isatty() else plain_width)
