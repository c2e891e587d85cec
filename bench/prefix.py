"""What the prefix cache saves, and host memory over a restart: `python -m bench.prefix --model DIR`.

Requests go through core.engine.Engine and the model's runner, in this process, without HTTP.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from tempfile import TemporaryDirectory

from bench.engine import MODEL_FLAGS, Streams, open_model, shown_model
from bench.kit import Flag, Found, bench
from bench.results import Cell, Table, table_of
from core.config import BLOCK_SIZE, EngineConfig
from gpu.checkpoint import open_checkpoint
from gpu.kv_store import KVOffload
from gpu.runner import ModelRunner

CACHED_SHARE = 0.95  # of the prompt


def ask(streams: Streams, prompt_ids: Sequence[int], max_tokens: int = 1) -> tuple[float, list[int], int]:
    """One request alone: seconds to its first token, its tokens, and how many of its prompt were cached."""
    name = streams.submit(prompt_ids, max_tokens)
    streams.run()
    return streams.ttft_s(name), streams.tokens[name], streams.cached_tokens[name]


def _beside_cold(title: str, found: dict[str, tuple[float, int]]) -> Table:
    """found: by the prompt, its TTFT in seconds and its cached tokens."""
    cold_s = found["cold"][0]
    rows: list[dict[str, Cell]] = [
        {"prompt": name, "cached tokens": cached, "TTFT ms": ttft_s * 1e3, "share of cold": ttft_s / cold_s}
        for name, (ttft_s, cached) in found.items()
    ]
    return table_of(title, rows)


def measure_ttft(runner: ModelRunner, arguments: argparse.Namespace) -> Table:
    """A long prompt that nobody has sent before, and others that begin as it does."""
    streams, num_common = Streams(runner), int(arguments.prompt * CACHED_SHARE)
    cold, warm, num_cached = [], [], 0
    for _ in range(arguments.repeats):
        prompt = streams.prompt(arguments.prompt)
        cold.append(ask(streams, prompt)[0])
        other = prompt[:num_common] + streams.prompt(arguments.prompt - num_common)
        warm_s, _, num_cached = ask(streams, other)
        warm.append(warm_s)
    found = {"cold": (statistics.median(cold), 0), "cached": (statistics.median(warm), num_cached)}
    return _beside_cold(f"Time to the first token of a prompt of {arguments.prompt}", found)


def measure_restart(runner: ModelRunner, arguments: argparse.Namespace) -> Table:
    """The long prompt: cold, from host memory, and in the first moments of a process that finds a warm directory.

    The model stays loaded: what a restart takes beside is the loading of the weights.
    """
    limits, block_bytes = runner.limits, runner.limits.block_bytes
    checkpoint = open_checkpoint(arguments.model, runner.config.packing)

    def opened(directory: str) -> tuple[Streams, KVOffload]:
        """Host memory for some long prompts, with a directory; as a process that starts would have it."""
        size_bytes = 8 * (arguments.prompt // BLOCK_SIZE + 2) * block_bytes
        runner.open_offload(EngineConfig(kv_offload_bytes=size_bytes, kv_offload_dir=directory), checkpoint)
        store: KVOffload | None = runner.offload
        assert store is not None
        return Streams(runner, store=store, stored=store.stored), store

    with TemporaryDirectory() as directory:
        streams, _ = opened(directory)
        prompt, *others = (streams.prompt(arguments.prompt) for _ in range(5))
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
        f"A prompt of {arguments.prompt} over a restart: {closed_s - started_s:.2f} s to write what was not yet,"
        f" {loaded_s - closed_s:.2f} s to read {num_stored} blocks of {block_bytes} bytes and the model's digest"
    )
    found = {"cold": cold, "from host memory": from_host, "after a restart": restarted}
    return _beside_cold(title, {name: (ttft_s, cached) for name, (ttft_s, _, cached) in found.items()})


PARTS = {"ttft": measure_ttft, "restart": measure_restart}


def _measure(arguments: argparse.Namespace) -> Found:
    longest = arguments.prompt + 1 + BLOCK_SIZE
    runner = open_model(arguments, 2 * longest, max_model_len=longest, max_sequences=1)
    tables = [PARTS[part](runner, arguments) for part in arguments.parts]
    name = "-".join(["prefix", *arguments.parts] if len(tables) < len(PARTS) else ["prefix"])
    return Found(tables, shown_model(arguments, runner), name=name)


FLAGS = (
    *MODEL_FLAGS,
    Flag("--prompt", 4096, "tokens", 128),
    Flag("--repeats", 3, "of each prompt", 1),
    Flag("--parts", tuple(PARTS), "to measure", more={"nargs": "+", "choices": tuple(PARTS)}),
)
main = bench("prefix", __doc__, _measure, FLAGS)

if __name__ == "__main__":
    sys.exit(main())
