"""What a hop through the gateway adds, beside haproxy in the same run: `python -m bench.gateway`.

One server with a null model, asked directly, through haproxy, through SGLang's router if there is an `smg`, and through
a gateway ([[models]], with a ledger and without), each over one kept HTTP/1.1 connection and HTTP/2 behind it. They
take turns, round by round, and what a hop adds is the difference between the quantiles of all rounds. A prompt is a
short chat's; the answer streams a few tokens, as fast as the server steps. `first` is from the request's last byte to
the first event with text, `last` to the end of the stream.

Then conversations with three servers of the embedded model, through the gateway's choice and through haproxy's round
robin, beside one server that has them all: cached prompt tokens and the median first token. Then clients that leave at
random moments, in lots: how long until the upstream behind the gateway holds nothing of a lot, and how many steps it
has computed for each client beyond the tokens that had reached it.
"""

import argparse
import contextlib
import http.client
import os
import random
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import msgspec

from bench.kit import MODEL, Flag, Found, bench, free_port, null_server_command, running, serve_command
from bench.load import CannotRun
from bench.results import Table, percentile, table_of

HAPROXY = """\
defaults
    mode http
    timeout connect 2s
    timeout client 1h
    timeout server 1h
    option http-no-delay
frontend front
    bind 127.0.0.1:{front}
    default_backend back
backend back
    http-reuse safe
    server one 127.0.0.1:{back} proto h2
"""
MODELS = '[[models]]\nname = "{model}"\nprotocol = "h2"\nupstreams = [{{ url = "http://127.0.0.1:{back}" }}]\n'
DEMO = "steploop-demo"
NUM_TURNS = 4  # of a conversation
BEGIN = "What is a KV cache, and what is a block of it? " * 110
ONE_MEMORY, THIRD_MEMORY = "96MiB", "32MiB"  # of KV caches: all conversations fit in one, or in three together
ANSWER = "A KV cache stores the keys and values of every layer. " * 4
LOT = 50  # clients that leave at once
STEPS_PER_S = 100
NUM_TOKENS = 8
NUM_EACH = 20  # requests of a turn
QUANTILES = (50, 99)


class Client:
    """One connection that asks again and again."""

    def __init__(self, port: int, max_tokens: int = NUM_TOKENS, request_id: str = "r") -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=10)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        body = {
            "model": MODEL,
            "messages": [{"role": "user", "content": "What is a KV cache?"}],
            "max_tokens": max_tokens,
            "ignore_eos": True,
            "stream": True,
        }
        content = msgspec.json.encode(body)
        head = "POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"
        head += f"x-request-id: {request_id}\r\ncontent-length: {len(content)}\r\n\r\n"
        self._request = head.encode() + content

    def ask(self) -> tuple[float, float]:
        """Milliseconds to the first text and to the end.

        Raises:
            CannotRun: that is no answer.
        """
        self._socket.sendall(self._request)
        begun_s, received, first_s = time.perf_counter(), b"", 0.0
        while not received.endswith(b"\r\n0\r\n\r\n"):
            chunk = self._socket.recv(65536)
            received += chunk
            if not first_s and received.count(b'"content":') > 1:  # the first has the role alone
                first_s = time.perf_counter()
            if not chunk or not received.startswith(b"HTTP/1.1 200"[: len(received)]):
                raise CannotRun(f"The answer is {received[:200]!r}.", "run the server alone and look")
        return (first_s - begun_s) * 1e3, (time.perf_counter() - begun_s) * 1e3

    def send(self) -> None:
        self._socket.sendall(self._request)

    def leave(self, num_reads: int) -> int:
        """Close the connection after so many reads of the answer. Returns how many tokens have come."""
        received = b"".join(self._socket.recv(65536) for _ in range(num_reads))
        with contextlib.suppress(BlockingIOError):
            received += self._socket.recv(1 << 20, socket.MSG_DONTWAIT)
        self.close()
        return max(0, received.count(b'"content":') - 1)

    def close(self) -> None:
        self._socket.close()


@contextmanager
def ways(directory: Path) -> Iterator[dict[str, int]]:
    """The ports that are asked, by name."""
    back, ports = free_port(), {name: free_port() for name in ("haproxy", "gateway", "gateway, ledger")}
    haproxy = directory / "haproxy.cfg"
    haproxy.write_text(HAPROXY.format(front=ports["haproxy"], back=back))
    models = directory / "gateway.toml"
    models.write_text(MODELS.format(model=MODEL, back=back))
    relay = ("--config", str(models))
    commands = {
        "haproxy": ["haproxy", "-db", "-f", str(haproxy)],
        "gateway": serve_command(ports["gateway"], *relay),
        "gateway, ledger": serve_command(ports["gateway, ledger"], *relay, "--ledger", str(directory / "ledger.db")),
    }
    if (smg := shutil.which("smg")) is not None:  # SGLang's router: pip install smg
        ports["smg"] = port = free_port()
        flags = ("--policy", "cache_aware", "--prometheus-port", str(free_port()), "--log-level", "warn")
        commands["smg"] = [smg, "launch", "--port", str(port), "--worker-urls", f"http://127.0.0.1:{back}", *flags]
    with ExitStack() as stack:
        stack.enter_context(running(null_server_command(back, "--step-rate", "0"), back))
        for name, command in commands.items():
            path = "/readiness" if name == "smg" else "/v1/models"
            stack.enter_context(running(command, ports[name], path))
        yield {"direct": back, **ports}


def measure(arguments: argparse.Namespace) -> Found:
    parts = {"hop": measure_hop, "conversations": measure_conversations, "cancels": measure_cancels}
    tables = [measure_part(arguments) for name, measure_part in parts.items() if arguments.only in (None, name)]
    config = {name: getattr(arguments, name) for name in ("rounds", "talks", "cancels")}
    return Found(tables, config | {"load_average": os.getloadavg()[0]})  # others' work lengthens every way


def measure_hop(arguments: argparse.Namespace) -> Table:
    firsts: dict[str, list[float]] = {}
    lasts: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as directory, ways(Path(directory)) as ports:
        for i in range(arguments.rounds + 1):
            for name, port in ports.items():  # a connection for each turn: servers close one after many requests
                with closing(Client(port)) as client:
                    _, *told = [client.ask() for _ in range(NUM_EACH + 1)]
                if i:  # the first warms up
                    firsts.setdefault(name, []).extend(first for first, _ in told)
                    lasts.setdefault(name, []).extend(last for _, last in told)
    rows = []
    for name in firsts:
        row: dict[str, str | float | None] = {"way": name}
        for what, found in (("first", firsts), ("last", lasts)):
            for q in QUANTILES:
                value, direct = percentile(found[name], q), percentile(found["direct"], q)
                assert value is not None
                assert direct is not None
                row[f"{what} p{q} ms"] = round(value, 3)
                row[f"{what} adds p{q} ms"] = round(value - direct, 3)
        rows.append(row)
    note = f"{arguments.rounds * NUM_EACH} requests each way, {NUM_TOKENS} tokens; goals: 1 ms more at p50, 3 ms at p99"
    return table_of("A hop through the gateway", rows, note=note)


def measure_conversations(arguments: argparse.Namespace) -> Table:
    """Turn by turn, one conversation after another; each way begins with servers that know nothing."""
    with tempfile.TemporaryDirectory() as directory, ExitStack() as stack:
        backs = [free_port() for _ in range(4)]
        for port, memory in zip(backs, (ONE_MEMORY, *[THIRD_MEMORY] * 3), strict=True):
            command = serve_command(port, "--threads", "1", "--kv-memory", memory)
            stack.enter_context(running(command, port, "/ready"))
        ways = {"one server": backs[0], "gateway": free_port(), "round robin": free_port()}
        urls = ", ".join(f'{{ url = "http://127.0.0.1:{port}" }}' for port in backs[1:])
        models, haproxy = Path(directory) / "gateway.toml", Path(directory) / "haproxy.cfg"
        models.write_text(f'[[models]]\nname = "{DEMO}"\nprotocol = "h2"\nupstreams = [{urls}]\n')
        head, line = HAPROXY.format(front=ways["round robin"], back=0).rsplit("    server", 1)
        servers = "".join(
            "    server" + line.replace("one 127.0.0.1:0", f"s{port} 127.0.0.1:{port}") for port in backs[1:]
        )
        haproxy.write_text(f"{head}    balance roundrobin\n{servers}")
        stack.enter_context(running(serve_command(ways["gateway"], "--config", str(models)), ways["gateway"]))
        stack.enter_context(running(["haproxy", "-db", "-f", str(haproxy)], ways["round robin"]))
        rows: list[dict[str, Any]] = []
        for name, port in ways.items():
            for back in backs:
                request_json(back, "POST", "/admin/cache/clear")
            firsts, num_cached, num_prompt = talk(port, arguments.talks)
            median = percentile(firsts, 50)
            assert median is not None
            row = {"way": name, "first p50 ms": round(median, 2), "prompt tokens": num_prompt, "cached": num_cached}
            rows.append(row | {"cached of one's": round(num_cached / (rows[0]["cached"] if rows else num_cached), 3)})
        rows[1]["first of round robin's"] = round(rows[1]["first p50 ms"] / rows[2]["first p50 ms"], 3)
    note = (
        f"{arguments.talks} conversations of {NUM_TURNS} turns on 3 servers; goals: 0.9 of one's, 0.5 of round robin's"
    )
    return table_of("Conversations", rows, note=note)


def talk(port: int, num_talks: int) -> tuple[list[float], int, int]:
    """First tokens in ms after each conversation's first turn; cached and all prompt tokens."""
    dice, said = random.Random(1), [f"{i}: {BEGIN}" for i in range(num_talks)]
    firsts, num_cached, num_prompt = [], 0, 0
    for turn in range(NUM_TURNS):
        for i in dice.sample(range(num_talks), num_talks):
            begun_s = time.perf_counter()
            body = {"model": DEMO, "prompt": said[i], "max_tokens": 1}
            usage = request_json(port, "POST", "/v1/completions", body)["usage"]
            if turn:
                firsts.append((time.perf_counter() - begun_s) * 1e3)
            num_cached += usage["prompt_tokens_details"]["cached_tokens"]
            num_prompt += usage["prompt_tokens"]
            said[i] += ANSWER
    return firsts, num_cached, num_prompt


def measure_cancels(arguments: argparse.Namespace) -> Table:
    freed: list[float] = []
    steps: list[float] = []
    dice = random.Random(2)
    with tempfile.TemporaryDirectory() as directory, ExitStack() as stack:
        back, front = free_port(), free_port()
        models = Path(directory) / "gateway.toml"
        models.write_text(MODELS.format(model=MODEL, back=back) + "trusted = true\n")  # it is asked what it computed
        stack.enter_context(running(null_server_command(back, "--step-rate", str(STEPS_PER_S)), back))
        stack.enter_context(running(serve_command(front, "--config", str(models)), front))
        while len(freed) * LOT < arguments.cancels:
            clients = {f"lot{len(freed)}-{i}": Client(front, 2000, f"lot{len(freed)}-{i}") for i in range(LOT)}
            for client in clients.values():
                client.send()
            come = {name: client.leave(dice.randrange(4)) for name, client in clients.items()}
            begun_s = time.perf_counter()
            while True:
                (load,) = request_json(back, "GET", "/v1/loads")["loads"]
                if not load["num_total_reqs"]:
                    break
            freed.append((time.perf_counter() - begun_s) * 1e3)
            counted = {name: num_computed(front, name) for name in come}
            steps += [num - come[name] for name, num in counted.items() if num is not None]
    row = {"cancels": len(freed) * LOT, "begun": len(steps), "lots": len(freed), "step ms": 1e3 / STEPS_PER_S}
    shown = {f"free after p{q} ms": round(percentile(freed, q) or 0.0, 1) for q in (50, 99, 100)}
    shown |= {f"steps beyond p{q}": percentile(steps, q) or 0.0 for q in (50, 99, 100)}
    return table_of("Clients that leave", [row | shown], note="goal: one step and 50 ms, which are six steps")


def num_computed(port: int, name: str) -> int | None:
    """Tokens of a client's request, as its upstream has counted them; None: it left before it was a request."""
    while True:
        try:
            told = request_json(port, "GET", f"/v1/requests/{name}")
        except CannotRun:
            return None
        if told["state"] in ("done", "failed"):
            return told["num_completion_tokens"] or 0


def request_json(port: int, method: str, path: str, body: object = None) -> Any:
    """Raises CannotRun: the answer is none."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60.0)
    try:
        content = None if body is None else msgspec.json.encode(body)
        connection.request(method, path, content, {"content-type": "application/json"})
        answer = connection.getresponse()
        data = answer.read()
    finally:
        connection.close()
    if answer.status != 200:
        raise CannotRun(f"{path} answers {answer.status}: {data[:200]!r}", "run the server alone and look")
    return msgspec.json.decode(data)


FLAGS = (
    Flag("--rounds", 100, "turns of each way", quick=2),
    Flag("--talks", 24, "conversations", quick=3),
    Flag("--cancels", 10_000, "clients that leave", quick=100),
    Flag("--only", None, "hop, conversations or cancels"),
)
main = bench("gateway", __doc__, measure, FLAGS)

if __name__ == "__main__":
    sys.exit(main())
