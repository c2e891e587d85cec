"""Typed reads of a config.json's fields, with errors that name the field. Any thread."""

from collections.abc import Mapping
from typing import Any

from core.errors import BadCheckpoint, UnsupportedModel

CONFIG_PREFIX = "config.json: "  # of messages about its fields
BAD_FIELD_FIX = "download the model's directory again, or correct the file."
# Limits of counts. With the last two, whatever is built before the weights are looked at (tensors without memory, lists
# of layers) stays small, in any product of fields.
MAX_COUNT = 2**31 - 1
MAX_WIDTH = 2**24
MAX_LAYERS = MAX_EXPERTS = 1024


def read_bool(config: Mapping[str, Any], name: str, default: bool = False) -> bool:
    value = config.get(name)
    value = default if value is None else value
    if not isinstance(value, bool):
        raise bad_field(f"{name}={value!r} is not true or false.")
    return value


def positive_int(config: Mapping[str, Any], name: str, default: int | None = None, at_most: int = MAX_COUNT) -> int:
    value = config.get(name)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        raise bad_field(f"{name}={value!r} is not a positive integer.")
    if value > at_most:
        raise bad_field(f"{name}={value} is more than any model has: {at_most} at most.")
    return value


def count(config: Mapping[str, Any], name: str) -> int:
    """0 where the field is not set."""
    return positive_int(config, name) if config.get(name) else 0


def positive_float(config: Mapping[str, Any], name: str, default: float | None = None) -> float:
    value = config.get(name)
    value = default if value is None else value
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < float("inf"):
        raise bad_field(f"{name}={value!r} is not a positive number.")
    return float(value)


def optional_float(config: Mapping[str, Any], name: str) -> float | None:
    return None if config.get(name) is None else positive_float(config, name)


def floats(config: Mapping[str, Any], name: str, length: int) -> tuple[float, ...]:
    """Ones, where the field is not set."""
    listed = config.get(name)
    listed = [1.0] * length if listed is None else listed
    if not isinstance(listed, list | tuple) or len(listed) != length:
        raise bad_field(f"{name}={listed!r} is not a list of {length} numbers.")
    return tuple(positive_float({name: one}, name) for one in listed)


def token_ids(config: Mapping[str, Any], name: str) -> tuple[int, ...]:
    """One id, a list of them, or none."""
    value = config.get(name)
    listed = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(item, int) and not isinstance(item, bool) and item >= 0 for item in listed):
        raise bad_field(f"{name}={value!r} is not a token id, or a list of them.")
    return tuple(listed)


def read_quantization(
    config: Mapping[str, Any], neutral: Mapping[str, Mapping[str, tuple[Any, ...]]]
) -> Mapping[str, Any] | None:
    """The quantization_config, if it is of one of these methods.

    Args:
        neutral: by method: fields that would change what the tensors mean, and the values under which they do not.

    Raises:
        UnsupportedModel: a field has another value.
    """
    given = config.get("quantization_config")
    if not isinstance(given, Mapping) or given.get("quant_method") not in tuple(neutral):
        return None
    refuse_others(given, neutral[given["quant_method"]], "quantization_config")
    return given


def refuse_others(given: Mapping[str, Any], neutral: Mapping[str, tuple[Any, ...]], name: str) -> None:
    """
    Args:
        name: of the given object, for the error.

    Raises:
        UnsupportedModel: a field has a value that is not among its neutral ones.
    """
    for field, values in neutral.items():
        if given.get(field) not in values:
            raise unsupported_field(f"{name}.{field}", given.get(field), values)


def unsupported_field(name: str, value: object, supported: tuple[Any, ...]) -> UnsupportedModel:
    choices = ", ".join(repr(choice) for choice in supported if choice is not None) or "leaving it out"
    return UnsupportedModel(
        f"{CONFIG_PREFIX}{name}={value!r} is not supported.", f"use a model with {name} as: {choices}."
    )


def bad_field(what: str) -> BadCheckpoint:
    return BadCheckpoint(f"{CONFIG_PREFIX}{what}", BAD_FIELD_FIX)
