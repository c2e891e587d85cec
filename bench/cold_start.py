"""From a typed command to a served token: `python -m bench.cold_start`.

Starts `steploop serve` on the embedded model (or --model) anew for each run, with the files in the page cache, and
times from the start of the process: the port answers, /ready says 200, the first token of a streamed chat. Beside them
--version and --help, which answer at once. The limits are the interpreter's own start and `import torch`, which nothing
that computes with torch can pass.
"""

import argparse
import json
import socket
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path

from bench.kit import Flag, Found, answers, bench, free_port, serve_command
from bench.load import CannotRun
from bench.raw_clients import http1_request
from bench.results import Cell, table_of

POLL_S = 0.01
TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 10.0
QUESTION = {"model": "cold", "stream": True, "messages": [{"role": "user", "content": "What is a KV cache?"}]}
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


def _read_first_token(port: int) -> None:
    received = b""
    with socket.create_connection(("127.0.0.1", port), timeout=TIMEOUT_S) as connection:
        connection.sendall(http1_request("POST", "/v1/chat/completions", json.dumps(QUESTION).encode()))
        while received.count(b"data: ") < 2:  # the first event is the role alone
            data = connection.recv(65536)
            if not data:
                raise CannotRun(f"the server closed: {received[-300:]!r}", "run `steploop serve` and look")
            received += data


def _command_s(*words: str) -> float:
    start_s = time.monotonic()
    subprocess.run([sys.executable, *words], check=True, stdout=subprocess.DEVNULL)
    return time.monotonic() - start_s


def _measure(arguments: argparse.Namespace) -> Found:
    found = defaultdict[str, list[float]](list)
    for _ in range(arguments.runs):  # in turn, so that a disturbance meets all alike
        times = {name: _command_s(*words) for name, words in COMMANDS.items()} | measure(arguments.model)
        for name, seconds in times.items():
            found[name].append(seconds)
    torch_s = statistics.median(found["import torch"])
    rows: list[dict[str, Cell]] = []
    for name, seen in found.items():
        median_s = statistics.median(seen)
        spread = {"median s": round(median_s, 3), "min s": round(min(seen), 3), "max s": round(max(seen), 3)}
        rows.append({"until": name, **spread, "x import torch": round(median_s / torch_s, 2)})
    return Found([table_of("Cold start, from the start of the process", rows)])


FLAGS = (
    Flag("--model", None, "a Hugging Face directory (default: the embedded model)", more={"type": Path}),
    Flag("--runs", 5, "of each", 1),
)
main = bench("cold_start", __doc__, _measure, FLAGS)

if __name__ == "__main__":
    sys.exit(main())
