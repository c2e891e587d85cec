"""The backend of this process: requests to the engine's inbox, its deliveries to deltas. Thread: loop.

The loop decides where text ends: a stop string is found here, a step or more after its token was drawn. The handle
then drops what came later, tells the engine how many tokens were kept, and cuts the usage to that count, so that the
same request has the same text and the same usage whatever the timing.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

import msgspec

from core.detokenizer import Detokenizer, PlainTexts, TokenTable
from core.errors import ErrorKind, ServiceError
from core.snapshot import EngineSnapshot
from core.types import (
    Cancel,
    ClearCache,
    Cost,
    Delta,
    EngineMark,
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
)
from server.backend import DeltaSink, LoopWork, TextTeller
from server.gate.text_rules import Matcher
from server.gate.text_screen import ScreenedDetokenizer, TextScreen

logger = logging.getLogger(__name__)

# What is handled before other callbacks of the loop, and the engine thread, get their turn: so many rows, or as many as
# make so many connections write, whichever comes first. A write costs more than all else of a token, and streams that
# share a connection share its write. 16, 32, 64, 128, 256 rows cost 8.1, 7.6, 7.1, 7.4, 6.9 us a token, on average
# over both protocols and 64 and 256 streams (bench/slices.py, on a busy machine): from 64 on, nothing shows any more.
SLICE_ROWS = 64
SLICE_CONNECTIONS = 16  # DESIGN, The way through it


class Output(Protocol):
    """Where deltas end up: the connections, each with what it has to write. server.wire.write_batch implements it."""

    @property
    def num_dirty(self) -> int:
        """Connections that wait to be flushed."""
        ...

    def flush_all(self) -> None:
        """Write what there is."""
        ...


class _Sequence:
    """The loop's side of one sequence of a request."""

    __slots__ = (
        "_plain",
        "choice",
        "detokenizer",
        "index",
        "is_finished",
        "logprobs",
        "mark",
        "num_tokens",
        "num_tokens_told",
        "plain_texts",
        "tell",
    )

    def __init__(
        self, index: int, choice: int, detokenizer: Detokenizer | ScreenedDetokenizer, has_logprobs: bool, mark: int
    ) -> None:
        self.index = index
        self.mark = mark  # the sink is told when so many are kept
        self.choice = choice
        self.detokenizer = detokenizer
        self.num_tokens = 0  # kept, of those received
        self.num_tokens_told = 0  # of these, in deltas
        self.is_finished = False
        self.logprobs: list[TokenLogprobs] | None = [] if has_logprobs else None
        self.tell: TextTeller | None = None  # while its tokens take the short way, of EngineClient._deliver_rows
        self._plain = detokenizer if isinstance(detokenizer, Detokenizer) else None
        self.plain_texts: PlainTexts = () if self._plain is None else self._plain.plain_texts

    @property
    def num_untold(self) -> int:
        """Tokens that no delta has told yet."""
        return 0 if self.tell is not None else self.num_tokens - self.num_tokens_told

    def take_short_way(self, sink: DeltaSink) -> None:
        """From the next token on, if nothing is held back: the sink's teller and plain_texts know all that it takes."""
        if self._plain is not None and self._plain.is_plain and not self.is_finished:
            self.tell = sink.text_teller(self.choice)

    def leave_short_way(self) -> None:
        """The detokenizer goes on, and learns what was told without it."""
        if self.tell is not None and self._plain is not None:
            self.tell = None
            self._plain.num_tokens_kept = self.num_tokens_told = self.num_tokens

    def end(self) -> None:
        """Whatever still comes of it is dropped."""
        self.leave_short_way()
        self.is_finished = True

    def take_delta(self, text: str, reason: FinishReason | None = None) -> Delta:
        """The text, with the count and the logprobs of the tokens that no delta has told yet."""
        logprobs = None
        if self.logprobs is not None:
            logprobs = tuple(self.logprobs)
            self.logprobs.clear()
        num_new = self.num_tokens - self.num_tokens_told
        self.num_tokens_told = self.num_tokens
        return Delta(text=text, num_tokens=num_new, logprobs=logprobs, finish_reason=reason)


class RequestHandle:
    """A submitted request: tokens in, deltas out, until its one terminal chunk.

    A sink that raises has a fault of ours: its request ends with an error, and its neighbours go on.
    """

    __slots__ = ("_error", "_is_cancelled", "_post", "_sink", "cost", "request", "sequences")

    def __init__(
        self, request: Request, sequences: list[_Sequence], sink: DeltaSink, post: Callable[[Message], None]
    ) -> None:
        self.request = request
        self.cost = Cost()
        self.sequences = sequences
        self._sink = sink
        self._post = post
        self._is_cancelled = False
        self._error: str | None = None

    def cancel(self, reason: FinishReason) -> None:
        if self._is_cancelled:
            return
        self._is_cancelled = True
        for sequence in self.sequences:
            if not sequence.is_finished:
                self._finish(sequence, reason)

    def finish(self, reason: FinishReason, now_s: float) -> None:
        for sequence in self.sequences:
            if not sequence.is_finished:
                sequence.leave_short_way()
                text = sequence.detokenizer.finish()  # a broken character that ends here may complete a stop string
                end = sequence.detokenizer.stop_reason if sequence.detokenizer.is_stopped else reason
                self._finish(sequence, end)
                self._sink.on_delta(sequence.choice, sequence.take_delta(text, end), now_s)

    def num_untold(self, choice: int) -> int:
        return self.sequences[choice - self.sequences[0].choice].num_untold

    def pause(self) -> None:
        self._post(Pause(self.request.request_id))

    def resume(self) -> None:
        self._post(Resume(self.request.request_id))

    def on_token(self, sequence: _Sequence, token_id: int, now_s: float) -> None:
        """One drawn token, without logprobs and not the last."""
        if sequence.is_finished:
            return
        sequence.leave_short_way()
        detokenizer = sequence.detokenizer
        try:
            text = detokenizer.push_token(token_id)
            sequence.num_tokens = num_tokens = detokenizer.num_tokens_kept
            if detokenizer.is_stopped:
                self._finish_at_stop_string(sequence, text, now_s)
            elif text:
                sequence.num_tokens_told = num_tokens
                self._sink.on_text(sequence.choice, text, now_s)
                sequence.take_short_way(self._sink)
            if num_tokens >= sequence.mark:
                self.pass_mark(sequence)
        except Exception:  # whatever a detokenizer or a writer of answers can raise
            self.break_off()

    def on_chunk(self, chunk: TokenChunk, now_s: float) -> None:
        sequence = self.sequences[chunk.index]
        if not sequence.is_finished:
            sequence.leave_short_way()
            try:
                self._take_chunk(sequence, chunk, now_s)
            except Exception:
                self.break_off()
        if chunk.error is not None:
            self._error = chunk.error
        if chunk.usage is not None:
            self.cost = chunk.cost
            self._end(self._cut(chunk.usage), self._error)

    def on_engine_mark(self, mark: EngineMark) -> None:
        self._sink.on_engine_mark(mark)

    def fail(self, message: str) -> None:
        """The engine will not tell its end any more: end it here."""
        for sequence in self.sequences:
            sequence.end()
        num_kept = self.num_tokens
        # Where tokens have come, the prompt was computed; otherwise nobody knows how much of it
        num_prompt = len(self.request.prompt_ids) if num_kept else 0
        self._end(Usage(num_prompt_tokens=num_prompt, num_completion_tokens=num_kept), message)

    def _take_chunk(self, sequence: _Sequence, chunk: TokenChunk, now_s: float) -> None:
        detokenizer = sequence.detokenizer
        text = detokenizer.push(chunk.token_ids)
        num_before = sequence.num_tokens
        sequence.num_tokens = detokenizer.num_tokens_kept
        if sequence.logprobs is not None and chunk.logprobs:
            sequence.logprobs.extend(chunk.logprobs[: sequence.num_tokens - num_before])
        if detokenizer.is_stopped:
            self._finish_at_stop_string(sequence, text, now_s)
        elif chunk.finish_reason is not None:
            sequence.end()
            sequence.num_tokens = chunk.num_sequence_tokens  # an end by id counts, and has no text
            text += detokenizer.finish()  # a broken character that ends here may yet complete a stop string
            reason = detokenizer.stop_reason if detokenizer.is_stopped else chunk.finish_reason
            self._sink.on_delta(sequence.choice, sequence.take_delta(text, reason), now_s)
        elif text or sequence.logprobs:
            self._sink.on_delta(sequence.choice, sequence.take_delta(text), now_s)
        if sequence.num_tokens >= sequence.mark:
            self.pass_mark(sequence)

    def pass_mark(self, sequence: _Sequence) -> None:
        """It has as many tokens as the sink wanted to know of."""
        if not sequence.is_finished:
            sequence.mark = self._sink.on_mark(sequence.choice, sequence.num_tokens)

    def _finish_at_stop_string(self, sequence: _Sequence, text: str, now_s: float) -> None:
        reason = sequence.detokenizer.stop_reason
        self._finish(sequence, reason)
        self._sink.on_delta(sequence.choice, sequence.take_delta(text, reason), now_s)

    def _finish(self, sequence: _Sequence, reason: FinishReason) -> None:
        sequence.end()
        self._post(Cancel(self.request.request_id, reason, sequence.index, sequence.num_tokens))

    def _end(self, usage: Usage, error: str | None) -> None:
        try:
            self._sink.on_end(usage, error)
        except Exception:  # it was its last news: there is nothing left to cancel
            logger.exception("an answer cannot be ended", extra={"request_id": self.request.request_id})

    def break_off(self) -> None:
        """The exception that is handled comes of writing the answer."""
        logger.exception("an answer cannot be written", extra={"request_id": self.request.request_id})
        self._error = "The server failed to write this answer. The fault is not in the request."
        self.cancel(FinishReason.ERROR)

    @property
    def num_tokens(self) -> int:
        return sum(sequence.num_tokens for sequence in self.sequences)

    def _cut(self, usage: Usage) -> Usage:
        """The engine's usage with our count of tokens kept: of a stop it may have heard too late."""
        return msgspec.structs.replace(usage, num_completion_tokens=self.num_tokens)


class EngineClient:
    """Implements server.backend.Backend over an engine thread's inbox and outbox.

    Args:
        post: puts a message into the engine's inbox.
        table: what the model's tokens say.
        output: of all connections; flushed after each slice.
        call_soon: the loop's.
        clock: monotonic seconds; read twice a slice.
        on_delivered: called for each delivery once it has been told in full.
    """

    def __init__(
        self,
        post: Callable[[Message], None],
        table: TokenTable,
        output: Output,
        call_soon: Callable[[Callable[[], None]], object],
        clock: Callable[[], float],
        on_delivered: Callable[[], None],
    ) -> None:
        self.stats = EngineStats()
        self.work = LoopWork()
        self._post = post
        self._table = table
        self._output = output
        self._call_soon = call_soon
        self._clock = clock
        self._on_delivered = on_delivered
        self._handles: dict[str, RequestHandle] = {}
        self._deliveries: deque[StepDelivery] = deque()
        self._next_row = 0  # of the first delivery
        self._error: ServiceError | None = None
        self._inspections: deque[tuple[int, asyncio.Future[EngineSnapshot]]] = deque()  # not yet answered, by serial
        self._num_inspections = 0

    def submit(
        self,
        request: Request,
        sink: DeltaSink,
        continues_text: bool,
        first_choice: int = 0,
        forbidden: Sequence[Matcher] = (),
    ) -> RequestHandle:
        if self._error is not None:
            raise self._error
        has_logprobs = request.sampling.num_logprobs is not None
        sequences = [
            _Sequence(
                i,
                first_choice + i,
                self._detokenizer(request, continues_text, forbidden),
                has_logprobs,
                sink.on_mark(first_choice + i, 0),
            )
            for i in range(request.num_sequences)
        ]
        handle = RequestHandle(request, sequences, sink, self._post)
        self._handles[request.request_id] = handle
        self._post(Submit(request))
        return handle

    def _detokenizer(
        self, request: Request, continues_text: bool, forbidden: Sequence[Matcher]
    ) -> Detokenizer | ScreenedDetokenizer:
        detokenizer = Detokenizer(self._table, request.sampling.stop, continues_text)
        return ScreenedDetokenizer(detokenizer, TextScreen(forbidden)) if forbidden else detokenizer

    def inspect(self) -> Awaitable[EngineSnapshot]:
        if self._error is not None:
            raise self._error
        self._num_inspections += 1
        future: asyncio.Future[EngineSnapshot] = asyncio.get_running_loop().create_future()
        self._inspections.append((self._num_inspections, future))
        self._post(Inspect(self._num_inspections))
        return future

    async def clear_cache(self) -> None:
        self._post(ClearCache())
        await self.inspect()

    def deliver(self, delivery: StepDelivery) -> None:
        """Take one step's news: the first slice of it now, the others in turn with the loop's other work."""
        if self._error is not None:  # all requests have been ended: nobody is left to be told
            self._on_delivered()
            return
        self._deliveries.append(delivery)
        if len(self._deliveries) == 1:
            self._deliver_slice()

    def fail(self, message: str) -> None:
        """The engine is gone: end every request it has not answered, refuse those to come. Idempotent."""
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
        self._output.flush_all()

    def _deliver_slice(self) -> None:
        if not self._deliveries:
            return
        delivery = self._deliveries[0]
        start = self._next_row
        now_s = self._clock()
        if delivery.marks and start == 0:
            for mark in delivery.marks:
                self._handles[mark.request_id].on_engine_mark(mark)
        end = self._deliver_rows(delivery, start, now_s)
        self.work.num_tokens += end - start
        if end == len(delivery.request_ids):
            self._deliver_chunks(delivery, now_s)
            self.work.num_tokens += len(delivery.chunks)
            self._deliveries.popleft()
            self._on_delivered()
            end = 0
        self._next_row = end
        self.work.busy_s += self._clock() - now_s
        self._output.flush_all()
        if self._deliveries:
            self._call_soon(self._deliver_slice)

    def _deliver_rows(self, delivery: StepDelivery, row: int, now_s: float) -> int:
        """A slice of them, from this one on; returns which is next."""
        handles, output = self._handles, self._output
        last = min(row + SLICE_ROWS, len(delivery.request_ids))
        most_dirty = output.num_dirty + SLICE_CONNECTIONS
        # One row makes one connection dirty at most: so many can be handled before it is worth a look
        while row < last and (num_rows := most_dirty - output.num_dirty) > 0:
            end = min(row + num_rows, last)
            for request_id, index, token_id in zip(
                delivery.request_ids[row:end], delivery.indexes[row:end], delivery.token_ids[row:end], strict=True
            ):
                handle = handles[request_id]
                sequence = handle.sequences[index]
                tell = sequence.tell
                if tell is None:
                    handle.on_token(sequence, token_id, now_s)
                    continue
                try:
                    text = sequence.plain_texts[token_id]
                except IndexError:  # the tokenizer knows of no such id
                    text = None
                if not text:
                    handle.on_token(sequence, token_id, now_s)
                    continue
                sequence.num_tokens = num_tokens = sequence.num_tokens + 1
                try:
                    tell(text, now_s)
                    if num_tokens >= sequence.mark:
                        handle.pass_mark(sequence)
                except Exception:  # whatever a writer of answers can raise
                    handle.break_off()
            row = end
        return row

    def _deliver_chunks(self, delivery: StepDelivery, now_s: float) -> None:
        for chunk in delivery.chunks:
            handle = self._handles[chunk.request_id]
            if chunk.is_terminal:
                del self._handles[chunk.request_id]
            handle.on_chunk(chunk, now_s)
        self.stats = delivery.stats
        if delivery.snapshot is not None:
            self._answer_inspections(delivery.snapshot)

    def _answer_inspections(self, snapshot: EngineSnapshot) -> None:
        while self._inspections and self._inspections[0][0] <= snapshot.serial:
            _, future = self._inspections.popleft()
            if not future.done():  # else who asked is gone
                future.set_result(snapshot)
