"""bench.gpu_check --part model: each family's tokens, and the speed of random models in the engine, without HTTP.

Requests go through core.engine.Engine in this process. A share of 1 would be a step that does nothing but read each
weight, key and value once, or multiply at the ceiling. Figures beside their targets: gpu_targets.py.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch

from bench.engine import EngineBench
from bench.gpu_environment import ceilings_case
from bench.gpu_families import family_cases
from bench.gpu_parts import Case, Context, Row
from bench.gpu_same_tokens import same_tokens_case
from bench.gpu_streams import Streams
from bench.gpu_targets import (
    CANCEL_STEPS,
    IDLE,
    SINGLE_STREAM,
    TAIL_BESIDE_PROMPTS,
    first_token_of,
)
from bench.gpu_targets import judged as judged_in
from bench.model_presets import PRESETS, tensor_shapes
from bench.random_weights import random_runner
from bench.results import Cell, percentile
from bench.work import ModelWork, count_work, decode_limit_s, prefill_limit_s
from core.config import EngineConfig
from gpu.runner import ModelRunner

MODELS = ("llama-8b", "qwen3-0.6b")  # the one that most targets are of first
QUICK_MODELS = ("qwen3-0.6b",)
TINY_CONFIG = {
    **PRESETS["qwen3-0.6b"],
    "vocab_size": 600,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 1024,
}
MODEL_LIMIT_S = 150.0  # weights are drawn, kernels compiled and measured by the first case of a model


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much is measured.

    Args:
        decodes: (sequences, context).
        arrivals: streams, tokens of the prompts that come in, how many, one every so many seconds.
    """

    max_model_len: int
    max_sequences: int
    max_batch_tokens: int
    decodes: tuple[tuple[int, int], ...]
    prompts: tuple[int, ...]
    num_steps: int
    arrivals: tuple[int, int, int, float]
    prefix: int


FULL = Sizes(
    max_model_len=16_384,
    max_sequences=512,
    max_batch_tokens=8192,
    decodes=((1, 128), (1, 1024), *((2**n, 128) for n in range(1, 10)), (64, 4096), (512, 640)),
    prompts=(128, 1024, 8192),
    num_steps=32,
    arrivals=(64, 8192, 8, 1.0),
    prefix=4096,
)
QUICK = Sizes(16_384, 64, 8192, ((1, 1024), (64, 128)), (128, 1024), 16, (16, 4096, 2, 0.5), 2048)
TINY = Sizes(512, 8, 128, ((1, 32), (4, 32)), (32,), 3, (2, 64, 2, 0.05), 96)


def cases(is_quick: bool, is_device: bool) -> list[Case]:
    """This part's."""
    models = ("tiny",) if not is_device else QUICK_MODELS if is_quick else MODELS
    found = [ceilings_case(), *family_cases(is_quick, is_device), same_tokens_case(models[-1], config_of(models[-1]))]
    for measures in (MEASURES, WITHOUT_GRAPHS):
        for model in models:
            for name, run in measures.items():
                found.append(Case(f"{model}: {name}", partial(run, model), MODEL_LIMIT_S, table_of(model)))
    return found


def table_of(model: str) -> str:
    return f"{model}, random weights, in the engine"


def config_of(model: str) -> Mapping[str, Any]:
    return TINY_CONFIG if model == "tiny" else PRESETS[model]


def sizes_of(context: Context) -> Sizes:
    return TINY if not context.is_device else QUICK if context.is_quick else FULL


def engine_config(context: Context) -> EngineConfig:
    sizes = sizes_of(context)
    return EngineConfig(
        device=context.device.type,
        dtype="auto" if context.is_device else "float32",
        max_model_len=sizes.max_model_len,
        max_sequences=sizes.max_sequences,
        max_batch_tokens=sizes.max_batch_tokens,
        kv_memory_bytes=None if context.is_device else 16 * 1024**2,
        threads=None if context.is_device else 1,
    )


def runner_of(model: str, context: Context) -> ModelRunner:
    return context.once(model, lambda: random_runner(config_of(model), engine_config(context)))


def runner_without_graphs(model: str, context: Context) -> ModelRunner:
    config = replace(engine_config(context), graphs="off")
    return context.once(f"{model} without graphs", lambda: random_runner(config_of(model), config))


def work_of_model(model: str) -> ModelWork:
    config = config_of(model)
    return count_work(config, dict(tensor_shapes(config)))


def judged(
    context: Context, model: str, measure: str, figure: float, limit: float | None = None, note: str = ""
) -> Row:
    return judged_in(context, table_of(model), model, measure, figure, limit, note)


def _decode(model: str, context: Context) -> Iterator[Row]:
    runner, sizes = runner_of(model, context), sizes_of(context)
    yield Row(table_of(model), {"measure": "room for tokens of KV", "figure": runner.memory.kv_tokens})
    work, bench, number_bytes = work_of_model(model), EngineBench(runner), runner.memory.device.dtype.itemsize
    for batch, length in sizes.decodes:
        if batch * (length + sizes.num_steps + 32) > runner.memory.kv_tokens:
            continue
        run = bench.decode(batch, length, sizes.num_steps)
        limit_s = decode_limit_s(work, context.speed, batch, run.context, number_bytes)
        name = f"decode {batch} x {length}"
        yield judged(context, model, f"{name}, tokens/s", batch / run.step_s, batch / limit_s)
        if (batch, length) == sizes.decodes[0]:
            yield judged(context, model, SINGLE_STREAM, 1 / run.step_s, 1 / limit_s)


def _first_tokens(model: str, context: Context) -> Iterator[Row]:
    yield from _first_tokens_of(model, context, runner_of(model, context))


def _first_tokens_by_python(model: str, context: Context) -> Iterator[Row]:
    yield from _first_tokens_of(model, context, runner_without_graphs(model, context), "without graphs: ")


def _first_tokens_of(model: str, context: Context, runner: ModelRunner, what: str = "") -> Iterator[Row]:
    sizes = sizes_of(context)
    work, bench, number_bytes = work_of_model(model), EngineBench(runner, seed=1), runner.memory.device.dtype.itemsize
    for num_tokens in sizes.prompts:
        bench.prefill(num_tokens)  # what this length compiles
        seconds = statistics.median(bench.prefill(num_tokens) for _ in range(3))
        limit_s = prefill_limit_s(work, context.speed, num_tokens, number_bytes)
        yield judged(context, model, what + first_token_of(num_tokens), seconds * 1e3, limit_s * 1e3)


def _arrivals(model: str, context: Context) -> Iterator[Row]:
    """Inter-token times of streams beside long prompts that come in, one at a time."""
    num_streams, num_prompt, num_arrivals, every_s = sizes_of(context).arrivals
    streams = Streams(runner_of(model, context))
    names = [streams.submit(streams.prompt(16), 1 << 13) for _ in range(num_streams)]
    prompts = [streams.prompt(num_prompt) for _ in range(num_arrivals + 1)]
    streams.run_until(lambda: streams.have_all(names, 8))
    _run_for(streams, every_s)
    quiet_until_s, started_s = time.perf_counter(), time.monotonic()
    sent: list[str] = []
    while len(sent) < num_arrivals or not streams.have_all(sent, 1):
        if len(sent) < num_arrivals and time.monotonic() >= started_s + len(sent) * every_s:
            sent.append(streams.submit(prompts[len(sent)], 1))
        streams.step()
    gaps_alone: list[float] = []
    gaps: list[float] = []
    for name in names:
        for before, now in pairwise(streams.times_s[name]):
            (gaps if now > quiet_until_s else gaps_alone).append(now - before)
    streams.cancel_all()
    median, p99 = (percentile(gaps, q) or 0.0 for q in (50, 99))
    load = f"{num_streams} streams, a prompt of {num_prompt} every {every_s:g} s"
    alone = percentile(gaps_alone, 50) or 0.0
    yield judged(context, model, "inter-token median without them, ms", alone * 1e3)
    yield judged(context, model, "inter-token median beside arriving prompts, ms", median * 1e3, note=load)
    yield judged(context, model, "inter-token p99 beside arriving prompts, ms", p99 * 1e3)
    yield judged(context, model, TAIL_BESIDE_PROMPTS, p99 / median)
    first = statistics.median(streams.ttft_s(name) for name in sent)
    yield judged(context, model, "time to first token of an arriving prompt, ms", first * 1e3)


def _run_for(streams: Streams, seconds: float) -> None:
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s:
        streams.step()


def _prefix(model: str, context: Context) -> Iterator[Row]:
    """The same prompt again, with another end: what is computed already is found."""
    streams, num_tokens = Streams(runner_of(model, context)), sizes_of(context).prefix
    shared, firsts, cached = streams.prompt(num_tokens), [], []
    for _ in range(4):
        name = streams.submit(shared + streams.prompt(8), 1)
        streams.run_until(lambda: streams.num_open == 0)
        firsts.append(streams.ttft_s(name))
        cached.append(streams.cached_tokens[name])
    warm = statistics.median(firsts[1:])
    yield judged(context, model, f"prefix of {num_tokens}: first time, ms", firsts[0] * 1e3)
    yield judged(context, model, f"prefix of {num_tokens}: again, ms", warm * 1e3, note=f"{cached[-1]} tokens found")
    if not all(found >= num_tokens - 16 for found in cached[1:]):
        raise RuntimeError(f"of {num_tokens} tokens known, {cached[1:]} were found")


def _split(model: str, context: Context) -> Iterator[Row]:
    captured = runner_of(model, context).captured
    yield Row(table_of(model), {"measure": "graphs captured", "figure": captured.num_graphs})
    yield Row(table_of(model), {"measure": "graphs of steps with prompts", "figure": captured.num_of_prompts})
    yield Row(table_of(model), {"measure": "to capture the graphs, s", "figure": captured.took_s})
    counted = runner_of(model, context).memory.graph_bytes / 2**20
    cells: dict[str, Cell] = {"measure": "graphs take, MiB", "figure": captured.size_bytes / 2**20, "limit": counted}
    yield Row(table_of(model), cells, "", "limit: what was counted for them")
    yield from _split_of(model, context, runner_of(model, context))


def _split_by_python(model: str, context: Context) -> Iterator[Row]:
    yield from _split_of(model, context, runner_without_graphs(model, context), "without graphs: ")


def _split_of(model: str, context: Context, runner: ModelRunner, what: str = "") -> Iterator[Row]:
    """Where the time of a decode step goes, on the host and on the device."""
    sizes = sizes_of(context)
    for num_streams in sorted({1, min(64, sizes.max_sequences)}):
        streams = Streams(runner)
        names = [streams.submit(streams.prompt(32), 1 << 13 if context.is_device else 64) for _ in range(num_streams)]
        streams.run_until(lambda streams=streams, names=names: streams.have_all(names, 4))  # type: ignore[misc]
        streams.clocked.send_s = streams.clocked.wait_s = 0.0
        started_s = time.perf_counter()
        for _ in range(sizes.num_steps):
            streams.step()
        total_s = (time.perf_counter() - started_s) / sizes.num_steps
        send_s, wait_s = (part / sizes.num_steps for part in (streams.clocked.send_s, streams.clocked.wait_s))
        of = f"of a step of {num_streams}, µs"
        yield judged(context, model, f"{what}whole {of}", total_s * 1e6)
        yield judged(context, model, f"{what}planning and telling {of}", (total_s - send_s - wait_s) * 1e6)
        yield judged(context, model, f"{what}sending {of}", send_s * 1e6)
        yield judged(context, model, f"{what}waiting {of}", wait_s * 1e6)
        if context.is_device:
            busy_s, span_s, num_kernels = _device_time(streams.step, sizes.num_steps)
            yield judged(context, model, f"{what}device busy {of}", busy_s / sizes.num_steps * 1e6)
            yield judged(
                context, model, f"{what}device operations in a step of {num_streams}", num_kernels / sizes.num_steps
            )
            note = f"{num_streams} streams, under a profiler"
            idle = 1 - busy_s / span_s
            yield judged(context, model, what + IDLE, idle, note=note)
        streams.cancel_all()


def _device_time(step: Callable[[], object], num_steps: int) -> tuple[float, float, int]:
    """(seconds in which the device computes or copies, from the first to the last, how many operations)."""
    from torch._C._autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as found:
        for _ in range(num_steps):
            step()
        torch.cuda.synchronize()
    spans = sorted(
        (event.time_range.start, event.time_range.end)
        for event in found.events() or ()
        if event.device_type == DeviceType.CUDA
    )
    if not spans:
        raise RuntimeError("the profiler has seen nothing of the device")
    busy, end = 0.0, spans[0][0]
    for start, stop in spans:  # µs; they overlap where there are several streams
        busy += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return busy / 1e6, (end - spans[0][0]) / 1e6, len(spans)


def _cancel(model: str, context: Context) -> Iterator[Row]:
    """From the message to the last news of a stream that decodes, and of a prompt in the middle."""
    sizes = sizes_of(context)
    streams = Streams(runner_of(model, context))
    num_streams = min(64, sizes.max_sequences - 1)
    names = [streams.submit(streams.prompt(16), 1 << 12 if context.is_device else 256) for _ in range(num_streams)]
    streams.run_until(lambda: streams.have_all(names, 4))
    seconds, steps = [], []
    for name in names[: max(1, num_streams // 2)]:
        took_s, num_steps = _time_cancel(streams, name)
        seconds.append(took_s)
        steps.append(num_steps)
    yield judged(context, model, "cancel of a stream, ms", statistics.median(seconds) * 1e3)
    yield judged(context, model, CANCEL_STEPS, float(max(steps)))
    long = streams.submit(streams.prompt(max(sizes.prompts)), 4)
    streams.step()
    streams.step()
    if long not in streams.cached_tokens:
        took_s, _ = _time_cancel(streams, long)
        yield judged(context, model, f"cancel of a prompt of {max(sizes.prompts)}, ms", took_s * 1e3)
    streams.cancel_all()


def _time_cancel(streams: Streams, name: str) -> tuple[float, int]:
    """Seconds, and steps that were computed meanwhile."""
    started_s, num_steps = time.perf_counter(), 0
    streams.cancel(name)
    while name not in streams.cached_tokens:
        streams.step()
        num_steps += 1
    return time.perf_counter() - started_s, num_steps


Measure = Callable[[str, Context], Iterator[Row]]
MEASURES: Mapping[str, Measure] = {
    "decode": _decode,
    "first tokens": _first_tokens,
    "step split": _split,
    "arriving prompts": _arrivals,
    "prefix cache": _prefix,
    "cancel": _cancel,
}
WITHOUT_GRAPHS: Mapping[str, Measure] = {
    "step split without graphs": _split_by_python,
    "first tokens without graphs": _first_tokens_by_python,
}
