"""One submitted request as the loop holds it: its tokens in, deltas to its sink, and one end. Thread: loop.

Most tokens say whole characters that no stop string begins with, and nothing is to be told of them but that text: they
take the short way, one call of what the sink has prepared (DeltaSink.short_way), and this file sees only the others.
"""

import logging
from collections.abc import Callable

import msgspec

from core.detokenizer import Detokenizer, PlainTexts
from core.types import (
    Cancel,
    Cost,
    Delta,
    EngineMark,
    FinishReason,
    Message,
    Pause,
    Request,
    Resume,
    TokenChunk,
    TokenLogprobs,
    Usage,
)
from server.backend import ChoiceClock, DeltaSink, ShortWay, TextTeller
from server.gate.text_rules import ScreenedDetokenizer

logger = logging.getLogger(__name__)


class RequestSequence:
    """The loop's side of one sequence of a request."""

    __slots__ = (
        "_plain",
        "_short_way",
        "choice",
        "clock",
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
        # While its tokens take the short way, of EngineClient._deliver_rows
        self.tell: TextTeller | None = None
        self.clock = ChoiceClock()
        self._short_way: ShortWay | None = None  # these two, once there is one
        self._plain = detokenizer if isinstance(detokenizer, Detokenizer) else None
        self.plain_texts: PlainTexts = () if self._plain is None else self._plain.plain_texts

    @property
    def num_untold(self) -> int:
        """Tokens that no delta has told yet."""
        return 0 if self.tell is not None else self.num_tokens - self.num_tokens_told

    def take_short_way(self, sink: DeltaSink) -> None:
        """From the next token on, if nothing is held back: the sink's way and plain_texts know all that it takes."""
        if self._plain is not None and self._plain.is_plain and not self.is_finished:
            if self._short_way is None:
                self._short_way = sink.short_way(self.choice)
            if self._short_way is not None:
                self.tell, self.clock = self._short_way

    def leave_short_way(self) -> None:
        """The detokenizer goes on, and learns what was told without it."""
        if self.tell is not None and self._plain is not None:
            self.tell = None
            self._plain.num_tokens_kept = self.num_tokens_told = self.num_tokens

    def end(self) -> None:
        """Whatever still comes of it is dropped."""
        self.leave_short_way()
        self.is_finished = True

    def take_delta(
        self, text: str, reason: FinishReason | None = None, stop_logprobs: TokenLogprobs | None = None
    ) -> Delta:
        """The text, with the count and the logprobs of the tokens that no delta has told yet."""
        logprobs = None
        if self.logprobs is not None:
            logprobs = tuple(self.logprobs)
            self.logprobs.clear()
        num_new = self.num_tokens - self.num_tokens_told
        self.num_tokens_told = self.num_tokens
        return Delta(
            text=text, num_tokens=num_new, logprobs=logprobs, stop_logprobs=stop_logprobs, finish_reason=reason
        )


class RequestHandle:
    """A submitted request: tokens in, deltas out, until its one terminal chunk.

    A sink that raises has a fault of ours: its request ends with an error, and its neighbours go on.
    """

    __slots__ = ("_error", "_has_ended", "_is_cancelled", "_post", "_sink", "cost", "request", "sequences")

    def __init__(
        self, request: Request, sequences: list[RequestSequence], sink: DeltaSink, post: Callable[[Message], None]
    ) -> None:
        self.request = request
        self.cost = Cost()
        self.sequences = sequences
        self._sink = sink
        self._post = post
        self._is_cancelled = False
        self._has_ended = False
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

    def on_token(self, sequence: RequestSequence, token_id: int, now_s: float) -> None:
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
        if chunk.prompt_logprobs:
            self._tell_of_prompt(chunk.prompt_logprobs, now_s)
            return
        sequence = self.sequences[chunk.index]
        if not sequence.is_finished:
            sequence.leave_short_way()
            try:
                self._take_chunk(sequence, chunk, now_s)
            except Exception:
                self.break_off()
        if chunk.error is not None:
            self._error = chunk.error

    def end(self, chunk: TokenChunk) -> None:
        """The terminal chunk, once it has been told: nothing more will come."""
        assert chunk.usage is not None, "it is terminal"
        self.cost = chunk.cost
        try:
            usage = self._cut(chunk.usage)
        except Exception:
            logger.exception("an answer's tokens cannot be counted", extra={"request_id": self.request.request_id})
            usage = chunk.usage  # the engine's count
        self._end(usage, self._error)

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

    def _take_chunk(self, sequence: RequestSequence, chunk: TokenChunk, now_s: float) -> None:
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
            stop_logprobs = None if detokenizer.is_stopped else chunk.stop_logprobs
            self._sink.on_delta(sequence.choice, sequence.take_delta(text, reason, stop_logprobs), now_s)
        elif text or sequence.logprobs:
            self._sink.on_delta(sequence.choice, sequence.take_delta(text), now_s)
        if sequence.num_tokens >= sequence.mark:
            self.pass_mark(sequence)

    def _tell_of_prompt(self, logprobs: tuple[TokenLogprobs, ...], now_s: float) -> None:
        """To every sequence: they have one prompt."""
        delta = Delta(text="", num_tokens=0, prompt_logprobs=logprobs)
        try:
            for sequence in self.sequences:
                if not sequence.is_finished:
                    self._sink.on_delta(sequence.choice, delta, now_s)
        except Exception:
            self.break_off()

    def pass_mark(self, sequence: RequestSequence) -> None:
        """It has as many tokens as the sink wanted to know of."""
        if not sequence.is_finished:
            sequence.mark = self._sink.on_mark(sequence.choice, sequence.num_tokens)

    def _finish_at_stop_string(self, sequence: RequestSequence, text: str, now_s: float) -> None:
        reason = sequence.detokenizer.stop_reason
        self._finish(sequence, reason)
        self._sink.on_delta(sequence.choice, sequence.take_delta(text, reason), now_s)

    def _finish(self, sequence: RequestSequence, reason: FinishReason) -> None:
        sequence.end()
        self._post(Cancel(self.request.request_id, reason, sequence.index, sequence.num_tokens))

    def _end(self, usage: Usage, error: str | None) -> None:
        if self._has_ended:
            return
        self._has_ended = True
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
