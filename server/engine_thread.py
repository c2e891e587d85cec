"""The engine thread: builds core.engine, steps it, wakes it, ends it.

Two crossings connect it to the loop: the inbox (a deque and a wake-up) and the outbox (one call_soon_threadsafe per
step).
"""

import threading
import time
from asyncio import AbstractEventLoop
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, Protocol

from core.engine import Engine
from core.types import Message, StepDelivery

Inbox = deque[Message]

# Deliveries that the loop has not handled in full: at so many the engine waits, so that none pile up where the loop is
# slower than the steps. More than one, so that a loop that is late for a moment delays no step.
MAX_DELIVERIES = 4


class Loaded(Protocol):
    """The result of loading: the engine, and what the loop reads of it."""

    @property
    def engine(self) -> Engine: ...


class EngineEvents(Protocol):
    """Receives the thread's events. Each method runs on the loop."""

    def on_ready(self, loaded: Any) -> None:
        """The engine is built; `loaded` is what build() has returned."""

    def on_delivery(self, delivery: StepDelivery) -> None: ...

    def on_beat(self, gil_wait_s: float) -> None:
        """The engine is between two steps: the answer to ask_for_beat().

        Args:
            gil_wait_s: how long its thread has just waited for the GIL.
        """

    def on_failed(self, error: BaseException) -> None:
        """The engine could not be built, or is broken: nothing more will be delivered."""


class EngineThread:
    """Steps an engine while it has work; otherwise sleeps until a message comes or work is due.

    Args:
        build: makes the engine on its thread (imports torch, loads weights) from the inbox and the delivery function.

    Thread: public methods belong to the loop, the rest to the engine.
    """

    def __init__(
        self,
        build: Callable[[Inbox, Callable[[StepDelivery], None]], Loaded],
        events: EngineEvents,
        loop: AbstractEventLoop,
    ) -> None:
        self._build = build
        self._events = events
        self._loop = loop
        self._inbox: Inbox = deque()
        self._wake_up = threading.Event()
        self._room: SimpleQueue[None] = SimpleQueue()  # a semaphore in C: it is passed each step
        for _ in range(MAX_DELIVERIES):
            self._room.put(None)
        self._is_stopping = False
        self._owes_beat = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def post(self, message: Message) -> None:
        self._inbox.append(message)
        self._wake_up.set()

    def on_delivered(self) -> None:
        """One more delivery has been handled in full."""
        self._room.put(None)

    def ask_for_beat(self) -> None:
        """Call on_beat once no step runs: at once when idle, never when a step hangs."""
        self._owes_beat = True
        self._wake_up.set()

    def stop(self) -> None:
        """Ask the thread to end after its current step. Unfinished requests get no more deliveries."""
        self._is_stopping = True
        self._wake_up.set()
        self._room.put(None)  # the loop may never handle the last deliveries

    def wait_stopped(self, timeout_s: float) -> bool:
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            loaded = self._build(self._inbox, self._deliver)
            self._tell(self._events.on_ready, loaded)
            self._step_until_stopped(loaded.engine)
        except BaseException as error:
            self._tell(self._events.on_failed, error)

    def _step_until_stopped(self, engine: Engine) -> None:
        while True:
            self._wake_up.clear()  # before the inbox and the flag are read: later messages wake the thread
            while not self._is_stopping and engine.step():
                self._beat()
            if self._is_stopping:
                engine.close()
                return
            self._beat()
            self._wake_up.wait(engine.wait_s())

    def _beat(self) -> None:
        if self._owes_beat:
            self._owes_beat = False
            before_s = time.perf_counter()
            time.sleep(0)  # gives up the GIL, as every wait for a device does, and takes it again
            self._tell(self._events.on_beat, time.perf_counter() - before_s)

    def _deliver(self, delivery: StepDelivery) -> None:
        self._room.get()
        self._tell(self._events.on_delivery, delivery)

    def _tell(self, callback: Callable[..., None], *args: object) -> None:
        try:
            self._loop.call_soon_threadsafe(callback, *args)
        except RuntimeError:  # the loop was closed while this step ran
            self._is_stopping = True
