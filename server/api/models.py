"""/v1/models: what is served. Wire only. Thread: loop."""

from collections.abc import Sequence
from typing import Any

import msgspec

from core.errors import ErrorKind, ServiceError
from server import sse


class ServedModel(msgspec.Struct, frozen=True, kw_only=True):
    """One name under which a model answers.

    Args:
        created_s: unix time; when it was loaded.
        max_model_len: tokens of context.
        description: what a user should know before trusting it, e.g. of the demonstration model.
    """

    id: str
    created_s: int
    max_model_len: int
    description: str | None = None


def list_reply(models: Sequence[ServedModel]) -> bytes:
    return sse.json_line({"object": "list", "data": [_model_object(model) for model in models]})


def model_reply(model: ServedModel) -> bytes:
    return sse.json_line(_model_object(model))


def find_model(models: Sequence[ServedModel], name: str) -> ServedModel:
    """The model that a request names.

    Raises:
        ServiceError: none has that name; the message lists those that are.
    """
    for model in models:
        if model.id == name:
            return model
    served = ", ".join(model.id for model in models)
    raise ServiceError(
        ErrorKind.NOT_FOUND, f"There is no model {name[:64]!r} here. Served: {served}.", "model_not_found", "model"
    )


def _model_object(model: ServedModel) -> dict[str, Any]:
    result = {
        "id": model.id,
        "object": "model",
        "created": model.created_s,
        "owned_by": "steploop",
        "max_model_len": model.max_model_len,
    }
    if model.description is not None:
        result["description"] = model.description
    return result
