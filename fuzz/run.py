"""`python -m fuzz.run TARGET ARGUMENT ...`: one target in libFuzzer, which takes the arguments and ends the process.

Saved inputs are one text file for each target, one input a line, its bytes escaped as in Python.
"""

import importlib
import shlex
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

TARGETS = ("http1", "http1_head", "http2", "http2_data", "connection", "proxy_protocol")


CORPUS = Path(__file__).parent / "corpus"


def load_inputs(target: str) -> list[bytes]:
    lines = (CORPUS / f"{target}.txt").read_text("ascii").splitlines()
    return [line.encode("ascii").decode("unicode_escape").encode("latin-1") for line in lines]


def save_inputs(target: str, inputs: Iterable[bytes]) -> None:
    """Shortest first, each once."""
    ordered = sorted(set(inputs), key=lambda data: (len(data), data))
    lines = [data.decode("latin-1").encode("unicode_escape").decode("ascii") + "\n" for data in ordered]
    (CORPUS / f"{target}.txt").write_text("".join(lines), "ascii")


def load_check(target: str) -> Callable[[bytes], None]:
    check: Callable[[bytes], None] = importlib.import_module(f"fuzz.{target}").check
    return check


def main() -> None:
    import atheris

    target, *arguments = sys.argv[1:]
    with atheris.instrument_imports(include=["server", "hpack"]):
        check = load_check(target)
    # its first word is what -merge starts processes with, through a shell
    itself = shlex.join([sys.executable, "-m", "fuzz.run", target])
    atheris.Setup([itself, *arguments], check)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
