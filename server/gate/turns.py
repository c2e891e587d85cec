"""Lets tenants' work off the loop begin in turns, so that whoever asks for much waits for itself. Thread: loop."""

import asyncio
from collections import Counter, deque


class TenantTurns:
    """Places for work: each that begin() has given must be given back by end().

    Args:
        most: at once, of all tenants.
        most_of_one: of one tenant.
    """

    def __init__(self, most: int, most_of_one: int) -> None:
        self._most, self._most_of_one = most, most_of_one
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}  # by tenant, the next one first
        self._nums = Counter[str]()  # of those that have begun

    async def begin(self, tenant: str, due_s: float | None = None) -> None:
        """Wait for the tenant's turn.

        Args:
            due_s: on the loop's clock.

        Raises:
            TimeoutError: its turn did not come until then.
        """
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, deque()).append(turn)
        self._give()
        if turn.done():
            return
        try:
            async with asyncio.timeout_at(due_s):
                await turn
        except BaseException:
            if turn.done() and not turn.cancelled():  # it came in the same moment
                self.end(tenant)
            raise

    def end(self, tenant: str) -> None:
        self._nums[tenant] -= 1
        self._nums += Counter()  # without zeros
        self._give()

    def _give(self) -> None:
        while self._nums.total() < self._most:
            tenant = next((one for one in self._waiting if self._nums[one] < self._most_of_one), None)
            if tenant is None:
                return
            waiting = self._waiting.pop(tenant)
            turn = waiting.popleft()
            if waiting:  # behind the other tenants
                self._waiting[tenant] = waiting
            if not turn.done():  # whoever waited may have left
                self._nums[tenant] += 1
                turn.set_result(None)
