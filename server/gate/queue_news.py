"""What a stream tells of its wait, for clients that ask (`timings: {"queue": true}`): SSE comments. Thread: loop.

    : queue {"position":3,"expected_ms":1200}
    : prefill {"tokens":512,"of":2048}

Parsers of events skip comments. Each is told when it says something new, and at most ten in a second.
"""

import asyncio
from collections.abc import Callable

import msgspec

from server.deadline import DeadlineTimer
from server.gate.admission import QueueView

NEWS_EVERY_S = 0.1  # at most


class QueueNews:
    """Of one stream, until its first token.

    Args:
        view: where its first prompt stands; None: it waits no more.
        num_prompt_tokens: of that prompt.
        say: sends a comment.
    """

    def __init__(
        self, view: Callable[[], QueueView | None], num_prompt_tokens: int, say: Callable[[str], None]
    ) -> None:
        self._view = view
        self._num_prompt_tokens = num_prompt_tokens
        self._say = say
        self._loop = asyncio.get_running_loop()
        self._told = ""
        self._num_computed: int | None = None  # once the engine computes it
        self._due_s: float | None = self._loop.time() + NEWS_EVERY_S  # who need not wait is told nothing
        self._timer = DeadlineTimer(self._loop, lambda: self._due_s, self._tell)
        self._timer.arm()

    def on_prefill(self, num_tokens: int) -> None:
        """So many of the prompt are computed."""
        self._num_computed = num_tokens

    def close(self) -> None:
        """Tell no more. Idempotent."""
        self._due_s = None
        self._timer.cancel()

    def _tell(self) -> None:
        self._due_s = self._loop.time() + NEWS_EVERY_S
        text = self._text()
        if text is not None and text != self._told:
            self._told = text
            self._say(text)

    def _text(self) -> str | None:
        if self._num_computed is not None:
            return f"prefill {_json({'tokens': self._num_computed, 'of': self._num_prompt_tokens})}"
        view = self._view()
        if view is None:
            return None
        expected_ms = None if view.expected_s is None else round(view.expected_s * 1e3)
        return f"queue {_json({'position': view.position, 'expected_ms': expected_ms})}"


def _json(value: dict[str, int | None]) -> str:
    return msgspec.json.encode(value).decode()
