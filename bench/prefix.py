"""The prefix cache: `python -m bench.prefix --model DIR`. What it costs where nothing is found, and what it saves.

Requests go through core.engine.Engine and the model's runner, in this process, without HTTP. With and without the cache
are run in turn, so that what else the machine does disturbs both alike.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from bench.engine import MODEL_FLAGS, Streams, open_model, shown_model
from bench.kit import Flag, Found, run_bench
from bench.results import Cell, Table
from core.config import BLOCK_SIZE, EngineConfig
from gpu.checkpoint import open_checkpoint
from gpu.kv_store import KVOffload
from gpu.runner import ModelRunner


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

    num_pairs: int = 6
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


_FEW = {"num_pairs": 1, "num_streams": 2, "num_repeats": 1, "num_chats": 1, "num_turns": 2}
QUICK = Cases(**_FEW, prompt=32, output=4, long_prompt=128, system=32, question=16, answer=4)  # type: ignore[arg-type]


def ask(streams: Streams, prompt_ids: Sequence[int], max_tokens: int = 1) -> tuple[float, list[int], int]:
    """One request alone: seconds to its first token, its tokens, and how many of its prompt were cached."""
    name = streams.submit(prompt_ids, max_tokens)
    streams.run()
    return streams.ttft_s(name), streams.tokens[name], streams.cached_tokens[name]


def measure_no_hits(runner: ModelRunner, cases: Cases) -> Table:
    """Random prompts: the cache is looked up, filled and evicted from, and never of use."""
    with_cache, without = Streams(runner), Streams(runner, has_prefix_cache=False)
    taken_s: dict[bool, list[float]] = {True: [], False: []}
    for number in range(cases.num_pairs + 1):
        prompts = [with_cache.prompt(cases.prompt) for _ in range(cases.num_streams)]
        for is_cached in (True, False) if number % 2 else (False, True):
            started_s = time.perf_counter()
            (with_cache if is_cached else without).answers(prompts, cases.output)
            taken_s[is_cached].append(time.perf_counter() - started_s)
    pairs = list(zip(taken_s[True][1:], taken_s[False][1:], strict=True))  # the first of both warms up
    num_tokens = cases.num_streams * cases.output
    lost = [100 * (on / off - 1) for on, off in pairs]
    rows: list[tuple[Cell, ...]] = [
        (i, num_tokens / on, num_tokens / off, lost[i - 1]) for i, (on, off) in enumerate(pairs, 1)
    ]
    on, off = (statistics.median(pair[i] for pair in pairs) for i in range(2))
    rows.append(("median", num_tokens / on, num_tokens / off, statistics.median(lost)))
    title = f"No hits: {cases.num_streams} streams, prompts of {cases.prompt} random tokens, {cases.output} out"
    return Table(title, ("pair", "tokens/s with", "tokens/s without", "lost %"), tuple(rows))


def measure_ttft(runner: ModelRunner, cases: Cases) -> Table:
    """A long prompt that nobody has sent before, and others that begin as it does."""
    streams, num_common = Streams(runner), int(cases.long_prompt * cases.cached_share)
    cold, warm, num_cached = [], [], 0
    for _ in range(cases.num_repeats):
        prompt = streams.prompt(cases.long_prompt)
        cold.append(ask(streams, prompt)[0])
        other = prompt[:num_common] + streams.prompt(cases.long_prompt - num_common)
        warm_s, _, num_cached = ask(streams, other)
        warm.append(warm_s)
    cold_s, warm_s = statistics.median(cold), statistics.median(warm)
    rows = (("cold", 0, cold_s * 1e3, 1.0), ("cached", num_cached, warm_s * 1e3, warm_s / cold_s))
    columns = ("prompt", "cached tokens", "TTFT ms", "share of cold")
    return Table(f"Time to the first token of a prompt of {cases.long_prompt}", columns, rows)


def measure_chats(runner: ModelRunner, cases: Cases) -> Table:
    """Chats over one system prompt, turn by turn, one chat's turn after another's."""
    rows: list[tuple[Cell, ...]] = []
    for has_cache in (False, True):
        streams = Streams(runner, has_prefix_cache=has_cache)  # each with the same questions
        system = streams.prompt(cases.system)
        chats = [list(system) for _ in range(cases.num_chats)]
        ttfts_s = []
        for _ in range(cases.num_turns):
            for chat in chats:
                chat += streams.prompt(cases.question)
                ttft_s, answer, _ = ask(streams, chat, cases.answer)
                ttfts_s.append(ttft_s)
                chat += answer
        stats = streams.scheduler.stats()
        means = (statistics.mean(ttfts_s) * 1e3, statistics.mean(ttfts_s[-cases.num_chats :]) * 1e3)
        rows.append(("with" if has_cache else "without", stats.num_prompt_tokens, stats.num_cache_hits, *means))
    columns = ("cache", "tokens computed", "tokens cached", "mean TTFT ms", "last turn ms")
    return Table(f"{cases.num_chats} chats of {cases.num_turns} turns", columns, tuple(rows))


def measure_restart(runner: ModelRunner, cases: Cases) -> Table:
    """The long prompt: cold, from host memory, and in the first moments of a process that finds a warm directory.

    The model stays loaded: what a restart takes beside is its loading of the weights.
    """
    limits = runner.limits
    found: dict[str, tuple[float, list[int], int]] = {}
    with TemporaryDirectory() as directory:
        streams = _with_memory(runner, cases, directory)
        prompt, *others = (streams.prompt(cases.long_prompt) for _ in range(5))
        ask(streams, others.pop())
        found["cold"] = ask(streams, prompt)
        for other in others:  # more than the device has room for
            ask(streams, other)
        found["from host memory"] = ask(streams, prompt)
        started_s = time.perf_counter()
        streams.engine.close()  # as the server does when it ends
        closed_s = time.perf_counter()
        warm = _with_memory(runner, cases, directory)
        loaded_s = time.perf_counter()
        found["after a restart"] = ask(warm, prompt)
        assert runner.offload is not None
        num_stored, block_bytes = len(runner.offload.stored), runner.limits.block_bytes
        warm.engine.close()
    runner.offload, runner.limits = None, limits
    title = (
        f"A prompt of {cases.long_prompt} over a restart: {closed_s - started_s:.2f} s to write what was not yet,"
        f" {loaded_s - closed_s:.2f} s to read {num_stored} blocks of {block_bytes} bytes and the model's digest"
    )
    cold_s = found["cold"][0]
    rows = tuple((name, cached, ttft_s * 1e3, ttft_s / cold_s) for name, (ttft_s, _, cached) in found.items())
    return Table(title, ("prompt", "cached tokens", "TTFT ms", "share of cold"), rows)


def _with_memory(runner: ModelRunner, cases: Cases, directory: str) -> Streams:
    """Host memory for some long prompts, with a directory; as a process that starts would have it."""
    size_bytes = 8 * (cases.long_prompt // BLOCK_SIZE + 2) * runner.limits.block_bytes
    checkpoint = open_checkpoint(cases.model, runner.config.packing)
    runner.open_offload(EngineConfig(kv_offload_bytes=size_bytes, kv_offload_dir=directory), checkpoint)
    store: KVOffload | None = runner.offload
    assert store is not None
    return Streams(runner, store=store, stored=store.stored)


PARTS = {"no-hits": measure_no_hits, "ttft": measure_ttft, "chats": measure_chats, "restart": measure_restart}


def _measure(arguments: argparse.Namespace) -> Found:
    cases = replace(QUICK if arguments.quick else Cases(num_pairs=arguments.pairs), model=arguments.model)
    runner = open_model(arguments, cases.num_kv_tokens, max_model_len=cases.longest, max_sequences=cases.num_streams)
    tables = [PARTS[part](runner, cases) for part in arguments.parts]
    name = "-".join(["prefix", *arguments.parts] if len(tables) < len(PARTS) else ["prefix"])
    return Found(tables, shown_model(arguments, runner), name=name)


FLAGS = (
    *MODEL_FLAGS,
    Flag("--pairs", Cases().num_pairs, "runs without hits"),
    Flag("--parts", tuple(PARTS), "to measure", more={"nargs": "+", "choices": tuple(PARTS)}),
)


def main(argv: Sequence[str] | None = None) -> int:
    return run_bench("prefix", __doc__, _measure, FLAGS, argv)


if __name__ == "__main__":
    sys.exit(main())
