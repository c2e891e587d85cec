"""bench.gpu_check --part http: random models behind the server's port, by the load generator of bench/load.py.

The server is a process of its own (bench/random_server.py) on 127.0.0.1. What HTTP costs is seen beside the engine
alone, which decodes the same number of streams before the server starts.
"""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial

from bench.engine import EngineBench
from bench.gpu_environment import ceilings_case
from bench.gpu_model import MODELS, QUICK_MODELS, config_of, engine_config, judged, runner_of, work_of_model
from bench.gpu_parts import FAILED, Case, Context, Row
from bench.load_run import LoadConfig, LoadResult, run_load
from bench.server_process import free_port, running
from bench.work import prefill_limit_s, serving_limit_tokens_per_s
from gpu.device import choose_device

START_LIMIT_S = 150.0
MODEL_LIMIT_S = 400.0


@dataclass(frozen=True, slots=True)
class Load:
    """One run of the generator. Tokens of prompts are about so many; num_requests: at most."""

    clients: int
    prompt: int
    output: int
    num_requests: int


FULL = (Load(1, 128, 256, 4), Load(1, 1024, 1, 8), Load(64, 128, 512, 128), Load(512, 128, 1024, 512))
QUICK = (Load(1, 128, 64, 2), Load(1, 1024, 1, 3), Load(64, 128, 128, 64))
TINY = (Load(1, 48, 4, 2), Load(4, 48, 6, 8))


def cases(is_quick: bool, is_device: bool) -> list[Case]:
    """This part's."""
    models = ("tiny",) if not is_device else QUICK_MODELS if is_quick else MODELS
    return [
        ceilings_case(),
        *(Case(f"{model}: http", partial(_check, model), MODEL_LIMIT_S, table_of(model)) for model in models),
    ]


def table_of(model: str) -> str:
    return f"{model}, random weights, through HTTP"


def _check(model: str, context: Context) -> Iterator[Row]:
    loads = TINY if not context.is_device else QUICK if context.is_quick else FULL
    widest = max(loads, key=lambda load: load.clients)
    alone = _engine_alone(model, context, widest)
    context.drop()
    with _server(model, context) as port:
        for load in loads:
            result = run_load(
                LoadConfig(
                    host="127.0.0.1",
                    port=port,
                    concurrency=load.clients,
                    num_requests=load.num_requests,
                    prompt_tokens=load.prompt,
                    max_tokens=load.output,
                    ignore_eos=True,
                    temperature=0.0,
                )
            )
            yield from _rows(model, context, load, result)
            if load == widest:
                median_s = result.inter_token_s.p50
                table, measure = table_of(model), "http beside the engine alone, share"
                if median_s:
                    note = f"a step of {load.clients}: {alone * 1e3:.3g} ms alone, {median_s * 1e3:.3g} between tokens"
                    yield judged(context, model, measure, alone / median_s, 1.0, table, note)


def _rows(model: str, context: Context, load: Load, result: LoadResult) -> Iterator[Row]:
    table, name = table_of(model), f"http {load.clients} x {load.prompt}/{load.output}"
    if result.num_failed:
        told = ", ".join(f"{kind}: {message}" for kind, message in result.failure_examples.items())
        yield Row(table, {"measure": name, "figure": result.num_failed}, FAILED, f"requests failed: {told}")
    number_bytes = choose_device(engine_config(context)).dtype.itemsize
    work, speed = work_of_model(model), context.speed
    limit = serving_limit_tokens_per_s(work, speed, load.clients, load.prompt, load.output, number_bytes)
    client = f"the generator used {result.client_cpu:.0%} of a core"
    yield judged(context, model, f"{name}, tokens/s", result.tokens_per_s, limit, table, client)
    yield judged(context, model, f"{name}, share of limit", result.tokens_per_s / limit, 1.0, table)
    least_ms = prefill_limit_s(work, speed, load.prompt, number_bytes) * 1e3
    figures = {
        "first token, median ms": (result.ttft_s.p50, least_ms),
        "inter-token, median ms": (result.inter_token_s.p50, None),
        "inter-token, p99 ms": (result.inter_token_s.p99, None),
    }
    for measure, (seconds, limit_ms) in figures.items():
        if seconds is not None:
            yield judged(context, model, f"{name}, {measure}", seconds * 1e3, limit_ms, table)


def _engine_alone(model: str, context: Context, load: Load) -> float:
    """Seconds of a decode step of as many streams, in the middle of their answers."""
    runner = runner_of(model, context)
    return (
        EngineBench(runner).decode(load.clients, load.prompt + load.output // 2, 16 if context.is_device else 3).step_s
    )


@contextmanager
def _server(model: str, context: Context) -> Iterator[int]:
    port = free_port()
    command = [sys.executable, "-m", "bench.random_server", "--config", json.dumps(config_of(model))]
    command += ["--engine", json.dumps(asdict(engine_config(context))), "--port", str(port)]
    with running(command, port, start_timeout_s=START_LIMIT_S):
        yield port
