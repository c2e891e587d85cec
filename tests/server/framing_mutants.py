"""Cases that nobody wrote: those of the table, with bytes and lines put in, taken out, repeated or exchanged."""

import random
from collections.abc import Callable, Sequence

from tests.server.framing_cases import Case, Understood

_MAX_CHANGES = 2
_MAX_BYTES = 400  # of a case to begin with
_PIECES = (
    *(bytes([byte]) for byte in b"\r\n \t\0\x01\x0b\x0c\x1f\x7f\x80\xa0\xff:;,\"'()<>[]{}\\/?#%@=+-_.0129aAz"),
    b"\r\n",
    b"0\r\n\r\n",
    b"3\r\nabc\r\n",
    b"chunked",
    b" HTTP/1.1",
    b"Content-Length: 3\r\n",
    b"Transfer-Encoding: chunked\r\n",
    b"Connection: close\r\n",
    b"Expect: 100-continue\r\n",
    b"GET /x HTTP/1.1\r\nHost: a\r\n\r\n",
)


def mutants(cases: Sequence[Case], count: int, seed: int, read: Callable[[bytes], Understood]) -> list[Case]:
    """So many different ones, of cases that are accepted; the same for the same seed.

    Args:
        read: what is expected of such bytes.
    """
    origins = [case for case in cases if len(case.data) <= _MAX_BYTES and case.expected.end in ("end", "closed")]
    chance = random.Random(seed)
    found: dict[bytes, Case] = {}
    while len(found) < count:
        data = chance.choice(origins).data
        for _ in range(chance.randint(1, _MAX_CHANGES)):
            data = chance.choice(_CHANGES)(data, chance)
        bare = Case(f"mutant.{len(found)}", data, Understood((), ""))
        found.setdefault(data, Case(bare.name, data, read(bare.sent)))
    return list(found.values())


def _insert(data: bytes, chance: random.Random) -> bytes:
    position = chance.randint(0, len(data))
    return data[:position] + chance.choice(_PIECES) + data[position:]


def _replace(data: bytes, chance: random.Random) -> bytes:
    position = chance.randint(0, len(data))
    return data[:position] + chance.choice(_PIECES) + data[position + 1 :]


def _remove(data: bytes, chance: random.Random) -> bytes:
    position = chance.randint(0, len(data))
    return data[:position] + data[position + chance.randint(1, 3) :]


def _repeat_line(data: bytes, chance: random.Random) -> bytes:
    lines = data.split(b"\r\n")
    lines.insert(chance.randint(0, len(lines)), chance.choice(lines))
    return b"\r\n".join(lines)


def _move_line(data: bytes, chance: random.Random) -> bytes:
    lines = data.split(b"\r\n")
    line = lines.pop(chance.randrange(len(lines)))
    lines.insert(chance.randint(0, len(lines)), line)
    return b"\r\n".join(lines)


_CHANGES = (_insert, _replace, _remove, _repeat_line, _move_line)
