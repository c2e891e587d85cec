"""Computes steps: the Runner of core.plan, on one CPU or one GPU; or a rank's part of them. Thread: engine, all of it.

Owns the model, its KV cache and the sampling state. Decides nothing: which rows, which blocks, and when a sequence
ends are the scheduler's. A row whose logits are not finite fails alone, and its blocks are made finite again.
"""

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from core.config import BLOCK_SIZE, EngineConfig, ModelConfig
from core.plan import DeviceError, Runner, RunnerLimits, SequenceStart, StepOutput, StepPlan, Ticket
from core.types import SamplingParams, TokenLogprobs
from gpu.attention import TILE_TOKENS
from gpu.batch import BatchBuilder, SampledRows
from gpu.checkpoint import Checkpoint, Progress, open_checkpoint
from gpu.decode_graphs import max_decodes
from gpu.device import DeviceChoice, apply_threads, choose_device, free_memory_bytes, last_level_cache_bytes
from gpu.device_attention import DeviceAttention
from gpu.drawn_tokens import DrawnTokens, OnTheirWay
from gpu.elementwise_speed import find_elementwise
from gpu.host_streams import open_streams
from gpu.kept_matrices import kept_scheme
from gpu.kernel_choice import find_operators, find_recorder
from gpu.kv_cache import KVCache, bytes_per_block
from gpu.kv_offload import CopyTicket, KVOffload, open_offload
from gpu.layer_weights import ModelWeights
from gpu.measured import MIN_PARAMETERS, choose_measured, usual
from gpu.memory_plan import MemoryPlan, plan_checkpoint
from gpu.model import Model
from gpu.operators import Operators
from gpu.parallel.ranks import Ranks
from gpu.parallel.shards import Shard
from gpu.prompt_logprobs import PromptScores, score
from gpu.quantize_cache import quantizing
from gpu.sampler import Drawn, RowLogprobs, Sampler
from gpu.spent_memory import drop_code_pages, trim_heap
from gpu.staged_copies import fill_on
from gpu.streams import Streams
from gpu.weights import MatrixForm, load_weights

if TYPE_CHECKING:
    from gpu.decode_steps import DecodeStep, DecodeSteps

logger = logging.getLogger(__name__)

NOT_FINITE = "The model computed values that are not finite numbers."
WARM_UP_TOKENS = 8
FindOperators = Callable[[ModelConfig, DeviceChoice], Operators]
# Of weights: what a last-level cache does not keep from one round to the next, but not more than is read in 0.1 s.
MIN_PROBE_BYTES, MAX_PROBE_BYTES = 80 * 1024**2, 512 * 1024**2


@dataclass(slots=True)
class StepTicket:
    """A step on its way.

    Args:
        logits: [sampled, vocab], float32; not beyond the next step's forward(), where all rows decode.
        decode: what it is, where all rows do.
    """

    sampled: SampledRows
    logits: Tensor
    decode: "DecodeStep | None" = None
    drawn: OnTheirWay | None = None
    host_copies: CopyTicket | None = None
    prompt_scores: PromptScores | None = None


@dataclass(frozen=True, slots=True)
class Captured:
    """CUDA graphs that were captured at start. size_bytes: of the device's memory, where that can be told."""

    num_graphs: int = 0
    took_s: float = 0.0
    size_bytes: int = 0


class ModelRunner:
    """A loaded model, ready to step.

    Args:
        memory: what was planned, and for which device.
        weights: taken over: see Model.
        operators: see Model.
    """

    def __init__(
        self,
        config: ModelConfig,
        engine: EngineConfig,
        memory: MemoryPlan,
        weights: ModelWeights,
        operators: Operators,
    ) -> None:
        device, dtype = memory.device.device, memory.device.dtype
        self.config = config
        self.memory = memory
        self._are_graphs_lazy = engine.graphs == "lazy"
        self._recorder = find_recorder(engine, memory.device, operators)
        self.captured = Captured()
        self.offload: KVOffload | None = None
        with torch.inference_mode():
            self._model = Model(config, weights, operators)
            has_padding = self._recorder is not None
            self._cache = KVCache(config, memory.num_blocks, dtype, device, has_padding)
            sampler = operators.sampler
            self._sampler = Sampler(engine.max_sequences, config.vocab_size, device, sampler)
            streams = open_streams(device)
            self._drawn = DrawnTokens(engine.max_sequences, streams, self._sampler.last_tokens)
            probes = self._model.probes(min(max(MIN_PROBE_BYTES, 2 * last_level_cache_bytes()), MAX_PROBE_BYTES))
            elementwise = find_elementwise(config, operators)
            product = operators.product_choice
            self.measured = (
                choose_measured(config, memory.device, probes, product, sampler, elementwise)
                if operators.ranks is None
                else usual(memory.device)  # each rank's own choice would round otherwise what all compute alike
            )
            if isinstance(operators.attention, DeviceAttention):
                rows, layer = max_decodes(engine), self._cache.layers[0]
                operators.attention.reserve(rows, memory.max_model_len, config.num_heads, layer)
                if config.num_parameters >= MIN_PARAMETERS:
                    operators.attention.choose(layer, config.num_heads)
        self.limits = RunnerLimits(
            num_blocks=memory.num_blocks,
            block_size=BLOCK_SIZE,
            max_sequences=engine.max_sequences,
            max_batch_tokens=engine.max_batch_tokens,
            max_model_len=memory.max_model_len,
            vocab_size=config.vocab_size,
            block_bytes=bytes_per_block(config, dtype),
            max_in_flight=steps_in_flight(engine.overlap, device),
            prompt_tile=TILE_TOKENS if operators.attention is None else operators.attention.prompt_tile,
        )
        self._builder = BatchBuilder(
            engine.max_sequences,
            memory.max_model_len,
            self._cache.scratch_block,
            dtype,
            device,
            config.windows,
            operators.attention,
        )
        has_device_rows = operators.has_device_rows and operators.ranks is None
        self._decodes = self._open_decodes(streams, max_decodes(engine)) if has_device_rows else None

    def _open_decodes(self, streams: Streams, max_rows: int) -> "DecodeSteps":
        from gpu.decode_steps import DecodeSteps  # imports triton

        parts = (self._model, self._cache, self._sampler, self._builder.tables)
        with torch.inference_mode():
            return DecodeSteps(*parts, streams, max_rows)

    def open_graphs(self, progress: Progress) -> None:
        """Send steps of decodes by CUDA graphs from now on, where there are any.

        Args:
            progress: called with (graphs captured, of how many), where they are captured now.

        Raises:
            DeviceError: the device is lost.
        """
        if self._decodes is None or self._recorder is None:
            return
        device = self.memory.device.device
        free_bytes, started_s = free_memory_bytes(device), time.perf_counter()
        with _device_errors(), torch.inference_mode():
            self._decodes.open_graphs(self._recorder, None if self._are_graphs_lazy else progress)
        taken_bytes = max(0, free_bytes - free_memory_bytes(device)) if device.type == "cuda" else 0
        self.captured = Captured(self._decodes.graphs.num_captured, time.perf_counter() - started_s, taken_bytes)
        if taken_bytes > self.memory.graph_bytes:
            found, counted = (f"{size_bytes / 2**20:.0f} MiB" for size_bytes in (taken_bytes, self.memory.graph_bytes))
            logger.warning("CUDA graphs have taken %s of memory, %s were counted for them", found, counted)

    def open_offload(self, engine: EngineConfig, checkpoint: Checkpoint) -> None:
        """Get the host memory that the operator asks for, filled with what is kept of the checkpoint's blocks.

        Raises:
            StartupError: it cannot be had.
        """
        with torch.inference_mode():
            self.offload = open_offload(self.config, engine, self.memory.device, self._cache, checkpoint)
        if self.offload is not None:
            num_slots, copy_s = self.offload.memory.num_slots, self.offload.copy_s
            self.limits = replace(self.limits, num_host_blocks=num_slots, host_copy_s=copy_s)

    def forward(self, plan: StepPlan) -> StepTicket:
        """Reset slots, copy and clear blocks, write KV, compute the logits of the rows that sample and of targets."""
        threads = self.measured.threads.of(plan.num_tokens)
        if threads != torch.get_num_threads():  # not for nothing: torch forgets what it has prepared
            torch.set_num_threads(threads)
        with _device_errors(), torch.inference_mode():
            for start in plan.sequence_starts:
                self._sampler.start(start)
            host_copies = self._start_host_copies(plan)
            if self._decodes is not None and self._decodes.knows(plan):
                step = self._decodes.forward(plan)
                return StepTicket(step.sampled, step.logits, step, host_copies=host_copies)
            batch = self._builder.build(plan)
            if batch.copy_sources is not None and batch.copy_targets is not None:
                self._cache.copy_blocks(batch.copy_sources, batch.copy_targets)
            if batch.cleared_blocks is not None:
                self._cache.clear_blocks(batch.cleared_blocks)
            self._drawn.fill_pending(batch)
            hidden = self._model.forward(batch, self._cache)  # [sampled + scored, hidden]
            num_sampled = len(batch.sampled_rows)
            ticket = StepTicket(batch.sampled, self._model.logits(hidden[:num_sampled]), host_copies=host_copies)
            if plan.prompt_targets:
                scored = hidden[num_sampled:]
                ticket.prompt_scores = score(scored, plan, self._model.logits, self.config.vocab_size)
            return ticket

    def _start_host_copies(self, plan: StepPlan) -> CopyTicket | None:
        if plan.host_copies is None:
            return None
        assert self.offload is not None, "the limits tell of no host memory"
        return self.offload.start(plan.host_copies)

    def logits(self, plan: StepPlan) -> Tensor:
        """Those of every token of a prompt, a plan's one row: [tokens, vocab], float32. Draws nothing."""
        with _device_errors(), torch.inference_mode():
            batch = self._builder.build(plan)
            batch.asked_tokens = torch.arange(len(plan.token_ids), device=batch.token_ids.device)
            return self._model.logits(self._model.forward(batch, self._cache))

    def sample(self, ticket: StepTicket) -> None:
        """Draw a token per sampling row. They stay on the device for the next step, and start for the host."""
        if len(ticket.sampled.rows):
            with _device_errors(), torch.inference_mode():
                ticket.drawn = self._drawn.send(self._draw(ticket))

    def _draw(self, ticket: StepTicket) -> Drawn:
        if ticket.decode is None:
            return self._sampler.sample(ticket.logits, ticket.sampled.slots, ticket.sampled.positions)
        assert self._decodes is not None, "it has sent the step"
        return self._decodes.draw(ticket.decode)

    def collect(self, ticket: StepTicket) -> StepOutput:
        """Wait for the drawn tokens; they come in the order of the plan's rows.

        Raises:
            DeviceError: the device is lost.
        """
        output = self._collect_drawn(ticket)
        if ticket.prompt_scores is not None:
            self._collect_scores(ticket.prompt_scores, output)
        if ticket.host_copies is not None:
            assert self.offload is not None, "it has started them"
            with _device_errors():
                output.host_copy_s = self.offload.finish(ticket.host_copies)
        return output

    def _collect_drawn(self, ticket: StepTicket) -> StepOutput:
        sampled, drawn = ticket.sampled, ticket.drawn
        if drawn is None:
            return StepOutput(np.empty(0, dtype=np.int32), np.empty(0, dtype=np.int32))
        with _device_errors(), torch.inference_mode():
            drawn.wait()
            is_finite, token_ids = drawn.is_finite.numpy(), drawn.token_ids.numpy()
            logprobs = _logprobs_by_row(drawn.logprobs, token_ids) if drawn.logprobs is not None else {}
            self.make_finite(sampled.slots[~is_finite].tolist())
        order = np.argsort(sampled.rows, kind="stable")  # back to the plan's
        order = order[is_finite[order]]
        return StepOutput(
            rows=sampled.rows[order].astype(np.int32),
            token_ids=token_ids[order].astype(np.int32),
            logprobs={index: logprobs[row] for index, row in enumerate(order.tolist()) if row in logprobs},
            failed_rows={int(row): NOT_FINITE for row in np.sort(sampled.rows[~is_finite])},
        )

    def _collect_scores(self, scores: PromptScores, output: StepOutput) -> None:
        with _device_errors(), torch.inference_mode():
            scores.wait()
            for targets, slot, told in scores.told():
                if told is not None:
                    output.prompt_logprobs[targets.row] = told
                else:
                    output.failed_rows[targets.row] = NOT_FINITE
                    self.make_finite([slot])

    def make_finite(self, slots: Iterable[int]) -> None:
        """Zero what is not finite in the blocks of these: others may come to share them."""
        with torch.inference_mode():
            for slot in slots:
                self._cache.make_finite(self._builder.blocks_of(slot))


def warm_up(runner: Runner[Ticket]) -> None:
    """Step once with a short prompt and once with one token: libraries load and compile what they need."""
    params = SamplingParams(max_tokens=1, temperature=1.0, top_p=0.9)
    prompt = (0,) * max(1, min(WARM_UP_TOKENS, runner.limits.max_model_len - 1))
    start = SequenceStart(0, prompt, len(prompt), params, seed=0, stop_ids=())
    for plan in (_one_row_plan(0, len(prompt), [start]), _one_row_plan(len(prompt), 1, [])):
        ticket = runner.forward(plan)
        runner.sample(ticket)
        runner.collect(ticket)


def steps_in_flight(overlap: str, device: torch.device) -> int:
    """
    Args:
        overlap: see EngineConfig. On a CPU the host computes the step itself: there is nothing to gain.
    """
    return 2 if overlap == "on" or (overlap == "auto" and device.type == "cuda") else 1


def load_runner(
    directory: Path,
    config: ModelConfig,
    engine: EngineConfig,
    progress: Progress,
    graph_progress: Progress = lambda done, total: None,
    find: FindOperators = find_operators,
) -> ModelRunner:
    """Load a Hugging Face directory's weights and get ready to step. Sets torch's threads.

    Args:
        progress: called with (bytes done, bytes total) while weights load.
        graph_progress: called with (graphs done, graphs total) while they are captured.
        find: what it computes with.

    Raises:
        StartupError: the device, the files or the memory; before the weights are read where that can be known.
    """
    choice = choose_device(engine)
    apply_threads(choice)
    checkpoint = open_checkpoint(directory, config.packing)
    memory = plan_checkpoint(config, engine, choice, checkpoint, free_memory_bytes(choice.device))
    runner = load_planned(checkpoint, config, engine, memory, progress, find=find)
    warm_up(runner)
    runner.open_graphs(graph_progress)
    runner.open_offload(engine, checkpoint)
    return runner


def load_planned(
    checkpoint: Checkpoint,
    config: ModelConfig,
    engine: EngineConfig,
    memory: MemoryPlan,
    progress: Progress,
    shard: Shard | None = None,
    ranks: Ranks | None = None,
    find: FindOperators = find_operators,
) -> ModelRunner:
    """As load_runner, once it is known where to; not warm yet.

    Args:
        shard: of the model, with whom it is computed together; None: all of it, alone.
    """
    choice, part = memory.device, config if shard is None else shard.config
    operators = find(part, choice)  # compiles or loads kernels
    operators.ranks = ranks
    drop_code_pages()
    with torch.inference_mode(), quantizing(engine) as convert:
        form = MatrixForm(convert, kept_scheme(config, engine.quantize, choice.device) is not None)
        fill = fill_on(choice.device)
        weights = load_weights(checkpoint, config, choice.dtype, choice.device, progress, form, fill, shard)
    runner = ModelRunner(part, engine, memory, weights, operators)
    trim_heap()
    return runner


def _one_row_plan(start: int, length: int, sequence_starts: list[SequenceStart]) -> StepPlan:
    """Slot 0 computes token 0 at these positions, in block 0, and samples."""

    def column(*values: int) -> Any:
        return np.array(values, dtype=np.int32)

    return StepPlan(
        slots=column(0),
        starts=column(start),
        lengths=column(length),
        samples=np.array([True]),
        token_ids=column(*[0] * length),
        table_slots=column(0),
        table_positions=column(0),
        table_blocks=column(0),
        copy_sources=column(),
        copy_targets=column(),
        sequence_starts=sequence_starts,
    )


def _logprobs_by_row(found: RowLogprobs, token_ids: np.ndarray[Any, Any]) -> dict[int, TokenLogprobs]:
    """Row among the sampled ones -> its logprobs."""
    drawn, top, top_ids = found.drawn.tolist(), found.top.tolist(), found.top_ids.tolist()
    return {
        row: TokenLogprobs(
            token_id=int(token_ids[row]),
            logprob=drawn[index],
            top=tuple(zip(top_ids[index][:num_top], top[index][:num_top], strict=True)),
        )
        for index, (row, num_top) in enumerate(zip(found.rows.tolist(), found.num_top, strict=True))
    }


@contextmanager
def _device_errors() -> Iterator[None]:
    """A CUDA error is sticky: nothing on that device succeeds after it. Running out of memory is the plan's alone."""
    try:
        yield
    except torch.AcceleratorError as error:
        raise DeviceError(str(error)) from error
