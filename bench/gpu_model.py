"""bench.gpu_check --part model: tokens first, then the speed of random models in the engine, without HTTP.

- Each family beside transformers: small random models in float32, whose tokens the oracle computes on the CPU, however
  steps are sent. The operators are what find_operators chooses: the kernels, where they know the model.
- A real shape in the format that serves, however steps are sent: each token is held against the logits that torch's
  operators compute in float32 of the same numbers. In bfloat16, steps of other sizes may round otherwise: a token may
  be as far from the likeliest as rounding goes, and no further.
- Speeds, beside their targets. A share of 1 would be a step that only reads each weight, key and value once, or
  multiplies at the ceiling.
"""

import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from itertools import product
from pathlib import Path
from random import Random
from typing import Any

import torch

from bench.engine import Streams, random_runner
from bench.gpu_run import (
    CANCEL_STEPS,
    FAILED,
    IDLE,
    OK,
    SINGLE_STREAM,
    SKIPPED,
    WRONG,
    Case,
    Context,
    Row,
    ceilings_case,
    first_token_of,
    judged,
)
from bench.limits import ModelWork, count_work, decode_limit_s, prefill_limit_s
from bench.make_model import PRESETS, tensor_shapes
from bench.results import Cell
from core.config import BLOCK_SIZE, EngineConfig, ModelConfig
from core.config_json import parse_model_config
from core.errors import StartupError
from core.plan import SequenceStart, make_plan
from gpu.device import DeviceChoice
from gpu.kv_cache import bytes_per_token
from gpu.loading import FindOperators, load_runner
from gpu.operators import Operators
from gpu.parallel.ranks import close
from gpu.parallel.runner import load_parallel_runner
from gpu.runner import ModelRunner
from gpu.tune import find_operators

INTERPRETED = "tests.gpu.kernels.interpreted"
ORACLE = "tests.oracle"  # it imports transformers, which only those who check families need
FAMILIES, SAME_TOKENS = "Families beside transformers, float32", "Tokens of real shapes, however steps are sent"
FAMILY_LIMIT_S = 200.0  # five runners, with what their kernels compile
SAME_LIMIT_S = 240.0
MODEL_LIMIT_S = 150.0  # the first case of a model draws weights, compiles and measures kernels
FAMILY_PROMPTS = (70, 1, 33)  # tokens
QUICK_FAMILIES = ("llama3", "gpt_oss")
KV_BYTES = 16 * 1024**2  # of a small model
LOGITS_TOLERANCE = 2e-4  # of the largest
TOKEN_TOLERANCES = {torch.bfloat16: 0.05, torch.float32: 2e-4}  # of the largest: what rounding does in tens of layers
# How steps may be sent; by graphs on a device alone. All give the same tokens.
MODES: dict[str, dict[str, str]] = {
    "as it comes": {},
    "without overlap": {"overlap": "off", "graphs": "off"},
    "overlapped": {"overlap": "on", "graphs": "off"},
    "with graphs": {"overlap": "off", "graphs": "on"},
    "with graphs, overlapped": {"overlap": "on", "graphs": "on"},
}
MODELS = ("llama-8b", "qwen3-0.6b")  # most targets are of the first
TINY_CONFIG = PRESETS["qwen3-0.6b"] | {
    "vocab_size": 600,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "head_dim": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
}


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much is measured. decodes: (sequences, context)."""

    max_model_len: int
    max_sequences: int
    max_batch_tokens: int
    decodes: tuple[tuple[int, int], ...]
    prompts: tuple[int, ...]
    num_steps: int


_DECODES = ((1, 128), (1, 1024), *((2**n, 128) for n in range(1, 10)), (64, 4096), (512, 640))
FULL = Sizes(16_384, 512, 8192, _DECODES, (128, 1024, 8192), 32)
QUICK = Sizes(16_384, 64, 8192, ((1, 1024), (64, 128)), (128, 1024), 16)
TINY = Sizes(512, 8, 128, ((1, 32), (4, 32)), (32,), 3)


def models_of(is_quick: bool, is_device: bool) -> tuple[str, ...]:
    return ("tiny",) if not is_device else MODELS[1:] if is_quick else MODELS


def config_of(model: str) -> Mapping[str, Any]:
    return TINY_CONFIG if model == "tiny" else PRESETS[model]


def cases(is_quick: bool, is_device: bool) -> list[Case]:
    """This part's."""
    models = models_of(is_quick, is_device)
    same = Case(f"{models[-1]}: same tokens", partial(_check_same_tokens, models[-1]), SAME_LIMIT_S, SAME_TOKENS)
    speeds = [
        Case(f"{model}: {name}", partial(run, model), MODEL_LIMIT_S, title_of(model))
        for model, (name, run) in product(models, MEASURES.items())
    ]
    return [ceilings_case(), *_family_cases(is_quick, is_device), same, *speeds]


# Tokens.


def _family_cases(is_quick: bool, is_device: bool) -> list[Case]:
    try:
        names = list(import_module(ORACLE).FAMILIES)
    except ImportError as error:  # another transformers than the tests': it costs the families alone
        refused = Row(FAMILIES, {"family": "all"}, FAILED, str(error))
        return [Case("families", lambda context: [refused], FAMILY_LIMIT_S, FAMILIES)]
    if is_quick or not is_device:
        names = [name for name in names if name in QUICK_FAMILIES]
    check = _check_family
    return [Case(f"family {name}", partial(check, name), FAMILY_LIMIT_S, FAMILIES, is_shared=True) for name in names]


def _find(context: Context) -> FindOperators:
    """The operators that serve; on a CPU the kernels, by Triton's interpreter."""
    found: FindOperators = find_operators if context.is_device else import_module(INTERPRETED).find_interpreted
    return found


def _check_family(family: str, context: Context) -> Iterator[Row]:
    module, is_short = import_module(ORACLE), context.is_quick or not context.is_device
    prompts = [Random(length).choices(range(3, 300), k=length) for length in FAMILY_PROMPTS[: 2 if is_short else None]]
    # Interpreted kernels take long: a batch has few rows there. The longest prompt is cut into chunks
    rows, tokens = (16, 64) if context.is_device else (4, 32)
    sizes = {"max_sequences": rows, "max_batch_tokens": tokens, "kv_memory_bytes": KV_BYTES, "threads": 1}
    engine = EngineConfig(device=context.device.type, dtype="float32", **sizes)  # type: ignore[arg-type]
    with context.poisoned(), tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch) / family
        oracle = module.Oracle(module.save_random_model(family, directory))
        wanted = [oracle.greedy(list(prompt), 4 if is_short else 24) for prompt in prompts]
        config = parse_model_config(json.loads((directory / "config.json").read_text(encoding="utf-8")))
        for mode, options in MODES.items():
            if options.get("graphs") == "on" and not context.is_device:
                continue
            asked = replace(engine, **options)  # type: ignore[arg-type]
            runner = load_runner(directory, config, asked, lambda done, total: None, find=_find(context))
            cells: dict[str, Cell] = {"family": family, "steps": mode}
            if mode == "as it comes":
                logits = oracle.logits(prompts[0])
                error = float((_logits(runner, prompts[0]).float().cpu() - logits).abs().max() / logits.abs().max())
                cells |= {"error of logits": error, "tolerance": LOGITS_TOLERANCE}
                if not error <= LOGITS_TOLERANCE:
                    yield Row(FAMILIES, cells, WRONG, "its logits differ")
                    continue
            found = Streams(runner).answers(prompts, len(wanted[0]))
            cells |= {"graphs": runner.captured.num_graphs, "of prompts": runner.captured.num_of_prompts}
            if options.get("graphs") == "on" and not runner.captured.num_of_prompts:
                yield Row(FAMILIES, cells, WRONG, "no graph of a prompt's chunk could be captured")
                continue
            yield Row(FAMILIES, cells, OK if found == wanted else WRONG, difference(found, wanted))
        cells = {"family": family, "steps": "of two ranks"}
        if context.is_device and torch.cuda.device_count() < 2:
            yield Row(FAMILIES, cells, SKIPPED, "there is one GPU")
            return
        asked = replace(engine, tensor_parallel=2)
        try:  # over NCCL where there are two GPUs, over gloo where there is none
            ranks = load_parallel_runner(directory, config, asked, lambda done, total: None)
        except StartupError as refused:
            yield Row(FAMILIES, cells, SKIPPED, refused.cause)
            return
        try:
            found = Streams(ranks).answers(prompts, len(wanted[0]))
        finally:
            close()
            ranks.followers.end()
        yield Row(FAMILIES, cells, OK if found == wanted else WRONG, difference(found, wanted))


def _logits(runner: ModelRunner, prompt: Sequence[int]) -> torch.Tensor:
    """At every place of a prompt, in the first slot and blocks, in steps as large as the runner's: [tokens, vocab]."""
    from tests.gpu.driver import GREEDY

    parts, size = [], runner.limits.max_batch_tokens
    for start in range(0, len(prompt), size):
        chunk = list(prompt[start : start + size])
        blocks = range(-(-start // BLOCK_SIZE), -(-(start + len(chunk)) // BLOCK_SIZE))  # that no chunk before has
        starts = [SequenceStart(0, tuple(prompt), len(prompt), GREEDY, seed=0, stop_ids=())] if start == 0 else []
        tables = [(0, index, index) for index in blocks]
        plan = make_plan([(0, start, chunk, True)], tables=tables, sequence_starts=starts)
        parts.append(runner.logits(plan).clone())
    return torch.cat(parts)


def difference(found: list[list[int]], wanted: list[list[int]]) -> str:
    """How many tokens of each answer are the same before the first that differs."""

    def num_same(ours: Sequence[int], theirs: Sequence[int]) -> int:
        pairs = enumerate(zip(ours, theirs, strict=False))
        return next((index for index, (our, their) in pairs if our != their), len(ours))

    places = [num_same(ours, theirs) for ours, theirs in zip(found, wanted, strict=True)]
    return "" if found == wanted else f"tokens are the same for {places} of {len(wanted[0])}"


def _check_same_tokens(model: str, context: Context) -> Iterator[Row]:
    config, lengths, num_tokens, modes = config_of(model), (20, 3), 2, ("without overlap", "overlapped")
    max_batch_tokens, kv_tokens, dtype = 16, 512, torch.float32
    if context.is_device:
        lengths, num_tokens, modes = (300, 7, 64, 129, 513, 1, 40, 90), 96, tuple(MODES)  # type: ignore[assignment]
        max_batch_tokens, kv_tokens, dtype = 256, 16_384, torch.bfloat16

    def engine(dtype: torch.dtype, max_batch_tokens: int, **options: Any) -> EngineConfig:
        token_bytes = bytes_per_token(parse_model_config(dict(config)), dtype)
        sizes = {"max_model_len": kv_tokens // len(lengths), "max_sequences": len(lengths), "threads": 1}
        sizes |= {"max_batch_tokens": max_batch_tokens, "kv_memory_bytes": kv_tokens * token_bytes}
        name = str(dtype).removeprefix("torch.")
        return EngineConfig(device=context.device.type, dtype=name, **sizes, **options)  # type: ignore[arg-type]

    prompts = [Random(length).choices(range(300, config["vocab_size"]), k=length) for length in lengths]
    answers = {}
    with context.poisoned():
        for mode in modes:
            context.drop()
            runner = random_runner(config, engine(dtype, max_batch_tokens, **MODES[mode]), _find(context))
            answers[mode] = Streams(runner).answers(prompts, num_tokens)
            del runner
    context.drop()
    whole = engine(torch.float32, kv_tokens // len(lengths))  # takes a prompt and its answer in one step
    exact = random_runner(config, whole, _torchs, dtype)
    for mode, found in answers.items():
        worst = max(_off(exact, prompt, answer) for prompt, answer in zip(prompts, found, strict=True))
        same = sum(ours == theirs for ours, theirs in zip(found, answers[modes[0]], strict=True))
        cells: dict[str, Cell] = {"model": model, "steps": mode, "dtype": str(dtype).removeprefix("torch.")}
        cells |= {"off the likeliest": worst, "tolerance": TOKEN_TOLERANCES[dtype]}
        cells |= {"answers as the first": same, "of": len(prompts)}
        yield Row(SAME_TOKENS, cells, OK if worst <= TOKEN_TOLERANCES[dtype] else WRONG)  # NaN is wrong


def _torchs(config: ModelConfig, choice: DeviceChoice) -> Operators:
    return Operators(choice.dtype, choice.device, config.rms_norm_eps)


def _off(exact: ModelRunner, prompt: Sequence[int], answer: Sequence[int]) -> float:
    """How far an answer's tokens are from the likeliest, at most: of the largest logit."""
    logits = _logits(exact, [*prompt, *answer[:-1]])[len(prompt) - 1 :]  # [answer, vocab]
    chosen = logits.gather(1, torch.tensor(answer, device=logits.device).unsqueeze(1)).squeeze(1)
    return ((logits.amax(-1) - chosen) / logits.abs().amax(-1)).max().item()


# Speeds.


def title_of(model: str) -> str:
    return f"{model}, random weights, in the engine"


def engine_config(context: Context) -> EngineConfig:
    sizes = context.of_size(TINY, QUICK, FULL)
    asked = {name: getattr(sizes, name) for name in ("max_model_len", "max_sequences", "max_batch_tokens")}
    if not context.is_device:
        asked |= {"dtype": "float32", "kv_memory_bytes": KV_BYTES, "threads": 1}
    return EngineConfig(device=context.device.type, **asked)


def runner_of(model: str, context: Context, graphs: str = "auto") -> ModelRunner:
    engine = replace(engine_config(context), graphs=graphs)
    return context.once(f"{model}, graphs {graphs}", lambda: random_runner(config_of(model), engine))


def work_of_model(model: str) -> ModelWork:
    config = config_of(model)
    return count_work(config, dict(tensor_shapes(config)))


def _decode(model: str, context: Context) -> Iterator[Row]:
    runner, sizes = runner_of(model, context), context.of_size(TINY, QUICK, FULL)
    row = partial(judged, context, title_of(model), model)
    yield row("room for tokens of KV", runner.memory.kv_tokens)
    work, streams, number_bytes = work_of_model(model), Streams(runner), runner.memory.device.dtype.itemsize
    for batch, length in sizes.decodes:
        if batch * (length + sizes.num_steps + 32) <= runner.memory.kv_tokens:
            step_s, mean_context = streams.decode_s(batch, length, sizes.num_steps)
            limit_s = decode_limit_s(work, context.speed, batch, mean_context, number_bytes)
            yield row(f"decode {batch} x {length}, tokens/s", batch / step_s, batch / limit_s)
            if (batch, length) == sizes.decodes[0]:
                yield row(SINGLE_STREAM, 1 / step_s, 1 / limit_s)


def _first_tokens(model: str, context: Context) -> Iterator[Row]:
    runner = runner_of(model, context)
    work, streams, number_bytes = work_of_model(model), Streams(runner, seed=1), runner.memory.device.dtype.itemsize
    for num_tokens in context.of_size(TINY, QUICK, FULL).prompts:
        streams.prefill_s(num_tokens)  # what this length compiles
        seconds = statistics.median(streams.prefill_s(num_tokens) for _ in range(3))
        limit_ms = prefill_limit_s(work, context.speed, num_tokens, number_bytes) * 1e3
        yield judged(context, title_of(model), model, first_token_of(num_tokens), seconds * 1e3, limit_ms)


def _split(graphs: str, model: str, context: Context) -> Iterator[Row]:
    """Where the time of a decode step goes, on the host and on the device."""
    runner, sizes = runner_of(model, context, graphs), context.of_size(TINY, QUICK, FULL)
    row, what = partial(judged, context, title_of(model), model), "without graphs: " if graphs == "off" else ""
    if graphs != "off":
        yield row("graphs captured", runner.captured.num_graphs, note=f"in {runner.captured.took_s:.1f} s")
        counted = f"{runner.memory.graph_bytes / 2**20:.0f} MiB were counted for them"
        yield row("graphs take, MiB", runner.captured.size_bytes / 2**20, note=counted)
    for num_streams in sorted({1, min(64, sizes.max_sequences)}):
        streams = Streams(runner)
        names = [streams.submit(streams.prompt(32), 1 << 13 if context.is_device else 64) for _ in range(num_streams)]
        streams.run_until(partial(streams.have_all, names, 4))
        streams.clocked.send_s = streams.clocked.wait_s = 0.0
        started_s = time.perf_counter()
        for _ in range(sizes.num_steps):
            streams.step()
        total_s, send_s, wait_s = time.perf_counter() - started_s, streams.clocked.send_s, streams.clocked.wait_s
        spent = {"whole": total_s, "planning and delivery": total_s - send_s - wait_s, "sending": send_s}
        for name, seconds in (spent | {"waiting": wait_s}).items():
            yield row(f"{what}{name} of a step of {num_streams}, µs", seconds / sizes.num_steps * 1e6)
        if context.is_device:
            busy_s, span_s, num_kernels = _device_time(streams.step, sizes.num_steps)
            yield row(f"{what}device busy of a step of {num_streams}, µs", busy_s / sizes.num_steps * 1e6)
            yield row(f"{what}device operations in a step of {num_streams}", num_kernels / sizes.num_steps)
            yield row(what + IDLE, 1 - busy_s / span_s, note=f"{num_streams} streams, under a profiler")
        streams.cancel_all()


def _device_time(step: Callable[[], object], num_steps: int) -> tuple[float, float, int]:
    """(seconds in which the device computes or copies, from the first to the last, how many operations)."""
    from torch._C._autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as found:
        for _ in range(num_steps):
            step()
        torch.cuda.synchronize()
    events = [event for event in found.events() or () if event.device_type == DeviceType.CUDA]
    spans = sorted((event.time_range.start, event.time_range.end) for event in events)
    if not spans:
        raise RuntimeError("the profiler has seen nothing of the device")
    busy, end = 0.0, spans[0][0]
    for start, stop in spans:  # µs; they overlap where there are several streams
        busy += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return busy / 1e6, (end - spans[0][0]) / 1e6, len(spans)


def _cancel(model: str, context: Context) -> Iterator[Row]:
    """From the message to the last news of a stream that decodes."""
    sizes, streams = context.of_size(TINY, QUICK, FULL), Streams(runner_of(model, context))
    num_tokens = 1 << 12 if context.is_device else 256
    names = [streams.submit(streams.prompt(16), num_tokens) for _ in range(min(64, sizes.max_sequences - 1))]
    streams.run_until(lambda: streams.have_all(names, 4))
    taken_s, num_steps = [], 0
    for name in names[: max(1, len(names) // 2)]:
        started_s, steps = time.perf_counter(), 0
        streams.cancel(name)
        while name not in streams.cached_tokens:
            streams.step()
            steps += 1
        taken_s.append(time.perf_counter() - started_s)
        num_steps = max(num_steps, steps)
    row = partial(judged, context, title_of(model), model)
    yield row("cancel of a stream, ms", statistics.median(taken_s) * 1e3)
    yield row(CANCEL_STEPS, float(num_steps))
    streams.cancel_all()


MEASURES: Mapping[str, Callable[[str, Context], Iterator[Row]]] = {
    "decode": _decode,
    "first tokens": _first_tokens,
    "step split": partial(_split, "auto"),
    "cancel": _cancel,
    "step split without graphs": partial(_split, "off"),
}
