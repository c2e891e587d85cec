"""Runs the real scheduler and engine with a simulated clock, cost model and runner: thousands of steps a second.

The simulated runner keeps its KV in blocks like a real one, and each sampled token is a hash of the content it finds
there. So a wrong table, a lost copy or a block reused too early gives other tokens than the reference, which is
computed from the tokens alone. Thread: its caller's.
"""

import sys
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import islice, pairwise
from operator import itemgetter

import numpy as np

from core.config import INTER_TOKEN_TARGET
from core.engine import Engine
from core.kv_cache import BlockCopies
from core.plan import (
    PENDING,
    Int32Array,
    PooledRow,
    PromptTargets,
    Runner,
    RunnerLimits,
    SequenceStart,
    StepOutput,
    StepPlan,
    TimedRow,
)
from core.scheduler import Scheduler
from core.step_cost import LEAST_STEPS, StepWork
from core.types import Message, Request, StepDelivery, Submit, TokenLogprobs, Usage

Prefix = bytes | memoryview  # token ids, 32 bits each

_NOTHING = -1  # in the KV: never written
_NO_COPIES = BlockCopies()


class SimulatedClock:
    """Monotonic seconds that pass by advance() only."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


@dataclass(frozen=True, slots=True)
class CostModel:
    """How long a step takes: fixed_s + token_s x tokens computed.

    The defaults are the linear layers of a 0.5B bf16 model on two Zen 5 cores, prepacked: measured 21.8 ms at 1 row,
    28.8 at 16, 41.1 at 32, 199 at 256. Attention is left out.
    """

    fixed_s: float = 0.0211
    token_s: float = 0.0007

    def step_s(self, plan: StepPlan) -> float:
        return self.fixed_s + self.token_s * plan.num_tokens


def timed_rows(took_s: Callable[[StepWork], float]) -> tuple[TimedRow, ...]:
    """What a server has timed at start: chunks of a prompt, and single tokens."""
    found = []
    for start, end in ((0, 64), (64, 256), (256, 512), (0, 512), (512, 513)):
        work = StepWork()
        work.add(start, end, num_prompt_tokens=512)
        found.append(TimedRow(start, end, 512, took_s(work)))
    return tuple(found * LEAST_STEPS)


def _hashed(prefix: Prefix, seed: int) -> int:
    return zlib.crc32(prefix, zlib.crc32(seed.to_bytes(8, "little")))


def _sampled(start: SequenceStart, hashed: int, length: int, vocab_size: int) -> int:
    """The token that follows so many, of whose hash it is made; no stop id before min_tokens."""
    while length - start.num_prompt_tokens < start.sampling.min_tokens and hashed % vocab_size in start.stop_ids:
        hashed += 1
    return hashed % vocab_size


def logprobs_after(prefix: Prefix, token_id: int, num_top: int) -> TokenLogprobs:
    """The simulated logprobs of a token after a prefix, and of num_top others: hashes of all of it."""

    def logprob(other: int) -> float:
        return -(zlib.crc32(other.to_bytes(4, "little"), zlib.crc32(prefix)) % 4096) / 256

    return TokenLogprobs(token_id, logprob(token_id), tuple((other, logprob(other)) for other in range(num_top)))


def continuation(start: SequenceStart, limits: RunnerLimits, max_tokens: int = sys.maxsize) -> list[int]:
    """The reference: the tokens that are sampled for a sequence from here on, an ending stop id included."""
    num_held = min(limits.max_model_len, limits.num_blocks * limits.block_size)
    max_length = min(start.num_prompt_tokens + start.sampling.max_tokens, num_held)
    hashed = _hashed(np.array(start.token_ids, np.int32).tobytes(), start.seed)  # of all tokens so far
    sampled: list[int] = []
    for length in range(len(start.token_ids), min(max_length, len(start.token_ids) + max_tokens)):
        sampled.append(token_id := _sampled(start, hashed, length, limits.vocab_size))
        if token_id in start.stop_ids:
            break
        hashed = zlib.crc32(token_id.to_bytes(4, "little"), hashed)
    return sampled


@dataclass(slots=True, eq=False)
class _Step:
    """A step that was sent and not collected; the device finishes it at end_s."""

    plan: StepPlan
    end_s: float
    output: StepOutput | None = None


class SimulatedRunner:
    """A core.plan.Runner whose KV holds token ids and whose steps take time of the clock, by their cost.

    The device computes them one after the other while the host does something else. It works with lists, because its
    steps have a few rows of a few tokens, for which arrays would take several times as long.

    Args:
        host_s: time that the host takes to plan and send each step.
    """

    def __init__(self, limits: RunnerLimits, cost: CostModel, clock: SimulatedClock, host_s: float = 0.0) -> None:
        self.limits = limits
        self._cost, self._clock, self._host_s = cost, clock, host_s
        self._free_s = 0.0  # when the device has finished all steps
        self._steps: deque[_Step] = deque()
        self._kv = [_new_block(b"\xff" * 4 * limits.block_size) for _ in range(limits.num_blocks)]
        self._host = [_new_block(b"\xff" * 4 * limits.block_size) for _ in range(limits.num_host_blocks)]
        self._num_entries = -(-limits.max_model_len // limits.block_size)
        self._tables: list[list[int]] = [[] for _ in range(limits.max_sequences)]  # of blocks, by slot
        self._window_tables: list[list[int]] = [[] for _ in range(limits.max_sequences)]  # of window blocks, by slot
        self._starts: dict[int, SequenceStart] = {}
        self._last_sampled = [0] * limits.max_sequences  # by slot
        self._num_pooled = [0] * limits.max_sequences  # by slot: tokens of a prompt that is pooled whole

    def forward(self, plan: StepPlan) -> StepPlan:
        for start in plan.sequence_starts:
            self._starts[start.slot] = start
            self._tables[start.slot] = [_NOTHING] * self._num_entries
            self._window_tables[start.slot] = [_NOTHING] * self._num_entries
        self._copy(plan)
        for slot, position, block in _rows_of(plan.table_slots, plan.table_positions, plan.table_blocks):
            if block >= 0:
                self._tables[slot][position] = block
            else:
                self._window_tables[slot][position] = ~block
        ids, offset = plan.token_ids.tolist(), 0
        for slot, first, length in _rows_of(plan.slots, plan.starts, plan.lengths):
            self._store(slot, first, ids[offset : offset + length])
            offset += length
        for row in (one.row for one in plan.pooled_rows if one.pooling.kind != "last"):
            slot, first = int(plan.slots[row]), int(plan.starts[row])
            assert first == 0 or first <= self._num_pooled[slot], "a token was left out"
            self._num_pooled[slot] = first + int(plan.lengths[row])
        if self._host_s:
            self._clock.advance(self._host_s)
        self._free_s = max(self._free_s, self._clock()) + self._cost.step_s(plan)
        self._steps.append(_Step(plan, self._free_s))
        return plan

    def sample(self, ticket: StepPlan, masks: Int32Array | None = None) -> None:
        rows, sampled = [], []
        coming = iter(() if masks is None else masks)
        for row, samples in enumerate(ticket.samples.tolist()):
            if not samples:
                continue
            slot, end = int(ticket.slots[row]), int(ticket.starts[row] + ticket.lengths[row])
            for length in range(end - ticket.num_drafts.get(row, 0), end + 1):
                token_id = self._sample_row(slot, length)
                if row in ticket.masked_rows:
                    token_id = _next_allowed(token_id, next(coming))
                self._last_sampled[slot] = token_id
                rows.append(row)
                sampled.append(token_id)
        told = {targets.row: self._follow(ticket, targets) for targets in ticket.prompt_targets}
        assert self._steps[-1].plan is ticket, "another step was sent before this one was sampled"
        self._steps[-1].output = StepOutput(
            rows=np.array(rows, np.int32),
            token_ids=np.array(sampled, np.int32),
            prompt_logprobs=told,
            pooled={one.row: self._pool(ticket, one) for one in ticket.pooled_rows if one.is_last},
        )

    def collect(self, ticket: StepPlan) -> StepOutput:
        """Let time pass until the step is done; earlier steps that were not collected are forgotten."""
        while (step := self._steps.popleft()).plan is not ticket:
            pass
        if step.end_s > self._clock():
            self._clock.advance(step.end_s - self._clock())
        assert step.output is not None, "it was never sampled"
        return step.output

    def _copy(self, plan: StepPlan) -> None:
        """All offloads, and the sources of copies on write, are read before anything is written."""
        copies = plan.host_copies or _NO_COPIES
        for slot, block in copies.offloads.items():
            self._host[slot] = _new_block(self._kv[block])
        for block, slot in copies.restores.items():
            self._kv[block] = _new_block(self._host[slot])
        found = [copy for copy in _rows_of(plan.copy_sources, plan.copy_targets) if copy[0] >= 0]
        sources = [_new_block(self._kv[source]) for source, _ in found]
        for (_, target), content in zip(found, sources, strict=True):
            self._kv[target] = content

    def _store(self, slot: int, start: int, token_ids: list[int]) -> None:
        size, table, last_sampled = self.limits.block_size, self._tables[slot], self._last_sampled[slot]
        for position, token_id in enumerate(token_ids, start):
            block = table[position // size]
            if block == _NOTHING:
                raise ValueError("a row writes where its slot has no block")
            self._kv[block][position % size] = last_sampled if token_id == PENDING else token_id

    def _sample_row(self, slot: int, length: int) -> int:
        start = self._starts[slot]
        return _sampled(start, _hashed(self._prefix(slot, length), start.seed), length, self.limits.vocab_size)

    def _follow(self, plan: StepPlan, targets: PromptTargets) -> list[TokenLogprobs]:
        """The logprobs of the prompt's tokens after the content of the blocks."""
        slot, first = int(plan.slots[targets.row]), int(plan.starts[targets.row]) + targets.first
        prefix = self._prefix(slot, first + len(targets.token_ids))
        return [
            logprobs_after(prefix[: first + i + 1], token_id, targets.num_top)
            for i, token_id in enumerate(targets.token_ids)
        ]

    def _pool(self, plan: StepPlan, pooled: PooledRow) -> bytes:
        """The vector of the prompt that is in the blocks; of all tokens only if the slot has computed all."""
        slot, end = int(plan.slots[pooled.row]), int(plan.starts[pooled.row] + plan.lengths[pooled.row])
        assert pooled.pooling.kind == "last" or self._num_pooled[slot] == end, "a token was left out"
        return pooled_vector(self._prefix(slot, end))

    def _prefix(self, slot: int, length: int) -> memoryview:
        """The sequence's tokens, read from its blocks."""
        num_blocks = -(-length // self.limits.block_size)
        content = b"".join([self._kv[block] for block in self._tables[slot][:num_blocks]])
        return memoryview(content).cast("i")[:length]


def pooled_vector(prompt: Prefix) -> bytes:
    """What a simulated model makes of a prompt: 8 numbers, float32."""
    digest = blake2b(bytes(prompt), digest_size=8).digest()
    return (np.frombuffer(digest, np.uint8).astype(np.float32) - 127.5).tobytes()


def _next_allowed(token_id: int, mask: Int32Array) -> int:
    """The token itself, or the next one that the mask allows."""
    allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
    return int(allowed[np.searchsorted(allowed, token_id) % len(allowed)])


def _new_block(content: bytes | memoryview) -> memoryview:
    """A block of 32-bit token ids; all bits set means _NOTHING."""
    return memoryview(bytearray(content)).cast("i")


def _rows_of(*columns: Int32Array) -> Iterator[tuple[int, ...]]:
    return zip(*(column.tolist() for column in columns), strict=True)


@dataclass(slots=True)
class RequestTrace:
    """One request's result: its tokens by sequence, and when they came (simulated seconds)."""

    request: Request
    num_steps_before: int = 0  # of the engine, when the request was submitted
    num_steps_to_first_token: int | None = None
    first_token_s: float | None = None
    end_s: float | None = None
    usage: Usage | None = None  # None: it was refused
    token_ids: dict[int, list[int]] = field(default_factory=dict)
    token_times_s: dict[int, list[float]] = field(default_factory=dict)

    @property
    def gaps_s(self) -> list[float]:
        """Seconds from each token of a sequence to its next."""
        return [later - earlier for times in self.token_times_s.values() for earlier, later in pairwise(times)]

    def add(self, index: int, token_id: int, now: float, num_steps: int) -> None:
        if self.first_token_s is None:
            self.first_token_s = now
            self.num_steps_to_first_token = num_steps - self.num_steps_before
        self.token_ids.setdefault(index, []).append(token_id)
        self.token_times_s.setdefault(index, []).append(now)


class Simulation:
    """Runs a list of requests through scheduler and engine, each submitted at its arrival_s.

    Args:
        num_may_enter: how many more requests the engine may be given now, by the number it has; by default any.
        on_step: called after every step.
        runner: makes the model.
        inter_token_target: see EngineConfig.
        messages: for the engine, each with its time: as clients leave, or read slowly.
        scheduler: makes it.
    """

    def __init__(
        self,
        limits: RunnerLimits,
        cost: CostModel,
        requests: Iterable[Request],
        eos_ids: tuple[int, ...] = (),
        num_may_enter: Callable[[int], int] = lambda num_inside: sys.maxsize,
        on_step: Callable[[Scheduler], None] = lambda scheduler: None,
        runner: Callable[[RunnerLimits, CostModel, SimulatedClock], Runner[StepPlan]] = SimulatedRunner,
        inter_token_target: float | None = INTER_TOKEN_TARGET,
        messages: Iterable[tuple[float, Message]] = (),
        scheduler: Callable[..., Scheduler] = Scheduler,
    ) -> None:
        self.clock = SimulatedClock()
        self.traces = {request.request_id: RequestTrace(request) for request in requests}
        self.scheduler = scheduler(limits, eos_ids, seeds=lambda: 0, inter_token_target=inter_token_target)
        self._coming = deque(sorted((trace.request for trace in self.traces.values()), key=lambda r: r.arrival_s))
        self._messages = deque(sorted(messages, key=itemgetter(0)))
        self._inbox: deque[Message] = deque()
        self._num_inside = 0
        self._num_may_enter = num_may_enter
        self._on_step = on_step
        self._engine = Engine(self.scheduler, runner(limits, cost, self.clock), self.clock, self._inbox, self._take)

    def run(self) -> list[RequestTrace]:
        """Step until every request has ended, skipping idle time. Returns the traces in order of arrival."""
        while self._coming or self._num_inside:
            self.advance()
        return sorted(self.traces.values(), key=lambda trace: trace.request.arrival_s)

    def advance(self) -> bool:
        """Run one step, or skip idle time. False: there is nothing to wait for."""
        self._enter()
        if self._engine.step():
            self._on_step(self.scheduler)
        elif self._coming or self._messages:
            arrivals = (request.arrival_s for request in islice(self._coming, 1))
            next_s = min([*arrivals, *(at_s for at_s, _ in islice(self._messages, 1))])
            self.clock.now = max(self.clock.now, next_s)
        else:
            return False
        return True

    def _enter(self) -> None:
        num_may_enter = self._num_may_enter(self._num_inside)
        while self._coming and self._coming[0].arrival_s <= self.clock.now and num_may_enter > 0:
            request = self._coming.popleft()
            if not self._admits(request):
                self.traces[request.request_id].end_s = request.arrival_s
                continue
            num_may_enter -= 1
            self.traces[request.request_id].num_steps_before = self.scheduler.stats().num_steps
            self._inbox.append(Submit(request))
            self._num_inside += 1
        while self._messages and self._messages[0][0] <= self.clock.now:
            self._inbox.append(self._messages.popleft()[1])

    def _admits(self, request: Request) -> bool:
        """Whether it is taken; otherwise it has ended as it came, without a usage."""
        return True

    def _take(self, delivery: StepDelivery) -> None:
        now = self.clock.now
        for request_id, index, token_id in zip(delivery.request_ids, delivery.indexes, delivery.token_ids, strict=True):
            self.traces[request_id].add(index, token_id, now, delivery.stats.num_steps)
        for chunk in delivery.chunks:
            if chunk.usage is not None:
                self.traces[chunk.request_id].end_s, self.traces[chunk.request_id].usage = now, chunk.usage
                self._num_inside -= 1
