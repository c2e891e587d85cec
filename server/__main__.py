"""The process from its first line to its last: the `steploop` command, and `python -m server`.

Imported before anything is known of the command: whatever is heavy, each function imports.
"""

import os
import signal
import sys
import threading
from typing import NoReturn

INTERRUPTED = 130  # as shells report SIGINT


def run_process() -> NoReturn:
    """Run what was typed, and end the process with its exit code.

    Until a command takes Ctrl-C for itself, it ends the process on the spot: a KeyboardInterrupt in the middle of an
    import may be swallowed there, or shown with a traceback.
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
    """Those that are closed (`2>&-`) lead nowhere: no file of ours gets their number, and what is said there."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest that is free
    sys.stdin = sys.stdin or os.fdopen(0)
    sys.stdout = sys.stdout or os.fdopen(1, "w")
    sys.stderr = sys.stderr or os.fdopen(2, "w")


def end_process(exit_code: int) -> NoReturn:
    """Leave, also when threads are still at work: the interpreter's own end under a thread in torch's C++ aborts.

    A group of ranks has such threads that are not Python's, and to leave it may mean to wait for one that is lost.
    """
    ranks = sys.modules.get("gpu.parallel.ranks")
    if threading.active_count() == 1 and (ranks is None or not ranks.is_member()):
        sys.exit(exit_code)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)


if __name__ == "__main__":
    run_process()
