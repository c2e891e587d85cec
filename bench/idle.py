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

from bench.kit import free_port, running
from bench.load import CannotRun
from bench.results import RESULTS_DIR, Table, command_line, print_tables, write_result

NUM_HTTP1 = 10_000
NUM_TLS = 5_000
NUM_NEWCOMERS = 200  # once all are there
NUM_REFUSED = 1_000
CONNECTIONS_PER_NEWCOMER = 50  # while they come
SPARE = 200  # connections and descriptors
TIMEOUT_S = 10.0
REQUEST = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"
LAST_REQUEST = b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
ANSWER_END = b'{"status":"ok"}'
EMPTY_SETTINGS = b"\0\0\0\x04\0\0\0\0\0"
SETTINGS_ACK = b"\0\0\0\x04\x01\0\0\0\0"
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + EMPTY_SETTINGS

Connect = Callable[[], socket.socket]


@dataclass(frozen=True, slots=True)
class Idle:
    """What many connections of a kind cost.

    Args:
        bytes_each: of the server's resident memory.
        opening_ms, idle_ms: what newcomers waited while they came, and once they were there.
        refused_ms: how long it took to turn those away who came past the cap.
    """

    kind: str
    num_connections: int
    bytes_each: float
    opening_ms: list[float]
    idle_ms: list[float]
    refused_ms: list[float]


def measure(kind: str, num_connections: int, pid: int, port: int, connect: Connect) -> Idle:
    """Open them, look, close them."""
    opening_ms, idle_ms = [], []
    for connection in [connect() for _ in range(100)]:  # what the first ones cost is not theirs alone
        connection.close()
    before = resident_bytes(pid)
    with contextlib.ExitStack() as stack:
        for number in range(num_connections):
            stack.enter_context(connect())
            if number % CONNECTIONS_PER_NEWCOMER == 0:
                opening_ms.append(newcomer_ms(port))
        after = resident_bytes(pid)
        idle_ms += [newcomer_ms(port) for _ in range(NUM_NEWCOMERS)]
        refused_ms = refusals_ms(port, stack)
    return Idle(kind, num_connections, (after - before) / num_connections, opening_ms, idle_ms, refused_ms)


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


def resident_bytes(pid: int) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * resource.getpagesize()


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
    connection.sendall(PREFACE)
    read_until(connection, SETTINGS_ACK)
    connection.sendall(SETTINGS_ACK)
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
        found = []
        kinds: list[tuple[str, int, Connect]] = [
            ("HTTP/1.1", num_http1, lambda: connect_http1(port)),
            ("HTTP/2 over TLS", num_tls, lambda: connect_tls(tls_port, context)),
        ]
        for kind, num_connections, connect in kinds:
            cap = num_connections + SPARE
            caps = [f"--max-connections={cap}", f"--max-connections-per-address={cap}"]
            with running([*command, *caps], port) as pid:  # anew: memory that was used once is not given back
                found.append(measure(kind, num_connections, pid, port, connect))
        return found


def percentile(values: Sequence[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, math.ceil(share * len(values)) - 1)]


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.idle", description=__doc__)
    parser.add_argument("--http1", type=int, default=NUM_HTTP1, metavar="COUNT")
    parser.add_argument("--tls", type=int, default=NUM_TLS, metavar="COUNT")
    parser.add_argument("--json", type=Path, default=RESULTS_DIR / "idle.json")
    arguments = parser.parse_args(argv)
    table = Table(
        title="Idle connections, and what newcomers wait beside them (connect, /health, answer)",
        columns=("kind", "connections", "KiB each", "while", "median ms", "p99 ms", "max ms"),
        rows=tuple(
            (
                one.kind,
                one.num_connections,
                round(one.bytes_each / 1024, 1),
                name,
                round(statistics.median(waits_ms), 2),
                round(percentile(waits_ms, 0.99), 2),
                round(max(waits_ms), 2),
            )
            for one in measure_all(arguments.http1, arguments.tls)
            for name, waits_ms in (
                ("they come", one.opening_ms),
                ("they idle", one.idle_ms),
                ("the cap is reached: refused", one.refused_ms),
            )
        ),
    )
    print_tables([table])
    write_result(arguments.json, "idle", command_line("python -m bench.idle", argv), [table])
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
