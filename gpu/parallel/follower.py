"""`python -m gpu.parallel.follower`: the process of every rank but the first.

It computes its part of every step and samples nothing. It reads orders from stdin and answers on stdout; all else that
is printed goes to stderr. It never outlives its parent, even one that is killed.
"""

import ctypes
import logging
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import IO, NoReturn

from core.errors import ExitCode, StartupError
from gpu.parallel.processes import Answer, Job, Load, Refusal, Step, read_message, write_message

PR_SET_PDEATHSIG = 1  # prctl(2)

logger = logging.getLogger(__name__)


def main() -> NoReturn:
    """Ends by os._exit: the group's threads would abort the interpreter's own exit."""
    orders = sys.stdin.buffer
    with os.fdopen(os.dup(sys.stdout.fileno()), "wb") as answers:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        die_with_parent()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # a terminal sends them to all; the parent drains
            signal.signal(number, signal.SIG_IGN)
        try:
            follow(orders, answers)
        except StartupError as error:
            _refuse(answers, Refusal(error.cause, error.fix, error.exit_code))
        except Exception as error:
            logger.critical("a rank fails: %s", error, exc_info=error)
            _refuse(answers, Refusal(f"{type(error).__name__}: {error}", "see its log.", ExitCode.DEVICE))
    sys.stderr.flush()
    os._exit(ExitCode.OK)


def die_with_parent() -> None:
    """Linux only; elsewhere the process ends when its orders do."""
    with suppress(AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def follow(orders: IO[bytes], answers: IO[bytes]) -> None:
    """Carry out one job."""
    job = read_message(orders, Job)
    if job is None:
        return  # the parent has ended
    from gpu.parallel.runner import find_room, load_rank  # imports torch

    room = find_room(Path(job.path), job.model, job.engine, job.rank)
    write_message(answers, Answer(room.free_bytes))
    load = read_message(orders, Load)
    if load is None:
        return
    runner = load_rank(room, load.free_bytes, job.meeting, lambda done, total: None)
    write_message(answers, Answer())
    while (step := read_message(orders, Step)) is not None:
        runner.make_finite(step.broken_slots)
        runner.sample(runner.forward(step.plan))


def _refuse(answers: IO[bytes], refusal: Refusal) -> NoReturn:
    with suppress(OSError):  # the parent has ended
        write_message(answers, Answer(refusal=refusal))
    sys.stderr.flush()
    os._exit(refusal.exit_code)


if __name__ == "__main__":
    main()
