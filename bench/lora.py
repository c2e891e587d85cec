"""What LoRA adapters cost: `python -m bench.lora --model DIR`. Steps with them and without, in pairs, and loads.

One runner's steps take turns: with the matmuls of a server that takes no adapters, and with those of one that has some
loaded. The ratio of a pair is of its median steps; decodes at several batches, and prompts. Where others keep the
machine busy, --cpu-time with --threads 1 counts what the engine's thread computes, and not what it waits.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from bench.engine import MODEL_FLAGS, Streams, open_model, shown_model
from bench.kit import Flag, Found, bench
from bench.results import Cell, table_of
from bench.speculative import interval
from core.types import Adapter
from gpu.adapters import CONFIG_FILE, PREFIX, SITES, WEIGHTS_FILE, AdaptedLinear, StepAdapters
from gpu.model import adapter_sites
from gpu.parameters import empty_weights
from gpu.runner import ModelRunner


def write_adapter(directory: Path, runner: ModelRunner, rank: int, seed: int) -> Path:
    """An adapter of every matrix of attention and MLP, with random weights."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, target in empty_weights(runner.config, torch.float32, torch.device("meta"))[1].items():
        if target.matrix in SITES:
            num_out, num_in = target.shape
            module = PREFIX + name.removesuffix(".weight")
            for part, shape in (("A", (rank, num_in)), ("B", (num_out, rank))):
                tensors[f"{module}.lora_{part}.weight"] = torch.randn(shape, generator=generator).mul_(0.01).bfloat16()
    directory.mkdir()
    (directory / CONFIG_FILE).write_text(json.dumps({"peft_type": "LORA", "r": rank, "lora_alpha": rank}))
    save_file(tensors, directory / WEIGHTS_FILE)
    return directory


def switch(runner: ModelRunner, has_adapters: bool) -> None:
    """Let the model's layers have the matmuls that take adapters, or those without."""
    model = runner.model
    if (model.adapted is not None) == has_adapters:
        return
    model.adapted = step = StepAdapters(model.operators.low_rank()) if has_adapters else None
    for index, layer in enumerate(model.layers):
        for owner, site in adapter_sites(layer):
            linear = getattr(owner, site)
            setattr(owner, site, linear.linear if step is None else AdaptedLinear(linear, index, site, step))


def measure(arguments: argparse.Namespace) -> Found:
    num, rank = arguments.adapters, arguments.rank
    if arguments.cpu_time:
        time.perf_counter = time.thread_time
    room = {"max_model_len": arguments.context + 256, "max_sequences": max(arguments.batches), "max_batch_tokens": 512}
    num_kv_tokens = max(arguments.batches) * (arguments.context + 64) + 2048
    runner = open_model(arguments, num_kv_tokens, **room, max_loras=num, max_lora_rank=rank)
    loads_s, adapters = list[float](), list[Adapter]()
    with tempfile.TemporaryDirectory() as home:
        for seed in range(num):
            path = write_adapter(Path(home) / str(seed), runner, rank, seed)
            started_s = time.perf_counter()
            adapters.append(runner.load_adapter(path))
            loads_s.append(time.perf_counter() - started_s)
    streams = Streams(runner, has_prefix_cache=False)
    kinds: dict[str, list[Adapter | None]] = {
        f"none of {num} loaded": [None],
        "one": [adapters[0]],
        f"{num} mixed": [*adapters],
    }
    rows = list[dict[str, Cell]]()
    for kind, mixed in kinds.items():
        for batch in (*arguments.batches, 0):
            pairs = list[tuple[float, float]]()
            for number in range(arguments.pairs + 1):  # the first one warms up
                found = {}
                for has_adapters in (True, False) if number % 2 else (False, True):
                    switch(runner, has_adapters)
                    own: list[Any] = mixed if has_adapters else [None]
                    found[has_adapters] = _measured_s(streams, batch, arguments, own)
                if number:
                    pairs.append((found[False], found[True]))
            ratios = [with_s / without_s for without_s, with_s in pairs]
            low, high = interval(ratios)
            without_s, with_s = (statistics.median(one) for one in zip(*pairs, strict=True))
            rows.append(
                {
                    "adapters": kind,
                    "step": f"decode of {batch}" if batch else f"prompt of {arguments.context}",
                    "ms without": 1e3 * without_s,
                    "ms with": 1e3 * with_s,
                    "ratio": statistics.median(ratios),
                    "from": low,
                    "to": high,
                }
            )
            print(rows[-1], file=sys.stderr)
    loads: list[dict[str, Cell]] = [
        {
            "rank": rank,
            "MiB": adapters[0].size_bytes / 2**20,
            "median ms": 1e3 * statistics.median(loads_s),
            "most ms": 1e3 * max(loads_s),
        }
    ]
    tables = table_of(f"Steps with adapters and without, {arguments.pairs} pairs", rows), table_of("Loads", loads)
    return Found(tables, {**shown_model(arguments, runner), "rank": rank, "context": arguments.context})


def _measured_s(streams: Streams, batch: int, arguments: argparse.Namespace, adapters: list[Adapter | None]) -> float:
    """A decode of so many rows; 0: a prompt."""
    if batch:
        return streams.decode_s(batch, arguments.decode_context, arguments.steps, adapters)[0]
    name = streams.submit(streams.prompt(arguments.context), 1, adapter=adapters[0])
    streams.run()
    return streams.ttft_s(name)


FLAGS = (
    *MODEL_FLAGS,
    Flag("--adapters", 16, "loaded", quick=2),
    Flag("--rank", 16, "of each, in every matrix", quick=4),
    Flag("--batches", (1, 16), "rows of a decode", quick=(2,), more={"type": int, "nargs": "+"}),
    Flag("--context", 256, "tokens of a prompt", quick=16),
    Flag("--decode-context", 16, "tokens before a decode", quick=8),
    Flag("--steps", 12, "timed, of each decode", quick=2),
    Flag("--pairs", 12, "of measurements", quick=2),
    Flag("--cpu-time", None, "of this thread, instead of the clock", more={"action": "store_true"}),
)
main = bench("lora", __doc__, measure, FLAGS)

if __name__ == "__main__":
    sys.exit(main())
