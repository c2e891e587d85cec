"""A quantised model computes what the plain one does with the weights that its integers stand for."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from core.config import QUANTIZE_SCHEMES, EngineConfig
from core.config_json import parse_model_config
from gpu.blocks import BlockWeight
from gpu.checkpoint import open_checkpoint
from gpu.cpu_kernels.support import NEEDED_FLAGS
from gpu.device import choose_device, cpu_flags
from gpu.memory_plan import weights_size_bytes
from gpu.operators import Operators
from gpu.parameters import ModelWeights
from gpu.quant import QuantizedWeight, can_quantize, dequantize, quantize
from gpu.runner import ModelRunner
from gpu.tune import find_operators
from gpu.weights import MatrixForm
from tests.gpu.conftest import ENGINE, load_whole, no_progress, open_runner
from tests.gpu.driver import Driver
from tests.oracle import read_config

if TYPE_CHECKING:
    from gpu.cpu_kernels.block_matmul import BlockMatmul

CPU = torch.device("cpu")
PROMPTS = ([5], list(range(40, 47)), list(range(100, 140)))  # rows for the operators, and for slabs
FAMILIES = ("llama2", "qwen2", "gemma2", "phi3", "qwen3_moe", "deepseek_v3", "gpt_oss")


def tokens_of(runner: ModelRunner, num_tokens: int = 24) -> list[list[int]]:
    driver = Driver(runner)
    return driver.generate(num_tokens, *(driver.add(list(prompt)) for prompt in PROMPTS))


def load_rounded(directory: Path, scheme: str) -> ModelWeights:
    """Floats, rounded to what the integers stand for."""

    def rounded(weight: torch.Tensor) -> torch.Tensor:
        if not can_quantize(scheme, weight.shape[-1]):
            return weight
        return dequantize(quantize(weight, scheme), weight.dtype)

    config = parse_model_config(read_config(directory))
    return load_whole(open_checkpoint(directory), config, torch.float32, CPU, no_progress, MatrixForm(rounded))


def quantized(scheme: str) -> EngineConfig:
    return dataclasses.replace(ENGINE, quantize=scheme)


@pytest.mark.parametrize("scheme", QUANTIZE_SCHEMES)
@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_are_those_of_the_rounded_weights(
    family: str, scheme: str, model_directory: Callable[[str], Path]
) -> None:
    directory = model_directory(family)
    served = open_runner(directory, quantized(scheme))
    config = parse_model_config(read_config(directory))
    plain = ModelRunner(
        config, ENGINE, served.memory, load_rounded(directory, scheme), find_operators(config, served.memory.device)
    )
    assert tokens_of(served) == tokens_of(plain)


def test_int8_says_nearly_what_the_model_says(model_directory: Callable[[str], Path]) -> None:
    want = tokens_of(open_runner(model_directory("llama2")), 8)
    got = tokens_of(open_runner(model_directory("llama2"), quantized("int8")), 8)
    pairs = [pair for row in zip(got, want, strict=True) for pair in zip(*row, strict=True)]
    assert sum(left == right for left, right in pairs) >= 0.8 * len(pairs)


@pytest.mark.skipif(not cpu_flags() >= NEEDED_FLAGS, reason="needs a CPU with AVX2")
@pytest.mark.parametrize("family", ["llama2", "qwen3_moe"])
@pytest.mark.parametrize("scheme", ["int8", "int4"])
def test_rows_in_8_bits_say_nearly_the_same(
    family: str, scheme: str, model_directory: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    want = tokens_of(open_runner(model_directory(family), quantized(scheme)), 8)
    multiplied, multiply = list[tuple[int, int]](), Operators.blocks

    def recorded(self: Operators, weight: BlockWeight, bias: torch.Tensor | None) -> "BlockMatmul":
        multiplied.append(weight.shape)
        return multiply(self, weight, bias)

    monkeypatch.setattr(Operators, "blocks", recorded)
    asked = dataclasses.replace(quantized(scheme), activations="int8")
    got = tokens_of(open_runner(model_directory(family), asked), 8)
    pairs = [pair for row in zip(got, want, strict=True) for pair in zip(*row, strict=True)]
    assert sum(left == right for left, right in pairs) >= 0.7 * len(pairs)
    assert multiplied
    assert {num_in % 32 for _, num_in in multiplied} == {0}  # others are dequantised


@pytest.mark.parametrize("scheme", QUANTIZE_SCHEMES)
@pytest.mark.parametrize("family", ["llama2", "qwen3_moe"])
def test_the_plan_counts_no_less_than_what_is_loaded(
    family: str, scheme: str, model_directory: Callable[[str], Path]
) -> None:
    config = parse_model_config(read_config(model_directory(family)))
    saved = 0

    def convert(weight: torch.Tensor) -> torch.Tensor | QuantizedWeight:
        nonlocal saved
        if not can_quantize(scheme, weight.shape[-1]):
            return weight
        made = quantize(weight, scheme)
        saved += weight.nbytes - sum(part.nbytes for part in (made.values, made.scales, made.zeros) if part is not None)
        return made

    load_whole(open_checkpoint(model_directory(family)), config, torch.float32, CPU, no_progress, MatrixForm(convert))
    planned = weights_size_bytes(config, quantized(scheme), choose_device(ENGINE))
    assert 4 * config.num_parameters - saved <= planned < 0.7 * 4 * config.num_parameters
