"""The engine of a simulated server: stepped from outside the loop, its news handed to the loop on a schedule.

While a step is computed the loop runs on: for as long as the cost model says, connections are served, and what they
post is found by the step's second look into the inbox.
"""

from collections import deque
from collections.abc import Callable, Iterable

from core.engine import Engine, EngineBroken
from core.plan import BlockStore, DeviceError, StepOutput, StepPlan
from core.scheduler import Scheduler
from core.simulation import SimulatedClock, SimulatedRunner
from core.types import FinishReason, Message, StepDelivery, TokenLogprobs
from tests.fakes import raising_runner
from tests.server.virtual_loop import VirtualTimeLoop

Schedule = Callable[[StepDelivery], Iterable[tuple[float, StepDelivery]]]


def at_once(delivery: StepDelivery) -> Iterable[tuple[float, StepDelivery]]:
    """Each step's news as they are."""
    return [(0.0, delivery)]


def token_by_token(delivery: StepDelivery) -> Iterable[tuple[float, StepDelivery]]:
    """Each token and each chunk in a delivery of its own."""
    columns = zip(delivery.request_ids, delivery.indexes, delivery.token_ids, strict=True)
    if delivery.marks:
        yield 0.0, StepDelivery([], [], [], [], delivery.stats, delivery.marks)
    for request_id, index, token_id in columns:
        yield 0.0, StepDelivery([request_id], [index], [token_id], [], delivery.stats)
    for chunk in delivery.chunks:
        yield 0.0, StepDelivery([], [], [], [chunk], delivery.stats)


def late_by(delay_s: float) -> Schedule:
    """Each step's news, when the loop has been busy elsewhere for so long."""
    return lambda delivery: [(delay_s, delivery)]


class LoopClock(SimulatedClock):
    """The loop's time. To let it pass is to let the loop run."""

    def __init__(self, loop: VirtualTimeLoop) -> None:
        self._loop = loop

    def __call__(self) -> float:
        return self._loop.time()

    def advance(self, seconds: float) -> None:
        self._loop.advance(seconds)


class LogprobRunner(SimulatedRunner):
    """Tells logprobs as well: of each token id the same, the lowest ids being the likeliest."""

    def collect(self, ticket: StepPlan) -> StepOutput:
        output = super().collect(ticket)
        for i, (row, token_id) in enumerate(zip(output.rows.tolist(), output.token_ids.tolist(), strict=True)):
            num_logprobs = self._starts[int(ticket.slots[row])].sampling.num_logprobs
            if num_logprobs is not None:
                top = tuple((likely, -0.5 - likely) for likely in range(num_logprobs))
                output.logprobs[i] = TokenLogprobs(token_id=token_id, logprob=-0.5 - token_id, top=top)
        return output


class SteppedEngine:
    """Both ways between a loop and its engine.

    Args:
        take: is handed the news, on the loop, when `schedule` says.

    Attributes:
        posted, delivered: all messages, all news.
        has_work: the last step had some.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: SimulatedRunner,
        loop: VirtualTimeLoop,
        schedule: Schedule,
        take: Callable[[StepDelivery], None],
        store: BlockStore | None = None,
    ) -> None:
        self.posted: list[Message] = []
        self.delivered: list[StepDelivery] = []
        self.is_broken = False
        self.has_work = False
        self._loop = loop
        self._schedule = schedule
        self._take = take
        self._inbox: deque[Message] = deque()
        self._on_its_way: deque[StepDelivery] = deque()
        self._engine = Engine(scheduler, runner, loop.time, self._inbox, self._send, store)

    @property
    def wants_step(self) -> bool:
        return self.has_work or (bool(self._inbox) and not self.is_broken)

    @property
    def is_telling(self) -> bool:
        """Some news have not been taken yet."""
        return bool(self._on_its_way)

    def post(self, message: Message) -> None:
        self.posted.append(message)
        self._inbox.append(message)

    def step(self) -> bool:
        """Compute one step. False: there was nothing to do."""
        self.has_work = False
        try:
            self.has_work = self._engine.step()
        except EngineBroken:
            self.is_broken = True
        return self.has_work

    def shutdown(self, reason: FinishReason, error: str | None) -> None:
        self._engine.shutdown(reason, error)

    def _send(self, delivery: StepDelivery) -> None:
        self.delivered.append(delivery)
        for delay_s, part in self._schedule(delivery):
            self._on_its_way.append(part)
            if delay_s:
                self._loop.call_later(delay_s, self._hand_over)
            else:
                self._loop.call_soon(self._hand_over)

    def _hand_over(self) -> None:
        self._take(self._on_its_way.popleft())


MortalRunner = raising_runner(DeviceError("fell off the bus"), at=5)


class SickRunner(SimulatedRunner):
    """Every row that it samples is found broken."""

    def collect(self, ticket: StepPlan) -> StepOutput:
        output = super().collect(ticket)
        output.failed_rows.update((int(row), "The logits are not finite.") for row in output.rows)
        return output
