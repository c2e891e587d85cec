"""Loads a model's files into a runner that is ready to step. Thread: engine, at start."""

import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import torch

from core.config import BLOCK_SIZE, EngineConfig, ModelConfig
from core.drafts import DraftModel
from core.errors import ExitCode, StartupError
from core.plan import DeviceError, Runner, RunnerLimits, SequenceStart, Ticket, TimedRow, make_plan
from core.types import SamplingParams
from gpu.blocks import FORMATS, INT4_FORMATS, why_no_blocks, why_not_in_place
from gpu.checkpoint import Checkpoint, Progress, open_checkpoint
from gpu.cpu_kernels.support import choose_for
from gpu.device import DeviceChoice, apply_threads, drop_code_pages, free_memory_bytes, trim_heap
from gpu.kv_cache import num_blocks_for
from gpu.linear import MOST_FEW_ROWS
from gpu.memory_plan import MemoryPlan, draft_room, mtp_bytes, plan_checkpoint
from gpu.mtp import MtpDrafts, MtpModel, MtpRunner
from gpu.operators import Operators, not_deterministic
from gpu.parallel.ranks import Ranks, Shard
from gpu.quant import GROUP_SIZES, quantizing
from gpu.runner import ModelRunner
from gpu.streams import fill_on
from gpu.tune import compile_first, find_operators, timed_steps, why_not_deterministic
from gpu.weights import MatrixForm, check_checkpoint, heads_left_out, load_mtp, load_weights, prequantized_scheme

# Steps that are timed: prompts of so many tokens, and a decode after each; fewer of a large model, which takes longer.
TIMED_CHUNKS = (8, 16, 32, 64) * 3
TIMED_FOR_S = 2.0
WARM_UP_TOKENS = 2 * MOST_FEW_ROWS  # of a prompt: beyond the few rows that other kernels compute
logger = logging.getLogger(__name__)
FindOperators = Callable[[ModelConfig, DeviceChoice], Operators]


def load_runner(
    directory: Path,
    config: ModelConfig,
    engine: EngineConfig,
    progress: Progress,
    graph_progress: Progress = lambda done, total: None,
    find: FindOperators = find_operators,
) -> ModelRunner:
    """Load a Hugging Face directory or GGUF file and get ready to step. Sets torch's threads.

    Args:
        progress: called with (bytes done, bytes total) while weights load.
        graph_progress: called with (graphs done, graphs total) while they are captured.
        find: finds the operators to compute with.

    Raises:
        StartupError: the device, the files or the memory; before the weights are read where possible.
    """
    choice = choose_for(config, engine)
    apply_threads(choice)
    checkpoint = open_checkpoint(directory, config.packing)
    config = check_checkpoint(checkpoint, config)
    memory = plan_checkpoint(config, engine, choice, checkpoint, free_memory_bytes(choice.device))
    try:
        runner = load_planned(checkpoint, config, engine, memory, progress, find=find)
        is_host = choice.device.type == "cpu"
        if not is_host:
            warm_up(runner)
        runner.open_graphs(graph_progress)
        if not runner.captures_lazily:  # timing would capture graphs

            def timing() -> tuple[TimedRow, ...]:
                """Where an earlier start's times are known, nothing has to be compiled: requests step first."""
                if is_host:
                    warm_up(runner)
                return time_rows(runner)

            timed = timed_steps(config, engine, choice, runner.operators, checkpoint.main_format, timing)
            runner.limits = replace(runner.limits, timed_rows=timed)
        if has_head := mtp_bytes(config, engine, choice, checkpoint) > 0:
            runner.drafts = _load_mtp(runner, checkpoint, find)
        if left_out := heads_left_out(checkpoint, config, has_head):
            logger.info("layers that predict later tokens are left out: %s", ", ".join(left_out))
        runner.open_offload(engine, checkpoint)
    except DeviceError as error:
        fix = "start it again; nvidia-smi and the system's log say what happened to the device."
        raise StartupError(f"The device is lost: {error}", fix, ExitCode.DEVICE) from error
    return runner


def _load_mtp(runner: ModelRunner, checkpoint: Checkpoint, find: FindOperators) -> DraftModel:
    """The drafts of the model's own head, whose memory is planned."""
    memory, engine, config = runner.memory, runner.memory.engine, runner.config
    num_sequences, num_blocks = draft_room(engine, memory.max_model_len)
    own = replace(engine, max_sequences=num_sequences, max_loras=0, deterministic=False)
    own_memory = replace(
        memory, model=config.mtp_layer, engine=own, num_blocks=num_blocks, num_window_blocks=0, num_kept_states=0
    )
    operators = find(config.mtp_layer, memory.device)
    operators.has_blocks = runner.operators.has_blocks
    with torch.inference_mode(), quantizing(engine) as convert:
        weights = load_mtp(checkpoint, config, memory.device.dtype, memory.device.device, convert)
        num_kv_slots = (num_blocks + 1) * BLOCK_SIZE
        head = MtpRunner(MtpModel(config.mtp_layer, weights, operators, runner.model, num_kv_slots), own_memory)
    warm_up(head)
    head.limits = replace(head.limits, timed_rows=time_rows(head))
    return MtpDrafts(head, runner.keep_states(), config.vocab_size)


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
    """Load weights as planned; the runner is not warmed up yet.

    Args:
        config: the whole model's.
        shard: the rank's part; None: the whole model.
        ranks: None: this process computes the whole model.
    """
    choice, part = memory.device, config if shard is None else shard.config
    if engine.deterministic and (why := why_not_deterministic(part, engine, choice)) is not None:
        raise not_deterministic(why)
    has_blocks = why_no_blocks(part, engine, choice.device, choice.dtype) is None
    if ranks is None:
        compile_first(part, choice, _multiplied_formats(checkpoint, engine) if has_blocks else set())
    operators = find(part, choice)  # compiles or loads kernels
    operators.ranks, operators.has_blocks = ranks, has_blocks
    drop_code_pages()
    with torch.inference_mode(), quantizing(engine) as convert:
        is_prequantized = prequantized_scheme(config, engine.quantize, choice.device) is not None
        has_blocks = shard is None and why_not_in_place(config, engine, choice) is None
        blocks_on = choice.device if has_blocks and choice.device.type != "cpu" else None
        form = MatrixForm(convert, is_prequantized, has_blocks, blocks_on)
        fill = fill_on(choice.device)
        weights = load_weights(checkpoint, config, choice.dtype, choice.device, progress, form, fill, shard)
        runner = ModelRunner(part, engine, memory, weights, operators)
    trim_heap()
    return runner


def _multiplied_formats(checkpoint: Checkpoint, engine: EngineConfig) -> set[str]:
    """Of most of the blocks that are multiplied."""
    if engine.quantize is not None:
        return {{"int8": "Q8_0", "int4": INT4_FORMATS[GROUP_SIZES[0]]}.get(engine.quantize, "")} & FORMATS.keys()
    return {tensor.format for tensor in checkpoint.tensors.values()} & FORMATS.keys()


def warm_up(runner: Runner[Ticket]) -> None:
    """Step once with a short prompt and once with one token, so that libraries load and compile what they need."""
    limits = runner.limits
    size = max(1, min(WARM_UP_TOKENS, limits.max_model_len - 1, limits.max_batch_tokens))
    _step_twice(runner, size, SamplingParams(max_tokens=1, temperature=1.0, top_p=0.9, num_logprobs=1))


def time_rows(runner: Runner[Ticket]) -> tuple[TimedRow, ...]:
    """Time short prompts, and a decode after each; the first of each size compiles, and does not count."""
    timed, started_s = list[TimedRow](), time.perf_counter()
    for index, size in enumerate(_timed_chunks(runner.limits)):
        prompt_s, decode_s = _step_twice(runner, size, SamplingParams(max_tokens=1, temperature=0.0))
        if index >= len(set(TIMED_CHUNKS)):
            timed += [TimedRow(0, size, size, prompt_s), TimedRow(size, size + 1, size, decode_s)]
        if time.perf_counter() - started_s > TIMED_FOR_S:
            break
    return tuple(timed)


def _step_twice(runner: Runner[Ticket], size: int, params: SamplingParams) -> tuple[float, ...]:
    """Compute a prompt of so many tokens in slot 0, and a token after it; returns the seconds of each step."""
    start = SequenceStart(0, (0,) * size, size, params, seed=0, stop_ids=())
    took_s = []
    blocks = range(num_blocks_for(size + 1))
    tables = [(0, position, position) for position in blocks]
    if runner.limits.num_window_blocks is not None:
        tables += [(0, position, ~position) for position in blocks]
    prompt = make_plan([(0, 0, start.token_ids, True)], tables, sequence_starts=[start])
    for plan in (prompt, make_plan([(0, size, (0,), True)])):
        before_s = time.perf_counter()
        ticket = runner.forward(plan)
        runner.sample(ticket)
        runner.collect(ticket)
        took_s.append(time.perf_counter() - before_s)
    return tuple(took_s)


def _timed_chunks(limits: RunnerLimits) -> Iterator[int]:
    """TIMED_CHUNKS, cut to what there is room for."""
    most = max(1, min(limits.max_model_len - 1, limits.max_batch_tokens, limits.num_blocks * limits.block_size - 1))
    return (min(size, most) for size in TIMED_CHUNKS)
