"""What an answer would write, kept until its request is in the ledger. Thread: loop."""

from collections.abc import Callable

from core.errors import ServiceError
from core.types import Delta, Usage
from server.answer_body import AnswerBody
from server.api.surface import Extras
from server.backend import ChoiceClock, TextTeller


class HeldBody:
    """Implements server.answer_body.AnswerBody before another one: nothing reaches that one before release().

    As long as the ledger takes to commit: a few tokens; never more than the whole answer.
    """

    def __init__(self, body: AnswerBody) -> None:
        self.is_streamed = body.is_streamed
        self._body = body
        self._writes: list[Callable[[], None]] = []

    def release(self) -> AnswerBody:
        """Write all that was kept; the body that goes on."""
        self._body.start()
        for write in self._writes:
            write()
        self._writes.clear()
        return self._body

    def start(self) -> None:
        raise AssertionError("release() starts the body")

    def add_text(self, choice: int, text: str, now_s: float) -> None:
        self._writes.append(lambda: self._body.add_text(choice, text, now_s))

    def text_teller(self, choice: int, clock: ChoiceClock) -> TextTeller:
        raise AssertionError("nothing can be told past what is held")

    def add(self, choice: int, delta: Delta, now_s: float) -> None:
        self._writes.append(lambda: self._body.add(choice, delta, now_s))

    def complete(self, usage: Usage, extras: Extras) -> None:
        raise AssertionError("what is complete is settled, and what is settled was reserved before")

    def break_off(self, error: ServiceError) -> None:
        self._writes.clear()
        self._body.break_off(error)

    def close(self) -> None:
        self._body.close()
