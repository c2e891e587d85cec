"""What a machine can give at most, and what a model's steps must at least take of it: `python -m bench.limits`.

Two ceilings for each number of threads, or of a GPU: bytes read from memory per second, and matmuls in bfloat16 per
second. A ceiling is the best that any listed form and shape reached in its best round: whatever a server does, it does
not pass it by much. Every share in the other benches refers to a probe of their own run: a machine is not the same the
next day.

A step's work counts matmuls with weights, attention's, and weights, keys and values read. Norms, activations, sampling
and everything done twice are a server's own cost: they make its share of the limit smaller.
"""

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.nn.functional as F
from torch import Tensor

from bench.kit import Flag, Found, bench
from bench.results import Cell, Table, table_of
from core.config_json import parse_model_config
from gpu.checkpoint import open_checkpoint
from gpu.device import DTYPES, MIN_PROBE_BYTES, num_physical_cores, probe_bytes
from gpu.linear import can_pack
from gpu.streams import recording

CPU = torch.device("cpu")
MATMULS = {  # rows, in, out
    "cpu": (
        *((256, 896, 9728), (512, 896, 9728), (512, 4864, 896)),
        *((512, 2048, 2048), (1024, 4096, 4096), (2048, 2048, 2048)),
    ),
    "cuda": ((4096, 4096, 14_336), (8192, 8192, 8192), (16_384, 4096, 4096)),
}
ROW_MATMUL = (896, 9728)  # in, out: the form in which a decode step reads
SECONDS_EACH = 0.4
MIN_ROUNDS = 3
MIB = 1024**2
MOVED_BYTES = 2048 * MIB  # on a device
DEVICE_ROUNDS, QUICK_DEVICE_ROUNDS = 20, 5
ROTATED_BYTES = 256 * MIB  # more than a device's cache keeps (an H200 has 50 MB)
MAX_COPIES = 32
ROUNDS, WARM_ROUNDS = 7, 2
UNITS = {"read": "GB/s", "product": "GFLOP/s"}

Measured = Callable[[], object]
Form = tuple[str, str, float, Measured]  # "read" or "product", name, bytes or operations of one run, the run


class Probe(msgspec.Struct, frozen=True):
    """One form's best round."""

    num_threads: int
    kind: str  # of UNITS
    form: str
    per_s: float  # bytes, or floating-point operations: a matmul of [m, k] and [k, n] is 2 * m * k * n


class Limits(msgspec.Struct, frozen=True):
    """The machine's ceilings in one number format: of all that was probed, the best."""

    dtype: str
    probes: tuple[Probe, ...]

    @property
    def threads(self) -> list[int]:
        return sorted({probe.num_threads for probe in self.probes})

    def best(self, kind: str, num_threads: int | None = None) -> Probe:
        """The fastest form; None: with whichever number of threads is fastest."""
        chosen = [p for p in self.probes if p.kind == kind and num_threads in (None, p.num_threads)]
        return max(chosen, key=lambda probe: probe.per_s)

    @property
    def speed(self) -> "Speed":
        return Speed(self.best("read").per_s, self.best("product").per_s)


@dataclass(frozen=True, slots=True)
class Speed:
    """What the machine can do at most."""

    read_bytes_per_s: float
    flops: float


def measure_limits(
    device: torch.device = CPU,
    dtype: torch.dtype = torch.bfloat16,
    is_quick: bool = False,
    threads: Sequence[int] | None = None,
) -> Limits:
    """Probe a CPU, about 20 s, or a GPU, a few seconds. Torch's thread count is as before afterwards.

    Args:
        threads: of a CPU, to measure with; None: 1, and all physical cores.
        is_quick: a second or two, and figures that only show that it works.
    """
    is_cuda, before, probes = device.type == "cuda", torch.get_num_threads(), list[Probe]()
    counts = [1] if is_cuda else sorted(threads or {1, num_physical_cores()})
    try:
        with torch.inference_mode():
            for kind, form, amount, run in _forms(device, dtype, is_quick):
                for num_threads in counts:
                    torch.set_num_threads(num_threads)
                    if is_cuda:
                        best_s, _ = median_s([run], device, QUICK_DEVICE_ROUNDS if is_quick else DEVICE_ROUNDS)
                        torch.cuda.empty_cache()
                    else:
                        best_s = _best_s(run, 0.0 if is_quick else SECONDS_EACH)
                    probes.append(Probe(num_threads, kind, form, amount / best_s))
    finally:
        torch.set_num_threads(before)
    return Limits(str(dtype).removeprefix("torch."), tuple(probes))


def _forms(device: torch.device, dtype: torch.dtype, is_quick: bool) -> Iterator[Form]:
    """One form's memory at a time."""
    if device.type == "cuda":
        source = torch.ones(MOVED_BYTES // 4, device=device)
        target = torch.empty_like(source)  # copies count the bytes read and those written
        yield "read", "copy of float32", 2.0 * MOVED_BYTES, lambda: target.copy_(source)
        yield "read", "sum of float32", float(MOVED_BYTES), source.sum
        yield "read", "one added to the other", 3.0 * MOVED_BYTES, lambda: target.add_(source)
        del source, target
    else:
        size_bytes = MIN_PROBE_BYTES if is_quick else probe_bytes(device)
        numbers = torch.ones(size_bytes // 4)
        yield "read", "sum of float32", size_bytes, numbers.sum
        yield "read", "dot product of float32 with itself", size_bytes, lambda: torch.dot(numbers, numbers)
        yield "read", "sum of int64", size_bytes, numbers.view(torch.int64).sum
        yield from _row_matmuls(dtype, size_bytes)
    for rows, width, height in MATMULS[device.type][: 1 if is_quick else None]:
        x = torch.randn(rows, width, device=device).to(dtype)
        weight = torch.randn(height, width, device=device).to(dtype)
        for form, product in _products(weight, rows):
            yield "product", f"{rows} x {width} x {height}, {form}", 2.0 * rows * width * height, partial(product, x)


def _row_matmuls(dtype: torch.dtype, size_bytes: int) -> Iterator[Form]:
    """One row times as many different weights as fill so many bytes."""
    width, height = ROW_MATMUL
    weight_bytes = width * height * dtype.itemsize
    x, weight = torch.randn(1, width).to(dtype), torch.randn(height, width).to(dtype)
    by_form: dict[str, list[Callable[[Tensor], Tensor]]] = {}
    for _ in range(size_bytes // weight_bytes):
        for form, product in _products(weight.clone(), 1):
            by_form.setdefault(form, []).append(product)

    def run_each(products: Sequence[Callable[[Tensor], Tensor]]) -> None:
        for product in products:
            product(x)

    for form in list(by_form):
        products = by_form.pop(form)
        amount = float(len(products) * weight_bytes)
        yield "read", f"1 x {width} x {height}, {form}", amount, partial(run_each, products)


def _products(weight: Tensor, rows: int) -> Iterator[tuple[str, Callable[[Tensor], Tensor]]]:
    """Ways to compute x [rows, in] times the transpose of weight [out, in]."""
    yield "plain", lambda x: F.linear(x, weight)
    if can_pack(weight.dtype, weight.device):
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, rows)
        yield "prepacked", lambda x: torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")


def _best_s(run: Measured, seconds: float) -> float:
    """Seconds of the best round, of as many as fit into `seconds`, after one that is not counted."""
    run()
    best_s, end_s, num_rounds = float("inf"), time.perf_counter() + seconds, 0
    while num_rounds < MIN_ROUNDS or time.perf_counter() < end_s:
        best_s = min(best_s, _wall_s(run))
        num_rounds += 1
    return best_s


def limit_tables(limits: Limits) -> list[Table]:
    """The ceilings, and every form's best."""
    rows: list[dict[str, Cell]] = []
    for num_threads in limits.threads:
        read, product = limits.best("read", num_threads), limits.best("product", num_threads)
        figures: dict[str, Cell] = {"read GB/s": read.per_s / 1e9, "read by": read.form, "GFLOP/s": product.per_s / 1e9}
        rows.append({"threads": num_threads, **figures, "computed by": product.form})
    forms: list[dict[str, Cell]] = [
        {"form": probe.form, "threads": probe.num_threads, "best": probe.per_s / 1e9, "unit": UNITS[probe.kind]}
        for probe in limits.probes
    ]
    return [table_of(f"Ceilings of this machine, {limits.dtype}", rows), table_of("Each form's best", forms)]


def num_copies(size_bytes: int, device: torch.device) -> int:
    """Of inputs of so many bytes, that rotate: what is not in a cache when its turn comes. One on a CPU."""
    if device.type != "cuda":
        return 1
    return max(1, min(MAX_COPIES, -(-ROTATED_BYTES // max(1, size_bytes))))


def median_s(calls: Sequence[Measured], device: torch.device, rounds: int = ROUNDS) -> tuple[float, str]:
    """Seconds of one call, the median of rounds of all of them, and how they were sent.

    On a device: "graph", as decode replays them, so that what the host takes to launch is not in it; "launched", where
    they cannot be captured: by events around all calls. On a CPU, where kernels are interpreted and times mean nothing,
    "called", once.
    """

    def call_all() -> None:
        for call in calls:
            call()

    if device.type != "cuda":
        return _wall_s(call_all) / len(calls), "called"
    call_all()  # compiles, and loads libraries
    torch.cuda.synchronize(device)
    send, how = call_all, "launched"
    try:
        graph = torch.cuda.CUDAGraph()
        with recording(graph, torch.cuda.graph_pool_handle()):
            call_all()
        send, how = graph.replay, "graph"
    except RuntimeError:  # what it does is not for graphs
        torch.cuda.synchronize(device)
    for _ in range(WARM_ROUNDS):
        send()
    return statistics.median(_event_s(send) for _ in range(rounds)) / len(calls), how


def _event_s(send: Callable[[], None]) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start.record()
    send()
    end.record()
    end.synchronize()
    milliseconds: float = start.elapsed_time(end)
    return milliseconds / 1e3


def _wall_s(run: Measured) -> float:
    started_s = time.perf_counter()
    run()
    return time.perf_counter() - started_s


# What steps must take.


@dataclass(frozen=True, slots=True)
class ModelWork:
    """Numbers of a model that cost something in each step.

    Args:
        body: of the layers' matrices, those of experts aside.
        head: of the output head; computed for the rows that sample only.
        experts: of all experts' matrices, over all layers; 0 in a dense model.
        num_experts, num_used_experts: of a layer: how many there are, and how many a token uses.
        query_width: heads times their size, times layers: what attention costs per pair of tokens.
        kv_width: keys and values that a token leaves behind, over all layers.
    """

    body: int
    head: int
    experts: int
    num_experts: int
    num_used_experts: int
    query_width: int
    kv_width: int

    @property
    def _share_used(self) -> float:
        return self.num_used_experts / self.num_experts if self.num_experts else 0.0

    def bytes_read(self, num_tokens: int, number_bytes: float, layer_bytes: float | None = None) -> float:
        """Of weights, in a step of so many tokens; of experts, those that are used if tokens choose evenly.

        Args:
            layer_bytes: of a number in the layers' matrices, where they are quantised; None: as number_bytes.
        """
        in_layers = self.body + self.experts * (1 - (1 - self._share_used) ** num_tokens)
        return in_layers * (number_bytes if layer_bytes is None else layer_bytes) + self.head * number_bytes

    def flops(self, num_tokens: int, num_pairs: float, num_sampled: int) -> float:
        """Operations of a step.

        Args:
            num_pairs: over all its tokens: how many tokens each attends to, itself counted.
        """
        used = self.body + self.experts * self._share_used
        return 2.0 * (used * num_tokens + self.head * num_sampled) + 4.0 * self.query_width * num_pairs


def work_of(directory: Path) -> ModelWork:
    """
    Raises:
        StartupError, OSError, ValueError: the directory's files.
    """
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    checkpoint = open_checkpoint(directory, parse_model_config(config).packing)
    return count_work(config, {name: tensor.shape for name, tensor in checkpoint.tensors.items()})


def count_work(config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> ModelWork:
    """The work of a model with this config.json and these tensors."""
    matrices = {name: math.prod(shape) for name, shape in shapes.items() if len(shape) > 1}
    experts = sum(size for name, size in matrices.items() if ".experts." in name)
    embedding = matrices.pop("model.embed_tokens.weight")
    head = matrices.pop("lm_head.weight", embedding)
    num_heads, num_layers = config["num_attention_heads"], config["num_hidden_layers"]
    head_dim = config.get("head_dim") or config["hidden_size"] // num_heads
    return ModelWork(
        body=sum(matrices.values()) - experts,
        head=head,
        experts=experts,
        num_experts=config.get("num_experts", 0),
        num_used_experts=config.get("num_experts_per_tok", 0),
        query_width=num_layers * num_heads * head_dim,
        kv_width=2 * num_layers * config.get("num_key_value_heads", num_heads) * head_dim,
    )


def decode_limit_s(
    work: ModelWork,
    speed: Speed,
    num_rows: int,
    context: float,
    number_bytes: float,
    layer_bytes: float | None = None,
) -> float:
    """The least time of a step that gives each of num_rows sequences one token: reading or computing, the longer one.

    Args:
        context: tokens that each row attends to.
        number_bytes: of one weight, and of one number in keys and values.
        layer_bytes: see bytes_read.
    """
    kv_bytes = num_rows * context * work.kv_width * number_bytes
    read_bytes = work.bytes_read(num_rows, number_bytes, layer_bytes) + kv_bytes
    return max(read_bytes / speed.read_bytes_per_s, work.flops(num_rows, num_rows * context, num_rows) / speed.flops)


def prefill_limit_s(work: ModelWork, speed: Speed, num_tokens: int, number_bytes: float) -> float:
    """The least time to compute one prompt and sample its first token."""
    flops = work.flops(num_tokens, num_tokens * (num_tokens + 1) / 2, 1)
    return max(work.bytes_read(num_tokens, number_bytes) / speed.read_bytes_per_s, flops / speed.flops)


def serving_limit_tokens_per_s(
    work: ModelWork, speed: Speed, num_streams: int, num_prompt: int, num_output: int, number_bytes: float
) -> float:
    """Output tokens per second at most, for so many clients that each ask again when answered.

    Prompts and decode steps of full batches one after the other: a token of a prompt costs what it costs alone.
    """
    prefill_s = num_streams * prefill_limit_s(work, speed, num_prompt, number_bytes)
    step_s = decode_limit_s(work, speed, num_streams, num_prompt + num_output / 2, number_bytes)
    return num_streams * num_output / (prefill_s + (num_output - 1) * step_s)


def _measure(arguments: argparse.Namespace) -> Found:
    limits = measure_limits(CPU, DTYPES[arguments.dtype], arguments.quick, arguments.threads)
    return Found(limit_tables(limits), {"dtype": arguments.dtype}, {"limits": msgspec.to_builtins(limits)})


FLAGS = (
    Flag("--threads", None, "to measure with (default: 1, and all physical cores)", more={"nargs": "+", "type": int}),
    Flag("--dtype", "bfloat16", "of matmuls", more={"choices": tuple(DTYPES)}),
)
main = bench("limits", __doc__, _measure, FLAGS)

if __name__ == "__main__":
    sys.exit(main())
