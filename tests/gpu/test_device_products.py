"""Which product serves on a device: what was the faster for its shape, measured once; the clock is the test's."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from core.config import ModelConfig
from gpu.device import DeviceChoice
from gpu.device_products import (
    MEASURED_FEW,
    MEASURED_MANY,
    MOST_FEW_ROWS,
    DeviceProducts,
    Served,
    machine_name,
    products_file,
    products_here,
)
from gpu.linear import Linear
from gpu.measured import Measuring
from tests.gpu.test_measured import LARGE, SMALL

CPU = torch.device("cpu")
SIZE = (6, 4)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return products_file()


class Bench:
    """Products that note who multiplied how many rows, and a clock for which a row costs each of them its price."""

    def __init__(self, kernel_price: Callable[[int], float]) -> None:
        self.calls: list[tuple[str, int]] = []
        self.num_measured = 0
        self._kernel_price = kernel_price

    def product(self, name: str) -> Linear:
        def multiply(x: torch.Tensor) -> torch.Tensor:
            self.calls.append((name, x.shape[0]))
            return x.new_zeros(x.shape[0], SIZE[0])

        return multiply

    def clock(self, work: Callable[[], object]) -> float:
        before = len(self.calls)
        work()
        self.num_measured += 1
        return sum(self._kernel_price(rows) if name.startswith("kernel") else 1.0 for name, rows in self.calls[before:])

    def products(self) -> DeviceProducts:
        return DeviceProducts(CPU, torch.float32, self.clock)

    def who(self, product: Linear, num_rows: int) -> str:
        product(torch.zeros(num_rows, SIZE[1]))
        return self.calls[-1][0]


def make(bench: Bench, products: DeviceProducts, name: str, size_bytes: int = 24) -> Linear:
    return products.make(name, bench.product(f"kernel {name}"), bench.product("torch"), SIZE, size_bytes)


@pytest.mark.parametrize("few", [True, False])
@pytest.mark.parametrize("many", [True, False])
def test_the_faster_serves_its_rows(few: bool, many: bool) -> None:
    bench = Bench(lambda rows: 0.5 if (few if rows <= MOST_FEW_ROWS else many) else 1.5)
    products = bench.products()
    plain, packed = make(bench, products, "bfloat16"), make(bench, products, "int4 by 64")
    assert products.choose() == {"bfloat16 6 x 4": Served(few, False), "int4 by 64 6 x 4": Served(few, many)}
    names = {True: "kernel int4 by 64", False: "torch"}
    for num_rows in (1, MOST_FEW_ROWS):
        assert bench.who(plain, num_rows) == ("kernel bfloat16" if few else "torch")
        assert bench.who(packed, num_rows) == names[few]
    assert bench.who(plain, MOST_FEW_ROWS + 1) == "torch"
    assert bench.who(packed, MOST_FEW_ROWS + 1) == names[many]


@pytest.mark.parametrize("failing", ["kernel int8", "torch"])
def test_one_that_fails_is_struck_and_the_start_goes_on(failing: str, caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench(lambda rows: 1.5 if failing == "torch" else 0.5)
    products = bench.products()

    def fail(x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("out of resource: shared memory")

    ways = {name: fail if name == failing else bench.product(name) for name in ("kernel int8", "torch")}
    products.make("int8", ways["kernel int8"], ways["torch"], SIZE, 24)
    is_kernel = failing == "torch"
    assert products.choose() == {"int8 6 x 4": Served(is_kernel, is_kernel)}
    assert [" does not serve here: " in record.getMessage() for record in caplog.records] == [True, True]


def test_all_of_a_shapes_rows_decide_together() -> None:
    """Twice as fast for one row, and a little slower for others: the geometric mean counts."""
    bench = Bench(lambda rows: 0.5 if rows == 1 else 1.3)
    products = bench.products()
    make(bench, products, "bfloat16")
    assert products.choose()["bfloat16 6 x 4"].few
    assert [rows for name, rows in bench.calls] == [rows for rows in MEASURED_FEW for _ in range(2)]


def test_before_it_is_measured_torch_serves_what_it_knows() -> None:
    bench = Bench(lambda rows: 1.0)
    products = bench.products()
    plain, packed = make(bench, products, "bfloat16"), make(bench, products, "int8")
    assert {bench.who(plain, rows) for rows in (1, 100)} == {"torch"}
    assert {bench.who(packed, rows) for rows in (1, 100)} == {"kernel int8"}


def test_matrices_of_a_shape_are_measured_in_turn_up_to_what_a_cache_keeps() -> None:
    bench = Bench(lambda rows: 0.5)
    products = bench.products()
    for _ in range(5):
        make(bench, products, "int8", 100 * 1024**2)
    products.choose()
    assert bench.calls.count(("kernel int8", MEASURED_MANY[0])) == 3


def test_a_shape_is_measured_once_per_device(cache: Path) -> None:
    first, second = Bench(lambda rows: 0.5), Bench(lambda rows: 2.0)
    for bench in (first, second):
        products = bench.products()
        product = make(bench, products, "bfloat16")
        assert products.choose() == {"bfloat16 6 x 4": Served(True, False)}
        assert bench.who(product, 1) == "kernel bfloat16"
    assert first.num_measured == 2 * len(MEASURED_FEW)
    assert second.num_measured == 0
    assert products_here(CPU) == {"bfloat16 6 x 4": Served(True, False)}
    other = second.products()
    make(second, other, "float16")
    other.choose()
    assert set(products_here(CPU)) == {"bfloat16 6 x 4", "float16 6 x 4"}


@pytest.mark.parametrize("content", [b"", b"[]", b'{"x": {"y": {"few": 1, "many": false}}}', b'{"x": {"y": {}}}'])
def test_a_file_that_is_not_ours_is_measured_over(content: bytes, cache: Path) -> None:
    cache.parent.mkdir(parents=True)
    cache.write_bytes(content)
    bench = Bench(lambda rows: 0.5)
    products = bench.products()
    make(bench, products, "bfloat16")
    assert products.choose() == {"bfloat16 6 x 4": Served(True, False)}
    assert json.loads(cache.read_text())[machine_name(CPU)] == {"bfloat16 6 x 4": {"few": True, "many": False}}


def test_it_reads_as_a_phrase() -> None:
    assert str(Served(True, False)) == "kernel up to 16 rows, torch beyond"


@pytest.mark.parametrize(("config", "is_measured"), [(LARGE, True), (SMALL, False)], ids=["large", "small"])
def test_a_large_models_start_chooses(config: ModelConfig, is_measured: bool) -> None:
    bench = Bench(lambda rows: 0.5)
    products = bench.products()
    make(bench, products, "bfloat16")
    choice = DeviceChoice(torch.device("cuda", 0), "", torch.bfloat16, "", 3, "")
    assert Measuring(config, choice, [], products).measured.threads.of(1) == 3
    assert (bench.num_measured > 0) == is_measured
