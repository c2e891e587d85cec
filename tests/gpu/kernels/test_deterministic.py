"""--deterministic by Triton's kernels: a row's bits are the same in any company, whatever torch would do there."""

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from core.config import EngineConfig, ModelConfig
from core.errors import StartupError
from core.scheduler import Scheduler
from core.types import Request, SamplingParams
from gpu.kernels import matmul
from gpu.kernels.matmul import GroupedExperts, Matmul
from gpu.kernels.operators import TritonOperators
from gpu.kernels.sizes import FIXED_TILES, SMALL_ROWS, splits_for
from gpu.layers import GATED
from gpu.tune import why_not_deterministic
from tests.fakes import FakeClock
from tests.gpu.conftest import ENGINE
from tests.gpu.kernels.test_device_steps import on_a_cpu, open_with, uncounted
from tests.gpu.kernels.test_experts import EXPERTS, HIDDEN, noise, weights_of
from tests.gpu.kernels.test_matmul import FORMS, rows_of, weight_of
from tests.gpu.kernels.test_sizes import CUDA, hopper
from tests.gpu.operator_cases import CONFIG
from tests.gpu.test_overlap import EOS
from tests.workload import Workload, WorkloadRun

__all__ = ["hopper", "on_a_cpu", "uncounted"]  # fixtures
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")
NUM_OUT, NUM_IN = 48, 1024


@pytest.mark.parametrize("form", FORMS)
def test_a_row_is_multiplied_in_the_same_way_by_any_number_of_rows(
    form: str, dtype: torch.dtype, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alone, in another place, at the end of a tile, and where the parts are added some rows at a time."""
    monkeypatch.setattr(matmul, "SPLIT_ROWS", 96)
    assert splits_for(NUM_OUT, NUM_IN, FIXED_TILES[16]) > 1
    weight, x = weight_of(form, (NUM_OUT, NUM_IN), dtype, device), rows_of(130, NUM_IN, dtype, device)
    multiply = Matmul(weight, rows_of(1, NUM_OUT, dtype, device)[0], is_fixed=True)
    together = multiply(x)
    assert torch.equal(multiply(x.flip(0)).flip(0), together)
    for first, count in ((0, 1), (129, 1), (5, SMALL_ROWS + 1), (63, 2)):
        assert torch.equal(multiply(x[first:][:count].clone()), together[first:][:count])


def test_without_it_a_row_may_differ_by_how_many_there_are(device: torch.device) -> None:
    weight, x = (rows_of(rows, NUM_IN, torch.float32, device) for rows in (NUM_OUT, SMALL_ROWS + 1))
    free = Matmul(weight, None)
    assert not torch.equal(free(x)[:1], free(x[:1]))


@pytest.mark.parametrize("form", [None, "int4"])
def test_a_token_of_any_number_goes_through_its_experts_in_the_same_way(form: str | None, device: torch.device) -> None:
    weights = weights_of(torch.float32, device, form=form)
    router = Matmul(weights.router, weights.router_bias, is_fixed=True)
    experts = GroupedExperts(EXPERTS, weights, GATED["silu"], router, is_fixed=True)
    x = noise(7, 40, HIDDEN).to(device)
    together = experts(x)
    for first, count in ((0, 1), (39, 1), (3, SMALL_ROWS + 1)):
        assert torch.equal(experts(x[first:][:count]), together[first:][:count])
    assert torch.equal(experts(x.flip(0)).flip(0), together)


def requests() -> list[Request]:
    """Of prompts of several tiles and chunks; one samples as torch alone can, so that torch samples the whole step."""
    rng = random.Random(3)
    rare: dict[str, Any] = {"typical_p": 0.8}
    return [
        Request(
            request_id=f"r{number}",
            prompt_ids=tuple(rng.choices(range(3, 300), k=num_tokens)),
            sampling=SamplingParams(
                max_tokens=14, temperature=1.0, top_p=0.9, seed=number, num_logprobs=3, **rare if number == 1 else {}
            ),
            arrival_s=0.0,
        )
        for number, num_tokens in enumerate((22, 7, 8))
    ]


@pytest.mark.usefixtures("wide_tiles")
@pytest.mark.parametrize(
    ("graphs", "kv_dtype"), [("off", "auto"), ("on", "auto"), pytest.param("on", "int8", marks=pytest.mark.slow)]
)
def test_tokens_and_logprobs_do_not_depend_on_what_else_is_computed(
    graphs: str, kv_dtype: str, one_layer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alone in whole prompts; together in few blocks and in small chunks, so that answers are computed again."""
    sizes = {"max_sequences": 4, "max_model_len": 64, "max_batch_tokens": 40}
    engine = replace(ENGINE, deterministic=True, graphs=graphs, kv_dtype=kv_dtype)
    runner = open_with(one_layer, replace(engine, **sizes))
    assert not runner.operators.matmuls.shapes  # none is chosen by measuring
    limits = runner.limits
    most_decodes = 0
    forward = runner._steps._model.forward

    def counted(batch: Any, cache: Any) -> torch.Tensor:
        nonlocal most_decodes
        most_decodes = max(most_decodes, *(rows.num_decodes for rows in batch.attending.values()))
        return forward(batch, cache)

    monkeypatch.setattr(runner._steps._model, "forward", counted)
    crowd = Scheduler(replace(limits, num_blocks=5, max_batch_tokens=12), (EOS,), seeds=lambda: 0)
    workload = Workload([(0, request) for request in requests()])
    found = WorkloadRun(workload, crowd, runner, FakeClock()).run()
    assert crowd.stats().num_preemptions > 0
    assert most_decodes > limits.max_sequences  # an answer again, in parts of as many rows as there is room for
    for request in requests():
        alone = Scheduler(limits, (EOS,), seeds=lambda: 0, has_prefix_cache=False)
        expected = WorkloadRun(Workload([(0, request)]), alone, runner, FakeClock()).run()
        assert found[request.request_id] == expected[request.request_id]


EXPERTS_SCALED = replace(EXPERTS, scales_inputs=True)


@pytest.mark.parametrize(
    ("config", "engine", "why"),
    [
        (CONFIG, EngineConfig(), None),
        (replace(CONFIG, experts=EXPERTS), EngineConfig(), None),
        (
            replace(CONFIG, experts=EXPERTS_SCALED),
            EngineConfig(max_loras=1),
            "experts that scale their inputs and adapt",
        ),
        (replace(CONFIG, head_dim=1024), EngineConfig(), "heads of 1024"),
    ],
)
def test_what_cannot_be_kept_on_a_device_is_refused_by_name(
    config: ModelConfig, engine: EngineConfig, why: str | None, hopper: None
) -> None:
    found = why_not_deterministic(config, engine, CUDA)
    assert found is None if why is None else why in (found or "")


def test_a_matrix_that_no_kernel_knows_is_refused(device: torch.device) -> None:
    operators = TritonOperators(CONFIG, torch.float32, device)
    unknown = torch.ones(8, 64, device=device)[:, :32]
    assert operators.linear(unknown, None) is not None
    operators.is_deterministic = True
    with pytest.raises(StartupError, match="--deterministic is not possible: the kernels do not support a matrix"):
        operators.linear(unknown, None)
