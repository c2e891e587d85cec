"""The backend of this process: requests to the engine's inbox, its deliveries to deltas. Thread: loop.

The loop decides where text ends: a stop string is found here, a step or more after its token was drawn. The handle
then drops what came later, tells the engine how many tokens were kept, and cuts the usage to that count, so that the
same request has the same text and the same usage whatever the timing.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from itertools import islice
from typing import Protocol

from core.detokenizer import Detokenizer, TokenTable
from core.errors import ErrorKind, ServiceError
from core.types import (
    ClearCache,
    EngineSnapshot,
    EngineStats,
    Inspect,
    Message,
    Request,
    StepDelivery,
    Submit,
    TokenChunk,
)
from server.backend import DeltaSink, LoopWork
from server.gate.text_rules import Matcher, ScreenedDetokenizer, TextScreen
from server.observing.metrics import Histogram
from server.request_handle import RequestHandle, RequestSequence

logger = logging.getLogger(__name__)

# What is handled before other callbacks of the loop, and the engine thread, get their turn: so many rows, or as many as
# make so many connections write, whichever comes first. A write costs more than all else of a token, and streams that
# share a connection share its write. 16, 32, 64, 128, 256 rows cost 8.1, 7.6, 7.1, 7.4, 6.9 us a token, on average
# over both protocols and 64 and 256 streams (bench/slices.py, on a busy machine): from 64 on, nothing shows any more.
SLICE_ROWS = 64
SLICE_CONNECTIONS = 16  # DESIGN, The way through it

LOOK_S, MOST_LOOKS = 0.05, 200  # while the files of a cleared cache are deleted
_CLEARED = "No request finds now what was computed before"


class Output(Protocol):
    """Where deltas end up: the connections, each with what it has to write. WriteBatch implements it."""

    @property
    def num_writes(self) -> int:
        """Of connections so far: those that wait to be flushed, and those that were made without."""
        ...

    def expect_flush(self) -> None:
        """flush_all is going to be called."""
        ...

    def flush_all(self) -> None:
        """Write what there is."""
        ...


class EngineClient:
    """Implements server.backend.Backend over an engine thread's inbox and outbox.

    Args:
        post: puts a message into the engine's inbox.
        table: what the model's tokens say.
        full_table: likewise, special tokens by their names.
        output: of all connections; flushed after each slice.
        call_soon: the loop's.
        clock: monotonic seconds; read twice a slice.
        on_delivered: called for each delivery once it has been told in full.
        gaps: observes the seconds between texts that take the short way; the sinks observe the others.
    """

    def __init__(
        self,
        post: Callable[[Message], None],
        table: TokenTable,
        full_table: TokenTable,
        output: Output,
        call_soon: Callable[[Callable[[], None]], object],
        clock: Callable[[], float],
        on_delivered: Callable[[], None],
        gaps: Histogram,
    ) -> None:
        self.stats = EngineStats()
        self.work = LoopWork()
        self._post = post
        self._table = table
        self._full_table = full_table
        self._output = output
        self._call_soon = call_soon
        self._clock = clock
        self._on_delivered = on_delivered
        self._gaps = gaps
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
            RequestSequence(
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
        sampling = request.sampling
        table = self._table if sampling.skip_special_tokens else self._full_table
        detokenizer = Detokenizer(table, sampling.stop, continues_text, sampling.min_tokens)
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
        store = (await self.inspect()).store
        for _ in range(MOST_LOOKS):
            if not store.is_deleting:
                break
            await asyncio.sleep(LOOK_S)
            store = (await self.inspect()).store
        if store.is_deleting:
            message = f"{_CLEARED}, but its files are still being deleted. Ask again."
            raise ServiceError(ErrorKind.UNAVAILABLE, message, "cache_files_pending", retry_after_s=MOST_LOOKS * LOOK_S)
        if store.num_undeleted:
            message = (
                f"{_CLEARED}, but {store.num_undeleted} of its files could not be deleted: a restarted server may read "
                "them. The log says which and why. Mend that and ask again."
            )
            raise ServiceError(ErrorKind.ENGINE, message, "cache_files_undeleted")

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
        try:
            now_s = self._clock()
            self._output.expect_flush()
            self._take_slice(self._deliveries[0], now_s)
            self.work.busy_s += self._clock() - now_s
        except Exception:  # of no request, for those are ended by what they raise; the rows behind are still to be told
            logger.exception("a step's news cannot be accounted for")
        finally:
            self._output.flush_all()
        if self._deliveries:
            self._call_soon(self._deliver_slice)

    def _take_slice(self, delivery: StepDelivery, now_s: float) -> None:
        start, num_rows = self._next_row, len(delivery.token_ids)
        if delivery.marks and start == 0:
            for mark in delivery.marks:
                try:
                    self._handles[mark.request_id].on_engine_mark(mark)
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
                if delivery.snapshot is not None:
                    self._answer_inspections(delivery.snapshot)
            finally:
                self._on_delivered()  # or the engine would wait for it

    def _break_off(self, request_id: str) -> None:
        """What is being handled was raised where the request was told of something: it ends, and no other does."""
        handle = self._handles.get(request_id)
        if handle is None:
            logger.exception("the engine tells of a request that is not in progress", extra={"request_id": request_id})
        else:
            handle.break_off()

    def _deliver_rows(self, delivery: StepDelivery, row: int, now_s: float) -> None:
        """A slice of them, from this one on; _next_row says how far it has come."""
        handles, output = self._handles, self._output
        last = min(row + SLICE_ROWS, len(delivery.token_ids))
        most_writes = output.num_writes + SLICE_CONNECTIONS
        columns = delivery.request_ids[row:last], delivery.indexes[row:last], delivery.token_ids[row:last]
        rows = zip(*columns, strict=True)
        before_s, num_alike = 0.0, 0  # neighbours' last texts mostly came at one time: so many at this one
        # One row makes one write at most: so many can be handled before it is worth a look
        while row < last and (num_rows := most_writes - output.num_writes) > 0:
            num_rows = min(num_rows, last - row)
            row = self._next_row = row + num_rows
            for request_id, index, token_id in islice(rows, num_rows):
                try:
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
                    clock = sequence.clock
                    if clock.last_s != before_s:
                        assert clock.last_s is not None, "who takes the short way has said something"
                        if num_alike:
                            self._gaps.observe(now_s - before_s, num_alike)
                        before_s, num_alike = clock.last_s, 0
                    num_alike += 1
                    clock.last_s = now_s
                    sequence.num_tokens = num_tokens = sequence.num_tokens + 1
                    tell(text)
                    if num_tokens >= sequence.mark:
                        handle.pass_mark(sequence)
                except Exception:  # whatever a writer of answers can raise
                    self._break_off(request_id)
        if num_alike:
            self._gaps.observe(now_s - before_s, num_alike)

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
            if not future.done():  # else who asked is gone
                future.set_result(snapshot)
