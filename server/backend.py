"""What the lifecycle asks tokens of. Here it is the engine of this process (engine_client.py). Thread: loop."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from core.types import Cost, Delta, EngineMark, EngineSnapshot, EngineStats, FinishReason, Request, Usage
from server.gate.text_rules import Matcher

NEVER = 2**63  # tokens: a mark that no sequence reaches
TextTeller = Callable[[str], None]  # DeltaSink.on_text of one choice, as for its time: ShortWay


@dataclass(slots=True)
class ChoiceClock:
    """
    Attributes:
        last_s: when the choice's last text came; None before its first.
    """

    last_s: float | None = None


class ShortWay(NamedTuple):
    """How a text is told in one call: whoever tells it by `tell` sets the clock, and observes the gap, by itself."""

    tell: TextTeller
    clock: ChoiceClock


@dataclass(slots=True)
class LoopWork:
    """What the loop has done for tokens since the start: text, stop strings, events. Measured once a slice of many."""

    num_tokens: int = 0
    busy_s: float = 0.0

    def cost_s(self, since: tuple[int, float], num_tokens: int) -> float:
        """What so many tokens have cost, at the mean price since then: (num_tokens, busy_s) as they were."""
        num, busy_s = self.num_tokens - since[0], self.busy_s - since[1]
        return busy_s * num_tokens / num if num else 0.0


class DeltaSink(Protocol):
    """Where a request's words go, as they come. Called on the loop, within the delivery of the step; must not block.

    `choice` is the sequence's number among those that share the sink; `now_s` is when the news came, monotonic.
    """

    def on_text(self, choice: int, text: str, now_s: float) -> None:
        """Newly drawn tokens say this, and there is nothing else to tell of them."""
        ...

    def short_way(self, choice: int) -> ShortWay | None:
        """The hot path: what does as on_text(choice, ...) in one call, for a choice that has said something before.

        Good until the choice has ended or been cancelled. None: not yet; ask again after the next on_text.
        """
        ...

    def on_delta(self, choice: int, delta: Delta, now_s: float) -> None: ...

    def on_mark(self, choice: int, num_tokens: int) -> int:
        """The choice has so many tokens: 0 as it is submitted, and later at least its mark.

        Returns: at how many to call again; NEVER.
        """
        ...

    def on_engine_mark(self, mark: EngineMark) -> None:
        """How far one of its requests has come, before any token of it."""
        ...

    def on_end(self, usage: Usage, error: str | None) -> None:
        """The request's last news, exactly once. With an error, sequences without a finish reason have failed."""
        ...


class GenerationHandle(Protocol):
    """A submitted request, as the loop holds it."""

    @property
    def num_tokens(self) -> int:
        """Of its completions, those that have come and are kept."""
        ...

    @property
    def cost(self) -> Cost:
        """Nothing until it has ended."""
        ...

    def cancel(self, reason: FinishReason) -> None:
        """End all its sequences. Later deltas are dropped; on_end still comes. Idempotent."""
        ...

    def finish(self, reason: FinishReason, now_s: float) -> None:
        """End all its sequences where they are, and tell it as their ends. Later news of them are dropped."""
        ...

    def num_untold(self, choice: int) -> int:
        """Tokens of one of its choices that have come, and that no text has told of yet."""
        ...

    def pause(self) -> None: ...

    def resume(self) -> None: ...


class Backend(Protocol):
    """Turns requests into deltas."""

    stats: EngineStats
    work: LoopWork

    def submit(
        self,
        request: Request,
        sink: DeltaSink,
        continues_text: bool,
        first_choice: int = 0,
        forbidden: Sequence[Matcher] = (),
    ) -> GenerationHandle:
        """Queue the request.

        Args:
            first_choice: the number of its first sequence; the others follow.
            forbidden: what ends the text of a sequence that says it, with content_filter.
            continues_text: the output goes on with the prompt's text (completions), rather than being one of its own.

        Raises:
            ServiceError: it cannot be taken now (loading, draining, engine failed).
        """
        ...

    def inspect(self) -> Awaitable[EngineSnapshot]:
        """What the engine is at, after all that was asked of it before.

        Raises:
            ServiceError: the engine has failed.
        """
        ...

    async def clear_cache(self) -> None:
        """Let no request find what was computed before now, after a restart neither. Returns once that is so.

        Raises:
            ServiceError: the engine has failed; or no request finds it now, but one after a restart may: some of its
                files could not be deleted, or not in time.
        """
        ...
