"""`steploop doctor`: what is installed, what the machine has, what would be served, and what stands in the way.

Facts come in as they are found (server/cli.py asks gpu for its own); nothing here imports torch. Thread: main.
"""

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TextIO

from core.errors import ExitCode, StartupError
from server.commands.console import new_console
from server.commands.hub_cache import NotFetched
from server.commands.versions import LISTED, NOT_EVERYWHERE, VersionOf, check_floors, installed_version, versions
from server.listening.sockets import Bind, PassedAddress, TcpAddress, open_binds
from server.values import format_count, format_size

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


@dataclass(frozen=True, slots=True)
class MachineFacts:
    """What would compute, and why.

    Args:
        threads: compute threads on a CPU, at most.
        device_error: the device asked for is not there; the device's fields are then those of the CPU.
        measured_threads: of the model's shape, what its steps were found to compute with best; see gpu/measured.py.
        bandwidth_bytes_per_s: read from the device's memory; every decode step reads all weights once.
    """

    device: str
    device_reason: str
    dtype: str
    dtype_reason: str
    threads: int
    threads_reason: str
    num_cores: int
    memory_bytes: int
    free_bytes: int
    bandwidth_bytes_per_s: float
    device_error: StartupError | None = None
    measured_threads: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class PlanFacts:
    """How the device's memory would be divided."""

    model_name: str
    architecture: str
    is_demonstration: bool
    num_parameters: int
    dtype: str
    device: str
    device_reason: str
    weights_bytes: int
    activation_bytes: int
    kv_bytes: int
    num_kv_tokens: int
    max_model_len: int
    context_origin: str
    attention: str  # of rows of one new token: what computes it, and why
    products: str  # with the layers' matrices, likewise; and all that lies between them
    graphs: str  # that steps of decodes are sent by
    total_bytes: int  # on the device
    free_bytes: int
    offload_bytes: int = 0
    offload_dir: str | None = None  # that outlives the process; not opened here
    graph_bytes: int = 0


@dataclass(frozen=True, slots=True)
class QualityFacts:
    """What a model says of the held text, plain or quantised.

    Args:
        scheme: of --quantize; None: the model as it is, which the others are held against.
        agreement: how often the greedy choice is that of the model as it is, from 0 to 1.
    """

    scheme: str | None
    dtype: str
    num_tokens: int
    perplexity: float
    agreement: float
    weights_bytes: int


def quality_section(find: Callable[[], Sequence[QualityFacts]]) -> Section:
    """What quantising costs.

    Args:
        find: the model as it is first; raises StartupError where it cannot be served.
    """
    try:
        plain, *others = find()
    except StartupError as error:
        return Section("Quality", (Fact("quality", "not measured", error),))
    text = Fact("held text", f"{plain.num_tokens:,} tokens of prose, speech and code")
    facts = [Fact(plain.dtype, f"perplexity {plain.perplexity:.3f}, weights {format_size(plain.weights_bytes)}")]
    for found in others:
        change = found.perplexity / plain.perplexity
        facts.append(
            Fact(
                found.scheme or "",
                f"perplexity {found.perplexity:.3f} (x {change:.4f}), same greedy token {found.agreement:.1%}, "
                f"weights {format_size(found.weights_bytes)}",
            )
        )
    return Section("Quality", (text, *facts))


def plan_facts(plan: PlanFacts) -> tuple[Fact, ...]:
    """The memory plan, as `serve --estimate` and `doctor` show it."""
    demonstration = " (demonstration model)" if plan.is_demonstration else ""
    num_full = plan.num_kv_tokens / plan.max_model_len
    kv = f"{format_size(plan.kv_bytes)}: {plan.num_kv_tokens:,} tokens = {num_full:.1f} x {plan.max_model_len:,}"
    offload = []
    if plan.offload_bytes:
        offload.append(Fact("host memory", f"{format_size(plan.offload_bytes)} for KV blocks that give way"))
    if plan.offload_dir is not None:
        offload.append(Fact("KV files", f"in {plan.offload_dir}: what lies in host memory, for the next start"))
    return (
        Fact("model", f"{plan.model_name}, {plan.architecture}{demonstration}"),
        Fact("parameters", f"{format_count(plan.num_parameters)}, {plan.dtype}"),
        Fact("device", f"{plan.device}: {plan.device_reason}"),
        Fact("context", f"{plan.max_model_len:,} tokens: {plan.context_origin}"),
        Fact("weights", format_size(plan.weights_bytes)),
        Fact("activations", f"{format_size(plan.activation_bytes)} at most"),
        Fact("KV cache", kv),
        *offload,
        Fact("attention", plan.attention),
        Fact("matmuls", plan.products),
        Fact("CUDA graphs", plan.graphs + (f": {format_size(plan.graph_bytes)}" if plan.graph_bytes else "")),
        Fact("in all", f"{format_size(plan.total_bytes)} of {format_size(plan.free_bytes)} free"),
    )


def plan_lines(plan: PlanFacts) -> list[str]:
    """The memory plan as plain lines."""
    return [f"{fact.name:<13}{fact.value}" for fact in plan_facts(plan)]


def version_section(version_of: VersionOf = installed_version) -> Section:
    """What is installed; a missing dependency, or one below its security floor, is an error."""
    facts = []
    for name, version in versions(version_of):
        is_missing = name in LISTED and name not in NOT_EVERYWHERE and version == "missing"
        missing = StartupError(f"{name} is not installed", f"{sys.executable} -m pip install {name}", ExitCode.VERSION)
        facts.append(Fact(name, version, missing if is_missing else None))
    return Section("Versions", (*facts, attempt("security floors", lambda: _floors_held(version_of))))


def machine_section(machine: MachineFacts) -> Section:
    """Device, threads and memory."""
    device: tuple[Fact, ...] = (
        Fact("device", f"{machine.device}: {machine.device_reason}"),
        Fact("number format", f"{machine.dtype}: {machine.dtype_reason}"),
    )
    if machine.device_error is not None:
        device = (Fact("device", "none", machine.device_error),)
    bandwidth = f"{machine.bandwidth_bytes_per_s / 1e9:.1f} GB/s read"
    return Section(
        "Machine",
        (
            *device,
            Fact("cores", f"{machine.num_cores} physical, {os.cpu_count()} logical"),
            Fact("compute threads", f"{machine.threads}: {machine.threads_reason}"),
            *(Fact("  measured", f"{threads}: {shape}") for shape, threads in machine.measured_threads),
            Fact("memory", f"{format_size(machine.memory_bytes)}, {format_size(machine.free_bytes)} free"),
            Fact("memory bandwidth", bandwidth),
        ),
    )


def serving_section(find: Callable[[], PlanFacts], binds: Sequence[Bind]) -> Section:
    """What `serve` would serve, with the same settings.

    Args:
        find: raises StartupError where the model is missing or does not fit, NotFetched where `serve` would fetch it.
    """
    try:
        facts = plan_facts(find())
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


def _floors_held(version_of: VersionOf) -> str:
    check_floors(version_of)
    return "held"
