"""Quantised weights come back within half a scale, multiply as they dequantise, and are made once."""

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from core.config import QUANTIZE_SCHEMES
from core.errors import BadCheckpoint
from gpu import quant
from gpu.cache_files import measured_file, read_kept, write_kept
from gpu.quant import (
    QuantizeCache,
    QuantizedWeight,
    SlabLinear,
    cache_directory,
    can_quantize,
    dequantize,
    pack_nibbles,
    quantize,
    quantizing,
    round_up_to_bfloat16,
    unpack_nibbles,
)
from tests.gpu.conftest import ENGINE, open_runner
from tests.gpu.driver import Driver

ROWS = (1, 4, 7, 8, 33)
TOLERANCE = {torch.bfloat16: 0.01, torch.float16: 0.002, torch.float32: 1e-5}
LIMIT = 2**20


def weight_of(seed: int, size: float, offset: float) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(5, 192, generator=generator) * size + offset


@pytest.mark.parametrize("scheme", QUANTIZE_SCHEMES)
@settings(max_examples=40, deadline=None)
@given(st.integers(0, 1000), st.sampled_from([1e-6, 0.02, 1.0, 300.0]), st.sampled_from([0.0, 0.5, -20.0]))
def test_a_weight_moves_by_little(scheme: str, seed: int, size: float, offset: float) -> None:
    """int8: half its scale. int4: and its zero's rounding. fp8: half a step of its mantissa, or of 2 ** -9."""
    weight = torch.randn(5, 192, generator=torch.Generator().manual_seed(seed)) * size + offset
    quantized = quantize(weight, scheme)
    moved, scales = (dequantize(quantized, torch.float32) - weight).abs(), quantized.scales.float()
    if scheme == "fp8":
        assert quantized.values.dtype == torch.float8_e4m3fn
        assert (moved <= weight.abs() / 16 * 1.0001 + scales * 2**-10).all()
    else:
        zeros = 0 if quantized.zeros is None else quantized.zeros.float().abs() / 256
        assert (moved.view(*scales.shape, -1).amax(-1) <= scales * 0.5001 + zeros).all()


@pytest.mark.parametrize("scheme", QUANTIZE_SCHEMES)
@pytest.mark.parametrize("value", [0.0, 0.75])
def test_weights_that_are_all_alike_come_back_exactly(scheme: str, value: float) -> None:
    weight = torch.full((3, 64), value)
    assert torch.allclose(dequantize(quantize(weight, scheme), torch.float32), weight, rtol=0.004)


@pytest.mark.parametrize("scheme", QUANTIZE_SCHEMES)
def test_a_stack_is_quantised_as_its_matrices_are(scheme: str) -> None:
    stack = torch.randn(3, 4, 96, generator=torch.Generator().manual_seed(0))
    whole, one = quantize(stack, scheme), quantize(stack[1], scheme)
    assert whole.shape == (3, 4, 96)
    assert torch.equal(whole[1].values, one.values)
    assert torch.equal(whole[1].scales, one.scales)


@pytest.mark.parametrize("scheme", QUANTIZE_SCHEMES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_number_that_is_not_finite_is_refused(scheme: str, bad: float) -> None:
    weight = torch.ones(2, 64)
    weight[1, 3] = bad
    with pytest.raises(BadCheckpoint, match="not a finite number"):
        quantize(weight, scheme)


def test_rows_that_no_group_divides_cannot_be_int4() -> None:
    assert [can_quantize("int4", size) for size in (32, 48, 96, 896)] == [True, False, True, True]
    assert can_quantize("int8", 7)
    assert can_quantize("fp8", 7)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 15), min_size=2, max_size=2), st.integers(1, 9))
def test_nibbles_come_back(pair: list[int], count: int) -> None:
    values = torch.tensor(pair * count, dtype=torch.uint8)
    assert torch.equal(unpack_nibbles(pack_nibbles(values)), values)


@settings(max_examples=40, deadline=None)
@given(st.floats(0, 2.0**90, width=32))
def test_a_scale_is_rounded_up_by_less_than_a_bfloat16_step(value: float) -> None:
    rounded = round_up_to_bfloat16(torch.tensor([value])).double().item()
    assert value <= rounded <= value * (1 + 2**-7) + 1e-39


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.float() - want).norm() / want.norm())


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("scheme", QUANTIZE_SCHEMES)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("shape", [(128, 192), (70, 96)])
def test_the_result_is_the_dequantised_weights(
    scheme: str, dtype: torch.dtype, rows: int, shape: tuple[int, int]
) -> None:
    torch.manual_seed(rows)
    quantized, bias = quantize(torch.randn(shape).to(dtype), scheme), torch.randn(shape[0]).to(dtype)
    x = torch.randn(rows, shape[1]).to(dtype)
    want = F.linear(x.float(), dequantize(quantized, torch.float32), bias.float())
    got = SlabLinear(quantized, bias)(x)
    assert got.shape == want.shape
    assert got.dtype == dtype
    assert relative_error(got, want) < TOLERANCE[dtype]


@pytest.mark.parametrize("scheme", QUANTIZE_SCHEMES)
@pytest.mark.parametrize("rows", [1, 40])
def test_several_slabs_give_what_one_gives(scheme: str, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    quantized, x = quantize(torch.randn(300, 64), scheme), torch.randn(rows, 64)
    whole = SlabLinear(quantized, None)(x)
    monkeypatch.setattr(quant, "SLAB_BYTES", 64 * 64 * 4 * 2)
    assert torch.allclose(SlabLinear(quantized, None)(x), whole, atol=1e-4)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The schemes of what was quantised, in order."""
    seen: list[str] = []

    def recorded(weight: torch.Tensor, scheme: str) -> QuantizedWeight:
        seen.append(scheme)
        return quantize(weight, scheme)

    monkeypatch.setattr(quant, "quantize", recorded)
    return seen


@pytest.fixture
def cache_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def same(one: QuantizedWeight, other: QuantizedWeight) -> bool:
    return all(
        left is right if left is None or right is None else torch.equal(left, right)
        for left, right in ((one.values, other.values), (one.scales, other.scales), (one.zeros, other.zeros))
    )


def matrix_of(seed: int) -> torch.Tensor:
    return torch.randn(8, 64, generator=torch.Generator().manual_seed(seed)).bfloat16()


@pytest.mark.parametrize("scheme", QUANTIZE_SCHEMES)
def test_a_weight_is_quantised_once(scheme: str, tmp_path: Path, made: list[str]) -> None:
    cache = QuantizeCache(tmp_path / "new", LIMIT)
    first, second = cache.quantize(matrix_of(0), scheme), cache.quantize(matrix_of(0), scheme)
    assert made == [scheme]
    assert same(first, second)
    assert second.dtype == torch.bfloat16


def test_on_a_device_it_is_made_and_nothing_is_hashed_or_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = QuantizedWeight(torch.bfloat16, torch.empty(0), torch.empty(0))
    monkeypatch.setattr(quant, "quantize", lambda weight, scheme: made)
    cache = QuantizeCache(tmp_path / "new", LIMIT)
    assert cache.quantize(torch.empty(8, 64, device="meta"), "fp8") is made  # whose numbers cannot be read
    assert not (tmp_path / "new").exists()


def test_other_numbers_formats_shapes_and_schemes_are_other_files(tmp_path: Path, made: list[str]) -> None:
    cache = QuantizeCache(tmp_path, LIMIT)
    for weight in (matrix_of(0), matrix_of(1), matrix_of(0).float(), matrix_of(0).view(4, 128)):
        cache.quantize(weight, "int8")
    cache.quantize(matrix_of(0), "int4")
    assert len(made) == len(list(tmp_path.iterdir())) == 5


@pytest.mark.parametrize("position", [3, 60, -1, None])
def test_a_damaged_or_truncated_file_is_made_again(position: int | None, tmp_path: Path, made: list[str]) -> None:
    cache = QuantizeCache(tmp_path, LIMIT)
    want = cache.quantize(matrix_of(0), "int4")
    (file,) = tmp_path.iterdir()
    content = bytearray(file.read_bytes())
    if position is None:
        del content[-10:]
    else:
        content[position] ^= 1
    file.write_bytes(content)
    for _ in range(2):
        assert same(cache.quantize(matrix_of(0), "int4"), want)
    assert len(made) == 2


def test_trimming_removes_what_was_used_longest_ago(tmp_path: Path) -> None:
    cache = QuantizeCache(tmp_path, LIMIT)
    for seed in range(3):
        cache.quantize(matrix_of(seed), "int8")
        for file in tmp_path.iterdir():
            os.utime(file, (file.stat().st_atime - 100, file.stat().st_mtime - 100))
    oldest = min(tmp_path.iterdir(), key=lambda file: file.stat().st_mtime)
    size = oldest.stat().st_size
    cache.quantize(matrix_of(0), "int8")  # used now
    QuantizeCache(tmp_path, 2 * size).trim()
    assert len(list(tmp_path.iterdir())) == 2
    assert oldest in tmp_path.iterdir()


def test_what_cannot_be_written_is_not_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("in the way")
    cache = QuantizeCache(tmp_path / "file" / "cache", LIMIT)
    assert same(cache.quantize(matrix_of(0), "int8"), quantize(matrix_of(0), "int8"))
    cache.quantize(matrix_of(1), "int8")
    assert [record.getMessage() for record in caplog.records if "cannot be cached" in record.getMessage()] != []
    cache.trim()
    assert len(caplog.records) == 1


def test_the_cache_lies_where_the_desktop_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_directory() == tmp_path / "steploop" / "quantized"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache_directory() == tmp_path / "home" / ".cache" / "steploop" / "quantized"


def test_who_has_no_home_keeps_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody(uid: int) -> None:
        raise KeyError(uid)

    monkeypatch.setattr("pwd.getpwuid", nobody)
    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    assert not cache_directory().parent.exists()
    cache = QuantizeCache(cache_directory(), LIMIT)
    assert same(cache.quantize(matrix_of(0), "int8"), quantize(matrix_of(0), "int8"))
    assert read_kept(measured_file(), str) == {}
    write_kept(measured_file(), {})


def test_a_matrix_that_no_group_divides_stays_as_it_is() -> None:
    weight = torch.ones(4, 40)
    with quantizing(dataclasses.replace(ENGINE, quantize="int4")) as convert:
        assert convert is not None
        assert convert(weight) is weight


@pytest.mark.parametrize("scheme", QUANTIZE_SCHEMES)
def test_a_second_start_quantises_nothing(
    scheme: str, model_directory: Callable[[str], Path], cache_home: Path, made: list[str]
) -> None:
    engine = dataclasses.replace(ENGINE, quantize=scheme, quantize_cache_bytes=LIMIT)
    first = open_runner(model_directory("llama2"), engine)
    num_made = len(made)
    second = open_runner(model_directory("llama2"), engine)
    assert num_made == len(made) > 0
    prompt = list(range(10, 45))
    want, got = (driver.generate(8, driver.add(prompt)) for driver in (Driver(first), Driver(second)))
    assert got == want
    assert cache_home in next(cache_directory().iterdir()).parents
