"""The table of fields: the surfaces do what it says, docs/api.md shows it, and the SDKs have no field beyond it."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from anthropic.types import message_create_params
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import response_create_params

from server.api import chat, completions, known_fields, messages, ollama, responses
from server.api.fields import StreamOptions
from server.api.known_fields import KNOWN, Does, Known, Name
from server.api.replies import Surface
from server.api.tokenize import TokenizeBody
from tests.server.api import wire

DOCS = Path(__file__).parents[3] / "docs" / "api.md"
BODIES: dict[Name, Any] = {
    "chat": chat.ChatBody,
    "completions": completions.CompletionBody,
    "responses": responses.ResponsesBody,
    "messages": messages.MessagesBody,
    "ollama": ollama.ChatBody,
    "tokenize": TokenizeBody,
}
PARSERS: dict[Name, tuple[Surface, dict[str, Any]]] = {
    "chat": (chat.SURFACE, {"messages": [{"role": "user", "content": "Hi"}]}),
    "completions": (completions.SURFACE, {"prompt": "Hi"}),
    "responses": (responses.SURFACE, {"input": "Hi"}),
    "messages": (messages.SURFACE, {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 9}),
    "ollama": (ollama.CHAT, {"messages": [{"role": "user", "content": "Hi"}]}),
}
ROWS = [(surface, row) for rows in KNOWN.values() for row in rows for surface in sorted(row.surfaces)]
OF_GENERATION = [(surface, row) for surface, row in ROWS if surface in PARSERS]


ALIAS_VALUES: dict[str, Any] = {  # of what is no number
    "stop": ["~"],
    "guided_regex": "a+",
    "guided_grammar": 'start: "a"',
    "guided_json": {"type": "object"},
}


def names(surface: Name) -> set[str]:
    return {row.name for one, row in ROWS if one == surface}


def served(surface: Name) -> set[str]:
    """The fields of its body, less those that are there to be refused."""
    options = StreamOptions.__struct_fields__ if surface in ("chat", "completions") else ()
    declared = {*BODIES[surface].__struct_fields__, *(f"stream_options.{name}" for name in options)}
    return {str(name) for name in declared} - {row.name for one, row in ROWS if one == surface} - {"sent_as"}


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
    ],
)
def test_every_field_of_the_sdks_is_known(surface: Name, params: Any) -> None:
    assert set(params.__annotations__) <= names(surface) | served(surface)


@pytest.mark.parametrize(("surface", "row"), OF_GENERATION, ids=lambda one: one.name if isinstance(one, Known) else one)
def test_the_surfaces_do_what_the_table_says(surface: Name, row: Known) -> None:
    parser, ask = PARSERS[surface]
    plain = wire.parse(parser, **ask)
    for value in (None, *row.neutral):
        call = wire.parse(parser, **ask | fields_of(row.name, value))
        assert call.sampling == plain.sampling
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
        named, meant = (wire.parse(parser, **ask, **{name: value}) for name in (row.name, row.target))
        assert named.sampling == meant.sampling
        if meant.constraint is not None:
            assert named.constraint == replace(meant.constraint, param=row.name)
        if row.target != "guided_json":  # any JSON may be one
            assert wire.refusal(parser, **ask, **{row.name: {}}).param == row.name


def test_true_is_no_number() -> None:
    for name, value in (("best_of", True), ("mirostat", False), ("echo", 0), ("do_sample", 1)):
        error = wire.refusal(chat.SURFACE, **PARSERS["chat"][1], **{name: value})
        assert (error.param, error.code) == (name, "unsupported_parameter")


def docs_row(owner: str, row: Known) -> str:
    """The row as docs/api.md has it."""
    what = f"{row.does} `{row.target}`" if row.target else str(row.does)
    if row.neutral:
        shown = ", ".join(f"`{json.dumps(value)}`" for value in row.neutral)
        what += f", but for {shown}" if not row.target else f"; {shown} asks for nothing"
    if row.unless is not None:
        what += f", and beside `{row.unless[0]}: {json.dumps(row.unless[1])}`"
    return f"| `{row.name}` | {', '.join(sorted(row.surfaces))} | {owner} | {what} |"


def test_the_docs_show_the_table_and_what_is_served() -> None:
    shown = [line for line in DOCS.read_text().splitlines() if line.startswith("| `")]
    expected = [docs_row(owner, row) for owner, rows in KNOWN.items() for row in rows]
    assert [line for line in shown if not line.endswith("| served |")] == expected, known_fields.__name__
    cells = [line.strip("| ").split(" | ") for line in shown if line.endswith("| served |")]
    told = [(surface, name.strip("`")) for name, surfaces, *_ in cells for surface in surfaces.split(", ")]
    assert sorted(told) == sorted((surface, name) for surface in BODIES for name in served(surface))
