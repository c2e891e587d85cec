"""The processes of every rank but the first, and the messages between them and the first. Thread: engine.

A follower gets a Job, then Load, then one Step after another on stdin, in core's encoding, length first; it answers the
first two on stdout. follower.py is what it runs. Imports no torch.
"""

import os
import struct
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TypeVar

from core.config import EngineConfig, ModelConfig
from core.errors import ExitCode, StartupError
from core.plan import DeviceError, StepPlan, decode, encode

ROOT = Path(__file__).parent.parent.parent
END_S = 5.0  # for a process to end by itself
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
                [sys.executable, "-m", "gpu.parallel.follower"],
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
