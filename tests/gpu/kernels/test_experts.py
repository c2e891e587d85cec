"""Experts in two launches are the experts one by one, however the router sends the tokens, and for each token alone."""

import pytest
import torch

from core.config import ExpertsConfig
from gpu.kernels.matmul import GroupedExperts, can_group, most_tiles
from gpu.kernels.operators import TritonOperators
from gpu.kernels.sizes import SMALL_ROWS
from gpu.layers import GATED, Experts
from gpu.linear import make_linear
from gpu.operators import Operators
from gpu.parameters import ExpertWeights
from gpu.quant import QuantizedWeight, Weight, dequantize, quantize
from tests.gpu.kernels.test_matmul import grouped as in_groups
from tests.gpu.operator_cases import CONFIG

HIDDEN, WIDTH = 64, 32
EXPERTS = ExpertsConfig(num_experts=5, num_active=2, intermediate_size=WIDTH, layout="mixtral")
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}  # of the largest


def noise(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def weights_of(
    dtype: torch.dtype, device: torch.device, num_experts: int = 5, form: str | None = None, has_bias: bool = False
) -> ExpertWeights:
    def made(seed: int, *shape: int) -> torch.Tensor:
        return noise(seed, *shape).to(device, dtype)

    def stored(weight: torch.Tensor) -> Weight:
        return weight if form is None else in_groups(weight, 32) if form == "fp8 by 32" else quantize(weight, form)

    gate_up, down = made(2, num_experts, 2 * WIDTH, HIDDEN) / 8, made(3, num_experts, HIDDEN, WIDTH) / 6
    return ExpertWeights(
        router=made(1, num_experts, HIDDEN),
        router_bias=made(4, num_experts) if has_bias else None,
        gate_up=stored(gate_up),
        gate_up_bias=made(5, num_experts, 2 * WIDTH) if has_bias else None,
        down=stored(down),
        down_bias=made(6, num_experts, HIDDEN) if has_bias else None,
    )


def exact_of(weight: Weight) -> torch.Tensor:
    return dequantize(weight, torch.float32) if isinstance(weight, QuantizedWeight) else weight.float()


def one_by_one(config: ExpertsConfig, weights: ExpertWeights, x: torch.Tensor, activation: str) -> torch.Tensor:
    """In float32, by torch."""
    operators = Operators(torch.float32, x.device, 1e-6)
    whole = ExpertWeights(
        router=weights.router.float(),
        router_bias=None if weights.router_bias is None else weights.router_bias.float(),
        gate_up=exact_of(weights.gate_up),
        gate_up_bias=None if weights.gate_up_bias is None else weights.gate_up_bias.float(),
        down=exact_of(weights.down),
        down_bias=None if weights.down_bias is None else weights.down_bias.float(),
    )
    return operators.experts(config, whole, GATED[activation])(x.float())


def grouped(config: ExpertsConfig, weights: ExpertWeights, activation: str = "silu") -> GroupedExperts:
    router = make_linear(weights.router, weights.router_bias)
    return GroupedExperts(config, weights, GATED[activation], router)


@pytest.mark.parametrize("num_tokens", [1, 6, SMALL_ROWS + 3])
@pytest.mark.parametrize(
    ("form", "has_bias", "activation"),
    [
        (None, False, "silu"),
        (None, True, "clamped_swiglu"),
        ("fp8", True, "silu"),
        ("int4", False, "silu"),
        ("fp8 by 32", False, "silu"),
    ],
)
def test_they_are_the_experts_one_by_one(
    form: str | None, has_bias: bool, activation: str, num_tokens: int, dtype: torch.dtype, device: torch.device
) -> None:
    weights = weights_of(dtype, device, form=form, has_bias=has_bias)
    x = noise(num_tokens, num_tokens, HIDDEN).to(device, dtype)
    want = one_by_one(EXPERTS, weights, x, activation)
    got = grouped(EXPERTS, weights, activation)(x)
    assert got.shape == want.shape
    assert got.dtype == dtype
    assert (got.float() - want).abs().max() <= TOLERANCE[dtype] * want.abs().max()


@pytest.mark.parametrize(("num_experts", "num_active"), [(1, 1), (3, 3), (8, 1), (33, 4)])
def test_any_number_of_them(num_experts: int, num_active: int, device: torch.device) -> None:
    config = ExpertsConfig(num_experts, num_active, WIDTH, "qwen3_moe", is_normalized=False)
    weights, x = weights_of(torch.float32, device, num_experts), noise(9, 7, HIDDEN).to(device)
    want = one_by_one(config, weights, x, "silu")
    assert (grouped(config, weights)(x) - want).abs().max() <= 2e-6 * want.abs().max()


def test_all_tokens_may_choose_the_same(device: torch.device) -> None:
    """Several tiles of one expert, and experts without a token before, between and behind."""
    weights = weights_of(torch.float32, device)
    weights.router = torch.zeros_like(weights.router)
    weights.router[1], weights.router[3] = 2.0, 1.0
    x = noise(8, SMALL_ROWS, HIDDEN).abs().to(device)
    want = one_by_one(EXPERTS, weights, x, "silu")
    assert (grouped(EXPERTS, weights)(x) - want).abs().max() <= 2e-6 * want.abs().max()


def test_a_token_is_computed_in_the_same_way_in_any_company(device: torch.device) -> None:
    experts = grouped(EXPERTS, weights_of(torch.float32, device))
    x = noise(7, SMALL_ROWS, HIDDEN).to(device)
    together = experts(x)
    for token in (0, 5, 15):
        assert torch.equal(experts(x[token : token + 1]), together[token : token + 1])
    assert torch.equal(experts(x.flip(0)).flip(0), together)
    assert experts(x[:0]).shape == (0, HIDDEN)


@pytest.mark.parametrize("rows", [1, 4, 16])
def test_tiles_are_enough_however_the_tokens_fall(rows: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    for _ in range(200):
        num_experts, num_pairs = (int(torch.randint(1, 40, (), generator=generator)) for _ in range(2))
        counts = torch.randint(num_experts, (num_pairs,), generator=generator).bincount(minlength=num_experts)
        assert int((-(-counts // rows)).sum()) <= most_tiles(num_pairs, num_experts, rows)


def test_the_operators_group_what_they_know(device: torch.device) -> None:
    operators = TritonOperators(CONFIG, torch.float32, device)
    weights = weights_of(torch.float32, device)
    assert can_group(weights)
    assert isinstance(operators.experts(EXPERTS, weights, GATED["silu"]), GroupedExperts)
    weights.down = weights_of(torch.float32, device, 5).gate_up
    assert isinstance(weights.down, torch.Tensor)
    weights.down = weights.down.transpose(1, 2)
    assert not can_group(weights)
    assert isinstance(operators.experts(EXPERTS, weights, GATED["silu"]), Experts)
