"""The backend of this process: requests to the engine's inbox, its deliveries to deltas. Thread: loop.

The loop decides where text ends: a stop string is found here, a step or more after its token was drawn. The handle
then drops what came later, tells the engine how many tokens were kept, and cuts the usage to that count, so that the
same request has the same text and the same usage whatever the timing.
"""

from collections import deque
from collections.abc import Callable

import msgspec

from core.detokenizer import Detokenizer, TokenTable
from core.errors import ErrorKind, ServiceError
from core.types import (
    Cancel,
    Delta,
    EngineStats,
    FinishReason,
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
from server.backend import DeltaSink

SLICE_ROWS = (
    16  # rows handled before other callbacks of the loop, and the engine thread, get their turn (PERFORMANCE.md)
)


class _Sequence:
    """The loop's side of one sequence of a request."""

    __slots__ = ("detokenizer", "index", "is_finished", "logprobs", "num_tokens")

    def __init__(self, index: int, detokenizer: Detokenizer, has_logprobs: bool) -> None:
        self.index = index
        self.detokenizer = detokenizer
        self.num_tokens = 0  # kept, of those received
        self.is_finished = False
        self.logprobs: list[TokenLogprobs] | None = [] if has_logprobs else None

    def take_logprobs(self) -> tuple[TokenLogprobs, ...] | None:
        """The logprobs of kept tokens that no delta has carried yet."""
        if self.logprobs is None:
            return None
        taken = tuple(self.logprobs)
        self.logprobs.clear()
        return taken


class RequestHandle:
    """A submitted request: tokens in, deltas out, until its one terminal chunk."""

    def __init__(self, request: Request, sequences: list[_Sequence], sink: DeltaSink, post: Callable[[Message], None]):
        self.request_id = request.request_id
        self._sequences = sequences
        self._sink = sink
        self._post = post
        self._is_cancelled = False
        self._error: str | None = None

    def cancel(self, reason: FinishReason) -> None:
        if self._is_cancelled:
            return
        self._is_cancelled = True
        for sequence in self._sequences:
            if not sequence.is_finished:
                self._finish(sequence, reason)

    def pause(self) -> None:
        self._post(Pause(self.request_id))

    def resume(self) -> None:
        self._post(Resume(self.request_id))

    def on_token(self, index: int, token_id: int) -> None:
        """The hot path: one drawn token, without logprobs and not the last."""
        sequence = self._sequences[index]
        if sequence.is_finished:
            return
        sequence.num_tokens += 1
        detokenizer = sequence.detokenizer
        text = detokenizer.push((token_id,))
        if detokenizer.is_stopped:
            self._finish_at_stop_string(sequence, text, 1)
        elif text:
            self._sink.on_delta(Delta(index=index, text=text, num_tokens=1))

    def on_chunk(self, chunk: TokenChunk) -> None:
        sequence = self._sequences[chunk.index]
        if not sequence.is_finished:
            self._take_chunk(sequence, chunk)
        if chunk.error is not None:
            self._error = chunk.error
        if chunk.usage is not None:
            self._sink.on_end(self._cut(chunk.usage), self._error)

    def _take_chunk(self, sequence: _Sequence, chunk: TokenChunk) -> None:
        text = sequence.detokenizer.push(chunk.token_ids)
        num_new = len(chunk.token_ids)
        if sequence.detokenizer.is_stopped:
            num_new -= sequence.num_tokens + num_new - sequence.detokenizer.num_tokens_kept
        sequence.num_tokens += num_new
        if sequence.logprobs is not None and chunk.logprobs:
            sequence.logprobs.extend(chunk.logprobs[:num_new])
        if sequence.detokenizer.is_stopped:
            self._finish_at_stop_string(sequence, text, num_new)
        elif chunk.finish_reason is not None:
            sequence.is_finished = True
            sequence.num_tokens = chunk.num_sequence_tokens  # an end by id counts, and has no text
            self._emit(sequence, text + sequence.detokenizer.finish(), num_new, chunk.finish_reason)
        elif text or sequence.logprobs:
            self._emit(sequence, text, num_new, None)

    def _emit(self, sequence: _Sequence, text: str, num_tokens: int, reason: FinishReason | None) -> None:
        logprobs = sequence.take_logprobs()
        self._sink.on_delta(
            Delta(index=sequence.index, text=text, num_tokens=num_tokens, logprobs=logprobs, finish_reason=reason)
        )

    def _finish_at_stop_string(self, sequence: _Sequence, text: str, num_new: int) -> None:
        self._finish(sequence, FinishReason.STOP)
        self._emit(sequence, text, num_new, FinishReason.STOP)

    def _finish(self, sequence: _Sequence, reason: FinishReason) -> None:
        sequence.is_finished = True
        self._post(Cancel(self.request_id, reason, sequence.index, sequence.num_tokens))

    def _cut(self, usage: Usage) -> Usage:
        """The engine's usage with our count of tokens kept: of a stop it may have heard too late."""
        num_kept = sum(sequence.num_tokens for sequence in self._sequences)
        return msgspec.structs.replace(usage, num_completion_tokens=num_kept)


class EngineClient:
    """Implements server.backend.Backend over an engine thread's inbox and outbox.

    Args:
        post: puts a message into the engine's inbox.
        table: what the model's tokens say.
        flush: writes out what the deltas of one slice have left in the connections.
        call_soon: the loop's.
    """

    def __init__(
        self,
        post: Callable[[Message], None],
        table: TokenTable,
        flush: Callable[[], None],
        call_soon: Callable[[Callable[[], None]], object],
    ) -> None:
        self.stats = EngineStats()
        self._post = post
        self._table = table
        self._flush = flush
        self._call_soon = call_soon
        self._handles: dict[str, RequestHandle] = {}
        self._deliveries: deque[StepDelivery] = deque()
        self._next_row = 0  # of the first delivery
        self._error: ServiceError | None = None

    def submit(self, request: Request, sink: DeltaSink, continues_text: bool) -> RequestHandle:
        if self._error is not None:
            raise self._error
        has_logprobs = request.sampling.num_logprobs is not None
        sequences = [
            _Sequence(index, Detokenizer(self._table, request.sampling.stop, continues_text), has_logprobs)
            for index in range(request.num_sequences)
        ]
        handle = RequestHandle(request, sequences, sink, self._post)
        self._handles[request.request_id] = handle
        self._post(Submit(request))
        return handle

    def deliver(self, delivery: StepDelivery) -> None:
        """Take one step's news: the first slice of it now, the others in turn with the loop's other work."""
        self._deliveries.append(delivery)
        if len(self._deliveries) == 1:
            self._deliver_slice()

    def fail(self, message: str) -> None:
        """The engine is gone: end every request it has not answered, refuse those to come."""
        self._error = ServiceError(ErrorKind.ENGINE, message, "engine_error")
        while self._deliveries:
            self._deliver_slice()
        for request_id in list(self._handles):
            usage = Usage(num_prompt_tokens=0, num_completion_tokens=0)
            chunk = TokenChunk(
                request_id=request_id, index=0, finish_reason=FinishReason.ERROR, usage=usage, error=message
            )
            self._handles.pop(request_id).on_chunk(chunk)
        self._flush()

    def _deliver_slice(self) -> None:
        if not self._deliveries:
            return
        delivery = self._deliveries[0]
        start, end = self._next_row, self._next_row + SLICE_ROWS
        handles = self._handles
        for request_id, index, token_id in zip(
            delivery.request_ids[start:end], delivery.indexes[start:end], delivery.token_ids[start:end], strict=True
        ):
            handles[request_id].on_token(index, token_id)
        if end >= len(delivery.request_ids):
            self._deliver_chunks(delivery)
            self._deliveries.popleft()
            end = 0
        self._next_row = end
        self._flush()
        if self._deliveries:
            self._call_soon(self._deliver_slice)

    def _deliver_chunks(self, delivery: StepDelivery) -> None:
        for chunk in delivery.chunks:
            handle = self._handles[chunk.request_id]
            if chunk.is_terminal:
                del self._handles[chunk.request_id]
            handle.on_chunk(chunk)
        self.stats = delivery.stats
