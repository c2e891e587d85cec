"""One request to an upstream, and its answer as it comes: a head, pieces of a body, an end. Thread: loop.

Whoever reads may pause: then at most a window of bytes more comes (HTTP/2), or what one read of the socket holds.
"""

import asyncio
from collections.abc import Callable
from typing import NamedTuple, Protocol


class UpstreamFault(Exception):
    """An upstream has not answered, or has broken its answer off. The text completes "The upstream failed: ...".

    Args:
        is_untouched: the request has not been begun: it can be sent elsewhere, whatever it does.
    """

    def __init__(self, why: str, is_untouched: bool = False) -> None:
        super().__init__(why)
        self.is_untouched = is_untouched


class AnswerHead(NamedTuple):
    status: int
    fields: tuple[tuple[bytes, bytes], ...]  # names in lower case

    def field(self, name: bytes) -> bytes | None:
        return next((value for key, value in self.fields if key == name), None)


class Carrier(Protocol):
    """What an exchange asks of its connection."""

    def acknowledge(self, exchange: "Exchange", num_bytes: int) -> None:
        """So many bytes of the answer have been read."""
        ...

    def set_paused(self, exchange: "Exchange", is_paused: bool) -> None: ...

    def cancel(self, exchange: "Exchange") -> None:
        """Nobody wants the answer any more. Idempotent."""
        ...


class Exchange:
    """
    Attributes:
        head: the answer's. Its exception is an UpstreamFault.
        stream_id: on HTTP/2.
    """

    def __init__(self, carrier: Carrier, on_over: Callable[[], None]) -> None:
        """
        Args:
            on_over: called once: the answer is complete, broken off, or cancelled.
        """
        self.head: asyncio.Future[AnswerHead] = asyncio.get_running_loop().create_future()
        self.stream_id = 0
        self.is_over = False
        self._carrier = carrier
        self._on_over = on_over
        self._on_data: Callable[[bytes], None] | None = None
        self._on_end: Callable[[UpstreamFault | None], None] | None = None
        self._early: list[bytes] = []  # of the body, before anybody reads it; within its window
        self._fault: UpstreamFault | None = None
        self._num_unread = 0
        self._is_paused = False

    # The reader's side.

    def read(self, on_data: Callable[[bytes], None], on_end: Callable[[UpstreamFault | None], None]) -> None:
        """Take the body: what has come of it now, and the rest as it comes. To be called once, after the head.

        Args:
            on_end: called once, unless cancel() is; with the fault that has broken the answer off.
        """
        self._on_data, self._on_end = on_data, on_end
        early, self._early = self._early, []
        for data in early:
            if self._on_data is not None:
                self._take(data)
        if self.is_over and self._on_end is not None:
            self._tell_end()

    async def read_all(self, most_bytes: int) -> bytes:
        """The whole body.

        Raises:
            UpstreamFault: it is broken off, or larger.
        """
        body = bytearray()
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def on_data(data: bytes) -> None:
            body.extend(data)
            if len(body) > most_bytes:
                self.cancel()
                on_end(UpstreamFault(f"its answer is larger than {most_bytes} bytes"))

        def on_end(fault: UpstreamFault | None) -> None:
            if not done.done():
                if fault is None:
                    done.set_result(None)
                else:
                    done.set_exception(fault)

        self.read(on_data, on_end)
        try:
            await done
        finally:
            self.cancel()
        return bytes(body)

    def pause(self) -> None:
        if not self._is_paused and not self.is_over:
            self._is_paused = True
            self._carrier.set_paused(self, True)

    def resume(self) -> None:
        if self._is_paused:
            self._is_paused = False
            num_unread, self._num_unread = self._num_unread, 0
            if not self.is_over:
                self._carrier.acknowledge(self, num_unread)
                self._carrier.set_paused(self, False)

    def cancel(self) -> None:
        """Nobody wants the rest. The upstream hears of it in this turn. Idempotent; on_end is not called."""
        self._on_data = self._on_end = None
        if not self.is_over:
            self._carrier.cancel(self)
            self._close(None)
        if not self.head.done():
            self.head.cancel()

    # The connection's side.

    def take_head(self, head: AnswerHead) -> None:
        if not self.head.done():
            self.head.set_result(head)

    def take_data(self, data: bytes) -> None:
        if self.is_over:
            return
        if self._on_data is None:
            self._early.append(data)
        else:
            self._take(data)

    def take_end(self, fault: UpstreamFault | None = None) -> None:
        """The answer is complete, or will never be. Idempotent."""
        if self.is_over:
            return
        self._close(fault)
        if not self.head.done():
            self.head.set_exception(fault or UpstreamFault("its answer has no head"))
            self.head.exception()  # marks it as retrieved: nobody may wait for it
        if self._on_end is not None:
            self._tell_end()

    def _take(self, data: bytes) -> None:
        assert self._on_data is not None
        if self._is_paused:
            self._num_unread += len(data)
        elif not self.is_over:
            self._carrier.acknowledge(self, len(data))
        self._on_data(data)

    def _close(self, fault: UpstreamFault | None) -> None:
        self.is_over, self._fault = True, fault
        self._on_over()

    def _tell_end(self) -> None:
        on_end, self._on_end, self._on_data = self._on_end, None, None
        assert on_end is not None
        on_end(self._fault)
