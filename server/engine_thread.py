"""The thread around core.engine: how it is built, woken, and ended. The only one that the loop talks to.

The two crossings: the inbox (a deque and a wake-up) and the outbox (one call_soon_threadsafe per step).
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

# Steps whose news the loop has not told in full: the engine waits for room, rather than let them pile up where the loop
# is slower than the steps. More than one, so that a loop that is late for a moment delays no step.
MAX_DELIVERIES = 4


class Loaded(Protocol):
    """What loading has made: the engine, and what the loop wants to know of it."""

    @property
    def engine(self) -> Engine: ...


class EngineEvents(Protocol):
    """What the loop is told. Each runs on the loop."""

    def on_ready(self, loaded: Any) -> None:
        """The engine is built; this is what build() has made."""
        ...

    def on_delivery(self, delivery: StepDelivery) -> None: ...

    def on_beat(self, gil_wait_s: float) -> None:
        """The engine is between two steps, as ask_for_beat() has asked.

        Args:
            gil_wait_s: what its thread waited for the interpreter, coming back from a call that had let go of it.
        """
        ...

    def on_failed(self, error: BaseException) -> None:
        """The engine could not be built, or is broken: nothing more will be delivered."""
        ...


class EngineThread:
    """Steps an engine for as long as it has work, sleeps while it has none: until a message, or until work is due.

    Args:
        build: makes the engine, on its thread: imports torch, loads weights. Takes the inbox, and where to deliver.

    Thread: post(), on_delivered(), ask_for_beat(), start(), stop() and wait_stopped() belong to the loop, the rest to
    the engine.
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
        self._room: SimpleQueue[None] = SimpleQueue()  # a semaphore that is no Python code, for it is passed each step
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
        """One more delivery has been told in full."""
        self._room.put(None)

    def ask_for_beat(self) -> None:
        """Have the loop told once no step runs: at once when there is none, never when it hangs."""
        self._owes_beat = True
        self._wake_up.set()

    def stop(self) -> None:
        """Ask the thread to end after its current step. What is unfinished then gets no answer from here."""
        self._is_stopping = True
        self._wake_up.set()
        self._room.put(None)  # what is delivered yet may never be told

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
            self._wake_up.clear()  # before the inbox and the flag are read: what comes later wakes us
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
            time.sleep(0)  # lets go of the interpreter, as every wait for a device does, and asks for it back
            self._tell(self._events.on_beat, time.perf_counter() - before_s)

    def _deliver(self, delivery: StepDelivery) -> None:
        self._room.get()
        self._tell(self._events.on_delivery, delivery)

    def _tell(self, callback: Callable[..., None], *args: object) -> None:
        try:
            self._loop.call_soon_threadsafe(callback, *args)
        except RuntimeError:  # the loop has closed while this step ran: nobody listens any more
            self._is_stopping = True
