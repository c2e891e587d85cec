"""/v1/models, /model_info, /server_info and /admin: replies about the models and the server. Thread: loop."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Literal, NotRequired, TypedDict

import msgspec

from core.types import Adapter, EngineSnapshot, EngineState, EngineStats, StoreState
from server.wire import sse

MOST_PATH_CHARS = 4096


class Status(TypedDict):
    status: str


class Version(TypedDict):
    version: str


CACHE_CLEARED = sse.json_line({"status": "cleared"})


class ServedModel(msgspec.Struct, frozen=True, kw_only=True):
    """One name under which a model answers.

    Args:
        created_s: unix time; when it was loaded.
        max_model_len: tokens of context; None: not known.
        description: what a user should know before trusting it.
        alias_of: the model's own name, by which it is billed; None: that is `id`.
        parent: of an adapter: the model that it adapts; root: its directory below the operator's, or that one's name.
        adapter: what the engine computes beside the model.
        tasks: what it does: "generate", "embed", "score"; empty: not known.
    """

    id: str
    created_s: int
    max_model_len: int | None
    description: str | None = None
    alias_of: str | None = None
    parent: str | None = None
    root: str | None = None
    adapter: Adapter | None = None
    tasks: tuple[str, ...] = ("generate",)

    @property
    def name(self) -> str:
        return self.alias_of or self.id

    @property
    def generates(self) -> bool:
        """As far as is known: routers ask a model that does not for embeddings alone."""
        return not self.tasks or "generate" in self.tasks


def adapter_card(
    base: ServedModel, name: str, root: str, adapter: Adapter | None = None, created_s: int | None = None
) -> ServedModel:
    """
    Args:
        root: what clients see of where it came from: never a path of this machine.
        created_s: None: when its model was.
    """
    created_s = base.created_s if created_s is None else created_s
    return msgspec.structs.replace(
        base, id=name, created_s=created_s, description=None, parent=base.name, root=root, adapter=adapter
    )


class LoadAdapterBody(msgspec.Struct, frozen=True, kw_only=True):
    """As vLLM takes it. load_inplace: replace the adapter of that name."""

    lora_name: Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
    lora_path: Annotated[str, msgspec.Meta(min_length=1, max_length=MOST_PATH_CHARS)]
    load_inplace: bool = False


class UnloadAdapterBody(msgspec.Struct, frozen=True, kw_only=True):
    lora_name: str
    lora_int_id: int | None = None  # deprecated; vLLM reads the name alone


class ServerCard(msgspec.Struct, frozen=True, kw_only=True):
    """The server as routers see it.

    Args:
        model_type, architectures: as config.json has them.
        max_sequences: run at once; more wait.
        max_batch_tokens: computed in one step.
        num_kv_tokens: capacity of the KV cache, over all sequences.
        binds: its addresses, as the banner shows them.
        num_parameters, size_bytes, digest: of the weights, as they are computed with; 0 and "": not known.
        file_format: of their files; precision: of the numbers in them, such as `int4` or `bfloat16`.
    """

    model: ServedModel
    model_type: str | None
    architectures: tuple[str, ...]
    version: str
    max_sequences: int
    max_batch_tokens: int
    num_kv_tokens: int
    speculates: bool = False
    binds: tuple[str, ...] = ()
    num_parameters: int = 0
    size_bytes: int = 0
    digest: str = ""
    file_format: str = ""
    precision: str = ""


def model_info_reply(card: ServerCard) -> bytes:
    """The fields of SGLang's /model_info that its router reads.

    A router fetches the tokenizer by the paths: they are the served name (a hub's, if the model is from one), never a
    path of this machine.
    """
    name = card.model.id
    return sse.json_line(
        {
            "model_path": name,
            "tokenizer_path": name,
            "served_model_name": name,
            "is_generation": card.model.generates,
            "has_image_understanding": False,
            "has_audio_understanding": False,
            "model_type": card.model_type,
            "architectures": card.architectures,
            "max_model_len": card.model.max_model_len,
        }
    )


def version_reply(card: ServerCard) -> bytes:
    return sse.json_line(Version(version=card.version))


def server_info_reply(card: ServerCard) -> bytes:
    """The fields of SGLang's /server_info that its router and vLLM's read; names of both where they differ."""
    name = card.model.id
    return sse.json_line(
        {
            "model_path": name,
            "served_model_name": name,
            "version": card.version,
            "is_embedding": not card.model.generates,
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


def loads_reply(card: ServerCard, stats: EngineStats, num_running: int, num_waiting: int, unix_s: float) -> bytes:
    """The fields of SGLang's /v1/loads that routers read, of the one rank that there is.

    Args:
        num_running, num_waiting: with requests at upstreams.
    """
    usage = stats.num_used_blocks / stats.num_blocks if stats.num_blocks else 0.0
    hits = stats.num_cache_hits / stats.num_cache_queries if stats.num_cache_queries else 0.0
    load = {
        "dp_rank": 0,
        "timestamp": unix_s,
        "num_running_reqs": num_running,
        "num_waiting_reqs": num_waiting,
        "num_total_reqs": num_running + num_waiting,
        "num_used_tokens": round(usage * card.num_kv_tokens),
        "max_total_num_tokens": card.num_kv_tokens,
        "token_usage": usage,
        "cache_hit_rate": hits,
        "utilization": num_running / card.max_sequences if card.max_sequences else 0.0,
        "max_running_requests": card.max_sequences,
    }
    return sse.json_line({"timestamp": unix_s, "version": card.version, "dp_rank_count": 1, "loads": [load]})


States = Mapping[str, str]  # of models that are started on demand, by name: as llama-server has them


class State(TypedDict):
    value: str


class ModelObject(TypedDict):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    tasks: NotRequired[tuple[str, ...]]
    root: NotRequired[str | None]
    parent: NotRequired[str]
    max_model_len: NotRequired[int]
    description: NotRequired[str]
    status: NotRequired[State]


class ModelList(TypedDict):
    object: Literal["list"]
    data: list[ModelObject]


def list_reply(models: Sequence[ServedModel], states: States) -> bytes:
    document: ModelList = {"object": "list", "data": [_model_object(model, states) for model in models]}
    return sse.json_line(document)


def model_reply(model: ServedModel, states: States) -> bytes:
    return sse.json_line(_model_object(model, states))


def _model_object(model: ServedModel, states: States) -> ModelObject:
    result: ModelObject = {"id": model.id, "object": "model", "created": model.created_s, "owned_by": "steploop"}
    if model.tasks:
        result["tasks"] = model.tasks
    if model.parent is not None:
        result["root"], result["parent"] = model.root, model.parent
    if model.max_model_len is not None:
        result["max_model_len"] = model.max_model_len
    if model.description is not None:
        result["description"] = model.description
    if (state := states.get(model.parent or model.name)) is not None:
        result["status"] = {"value": state}
    return result


class ModelState(TypedDict):
    model: str
    status: State


def state_reply(name: str, states: States) -> bytes:
    return sse.json_line(ModelState(model=name, status={"value": states[name]}))


class EngineReport(EngineState):
    """The engine's state, and its counters since the start."""

    serial: int
    store: StoreState
    counters: EngineStats


def engine_reply(snapshot: EngineSnapshot, stats: EngineStats) -> bytes:
    report: EngineReport = {**snapshot.state, "serial": snapshot.serial, "store": snapshot.store, "counters": stats}
    return msgspec.json.encode(report) + b"\n"


class Draining(TypedDict):
    """grace_s: until the process ends at the latest."""

    status: Literal["draining"]
    grace_s: float
    num_in_progress: int


def drain_reply(grace_s: float, num_in_progress: int) -> bytes:
    return sse.json_line(Draining(status="draining", grace_s=grace_s, num_in_progress=num_in_progress))
