"""What idle connections cost, and whether new ones still get in: `python -m bench.idle`.

Holds thousands of connections that have had one answer each and ask nothing more: HTTP/1.1, and TLS with HTTP/2.
Measured: the server's memory per connection, the time of a further connection from connect to its answer while they are
held (and with none), the server's CPU while nothing happens, and that those past --max-connections are closed at once
and counted. The server is `steploop serve` on the embedded model.
"""

import argparse
import resource
import socket
import ssl
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench import http2_frames
from bench.http2_frames import OPENING
from bench.load_run import CannotRun
from bench.measures import Distribution, summarize
from bench.process_cpu import cpu_times
from bench.results import RESULTS_DIR, Table, command_line, print_tables, write_result
from bench.server_process import free_port

NUM_HTTP1 = 10_000
NUM_HTTP2 = 5_000
NUM_FURTHER = 300  # connections that are timed while the others are held
NUM_REFUSED = 100
NUM_FILLERS = 16  # up to the cap; before, room for those that come and go
SPARE_DESCRIPTORS = 100
NUM_OPENERS = 8  # at once
NUM_SOURCES = 8  # 127.0.0.2 and on: one address has 28,000 ports at most
IDLE_S = 3.0
TIMEOUT_S = 30.0
START_TIMEOUT_S = 60.0
HTTP2_GET = OPENING + http2_frames.request(1, http2_frames.request_head("GET", "/health", "https"))
HTTP1_GET = b"GET %s HTTP/1.1\r\nhost: a\r\n\r\n"

Opener = Callable[[int], socket.socket]  # number -> a connection that has had its answer


@dataclass(frozen=True, slots=True)
class Held:
    """What holding so many connections was like.

    Args:
        kib_per_connection: of the server's resident memory, by the second half of them.
    """

    kind: str
    num_held: int
    opened_s: float
    kib_per_connection: float
    opening_ms: Distribution
    further_ms: Distribution
    further_alone_ms: Distribution
    idle_cpu: float  # share of a core
    num_refused: int
    num_counted: int
    refused_ms: Distribution


def connect(port: int, number: int) -> socket.socket:
    """A TCP connection from one of several loopback addresses."""
    with _closed_on_failure(socket.socket()) as sock:
        sock.settimeout(TIMEOUT_S)
        sock.bind((f"127.0.0.{2 + number % NUM_SOURCES}", 0))
        sock.connect(("127.0.0.1", port))
        return sock


def open_http1(port: int, number: int) -> socket.socket:
    with _closed_on_failure(connect(port, number)) as sock:
        ask_http1(sock, b"/health")
        return sock


def ask_http1(sock: socket.socket, path: bytes) -> bytes:
    """The answer's body; all bodies here have a content-length."""
    sock.sendall(HTTP1_GET % path)
    received = b""
    while b"\r\n\r\n" not in received:
        received += _receive(sock)
    head, _, body = received.partition(b"\r\n\r\n")
    length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
    while len(body) < length:
        body += _receive(sock)
    return body


def open_http2(port: int, number: int, tls: ssl.SSLContext) -> socket.socket:
    with _closed_on_failure(connect(port, number)) as plain:
        secure = tls.wrap_socket(plain, server_hostname="127.0.0.1")  # it owns the socket from here on
    with _closed_on_failure(secure) as sock:
        sock.sendall(HTTP2_GET)
        received = b""
        while b'"status":"ok"' not in received:
            received += _receive(sock)
        return sock


@contextmanager
def _closed_on_failure(sock: socket.socket) -> Iterator[socket.socket]:
    try:
        yield sock
    except BaseException:
        sock.close()
        raise


def _receive(sock: socket.socket) -> bytes:
    data = sock.recv(65_536)
    if not data:
        raise CannotRun("the server closed a connection that it should have kept", "look at the server's log")
    return data


def time_further(opener: Opener) -> Distribution:
    """Milliseconds from connect to answer, one connection after the other."""
    times = []
    for number in range(NUM_FURTHER):
        start_s = time.monotonic()
        with opener(number):
            times.append((time.monotonic() - start_s) * 1e3)
    return summarize(times)


def open_refused(opener: Opener) -> tuple[int, list[float]]:
    """How many of some further connections were closed at once, and after how many milliseconds."""
    num_refused, times = 0, []
    for number in range(NUM_REFUSED):
        start_s = time.monotonic()
        try:
            opener(number).close()
        except (CannotRun, OSError):  # closed, reset, or in the middle of the handshake
            num_refused += 1
        times.append((time.monotonic() - start_s) * 1e3)
    return num_refused, times


def rss_kib(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1])
    raise CannotRun(f"/proc/{pid}/status has no VmRSS", "run it on Linux")


def num_refused_counted(page: bytes) -> int:
    line = next(line for line in page.decode().splitlines() if line.startswith("steploop_connections_refused_total"))
    return int(float(line.split()[-1]))


def measure(kind: str, num_held: int, tls_flags: Sequence[str], tls: ssl.SSLContext | None) -> Held:
    """Start a server that takes so many connections and few more, and hold them.

    Raises:
        CannotRun: it does not start, or closes what it should keep.
    """
    port = free_port()
    cap = num_held + NUM_FILLERS
    command = [sys.executable, "-m", "server", "serve", "--port", str(port), "--max-connections", str(cap)]
    command += ["--idle-timeout", "1h", "--log-level", "warning", *tls_flags]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)

    def opener(number: int) -> socket.socket:
        return open_http1(port, number) if tls is None else open_http2(port, number, tls)

    def timed(number: int) -> tuple[socket.socket, float]:
        begin_s = time.monotonic()
        return opener(number), (time.monotonic() - begin_s) * 1e3

    with ExitStack() as stack:
        stack.callback(_end, process)
        _wait_ready(process, port, tls)
        alone = time_further(opener)
        start_s = time.monotonic()
        halves = range(num_held // 2), range(num_held // 2, num_held)
        sizes_kib, opening_ms = [], []
        with ThreadPoolExecutor(NUM_OPENERS) as pool:
            for half in halves:
                for connection, time_ms in pool.map(timed, half):
                    stack.enter_context(connection)
                    opening_ms.append(time_ms)
                sizes_kib.append(rss_kib(process.pid))
        opened_s = time.monotonic() - start_s
        # The first half fills what loading has left free, and would look cheaper than it is
        per_connection = (sizes_kib[1] - sizes_kib[0]) / len(halves[1])
        further = time_further(opener)
        cpu_s = cpu_times(process.pid).total_s
        time.sleep(IDLE_S)
        idle_cpu = (cpu_times(process.pid).total_s - cpu_s) / IDLE_S
        fillers = [stack.enter_context(opener(number)) for number in range(NUM_FILLERS)]
        num_refused, refused_ms = open_refused(opener)
        for filler in fillers:
            filler.close()
        page = _ask_once(port, tls, b"/metrics")
        return Held(
            kind,
            num_held,
            opened_s,
            per_connection,
            summarize(opening_ms),
            further,
            alone,
            idle_cpu,
            num_refused,
            num_refused_counted(page),
            summarize(refused_ms),
        )


def _end(process: "subprocess.Popen[bytes]") -> None:
    process.terminate()
    try:
        process.wait(TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _wait_ready(process: "subprocess.Popen[bytes]", port: int, tls: ssl.SSLContext | None) -> None:
    """Until the model is loaded: its memory is not the connections'."""
    end_s = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < end_s:
        if process.poll() is not None:
            break
        try:
            if b'"ready"' in _ask_once(port, tls, b"/ready"):
                return
        except OSError:
            pass  # it does not listen yet
        time.sleep(0.1)
    raise CannotRun(f"the server did not become ready ({process.poll()})", "run `steploop serve` and look")


def _ask_once(port: int, tls: ssl.SSLContext | None, path: bytes) -> bytes:
    with connect(port, 0) as sock:
        if tls is None:
            return ask_http1(sock, path)
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        with context.wrap_socket(sock, server_hostname="127.0.0.1") as secure:
            return ask_http1(secure, path)


def make_certificate(directory: Path) -> tuple[list[str], ssl.SSLContext]:
    """A self-signed certificate: the server's flags, and a client's context that asks for HTTP/2.

    Raises:
        CannotRun: there is no openssl.
    """
    certificate, key = directory / "certificate.pem", directory / "key.pem"
    command = ["openssl", "req", "-x509", "-nodes", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"]
    command += ["-days", "2", "-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    try:
        subprocess.run([*command, "-out", str(certificate), "-keyout", str(key)], check=True, capture_output=True)
    except FileNotFoundError as error:
        raise CannotRun("there is no openssl to make a certificate with", "apt-get install openssl") from error
    tls = ssl.create_default_context(cafile=str(certificate))
    tls.set_alpn_protocols(["h2"])
    return ["--tls-cert", str(certificate), "--tls-key", str(key)], tls


def raise_descriptor_limit(num_held: int) -> None:
    """
    Raises:
        CannotRun: this process may not open so many sockets.
    """
    needed = num_held + NUM_FILLERS + SPARE_DESCRIPTORS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise CannotRun(f"{needed} open files are needed, {hard} allowed", f"`ulimit -Hn {needed}`, or hold fewer")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, needed), hard))


def tables_of(runs: Sequence[Held]) -> list[Table]:
    memory = Table(
        title="Idle connections, each after one answer",
        columns=("connections", "held", "KiB each", "opened /s", "CPU of a core while idle"),
        rows=tuple(
            (run.kind, run.num_held, run.kib_per_connection, run.num_held / run.opened_s, round(run.idle_cpu, 3))
            for run in runs
        ),
    )
    further = Table(
        title="One connection more: from connect to its answer, ms",
        columns=("connections", "held", "p50", "p99", "max"),
        rows=tuple(
            (run.kind, held, times.p50, times.p99, times.max)
            for run in runs
            for held, times in (
                ("none", run.further_alone_ms),
                (f"while {run.num_held} come, {NUM_OPENERS} at once", run.opening_ms),
                (f"{run.num_held}", run.further_ms),
            )
        ),
    )
    refused = Table(
        title="Past --max-connections",
        columns=("connections", "tried", "closed at once", "counted", "p99 ms", "max ms"),
        rows=tuple(
            (run.kind, NUM_REFUSED, run.num_refused, run.num_counted, run.refused_ms.p99, run.refused_ms.max)
            for run in runs
        ),
    )
    return [memory, further, refused]


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.idle", description=__doc__)
    parser.add_argument("--http1", type=int, default=NUM_HTTP1, help="HTTP/1.1 connections; 0: leave out")
    parser.add_argument("--http2", type=int, default=NUM_HTTP2, help="TLS connections with HTTP/2; 0: leave out")
    parser.add_argument("--json", type=Path, default=RESULTS_DIR / "idle.json")
    arguments = parser.parse_args(argv)
    try:
        raise_descriptor_limit(max(arguments.http1, arguments.http2))
        with tempfile.TemporaryDirectory() as directory:
            flags, tls = make_certificate(Path(directory))
            runs = []
            if arguments.http1:
                runs.append(measure("HTTP/1.1", arguments.http1, [], None))
            if arguments.http2:
                runs.append(measure("TLS, HTTP/2", arguments.http2, flags, tls))
    except CannotRun as error:
        print(f"error: {error.cause}\nfix: {error.fix}", file=sys.stderr)
        return 1
    tables = tables_of(runs)
    print_tables(tables)
    write_result(arguments.json, "idle", command_line("python -m bench.idle", argv), tables)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
