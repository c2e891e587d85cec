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
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from pathlib import Path

from bench.kit import free_port
from bench.load import CannotRun
from bench.results import RESULTS_DIR, Table, command_line, print_tables, write_result

NUM_RUNS = 5
POLL_S = 0.01
TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 10.0
QUESTION = "What is a KV cache?"


@dataclass(frozen=True, slots=True)
class ColdStart:
    """Seconds from the start of the process."""

    listening_s: float
    ready_s: float
    first_token_s: float


def measure(model: Path | None) -> ColdStart:
    """Start a server, ask it once, end it.

    Raises:
        CannotRun: it ended, or did not come up in time.
    """
    port = free_port()
    command = [sys.executable, "-m", "server", "serve", "--port", str(port), "--served-model-name", "cold"]
    if model is not None:
        command += ["--model", str(model)]
    start_s = time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        listening_s = _wait_until(process, port, "/health") - start_s
        ready_s = _wait_until(process, port, "/ready") - start_s
        first_token_s = _first_token(port) - start_s
    finally:
        process.terminate()
        process.wait(STOP_TIMEOUT_S)
    return ColdStart(listening_s, ready_s, first_token_s)


def _wait_until(process: "subprocess.Popen[bytes]", port: int, path: str) -> float:
    """The monotonic time at which GET path first answers 200."""
    request = f"GET {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n".encode()
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
    question = {"model": "cold", "stream": True, "messages": [{"role": "user", "content": QUESTION}]}
    body = json.dumps(question).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n\r\n".encode()
    received = b""
    with socket.create_connection(("127.0.0.1", port), timeout=TIMEOUT_S) as connection:
        connection.sendall(head + body)
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


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.cold_start", description=__doc__)
    parser.add_argument("--model", type=Path, help="a Hugging Face directory (default: the embedded model)")
    parser.add_argument("--runs", type=int, default=NUM_RUNS)
    parser.add_argument("--json", type=Path, default=RESULTS_DIR / "cold_start.json")
    arguments = parser.parse_args(argv)
    runs, bare, torch, version, usage = [], [], [], [], []
    for _ in range(arguments.runs):  # in turn, so that a disturbance meets all alike
        bare.append(_run_s("-c", "pass"))
        torch.append(_run_s("-c", "import torch"))
        version.append(_run_s("-m", "server", "--version"))
        usage.append(_run_s("-m", "server", "--help"))
        runs.append(measure(arguments.model))
    columns = list(zip(*map(astuple, runs), strict=True))
    labels = ("port answers", "ready", "first token")
    rows = [
        ("python -c pass", bare),
        ("import torch", torch),
        ("--version", version),
        ("--help", usage),
        *zip(labels, columns, strict=True),
    ]
    table = Table(
        title="Cold start, from the start of the process",
        columns=("until", "median s", "min s", "max s", "x import torch"),
        rows=tuple(
            (
                label,
                round(statistics.median(times), 3),
                round(min(times), 3),
                round(max(times), 3),
                round(statistics.median(times) / statistics.median(torch), 2),
            )
            for label, times in rows
        ),
    )
    print_tables([table])
    write_result(arguments.json, "cold_start", command_line("python -m bench.cold_start", argv), [table])
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
