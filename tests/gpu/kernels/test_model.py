"""Whole small models with the kernels give transformers' greedy tokens, in float32, whoever shares their steps."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from core.config import parse_model_config
from gpu.checkpoint import open_checkpoint
from gpu.device import DeviceChoice
from gpu.kernels.operators import TritonOperators
from gpu.memory_plan import plan_memory
from gpu.runner import ModelRunner
from gpu.weights import load_weights
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
NUM_TOKENS = 5
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")


def open_with_kernels(directory: Path, device: torch.device) -> ModelRunner:
    choice = DeviceChoice(device, "", torch.float32, "", 1, "")
    config = parse_model_config(read_config(directory))
    checkpoint = open_checkpoint(directory)
    memory = plan_memory(config, ENGINE, choice, checkpoint.size_bytes, 1 << 30)
    with torch.inference_mode():
        weights = load_weights(checkpoint, config, torch.float32, device, no_progress)
    return ModelRunner(config, ENGINE, memory, weights, TritonOperators(config, torch.float32, device))


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_are_the_oracles(
    family: str, model_directory: Callable[[str], Path], device: torch.device
) -> None:
    directory = model_directory(family)
    driver, oracle = Driver(open_with_kernels(directory, device)), Oracle(directory)
    found = driver.generate(NUM_TOKENS, *(driver.add(list(prompt)) for prompt in PROMPTS))
    assert found == [oracle.greedy(list(prompt), NUM_TOKENS) for prompt in PROMPTS]
