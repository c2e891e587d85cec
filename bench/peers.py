"""The same weights and load through HTTP, one server after the other: `python -m bench.peers --model DIR`.

steploop, `transformers serve` with continuous batching, and llama.cpp's llama-server (`make peers` builds it). A server
that is not installed is reported and left out. Compare only figures of one run on a quiet machine: the
machine's ceilings are measured first, and the share is of what they allow for this load (bench/limits.py).

With --mix all read one GGUF file of random blocks (bench/make_model.py), and the limit is of the bytes that it has.

A fresh process for each part: closed loops of 1, 8 and 32 clients; 8 streams while a long prompt prefills; a client
that leaves a long prefill. Where other work disturbs the machine, `--parts pairs` compares the first two servers: both
stay up, and answer the same number of clients in turn: `--streams 1 8 32 --rounds 3` of a quantised 0.6B model
(--mix Q4_K_M) takes less than five minutes on two cores.
"""

import argparse
import importlib.util
import shutil
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any

import msgspec

from bench.beside import abandon_prefill, send_beside
from bench.engine import model_config
from bench.kit import DidNotStart, Flag, Found, bench, free_port, running
from bench.limits import limit_tables, measure_limits, serving_limit_tokens_per_s, work_of
from bench.load import CannotRun, LoadConfig, LoadResult, run_load, run_on_fast_loop
from bench.make_model import MIXES, CannotConvert, stored_bytes_a_weight, write_gguf
from bench.results import Cell, Plot, table_of
from gpu.device import num_physical_cores

SERVERS = STEPLOOP, TRANSFORMERS, LLAMA = "steploop", "transformers serve", "llama-server"
PARTS = CLOSED, LONG, LEAVE, PAIRS = ("closed", "long", "leave", "pairs")
BF16_BYTES = 2
START_TIMEOUT_S = 300.0
REQUEST_TIMEOUT_S = 900.0
PREFILL_TOKENS = 512
MANY_STREAMS = 8  # in turn, more of them ask for half as many tokens
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


class Missing(Exception):
    """A server cannot be measured here."""


def find_server(
    name: str,
    directory: Path,
    threads: int | None,
    max_model_len: int,
    scratch: Path,
    mix: str | None = None,
    slots: int = LLAMA_SLOTS,
) -> PeerServer:
    """How to start the server called `name` (of SERVERS) over this model.

    Args:
        threads: compute threads; None: each server's own choice, and all physical cores for llama.cpp.
        scratch: where the model is written anew for a server that needs another format.
        mix: the quantised file of MIXES that all read; None: the directory, or the same numbers as bfloat16.
        slots: llama.cpp's: no more than it is asked for at once.

    Raises:
        Missing: it is not installed, or cannot read this model.
        BadCheckpoint, OSError: the model's files.
    """
    if name == STEPLOOP:
        path = directory if mix is None else _file(directory, scratch, mix)
        command = [sys.executable, "-m", "server", "serve", "--model", str(path), "--log-level", "warning"]
        command += [
            "--max-model-len",
            str(max_model_len),
            "--speculation",
            "off",
            *(["--threads", str(threads)] if threads else []),
        ]
        command += [] if mix is None else ["--served-model-name", directory.resolve().name]
        return PeerServer(name, command, directory.resolve().name, "/v1/models", True)
    bin_directory = Path(sys.executable).parent
    if name == TRANSFORMERS and mix is not None:
        raise Missing("it turns a quantised file into floats")
    if name == TRANSFORMERS:
        needed = ("transformers", "accelerate", "fastapi", "uvicorn", "openai")
        absent = [package for package in needed if importlib.util.find_spec(package) is None]
        if absent:
            raise Missing(f"not installed: {', '.join(absent)}; make peers installs them")
        command = [str(bin_directory / "transformers"), "serve", str(directory), "--continuous-batching"]
        environment = {"HF_HUB_OFFLINE": "1", **({"OMP_NUM_THREADS": str(threads)} if threads else {})}
        command += ["--device", "cpu", "--dtype", "bfloat16"]
        return PeerServer(name, command, str(directory), "/health", False, environment)
    found = shutil.which("llama-server") or shutil.which("llama-server", path=str(bin_directory))
    if found is None:
        raise Missing("llama-server is not on PATH; make peers builds it")
    file, cores = _file(directory, scratch, mix or "BF16"), str(threads or num_physical_cores())
    command = [found, "--model", str(file), "--alias", directory.name, "--threads", cores, "--threads-batch", cores]
    command += ["--parallel", str(slots), "--ctx-size", str(LLAMA_CONTEXT), "--kv-unified"]
    return PeerServer(name, command, directory.name, "/health", True)


def _file(directory: Path, scratch: Path, mix: str) -> Path:
    """The model as a GGUF file, written once for all servers."""
    file = scratch / f"{directory.resolve().name}-{mix}.gguf"
    if not file.exists():
        try:
            write_gguf(directory, file, mix)
        except CannotConvert as error:
            raise Missing(str(error)) from error
    return file


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


class PeerBench:
    """One server under all loads.

    Attributes:
        closed, beside: rows of the tables; a part that failed leaves its cells out.
        failures: what went wrong, by part.
    """

    def __init__(self, server: PeerServer, load: Load, limit: Callable[[int], float]) -> None:
        """limit: tokens/s at most, by the number of streams."""
        self._server, self._load, self._limit = server, load, limit
        self._seed, self.name = 0, server.name
        self.closed: list[dict[str, Cell]] = []
        self.beside: dict[str, Cell] = {"server": server.name}
        self.failures: list[str] = []

    def run(self, parts: Sequence[str], log: IO[bytes]) -> None:
        """Each part in a fresh process that has answered two clients at once; those after one that failed go on."""
        measures = {CLOSED: self._closed_loops, LONG: self._stall, LEAVE: self._abandon}
        for part in parts:
            print(f"{self._server.name}: {part}", file=sys.stderr)
            port, server = free_port(), self._server
            try:
                command = server.command_at(port)
                with running(command, port, server.ready_path, START_TIMEOUT_S, server.environment, log):
                    self._run(port, concurrency=2, num_requests=2, max_tokens=4)
                    measures[part](port)
            except CannotRun as error:
                self.failures.append(f"{server.name}, {part}: {error.cause}")
                log.flush()
                shown = Path(log.name).read_bytes()[-SHOWN_LOG_CHARS:].decode(errors="replace")
                print(f"{self.failures[-1]}\n{shown}", file=sys.stderr)
                if isinstance(error, DidNotStart):
                    return

    @contextmanager
    def up(self, log: IO[bytes]) -> Iterator[Callable[[int, int, int], LoadResult]]:
        """A process that stays: a function of (clients, prompt tokens, output tokens), a request of each client."""
        port, server = free_port(), self._server
        with running(server.command_at(port), port, server.ready_path, START_TIMEOUT_S, server.environment, log):
            self._run(port, concurrency=2, num_requests=2, max_tokens=4)
            yield lambda streams, num_prompt, num_output: self._run(
                port, concurrency=streams, num_requests=streams, prompt_tokens=num_prompt, max_tokens=num_output
            )

    def _closed_loops(self, port: int) -> None:
        for num_streams in self._load.streams:
            result = self._run(port, concurrency=num_streams, num_requests=num_streams * self._load.rounds)
            cells: dict[str, Cell] = {"server": self._server.name, "streams": num_streams}
            cells |= {"tokens/s": result.tokens_per_s, "share of limit": result.tokens_per_s / self._limit(num_streams)}
            times = {"TTFT p50 ms": result.ttft_s.p50, "p99": result.ttft_s.p99}
            times |= {"inter-token p50 ms": result.inter_token_s.p50}
            self.closed.append(cells | _ms(times) | {"tokens": result.num_tokens})

    def _stall(self, port: int) -> None:
        config, load = self._config(port, concurrency=1), self._load
        found = run_on_fast_loop(send_beside(config, load.num_beside, load.num_long, 1, 0.0, STREAM_TOKENS))
        gaps = {"inter-token p50": found.inter_token_s.p50, "p99": found.inter_token_s.p99}
        self.beside |= _ms(gaps | {"TTFT of the long prompt": found.long_ttft_s.p50})

    def _abandon(self, port: int) -> None:
        found = run_on_fast_loop(abandon_prefill(self._config(port, concurrency=1), self._load.num_long))
        self.beside |= _ms({"short TTFT alone": found.alone_s, "after one left": found.next_s})

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


def compare_in_turn(ours: PeerBench, theirs: PeerBench, load: Load, log: IO[bytes]) -> Iterator[dict[str, Cell]]:
    """Rows of medians: decoding speed per client by number of clients, and prefill of 512 tokens, in pairs.

    Ratios are ours to theirs; of "TTFT", the first token's time, less is better.
    """
    with ours.up(log) as our_load, theirs.up(log) as their_load:
        wide = load.num_output // 2  # tokens of each of many clients, whose turns take longest
        cases = [(n, load.num_prompt, load.num_output if n <= MANY_STREAMS else wide) for n in load.streams]
        cases.append((1, PREFILL_TOKENS, 1))
        for streams, num_prompt, num_output in cases:
            speeds, firsts = [], []
            for _ in range(load.rounds):
                pair = our_load(streams, num_prompt, num_output), their_load(streams, num_prompt, num_output)
                ends = [(one.end_to_end_s.p50 or 0.0, one.ttft_s.p50 or 0.0) for one in pair]
                firsts.append(ends[0][1] / ends[1][1])
                speeds.append(
                    [(num_output - 1) / (end - first) if num_output > 1 else num_prompt / first for end, first in ends]
                )
            ratios = sorted(first / second for first, second in speeds)
            medians = [statistics.median(column) for column in zip(*speeds, strict=True)]
            yield {
                "streams": streams,
                "tokens in": num_prompt,
                "out": num_output,
                ours.name: medians[0],
                theirs.name: medians[1],
                "ratio": statistics.median(ratios),
                "least": ratios[0],
                "greatest": ratios[-1],
                "TTFT": statistics.median(firsts),
            }


def _ms(seconds: Mapping[str, float | None]) -> dict[str, Cell]:
    return {name: None if value is None else value * 1e3 for name, value in seconds.items()}


def _measure(arguments: argparse.Namespace) -> Found:
    parts = [part for part in arguments.parts if part != PAIRS]
    load = QUICK if arguments.quick else replace(Load(), rounds=arguments.rounds, streams=tuple(arguments.streams))
    model_config(arguments.model)  # refuses a directory without a model
    name = arguments.model.resolve().name
    work, limits = work_of(arguments.model), measure_limits(is_quick=arguments.quick or not parts)
    done, missing = list[PeerBench](), list[dict[str, Cell]]()

    def limit(num_streams: int) -> float:
        # Keys and values are counted as small as weights, which they are not: at this context they are a hundredth.
        weight_bytes = BF16_BYTES if arguments.mix is None else stored_bytes_a_weight(arguments.model, arguments.mix)
        sizes = num_streams, load.num_prompt, load.num_output, weight_bytes
        return serving_limit_tokens_per_s(work, limits.speed, *sizes)

    with tempfile.TemporaryDirectory() as scratch:
        for server_name in arguments.servers:
            try:
                asked = arguments.model, arguments.threads, load.max_model_len, Path(scratch), arguments.mix
                slots = LLAMA_SLOTS if parts else max(load.streams)
                done.append(PeerBench(find_server(server_name, *asked, slots), load, limit))
            except Missing as error:
                missing.append({"server": server_name, "why": str(error)})
                print(f"{server_name} is left out: {error}", file=sys.stderr)
                continue
            with (Path(scratch) / "log").open("wb") as log:
                done[-1].run(parts, log)
        pairs: list[dict[str, Cell]] = []
        if PAIRS in arguments.parts and len(done) > 1:
            with (Path(scratch) / "log").open("wb") as log:
                pairs += compare_in_turn(done[0], done[1], load, log)
    title = f"Closed loop, {load.num_prompt} tokens in, {load.num_output} out"
    beside = f"{load.num_beside} streams while {load.num_long} tokens prefill; a client leaves such a prefill; ms"
    closed = [row for one in done for row in one.closed]
    tables = [table_of(title, closed, Plot("streams", "tokens/s", "server"))] if closed else []
    if pairs:
        tables.append(table_of("Tokens/s of one client, in turn", pairs))
    if any(len(one.beside) > 1 for one in done):
        tables.append(table_of(beside, [one.beside for one in done]))
    tables += limit_tables(limits)[:1]
    if missing:
        tables.append(table_of("Left out", missing))
    failures = [failure for one in done for failure in one.failures]
    details = {"failures": failures, "limits": msgspec.to_builtins(limits)}
    config = {"model": name, "threads": arguments.threads, "mix": arguments.mix}
    of_mix = f"-{arguments.mix.lower()}" if arguments.mix else ""
    return Found(tables, config, details, f"peers-{name}{of_mix}", 1 if failures else 0)


FLAGS = (
    Flag("--model", None, "of bench.make_model", more={"type": Path, "required": True}),
    Flag("--servers", SERVERS, "to compare", more={"nargs": "+", "choices": SERVERS}),
    Flag("--mix", None, "a GGUF file of random blocks that the servers read", more={"choices": MIXES[1:]}),
    Flag("--threads", None, "of each server (default: its own choice)", more={"type": int}),
    Flag("--streams", Load().streams, "clients at once", more={"nargs": "+", "type": int}),
    Flag("--parts", PARTS[:-1], "of the load", more={"nargs": "+", "choices": PARTS}),
    Flag("--rounds", Load().rounds, "requests of each client in a closed loop"),
)
main = bench("peers", __doc__, _measure, FLAGS)

if __name__ == "__main__":
    sys.exit(main())
