"""The kernels beside torch's operators: the same numbers, rounded at most one step apart, over a grid of shapes."""

import pytest
import torch

from gpu.kernels.operators import ACTIVATIONS, TritonOperators
from gpu.kernels.sizes import heads_at_once
from gpu.kv_cache import SCALE_BYTES, LayerKV, blockwise
from gpu.layers import GATED
from gpu.operators import Operators
from tests.gpu import operator_cases
from tests.gpu.operator_cases import CONFIG, EPS, NORMS, kv_of, norms_of, rotation_of

ONE_STEP = {torch.float32: 2.0**-21, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}  # relative
# As on a device: exp of what is large is infinite, and its inverse 0.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")


class Pair:
    """Both operators of one format, and noise for them."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.kernels = TritonOperators(CONFIG, dtype, device)
        self.torchs = Operators(dtype, device, EPS)
        self._dtype, self.device = dtype, device
        self.step = ONE_STEP[dtype]

    def noise(self, *shape: int, seed: int = 0) -> torch.Tensor:
        return operator_cases.noise(*shape, seed=seed).to(self.device, self._dtype)

    def assert_same(self, got: torch.Tensor, want: torch.Tensor, atol: float = 1e-6) -> None:
        assert got.shape == want.shape
        assert got.dtype == want.dtype
        assert torch.allclose(got.float(), want.float(), rtol=self.step, atol=atol)


@pytest.fixture
def pair(dtype: torch.dtype, device: torch.device) -> Pair:
    return Pair(dtype, device)


@pytest.fixture
def exact(device: torch.device) -> Pair:
    return Pair(torch.float32, device)


@pytest.mark.parametrize("num_tokens", [0, 1, 5])
@pytest.mark.parametrize("width", [1, 64, 896, 73])
@pytest.mark.parametrize("is_weight_float", [False, True])
def test_norms_are_torchs(pair: Pair, num_tokens: int, width: int, is_weight_float: bool) -> None:
    x, added, weight = pair.noise(num_tokens, width), pair.noise(num_tokens, width, seed=1), pair.noise(width)
    if is_weight_float:
        weight = weight.float()
    pair.assert_same(pair.kernels.norm(x, weight), pair.torchs.norm(x, weight))
    for scale in (1.0, 0.21875):  # of the format, as the model passes it
        got, want = (operators.add_norm(x, added, scale, weight) for operators in (pair.kernels, pair.torchs))
        pair.assert_same(got[0], want[0])
        pair.assert_same(got[1], want[1], atol=2 * pair.step)  # of sums that may be rounded apart
    total, same = pair.kernels.add_norm(x, added, 1.0, None)
    assert total is same
    pair.assert_same(total, x + added)


def test_a_row_is_normed_alone(exact: Pair) -> None:
    """Bit by bit the same beside others; what is not a number stays with its row."""
    x, weight = exact.noise(6, 130), exact.noise(130)
    x[4, 7] = float("nan")
    found = exact.kernels.norm(x, weight)
    alone = torch.cat([exact.kernels.norm(row.unsqueeze(0), weight) for row in x])
    assert torch.equal(found[:4], alone[:4])
    assert found[4].isnan().all()
    assert torch.equal(found[5], alone[5])


def test_rows_that_are_not_contiguous_are_left_to_torch(exact: Pair) -> None:
    x, weight = exact.noise(4, 192)[:, :96], exact.noise(96)
    assert torch.equal(exact.kernels.norm(x, weight), exact.torchs.norm(x, weight))
    for got, want in zip(*(each.add_norm(x, x, 1.0, weight) for each in (exact.kernels, exact.torchs)), strict=True):
        exact.assert_same(got, want)
    for activation in ACTIVATIONS:
        exact.assert_same(exact.kernels.gated(activation)(x.T.contiguous().T), GATED[activation](x.clone()))
    qkv = exact.noise(3, 4, 64)[:, :, :32]
    got_kv, want_kv = (empty_kv(exact, 1, 32) for _ in range(2))
    slots = torch.tensor([5, 1, 9], device=exact.device)
    got = exact.kernels.rotate_and_store(qkv, None, None, got_kv, slots)
    assert torch.equal(got, exact.torchs.rotate_and_store(qkv, None, None, want_kv, slots))
    assert torch.equal(got_kv.keys[slots], want_kv.keys[slots])


def empty_kv(pair: Pair, num_kv_heads: int, head_dim: int) -> LayerKV:
    return kv_of(torch.full_like(pair.noise(2, 4, 16, num_kv_heads, head_dim), float("nan")))


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("rotary", [None, 1.0, 0.5])
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim"), [(3, 1, 64), (2, 2, 80), (5, 1, 96), (14, 2, 128), (7, 1, 24), (1, 1, 2)]
)
def test_queries_keys_and_values_are_torchs(
    pair: Pair, num_heads: int, num_kv_heads: int, head_dim: int, rotary: float | None, norm: str | None
) -> None:
    """What lies beside the slots is as it was."""
    num_tokens = 3
    qkv = pair.noise(num_tokens, num_heads + 2 * num_kv_heads, head_dim)
    norms = norms_of(norm, num_heads, num_kv_heads, head_dim, qkv)
    rotation = rotation_of(rotary if head_dim > 2 else None, num_tokens, head_dim, pair.device)
    slots = torch.tensor([63, 0, 21], device=pair.device)
    got_kv, want_kv = (empty_kv(pair, num_kv_heads, head_dim) for _ in range(2))
    got = pair.kernels.rotate_and_store(qkv, norms, rotation, got_kv, slots)
    want = pair.torchs.rotate_and_store(qkv, norms, rotation, want_kv, slots)
    pair.assert_same(got, want, atol=4 * pair.step)  # differences of products
    assert torch.allclose(got_kv.keys.float(), want_kv.keys.float(), rtol=pair.step, atol=4 * pair.step, equal_nan=True)
    assert torch.equal(got_kv.keys.isnan(), want_kv.keys.isnan())
    assert torch.equal(got_kv.values.nan_to_num(7), want_kv.values.nan_to_num(7))


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # NaN has no integer
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize(("num_kv_heads", "head_dim"), [(1, 64), (3, 96), (2, 16)])
def test_keys_and_values_in_8_bits_are_torchs(pair: Pair, num_kv_heads: int, head_dim: int, norm: str | None) -> None:
    """To the last bit, but for keys that rounded one step apart before; what lies beside the slots is as it was."""
    qkv = pair.noise(40, 4 * num_kv_heads, head_dim)
    qkv[3, -1], qkv[4, -1, 5], qkv[5, 2 * num_kv_heads, 1] = 0, float("nan"), float("inf")
    qkv[6, -1] *= 1e-3
    norms = norms_of(norm, 2 * num_kv_heads, num_kv_heads, head_dim, qkv)
    rotation = None if norm is None else rotation_of(1.0, len(qkv), head_dim, pair.device)
    slots = torch.randperm(8 * 16, generator=torch.Generator().manual_seed(1))[: len(qkv)].to(pair.device)
    room = torch.full((2, 8, 16, num_kv_heads, head_dim + SCALE_BYTES), 7, dtype=torch.int8, device=pair.device)
    got, want = (blockwise(room.clone(), is_paired=False) for _ in range(2))
    query = pair.kernels.rotate_and_store(qkv, norms, rotation, got, slots)
    wanted = pair.torchs.rotate_and_store(qkv, norms, rotation, want, slots)
    is_real = torch.arange(len(qkv), device=pair.device) != 5
    pair.assert_same(query[is_real], wanted[is_real], atol=4 * pair.step)
    blocks = torch.arange(8, device=pair.device)[None]
    parts = zip(got.read(blocks, torch.float32), want.read(blocks, torch.float32), strict=True)
    for most_steps, (one, other) in zip((0 if norm is None else 1.5, 0), parts, strict=True):
        is_finite = other.isfinite().all(-1)
        assert torch.equal(one.isfinite().all(-1), is_finite)
        one, other = one[is_finite], other[is_finite]
        step = other.abs().amax(-1, keepdim=True) / 127
        assert ((one - other).abs() <= most_steps * step).all()


@pytest.mark.parametrize("width", [96, 1025, 40])
@pytest.mark.parametrize("activation", list(ACTIVATIONS))
def test_gates_are_torchs(pair: Pair, width: int, activation: str) -> None:
    gate_up = pair.noise(3, 2 * width) * 4
    want = GATED[activation](gate_up.float())
    got = pair.kernels.gated(activation)(gate_up)
    assert got.shape == want.shape
    assert got.dtype == gate_up.dtype
    assert torch.allclose(got.float(), want, rtol=2 * pair.step, atol=1e-5)


@pytest.mark.parametrize("activation", list(ACTIVATIONS))
def test_a_gate_that_is_not_a_number_stays_so(exact: Pair, activation: str) -> None:
    gates = torch.tensor([float("nan"), 1.0, 200.0, -200.0, 0.0], device=exact.device)
    ups = torch.tensor([1.0, float("nan"), 2.0, 2.0, 2.0], device=exact.device)
    gate_up = torch.cat([gates, ups]).unsqueeze(0)
    got, want = exact.kernels.gated(activation)(gate_up), GATED[activation](gate_up.clone())
    assert torch.equal(got.isnan(), want.isnan())
    assert got[0, :2].isnan().all()
    assert torch.allclose(got[0, 2:], want[0, 2:])


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "together", "want"),
    [
        (14, 2, 64, False, 16),
        (32, 8, 128, False, 8),
        (32, 8, 128, True, 32),
        (3, 1, 24, True, 4),
        (1, 1, 2048, False, 1),
    ],
)
def test_heads_are_taken_by_powers_of_two(heads: int, kv_heads: int, dim: int, together: bool, want: int) -> None:
    assert heads_at_once(heads, kv_heads, dim, together) == want
