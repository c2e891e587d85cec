"""`python -m fuzz [--seconds S] [--save] [TARGET ...]`: look for bytes that break a target, so long for each."""

import argparse
import importlib.util
import subprocess
import sys
import tempfile
from pathlib import Path

from fuzz.run import TARGETS, load_inputs, save_inputs

_FOUND = Path(__file__).parent / "found"
_MAX_BYTES = 4096  # of an input that it makes itself; saved ones may be longer
_INPUT_TIMEOUT_S = 20


def main() -> int:
    arguments = _parser().parse_args()
    if importlib.util.find_spec("atheris") is None:
        print("error: atheris is not installed", "fix: make fuzz", sep="\n")
        return 1
    failed = [name for name in arguments.target or TARGETS if not _fuzz(name, arguments.seconds, arguments.save)]
    if failed:
        print(f"found: {', '.join(failed)}; the inputs are under {_FOUND}, `python -m fuzz.run TARGET FILE` tries one")
    return len(failed)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m fuzz", description="Look for bytes that break a target.")
    parser.add_argument("target", nargs="*", type=_target, help=f"of {', '.join(TARGETS)}; default: all")
    parser.add_argument("--seconds", type=int, default=60, help="for each target (default: %(default)s)")
    parser.add_argument("--save", action="store_true", help="keep what reaches new code in fuzz/corpus")
    return parser


def _target(name: str) -> str:
    if name not in TARGETS:
        raise argparse.ArgumentTypeError(f"{name} is none of {', '.join(TARGETS)}")
    return name


def _fuzz(target: str, seconds: int, keeps: bool) -> bool:
    """Whether it held."""
    _FOUND.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as directory:
        inputs = Path(directory) / "inputs"
        inputs.mkdir()
        for number, data in enumerate(load_inputs(target)):
            (inputs / str(number)).write_bytes(data)
        has_held = _run(target, inputs, f"-max_total_time={seconds}", f"-max_len={_MAX_BYTES}")
        if keeps and has_held:
            least = Path(directory) / "least"
            least.mkdir()
            if _run(target, "-merge=1", least, inputs):
                save_inputs(target, [path.read_bytes() for path in least.iterdir()])
    return has_held


def _run(target: str, *arguments: str | Path) -> bool:
    limits = (f"-timeout={_INPUT_TIMEOUT_S}", f"-artifact_prefix={_FOUND}/{target}-", "-print_final_stats=0")
    command = [sys.executable, "-m", "fuzz.run", target, *map(str, arguments), *limits]
    return subprocess.run(command, check=False).returncode == 0


if __name__ == "__main__":
    sys.exit(main())
