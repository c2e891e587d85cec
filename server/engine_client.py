"""The event loop's client of the engine: posts requests to its inbox, turns its tokens into text. Thread: loop.

    step's rows ─▶ RequestSequence: text of a token ─▶ its writer, or its request's sink ─▶ the stream's frames

Text that needs no further processing (whole characters, no possible start of a stop string, no logprobs) is written at
once by the loop over the step's rows; otherwise the sequence's detokenizer decides what may be written.

The loop decides where text ends: a stop string is found here, a step or more after its token was sampled. The handle
then drops later tokens, tells the engine how many were kept, and limits the usage to that count, so that the same
request has the same text and usage whatever the timing.
"""

import asyncio
import logging
import math
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Protocol

import msgspec

from core.detokenizer import Detokenizer, PlainTexts, TokenTable
from core.errors import ErrorKind, ServiceError
from core.incident import Pace
from core.thoughts import ThoughtFollower
from core.types import (
    Cancel,
    ClearCache,
    Cost,
    Delta,
    EngineMark,
    EngineSnapshot,
    EngineStats,
    FinishReason,
    Inspect,
    Message,
    Pause,
    Request,
    Resume,
    StepDelivery,
    Submit,
    TokenChunk,
    TokenLogprobs,
    Usage,
    Watch,
    Watched,
)
from server.gate.text_rules import Matcher, ScreenedDetokenizer, TextScreen
from server.observing.metrics import Histogram
from server.observing.timing import Stage
from server.wire.messages import TextWriter

logger = logging.getLogger(__name__)

# How much is handled before other callbacks of the loop, and the engine thread, get their turn: so many rows, or as
# many as make so many connections write, whichever comes first. A write costs more than all else of a token, and
# streams that share a connection share its write. 16, 32, 64, 128, 256 rows cost 8.1, 7.6, 7.1, 7.4, 6.9 us a token,
# on average over both protocols and 64 and 256 streams: from 64 on the difference is noise.
SLICE_ROWS = 64
SLICE_CONNECTIONS = 16

NOT_YET = -math.inf  # before the first text
PACE_EVERY_S, MAX_PACES = 0.25, 4096  # a quarter of an hour of work
LOOK_S, MOST_LOOKS = 0.05, 200  # while the files of a cleared cache are deleted
_CLEARED = "The prefix cache is cleared"


class DeltaSink(Protocol):
    """Receives a request's output. Called on the loop, during the delivery of the step; must not block.

    `choice` is the sequence's number among those that share the sink; `now_s` is when the output came, monotonic.
    """

    def on_begin(self, choice: int, now_s: float) -> None:
        """The choice's first token has arrived; its text follows."""

    def on_text(self, choice: int, text: str) -> None:
        """The text of new tokens, without logprobs or an end."""

    def text_writer(self, choice: int) -> TextWriter | None:
        """A function equivalent to on_text(choice, ...), for a choice that has had text before.

        Valid until the choice has ended or been cancelled. None: not yet; ask again after the next on_text.
        """

    def on_delta(self, choice: int, delta: Delta, now_s: float) -> None: ...

    def on_answer(self, choice: int, ids: Sequence[int], cut_text: str) -> None:
        """All token ids of a choice, after its last text, if the request has tells_answer.

        Args:
            ids: without the id that ends the answer.
            cut_text: the end of their text that a stop string cut off.
        """

    def on_mark(self, choice: int, num_tokens: int) -> int:
        """The choice's number of tokens: 0 when it is submitted, later at least its mark.

        Returns: its next mark, the number of tokens at which to call again.
        """

    def on_engine_mark(self, mark: EngineMark) -> None:
        """One of its requests has passed a stage before its first token."""

    def on_stage(self, before: Stage, stage: Stage, now_s: float) -> None:
        """Likewise, for a request that an upstream answers."""

    def on_upstream(self, shown: str, fallback: str | None) -> None:
        """An upstream gets the request; `fallback`: another model's name, if used. Called before the first text."""

    def fail(self, error: ServiceError, is_refusal: bool = False) -> None:
        """The answer ends with an error; on_end still comes.

        Args:
            is_refusal: nothing was computed, so the ledger drops the request.
        """

    def on_end(self, usage: Usage, error: str | None) -> None:
        """The request has ended; called exactly once. With an error, sequences without a finish reason have failed."""


@dataclass(slots=True, eq=False)
class SequenceProgress:
    """How much of one choice has arrived, and when.

    Attributes:
        mark: the number of kept tokens at which to call the sink's on_mark.
        num_tokens: received and kept.
        last_s: when its last text came.
        discounted_s: later than last_s if the last token had no text, or if time until then does not count as waiting.
    """

    choice: int
    mark: int
    num_tokens: int = 0
    is_finished: bool = False
    last_s: float = NOT_YET
    discounted_s: float = NOT_YET

    @property
    def waits_since_s(self) -> float:
        """When the wait for its next token started."""
        return max(self.last_s, self.discounted_s)


@dataclass(slots=True, eq=False, kw_only=True)
class RequestSequence(SequenceProgress):
    """One sequence of a request: its tokens and their text.

    Attributes:
        logprobs: of tokens that no delta has reported yet; None: not requested.
        num_unreported: tokens whose text is withheld: half a character, or the possible start of a stop string.
        sampled_ids: set at its end, if requested; some may come after its end.
        write: writes the text of a token in plain_texts; None: the next token goes through the detokenizer.
    """

    index: int
    detokenizer: Detokenizer | ScreenedDetokenizer
    logprobs: list[TokenLogprobs] | None
    num_unreported: int = 0
    sampled_ids: tuple[int, ...] = ()
    write: TextWriter | None = None
    plain_texts: PlainTexts = field(init=False)
    _writer: TextWriter | None = None  # the sink's, once there is one

    def __post_init__(self) -> None:
        self.plain_texts = self.detokenizer.plain_texts

    def push(self, token_id: int) -> str:
        """The text that may be written now."""
        detokenizer, num_before = self.detokenizer, self.num_tokens
        self.write = None
        detokenizer.num_tokens_kept = num_before  # some have been counted where write was called
        text = detokenizer.push_token(token_id)
        self.num_tokens = detokenizer.num_tokens_kept
        self.num_unreported += self.num_tokens - num_before
        return text

    def write_text(self, text: str, sink: DeltaSink) -> None:
        """Write text without logprobs. If nothing is withheld, the next token's plain text may go straight to write."""
        self.num_unreported = 0
        if self._writer is not None:
            self._writer(text)
        else:
            sink.on_text(self.choice, text)
            self._writer = sink.text_writer(self.choice)
        if self.detokenizer.is_plain and not self.is_finished:
            self.write = self._writer

    def finish_text(self) -> str:
        """The text still withheld; a broken character that ends here may complete a stop string."""
        self.write = None
        self.detokenizer.num_tokens_kept = self.num_tokens
        return self.detokenizer.finish()

    def end(self) -> None:
        """Ignore later tokens."""
        self.write = None
        self.is_finished = True

    def take_delta(
        self, text: str, reason: FinishReason | None = None, stop_logprobs: TokenLogprobs | None = None
    ) -> Delta:
        """The text, with the count and the logprobs of the tokens that no delta has reported yet."""
        logprobs = None
        if self.logprobs is not None:
            logprobs = tuple(self.logprobs)
            self.logprobs.clear()
        num_new, self.num_unreported = self.num_unreported, 0
        return Delta(
            text=text,
            num_tokens=num_new,
            logprobs=logprobs,
            stop_logprobs=stop_logprobs,
            finish_reason=reason,
            stop_string=None if reason is None else self.detokenizer.stopped_by,
        )


@dataclass(slots=True, eq=False)
class RequestHandle:
    """A submitted request: tokens in, deltas out, until its one terminal chunk.

    An exception of its sink is a bug: EngineClient then calls break_off(), and other requests continue.

    Args:
        post: puts a message into the engine's inbox.
        gaps: observes the seconds between a sequence's texts.

    Attributes:
        cost: set when it ends.
    """

    request: Request
    sequences: list[RequestSequence]
    sink: DeltaSink
    post: Callable[[Message], None]
    gaps: Histogram
    cost: Cost = field(default_factory=Cost)
    _is_cancelled: bool = False
    _has_ended: bool = False
    _error: str | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens of its completions that have arrived and are kept."""
        return sum(sequence.num_tokens for sequence in self.sequences)

    @property
    def token_ids(self) -> list[list[int]]:
        """Token ids of its completions, once it has ended and if requested: those kept, with the ids that end them."""
        return [list(sequence.sampled_ids[: sequence.num_tokens]) for sequence in self.sequences]

    @property
    def num_thought_tokens(self) -> int:
        """Of these."""
        return sum(sequence.detokenizer.num_thought_tokens for sequence in self.sequences)

    # Called by its owner.

    def cancel(self, reason: FinishReason) -> None:
        """End all its sequences. Later tokens are dropped; on_end still comes. Idempotent."""
        if self._is_cancelled:
            return
        self._is_cancelled = True
        for sequence in self.sequences:
            if not sequence.is_finished:
                self._finish(sequence, reason)

    def finish(self, reason: FinishReason, now_s: float) -> None:
        """End all its sequences where they are, and report that to the sink. Later tokens are dropped."""
        for sequence in self.sequences:
            if not sequence.is_finished:
                text = sequence.finish_text()
                end = sequence.detokenizer.stop_reason if sequence.detokenizer.is_stopped else reason
                self._finish(sequence, end)
                self._report_delta(sequence, sequence.take_delta(text, end), now_s)

    def pause(self) -> None:
        self.post(Pause(self.request.request_id))

    def resume(self) -> None:
        self.post(Resume(self.request.request_id))

    # Called with the engine's output.

    def on_token(self, sequence: RequestSequence, token_id: int, now_s: float) -> None:
        """One sampled token, without logprobs and not the last."""
        if not sequence.is_finished:
            self._report(sequence, sequence.push(token_id), now_s)

    def on_chunk(self, chunk: TokenChunk, now_s: float) -> None:
        """Tokens with logprobs, the prompt's logprobs, or the end of a sequence."""
        if chunk.error is not None:
            self._error = chunk.error
        if self.request.tells_answer and chunk.finish_reason is not None:
            stop = () if chunk.stop_id is None else (chunk.stop_id,)
            self.sequences[chunk.index].sampled_ids = (*chunk.answer_ids, *stop)
        if chunk.prompt_logprobs:  # for every sequence: they have one prompt
            delta = Delta(text="", num_tokens=0, prompt_logprobs=chunk.prompt_logprobs)
            for sequence in self.sequences:
                if not sequence.is_finished:
                    self.sink.on_delta(sequence.choice, delta, now_s)
            return
        sequence = self.sequences[chunk.index]
        if is_heard := not sequence.is_finished:
            self._take_chunk(sequence, chunk, now_s)
        detokenizer = sequence.detokenizer
        if chunk.answer_ids and (is_heard or detokenizer.stopped_by is not None):  # a cancel cuts its text anywhere
            self.sink.on_answer(sequence.choice, chunk.answer_ids[: sequence.num_tokens], detokenizer.cut_text)

    def pass_mark(self, sequence: RequestSequence) -> None:
        """The sequence has reached its mark."""
        if not sequence.is_finished:
            sequence.mark = self.sink.on_mark(sequence.choice, sequence.num_tokens)

    def end(self, chunk: TokenChunk) -> None:
        """End by the terminal chunk, after on_chunk(): the engine's usage, with the loop's count of kept tokens.

        The engine may have been told of a stop too late.
        """
        assert chunk.usage is not None, "it is terminal"
        self.cost = chunk.cost
        counts = {"num_completion_tokens": self.num_tokens, "num_thought_tokens": self.num_thought_tokens}
        counts["num_predicted_tokens"] = min(self.num_tokens, chunk.usage.num_predicted_tokens)
        if self.request.beams is not None:  # all that they have computed counts
            del counts["num_completion_tokens"]
        self._end(msgspec.structs.replace(chunk.usage, **counts), self._error)

    def fail(self, message: str) -> None:
        """End here: the engine is gone, and no terminal chunk will come."""
        for sequence in self.sequences:
            sequence.end()
        num_kept = self.num_tokens
        # If tokens have come, the prompt was computed; otherwise an unknown part of it
        num_prompt = len(self.request.prompt_ids) if num_kept else 0
        self._end(Usage(num_prompt, num_kept, num_thought_tokens=self.num_thought_tokens), message)

    def break_off(self) -> None:
        """Cancel it, because writing its answer raised the exception that is being handled."""
        logger.exception("an answer cannot be written", extra={"request_id": self.request.request_id})
        self._error = "The server failed to write this answer. The fault is not in the request."
        self.cancel(FinishReason.ERROR)

    def _report(self, sequence: RequestSequence, text: str, now_s: float) -> None:
        """Report the text of the newest tokens."""
        if sequence.detokenizer.is_stopped:
            reason = sequence.detokenizer.stop_reason
            self._finish(sequence, reason)
            self._report_delta(sequence, sequence.take_delta(text, reason), now_s)
        elif sequence.logprobs is not None:
            if text or sequence.logprobs:
                self._report_delta(sequence, sequence.take_delta(text), now_s)
        elif text:
            self._note_time(sequence, now_s)
            sequence.write_text(text, self.sink)
        else:
            sequence.discounted_s = now_s
        if sequence.num_tokens >= sequence.mark:
            self.pass_mark(sequence)

    def _take_chunk(self, sequence: RequestSequence, chunk: TokenChunk, now_s: float) -> None:
        num_before = sequence.num_tokens
        ids = chunk.token_ids
        text = sequence.push(ids[0]) if len(ids) == 1 else "".join(map(sequence.push, ids))
        if sequence.logprobs is not None and chunk.logprobs:
            sequence.logprobs.extend(chunk.logprobs[: sequence.num_tokens - num_before])
        if chunk.finish_reason is None or sequence.detokenizer.is_stopped:
            self._report(sequence, text, now_s)
            return
        text += sequence.finish_text()
        sequence.end()
        sequence.num_unreported += chunk.num_sequence_tokens - sequence.num_tokens
        sequence.num_tokens = chunk.num_sequence_tokens  # a stop id counts, and has no text
        is_stopped = sequence.detokenizer.is_stopped
        reason = sequence.detokenizer.stop_reason if is_stopped else chunk.finish_reason
        delta = sequence.take_delta(text, reason, None if is_stopped else chunk.stop_logprobs)
        if chunk.pooled or chunk.stop_id is not None:
            stop_id = None if is_stopped else chunk.stop_id
            delta = msgspec.structs.replace(delta, pooled=chunk.pooled, stop_id=stop_id)
        self._report_delta(sequence, delta, now_s)

    def _report_delta(self, sequence: RequestSequence, delta: Delta, now_s: float) -> None:
        if delta.num_tokens or delta.pooled:
            self._note_time(sequence, now_s)
        self.sink.on_delta(sequence.choice, delta, now_s)

    def _note_time(self, sequence: RequestSequence, now_s: float) -> None:
        last_s, sequence.last_s = sequence.last_s, now_s
        if last_s == NOT_YET:
            self.sink.on_begin(sequence.choice, now_s)
        else:
            self.gaps.observe(now_s - last_s)

    def _finish(self, sequence: RequestSequence, reason: FinishReason) -> None:
        sequence.end()
        self.post(Cancel(self.request.request_id, reason, sequence.index, sequence.num_tokens))

    def _end(self, usage: Usage, error: str | None) -> None:
        if self._has_ended:
            return
        self._has_ended = True
        try:
            self.sink.on_end(usage, error)
        except Exception:  # there is nothing left to cancel
            logger.exception("an answer cannot be ended", extra={"request_id": self.request.request_id})


@dataclass(slots=True)
class LoopWork:
    """The loop's time for tokens since the start: text, stop strings, events. Measured once per slice."""

    num_tokens: int = 0
    busy_s: float = 0.0

    def cost_s(self, since: tuple[int, float], num_tokens: int) -> float:
        """The cost of so many tokens, at the mean price since then: (num_tokens, busy_s) as they were."""
        num, busy_s = self.num_tokens - since[0], self.busy_s - since[1]
        return busy_s * num_tokens / num if num else 0.0


class WriteQueue(Protocol):
    """The connections that receive deltas. WriteBatch implements it."""

    @property
    def num_writes(self) -> int:
        """The number of writes to connections so far, flushed or waiting."""

    def flush_all(self) -> None:
        """Write what is waiting."""


@dataclass(slots=True, eq=False)
class EngineClient:
    """Turns requests into deltas, over an engine thread's inbox and outbox.

    Args:
        post: puts a message into the engine's inbox.
        output: flushed after each slice.
        call_soon: the loop's.
        clock: monotonic seconds; read twice a slice.
        on_delivered: called for each delivery once it has been handled in full.
        gaps: observes the seconds from one text of a sequence to the next.

    Attributes:
        stats: the engine's latest.
        _paces: its progress every PACE_EVERY_S, while it worked.
    """

    post: Callable[[Message], None]
    output: WriteQueue
    call_soon: Callable[[Callable[[], None]], object]
    clock: Callable[[], float]
    on_delivered: Callable[[], None]
    gaps: Histogram
    stats: EngineStats = field(default_factory=EngineStats)
    work: LoopWork = field(default_factory=LoopWork)
    _handles: dict[str, RequestHandle] = field(default_factory=dict)
    _deliveries: deque[StepDelivery] = field(default_factory=deque)
    _next_row: int = 0  # of the first delivery
    _error: ServiceError | None = None
    # Not yet answered, by serial
    _inspections: deque[tuple[int, asyncio.Future[EngineSnapshot]]] = field(default_factory=deque)
    _num_inspections: int = 0
    on_watched: Callable[[Watched], None] = lambda watched: None
    _paces: deque[Pace] = field(default_factory=lambda: deque(maxlen=MAX_PACES))

    def submit(
        self,
        request: Request,
        sink: DeltaSink,
        table: TokenTable,
        continues_text: bool,
        first_choice: int = 0,
        forbidden: Sequence[Matcher] = (),
        follow: Callable[[], ThoughtFollower | None] = lambda: None,
    ) -> RequestHandle:
        """Queue the request.

        Args:
            table: the text of the model's tokens.
            continues_text: the output continues the prompt's text (completions), instead of starting a new one.
            first_choice: the number of its first sequence; the others follow.
            forbidden: where it matches, a sequence's text ends with content_filter.
            follow: makes the tracker of a sequence's reasoning.

        Raises:
            ServiceError: the engine has failed.
        """
        if self._error is not None:
            raise self._error
        sampling = request.sampling
        sequences = []
        detokenizer: Detokenizer | ScreenedDetokenizer
        for i in range(request.num_sequences):
            choice = first_choice + i
            logprobs: list[TokenLogprobs] | None = None if sampling.num_logprobs is None else []
            detokenizer = Detokenizer(table, sampling.stop, continues_text, sampling.min_tokens, follow())
            if forbidden:
                detokenizer = ScreenedDetokenizer(detokenizer, TextScreen(forbidden))
            known = RequestSequence(
                choice, sink.on_mark(choice, 0), index=i, detokenizer=detokenizer, logprobs=logprobs
            )
            sequences.append(known)
        handle = self._handles[request.request_id] = RequestHandle(request, sequences, sink, self.post, self.gaps)
        self.post(Submit(request))
        return handle

    def inspect(self) -> Awaitable[EngineSnapshot]:
        """The engine's state, after all earlier messages took effect. Raises ServiceError: the engine has failed."""
        if self._error is not None:
            raise self._error
        self._num_inspections += 1
        future: asyncio.Future[EngineSnapshot] = asyncio.get_running_loop().create_future()
        self._inspections.append((self._num_inspections, future))
        self.post(Inspect(self._num_inspections))
        return future

    def watch(self, seconds: float, tells_blocks: bool, on_watched: Callable[[Watched], None]) -> None:
        """Get steps and preemptions reported for this long, and the block map once."""
        self.on_watched = on_watched
        if self._error is None:
            self.post(Watch(self.clock() + seconds, tells_blocks))

    def paces(self) -> list[Pace]:
        """The engine's progress until now; empty: too few steps were measured."""
        return [*self._paces, *self._pace()]

    def _pace(self) -> Iterator[Pace]:
        stats = self.stats
        if stats.outlook is not None:
            outlook = stats.outlook
            yield Pace(stats.landed_s, stats.busy_s, stats.predicted_s, outlook.fit, outlook.late_p90)

    async def clear_cache(self) -> None:
        """Clear the prefix cache, so that no request finds earlier blocks, even after a restart. Returns when done.

        Raises:
            ServiceError: the engine has failed; or files could not be deleted, or not in time, so that requests after a
                restart may still find their blocks.
        """
        self.post(ClearCache())
        store = (await self.inspect()).store
        for _ in range(MOST_LOOKS):
            if not store.is_deleting:
                break
            await asyncio.sleep(LOOK_S)
            store = (await self.inspect()).store
        if store.is_deleting:
            message = f"{_CLEARED}, but its files are still being deleted. Send the request again."
            raise ServiceError(ErrorKind.UNAVAILABLE, message, "cache_files_pending", retry_after_s=MOST_LOOKS * LOOK_S)
        if store.num_undeleted:
            message = (
                f"{_CLEARED}, but {store.num_undeleted} of its files could not be deleted: a restarted server may read "
                "them. Fix the cause, which is in the log, and send the request again."
            )
            raise ServiceError(ErrorKind.ENGINE, message, "cache_files_undeleted")

    def deliver(self, delivery: StepDelivery) -> None:
        """Take one step's output: the first slice now, the others in turns with the loop's other work."""
        if self._error is not None:  # all requests have been ended
            self.on_delivered()
            return
        self._deliveries.append(delivery)
        if len(self._deliveries) == 1:
            self._deliver_slice()

    def fail(self, message: str) -> None:
        """The engine is gone: end every request, and refuse new ones. Idempotent."""
        while self._deliveries:
            self._deliver_slice()
        self._error = ServiceError(ErrorKind.ENGINE, message, "engine_error")
        while self._handles:
            _, handle = self._handles.popitem()
            handle.fail(message)
        while self._inspections:
            _, future = self._inspections.popleft()
            if not future.done():
                future.set_exception(self._error)
        self.output.flush_all()

    def _deliver_slice(self) -> None:
        if not self._deliveries:
            return
        try:
            now_s = self.clock()
            self._take_slice(self._deliveries[0], now_s)
            self.work.busy_s += self.clock() - now_s
        except Exception:  # not of a single request: those are broken off below. Go on with the rows behind
            logger.exception("a step's output cannot be accounted for")
        finally:
            self.output.flush_all()
        if self._deliveries:
            self.call_soon(self._deliver_slice)

    def _take_slice(self, delivery: StepDelivery, now_s: float) -> None:
        start, num_rows = self._next_row, len(delivery.token_ids)
        if delivery.marks and start == 0:
            for mark in delivery.marks:
                try:
                    self._handles[mark.request_id].sink.on_engine_mark(mark)
                except Exception:
                    self._break_off(mark.request_id)
        if start < num_rows:
            self._deliver_rows(delivery, start, now_s)
            self.work.num_tokens += self._next_row - start
        if self._next_row == num_rows:
            self._deliveries.popleft()
            self._next_row = 0
            try:
                if delivery.chunks:
                    self._deliver_chunks(delivery.chunks, now_s)
                self.stats = delivery.stats
                if not self._paces or now_s >= self._paces[-1].at_s + PACE_EVERY_S:
                    self._paces += self._pace()
                if delivery.snapshot is not None:
                    self._answer_inspections(delivery.snapshot)
                if delivery.watched is not None:
                    self.on_watched(delivery.watched)
            finally:
                self.on_delivered()  # or the engine would wait for it

    def _break_off(self, request_id: str) -> None:
        """End the request whose output raised the exception that is being handled."""
        handle = self._handles.get(request_id)
        if handle is None:
            logger.exception("the engine reports a request that is not in progress", extra={"request_id": request_id})
        else:
            handle.break_off()

    def _deliver_rows(self, delivery: StepDelivery, row: int, now_s: float) -> None:
        """Deliver a slice of the rows, from this one on. Advances _next_row."""
        handles, output = self._handles, self.output
        last = min(row + SLICE_ROWS, len(delivery.token_ids))
        most_writes = output.num_writes + SLICE_CONNECTIONS
        columns = delivery.request_ids[row:last], delivery.indexes[row:last], delivery.token_ids[row:last]
        rows = zip(*columns, strict=True)
        before_s, num_alike = 0.0, 0  # neighbours' last texts mostly came at one time: so many at this one
        # One row makes one write at most: so many can be handled before the count is worth a look
        while row < last and (num_rows := most_writes - output.num_writes) > 0:
            num_rows = min(num_rows, last - row)
            row = self._next_row = row + num_rows
            for request_id, index, token_id in islice(rows, num_rows):
                try:
                    handle = handles[request_id]
                    sequence = handle.sequences[index]
                    write = sequence.write
                    if write is None:
                        handle.on_token(sequence, token_id, now_s)
                        continue
                    try:
                        text = sequence.plain_texts[token_id]
                    except IndexError:  # the tokenizer knows of no such id
                        text = None
                    if not text:
                        handle.on_token(sequence, token_id, now_s)
                        continue
                    if sequence.last_s != before_s:
                        if num_alike:
                            self.gaps.observe(now_s - before_s, num_alike)
                        before_s, num_alike = sequence.last_s, 0
                    num_alike += 1
                    sequence.last_s = now_s
                    sequence.num_tokens = num_tokens = sequence.num_tokens + 1
                    write(text)
                    if num_tokens >= sequence.mark:
                        handle.pass_mark(sequence)
                except Exception:  # whatever a detokenizer or a writer of answers can raise
                    self._break_off(request_id)
        if num_alike:
            self.gaps.observe(now_s - before_s, num_alike)

    def _deliver_chunks(self, chunks: Sequence[TokenChunk], now_s: float) -> None:
        for chunk in chunks:
            try:
                self._handles[chunk.request_id].on_chunk(chunk, now_s)
            except Exception:
                self._break_off(chunk.request_id)
            if chunk.is_terminal:
                handle = self._handles.pop(chunk.request_id, None)
                if handle is not None:
                    handle.end(chunk)
        self.work.num_tokens += len(chunks)

    def _answer_inspections(self, snapshot: EngineSnapshot) -> None:
        while self._inspections and self._inspections[0][0] <= snapshot.serial:
            _, future = self._inspections.popleft()
            if not future.done():  # its caller may have left
                future.set_result(snapshot)
