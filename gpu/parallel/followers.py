"""The processes of every rank but the first: how they are started, what they are sent, and what they do.

A follower computes its part of every step and samples nothing. It reads a Job, then Load, then one Step after another
from stdin, in core's encoding, length first; it answers the first two on stdout. All else it prints goes to stderr. It
never outlives its parent, even one that is killed. Imports torch in the followers only. Thread: engine.
"""

import ctypes
import logging
import os
import signal
import struct
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, NoReturn, TypeVar

from core.config import EngineConfig, ModelConfig
from core.errors import ExitCode, StartupError
from core.plan import DeviceError, StepPlan, decode, encode

logger = logging.getLogger(__name__)

ROOT = Path(__file__).parent.parent.parent
END_S = 5.0  # for a process to end by itself
PR_SET_PDEATHSIG = 1  # prctl(2)
_LENGTH = struct.Struct("<I")


@dataclass(frozen=True, slots=True)
class Job:
    """
    Args:
        path: the checkpoint's.
        model: the whole model.
        meeting: see Ranks.
    """

    rank: int
    path: str
    model: ModelConfig
    engine: EngineConfig
    meeting: int


@dataclass(frozen=True, slots=True)
class Load:
    """
    Args:
        free_bytes: what every rank's device has, at least.
    """

    free_bytes: int


@dataclass(frozen=True, slots=True)
class Step:
    """
    Args:
        broken_slots: slots whose blocks are made finite before the step.
    """

    plan: StepPlan
    broken_slots: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Refusal:
    """A StartupError of the rank, or another exception as one."""

    cause: str
    fix: str
    exit_code: int


@dataclass(frozen=True, slots=True)
class Answer:
    """
    Args:
        free_bytes: on the rank's device, in answer to a Job.
        refusal: None: done.
    """

    free_bytes: int = 0
    refusal: Refusal | None = None


M = TypeVar("M", Job, Load, Step, Answer)


def write_message(pipe: IO[bytes], message: Job | Load | Step | Answer) -> None:
    """
    Raises:
        OSError: the reader has closed the pipe.
    """
    body = encode(message)
    pipe.write(_LENGTH.pack(len(body)) + body)
    pipe.flush()


def read_message(pipe: IO[bytes], kind: type[M]) -> M | None:
    """None: the writer has ended."""
    head = pipe.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        return None
    (length,) = _LENGTH.unpack(head)
    body = pipe.read(length)
    return decode(body, kind) if len(body) == length else None


class Followers:
    """The processes of ranks 1 to num_ranks - 1.

    Args:
        meeting: a descriptor that they inherit under the same number.
    """

    def __init__(self, num_ranks: int, meeting: int) -> None:
        # without the settings, which may hold keys: a rank is sent what it needs
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("STEPLOOP_")}
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        self.processes = [
            subprocess.Popen(
                [sys.executable, "-c", "from gpu.parallel.followers import main; main()"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                pass_fds=[meeting],
                env={**inherited, "PYTHONPATH": path},
            )
            for _ in range(1, num_ranks)
        ]

    def tell(self, order_of: Callable[[int], Job | Load | Step]) -> None:
        """
        Args:
            order_of: rank -> its message.

        Raises:
            DeviceError: a rank is lost.
        """
        for rank, process in self._ranks():
            assert process.stdin is not None
            try:
                write_message(process.stdin, order_of(rank))
            except OSError as error:
                raise DeviceError(self._end_of(rank, process)) from error

    def answers(self) -> list[Answer]:
        """One answer of each, in the order of ranks.

        Raises:
            StartupError: one has refused, or ended.
        """
        found = []
        for rank, process in self._ranks():
            assert process.stdout is not None
            answer = read_message(process.stdout, Answer)
            if answer is None:
                cause = f"{self._end_of(rank, process)} while it was loading."
                raise StartupError(cause, "see what it has logged above, or --tensor-parallel 1.", ExitCode.DEVICE)
            if answer.refusal is not None:
                refusal = answer.refusal
                raise StartupError(f"Rank {rank}: {refusal.cause}", refusal.fix, refusal.exit_code)
            found.append(answer)
        return found

    def check(self) -> None:
        """
        Raises:
            DeviceError: one has ended.
        """
        for rank, process in self._ranks():
            if process.poll() is not None:
                raise DeviceError(self._end_of(rank, process))

    def end(self) -> None:
        """Kill them, and wait until they have ended."""
        for _, process in self._ranks():
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                assert pipe is not None
                with suppress(OSError):  # it could not be flushed
                    pipe.close()

    def _ranks(self) -> "list[tuple[int, subprocess.Popen[bytes]]]":
        return list(enumerate(self.processes, start=1))

    def _end_of(self, rank: int, process: "subprocess.Popen[bytes]") -> str:
        """How it has ended: its pipes may close a moment before it does."""
        try:
            code = process.wait(END_S)
        except subprocess.TimeoutExpired:
            return f"Rank {rank} (process {process.pid}) does not respond"
        return f"Rank {rank} (process {process.pid}) has ended by {f'signal {-code}' if code < 0 else f'code {code}'}"


def main() -> NoReturn:
    """The process of a follower. Ends by os._exit: the group's threads would abort the interpreter's own exit."""
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
