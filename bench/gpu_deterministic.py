"""bench.gpu_check --part deterministic: the same bits alone and in company, and what that costs beside free steps.

- Matmuls of a real model's sizes, in each form: rows alone, in another order and beside others; and their times.
- Small models of each kind and format of weights: requests with seeds and logprobs, alone in whole prompts, and in a
  crowd that has too few blocks, so that prompts come in chunks and answers are computed again; by graphs and without.
- A real shape's requests, the same way, with --deterministic and without it, where the count of those that differ is
  told and not judged; and its decodes and prompts, timed.
"""

import json
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from importlib import import_module
from itertools import product
from pathlib import Path
from random import Random
from typing import Any

import torch

from bench.engine import Streams, random_runner
from bench.gpu_kernels import Draw, stored
from bench.gpu_model import FAMILY_LIMIT_S, KV_BYTES, MODEL_LIMIT_S, ORACLE, config_of, engine_config, models_of
from bench.gpu_run import OK, WRONG, Case, Context, Row, ceilings_case
from bench.results import Cell
from core.config import BLOCK_SIZE, QUANTIZE_SCHEMES, EngineConfig
from core.config_json import parse_model_config
from core.scheduler import Scheduler
from core.types import Request, SamplingParams
from gpu.loading import load_runner
from gpu.runner import ModelRunner
from gpu.streams import graph_seconds

MATMULS = "Matmuls of one tile: a row alone and in company"
COMPANY, COST = "Requests alone and in company", "What it costs"
FORMS = ("plain", "int8", "fp8", "int4", "fp8 by 128")
SIZES = ((6144, 4096), (4096, 14_336))  # Llama 8B's: of many outputs, and cut along its inputs
ROWS = (1, 2, 15, 16, 17, 33, 64, 65, 130, 300, 2048)
TIMED_ROWS = (1, 16, 64, 512, 2048)
FAMILIES = ("llama3", "qwen3_moe", "gpt_oss", "gemma2")
DECODES, PROMPTS = ((1, 1024), (64, 1024)), (1024, 8192)


def cases(is_quick: bool, is_device: bool) -> list[Case]:
    """This part's."""
    sizes, families = (SIZES, FAMILIES) if is_device else (((70, 1024),), FAMILIES[:1])
    schemes: tuple[str | None, ...] = (None, *QUANTIZE_SCHEMES) if is_device else (None,)
    forms = FORMS[:2] if is_quick else FORMS
    model = models_of(is_quick, is_device)[-1]
    found = [
        Case(f"matmul {form} {size}", partial(check_matmul, form, size), 120.0, MATMULS)
        for form in forms
        for size in sizes
    ]
    for family, scheme in product(families[:2] if is_quick else families, schemes):
        name = f"{family}, {scheme or 'as stored'}"
        found.append(Case(name, partial(_small, family, scheme), FAMILY_LIMIT_S, COMPANY, is_shared=True))
    found.append(Case(f"{model}: company", partial(_company, model), 2 * MODEL_LIMIT_S, COMPANY))
    return [ceilings_case(), *found, Case(f"{model}: cost", partial(_cost, model), 2 * MODEL_LIMIT_S, COST)]


def check_matmul(form: str, size: tuple[int, int], context: Context) -> Iterator[Row]:
    from gpu.kernels.matmul import Matmul

    dtype, rows = (torch.bfloat16, ROWS) if context.is_device else (torch.float32, (1, 17, 40))
    draw = Draw(torch.Generator(context.device).manual_seed(0), dtype)
    weight, x = stored(draw, form, *size), draw.noise(rows[-1], size[1])
    fixed, free = Matmul(weight, None, is_fixed=True), Matmul(weight, None)
    together = fixed(x)
    for count in rows:
        first = (rows[-1] - count) // 2
        is_same = torch.equal(fixed(x[first:][:count].clone()), together[first:][:count])
        is_same &= torch.equal(fixed(x[:count].flip(0)).flip(0), together[:count])
        cells: dict[str, Cell] = {"form": form, "size": str(size), "rows": count}
        if context.is_device and count in TIMED_ROWS:
            taken_s = [graph_seconds(partial(one, x[:count])) for one in (free, fixed)]
            cells |= {"free, µs": taken_s[0] * 1e6, "fixed, µs": taken_s[1] * 1e6, "ratio": taken_s[1] / taken_s[0]}
        yield Row(MATMULS, cells, OK if is_same else WRONG)


def _small(family: str, scheme: str | None, context: Context) -> Iterator[Row]:
    """On a CPU by its own operators: Triton's interpreter takes minutes for each."""
    dtype, graphs = ("bfloat16", ("on", "off")) if context.is_device else ("float32", ("off",))
    sizes = {"max_sequences": 8, "max_batch_tokens": 128, "max_model_len": 256, "kv_memory_bytes": KV_BYTES}
    asked = {"device": context.device.type, "dtype": dtype, "quantize": scheme, "deterministic": True, "threads": 1}
    engine = EngineConfig(**asked | sizes)  # type: ignore[arg-type]
    lengths = (70, 1, 33, 50, 17, 120) if context.is_device else (22, 7, 8)
    with context.poisoned(), tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch) / family
        import_module(ORACLE).save_random_model(family, directory)
        config = parse_model_config(json.loads((directory / "config.json").read_text(encoding="utf-8")))
        for mode in graphs:
            runner = load_runner(directory, config, replace(engine, graphs=mode), lambda done, total: None)
            cells: dict[str, Cell] = {"model": family, "weights": scheme or "as stored", "graphs": mode}
            yield _judged(runner, cells, lengths, 40 if context.is_device else 12, (3, 300))


def _company(model: str, context: Context) -> Iterator[Row]:
    lengths, num_tokens = ((300, 7, 64, 129, 513, 1, 40, 90), 96) if context.is_device else ((22, 7, 8), 12)
    config = config_of(model)
    for is_deterministic in (True, False):
        runner = _runner(model, context, is_deterministic)
        cells: dict[str, Cell] = {"model": model, "weights": "as stored", "graphs": "auto"}
        cells["--deterministic"] = str(is_deterministic)
        found = _judged(runner, cells, lengths, num_tokens, (300, config["vocab_size"]))
        yield found if is_deterministic else replace(found, verdict="")
        del runner


def _judged(
    runner: ModelRunner, cells: dict[str, Cell], lengths: tuple[int, ...], num_tokens: int, vocabulary: tuple[int, int]
) -> Row:
    """Tokens and logprobs of requests with prompts of these lengths, together and each alone."""
    from tests.fakes import FakeClock
    from tests.workload import Workload, WorkloadRun

    requests = [
        Request(
            request_id=str(number),
            prompt_ids=tuple(Random(number).choices(range(*vocabulary), k=length)),
            sampling=_sampling(number, num_tokens),
            arrival_s=0.0,
        )
        for number, length in enumerate(lengths)
    ]
    limits = runner.limits
    longest = -(-(max(lengths) + num_tokens + 1) // BLOCK_SIZE)
    few = replace(limits, num_blocks=longest + 2, max_batch_tokens=max(12, max(lengths) // 4), timed_rows=())
    crowd = Scheduler(few, (), seeds=lambda: 0)
    together = WorkloadRun(Workload([(0, one) for one in requests]), crowd, runner, FakeClock()).run()
    num_same = 0
    for one in requests:
        alone = Scheduler(limits, (), seeds=lambda: 0, has_prefix_cache=False)
        found = WorkloadRun(Workload([(0, one)]), alone, runner, FakeClock()).run()
        num_same += found[one.request_id] == together[one.request_id]
    cells |= {"preempted": crowd.stats().num_preemptions, "the same": num_same, "of": len(requests)}
    return Row(COMPANY, cells, OK if num_same == len(requests) else WRONG)


def _sampling(number: int, num_tokens: int) -> SamplingParams:
    """One of four samples as torch alone can, and so makes torch sample its whole steps."""
    rare: dict[str, Any] = {"typical_p": 0.8} if number % 4 == 1 else {}
    temperature = 0.0 if number % 4 == 2 else 1.0
    return SamplingParams(
        max_tokens=num_tokens, temperature=temperature, top_p=0.9, seed=number, num_logprobs=3, ignore_eos=True, **rare
    )


def _runner(model: str, context: Context, is_deterministic: bool) -> ModelRunner:
    engine = replace(engine_config(context), deterministic=is_deterministic)
    made: Callable[[], ModelRunner] = lambda: random_runner(config_of(model), engine)  # noqa: E731
    return context.once(f"{model}, deterministic {is_deterministic}", made)


def _cost(model: str, context: Context) -> Iterator[Row]:
    decodes, prompts, num_steps = (DECODES, PROMPTS, 32) if context.is_device else (((2, 16),), (16,), 2)
    figures: dict[str, list[float]] = {}
    for is_deterministic in (False, True):
        streams = Streams(_runner(model, context, is_deterministic))
        streams.prefill_s(prompts[0])  # compiles
        for batch, length in decodes:
            figures.setdefault(f"step of {batch} x {length}, ms", []).append(
                1e3 * streams.decode_s(batch, length, num_steps)[0]
            )
        for length in prompts:
            figures.setdefault(f"prompt of {length}, ms", []).append(
                1e3 * min(streams.prefill_s(length) for _ in range(3))
            )
    for measure, (free, fixed) in figures.items():
        yield Row(COST, {"model": model, "measure": measure, "free": free, "fixed": fixed, "ratio": fixed / free})
