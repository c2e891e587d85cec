"""The table of fields: the surfaces do what it says, docs/api.md shows it, and the SDKs know no field beyond it."""

import json
from pathlib import Path
from typing import Any

import pytest
from anthropic.types import message_create_params
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import response_create_params

from server.api import known_fields
from server.api.chat import ChatBody, ChatSurface
from server.api.completions import CompletionBody, CompletionsSurface
from server.api.known_fields import KNOWN, Does, Known, Name
from server.api.responses import ResponsesBody, ResponsesSurface
from server.api.surface import Surface
from server.api.tokenize import TokenizeBody
from tests.server.api import wire

DOCS = Path(__file__).parents[3] / "docs" / "api.md"
BODIES: dict[Name, Any] = {
    "chat": ChatBody,
    "completions": CompletionBody,
    "responses": ResponsesBody,
    "tokenize": TokenizeBody,
}
PARSERS: dict[Name, tuple[Surface, dict[str, Any]]] = {
    "chat": (ChatSurface(), {"messages": [{"role": "user", "content": "Hi"}]}),
    "completions": (CompletionsSurface(), {"prompt": "Hi"}),
    "responses": (ResponsesSurface(), {"input": "Hi"}),
}
ROWS = [(surface, row) for rows in KNOWN.values() for row in rows for surface in sorted(row.surfaces)]
OF_GENERATION = [(surface, row) for surface, row in ROWS if surface in PARSERS]


def names(surface: Name, *does: Does) -> set[str]:
    return {row.name for one, row in ROWS if one == surface and (not does or row.does in does)}


def fields_of(name: str, value: object) -> dict[str, Any]:
    outer, _, inner = name.partition(".")
    return {outer: {inner: value} if inner else value}


def test_each_field_has_one_row() -> None:
    assert len({(surface, row.name) for surface, row in ROWS}) == len(ROWS)


@pytest.mark.parametrize("surface", BODIES)
def test_what_is_served_is_what_the_body_has(surface: Name) -> None:
    shaped = set(BODIES[surface].__struct_fields__)
    assert {name for name in names(surface, Does.SERVED) if "." not in name} <= shaped
    assert shaped <= names(surface, Does.SERVED, Does.REFUSED)
    assert {row.target for one, row in ROWS if one == surface and row.target} <= shaped


@pytest.mark.parametrize(
    ("surface", "params"),
    [
        ("chat", chat_create_params.CompletionCreateParamsBase),
        ("completions", completion_create_params.CompletionCreateParamsBase),
        ("responses", response_create_params.ResponseCreateParamsBase),
        ("chat", message_create_params.MessageCreateParamsBase),
    ],
)
def test_every_field_of_the_sdks_is_known(surface: Name, params: Any) -> None:
    assert set(params.__annotations__) <= names(surface)


@pytest.mark.parametrize(("surface", "row"), OF_GENERATION, ids=lambda one: one.name if isinstance(one, Known) else one)
def test_the_surfaces_do_what_the_table_says(surface: Name, row: Known) -> None:
    parser, ask = PARSERS[surface]
    plain = wire.parse(parser, **ask)
    for value in (None, *row.neutral):
        if row.does is not Does.SERVED:
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
        value: Any = ["~"] if row.target == "stop" else 2
        assert (
            wire.parse(parser, **ask, **{row.name: value}).sampling
            == wire.parse(parser, **ask, **{row.target: value}).sampling
        )
        assert wire.refusal(parser, **ask, **{row.name: {}}).param == row.name


def docs_row(owner: str, row: Known) -> str:
    """The row as docs/api.md has it."""
    what = f"{row.does} `{row.target}`" if row.target else str(row.does)
    if row.neutral:
        shown = ", ".join(f"`{json.dumps(value)}`" for value in row.neutral)
        what += f", but for {shown}" if not row.target else f"; {shown} asks for nothing"
    if row.unless is not None:
        what += f", and beside `{row.unless[0]}: {json.dumps(row.unless[1])}`"
    return f"| `{row.name}` | {', '.join(sorted(row.surfaces))} | {owner} | {what} |"


def test_the_docs_show_the_table() -> None:
    expected = [docs_row(owner, row) for owner, rows in KNOWN.items() for row in rows]
    shown = [line for line in DOCS.read_text().splitlines() if line.startswith("| `")]
    assert shown == expected, "docs/api.md differs from the table in " + known_fields.__name__
