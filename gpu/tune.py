"""Chooses what computes each operation, and on how many threads: by rule or by cached measurement. Thread: engine.

| what                     | chosen by                                                                  |
|--------------------------|----------------------------------------------------------------------------|
| operators, attention     | known: the device's kernels where they support it and the model, or torch  |
| sampling                 | known: the device's kernel, or torch's operators                           |
| matmuls, norms on a CPU  | known: numba's kernels with AVX2; with AMX, and elsewhere, oneDNN          |
| gated delta nets         | known: numba's kernel with AVX2; elsewhere torch's operators               |
| matmuls of blocks        | known: numba's kernels with AVX2; int8 and int4 elsewhere by slabs         |
| layers of few decodes    | known: recorded, where numba's kernels compute all of them                  |
| threads of a CPU's steps | measured, by a step's tokens                                               |
| matmuls on a device      | measured, by a matrix's shape, for few rows and for many; by the kernel of |
|                          | one fixed tile with --deterministic                                        |

numba's kernels are not measured: each file in cpu_kernels/ has its figures beside torch. Neither numba nor triton is
imported unless it serves. Descriptions and forget_measured may run on any thread.
"""

import logging
import time
from collections.abc import Callable, Generator, Mapping, Sequence, Set
from dataclasses import asdict, astuple, dataclass
from functools import partial
from hashlib import sha256
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch

from core.config import EngineConfig, ModelConfig
from core.plan import TimedRow
from gpu.cache_files import compile_apart, measured_file, read_kept, write_kept
from gpu.cpu_kernels import support
from gpu.device import DeviceChoice, cpu_flags, cpu_model
from gpu.kernels import sizes as cuda
from gpu.linear import Linear, MatmulChoices, MatmulShape, Served
from gpu.operators import Operators
from gpu.sampler import MakeSampler
from gpu.step_graphs import CudaRecorder
from gpu.step_shapes import step_shapes
from gpu.streams import NEVER_S, Timer, graph_seconds, seconds_or_never

MIN_SAMPLING_CAPABILITY = (8, 0)  # tests compile for a newer one; older devices are untested
MAX_DEVICE_VOCABULARY = 1 << 20  # 8,192 segments, whose maxima one program holds

# A smaller model's matmuls take about as long as waking a thread: several threads compute long prefills only.
MIN_PARAMETERS = 64_000_000
SMALL_MODEL_TOKENS = 128
LOOKS = 2  # at the first start
IDLE_LOOKS = 6  # quiet ones of a process, while it idles: counts that are equally fast never settle
MOST_SKIPS = 63  # idle phases without a look, where others compute
MOST_WAITING = 0.02  # share of a quiet look that its threads waited for a core
TASKS = Path("/proc/self/task")
MEASURED_TOKENS = (1, 4, 8, 32)  # of a step
PREFILL_TOKENS = 128  # bound by arithmetic: all threads from here on, whatever was measured
ROUNDS = 3  # the best one counts, and the first warms up
WORTH_A_THREAD = 1.05  # more threads must be so much faster
NOISE = 0.03  # share of a time by which repeated measurements differ
SLICE_S = 0.02  # of matmuls, after which a measurement can be interrupted; one matmul is not divided
MEASURED_FEW = (1, 4, 16)  # rows of a device's matmuls; on the geometric mean
MEASURED_MANY = (64, 512)
MOST_TIMED_MODELS = 32  # whose steps' times are kept

logger = logging.getLogger(__name__)

Found = TypeVar("Found")
Measurement = Generator[None, None, Found]
"""Returns what it finds, after any number of slices. Closed between two, it leaves everything as it was."""

Probe = tuple[Linear, int]
"""A matmul, and the width of its input."""


def find_operators(config: ModelConfig, choice: DeviceChoice) -> Operators:
    """The model's operators: its device's kernels, which are compiled or loaded here, or torch's."""
    if why_no_kernels(config, choice) is not None:
        found = Operators(choice.dtype, choice.device, config.rms_norm_eps)
    elif choice.device.type == "cuda":
        from gpu.kernels.operators import TritonOperators

        attention = None
        if cuda.why_no_attention(config, choice.dtype) is None:
            from gpu.kernels.attention import PagedAttention

            attention = PagedAttention()
        found = TritonOperators(config, choice.dtype, choice.device, attention)
    else:
        from gpu.cpu_kernels.operators import KernelOperators

        found = KernelOperators(config, has_attention=support.why_no_attention(config) is None)
    found.sampler = find_sampler(config, choice)
    return found


def compile_first(config: ModelConfig, choice: DeviceChoice, formats: Set[str]) -> int:
    """Compile a large model's CPU kernels in other processes, if no earlier start did: see compile_apart.

    Args:
        formats: of the blocks that are multiplied as they are.
    """
    if (
        choice.device.type != "cpu"
        or config.num_parameters < support.MIN_PARAMETERS
        or support.why_no_numba() is not None
    ):
        return 0
    others = ["sampling"]
    if why_no_kernels(config, choice) is None:
        others += ["operators"] if config.recurrence is None else ["operators", "recurrence"]
    groups = [group for group in (sorted(formats), others) if group]
    return compile_apart(groups, f"{cpu_model()}, {sorted(cpu_flags())}")


def find_sampler(config: ModelConfig, choice: DeviceChoice) -> MakeSampler | None:
    """The sampling kernel of the model's device; None: torch samples."""
    if why_no_sampling_kernel(config, choice) is not None:
        return None
    if choice.device.type == "cuda":
        from gpu.kernels.sampling import DeviceSampler

        return DeviceSampler
    from gpu.cpu_kernels.sampling import RowSampler

    return RowSampler


def find_recorder(engine: EngineConfig, choice: DeviceChoice, operators: Operators) -> CudaRecorder | None:
    """What captures steps as CUDA graphs; None: Python launches them."""
    if engine.graphs == "off" or (engine.graphs == "auto" and choice.device.type != "cuda"):
        return None
    if operators.has_device_rows and operators.ranks is None:
        return CudaRecorder(choice.device)
    if engine.graphs != "auto":
        logger.warning("no CUDA graphs: the model is not computed by kernels that read their rows on the device")
    return None


def why_no_kernels(config: ModelConfig, choice: DeviceChoice) -> str | None:
    """Why the device's kernels cannot serve, as a phrase; None: they can."""
    if choice.device.type == "cuda":
        return cuda.why_no_kernels(config, choice)
    return support.why_no_kernels(config, choice)


def why_no_sampling_kernel(config: ModelConfig, choice: DeviceChoice) -> str | None:
    """Why it cannot serve, as a phrase; None: it can. It takes float32 logits, whatever computed them."""
    if choice.device.type == "cpu":
        is_small = config.num_parameters < support.MIN_PARAMETERS
        return "the model is too small to repay loading the kernel" if is_small else support.why_no_numba()
    if choice.device.type != "cuda" or torch.version.hip is not None:
        return f"it is not tested on {choice.device.type}"
    if find_spec("triton") is None:
        return "triton is not installed"
    if config.vocab_size > MAX_DEVICE_VOCABULARY:
        return f"a vocabulary of {config.vocab_size:,}: the kernel supports up to {MAX_DEVICE_VOCABULARY:,}"
    if torch.cuda.get_device_capability(choice.device) < MIN_SAMPLING_CAPABILITY:
        return "the device is older than compute capability {}.{}".format(*MIN_SAMPLING_CAPABILITY)
    return None


def why_no_graphs(config: ModelConfig, choice: DeviceChoice) -> str | None:
    """Why CUDA graphs cannot serve, as a phrase; None: they can."""
    if choice.device.type != "cuda":
        return f"on {choice.device.type} there is nothing to gain"
    return why_no_kernels(config, choice) or cuda.why_no_attention(config, choice.dtype)


def why_not_deterministic(config: ModelConfig, engine: EngineConfig, choice: DeviceChoice) -> str | None:
    """Why a row's bits would depend on what else is in its step, as a phrase; None: as far as known they do not."""
    if choice.device.type == "cpu":
        return None
    why = why_no_kernels(config, choice) or cuda.why_no_attention(config, choice.dtype)
    if why is not None:
        return f"torch's operators add in an order that depends on the step, and would be used ({why})"
    parts = {
        "recurrent layers": config.recurrence is not None,
        "experts that scale their inputs": config.experts is not None and config.experts.scales_inputs,
        "adapters (--max-loras, --lora)": engine.max_loras > 0,
    }
    found = [name for name, is_there in parts.items() if is_there]
    return f"on a GPU no kernels of fixed tiles compute {' and '.join(found)}" if found else None


def describe_attention(config: ModelConfig, choice: DeviceChoice) -> str:
    """What computes attention, and why it is not the kernel."""
    is_cuda = choice.device.type == "cuda"
    why = why_no_kernels(config, choice)
    why = why or (cuda.why_no_attention(config, choice.dtype) if is_cuda else support.why_no_attention(config))
    return f"torch's operators: {why}" if why else f"{'Triton' if is_cuda else 'numba'}'s kernel over block tables"


def describe_matmuls(config: ModelConfig, choice: DeviceChoice, engine: EngineConfig) -> str:
    """What computes the layers' matmuls, norms, RoPE and gates."""
    why = why_no_kernels(config, choice)
    if why is not None:
        return f"torch's operators: {why}"
    if choice.device.type == "cuda":
        return "Triton's kernels" + (", of fixed tiles" if engine.deterministic else " or cuBLAS, as measured")
    return "numba's kernel" if "amx_bf16" not in cpu_flags() else "oneDNN, by AMX; int8 and int4 by numba's kernel"


def describe_graphs(config: ModelConfig, choice: DeviceChoice, engine: EngineConfig) -> str:
    """Which steps are launched as CUDA graphs, or why none are."""
    why = "asked for" if engine.graphs == "off" else why_no_graphs(config, choice)
    if why is not None:
        return f"none: {why}"
    when = "as they are needed" if engine.graphs == "lazy" else "at start"
    shapes = step_shapes(config, engine)
    most = (
        f", {len(shapes.chunks)} of prompts up to {shapes.chunks[-1].num_prompt_tokens} tokens" if shapes.chunks else ""
    )
    return f"{len(shapes.decodes)} sizes of decodes{most}, captured {when}"


def measured_here(choice: DeviceChoice, config: ModelConfig | None) -> "Mapping[str, Kept]":
    """What was measured on this machine: on a CPU by a model's sizes, on a device by a matrix's shape.

    Args:
        config: on a CPU, only what was measured of this model's sizes; None: all.
    """
    known = read_measured().get(_machine(choice), {})
    if config is None or choice.device.type == "cuda":
        return known
    return {shape: found for shape, found in known.items() if f"{shape},".startswith(f"{_sizes(config, choice)},")}


@dataclass(frozen=True, slots=True)
class StepThreads:
    """Threads by a step's tokens. by_tokens: (least tokens, threads), ascending, the first from 1."""

    by_tokens: tuple[tuple[int, int], ...]

    def of(self, num_tokens: int) -> int:
        """For a step of so many tokens."""
        return next((threads for least, threads in reversed(self.by_tokens) if num_tokens >= least), 1)

    def __str__(self) -> str:
        first, *others = self.by_tokens
        return "; ".join([str(first[1]), *(f"{threads} from {least} tokens a step" for least, threads in others)])


@dataclass(frozen=True, slots=True)
class Measured:
    """The result for a model's sizes on a CPU. is_settled: it is not measured again."""

    threads: StepThreads
    is_settled: bool = True

    def __str__(self) -> str:
        return f"threads {self.threads}{'' if self.is_settled else '; not settled yet: measured again while idle'}"


@dataclass(frozen=True, slots=True)
class Look(Generic[Found]):
    """One measurement.

    Args:
        is_clear: it would be the same with times that differ by NOISE.
        is_quiet: no other process took the cores.
    """

    found: Found
    is_clear: bool
    is_quiet: bool = True


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Of a model's first steps. They need not be exact: the scheduler learns from each step."""

    rows: tuple[TimedRow, ...]

    def __str__(self) -> str:
        return f"{len(self.rows)} steps timed"


Kept = Measured | Served | StepTimes


class Tuning:
    """Measures what is to be measured: at start, unless an earlier start did, and while the server idles.

    A result is settled once two looks in a row agree by more than the noise, while no other process computes. Until
    then the first look's result serves, or the first quiet one's, and more looks follow while the server idles.

    Args:
        probes: the model's matmuls; None: nothing is measured.
    """

    def __init__(
        self,
        config: ModelConfig,
        choice: DeviceChoice,
        operators: Operators,
        probes: Sequence[Probe] | None,
        clock: Timer = graph_seconds,
    ) -> None:
        self._choice = choice
        self._probes = probes or ()
        self._idle_looks_left = IDLE_LOOKS
        self._last: Look[StepThreads] | None = None
        self._under_way: Measurement[None] | None = None  # a look that a request has interrupted
        self._is_quiet = False  # the look whose result is in use
        self._num_skipped = self._num_skips = 0  # idle phases, after looks that were not quiet
        self.measured = Measured(_unmeasured(choice))  # in use
        is_measured = probes is not None and config.num_parameters >= MIN_PARAMETERS
        if operators.matmuls is not None and is_measured:
            choose_matmuls(operators.matmuls, choice, clock)
        if choice.device.type != "cpu":
            self.measured = Measured(StepThreads(((1, choice.threads),)))
        elif is_measured and not choice.are_threads_asked and choice.threads > 1:
            self._place = _machine(choice), _shape(config, choice, operators)
            self._start()

    def _start(self) -> None:
        machine, shape = self._place
        known = read_measured().get(machine, {}).get(shape)
        self.measured = known if isinstance(known, Measured) else Measured(self.measured.threads, is_settled=False)
        if isinstance(known, Measured):
            return
        for _ in range(LOOKS):
            at_once(self._look(is_starting=True))
        self._keep()
        if not self.measured.is_settled:
            logger.info("two measurements did not settle the number of threads: %s", self.measured)

    @torch.inference_mode()
    def look_again(self) -> Generator[None]:
        """Measure until the result is settled, after IDLE_LOOKS quiet looks, or for now because others compute.

        Closed between two slices, it leaves the result in use as it was, and the next idle phase goes on there. Beside
        others the next look is at first one, then ever more idle phases away. A settled result is used at once.
        """
        if self._num_skipped < self._num_skips:
            self._num_skipped += 1
            return
        threads = torch.get_num_threads()
        try:
            while not self.measured.is_settled and self._idle_looks_left:
                self._under_way = self._under_way or self._look(is_starting=False)
                for _ in self._under_way:
                    yield
                self._under_way = None
                self._keep()
                if self._last is not None and not self._last.is_quiet:
                    self._num_skipped, self._num_skips = 0, min(2 * self._num_skips + 1, MOST_SKIPS)
                    return
                self._idle_looks_left -= 1
        finally:
            torch.set_num_threads(threads)

    def _look(self, is_starting: bool) -> Measurement[None]:
        look = yield from measure_threads(self._probes, self._choice.threads, self._choice.dtype)
        last, self._last = self._last, look
        is_settled = last == look and look.is_clear and look.is_quiet
        if is_settled or (is_starting and last is None) or (look.is_quiet and not self._is_quiet):
            self.measured, self._is_quiet = Measured(look.found, is_settled), look.is_quiet

    def _keep(self) -> None:
        machine, shape = self._place
        known = read_measured()
        known.setdefault(machine, {})[shape] = self.measured
        _write_measured(known)


def forget_measured(choice: DeviceChoice, config: ModelConfig) -> None:
    """Forget a model's results on a CPU, so that its next start measures. Thread: main."""
    known = read_measured()
    for shape in measured_here(choice, config):
        del known[_machine(choice)][shape]
    _write_measured(known)


def _unmeasured(choice: DeviceChoice) -> StepThreads:
    if choice.are_threads_asked or choice.threads == 1:
        return StepThreads(((1, choice.threads),))
    return StepThreads(((1, 1), (SMALL_MODEL_TOKENS, choice.threads)))


def at_once(measurement: Measurement[Found]) -> Found:
    """All slices of it."""
    while True:
        try:
            next(measurement)
        except StopIteration as end:
            found: Found = end.value
            return found


def measure_threads(probes: Sequence[Probe], max_threads: int, dtype: torch.dtype) -> Measurement[Look[StepThreads]]:
    """The fewest threads that are about as fast as any, for each of MEASURED_TOKENS. Torch's number is restored.

    One row's matmuls are bound by memory, whose bandwidth one core may nearly fill: further threads only take the event
    loop's core.
    """
    before = torch.get_num_threads()
    counts = sorted({2**power for power in range(max_threads.bit_length())} | {max_threads})
    by_tokens: list[tuple[int, int]] = []
    is_clear = is_quiet = True
    try:
        for num_tokens in MEASURED_TOKENS:
            seconds, waiting = yield from seconds_of(probes, num_tokens, counts, dtype)
            is_quiet &= waiting <= MOST_WAITING
            threads = fewest(counts, seconds)
            others = {fewest(counts, seconds, WORTH_A_THREAD + error) for error in (-NOISE, NOISE)}
            is_clear &= others == {threads}
            if not by_tokens or by_tokens[-1][1] != threads:
                by_tokens.append((num_tokens, threads))
    finally:
        torch.set_num_threads(before)
    if by_tokens[-1][1] != max_threads:
        by_tokens.append((PREFILL_TOKENS, max_threads))
    return Look(StepThreads(tuple(by_tokens)), is_clear, is_quiet)


def fewest(counts: Sequence[int], seconds: Sequence[float], worth: float = WORTH_A_THREAD) -> int:
    """The first count that more threads improve on by less than `worth`. counts ascend."""
    limit = min(seconds) * worth
    return next(count for count, taken in zip(counts, seconds, strict=True) if taken <= limit)


def seconds_of(
    probes: Sequence[Probe], num_tokens: int, counts: Sequence[int], dtype: torch.dtype
) -> Measurement[tuple[list[float], float]]:
    """(the best round of all matmuls with each count of threads, the share of the time that these waited for a core).

    The counts take turns, so that what else is computed meanwhile holds them all up. Changes torch's number of threads.
    """
    inputs = {width: torch.zeros(num_tokens, width, dtype=dtype) for _, width in probes}
    best_s, slice_s, all_s, waiting_s = [float("inf")] * len(counts), 0.0, 0.0, 0.0
    for _ in range(ROUNDS):
        for index, count in enumerate(counts):
            torch.set_num_threads(count)
            round_s, before_s = 0.0, waited_s()
            for linear, width in probes:
                started_s = time.perf_counter()
                linear(inputs[width])
                took_s = time.perf_counter() - started_s
                round_s, slice_s = round_s + took_s, slice_s + took_s
                if slice_s >= SLICE_S:
                    waiting_s += waited_s() - before_s
                    yield
                    torch.set_num_threads(count)
                    slice_s, before_s = 0.0, waited_s()
            waiting_s += waited_s() - before_s
            best_s[index], all_s = min(best_s[index], round_s), all_s + round_s
    yield
    return best_s, waiting_s / max(all_s, 1e-9)


def waited_s() -> float:
    """How long this process's threads have been ready to compute, and had no core; 0 where the system does not say."""
    try:
        return sum(int((task / "schedstat").read_text().split()[1]) for task in TASKS.iterdir()) / 1e9
    except (OSError, IndexError, ValueError):  # a thread that has just ended, too
        return 0.0


def choose_matmuls(choices: MatmulChoices, choice: DeviceChoice, clock: Timer) -> dict[str, Served]:
    """Choose by what an earlier start measured, or measure the model's own matrices now."""
    known = read_measured()
    here = known.setdefault(_machine(choice), {})
    has_new = False
    for key, shape in choices.shapes.items():
        found = here.get(key)
        if not isinstance(found, Served):
            faster = partial(_is_kernel_faster, key, shape, choice, clock)
            found = here[key] = Served(faster(MEASURED_FEW), shape.has_many and faster(MEASURED_MANY))
            has_new = True
        shape.served.few, shape.served.many = found.few, found.many and shape.has_many
        del shape.matmuls[:]  # no longer needed
    if has_new:
        _write_measured(known)
    return {key: shape.served for key, shape in choices.shapes.items()}


def _is_kernel_faster(key: str, shape: MatmulShape, choice: DeviceChoice, clock: Timer, rows: Sequence[int]) -> bool:
    """By the geometric mean. An implementation that fails is the slower one."""

    def seconds(name: str, matmuls: Sequence[Linear], num_rows: int) -> float:
        x = torch.zeros(num_rows, shape.num_in, dtype=choice.dtype, device=choice.device)
        name = f"{name} matmul of {num_rows} rows with {key}"
        return seconds_or_never(clock, lambda: [matmul(x) for matmul in matmuls], name, choice.device)

    ratio = 1.0
    for num_rows in rows:
        by_kernel = seconds("Triton's", [each.kernel for each in shape.matmuls], num_rows)
        if by_kernel == NEVER_S:
            return False
        by_torch = seconds("torch's", [each.torchs for each in shape.matmuls], num_rows)
        if by_torch == NEVER_S:
            return True
        ratio *= by_kernel / by_torch
    return ratio < 1


def timed_steps(
    config: ModelConfig,
    engine: EngineConfig,
    choice: DeviceChoice,
    operators: Operators,
    stored_as: str,
    time_rows: Callable[[], tuple[TimedRow, ...]],
) -> tuple[TimedRow, ...]:
    """The steps' times of an earlier start with the same model and settings, or of now.

    Args:
        stored_as: the checkpoint's main format.
    """
    if config.num_parameters < MIN_PARAMETERS:  # quickly timed
        return time_rows()
    fields = config, engine.quantize, engine.activations, engine.max_batch_tokens, engine.max_model_len, stored_as
    shape = f"{_shape(config, choice, operators)}, steps of {sha256(repr(fields).encode()).hexdigest()[:16]}"
    found = read_measured().get(_machine(choice), {}).get(shape)
    if isinstance(found, StepTimes):
        return found.rows
    rows = time_rows()
    known = read_measured()
    here = known.setdefault(_machine(choice), {})
    here[shape] = StepTimes(rows)
    for name in [name for name, kept in here.items() if isinstance(kept, StepTimes)][:-MOST_TIMED_MODELS]:
        del here[name]
    _write_measured(known)
    return rows


def read_measured() -> dict[str, dict[str, Kept]]:
    """Machine -> shape -> result; empty where the file is missing or malformed."""
    return read_kept(measured_file(), _checked)


def _checked(found: Any) -> Kept:
    """
    Raises:
        ValueError, TypeError, KeyError: it is malformed.
    """
    if "rows" in found:
        rows = tuple(TimedRow(int(start), int(end), int(num), float(s)) for start, end, num, s in found["rows"])
        if not all(0 < row.took_s < float("inf") for row in rows):
            raise ValueError("no seconds")
        return StepTimes(rows)
    flags = [found["few"], found["many"]] if "few" in found else [found["is_settled"]]
    if not all(isinstance(flag, bool) for flag in flags):
        raise ValueError("neither true nor false")
    if "few" in found:
        return Served(*flags)
    by_tokens = tuple((int(least), int(threads)) for least, threads in found["threads"])
    if not by_tokens or by_tokens[0][0] != 1 or list(by_tokens) != sorted(by_tokens):
        raise ValueError("not from 1 token on, ascending")
    if any(threads < 1 for _, threads in by_tokens):
        raise ValueError("no threads")
    return Measured(StepThreads(by_tokens), *flags)


def _write_measured(known: Mapping[str, Mapping[str, Kept]]) -> None:
    def content(found: Kept) -> dict[str, Any]:
        if isinstance(found, Served):
            return asdict(found)
        if isinstance(found, StepTimes):
            return {"rows": [astuple(row) for row in found.rows]}
        return {"threads": found.threads.by_tokens, "is_settled": found.is_settled}

    write_kept(
        measured_file(),
        {machine: {shape: content(found) for shape, found in shapes.items()} for machine, shapes in known.items()},
    )


def _machine(choice: DeviceChoice) -> str:
    """What a measurement depends on beside the model."""
    if choice.device.type == "cuda":
        triton = f"triton {version('triton')}" if find_spec("triton") is not None else "no triton"
        return f"{torch.cuda.get_device_name(choice.device)}, torch {torch.__version__}, {triton}"
    threads = f"{choice.threads} threads asked for" if choice.are_threads_asked else f"{choice.threads} cores"
    return f"{cpu_model()}, {threads}, torch {torch.__version__}"


def _shape(config: ModelConfig, choice: DeviceChoice, operators: Operators) -> str:
    return f"{_sizes(config, choice)}, {type(operators).__name__}"


def _sizes(config: ModelConfig, choice: DeviceChoice) -> str:
    mlp = f"{config.intermediate_size}" if config.experts is None else f"{config.experts.num_experts} experts"
    return f"{config.hidden_size} x {mlp}, {config.query_size} + {config.kv_size}, {choice.dtype_name}"
