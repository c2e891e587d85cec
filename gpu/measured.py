"""What was measured of this machine for a model's shape: threads by a step's tokens, and who computes its parts.

Settled is what two looks, one after the other, found alike by more than the noise while no others computed. What is not
is served, looked at again while the server idles, and at the next start. All is kept in a file of the user's cache, per
machine and shape; a file that cannot be read is as none, one that cannot be written is done without. Thread: engine.
"""

import logging
import os
from collections.abc import Callable, Generator, Mapping, Sequence
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
from gpu.threads import NOISE, Look, Measurement, Probe, StepThreads, at_once, measure_threads, seconds_of

# A smaller model's products take about as long as waking a thread: several compute in long prefills only.
MIN_PARAMETERS = 64_000_000
SMALL_MODEL_TOKENS = 128
LOOKS = 2  # at start, at all that is not settled
IDLE_LOOKS = 6  # of a process, begun while it idles: forms that are as fast are never settled
MEASURED_ROWS = (1, 8, 32, 256)  # of products
TURNS = 3
DRAWN_ROWS = (1, 8)
ELEMENTWISE_ROWS = (1, 8, 32, 256)
logger = logging.getLogger(__name__)

NAMES = {True: "by numba's kernel", False: "by oneDNN"}
OR_TORCH = {True: "by numba's kernel", False: "by torch"}
PARTS = {
    "uses_kernel": "products",
    "threads": "threads",
    "draws_by_kernel": "sampling",
    "norms_by_kernel": "norms, RoPE, gates",
}
"""What is measured, by its field of Measured, in that order: the threads depend on the products."""
SWAPPED = {"threads", "draws_by_kernel"}  # between steps; the others round otherwise, and keys and values are cached


@dataclass(frozen=True, slots=True)
class Measured:
    """
    Args:
        uses_kernel, draws_by_kernel, norms_by_kernel: for products, for sampling, and for norms, RoPE and gates; None:
            there is none.
        unsettled: fields that are to be measured again.
    """

    threads: StepThreads
    uses_kernel: bool | None = None
    draws_by_kernel: bool | None = None
    norms_by_kernel: bool | None = None
    unsettled: tuple[str, ...] = ()

    def __str__(self) -> str:
        told = [f"threads {self.threads}"]
        if self.uses_kernel is not None:
            told.append(f"products {NAMES[self.uses_kernel]}")
        if self.draws_by_kernel is not None:
            told.append(f"sampling {OR_TORCH[self.draws_by_kernel]}")
        if self.norms_by_kernel is not None:
            told.append(f"norms, RoPE, gates {OR_TORCH[self.norms_by_kernel]}")
        if self.unsettled:
            told.append(f"not settled yet ({'; '.join(PARTS[name] for name in self.unsettled)})")
        return "; ".join(told)


class Measuring:
    """Chooses as asked; for a large model as measured, now, earlier, or while the server idles; or as is usual.

    Args:
        probes: None: nothing is measured.
        product: is set, where it is open; None: there is no kernel for products.
        sampler: is set; None: there is no kernel that draws.
        elementwise: its choice is set; None: there are no kernels for norms, RoPE and gates.
    """

    def __init__(
        self,
        config: ModelConfig,
        choice: DeviceChoice,
        probes: Sequence[Probe] | None,
        product: ProductChoice | DeviceProducts | None = None,
        sampler: SamplerChoice | None = None,
        elementwise: ElementwiseProbe | None = None,
    ) -> None:
        self._choice = choice
        self._choices: dict[str, ProductChoice | SamplerChoice | ElementwiseChoice] = {}
        self._measure: dict[str, Callable[[], Measurement[Look[Any]]]] = {}
        self._last: dict[str, Look[Any]] = {}
        self._idle_looks_left = IDLE_LOOKS
        self.measured = Measured(_unmeasured(choice))  # what serves
        self._found = self.measured  # for the next start
        if probes is None:
            return
        if isinstance(product, DeviceProducts) and config.num_parameters >= MIN_PARAMETERS:
            product.choose()
        if isinstance(product, DeviceProducts) or choice.device.type != "cpu":
            self.measured = Measured(StepThreads(((1, choice.threads),)))
            return
        self._place = _machine(choice), _shape(config, choice, product, sampler, elementwise)
        self._find_parts(config, probes, product, sampler, elementwise)
        if config.num_parameters >= MIN_PARAMETERS:
            self._start()

    def _find_parts(
        self,
        config: ModelConfig,
        probes: Sequence[Probe],
        product: ProductChoice | None,
        sampler: SamplerChoice | None,
        elementwise: ElementwiseProbe | None,
    ) -> None:
        threads, dtype = self._choice.threads, self._choice.dtype
        if product is not None:
            self._choices["uses_kernel"] = product
            if product.is_open:
                self._measure["uses_kernel"] = lambda: measure_products(probes, threads, dtype, product)
        if not self._choice.are_threads_asked and threads > 1:
            self._measure["threads"] = lambda: measure_threads(probes, threads, dtype)
        if sampler is not None:
            self._choices["draws_by_kernel"] = sampler
            self._measure["draws_by_kernel"] = lambda: measure_drawing(sampler, config.vocab_size, threads)
        if elementwise is not None:
            self._choices["norms_by_kernel"] = elementwise.choice
            self._measure["norms_by_kernel"] = lambda: measure_elementwise(elementwise, threads)
        by_kernel: dict[str, Any] = {name: chosen.uses_kernel for name, chosen in self._choices.items()}
        self.measured = self._found = replace(self.measured, **by_kernel)

    def _start(self) -> None:
        machine, shape = self._place
        known = read_measured(cache_file()).get(machine, {}).get(shape)
        unsettled = self._measure if known is None else known.unsettled
        found = replace(known or self.measured, unsettled=tuple(name for name in unsettled if name in self._measure))
        self.measured = self._found = found
        self._set_choices()
        if not found.unsettled:
            return
        for _ in range(LOOKS):
            at_once(self._look(is_starting=True))
        self._keep()
        if self._found.unsettled:
            logger.info(
                "what two looks did not settle is measured again, while idle or at the next start: %s", self._found
            )

    @torch.inference_mode()
    def look_again(self) -> Generator[None]:
        """Measure what is not settled until it is, IDLE_LOOKS have begun, or others compute.

        Closed between two slices, it leaves what serves as it was. What can be swapped between steps serves as soon as
        it is settled, the rest from the next start on.
        """
        while self._found.unsettled and self._idle_looks_left and load_average() <= self._choice.threads:
            self._idle_looks_left -= 1
            yield from self._look(is_starting=False)
            self._keep()

    def _look(self, is_starting: bool) -> Measurement[None]:
        for name in self._found.unsettled:
            look = yield from self._measure[name]()
            self._take(name, look, is_starting)

    def _take(self, name: str, look: Look[Any], is_starting: bool) -> None:
        last, self._last[name] = self._last.get(name), look
        is_settled = last == look and look.is_clear and load_average() <= self._choice.threads
        if is_settled or (is_starting and last is None):
            self._found = replace(self._found, **{name: look.found})
            if is_starting or name in SWAPPED:
                self.measured = replace(self.measured, **{name: look.found})
        if is_settled:
            self._found = replace(
                self._found, unsettled=tuple(other for other in self._found.unsettled if other != name)
            )
        self._set_choices()

    def _set_choices(self) -> None:
        for name, chosen in self._choices.items():
            uses_kernel = getattr(self.measured, name)
            if name in self._measure and uses_kernel is not None:
                chosen.uses_kernel = uses_kernel

    def _keep(self) -> None:
        machine, shape = self._place
        found, self.measured = self._found, replace(self.measured, unsettled=self._found.unsettled)
        if found.uses_kernel != self.measured.uses_kernel and "threads" in self._measure:  # measured with the other
            found = replace(
                found, unsettled=tuple(name for name in self._measure if name in {*found.unsettled, "threads"})
            )
        known = read_measured(cache_file())
        known.setdefault(machine, {})[shape] = found
        _write_measured(cache_file(), known)


def forget_measured(choice: DeviceChoice, config: ModelConfig) -> None:
    """Have a model's next start measure anew, on a CPU. Thread: main."""
    known = read_measured(cache_file())
    for shape in measured_here(choice, config):
        del known[_machine(choice)][shape]
    _write_measured(cache_file(), known)


def _unmeasured(choice: DeviceChoice) -> StepThreads:
    if choice.are_threads_asked or choice.threads == 1:
        return StepThreads(((1, choice.threads),))
    return StepThreads(((1, 1), (SMALL_MODEL_TOKENS, choice.threads)))


def measure_products(
    probes: Sequence[Probe], threads: int, dtype: torch.dtype, product: ProductChoice
) -> Measurement[Look[bool]]:
    """Whether the kernel is the faster, on the geometric mean of MEASURED_ROWS. Torch's threads and the choice stay.

    Both take turns, and the best round of each counts: what disturbs one for a while disturbs the other.
    """
    return _look_for_faster(
        product, MEASURED_ROWS, threads, lambda num_rows: seconds_of(probes, num_rows, threads, dtype)
    )


def measure_drawing(sampler: SamplerChoice, vocab_size: int, threads: int) -> Measurement[Look[bool]]:
    """As measure_products, of tokens drawn of so many, and DRAWN_ROWS."""
    return _look_for_faster(
        sampler,
        DRAWN_ROWS,
        threads,
        lambda num_rows: _in_one(lambda: seconds_of_drawing(sampler, num_rows, vocab_size)),
    )


def measure_elementwise(elementwise: ElementwiseProbe, threads: int) -> Measurement[Look[bool]]:
    """As measure_products, of a layer's norms, RoPE and gate, and ELEMENTWISE_ROWS."""
    return _look_for_faster(
        elementwise.choice, ELEMENTWISE_ROWS, threads, lambda num_rows: _in_one(lambda: elementwise.seconds(num_rows))
    )


def _in_one(seconds: Callable[[], float]) -> Measurement[float]:
    """Some milliseconds that are not divided."""
    yield
    return seconds()


def _look_for_faster(
    choice: ProductChoice | SamplerChoice | ElementwiseChoice,
    row_counts: Sequence[int],
    threads: int,
    seconds: Callable[[int], Measurement[float]],
) -> Measurement[Look[bool]]:
    """That the kernel is not the faster is believed when it was seen twice.

    On two quiet Zen 4 cores the kernels took three quarters of oneDNN's time whenever it was looked at, but for once.
    """
    before = torch.get_num_threads(), choice.uses_kernel
    try:
        torch.set_num_threads(threads)
        ratio = yield from _kernels_share(choice, row_counts, seconds)
        if ratio >= 1:
            ratio = yield from _kernels_share(choice, row_counts, seconds)
    finally:
        torch.set_num_threads(before[0])
        choice.uses_kernel = before[1]
    return Look(ratio < 1, abs(ratio - 1) > NOISE)


def _kernels_share(
    choice: ProductChoice | SamplerChoice | ElementwiseChoice,
    row_counts: Sequence[int],
    seconds: Callable[[int], Measurement[float]],
) -> Measurement[float]:
    """Of the time without it, the geometric mean over the counts of rows; both take turns."""
    ratio = 1.0
    for num_rows in row_counts:
        rounds = []
        for _ in range(TURNS):
            for choice.uses_kernel in (True, False):
                rounds.append((yield from seconds(num_rows)))
        ratio *= min(rounds[::2]) / min(rounds[1::2])
    return float(ratio ** (1 / len(row_counts)))


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
    unsettled = tuple(found.get("unsettled", ()))
    if not set(unsettled) <= set(PARTS):
        raise ValueError("no such part")
    return Measured(StepThreads(by_tokens), *by_kernel, unsettled)


def _write_measured(path: Path, known: dict[str, dict[str, Measured]]) -> None:
    content = {
        machine: {
            shape: {
                "threads": found.threads.by_tokens,
                "uses_kernel": found.uses_kernel,
                "draws_by_kernel": found.draws_by_kernel,
                "norms_by_kernel": found.norms_by_kernel,
                "unsettled": found.unsettled,
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
