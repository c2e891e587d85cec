"""bench.gpu_check --part peers: transformers on the same weights, device and prompts, in the same run as the engine.

By `generate` with a static cache, for one stream and for a batch, and by its continuous batching for many. Prompts are
all of one length and answers too, so that a batch without a scheduler is at its best.
"""

import inspect
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from random import Random
from typing import Any

import torch

from bench.gpu_environment import ceilings_case
from bench.gpu_model import MODELS, QUICK_MODELS, config_of, engine_config, runner_of, work_of_model
from bench.gpu_parts import Case, Context, Row
from bench.gpu_streams import Streams
from bench.random_weights import draw_tensor
from bench.results import Cell
from bench.work import serving_limit_tokens_per_s
from gpu.device import choose_device

LIMIT_S = 200.0  # torch.compile and graphs of a static cache are most of it
STEPLOOP, STATIC, PLAIN, CONTINUOUS = (
    "steploop",
    "transformers generate, static cache, compiled",
    "transformers generate, static cache",
    "transformers, continuous batching",
)


@dataclass(frozen=True, slots=True)
class Load:
    """So many prompts at once, of so many tokens, and as many tokens out."""

    streams: int
    prompt: int
    output: int


FULL = (Load(1, 128, 128), Load(64, 128, 256))
QUICK = (Load(1, 128, 64),)
TINY = (Load(1, 24, 4), Load(3, 24, 4))
# On a CPU one would measure a C++ compiler, and the other fills the memory with keys and values.
DEVICE_ALONE = (STATIC, CONTINUOUS)


def cases(is_quick: bool, is_device: bool) -> list[Case]:
    """This part's."""
    models = ("tiny",) if not is_device else QUICK_MODELS if is_quick else MODELS
    found = [ceilings_case()]
    for model in models:
        for name in SERVERS:
            if is_device or name not in DEVICE_ALONE:
                run = partial(_check, model, name)
                found.append(Case(f"{model}: {name}", run, LIMIT_S, table_of(model), is_alone=is_device))
    return found


def table_of(model: str) -> str:
    return f"{model}: peers, random weights"


Generate = Callable[[list[list[int]], int], list[list[int]]]
"""(prompts, tokens out of each) -> the tokens"""


def _check(model: str, name: str, context: Context) -> Iterator[Row]:
    loads = TINY if not context.is_device else QUICK if context.is_quick else FULL
    number_bytes = choose_device(engine_config(context)).dtype.itemsize
    generate = SERVERS[name](model, context)
    for load in loads:
        prompts = _prompts(model, load)
        generate(prompts, load.output)  # compiles, and captures what it captures
        times_s, found = [], []
        for _ in range(2):
            started_s = time.perf_counter()
            found = generate(prompts, load.output)
            times_s.append(time.perf_counter() - started_s)
        num_tokens = sum(map(len, found))
        limit = serving_limit_tokens_per_s(
            work_of_model(model), context.speed, load.streams, load.prompt, load.output, number_bytes
        )
        rate = num_tokens / statistics.median(times_s)
        of = f"{load.streams} x {load.prompt}/{load.output}"
        cells: dict[str, Cell] = {"server": name, "load": of, "tokens/s": rate, "limit": limit}
        cells |= {"share of limit": rate / limit, "tokens": num_tokens}
        if name == STEPLOOP:
            context.state[of] = {"tokens/s": rate, "said": found}
        elif of in context.state:
            ours = context.state[of]
            cells |= {"steploop is faster by": ours["tokens/s"] / rate, "agree": _agreement(ours["said"], found)}
        yield Row(table_of(model), cells)


def _prompts(model: str, load: Load) -> list[list[int]]:
    source, vocab_size = Random(load.streams), config_of(model)["vocab_size"]
    return [source.choices(range(300, vocab_size), k=load.prompt) for _ in range(load.streams)]


def _agreement(ours: list[list[int]], theirs: list[list[int]]) -> float:
    """Of the answers' tokens, those before the first that differs: rounding parts them sooner or later."""
    num_same = 0
    for our, their in zip(ours, theirs, strict=True):
        num_same += next(
            (place for place, pair in enumerate(zip(our, their, strict=False)) if pair[0] != pair[1]), len(our)
        )
    return num_same / sum(map(len, ours))


def _steploop(model: str, context: Context) -> Generate:
    runner = runner_of(model, context)

    def generate(prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
        streams = Streams(runner)  # with an empty prefix cache
        names = [streams.submit(tuple(prompt), num_tokens) for prompt in prompts]
        streams.run_until(lambda: streams.num_open == 0)
        return [streams.tokens[name] for name in names]

    return generate


def _transformers(model: str, context: Context) -> Any:
    """Its model, with the numbers that bench/random_weights.py draws."""
    return context.once(f"{model}, transformers", lambda: _load(model, context))


def _load(model: str, context: Context) -> Any:
    library, mapping = import_module("transformers"), import_module("transformers.models.auto.configuration_auto")
    config, dtype = dict(config_of(model)), choose_device(engine_config(context)).dtype
    with context.device:
        theirs = mapping.CONFIG_MAPPING[config["model_type"]].from_dict(config)
        made = library.AutoModelForCausalLM.from_config(theirs, dtype=dtype).eval()
    with torch.inference_mode():
        for name, parameter in made.named_parameters():
            parameter.copy_(draw_tensor(name, tuple(parameter.shape), dtype, context.device))
    return made


def _generate(is_compiled: bool, model: str, context: Context) -> Generate:
    made = _transformers(model, context)

    def generate(prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
        inputs = torch.tensor(prompts, device=context.device)
        with torch.inference_mode():
            out = made.generate(
                inputs,
                attention_mask=torch.ones_like(inputs),
                max_new_tokens=num_tokens,
                min_new_tokens=num_tokens,
                do_sample=False,
                cache_implementation="static",
                disable_compile=not is_compiled,
                pad_token_id=0,
            )
        found: list[list[int]] = out[:, inputs.shape[1] :].tolist()
        return found

    return generate


def _continuous(model: str, context: Context) -> Generate:
    made = _transformers(model, context)
    asks = import_module("transformers").GenerationConfig
    is_kept = "persistent_manager" in inspect.signature(made.generate_batch).parameters
    options = {"persistent_manager": True} if is_kept else {}  # its graphs are captured in the first run

    def generate(prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
        asked = asks(max_new_tokens=num_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0)
        found = made.generate_batch(inputs=prompts, generation_config=asked, progress_bar=False, **options)
        by_prompt = {tuple(output.prompt_ids): list(output.generated_tokens) for output in found.values()}
        return [by_prompt[tuple(prompt)] for prompt in prompts]

    return generate


SERVERS: dict[str, Callable[[str, Context], Generate]] = {
    STEPLOOP: _steploop,
    PLAIN: partial(_generate, False),
    STATIC: partial(_generate, True),
    CONTINUOUS: _continuous,
}
