"""Requests through an engine that is stepped by hand, with the moment of each token: what the GPU's figures come from.

Where a step's time goes is seen from the runner's calls: planning and telling between them, sending, and waiting.
"""

import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

from core.engine import Engine
from core.plan import Runner, RunnerLimits, StepOutput, StepPlan
from core.scheduler import Scheduler
from core.types import Cancel, FinishReason, Message, Request, SamplingParams, StepDelivery, Submit


class ClockedRunner:
    """A runner, and the seconds that its calls take: forward and sample send, collect waits."""

    def __init__(self, runner: Runner[Any]) -> None:
        self._runner = runner
        self.limits: RunnerLimits = runner.limits
        self.send_s = 0.0
        self.wait_s = 0.0

    def forward(self, plan: StepPlan) -> Any:
        started_s = time.perf_counter()
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
        runner: stepped by this engine alone, until close.
    """

    def __init__(self, runner: Runner[Any], seed: int = 0) -> None:
        self.clocked = ClockedRunner(runner)
        self.tokens: dict[str, list[int]] = defaultdict(list)
        self.times_s: dict[str, list[float]] = defaultdict(list)
        self.sent_s: dict[str, float] = {}
        self.cached_tokens: dict[str, int] = {}  # of those that have ended
        self.num_open = 0
        self._inbox: deque[Message] = deque()
        self._random, self._vocab_size = Random(seed), runner.limits.vocab_size
        self._scheduler = Scheduler(runner.limits, (), lambda: 0)
        self._engine = Engine(self._scheduler, self.clocked, time.monotonic, self._inbox, self._take)

    def prompt(self, num_tokens: int) -> tuple[int, ...]:
        """Random, and with no other's beginning."""
        return tuple(self._random.choices(range(self._vocab_size), k=num_tokens))

    def submit(self, prompt_ids: tuple[int, ...], num_tokens: int) -> str:
        name = str(len(self.sent_s))
        sampling = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
        request = Request(request_id=name, prompt_ids=prompt_ids, sampling=sampling, arrival_s=time.monotonic())
        self.sent_s[name] = time.perf_counter()
        self.num_open += 1
        self._inbox.append(Submit(request))
        return name

    def cancel(self, name: str) -> None:
        self._inbox.append(Cancel(name, FinishReason.CANCELLED))

    def step(self) -> bool:
        return self._engine.step()

    def run_until(self, is_done: Callable[[], bool]) -> None:
        """
        Raises:
            RuntimeError: the engine has nothing more to do before that.
        """
        while not is_done():
            if not self._engine.step() and not is_done():
                raise RuntimeError("the engine stands still, and not all that was waited for has come")

    def cancel_all(self) -> None:
        for name in self.sent_s:
            if name not in self.cached_tokens:
                self.cancel(name)
        self.run_until(lambda: self.num_open == 0)

    def have_all(self, names: Sequence[str], num_tokens: int) -> bool:
        return all(len(self.tokens[name]) >= num_tokens for name in names)

    def ttft_s(self, name: str) -> float:
        return self.times_s[name][0] - self.sent_s[name]

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
