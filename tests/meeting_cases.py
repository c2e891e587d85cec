"""A part of bench.gpu_check of which two cases need each other's company: what test_bench_gpu_check.py runs."""

import os
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from bench.gpu_parts import OK, Case, Context, Row

TABLE = "Meeting"


def cases(is_quick: bool, is_device: bool) -> list[Case]:
    meet = {"reads": partial(_open, "reads", "r"), "writes": partial(_open, "writes", "w"), "dies": _die}
    shared = [Case(name, run, 60.0, TABLE, is_shared=True) for name, run in meet.items()]
    return [*shared, Case("alone", _rest, 60.0, TABLE)]


def _open(name: str, mode: str, context: Context) -> Iterator[Row]:
    """An end of a pipe with a name, which opens when someone opens the other."""
    Path(context.state["pipe"]).open(mode).close()
    yield Row(TABLE, {"case": name}, OK)


def _die(context: Context) -> Iterator[Row]:
    os.kill(os.getpid(), signal.SIGKILL)
    yield from ()


def _rest(context: Context) -> Iterator[Row]:
    yield Row(TABLE, {"case": "alone"}, OK)
