"""/v1/rerank (Jina's and Cohere's shapes) and /v1/score (vLLM's): how well texts answer a query. Thread: loop.

A reranker scores each pair of texts in a prompt of its own. Of an embedding model the score is the cosine of both
vectors.
"""

import math
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta

from core.errors import InvalidRequest
from core.types import Delta, Usage
from server.api.embeddings import PooledFields, check_num_texts, pooled_call, pooled_usage, style_of
from server.api.fields import (
    DefaultsOf,
    GenerationCall,
    GenerationDefaults,
    PairPrompt,
    Prompt,
    TextPrompt,
    read_body,
)
from server.api.replies import Extras, ReplyContext, Surface, WholeReply

MOST_CHARS = 16_000_000  # of all pairs, in each of which the query is tokenized anew


class Document(msgspec.Struct, frozen=True):
    text: str


class RerankBody(PooledFields, frozen=True, kw_only=True):
    query: Annotated[str, Meta(min_length=1)]
    documents: list[str | Document]
    top_n: Annotated[int, Meta(ge=1)] | None = None
    return_documents: bool | None = None
    instruction: str | None = None


class ScoreBody(PooledFields, frozen=True, kw_only=True):
    text_1: str | list[str]
    text_2: str | list[str]
    instruction: str | None = None


def parse_rerank(body: bytes, defaults_of: DefaultsOf) -> GenerationCall:
    read = read_body(body, RerankBody, "rerank", defaults_of)
    wire, defaults = read.wire, read.defaults
    texts = [one if isinstance(one, str) else one.text for one in wire.documents]
    check_num_texts(len(texts), "documents", defaults)
    prompts = style_of(defaults).prompts
    before = prompts.get("query", ""), prompts.get("document", prompts.get("passage", ""))
    return pooled_call(read, _prompts([wire.query], texts, wire.instruction, before, defaults), "documents")


def parse_score(body: bytes, defaults_of: DefaultsOf) -> GenerationCall:
    read = read_body(body, ScoreBody, "score", defaults_of)
    wire, defaults = read.wire, read.defaults
    first, second = ([one] if isinstance(one, str) else one for one in (wire.text_1, wire.text_2))
    for param, texts in (("text_1", first), ("text_2", second)):
        check_num_texts(len(texts), param, defaults)
    if len(first) not in (1, len(second)):
        message = f"text_1 has {len(first)} texts, and text_2 {len(second)}. Send one, or as many, in text_1."
        raise InvalidRequest(message, "text_1")
    return pooled_call(read, _prompts(first, second, wire.instruction, ("", ""), defaults), "text_2")


def _prompts(
    first: list[str], second: list[str], instruction: str | None, before: tuple[str, str], defaults: GenerationDefaults
) -> tuple[Prompt, ...]:
    """A pair of each two; of a model that embeds, all texts, the first ones first.

    Args:
        before: what an embedding model wants before each of them.
    """
    style = style_of(defaults)
    if instruction is not None and not style.has_template:
        message = "This model does not take an instruction. Leave it out, or put it into the query."
        raise InvalidRequest(message, "instruction", "unsupported_parameter")
    if style.scores is None:
        texts = [before[0] + text for text in first] + [before[1] + text for text in second]
        return tuple(TextPrompt(text) for text in texts)
    firsts = first * len(second) if len(first) == 1 else first
    if (num_chars := sum(map(len, firsts)) + sum(map(len, second))) > MOST_CHARS:
        message = f"The pairs have {num_chars} characters, and at most {MOST_CHARS} are allowed. Send fewer at once."
        raise InvalidRequest(message, "query" if len(first) == 1 else "text_1")
    return tuple(PairPrompt(*pair, instruction) for pair in zip(firsts, second, strict=True))


class ScoresReply(WholeReply):
    """Collects vectors, and makes scores of them."""

    def __init__(self, call: GenerationCall, context: ReplyContext) -> None:
        super().__init__(call, context)
        self._vectors: list[np.ndarray[Any, np.dtype[np.float64]]] = [np.empty(0)] * len(call.prompts)

    def add(self, choice: int, delta: Delta) -> None:
        super().add(choice, delta)
        if delta.pooled:
            self._vectors[choice] = np.frombuffer(delta.pooled, np.float32).astype(np.float64)

    def scores(self) -> list[float]:
        style, vectors = self._call.pooling, self._vectors
        assert style is not None, "it asks for scores"
        if style.scores is not None:
            values = [float(one[0] - one[1]) if style.scores == "tokens" else float(one[0]) for one in vectors]
            return [_sigmoid(value) for value in values] if style.is_sigmoid else values
        wire = self._call.wire
        num_first = 1 if isinstance(wire, RerankBody) or isinstance(wire.text_1, str) else len(wire.text_1)
        first, second = vectors[:num_first], vectors[num_first:]
        pairs = zip(first * len(second) if num_first == 1 else first, second, strict=True)
        return [_cosine(*pair) for pair in pairs]


class RerankDocument(ScoresReply):
    returns_documents = True

    def document(self, usage: Usage, extras: Extras) -> dict[str, Any]:
        wire, scores = self._call.wire, self.scores()
        best = sorted(range(len(scores)), key=lambda i: -scores[i])[: wire.top_n]
        shows = self.returns_documents if wire.return_documents is None else wire.return_documents
        results: list[dict[str, Any]] = [{"index": i, "relevance_score": scores[i]} for i in best]
        for line in results if shows else ():
            given = wire.documents[line["index"]]
            line["document"] = {"text": given if isinstance(given, str) else given.text}
        context = self._context
        return {
            "id": RERANK.prefix + context.reply_id,
            "model": context.model,
            "results": results,
            "usage": pooled_usage(usage),
            **extras,
        }


class CohereDocument(RerankDocument):
    returns_documents = False

    def document(self, usage: Usage, extras: Extras) -> dict[str, Any]:
        units = {"billed_units": {"search_units": 1}, "tokens": {"input_tokens": usage.num_prompt_tokens}}
        return super().document(usage, extras) | {"meta": {"api_version": {"version": "2"}, **units}}


class ScoreDocument(ScoresReply):
    def document(self, usage: Usage, extras: Extras) -> dict[str, Any]:
        context = self._context
        return {
            "id": SCORE.prefix + context.reply_id,
            "object": "list",
            "created": context.created_s,
            "model": context.model,
            "data": [{"index": i, "object": "score", "score": score} for i, score in enumerate(self.scores())],
            "usage": pooled_usage(usage),
            **extras,
        }


def _sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x >= 0 else 1 - 1 / (1 + math.exp(x))


def _cosine(one: Any, other: Any) -> float:
    lengths = float(np.linalg.norm(one) * np.linalg.norm(other))
    return float(one @ other) / lengths if lengths > 0 else 0.0


RERANK = Surface("/v1/rerank", "document", parse_rerank, RerankDocument, prefix="rerank-", does="score")
COHERE_RERANK = RERANK._replace(path="/v2/rerank", whole=CohereDocument)
SCORE = Surface("/v1/score", "document", parse_score, ScoreDocument, prefix="score-", does="score")
