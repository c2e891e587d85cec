"""Whole small models with the kernels give transformers' greedy tokens, in float32, whoever shares their steps."""

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from core.config_json import parse_model_config
from gpu.checkpoint import open_checkpoint
from gpu.device import DeviceChoice
from gpu.kernels.operators import TritonOperators
from gpu.memory_plan import plan_memory
from gpu.operators import Operators
from gpu.quant import quantizing
from gpu.runner import ModelRunner
from gpu.tune import choose_matmuls
from gpu.weights import MatrixForm, check_checkpoint, load_weights, prequantized_scheme
from tests import fp8_files, packed_files
from tests.gpu.conftest import ENGINE, no_progress
from tests.gpu.driver import Driver
from tests.oracle import Oracle, read_config

# Between them: scaled, partial and missing rotation, norms of heads and of all, float32 norms, scaled residuals, odd
# widths, tied heads, biases, windows, caps, sinks, every activation, experts with and without biases
FAMILIES = (
    "llama3",
    "qwen2",
    "qwen3",
    "olmo2",
    "smollm3",
    "granite",
    "phi4_longrope",
    "gemma2",
    "qwen3_moe",
    "gpt_oss",
)
PROMPTS = ([5, 17, 101, 9], [250])
LONG_PROMPT = [(37 * place) % 290 + 3 for place in range(20)]
NUM_TOKENS = 4
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def open_runner(
    directory: Path, device: torch.device, operators_of: type[Operators], scheme: str | None
) -> ModelRunner:
    """With kernels, they multiply wherever they can."""
    choice = DeviceChoice(device, "", torch.float32, "", 1, "")
    config, engine = parse_model_config(read_config(directory)), dataclasses.replace(ENGINE, quantize=scheme)
    checkpoint = open_checkpoint(directory, config.packing)
    config = check_checkpoint(checkpoint, config)
    memory = plan_memory(config, engine, choice, checkpoint.size_bytes, 1 << 30)
    with torch.inference_mode(), quantizing(engine) as convert:
        form = MatrixForm(convert, prequantized_scheme(config, scheme, device) is not None)
        weights = load_weights(checkpoint, config, torch.float32, device, no_progress, form)
    operators: Operators
    if operators_of is TritonOperators:
        operators = TritonOperators(config, torch.float32, device)
    else:
        operators = Operators(torch.float32, device, config.rms_norm_eps)
    runner = ModelRunner(config, engine, memory, weights, operators)
    if operators.matmuls is not None:
        prices = itertools.cycle([1.0, 2.0])  # the kernel is measured first
        served = choose_matmuls(operators.matmuls, choice, lambda work: next(prices))
        assert served
        assert all(found.few and found.many is not name.startswith("float32") for name, found in served.items())
    return runner


def tokens_of(runner: ModelRunner, *prompts: list[int]) -> list[list[int]]:
    driver = Driver(runner)
    return driver.generate(NUM_TOKENS, *(driver.add(list(prompt)) for prompt in prompts))


def assert_greedy(oracle: Oracle, prompts: Sequence[list[int]], found: list[list[int]]) -> None:
    for prompt, said in zip(prompts, found, strict=True):
        assert said == oracle.greedy(prompt, NUM_TOKENS, said)


@pytest.mark.usefixtures("wide_tiles")
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_are_the_oracles(
    family: str, model_directory: Callable[[str], Path], device: torch.device
) -> None:
    directory = model_directory(family)
    oracle = Oracle(directory)
    found = tokens_of(open_runner(directory, device, TritonOperators, None), *PROMPTS)
    assert_greedy(oracle, PROMPTS, found)


@pytest.mark.parametrize("scheme", ["blocks", "whole"])
def test_8_bit_floats_of_a_checkpoint_say_what_they_stand_for(
    scheme: str, tmp_path: Path, device: torch.device
) -> None:
    """A prompt of more rows than the small tile has, and few rows."""
    _, plain = packed_files.save_pair(tmp_path / "plain", {"quant_method": "awq", "bits": 4, "group_size": 32})
    stored, floats = fp8_files.save_pair(plain, tmp_path, fp8_files.SCHEMES[scheme])
    oracle, prompts = Oracle(floats), (LONG_PROMPT, PROMPTS[1])
    found = tokens_of(open_runner(stored, device, TritonOperators, "fp8"), *prompts)
    assert_greedy(oracle, prompts, found)


def test_8_bit_floats_of_a_delta_net_say_what_they_stand_for(
    model_directory: Callable[[str], Path], tmp_path: Path, device: torch.device
) -> None:
    """Its strengths and steps are floats beside them."""
    scheme = fp8_files.SCHEMES["compressed channels"]
    stored, floats = fp8_files.save_pair(model_directory("qwen3_next"), tmp_path, scheme, "in_proj_ba")
    oracle, prompts = Oracle(floats), (LONG_PROMPT, PROMPTS[1])
    found = tokens_of(open_runner(stored, device, TritonOperators, "fp8"), *prompts)
    assert_greedy(oracle, prompts, found)


@pytest.mark.parametrize(("family", "scheme"), [("llama2", "int8"), ("llama2", "fp8"), ("gpt_oss", "int4")])
def test_quantised_models_say_what_they_say_by_torch(
    family: str, scheme: str, model_directory: Callable[[str], Path], device: torch.device
) -> None:
    """A prompt of more rows than the small tile has, and few rows."""
    directory = model_directory(family)
    by_kernels, by_torch = (
        tokens_of(open_runner(directory, device, kind, scheme), LONG_PROMPT, PROMPTS[1])
        for kind in (TritonOperators, Operators)
    )
    assert by_kernels == by_torch
