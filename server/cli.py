"""The `steploop` command: what was typed → what runs. With __main__.py the wiring: gpu's facts for doctor and models.

Everything heavy is imported by the command that needs it: --help and --version load no settings, nor torch nor rich.
Thread: main.
"""

import argparse
import logging
import os
import signal
import sys
import threading
import traceback
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from core.errors import DeviceUnavailable, ExitCode, StartupError
from server.__main__ import INTERRUPTED, as_memory_error, check_address_space, run_process
from server.commands.command_names import ANSWERED_AT_ONCE, COMMANDS, name_commands

if TYPE_CHECKING:
    from core.config import EngineConfig, ModelConfig
    from gpu.device import DeviceChoice
    from server.commands.chat_client import HttpChatBackend
    from server.commands.doctor import MachineFacts, PlanFacts, QualityFacts
    from server.commands.model_list import ModelFacts
    from server.config import ServerConfig

logger = logging.getLogger(__name__)

BROKEN_PIPE = 141  # as shells report SIGPIPE
DEFAULT_QUESTION_SOURCE = "-"  # -q -: the question comes from stdin


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line and give its exit code; --help and --version leave by SystemExit, as argparse has it."""
    argv = sys.argv[1:] if argv is None else list(argv)
    has_traceback = "--debug" in argv
    try:
        try:
            return _run(argv)
        finally:
            sys.stdout.flush()  # here, where a reader that has left is no surprise
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # whoever read our output has left; the interpreter must not trip over it again when it flushes
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except Exception as error:
        told = error if isinstance(error, StartupError) else _as_startup_error(error)
        lines = ["".join(traceback.format_exception(error)).rstrip()] if has_traceback else []
        _tell([*lines, *_error_lines(told)], argv)
        return int(told.exit_code)


def _tell(lines: list[str], argv: list[str]) -> None:
    """As a server's log has it, before there is one."""
    if argv[:1] == ["serve"] and "--estimate" not in argv and _told_log_format(argv) == "json":
        from server.observing.logs import configure_logging, tell

        log = configure_logging("info", "json")
        tell(lines, sys.stderr, logging.CRITICAL)
        log.close()
    else:
        print("\n".join(lines), file=sys.stderr)


def _told_log_format(argv: list[str]) -> str | None:
    try:
        from server.config_sources import told_log_format
    except ImportError:  # a dependency is missing, of which we are about to tell
        return None
    return told_log_format(argv, os.environ)


def _error_lines(error: StartupError) -> list[str]:
    return [f"error: {error.cause}", f"fix: {error.fix}"]


def _as_startup_error(error: Exception) -> StartupError:
    from server.commands.versions import LISTED

    refused = as_memory_error(error)
    if refused is not None:
        return refused
    if isinstance(error, ModuleNotFoundError) and error.name in LISTED:
        fix = f"{sys.executable} -m pip install {error.name}; steploop doctor lists what is needed"
        return StartupError(f"{error.name} is not installed", fix, ExitCode.VERSION)
    cause = f"this is a bug: {type(error).__name__}: {error}"
    return StartupError(cause, "run it again with --debug, and report the traceback", ExitCode.INTERNAL)


def _run(argv: list[str]) -> int:
    if argv[:2] == ["bench", "serve"]:  # the load generator parses its own flags
        from bench.load import main as run_load_generator

        _take_interrupts()
        return run_load_generator(argv[2:])
    names, _ = name_commands()
    if not argv:
        names.print_help()
        return ExitCode.USAGE
    if argv[0] in ANSWERED_AT_ONCE:
        names.parse_args(argv[:1])  # leaves by SystemExit
    from server.commands.command_line import build_parsers, flags_given, refuse_unknown
    from server.config_sources import load_config
    from server.values import did_you_mean

    parser, by_command = build_parsers("--help-all" in argv)
    if not argv[0].startswith("-") and argv[0] not in COMMANDS:
        parser.error(f"unknown command: {argv[0]}{did_you_mean(argv[0], COMMANDS)}")
    arguments, unknown = parser.parse_known_args(argv)
    if unknown:
        refuse_unknown(getattr(arguments, "action_parser", by_command[arguments.command]), unknown[0])
    if arguments.command == "bench":
        by_command["bench"].error("what to measure? steploop bench serve --help")
    config = load_config(flags_given(arguments), os.environ)
    if arguments.command != "serve":
        for warning in config.warnings:
            _report(f"warning: {warning}")
    if arguments.command in ("serve", "doctor", "models"):
        check_address_space()
    commands = {"serve": _serve, "chat": _chat, "doctor": _doctor, "models": _models, "keys": _keys, "usage": _usage}
    return commands[arguments.command](arguments, config)


def _serve(arguments: argparse.Namespace, config: "ServerConfig") -> int:
    if arguments.estimate:
        from server.commands.doctor import plan_lines

        print("\n".join(plan_lines(find_plan(config))))
        return ExitCode.OK
    from server.commands.versions import check_floors

    check_floors()
    from server.__main__ import run_server
    from server.commands.command_line import flags_given
    from server.config_sources import load_config
    from server.observing.logs import configure_logging, log_everything, tell

    log = configure_logging(config.log_level, config.log_format)
    log_everything()
    for warning in config.warnings:
        logger.warning(warning)
    flags = flags_given(arguments)
    try:
        return run_server(config, lambda: load_config(flags, os.environ))
    except Exception as error:
        if arguments.debug:
            raise
        told = error if isinstance(error, StartupError) else _as_startup_error(error)
        tell(_error_lines(told), sys.stderr, logging.CRITICAL)
        return int(told.exit_code)
    finally:
        log.close()


def _doctor(arguments: argparse.Namespace, config: "ServerConfig") -> int:
    from server.commands.doctor import (
        exit_code,
        machine_section,
        print_report,
        quality_section,
        serving_section,
        version_section,
    )

    if arguments.measure:
        measure_anew(config)
    sections = [
        version_section(),
        machine_section(find_machine(config)),
        serving_section(lambda: find_plan(config), config.all_binds()),
    ]
    if arguments.quality:
        sections.append(quality_section(lambda: measure_quality(config)))
    print_report(sections, sys.stdout)
    return exit_code(sections)


def _models(arguments: argparse.Namespace, config: "ServerConfig") -> int:
    from server.commands.hub_cache import environment_hub
    from server.commands.model_list import find_models, print_json, print_table
    from server.values import BadValueError, existing_directory

    try:
        directories = [existing_directory(text) for text in arguments.dir]
    except BadValueError as error:
        fix = "name a directory of models" if error.proposal is None else f"--dir {error.proposal}"
        raise StartupError(f"--dir must be {error.expected}", fix, ExitCode.USAGE) from error
    found = find_models(directories, environment_hub())
    listed = describe_models([("", None), *found], config)
    (print_json if arguments.json else print_table)(listed, sys.stdout)
    return ExitCode.OK


def _keys(arguments: argparse.Namespace, config: "ServerConfig") -> int:
    from datetime import UTC, datetime

    from server.commands.keys_command import create, print_keys, revoke

    commands = {"create": create, "list": print_keys, "revoke": revoke}
    commands[arguments.action](arguments, config, datetime.now(UTC))
    return ExitCode.OK


def _usage(arguments: argparse.Namespace, config: "ServerConfig") -> int:
    from datetime import UTC, datetime

    from server.commands.usage_command import print_usage

    print_usage(arguments, config, datetime.now(UTC))
    return ExitCode.OK


def _chat(arguments: argparse.Namespace, config: "ServerConfig") -> int:
    from server.__main__ import start_in_thread
    from server.banner import configured_url
    from server.commands.chat_client import HttpChatBackend, serve_and_chat
    from server.commands.tls_trust import check_trust_flags, client_context

    if arguments.url is not None and arguments.model is not None:
        raise StartupError("--url and --model are two different models", "give one of them", ExitCode.USAGE)
    question = _question(arguments.question)
    if arguments.model is None:
        url = arguments.url or configured_url(config)
        check_trust_flags(arguments)
        is_asked = arguments.ca_file is not None or arguments.takes_any
        tls = client_context(arguments.ca_file, not arguments.takes_any) if is_asked else None
        key = config.api_keys[0] if config.api_keys else None
        backend = None if url is None else HttpChatBackend(url, key, tls=tls)
        if backend is not None and (arguments.url is not None or backend.is_up()):
            backend.wait_ready(_report)
            return _converse(backend, question)
    with serve_and_chat(config, start_in_thread, _report) as backend:
        return _converse(backend, question)


def _question(text: str | None) -> str | None:
    """The one question to ask, from where the flag says; None: talk.

    Raises:
        StartupError: there is none, as from a variable of a script that was not filled in.
    """
    if text is None:
        return None
    question = sys.stdin.read() if text == DEFAULT_QUESTION_SOURCE else text
    if not question.strip():
        where = "stdin" if text == DEFAULT_QUESTION_SOURCE else "-q"
        fix = 'ask something, as in steploop chat -q "What is a KV cache?", or leave -q out to talk'
        raise StartupError(f"the question from {where} is empty", fix, ExitCode.USAGE)
    return question


def _converse(backend: "HttpChatBackend", question: str | None) -> int:
    from server.commands.chat import Conversation, terminal_reader

    has_colour = sys.stderr.isatty() and not os.environ.get("NO_COLOR")
    conversation = Conversation(backend, sys.stdout, sys.stderr, has_colour)
    _take_interrupts()
    if question is not None:
        conversation.ask(question)
        return ExitCode.OK
    conversation.run(terminal_reader(), f"{backend.model} at {backend.url}; /help lists the commands")
    return ExitCode.OK


def _take_interrupts() -> None:
    """From here on Ctrl-C raises KeyboardInterrupt: what runs now knows what to do with it."""
    if threading.current_thread() is threading.main_thread():  # Python lets no other set it
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _report(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def find_machine(config: "ServerConfig") -> "MachineFacts":
    """Ask gpu what would compute; measures the memory's bandwidth (0.1 s)."""
    from gpu.device import (
        apply_threads,
        choose_device,
        free_memory_bytes,
        measure_bandwidth,
        num_physical_cores,
        total_memory_bytes,
    )
    from gpu.measured import measured_here
    from server.commands.doctor import MachineFacts

    engine, device_error = config.to_engine_config(), None
    try:
        choice = choose_device(engine)
    except DeviceUnavailable as error:
        choice, device_error = choose_device(replace(engine, device="cpu")), error
    apply_threads(choice)
    model = _model_config(config)
    return MachineFacts(
        device=str(choice.device),
        device_reason=choice.device_reason,
        dtype=choice.dtype_name,
        dtype_reason=choice.dtype_reason,
        threads=choice.threads,
        threads_reason=choice.threads_reason,
        num_cores=num_physical_cores(),
        memory_bytes=total_memory_bytes(choice.device),
        free_bytes=free_memory_bytes(choice.device),
        bandwidth_bytes_per_s=measure_bandwidth(choice.device),
        device_error=device_error,
        measured_threads=tuple((shape, str(found)) for shape, found in measured_here(choice, model).items()),
    )


def _model_config(config: "ServerConfig") -> "ModelConfig | None":
    """None: the model is not here, or not understood."""
    from server.__main__ import model_path
    from server.commands.model_files import parse_config, read_model_config

    try:
        path = model_path(config, fetches=False)
        return parse_config(path, read_model_config(path))
    except StartupError:
        return None


def describe_models(found: Sequence[tuple[str, Path | None]], config: "ServerConfig") -> "list[ModelFacts]":
    """Ask gpu what each model is and needs; reads headers only.

    Args:
        found: names and paths; None: the embedded model.

    Raises:
        StartupError: the device asked for is not there.
    """
    from gpu.device import choose_device, free_memory_bytes
    from server.__main__ import DEMO_DIRECTORY, DEMO_NAME
    from server.commands.model_list import ModelFacts

    engine = config.to_engine_config()
    choice = choose_device(engine)
    free_bytes = free_memory_bytes(choice.device)
    named = [ModelFacts(name or DEMO_NAME, path or DEMO_DIRECTORY) for name, path in found]
    return [_described(model, engine, choice, free_bytes) for model in named]


def _described(facts: "ModelFacts", engine: "EngineConfig", choice: "DeviceChoice", free_bytes: int) -> "ModelFacts":
    """A model's name and path, with all that its headers say."""
    from gpu.checkpoint import open_checkpoint
    from gpu.memory_plan import memory_needed
    from gpu.weights import check_checkpoint
    from server.commands.model_files import check_tokenizer, parse_config, read_model_config
    from server.values import format_size

    try:
        model = parse_config(facts.path, read_model_config(facts.path))
        checkpoint = open_checkpoint(facts.path, model.packing)
        model = check_checkpoint(checkpoint, model)
        check_tokenizer(facts.path)
        needed_bytes = memory_needed(model, engine, choice, checkpoint)
    except StartupError as error:
        return replace(facts, reason=error.cause)
    fits = needed_bytes <= free_bytes
    return replace(
        facts,
        size_bytes=checkpoint.size_bytes,
        num_parameters=model.num_parameters,
        context=model.max_position,
        dtype=checkpoint.main_format,
        needed_bytes=needed_bytes,
        fits=fits,
        reason=None if fits else f"{format_size(free_bytes)} free",
    )


def measure_anew(config: "ServerConfig") -> None:
    """Forget what was measured for the model on this machine, and load it, which measures and keeps that.

    Raises:
        StartupError: the model is missing or not understood, or it does not fit.
    """
    from gpu.device import choose_device
    from gpu.loading import load_runner
    from gpu.measured import forget_measured
    from server.__main__ import model_path
    from server.commands.model_files import parse_config, read_model_config

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


def measure_quality(config: "ServerConfig") -> "list[QualityFacts]":
    """Ask gpu what the model says of the held text: as it is, then quantised as asked, or in both ways.

    Raises:
        StartupError: the model is missing or not understood, or it does not fit.
    """
    from core.config import QUANTIZE_SCHEMES
    from gpu.loading import load_runner
    from gpu.quality import HELD_TEXT, Predictions, held_tokens, predict
    from server.__main__ import model_path
    from server.commands.doctor import QualityFacts
    from server.commands.model_files import parse_config, read_model_files

    files = read_model_files(model_path(config, fetches=False), config.max_model_len, config.chat_template)
    model = parse_config(files.path, files.config)
    context = config.max_model_len or model.max_position
    tokens = held_tokens(files.tokenizer.encode(HELD_TEXT.read_text(encoding="utf-8")), context)
    if len(tokens) < 2:
        raise StartupError(f"A context of {context} tokens leaves nothing to predict", "--max-model-len 2048")
    engine = replace(config.to_engine_config(), max_model_len=len(tokens) + 1, max_sequences=1, tensor_parallel=1)
    plain: Predictions | None = None
    found = []
    for scheme in (None, config.quantize) if config.quantize is not None else (None, *QUANTIZE_SCHEMES):
        _report(f"measuring {scheme or 'the model as it is'} over {len(tokens):,} tokens")
        runner = load_runner(files.path, model, replace(engine, quantize=scheme), lambda done, total: None)
        made = predict(runner, tokens)
        plain = plain or made
        memory = runner.memory
        del runner  # before the next is loaded
        dtype = memory.device.dtype_name
        agreement = made.agreement(plain)
        found.append(QualityFacts(scheme, dtype, len(tokens), made.perplexity, agreement, memory.weights_bytes))
    return found


def find_plan(config: "ServerConfig") -> "PlanFacts":
    """Ask gpu how memory would be divided; reads headers only.

    Raises:
        StartupError: the model is missing or not understood, or it does not fit.
    """
    from gpu.kept_matrices import kept_scheme
    from gpu.kernel_choice import describe_attention, describe_graphs, describe_products
    from gpu.memory_plan import estimate
    from gpu.parallel.ranks import part_of
    from gpu.parallel.runner import estimate_ranks
    from server.__main__ import model_path, served_name
    from server.commands.doctor import PlanFacts
    from server.commands.model_files import parse_config, read_model_files

    files = read_model_files(model_path(config, fetches=False), config.max_model_len, config.chat_template)
    model = parse_config(files.path, files.config)
    engine = config.to_engine_config()
    plan = (estimate if engine.tensor_parallel == 1 else estimate_ranks)(files.path, model, engine)
    part, layers = part_of(model, engine.tensor_parallel), kept_scheme(model, config.quantize, plan.device.device)
    layers = layers or config.quantize
    return PlanFacts(
        model_name=served_name(config),
        architecture=model.architecture,
        is_demonstration=config.model is None,
        num_parameters=plan.num_parameters,
        dtype=plan.device.dtype_name if layers is None else f"{plan.device.dtype_name}, layers {layers}",
        device=str(plan.device.device),
        device_reason=plan.device.device_reason,
        weights_bytes=plan.weights_bytes,
        activation_bytes=plan.activation_bytes,
        kv_bytes=plan.kv_bytes,
        num_kv_tokens=plan.kv_tokens,
        max_model_len=plan.max_model_len,
        context_origin=config.context_origin,
        attention=describe_attention(part, plan.device),
        products=describe_products(part, plan.device),
        graphs=describe_graphs(part, plan.device, engine),
        total_bytes=plan.total_bytes,
        free_bytes=plan.free_bytes,
        offload_bytes=plan.offload_bytes,
        offload_dir=engine.kv_offload_dir,
        graph_bytes=plan.graph_bytes,
    )


if __name__ == "__main__":
    run_process()
