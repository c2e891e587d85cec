"""bench.gpu_check --part peers: transformers on the same weights, device and prompts, in the same run as the engine.

By `generate` with a static cache, for one stream and for a batch, and by its continuous batching for many. Prompts are
all of one length and answers too, so that a batch without a scheduler is at its best.
"""

import inspect
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from random import Random
from typing import Any

import torch

from bench.engine import Streams
from bench.gpu_model import config_of, engine_config, models_of, num_same, runner_of, work_of_model
from bench.gpu_run import Case, Context, Row, ceilings_case
from bench.limits import serving_limit_tokens_per_s
from bench.make_model import draw_tensor
from bench.results import Cell
from gpu.device import choose_device

LIMIT_S = 200.0  # torch.compile and graphs of a static cache are most of it
STEPLOOP = "steploop"
PLAIN, STATIC = "transformers generate, static cache", "transformers generate, static cache, compiled"
CONTINUOUS = "transformers, continuous batching"
# On a CPU one would measure a C++ compiler, and the other fills the memory with keys and values.
DEVICE_ALONE = (STATIC, CONTINUOUS)

Load = tuple[int, int, int]  # so many prompts at once, of so many tokens, and as many tokens out
FULL: tuple[Load, ...] = ((1, 128, 128), (64, 128, 256))
QUICK: tuple[Load, ...] = ((1, 128, 64),)
TINY: tuple[Load, ...] = ((1, 24, 4), (3, 24, 4))
Generate = Callable[[list[list[int]], int], list[list[int]]]
"""(prompts, tokens out of each) -> the tokens"""


def cases(is_quick: bool, is_device: bool) -> list[Case]:
    """This part's."""
    checks = [
        Case(f"{model}: {name}", partial(_check, model, name), LIMIT_S, table_of(model), is_alone=is_device)
        for model in models_of(is_quick, is_device)
        for name in SERVERS
        if is_device or name not in DEVICE_ALONE
    ]
    return [ceilings_case(), *checks]


def table_of(model: str) -> str:
    return f"{model}: peers, random weights"


def _check(model: str, name: str, context: Context) -> Iterator[Row]:
    number_bytes, vocab_size = choose_device(engine_config(context)).dtype.itemsize, config_of(model)["vocab_size"]
    generate = SERVERS[name](model, context)
    for num_streams, num_prompt, num_output in context.of_size(TINY, QUICK, FULL):
        source = Random(num_streams)
        prompts = [source.choices(range(300, vocab_size), k=num_prompt) for _ in range(num_streams)]
        generate(prompts, num_output)  # compiles, and captures what it captures
        times_s, found = [], []
        for _ in range(2):
            started_s = time.perf_counter()
            found = generate(prompts, num_output)
            times_s.append(time.perf_counter() - started_s)
        work, speed = work_of_model(model), context.known_speed
        limit = serving_limit_tokens_per_s(work, speed, num_streams, num_prompt, num_output, number_bytes)
        num_tokens = sum(map(len, found))
        rate, of = num_tokens / statistics.median(times_s), f"{num_streams} x {num_prompt}/{num_output}"
        cells: dict[str, Cell] = {"server": name, "load": of, "tokens/s": rate, "limit": limit}
        cells |= {"share of limit": rate / limit, "tokens": num_tokens}
        if name == STEPLOOP:
            context.state[of] = {"tokens/s": rate, "said": found}
        elif of in context.state:
            ours = context.state[of]  # answers part sooner or later: by rounding
            same = sum(num_same(our, their) for our, their in zip(ours["said"], found, strict=True))
            agree = same / sum(map(len, ours["said"]))
            cells |= {"steploop is faster by": ours["tokens/s"] / rate, "agree": agree}
        yield Row(table_of(model), cells)


def _steploop(model: str, context: Context) -> Generate:
    runner = runner_of(model, context)
    return lambda prompts, num_tokens: Streams(runner).answers(prompts, num_tokens)  # with an empty prefix cache


def _transformers(model: str, context: Context) -> Any:
    """Its model, with the numbers that bench/make_model.py draws."""

    def load() -> Any:
        library, mapping = import_module("transformers"), import_module("transformers.models.auto.configuration_auto")
        config, dtype = dict(config_of(model)), choose_device(engine_config(context)).dtype
        with context.device:
            theirs = mapping.CONFIG_MAPPING[config["model_type"]].from_dict(config)
            made = library.AutoModelForCausalLM.from_config(theirs, dtype=dtype).eval()
        with torch.inference_mode():
            for name, parameter in made.named_parameters():
                parameter.copy_(draw_tensor(name, tuple(parameter.shape), dtype, context.device))
        return made

    return context.once(f"{model}, transformers", load)


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
    made, asks = _transformers(model, context), import_module("transformers").GenerationConfig
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
