"""What the benches share: a command line with a result, servers as processes of their own, and their CPU and memory.

`bench` makes every bench's `main`: it reads the flags, measures, shows the tables and writes bench/results/NAME.json.
With --quick it only shows that the bench works, and writes nothing unless --json says where.
"""

import argparse
import contextlib
import http.client
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from bench.load import CannotRun
from bench.results import RESULTS_DIR, Table, command_line, print_tables, write_result
from core.errors import StartupError

ROOT = Path(__file__).parent.parent
DEMO_MODEL = ROOT / "gpu" / "demo" / "model"
MODEL = "null"  # of the null server and the front ends beside it
PIECES = tuple(f" word{i:03d}" for i in range(1_000))  # what they say: id -> text
STOP_TIMEOUT_S = 10.0
POLL_S = 0.05

# Becomes the command that follows, under the same process id, after asking the kernel to end it with its parent: a
# bench may be killed outright, and a server that it started would live on and hold a port or a device. Linux only:
# prctl(2)'s PR_SET_PDEATHSIG, kept over execve(2); the parent is the thread that started us, which must last, too.
_BOUND = """
import ctypes, os, signal, sys
parent, *command = sys.argv[1:]
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
if os.getppid() != int(parent):  # it had ended before we asked
    sys.exit(1)
try:
    os.execvp(command[0], command)
except OSError as error:
    sys.exit(f"{command[0]}: {error.strerror}")
"""


@dataclass(frozen=True, slots=True)
class Flag:
    """An option of one bench.

    Args:
        default, quick: its value where it is not given, and with --quick; quick None: the same.
        more: further arguments of argparse's add_argument.
    """

    name: str
    default: Any
    help: str
    quick: Any = None
    more: Mapping[str, Any] = field(default_factory=dict)

    def add_to(self, parser: argparse.ArgumentParser) -> None:
        inferred = {} if self.default is None or isinstance(self.default, tuple) else {"type": type(self.default)}
        shown = "" if self.default is None else f" (default: {self.default})"
        parser.add_argument(self.name, help=self.help + shown, **{**inferred, **self.more})

    def value(self, arguments: argparse.Namespace) -> Any:
        found = getattr(arguments, self.name.removeprefix("--").replace("-", "_"))
        if found is None:
            found = self.quick if arguments.quick and self.quick is not None else self.default
        return found


@dataclass(slots=True)
class Found:
    """What a bench has measured.

    Args:
        config, details: see ResultFile.
        name: of the result file; "": the bench's.
        code: the exit code.
    """

    tables: Sequence[Table]
    config: dict[str, Any] = field(default_factory=dict)
    details: dict[str, Any] = field(default_factory=dict)
    name: str = ""
    code: int = 0


class Broken(Exception):
    """What a bench measures has not kept its word: there is nothing to write."""


def bench(
    name: str, description: str | None, measure: Callable[[argparse.Namespace], Found], flags: Sequence[Flag] = ()
) -> Callable[..., int]:
    """The `main` of a bench: parse, measure, show, write.

    It returns the exit code: 2 where nothing could be measured, with a cause and a fix; 1 for what is Broken.
    """

    def main(argv: Sequence[str] | None = None) -> int:
        argv = sys.argv[1:] if argv is None else argv
        program, shape = f"python -m bench.{name}", argparse.RawDescriptionHelpFormatter
        parser = argparse.ArgumentParser(prog=program, description=description, formatter_class=shape)
        for flag in flags:
            flag.add_to(parser)
        parser.add_argument("--quick", action="store_true", help="see that it works; writes nothing unless --json")
        parser.add_argument("--json", type=Path, metavar="FILE", help="where the result goes (default: bench/results)")
        arguments = parser.parse_args(argv)
        for flag in flags:
            setattr(arguments, flag.name.removeprefix("--").replace("-", "_"), flag.value(arguments))
        try:
            found = measure(arguments)
        except StartupError as error:
            print(f"bench.{name}: {error.cause}\nFix: {error.fix}", file=sys.stderr)
            return 2
        except Broken as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
        print_tables(found.tables)
        path = arguments.json or (None if arguments.quick else RESULTS_DIR / f"{found.name or name}.json")
        if path is not None:
            write_result(path, name, command_line(program, argv), found.tables, found.config, found.details)
            print(f"written: {path}")
        return found.code

    return main


def bound(command: Sequence[str]) -> list[str]:
    """The command to start in its place, so that it ends with this process however this one ends."""
    return [sys.executable, "-I", "-S", "-c", _BOUND, str(os.getpid()), *command]


def free_port() -> int:
    """A loopback port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class DidNotStart(CannotRun):
    """The server ended, or never answered."""


@contextlib.contextmanager
def running(
    command: Sequence[str],
    port: int,
    ready_path: str = "/v1/models",
    start_timeout_s: float = 60.0,
    environment: Mapping[str, str] | None = None,
    errors: IO[bytes] | int | None = None,
) -> Iterator[int]:
    """Start a server, wait until it answers 200 on `ready_path`, give its process id, and end it.

    Args:
        environment: beside this process's own.
        errors: where its stderr goes; None: to ours.

    Raises:
        DidNotStart: it did not come up.
    """
    merged = {**os.environ, **(environment or {})}
    process = subprocess.Popen(
        bound(command), stdout=subprocess.DEVNULL, stderr=errors, env=merged, start_new_session=True
    )
    end_s = time.monotonic() + start_timeout_s
    try:
        while not answers(port, ready_path):
            if process.poll() is not None:
                raise DidNotStart(f"{command!r} ended with {process.returncode}.", "run it alone and look")
            if time.monotonic() > end_s:
                raise DidNotStart(f"{command!r} was not ready in {start_timeout_s:g} s.", "run it alone and look")
            time.sleep(POLL_S)
        yield process.pid
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_TIMEOUT_S)
        with contextlib.suppress(ProcessLookupError):  # it, and workers that it left behind
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def answers(port: int, path: str) -> bool:
    """Whether GET `path` answers 200 now."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5.0)
    try:
        connection.request("GET", path)
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def serve_command(port: int, *more: str) -> list[str]:
    """`steploop serve` of this checkout."""
    return [sys.executable, "-m", "server", "serve", "--port", str(port), "--log-level", "warning", *more]


def null_server_command(port: int, *more: str) -> list[str]:
    """The server around a null model; see bench/null_server.py."""
    return [sys.executable, "-m", "bench.null_server", "--port", str(port), *more]


@dataclass(frozen=True, slots=True)
class CpuTimes:
    """Seconds of another process since it began, as Linux counts them (proc(5)).

    Args:
        main_s: of the thread that runs the event loop; other_s: of all others together.
    """

    main_s: float
    other_s: float

    @property
    def total_s(self) -> float:
        return self.main_s + self.other_s

    def __sub__(self, other: "CpuTimes") -> "CpuTimes":
        return CpuTimes(self.main_s - other.main_s, self.other_s - other.other_s)


def busiest(pid: int) -> int:
    """The child that has worked most, of servers that have their loop in a worker; without children, the process."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return max(map(int, children), key=lambda child: cpu_times(child).total_s, default=pid)


def cpu_times(pid: int) -> CpuTimes:
    """
    Raises:
        OSError: there is no such process.
    """
    by_thread = {True: 0.0, False: 0.0}
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(FileNotFoundError):  # it ended meanwhile
            by_thread[task.name == str(pid)] += _thread_s(task)
    return CpuTimes(by_thread[True], by_thread[False])


def _thread_s(task: Path) -> float:
    """Nanoseconds where the kernel keeps scheduler statistics, else ticks."""
    with contextlib.suppress(FileNotFoundError, IndexError):
        if on_cpu_ns := int((task / "schedstat").read_text().split()[0]):
            return on_cpu_ns / 1e9
    fields = (task / "stat").read_text().rpartition(")")[2].split()  # the name before it may contain anything
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def resident_bytes(pid: int) -> int:
    """Of another process (proc(5))."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize()
