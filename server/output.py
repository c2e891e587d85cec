"""What a generation writes into its stream: events as they come, or one document at the end. Thread: loop."""

import math
from functools import partial
from typing import Any

from core.errors import ServiceError
from core.types import Delta, Usage
from server.api.fields import GenerationCall
from server.api.replies import EVENTS, Extras, ReplyContext, Surface
from server.observing.timing import Stage, StageClock, answer_headers
from server.wire.messages import ResponseHead, TextWriter
from server.wire.stream import HttpStream


class StreamedOutput:
    """An answer as server-sent events. The head goes out with the first token, or the first comment."""

    is_streamed = True

    def __init__(
        self, surface: Surface, call: GenerationCall, context: ReplyContext, stream: HttpStream, timings: StageClock
    ) -> None:
        self._reply = surface.stream(call, context)
        self._media_type = surface.media_type
        self._stream = stream
        self._with_extras = partial(_with_extras, call, context, timings)
        self._timings = timings

    def add_text(self, choice: int, text: str) -> None:
        self._opened().send(self._reply.text(choice, text))

    def text_writer(self, choice: int) -> TextWriter:
        """A function that does add_text(choice, ...), once the choice has begun."""
        frame, reply, stream = self._reply.text_frame(choice), self._reply, self._stream
        return stream.text_writer(frame) if frame is not None else lambda text: stream.send(reply.text(choice, text))

    def add(self, choice: int, delta: Delta) -> None:
        self._opened().send(self._reply.delta(choice, delta))

    def comment(self, line: bytes) -> None:
        """Send what parsers of events skip, unless the reader is behind anyway."""
        if not self._stream.is_blocked and self._media_type == EVENTS:
            self._opened().send(line)

    def compose(self, usage: Usage, extras: Extras) -> bytes:
        """The last events."""
        self._opened()
        return self._reply.end(usage, self._with_extras(extras))

    def complete(self, usage: Usage, last: bytes) -> None:
        """last: that compose() has made."""
        self._opened().send(last)
        if not self._stream.takes_trailers:
            self._stream.end()
            return
        counts = (usage.num_prompt_tokens, usage.num_cached_tokens, usage.num_completion_tokens)
        shown = b"prompt-tokens=%d, cached-tokens=%d, completion-tokens=%d" % counts  # RFC 9651 §3.2: a dictionary
        self._stream.end(((b"server-timing", self._timings.server_timing()), (b"steploop-usage", shown)))

    def break_off(self, error: ServiceError) -> None:
        """Write the error as the last event, if the head is already out; otherwise it becomes the answer."""
        if self._stream.head_sent:
            self._stream.send(self._reply.error(error))
            self._stream.end()

    def _opened(self) -> HttpStream:
        """The stream, once its head is out and the reply has begun."""
        if self._stream.status is None:
            self._open()
        return self._stream

    def _open(self) -> None:
        headers = ((b"content-type", self._media_type), (b"x-accel-buffering", b"no"), *answer_headers(self._timings))
        self._stream.send_head(ResponseHead(200, headers))
        self._stream.send(self._reply.start())
        self._stream.call_once_written(lambda now_s: self._timings.go_on(Stage.FIRST_FLUSH, Stage.DECODE, now_s))


class WholeOutput:
    """An answer as one JSON document."""

    is_streamed = False

    def __init__(
        self, surface: Surface, call: GenerationCall, context: ReplyContext, stream: HttpStream, timings: StageClock
    ) -> None:
        self._call = call
        self._reply = surface.whole(call, context)
        self._stream = stream
        self._with_extras = partial(_with_extras, call, context, timings)
        self._timings = timings
        self.add = self._reply.add

    def add_text(self, choice: int, text: str) -> None:
        self._reply.texts[choice].append(text)

    def text_writer(self, choice: int) -> TextWriter:
        return self._reply.texts[choice].append

    def comment(self, line: bytes) -> None:
        """A document has none."""

    def compose(self, usage: Usage, extras: Extras) -> bytes:
        """The document."""
        return self._reply.end(usage, self._with_extras(extras))

    def complete(self, usage: Usage, last: bytes) -> None:
        self._stream.send_document(200, last, answer_headers(self._timings))

    def break_off(self, error: ServiceError) -> None:
        """Nothing has been sent: the error becomes the answer."""


class BestOutput(WholeOutput):
    """A document of the best of the answers that are computed: those of beams come best first.

    Others are ranked by the mean of their tokens' logprobs.
    """

    def __init__(
        self, surface: Surface, call: GenerationCall, context: ReplyContext, stream: HttpStream, timings: StageClock
    ) -> None:
        super().__init__(surface, call, context, stream, timings)
        self._pieces: list[list[str | Delta]] = [[] for _ in range(len(call.prompts) * call.num_computed)]
        self.add = self._keep

    def _keep(self, choice: int, delta: Delta) -> None:
        self._pieces[choice].append(delta)

    def add_text(self, choice: int, text: str) -> None:
        self._pieces[choice].append(text)

    def text_writer(self, choice: int) -> TextWriter:
        return self._pieces[choice].append

    def compose(self, usage: Usage, extras: Extras) -> bytes:
        call = self._call
        for prompt in range(len(call.prompts)):
            pieces = self._pieces[prompt * call.num_computed : (prompt + 1) * call.num_computed]
            if call.beams is None:
                pieces.sort(key=_mean_logprob, reverse=True)
            for i, some in enumerate(pieces[: call.num_sequences]):
                choice = prompt * call.num_sequences + i
                for piece in some:
                    if isinstance(piece, str):
                        self._reply.texts[choice].append(piece)
                    else:
                        self._reply.add(choice, piece)
        return super().compose(usage, extras)


def _mean_logprob(pieces: list[str | Delta]) -> float:
    deltas = [piece for piece in pieces if isinstance(piece, Delta)]
    tokens = [
        token for delta in deltas for token in (*(delta.logprobs or ()), delta.stop_logprobs) if token is not None
    ]
    return sum(token.logprob for token in tokens) / len(tokens) if tokens else -math.inf


def _with_extras(call: GenerationCall, context: ReplyContext, timings: StageClock, extras: Extras) -> Extras:
    """With what was left out of the prompt; where the time went, if that is asked for, and what repeats the answer."""
    if context.context is not None:
        extras = extras | {"context": context.context}
    if not call.wants_timings:
        return extras
    told: dict[str, Any] = timings.details()
    if call.sampling.seed is not None:
        told |= {"seed": call.sampling.seed, "fingerprint": context.fingerprint, **context.identity}
    return extras | {"timings": told | extras.get("timings", {})}


Output = StreamedOutput | WholeOutput


def output_of(call: GenerationCall) -> type[StreamedOutput] | type[WholeOutput]:
    if call.is_stream:
        return StreamedOutput
    return BestOutput if call.num_computed > call.num_sequences else WholeOutput
