"""What this machine can give at most: `python -m bench.limits`. Every share in the other benches refers to this probe.

Two ceilings for each number of threads: bytes read from memory per second, and products with bfloat16 matrices per
second. A ceiling is the best that any listed form and shape reached in its best round: whatever a server does, it does
not pass it by much. Others measure it in their own run (`measure_limits`): a machine is not the same the next day.
"""

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec
import torch
import torch.nn.functional as F
from torch import Tensor

from bench.results import RESULTS_DIR, Cell, Table, command_line, print_tables, write_result
from gpu.device import DTYPES, MIN_PROBE_BYTES, last_level_cache_bytes, num_physical_cores, probe_bytes
from gpu.linear import can_pack

PRODUCTS = (  # rows, in, out
    (256, 896, 9728),
    (512, 896, 9728),
    (512, 4864, 896),
    (512, 2048, 2048),
    (1024, 4096, 4096),
    (2048, 2048, 2048),
)
ROW_PRODUCT = (896, 9728)  # in, out: the form in which a decode step reads
SECONDS_EACH = 0.4
MIB = 1024**2
MIN_ROUNDS = 3
QUICK_SECONDS_EACH = 0.0

Measured = Callable[[], object]


class Ceiling(msgspec.Struct, frozen=True):
    """Of one number of threads.

    Args:
        read_form, product_form: which form was the fastest.
    """

    num_threads: int
    read_bytes_per_s: float
    read_form: str
    flops: float  # per second; a product of [m, k] and [k, n] is 2 * m * k * n
    product_form: str


class Probe(msgspec.Struct, frozen=True):
    """One form's best round."""

    num_threads: int
    kind: str  # "read" or "product"
    form: str
    per_s: float  # bytes, or floating-point operations


class Limits(msgspec.Struct, frozen=True):
    """The machine's ceilings in one number format, and everything they were chosen from."""

    dtype: str
    ceilings: tuple[Ceiling, ...]
    probes: tuple[Probe, ...]
    read_size_bytes: int = 0  # what a probe of kind "read" reads, beyond the last-level cache
    cache_bytes: int = 0  # of that cache, as the kernel tells it; neighbours may share it

    @property
    def read_bytes_per_s(self) -> float:
        """With whichever number of threads reads fastest."""
        return max(ceiling.read_bytes_per_s for ceiling in self.ceilings)

    @property
    def flops(self) -> float:
        """With whichever number of threads multiplies fastest."""
        return max(ceiling.flops for ceiling in self.ceilings)


def measure_limits(
    threads: Sequence[int] | None = None, dtype: torch.dtype = torch.bfloat16, is_quick: bool = False
) -> Limits:
    """Probe the machine: about 20 s. Torch's thread count is as before afterwards.

    Args:
        threads: to measure with; None: 1, and all physical cores.
        is_quick: a second or two, and figures that only show that it works.
    """
    threads = threads or sorted({1, num_physical_cores()})
    before = torch.get_num_threads()
    try:
        products, seconds = (PRODUCTS[:1], QUICK_SECONDS_EACH) if is_quick else (PRODUCTS, SECONDS_EACH)
        size_bytes = MIN_PROBE_BYTES if is_quick else probe_bytes(torch.device("cpu"))
        probes = tuple(_probes(threads, dtype, products, seconds, size_bytes))
    finally:
        torch.set_num_threads(before)
    name = str(dtype).removeprefix("torch.")
    ceilings = tuple(best_of(probes, num_threads) for num_threads in threads)
    return Limits(name, ceilings, probes, size_bytes, last_level_cache_bytes())


def best_of(probes: Sequence[Probe], num_threads: int) -> Ceiling:
    """The ceiling that these probes show for a number of threads."""
    read, product = (
        max(
            (probe for probe in probes if probe.kind == kind and probe.num_threads == num_threads),
            key=lambda probe: probe.per_s,
        )
        for kind in ("read", "product")
    )
    return Ceiling(num_threads, read.per_s, read.form, product.per_s, product.form)


def _probes(
    threads: Sequence[int],
    dtype: torch.dtype,
    products: Sequence[tuple[int, int, int]],
    seconds: float,
    size_bytes: int,
) -> Iterator[Probe]:
    with torch.inference_mode():
        for kind, form, amount, run in _forms(dtype, products, size_bytes):
            for num_threads in threads:
                torch.set_num_threads(num_threads)
                yield Probe(num_threads, kind, form, amount / _best_s(run, seconds))


def _forms(
    dtype: torch.dtype, products: Sequence[tuple[int, int, int]], size_bytes: int
) -> Iterator[tuple[str, str, float, Measured]]:
    """(kind, name, bytes or operations of one run, the run); one form's memory at a time."""
    yield from _sums(size_bytes)
    yield from _row_products(dtype, size_bytes)
    for rows, width, height in products:
        x, weight = torch.randn(rows, width).to(dtype), torch.randn(height, width).to(dtype)
        for form, product in _products(weight, rows):
            yield "product", f"{rows} x {width} x {height}, {form}", 2.0 * rows * width * height, _bound(product, x)


def _sums(size_bytes: int) -> Iterator[tuple[str, str, float, Measured]]:
    numbers = torch.ones(size_bytes // 4)
    yield "read", "sum of float32", size_bytes, numbers.sum
    yield "read", "dot product of float32 with itself", size_bytes, lambda: torch.dot(numbers, numbers)
    yield "read", "sum of int64", size_bytes, numbers.view(torch.int64).sum


def _row_products(dtype: torch.dtype, size_bytes: int) -> Iterator[tuple[str, str, float, Measured]]:
    """One row times as many different weights as fill so many bytes."""
    width, height = ROW_PRODUCT
    num_weights = size_bytes // (width * height * dtype.itemsize)
    x = torch.randn(1, width).to(dtype)
    weight = torch.randn(height, width).to(dtype)
    by_form: dict[str, list[Measured]] = {}
    for _ in range(num_weights):
        for form, product in _products(weight.clone(), 1):
            by_form.setdefault(form, []).append(_bound(product, x))
    size_bytes = num_weights * width * height * dtype.itemsize
    for form in list(by_form):
        runs = by_form.pop(form)
        yield "read", f"1 x {width} x {height}, {form}", size_bytes, _all_of(runs)


def _products(weight: Tensor, rows: int) -> Iterator[tuple[str, Callable[[Tensor], Tensor]]]:
    """Ways to compute x [rows, in] times the transpose of weight [out, in]."""
    yield "plain", lambda x: F.linear(x, weight)
    if can_pack(weight.dtype, weight.device):
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, rows)
        yield "prepacked", lambda x: torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")


def _bound(product: Callable[[Tensor], Tensor], x: Tensor) -> Measured:
    return lambda: product(x)


def _all_of(runs: Sequence[Measured]) -> Measured:
    def run() -> None:
        for one in runs:
            one()

    return run


def _best_s(run: Measured, seconds: float) -> float:
    """Seconds of the best round, of as many as fit into `seconds`, after one that is not counted."""
    run()
    best_s, end_s, num_rounds = float("inf"), time.perf_counter() + seconds, 0
    while num_rounds < MIN_ROUNDS or time.perf_counter() < end_s:
        started_s = time.perf_counter()
        run()
        best_s = min(best_s, time.perf_counter() - started_s)
        num_rounds += 1
    return best_s


def limit_tables(limits: Limits, has_probes: bool = True) -> list[Table]:
    """The ceilings, and with has_probes every form's figure."""
    ceilings = Table(
        f"Ceilings of this machine, {limits.dtype}",
        ("threads", "read GB/s", "read by", "GFLOP/s", "computed by"),
        tuple(
            (c.num_threads, c.read_bytes_per_s / 1e9, c.read_form, c.flops / 1e9, c.product_form)
            for c in limits.ceilings
        ),
    )
    sizes = Table(
        "Read by a probe",
        ("last-level cache MiB", "MiB"),
        ((limits.cache_bytes // MIB, limits.read_size_bytes // MIB),),
    )
    if not has_probes:
        return [ceilings]
    return [ceilings, sizes, _probe_table(limits, "read", "GB/s"), _probe_table(limits, "product", "GFLOP/s")]


def _probe_table(limits: Limits, kind: str, unit: str) -> Table:
    threads = [ceiling.num_threads for ceiling in limits.ceilings]
    found = {(probe.form, probe.num_threads): probe.per_s / 1e9 for probe in limits.probes if probe.kind == kind}
    forms = list(dict.fromkeys(form for form, _ in found))
    rows: list[tuple[Cell, ...]] = [(form, *(found[form, num_threads] for num_threads in threads)) for form in forms]
    columns = ("form", *(f"{unit}, {num_threads} thread{'s' * (num_threads > 1)}" for num_threads in threads))
    return Table(f"Each form's best: {kind}", columns, tuple(rows))


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, show, write. Returns the exit code."""
    argv = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(prog="python -m bench.limits", description=__doc__)
    parser.add_argument("--threads", nargs="+", type=int, metavar="N", help="default: 1, and all physical cores")
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="bfloat16")
    parser.add_argument("--quick", action="store_true", help="see that it works; writes nothing unless --json")
    parser.add_argument("--json", type=Path, metavar="FILE", help="default: bench/results/limits.json")
    arguments = parser.parse_args(argv)
    limits = measure_limits(arguments.threads, DTYPES[arguments.dtype], arguments.quick)
    tables = limit_tables(limits)
    print_tables(tables)
    path = arguments.json or (None if arguments.quick else RESULTS_DIR / "limits.json")
    if path is not None:
        details = {"limits": msgspec.to_builtins(limits)}
        write_result(
            path, "limits", command_line("python -m bench.limits", argv), tables, {"dtype": limits.dtype}, details
        )
        print(f"written to {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
