"""From a typed command to a served token: `python -m bench.cold_start`.

Starts `steploop serve` on the embedded model (or --model) anew for each run, with the files in the page cache, and
times from the start of the process: the port answers, /ready says 200, the first token of a streamed chat. Beside them
what answers at once: --version and --help. The limits are the interpreter's own start and `import torch`, which nothing
that computes with torch can pass.
"""

import argparse
import json
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path

from bench.client import encode_request
from bench.kit import Flag, Found, free_port, run_bench, serve_command
from bench.load import CannotRun
from bench.raw_clients import http1_request
from bench.results import Cell, Table

POLL_S = 0.01
TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 10.0
QUESTION = {"model": "cold", "stream": True, "messages": [{"role": "user", "content": "What is a KV cache?"}]}


def measure(model: Path | None) -> dict[str, float]:
    """Start a server, ask it once, end it: seconds from the start of the process.

    Raises:
        CannotRun: it ended, or did not come up in time.
    """
    port = free_port()
    command = serve_command(port, "--served-model-name", "cold", *(() if model is None else ("--model", str(model))))
    start_s = time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        return {
            "port answers": _wait_until(process, port, "/health") - start_s,
            "ready": _wait_until(process, port, "/ready") - start_s,
            "first token": _first_token(port) - start_s,
        }
    finally:
        process.terminate()
        process.wait(STOP_TIMEOUT_S)


def _wait_until(process: "subprocess.Popen[bytes]", port: int, path: str) -> float:
    """The monotonic time at which GET path first answers 200."""
    request = encode_request("GET", path, "localhost", {"connection": "close"})
    end_s = time.monotonic() + TIMEOUT_S
    while time.monotonic() < end_s:
        if process.poll() is not None:
            raise CannotRun(f"the server ended with {process.returncode}", "run `steploop serve` and look")
        try:
            with socket.create_connection(("127.0.0.1", port), timeout=TIMEOUT_S) as connection:
                connection.sendall(request)
                if connection.recv(64).startswith(b"HTTP/1.1 200"):
                    return time.monotonic()
        except OSError:
            pass  # it does not listen yet
        time.sleep(POLL_S)
    raise CannotRun(f"{path} did not answer within {TIMEOUT_S:g} s", "run `steploop serve` and look")


def _first_token(port: int) -> float:
    """The monotonic time at which the first text of a streamed chat is here."""
    received = b""
    with socket.create_connection(("127.0.0.1", port), timeout=TIMEOUT_S) as connection:
        connection.sendall(http1_request("POST", "/v1/chat/completions", json.dumps(QUESTION).encode()))
        while received.count(b"data: ") < 2:  # the first event is the role alone
            data = connection.recv(65536)
            if not data:
                raise CannotRun(f"the server closed: {received[-300:]!r}", "run `steploop serve` and look")
            received += data
    return time.monotonic()


def _run_s(*words: str) -> float:
    """What the interpreter takes for it, from nothing."""
    start_s = time.monotonic()
    subprocess.run([sys.executable, *words], check=True, stdout=subprocess.DEVNULL)
    return time.monotonic() - start_s


COMMANDS = {
    "python -c pass": ("-c", "pass"),
    "import torch": ("-c", "import torch"),
    "--version": ("-m", "server", "--version"),
    "--help": ("-m", "server", "--help"),
}


def _measure(arguments: argparse.Namespace) -> Found:
    found: dict[str, list[float]] = {}
    for _ in range(arguments.runs):  # in turn, so that a disturbance meets all alike
        times = {name: _run_s(*words) for name, words in COMMANDS.items()} | measure(arguments.model)
        for name, seconds in times.items():
            found.setdefault(name, []).append(seconds)
    torch_s = statistics.median(found["import torch"])
    rows: list[tuple[Cell, ...]] = []
    for name, seen in found.items():
        median_s = statistics.median(seen)
        rows.append((name, *(round(s, 3) for s in (median_s, min(seen), max(seen))), round(median_s / torch_s, 2)))
    columns = ("until", "median s", "min s", "max s", "x import torch")
    return Found([Table("Cold start, from the start of the process", columns, tuple(rows))])


FLAGS = (
    Flag("--model", None, "a Hugging Face directory (default: the embedded model)", more={"type": Path}),
    Flag("--runs", 5, "of each", 1),
)

if __name__ == "__main__":
    sys.exit(run_bench("cold_start", __doc__, _measure, FLAGS))
