"""/v1/embeddings, and Ollama's /api/embed and /api/embeddings: texts in, vectors out. Thread: loop.

A text is a prompt that ends with a vector: it takes the way of every generation, in a lower class than chats.
"""

import base64
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt
import orjson
from msgspec import Meta

from core.errors import InvalidRequest
from core.types import LOWEST_CLASS, TOP_CLASS, Delta, SamplingParams, Usage
from server.api.fields import (
    DefaultsOf,
    GenerationCall,
    GenerationDefaults,
    IdsPrompt,
    ModelName,
    PoolingStyle,
    Prompt,
    ReadBody,
    TextPrompt,
    check_range,
    checked_ids,
    read_body,
)
from server.api.replies import Extras, ReplyContext, Surface, WholeReply
from server.gate.tenants import ANY_TIME, DeadlineTable
from server.wire import sse

PRIORITY = -1  # where a request says nothing: below chats
TO_CONTEXT = -1  # of truncate_prompt_tokens
_MS_NS = 1_000_000

Float32Array = npt.NDArray[np.float32]


class PooledFields(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of every surface that pools."""

    model: ModelName | None = None
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    priority: Annotated[int, Meta(ge=LOWEST_CLASS, le=TOP_CLASS)] | None = None
    cache_salt: Annotated[str, Meta(min_length=1, max_length=256)] | None = None
    deadlines: DeadlineTable | None = None


class EmbeddingBody(PooledFields, frozen=True, kw_only=True):
    input: str | list[str | int | list[int]]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    add_special_tokens: bool | None = None
    prompt_name: str | None = None


class OllamaBody(PooledFields, frozen=True, kw_only=True):
    input: str | list[str] | None = None
    prompt: str | None = None  # of /api/embeddings
    truncate: bool | None = None
    dimensions: int | None = None
    keep_alive: str | float | None = None


def parse(body: bytes, defaults_of: DefaultsOf) -> GenerationCall:
    read = read_body(body, EmbeddingBody, "embeddings", defaults_of)
    wire, style = read.wire, style_of(read.defaults)
    check_dimensions(wire.dimensions, style)
    before = named_prompt(style, wire.prompt_name)
    return pooled_call(read, _prompts(wire.input, before, wire.add_special_tokens is not False, read.defaults))


def parse_ollama(body: bytes, defaults_of: DefaultsOf) -> GenerationCall:
    read = read_body(body, OllamaBody, "embed", lambda name: defaults_of(name and name.removesuffix(":latest")))
    wire, style = read.wire, style_of(read.defaults)
    check_dimensions(wire.dimensions, style)
    texts = wire.input if wire.input is not None else wire.prompt
    if texts is None:
        raise InvalidRequest("input is missing.", "input", "missing_required_parameter")
    prompts = _prompts(texts, named_prompt(style, None), True, read.defaults)  # type: ignore[arg-type]  # lists are invariant
    cut = None if wire.truncate is False else TO_CONTEXT
    return msgspec.structs.replace(pooled_call(read, prompts), truncate_to=cut, wants_timings=True)


def style_of(defaults: GenerationDefaults) -> PoolingStyle:
    """Raises InvalidRequest: the model makes no vectors, by the files that a gateway counts with."""
    if defaults.pooling is None:
        raise InvalidRequest(
            "This model makes no embeddings or scores. Name another one.", "model", "unsupported_model"
        )
    return defaults.pooling


def pooled_call(read: ReadBody[PooledFields], prompts: tuple[Prompt, ...], param: str = "input") -> GenerationCall:
    wire = read.wire
    return GenerationCall(
        model=read.model,
        prompts=prompts,
        sampling=SamplingParams(max_tokens=0),
        cache_salt=wire.cache_salt or "",
        priority=PRIORITY if wire.priority is None else wire.priority,
        deadlines=ANY_TIME if wire.deadlines is None else ANY_TIME.replaced_by(wire.deadlines),
        pooling=style_of(read.defaults),
        prompts_param=param,
        truncate_to=wire.truncate_prompt_tokens,
        wire=wire,
        speculates=False,
        unknown_fields=read.unknown_fields,
    )


def check_dimensions(dimensions: int | None, style: PoolingStyle) -> None:
    if dimensions is not None:
        check_range("dimensions", dimensions, 1, style.num_dims)


def named_prompt(style: PoolingStyle, name: str | None) -> str:
    """What the model wants before a text. Raises InvalidRequest: it has no prompt of that name."""
    if name is None:
        return style.prompts.get(style.default_prompt or "", "")
    if name not in style.prompts:
        known = ", ".join(style.prompts) or "none"
        raise InvalidRequest(f"The model has no prompt {name[:64]!r}. Its prompts: {known}.", "prompt_name")
    return style.prompts[name]


def check_num_texts(num: int, param: str, defaults: GenerationDefaults) -> None:
    """Raises InvalidRequest: none, or more than one request may have."""
    if not num:
        raise InvalidRequest(f"{param} is empty: send at least one text.", param)
    if num > (most := defaults.limits.num_inputs):
        raise InvalidRequest(f"{param} has {num} texts, and at most {most} are allowed. Send fewer at once.", param)


def _prompts(
    given: str | list[str | int | list[int]], before: str, adds_special_tokens: bool, defaults: GenerationDefaults
) -> tuple[Prompt, ...]:
    """A text, texts, ids, or lists of ids; a list of lists and texts is fine, too."""
    if isinstance(given, str):
        given = [given]
    if given and all(isinstance(item, int) for item in given):
        given = [given]  # type: ignore[list-item]  # all are ids
    check_num_texts(len(given), "input", defaults)
    prompts: list[Prompt] = []
    for i, item in enumerate(given):
        where = "input" if len(given) == 1 else f"input[{i}]"
        if isinstance(item, int):
            raise InvalidRequest("input must be a text, token ids, or a list of texts or of lists of ids.", where)
        if not item:
            raise InvalidRequest(f"{where} is empty: send a text, or at least one token id.", where)
        if isinstance(item, str):
            prompts.append(TextPrompt(before + item, adds_special_tokens))
        else:
            prompts.append(IdsPrompt(checked_ids(item, where, defaults.vocab_size)))
    return tuple(prompts)


# Answers.


def embedding_of(pooled: bytes, style: PoolingStyle, dimensions: int | None = None) -> Float32Array:
    """The vector as it is answered: cut, then normalised."""
    vector = np.frombuffer(pooled, np.float32)[:dimensions]
    if not style.is_normalized:
        return vector
    length = float(np.linalg.norm(vector))
    return vector / np.float32(length) if length > 0 else vector


class VectorsReply(WholeReply):
    """Collects vectors; each takes its wire form as it comes, since those of many texts take long."""

    def __init__(self, call: GenerationCall, context: ReplyContext) -> None:
        super().__init__(call, context)
        assert call.pooling is not None, "it asks for vectors"
        self._style = call.pooling
        self._written: list[bytes] = [b""] * len(call.prompts)

    def add(self, choice: int, delta: Delta) -> None:
        super().add(choice, delta)
        if delta.pooled:
            self._written[choice] = self.written(choice, delta.pooled)

    def written(self, choice: int, pooled: bytes) -> bytes:
        vector = embedding_of(pooled, self._style, self._call.wire.dimensions)
        if getattr(self._call.wire, "encoding_format", None) == "base64":
            return b'"' + base64.b64encode(vector.astype("<f4").tobytes()) + b'"'
        return orjson.dumps(vector, option=orjson.OPT_SERIALIZE_NUMPY)


class EmbeddingDocument(VectorsReply):
    def end(self, usage: Usage, extras: Extras) -> bytes:
        context = self._context
        head = {"id": SURFACE.prefix + context.reply_id, "object": "list", "created": context.created_s}
        lines = [
            b'{"object":"embedding","index":%d,"embedding":%b}' % (i, text) for i, text in enumerate(self._written)
        ]
        tail = sse.json_line({"model": context.model, "usage": pooled_usage(usage)} | extras)
        return sse.json_line(head)[:-1] + b',"data":[' + b",".join(lines) + b"]," + tail[1:]


class OllamaEmbeddings(VectorsReply):
    """Of /api/embed; /api/embeddings has one, and nothing else."""

    def end(self, usage: Usage, extras: Extras) -> bytes:
        if self._call.wire.input is None:
            return b'{"embedding":' + self._written[0] + b"}"
        total_ms = extras.get("timings", {}).get("total", 0.0)
        tail = {
            "total_duration": round(total_ms * _MS_NS),
            "load_duration": 0,
            "prompt_eval_count": usage.num_prompt_tokens,
        }
        head = sse.json_line({"model": self._context.model})[:-1]
        return head + b',"embeddings":[' + b",".join(self._written) + b"]," + sse.json_line(tail)[1:]


def pooled_usage(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.num_prompt_tokens,
        "total_tokens": usage.num_prompt_tokens,
        "completion_tokens": 0,
        "prompt_tokens_details": {"cached_tokens": usage.num_cached_tokens},
    }


SURFACE = Surface("/v1/embeddings", "document", parse, EmbeddingDocument, prefix="embd-", does="embed")
OLLAMA = Surface("/api/embed", "document", parse_ollama, OllamaEmbeddings, does="embed")
