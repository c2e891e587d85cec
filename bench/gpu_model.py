"""bench.gpu_check --part model: tokens first, then the speed of random models in the engine, without HTTP.

- Each family beside transformers: small random models in float32, whose tokens the oracle on the CPU says, however
  steps are sent. What serves there is what find_operators chooses: the kernels, where they know the model.
- A real shape in the format that serves, however steps are sent: each token is held against the logits that torch's
  operators compute in float32 of the same numbers for what stood before it. In bfloat16, steps of other sizes may be
  rounded otherwise: a token may be as far from the likeliest as rounding goes, and no further.
- Speeds, beside their targets. A share of 1 would be a step that does nothing but read each weight, key and value once,
  or multiply at the ceiling.
"""

import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from itertools import pairwise
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
    TAIL_BESIDE_PROMPTS,
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
from bench.results import Cell, percentile
from core.config import BLOCK_SIZE, EngineConfig, ModelConfig, parse_model_config
from core.errors import StartupError
from core.plan import SequenceStart
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
MODEL_LIMIT_S = 150.0  # weights are drawn, kernels compiled and measured by the first case of a model
FAMILY_PROMPTS = (70, 1, 33)  # tokens
QUICK_FAMILIES = ("llama3", "gpt_oss")
FAMILY_KV_BYTES = 16 * 1024**2
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
MODELS = ("llama-8b", "qwen3-0.6b")  # the one that most targets are of first
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


def models_of(is_quick: bool, is_device: bool) -> tuple[str, ...]:
    return ("tiny",) if not is_device else MODELS[1:] if is_quick else MODELS


def cases(is_quick: bool, is_device: bool) -> list[Case]:
    """This part's."""
    models = models_of(is_quick, is_device)
    found = [ceilings_case(), *_family_cases(is_quick, is_device)]
    same = partial(_check_same_tokens, models[-1], config_of(models[-1]))
    found.append(Case(f"{models[-1]}: same tokens", same, SAME_LIMIT_S, SAME_TOKENS))
    for measures in (MEASURES, WITHOUT_GRAPHS):
        for model in models:
            for name, run in measures.items():
                found.append(Case(f"{model}: {name}", partial(run, model), MODEL_LIMIT_S, table_of(model)))
    return found


# Tokens.


def _family_cases(is_quick: bool, is_device: bool) -> list[Case]:
    def refuse(why: str, context: Context) -> Iterator[Row]:
        yield Row(FAMILIES, {"family": "all"}, FAILED, why)

    try:
        names = list(import_module(ORACLE).FAMILIES)
    except ImportError as error:  # another transformers than the tests': it costs the families alone
        return [Case("families", partial(refuse, str(error)), FAMILY_LIMIT_S, FAMILIES)]
    if is_quick or not is_device:
        names = [name for name in names if name in QUICK_FAMILIES]
    check = _check_family
    return [Case(f"family {name}", partial(check, name), FAMILY_LIMIT_S, FAMILIES, is_shared=True) for name in names]


@contextmanager
def _poisoned(context: Context) -> Iterator[None]:
    """On a CPU what nobody has written is NaN: what padding leaves behind must reach nobody."""
    if not context.is_device:
        torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        if not context.is_device:
            torch.use_deterministic_algorithms(False)


def _find(context: Context) -> FindOperators:
    """What serves; on a CPU the kernels, by Triton's interpreter."""
    found: FindOperators = find_operators if context.is_device else import_module(INTERPRETED).find_interpreted
    return found


def _check_family(family: str, context: Context) -> Iterator[Row]:
    with _poisoned(context), tempfile.TemporaryDirectory() as scratch:
        yield from _family_rows(family, context, Path(scratch) / family)


def _family_rows(family: str, context: Context, directory: Path) -> Iterator[Row]:
    module = import_module(ORACLE)
    oracle = module.Oracle(module.save_random_model(family, directory))
    is_short = context.is_quick or not context.is_device
    prompts = [Random(length).choices(range(3, 300), k=length) for length in FAMILY_PROMPTS[: 2 if is_short else None]]
    wanted = [oracle.greedy(list(prompt), 4 if is_short else 24) for prompt in prompts]
    # interpreted kernels take long: a batch has few rows there. The longest prompt is cut into chunks
    max_sequences, max_batch_tokens = (16, 64) if context.is_device else (4, 32)
    engine = EngineConfig(
        device=context.device.type,
        dtype="float32",
        max_sequences=max_sequences,
        max_batch_tokens=max_batch_tokens,
        kv_memory_bytes=FAMILY_KV_BYTES,
        threads=1,
    )
    config = parse_model_config(json.loads((directory / "config.json").read_text(encoding="utf-8")))
    for mode, options in MODES.items():
        if options.get("graphs") == "on" and not context.is_device:
            continue
        asked = replace(engine, **options)  # type: ignore[arg-type]
        runner = load_runner(directory, config, asked, lambda done, total: None, find=_find(context))
        cells: dict[str, Cell] = {"family": family, "steps": mode, "device": str(runner.memory.device.device)}
        if mode == "as it comes":
            error = _logits_error(runner, oracle.logits(prompts[0]), prompts[0])
            cells |= {"error of logits": error, "tolerance": LOGITS_TOLERANCE}
            if not error <= LOGITS_TOLERANCE:
                yield Row(FAMILIES, cells, WRONG, "its logits differ")
                continue
        found = Streams(runner).answers(prompts, len(wanted[0]))
        cells["graphs"], cells["of prompts"] = runner.captured.num_graphs, runner.captured.num_of_prompts
        if options.get("graphs") == "on" and not runner.captured.num_of_prompts:
            yield Row(FAMILIES, cells, WRONG, "no graph of a prompt's chunk could be captured")
            continue
        yield Row(FAMILIES, cells, OK if found == wanted else WRONG, difference(found, wanted))
    cells = {"family": family, "steps": "of two ranks"}
    if context.is_device and torch.cuda.device_count() < 2:
        yield Row(FAMILIES, cells, SKIPPED, "there is one GPU")
        return
    try:  # over NCCL where there are two GPUs, over gloo where there is none
        ranks = load_parallel_runner(directory, config, replace(engine, tensor_parallel=2), lambda done, total: None)
    except StartupError as refused:
        yield Row(FAMILIES, cells, SKIPPED, refused.cause)
        return
    try:
        found = Streams(ranks).answers(prompts, len(wanted[0]))
    finally:
        close()
        ranks.followers.end()
    yield Row(FAMILIES, cells, OK if found == wanted else WRONG, difference(found, wanted))


def _logits_error(runner: ModelRunner, wanted: torch.Tensor, prompt: list[int]) -> float:
    """The largest difference at any place of the prompt, of the largest logit."""
    found = _logits(runner, prompt).float().cpu()
    return float((found - wanted).abs().max() / wanted.abs().max())


def _logits(runner: ModelRunner, prompt: Sequence[int]) -> torch.Tensor:
    """At every place of a prompt, in the first slot and blocks, in steps as large as the runner's: [tokens, vocab]."""
    from tests.gpu.driver import GREEDY, make_plan

    parts, size = [], runner.limits.max_batch_tokens
    for start in range(0, len(prompt), size):
        chunk = list(prompt[start : start + size])
        blocks = range(-(-start // BLOCK_SIZE), -(-(start + len(chunk)) // BLOCK_SIZE))  # that no chunk before has
        starts = [SequenceStart(0, tuple(prompt), len(prompt), GREEDY, seed=0, stop_ids=())] if start == 0 else []
        tables = [(0, index, index) for index in blocks]
        plan = make_plan([(0, start, chunk, True)], tables=tables, sequence_starts=starts)
        parts.append(runner.logits(plan).clone())
    return torch.cat(parts)


def num_same(ours: Sequence[int], theirs: Sequence[int]) -> int:
    """Tokens before the first that differs."""
    pairs = enumerate(zip(ours, theirs, strict=False))
    return next((place for place, (our, their) in pairs if our != their), len(ours))


def difference(found: list[list[int]], wanted: list[list[int]]) -> str:
    if found == wanted:
        return ""
    places = [num_same(ours, theirs) for ours, theirs in zip(found, wanted, strict=True)]
    return f"tokens are the same for {places} of {len(wanted[0])}"


def _check_same_tokens(model: str, config: Mapping[str, Any], context: Context) -> Iterator[Row]:
    lengths: tuple[int, ...]
    if context.is_device:
        lengths, num_tokens, modes = (300, 7, 64, 129, 513, 1, 40, 90), 96, tuple(MODES)
        max_batch_tokens, kv_tokens, dtype = 256, 16_384, torch.bfloat16
    else:
        lengths, num_tokens, modes = (20, 3), 2, ("without overlap", "overlapped")
        max_batch_tokens, kv_tokens, dtype = 16, 512, torch.float32

    def engine(dtype: torch.dtype, max_batch_tokens: int, **options: Any) -> EngineConfig:
        return EngineConfig(
            device=context.device.type,
            dtype=str(dtype).removeprefix("torch."),
            max_model_len=kv_tokens // len(lengths),
            max_sequences=len(lengths),
            max_batch_tokens=max_batch_tokens,
            kv_memory_bytes=kv_tokens * bytes_per_token(parse_model_config(dict(config)), dtype),
            threads=1,
            **options,
        )

    prompts = [Random(length).choices(range(300, config["vocab_size"]), k=length) for length in lengths]
    answers = {}
    with _poisoned(context):
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


def table_of(model: str) -> str:
    return f"{model}, random weights, in the engine"


def config_of(model: str) -> Mapping[str, Any]:
    return TINY_CONFIG if model == "tiny" else PRESETS[model]


def sizes_of(context: Context) -> Sizes:
    return context.of_size(TINY, QUICK, FULL)


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


def runner_of(model: str, context: Context, has_graphs: bool = True) -> ModelRunner:
    engine = engine_config(context) if has_graphs else replace(engine_config(context), graphs="off")
    return context.once(f"{model}, graphs {has_graphs}", lambda: random_runner(config_of(model), engine))


def work_of_model(model: str) -> ModelWork:
    config = config_of(model)
    return count_work(config, dict(tensor_shapes(config)))


def _row(context: Context, model: str, measure: str, figure: float, limit: float | None = None, note: str = "") -> Row:
    return judged(context, table_of(model), model, measure, figure, limit, note)


def _decode(model: str, context: Context) -> Iterator[Row]:
    runner, sizes = runner_of(model, context), sizes_of(context)
    yield Row(table_of(model), {"measure": "room for tokens of KV", "figure": runner.memory.kv_tokens})
    work, streams, number_bytes = work_of_model(model), Streams(runner), runner.memory.device.dtype.itemsize
    for batch, length in sizes.decodes:
        if batch * (length + sizes.num_steps + 32) > runner.memory.kv_tokens:
            continue
        step_s, mean_context = streams.decode_s(batch, length, sizes.num_steps)
        limit_s = decode_limit_s(work, context.known_speed, batch, mean_context, number_bytes)
        yield _row(context, model, f"decode {batch} x {length}, tokens/s", batch / step_s, batch / limit_s)
        if (batch, length) == sizes.decodes[0]:
            yield _row(context, model, SINGLE_STREAM, 1 / step_s, 1 / limit_s)


def _first_tokens(has_graphs: bool, model: str, context: Context) -> Iterator[Row]:
    runner = runner_of(model, context, has_graphs)
    work, streams, number_bytes = work_of_model(model), Streams(runner, seed=1), runner.memory.device.dtype.itemsize
    for num_tokens in sizes_of(context).prompts:
        streams.prefill_s(num_tokens)  # what this length compiles
        seconds = statistics.median(streams.prefill_s(num_tokens) for _ in range(3))
        limit_s = prefill_limit_s(work, context.known_speed, num_tokens, number_bytes)
        measure = _of(has_graphs) + first_token_of(num_tokens)
        yield _row(context, model, measure, seconds * 1e3, limit_s * 1e3)


def _of(has_graphs: bool) -> str:
    return "" if has_graphs else "without graphs: "


def _arrivals(model: str, context: Context) -> Iterator[Row]:
    """Inter-token times of streams beside long prompts that come in, one at a time."""
    num_streams, num_prompt, num_arrivals, every_s = sizes_of(context).arrivals
    streams = Streams(runner_of(model, context))
    names = [streams.submit(streams.prompt(16), 1 << 13) for _ in range(num_streams)]
    prompts = [streams.prompt(num_prompt) for _ in range(num_arrivals + 1)]
    streams.run_until(lambda: streams.have_all(names, 8))
    quiet_end_s = time.perf_counter() + every_s
    while time.perf_counter() < quiet_end_s:
        streams.step()
    quiet_until_s, started_s, sent = time.perf_counter(), time.monotonic(), list[str]()
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
    alone, median, p99 = (percentile(*asked) or 0.0 for asked in ((gaps_alone, 50), (gaps, 50), (gaps, 99)))
    load = f"{num_streams} streams, a prompt of {num_prompt} every {every_s:g} s"
    yield _row(context, model, "inter-token median without them, ms", alone * 1e3)
    yield _row(context, model, "inter-token median beside arriving prompts, ms", median * 1e3, note=load)
    yield _row(context, model, "inter-token p99 beside arriving prompts, ms", p99 * 1e3)
    yield _row(context, model, TAIL_BESIDE_PROMPTS, p99 / median)
    first_s = statistics.median(streams.ttft_s(name) for name in sent)
    yield _row(context, model, "time to first token of an arriving prompt, ms", first_s * 1e3)


def _prefix(model: str, context: Context) -> Iterator[Row]:
    """The same prompt again, with another end: what is computed already is found."""
    streams, num_tokens = Streams(runner_of(model, context)), sizes_of(context).prefix
    shared, firsts, cached = streams.prompt(num_tokens), [], []
    for _ in range(4):
        name = streams.submit(shared + streams.prompt(8), 1)
        streams.run()
        firsts.append(streams.ttft_s(name))
        cached.append(streams.cached_tokens[name])
    again_s, note = statistics.median(firsts[1:]), f"{cached[-1]} tokens found"
    yield _row(context, model, f"prefix of {num_tokens}: first time, ms", firsts[0] * 1e3)
    yield _row(context, model, f"prefix of {num_tokens}: again, ms", again_s * 1e3, note=note)
    if not all(found >= num_tokens - 16 for found in cached[1:]):
        raise RuntimeError(f"of {num_tokens} tokens known, {cached[1:]} were found")


def _split(has_graphs: bool, model: str, context: Context) -> Iterator[Row]:
    """Where the time of a decode step goes, on the host and on the device."""
    runner, sizes, what = runner_of(model, context, has_graphs), sizes_of(context), _of(has_graphs)
    if has_graphs:
        captured, counted = runner.captured, runner.memory.graph_bytes / 2**20
        yield Row(table_of(model), {"measure": "graphs captured", "figure": captured.num_graphs})
        yield Row(table_of(model), {"measure": "graphs of steps with prompts", "figure": captured.num_of_prompts})
        yield Row(table_of(model), {"measure": "to capture the graphs, s", "figure": captured.took_s})
        cells: dict[str, Cell] = {"measure": "graphs take, MiB", "figure": captured.size_bytes / 2**20}
        yield Row(table_of(model), cells | {"limit": counted}, "", "limit: what was counted for them")
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
        spent = {"whole": total_s, "planning and telling": total_s - send_s - wait_s, "sending": send_s}
        for name, seconds in (spent | {"waiting": wait_s}).items():
            yield _row(context, model, f"{what}{name} of a step of {num_streams}, µs", seconds * 1e6)
        if context.is_device:
            busy_s, span_s, num_kernels = _device_time(streams.step, sizes.num_steps)
            busy = f"{what}device busy of a step of {num_streams}, µs"
            operations = f"{what}device operations in a step of {num_streams}"
            yield _row(context, model, busy, busy_s / sizes.num_steps * 1e6)
            yield _row(context, model, operations, num_kernels / sizes.num_steps)
            note = f"{num_streams} streams, under a profiler"
            yield _row(context, model, what + IDLE, 1 - busy_s / span_s, note=note)
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
    sizes, streams = sizes_of(context), Streams(runner_of(model, context))
    num_streams, num_long = min(64, sizes.max_sequences - 1), max(sizes.prompts)
    names = [streams.submit(streams.prompt(16), 1 << 12 if context.is_device else 256) for _ in range(num_streams)]
    streams.run_until(lambda: streams.have_all(names, 4))
    taken = [_time_cancel(streams, name) for name in names[: max(1, num_streams // 2)]]
    yield _row(context, model, "cancel of a stream, ms", statistics.median(seconds for seconds, _ in taken) * 1e3)
    yield _row(context, model, CANCEL_STEPS, float(max(num_steps for _, num_steps in taken)))
    long = streams.submit(streams.prompt(num_long), 4)
    streams.step()
    streams.step()
    if long not in streams.cached_tokens:
        yield _row(context, model, f"cancel of a prompt of {num_long}, ms", _time_cancel(streams, long)[0] * 1e3)
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
    "first tokens": partial(_first_tokens, True),
    "step split": partial(_split, True),
    "arriving prompts": _arrivals,
    "prefix cache": _prefix,
    "cancel": _cancel,
}
WITHOUT_GRAPHS: Mapping[str, Measure] = {
    "step split without graphs": partial(_split, False),
    "first tokens without graphs": partial(_first_tokens, False),
}
