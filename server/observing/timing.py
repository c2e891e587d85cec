"""Where a request's time goes: one clock per request, always in exactly one stage. Thread: loop.

Stages are integers of monotonic nanoseconds that add up to the request's whole time. The engine's marks tell its
stages; nothing is stamped per token.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum

from core.types import Admitted, Prefilled
from server.wire.messages import Headers

S_NS = 1_000_000_000
MS_NS = 1_000_000

NO_STORE = (b"cache-control", b"no-store")


class Stage(StrEnum):
    """What a request is doing, in the order of a streamed generation."""

    HEAD = "head"  # from its first byte until its handler runs
    AUTH = "auth"  # routed, identified, authorized
    QUOTA = "quota"  # quotas are taken from, before the body and after it
    BODY = "body"
    OFFLOAD = "offload"  # waiting for another thread to take long work, and for the loop to take it back
    VALIDATE = "validate"
    TEMPLATE = "template"
    TOKENIZE = "tokenize"
    GRAMMAR = "grammar"  # of a structured answer: compiled, after those that wait for the same thread
    QUEUE = "queue"  # from the engine's inbox to the step that admits it
    UPSTREAM_CONNECT = "upstream_connect"  # until the request is on its way to an upstream, where there are any
    PREFILL = "prefill"
    FIRST_TOKEN = "first_token"  # sampled, on its way to the loop
    FIRST_FLUSH = "first_flush"  # at the loop, as text; of a stream only
    DECODE = "decode"  # until the last token is at the loop, without DETOKENIZE
    DETOKENIZE = "detokenize"  # the loop's work on its tokens: text, stop strings, events
    SETTLE = "settle"  # the ledger takes its cost
    ANSWER = "answer"  # an answer without a generation
    LAST_FLUSH = "last_flush"  # until the answer's last byte is with the kernel


_AT_THE_END = (Stage.LAST_FLUSH, None)
_RANK = {stage: rank for rank, stage in enumerate(Stage)}


class StageMarks:
    """Stages of work on any thread; the loop takes them over afterwards."""

    __slots__ = ("_clock", "entries")

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.entries: list[tuple[Stage, float]] = []

    def enter(self, stage: Stage) -> None:
        self.entries.append((stage, self._clock()))


@dataclass(slots=True, eq=False)
class StageClock:
    """One request's time. Arguments are monotonic seconds; nanoseconds are kept.

    A time before the last one counts as the last one: threads read one clock, but not always in the order of events.

    Attributes:
        accepted_s: its first byte came.
        arrived_s: its handler began: its place in the queue dates from then; 0: it has not.
        entries: the stages that it has entered, and when, in nanoseconds.
        first_token_s: its first token was at the loop, or sampled, where that is told at the end (beams).
        end_s: its last token and its usage were at the loop.
        detokenize_s: the loop's work on its tokens.
        num_prefill_chunks: steps that computed some of a prompt.
        num_cached_tokens: of its prompts.
        upstream: that it was sent to, and its version.
    """

    accepted_s: float
    arrived_s: float = 0.0
    first_token_s: float | None = None
    end_s: float | None = None
    detokenize_s: float = 0.0
    num_prefill_chunks: int = 0
    num_cached_tokens: int = 0
    upstream: str | None = None
    entries: list[tuple[Stage, int]] = field(init=False)
    _finished_ns: int | None = None

    def __post_init__(self) -> None:
        self.entries = [(Stage.HEAD, round(self.accepted_s * S_NS))]

    @property
    def stage(self) -> Stage | None:
        """The current one; None: the request is over."""
        return self.entries[-1][0] if self._finished_ns is None else None

    def enter(self, stage: Stage, now_s: float) -> None:
        if self._finished_ns is None:  # its engine may end later than its account, which is kept
            self.entries.append((stage, self._not_before(now_s)))

    def go_on(self, before: Stage, stage: Stage, now_s: float) -> None:
        """Enter the stage from the one before; a mark that comes late changes nothing."""
        if self.stage is before:
            self.enter(stage, now_s)

    def take_over(self, marks: StageMarks) -> None:
        """Add the stages of work that this clock waited for."""
        for stage, at_s in tuple(marks.entries):
            self.enter(stage, at_s)

    def on_engine_mark(self, mark: Admitted | Prefilled) -> None:
        """Of several requests of one call, the furthest leads."""
        if isinstance(mark, Prefilled):
            self.num_prefill_chunks += mark.num_chunks
            self.num_cached_tokens += mark.num_cached_tokens
            self.go_on(Stage.PREFILL, Stage.FIRST_TOKEN, mark.at_s)
        else:
            self.go_on(Stage.QUEUE, Stage.PREFILL, mark.at_s)

    def begin_decode(self, stage: Stage, now_s: float, is_told: bool) -> None:
        """Its first token is at the loop.

        Args:
            is_told: tokens come one by one. False: all at the end; the first was sampled with the prompt.
        """
        if not is_told and self.stage is Stage.FIRST_TOKEN:
            now_s = self.entries.pop()[1] / S_NS
        self.first_token_s = now_s
        self.enter(stage, now_s)

    def finish(self, now_s: float) -> None:
        """The request is over. Idempotent."""
        if self._finished_ns is None:
            self._finished_ns = self._not_before(now_s)

    def _not_before(self, now_s: float) -> int:
        return max(self.entries[-1][1], round(now_s * S_NS))

    @property
    def total_ns(self) -> int:
        """Until the latest stage was left."""
        latest_ns = self.entries[-1][1] if self._finished_ns is None else self._finished_ns
        return latest_ns - self.entries[0][1]

    @property
    def detokenize_ms(self) -> float:
        return round(self.detokenize_s * 1e3, 3)

    @property
    def ttft_s(self) -> float | None:
        return None if self.first_token_s is None else self.first_token_s - self.accepted_s

    def intervals(self) -> list[tuple[Stage, int, int]]:
        """The stages left so far, in order, each with when it was entered and left, in nanoseconds."""
        ends = [start for _, start in self.entries[1:]]
        if self._finished_ns is not None:
            ends.append(self._finished_ns)
        return [(stage, start, end) for (stage, start), end in zip(self.entries, ends, strict=False)]

    def stages_ns(self) -> dict[Stage, int]:
        """Of the stages left so far, in the order of Stage; the sum is total_ns."""
        spent: dict[Stage, int] = {}
        for stage, start_ns, end_ns in self.intervals():
            spent[stage] = spent.get(stage, 0) + end_ns - start_ns
        if Stage.DECODE in spent:
            spent[Stage.DETOKENIZE] = min(round(self.detokenize_s * S_NS), spent[Stage.DECODE])
            spent[Stage.DECODE] -= spent[Stage.DETOKENIZE]
        return {stage: spent[stage] for stage in sorted(spent, key=_RANK.__getitem__)}

    def stages_ms(self) -> dict[str, float]:
        """Likewise, rounded to microseconds."""
        return {stage.value: round(ns / MS_NS, 3) for stage, ns in self.stages_ns().items()}

    def details(self) -> dict[str, float]:
        """The `timings` object: stages, total, TTFT and the prefill's chunks."""
        details = self.stages_ms() | {"total": round(self.total_ns / MS_NS, 3)}
        if self.ttft_s is not None:
            details["ttft"] = round(self.ttft_s * 1e3, 3)
        if self.num_prefill_chunks:
            details |= {"prefill_chunks": self.num_prefill_chunks, "cached_tokens": self.num_cached_tokens}
        return details

    def server_timing(self) -> bytes:
        """The Server-Timing field's value (W3C Server Timing, section 3); with the total once the answer is ready."""
        entries = [f"{stage};dur={ns / MS_NS:.3f}" for stage, ns in self.stages_ns().items()]
        if self.num_prefill_chunks:
            about = f';desc="chunks={self.num_prefill_chunks} cached={self.num_cached_tokens}"'
            entries = [entry + about if entry.startswith(Stage.PREFILL) else entry for entry in entries]
        if self.stage in _AT_THE_END:
            entries.append(f"total;dur={self.total_ns / MS_NS:.3f}")
        return ", ".join(entries).encode()


def answer_headers(timings: StageClock, caching: tuple[bytes, bytes] = NO_STORE) -> Headers:
    """Cache-Control, and where the time went until now."""
    processing_ms = b"%d" % round(timings.total_ns / MS_NS)
    return (caching, (b"server-timing", timings.server_timing()), (b"openai-processing-ms", processing_ms))
