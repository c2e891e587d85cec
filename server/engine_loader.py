"""Wires the server to gpu/: loads the engine, and tells `doctor` and `models` what gpu/ knows of machine and model.

The only file that knows both the settings and gpu's functions. Each function imports gpu, and with it torch, itself:
the server listens before torch is there. Thread: the engine's for engine_loader(), else main.
"""

import logging
import os
import random
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace
from mmap import mmap
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, cast

from core.config import BLOCK_SIZE, CHANGE_TOKENS, QUANTIZE_SCHEMES, EngineConfig, ModelConfig
from core.drafts import DraftModel
from core.encoders import EncoderConfig, is_encoder
from core.engine import Engine
from core.errors import DeviceUnavailable, NotEnoughMemory, StartupError
from core.plan import Runner
from core.scheduler import Scheduler
from core.tokenizer import Tokenizer
from core.tool_formats import ANY_FORMAT
from core.types import Adapter, StepDelivery
from server.api.fields import PoolingStyle, tasks_of
from server.banner import drafts_of
from server.commands.console import MIN_FETCHED_BYTES, MIN_LOADED_BYTES, progress
from server.commands.hub import cached, environment_hub, fetch
from server.config import ServerConfig
from server.engine_thread import Inbox
from server.grammar_guard import GuardedCompiler
from server.loaded_engine import EngineFacts, LoadedEngine, LoadEngine, compiler_of, thought_style_of, tool_style_of
from server.memory_limits import as_memory_error, check_address_space
from server.model_files import (
    ModelFiles,
    check_tokenizer,
    encoder_of,
    parse_config,
    read_model_config,
    read_model_files,
    stamps_of,
)
from server.observing.logs import LoggedLines, LogHandler
from server.own_processes import DEVICES, Plan, fix_of_entry
from server.values import HubId, format_count, format_size, is_gguf

if TYPE_CHECKING:
    from gpu.device import DeviceChoice
    from gpu.draft_model import DraftRunner
    from gpu.encoder import EncoderRunner
    from gpu.memory_plan import MemoryPlan
    from gpu.parallel.runner import ParallelRunner
    from gpu.runner import ModelRunner

LOCAL_KV_SHARE = 0.25  # of what a model's weights leave of the bound of all local models
ROWS_IN_8_BITS = "rows in 8 bits"  # doctor --quality: a GGUF file's blocks as stored
KV_IN_8_BITS = "keys and values in 8 bits"
GPU_FILES = ("/dev/nvidiactl", "/dev/kfd")  # one of them is there where torch may find a GPU
DEMO_DIRECTORY = Path(__file__).parent.parent / "gpu" / "demo" / "model"
DEMO_NAME = "steploop-demo"


# Which model.


def model_path(config: ServerConfig, fetches: bool = True) -> Path:
    """The directory or GGUF file to serve.

    Args:
        fetches: download a hub's model that is not cached; False: that is an error.

    Raises:
        StartupError: see fetch and cached in server/commands/hub.py.
    """
    if isinstance(config.model, HubId):
        if not fetches:
            return cached(environment_hub(), config.model)
        with progress(_progress_stream(), f"fetching {config.model}", True, MIN_FETCHED_BYTES) as report_bytes:
            return fetch(environment_hub(), config.model, report_bytes)
    return config.model or DEMO_DIRECTORY


def served_name(config: ServerConfig) -> str:
    if config.served_model_name is not None:
        return config.served_model_name
    match config.model:
        case None:
            return DEMO_NAME
        case HubId(repo=repo):
            return repo
        case path:
            return path.stem if is_gguf(path) else path.resolve().name


def _read_model(config: ServerConfig, path: Path) -> tuple[ModelFiles, ModelConfig | EncoderConfig]:
    files = None
    if _kept:
        with suppress(OSError):  # what is missing is told by reading it
            files = _kept.get(_kept_as(config, path))
    if files is None:
        given = config.chat_template, config.allow_special_in_content, config.pooling
        files = read_model_files(path, config.max_model_len, *given)
    if is_encoder(files.config):
        return files, encoder_of(files.config)
    return files, parse_config(path, files.config, config.max_model_len)


MOST_KEPT = 8  # models
_kept: dict[tuple[object, ...], ModelFiles] = {}  # for processes that are forked from this one; the last used last


def share_code_pages() -> None:
    """In a process that others are forked from."""
    from gpu import device

    device.shares_code_pages = True


def keep_files(config: ServerConfig) -> None:
    """Read a model's tokenizer, template and vocabulary, so that a process that is forked later finds them.

    Weights are not read.

    Raises:
        StartupError, OSError: a file is missing or broken.
    """
    path = model_path(config, fetches=False)
    key = _kept_as(config, path)
    files = _kept.pop(key, None)
    _kept[key] = _with_compiler(_read_model(config, path)[0]) if files is None else files
    for old in [one for one in _kept if one[0] == path and one != key] + list(_kept)[:-MOST_KEPT]:
        _kept.pop(old, None)


def _with_compiler(files: ModelFiles) -> ModelFiles:
    return replace(files, compiler=files.compiler or compiler_of(files.tokenizer, files.eos_ids, GuardedCompiler))


def _kept_as(config: ServerConfig, path: Path) -> tuple[object, ...]:
    template = config.chat_template
    given = config.max_model_len, template, config.allow_special_in_content, config.pooling
    return path, given, stamps_of(path), template and template.stat().st_mtime_ns


# Loading.


def engine_loader(config: ServerConfig) -> LoadEngine:
    """The function that the engine thread runs first."""

    def load(
        inbox: Inbox, deliver: Callable[[StepDelivery], None], report_stage: Callable[[str], None]
    ) -> LoadedEngine:
        try:
            report_stage("finding the model's files")
            path = model_path(config)
            with _reading_ahead(config, path) as memory:
                return _load(config, path, memory, inbox, deliver, report_stage)
        except Exception as error:
            refused = as_memory_error(error)
            if refused is None:
                raise
            raise refused from error

    return load


def _reading_ahead(config: ServerConfig, path: Path) -> AbstractContextManager[mmap | None]:
    """Of a GGUF file whose blocks stay as they are: memory for them, while torch is imported."""
    from gpu.host_memory import reading_ahead

    if not (is_gguf(path) and path.is_file()):
        return reading_ahead(None, gets_memory=False)
    has_gpu = config.device == "auto" and any(map(os.path.exists, GPU_FILES))
    is_alone = config.draft is None and config.quantize is None and config.tensor_parallel == 1
    return reading_ahead(path, gets_memory=is_alone and not has_gpu and config.device != "cuda")


def _load(
    config: ServerConfig,
    path: Path,
    memory: mmap | None,
    inbox: Inbox,
    deliver: Callable[[StepDelivery], None],
    report_stage: Callable[[str], None],
) -> LoadedEngine:
    """
    Args:
        memory: that weights may take first.
    """
    report_stage("reading the model's files")
    files, model = _read_model(config, path)
    files = _with_compiler(files)  # before torch and weights, which use the memory that it frees
    if config.takes_adapters and isinstance(model, EncoderConfig):
        cause, fix = "LoRA adapters are not for encoders", "leave --lora and --lora-dir out"
        raise StartupError(cause, fix)
    draft = None if config.draft is None else _read_draft(config, files, model)
    report_stage("importing torch")
    check_address_space()
    from gpu import cache_files
    from gpu.device import drop_code_pages, huge_pages, trim_heap
    from gpu.parallel.runner import ParallelRunner
    from gpu.runner import ModelRunner

    cache_files.uses_kept_code = True
    if memory is not None:
        huge_pages.begin_with(memory)
    engine = config.to_engine_config()
    draft_model: DraftModel | None = None
    if draft is not None and isinstance(model, ModelConfig):  # before the other, so that its memory is taken
        report_stage("loading the draft model")
        draft_model = _load_draft(draft, model, engine)
    report_stage("loading weights")
    runner = _load_runner(files, model, engine)
    if isinstance(runner, ModelRunner) and draft_model is None:
        draft_model = runner.drafts
    scheduler = Scheduler(
        runner.limits,
        files.eos_ids,
        seeds=lambda: random.SystemRandom().getrandbits(64),
        has_prefix_cache=engine.has_prefix_cache and not isinstance(model, EncoderConfig),
        inter_token_target=engine.inter_token_target,
        forces_tokens=engine.forced_tokens == "on",
        speculates=engine.speculation == "auto",
        draft_model=draft_model,
        stored=() if runner.offload is None else runner.offload.stored,
    )
    facts = _facts(config, files, model, runner, has_mtp=draft_model is not None and draft_model.name == "mtp")
    check = runner.followers.check if isinstance(runner, ParallelRunner) else None
    idle_work = None if isinstance(runner, ParallelRunner) else runner.idle_work
    computing: Runner[Any] = runner
    loaded = Engine(scheduler, computing, time.monotonic, inbox, deliver, runner.offload, check, idle_work)
    read_adapter = runner.load_adapter if config.takes_adapters and isinstance(runner, ModelRunner) else None
    adapters: tuple[tuple[str, str, Adapter], ...] = ()
    if read_adapter is not None and config.loras:
        report_stage("loading adapters")
        adapters = tuple((one.name, one.path.resolve().name, read_adapter(one.path)) for one in config.loras)
    huge_pages.release_rest()
    trim_heap()  # and what only starting needed of libraries
    drop_code_pages()
    return LoadedEngine(loaded, files, facts, scheduler.stats(), adapters, read_adapter)


def _facts(
    config: ServerConfig,
    files: ModelFiles,
    model: ModelConfig | EncoderConfig,
    runner: "ModelRunner | ParallelRunner | EncoderRunner",
    has_mtp: bool,
) -> EngineFacts:
    from gpu.checkpoint import sampled_digest
    from gpu.device import arithmetic_of

    memory, engine = runner.memory, config.to_engine_config()
    packing = None if isinstance(model, EncoderConfig) else model.packing
    return EngineFacts(
        model_name=served_name(config),
        is_demonstration=config.model is None,
        num_parameters=memory.num_parameters,
        dtype=memory.device.dtype_name,
        device=str(memory.device.device),
        device_reason=_shown_device(runner),
        kv_size_bytes=memory.kv_bytes,
        context_origin=config.context_origin,
        limits=runner.limits,
        tasks=tasks_of(files.pooling),
        model_digest=sampled_digest(files.path, packing),
        settings=(arithmetic_of(memory.device.device), *(getattr(engine, name) for name in CHANGE_TOKENS)),
        weights_bytes=memory.weights_bytes,
        quantization=_quantization_of(model, config, memory.device),
        has_mtp=has_mtp,
    )


def _load_runner(
    files: ModelFiles, model: ModelConfig | EncoderConfig, engine: EngineConfig
) -> "ModelRunner | ParallelRunner | EncoderRunner":
    from gpu.encoder import load_encoder
    from gpu.loading import load_runner
    from gpu.parallel.runner import load_parallel_runner

    with (
        progress(_progress_stream(), "loading weights", True, MIN_LOADED_BYTES) as report_bytes,
        progress(_progress_stream(), "capturing CUDA graphs") as report_graphs,
    ):
        if isinstance(model, EncoderConfig):
            return load_encoder(files.path, model, engine, report_bytes)
        if engine.tensor_parallel == 1:
            return load_runner(files.path, model, engine, report_bytes, report_graphs)
        return load_parallel_runner(files.path, model, engine, report_bytes)


def _read_draft(
    config: ServerConfig, files: ModelFiles, model: ModelConfig | EncoderConfig, fetches: bool = True
) -> tuple[ModelFiles, ModelConfig]:
    """Raises StartupError: it is missing or not supported, or does not go with the model."""
    if isinstance(model, EncoderConfig):
        raise StartupError(f"--draft, and {served_name(config)} generates no text", "leave --draft out")
    path = model_path(replace(config, model=config.draft), fetches)
    draft = read_model_files(path, None, None, config.allow_special_in_content)
    _check_vocabulary(files.tokenizer, draft.tokenizer, (served_name(config), str(config.draft)))
    parsed = parse_config(path, draft.config, None)
    if parsed.recurrence is not None:
        fix = "--draft with a model of another family"
        raise StartupError("--draft: the draft model has recurrent layers, which is not supported", fix)
    return draft, parsed


def _check_vocabulary(target: Tokenizer, draft: Tokenizer, names: tuple[str, str]) -> None:
    """
    Args:
        names: of both.

    Raises:
        StartupError: a token is not the same text in both.
    """
    other = f"--draft {names[1]} has a different vocabulary than {names[0]}"
    fix, sizes = "--draft with a smaller model of the same family", (target.vocab_size, draft.vocab_size)
    for token_id in range(min(sizes)):
        texts = target.bytes_of(token_id), draft.bytes_of(token_id)
        if texts[0] != texts[1]:
            raise StartupError(f"{other}: token {token_id} is {texts[1]!r}, not {texts[0]!r}", fix)
    if sizes[0] != sizes[1]:
        raise StartupError(f"{other}: {sizes[1]:,} tokens, not {sizes[0]:,}", fix)


def _draft_bytes(config: ServerConfig, model: ModelConfig, engine: EngineConfig) -> int:
    """What the draft model needs; 0: there is none."""
    from gpu.draft_model import draft_settings
    from gpu.memory_plan import estimate

    if config.draft is None:
        return 0
    path = model_path(replace(config, model=config.draft), fetches=False)
    draft = parse_config(path, read_model_config(path))
    return estimate(path, draft, draft_settings(engine, model, draft)).total_bytes


def _load_draft(read: tuple[ModelFiles, ModelConfig], model: ModelConfig, engine: EngineConfig) -> "DraftRunner":
    from gpu.draft_model import DraftRunner, draft_settings
    from gpu.loading import load_runner

    draft, parsed = read
    with progress(_progress_stream(), "loading the draft model", True, MIN_LOADED_BYTES) as report_bytes:
        runner = load_runner(draft.path, parsed, draft_settings(engine, model, parsed), report_bytes)
    return DraftRunner(runner, model.vocab_size)


def _progress_stream() -> TextIO:
    """Where progress is shown: a server's log, unless stderr is a terminal."""
    is_logged = any(isinstance(handler, LogHandler) for handler in logging.getLogger().handlers)
    if sys.stderr.isatty() or not is_logged:
        return sys.stderr
    return cast(TextIO, LoggedLines(logging.getLogger(__name__)))


def local_plan(config: ServerConfig, bounds: Mapping[str, int]) -> Plan:
    """What a model's own process needs, with KV for several models to stay beside one another.

    Args:
        bounds: bytes for all models together, by device; of others, what is free.

    Raises:
        StartupError: the model is missing or not supported, or it does not fit.
    """
    from gpu.checkpoint import open_checkpoint
    from gpu.cpu_kernels.support import choose_for
    from gpu.device import free_memory_bytes
    from gpu.memory_plan import plan_checkpoint
    from gpu.weights import check_checkpoint

    path, engine = model_path(config), config.to_engine_config()
    fields = read_model_config(path)
    check_tokenizer(path)
    if is_encoder(fields):
        from gpu.encoder import plan_encoder

        encoder = plan_encoder(path, encoder_of(fields), engine)
        device_type = encoder.device.device.type
        return Plan(device_type, encoder.needed_bytes, 0, encoder.max_model_len, encoder.free_bytes)
    model = parse_config(path, fields, config.max_model_len)
    device, checkpoint = choose_for(model, engine), open_checkpoint(path, model.packing)
    model = check_checkpoint(checkpoint, model)
    free_bytes = free_memory_bytes(device.device)
    bound = bounds.get(device.device.type, free_bytes)
    try:
        plan = plan_checkpoint(model, engine, device, checkpoint, bound)
    except StartupError as error:
        if bound >= free_bytes:
            raise
        cause = f"{error.cause} All models have {format_size(bound)} together."
        raise StartupError(cause, f"raise --models-memory, or {error.fix}", error.exit_code) from error
    kv_bytes = plan.kv_bytes
    if engine.kv_memory_bytes is None:
        kv_bytes = min(kv_bytes, max(plan.least_kv_bytes, round(plan.kv_room_bytes * LOCAL_KV_SHARE)))
    needed_bytes = plan.beside_kv_bytes + max(kv_bytes, plan.loading_bytes) + _draft_bytes(config, model, engine)
    return Plan(device.device.type, needed_bytes, kv_bytes, plan.max_model_len, free_bytes)


# What `doctor` and `serve --estimate` tell.


@dataclass(frozen=True, slots=True)
class Fact:
    """One line of the doctor's report. With an error, `serve` would refuse to start."""

    name: str
    value: str
    error: StartupError | None = None


def machine_facts(config: ServerConfig) -> tuple[Fact, ...]:
    """Device, threads and memory, whose bandwidth is measured (0.1 s); those of the CPU if the device is missing."""
    from gpu.cpu_kernels.support import choose_for
    from gpu.device import apply_threads, free_memory_bytes, measure_bandwidth, num_physical_cores, total_memory_bytes
    from gpu.tune import measured_here

    engine, model = config.to_engine_config(), None
    with suppress(StartupError):  # the model is not here, or its configuration is not supported
        path = model_path(config, fetches=False)
        model = parse_config(path, read_model_config(path), config.max_model_len)
    try:
        choice = choose_for(model, engine)
        device = [
            Fact("device", f"{choice.device}: {choice.device_reason}"),
            Fact("number format", f"{choice.dtype_name}: {choice.dtype_reason}"),
        ]
    except DeviceUnavailable as error:
        choice = choose_for(model, replace(engine, device="cpu"))
        device = [Fact("device", "none", error)]
    apply_threads(choice)
    measured = measured_here(choice, model)
    total, free = total_memory_bytes(choice.device), free_memory_bytes(choice.device)
    return (
        *device,
        Fact("cores", f"{num_physical_cores()} physical, {os.cpu_count()} logical"),
        Fact("compute threads", f"{choice.threads}: {choice.threads_reason}"),
        *(Fact("  measured", f"{found}: {shape}") for shape, found in measured.items()),
        Fact("memory", f"{format_size(total)}, {format_size(free)} free"),
        Fact("memory bandwidth", f"{measure_bandwidth(choice.device) / 1e9:.1f} GB/s read"),
    )


def plan_facts(config: ServerConfig) -> tuple[Fact, ...]:
    """How the model would divide the device's memory, and what would compute it. Reads file headers only.

    Raises:
        StartupError: the model is missing or not supported, or it does not fit.
    """
    if not config.has_engine:
        return _upstream_facts(config)
    from gpu.checkpoint import open_checkpoint
    from gpu.memory_plan import estimate, mtp_bytes
    from gpu.parallel.ranks import part_of
    from gpu.parallel.runner import estimate_ranks
    from gpu.tune import describe_attention, describe_graphs, describe_matmuls, why_not_deterministic
    from gpu.weights import heads_left_out

    files, model = _read_model(config, model_path(config, fetches=False))
    engine = config.to_engine_config()
    if isinstance(model, EncoderConfig):
        return (*_encoder_facts(config, files, model), *_upstream_facts(config))
    plan = (estimate if engine.tensor_parallel == 1 else estimate_ranks)(files.path, model, engine)
    if config.draft is not None:
        _read_draft(config, files, model, fetches=False)
        draft_bytes = _draft_bytes(config, model, engine)
        plan = replace(plan, free_bytes=plan.free_bytes - draft_bytes).with_graphs(None)
    checkpoint = open_checkpoint(files.path, model.packing)
    head_bytes = mtp_bytes(plan.model, engine, plan.device, checkpoint)
    part = part_of(model, engine.tensor_parallel)
    demonstration = " (demonstration model)" if config.model is None else ""
    scheme = _quantization_of(model, config, plan.device)
    layers = f", layers {scheme}" if scheme else ""
    num_full = plan.kv_tokens / plan.max_model_len
    kv = f"{format_size(plan.kv_bytes)}: {plan.kv_tokens:,} tokens = {num_full:.1f} x {plan.max_model_len:,}"
    kv += "" if engine.kv_dtype == "auto" else f", in {engine.kv_dtype}"
    if plan.num_window_blocks:
        kv += f", {plan.num_window_blocks * BLOCK_SIZE:,} in the layers with windows"
    offload = f"{format_size(plan.offload_bytes)} for prompts that the KV cache evicts"
    graphs = describe_graphs(part, plan.device, engine)
    facts = {
        "model": f"{served_name(config)}, {model.architecture}{demonstration}",
        "parameters": f"{format_count(plan.num_parameters)}, {plan.device.dtype_name}{layers}",
        "device": f"{plan.device.device}: {plan.device.device_reason}",
        "context": f"{plan.max_model_len:,} tokens: {config.context_origin}",
        "tools": _shown_tools(files, config.tool_format),
        "formats": _shown_formats(files.path, part, plan) if files.path.is_file() else None,
        "thoughts": _shown_thoughts(files),
        "tasks": _shown_tasks(files.pooling),
        "weights": format_size(plan.weights_bytes),
        "adapters": _shown_adapters(config, plan) if config.takes_adapters else None,
        "activations": f"{format_size(plan.activation_bytes)} at most",
        "KV cache": kv,
        "host memory": offload if plan.offload_bytes else None,
        "KV files": engine.kv_offload_dir and f"in {engine.kv_offload_dir}: evicted prompts, for the next start",
        "attention": describe_attention(part, plan.device),
        "matmuls": describe_matmuls(part, plan.device, engine),
        "deterministic": (why_not_deterministic(part, engine, plan.device) or "guaranteed, and checked at start")
        if engine.deterministic
        else None,
        "states": _shown_states(plan) if part.recurrence is not None else None,
        "drafts": _shown_drafts(config, plan, head_bytes, heads_left_out(checkpoint, plan.model, head_bytes > 0)),
        "draft model": None if config.draft is None else f"{format_size(draft_bytes)} with its KV cache",
        "CUDA graphs": graphs + (f": {format_size(plan.graph_bytes)}" if plan.graph_bytes else ""),
        "in all": f"{format_size(plan.total_bytes)} of {format_size(plan.free_bytes)} free",
    }
    return (*(Fact(name, value) for name, value in facts.items() if value is not None), *_upstream_facts(config))


def _encoder_facts(config: ServerConfig, files: ModelFiles, model: EncoderConfig) -> tuple[Fact, ...]:
    from gpu.encoder import plan_encoder

    plan = plan_encoder(files.path, model, config.to_engine_config())
    facts = {
        "model": f"{served_name(config)}, an encoder like {model.family}",
        "parameters": f"{format_count(plan.num_parameters)}, {plan.device.dtype_name}",
        "device": f"{plan.device.device}: {plan.device.device_reason}",
        "context": f"{plan.max_model_len:,} tokens: {config.context_origin}",
        "tasks": _shown_tasks(files.pooling),
        "weights": format_size(plan.weights_bytes),
        "activations": f"{format_size(plan.activation_bytes)} at most",
        "in all": f"{format_size(plan.needed_bytes)} of {format_size(plan.free_bytes)} free",
    }
    return tuple(Fact(name, value) for name, value in facts.items() if value is not None)


def _shown_tasks(style: PoolingStyle | None) -> str | None:
    """None: it generates alone, as most do."""
    if style is None:
        return None
    if style.scores is not None:
        how = "the checkpoint's head" if style.scores == "head" else "the tokens for yes and no"
        return f"score: pairs of texts, by {how}"
    norm = ", normalized to length 1" if style.is_normalized else ""
    return f"{', '.join(style.tasks)}: {style.num_dims} numbers, {style.pooling.kind} pooling{norm}"


def _shown_adapters(config: ServerConfig, plan: "MemoryPlan") -> str:
    named = ", ".join(map(str, config.loras))
    size = format_size(plan.adapters_bytes)
    room = f"{size} for {config.max_loras} of rank {config.max_lora_rank} and one that replaces another"
    by_request = f"loaded on request from {config.lora_dir}" if config.lora_dir is not None else "none on request"
    return f"{room}; {named + ' at start, ' if named else ''}{by_request}"


def _upstream_facts(config: ServerConfig) -> tuple[Fact, ...]:
    own = iter(config.own_models)
    return tuple(
        Fact(
            one.name,
            f"at {', '.join(at.url for at in one.upstreams)}" if one.path is None else _shown_plan(next(own), config),
        )
        for one in config.models
    )


def _shown_plan(process: ServerConfig, config: ServerConfig) -> str:
    try:
        bound = config.models_memory_bytes
        plan = local_plan(process, {} if bound is None else dict.fromkeys(DEVICES, bound))
    except StartupError as error:
        return f"{error.cause} Fix: {fix_of_entry(error.fix)}"
    kv = f"{format_size(plan.kv_bytes)} of it KV, contexts of {plan.max_model_len:,} tokens"
    return f"when asked for, {format_size(plan.needed_bytes)} on {plan.device}, {kv}"


def _shown_states(plan: "MemoryPlan") -> str:
    size, most, num_kept = format_size(plan.state_bytes), plan.engine.max_sequences, plan.num_kept_states
    return f"{size} for recurrent layers: two for each of --max-sequences {most}, {num_kept} stored for later prompts"


def _quantization_of(model: ModelConfig | EncoderConfig, config: ServerConfig, device: "DeviceChoice") -> str | None:
    """Of the layers' matrices; None: they are floats."""
    from gpu.weights import prequantized_scheme

    if isinstance(model, EncoderConfig):
        return None
    return prequantized_scheme(model, config.quantize, device.device) or config.quantize


def _shown_device(runner: "ModelRunner | ParallelRunner | EncoderRunner") -> str:
    from gpu.runner import ModelRunner

    device = runner.memory.device
    if device.device.type != "cpu" or not isinstance(runner, ModelRunner):
        return device.device_reason
    return f"{device.device_reason}; {runner.measured}"


def _shown_drafts(config: ServerConfig, plan: "MemoryPlan", head_bytes: int, left_out: Sequence[str]) -> str:
    """left_out: layers that predict later tokens."""
    can_verify = plan.device.device.type == "cpu" and config.tensor_parallel == 1
    said = drafts_of(config, head_bytes > 0, can_verify) + (f" ({format_size(head_bytes)})" if head_bytes else "")
    is_told = left_out and can_verify and config.speculation == "auto"
    return said + (f"; heads left out: {', '.join(left_out)}" if is_told else "")


def _shown_formats(file: Path, model: ModelConfig, plan: "MemoryPlan") -> str:
    from gpu.blocks import why_not_in_place
    from gpu.checkpoint import open_checkpoint
    from gpu.weights import describe_blocks

    rows = "in 8 bits" if plan.device.device.type == "cpu" else f"as {plan.device.dtype_name}"
    return describe_blocks(open_checkpoint(file), why_not_in_place(model, plan.engine, plan.device), rows)


def _shown_tools(files: ModelFiles, tool_format: str) -> str:
    style = tool_style_of(files.chat_template, tool_format)
    if style is None:
        return "none: the chat template has no known tool call format"
    origin = "found in the chat template" if tool_format == ANY_FORMAT else "set by --tool-format"
    return f"tool calls in the format {style.format}, {origin}"


def _shown_thoughts(files: ModelFiles) -> str:
    style = thought_style_of(files.chat_template)
    if style is None:
        return "none: the chat template has no known reasoning format"
    switch = f", turned on and off by {style.switch}" if style.switch else ""
    effort = ", with reasoning_effort" if style.takes_effort else ""
    return f"in the form {style.name}, found in the chat template{switch}{effort}"


def measure_anew(config: ServerConfig, report: Callable[[str], None]) -> None:
    """Discard the model's measurements on this machine, then load it, which measures again and stores the result.

    Raises:
        StartupError: the model is missing or not supported, or it does not fit.
    """
    from gpu.cpu_kernels.support import choose_for
    from gpu.loading import load_runner
    from gpu.tune import forget_measured

    path, engine = model_path(config, fetches=False), replace(config.to_engine_config(), tensor_parallel=1)
    model = parse_config(path, read_model_config(path), config.max_model_len)
    choice = choose_for(model, engine)
    if choice.device.type == "cpu":
        forget_measured(choice, model)
    report("measuring threads and kernels")
    runner = load_runner(path, model, engine, lambda done, total: None)
    for _ in runner.idle_work():  # repeats measurements that are not settled yet
        pass
    report(f"measured: {runner.measured}")


def quality_facts(config: ServerConfig, report: Callable[[str], None]) -> Iterator[Fact]:
    """How well the model predicts the test text: unquantized, with --kv-dtype, with --quantize's scheme or with each.

    A GGUF file's numbers are the reference, multiplied in the serving format; on a CPU its blocks are then, by rows in
    8 bits.

    Raises:
        StartupError: the model is missing or not supported, or it does not fit.
    """
    from gpu.cpu_kernels.support import choose_for
    from gpu.loading import load_runner
    from gpu.quality import HELD_TEXT, Predictions, held_tokens, predict

    files, model = _read_model(config, model_path(config, fetches=False))
    context = config.max_model_len or model.max_position
    if isinstance(model, EncoderConfig):
        raise StartupError(f"{files.path} is an encoder: it generates no text.", "doctor without --quality")
    tokens = held_tokens(files.tokenizer.encode(HELD_TEXT.read_text(encoding="utf-8")), context)
    if len(tokens) < 2:
        raise StartupError(f"A context of {context} tokens leaves nothing to predict", "--max-model-len 2048")
    engine = replace(config.to_engine_config(), max_model_len=len(tokens) + 1, max_sequences=1, tensor_parallel=1)
    engine = replace(engine, has_window_blocks=False)
    yield Fact("test text", f"{len(tokens):,} tokens of prose, speech and code")
    plain: Predictions | None = None
    schemes = (config.quantize,) if config.quantize is not None else QUANTIZE_SCHEMES
    is_on_cpu = choose_for(model, engine).device.type == "cpu"
    in_8_bits: tuple[str, ...] = (ROWS_IN_8_BITS,) if is_gguf(files.path) and is_on_cpu else ()
    in_8_bits += () if config.kv_dtype == "auto" else (KV_IN_8_BITS,)
    for scheme in (None, *in_8_bits, *schemes):
        report(f"measuring {scheme or 'the model as it is'} over {len(tokens):,} tokens")
        is_quantized = scheme in schemes
        asked = replace(engine, quantize=scheme if is_quantized else None)
        rows = {None: "bf16", KV_IN_8_BITS: "bf16", ROWS_IN_8_BITS: "int8"}.get(scheme, engine.activations)
        asked = replace(asked, activations=rows, kv_dtype=engine.kv_dtype if scheme == KV_IN_8_BITS else "auto")
        try:
            runner = load_runner(files.path, model, asked, lambda done, total: None)
        except NotEnoughMemory as error:
            what = f"with {scheme}" if plain else "whose numbers as floats all else is compared with"
            cause, fix = f"The model, {what}: {error.cause}", "measure where more memory is free"
            raise NotEnoughMemory(cause, fix) from error
        made, memory = predict(runner, tokens), runner.memory
        del runner  # before the next is loaded
        weights = f"weights {format_size(memory.weights_bytes)}"
        if plain is None:
            plain = made
            yield Fact(memory.device.dtype_name, f"perplexity {made.perplexity:.3f}, {weights}")
        else:
            change, same = made.perplexity / plain.perplexity, made.agreement(plain)
            cost = f"perplexity {made.perplexity:.3f} (x {change:.4f}), same greedy token {same:.1%}"
            yield Fact(scheme or "", f"{cost}, {weights}")


# What `models` tells.


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """One model; None where its files do not say.

    Args:
        name: what --model takes.
        size_bytes: of the stored tensors.
        context: tokens.
        dtype: of most tensors in the file.
        needed_bytes: to serve one sequence of the whole context.
        reason: why it does not fit, or cannot be served at all.
    """

    name: str
    path: Path
    size_bytes: int | None = None
    num_parameters: int | None = None
    context: int | None = None
    dtype: str | None = None
    needed_bytes: int | None = None
    fits: bool = False
    reason: str | None = None


def describe_models(found: Sequence[tuple[str, Path]], engine: EngineConfig) -> list[ModelFacts]:
    """The facts of models, given by name and path. Reads file headers only.

    Raises:
        DeviceUnavailable: the device or dtype asked for.
    """
    from gpu.checkpoint import open_checkpoint
    from gpu.cpu_kernels.support import choose_for
    from gpu.device import free_memory_bytes
    from gpu.encoder import plan_encoder
    from gpu.memory_plan import memory_needed
    from gpu.weights import check_checkpoint

    free_bytes = free_memory_bytes(choose_for(None, engine).device)

    def describe(name: str, path: Path) -> ModelFacts:
        try:
            fields = read_model_config(path)
            if is_encoder(fields):
                plan = plan_encoder(path, encoder_of(fields), engine)
                checkpoint, needed_bytes = plan.checkpoint, plan.needed_bytes
                num_parameters, context = plan.num_parameters, plan.max_model_len
            else:
                model = parse_config(path, fields)
                checkpoint = open_checkpoint(path, model.packing)
                model = check_checkpoint(checkpoint, model)
                needed_bytes = memory_needed(model, engine, choose_for(model, engine), checkpoint)
                num_parameters, context = model.num_parameters, model.max_position
            check_tokenizer(path)
        except StartupError as error:
            return ModelFacts(name, path, reason=error.cause)
        fits = needed_bytes <= free_bytes
        return ModelFacts(
            name,
            path,
            size_bytes=checkpoint.size_bytes,
            num_parameters=num_parameters,
            context=context,
            dtype=checkpoint.main_format,
            needed_bytes=needed_bytes,
            fits=fits,
            reason=None if fits else f"{format_size(free_bytes)} free",
        )

    return [describe(name, path) for name, path in found]
