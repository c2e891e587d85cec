"""The tables of docs/api.md, made of the code: `make tables` writes them, test_known_fields.py holds them to it."""

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

from server.api.fields import StreamOptions
from server.api.known_fields import GENERATION, KNOWN, Known, Name
from server.routes import ROUTES

DOCS = Path(__file__).parents[3] / "docs" / "api.md"
BODIES: dict[Name, tuple[Any, ...]] = {}  # by surface: what is taken, a body's type or the names of a form's fields
PATHS: dict[Name, tuple[str, ...]] = {}
for _path, _methods in ROUTES.items():
    for _told in (route.operation for route in _methods.values()):
        if _told is not None and _told.surface is not None:
            _known = BODIES.get(_told.surface, ())
            _body = dict.fromkeys(_told.body) if isinstance(_told.body, tuple) else _told.body
            BODIES[_told.surface] = _known if _body in _known else (*_known, _body)
            PATHS[_told.surface] = (*PATHS.get(_told.surface, ()), _path)
ROWS = [(surface, row) for rows in KNOWN.values() for row in rows for surface in sorted(row.surfaces)]
OURS = "steploop"  # whose a served field is that no row of the docs names
ALL = "all that generate"  # in the docs, stands for the surfaces of GENERATION
_ROUTES, _FIELDS = "| Route | Methods | Right | Fields of |", "| Field | Surface | Of | Here |"


def served(surface: Name) -> set[str]:
    """The fields of its body, less those that are there to be refused."""
    options = StreamOptions.__struct_fields__ if surface in ("chat", "completions") else ()
    declared = {name for body in BODIES[surface] for name in getattr(body, "__struct_fields__", body)}
    declared |= {f"stream_options.{name}" for name in options}
    return declared - {row.name for one, row in ROWS if one == surface} - {"sent_as"}


def written(docs: str) -> str:
    """The page with its tables as the code has them. Whose a served field is, and the order of these, stay."""
    lines = docs.splitlines()
    for head, rows in ((_ROUTES, _routes()), (_FIELDS, _fields(docs))):
        start = lines.index(head) + 2
        end = next((i for i in range(start, len(lines)) if not lines[i].startswith("|")), len(lines))
        lines[start:end] = rows
    return "\n".join(lines) + "\n"


def _routes() -> list[str]:
    shown = ROUTES
    surfaces = {path: name for name, paths in PATHS.items() for path in paths}
    rights = {
        path: {str(one.scope.value) if one.scope else "none" for one in route.values()} for path, route in shown.items()
    }
    rows = ((path, ", ".join(sorted(shown[path])), ", ".join(sorted(rights[path]))) for path in sorted(shown))
    return [f"| `{path}` | {methods} | {right} | {surfaces.get(path, '')} |" for path, methods, right in rows]


def _fields(docs: str) -> list[str]:
    old = [line.strip("| ").split(" | ") for line in docs.splitlines() if line.endswith("| served |")]
    owners = {name.strip("`"): owner for name, _, owner, _ in old}
    where: dict[str, list[Name]] = {}
    for surface in BODIES:
        for name in served(surface):
            where.setdefault(name, []).append(surface)
    names = [name for name in owners if name in where] + sorted(where.keys() - owners.keys())
    rows = [f"| `{name}` | {_named(where[name])} | {owners.get(name, OURS)} | served |" for name in names]
    return rows + [_row(owner, row) for owner, known in KNOWN.items() for row in known]


def _named(surfaces: Collection[Name]) -> str:
    has_all = set(surfaces) >= GENERATION
    return ", ".join([*([ALL] if has_all else ()), *sorted(set(surfaces) - GENERATION if has_all else surfaces)])


def _row(owner: str, row: Known) -> str:
    what = f"{row.does} `{row.target}`" if row.target else str(row.does)
    if row.neutral:
        shown = ", ".join(f"`{json.dumps(value)}`" for value in row.neutral)
        what += f", but for {shown}" if not row.target else f"; {shown} asks for nothing"
    if row.unless is not None:
        what += f", and beside `{row.unless[0]}: {json.dumps(row.unless[1])}`"
    return f"| `{row.name}` | {_named(row.surfaces)} | {owner} | {what} |"


if __name__ == "__main__":
    DOCS.write_text(written(DOCS.read_text()))
