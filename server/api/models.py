"""/v1/models, /model_info, /server_info and /admin: what is served, and by what. Wire only. Thread: loop."""

from collections.abc import Sequence
from typing import Any

import msgspec

from core.errors import ErrorKind, InvalidRequest, ServiceError
from core.types import EngineSnapshot, EngineStats
from server.wire import sse

CACHE_CLEARED = sse.json_line({"status": "cleared"})


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


class ServerCard(msgspec.Struct, frozen=True, kw_only=True):
    """The server as routers see it.

    Args:
        model_type, architectures: as config.json has them.
        max_sequences: run at once; more wait.
        max_batch_tokens: computed in one step.
        num_kv_tokens: that the KV cache holds, over all sequences.
        binds: where it listens, as the banner shows it.
    """

    model: ServedModel
    model_type: str | None
    architectures: tuple[str, ...]
    version: str
    max_sequences: int
    max_batch_tokens: int
    num_kv_tokens: int
    binds: tuple[str, ...] = ()


def model_info_reply(card: ServerCard) -> bytes:
    """What SGLang's /model_info says, as far as its router reads it.

    A router fetches the tokenizer by these paths: they are the served name, which is a hub's where the model is from
    one, and never a path of this machine.
    """
    name = card.model.id
    return sse.json_line(
        {
            "model_path": name,
            "tokenizer_path": name,
            "served_model_name": name,
            "is_generation": True,
            "has_image_understanding": False,
            "has_audio_understanding": False,
            "model_type": card.model_type,
            "architectures": card.architectures,
            "max_model_len": card.model.max_model_len,
        }
    )


def version_reply(card: ServerCard) -> bytes:
    return sse.json_line({"version": card.version})


def server_info_reply(card: ServerCard) -> bytes:
    """What SGLang's /server_info says, as far as its router and vLLM's read it; names of both where they differ."""
    name = card.model.id
    return sse.json_line(
        {
            "model_path": name,
            "served_model_name": name,
            "version": card.version,
            "is_embedding": False,
            "context_length": card.model.max_model_len,
            "max_model_len": card.model.max_model_len,
            "max_num_reqs": card.max_sequences,
            "max_running_requests": card.max_sequences,
            "max_prefill_tokens": card.max_batch_tokens,
            "max_total_tokens": card.num_kv_tokens,
            "tp_size": 1,
            "dp_size": 1,
            "pp_size": 1,
            "binds": card.binds,
        }
    )


def list_reply(models: Sequence[ServedModel]) -> bytes:
    return sse.json_line({"object": "list", "data": [_model_object(model) for model in models]})


def model_reply(model: ServedModel) -> bytes:
    return sse.json_line(_model_object(model))


def find_model(models: Sequence[ServedModel], name: str | None) -> ServedModel:
    """The model that a request asks for.

    Args:
        models: that its caller may use.
        name: None: the one that there is.

    Raises:
        InvalidRequest: there are several, and none is named.
        ServiceError: none of them has that name, or there are none; the message lists those that are.
    """
    if name is None and len(models) > 1:
        names = ", ".join(model.id for model in models)
        raise InvalidRequest(f"model is missing. Served: {names}.", "model", "missing_required_parameter")
    for model in models:
        if name is None or model.id == name:
            return model
    what = "There is no model" if name is None else f"There is no model {name[:64]!r}"
    if models:
        message = f"{what} here. Served: {', '.join(model.id for model in models)}."
    else:
        message = f"{what} that you may use: your tenant may use none of those that are served here. Ask the operator."
    raise ServiceError(ErrorKind.NOT_FOUND, message, "model_not_found", "model")


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


def engine_reply(snapshot: EngineSnapshot, stats: EngineStats) -> bytes:
    """The engine as it is, field by field as in core/inspection.py, and what it has counted since its start."""
    shown = {"serial": snapshot.serial, **snapshot.state, "store": snapshot.store, "counters": stats}
    return msgspec.json.encode(shown) + b"\n"


def drain_reply(grace_s: float, num_in_progress: int) -> bytes:
    return sse.json_line({"status": "draining", "grace_s": grace_s, "num_in_progress": num_in_progress})
