"""What a generation writes into its stream: events as they come, or one document at the end. Thread: loop."""

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
        self._call = call
        self._reply = surface.stream(call, context)
        self._media_type = surface.media_type
        self._stream = stream
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

    def complete(self, usage: Usage, extras: Extras) -> None:
        self._opened().send(self._reply.end(usage, extras | _timings_of(self._call, self._timings)))
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
        headers = (
            (b"content-type", self._media_type),
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
        self._call = call
        self._reply = surface.whole(call, context)
        self._stream = stream
        self._timings = timings
        self.add = self._reply.add

    def add_text(self, choice: int, text: str) -> None:
        self._reply.texts[choice].append(text)

    def text_writer(self, choice: int) -> TextWriter:
        return self._reply.texts[choice].append

    def comment(self, line: bytes) -> None:
        """A document has none."""

    def complete(self, usage: Usage, extras: Extras) -> None:
        body = self._reply.end(usage, extras | _timings_of(self._call, self._timings))
        self._stream.send_document(200, body, answer_headers(self._timings))

    def break_off(self, error: ServiceError) -> None:
        """Nothing has been sent: the error becomes the answer."""


def _timings_of(call: GenerationCall, timings: StageClock) -> Extras:
    return {"timings": timings.details()} if call.wants_timings else {}


Output = StreamedOutput | WholeOutput
