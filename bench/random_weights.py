"""A model with random weights, made where it is computed: no files of many gigabytes, and a runner over it.

Numbers are drawn by the names of a checkpoint's tensors, so that who loads the same shapes otherwise (transformers, in
bench/gpu_peers.py) has the same model on the same device. As bench/make_model.py's, but not the same numbers.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.make_model import SCALE, make_model_files, name_hash
from bench.model_tokenizer import SPECIAL_TOKENS
from core.config import EngineConfig, ModelConfig, parse_model_config
from gpu.device import apply_threads, choose_device, free_memory_bytes
from gpu.loading import FindOperators, warm_up
from gpu.memory_plan import plan_memory
from gpu.parameters import EMBEDDING, HEAD, ModelWeights, empty_weights, targets
from gpu.runner import ModelRunner
from gpu.tune import find_operators


def draw_tensor(name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, seed: int = 0) -> Tensor:
    """Norms are ones, all else is normal; special tokens have zeros, so that no greedy answer ends by itself."""
    if "norm" in name:
        return torch.ones(shape, dtype=dtype, device=device)
    source = torch.Generator(device).manual_seed(name_hash(name) ^ seed)
    drawn = torch.empty(shape, dtype=dtype, device=device).normal_(0.0, SCALE, generator=source)
    if name in (EMBEDDING, HEAD):
        drawn[: len(SPECIAL_TOKENS)] = 0
    return drawn


def random_weights(
    config: ModelConfig, dtype: torch.dtype, device: torch.device, drawn_as: torch.dtype | None = None
) -> ModelWeights:
    """All parameters of a model that is not packed.

    Args:
        drawn_as: the format whose numbers they are; None: dtype.
    """
    weights = empty_weights(config, dtype, device)
    for name, target in targets(config, weights).items():
        target.fill(draw_tensor(name, target.shape, drawn_as or dtype, device).to(dtype))
    return weights


def random_runner(
    config: Mapping[str, Any],
    engine: EngineConfig,
    find: FindOperators = find_operators,
    drawn_as: torch.dtype | None = None,
) -> ModelRunner:
    """A runner over a model of this config.json, ready to step. Sets torch's threads.

    Args:
        find: what it computes with.
        drawn_as: see random_weights.

    Raises:
        StartupError: the device or its memory.
    """
    model, choice = parse_model_config(dict(config)), choose_device(engine)
    apply_threads(choice)
    size_bytes = model.num_parameters * choice.dtype.itemsize
    memory = plan_memory(model, engine, choice, size_bytes, free_memory_bytes(choice.device))
    operators = find(model, choice)
    with torch.inference_mode():
        weights = random_weights(model, choice.dtype, choice.device, drawn_as)
    runner = ModelRunner(model, engine, memory, weights, operators)
    warm_up(runner)
    runner.open_graphs(lambda done, total: None)
    return runner


def write_model_files(config: Mapping[str, Any], directory: Path) -> Mapping[str, Any]:
    """All that a server reads of a model beside its weights; returns the config.json."""
    make_model_files(config, directory)
    found: dict[str, Any] = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    return found
