"""What a generation writes into its stream: events as they come, or one document at the end. Thread: loop."""

from core.errors import ServiceError
from core.types import Delta, FinishReason, TokenLogprobs, Usage
from server.api.surface import Choice, Extras, GenerationCall, ReplyContext, Surface
from server.observing.timing import Stage, StageClock, answer_headers
from server.wire.messages import ResponseHead, TextWriter
from server.wire.stream import HttpStream


class StreamedOutput:
    """An answer as server-sent events. The head goes out with the first token, or the first comment."""

    is_streamed = True

    def __init__(
        self, surface: Surface, call: GenerationCall, context: ReplyContext, stream: HttpStream, timings: StageClock
    ) -> None:
        self._call = call
        self._reply = surface.stream_reply(call, context)
        self._stream = stream
        self._timings = timings

    def add_text(self, choice: int, text: str) -> None:
        if self._stream.status is None:
            self._open()
        self._stream.send(self._reply.text(choice, text))

    def text_writer(self, choice: int) -> TextWriter:
        """add_text in one call, once the choice has begun."""
        frame, reply, stream = self._reply.text_frame(choice), self._reply, self._stream
        return stream.text_writer(frame) if frame is not None else lambda text: stream.send(reply.text(choice, text))

    def add(self, choice: int, delta: Delta) -> None:
        if self._stream.status is None:
            self._open()
        self._stream.send(self._reply.delta(choice, delta))

    def comment(self, line: bytes) -> None:
        """Send what parsers of events skip, where the reader has not enough to read anyway."""
        if self._stream.is_blocked:
            return
        if self._stream.status is None:
            self._open()
        self._stream.send(line)

    def complete(self, usage: Usage, extras: Extras) -> None:
        if self._stream.status is None:
            self._open()
        self._stream.send(self._reply.end(usage, extras | _timings_of(self._call, self._timings)))
        self._stream.end(((b"server-timing", self._timings.server_timing()), _usage_trailer(usage)))

    def break_off(self, error: ServiceError) -> None:
        """Tell the error as the last event, if the head is already out; otherwise it becomes the answer."""
        if self._stream.head_sent:
            self._stream.send(self._reply.error(error))
            self._stream.end()

    def _open(self) -> None:
        headers = (
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"x-accel-buffering", b"no"),
            *answer_headers(self._timings),
        )
        self._stream.send_head(ResponseHead(200, headers))
        self._stream.send(self._reply.start())
        self._stream.call_once_written(lambda now_s: self._timings.go_on(Stage.FIRST_FLUSH, Stage.DECODE, now_s))


class WholeOutput:
    """An answer as one JSON document."""

    is_streamed = False

    def __init__(
        self, surface: Surface, call: GenerationCall, context: ReplyContext, stream: HttpStream, timings: StageClock
    ) -> None:
        self._surface = surface
        self._call = call
        self._context = context
        self._stream = stream
        self._timings = timings
        num_choices = len(call.prompts) * call.num_sequences
        self._texts: list[list[str]] = [[] for _ in range(num_choices)]
        self._logprobs: list[list[TokenLogprobs]] = [[] for _ in range(num_choices)]
        self._stop_logprobs: list[TokenLogprobs | None] = [None] * num_choices
        self._prompt_logprobs = [surface.prompt_logprobs(call, context, choice) for choice in range(num_choices)]
        self._reasons = [FinishReason.STOP] * num_choices

    def add_text(self, choice: int, text: str) -> None:
        self._texts[choice].append(text)

    def text_writer(self, choice: int) -> TextWriter:
        return self._texts[choice].append

    def add(self, choice: int, delta: Delta) -> None:
        self._texts[choice].append(delta.text)
        if delta.logprobs:
            self._logprobs[choice].extend(delta.logprobs)
        prompt_logprobs = self._prompt_logprobs[choice]
        if prompt_logprobs is not None and delta.prompt_logprobs:
            prompt_logprobs.add_prompt(delta.prompt_logprobs)
        if delta.finish_reason is not None:
            self._reasons[choice] = delta.finish_reason
            self._stop_logprobs[choice] = delta.stop_logprobs

    def comment(self, line: bytes) -> None:
        """A document has none."""

    def complete(self, usage: Usage, extras: Extras) -> None:
        has_logprobs = self._call.sampling.num_logprobs is not None
        choices = [
            Choice(
                i,
                "".join(texts),
                self._reasons[i],
                self._logprobs[i] if has_logprobs else None,
                self._stop_logprobs[i],
                self._prompt_logprobs[i],
            )
            for i, texts in enumerate(self._texts)
        ]
        extras = extras | _timings_of(self._call, self._timings)
        body = self._surface.whole_reply(self._call, self._context, choices, usage, extras)
        self._stream.send_document(200, body, answer_headers(self._timings))

    def break_off(self, error: ServiceError) -> None:
        """Nothing has been sent: the error becomes the answer."""


def _timings_of(call: GenerationCall, timings: StageClock) -> Extras:
    return {"timings": timings.details()} if call.wants_timings else {}


def _usage_trailer(usage: Usage) -> tuple[bytes, bytes]:
    """RFC 9651 §3.2: the usage is a dictionary."""
    counts = (usage.num_prompt_tokens, usage.num_cached_tokens, usage.num_completion_tokens)
    return b"steploop-usage", b"prompt-tokens=%d, cached-tokens=%d, completion-tokens=%d" % counts


Output = StreamedOutput | WholeOutput
