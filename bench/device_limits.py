"""What a GPU can give at most: `python -m bench.device_limits`. The CPU's ceilings are bench/limits.py's.

Bytes per second by copying and by reading, and products of matrices per second, each the best of a few forms. Copies
count the bytes read and those written.
"""

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.device_clock import median_s
from bench.limits import Limits, Probe, best_of, measure_limits
from bench.results import Table, print_tables
from bench.work import Speed
from gpu.device import DTYPES

MOVED_BYTES = 2 * 1024**3
PRODUCTS = ((4096, 4096, 14_336), (8192, 8192, 8192), (16_384, 4096, 4096))  # rows, in, out
ROUNDS = 20
QUICK_ROUNDS = 5


def measure_device_limits(device: torch.device, dtype: torch.dtype, is_quick: bool = False) -> Limits:
    """Probe the device: a few seconds. On a CPU bench.limits' own probe."""
    if device.type != "cuda":
        return measure_limits(dtype=dtype, threads=[1] if is_quick else None, is_quick=is_quick)
    rounds, probes = (QUICK_ROUNDS if is_quick else ROUNDS), []
    with torch.inference_mode():
        for kind, form, amount, run in _forms(device, dtype):
            seconds, _ = median_s([run], device, rounds)
            probes.append(Probe(1, kind, form, amount / seconds))
            del run
            torch.cuda.empty_cache()
    name = str(dtype).removeprefix("torch.")
    return Limits(name, (best_of(probes, 1),), tuple(probes))


def _forms(device: torch.device, dtype: torch.dtype) -> Iterator[tuple[str, str, float, Callable[[], object]]]:
    """(kind, name, bytes or operations, the run), one form's memory at a time."""
    yield from _moves(torch.ones(MOVED_BYTES // 4, device=device))
    for rows, width, height in PRODUCTS:
        x = torch.randn(rows, width, device=device).to(dtype)
        weight = torch.randn(height, width, device=device).to(dtype)
        form, amount = f"{rows} x {width} x {height}", 2.0 * rows * width * height
        yield "product", form, amount, lambda x=x, weight=weight: F.linear(x, weight)  # type: ignore[misc]


def _moves(source: Tensor) -> Iterator[tuple[str, str, float, Callable[[], object]]]:
    target = torch.empty_like(source)
    yield "read", "copy of float32", 2.0 * MOVED_BYTES, lambda: target.copy_(source)
    yield "read", "sum of float32", float(MOVED_BYTES), source.sum
    yield "read", "one added to the other", 3.0 * MOVED_BYTES, lambda: target.add_(source)


def speed_of(limits: Limits) -> Speed:
    return Speed(limits.read_bytes_per_s, limits.flops)


def device_limit_table(limits: Limits) -> Table:
    """Every form's figure."""
    scale = {"read": (1e9, "GB/s"), "product": (1e12, "TFLOP/s")}
    rows = tuple(
        (probe.kind, probe.form, probe.num_threads, probe.per_s / scale[probe.kind][0], scale[probe.kind][1])
        for probe in limits.probes
    )
    return Table(f"Ceilings, {limits.dtype}", ("kind", "form", "threads", "best", "unit"), rows)


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: 2 where there is no CUDA device."""
    parser = argparse.ArgumentParser(prog="python -m bench.device_limits", description=__doc__)
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="bfloat16")
    parser.add_argument("--quick", action="store_true")
    arguments = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("bench.device_limits: no CUDA device\nFix: python -m bench.limits measures the CPU", file=sys.stderr)
        return 2
    found = measure_device_limits(torch.device("cuda"), DTYPES[arguments.dtype], arguments.quick)
    print_tables([device_limit_table(found)])
    return 0


if __name__ == "__main__":
    sys.exit(main())
