"""The same weights and load through HTTP, one server after the other: `python -m bench.peers --model DIR`.

steploop, `transformers serve` with continuous batching, and llama.cpp's llama-server (`make peers` builds it). A server
that is not installed is reported and left out. Compare only figures of one run on a quiet machine: the
machine's ceilings are measured first, and the share is of what they allow for this load (bench/limits.py).

A fresh process for each part: closed loops of 1, 8 and 32 clients; 8 streams while a long prompt prefills; a client
that leaves a long prefill.
"""

import argparse
import importlib.util
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any, TypeVar

import msgspec

from bench.beside import Abandoned, Beside, abandon_prefill, send_beside
from bench.engine import model_config
from bench.kit import DidNotStart, Flag, Found, bench, free_port, running
from bench.limits import ModelWork, Speed, limit_tables, measure_limits, serving_limit_tokens_per_s, work_of
from bench.load import CannotRun, LoadConfig, LoadResult, run_load, run_on_fast_loop
from bench.make_model import CannotConvert, write_gguf
from bench.results import Cell, Plot, Table, table_of
from gpu.device import num_physical_cores

T = TypeVar("T")

SERVERS = STEPLOOP, TRANSFORMERS, LLAMA = "steploop", "transformers serve", "llama-server"
PARTS = CLOSED, LONG, LEAVE = ("closed", "long", "leave")
BF16_BYTES = 2
START_TIMEOUT_S = 300.0
REQUEST_TIMEOUT_S = 900.0
STREAM_TOKENS = 2048  # of a stream that shall outlast the long prompt
SHOWN_LOG_CHARS = 2_000
LLAMA_SLOTS = 32  # as many streams as the widest load has
LLAMA_CONTEXT = 32_768  # over all slots


@dataclass(frozen=True, slots=True)
class PeerServer:
    """One server, ready to start.

    Args:
        command: without host and port.
        model: the name that its requests bear.
        ignores_eos: it takes ignore_eos; one that does not gets models that never end by themselves (make_model).
    """

    name: str
    command: Sequence[str]
    model: str
    ready_path: str
    ignores_eos: bool
    environment: Mapping[str, str] = field(default_factory=dict)

    def command_at(self, port: int) -> list[str]:
        return [*self.command, "--host", "127.0.0.1", "--port", str(port)]


@dataclass(frozen=True, slots=True)
class Missing:
    """A server that cannot be measured here."""

    name: str
    reason: str


def find_server(
    name: str, directory: Path, threads: int | None, max_model_len: int, scratch: Path
) -> PeerServer | Missing:
    """How to start the server called `name` (of SERVERS) over this model.

    Args:
        threads: compute threads; None: each server's own choice, and all physical cores for llama.cpp.
        scratch: where the model is written anew for a server that needs another format.

    Raises:
        BadCheckpoint, OSError: the model's files.
    """
    if name == STEPLOOP:
        command = [sys.executable, "-m", "server", "serve", "--model", str(directory), "--log-level", "warning"]
        command += ["--max-model-len", str(max_model_len), *(["--threads", str(threads)] if threads else [])]
        return PeerServer(name, command, directory.resolve().name, "/v1/models", True)
    bin_directory = Path(sys.executable).parent
    if name == TRANSFORMERS:
        needed = ("transformers", "accelerate", "fastapi", "uvicorn", "openai")
        absent = [package for package in needed if importlib.util.find_spec(package) is None]
        if absent:
            return Missing(name, f"not installed: {', '.join(absent)}; make peers installs them")
        command = [str(bin_directory / "transformers"), "serve", str(directory), "--continuous-batching"]
        environment = {"HF_HUB_OFFLINE": "1", **({"OMP_NUM_THREADS": str(threads)} if threads else {})}
        command += ["--device", "cpu", "--dtype", "bfloat16"]
        return PeerServer(name, command, str(directory), "/health", False, environment)
    found = shutil.which("llama-server") or shutil.which("llama-server", path=str(bin_directory))
    if found is None:
        return Missing(name, "llama-server is not on PATH; make peers builds it")
    file, cores = scratch / "model.gguf", str(threads or num_physical_cores())
    try:
        write_gguf(directory, file)
    except CannotConvert as error:
        return Missing(name, str(error))
    command = [found, "--model", str(file), "--alias", directory.name, "--threads", cores, "--threads-batch", cores]
    command += ["--parallel", str(LLAMA_SLOTS), "--ctx-size", str(LLAMA_CONTEXT), "--kv-unified"]
    return PeerServer(name, command, directory.name, "/health", True)


@dataclass(frozen=True, slots=True)
class Load:
    """What every server is asked."""

    streams: tuple[int, ...] = (1, 8, 32)
    num_prompt: int = 253
    num_output: int = 64
    rounds: int = 4  # requests of each client, on average
    num_beside: int = 8
    num_long: int = 4096

    @property
    def max_model_len(self) -> int:
        """Room for the long prompt, which is only about as long as asked, and for the streams beside it."""
        return 2 * max(self.num_long, 2048)


QUICK = Load((1, 2), num_prompt=80, num_output=4, rounds=1, num_beside=2, num_long=300)


class Answers(msgspec.Struct, frozen=True, kw_only=True):
    """What one server did; None: that part failed, see failures."""

    closed: dict[int, LoadResult]  # by streams
    stalled: Beside | None
    abandoned: Abandoned | None
    failures: tuple[str, ...]


class PeerBench:
    """One server under all loads."""

    def __init__(self, server: PeerServer, load: Load, log: IO[bytes], parts: Sequence[str] = PARTS) -> None:
        self._server = server
        self._parts = parts
        self._load = load
        self._log = log
        self._seed = 0
        self._failures: list[str] = []
        self._starts = True

    def measure(self) -> Answers:
        """Every part, in turn; a part that fails is written down, and the others go on, if the server starts at all."""
        return Answers(
            closed=self._part(CLOSED, "closed loops", self._closed_loops) or {},
            stalled=self._part(LONG, "streams beside a long prompt", self._stall),
            abandoned=self._part(LEAVE, "a client that leaves", self._abandon),
            failures=tuple(self._failures),
        )

    def _part(self, part: str, name: str, measure: Callable[[int], T]) -> T | None:
        """In a fresh process, warm: it has answered two clients at once."""
        if not self._starts or part not in self._parts:
            return None
        print(f"{self._server.name}: {name}", file=sys.stderr)
        port, server = free_port(), self._server
        command = server.command_at(port)
        try:
            with running(command, port, server.ready_path, START_TIMEOUT_S, server.environment, self._log):
                self._run(port, concurrency=2, num_requests=2, max_tokens=4)
                return measure(port)
        except CannotRun as error:
            self._starts = not isinstance(error, DidNotStart)
            self._failures.append(f"{self._server.name}, {name}: {error.cause}")
            self._log.flush()
            log = Path(self._log.name).read_bytes()[-SHOWN_LOG_CHARS:].decode(errors="replace")
            print(f"{self._failures[-1]}\n{log}", file=sys.stderr)
            return None

    def _closed_loops(self, port: int) -> dict[int, LoadResult]:
        found = {}
        for num_streams in self._load.streams:
            result = self._run(port, concurrency=num_streams, num_requests=num_streams * self._load.rounds)
            print(f"{self._server.name}: {num_streams} streams, {result.tokens_per_s:.1f} tokens/s", file=sys.stderr)
            found[num_streams] = result
        return found

    def _stall(self, port: int) -> Beside:
        config, load = self._config(port, concurrency=1), self._load
        return run_on_fast_loop(send_beside(config, load.num_beside, load.num_long, 1, 0.0, STREAM_TOKENS))

    def _abandon(self, port: int) -> Abandoned:
        return run_on_fast_loop(abandon_prefill(self._config(port, concurrency=1), self._load.num_long))

    def _run(self, port: int, **settings: Any) -> LoadResult:
        result = run_load(self._config(port, **settings))
        if result.num_failed:
            raise CannotRun(f"{result.num_failed} requests failed: {result.failure_examples}.", "look at it alone")
        return result

    def _config(self, port: int, **settings: Any) -> LoadConfig:
        """Greedy, and no two runs on a server with the same prompts: none is found in a cache."""
        self._seed += 2  # a long prompt takes the next one: bench/beside.py
        config = LoadConfig(
            host="127.0.0.1",
            port=port,
            model=self._server.model,
            prompt_tokens=self._load.num_prompt,
            max_tokens=self._load.num_output,
            ignore_eos=self._server.ignores_eos,
            temperature=0.0,
            seed=self._seed,
            timeout_s=REQUEST_TIMEOUT_S,
        )
        return replace(config, **settings)


def result_tables(answers: dict[str, Answers], load: Load, work: ModelWork, speed: Speed) -> list[Table]:
    """Throughput, bursts, and who is in whose way."""
    closed: list[dict[str, Cell]] = []
    mixed: list[dict[str, Cell]] = []
    for name, answer in answers.items():
        server: dict[str, Cell] = {"server": name}
        for num_streams, result in answer.closed.items():
            limit = serving_limit_tokens_per_s(work, speed, num_streams, load.num_prompt, load.num_output, BF16_BYTES)
            rates: dict[str, Cell] = {"streams": num_streams, "tokens/s": result.tokens_per_s}
            times_ms = {"TTFT p50 ms": _ms(result.ttft_s.p50), "p99": _ms(result.ttft_s.p99)}
            times_ms |= {"inter-token p50 ms": _ms(result.inter_token_s.p50)}
            shares: dict[str, Cell] = {"share of limit": result.tokens_per_s / limit}
            closed.append(server | rates | shares | times_ms | {"tokens": result.num_tokens})
        cells: dict[str, Cell] = {}
        if (long := answer.stalled) is not None:
            cells |= {"inter-token p50": _ms(long.inter_token_s.p50), "p99": _ms(long.inter_token_s.p99)}
            cells |= {"TTFT of the long prompt": _ms(long.long_ttft_s.p50)}
        if (left := answer.abandoned) is not None:
            cells |= {"short TTFT alone": _ms(left.alone_s), "after one left": _ms(left.next_s)}
        mixed.append(server | cells)
    title = f"Closed loop, {load.num_prompt} tokens in, {load.num_output} out"
    beside = f"{load.num_beside} streams while {load.num_long} tokens prefill; a client leaves such a prefill; ms"
    return [
        table_of(title, closed, Plot("streams", "tokens/s", "server")),
        table_of(beside, mixed),
    ]


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1e3


def _measure(arguments: argparse.Namespace) -> Found:
    load = QUICK if arguments.quick else replace(Load(), rounds=arguments.rounds)
    model_config(arguments.model)
    work, limits = work_of(arguments.model), measure_limits(is_quick=arguments.quick)
    answers: dict[str, Answers] = {}
    missing: list[Missing] = []
    with tempfile.TemporaryDirectory() as scratch:
        for name in arguments.servers:
            server = find_server(name, arguments.model, arguments.threads, load.max_model_len, Path(scratch))
            if isinstance(server, Missing):
                missing.append(server)
                print(f"{name} is left out: {server.reason}", file=sys.stderr)
                continue
            with (Path(scratch) / "log").open("wb") as log:
                answers[name] = PeerBench(server, load, log, arguments.parts).measure()
    tables = result_tables(answers, load, work, limits.speed) + limit_tables(limits)[:1]
    if missing:
        tables.append(Table("Left out", ("server", "why"), tuple((peer.name, peer.reason) for peer in missing)))
    name = arguments.model.resolve().name
    return Found(
        tables,
        {"model": name, "threads": arguments.threads},
        {"answers": msgspec.to_builtins(answers, str_keys=True), "limits": msgspec.to_builtins(limits)},
        f"peers-{name}",
        1 if any(answer.failures for answer in answers.values()) else 0,
    )


FLAGS = (
    Flag("--model", None, "of bench.make_model", more={"type": Path, "required": True}),
    Flag("--servers", SERVERS, "to compare", more={"nargs": "+", "choices": SERVERS}),
    Flag("--threads", None, "of each server (default: its own choice)", more={"type": int}),
    Flag("--parts", PARTS, "of the load", more={"nargs": "+", "choices": PARTS}),
    Flag("--rounds", Load().rounds, "requests of each client in a closed loop"),
)
main = bench("peers", __doc__, _measure, FLAGS)

if __name__ == "__main__":
    sys.exit(main())
