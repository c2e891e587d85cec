"""The table of framing cases, http1_framing_cases.toml: what is sent, and what must be understood of it."""

import re
import tomllib
from dataclasses import dataclass
from pathlib import Path

_TABLE = Path(__file__).with_name("http1_framing_cases.toml")
_REPEATED = re.compile(r"\{([^{}]*)\*(\d+)\}")
_SHORT = {
    "{get}": "GET /a HTTP/1.1\r\nHost: a\r\n",
    "{post}": "POST /a HTTP/1.1\r\nHost: a\r\n",
    "{chunked}": "POST /a HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n",
    "{smuggled}": "GET /smuggled HTTP/1.1\r\nHost: a\r\n\r\n",
}

LAST_REQUEST = b"GET /end HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n"
LAST = "GET /end"


@dataclass(frozen=True)
class Understood:
    """What a server made of a connection's bytes.

    Args:
        requests: those that came to their end, in the table's notation.
        end: how it went on after them. "end": the last was LAST_REQUEST; "closed" before that; a status: that refused
            what followed; "waits": for bytes of a request that has begun.
    """

    requests: tuple[str, ...]
    end: str


@dataclass(frozen=True)
class Case:
    """One connection's input. LAST_REQUEST is sent behind it: it must be neither swallowed nor doubled."""

    name: str
    data: bytes
    expected: Understood

    @property
    def theme(self) -> str:
        return self.name.partition(".")[0]

    @property
    def sent(self) -> bytes:
        return self.data + LAST_REQUEST


def noted(method: str, target: str, body: bytes) -> str:
    """A request in the table's notation: method, path and query, body as Latin-1."""
    path, _, query = target.partition("?")
    line = f"{method} {path}?{query}" if query else f"{method} {path}"
    return f"{line} {body.decode('latin-1')}" if body else line


def load_cases() -> list[Case]:
    table: dict[str, dict[str, list[str]]] = tomllib.loads(_TABLE.read_text())
    return [_case(f"{theme}.{name}", *row) for theme, rows in table.items() for name, row in rows.items()]


def _case(name: str, sent: str, *understood: str) -> Case:
    requests = tuple(_spelled_out(request) for request in understood[:-1])
    end = understood[-1]
    if end == "end":
        requests += (LAST,)
    return Case(name, _spelled_out(sent).encode("latin-1"), Understood(requests, end))


def _spelled_out(text: str) -> str:
    for short, spelled in _SHORT.items():
        text = text.replace(short, spelled)
    return _REPEATED.sub(lambda match: match[1] * int(match[2]), text)
