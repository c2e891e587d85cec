"""Small random models of every family, made once per run, and runners over them."""

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch

from core.config import EngineConfig
from core.config_json import parse_model_config
from gpu.loading import load_runner
from gpu.parameters import ModelWeights
from gpu.runner import ModelRunner
from gpu.weights import load_weights
from tests.oracle import FAMILIES, Oracle, read_config, save_random_model

ENGINE = EngineConfig(device="cpu", dtype="float32", max_sequences=16, kv_memory_bytes=8 * 1024**2, threads=1)


def no_progress(done: int, total: int) -> None:
    """For those who do not look."""


def load_whole(*arguments: Any, **named: Any) -> ModelWeights:
    """As load_weights does, all layers at once."""
    weights = load_weights(*arguments, **named)
    weights.layers = list(weights.layers)
    return weights


@pytest.fixture(scope="session")
def model_directory(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Family -> the directory of its random model."""
    made: dict[str, Path] = {}

    def get(family: str) -> Path:
        if family not in made:
            made[family] = save_random_model(family, tmp_path_factory.mktemp(family))
        return made[family]

    return get


@pytest.fixture(scope="session", params=list(FAMILIES))
def family(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="session")
def oracle_of(model_directory: Callable[[str], Path]) -> Callable[[str], Oracle]:
    """Family -> its oracle; the last one is kept."""
    return lru_cache(maxsize=1)(lambda family: Oracle(model_directory(family)))


@pytest.fixture
def oracle(family: str, oracle_of: Callable[[str], Oracle]) -> Oracle:
    return oracle_of(family)


@pytest.fixture
def runner(family: str, model_directory: Callable[[str], Path]) -> ModelRunner:
    """A fresh runner over the family's model."""
    return open_runner(model_directory(family))


@pytest.fixture
def llama_runner(model_directory: Callable[[str], Path]) -> ModelRunner:
    return open_runner(model_directory("llama3"))


def open_runner(directory: Path, engine: EngineConfig = ENGINE) -> ModelRunner:
    return load_runner(directory, parse_model_config(read_config(directory), engine.max_model_len), engine, no_progress)


@pytest.fixture(autouse=True)
def threads_kept() -> object:
    """One, as small models are the slower by more; a runner sets them for its process: they are given back."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield None
    torch.set_num_threads(before)
