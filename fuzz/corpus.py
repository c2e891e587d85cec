"""The saved inputs: one text file for each target, one input a line, its bytes escaped as in Python."""

from collections.abc import Iterable
from pathlib import Path

DIRECTORY = Path(__file__).parent / "corpus"


def load(target: str) -> list[bytes]:
    lines = (DIRECTORY / f"{target}.txt").read_text("ascii").splitlines()
    return [line.encode("ascii").decode("unicode_escape").encode("latin-1") for line in lines]


def save(target: str, inputs: Iterable[bytes]) -> None:
    """Shortest first, each once."""
    ordered = sorted(set(inputs), key=lambda data: (len(data), data))
    lines = [data.decode("latin-1").encode("unicode_escape").decode("ascii") + "\n" for data in ordered]
    (DIRECTORY / f"{target}.txt").write_text("".join(lines), "ascii")
