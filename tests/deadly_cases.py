"""A part of bench.gpu_check whose cases take their process down: what test_bench_gpu_check.py runs."""

import os
import signal
from collections.abc import Iterator

from bench.gpu_parts import OK, Case, Context, Row

TABLE = "Deadly"


def cases(is_quick: bool, is_device: bool) -> list[Case]:
    return [
        Case("counts", lambda context: _count("counts", context), 60.0, TABLE),
        Case("dies", _die, 60.0, TABLE),
        Case("never ends", _wait, 0.1, TABLE),
        Case("counts again", lambda context: _count("counts again", context), 60.0, TABLE),
    ]


def _count(name: str, context: Context) -> Iterator[Row]:
    context.state["seen"] = context.state.get("seen", 0) + 1
    yield Row(TABLE, {"case": name, "seen": context.state["seen"]}, OK)


def _die(context: Context) -> Iterator[Row]:
    os.kill(os.getpid(), signal.SIGKILL)
    yield from ()


def _wait(context: Context) -> Iterator[Row]:
    signal.pause()
    yield from ()
