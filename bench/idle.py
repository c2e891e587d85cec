"""Many idle connections: `python -m bench.idle`. Memory of the server for each, whether a newcomer still gets in, and
how soon one past the cap is turned away.

A server of its own; the connections come one after the other from this process. Of each kind: HTTP/1.1 after one
answered request, HTTP/2 over TLS after its SETTINGS. While they come, and once they are all there, a newcomer now and
then connects, asks for /health and is answered: from its first SYN to the last byte, in the clear on a bind of its own.
At last the cap is filled up; who comes then is timed from the SYN to the end of the connection.
"""

import argparse
import contextlib
import math
import resource
import socket
import ssl
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.client import encode_request
from bench.kit import Flag, Found, free_port, resident_bytes, run_bench, running
from bench.load import CannotRun
from bench.raw_clients import ACK, PREFACE, SETTINGS, frame
from bench.results import Cell, Table

NUM_NEWCOMERS = 200  # once all are there
NUM_REFUSED = 1_000
CONNECTIONS_PER_NEWCOMER = 50  # while they come
SPARE = 200  # connections and descriptors
TIMEOUT_S = 10.0
REQUEST = encode_request("GET", "/health", "localhost", {})
LAST_REQUEST = encode_request("GET", "/health", "localhost", {"connection": "close"})
ANSWER_END = b'{"status":"ok"}'

Connect = Callable[[], socket.socket]


@dataclass(frozen=True, slots=True)
class Idle:
    """What many connections of a kind cost.

    Args:
        bytes_each: of the server's resident memory.
        waits_ms: of newcomers, by what went on meanwhile.
    """

    kind: str
    num_connections: int
    bytes_each: float
    waits_ms: dict[str, list[float]]


def measure(kind: str, num_connections: int, pid: int, port: int, connect: Connect) -> Idle:
    """Open them, look, close them."""
    opening_ms = []
    for connection in [connect() for _ in range(100)]:  # what the first ones cost is not theirs alone
        connection.close()
    before = resident_bytes(pid)
    with contextlib.ExitStack() as stack:
        for number in range(num_connections):
            stack.enter_context(connect())
            if number % CONNECTIONS_PER_NEWCOMER == 0:
                opening_ms.append(newcomer_ms(port))
        bytes_each = (resident_bytes(pid) - before) / num_connections
        idle_ms = [newcomer_ms(port) for _ in range(NUM_NEWCOMERS)]
        refused_ms = refusals_ms(port, stack)
    waits_ms = {"they come": opening_ms, "they idle": idle_ms, "the cap is reached: refused": refused_ms}
    return Idle(kind, num_connections, bytes_each, waits_ms)


def refusals_ms(port: int, stack: contextlib.ExitStack) -> list[float]:
    """How long each refusal took; the connections that are let in until then stay.

    Raises:
        CannotRun: more are let in than the cap has room for.
    """
    found: list[float] = []
    for _ in range(NUM_REFUSED + 2 * SPARE):
        start_s = time.monotonic()
        connection = stack.enter_context(socket.create_connection(("127.0.0.1", port), TIMEOUT_S))
        try:
            connection.sendall(REQUEST)
            read_until(connection, ANSWER_END)
        except ConnectionError:
            connection.close()
            found.append((time.monotonic() - start_s) * 1e3)
            if len(found) == NUM_REFUSED:
                return found
    raise CannotRun("the server lets more in than its cap", "look at what the server says")


def newcomer_ms(port: int) -> float:
    start_s = time.monotonic()
    with socket.create_connection(("127.0.0.1", port), TIMEOUT_S) as connection:
        connection.sendall(LAST_REQUEST)
        read_until(connection, ANSWER_END)
    return (time.monotonic() - start_s) * 1e3


def read_until(connection: socket.socket, end: bytes) -> None:
    """
    Raises:
        ConnectionError: the server closed before.
    """
    received = b""
    while end not in received:
        data = connection.recv(65_536)
        if not data:
            raise ConnectionResetError(f"the server closed: {received!r}")
        received += data


def connect_http1(port: int) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", port), TIMEOUT_S)
    connection.sendall(REQUEST)
    read_until(connection, ANSWER_END)
    return connection


def connect_tls(port: int, context: ssl.SSLContext) -> socket.socket:
    plain = socket.create_connection(("127.0.0.1", port), TIMEOUT_S)
    connection = context.wrap_socket(plain, server_hostname="localhost")
    connection.sendall(PREFACE + frame(SETTINGS))
    read_until(connection, frame(SETTINGS, flags=ACK))
    connection.sendall(frame(SETTINGS, flags=ACK))
    return connection


@contextlib.contextmanager
def certificate() -> Iterator[tuple[Path, Path]]:
    """A self-signed one, made by openssl, and its key."""
    with tempfile.TemporaryDirectory() as directory:
        file, key = Path(directory, "certificate.pem"), Path(directory, "key.pem")
        command = ["openssl", "req", "-x509", "-nodes", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"]
        command += ["-days", "2", "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"]
        subprocess.run([*command, "-out", str(file), "-keyout", str(key)], check=True, capture_output=True)
        yield file, key


def measure_all(num_http1: int, num_tls: int) -> list[Idle]:
    most = max(num_http1, num_tls)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < most + SPARE:
        raise CannotRun(f"{hard} files may be open, too few for {most} connections", f"ulimit -n {2 * most}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    with certificate() as (file, key):
        context = ssl.create_default_context(cafile=str(file))
        context.set_alpn_protocols(["h2"])
        port, tls_port = free_port(), free_port()
        command = [sys.executable, "-m", "server", "serve", "--threads", "1", "--log-level", "warning"]
        command += ["--bind", f"plain:127.0.0.1:{port}", "--bind", f"127.0.0.1:{tls_port}", "--idle-timeout", "1h"]
        command += ["--tls-cert", str(file), "--tls-key", str(key)]
        kinds: list[tuple[str, int, Connect]] = [
            ("HTTP/1.1", num_http1, lambda: connect_http1(port)),
            ("HTTP/2 over TLS", num_tls, lambda: connect_tls(tls_port, context)),
        ]
        found = []
        for kind, num_connections, connect in kinds:
            cap = num_connections + SPARE
            caps = [f"--max-connections={cap}", f"--max-connections-per-address={cap}"]
            with running([*command, *caps], port) as pid:  # anew: memory that was used once is not given back
                found.append(measure(kind, num_connections, pid, port, connect))
        return found


def percentile(values: Sequence[float], share: float) -> float:
    """One that was seen."""
    return sorted(values)[min(len(values) - 1, math.ceil(share * len(values)) - 1)]


def _measure(arguments: argparse.Namespace) -> Found:
    rows: list[tuple[Cell, ...]] = []
    for one in measure_all(arguments.http1, arguments.tls):
        for name, waits_ms in one.waits_ms.items():
            shown = (statistics.median(waits_ms), percentile(waits_ms, 0.99), max(waits_ms))
            kib = round(one.bytes_each / 1024, 1)
            rows.append((one.kind, one.num_connections, kib, name, *(round(ms, 2) for ms in shown)))
    title = "Idle connections, and what newcomers wait beside them (connect, /health, answer)"
    columns = ("kind", "connections", "KiB each", "while", "median ms", "p99 ms", "max ms")
    return Found([Table(title, columns, tuple(rows))])


FLAGS = (Flag("--http1", 10_000, "connections", 100), Flag("--tls", 5_000, "connections", 100))

if __name__ == "__main__":
    sys.exit(run_bench("idle", __doc__, _measure, FLAGS))
