"""Starts and ends the process of the `steploop` command and of `python -m server`.

It imports little: the command is not known yet.
"""

import os
import signal
import sys
import threading
from typing import NoReturn

INTERRUPTED = 130  # as shells report SIGINT


def run_process() -> NoReturn:
    """Run the command, and end the process with its exit code.

    Until a command calls take_interrupts(), Ctrl-C ends the process at once: a KeyboardInterrupt during an import may
    be swallowed, or shown with a traceback.
    """
    signal.signal(signal.SIGINT, lambda number, frame: os._exit(INTERRUPTED))
    _open_standard_streams()
    from server.cli import main

    try:
        exit_code = main()
    except KeyboardInterrupt:
        exit_code = INTERRUPTED
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_process(exit_code)


def _open_standard_streams() -> None:
    """Open /dev/null for closed streams (`2>&-`): no other file may get their numbers, and our messages."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number
    sys.stdin = sys.stdin or os.fdopen(0)
    sys.stdout = sys.stdout or os.fdopen(1, "w")
    sys.stderr = sys.stderr or os.fdopen(2, "w")


def end_process(exit_code: int) -> NoReturn:
    """Exit, even while threads run: the interpreter's own exit aborts under a thread in torch's C++ code.

    torch.distributed has threads that Python does not list, and leaving its group could wait for a lost rank.
    """
    ranks = sys.modules.get("gpu.parallel.ranks")
    if threading.active_count() == 1 and (ranks is None or not ranks.is_member()):
        sys.exit(exit_code)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)


if __name__ == "__main__":
    run_process()
