"""The kernels beside torch's operators: the same numbers, rounded at most one step apart, over a grid of shapes."""

from collections.abc import Callable

import pytest
import torch

from gpu.cpu_kernels.support import NEEDED_FLAGS
from gpu.device import cpu_flags
from gpu.kv_cache import SCALE_BYTES, LayerKV, blockwise
from gpu.layers import GATED
from gpu.operators import Operators
from tests.gpu import operator_cases
from tests.gpu.operator_cases import CONFIG, EPS, NORMS, kv_of, norms_of, rotation_of

if not cpu_flags() >= NEEDED_FLAGS:
    pytest.skip("needs a CPU with AVX2", allow_module_level=True)

from gpu.cpu_kernels.operators import GATES, KernelOperators

CPU = torch.device("cpu")
ONE_STEP = 2.0**-7  # of bf16, relative


@pytest.fixture(scope="module")
def kernels() -> KernelOperators:
    return KernelOperators(CONFIG, has_attention=True)


@pytest.fixture(scope="module")
def torchs() -> Operators:
    return Operators(torch.bfloat16, CPU, EPS)


@pytest.fixture(params=[1, 2], autouse=True, ids=["1 thread", "2 threads"])
def num_threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpu.cpu_kernels.operators.NUMBERS_PER_THREAD", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: request.param)


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return operator_cases.noise(*shape, seed=seed).bfloat16()


def assert_same(got: torch.Tensor, want: torch.Tensor, num_steps: int = 1) -> None:
    """
    Args:
        num_steps: of bf16's rounding, that they may be apart.
    """
    assert got.shape == want.shape
    assert torch.allclose(got.float(), want.float(), rtol=num_steps * ONE_STEP, atol=1e-6)


@pytest.mark.parametrize("num_tokens", [1, 2, 17])
@pytest.mark.parametrize("width", [64, 896, 72])  # the last is not the kernels'
@pytest.mark.parametrize("weight_dtype", [torch.bfloat16, torch.float32])
def test_norms_are_torchs(kernels: KernelOperators, num_tokens: int, width: int, weight_dtype: torch.dtype) -> None:
    """Of the kernels' widths torch's in float32: how often torch rounds in bf16 depends on the CPU."""
    x, added, weight = noise(num_tokens, width), noise(num_tokens, width, seed=1), noise(width).to(weight_dtype)
    dtype = torch.bfloat16 if width == 72 else torch.float32
    exact = Operators(dtype, CPU, EPS)
    assert_same(kernels.norm(x, weight), exact.norm(x.to(dtype), weight), num_steps=2)
    for scale in (1.0, 0.21875):  # of bf16, as the model passes it
        wanted = exact.add_norm(x.to(dtype), added.to(dtype), scale, weight)
        for got, want in zip(kernels.add_norm(x, added, scale, weight), wanted, strict=True):
            assert_same(got, want, num_steps=2)
    assert torch.equal(kernels.add_norm(x, added, 1.0, None)[1], x + added)


@pytest.mark.parametrize("width", [60, 80, 1000])
def test_torchs_scaled_sum_of_a_row_does_not_depend_on_the_others(torchs: Operators, width: int) -> None:
    x, added = noise(39, width), noise(39, width, seed=1)
    together = torchs.add_norm(x, added, 0.22, None)[0]
    for num in range(1, 39):
        assert torch.equal(torchs.add_norm(x[:num].clone(), added[:num].clone(), 0.22, None)[0], together[:num])


@pytest.mark.parametrize("num_tokens", [1, 19])
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(2, 2, 16), (3, 1, 64), (14, 2, 64), (7, 1, 24)])
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("rotary", [None, 1.0, 0.5])
def test_queries_keys_and_values_are_torchs(
    kernels: KernelOperators,
    torchs: Operators,
    num_tokens: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    norm: str | None,
    rotary: float | None,
) -> None:
    qkv = noise(num_tokens, num_heads + 2 * num_kv_heads, head_dim)
    norms = norms_of(norm, num_heads, num_kv_heads, head_dim, qkv)
    rotation = rotation_of(rotary, num_tokens, head_dim, CPU)
    slots = torch.randperm(8 * 16, generator=torch.Generator().manual_seed(1))[:num_tokens]
    got_kv, want_kv = (kv_of(torch.zeros(2, 8, 16, num_kv_heads, head_dim).bfloat16()) for _ in range(2))
    got = kernels.rotate_and_store(qkv, norms, rotation, got_kv, slots)
    want = torchs.rotate_and_store(qkv, norms, rotation, want_kv, slots)
    assert torch.allclose(got.float(), want.float(), rtol=ONE_STEP, atol=0.03)  # differences of products
    assert torch.allclose(got_kv.keys.float(), want_kv.keys.float(), rtol=ONE_STEP, atol=0.03)
    assert torch.equal(got_kv.values, want_kv.values)
    in_pairs, blocks = blockwise(torch.zeros_like(got_kv.both), is_paired=True), torch.arange(8)[None]
    assert torch.equal(kernels.rotate_and_store(qkv, norms, rotation, in_pairs, slots), got)
    for one, other in zip(in_pairs.read(blocks, qkv.dtype), got_kv.read(blocks, qkv.dtype), strict=True):
        assert torch.equal(one, other)


def test_rows_of_wider_ones_are_computed_as_each_alone(kernels: KernelOperators) -> None:
    """As queries beside their gates: one such row is contiguous, several are not."""

    def assert_alone(compute: Callable[[torch.Tensor], torch.Tensor], rows: torch.Tensor) -> None:
        assert not rows.is_contiguous()
        assert torch.equal(compute(rows), torch.cat([compute(row) for row in rows.split(1)]))

    wide, weight, kv = noise(40, 1024), noise(512, seed=1), kv_of(torch.zeros(2, 8, 16, 1, 128).bfloat16())
    norms, rotation = norms_of("head", 2, 1, 128, wide), rotation_of(1.0, 2, 128, CPU)
    assert rotation is not None
    assert_alone(lambda x: kernels.norm(x, weight), wide[:, :512])
    assert_alone(lambda x: kernels.add_norm(x, x, 0.22, weight)[1], wide[:, :512])
    assert_alone(kernels.gated("silu"), wide[:, :512])

    def stored(rows: torch.Tensor) -> torch.Tensor:
        slots, turned = torch.arange(len(rows)), rotation[1:].expand(len(rows), -1, -1).contiguous()
        query = kernels.rotate_and_store(rows.view(-1, 4, 128), norms, turned, kv, slots)
        return torch.cat([query, kv.keys[slots], kv.values[slots]], 1)

    assert_alone(stored, wide[:, 512:])


@pytest.mark.parametrize(("num_kv_heads", "head_dim"), [(1, 64), (3, 96)])
def test_keys_and_values_in_8_bits_are_torchs(
    kernels: KernelOperators, torchs: Operators, num_kv_heads: int, head_dim: int
) -> None:
    def cache() -> LayerKV:
        room = torch.zeros(2, 8, 16, num_kv_heads, head_dim + SCALE_BYTES, dtype=torch.int8)
        return blockwise(room, is_paired=True)

    qkv = noise(40, 4 * num_kv_heads, head_dim)
    qkv[3, -1], qkv[4, -1, 5], qkv[5, 2 * num_kv_heads, 1] = 0, float("nan"), float("inf")
    slots = torch.randperm(8 * 16, generator=torch.Generator().manual_seed(1))[:40]
    got, want = cache(), cache()
    kernels.rotate_and_store(qkv, None, None, got, slots)
    torchs.rotate_and_store(qkv, None, None, want, slots)
    for one, other in zip(
        got.read(torch.arange(8)[None], torch.float32), want.read(torch.arange(8)[None], torch.float32), strict=True
    ):
        finite = other.isfinite().all(-1)
        assert torch.equal(one.isfinite().all(-1), finite)
        one, other = one[finite], other[finite]
        steps = (one - other).abs() * 127 / other.abs().amax(-1, keepdim=True).clamp(min=1e-9)
        assert steps.max() < 1.01  # a tie is rounded after one operation, or two
        assert (steps > 0.5).float().mean() < 0.01


@pytest.mark.parametrize("num_tokens", [1, 5])
@pytest.mark.parametrize("width", [96, 4864, 40])
@pytest.mark.parametrize("activation", list(GATES))
def test_gates_are_torchs(kernels: KernelOperators, num_tokens: int, width: int, activation: str) -> None:
    gate_up = noise(num_tokens, 2 * width) * 4
    exact = GATED[activation](gate_up.float())
    got = kernels.gated(activation)(gate_up.clone())
    assert torch.allclose(got.float(), exact, rtol=3 * ONE_STEP, atol=0.02)


@pytest.mark.parametrize("activation", ["silu", "gelu_pytorch_tanh"])
def test_a_gate_that_is_not_a_number_stays_so(kernels: KernelOperators, activation: str) -> None:
    gate_up = torch.tensor([[float("nan"), 100.0, -100.0, 0.0] * 4 + [2.0] * 16]).bfloat16()
    got = kernels.gated(activation)(gate_up)
    assert got[0, ::4].isnan().all()
    assert torch.equal(got[0, 1::4], torch.full((4,), 200.0).bfloat16())
    assert not got[0, 2::4].float().abs().gt(1e-30).any()
    assert not got[0, 3::4].any()
