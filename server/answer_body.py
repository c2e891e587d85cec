"""What an answer writes into its stream: events or one document, and the fields beside it. Thread: loop."""

import asyncio
from typing import Protocol

from core.errors import ServiceError
from core.types import Delta, FinishReason, TokenLogprobs, Usage
from server.api.surface import Choice, Extras, GenerationCall, ReplyContext, Surface
from server.backend import ChoiceClock, TextTeller
from server.deadline import DeadlineTimer
from server.observing.timing import MS_NS, Stage, StageClock
from server.wire.messages import Headers, ResponseHead
from server.wire.sse import KEEP_ALIVE
from server.wire.stream import HttpStream

KEEP_ALIVE_S = 15.0  # of silence on a stream before a comment goes out (DESIGN, Answers)

JSON_TYPE = b"application/json"
NO_STORE = (b"cache-control", b"no-store")


class AnswerBody(Protocol):
    """What an answer writes: events as they come, or one document at the end.

    Attributes:
        is_streamed: the former.
    """

    is_streamed: bool

    def start(self) -> None:
        """It may write from now on."""

    def add_text(self, choice: int, text: str, now_s: float) -> None: ...

    def text_teller(self, choice: int, clock: ChoiceClock) -> TextTeller:
        """add_text in one call, for a choice that has begun.

        Args:
            clock: of the choice; tells when each of its texts came.
        """
        ...

    def add(self, choice: int, delta: Delta, now_s: float) -> None: ...

    def complete(self, usage: Usage, extras: Extras) -> None: ...

    def break_off(self, error: ServiceError) -> None:
        """Tell the error in the body, if its head is already out."""

    def close(self) -> None:
        """Let go of timers. Idempotent."""


class StreamedBody:
    """An answer as server-sent events. The head goes out with the first token, or the first keep-alive.

    The loop's time and the clock that news are stamped with are one, as in asyncio and uvloop.
    """

    is_streamed = True

    def __init__(
        self, surface: Surface, call: GenerationCall, context: ReplyContext, stream: HttpStream, timings: StageClock
    ) -> None:
        self._call = call
        self._reply = surface.stream_reply(call, context)
        self._stream = stream
        self._timings = timings
        self._loop = asyncio.get_running_loop()
        self._last_sent_s = self._loop.time()  # but for what the choices' tellers have sent
        self._clocks: list[ChoiceClock] = []  # of these
        self._keep_alive = DeadlineTimer(self._loop, self._next_keep_alive, self._on_keep_alive)

    def start(self) -> None:
        self._keep_alive.arm()

    def add_text(self, choice: int, text: str, now_s: float) -> None:
        self._last_sent_s = now_s
        if self._stream.status is None:
            self._open()
        self._stream.send(self._reply.text(choice, text))

    def text_teller(self, choice: int, clock: ChoiceClock) -> TextTeller:
        self._clocks.append(clock)
        frame, reply, stream = self._reply.text_frame(choice), self._reply, self._stream
        return stream.text_writer(frame) if frame is not None else lambda text: stream.send(reply.text(choice, text))

    def add(self, choice: int, delta: Delta, now_s: float) -> None:
        self._last_sent_s = now_s
        if self._stream.status is None:
            self._open()
        self._stream.send(self._reply.delta(choice, delta))

    def complete(self, usage: Usage, extras: Extras) -> None:
        self.close()
        if not self._stream.head_sent:
            self._open()
        self._stream.send(self._reply.end(usage, extras | _timings_of(self._call, self._timings)))
        self._stream.end(answer_trailers(usage, self._timings))

    def break_off(self, error: ServiceError) -> None:
        self.close()
        if self._stream.head_sent:
            self._stream.send(self._reply.error(error))
            self._stream.end()

    def close(self) -> None:
        self._keep_alive.cancel()

    def _open(self) -> None:
        headers = (
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"x-accel-buffering", b"no"),
            *answer_headers(self._timings),
        )
        self._stream.send_head(ResponseHead(200, headers))
        self._stream.send(self._reply.start())
        self._stream.call_once_written(self._on_begun)

    def _on_begun(self, now_s: float) -> None:
        self._timings.go_on(Stage.FIRST_FLUSH, Stage.DECODE, now_s)

    def _next_keep_alive(self) -> float:
        last_s = max((clock.last_s or 0.0 for clock in self._clocks), default=0.0)
        return max(last_s, self._last_sent_s) + KEEP_ALIVE_S

    def _on_keep_alive(self) -> None:
        self.say(KEEP_ALIVE)

    def say(self, line: bytes) -> None:
        """Send a comment, where the reader has not enough to read anyway."""
        self._last_sent_s = self._loop.time()
        if self._stream.is_blocked:
            return
        if not self._stream.head_sent:
            self._open()
        self._stream.send(line)


class WholeBody:
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

    def start(self) -> None:
        """It writes at the end alone."""

    def add_text(self, choice: int, text: str, now_s: float) -> None:
        self._texts[choice].append(text)

    def text_teller(self, choice: int, clock: ChoiceClock) -> TextTeller:
        return self._texts[choice].append

    def add(self, choice: int, delta: Delta, now_s: float) -> None:
        self._texts[choice].append(delta.text)
        if delta.logprobs:
            self._logprobs[choice].extend(delta.logprobs)
        prompt_logprobs = self._prompt_logprobs[choice]
        if prompt_logprobs is not None and delta.prompt_logprobs:
            prompt_logprobs.add_prompt(delta.prompt_logprobs)
        if delta.finish_reason is not None:
            self._reasons[choice] = delta.finish_reason
            self._stop_logprobs[choice] = delta.stop_logprobs

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
        send_document(self._stream, 200, body, answer_headers(self._timings))

    def break_off(self, error: ServiceError) -> None:
        """Nothing has been sent: the error becomes the answer, in wait_finished()."""

    def close(self) -> None:
        """Nothing is held."""


def _timings_of(call: GenerationCall, timings: StageClock) -> Extras:
    return {"timings": timings.details()} if call.wants_timings else {}


def send_document(
    stream: HttpStream, status: int, body: bytes, headers: Headers = (), media_type: bytes = JSON_TYPE
) -> None:
    """Answer with one document, whole."""
    stream.send_head(ResponseHead(status, (*content_headers(body, media_type), *headers)))
    stream.send(body)
    stream.end()


def content_headers(body: bytes, media_type: bytes = JSON_TYPE) -> Headers:
    return ((b"content-type", media_type), (b"content-length", b"%d" % len(body)))


def answer_headers(timings: StageClock) -> Headers:
    """What an answer bears beside its content: where the time went until now."""
    processing_ms = b"%d" % round(timings.total_ns / MS_NS)
    return (NO_STORE, (b"server-timing", timings.server_timing()), (b"openai-processing-ms", processing_ms))


def answer_trailers(usage: Usage, timings: StageClock) -> Headers:
    """What is only known at a stream's end. RFC 9651 §3.2: the usage is a dictionary."""
    counts = (usage.num_prompt_tokens, usage.num_cached_tokens, usage.num_completion_tokens)
    return (
        (b"server-timing", timings.server_timing()),
        (b"steploop-usage", b"prompt-tokens=%d, cached-tokens=%d, completion-tokens=%d" % counts),
    )
