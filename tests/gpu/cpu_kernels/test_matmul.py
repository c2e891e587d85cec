"""The kernel's matmuls are F.linear's, whatever the rows; oneDNN, where it has bf16, serves what needs padding."""

import pytest
import torch
import torch.nn.functional as F

from gpu.cpu_kernels.support import NEEDED_FLAGS
from gpu.device import cpu_flags
from gpu.linear import blocks_of, in_blocks, pack

if not cpu_flags() >= NEEDED_FLAGS:
    pytest.skip("needs a CPU with AVX2", allow_module_level=True)

from gpu.cpu_kernels.matmul import PackedMatmul
from gpu.cpu_kernels.operators import KernelOperators
from tests.gpu.operator_cases import CONFIG


@pytest.fixture(scope="module")
def make() -> KernelOperators:
    return KernelOperators(CONFIG, has_attention=False)


def noise(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).bfloat16()


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("num_rows", [0, 1, 2, 3, 4, 5, 6, 7, 11, 12, 13, 16, 17, 32, 33, 50, 96, 97, 193, 300])
@pytest.mark.parametrize(("num_out", "num_in"), [(64, 64), (192, 1024), (128, 2176), (320, 1088)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_matmuls_are_torchs(
    make: KernelOperators,
    monkeypatch: pytest.MonkeyPatch,
    num_threads: int,
    num_rows: int,
    num_out: int,
    num_in: int,
    has_bias: bool,
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: num_threads)
    weight, x = noise(num_out, num_in), noise(num_rows, num_in)
    bias = noise(num_out) if has_bias else None
    matmul = make.linear(weight, bias)
    assert isinstance(matmul, PackedMatmul)
    want = F.linear(x.float(), weight.float(), None if bias is None else bias.float())
    assert torch.allclose(matmul(x).float(), want, rtol=2.0**-8, atol=1e-3)


@pytest.mark.parametrize(("num_out", "num_in"), [(192, 2176), (896, 4864), (1152, 896), (64, 4096)])
def test_a_row_is_rounded_the_same_in_any_company(make: KernelOperators, num_out: int, num_in: int) -> None:
    """With one thread or two, of a panel and of several, of a piece of one block and of several."""
    matmul = make.linear(noise(num_out, num_in), None)
    x = noise(600, num_in)
    whole = matmul(x)
    before = torch.get_num_threads()
    try:
        for num_threads in (1, 2):
            torch.set_num_threads(num_threads)
            for num_rows in (*range(1, 70), 96, 128, 255, 256, 257, 300, 512):
                assert torch.equal(matmul(x[:num_rows]), whole[:num_rows])
            for first, end in ((3, 10), (90, 200), (199, 200), (599, 600)):
                assert torch.equal(matmul(x[first:end]), whole[first:end])
    finally:
        torch.set_num_threads(before)


def test_rows_may_lie_apart(make: KernelOperators) -> None:
    weight, x = noise(64, 128), noise(5, 192)[:, 64:]
    assert torch.equal(make.linear(weight, None)(x), make.linear(weight, None)(x.contiguous()))


@pytest.mark.parametrize(("num_out", "num_in"), [(48, 72), (64, 72), (100, 64)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_matrix_that_is_padded_is_onednns_where_it_has_bf16(
    make: KernelOperators, num_out: int, num_in: int, has_bias: bool
) -> None:
    weight, x = noise(num_out, num_in), noise(40, num_in)
    bias = noise(num_out) if has_bias else None
    matmul = make.linear(weight, bias)
    assert not isinstance(matmul, PackedMatmul)
    whole = matmul(x)
    assert torch.allclose(
        whole.float(), F.linear(x.float(), weight.float(), bias if bias is None else bias.float()), rtol=0.02, atol=0.05
    )
    for num_rows in (1, 2, 7, 33):
        assert torch.equal(matmul(x[:num_rows]), whole[:num_rows])


@pytest.mark.skipif("avx512_bf16" not in cpu_flags(), reason="needs a CPU with avx512_bf16, whose layout is known")
def test_the_layout_is_onednns_own() -> None:
    weight = noise(128, 192)
    packed = pack(weight)
    assert torch.equal(in_blocks(weight), blocks_of(packed, weight.shape))
