"""The prefix cache: `python -m bench.prefix --model DIR`. What it costs where nothing is found, and what it saves.

Requests go through core.engine.Engine and the model's runner, in this process, without HTTP. Runs with and without the
cache take turns, so that what else the machine does disturbs both alike.
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
from bench.kit import Flag, Found, bench
from bench.results import Cell, Table, table_of
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
    streams = {"with": Streams(runner), "without": Streams(runner, has_prefix_cache=False)}
    rows: list[dict[str, Cell]] = []
    num_tokens = cases.num_streams * cases.output
    for pair in range(cases.num_pairs + 1):
        prompts = [streams["with"].prompt(cases.prompt) for _ in range(cases.num_streams)]
        rates = {}
        for name in sorted(streams, reverse=bool(pair % 2)):
            started_s = time.perf_counter()
            streams[name].answers(prompts, cases.output)
            rates[name] = num_tokens / (time.perf_counter() - started_s)
        figures: dict[str, Cell] = {f"tokens/s {name}": rates[name] for name in streams}
        rows.append({"pair": pair} | figures | {"lost %": 100 * (rates["without"] / rates["with"] - 1)})
    del rows[0]  # it warms up
    medians: dict[str, Cell] = {"pair": "median"}
    medians |= {name: statistics.median(float(row[name] or 0) for row in rows) for name in rows[0] if name != "pair"}
    title = f"No hits: {cases.num_streams} streams, prompts of {cases.prompt} random tokens, {cases.output} out"
    return table_of(title, [*rows, medians])


def _beside_cold(title: str, found: dict[str, tuple[float, int]]) -> Table:
    """found: by the prompt, its TTFT in seconds and its cached tokens."""
    cold_s = found["cold"][0]
    rows: list[dict[str, Cell]] = [
        {"prompt": name, "cached tokens": cached, "TTFT ms": ttft_s * 1e3, "share of cold": ttft_s / cold_s}
        for name, (ttft_s, cached) in found.items()
    ]
    return table_of(title, rows)


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
    found = {"cold": (statistics.median(cold), 0), "cached": (statistics.median(warm), num_cached)}
    return _beside_cold(f"Time to the first token of a prompt of {cases.long_prompt}", found)


def measure_chats(runner: ModelRunner, cases: Cases) -> Table:
    """Chats over one system prompt, turn by turn, one chat's turn after another's."""
    rows: list[dict[str, Cell]] = []
    for has_cache in (False, True):
        streams = Streams(runner, has_prefix_cache=has_cache)  # each with the same questions
        system = streams.prompt(cases.system)
        chats, ttfts_ms = [list(system) for _ in range(cases.num_chats)], []
        for chat in chats * cases.num_turns:
            chat += streams.prompt(cases.question)
            ttft_s, answer, _ = ask(streams, chat, cases.answer)
            ttfts_ms.append(ttft_s * 1e3)
            chat += answer
        stats = streams.scheduler.stats()
        counts = {"tokens computed": stats.num_prompt_tokens, "tokens cached": stats.num_cache_hits}
        last_ms = statistics.mean(ttfts_ms[-cases.num_chats :])
        means = {"mean TTFT ms": statistics.mean(ttfts_ms), "last turn ms": last_ms}
        rows.append({"cache": "with" if has_cache else "without", **counts, **means})
    return table_of(f"{cases.num_chats} chats of {cases.num_turns} turns", rows)


def measure_restart(runner: ModelRunner, cases: Cases) -> Table:
    """The long prompt: cold, from host memory, and in the first moments of a process that finds a warm directory.

    The model stays loaded: what a restart takes beside is the loading of the weights.
    """
    limits, block_bytes = runner.limits, runner.limits.block_bytes
    checkpoint = open_checkpoint(cases.model, runner.config.packing)

    def opened(directory: str) -> tuple[Streams, KVOffload]:
        """Host memory for some long prompts, with a directory; as a process that starts would have it."""
        size_bytes = 8 * (cases.long_prompt // BLOCK_SIZE + 2) * block_bytes
        runner.open_offload(EngineConfig(kv_offload_bytes=size_bytes, kv_offload_dir=directory), checkpoint)
        store: KVOffload | None = runner.offload
        assert store is not None
        return Streams(runner, store=store, stored=store.stored), store

    with TemporaryDirectory() as directory:
        streams, _ = opened(directory)
        prompt, *others = (streams.prompt(cases.long_prompt) for _ in range(5))
        ask(streams, others.pop())
        cold = ask(streams, prompt)
        for other in others:  # more than the device has room for
            ask(streams, other)
        from_host = ask(streams, prompt)
        started_s = time.perf_counter()
        streams.engine.close()  # as the server does when it ends
        closed_s = time.perf_counter()
        warm, store = opened(directory)
        loaded_s = time.perf_counter()
        restarted = ask(warm, prompt)
        num_stored = len(store.stored)
        warm.engine.close()
    runner.offload, runner.limits = None, limits
    title = (
        f"A prompt of {cases.long_prompt} over a restart: {closed_s - started_s:.2f} s to write what was not yet,"
        f" {loaded_s - closed_s:.2f} s to read {num_stored} blocks of {block_bytes} bytes and the model's digest"
    )
    found = {"cold": cold, "from host memory": from_host, "after a restart": restarted}
    return _beside_cold(title, {name: (ttft_s, cached) for name, (ttft_s, _, cached) in found.items()})


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
main = bench("prefix", __doc__, _measure, FLAGS)

if __name__ == "__main__":
    sys.exit(main())
