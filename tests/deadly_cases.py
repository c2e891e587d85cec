"""Parts of bench.gpu_check for its tests: cases that take their process down (quick), and cases that need company."""

import os
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from bench.gpu_run import OK, Case, Context, Row

TABLE = "Deadly"


def cases(is_quick: bool, is_device: bool) -> list[Case]:
    if is_quick:
        return [
            Case("counts", partial(_count, "counts"), 60.0, TABLE),
            Case("dies", _die, 60.0, TABLE),
            Case("never ends", _wait, 0.1, TABLE),
            Case("counts again", partial(_count, "counts again"), 60.0, TABLE),
        ]
    meet = {"reads": partial(_open, "reads", "r"), "writes": partial(_open, "writes", "w"), "dies": _die}
    shared = [Case(name, run, 60.0, TABLE, is_shared=True) for name, run in meet.items()]
    return [*shared, Case("alone", partial(_count, "alone"), 60.0, TABLE)]


def _count(name: str, context: Context) -> Iterator[Row]:
    context.state["seen"] = context.state.get("seen", 0) + 1
    yield Row(TABLE, {"case": name, "seen": context.state["seen"]}, OK)


def _die(context: Context) -> Iterator[Row]:
    os.kill(os.getpid(), signal.SIGKILL)
    yield from ()


def _wait(context: Context) -> Iterator[Row]:
    signal.pause()
    yield from ()


def _open(name: str, mode: str, context: Context) -> Iterator[Row]:
    """An end of a pipe with a name, which opens when someone opens the other."""
    Path(context.state["pipe"]).open(mode).close()
    yield Row(TABLE, {"case": name}, OK)
