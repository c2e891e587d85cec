"""What the first rank tells the others, and what they answer: msgpack with its length before it, never pickle. Pure."""

import struct
from typing import Any, BinaryIO

import msgspec
import numpy as np

from core.config import EngineConfig, ModelConfig
from core.plan import StepPlan

_LENGTH = struct.Struct("<I")


class Job(msgspec.Struct, frozen=True, tag=True):
    """What a rank is to be.

    Args:
        path: of the checkpoint.
        model: all of it.
        engine: with the compute threads of one rank.
        meeting: see Ranks.
    """

    rank: int
    path: str
    model: ModelConfig
    engine: EngineConfig
    meeting: int


class Load(msgspec.Struct, frozen=True, tag=True):
    """Load, with so much free memory on each rank's device."""

    free_bytes: int


class Step(msgspec.Struct, frozen=True, tag=True):
    """Compute a step.

    Args:
        broken_slots: whose blocks are made finite before.
    """

    plan: StepPlan
    broken_slots: tuple[int, ...] = ()


class Found(msgspec.Struct, frozen=True, tag=True):
    """What a rank's device has free."""

    free_bytes: int


class Loaded(msgspec.Struct, frozen=True, tag=True):
    """A rank is ready to step."""


class Refused(msgspec.Struct, frozen=True, tag=True):
    """A StartupError, or what came instead."""

    cause: str
    fix: str
    exit_code: int


Order = Job | Load | Step
Answer = Found | Loaded | Refused


def write_message(pipe: BinaryIO, message: Order | Answer) -> None:
    """
    Raises:
        OSError: nobody reads any more.
    """
    body = _ENCODER.encode(message)
    pipe.write(_LENGTH.pack(len(body)) + body)
    pipe.flush()


def read_order(pipe: BinaryIO) -> Order | None:
    """None: whoever wrote has ended."""
    body = _read_body(pipe)
    return None if body is None else _ORDERS.decode(body)


def read_answer(pipe: BinaryIO) -> Answer | None:
    """None: whoever wrote has ended."""
    body = _read_body(pipe)
    return None if body is None else _ANSWERS.decode(body)


def _read_body(pipe: BinaryIO) -> bytes | None:
    head = pipe.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        return None
    (length,) = _LENGTH.unpack(head)
    body = pipe.read(length)
    return body if len(body) == length else None


def _bytes_of(column: Any) -> bytes:
    if isinstance(column, np.ndarray):
        return column.tobytes()
    raise NotImplementedError(f"{type(column).__name__} in a message")  # as msgspec asks for


def _column(kind: Any, content: Any) -> Any:
    """kind: NDArray of a number format, as StepPlan's fields say."""
    return np.frombuffer(content, dtype=_FORMATS[kind])


_FORMATS = {np.ndarray[tuple[Any, ...], np.dtype[kind]]: kind for kind in (np.int32, np.bool_)}
_ENCODER = msgspec.msgpack.Encoder(enc_hook=_bytes_of)
_ORDERS: msgspec.msgpack.Decoder[Order] = msgspec.msgpack.Decoder(Order, dec_hook=_column)
_ANSWERS: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)
