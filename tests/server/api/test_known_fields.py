"""The table of fields: the surfaces do what it says, docs/api.md shows it, and the SDKs have no field beyond it."""

from dataclasses import replace
from typing import Any

import pytest
from anthropic.types import message_create_params
from openai.types import batch_create_params, completion_create_params, embedding_create_params
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import response_create_params

from server.api import chat, completions, embeddings, llama_server, messages, ollama, responses, scores
from server.api.known_fields import Does, Known, Name
from server.api.replies import Surface
from server.routes import ROUTES
from tests.server.api import wire
from tests.server.api.api_tables import BODIES, DOCS, PATHS, ROWS, served, written

PARSERS: dict[Name, tuple[Surface, dict[str, Any]]] = {
    "chat": (chat.SURFACE, {"messages": [{"role": "user", "content": "Hi"}]}),
    "completions": (completions.SURFACE, {"prompt": "Hi"}),
    "responses": (responses.SURFACE, {"input": "Hi"}),
    "messages": (messages.SURFACE, {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 9}),
    "ollama": (ollama.CHAT, {"messages": [{"role": "user", "content": "Hi"}]}),
    "completion": (llama_server.COMPLETION, {"prompt": "Hi"}),
    "infill": (llama_server.INFILL, {"input_prefix": "Hi", "input_suffix": "!"}),
    "embeddings": (embeddings.SURFACE, {"input": "Hi"}),
    "embed": (embeddings.OLLAMA, {"input": "Hi"}),
    "rerank": (scores.RERANK, {"query": "Hi", "documents": ["Ho"]}),
    "score": (scores.SCORE, {"text_1": "Hi", "text_2": "Ho"}),
}
PARSED = [(surface, row) for surface, row in ROWS if surface in PARSERS]


ALIAS_VALUES: dict[str, Any] = {  # of what is no number
    "stop": ["~"],
    "guided_regex": "a+",
    "guided_grammar": 'start: "a"',
    "guided_json": {"type": "object"},
    "prompt_name": "query",
    "text_1": "Hi",
    "text_2": "Ho",
}


def names(surface: Name) -> set[str]:
    return {row.name for one, row in ROWS if one == surface}


def fields_of(name: str, value: object) -> dict[str, Any]:
    outer, _, inner = name.partition(".")
    return {outer: {inner: value} if inner else value}


def test_each_field_has_one_row() -> None:
    assert len({(surface, row.name) for surface, row in ROWS}) == len(ROWS)


@pytest.mark.parametrize("surface", BODIES)
def test_an_alias_stands_for_a_field_of_the_body(surface: Name) -> None:
    assert {row.target for one, row in ROWS if one == surface and row.target} <= served(surface)


@pytest.mark.parametrize(
    ("surface", "params"),
    [
        ("chat", chat_create_params.CompletionCreateParamsBase),
        ("completions", completion_create_params.CompletionCreateParamsBase),
        ("responses", response_create_params.ResponseCreateParamsBase),
        ("chat", message_create_params.MessageCreateParamsBase),
        ("messages", message_create_params.MessageCreateParamsBase),
        ("embeddings", embedding_create_params.EmbeddingCreateParams),
        ("batches", batch_create_params.BatchCreateParams),
    ],
)
def test_every_field_of_the_sdks_is_known(surface: Name, params: Any) -> None:
    assert set(params.__annotations__) <= names(surface) | served(surface)


@pytest.mark.parametrize(("surface", "row"), PARSED, ids=lambda one: one.name if isinstance(one, Known) else one)
def test_the_surfaces_do_what_the_table_says(surface: Name, row: Known) -> None:
    parser, ask = PARSERS[surface]
    plain = wire.parse(parser, **ask)
    for value in (None, *row.neutral):
        call = wire.parse(parser, **ask | fields_of(row.name, value))
        assert (call.sampling, call.prompts) == (plain.sampling, plain.prompts)
        assert call.unknown_fields == ()
    if row.does is Does.REFUSED:
        error = wire.refusal(parser, **ask | fields_of(row.name, {"asks": "for something"}))
        assert (error.param, error.code) == (row.name, "unsupported_parameter")
        assert row.name in error.message
        if row.unless is not None:
            wire.parse(parser, **ask, **{row.name: [{"type": "function"}], row.unless[0]: row.unless[1]})
    elif row.does is Does.CONTAINER:
        assert wire.refusal(parser, **ask, **{row.name: {"top_k": 2}}).param == f"{row.name}.top_k"
    elif row.does is Does.ALIAS:
        value = ALIAS_VALUES.get(row.target, 2)
        ask = {name: given for name, given in ask.items() if name != row.target}
        named, meant = (wire.parse(parser, **ask, **{name: value}) for name in (row.name, row.target))
        assert (named.sampling, named.prompts) == (meant.sampling, meant.prompts)
        if meant.constraint is not None:
            assert named.constraint == replace(meant.constraint, param=row.name)
        if row.target != "guided_json":  # any JSON may be one
            assert wire.refusal(parser, **ask, **{row.name: {}}).param == row.name


def test_true_is_no_number() -> None:
    for name, value in (("best_of", True), ("mirostat", False), ("echo", 0), ("do_sample", 1)):
        error = wire.refusal(chat.SURFACE, **PARSERS["chat"][1], **{name: value})
        assert (error.param, error.code) == (name, "unsupported_parameter")


def test_each_route_that_reads_a_body_names_its_fields() -> None:
    reading = {path for path, methods in ROUTES.items() if "POST" in methods and not path.startswith("/admin")}
    assert {path for paths in PATHS.values() for path in paths} == reading - {"/ping", "/v1/batches/{batch_id}/cancel"}


def test_the_docs_have_the_tables_of_the_code() -> None:
    docs = DOCS.read_text()
    assert written(docs) == docs, "make tables"
