"""A day of a gateway's arrivals in simulated time: conversations of many tenants, 64 upstreams that come and go.

What is tried is the choice (server/upstream/pool.py): each upstream here computes prompts one after another, keeps the
blocks of the last ones, forgets them all when it goes, and answers several at once. Nothing is sent.
"""

import heapq
import itertools
import math
import random
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from server.upstream.pool import Access, LeadingBlocks, Pool, Slot, Upstream
from server.upstream.settings import ModelSettings, UpstreamSettings

DAY_S = 86_400.0
BLOCK = 64  # tokens
KEPT_BLOCKS = 4000  # of an upstream's prompts: 256,000 tokens
PREFILL_TOKENS_S = 400.0  # of an upstream
ANSWER_S = 6.0
MAX_REQUESTS = 16  # in progress at an upstream
NUM_TENANTS = 40
SYSTEM_BLOCKS = 12  # that all conversations of a tenant begin with
TURN_BLOCKS = 6  # that each turn adds, and its answer
MEAN_TURNS, THINK_S = 8, 40.0
OUTAGE_S = 600.0
DAY_REQUESTS_S = 1.5


class DayFigures(NamedTuple):
    """
    Args:
        hit_ratio: of the cached tokens that one upstream which keeps everything would find.
        num_lost: answers that had begun at an upstream that went.
    """

    num_answers: int
    hit_ratio: float
    median_ttft_s: float
    p99_ttft_s: float
    num_refused: int
    num_lost: int
    num_moved: int


class FakeLoop:
    """The time, and futures without a loop."""

    now_s = 0.0

    def time(self) -> float:
        return self.now_s

    def create_future(self) -> Any:
        return Future()


class RoundRobin(Pool):
    """What is compared with."""

    def _choose(self, slot: Slot, now_s: float) -> Upstream | None:
        free = [one for one in self.upstreams if one.takes_requests(now_s) and one.num_active < MAX_REQUESTS]
        free = [one for one in free if one is not slot.failed]
        return min(free, key=lambda one: one.num_requests, default=None)


@dataclass
class Box:
    """What an upstream really has."""

    free_s: float = 0.0
    blocks: OrderedDict[int, None] = field(default_factory=OrderedDict)

    def compute(self, prompt: LeadingBlocks, now_s: float) -> tuple[int, float]:
        """How many tokens of the prompt were there, and when its first token comes."""
        num_known = sum(1 for _ in itertools.takewhile(self.blocks.__contains__, prompt.hashes))
        for block in prompt.hashes:
            self.blocks[block] = None
            self.blocks.move_to_end(block)
        while len(self.blocks) > KEPT_BLOCKS:
            self.blocks.popitem(last=False)
        self.free_s = max(self.free_s, now_s) + (prompt.num_tokens - num_known * BLOCK) / PREFILL_TOKENS_S
        return num_known * BLOCK, self.free_s


@dataclass(eq=False)
class Asked:
    """A request of the simulation. Attributes: attempt: raised when it is sent elsewhere; what was due then is not."""

    tenant: str
    prompt: LeadingBlocks
    came_s: float
    slot: Slot | None = None
    attempt: int = 0
    has_begun: bool = False


class PoolDay:
    """
    Attributes:
        num_hits, num_best_hits: prompts' tokens found where they were sent, or in one upstream that keeps everything.
        ttfts_s: of the requests that have begun.
    """

    def __init__(self, seed: int, num_upstreams: int = 64, pool_type: type[Pool] = Pool) -> None:
        self.rng = random.Random(seed)
        self.loop = FakeLoop()
        upstreams = tuple(
            UpstreamSettings(url=f"http://h{i}:1", version="new" if i % 8 == 0 else "old") for i in range(num_upstreams)
        )
        settings = ModelSettings(name="m", upstreams=upstreams, max_requests=MAX_REQUESTS)
        self.pool = pool_type(settings, self.loop, Access())  # type: ignore[arg-type]
        self.boxes = {one: Box() for one in self.pool.upstreams}
        self.all_blocks: set[int] = set()
        self.num_hits = self.num_best_hits = self.num_refused = self.num_lost = self.num_moved = 0
        self.ttfts_s: list[float] = []
        self._open: set[Asked] = set()
        self._serials = itertools.count()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        for one in self.pool.upstreams:
            one.note_probe(None, 0.0)

    def run(self, requests_s: float, until_s: float = DAY_S) -> None:
        """
        Args:
            requests_s: that come each second, at the mean of a day.
        """
        self._at(0.0, lambda: self._begin_conversation(requests_s / MEAN_TURNS, until_s))
        self._at(OUTAGE_S, lambda: self._fail_one(until_s))
        while self._events:
            self.loop.now_s, _, event = heapq.heappop(self._events)
            event()
        assert not self._open
        assert self.pool.num_waiting == 0
        for one in self.pool.upstreams:
            assert (one.num_active, one.num_waiting_tokens) == (0, 0)

    def _at(self, due_s: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (due_s, next(self._serials), event))

    def _begin_conversation(self, rate: float, until_s: float) -> None:
        now_s = self.loop.now_s
        tenant = min(int(self.rng.paretovariate(0.6)), NUM_TENANTS)
        system = [hash((tenant, i)) for i in range(SYSTEM_BLOCKS)]
        self._take_turn(f"t{tenant}", system, 1 + int(self.rng.expovariate(1 / (MEAN_TURNS - 1))))
        busy = 1 + 0.8 * math.sin(2 * math.pi * now_s / DAY_S)
        if (next_s := now_s + self.rng.expovariate(rate * busy)) < until_s:
            self._at(next_s, lambda: self._begin_conversation(rate, until_s))

    def _take_turn(self, tenant: str, said: list[int], num_left: int) -> None:
        said = said + [hash((id(said), next(self._serials))) for _ in range(self.rng.randint(1, TURN_BLOCKS))]
        prompt = LeadingBlocks(len(said) * BLOCK, BLOCK, tuple(said))
        asked = Asked(tenant, prompt, self.loop.now_s)
        self._open.add(asked)
        asked.slot = self.pool.take_slot(prompt, 0, tenant)
        asked.slot.granted.add_done_callback(lambda future: self._granted(asked, future))
        if num_left > 1:
            pause_s = ANSWER_S + self.rng.expovariate(1 / THINK_S)
            self._at(self.loop.now_s + pause_s, lambda: self._take_turn(tenant, said, num_left - 1))

    def _granted(self, asked: Asked, future: Any) -> None:
        if future.exception() is not None:
            self.num_refused += 1
            self._open.discard(asked)
        else:
            attempt = asked.attempt
            self._at(self.loop.now_s, lambda: self._compute(asked) if attempt == asked.attempt else None)

    def _compute(self, asked: Asked) -> None:
        now_s, slot = self.loop.now_s, asked.slot
        assert slot is not None
        if slot.upstream is None:  # it went before the request came to it
            return
        assert slot.upstream.num_active <= MAX_REQUESTS
        if not isinstance(self.pool, RoundRobin) and not asked.attempt and asked.came_s == now_s:
            assert slot.upstream.settings.version == self.pool.version_of(asked.tenant, now_s)
        num_hits, first_s = self.boxes[slot.upstream].compute(asked.prompt, now_s)
        self.num_hits += num_hits
        self.num_best_hits += BLOCK * sum(
            1 for _ in itertools.takewhile(self.all_blocks.__contains__, asked.prompt.hashes)
        )
        self.all_blocks.update(asked.prompt.hashes)
        attempt = asked.attempt
        self._at(first_s, lambda: self._begin(asked, attempt))

    def _begin(self, asked: Asked, attempt: int) -> None:
        if asked.attempt == attempt and asked in self._open:
            assert asked.slot is not None
            asked.has_begun = True
            asked.slot.note_begun()
            self.ttfts_s.append(self.loop.now_s - asked.came_s)
            self._at(self.loop.now_s + ANSWER_S, lambda: self._leave(asked))

    def _leave(self, asked: Asked) -> None:
        if asked in self._open:
            assert asked.slot is not None
            self._open.discard(asked)
            asked.slot.leave()

    def _fail_one(self, until_s: float) -> None:
        """An upstream goes: what waits there is sent elsewhere if it may be, what has begun is lost."""
        upstream = self.rng.choice(self.pool.upstreams)
        for _ in range(3):
            upstream.note_probe("it does not answer", self.loop.now_s)
        self.boxes[upstream] = Box()
        held = [one for one in self._open if one.slot is not None and one.slot.upstream is upstream]
        for asked in sorted(held, key=lambda one: one.came_s):
            assert asked.slot is not None
            asked.attempt += 1
            if not asked.has_begun and self.pool.move(asked.slot, takes_same=True):
                self.num_moved += 1
                asked.slot.granted.add_done_callback(lambda future, asked=asked: self._granted(asked, future))
            else:
                self.num_lost += 1
                self._leave(asked)
        self._at(self.loop.now_s + OUTAGE_S, lambda: self._recover(upstream))
        if self.loop.now_s + 3 * OUTAGE_S < until_s:
            self._at(self.loop.now_s + self.rng.expovariate(1 / OUTAGE_S), lambda: self._fail_one(until_s))

    def _recover(self, upstream: Upstream) -> None:
        for _ in range(2):
            upstream.note_probe(None, self.loop.now_s)

    def figures(self) -> DayFigures:
        ttfts_s = sorted(self.ttfts_s)
        median_s, p99_s = (ttfts_s[int(part * (len(ttfts_s) - 1))] for part in (0.5, 0.99))
        counts = self.num_refused, self.num_lost, self.num_moved
        return DayFigures(len(ttfts_s), self.num_hits / self.num_best_hits, median_s, p99_s, *counts)


def run_day(pool_type: type[Pool], seed: int) -> DayFigures:
    day = PoolDay(seed, pool_type=pool_type)
    day.run(DAY_REQUESTS_S)
    return day.figures()
