"""What a hop through the gateway adds, beside haproxy in the same run: `python -m bench.gateway`.

One server with a null model, asked directly, through haproxy, and through a gateway ([[models]], with a ledger and
without), each over one kept HTTP/1.1 connection and HTTP/2 behind it. They take turns, round by round, and what a hop
adds is the difference between the quantiles of all rounds. A prompt is a short chat's; the answer streams a few
tokens, as fast as the server steps. `first` is from the request's last byte to the first event with text, `last` to
the end of the stream.
"""

import argparse
import os
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import msgspec

from bench.kit import MODEL, Flag, Found, bench, free_port, null_server_command, running, serve_command
from bench.load import CannotRun
from bench.results import percentile, table_of

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
NUM_TOKENS = 8
NUM_EACH = 20  # requests of a turn
QUANTILES = (50, 99)


class Client:
    """One connection that asks again and again."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=10)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        body = {
            "model": MODEL,
            "messages": [{"role": "user", "content": "What is a KV cache?"}],
            "max_tokens": NUM_TOKENS,
            "ignore_eos": True,
            "stream": True,
        }
        content = msgspec.json.encode(body)
        head = "POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\ncontent-length: "
        self._request = f"{head}{len(content)}\r\n\r\n".encode() + content

    def ask(self) -> tuple[float, float]:
        """Milliseconds to the first text and to the end.

        Raises:
            CannotRun: that is no answer.
        """
        self._socket.sendall(self._request)
        begun_s, received, first_s = time.perf_counter(), b"", 0.0
        while not received.endswith(b"\r\n0\r\n\r\n"):
            received += self._socket.recv(65536)
            if not first_s and received.count(b'"content":') > 1:  # the first has the role alone
                first_s = time.perf_counter()
            if not received.startswith(b"HTTP/1.1 200"[: len(received)]):
                raise CannotRun(f"The answer is {received[:200]!r}.", "run the server alone and look")
        return (first_s - begun_s) * 1e3, (time.perf_counter() - begun_s) * 1e3

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
    with ExitStack() as stack:
        stack.enter_context(running(null_server_command(back, "--step-rate", "0"), back))
        for name, command in commands.items():
            stack.enter_context(running(command, ports[name]))
        yield {"direct": back, **ports}


def measure(arguments: argparse.Namespace) -> Found:
    firsts: dict[str, list[float]] = {}
    lasts: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as directory, ways(Path(directory)) as ports:
        clients = {name: Client(port) for name, port in ports.items()}
        for i in range(arguments.rounds + 1):
            for name, client in clients.items():
                told = [client.ask() for _ in range(NUM_EACH)]
                if i:  # the first warms up
                    firsts.setdefault(name, []).extend(first for first, _ in told)
                    lasts.setdefault(name, []).extend(last for _, last in told)
        for client in clients.values():
            client.close()
    rows = []
    for name in clients:
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
    config = {"rounds": arguments.rounds, "load_average": os.getloadavg()[0]}  # others' work lengthens every way
    return Found([table_of("A hop through the gateway", rows, note=note)], config)


main = bench("gateway", __doc__, measure, (Flag("--rounds", 100, "turns of each way", quick=2),))

if __name__ == "__main__":
    sys.exit(main())
