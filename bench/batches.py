"""Batches: `python -m bench.batches`: do they survive kill -9, and what do they cost those who wait?

Crashes: a batch of many lines runs on the null runner, and its server is killed again and again. Then each line must be
in the output once, and settled in the ledger once, with the tokens that its answer tells.

Room: requests come one by one to a server with the embedded model, in rounds with a batch running and without, in
turns. Of their times to the first token the 95th percentiles are compared, by the median of the rounds' ratios.
"""

import argparse
import http.client
import json
import os
import random
import signal
import sqlite3
import statistics
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from bench.crash import fork_server
from bench.kit import MODEL, Broken, Flag, Found, bench, free_port, running, serve_command
from bench.results import Table
from server.config import ServerConfig
from server.ledger.store import RowState
from server.observing.logs import configure_logging

MOST_TOKENS = 12
LIFE_S = (0.15, 0.6)  # from a server's start to its kill
DEADLINE_S = 300.0
OVER = ("completed", "failed", "expired", "cancelled")
DEMO = "steploop-demo"
REQUESTS = 40  # of a round
PAUSE_S = 0.02  # between two


def ask(port: int, method: str, path: str, body: Any = None, content_type: str = "application/json") -> bytes:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        content = body if isinstance(body, bytes) else None if body is None else json.dumps(body).encode()
        connection.request(method, path, content, {"content-type": content_type})
        response = connection.getresponse()
        found = response.read()
        if response.status != 200:
            raise Broken(f"{method} {path}: {response.status} {found[:300]!r}")
        return found
    finally:
        connection.close()


def begin(port: int, lines: list[dict[str, Any]], endpoint: str) -> str:
    """The id of a batch of these lines."""
    content = b"".join(json.dumps(line).encode() + b"\n" for line in lines)
    head = '--m\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--m\r\n'
    head += 'Content-Disposition: form-data; name="file"; filename="in.jsonl"\r\n\r\n'
    form = head.encode() + content + b"\r\n--m--\r\n"
    file = json.loads(ask(port, "POST", "/v1/files", form, "multipart/form-data; boundary=m"))
    body = {"input_file_id": file["id"], "endpoint": endpoint, "completion_window": "24h"}
    return str(json.loads(ask(port, "POST", "/v1/batches", body))["id"])


def survive(directory: Path, num_lines: int, num_kills: int, seed: int) -> Counter[str]:
    """Kill a batch's server so often, let it end, and check what is there.

    Raises:
        Broken: a line is missing, doubled, or billed otherwise than once.
    """
    rng, ledger = random.Random(seed), directory / "ledger.db"
    config = ServerConfig(port=0, ledger=ledger, files=directory / "files", max_queue=512)
    names = [f"line-{i}" for i in range(num_lines)]
    bodies = [{"model": MODEL, "prompt": "x", "max_tokens": rng.randint(1, MOST_TOKENS)} for _ in names]
    url, batch_id, found, num_done = "/v1/completions", "", Counter[str](), 0
    lines = [
        {"custom_id": name, "method": "POST", "url": url, "body": body}
        for name, body in zip(names, bodies, strict=True)
    ]
    for life in range(num_kills + 1):
        pid, port = fork_server(config)
        try:
            batch_id = batch_id or begin(port, lines, url)
            if life < num_kills:
                time.sleep(rng.uniform(*LIFE_S))
            batch = _batch(port, batch_id, is_awaited=life == num_kills)
            num_done = batch["request_counts"]["completed"]
            found["kills"] += life < num_kills and batch["status"] not in OVER
            if life == num_kills:
                output = ask(port, "GET", f"/v1/files/{batch['output_file_id']}/content").splitlines()
        finally:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    if batch["status"] != "completed" or num_done != num_lines:
        raise Broken(f"the batch is {batch['status']} with {num_done} of {num_lines} lines answered")
    _check(ledger, names, [json.loads(text) for text in output])
    return found + Counter(lines=num_lines)


def _batch(port: int, batch_id: str, is_awaited: bool) -> dict[str, Any]:
    end_s = time.monotonic() + DEADLINE_S
    while True:
        batch: dict[str, Any] = json.loads(ask(port, "GET", f"/v1/batches/{batch_id}"))
        if not is_awaited or batch["status"] in OVER or time.monotonic() > end_s:
            return batch
        time.sleep(0.05)


def _check(ledger: Path, names: list[str], output: list[dict[str, Any]]) -> None:
    if [one["custom_id"] for one in output] != names:
        raise Broken("the output has not each line once, in its order")
    told = {one["custom_id"]: one["response"]["body"]["usage"]["completion_tokens"] for one in output}
    with sqlite3.connect(ledger) as database:
        rows = database.execute("SELECT client_id, state, completion_tokens FROM requests").fetchall()
    if len(rows) != len(names):
        raise Broken(f"the ledger has {len(rows)} rows of {len(names)} lines")
    for name, state, num_tokens in rows:
        if (state, num_tokens) != (RowState.SETTLED, told.get(name)):
            raise Broken(f"{name} is {state} with {num_tokens} tokens, and its answer has {told.get(name)}")


def ttft_s(port: int, number: int) -> float:
    """Of one streamed request."""
    body = {"messages": [{"role": "user", "content": f"{number} What is a KV cache?"}], "max_tokens": 8, "stream": True}
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        start_s = time.perf_counter()
        connection.request("POST", "/v1/chat/completions", json.dumps(body), {"content-type": "application/json"})
        response = connection.getresponse()
        response.readline()
        found = time.perf_counter() - start_s
        response.read()
        return found
    finally:
        connection.close()


def room(directory: Path, num_rounds: int) -> Table:
    """Times to the first token beside a batch, and alone, in turns."""
    port, rows = free_port(), []
    question = {"messages": [{"role": "user", "content": "Tell me all that you know."}], "max_tokens": 200}
    body = question | {"ignore_eos": True}
    url = "/v1/chat/completions"
    with running(serve_command(port, "--files", str(directory / "files")), port):
        lines = [{"custom_id": str(i), "method": "POST", "url": url, "body": body | {"seed": i}} for i in range(50_000)]
        for number in range(num_rounds):
            alone = _p95([ttft_s(port, number * 1000 + i) for i in _paced(REQUESTS)])
            batch_id = begin(port, lines[:5000], url)
            while not json.loads(ask(port, "GET", f"/v1/batches/{batch_id}"))["request_counts"]["completed"]:
                time.sleep(0.05)
            beside = _p95([ttft_s(port, number * 1000 + 500 + i) for i in _paced(REQUESTS)])
            batch = json.loads(ask(port, "POST", f"/v1/batches/{batch_id}/cancel"))
            rows.append((alone * 1e3, beside * 1e3, beside / alone, batch["request_counts"]["completed"]))
            _batch(port, batch_id, is_awaited=True)
    rows.append(tuple(statistics.median(column) for column in zip(*rows, strict=True)))
    shown = tuple((round(a, 2), round(b, 2), round(ratio, 3), round(done)) for a, b, ratio, done in rows)
    return Table("p95 time to first token (ms), the median of all rounds last", COLUMNS, shown)


COLUMNS = ("alone", "beside a batch", "ratio", "lines meanwhile")


def _paced(num: int) -> Any:
    for i in range(num):
        time.sleep(PAUSE_S)
        yield i


def _p95(times_s: list[float]) -> float:
    return sorted(times_s)[int(0.95 * len(times_s))]


def _measure(arguments: argparse.Namespace) -> Found:
    configure_logging("critical", "text")
    tables = []
    with tempfile.TemporaryDirectory() as directory:
        begin_s = time.monotonic()
        found = survive(Path(directory), arguments.lines, arguments.kills, arguments.seed)
        duration_s = round(time.monotonic() - begin_s)
        print(f"{found['lines']} lines over {found['kills']} kills: each answered once, billed once")
        title = "kill -9 during a batch: lines that were lost, doubled, or billed otherwise than once"
        columns = ("lines", "kills", "lost or doubled", "s")
        tables.append(Table(title, columns, ((found["lines"], found["kills"], 0, duration_s),)))
        if arguments.rounds:
            tables.append(room(Path(directory), arguments.rounds))
    return Found(tables)


FLAGS = (
    Flag("--lines", 10_000, "of the batch that is killed", 1_500),
    Flag("--kills", 20, "how often", 3),
    Flag("--seed", 1, "of the moments; the machine's timing is its own"),
    Flag("--rounds", 8, "with a batch and without; 0: none", 0),
)

main = bench("batches", __doc__, _measure, FLAGS)

if __name__ == "__main__":
    sys.exit(main())
