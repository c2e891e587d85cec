"""Divides the device's memory among weights, the largest step, CUDA graphs and KV, before anything is loaded.

Reads headers and settings only. Thread: engine, at start, or main, for an estimate.
"""

import math
from bisect import bisect_left
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

import torch

from core.config import BLOCK_SIZE, EngineConfig, ModelConfig, RecurrentConfig
from core.errors import NotEnoughMemory, StartupError
from core.kv_cache import least_window_blocks, num_seen_blocks
from gpu.adapters import adapter_bytes
from gpu.attention import MAX_GATHERED_TOKENS, MAX_SCORES
from gpu.blocks import why_not_in_place
from gpu.checkpoint import Checkpoint, open_checkpoint
from gpu.cpu_kernels.support import attends, choose_for, why_no_kernels
from gpu.device import DeviceChoice, free_memory_bytes
from gpu.kernels.sizes import kernel_shape, why_no_attention
from gpu.kv_cache import bytes_per_block, bytes_per_token, kv_dtype_of, layer_bytes, num_blocks_for
from gpu.linear import can_gather, can_pack
from gpu.parameters import EMBEDDING, empty_ends, empty_layer, empty_weights, matrices
from gpu.quant import DEVICE_SLAB_BYTES, SLAB_BYTES, can_quantize, floats, stored_bytes
from gpu.recurrence import bytes_per_state
from gpu.rows import MOST_STATES
from gpu.sampler import piece_rows
from gpu.step_shapes import max_decodes, step_shapes
from gpu.streams import staged_bytes
from gpu.weights import (
    check_checkpoint,
    ends_in_blocks,
    find_prequantized,
    mtp_size_bytes,
    names_in_blocks,
    prequantized_scheme,
)

MIB, GIB = 1024**2, 1024**3
ROUNDING_TOKENS = 100  # of a proposed --max-model-len
# The KV cache's default share of the room: other processes need the host's memory too; of a GPU's, torch's allocator
# loses some between blocks.
SHARED_MEMORY_SHARE, OWN_MEMORY_SHARE = 0.5, 0.95
KEPT_STATES_SHARE, MOST_KEPT_STATES = 0.15, 4  # of recurrent layers: of the room, and for each sequence
WINDOWS_A_SEQUENCE = 2  # times what a sequence sees: window blocks for each, the rest for prompts that come back ...
WINDOW_SHARE = 2 / 3  # ... and at most so many of the blocks that there would be if all layers had one table
FIX_MARGIN = 0.02  # of the free memory, left by proposed settings: a minute later there may be less


MOST_DRAFTED = 16  # sequences that a draft model, or the model's own head, drafts for at once
DRAFT_CONTEXTS = 2  # of the longest sequence, that its blocks hold at least ...
DRAFT_TOKENS = 16_384  # ... and tokens


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """What the model and the settings need of a device's memory, and how many blocks are left for KV.

    Args:
        engine: max_model_len is set.
        num_parameters: of the whole model, however many ranks share it.
        checkpoint_bytes: tensors in the files; weights_bytes: the same in memory, as dtype or quantised.
        free_bytes: on the device, before anything is loaded.
        measured_graph_bytes: of CUDA graphs; None: they are estimated, before loading.
        num_blocks: for sequences; the cache holds one more.
        num_window_blocks: the same of layers with windows; 0: all layers have one table.
        num_kept_states: of recurrent layers, kept at block borders for later prompts.
    """

    model: ModelConfig
    engine: EngineConfig
    device: DeviceChoice
    num_parameters: int
    checkpoint_bytes: int
    weights_bytes: int
    free_bytes: int
    measured_graph_bytes: int | None = None
    num_blocks: int = 0
    num_window_blocks: int = 0
    num_kept_states: int = 0

    @property
    def max_model_len(self) -> int:
        assert self.engine.max_model_len is not None
        return self.engine.max_model_len

    @property
    def activation_bytes(self) -> int:
        """An upper bound for the largest step."""
        return activation_size_bytes(self.model, self.engine, self.max_model_len, self.device)

    @property
    def graph_bytes(self) -> int:
        if self.measured_graph_bytes is not None:
            return self.measured_graph_bytes
        return graphs_size_bytes(self.model, self.engine, self.device)

    @property
    def adapters_bytes(self) -> int:
        """Of --max-loras adapters, each with --max-lora-rank everywhere, and of one that replaces another."""
        engine = self.engine
        one_bytes = adapter_bytes(self.model, self.device.dtype, engine.max_lora_rank) if engine.max_loras else 0
        return (engine.max_loras + 1) * one_bytes

    @property
    def loading_bytes(self) -> int:
        return loading_size_bytes(self.model, self.engine, self.device)

    @property
    def kv_dtype(self) -> torch.dtype:
        return kv_dtype_of(self.model, self.engine, self.device)

    @property
    def state_bytes(self) -> int:
        """Of recurrent layers: two states of each sequence that runs, those kept, and zeros."""
        num_states = 2 * self.engine.max_sequences + self.num_kept_states + 1
        return num_states * bytes_per_state(self.model, self.device.dtype)

    @property
    def kv_bytes_per_token(self) -> int:
        return bytes_per_token(self.model, self.kv_dtype)

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Of each layer that caches, its window, if it has window blocks; empty: all layers have one table."""
        return () if why_one_table(self.model, self.engine, self.device) else _windows_of(self.model, self.engine)

    @property
    def least_window_blocks(self) -> int:
        """With which one sequence can run; 0: all layers have one table."""
        return _least_window_blocks(self.windows, self.engine) if self.windows else 0

    @property
    def block_bytes(self) -> int:
        """Of a block: all layers, or those without window blocks."""
        return bytes_per_block(self.model, self.kv_dtype) - self.window_block_bytes

    @property
    def window_block_bytes(self) -> int:
        found = zip(self.windows, layer_bytes(self.model, self.kv_dtype), strict=False)
        return BLOCK_SIZE * sum(size_bytes for window, size_bytes in found if window is not None)

    @property
    def kv_tokens(self) -> int:
        return self.num_blocks * BLOCK_SIZE

    @property
    def kv_bytes(self) -> int:
        """With the scratch blocks."""
        return (self.num_blocks + 1) * self.block_bytes + (self.num_window_blocks + 1) * self.window_block_bytes

    @property
    def least_kv_bytes(self) -> int:
        """One sequence of max_model_len, with the scratch blocks."""
        num_blocks = num_blocks_for(self.max_model_len) + 1
        return num_blocks * self.block_bytes + (self.least_window_blocks + 1) * self.window_block_bytes

    @property
    def offload_bytes(self) -> int:
        """Host memory for KV."""
        return self.engine.kv_offload_bytes

    @property
    def shared_bytes(self) -> int:
        """Host memory for KV that is taken from the device's: a CPU has no other."""
        return self.offload_bytes if self.device.device.type == "cpu" else 0

    @property
    def beside_kv_bytes(self) -> int:
        """On the device, all but KV."""
        on_all = self.weights_bytes + self.adapters_bytes + self.activation_bytes + self.state_bytes
        return on_all + self.graph_bytes + self.shared_bytes

    @property
    def total_bytes(self) -> int:
        """On the device."""
        return self.beside_kv_bytes + self.kv_bytes

    @property
    def kv_room_bytes(self) -> int:
        """What all else leaves; may be negative."""
        return self.free_bytes - self.beside_kv_bytes

    @property
    def fits(self) -> bool:
        given = self.engine.kv_memory_bytes
        return self.least_kv_bytes <= (self.least_kv_bytes if given is None else given) <= self.kv_room_bytes

    def but(self, **settings: int | None) -> "MemoryPlan":
        """The same with other settings of the engine."""
        return replace(self, engine=replace(self.engine, **settings))  # type: ignore[arg-type]

    def with_graphs(self, measured_bytes: int | None) -> "MemoryPlan":
        """The plan divided: as much KV as is useful beside graphs of this size.

        Raises:
            NotEnoughMemory: one sequence's KV does not fit.
        """
        plan = replace(self, measured_graph_bytes=measured_bytes, num_kept_states=0)
        plan = replace(plan, num_kept_states=_num_kept_states(plan))
        num_blocks, num_window_blocks = _num_blocks(plan)
        return replace(plan, num_blocks=num_blocks, num_window_blocks=num_window_blocks)

    def most(self, setting: str) -> int:
        """The largest value of a setting that fits, up to its own; 0: none. Memory grows with it."""
        values = range(1, getattr(self.engine, setting) + 1)
        return bisect_left(values, True, key=lambda value: not self.but(**{setting: value}).fits)

    @property
    def longest(self) -> int:
        """The longest context that fits, rounded down; 0: none."""
        longest = self.most("max_model_len")
        return longest // ROUNDING_TOKENS * ROUNDING_TOKENS or longest


def estimate(directory: Path, model: ModelConfig, engine: EngineConfig) -> MemoryPlan:
    """Plan the memory of a model's directory; reads headers only, and the head of a tied model that has one.

    Raises:
        BadCheckpoint: the directory's files, or tensors that are not those of its config.json.
        DeviceUnavailable: the requested device or dtype.
        NotEnoughMemory: the weights, or the KV cache of one sequence of max_model_len, do not fit.
    """
    device = choose_for(model, engine)
    checkpoint = open_checkpoint(directory, model.packing)
    model = check_checkpoint(checkpoint, model)
    offload_slots(model, engine, kv_dtype_of(model, engine, device), free_memory_bytes(torch.device("cpu")))
    return plan_checkpoint(model, engine, device, checkpoint, free_memory_bytes(device.device))


def plan_checkpoint(
    model: ModelConfig, engine: EngineConfig, device: DeviceChoice, checkpoint: Checkpoint, free_bytes: int
) -> MemoryPlan:
    """plan_memory for a model whose headers have been read."""
    weights_bytes = weights_size_bytes(model, engine, device, checkpoint)
    return plan_memory(model, engine, device, checkpoint.size_bytes, free_bytes, weights_bytes)


def plan_memory(
    model: ModelConfig,
    engine: EngineConfig,
    device: DeviceChoice,
    checkpoint_bytes: int,
    free_bytes: int,
    weights_bytes: int | None = None,
    graph_bytes: int | None = None,
) -> MemoryPlan:
    """Divide free_bytes: weights first, then the largest step, then as much KV as is useful; see estimate.

    Args:
        weights_bytes: None: computed from the model's configuration.
        graph_bytes: None: an estimate.

    Raises:
        StartupError: recurrent layers do not go with the settings.
    """
    if weights_bytes is None:
        weights_bytes = weights_size_bytes(model, engine, device)
    _check_layers(model, engine)
    given = (model, _with_length(model, engine), device, model.num_parameters, checkpoint_bytes, weights_bytes)
    return MemoryPlan(*given, free_bytes).with_graphs(graph_bytes)


def _check_layers(model: ModelConfig, engine: EngineConfig) -> None:
    """
    Raises:
        StartupError: a setting does not go with the model's layers.
    """
    if model.has_unknown_factors and engine.max_loras:
        cause = (
            "the model's multipliers are in its matrices and not stored, so an adapter's cannot be multiplied by them"
        )
        fix = "serve the model's safetensors, or start without --max-loras."
        raise StartupError(f"--max-loras is not supported for this GGUF file: {cause}.", fix)
    refused, what = {"--tensor-parallel": engine.tensor_parallel > 1}, "recurrent layers"
    if model.recurrence is None:
        refused["--max-loras"] = engine.max_loras > 0
        what = "layers that differ in their sizes, or have inputs of their own"
    else:
        refused["--kv-offload-memory"] = engine.kv_offload_bytes > 0
        refused["--kv-offload-dir"] = engine.kv_offload_dir is not None
    for flag, is_set in refused.items():
        if is_set and (model.recurrence is not None or model.inputs is not None or len(model.kinds) > 1):
            raise StartupError(f"{flag} is not supported for models with {what}.", f"start without {flag}.")
    if model.recurrence is None:
        return
    least = engine.max_sequences + BLOCK_SIZE
    if engine.deterministic and engine.max_batch_tokens < least:
        cause = f"--deterministic: with recurrent layers a step needs {BLOCK_SIZE} prompt tokens and one per sequence."
        raise StartupError(cause, f"--max-batch-tokens {least}, or fewer --max-sequences.")


def memory_needed(
    model: ModelConfig, engine: EngineConfig, device: DeviceChoice, checkpoint: Checkpoint | None = None
) -> int:
    """The least free memory with which plan_memory succeeds, in bytes, for one sequence of the full length.

    Args:
        checkpoint: see weights_size_bytes.
    """
    weights_bytes = weights_size_bytes(model, engine, device, checkpoint)
    plan = MemoryPlan(model, _with_length(model, engine), device, model.num_parameters, 0, weights_bytes, free_bytes=0)
    return max(plan.beside_kv_bytes + plan.least_kv_bytes, weights_bytes + plan.loading_bytes)


def mtp_bytes(model: ModelConfig, engine: EngineConfig, device: DeviceChoice, checkpoint: Checkpoint) -> int:
    """Of the model's own head that drafts: weights, KV, the states that it reads; 0: none drafts."""
    if not engine.mtp or engine.speculation == "off" or device.device.type != "cpu" or engine.tensor_parallel > 1:
        return 0
    weights_bytes = mtp_size_bytes(checkpoint, model, device.dtype)
    if not weights_bytes:
        return 0
    longest = _with_length(model, engine).max_model_len
    assert longest is not None, "it was set"
    num_blocks = draft_room(engine, longest)[1] + 1
    states = num_blocks * BLOCK_SIZE + engine.max_sequences * MOST_STATES
    kv_bytes = num_blocks * bytes_per_block(model.mtp_layer, kv_dtype_of(model, engine, device))
    return weights_bytes + kv_bytes + states * model.hidden_size * device.dtype.itemsize


def draft_room(engine: EngineConfig, longest: int) -> tuple[int, int]:
    """How many sequences are drafted for at once, and the KV blocks of what drafts."""
    num_sequences = min(engine.max_sequences, MOST_DRAFTED)
    num_tokens = min(num_sequences * longest, max(DRAFT_CONTEXTS * longest, DRAFT_TOKENS))
    return num_sequences, num_blocks_for(num_tokens)


def offload_slots(model: ModelConfig, engine: EngineConfig, dtype: torch.dtype, free_bytes: int) -> int:
    """How many blocks fit in --kv-offload-memory; 0: it is 0.

    Args:
        dtype: of keys and values.
        free_bytes: on the host.

    Raises:
        StartupError: it does not hold one block, or is more than is free.
    """
    asked_bytes, block_bytes = engine.kv_offload_bytes, bytes_per_block(model, dtype)
    if 0 < asked_bytes < block_bytes:
        least = f"--kv-offload-memory of at least {-(-block_bytes // MIB)}MiB."
        raise StartupError("--kv-offload-memory is too small for one KV block.", least)
    if asked_bytes > free_bytes:
        unit = _unit_of(asked_bytes, free_bytes)
        raise NotEnoughMemory(
            f"--kv-offload-memory asks for {unit.show(asked_bytes)}, {unit.show(free_bytes)} free.",
            f"--kv-offload-memory {unit.setting_between(1, free_bytes // 2, free_bytes)}, or less.",
        )
    return asked_bytes // block_bytes


def _with_length(model: ModelConfig, engine: EngineConfig) -> EngineConfig:
    """The settings, with max_model_len set."""
    length = model.max_position if engine.max_model_len is None else engine.max_model_len
    if not 0 < length <= model.max_position:
        raise StartupError(
            f"A context of {length} tokens was requested; the model supports up to {model.max_position}.",
            f"--max-model-len {model.max_position}, or less.",
        )
    return replace(engine, max_model_len=length)


def _num_kept_states(plan: MemoryPlan) -> int:
    """As many as MOST_KEPT_STATES a sequence, within a share of the room."""
    size_bytes = bytes_per_state(plan.model, plan.device.dtype)
    if not size_bytes or not plan.engine.has_prefix_cache:
        return 0
    room_bytes = int((plan.kv_room_bytes - (plan.engine.kv_memory_bytes or plan.least_kv_bytes)) * KEPT_STATES_SHARE)
    return max(0, min(MOST_KEPT_STATES * plan.engine.max_sequences, room_bytes // size_bytes))


def why_one_table(model: ModelConfig, engine: EngineConfig, device: DeviceChoice) -> str | None:
    """Why layers with windows have no KV blocks of their own; None: they have, and give back what no token sees.

    Args:
        engine: max_model_len is set.
    """
    windows = _windows_of(model, engine)
    length = num_blocks_for(engine.max_model_len or model.max_position) * BLOCK_SIZE
    if None not in windows or not any(windows):
        return "all layers see alike"
    if not engine.has_window_blocks:
        return "the model drafts, or is measured"
    if engine.tensor_parallel > 1:
        return "ranks have one table"
    if engine.kv_offload_bytes:
        return "copies in host memory are of all layers"
    if model.recurrence is not None:
        return "it has recurrent layers"
    if _least_window_blocks(windows, engine) >= length // BLOCK_SIZE:
        return "one context has no more blocks than a window and a step"
    return None


def _windows_of(model: ModelConfig, engine: EngineConfig) -> tuple[int | None, ...]:
    return model.kv_windows(num_blocks_for(engine.max_model_len or model.max_position) * BLOCK_SIZE)


def _least_window_blocks(windows: tuple[int | None, ...], engine: EngineConfig) -> int:
    longest = max(one for one in windows if one is not None)
    return least_window_blocks(longest, engine.max_batch_tokens, BLOCK_SIZE)


def _num_blocks(plan: MemoryPlan) -> tuple[int, int]:
    """Blocks and window blocks: all sequences at full length, by default within a share of the room; at least one."""
    _check(plan)
    one_sequence, max_sequences = num_blocks_for(plan.max_model_len), plan.engine.max_sequences
    share = SHARED_MEMORY_SHARE if plan.device.device.type == "cpu" else OWN_MEMORY_SHARE
    room_bytes = plan.engine.kv_memory_bytes or max(int(plan.kv_room_bytes * share), plan.least_kv_bytes)
    num_window_blocks, least = 0, plan.least_window_blocks
    if least:
        longest = max(one for one in plan.windows if one is not None)
        wanted = least + WINDOWS_A_SEQUENCE * max_sequences * num_seen_blocks(longest, BLOCK_SIZE)
        most = int(WINDOW_SHARE * room_bytes / (plan.block_bytes + plan.window_block_bytes))
        most = min(most, (room_bytes - (one_sequence + 1) * plan.block_bytes) // plan.window_block_bytes - 1)
        num_window_blocks = min(wanted, max(most, least), max_sequences * one_sequence)
        room_bytes -= (num_window_blocks + 1) * plan.window_block_bytes
    num_blocks = room_bytes // plan.block_bytes - 1
    if plan.engine.kv_memory_bytes is None:
        num_blocks = min(num_blocks, max_sequences * one_sequence)
    return num_blocks, num_window_blocks


def _check(plan: MemoryPlan) -> None:
    """
    Raises:
        NotEnoughMemory: with settings that fit, where there are any.
    """
    room, free, weights, loading = plan.kv_room_bytes, plan.free_bytes, plan.weights_bytes, plan.loading_bytes
    dtype, given, need = plan.device.dtype_name, plan.engine.kv_memory_bytes, plan.least_kv_bytes
    if room <= 0:
        needed, shared = weights + plan.activation_bytes + plan.graph_bytes, plan.shared_bytes
        unit = _unit_of(needed, shared, free)
        beside = f" beside --kv-offload-memory of {unit.show(shared)}" if shared else ""
        cause = f"Weights and activations need {unit.show(needed)} as {dtype}{beside}, {unit.show(free)} free."
    elif weights + loading > free:
        unit = _unit_of(weights, loading, free)
        more = f"and {unit.show(loading)} more while they load, {unit.show(free)} free."
        raise NotEnoughMemory(f"Weights need {unit.show(weights)} as {dtype}, {more}", _smaller(plan))
    elif given is not None and given > room:
        unit = _unit_of(given, room)
        cause = f"KV cache: --kv-memory asks for {unit.show(given)}, {unit.show(room)} free besides the weights."
    elif not plan.fits:
        has, gives = (room, "{} free") if given is None else (given, "--kv-memory gives {}")
        unit = _unit_of(need, has)
        short = f", {need - has} bytes too few" if unit.show(need) == unit.show(has) else ""
        needs = f"need {unit.show(need)} for {plan.max_model_len} tokens"
        cause = f"KV cache: {needs}, {gives.format(unit.show(has))}{short}."
    else:
        return
    raise NotEnoughMemory(cause, _fix(plan, unit))


def _fix(plan: MemoryPlan, unit: "_Unit") -> str:
    """Settings that were found to fit: with a margin, unless they only fit in all that is free now."""
    with_margin = replace(plan, free_bytes=round(plan.free_bytes * (1 - FIX_MARGIN)))
    ways = _settings_that_fit(with_margin, unit) or _settings_that_fit(plan, unit)
    return ", or ".join(ways) or _smaller(plan)


def _settings_that_fit(plan: MemoryPlan, unit: "_Unit") -> list[str]:
    """Each alone; where none does, the first combination."""
    given = plan.engine.kv_memory_bytes
    ways = {
        "--max-model-len {}": plan.longest,
        "--max-sequences {}": plan.most("max_sequences"),
        "--kv-memory {}": given and unit.setting_between(plan.least_kv_bytes, given, plan.kv_room_bytes),
    }
    combinations = {
        "--max-sequences 1 --max-model-len {}": plan.but(max_sequences=1),
        "--max-model-len {} without --kv-memory": plan.but(kv_memory_bytes=None),
    }
    return [way.format(value) for way, value in ways.items() if value] or [
        way.format(changed.longest) for way, changed in combinations.items() if changed.longest
    ][:1]


def _smaller(plan: MemoryPlan) -> str:
    ways = ["a smaller model"]
    if plan.engine.kv_offload_bytes:
        ways.append("less --kv-offload-memory")
    if plan.device.dtype == torch.float32:
        ways.append("--dtype bfloat16")
    if plan.engine.quantize != "int4":
        ways.append("--quantize int4")
    return ", or ".join(ways)


@dataclass(frozen=True, slots=True)
class _Unit:
    """The unit of all sizes in one message.

    Args:
        steps: within one unit, of the sizes that are proposed.
    """

    name: str
    num_bytes: int
    steps: int

    def show(self, size_bytes: int) -> str:
        size = size_bytes / self.num_bytes
        return f"{size:.1f} {self.name}" if size >= 1 or size_bytes <= 0 else f"{size:.2g} {self.name}"

    def setting_between(self, least: int, wanted: int, most: int) -> str | None:
        """A flag's value: as many bytes as wanted, or the nearest that fit; None: none do."""
        step = self.num_bytes / self.steps
        first, last = math.ceil(least / step), math.floor(most / step)
        if first > last:
            return None if self is _MIB else _MIB.setting_between(least, wanted, most)
        return f"{min(max(round(wanted / step), first), last) / self.steps:g}{self.name}"


_MIB, _GIB = _Unit("MiB", MIB, 1), _Unit("GiB", GIB, 100)


def _unit_of(*sizes: int) -> _Unit:
    """The one that suits the largest."""
    return _GIB if max(sizes) >= GIB else _MIB


# Bytes that a driver keeps per kernel of a graph, guessed generously, for estimates before anything is loaded;
# step_graphs.py measures the real figure at start.
GRAPH_NODE_BYTES, GRAPH_NODES_A_LAYER, GRAPH_NODES = 8 * 1024, 16, 32


def weights_size_bytes(
    model: ModelConfig, engine: EngineConfig, device: DeviceChoice, checkpoint: Checkpoint | None = None
) -> int:
    """All parameters as they are served, and what the head that predicts later tokens needs.

    Matrices are quantised, or in the blocks of a GGUF file, where possible; all else is in dtype. A tied head that is
    prepacked is one more copy, unless the embedding's rows can be read from it.

    Args:
        checkpoint: tells which matrices it stores quantised; None: all that may be.
    """
    dtype, quantize, ends = device.dtype, engine.quantize, (model.vocab_size, model.hidden_size)
    scheme, meta = prequantized_scheme(model, quantize, device.device), torch.device("meta")
    size_bytes, in_blocks = model.num_parameters * dtype.itemsize, list[str]()
    is_file = checkpoint is not None and checkpoint.path.is_file()
    file = checkpoint if is_file and why_not_in_place(model, engine, device) is None else None
    if file is not None:
        in_blocks += ends_in_blocks(empty_ends(model, dtype, meta, model.vocab_size)[1], file)
        if device.device.type != "cpu":
            size_bytes += DEVICE_SLAB_BYTES  # of what torch multiplies by many rows
    is_packed = can_pack(dtype, device.device) and EMBEDDING not in in_blocks
    if model.tie_embeddings and is_packed and not can_gather(ends):
        size_bytes += math.prod(ends) * dtype.itemsize
    are_converted = quantize is not None or scheme is not None or file is not None
    for index in range(model.num_layers if are_converted else 0):
        layer, targets = empty_layer(model, index, dtype, meta)
        if file is not None:
            in_blocks += chain.from_iterable(names_in_blocks(targets, file).values())
        kept = {} if scheme is None else find_prequantized(model, layer, targets, checkpoint)
        for owner, field in matrices(layer):
            shape = tuple(floats(getattr(owner, field)).shape)
            becomes, group_size = (scheme, kept[field]) if field in kept else (quantize, None)
            if becomes is not None and (field in kept or can_quantize(becomes, shape[-1])):
                size_bytes += stored_bytes(shape, becomes, dtype, device.device, group_size)
                size_bytes -= math.prod(shape) * dtype.itemsize
    if checkpoint is None:
        return size_bytes
    for stored in map(checkpoint.tensors.__getitem__, in_blocks):
        size_bytes += stored.size_bytes - math.prod(stored.shape) * dtype.itemsize
    return size_bytes + mtp_bytes(model, engine, device, checkpoint)


def loading_size_bytes(model: ModelConfig, engine: EngineConfig, device: DeviceChoice) -> int:
    """What loading takes beside the weights: staging buffers, and a layer before it is quantised."""
    size_bytes = staged_bytes(device.device)
    if engine.quantize is not None or prequantized_scheme(model, None, device.device) is not None:
        layers = empty_weights(model, device.dtype, torch.device("meta"))[0].layers
        size_bytes += max(sum(floats(getattr(*matrix)).nbytes for matrix in matrices(layer)) for layer in layers)
    return size_bytes


def activation_size_bytes(model: ModelConfig, engine: EngineConfig, max_model_len: int, device: DeviceChoice) -> int:
    """An upper bound: one layer's tensors of a full batch, logits, noise; where torch attends, masks and a gather."""
    dtype = device.dtype
    scored_rows = min(piece_rows(model.vocab_size), engine.max_batch_tokens)
    one_layer = engine.max_batch_tokens * _layer_width(model) * dtype.itemsize
    windows = {(sight.window, sight.chunk) for sight in model.sights}
    masks = len(windows) + (windows != {(None, None)})  # one per window, and one while a windowed mask is made
    mask = masks * engine.max_batch_tokens * max_model_len * dtype.itemsize
    longest = num_blocks_for(max_model_len) * BLOCK_SIZE
    gathered_tokens = min(engine.max_sequences * longest, max(longest, MAX_GATHERED_TOKENS))
    kv_size = max(kind.kv_size for kind in model.kinds)
    gathered = gathered_tokens * kv_size * 2 * dtype.itemsize
    if engine.kv_dtype != "auto":  # integers in order, and as float32: of keys, then of values
        gathered += gathered_tokens * kv_size * (1 + 1 + 4)
    # Rows that sample: raw, adjusted, scaled, noise; prompts' rows beside them: the head's, raw, logarithms
    logits = 4 * model.vocab_size * max(4 * engine.max_sequences, engine.max_sequences + 3 * scored_rows)  # float32
    is_written_out = model.attention_cap is not None or model.has_sinks or model.latent is not None
    written_out = 3 * 4 * MAX_SCORES * is_written_out  # float32: scores, and two steps on
    slab_bytes = SLAB_BYTES if device.device.type == "cpu" else DEVICE_SLAB_BYTES
    slabs = 4 * slab_bytes if engine.quantize or model.packing else 0  # part of a weight: bits, integers, floats
    experts = _expert_activation_bytes(model, engine.max_batch_tokens, dtype)
    decoding = _decoding_bytes(model, engine, max_model_len, device)
    recurrent = _recurrent_bytes(model, engine, device)
    attention = 0 if attends(model, device) else mask + gathered
    return one_layer + attention + logits + written_out + slabs + experts + decoding + recurrent


def _recurrent_bytes(model: ModelConfig, engine: EngineConfig, device: DeviceChoice) -> int:
    """A recurrent layer's tensors of a full batch, in part as float32; by torch the states of all rows, too, twice."""
    own = model.recurrence
    if own is None:
        return 0
    taken = 2 * own.input_size * device.dtype.itemsize
    if why_no_kernels(model, device) is None and recurs_in_place(own):
        return engine.max_batch_tokens * (taken + 4 * (own.channels + 2 * own.output_size))
    tokens = taken + 4 * (3 * own.channels + 12 * own.num_heads * sum(own.memory_shape[1:]))
    return engine.max_batch_tokens * tokens + 2 * engine.max_sequences * 4 * math.prod(own.memory_shape)


def recurs_in_place(own: RecurrentConfig) -> bool:
    """What can_compute of gpu/cpu_kernels/recurrence.py says, without numba."""
    return own.kind != "conv" and own.key_dim % 16 == 0 and own.value_dim % 32 == 0


def _layer_width(model: ModelConfig) -> int:
    """Numbers per token in all tensors of the widest layer, and of what all layers read."""
    shared = model.experts.shared_size if model.experts is not None else 0
    width = 4 * model.hidden_size + max(
        4 * kind.query_size + 6 * kind.kv_size + 3 * max(kind.intermediate_size, shared) for kind in model.kinds
    )
    if model.inputs is not None:
        width += 4 * model.num_layers * model.inputs.size
    return width + (0 if model.streams is None else 4 * model.streams.count * model.hidden_size)


def _decoding_bytes(model: ModelConfig, engine: EngineConfig, max_model_len: int, device: DeviceChoice) -> int:
    """With rows on the device: attention's partial results until they are merged, tables of blocks and of seen tokens,
    logits.
    """
    if not _may_have_device_rows(model, device):
        return 0
    rows, width = max_decodes(engine), num_blocks_for(max_model_len)
    shape = kernel_shape(model.num_heads, model.num_kv_heads, model.head_dim, device.dtype)
    splits = rows * shape.splits_of(width * BLOCK_SIZE) * model.num_heads * (model.head_dim + 2) * 4  # float32
    tables = (engine.max_sequences + rows) * width * 4  # of slots and of rows, int32
    return splits + tables + (engine.max_sequences + rows) * model.vocab_size * 4


def _may_have_device_rows(model: ModelConfig, device: DeviceChoice) -> bool:
    """Whether decodes may be graphs; may be wrong for an old GPU without kernels, which then keeps room to spare."""
    return device.device.type == "cuda" and why_no_attention(model, device.dtype) is None


def graphs_size_bytes(model: ModelConfig, engine: EngineConfig, device: DeviceChoice) -> int:
    """What graphs share, a block for padding, and the driver's part of each graph."""
    is_cut = engine.max_model_len is not None and model.is_cut(engine.max_model_len)
    if engine.graphs == "off" or model.recurrence is not None or is_cut or not _may_have_device_rows(model, device):
        return 0
    shapes, dtype = step_shapes(model, engine), device.dtype
    rows, tokens = max_decodes(engine), max(shape.num_tokens for shape in shapes.largest)
    pool = (tokens * _layer_width(model) + rows * model.vocab_size) * dtype.itemsize
    nodes = GRAPH_NODES + GRAPH_NODES_A_LAYER * model.num_layers
    driver = len(shapes.in_order) * nodes * GRAPH_NODE_BYTES
    return pool + _expert_activation_bytes(model, tokens, dtype) + bytes_per_block(model, dtype) + driver


def _expert_activation_bytes(model: ModelConfig, num_tokens: int, dtype: torch.dtype) -> int:
    """Each token once per active expert: inputs, outputs, outputs in order, and once as float32."""
    if model.experts is None:
        return 0
    copies = num_tokens * model.experts.num_active
    return copies * (
        model.hidden_size * (3 * dtype.itemsize + 4) + 3 * model.experts.intermediate_size * dtype.itemsize
    )
