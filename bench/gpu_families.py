"""Every family beside transformers: small random models, on the device in float32, whose tokens the CPU oracle says.

What serves there is what find_operators chooses: the kernels, where they know the model.
"""

import json
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from random import Random
from typing import Any

import torch

from bench.gpu_parts import FAILED, OK, SKIPPED, WRONG, Case, Context, Row
from bench.gpu_streams import Streams
from bench.results import Cell
from core.config import EngineConfig, parse_model_config
from core.errors import StartupError
from core.plan import Runner, SequenceStart, StepPlan
from core.types import SamplingParams
from gpu.loading import load_runner
from gpu.parallel.ranks import close
from gpu.parallel.runner import load_parallel_runner
from gpu.runner import ModelRunner
from gpu.tune import find_operators

INTERPRETED = "tests.gpu.kernels.interpreted"
ORACLE = "tests.oracle"  # it imports transformers, which only those who check families need
TABLE = "Families beside transformers, float32"
LIMIT_S = 200.0  # five runners, with what their kernels compile
PROMPTS = (70, 1, 33)  # tokens
QUICK_FAMILIES = ("llama3", "gpt_oss")
NUM_TOKENS, QUICK_TOKENS = 24, 4
KV_BYTES = 16 * 1024**2
LOGITS_TOLERANCE = 2e-4  # of the largest
# How steps may be sent; by graphs on a device alone. All give the same tokens.
MODES: dict[str, dict[str, str]] = {
    "as it comes": {},
    "without overlap": {"overlap": "off", "graphs": "off"},
    "overlapped": {"overlap": "on", "graphs": "off"},
    "with graphs": {"overlap": "off", "graphs": "on"},
    "with graphs, overlapped": {"overlap": "on", "graphs": "on"},
}


def family_cases(is_quick: bool, is_device: bool) -> list[Case]:
    try:
        families = import_module(ORACLE).FAMILIES
    except ImportError as error:  # another transformers than the tests': it costs the families alone
        return [Case("families", partial(_refuse, str(error)), LIMIT_S, TABLE)]
    names = [name for name in families if name in QUICK_FAMILIES] if is_quick or not is_device else list(families)
    return [Case(f"family {name}", partial(_check, name), LIMIT_S, TABLE, is_shared=True) for name in names]


def _refuse(why: str, context: Context) -> Iterator[Row]:
    yield Row(TABLE, {"family": "all"}, FAILED, why)


def _check(family: str, context: Context) -> Iterator[Row]:
    with poisoned(context):
        yield from _check_modes(family, context)


@contextmanager
def poisoned(context: Context) -> Iterator[None]:
    """On a CPU what nobody has written is NaN: what padding leaves behind must reach nobody."""
    if context.is_device:
        yield
        return
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def _check_modes(family: str, context: Context) -> Iterator[Row]:
    oracle_module = import_module(ORACLE)
    is_short = context.is_quick or not context.is_device
    prompts = [Random(length).choices(range(3, 300), k=length) for length in PROMPTS[: 2 if is_short else None]]
    num_tokens = QUICK_TOKENS if is_short else NUM_TOKENS
    with tempfile.TemporaryDirectory() as scratch:
        directory = oracle_module.save_random_model(family, Path(scratch) / family)
        oracle = oracle_module.Oracle(directory)
        wanted = [oracle.greedy(list(prompt), num_tokens) for prompt in prompts]
        for mode, options in MODES.items():
            if options.get("graphs") == "on" and not context.is_device:
                continue
            runner = _open(directory, context.device, options)
            cells: dict[str, Cell] = {"family": family, "steps": mode, "device": str(runner.memory.device.device)}
            if mode == "as it comes":
                error = _logits_error(runner, oracle.logits(prompts[0]), prompts[0])
                cells |= {"error of logits": error, "tolerance": LOGITS_TOLERANCE}
                if not error <= LOGITS_TOLERANCE:
                    yield Row(TABLE, cells, WRONG, "its logits differ")
                    continue
            found = _tokens(runner, prompts, num_tokens)
            cells["graphs"], cells["of prompts"] = runner.captured.num_graphs, runner.captured.num_of_prompts
            if options.get("graphs") == "on" and not runner.captured.num_of_prompts:
                yield Row(TABLE, cells, WRONG, "no graph of a prompt's chunk could be captured")
                continue
            yield Row(TABLE, cells, OK if found == wanted else WRONG, difference(found, wanted))
        yield _of_two_ranks(directory, context, {"family": family, "steps": "of two ranks"}, prompts, wanted)


def _of_two_ranks(
    directory: Path, context: Context, cells: dict[str, Cell], prompts: list[list[int]], wanted: list[list[int]]
) -> Row:
    """Over NCCL where there are two GPUs, over gloo where there is none."""
    if context.is_device and torch.cuda.device_count() < 2:
        return Row(TABLE, cells, SKIPPED, "there is one GPU")
    config = parse_model_config(json.loads((directory / "config.json").read_text(encoding="utf-8")))
    engine = replace(_engine(context.device), tensor_parallel=2)
    try:
        runner = load_parallel_runner(directory, config, engine, lambda done, total: None)
    except StartupError as error:
        return Row(TABLE, cells, SKIPPED, error.cause)
    try:
        found = _tokens(runner, prompts, len(wanted[0]))
    finally:
        close()
        runner.end()
    return Row(TABLE, cells, OK if found == wanted else WRONG, difference(found, wanted))


def _open(directory: Path, device: torch.device, options: dict[str, str]) -> ModelRunner:
    """On a CPU by Triton's interpreter, which takes long: a batch has few rows there."""
    find = find_operators if device.type != "cpu" else import_module(INTERPRETED).find_interpreted
    config = parse_model_config(json.loads((directory / "config.json").read_text(encoding="utf-8")))
    changed = replace(_engine(device), **options)  # type: ignore[arg-type]
    return load_runner(directory, config, changed, lambda done, total: None, find=find)


def _engine(device: torch.device) -> EngineConfig:
    """The longest prompt is cut into chunks."""
    max_sequences, max_batch_tokens = (4, 32) if device.type == "cpu" else (16, 64)
    return EngineConfig(
        device=device.type,
        dtype="float32",
        max_sequences=max_sequences,
        max_batch_tokens=max_batch_tokens,
        kv_memory_bytes=KV_BYTES,
        threads=1,
    )


def _tokens(runner: Runner[Any], prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
    """Greedy, all in one batch, the first one's prompt in chunks beside the others' decodes."""
    streams = Streams(runner)
    names = [streams.submit(tuple(prompt), num_tokens) for prompt in prompts]
    streams.run_until(lambda: streams.num_open == 0)
    return [streams.tokens[name] for name in names]


def _logits_error(runner: ModelRunner, wanted: torch.Tensor, prompt: list[int]) -> float:
    """The largest difference at any place of the prompt, of the largest logit."""
    found = runner.logits(prompt_plan(prompt)).float().cpu()
    return float((found - wanted).abs().max() / wanted.abs().max())


def prompt_plan(prompt: Sequence[int]) -> StepPlan:
    """All of a prompt in one step, in the first slot and blocks."""
    from tests.gpu.driver import make_plan

    tables = [(0, index, index) for index in range(-(-len(prompt) // 16))]
    greedy = SamplingParams(max_tokens=1, temperature=0.0)
    start = SequenceStart(0, tuple(prompt), len(prompt), greedy, seed=0, stop_ids=())
    return make_plan([(0, 0, list(prompt), True)], tables=tables, sequence_starts=[start])


def difference(found: list[list[int]], wanted: list[list[int]]) -> str:
    if found == wanted:
        return ""
    places = [
        next((place for place, pair in enumerate(zip(ours, theirs, strict=False)) if pair[0] != pair[1]), len(ours))
        for ours, theirs in zip(found, wanted, strict=True)
    ]
    return f"tokens are the same for {places} of {len(wanted[0])}"
