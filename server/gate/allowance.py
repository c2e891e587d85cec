"""Reserves quota for an answer's next tokens as it goes on, and pauses it when none is left. Thread: loop.

Nothing is said that was not reserved before. A sequence is asked about when AHEAD_TOKENS are left to it, and when none
are; in between, what is in flight when it is paused still has its place. Where less than a top-up is left, its choices
share that.

An answer is paused until there is a whole top-up, MAX_WAIT_S at most. Then it says what it has, and what has come
meanwhile, and ends when nothing is left. Where nothing can come by then, as of a day's limit, it is not paused.
"""

import asyncio
import logging
from typing import Any, Protocol

from core.types import Request
from server.gate.quota import FIRST_TOKENS, S_NS, TOP_UP_TOKENS, Shortage, Ticket

logger = logging.getLogger(__name__)

NEVER = 2**63  # tokens: a mark that no sequence reaches
AHEAD_TOKENS = 32  # at 100 tokens/s of a stream a third of a second: the loop is seldom later
MAX_WAIT_S = 10.0
MAX_WAIT_NS = round(MAX_WAIT_S * S_NS)
LEAST_RETRY_S = 1  # where others have given back since
POLL_S = 1.0  # others settle at any time: tried again so often while it is paused


class Pausable(Protocol):
    """The answer, as its allowance steers it."""

    def pause(self) -> None: ...

    def resume(self) -> None: ...

    def end_early(self) -> None:
        """End all that still goes on, as if at its max_tokens."""
        ...


class Allowance:
    """Of the answer's choices, by number.

    Args:
        ticket: holds what was reserved for the requests.
        requests: in the order of their choices.
    """

    def __init__(
        self, answer: Pausable, ticket: Ticket, requests: list[Request], loop: asyncio.AbstractEventLoop
    ) -> None:
        self._answer = answer
        self._ticket = ticket
        self._loop = loop
        limits = [one.sampling.max_tokens for one in requests for _ in range(one.num_sequences)]
        self._max = limits
        self._num_choices = len(limits)  # that have not ended
        self._allowed = [min(limit, FIRST_TOKENS) for limit in limits]
        self._short: dict[int, None] = {}  # choices that go on when there is more, in order
        self._shortage: Shortage | None = None  # the last
        self._timer: asyncio.TimerHandle | None = None
        self._give_up_s = 0.0
        self._has_waited = False  # in vain: it is not paused again before there is a whole top-up
        self._has_ended = False

    @property
    def extras(self) -> dict[str, Any]:
        """What the answer's last chunk says of it, once it is settled: what it gave back shortens the wait."""
        if not self._has_ended or self._shortage is None:
            return {}
        wait_ns = self._ticket.wait_ns(self._shortage)
        retry_after_s = None if wait_ns is None else max(LEAST_RETRY_S, -(-wait_ns // S_NS))
        limit = self._shortage.pool.name
        message = f"{self._shortage.account.owner} has used up its {limit}: the answer ends here."
        return {"steploop": {"ended_by": limit, "message": message, "retry_after_s": retry_after_s}}

    def on_mark(self, choice: int, num_tokens: int) -> int:
        """The choice has said so much: 0, or its mark or more. Gives its next mark; may pause or end the answer."""
        if self._has_ended:
            return NEVER
        mark = self._next_mark(choice)
        if num_tokens < mark:  # it has been topped up since its mark was set
            return mark
        if self._try_top_up(choice) or self._try_take_rest(choice):
            return self._next_mark(choice)
        if num_tokens >= self._allowed[choice]:
            self._end()
            return NEVER
        if not self._has_waited and self._ticket.may_gain(MAX_WAIT_NS):
            self._pause(choice)
        return self._allowed[choice]

    def drop(self, choice: int) -> None:
        """The choice has ended: it waits for no more. To be called once."""
        self._num_choices -= 1
        if choice in self._short:
            del self._short[choice]
            if not self._short and self._timer is not None:
                self.close()
                self._answer.resume()

    def close(self) -> None:
        """Let go of the timer. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _next_mark(self, choice: int) -> int:
        allowed = self._allowed[choice]
        return NEVER if allowed == self._max[choice] else allowed - AHEAD_TOKENS

    def _wanted(self, choice: int) -> int:
        return min(TOP_UP_TOKENS, self._max[choice] - self._allowed[choice])

    def _try_top_up(self, choice: int) -> bool:
        num = self._wanted(choice)
        shortage = self._ticket.top_up(num)
        if shortage is not None:
            self._shortage = shortage
            return False
        self._allowed[choice] += num
        self._has_waited = False
        return True

    def _try_take_rest(self, choice: int) -> bool:
        """Where there is less than a top-up: its part of what is left."""
        num = self._ticket.top_up_rest(self._wanted(choice), self._num_choices)
        self._allowed[choice] += num
        return num > 0

    def _pause(self, choice: int) -> None:
        self._short[choice] = None
        if self._timer is None:
            self._answer.pause()
            self._give_up_s = self._loop.time() + MAX_WAIT_S
            self._wait()

    def _wait(self) -> None:
        assert self._shortage is not None
        wait_s = POLL_S if self._shortage.wait_ns is None else self._shortage.wait_ns / S_NS
        now_s = self._loop.time()
        self._timer = self._loop.call_at(min(now_s + min(wait_s, POLL_S), self._give_up_s), self._try_again)

    def _try_again(self) -> None:
        """A fault of ours must not leave it paused: nothing else would let it go on."""
        try:
            self._look_again()
        except Exception:
            logger.exception("an answer that waits for its quota cannot go on, and ends")
            self._end()

    def _look_again(self) -> None:
        for choice in list(self._short):
            if not self._try_top_up(choice):
                break
            del self._short[choice]
        if self._short and self._loop.time() < self._give_up_s:
            self._wait()
            return
        self._has_waited = bool(self._short)
        for choice in self._short:
            self._try_take_rest(choice)
        self._short.clear()
        self._timer = None
        self._answer.resume()

    def _end(self) -> None:
        self.close()
        self._has_ended = True
        self._answer.end_early()
