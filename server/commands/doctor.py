"""`steploop doctor`, and `serve --estimate`: what is installed, what the machine has, what would be served.

Each fact that would keep `serve` from starting bears the error. gpu is asked for its own: headers alone are read, and
weights are loaded only where --measure or --quality asks for it. Thread: main.
"""

import argparse
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, TextIO

from core.config import QUANTIZE_SCHEMES, EngineConfig, ModelConfig
from core.errors import DeviceUnavailable, ExitCode, StartupError
from server.commands.console import new_console
from server.commands.hub import NotFetched
from server.commands.versions import LISTED, NOT_EVERYWHERE, VersionOf, check_floors, installed_version, versions
from server.config import ServerConfig
from server.engine_loader import model_path, served_name
from server.listening.sockets import Bind, PassedAddress, TcpAddress, open_binds
from server.model_files import ModelFiles, parse_config, read_model_config, read_model_files
from server.values import format_count, format_size

if TYPE_CHECKING:
    from gpu.memory_plan import MemoryPlan

TRIAL_BACKLOG = 1


@dataclass(frozen=True, slots=True)
class Fact:
    """One line. An error is a reason why `serve` would refuse to start."""

    name: str
    value: str
    error: StartupError | None = None


@dataclass(frozen=True, slots=True)
class Section:
    title: str
    facts: tuple[Fact, ...]


def run(arguments: argparse.Namespace, config: ServerConfig) -> int:
    if arguments.measure:
        measure_anew(config)
    sections = [
        version_section(),
        machine_section(config),
        serving_section(lambda: plan_facts(config), config.all_binds()),
    ]
    if arguments.quality:
        sections.append(quality_section(lambda: quality_facts(config)))
    print_report(sections, sys.stdout)
    return exit_code(sections)


def print_estimate(config: ServerConfig) -> ExitCode:
    """The memory plan as plain lines."""
    for fact in plan_facts(config):
        print(f"{fact.name:<13}{fact.value}")
    return ExitCode.OK


def version_section(version_of: VersionOf = installed_version) -> Section:
    """What is installed; a missing dependency, or one below its security floor, is an error."""
    facts = []
    for name, version in versions(version_of):
        is_missing = name in LISTED and name not in NOT_EVERYWHERE and version == "missing"
        missing = StartupError(f"{name} is not installed", f"{sys.executable} -m pip install {name}", ExitCode.VERSION)
        facts.append(Fact(name, version, missing if is_missing else None))

    def check() -> str:
        check_floors(version_of)
        return "held"

    return Section("Versions", (*facts, attempt("security floors", check)))


def machine_section(config: ServerConfig) -> Section:
    """Device, threads and memory, whose bandwidth is measured (0.1 s); the CPU's where the device is not there."""
    from gpu.device import (
        apply_threads,
        choose_device,
        free_memory_bytes,
        measure_bandwidth,
        num_physical_cores,
        total_memory_bytes,
    )
    from gpu.tune import measured_here

    engine = config.to_engine_config()
    try:
        choice = choose_device(engine)
        device = [
            Fact("device", f"{choice.device}: {choice.device_reason}"),
            Fact("number format", f"{choice.dtype_name}: {choice.dtype_reason}"),
        ]
    except DeviceUnavailable as error:
        choice = choose_device(replace(engine, device="cpu"))
        device = [Fact("device", "none", error)]
    apply_threads(choice)
    measured = measured_here(choice, _model_config(config))
    total, free = total_memory_bytes(choice.device), free_memory_bytes(choice.device)
    facts = [
        *device,
        Fact("cores", f"{num_physical_cores()} physical, {os.cpu_count()} logical"),
        Fact("compute threads", f"{choice.threads}: {choice.threads_reason}"),
        *(Fact("  measured", f"{found}: {shape}") for shape, found in measured.items()),
        Fact("memory", f"{format_size(total)}, {format_size(free)} free"),
        Fact("memory bandwidth", f"{measure_bandwidth(choice.device) / 1e9:.1f} GB/s read"),
    ]
    return Section("Machine", tuple(facts))


def _model_config(config: ServerConfig) -> ModelConfig | None:
    """None: the model is not here, or not understood."""
    try:
        path = model_path(config, fetches=False)
        return parse_config(path, read_model_config(path))
    except StartupError:
        return None


def plan_facts(config: ServerConfig) -> tuple[Fact, ...]:
    """How the device's memory would be divided, and what would compute; from headers alone.

    Raises:
        StartupError: the model is missing or not understood, or it does not fit.
    """
    from gpu.memory_plan import estimate
    from gpu.parallel.ranks import part_of
    from gpu.parallel.runner import estimate_ranks
    from gpu.tune import describe_attention, describe_graphs, describe_matmuls
    from gpu.weights import prequantized_scheme

    files, model = _model_files(config)
    engine = config.to_engine_config()
    plan = (estimate if engine.tensor_parallel == 1 else estimate_ranks)(files.path, model, engine)
    part = part_of(model, engine.tensor_parallel)
    layers = prequantized_scheme(model, config.quantize, plan.device.device) or config.quantize
    graphs = describe_graphs(part, plan.device, engine)
    return (
        Fact(
            "model", f"{served_name(config)}, {model.architecture}{' (demonstration model)' * (config.model is None)}"
        ),
        Fact(
            "parameters",
            f"{format_count(plan.num_parameters)}, {plan.device.dtype_name}{f', layers {layers}' * bool(layers)}",
        ),
        Fact("device", f"{plan.device.device}: {plan.device.device_reason}"),
        Fact("context", f"{plan.max_model_len:,} tokens: {config.context_origin}"),
        *memory_facts(plan, engine),
        Fact("attention", describe_attention(part, plan.device)),
        Fact("matmuls", describe_matmuls(part, plan.device)),
        Fact("CUDA graphs", graphs + (f": {format_size(plan.graph_bytes)}" if plan.graph_bytes else "")),
        Fact("in all", f"{format_size(plan.total_bytes)} of {format_size(plan.free_bytes)} free"),
    )


def memory_facts(plan: "MemoryPlan", engine: EngineConfig) -> Iterable[Fact]:
    num_full = plan.kv_tokens / plan.max_model_len
    kv = f"{format_size(plan.kv_bytes)}: {plan.kv_tokens:,} tokens = {num_full:.1f} x {plan.max_model_len:,}"
    yield Fact("weights", format_size(plan.weights_bytes))
    yield Fact("activations", f"{format_size(plan.activation_bytes)} at most")
    yield Fact("KV cache", kv)
    if plan.offload_bytes:
        yield Fact("host memory", f"{format_size(plan.offload_bytes)} for prompts that the KV cache evicts")
    if engine.kv_offload_dir is not None:
        yield Fact("KV files", f"in {engine.kv_offload_dir}: what host memory holds, for the next start")


def _model_files(config: ServerConfig) -> tuple[ModelFiles, ModelConfig]:
    files = read_model_files(model_path(config, fetches=False), config.max_model_len, config.chat_template)
    return files, parse_config(files.path, files.config)


def measure_anew(config: ServerConfig) -> None:
    """Forget what was measured for the model on this machine, and load it, which measures and keeps that.

    Raises:
        StartupError: the model is missing or not understood, or it does not fit.
    """
    from gpu.device import choose_device
    from gpu.loading import load_runner
    from gpu.tune import forget_measured

    path, engine = model_path(config, fetches=False), replace(config.to_engine_config(), tensor_parallel=1)
    model = parse_config(path, read_model_config(path))
    choice = choose_device(engine)
    if choice.device.type == "cpu":
        forget_measured(choice, model)
    _report("measuring threads and kernels")
    runner = load_runner(path, model, engine, lambda done, total: None)
    for _ in runner.idle_work():  # measures again what is not settled
        pass
    _report(f"measured: {runner.measured}")


def quality_section(find: Callable[[], Sequence[Fact]]) -> Section:
    """What quantizing costs; what cannot be measured says why."""
    try:
        return Section("Quality", tuple(find()))
    except StartupError as error:
        return Section("Quality", (Fact("quality", "not measured", error),))


def quality_facts(config: ServerConfig) -> list[Fact]:
    """How well the model predicts the held text: as it is, then quantized as asked, or in every way.

    Raises:
        StartupError: the model is missing or not understood, or it does not fit.
    """
    from gpu.loading import load_runner
    from gpu.quality import HELD_TEXT, Predictions, held_tokens, predict

    files, model = _model_files(config)
    context = config.max_model_len or model.max_position
    tokens = held_tokens(files.tokenizer.encode(HELD_TEXT.read_text(encoding="utf-8")), context)
    if len(tokens) < 2:
        raise StartupError(f"A context of {context} tokens leaves nothing to predict", "--max-model-len 2048")
    engine = replace(config.to_engine_config(), max_model_len=len(tokens) + 1, max_sequences=1, tensor_parallel=1)
    plain: Predictions | None = None
    facts = [Fact("held text", f"{len(tokens):,} tokens of prose, speech and code")]
    for scheme in (None, config.quantize) if config.quantize is not None else (None, *QUANTIZE_SCHEMES):
        _report(f"measuring {scheme or 'the model as it is'} over {len(tokens):,} tokens")
        runner = load_runner(files.path, model, replace(engine, quantize=scheme), lambda done, total: None)
        made, memory = predict(runner, tokens), runner.memory
        del runner  # before the next is loaded
        weights = f"weights {format_size(memory.weights_bytes)}"
        if plain is None:
            plain = made
            facts.append(Fact(memory.device.dtype_name, f"perplexity {made.perplexity:.3f}, {weights}"))
        else:
            change, same = made.perplexity / plain.perplexity, made.agreement(plain)
            cost = f"perplexity {made.perplexity:.3f} (x {change:.4f}), same greedy token {same:.1%}"
            facts.append(Fact(scheme or "", f"{cost}, {weights}"))
    return facts


def _report(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def serving_section(find: Callable[[], tuple[Fact, ...]], binds: Sequence[Bind]) -> Section:
    """What `serve` would serve, with the same settings.

    Args:
        find: raises StartupError where the model is missing or does not fit, NotFetched where `serve` would fetch it.
    """
    try:
        facts = find()
    except NotFetched as error:
        facts = (Fact("model", error.cause),)
    except StartupError as error:
        facts = (Fact("model", "cannot be served", error),)
    addresses = (attempt("address", partial(try_bind, bind)) for bind in binds)
    return Section("Would be served", (*facts, *addresses))


def try_bind(bind: Bind) -> str:
    """Listen there for a moment.

    Raises:
        StartupError: it cannot be listened on.
    """
    address = bind.address
    if isinstance(address, PassedAddress):
        return f"{address}, as systemd passes it"
    for listening in open_binds([bind], [], TRIAL_BACKLOG):
        listening.close()
    if isinstance(address, TcpAddress) and not address.port:
        return f"{address.host}, on a free port"
    return f"{address} is free"


def attempt(name: str, find: Callable[[], str]) -> Fact:
    """A fact that may turn out to be an error."""
    try:
        return Fact(name, find())
    except StartupError as error:
        return Fact(name, "no", error)


def exit_code(sections: Sequence[Section]) -> int:
    """What `serve` would exit with: the first error's code, or 0."""
    codes = [fact.error.exit_code for section in sections for fact in section.facts if fact.error is not None]
    return codes[0] if codes else ExitCode.OK


def print_report(sections: Sequence[Section], stream: TextIO) -> None:
    """A table a section, then every error with its fix, once where several facts have it, then the verdict."""
    from rich.table import Table
    from rich.text import Text

    console = new_console(stream)
    for section in sections:
        table = Table(title=section.title, title_justify="left", show_header=False, min_width=60)
        table.add_column(style="bold", no_wrap=True)
        table.add_column(overflow="fold")
        for fact in section.facts:
            table.add_row(Text(fact.name), Text(fact.value, style="" if fact.error is None else "red"))
        console.print(table)
    errors = [fact.error for section in sections for fact in section.facts if fact.error is not None]
    for told in dict.fromkeys(f"error: {error.cause}\nfix: {error.fix}" for error in errors):
        console.print(Text(told), soft_wrap=True)
    console.print("serve would refuse to start" if errors else "serve would start")
