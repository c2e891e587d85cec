"""bench.gpu_check --part http: random models behind the server's port, by the load generator of bench/load.py.

The server is a process of its own (bench/null_server.py) on 127.0.0.1. What HTTP costs is seen beside the engine alone,
which answers the same requests, of as many tokens, when the server has ended. What one measure finds wrong is a row,
and the others are measured all the same.
"""

import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial

from bench.beside import call_off, send_again, send_beside
from bench.engine import Streams
from bench.gpu_model import config_of, engine_config, models_of, runner_of, work_of_model
from bench.gpu_run import (
    BESIDE_ENGINE,
    FAILED,
    FULL_SERVER,
    TAIL_BESIDE_PROMPTS,
    Case,
    Context,
    Row,
    ceilings_case,
    first_token_of,
    judged,
    last_line,
)
from bench.kit import free_port, null_server_command, running
from bench.limits import prefill_limit_s, serving_limit_tokens_per_s
from bench.load import LoadConfig, LoadResult, run_load, run_on_fast_loop
from core.config import parse_model_config
from core.errors import StartupError
from gpu.device import choose_device, free_memory_bytes
from gpu.memory_plan import plan_memory

START_LIMIT_S = 150.0
MODEL_LIMIT_S = 300.0
REQUEST_LIMIT_S = 120.0
KV_SLACK = 0.9  # of the room that is planned: prompts are about as long as asked
SINGLE = "http single stream, tokens/s"


@dataclass(frozen=True, slots=True)
class Load:
    """One run of the generator. Tokens of prompts are about so many; num_requests: at most."""

    clients: int
    prompt: int
    output: int
    num_requests: int


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much is measured.

    Args:
        full: clients that ask once each; fewer where the device has no room for all of them.
        beside: streams, tokens of a prompt, prompts, seconds between two, tokens of a stream at most.
        prefix: tokens.
        call_offs: streams, and how many of them are called off.
    """

    single: Load
    prompts: tuple[Load, ...]
    closed: tuple[Load, ...]
    full: Load
    beside: tuple[int, int, int, float, int]
    prefix: int
    call_offs: tuple[int, int]


FULL = Sizes(
    Load(1, 128, 256, 4),
    (Load(1, 128, 1, 8), Load(1, 1024, 1, 8), Load(1, 8192, 1, 4)),
    (Load(64, 128, 256, 128),),
    Load(512, 128, 1024, 512),
    (64, 8192, 8, 1.0, 1 << 13),
    4096,
    (64, 16),
)
QUICK = Sizes(
    Load(1, 128, 64, 2),
    (Load(1, 1024, 1, 3),),
    (),
    Load(64, 128, 128, 64),
    (16, 4096, 2, 0.5, 1 << 12),
    2048,
    (16, 4),
)
TINY = Sizes(Load(1, 48, 4, 2), (Load(1, 96, 1, 2),), (), Load(4, 48, 6, 4), (2, 96, 2, 0.05, 400), 96, (2, 1))


def cases(is_quick: bool, is_device: bool) -> list[Case]:
    """This part's."""
    models = models_of(is_quick, is_device)
    checks = [Case(f"{model}: http", partial(_check, model), MODEL_LIMIT_S, table_of(model)) for model in models]
    return [ceilings_case(), *checks]


def table_of(model: str) -> str:
    return f"{model}, random weights, through HTTP"


@dataclass(slots=True)
class Served:
    """A model's server, and what is measured of it.

    Args:
        clients: that have room at once.
        full: its run of as many.
    """

    model: str
    context: Context
    sizes: Sizes
    port: int
    clients: int
    full: LoadResult | None = None

    def load(self, prompt_tokens: int) -> LoadConfig:
        """Requests of one client."""
        return LoadConfig(
            host="127.0.0.1",
            port=self.port,
            prompt_tokens=prompt_tokens,
            ignore_eos=True,
            temperature=0.0,
            timeout_s=REQUEST_LIMIT_S,
        )

    def row(self, measure: str, figure: float, limit: float | None = None, note: str = "") -> Row:
        return judged(self.context, table_of(self.model), self.model, measure, figure, limit, note)

    def run(self, load: Load) -> LoadResult:
        """
        Raises:
            CannotRun: there is no server.
            RuntimeError: a request failed.
        """
        of_load = {"concurrency": load.clients, "num_requests": load.num_requests, "max_tokens": load.output}
        result = run_load(replace(self.load(load.prompt), **of_load))  # type: ignore[arg-type]
        if result.num_failed:
            told = ", ".join(f"{kind}: {message}" for kind, message in result.failure_examples.items())
            raise RuntimeError(f"{result.num_failed} requests failed: {told}")
        return result

    def rate_limit(self, load: Load, clients: int) -> float:
        work, speed = work_of_model(self.model), self.context.known_speed
        return serving_limit_tokens_per_s(work, speed, clients, load.prompt, load.output, self.number_bytes)

    @property
    def number_bytes(self) -> int:
        return choose_device(engine_config(self.context)).dtype.itemsize


def _check(model: str, context: Context) -> Iterator[Row]:
    sizes, port = context.of_size(TINY, QUICK, FULL), free_port()
    context.drop()
    config, engine = json.dumps(config_of(model)), json.dumps(asdict(engine_config(context)))
    served = Served(model, context, sizes, port, _clients(model, context, sizes.full))
    command = null_server_command(port, "--random", config, "--engine", engine)
    with running(command, port, start_timeout_s=START_LIMIT_S):
        for name, measure in MEASURES.items():
            try:
                yield from measure(served)
            except (OSError, RuntimeError, StartupError) as error:
                yield Row(table_of(model), {"measure": name}, FAILED, last_line(error))
    if served.full is not None:
        yield _beside_engine(served, served.full)


def _clients(model: str, context: Context, full: Load) -> int:
    """That the device has room for, at once: on one that is too small, requests would be computed twice."""
    config, engine = parse_model_config(dict(config_of(model))), engine_config(context)
    choice = choose_device(engine)
    size_bytes = config.num_parameters * choice.dtype.itemsize
    room = plan_memory(config, engine, choice, size_bytes, free_memory_bytes(choice.device)).kv_tokens
    fitting = int(KV_SLACK * room) // (full.prompt + full.output)
    return min(full.clients, fitting if fitting < 8 else fitting // 8 * 8)


def _single(served: Served) -> Iterator[Row]:
    load, result = served.sizes.single, served.run(served.sizes.single)
    decoding_s = (_ms(result.end_to_end_s.p50) - _ms(result.ttft_s.p50)) / 1e3
    yield served.row(SINGLE, (load.output - 1) / decoding_s, served.rate_limit(load, 1))
    yield served.row("http single stream, its prompt too, tokens/s", result.tokens_per_s)


def _first_tokens(served: Served) -> Iterator[Row]:
    for load in served.sizes.prompts:
        result = served.run(load)
        num_prompt = round(result.num_prompt_tokens / result.num_done)
        work, speed = work_of_model(served.model), served.context.known_speed
        limit_ms = prefill_limit_s(work, speed, num_prompt, served.number_bytes) * 1e3
        measure = f"http {first_token_of(load.prompt)}"
        yield served.row(measure, _ms(result.ttft_s.p50), limit_ms, f"{num_prompt} tokens")


def _closed(served: Served) -> Iterator[Row]:
    for load in served.sizes.closed:
        yield from _run_rows(served, load, served.run(load))


def _full(served: Served) -> Iterator[Row]:
    load = replace(served.sizes.full, clients=served.clients, num_requests=served.clients)
    served.full = result = served.run(load)
    if served.sizes.full == FULL.full:
        note = f"{served.clients} clients of {FULL.full.clients}"
        yield served.row(FULL_SERVER, result.tokens_per_s, served.rate_limit(load, served.clients), note)
    yield from _run_rows(served, load, result)


def _run_rows(served: Served, load: Load, result: LoadResult) -> Iterator[Row]:
    name, note = f"http {load.clients} x {load.prompt}/{load.output}", f"the generator used {result.client_cpu:.0%}"
    limit = served.rate_limit(load, load.clients)
    yield served.row(f"{name}, tokens/s", result.tokens_per_s, limit, f"{note} of a core")
    yield served.row(f"{name}, first token, median ms", _ms(result.ttft_s.p50))
    yield served.row(f"{name}, inter-token, median ms", _ms(result.inter_token_s.p50))
    yield served.row(f"{name}, inter-token, p99 ms", _ms(result.inter_token_s.p99))


def _arrivals(served: Served) -> Iterator[Row]:
    num_streams, _, _, every_s, _ = served.sizes.beside
    found = run_on_fast_loop(send_beside(served.load(served.sizes.single.prompt), *served.sizes.beside))
    load = f"{num_streams} streams, a prompt of {found.num_long_tokens} every {every_s:g} s"
    beside = found.inter_token_s
    yield served.row("http inter-token median without them, ms", _ms(found.alone_s.p50))
    yield served.row("http inter-token median beside arriving prompts, ms", _ms(beside.p50), note=load)
    yield served.row("http inter-token p99 beside arriving prompts, ms", _ms(beside.p99))
    yield served.row(f"http {TAIL_BESIDE_PROMPTS}", _ms(beside.p99) / _ms(beside.p50))
    yield served.row("http time to first token of an arriving prompt, ms", _ms(found.long_ttft_s.p50))


def _prefix(served: Served) -> Iterator[Row]:
    size = served.sizes.prefix
    first_s, *again_s = run_on_fast_loop(send_again(served.load(size), 4))
    yield served.row(f"http prefix of {size}: first time, ms", first_s * 1e3)
    yield served.row(f"http prefix of {size}: again, ms", statistics.median(again_s) * 1e3)


def _call_offs(served: Served) -> Iterator[Row]:
    seconds = run_on_fast_loop(call_off(served.load(served.sizes.single.prompt), *served.sizes.call_offs))
    note = f"from DELETE to the end of the answer, beside {served.sizes.call_offs[0]} streams"
    yield served.row("http cancel of a stream, ms", statistics.median(seconds) * 1e3, note=note)


def _beside_engine(served: Served, result: LoadResult) -> Row:
    """What the engine gives when nobody is between it and its requests: from their submission to the last one's end."""
    num_prompt, num_output = round(result.num_prompt_tokens / result.num_done), served.sizes.full.output
    runner, took_s = runner_of(served.model, served.context), 0.0
    for num_tokens in (2, num_output):  # the first round compiles, and meets what the server has met before
        streams = Streams(runner, seed=num_tokens)
        prompts = [streams.prompt(num_prompt) for _ in range(served.clients)]
        started_s = time.perf_counter()
        streams.answers(prompts, num_tokens)
        took_s = time.perf_counter() - started_s
    rate = served.clients * num_output / took_s
    note = f"{served.clients} streams: {result.tokens_per_s:.6g} tokens/s through HTTP, {rate:.6g} without"
    return served.row(BESIDE_ENGINE, result.tokens_per_s / rate, note=note)


def _ms(seconds: float | None) -> float:
    """
    Raises:
        RuntimeError: nothing was measured.
    """
    if not seconds:
        raise RuntimeError("nothing was measured")
    return seconds * 1e3


MEASURES: dict[str, Callable[[Served], Iterator[Row]]] = {
    "single stream": _single,
    "first tokens": _first_tokens,
    "all clients": _full,
    "arriving prompts": _arrivals,
    "prefix cache": _prefix,
    "cancel": _call_offs,
    "some clients": _closed,
}
