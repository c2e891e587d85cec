"""A matmul is the dequantised weight's, for any rows, shape and form; a row's is the same in any company."""

import pytest
import torch
import torch.nn.functional as F

from gpu.kernels.matmul import Matmul, can_multiply, stored_as
from gpu.kernels.sizes import (
    MAX_SPLITS,
    MIN_SPLIT_INPUTS,
    SMALL_ROWS,
    SMALL_TILES,
    split_inputs,
    splits_for,
)
from gpu.quant import QuantizedWeight, Weight, dequantize, quantize

FORMS = ("plain", "int8", "fp8", "int4", "fp8 by 32")
SHAPES = ((70, 96), (33, 544), (64, 2048))  # odd outputs; odd inputs in several parts; whole tiles in several parts
TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}  # of the largest


def weight_of(form: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Weight:
    made = torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(device, dtype)
    if form.startswith("fp8 by "):
        return grouped(made, int(form.removeprefix("fp8 by ")))
    return made if form == "plain" else quantize(made, form)


def grouped(weight: torch.Tensor, size: int) -> QuantizedWeight:
    """As checkpoints have it: 8-bit floats with a float32 scale for each group of inputs."""
    groups = weight.float().unflatten(-1, (-1, size))
    scales = groups.abs().amax(-1) / 448
    values = (groups / scales.unsqueeze(-1)).clamp(-448, 448).to(torch.float8_e4m3fn)
    return QuantizedWeight(weight.dtype, values.flatten(-2), scales)


def rows_of(num_rows: int, num_in: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.randn(num_rows, num_in, generator=torch.Generator().manual_seed(num_in)).to(device, dtype)


def exact(weight: Weight, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    floats = dequantize(weight, torch.float32) if isinstance(weight, QuantizedWeight) else weight.float()
    return F.linear(x.float(), floats, None if bias is None else bias.float())


def assert_near(got: torch.Tensor, want: torch.Tensor) -> None:
    assert got.shape == want.shape
    assert (got.float() - want).abs().max() <= TOLERANCE[got.dtype] * want.abs().max()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("num_rows", [1, 5, SMALL_ROWS, SMALL_ROWS + 1])
def test_a_matmul_is_the_weights(
    form: str, shape: tuple[int, int], num_rows: int, dtype: torch.dtype, device: torch.device
) -> None:
    weight, x = weight_of(form, shape, dtype, device), rows_of(num_rows, shape[1], dtype, device)
    bias = rows_of(1, shape[0], dtype, device)[0] if num_rows != 5 else None
    assert can_multiply(weight)
    got = Matmul(weight, bias)(x)
    assert got.dtype == dtype
    assert_near(got, exact(weight, x, bias))


def test_inputs_of_any_number_are_multiplied(device: torch.device) -> None:
    for num_in in (1, 63, 65):
        weight, x = (rows_of(rows, num_in, torch.float32, device) for rows in (40, 3))
        assert_near(Matmul(weight, None)(x), exact(weight, x, None))


def test_no_rows_give_none(device: torch.device) -> None:
    assert Matmul(torch.ones(8, 16, device=device), None)(torch.ones(0, 16, device=device)).shape == (0, 8)


def test_rows_may_lie_apart_and_columns_too(device: torch.device) -> None:
    weight, wide = rows_of(24, 32, torch.float32, device), rows_of(32, 64, torch.float32, device)
    for x in (wide[:, 3:35], wide[:, :7].T):
        assert_near(Matmul(weight, None)(x), exact(weight, x, None))


@pytest.mark.parametrize("num_inputs", [32, 96, 256])
def test_groups_of_any_size_that_is_known(num_inputs: int, device: torch.device) -> None:
    """As GPTQ and AWQ checkpoints have them: not only those that are made here."""
    num_out, num_groups = 40, 2
    generator = torch.Generator().manual_seed(num_inputs)
    values = torch.randint(0, 256, (num_out, num_groups * num_inputs // 2), generator=generator, dtype=torch.uint8)
    scales, zeros = torch.rand(2, num_out, num_groups, generator=generator).bfloat16()
    weight = QuantizedWeight(torch.float32, values.to(device), scales.to(device), zeros.to(device))
    assert weight.group_size == num_inputs
    assert can_multiply(weight)
    x = rows_of(3, num_groups * num_inputs, torch.float32, device)
    assert_near(Matmul(weight, None)(x), exact(weight, x, None))


@pytest.mark.parametrize("num_inputs", [64, 96, 128, 256])
def test_groups_of_8_bit_floats_of_any_size_that_is_known(num_inputs: int, device: torch.device) -> None:
    weight = grouped(rows_of(40, 2 * num_inputs, torch.float32, device), num_inputs)
    x = rows_of(SMALL_ROWS + 4, 2 * num_inputs, torch.float32, device)
    assert can_multiply(weight)
    assert stored_as(weight) == (f"float8_e4m3fn by {num_inputs}", 40 * 2 * num_inputs)
    for num_rows in (3, SMALL_ROWS + 4):
        assert_near(Matmul(weight, None)(x[:num_rows]), exact(weight, x[:num_rows], None))


def test_what_is_not_known_is_told() -> None:
    assert not can_multiply(grouped(torch.ones(8, 48), 24))
    assert not can_multiply(torch.ones(8, 64)[:, :32])
    narrow = torch.ones(8, 3, dtype=torch.bfloat16)
    assert not can_multiply(QuantizedWeight(torch.float32, torch.ones(8, 24, dtype=torch.uint8), narrow, narrow))


@pytest.mark.parametrize("form", FORMS)
def test_a_row_is_multiplied_in_the_same_way_in_any_company(
    form: str, dtype: torch.dtype, device: torch.device
) -> None:
    weight, x = weight_of(form, (48, 1024), dtype, device), rows_of(SMALL_ROWS, 1024, dtype, device)
    assert splits_for(48, 1024, SMALL_TILES[16]) > 1
    matmul = Matmul(weight, None)
    together = matmul(x)
    x[7] = float("nan")
    assert torch.equal(matmul(x)[:7], together[:7])
    for count in (1, 2, 9):
        assert torch.equal(matmul(x[8:][:count]), together[8:][:count])


@pytest.mark.parametrize(
    "shape", [(64, 64), (6144, 4096), (4096, 14_336), (28_672, 4096), (152_064, 896), (1, 1 << 20)]
)
def test_parts_cover_the_inputs_once(shape: tuple[int, int]) -> None:
    num_out, num_in = shape
    for tile in SMALL_TILES.values():
        splits = splits_for(num_out, num_in, tile)
        width = split_inputs(num_in, splits, tile)
        assert 1 <= splits <= MAX_SPLITS
        assert splits == 1 or num_in >= splits * MIN_SPLIT_INPUTS
        assert width % tile.inputs == 0
        assert width * splits >= num_in


def test_a_matrix_of_many_outputs_is_not_cut() -> None:
    assert splits_for(28_672, 4096, SMALL_TILES[16]) == 1
    assert splits_for(4096, 4096, SMALL_TILES[16]) == 4
