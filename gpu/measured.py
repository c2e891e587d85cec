"""What was measured of this machine for a model's shape: threads by a step's tokens, and who computes its parts.

Kept in a file of the user's cache, per machine and shape, unless others computed at the same time or a second look
found otherwise; a file that cannot be read is as none, one that cannot be written is done without. Thread: engine (at
start).
"""

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from core.config import ModelConfig
from gpu.device import DeviceChoice, cpu_model
from gpu.device_products import DeviceProducts, Served, products_here
from gpu.elementwise_speed import ElementwiseProbe
from gpu.linear import ProductChoice
from gpu.measured_file import measured_file, read_kept, write_kept
from gpu.operators import ElementwiseChoice
from gpu.sampler import SamplerChoice
from gpu.sampling_speed import seconds_of_drawing
from gpu.threads import Probe, StepThreads, measure_threads, seconds_of

# A smaller model's products take about as long as waking a thread: several compute in long prefills only.
MIN_PARAMETERS = 64_000_000
SMALL_MODEL_TOKENS = 128
LOOKS = 2  # at everything; what they do not agree on is within the noise, and measured again at the next start
MEASURED_ROWS = (1, 8, 32, 256)  # of products
TURNS = 3
DRAWN_ROWS = (1, 8)
ELEMENTWISE_ROWS = (1, 8, 32, 256)
logger = logging.getLogger(__name__)

NAMES = {True: "by numba's kernel", False: "by oneDNN"}
OR_TORCH = {True: "by numba's kernel", False: "by torch"}


@dataclass(frozen=True, slots=True)
class Measured:
    """
    Args:
        uses_kernel, draws_by_kernel, norms_by_kernel: for products, for sampling, and for norms, RoPE and gates; None:
            there is none.
    """

    threads: StepThreads
    uses_kernel: bool | None = None
    draws_by_kernel: bool | None = None
    norms_by_kernel: bool | None = None

    def __str__(self) -> str:
        told = [f"threads {self.threads}"]
        if self.uses_kernel is not None:
            told.append(f"products {NAMES[self.uses_kernel]}")
        if self.draws_by_kernel is not None:
            told.append(f"sampling {OR_TORCH[self.draws_by_kernel]}")
        if self.norms_by_kernel is not None:
            told.append(f"norms, RoPE, gates {OR_TORCH[self.norms_by_kernel]}")
        return "; ".join(told)


def choose_measured(
    config: ModelConfig,
    choice: DeviceChoice,
    probes: Sequence[Probe],
    product: ProductChoice | DeviceProducts | None = None,
    sampler: SamplerChoice | None = None,
    elementwise: ElementwiseProbe | None = None,
) -> Measured:
    """As asked; for a large model as measured, now or earlier; or as is usual.

    Args:
        product: is set, where it is open; None: there is no kernel for products.
        sampler: is set; None: there is no kernel that draws.
        elementwise: its choice is set; None: there are no kernels for norms, RoPE and gates.
    """
    if isinstance(product, DeviceProducts):
        if config.num_parameters >= MIN_PARAMETERS:
            product.choose()
        return Measured(StepThreads(((1, choice.threads),)))
    if choice.device.type != "cpu":
        return Measured(StepThreads(((1, choice.threads),)))
    if config.num_parameters < MIN_PARAMETERS:
        uses_kernel = None if product is None else product.uses_kernel
        draws_by_kernel = None if sampler is None else sampler.uses_kernel
        norms_by_kernel = None if elementwise is None else elementwise.choice.uses_kernel
        return Measured(_unmeasured(choice), uses_kernel, draws_by_kernel, norms_by_kernel)
    machine, shape = _machine(choice), _shape(config, choice, product, sampler, elementwise)
    known = read_measured(cache_file())
    found = known.get(machine, {}).get(shape)
    if found is None:
        found, again = (_look(config, choice, probes, product, sampler, elementwise) for _ in range(LOOKS))
        known.setdefault(machine, {})[shape] = found
        if found == again and load_average() <= choice.threads:
            _write_measured(cache_file(), known)
        else:
            logger.info("what was measured is not kept, for the machine is disturbed or forms are as fast: %s", found)
    if product is not None and product.is_open and found.uses_kernel is not None:
        product.uses_kernel = found.uses_kernel
    if sampler is not None and found.draws_by_kernel is not None:
        sampler.uses_kernel = found.draws_by_kernel
    if elementwise is not None and found.norms_by_kernel is not None:
        elementwise.choice.uses_kernel = found.norms_by_kernel
    return found


def _look(
    config: ModelConfig,
    choice: DeviceChoice,
    probes: Sequence[Probe],
    product: ProductChoice | None,
    sampler: SamplerChoice | None,
    elementwise: ElementwiseProbe | None,
) -> Measured:
    found = _measure(choice, probes, product)
    if sampler is not None:
        draws_by_kernel = measure_drawing(sampler, config.vocab_size, choice.threads)
        found = replace(found, draws_by_kernel=draws_by_kernel)
    if elementwise is not None:
        found = replace(found, norms_by_kernel=measure_elementwise(elementwise, choice.threads))
    return found


def forget_measured(choice: DeviceChoice, config: ModelConfig) -> None:
    """Have a model's next start measure anew, on a CPU. Thread: main."""
    known = read_measured(cache_file())
    for shape in measured_here(choice, config):
        del known[_machine(choice)][shape]
    _write_measured(cache_file(), known)


def usual(choice: DeviceChoice) -> Measured:
    """What serves where nothing is measured; products and sampling stay as they are set."""
    return Measured(_unmeasured(choice))


def _unmeasured(choice: DeviceChoice) -> StepThreads:
    if choice.are_threads_asked or choice.threads == 1:
        return StepThreads(((1, choice.threads),))
    return StepThreads(((1, 1), (SMALL_MODEL_TOKENS, choice.threads)))


def _measure(choice: DeviceChoice, probes: Sequence[Probe], product: ProductChoice | None) -> Measured:
    """The products first: the threads depend on them."""
    uses_kernel = None
    if product is not None:
        is_open = product.is_open
        uses_kernel = measure_products(probes, choice.threads, choice.dtype, product) if is_open else True
    if choice.are_threads_asked or choice.threads == 1:
        return Measured(StepThreads(((1, choice.threads),)), uses_kernel)
    return Measured(measure_threads(probes, choice.threads, choice.dtype), uses_kernel)


def measure_products(probes: Sequence[Probe], threads: int, dtype: torch.dtype, product: ProductChoice) -> bool:
    """Whether the kernel is the faster, on the geometric mean of MEASURED_ROWS; it is set. Torch's threads stay.

    Both take turns, and the best round of each counts: what disturbs one for a while disturbs the other.
    """
    return _choose_faster(
        product, MEASURED_ROWS, threads, lambda num_rows: seconds_of(probes, num_rows, threads, dtype)
    )


def measure_drawing(sampler: SamplerChoice, vocab_size: int, threads: int) -> bool:
    """As measure_products, of tokens drawn of so many, and DRAWN_ROWS."""
    return _choose_faster(
        sampler, DRAWN_ROWS, threads, lambda num_rows: seconds_of_drawing(sampler, num_rows, vocab_size)
    )


def measure_elementwise(elementwise: ElementwiseProbe, threads: int) -> bool:
    """As measure_products, of a layer's norms, RoPE and gate, and ELEMENTWISE_ROWS."""
    return _choose_faster(elementwise.choice, ELEMENTWISE_ROWS, threads, elementwise.seconds)


def _choose_faster(
    choice: ProductChoice | SamplerChoice | ElementwiseChoice,
    row_counts: Sequence[int],
    threads: int,
    seconds: Callable[[int], float],
) -> bool:
    """Set whether the kernel serves: it is the faster, on the geometric mean over the counts of rows.

    That it is not is believed when it was seen twice. What is found is kept for good, and on two quiet Zen 4 cores the
    kernels took three quarters of oneDNN's time whenever it was looked at, but for once.
    """
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        is_faster = _is_kernel_faster(choice, row_counts, seconds) or _is_kernel_faster(choice, row_counts, seconds)
    finally:
        torch.set_num_threads(before)
    choice.uses_kernel = is_faster
    return is_faster


def _is_kernel_faster(
    choice: ProductChoice | SamplerChoice | ElementwiseChoice,
    row_counts: Sequence[int],
    seconds: Callable[[int], float],
) -> bool:
    """Both take turns."""
    ratio = 1.0
    for num_rows in row_counts:
        rounds = []
        for _ in range(TURNS):
            for choice.uses_kernel in (True, False):
                rounds.append(seconds(num_rows))
        ratio *= min(rounds[::2]) / min(rounds[1::2])
    return ratio < 1


def measured_here(choice: DeviceChoice, config: ModelConfig | None) -> Mapping[str, Measured | Served]:
    """What is known of this machine: by shape of model; of a device, by shape of matrix.

    Args:
        config: of a model: what is known of its sizes alone, on a CPU; None: of all.
    """
    if choice.device.type == "cuda":
        return products_here(choice.device)
    known = read_measured(cache_file()).get(_machine(choice), {})
    if config is None:
        return known
    return {shape: found for shape, found in known.items() if f"{shape},".startswith(f"{_sizes(config, choice)},")}


def load_average() -> float:
    """Threads that computed or waited for a core, over the last minute; 0 where the system does not tell."""
    try:
        return os.getloadavg()[0]
    except OSError:
        return 0.0


def cache_file() -> Path:
    return measured_file("measured.json")


def read_measured(path: Path) -> dict[str, dict[str, Measured]]:
    """Machine -> shape -> what was measured; empty where the file is missing or not what we write."""
    return read_kept(path, _checked)


def _checked(found: Any) -> Measured:
    """
    Raises:
        ValueError, TypeError, KeyError: it is not what Measured holds.
    """
    by_tokens = tuple((int(least), int(threads)) for least, threads in found["threads"])
    if not by_tokens or by_tokens[0][0] != 1 or list(by_tokens) != sorted(by_tokens):
        raise ValueError("not from 1 token on, ascending")
    if any(threads < 1 for _, threads in by_tokens):
        raise ValueError("no threads")
    by_kernel = (found["uses_kernel"], found.get("draws_by_kernel"), found.get("norms_by_kernel"))
    if not set(by_kernel) <= {True, False, None}:
        raise ValueError("neither the kernel nor torch")
    return Measured(StepThreads(by_tokens), *by_kernel)


def _write_measured(path: Path, known: dict[str, dict[str, Measured]]) -> None:
    content = {
        machine: {
            shape: {
                "threads": found.threads.by_tokens,
                "uses_kernel": found.uses_kernel,
                "draws_by_kernel": found.draws_by_kernel,
                "norms_by_kernel": found.norms_by_kernel,
            }
            for shape, found in shapes.items()
        }
        for machine, shapes in known.items()
    }
    write_kept(path, content)


def _machine(choice: DeviceChoice) -> str:
    threads = f"{choice.threads} threads asked for" if choice.are_threads_asked else f"{choice.threads} cores"
    return f"{cpu_model()}, {threads}, torch {torch.__version__}"


def _shape(
    config: ModelConfig,
    choice: DeviceChoice,
    product: ProductChoice | None,
    sampler: SamplerChoice | None,
    elementwise: ElementwiseProbe | None,
) -> str:
    kernel = "" if product is None else ", numba" if product.is_open else ", numba alone"
    drawn = "" if sampler is None else f", of {config.vocab_size:,} tokens"
    between = "" if elementwise is None else ", norms"
    return f"{_sizes(config, choice)}{kernel}{between}{drawn}"


def _sizes(config: ModelConfig, choice: DeviceChoice) -> str:
    mlp = f"{config.intermediate_size}" if config.experts is None else f"{config.experts.num_experts} experts"
    return f"{config.hidden_size} x {mlp}, {config.query_size} + {config.kv_size}, {choice.dtype_name}"
