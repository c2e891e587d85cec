"""bench.gpu_check --part http: random models behind the server's port, by the load generator of bench/load.py.

The server is a process of its own (bench/null_server.py) on 127.0.0.1. When it has ended, the engine alone answers the
same requests, of as many tokens: the difference is what HTTP costs.
"""

import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial

from bench.beside import send_beside
from bench.engine import Streams
from bench.gpu_model import config_of, engine_config, models_of, runner_of, work_of_model
from bench.gpu_run import (
    BESIDE_ENGINE,
    FULL_SERVER,
    TAIL_BESIDE_PROMPTS,
    Case,
    Context,
    Row,
    ceilings_case,
    judged,
)
from bench.kit import free_port, null_server_command, running
from bench.limits import serving_limit_tokens_per_s
from bench.load import LoadConfig, LoadResult, run_load, run_on_fast_loop
from core.config_json import parse_model_config
from gpu.device import choose_device, free_memory_bytes
from gpu.memory_plan import plan_memory

START_LIMIT_S = 150.0
LIMIT_S = 300.0  # of a model
SHORTEST_GAP_S = 1e-6  # for a median of tokens that were read two at a time
REQUEST_LIMIT_S = 120.0
KV_SLACK = 0.9  # of the room that is planned: prompts are about as long as asked


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much is measured.

    Args:
        clients: that ask once each; fewer where the device has no room for all of them.
        prompt, output: tokens of each.
        beside: streams, tokens of a prompt, prompts, seconds between two, tokens of a stream at most.
    """

    clients: int
    prompt: int
    output: int
    beside: tuple[int, int, int, float, int]


FULL = Sizes(512, 128, 1024, (64, 8192, 8, 1.0, 1 << 13))
QUICK = Sizes(64, 128, 128, (16, 4096, 2, 0.5, 1 << 12))
TINY = Sizes(4, 48, 6, (2, 96, 2, 0.05, 400))


def cases(is_quick: bool, is_device: bool) -> list[Case]:
    """This part's."""
    models = models_of(is_quick, is_device)
    return [
        ceilings_case(),
        *(Case(f"{name}: http", partial(_check, name), LIMIT_S, title_of(name)) for name in models),
    ]


def title_of(model: str) -> str:
    return f"{model}, random weights, through HTTP"


def _check(model: str, context: Context) -> Iterator[Row]:
    context.drop()
    sizes, port, result = context.of_size(TINY, QUICK, FULL), free_port(), None
    num_clients = _num_clients(model, context, sizes)
    asked = {"prompt_tokens": sizes.prompt, "max_tokens": sizes.output, "ignore_eos": True, "temperature": 0.0}
    load = LoadConfig(host="127.0.0.1", port=port, timeout_s=REQUEST_LIMIT_S, **asked)  # type: ignore[arg-type]
    config, engine = json.dumps(config_of(model)), json.dumps(asdict(engine_config(context)))
    row = partial(judged, context, title_of(model), model)
    with running(
        null_server_command(port, "--random", config, "--engine", engine), port, start_timeout_s=START_LIMIT_S
    ):
        alone = _run(replace(load, num_requests=4))
        decode_s = (alone.end_to_end_s.p50 or 0.0) - (alone.ttft_s.p50 or 0.0)
        yield row("http single stream, tokens/s", (sizes.output - 1) / decode_s, _limit(model, context, sizes, 1))
        yield row("http time to first token, ms", (alone.ttft_s.p50 or 0.0) * 1e3)
        found = run_on_fast_loop(send_beside(load, *sizes.beside))
        note = f"{sizes.beside[0]} streams, a prompt of {found.num_long_tokens} every {sizes.beside[3]:g} s"
        p50, p99 = found.inter_token_s.p50 or 0.0, found.inter_token_s.p99 or 0.0
        yield row("http inter-token median without them, ms", (found.alone_s.p50 or 0.0) * 1e3)
        yield row("http inter-token median beside arriving prompts, ms", p50 * 1e3, note=note)
        yield row("http inter-token p99 beside arriving prompts, ms", p99 * 1e3)
        yield row(TAIL_BESIDE_PROMPTS, p99 / (p50 or SHORTEST_GAP_S))
        yield row("http time to first token of an arriving prompt, ms", (found.long_ttft_s.p50 or 0.0) * 1e3)
        result = _run(replace(load, concurrency=num_clients, num_requests=num_clients))
    note = f"{num_clients} clients of {FULL.clients}; the generator used {result.client_cpu:.0%} of a core"
    limit = _limit(model, context, sizes, num_clients)
    if sizes is FULL:
        yield row(FULL_SERVER, result.tokens_per_s, limit, note)
    name = f"http {num_clients} x {sizes.prompt}/{sizes.output}"
    yield row(f"{name}, tokens/s", result.tokens_per_s, limit, note)
    yield row(f"{name}, first token, median ms", (result.ttft_s.p50 or 0.0) * 1e3)
    yield row(f"{name}, inter-token, p99 ms", (result.inter_token_s.p99 or 0.0) * 1e3)
    rate = _engine_rate(model, context, num_clients, round(result.num_prompt_tokens / result.num_done), sizes.output)
    note = f"{num_clients} streams: {result.tokens_per_s:.6g} tokens/s through HTTP, {rate:.6g} without"
    yield row(BESIDE_ENGINE, result.tokens_per_s / rate, note=note)


def _num_clients(model: str, context: Context, sizes: Sizes) -> int:
    """As many as the device has room for at once: on one that is too small, requests would be computed twice."""
    config, engine = parse_model_config(dict(config_of(model))), engine_config(context)
    choice = choose_device(engine)
    size_bytes = config.num_parameters * choice.dtype.itemsize
    room = plan_memory(config, engine, choice, size_bytes, free_memory_bytes(choice.device)).kv_tokens
    fitting = int(KV_SLACK * room) // (sizes.prompt + sizes.output)
    return min(sizes.clients, fitting if fitting < 8 else fitting // 8 * 8)


def _limit(model: str, context: Context, sizes: Sizes, num_clients: int) -> float:
    number_bytes = choose_device(engine_config(context)).dtype.itemsize
    load = num_clients, sizes.prompt, sizes.output, number_bytes
    return serving_limit_tokens_per_s(work_of_model(model), context.speed, *load)


def _run(load: LoadConfig) -> LoadResult:
    """
    Raises:
        CannotRun: there is no server.
        RuntimeError: a request failed.
    """
    result = run_load(load)
    if result.num_failed:
        raise RuntimeError(f"{result.num_failed} requests failed: {result.failure_examples}")
    return result


def _engine_rate(model: str, context: Context, num_clients: int, num_prompt: int, num_output: int) -> float:
    """Tokens/s that the engine gives without HTTP, from the requests' submission to the last one's end."""
    runner, took_s = runner_of(model, context), 0.0
    for num_tokens in (2, num_output):  # the first round compiles, and meets what the server has met before
        streams = Streams(runner, seed=num_tokens)
        prompts = [streams.prompt(num_prompt) for _ in range(num_clients)]
        started_s = time.perf_counter()
        streams.answers(prompts, num_tokens)
        took_s = time.perf_counter() - started_s
    return num_clients * num_output / took_s
