"""What the first rank tells the others, and what they answer: core's encoding with its length before it. Pure.

A rank is told a Job, then what to Load, then a Step after the other; it answers the first two.
"""

import struct
from dataclasses import dataclass
from typing import IO, TypeVar

from core.config import EngineConfig, ModelConfig
from core.plan import StepPlan, decode, encode

_LENGTH = struct.Struct("<I")


@dataclass(frozen=True, slots=True)
class Job:
    """What a rank is to be.

    Args:
        path: of the checkpoint.
        model: all of it.
        meeting: see Ranks.
    """

    rank: int
    path: str
    model: ModelConfig
    engine: EngineConfig
    meeting: int


@dataclass(frozen=True, slots=True)
class Load:
    """Load, with so much free memory on each rank's device."""

    free_bytes: int


@dataclass(frozen=True, slots=True)
class Step:
    """Compute a step.

    Args:
        broken_slots: whose blocks are made finite before.
    """

    plan: StepPlan
    broken_slots: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Refusal:
    """A StartupError, or what came instead."""

    cause: str
    fix: str
    exit_code: int


@dataclass(frozen=True, slots=True)
class Answer:
    """It is done, or refused.

    Args:
        free_bytes: of a Job: on the rank's device.
    """

    free_bytes: int = 0
    refusal: Refusal | None = None


M = TypeVar("M", Job, Load, Step, Answer)


def write_message(pipe: IO[bytes], message: Job | Load | Step | Answer) -> None:
    """
    Raises:
        OSError: nobody reads any more.
    """
    body = encode(message)
    pipe.write(_LENGTH.pack(len(body)) + body)
    pipe.flush()


def read_message(pipe: IO[bytes], kind: type[M]) -> M | None:
    """None: whoever wrote has ended."""
    head = pipe.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        return None
    (length,) = _LENGTH.unpack(head)
    body = pipe.read(length)
    return decode(body, kind) if len(body) == length else None
