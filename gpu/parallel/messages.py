"""Messages between the first rank and the others: core's encoding, length first. Pure.

A rank gets a Job, then Load, then one Step after another; it answers the first two.
"""

import struct
from dataclasses import dataclass
from typing import IO, TypeVar

from core.config import EngineConfig, ModelConfig
from core.plan import StepPlan, decode, encode

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
