"""What the choices of one answer may still say: topped up as they go on, held where nothing is left. Thread: loop.

Nothing is said that was not reserved before. A sequence is asked about when AHEAD_TOKENS are left to it, and when none
are; in between, what is in flight when it is held still has its place.
"""

import asyncio
from typing import Protocol

from core.types import Request
from server.api.surface import Extras
from server.backend import NEVER
from server.gate.quota import FIRST_TOKENS, S_NS, TOP_UP_TOKENS, Shortage, Ticket

AHEAD_TOKENS = 32  # at 100 tokens/s of a stream a third of a second: the loop is seldom later
MAX_WAIT_S = 10.0
POLL_S = 1.0  # others settle at any time: tried again so often while it is held


class Held(Protocol):
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

    def __init__(self, held: Held, ticket: Ticket, requests: list[Request], loop: asyncio.AbstractEventLoop) -> None:
        self._held = held
        self._ticket = ticket
        self._loop = loop
        limits = [one.sampling.max_tokens for one in requests for _ in range(one.num_sequences)]
        self._max = limits
        self._allowed = [min(limit, FIRST_TOKENS) for limit in limits]
        self._short: dict[int, None] = {}  # choices that go on when there is more, in order
        self._shortage: Shortage | None = None  # the last
        self._timer: asyncio.TimerHandle | None = None
        self._give_up_s = 0.0
        self._has_ended = False

    @property
    def extras(self) -> Extras:
        """What the answer's last chunk says of it, once it is settled: what it gave back shortens the wait."""
        if not self._has_ended or self._shortage is None:
            return {}
        wait_ns = self._ticket.wait_ns(self._shortage)
        retry_after_s = None if wait_ns is None else -(-wait_ns // S_NS)
        limit = self._shortage.pool.name
        message = f"{self._shortage.account.owner} has used up its {limit}: the answer ends here."
        return {"steploop": {"ended_by": limit, "message": message, "retry_after_s": retry_after_s}}

    def on_mark(self, choice: int, num_tokens: int) -> int:
        """The choice has said so much: 0, or its mark or more. Gives its next mark; may hold or end the answer."""
        if self._has_ended:
            return NEVER
        mark = self._next_mark(choice)
        if num_tokens < mark or self._try_top_up(choice):  # it may have been topped up since its mark was set
            return self._next_mark(choice)
        if num_tokens >= self._allowed[choice]:
            self._end()
            return NEVER
        self._hold(choice)
        return self._allowed[choice]

    def drop(self, choice: int) -> None:
        """The choice has ended: nobody waits for its sake."""
        if choice in self._short:
            del self._short[choice]
            if not self._short and self._timer is not None:
                self.close()
                self._held.resume()

    def close(self) -> None:
        """Let go of the timer. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _next_mark(self, choice: int) -> int:
        allowed = self._allowed[choice]
        return NEVER if allowed == self._max[choice] else allowed - AHEAD_TOKENS

    def _try_top_up(self, choice: int) -> bool:
        num = min(TOP_UP_TOKENS, self._max[choice] - self._allowed[choice])
        shortage = self._ticket.top_up(num)
        if shortage is not None:
            self._shortage = shortage
            return False
        self._allowed[choice] += num
        return True

    def _hold(self, choice: int) -> None:
        self._short[choice] = None
        if self._timer is None:
            self._held.pause()
            self._give_up_s = self._loop.time() + MAX_WAIT_S
            self._wait()

    def _wait(self) -> None:
        assert self._shortage is not None
        wait_s = POLL_S if self._shortage.wait_ns is None else self._shortage.wait_ns / S_NS
        now_s = self._loop.time()
        self._timer = self._loop.call_at(min(now_s + min(wait_s, POLL_S), self._give_up_s), self._try_again)

    def _try_again(self) -> None:
        for choice in list(self._short):
            if not self._try_top_up(choice):
                break
            del self._short[choice]
        if not self._short:
            self._timer = None
            self._held.resume()
        elif self._loop.time() >= self._give_up_s:
            self._end()
        else:
            self._wait()

    def _end(self) -> None:
        self.close()
        self._has_ended = True
        self._held.end_early()
