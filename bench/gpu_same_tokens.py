"""Whether all ways of sending steps say what a model of real shapes says, in the format that serves: of --part model.

Its weights are random. Greedy answers of several streams, prompts in chunks among them, with graphs and without,
overlapped and not: each token is held against the logits that torch's operators compute in float32 of the same numbers
for what stood before it. In bfloat16, steps of other sizes may be rounded otherwise: answers may part where two tokens
are as good as equal, so that a token may be as far from the likeliest as rounding goes, and no further.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from random import Random
from typing import Any

import torch

from bench.gpu_families import INTERPRETED, MODES, poisoned, prompt_plan
from bench.gpu_parts import OK, WRONG, Case, Context, Row
from bench.gpu_streams import Streams
from bench.random_weights import random_runner
from bench.results import Cell
from core.config import EngineConfig, ModelConfig, parse_model_config
from gpu.device import DeviceChoice
from gpu.kv_cache import bytes_per_token
from gpu.loading import FindOperators
from gpu.operators import Operators
from gpu.runner import ModelRunner
from gpu.tune import find_operators

TABLE = "Tokens of real shapes, however steps are sent"
LIMIT_S = 240.0
Config = Mapping[str, Any]
# Of the largest logit: what rounding does in tens of layers, by format.
TOLERANCES = {torch.bfloat16: 0.05, torch.float32: 2e-4}


@dataclass(frozen=True, slots=True)
class Sizes:
    """
    Args:
        prompts: tokens of each stream's.
        modes: of gpu_families.MODES.
        kv_tokens: of all streams together.
    """

    prompts: tuple[int, ...]
    num_tokens: int
    modes: tuple[str, ...]
    max_batch_tokens: int
    kv_tokens: int


FULL = Sizes((300, 7, 64, 129, 513, 1, 40, 90), 96, tuple(MODES), 256, 16_384)
TINY = Sizes((20, 3), 2, ("without overlap", "overlapped"), 16, 512)


def same_tokens_case(model: str, config: Config) -> Case:
    return Case(f"{model}: same tokens", partial(_check, model, config), LIMIT_S, TABLE)


def _check(model: str, config: Config, context: Context) -> Iterator[Row]:
    sizes = FULL if context.is_device else TINY
    dtype = torch.bfloat16 if context.is_device else torch.float32
    prompts = [Random(length).choices(range(300, config["vocab_size"]), k=length) for length in sizes.prompts]
    with poisoned(context):
        answers = {mode: _answers(config, context, sizes, MODES[mode], prompts) for mode in sizes.modes}
    context.drop()
    exact = random_runner(config, _engine(config, context, sizes, torch.float32, {}), _torchs, dtype)
    first = answers[sizes.modes[0]]
    for mode, found in answers.items():
        worst = max(_off(exact, prompt, answer) for prompt, answer in zip(prompts, found, strict=True))
        num_same = sum(ours == theirs for ours, theirs in zip(found, first, strict=True))
        cells: dict[str, Cell] = {"model": model, "steps": mode, "dtype": str(dtype).removeprefix("torch.")}
        cells |= {"off the likeliest": worst, "tolerance": TOLERANCES[dtype]}
        cells |= {"answers as the first": num_same, "of": len(prompts)}
        is_right = worst <= TOLERANCES[dtype]  # what is not a number is not
        yield Row(TABLE, cells, OK if is_right else WRONG)


def _answers(
    config: Config, context: Context, sizes: Sizes, options: Mapping[str, str], prompts: Sequence[Sequence[int]]
) -> list[list[int]]:
    dtype = torch.bfloat16 if context.is_device else torch.float32
    find: FindOperators = find_operators if context.is_device else import_module(INTERPRETED).find_interpreted
    context.drop()
    streams = Streams(random_runner(config, _engine(config, context, sizes, dtype, options), find))
    names = [streams.submit(tuple(prompt), sizes.num_tokens) for prompt in prompts]
    streams.run_until(lambda: not streams.num_open)
    return [streams.tokens[name] for name in names]


def _engine(
    config: Config, context: Context, sizes: Sizes, dtype: torch.dtype, options: Mapping[str, str]
) -> EngineConfig:
    return EngineConfig(
        device=context.device.type,
        dtype=str(dtype).removeprefix("torch."),
        max_model_len=sizes.kv_tokens // len(sizes.prompts),
        max_sequences=len(sizes.prompts),
        max_batch_tokens=sizes.max_batch_tokens,
        kv_memory_bytes=sizes.kv_tokens * bytes_per_token(parse_model_config(dict(config)), dtype),
        threads=1,
        **options,  # type: ignore[arg-type]
    )


def _torchs(config: ModelConfig, choice: DeviceChoice) -> Operators:
    return Operators(choice.dtype, choice.device, config.rms_norm_eps)


def _off(exact: ModelRunner, prompt: Sequence[int], answer: Sequence[int]) -> float:
    """How far an answer's tokens are from the likeliest, at most: of the largest logit."""
    logits = exact.logits(prompt_plan([*prompt, *answer[:-1]]))[len(prompt) - 1 :]  # [answer, vocab]
    chosen = logits.gather(1, torch.tensor(answer, device=logits.device).unsqueeze(1)).squeeze(1)
    return ((logits.amax(-1) - chosen) / logits.abs().amax(-1)).max().item()
