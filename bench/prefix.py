"""The prefix cache: `python -m bench.prefix --model DIR`. What it costs where nothing is found, and what it saves.

Requests go through core.engine.Engine and the model's runner, in this process, without HTTP. With and without the cache
are run in turn, so that what else the machine does disturbs both alike.
"""

import argparse
import json
import random
import statistics
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from bench.results import RESULTS_DIR, Table, command_line, print_tables, write_result
from core.config import BLOCK_SIZE, EngineConfig, parse_model_config
from core.engine import Engine
from core.errors import StartupError
from core.scheduler import Scheduler
from core.types import EngineStats, Message, Request, SamplingParams, StepDelivery, Submit
from gpu.checkpoint import open_checkpoint
from gpu.device import DTYPES, choose_device
from gpu.kv_cache import bytes_per_token
from gpu.kv_store import KVOffload
from gpu.loading import load_runner
from gpu.runner import ModelRunner

NUM_PAIRS = 6


@dataclass(frozen=True, slots=True)
class Cases:
    """What to measure. Counts are of tokens, unless they say otherwise.

    Args:
        num_pairs: of runs without hits, one with the cache and one without.
        num_streams: of each such run, all at once.
        long_prompt: of which cached_share is cached.
        num_turns: of a chat; each adds a question and its answer to the prompt.
        model: the runner's directory.
    """

    num_pairs: int = NUM_PAIRS
    num_streams: int = 8
    prompt: int = 128
    output: int = 32
    long_prompt: int = 4096
    cached_share: float = 0.95
    num_repeats: int = 3
    num_chats: int = 3
    num_turns: int = 5
    system: int = 256
    question: int = 48
    answer: int = 24
    model: Path = Path()

    @property
    def longest(self) -> int:
        chat = self.system + self.num_turns * (self.question + self.answer)
        return max(self.long_prompt + 1, chat, self.prompt + self.output) + BLOCK_SIZE

    @property
    def num_kv_tokens(self) -> int:
        """Room for the long prompt twice, and for what the other cases hold at once."""
        return 2 * self.longest + self.num_streams * (self.prompt + self.output + 2 * BLOCK_SIZE)


QUICK = Cases(
    num_pairs=1,
    num_streams=2,
    prompt=32,
    output=4,
    long_prompt=128,
    num_repeats=1,
    num_chats=1,
    num_turns=2,
    system=32,
    question=16,
    answer=4,
)


class PrefixBench:
    """A scheduler and an engine over a loaded runner, stepped by hand.

    Several may use a runner in turn, as long as none of them counts on what it has cached before another's turn.

    Args:
        store: host memory, and a directory, for what is evicted.
    """

    def __init__(self, runner: ModelRunner, has_prefix_cache: bool, store: KVOffload | None = None) -> None:
        self._inbox: deque[Message] = deque()
        self._tokens: dict[str, list[int]] = {}
        self._num_requests = 0
        stored = () if store is None else store.stored
        self._scheduler = Scheduler(runner.limits, (), lambda: 0, has_prefix_cache, stored=stored)
        self._engine = Engine(self._scheduler, runner, time.monotonic, self._inbox, self._take, store)

    @property
    def stats(self) -> EngineStats:
        return self._scheduler.stats()

    def close(self) -> None:
        """As the server does when it ends."""
        self._engine.close()

    def ask(self, prompt_ids: Sequence[int], max_tokens: int) -> tuple[float, list[int]]:
        """One request alone: seconds to its first token, and its tokens."""
        started_s = time.perf_counter()
        name = self._submit(prompt_ids, max_tokens)
        while not self._tokens[name]:
            self._engine.step()
        ttft_s = time.perf_counter() - started_s
        self._run()
        return ttft_s, self._tokens.pop(name)

    def ask_counted(self, prompt_ids: Sequence[int]) -> tuple[int, float]:
        """One request alone: how many tokens were cached, and ms to its first token."""
        before = self.stats.num_cache_hits
        ttft_s, _ = self.ask(prompt_ids, 1)
        return self.stats.num_cache_hits - before, ttft_s * 1e3

    def ask_at_once(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> float:
        """All of them together: seconds until the last has ended."""
        started_s = time.perf_counter()
        for prompt_ids in prompts:
            self._submit(prompt_ids, max_tokens)
        self._run()
        return time.perf_counter() - started_s

    def _submit(self, prompt_ids: Sequence[int], max_tokens: int) -> str:
        name = str(self._num_requests)
        self._num_requests += 1
        self._tokens[name] = []
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        request = Request(request_id=name, prompt_ids=tuple(prompt_ids), sampling=sampling, arrival_s=time.monotonic())
        self._inbox.append(Submit(request))
        return name

    def _run(self) -> None:
        while self._engine.step():
            pass

    def _take(self, delivery: StepDelivery) -> None:
        for name, token_id in zip(delivery.request_ids, delivery.token_ids, strict=True):
            self._tokens[name].append(token_id)
        for chunk in delivery.chunks:
            if chunk.error is not None:
                raise RuntimeError(f"request {chunk.request_id} failed: {chunk.error}")


def measure_no_hits(runner: ModelRunner, cases: Cases, rng: random.Random) -> Table:
    """Random prompts: the cache is looked up, filled and evicted from, and never of use."""
    with_cache, without = PrefixBench(runner, True), PrefixBench(runner, False)
    seconds: list[tuple[float, float]] = []
    for number in range(cases.num_pairs + 1):
        prompts = [_random_ids(runner, cases.prompt, rng) for _ in range(cases.num_streams)]
        order = (with_cache, without) if number % 2 else (without, with_cache)
        taken = {bench: bench.ask_at_once(prompts, cases.output) for bench in order}
        if number:  # the first of both warms up
            seconds.append((taken[with_cache], taken[without]))
    num_tokens = cases.num_streams * cases.output
    rows = [(i, num_tokens / on, num_tokens / off, 100 * (on / off - 1)) for i, (on, off) in enumerate(seconds, 1)]
    on, off = (statistics.median(pair[i] for pair in seconds) for i in range(2))
    lost = statistics.median(100 * (on / off - 1) for on, off in seconds)
    title = f"No hits: {cases.num_streams} streams, prompts of {cases.prompt} random tokens, {cases.output} out"
    columns = ("pair", "tokens/s with", "tokens/s without", "lost %")
    return Table(title, columns, (*rows, ("median", num_tokens / on, num_tokens / off, lost)))


def measure_ttft(runner: ModelRunner, cases: Cases, rng: random.Random) -> Table:
    """A long prompt that nobody has sent before, and others that begin as it does."""
    bench = PrefixBench(runner, True)
    num_common = int(cases.long_prompt * cases.cached_share)
    cold, warm = [], []
    num_hits = 0
    for _ in range(cases.num_repeats):
        prompt = _random_ids(runner, cases.long_prompt, rng)
        cold.append(bench.ask(prompt, 1)[0])
        before = bench.stats.num_cache_hits
        warm.append(bench.ask(prompt[:num_common] + _random_ids(runner, cases.long_prompt - num_common, rng), 1)[0])
        num_hits = bench.stats.num_cache_hits - before
    cold_s, warm_s = statistics.median(cold), statistics.median(warm)
    rows = (
        ("cold", 0, cold_s * 1e3, 1.0),
        ("cached", num_hits, warm_s * 1e3, warm_s / cold_s),
    )
    columns = ("prompt", "cached tokens", "TTFT ms", "share of cold")
    return Table(f"Time to the first token of a prompt of {cases.long_prompt}", columns, rows)


def measure_chats(runner: ModelRunner, cases: Cases, rng: random.Random) -> Table:
    """Chats over one system prompt, turn by turn, one chat's turn after another's."""
    rows = []
    before = rng.getstate()
    for has_cache in (False, True):
        rng.setstate(before)  # the same questions
        bench = PrefixBench(runner, has_cache)
        system = _random_ids(runner, cases.system, rng)
        chats = [list(system) for _ in range(cases.num_chats)]
        ttfts_s = []
        for _ in range(cases.num_turns):
            for chat in chats:
                chat += _random_ids(runner, cases.question, rng)
                ttft_s, answer = bench.ask(chat, cases.answer)
                ttfts_s.append(ttft_s)
                chat += answer
        stats = bench.stats
        last_s = statistics.mean(ttfts_s[-cases.num_chats :])
        name = "with" if has_cache else "without"
        rows.append((name, stats.num_prompt_tokens, stats.num_cache_hits, statistics.mean(ttfts_s) * 1e3, last_s * 1e3))
    columns = ("cache", "tokens computed", "tokens cached", "mean TTFT ms", "last turn ms")
    return Table(f"{cases.num_chats} chats of {cases.num_turns} turns", columns, tuple(rows))


def measure_restart(runner: ModelRunner, cases: Cases, rng: random.Random) -> Table:
    """The long prompt: cold, from host memory, and in the first moments of a process that finds a warm directory.

    The model stays loaded: what a restart takes beside is its loading of the weights.
    """
    prompt, other = (_random_ids(runner, cases.long_prompt, rng) for _ in range(2))
    limits, rows = runner.limits, []
    with TemporaryDirectory() as directory:
        offer_memory(runner, cases, directory)
        bench = PrefixBench(runner, True, runner.offload)
        bench.ask(other, 1)
        rows.append(("cold", *bench.ask_counted(prompt)))
        for _ in range(3):  # more than the device has room for
            bench.ask(_random_ids(runner, cases.long_prompt, rng), 1)
        rows.append(("from host memory", *bench.ask_counted(prompt)))
        started_s = time.perf_counter()
        bench.close()
        closed_s = time.perf_counter()
        offer_memory(runner, cases, directory)
        loaded_s = time.perf_counter()
        warm = PrefixBench(runner, True, runner.offload)
        rows.append(("after a restart", *warm.ask_counted(prompt)))
        assert runner.offload is not None
        num_stored, block_bytes = len(runner.offload.stored), runner.limits.block_bytes
        warm.close()
    runner.offload, runner.limits = None, limits
    title = (
        f"A prompt of {cases.long_prompt} over a restart: {closed_s - started_s:.2f} s to write what was not yet,"
        f" {loaded_s - closed_s:.2f} s to read {num_stored} blocks of {block_bytes} bytes and the model's digest"
    )
    cold_ms = rows[0][2]
    return Table(
        title,
        ("prompt", "cached tokens", "TTFT ms", "share of cold"),
        tuple((name, cached, ttft_ms, ttft_ms / cold_ms) for name, cached, ttft_ms in rows),
    )


def offer_memory(runner: ModelRunner, cases: Cases, directory: str) -> None:
    """Host memory for some long prompts, with a directory; as a process that starts would have it."""
    size_bytes = 8 * (cases.long_prompt // BLOCK_SIZE + 2) * runner.limits.block_bytes
    checkpoint = open_checkpoint(cases.model, runner.config.packing)
    runner.open_offload(EngineConfig(kv_offload_bytes=size_bytes, kv_offload_dir=directory), checkpoint)


PARTS = {"no-hits": measure_no_hits, "ttft": measure_ttft, "chats": measure_chats, "restart": measure_restart}


def _random_ids(runner: ModelRunner, count: int, rng: random.Random) -> list[int]:
    return rng.choices(range(runner.limits.vocab_size), k=count)


def _open(directory: Path, cases: Cases, dtype: str, threads: int | None) -> ModelRunner:
    config = parse_model_config(json.loads((directory / "config.json").read_text(encoding="utf-8")))
    engine = EngineConfig(device="cpu", dtype=dtype, threads=threads)
    engine = EngineConfig(
        device="cpu",
        dtype=dtype,
        threads=threads,
        max_model_len=cases.longest,
        max_sequences=cases.num_streams,
        kv_memory_bytes=(cases.num_kv_tokens + BLOCK_SIZE) * bytes_per_token(config, choose_device(engine).dtype),
    )
    return load_runner(directory, config, engine, lambda done, total: None)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.prefix", description=__doc__)
    parser.add_argument("--model", type=Path, required=True, metavar="DIR", help="e.g. of bench.make_model")
    parser.add_argument("--threads", type=int, metavar="N", help="compute threads (default: as the server chooses)")
    parser.add_argument("--dtype", choices=("auto", *DTYPES), default="auto")
    parser.add_argument("--pairs", type=int, default=NUM_PAIRS, help="runs without hits (default: %(default)s)")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="default: all of them")
    parser.add_argument("--quick", action="store_true", help="see that it works; writes nothing unless --json")
    parser.add_argument("--json", type=Path, metavar="FILE", help="default: bench/results/prefix.json")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, show, write. Returns the exit code: 2 when the model cannot be loaded."""
    argv = sys.argv[1:] if argv is None else argv
    arguments = _parser().parse_args(argv)
    cases = replace(QUICK if arguments.quick else Cases(num_pairs=arguments.pairs), model=arguments.model)
    try:
        runner = _open(arguments.model, cases, arguments.dtype, arguments.threads)
    except StartupError as error:
        print(f"bench.prefix: {error.cause}\nFix: {error.fix}", file=sys.stderr)
        return 2
    except (OSError, ValueError) as error:
        fix = "name a model directory; python -m bench.make_model makes one"
        print(f"bench.prefix: {error}\nFix: {fix}", file=sys.stderr)
        return 2
    tables = [PARTS[part](runner, cases, random.Random(0)) for part in arguments.parts]
    print_tables(tables)
    name = "-".join(["prefix", *arguments.parts] if len(tables) < len(PARTS) else ["prefix"])
    path = arguments.json or (None if arguments.quick else RESULTS_DIR / f"{name}.json")
    if path is not None:
        device = runner.memory.device
        shown = {
            "model": arguments.model.resolve().name,
            "dtype": device.dtype_name,
            "threads": device.threads,
        }
        write_result(path, "prefix", command_line("python -m bench.prefix", argv), tables, shown, {})
        print(f"written: {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
