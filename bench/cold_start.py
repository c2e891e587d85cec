"""From a typed command to a served token: `python -m bench.cold_start`.

Starts `steploop serve` on the embedded model (or --model) anew for each run, with the files in the page cache, and
times from the start of the process: the port answers, /ready says 200, the first token of a streamed chat. Beside them
--version and --help, which answer at once. The limits are the interpreter's own start and `import torch`, which nothing
that computes with torch can pass.

With --wakes, a model on demand: two entries of [[models]] that take turns in memory for one, each with a directory for
its keys and values. In each round the first token of a long prompt from the awake model, which has its beginning
cached; of a short one, from the model that has to be loaded; and of the long one again, from the directory. Beside
them the time to read the weights' files from the page cache.

With --model FILE.gguf, what a quantised file promises: ready at most 1.2 times a cold read of the file later than the
embedded model, and at most 300 MiB beside the file and the KV cache. The process tells systemd's socket when it is
ready: to ask again and again would delay it. A first start compiles kernels and times steps, and does not count.
"""

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.kit import Flag, Found, answers, bench, free_port, resident_bytes, running, serve_command
from bench.load import CannotRun
from bench.raw_clients import http1_request
from bench.results import Cell, table_of

POLL_S = 0.01
TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 10.0
QUESTION = {"model": "cold", "stream": True, "messages": [{"role": "user", "content": "What is a KV cache?"}]}
KV_BYTES = 64 * 2**20
BESIDE_MIB, READS = 300, 1.2
PREFIX = " ".join(f"Line {i} says {i * i}." for i in range(120))
COMMANDS = {
    "python -c pass": ("-c", "pass"),
    "import torch": ("-c", "import torch"),
    "--version": ("-m", "server", "--version"),
    "--help": ("-m", "server", "--help"),
}


def measure(model: Path | None) -> dict[str, float]:
    """Start a server, ask it once, end it: seconds from the start of the process.

    Raises:
        CannotRun: it ended, or did not come up in time.
    """
    port = free_port()
    command = serve_command(port, "--served-model-name", "cold", *(() if model is None else ("--model", str(model))))
    start_s = time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    found = {}
    try:
        for name, path in (("port answers", "/health"), ("ready", "/ready")):
            while not answers(port, path):
                if process.poll() is not None or time.monotonic() > start_s + TIMEOUT_S:
                    raise CannotRun(f"{path} did not answer within {TIMEOUT_S:g} s", "run `steploop serve` and look")
                time.sleep(POLL_S)
            found[name] = time.monotonic() - start_s
        _read_first_token(port)
        return found | {"first token": time.monotonic() - start_s}
    finally:
        process.terminate()
        process.wait(STOP_TIMEOUT_S)


def _read_first_token(port: int, question: Mapping[str, Any] = QUESTION) -> None:
    received = b""
    with socket.create_connection(("127.0.0.1", port), timeout=TIMEOUT_S) as connection:
        connection.sendall(http1_request("POST", "/v1/chat/completions", json.dumps(question).encode()))
        while received.count(b"data: ") < 2:  # the first event is the role alone
            data = connection.recv(65536)
            if not data:
                raise CannotRun(f"the server closed: {received[-300:]!r}", "run `steploop serve` and look")
            received += data


@dataclass(frozen=True, slots=True)
class Start:
    """Args: ready_s: from the start of the process; ready_bytes, asked_bytes: resident then, and after an answer."""

    ready_s: float
    ready_bytes: int
    asked_bytes: int


def start(model: Path | None) -> Start:
    """Start a server, and ask it once.

    Raises:
        CannotRun: it was not ready in time.
    """
    port, settings = free_port(), ("--kv-memory", str(KV_BYTES), "--max-model-len", "512", "--max-sequences", "4")
    command = serve_command(port, "--served-model-name", "cold", *settings)
    command += [] if model is None else ["--model", str(model)]
    with tempfile.TemporaryDirectory() as directory, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as told:
        told.bind(f"{directory}/ready")
        told.settimeout(TIMEOUT_S)
        environment = os.environ | {"NOTIFY_SOCKET": f"{directory}/ready"}
        start_s = time.monotonic()
        process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            while b"READY=1" not in told.recv(4096):
                pass
            ready_s, ready_bytes = time.monotonic() - start_s, resident_bytes(process.pid)
            _read_first_token(port)
            return Start(ready_s, ready_bytes, resident_bytes(process.pid))
        except TimeoutError as error:
            raise CannotRun(f"it was not ready within {TIMEOUT_S:g} s", "run `steploop serve` and look") from error
        finally:
            process.terminate()
            process.wait(STOP_TIMEOUT_S)


def _drop(file: Path) -> None:
    """Take a file out of the page cache."""
    with file.open("rb") as opened:
        os.fsync(opened.fileno())  # pages that are not written yet would stay
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _read_s(file: Path) -> float:
    buffer, start_s = bytearray(2**24), time.monotonic()
    with file.open("rb", buffering=0) as opened:
        while opened.readinto(buffer):
            pass
    return time.monotonic() - start_s


def _measure_gguf(file: Path, num_runs: int) -> Found:
    start(file)
    seconds, resident = defaultdict[str, list[float]](list), defaultdict[str, list[float]](list)
    size_bytes = file.stat().st_size
    for _ in range(num_runs):
        _drop(file)
        seconds["a cold read of the file"].append(_read_s(file))
        seconds["the embedded model is ready"].append(start(None).ready_s)
        for name in ("not in the page cache", "in the page cache"):
            if name.startswith("not"):
                _drop(file)
            found = start(file)
            seconds[f"ready, the file {name}"].append(found.ready_s)
            resident["ready"].append(found.ready_bytes - size_bytes)
            resident["after an answer, less all of the KV cache"].append(found.asked_bytes - size_bytes - KV_BYTES)
    medians = {name: statistics.median(seen) for name, seen in seconds.items()}
    read_s, embedded_s, cold_s, warm_s = medians.values()
    limit_s = embedded_s + READS * read_s
    times: list[dict[str, Cell]] = [
        {
            "until": name,
            "median s": round(median_s, 2),
            "min s": round(min(seconds[name]), 2),
            "promised": "",
            "kept": "",
        }
        for name, median_s in medians.items()
    ]
    for row, found_s in zip(times[2:], (cold_s, warm_s), strict=True):
        row |= {"promised": f"{limit_s:.2f}", "kept": _kept(found_s <= limit_s)}
    sizes: list[dict[str, Cell]] = [
        {
            "when": name,
            "MiB beside it": round(most / 2**20),
            "promised": BESIDE_MIB,
            "kept": _kept(most <= BESIDE_MIB * 2**20),
        }
        for name, most in ((name, max(seen)) for name, seen in resident.items())
    ]
    title = f"a GGUF file of {size_bytes / 2**20:.0f} MiB"
    return Found([table_of(f"Starts of {title}", times), table_of(f"Resident memory beside {title}", sizes)])


def _kept(is_kept: bool) -> str:
    return "yes" if is_kept else "no"


def _command_s(*words: str) -> float:
    start_s = time.monotonic()
    subprocess.run([sys.executable, *words], check=True, stdout=subprocess.DEVNULL)
    return time.monotonic() - start_s


def _measure_wakes(path: Path, num_rounds: int) -> Found:
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    size = sum(one.stat().st_size for one in files)
    entry = 'path = "{}"\nsettings = {{ kv_memory = "256MiB", max_model_len = 4096, max_sequences = 4 }}\n'
    found = defaultdict[str, list[float]](list)

    def first_token(name: str, model: str, text: str) -> None:
        begun_s = time.monotonic()
        messages = [{"role": "user", "content": text}]
        _read_first_token(port, {"model": model, "stream": True, "max_tokens": 1, "messages": messages})
        if name:
            found[name].append(time.monotonic() - begun_s)

    def read_weights() -> None:
        found["weights are read"].append(sum(map(_read_s, files)))

    with tempfile.TemporaryDirectory() as directory:
        config, port = Path(directory) / "models.toml", free_port()
        config.write_text("".join(f'[[models]]\nname = "{name}"\n{entry.format(path)}' for name in "ab"))
        kv = ("--kv-offload-memory", "512MiB", "--kv-offload-dir", directory)
        command = serve_command(port, "--config", str(config), "--models-memory", f"{size + 2**30}", *kv)
        with running(command, port, "/ready"):
            first_token("", "a", PREFIX)
            for i in range(num_rounds):
                first_token("warm prefix", "a", PREFIX)
                read_weights()
                first_token("", "b", f"{i} is a number.")
                first_token("wake and first token", "a", f"{i} is no letter.")
                first_token("prefix after waking", "a", PREFIX)
                first_token("the same size, not known", "a", f"{i}. {PREFIX}")
    return Found(
        [table_of(f"Waking a model of {size / 1e9:.2f} GB on demand", _rows(found, "weights are read"))], name="wakes"
    )


def _measure(arguments: argparse.Namespace) -> Found:
    if arguments.wakes:
        if arguments.model is None:
            raise CannotRun("--wakes is for a model with files of its own", "--model DIR")
        return _measure_wakes(arguments.model, arguments.runs)
    if arguments.model is not None and arguments.model.is_file():
        return _measure_gguf(arguments.model, arguments.runs)
    found = defaultdict[str, list[float]](list)
    for _ in range(arguments.runs):  # in turn, so that a disturbance meets all alike
        times = {name: _command_s(*words) for name, words in COMMANDS.items()} | measure(arguments.model)
        for name, seconds in times.items():
            found[name].append(seconds)
    return Found([table_of("Cold start, from the start of the process", _rows(found, "import torch"))])


def _rows(found: Mapping[str, Sequence[float]], base: str) -> list[dict[str, Cell]]:
    base_s = statistics.median(found[base])
    rows: list[dict[str, Cell]] = []
    for name, seen in found.items():
        median_s = statistics.median(seen)
        spread = {"median s": round(median_s, 3), "min s": round(min(seen), 3), "max s": round(max(seen), 3)}
        rows.append({"until": name, **spread, f"x {base}": round(median_s / base_s, 2)})
    return rows


FLAGS = (
    Flag("--model", None, "a Hugging Face directory or GGUF file (default: the embedded model)", more={"type": Path}),
    Flag("--runs", 5, "of each", 1),
    Flag("--wakes", None, "measure models on demand instead", more={"action": "store_const", "const": True}),
)
main = bench("cold_start", __doc__, _measure, FLAGS)

if __name__ == "__main__":
    sys.exit(main())
