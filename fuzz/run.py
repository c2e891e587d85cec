"""`python -m fuzz.run TARGET ARGUMENT ...`: one target in libFuzzer, which takes the arguments and ends the process."""

import importlib
import shlex
import sys
from collections.abc import Callable

TARGETS = ("http1", "http1_head", "frame_gate", "http2", "http2_data", "connection", "proxy_protocol")


def load_check(target: str) -> Callable[[bytes], None]:
    check: Callable[[bytes], None] = importlib.import_module(f"fuzz.{target}").check
    return check


def main() -> None:
    import atheris

    target, *arguments = sys.argv[1:]
    with atheris.instrument_imports(include=["server", "h2", "hpack"]):
        check = load_check(target)
    # its first word is what -merge starts processes with, through a shell
    itself = shlex.join([sys.executable, "-m", "fuzz.run", target])
    atheris.Setup([itself, *arguments], check)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
