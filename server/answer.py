"""The answer to one generation while it comes into being: deltas in, a surface's bytes out. Thread: loop."""

import asyncio
import logging
from collections.abc import Callable, Sequence

from core.errors import ErrorKind, ServiceError
from core.types import Cost, Delta, EngineMark, FinishReason, Prefilling, Request, Usage
from server.answer_body import AnswerBody, StreamedBody
from server.api.replies import WIRE_REASONS, cut_short, status_of
from server.backend import NEVER, Backend, ChoiceClock, GenerationHandle, ShortWay
from server.gate.admission import Place
from server.gate.allowance import Allowance
from server.gate.deadline_watch import DeadlineWatch
from server.gate.deadlines import Deadlines
from server.gate.queue_news import QueueNews
from server.gate.quota import Ticket
from server.gate.text_rules import Matcher
from server.held_body import HeldBody
from server.ledger.ledger import End, Entry, unavailable
from server.observing.accounting import CLIENT_GONE, Outcome
from server.observing.metrics import Metrics
from server.observing.timing import Stage, StageClock
from server.wire.sse import comment
from server.wire.stream import HttpStream

logger = logging.getLogger(__name__)


class Answer:
    """The answer to one call while it comes into being, over all its prompts and sequences.

    Implements server.backend.DeltaSink, for the request of each prompt.
    It is open until it is complete, broken off by an error, or its client has gone; from then on it writes nothing, and
    is finished once every request it submitted has had its terminal news.

    Attributes:
        news: what it tells of its wait; None: nothing.
        forbidden: what it must not say.
    """

    def __init__(
        self,
        stream: HttpStream,
        body: AnswerBody,
        timings: StageClock,
        clock: Callable[[], float],
        metrics: Metrics,
        deadlines: Deadlines,
        place: Place,
    ) -> None:
        self.news: QueueNews | None = None
        self.forbidden: Sequence[Matcher] = ()
        self._stream = stream
        self._body = body
        self._timings = timings
        self._clock = clock
        self._metrics = metrics
        self._place = place
        self._entry: Entry | None = None  # in the ledger, until it is settled
        self._held: HeldBody | None = None  # until it is reserved there
        self._is_unreserved = False  # it could not be: whatever was computed meanwhile is nobody's to pay
        self._is_settling = False  # its end has been handed to the ledger
        self._is_unsettled = False  # and could not be written
        self._backend: Backend | None = None  # once it is asked
        self._work_before = (0, 0.0)  # of the loop, for tokens of all requests
        self._handles: list[GenerationHandle] = []
        self._owners: list[GenerationHandle] = []  # by choice
        self._prompt_lengths: list[int] = []  # of the handles
        self._usages: list[Usage] = []  # of the handles whose terminal news has come
        self._error: ServiceError | None = None
        self._is_open = True
        self._clocks: list[ChoiceClock] = []  # by choice
        self._watch = DeadlineWatch(
            deadlines, timings, self._clocks, self._num_untold, lambda: self._held is not None, self.fail
        )
        self._reasons: dict[FinishReason, None] = {}  # a set in order
        self._ends: list[FinishReason] = []  # of the choices that have ended
        self._num_holds = 0  # by a slow reader, by an empty quota
        self._ticket: Ticket | None = None  # while it holds tokens
        self._allowance: Allowance | None = None
        self._finished: asyncio.Future[Usage] = asyncio.get_running_loop().create_future()

    @property
    def is_open(self) -> bool:
        return self._is_open

    def submit(
        self,
        backend: Backend,
        requests: list[Request],
        continues_text: bool,
        ticket: Ticket,
        entry: Entry | None = None,
    ) -> None:
        """Hand every prompt's request to the backend; their choices are numbered through.

        Args:
            ticket: what they cost is reserved on it, and settled when the last has ended.
            entry: of the ledger, where there is one: the first byte waits until it is reserved, the end until it is
                settled.

        Raises:
            ServiceError: the caller has too little left, or the ledger or the backend takes none now; close() cancels
                those it had taken.
        """
        ticket.reserve(requests)
        self._ticket = ticket
        if ticket.is_bounded:
            self._allowance = Allowance(self, ticket, requests, asyncio.get_running_loop())
        self._backend, self._work_before = backend, (backend.work.num_tokens, backend.work.busy_s)
        self._timings.enter(Stage.QUEUE, self._clock())
        if entry is None:
            self._body.start()
        else:
            held = HeldBody(self._body)
            entry.reserve(ticket.num_reserved, self._progress, self._on_reserved)
            self._entry, self._body, self._held = entry, held, held
        for request in requests:
            self._prompt_lengths.append(len(request.prompt_ids))
            first_choice = len(self._clocks)
            self._clocks += [ChoiceClock() for _ in range(request.num_sequences)]
            handle = backend.submit(request, self, continues_text, first_choice, self.forbidden)
            self._handles.append(handle)
            self._owners += [handle] * request.num_sequences
        self._watch.arm()

    async def wait_finished(self) -> Outcome:
        """Until all its requests have ended. An error that no head has gone out for is the caller's to tell."""
        usage = await self._finished
        is_billed = not (self._is_unreserved or self._is_unsettled)
        if is_billed:
            self._metrics.finished.update(self._ends)
        return Outcome(usage, tuple(self._reasons), self._error, self._is_unreserved, is_billed)

    def close(self) -> None:
        """Let go of timers, and of what is still being generated if the task itself is cancelled. Idempotent."""
        try:
            self._cancel()
        finally:
            self._body.close()
        if self._has_ended:  # no news will come of any; settled already, unless that failed
            usage = total_usage(self._usages)
            self._settle(usage)
            if self._entry is not None and not self._is_settling:
                self._write_end(self._entry, usage)

    def on_text(self, choice: int, text: str, now_s: float) -> None:
        self._time_token(choice, now_s)
        if self._is_open:
            self._body.add_text(choice, text, now_s)

    def short_way(self, choice: int) -> ShortWay | None:
        if not self._is_open or self._held is not None:
            return None
        clock = self._clocks[choice]
        return ShortWay(self._body.text_teller(choice, clock), clock)

    def on_delta(self, choice: int, delta: Delta, now_s: float) -> None:
        if delta.num_tokens:
            self._time_token(choice, now_s)
        reason = delta.finish_reason
        if reason is not None:
            self._reasons[reason] = None
            self._ends.append(reason)
            self._watch.drop(choice)
            if self._clocks[choice].last_s is not None:
                self._place.on_choice_end()
            if self._allowance is not None:
                self._allowance.drop(choice)
        # What ends a choice for no reason that the wire knows is told with the end of the request, as an error
        if self._is_open and (delta.text or delta.logprobs or delta.prompt_logprobs or reason in WIRE_REASONS):
            self._body.add(choice, delta, now_s)

    def _time_token(self, choice: int, now_s: float) -> None:
        clock = self._clocks[choice]
        last_s, clock.last_s = clock.last_s, now_s
        if last_s is not None:
            self._metrics.inter_token.observe(now_s - last_s)
        else:
            self._begin_choice(choice, now_s)

    def _num_untold(self, choice: int) -> int:
        return self._owners[choice].num_untold(choice)

    def _begin_choice(self, choice: int, now_s: float) -> None:
        if self._timings.first_token_s is None:
            self._time_first_token(now_s)
            self._end_news()
        self._place.on_first_token(choice, now_s)
        self._watch.begin()

    def say(self, text: str) -> None:
        """Send a comment, once the stream may say anything."""
        if self._held is None and isinstance(self._body, StreamedBody):
            self._body.say(comment(text))

    def _end_news(self) -> None:
        if self.news is not None:
            self.news.close()

    def _time_first_token(self, now_s: float) -> None:
        timings = self._timings
        timings.first_token_s = now_s
        self._metrics.ttft.observe(now_s - timings.accepted_s)
        is_first_told = self._body.is_streamed and not self._stream.head_sent  # by a keep-alive it may have been
        timings.enter(Stage.FIRST_FLUSH if is_first_told else Stage.DECODE, now_s)

    def on_engine_mark(self, mark: EngineMark) -> None:
        if not isinstance(mark, Prefilling):
            self._timings.on_engine_mark(mark)
        elif self.news is not None:
            self.news.on_prefill(mark.num_tokens)

    def on_mark(self, choice: int, num_tokens: int) -> int:
        return NEVER if self._allowance is None else self._allowance.on_mark(choice, num_tokens)

    def on_end(self, usage: Usage, error: str | None) -> None:
        self._usages.append(usage)
        is_last = self._has_ended
        try:
            if is_last:
                self._end_decode()
                self._settle(total_usage(self._usages))  # whatever becomes of the answer
            if error is not None:
                self.fail(ServiceError(ErrorKind.ENGINE, error, "engine_error"))
            if is_last:
                self._finish()
        except Exception as fault:  # whatever a surface or settling can raise: its task must not wait for ever
            self._break_down(fault)

    def fail(self, error: ServiceError) -> None:
        """Break the answer off: an error event where the head is out, otherwise an error answer at the end."""
        if not self._is_open:
            return
        self._error = error
        try:
            self._body.break_off(error)
        except Exception as fault:  # it cannot even be told: the connection's end tells it
            self._break_down(fault)
        is_late = error.kind is ErrorKind.DEADLINE_EXCEEDED
        self._cancel(FinishReason.DEADLINE if is_late else FinishReason.CANCELLED)
        self._leave_ledger_behind()

    def on_disconnect(self) -> None:
        if self._is_open:
            self._metrics.num_disconnects += 1
            self._cancel()
            self._leave_ledger_behind()

    def on_blocked(self) -> None:
        """The reader has stopped."""
        self._place.pause()
        self.pause()

    def on_unblocked(self) -> None:
        self._place.resume()
        self.resume()

    def pause(self) -> None:
        """Until as many resume() have come."""
        self._num_holds += 1
        if self._num_holds == 1:
            self._watch.hold(self._clock())
            for handle in self._handles:
                handle.pause()

    def resume(self) -> None:
        self._num_holds -= 1
        if self._num_holds == 0:
            self._watch.release(self._clock())
            for handle in self._handles:
                handle.resume()

    def end_early(self) -> None:
        now_s = self._clock()
        for handle in self._handles:
            handle.finish(FinishReason.LENGTH, now_s)

    def _settle(self, usage: Usage) -> None:
        if self._allowance is not None:
            self._allowance.close()
        if self._ticket is not None and self._held is None:  # else _on_reserved() knows what it is to pay
            self._ticket.settle(Usage(0, 0) if self._is_unreserved else usage)
            self._ticket = None

    def _cancel(self, reason: FinishReason = FinishReason.CANCELLED) -> None:
        self._is_open = False
        for handle in self._handles:
            handle.cancel(reason)
        self._watch.close()
        self._end_news()
        if self._allowance is not None:
            self._allowance.close()

    @property
    def _has_ended(self) -> bool:
        """The backend has told the end of every request."""
        return len(self._usages) == len(self._handles)

    def _end_decode(self) -> None:
        timings = self._timings
        timings.end_s = self._clock()
        timings.enter(Stage.SETTLE, timings.end_s)
        if self._backend is not None:
            num_tokens = sum(usage.num_completion_tokens for usage in self._usages)
            timings.detokenize_s = self._backend.work.cost_s(self._work_before, num_tokens)

    def _finish(self) -> None:
        usage = total_usage(self._usages)
        self._metrics.count_generation(usage, self._timings)
        broken = [reason for reason in self._reasons if reason not in WIRE_REASONS]
        if broken:
            self.fail(cut_short(broken[0]))
        if self._entry is not None:
            self._write_end(self._entry, usage)
        if self._entry is None or not self._is_open:  # only what is whole waits until it is settled: errors do not
            self._complete(usage)

    def _complete(self, usage: Usage) -> None:
        if self._finished.done():
            return  # the task that waited was cancelled
        if self._is_open:
            self._is_open = False
            self._watch.close()
            self._end_news()
            self._timings.enter(Stage.LAST_FLUSH, self._clock())
            self._body.complete(usage, {} if self._allowance is None else self._allowance.extras)
            self._stream.call_once_written(self._timings.finish)
        self._finished.set_result(usage)

    def _break_down(self, fault: Exception) -> None:
        """Whatever a surface can raise: the request's task must not wait for ever. It calls close() when it ends."""
        if not self._finished.done():
            self._finished.set_exception(fault)
        else:
            logger.error("an answer that nobody waits for has failed", exc_info=fault)
            self.close()

    # The ledger's side.

    def _on_reserved(self, is_durable: bool) -> None:
        held, self._held = self._held, None
        self._is_unreserved = not is_durable
        try:
            if self._has_ended:
                self._settle(total_usage(self._usages))
            if not is_durable:
                self.fail(unavailable())
            elif held is not None and self._is_open:
                self._body = held.release()
                self._watch.arm()
        except Exception as fault:
            self._break_down(fault)
            self._cancel()

    def _leave_ledger_behind(self) -> None:
        """The answer is no longer open: where it waited for the ledger alone, it is over, and its row tells how."""
        if self._entry is not None and self._is_settling:
            usage = total_usage(self._usages)
            self._entry.retell(self._end(usage))
            self._complete(usage)

    def _on_settled(self, usage: Usage, is_durable: bool) -> None:
        self._is_unsettled = not is_durable
        if not is_durable:
            self.fail(unavailable())
        try:
            self._complete(usage)
        except Exception as fault:
            self._break_down(fault)

    def _write_end(self, entry: Entry, usage: Usage) -> None:
        entry.settle(self._end(usage), lambda is_durable: self._on_settled(usage, is_durable))
        self._is_settling = True

    def _end(self, usage: Usage) -> End:
        error = self._error
        reason = ",".join(self._reasons) or None
        cost = Cost(
            device_s=sum(handle.cost.device_s for handle in self._handles),
            kv_block_s=sum(handle.cost.kv_block_s for handle in self._handles),
        )
        told = 200 if self._is_open else CLIENT_GONE
        status = told if error is None else status_of(error)
        if status == CLIENT_GONE:
            reason = FinishReason.CANCELLED
        code = None if error is None else error.code
        return End(usage, cost, reason, status, code, self._timings.stages_ms())

    def _progress(self) -> Usage:
        """As far as it has come: a prompt of which something has been said was computed."""
        pairs = zip(self._handles, self._prompt_lengths, strict=True)
        num_prompt_tokens = sum(length for handle, length in pairs if handle.num_tokens)
        return Usage(
            num_prompt_tokens=num_prompt_tokens,
            num_completion_tokens=sum(handle.num_tokens for handle in self._handles),
            num_cached_tokens=min(num_prompt_tokens, self._timings.num_cached_tokens),
        )


def total_usage(usages: list[Usage]) -> Usage:
    return Usage(
        num_prompt_tokens=sum(usage.num_prompt_tokens for usage in usages),
        num_completion_tokens=sum(usage.num_completion_tokens for usage in usages),
        num_cached_tokens=sum(usage.num_cached_tokens for usage in usages),
    )
