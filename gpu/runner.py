"""Computes steps on one CPU or one GPU, or one rank's part of them: the Runner of core.plan. Thread: engine.

Owns the model, its KV cache and the sampling state. The scheduler decides which rows and blocks a step has, and when a
sequence ends. A row whose logits are not finite fails alone, and its blocks are made finite again.
"""

import logging
import time
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from core.config import BLOCK_SIZE, EngineConfig, ModelConfig
from core.drafts import MOST_DRAFTS, DraftModel
from core.plan import BoolArray, DeviceError, Int32Array, RunnerLimits, StepOutput, StepPlan
from gpu.adapters import LoadedAdapter, load_adapter
from gpu.attention import IntArray
from gpu.checkpoint import Checkpoint
from gpu.device import FEW_TOKENS, last_level_cache_bytes, to_device, trim_heap
from gpu.kv_cache import KVCache
from gpu.kv_store import CopyTicket, KVOffload, open_offload
from gpu.linear import Linear
from gpu.memory_plan import MemoryPlan
from gpu.model import Model
from gpu.operators import Operators, not_deterministic
from gpu.parameters import ModelWeights
from gpu.recurrence import States
from gpu.rows import LastStates
from gpu.sampler import PendingTokens, PromptScores, Sampler, TokensToHost
from gpu.step_graphs import CountedGraphs, Progress, StepGraphs, count_graphs
from gpu.step_shapes import StepShapes, max_decodes, step_shapes
from gpu.steps import SentStep, Steps
from gpu.streams import open_streams
from gpu.tune import Measured, Tuning, find_recorder

logger = logging.getLogger(__name__)

CHECKED_ROWS = (1, 2, 3, 5, 8, 16, 17, 33, 64, 130)  # of a step
NOT_FINITE = "The model computed values that are not finite numbers."
# Of weights, for timing matmuls: more than a last-level cache keeps between rounds, no more than is read in 0.1 s.
MIN_PROBE_BYTES, MAX_PROBE_BYTES = 80 * 1024**2, 512 * 1024**2


@dataclass(slots=True)
class StepTicket:
    """A step under way, its tokens on their way to the host, and its copies of blocks."""

    sent: SentStep
    tokens: PendingTokens | None = None
    host_copies: CopyTicket | None = None


@dataclass(frozen=True, slots=True)
class Captured:
    """The CUDA graphs captured at start.

    Args:
        num_of_prompts: how many of them are for steps with prompts.
        size_bytes: device memory.
    """

    num_graphs: int = 0
    num_of_prompts: int = 0
    took_s: float = 0.0
    size_bytes: int = 0


class ModelRunner:
    """A loaded model, ready to step.

    Args:
        memory: the plan, and its device.
        weights: Model takes them over; or the model that has.
        operators: see Model.

    Attributes:
        drafts: by the model's own head; None: it has none.
    """

    def __init__(
        self,
        config: ModelConfig,
        engine: EngineConfig,
        memory: MemoryPlan,
        weights: ModelWeights | Model,
        operators: Operators,
    ) -> None:
        device = memory.device.device
        self.drafts: DraftModel | None = None
        self.config = config
        self._engine, self.operators = engine, operators
        operators.is_deterministic = engine.deterministic  # before the model makes its matmuls
        self.captured = Captured()
        self.offload: KVOffload | None = None
        self.memory = memory
        with torch.inference_mode():
            if not isinstance(weights, Model):
                weights = Model(config, weights, operators, takes_adapters=engine.max_loras > 0)
            self.model = weights
            self._streams = open_streams(device)
            self._sampler = Sampler(
                engine.max_sequences, config.vocab_size, device, operators.sampler, engine.deterministic
            )
            takes_drafts = device.type == "cpu" and operators.ranks is None and not operators.has_device_rows
            max_drafts = MOST_DRAFTS if takes_drafts else 0
            self._to_host = TokensToHost(engine.max_sequences + max_drafts, self._streams)
            with _device_errors():
                self._tuning = self._tune(memory)
            if engine.deterministic:
                self._check_rounding(memory)
            self._recorder = None
            if config.recurrence is None and not config.is_cut(memory.max_model_len):
                self._recorder = find_recorder(engine, memory.device, operators)
            self._states: States | None = None
            counted = self._count_graphs(memory)
            self.memory = memory = counted.memory
            has_padding, windows = self._recorder is not None, memory.windows
            kinds = memory.kv_dtype, device, has_padding, windows, memory.num_window_blocks
            self._cache = KVCache(config, memory.num_blocks, *kinds, operators.pairs_kv(memory.kv_dtype))
            if config.recurrence is not None:
                self._states = States(config, engine.max_sequences, memory.num_kept_states, memory.device.dtype, device)
            with _device_errors():
                self._steps = self._open_steps(self._cache, counted.shapes)
        self._steps.graphs.most_graphs = counted.most_graphs
        self.limits = RunnerLimits(
            num_blocks=memory.num_blocks,
            block_size=BLOCK_SIZE,
            max_sequences=engine.max_sequences,
            max_batch_tokens=engine.max_batch_tokens,
            max_model_len=memory.max_model_len,
            vocab_size=config.vocab_size,
            block_bytes=memory.block_bytes,
            max_in_flight=steps_in_flight(engine.overlap, device),
            prompt_tile=operators.attention.prompt_tile,
            few_tokens=FEW_TOKENS[device.type],
            max_drafts=max_drafts,
            num_kept_states=None if config.recurrence is None else memory.num_kept_states,
            window=max((one for one in windows if one is not None), default=config.longest_window),
            num_window_blocks=memory.num_window_blocks if windows else None,
            shares_answers=not engine.deterministic,
        )

    def _tune(self, memory: MemoryPlan) -> Tuning:
        operators = self.operators
        if operators.ranks is not None:
            # ranks that chose differently would round differently what all compute alike
            return Tuning(self.config, memory.device, operators, None)
        probes = self.model.probes(min(max(MIN_PROBE_BYTES, 2 * last_level_cache_bytes()), MAX_PROBE_BYTES))
        return Tuning(self.config, memory.device, operators, probes)

    def _check_rounding(self, memory: MemoryPlan) -> None:
        """
        Raises:
            StartupError: a row's rounding depends on what else is in its step, or may.
        """
        device, counts = memory.device, (1, memory.device.threads)
        if self.operators.ranks is not None:
            raise not_deterministic("several devices add their sums in an order that depends on the step")
        hidden = self.config.hidden_size
        whole: list[tuple[Linear, int]] = [(one.mlp, hidden) for one in self.model.layers if one.mlp is not None]
        probes: list[tuple[Linear, int]] = [
            *whole[-1:],
            (partial(self.model.logits, out=None), hidden),
            *self.model.probes(1),
        ]
        with _device_errors():
            if not keeps_rounding(probes, device.dtype, device.device, counts):
                raise not_deterministic(f"this {device.device.type.upper()} rounds a row by how many there are")

    @property
    def measured(self) -> Measured:
        """What was chosen by measuring."""
        return self._tuning.measured

    def idle_work(self) -> Generator[None]:
        """Engine's idle work: measure again what was within noise, and return memory that a busy phase has freed."""
        yield from self._tuning.look_again()
        trim_heap()

    def _count_graphs(self, memory: MemoryPlan) -> CountedGraphs:
        """Measure graphs before KV gets what they leave; without graphs, the plan as it is."""
        if self._recorder is None:
            return CountedGraphs(memory, step_shapes(self.config, self._engine), 0)

        def open_graphs(cache: KVCache, shapes: StepShapes) -> StepGraphs:
            return self._open_steps(cache, shapes).graphs

        with _device_errors():
            counted = count_graphs(open_graphs, memory, self._recorder)
        if not counted.most_graphs:
            self._recorder = None
        return counted

    def _open_steps(self, cache: KVCache, shapes: StepShapes) -> Steps:
        most_rows, most_tokens = max_decodes(self._engine), self.memory.max_model_len
        self.operators.attention.reserve(most_rows, most_tokens, self.config.num_heads, cache.layers[0])
        return Steps(self.model, self._sampler, self._streams, self.memory, shapes, cache, self._states)

    @property
    def captures_lazily(self) -> bool:
        """Whether a graph is captured when the first step of its shape comes."""
        return self._recorder is not None and self._engine.graphs == "lazy"

    def open_graphs(self, progress: Progress) -> None:
        """Send steps by CUDA graphs from now on, if the device can; capture them now unless that is lazy.

        Args:
            progress: called with (graphs captured, of how many).

        Raises:
            DeviceError: the device is lost.
        """
        if self._recorder is None:
            return
        graphs, started_s = self._steps.graphs, time.perf_counter()
        graphs.recorder = self._recorder
        if self._engine.graphs != "lazy":
            with _device_errors(), torch.inference_mode():
                graphs.capture_all(progress)
        took_s = time.perf_counter() - started_s
        self.captured = Captured(graphs.num_captured, graphs.num_of_prompts, took_s, graphs.size_bytes)
        if graphs.size_bytes > self.memory.graph_bytes:
            sizes = (f"{size_bytes / 2**20:.0f} MiB" for size_bytes in (graphs.size_bytes, self.memory.graph_bytes))
            logger.warning("CUDA graphs use %s of memory, but %s was planned for them", *sizes)

    def open_offload(self, engine: EngineConfig, checkpoint: Checkpoint) -> None:
        """Allocate the host memory for KV, filled from its directory, if the settings ask for it.

        Raises:
            StartupError: it does not fit, or the directory cannot be used.
        """
        with torch.inference_mode():
            self.offload = open_offload(self.config, engine, self.memory.device, self._cache, checkpoint, self._streams)
        if self.offload is not None:
            num_slots, copy_s = self.offload.memory.num_slots, self.offload.copy_s
            self.limits = replace(self.limits, num_host_blocks=num_slots, host_copy_s=copy_s)

    def keep_states(self) -> LastStates:
        """From now on, each step leaves the last hidden states of its tokens there."""
        dtype, num_slots = self.memory.device.dtype, self.memory.engine.max_sequences
        self._steps.last_states = LastStates(num_slots, self.config.hidden_size, dtype)
        return self._steps.last_states

    def load_adapter(self, directory: Path) -> LoadedAdapter:
        """See gpu/adapters.py. Thread: any."""
        device, adapted = self.memory.device, self.model.adapted
        kernel = None if adapted is None else adapted.kernel
        return load_adapter(directory, self.config, device.dtype, device.device, self._engine.max_lora_rank, kernel)

    def forward(self, plan: StepPlan) -> StepTicket:
        """Reset slots, copy and clear blocks, write KV, compute the logits of the rows that sample and of targets."""
        threads = self.measured.threads.of(plan.num_tokens)
        if threads != torch.get_num_threads():  # setting it makes torch forget what it has prepared
            torch.set_num_threads(threads)
        with _device_errors(), torch.inference_mode():
            for start in plan.sequence_starts:
                self._sampler.start(start)
            for penalties in plan.penalties:
                self._sampler.penalise(penalties)
            host_copies = self._start_host_copies(plan)
            return StepTicket(self._steps.forward(plan), host_copies=host_copies)

    def _start_host_copies(self, plan: StepPlan) -> CopyTicket | None:
        if plan.host_copies is None:
            return None
        assert self.offload is not None, "the scheduler copies to host memory only if the limits have some"
        return self.offload.start(plan.host_copies)

    def logits(self, plan: StepPlan) -> Tensor:
        """The logits of every token of a plan's single row, a prompt: [tokens, vocab], float32. Samples nothing."""
        with _device_errors(), torch.inference_mode():
            return self._steps.forward(plan, wants_all=True).logits

    def sample(self, ticket: StepTicket, masks: Int32Array | None = None) -> None:
        """Sample a token per sampling row; the tokens stay on the device, and a copy to the host starts."""
        if not len(ticket.sent.sampled.rows):
            return
        ranks = self.operators.ranks
        with _device_errors(), torch.inference_mode():
            if ranks is None or ranks.rank == 0:
                ticket.tokens = self._to_host.send(self._steps.sample(ticket.sent, masks))
            if ranks is not None and self.limits.max_in_flight > 1:  # otherwise the next plan holds them
                ranks.share(self._sampler.last_tokens)

    def collect(self, ticket: StepTicket) -> StepOutput:
        """Wait for the sampled tokens, in the order of the plan's rows.

        Raises:
            DeviceError: the device is lost.
        """
        output = self._collect_tokens(ticket)
        if ticket.sent.scores is not None:
            self._collect_scores(ticket.sent.scores, output)
        if ticket.sent.pooled is not None:
            for row, slot, vector in ticket.sent.pooled.entries():
                if vector is not None:
                    output.pooled[row] = vector
                else:
                    output.failed_rows[row] = NOT_FINITE
                    self.make_finite([slot])
        if ticket.host_copies is not None:
            assert self.offload is not None, "it started them"
            with _device_errors():
                output.host_copy_s = self.offload.finish(ticket.host_copies)
        return output

    def _collect_tokens(self, ticket: StepTicket) -> StepOutput:
        sampled, tokens = ticket.sent.sampled, ticket.tokens
        if tokens is None:
            return StepOutput(np.empty(0, dtype=np.int32), np.empty(0, dtype=np.int32))
        with _device_errors(), torch.inference_mode():
            tokens.wait()
            is_finite, token_ids, logprobs = (
                tokens.is_finite.numpy(),
                tokens.token_ids.numpy(),
                tokens.logprobs_by_row(),
            )
            self.make_finite(sampled.slots[~is_finite].tolist())
        order = sampled.order
        failed: dict[int, str] = {}
        if not is_finite.all():
            order, failed = _until_broken(order, sampled.rows, is_finite)
        return StepOutput(
            rows=sampled.rows[order].astype(np.int32),
            token_ids=token_ids[order].astype(np.int32),
            logprobs={index: logprobs[row] for index, row in enumerate(order.tolist()) if row in logprobs},
            failed_rows=failed,
        )

    def _collect_scores(self, scores: PromptScores, output: StepOutput) -> None:
        with _device_errors(), torch.inference_mode():
            scores.wait()
            for targets, slot, told in scores.entries():
                if told is not None:
                    output.prompt_logprobs[targets.row] = told
                else:
                    output.failed_rows[targets.row] = NOT_FINITE
                    self.make_finite([slot])

    def make_finite(self, slots: Iterable[int]) -> None:
        """Zero non-finite numbers in these slots' blocks: later sequences may share them."""
        with torch.inference_mode():
            for slot in slots:
                blocks = to_device(self._steps.tables.of(slot), self._cache.device)
                self._streams.current.run(partial(self._cache.make_finite, blocks))


def keeps_rounding(
    probes: Iterable[tuple[Linear, int]], dtype: torch.dtype, device: torch.device, thread_counts: Iterable[int]
) -> bool:
    """Whether each of these matmuls gives a row the same bits in any company and on any of these numbers of threads.

    Args:
        probes: with the widths of their rows. Sets torch's threads.
    """
    generator = torch.Generator().manual_seed(0)
    for linear, width in probes:
        x = torch.randn((CHECKED_ROWS[-1], width), generator=generator).to(device, dtype)
        expected: Tensor | None = None
        for threads in dict.fromkeys(thread_counts):
            torch.set_num_threads(threads)
            expected = linear(x).clone() if expected is None else expected
            if not all(torch.equal(linear(x[:count].clone()), expected[:count]) for count in CHECKED_ROWS):
                return False
    return True


def _until_broken(order: IntArray, rows: IntArray, is_finite: BoolArray) -> tuple[IntArray, dict[int, str]]:
    """Leave out what was sampled from logits that are not finite, and what the same row sampled after that.

    Returns: the order without that, and the rows that have nothing left: others may have had a draft that they refuse.
    """
    kept: list[int] = []
    broken: set[int] = set()
    for index in order.tolist():
        row = int(rows[index])
        if not is_finite[index]:
            broken.add(row)
        elif row not in broken:
            kept.append(index)
    failed = sorted(broken.difference(rows[kept].tolist()))
    return np.array(kept, np.int64), dict.fromkeys(failed, NOT_FINITE)


def steps_in_flight(overlap: str, device: torch.device) -> int:
    """
    Args:
        overlap: see EngineConfig. "auto" overlaps on a GPU only: a CPU's host computes the step itself.
    """
    return 2 if overlap == "on" or (overlap == "auto" and device.type == "cuda") else 1


@contextmanager
def _device_errors() -> Iterator[None]:
    """A CUDA error breaks the device for good. Running out of memory is no such error: it fails one step."""
    try:
        yield
    except torch.AcceleratorError as error:
        raise DeviceError(str(error)) from error
