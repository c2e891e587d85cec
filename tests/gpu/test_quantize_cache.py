"""What was quantised once is not quantised again; what is damaged is; the cache keeps to its size."""

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from core.config import QUANTIZE_SCHEMES
from gpu import quant
from gpu.cache_files import measured_file, read_kept, write_kept
from gpu.quant import QuantizeCache, QuantizedWeight, cache_directory, quantize, quantizing
from tests.gpu.conftest import ENGINE, open_runner
from tests.gpu.driver import Driver

LIMIT = 2**20


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


def weight_of(seed: int) -> torch.Tensor:
    return torch.randn(8, 64, generator=torch.Generator().manual_seed(seed)).bfloat16()


@pytest.mark.parametrize("scheme", QUANTIZE_SCHEMES)
def test_a_weight_is_quantised_once(scheme: str, tmp_path: Path, made: list[str]) -> None:
    cache = QuantizeCache(tmp_path / "new", LIMIT)
    first, second = cache.quantize(weight_of(0), scheme), cache.quantize(weight_of(0), scheme)
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
    for weight in (weight_of(0), weight_of(1), weight_of(0).float(), weight_of(0).view(4, 128)):
        cache.quantize(weight, "int8")
    cache.quantize(weight_of(0), "int4")
    assert len(made) == len(list(tmp_path.iterdir())) == 5


@pytest.mark.parametrize("position", [3, 60, -1])
def test_a_damaged_file_is_made_again(position: int, tmp_path: Path, made: list[str]) -> None:
    cache = QuantizeCache(tmp_path, LIMIT)
    want = cache.quantize(weight_of(0), "int4")
    (file,) = tmp_path.iterdir()
    content = bytearray(file.read_bytes())
    content[position] ^= 1
    file.write_bytes(content)
    assert same(cache.quantize(weight_of(0), "int4"), want)
    assert same(cache.quantize(weight_of(0), "int4"), want)
    assert len(made) == 2


def test_a_truncated_file_is_made_again(tmp_path: Path, made: list[str]) -> None:
    cache = QuantizeCache(tmp_path, LIMIT)
    want = cache.quantize(weight_of(0), "int8")
    (file,) = tmp_path.iterdir()
    file.write_bytes(file.read_bytes()[:-10])
    assert same(cache.quantize(weight_of(0), "int8"), want)
    assert len(made) == 2


def test_trimming_removes_what_was_used_longest_ago(tmp_path: Path) -> None:
    cache = QuantizeCache(tmp_path, LIMIT)
    for seed in range(3):
        cache.quantize(weight_of(seed), "int8")
        for file in tmp_path.iterdir():
            os.utime(file, (file.stat().st_atime - 100, file.stat().st_mtime - 100))
    oldest = min(tmp_path.iterdir(), key=lambda file: file.stat().st_mtime)
    size = oldest.stat().st_size
    cache.quantize(weight_of(0), "int8")  # used now
    QuantizeCache(tmp_path, 2 * size).trim()
    assert len(list(tmp_path.iterdir())) == 2
    assert oldest in tmp_path.iterdir()


def test_what_cannot_be_written_is_not_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("in the way")
    cache = QuantizeCache(tmp_path / "file" / "cache", LIMIT)
    assert same(cache.quantize(weight_of(0), "int8"), quantize(weight_of(0), "int8"))
    cache.quantize(weight_of(1), "int8")
    assert [record.getMessage() for record in caplog.records if "not kept" in record.getMessage()] != []
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
    assert same(cache.quantize(weight_of(0), "int8"), quantize(weight_of(0), "int8"))
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
