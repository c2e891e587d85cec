"""Plans and configurations as bytes, and back: for processes that compute together. Msgpack, never pickle. Pure.

Columns are sent as they lie in memory, so both ends are on machines of one byte order.
"""

from functools import cache
from typing import Any, TypeVar

import msgspec
import numpy as np

from core.plan import BoolArray, Int32Array

T = TypeVar("T")

_FORMATS: dict[Any, type[np.generic]] = {Int32Array: np.int32, BoolArray: np.bool_}


def encode(value: object) -> bytes:
    """
    Args:
        value: a dataclass of what core's are made of: plain values, tuples, others like it, and columns of a StepPlan.
    """
    return _ENCODER.encode(value)


def decode(content: bytes, kind: type[T]) -> T:
    """What was encoded; its columns cannot be written to.

    Raises:
        msgspec.DecodeError: it is none of that kind.
    """
    hashable: Any = kind
    decoder: msgspec.msgpack.Decoder[T] = _decoder(hashable)
    return decoder.decode(content)


@cache
def _decoder(kind: Any) -> Any:
    return msgspec.msgpack.Decoder(kind, dec_hook=_column)


def _column(kind: Any, content: Any) -> Any:
    return np.frombuffer(content, dtype=_FORMATS[kind])


def _bytes_of(column: Any) -> bytes:
    if isinstance(column, np.ndarray):
        return column.tobytes()
    raise NotImplementedError(f"{type(column).__name__} in what is encoded")  # as msgspec asks for


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_bytes_of)
