"""An engine over a loaded model that is stepped by hand, in this process and without HTTP, and what it gave when.

Also how a model comes to be there: loaded with room for the cases that are measured and no more, or with random weights
made where it is computed, so that there are no files of many gigabytes. Their numbers come of the names of a
checkpoint's tensors: whoever loads the same shapes otherwise (bench/gpu_peers.py) has the same model on that device.
"""

import argparse
import json
import statistics
import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import Tensor

from bench.kit import Flag
from bench.load import CannotRun
from bench.make_model import SCALE, SPECIAL_TOKENS, name_hash
from core.config import BLOCK_SIZE, EngineConfig, ModelConfig, parse_model_config
from core.engine import Engine
from core.plan import BlockStore, Runner, RunnerLimits, StepOutput, StepPlan
from core.scheduler import Scheduler
from core.types import Cancel, FinishReason, Message, Pause, Request, Resume, SamplingParams, StepDelivery, Submit
from gpu.device import DTYPES, apply_threads, choose_device, free_memory_bytes
from gpu.kv_cache import bytes_per_token
from gpu.loading import FindOperators, load_runner, warm_up
from gpu.memory_plan import plan_memory
from gpu.parameters import EMBEDDING, HEAD, ModelWeights, empty_weights
from gpu.runner import ModelRunner
from gpu.tune import find_operators

WARM_STEPS = 2
SPARE_TOKENS = 4  # of each sequence: sampled before it was paused, and in flight at the end

MODEL_FLAGS = (
    Flag("--model", None, "a directory, e.g. of bench.make_model", more={"type": Path, "required": True}),
    Flag("--threads", None, "compute threads (default: as the server chooses)", more={"type": int}),
    Flag("--dtype", "auto", "of weights", more={"choices": ("auto", *DTYPES)}),
)


class ClockedRunner:
    """A runner, and the seconds that its calls take: forward and sample send, collect waits.

    Attributes:
        plan: of the last step.
    """

    def __init__(self, runner: Runner[Any]) -> None:
        self._runner = runner
        self.limits: RunnerLimits = runner.limits
        self.send_s = self.wait_s = 0.0
        self.plan: StepPlan | None = None

    def forward(self, plan: StepPlan) -> Any:
        started_s, self.plan = time.perf_counter(), plan
        ticket = self._runner.forward(plan)
        self.send_s += time.perf_counter() - started_s
        return ticket

    def sample(self, ticket: Any, *host_inputs: Any) -> None:
        started_s = time.perf_counter()
        self._runner.sample(ticket, *host_inputs)
        self.send_s += time.perf_counter() - started_s

    def collect(self, ticket: Any) -> StepOutput:
        started_s = time.perf_counter()
        output = self._runner.collect(ticket)
        self.wait_s += time.perf_counter() - started_s
        return output


class Streams:
    """Greedy requests, and when each of their tokens came.

    Args:
        runner: stepped by this engine alone, as long as it counts on what is cached.
        limits: instead of the runner's.
        store: host memory, and a directory, for blocks that are evicted.
        scheduling: further arguments of the scheduler.
    """

    def __init__(
        self,
        runner: Runner[Any],
        seed: int = 0,
        limits: RunnerLimits | None = None,
        store: BlockStore | None = None,
        **scheduling: Any,
    ) -> None:
        self.clocked = ClockedRunner(runner)
        self.tokens: dict[str, list[int]] = defaultdict(list)
        self.times_s: dict[str, list[float]] = defaultdict(list)
        self.sent_s: dict[str, float] = {}
        self.cached_tokens: dict[str, int] = {}  # of those that have ended
        self.num_open = 0
        self._inbox: deque[Message] = deque()
        self._random, self._vocab_size = Random(seed), runner.limits.vocab_size
        self.scheduler = Scheduler(limits or runner.limits, (), lambda: 0, **scheduling)
        self.engine = Engine(self.scheduler, self.clocked, time.monotonic, self._inbox, self._take, store)

    def prompt(self, num_tokens: int) -> tuple[int, ...]:
        """Random, and with no other's beginning."""
        return tuple(self._random.choices(range(self._vocab_size), k=num_tokens))

    def submit(self, prompt_ids: Sequence[int], num_tokens: int) -> str:
        name = str(len(self.sent_s))
        sampling = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
        self.sent_s[name] = time.perf_counter()
        self.num_open += 1
        request = Request(request_id=name, prompt_ids=tuple(prompt_ids), sampling=sampling, arrival_s=time.monotonic())
        self._inbox.append(Submit(request))
        return name

    def cancel(self, *names: str) -> None:
        self._inbox.extend(Cancel(name, FinishReason.CANCELLED) for name in names)

    def pause(self, names: Sequence[str]) -> None:
        self._inbox.extend(Pause(name) for name in names)

    def resume(self, names: Sequence[str]) -> None:
        self._inbox.extend(Resume(name) for name in names)

    def step(self) -> bool:
        return self.engine.step()

    def run_until(self, is_done: Callable[[], bool]) -> None:
        """
        Raises:
            RuntimeError: the engine has nothing more to do before that.
        """
        while not is_done():
            if not self.engine.step() and not is_done():
                raise RuntimeError("the engine stands still, and not all that was waited for has come")

    def run(self) -> None:
        """Until all have ended, and nothing is left to do."""
        self.run_until(lambda: not self.num_open)
        while self.engine.step():
            pass

    def cancel_all(self) -> None:
        self.cancel(*(name for name in self.sent_s if name not in self.cached_tokens))
        self.run()

    def have_all(self, names: Sequence[str], num_tokens: int) -> bool:
        return all(len(self.tokens[name]) >= num_tokens for name in names)

    def ttft_s(self, name: str) -> float:
        return self.times_s[name][0] - self.sent_s[name]

    def answers(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> list[list[int]]:
        """Of all of them, in one batch."""
        names = [self.submit(prompt, num_tokens) for prompt in prompts]
        self.run()
        return [self.tokens[name] for name in names]

    def prefill_s(self, num_tokens: int) -> float:
        """Seconds from a prompt's submission to its first token, while nothing else runs."""
        name = self.submit(self.prompt(num_tokens), 1)
        self.run()
        return self.ttft_s(name)

    def decode_s(self, num_rows: int, context: int, num_steps: int) -> tuple[float, float]:
        """Compute the prompts, then time so many steps of all rows: the median step, and the mean context of a row.

        Raises:
            RuntimeError: a step did not give each row its token, or there was less room than was planned.
        """
        num_preempted = self.scheduler.stats().num_preemptions
        names = [self.submit(self.prompt(context), WARM_STEPS + num_steps + SPARE_TOKENS) for _ in range(num_rows)]
        paused: set[str] = set()  # whoever has a token is paused until the last one has it
        while len(paused) < num_rows:
            self.step()
            started = {name for name in names if self.tokens[name]} - paused
            self.pause(sorted(started))
            paused |= started
        while self.step():  # nothing is in flight any more
            pass
        self.resume(names)
        steps_s = []
        for number in range(WARM_STEPS + num_steps):
            num_before, started_s = self._num_tokens(names), time.perf_counter()
            self.step()
            if number >= WARM_STEPS:
                steps_s.append(time.perf_counter() - started_s)
            if (num_new := self._num_tokens(names) - num_before) != num_rows:
                raise RuntimeError(f"a step gave {num_new} tokens instead of {num_rows}")
        self.cancel_all()
        if self.scheduler.stats().num_preemptions != num_preempted:
            raise RuntimeError("a sequence lost its blocks: there is less room than this bench has planned")
        return statistics.median(steps_s), context + 1 + WARM_STEPS + (num_steps - 1) / 2

    def _num_tokens(self, names: Sequence[str]) -> int:
        return sum(len(self.tokens[name]) for name in names)

    def _take(self, delivery: StepDelivery) -> None:
        now_s = time.perf_counter()
        for name, token_id in zip(delivery.request_ids, delivery.token_ids, strict=True):
            self.tokens[name].append(token_id)
            self.times_s[name].append(now_s)
        for chunk in delivery.chunks:
            if chunk.error is not None:
                raise RuntimeError(f"request {chunk.request_id} failed: {chunk.error}")
            if chunk.usage is not None:
                self.cached_tokens[chunk.request_id] = chunk.usage.num_cached_tokens
                self.num_open -= 1


def model_config(directory: Path) -> ModelConfig:
    """
    Raises:
        CannotRun: there is no model.
    """
    try:
        return parse_model_config(json.loads((directory / "config.json").read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        fix = "name a model directory; python -m bench.make_model makes one"
        raise CannotRun(f"{error}", fix) from error


def open_model(arguments: argparse.Namespace, num_kv_tokens: int, **engine: Any) -> ModelRunner:
    """The model of MODEL_FLAGS, with room for so many tokens.

    Args:
        engine: further fields of EngineConfig.

    Raises:
        StartupError: as load_runner.
    """
    config = model_config(arguments.model)
    asked = {"device": "cpu", "dtype": arguments.dtype, "threads": arguments.threads}
    token_bytes = bytes_per_token(config, choose_device(EngineConfig(**asked)).dtype)
    engine["max_model_len"] = min(engine["max_model_len"], config.max_position)
    memory_bytes = (num_kv_tokens + BLOCK_SIZE) * token_bytes
    return load_runner(
        arguments.model, config, EngineConfig(**asked, **engine, kv_memory_bytes=memory_bytes), lambda *_: None
    )


def shown_model(arguments: argparse.Namespace, runner: ModelRunner) -> dict[str, Any]:
    """For the result file."""
    device = runner.memory.device
    return {"model": arguments.model.resolve().name, "dtype": device.dtype_name, "threads": device.threads}


def draw_tensor(name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, seed: int = 0) -> Tensor:
    """Norms are ones, all else is normal; special tokens have zeros, so that no greedy answer ends by itself."""
    if "norm" in name:
        return torch.ones(shape, dtype=dtype, device=device)
    source = torch.Generator(device).manual_seed(name_hash(name) ^ seed)
    drawn = torch.empty(shape, dtype=dtype, device=device).normal_(0.0, SCALE, generator=source)
    if name in (EMBEDDING, HEAD):
        drawn[: len(SPECIAL_TOKENS)] = 0
    return drawn


def random_weights(
    config: ModelConfig, dtype: torch.dtype, device: torch.device, drawn_as: torch.dtype | None = None
) -> ModelWeights:
    """All parameters of a model that is not packed.

    Args:
        drawn_as: the format whose numbers they are; None: dtype.
    """
    weights, targets = empty_weights(config, dtype, device)
    for name, target in targets.items():
        target.fill(draw_tensor(name, target.shape, drawn_as or dtype, device).to(dtype))
    return weights


def random_runner(
    config: Mapping[str, Any],
    engine: EngineConfig,
    find: FindOperators = find_operators,
    drawn_as: torch.dtype | None = None,
) -> ModelRunner:
    """A runner over a model of this config.json, ready to step. Sets torch's threads.

    Args:
        find: what it computes with.
        drawn_as: see random_weights.

    Raises:
        StartupError: the device or its memory.
    """
    model, choice = parse_model_config(dict(config)), choose_device(engine)
    apply_threads(choice)
    size_bytes = model.num_parameters * choice.dtype.itemsize
    memory = plan_memory(model, engine, choice, size_bytes, free_memory_bytes(choice.device))
    operators = find(model, choice)
    with torch.inference_mode():
        weights = random_weights(model, choice.dtype, choice.device, drawn_as)
    runner = ModelRunner(model, engine, memory, weights, operators)
    warm_up(runner)
    runner.open_graphs(lambda done, total: None)
    return runner
