"""Watches the engine, and reports the server's state to systemd. Thread: loop.

Once a tick it asks the engine for a beat. It tells the server of an engine that is silent or lost, and decides nothing
about requests. Source: sd_notify(3), systemd.service(5) (Type=notify, WatchdogSec=): one datagram for each message.
"""

import asyncio
import enum
import faulthandler
import logging
import os
import socket
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Protocol

from core.errors import StartupError
from core.types import EngineStats
from server.app import Readiness

logger = logging.getLogger(__name__)

TICK_S = 1.0
NUM_TICKS_PER_WATCHDOG = 3  # one more than sd_watchdog_enabled(3) recommends: a tick may be late

MIN_SILENCE_S = 10.0  # shorter silence is never an alarm
NUM_STEPS_OF_SILENCE = 3  # predicted steps
NUM_SILENCES_TO_DEATH = 3
FIRST_STEP_S = 100.0  # predicted before any measurement: the first step may compile kernels and have a full prompt
RECENT_TICKS = 60  # whose longest steps count

SEND_TIMEOUT_S = 1.0  # systemd reads at once; if it hangs, the loop must not
EXTENSION_S = 30.0  # added to systemd's timeouts with each tick while loading or draining
_EXTENSION = f"EXTEND_TIMEOUT_USEC={EXTENSION_S * 1e6:.0f}"


class EngineLost(Exception):
    """The engine's thread hangs in a step."""


class Supervised(Protocol):
    """The server, as supervision sees it. Thread: loop."""

    @property
    def num_in_progress(self) -> int:
        """Requests in progress."""

    @property
    def why_refusing(self) -> str | None:
        """Why requests are refused although the engine works; None: they are not."""

    def ask_for_beat(self) -> None:
        """Make the engine's thread call on_beat() after its step, or at once when it is idle."""

    def on_failed(self, error: BaseException) -> None: ...


class Supervision:
    """Ticks from start() to close()."""

    def __init__(
        self, server: Supervised, readiness: Readiness, manager: "ServiceManager", loop: asyncio.AbstractEventLoop
    ) -> None:
        self._server = server
        self._readiness = readiness
        self._manager = manager
        self._loop = loop
        self._tick_s = min(TICK_S, (manager.watchdog_s or TICK_S * NUM_TICKS_PER_WATCHDOG) / NUM_TICKS_PER_WATCHDOG)
        self._watch: EngineWatch | None = None  # once the engine is ready
        self._pulse = Pulse.BEATING
        self._serving = "Serving"  # the status; says also how the last reload failed
        self._why_refusing: str | None = None  # as last reported
        self._timer: asyncio.TimerHandle | None = None
        self._cause: StartupError | None = None
        self.last_reload: tuple[float, bool] | None = None  # unix time, and whether it succeeded

    def start(self) -> None:
        self._timer = self._loop.call_later(self._tick_s, self._tick)
        self._ask_for_time()

    def on_stage(self) -> None:
        """Loading has reached another stage."""
        self._ask_for_time()

    def on_ready(self, max_batch_tokens: int) -> None:
        self._watch = EngineWatch(self._server.ask_for_beat, self._tick_s, max_batch_tokens)
        self._manager.send("READY=1", status="Serving")

    def on_step(self, stats: EngineStats) -> None:
        assert self._watch is not None, "no step is made before the engine is ready"
        self._watch.on_step(stats)

    def on_beat(self) -> None:
        assert self._watch is not None, "no beat is asked for before the engine is ready"
        self._watch.on_beat()

    def reload(self, reload: Callable[[], None]) -> None:
        """Call it, and report its beginning and its end."""
        is_ready = (
            self._watch is not None and not self._readiness.is_draining
        )  # systemd expects reloads of a ready service only
        if is_ready:
            # systemd compares the time with its own
            self._manager.send("RELOADING=1", f"MONOTONIC_USEC={time.monotonic_ns() // 1000}", status="Reloading")
        self._serving = "Serving"
        self.last_reload = time.time(), True
        try:
            reload()
        except StartupError as error:
            self.last_reload = time.time(), False
            logger.error(
                "the reload failed; everything but revocations stays as it was: %s; %s", error.cause, error.fix
            )
            self._serving = f"Serving as before: the reload failed: {error.cause}"
        except Exception:
            logger.exception("the reload failed")
            self._serving = "Serving: the reload failed partway, see the log"
        if is_ready:
            self._manager.send("READY=1", status=self._status)

    def on_stopping(self, cause: StartupError | None) -> None:
        """The server drains.

        Args:
            cause: why it could not start.
        """
        self._cause = cause
        self._ask_for_time()

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _tick(self) -> None:
        self._timer = self._loop.call_later(self._tick_s, self._tick)
        self._ask_for_time()
        if self._watch is None or self._pulse is Pulse.LOST:
            return
        before, self._pulse = self._pulse, self._watch.tick()
        busy = f"busy with one step for {self._watch.silence_s:.1f} s"
        if self._pulse is Pulse.BEATING:
            if self._manager.watchdog_s is not None:
                self._manager.send("WATCHDOG=1")
            before_why, self._why_refusing = self._why_refusing, self._server.why_refusing
            if not self._readiness.is_draining and (before is Pulse.SILENT or before_why != self._why_refusing):
                self._manager.send(status=self._status)
            if before is Pulse.SILENT:
                logger.warning("the engine is stepping again")
                self._readiness.is_stalled = False
        elif self._pulse is Pulse.LOST:
            logger.critical("the stacks of all threads:\n%s", _stacks())
            self._server.on_failed(EngineLost(f"{busy}; the stacks are above"))
        elif before is Pulse.BEATING:
            logger.error("the engine has been %s", busy)
            self._manager.send(status=f"The engine has been {busy}")
            self._readiness.is_stalled = True

    @property
    def _status(self) -> str:
        return self._serving if self._why_refusing is None else f"Refusing requests: {self._why_refusing}"

    def _ask_for_time(self) -> None:
        """Loading and draining may take longer than the unit's TimeoutStartSec and TimeoutStopSec."""
        if self._readiness.is_draining:
            num = self._server.num_in_progress
            draining = f"Draining: {num} {'request' if num == 1 else 'requests'} in progress"
            status = draining if self._cause is None else f"Failed: {self._cause.cause}"
            self._manager.send("STOPPING=1", _EXTENSION, status=status)
        elif self._watch is None:
            self._manager.send(_EXTENSION, status=f"Loading: {self._readiness.stage}")


def _stacks() -> str:
    """Of all threads, as text for the log: to write them to stderr could block."""
    with open(os.memfd_create("stacks"), "w+") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        return file.read()


class Pulse(enum.Enum):
    """The engine's state."""

    BEATING = enum.auto()
    SILENT = enum.auto()  # for too long: clients should use another server
    LOST = enum.auto()  # it will not recover


class EngineWatch:
    """Asks for beats, and counts the ticks since: the engine answers when its step ends.

    Silence is counted in ticks, not by a clock: in a process that was frozen (SIGSTOP, a suspended machine, a busy
    loop) the engine was frozen too.

    Args:
        ask: see Supervised.ask_for_beat.
        tick_s: between calls of tick().
        max_batch_tokens: of a step.
    """

    def __init__(self, ask: Callable[[], None], tick_s: float, max_batch_tokens: int) -> None:
        self._ask = ask
        self._tick_s = tick_s
        self._max_batch_tokens = max_batch_tokens
        self._num_silent_ticks: int | None = None  # since a beat was asked for; None: the engine has answered
        self._num_tokens = 0  # computed since the start
        self._longest_s = 0.0  # step since the last tick
        self._recent_s: deque[float] = deque(maxlen=RECENT_TICKS)  # the longest step of each tick
        self._full_step_s = FIRST_STEP_S  # upper bound for a full step

    @property
    def silence_s(self) -> float:
        """Time since a beat was asked for that has not come."""
        return (self._num_silent_ticks or 0) * self._tick_s

    @property
    def max_silence_s(self) -> float:
        """Longest time that one step may take."""
        predicted_s = max(self._full_step_s, self._longest_s, *self._recent_s)
        return max(MIN_SILENCE_S, NUM_STEPS_OF_SILENCE * predicted_s)

    def on_beat(self) -> None:
        self._num_silent_ticks = None

    def on_step(self, stats: EngineStats) -> None:
        """A step has ended. Its time per token bounds a full step's, since each step has a fixed part as well."""
        num_tokens = stats.num_prompt_tokens + stats.num_generated_tokens
        num_new, self._num_tokens = num_tokens - self._num_tokens, num_tokens
        self._longest_s = max(self._longest_s, stats.step_s)
        if num_new > 0:
            self._full_step_s = min(self._full_step_s, stats.step_s * self._max_batch_tokens / num_new)

    def tick(self) -> Pulse:
        self._recent_s.append(self._longest_s)
        self._longest_s = 0.0
        if self._num_silent_ticks is None:
            self._num_silent_ticks = 0
            self._ask()
            return Pulse.BEATING
        self._num_silent_ticks += 1
        if self.silence_s <= self.max_silence_s:
            return Pulse.BEATING
        return Pulse.SILENT if self.silence_s <= NUM_SILENCES_TO_DEATH * self.max_silence_s else Pulse.LOST


class ServiceManager:
    """systemd, if it started this process: without $NOTIFY_SOCKET nothing is sent.

    Args:
        environ: of the process: NOTIFY_SOCKET, WATCHDOG_USEC, WATCHDOG_PID.
        pid: ours; WATCHDOG_PID may name another process.

    Attributes:
        watchdog_s: the longest time between pings once the service is ready; None: no pings are wanted.
    """

    def __init__(self, environ: Mapping[str, str], pid: int) -> None:
        usec = environ.get("WATCHDOG_USEC", "")  # sd_watchdog_enabled(3)
        is_ours = usec.isdecimal() and int(usec) > 0 and environ.get("WATCHDOG_PID", str(pid)) == str(pid)
        self.watchdog_s = int(usec) / 1e6 if is_ours else None
        self._address: str | None = environ.get("NOTIFY_SOCKET") or None
        if self._address is not None and self._address[0] not in "@/":
            logger.warning("NOTIFY_SOCKET=%s is not a Unix socket: systemd gets no notifications", self._address)
            self._address = None

    def send(self, *lines: str, status: str | None = None) -> None:
        """One message.

        Args:
            status: as systemctl status shows it.
        """
        if self._address is None:
            return
        if status is not None:
            lines += ("STATUS=" + " ".join(status.split()),)  # a line break would begin another field
        # a leading @ stands for the NUL of an abstract address
        address = "\0" + self._address[1:] if self._address[0] == "@" else self._address
        try:
            # a new socket for each message, as sd_notify(3) does: systemd may have bound its own again
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
                sock.settimeout(SEND_TIMEOUT_S)
                sock.sendto("\n".join(lines).encode(), address)
        except OSError as error:  # systemd acts by itself on missing messages
            logger.warning("the service manager cannot be sent %s: %s", lines[0], error)
