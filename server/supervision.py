"""Watches the engine once a tick, and reports to systemd: ready, reloading, watchdog. Thread: loop.

It decides nothing about requests: that the engine is silent, or lost, goes to the one who made this. systemd is told by
hand, one datagram a message: sd_notify(3), systemd.service(5) (Type=notify, WatchdogSec=).
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

logger = logging.getLogger(__name__)

TICK_S = 1.0
NUM_TICKS_PER_WATCHDOG = 3  # one more than sd_watchdog_enabled(3) recommends: a tick may come late

MIN_SILENCE_S = 10.0  # that is never taken for a hang
NUM_STEPS_OF_SILENCE = 3  # predicted steps that are not, either
NUM_SILENCES_TO_DEATH = 3
FIRST_STEP_S = 100.0  # predicted while nothing has been measured: it may have to compile, and a prompt may fill it
RECENT_TICKS = 60  # whose longest steps count

SEND_TIMEOUT_S = 1.0  # the manager reads at once; one that hangs must not hang the loop for long
EXTENSION_S = 30.0  # more time for what the manager waits for; asked again long before it is over
_EXTENSION = f"EXTEND_TIMEOUT_USEC={EXTENSION_S * 1e6:.0f}"


class EngineLost(Exception):
    """The engine's thread hangs in a step."""


class Supervised(Protocol):
    """What supervision may ask and tell of the process. Thread: loop."""

    @property
    def num_in_progress(self) -> int:
        """Requests that are being answered."""

    @property
    def stage(self) -> str:
        """What it is doing while it is not ready."""

    @property
    def why_refusing(self) -> str | None:
        """What keeps requests out though the engine beats; None: nothing."""

    def ask_for_beat(self) -> None:
        """Have on_beat() called when the engine is between two steps."""

    def on_silence(self, is_silent: bool) -> None:
        """The engine has been busy with a step for too long; or, False, is back."""

    def on_failed(self, error: BaseException) -> None: ...


class Supervision:
    """Ticks from start() to close().

    Args:
        manager: told of each change, and pinged while the engine beats.
    """

    def __init__(self, process: Supervised, manager: "ServiceManager", loop: asyncio.AbstractEventLoop) -> None:
        self._process = process
        self._manager = manager
        self._loop = loop
        self._tick_s = min(TICK_S, (manager.watchdog_s or TICK_S * NUM_TICKS_PER_WATCHDOG) / NUM_TICKS_PER_WATCHDOG)
        self._watch: EngineWatch | None = None  # once it is ready
        self._pulse = Pulse.BEATING
        self._serving = "Serving"  # or what the last reload has left to say
        self._why_refusing: str | None = None  # as it was told
        self._timer: asyncio.TimerHandle | None = None
        self._is_stopping = False
        self._cause: StartupError | None = None
        self.last_reload: tuple[float, bool] | None = None  # unix time, and whether it was taken

    def start(self) -> None:
        self._timer = self._loop.call_later(self._tick_s, self._tick)
        self._manager.tell_loading(self._process.stage)

    def on_stage(self) -> None:
        """The process has reached another stage of loading."""
        if self._watch is None and not self._is_stopping:
            self._manager.tell_loading(self._process.stage)

    def on_ready(self, max_batch_tokens: int) -> None:
        """Whatever there was to load and warm up is done."""
        self._watch = EngineWatch(self._process.ask_for_beat, self._tick_s, max_batch_tokens)
        self._manager.tell_ready("Serving")

    def on_step(self, stats: EngineStats) -> None:
        assert self._watch is not None, "no step is made before the engine is ready"
        self._watch.on_step(stats)

    def on_beat(self) -> None:
        assert self._watch is not None, "nobody asks for a beat before the engine is ready"
        self._watch.on_beat()

    def reload(self, reload: Callable[[], None]) -> None:
        """Call it, and tell of its beginning and end. What cannot be taken changes nothing but revocations."""
        is_ready = self._watch is not None and not self._is_stopping  # a manager expects no reload at other times
        if is_ready:
            self._manager.tell_reloading()
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
            self._serving = "Serving: the reload failed, the log says how far it has come"
        if is_ready:
            self._manager.tell_ready(self._status)

    def on_stopping(self, cause: StartupError | None) -> None:
        """The end begins.

        Args:
            cause: why the process could not start.
        """
        self._is_stopping = True
        self._cause = cause
        self._tell_stopping()

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _tick(self) -> None:
        self._timer = self._loop.call_later(self._tick_s, self._tick)
        if self._is_stopping:
            self._tell_stopping()
        elif self._watch is None:
            self._manager.tell_loading(self._process.stage)
        if self._watch is not None and self._pulse is not Pulse.LOST:
            self._look_at(self._watch)

    def _look_at(self, watch: "EngineWatch") -> None:
        before, self._pulse = self._pulse, watch.tick()
        if self._pulse is Pulse.BEATING:
            self._manager.feed_watchdog()
            before_why, self._why_refusing = self._why_refusing, self._process.why_refusing
            if not self._is_stopping and (before is Pulse.SILENT or before_why != self._why_refusing):
                self._manager.tell_status(self._status)
            if before is Pulse.SILENT:
                logger.warning("the engine steps again")
                self._process.on_silence(False)
        elif self._pulse is Pulse.LOST:
            self._lose(watch.silence_s)
        elif before is Pulse.BEATING:
            logger.error("the engine has been busy with one step for %.1f s", watch.silence_s)
            self._manager.tell_status(f"The engine has been busy with one step for {watch.silence_s:.1f} s")
            self._process.on_silence(True)

    @property
    def _status(self) -> str:
        return self._serving if self._why_refusing is None else f"Refusing requests: {self._why_refusing}"

    def _lose(self, silence_s: float) -> None:
        logger.critical("the stacks of all threads:\n%s", _stacks())
        self._process.on_failed(EngineLost(f"busy with one step for {silence_s:.1f} s; the stacks are above"))

    def _tell_stopping(self) -> None:
        num = self._process.num_in_progress
        draining = f"Draining: {num} {'request' if num == 1 else 'requests'} in progress"
        self._manager.tell_stopping(draining if self._cause is None else f"Failed: {self._cause.cause}")


def _stacks() -> str:
    """Of all threads, by way of the log: its reader may be as stuck as the engine is."""
    with open(os.memfd_create("stacks"), "w+") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        return file.read()


class Pulse(enum.Enum):
    """How the engine does."""

    BEATING = enum.auto()
    SILENT = enum.auto()  # for too long: whoever can go elsewhere should
    LOST = enum.auto()  # it will not come back


class EngineWatch:
    """Asks for beats, and counts the ticks that pass without: the engine owes one at its next step's end.

    Silence is counted in ticks of the loop, not by a clock: a process that was frozen (SIGSTOP, a suspended machine, a
    loop that was busy itself) must not take its own sleep for the engine's.

    Args:
        ask: makes the engine thread call back on_beat() once its step is over; at once when it is idle.
        tick_s: between calls of tick().
        max_batch_tokens: of a step.
    """

    def __init__(self, ask: Callable[[], None], tick_s: float, max_batch_tokens: int) -> None:
        self._ask = ask
        self._tick_s = tick_s
        self._max_batch_tokens = max_batch_tokens
        self._num_silent_ticks: int | None = None  # since a beat was asked for; None: none is owed
        self._num_tokens = 0  # computed since the start
        self._longest_s = 0.0  # step since the last tick
        self._recent_s: deque[float] = deque(maxlen=RECENT_TICKS)  # the longest step of each tick
        self._full_step_s = FIRST_STEP_S

    @property
    def silence_s(self) -> float:
        """For how long a beat has been owed."""
        return (self._num_silent_ticks or 0) * self._tick_s

    @property
    def max_silence_s(self) -> float:
        """What the engine may be busy with one step."""
        predicted_s = max(self._full_step_s, self._longest_s, *self._recent_s)
        return max(MIN_SILENCE_S, NUM_STEPS_OF_SILENCE * predicted_s)

    def on_beat(self) -> None:
        """The engine is between two steps."""
        self._num_silent_ticks = None

    def on_step(self, stats: EngineStats) -> None:
        """A step is over. What it took per token bounds what a full one takes: each has a fixed part besides."""
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
    """The manager that has started this process, if one has: without $NOTIFY_SOCKET nothing is sent.

    Args:
        environ: of the process: NOTIFY_SOCKET, WATCHDOG_USEC, WATCHDOG_PID.
        pid: ours; a watchdog meant for another process is not ours to feed.
        monotonic_ns: CLOCK_MONOTONIC, as systemd reads it.

    Attributes:
        watchdog_s: it wants a ping at least so often, from ready() on; None: it wants none.
    """

    def __init__(
        self, environ: Mapping[str, str], pid: int, monotonic_ns: Callable[[], int] = time.monotonic_ns
    ) -> None:
        self.watchdog_s = _watchdog_s(environ, pid)
        self._monotonic_ns = monotonic_ns
        self._address = _unix_address(environ.get("NOTIFY_SOCKET", ""))

    def tell_loading(self, stage: str) -> None:
        """Loading goes on, and may take longer than the unit's TimeoutStartSec."""
        self._send(_status(f"Loading: {stage}"), _EXTENSION)

    def tell_ready(self, status: str) -> None:
        """Start or reload is over."""
        self._send("READY=1", _status(status))

    def tell_status(self, status: str) -> None:
        self._send(_status(status))

    def tell_reloading(self) -> None:
        """tell_ready() must follow."""
        self._send("RELOADING=1", f"MONOTONIC_USEC={self._monotonic_ns() // 1000}", _status("Reloading"))

    def tell_stopping(self, status: str) -> None:
        """The end goes on, and may take longer than the unit's TimeoutStopSec."""
        self._send("STOPPING=1", _status(status), _EXTENSION)

    def feed_watchdog(self) -> None:
        if self.watchdog_s is not None:
            self._send("WATCHDOG=1")

    def _send(self, *lines: str) -> None:
        if self._address is None:
            return
        try:
            # each message by a socket of its own, as sd_notify(3) does: the manager may have bound its anew
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
                sock.settimeout(SEND_TIMEOUT_S)
                sock.sendto("\n".join(lines).encode(), self._address)
        except OSError as error:  # the manager itself acts on what it misses
            logger.warning("the service manager does not take %s: %s", lines[0], error)


def _status(text: str) -> str:
    return "STATUS=" + " ".join(text.split())  # a line's end would begin another message


def _unix_address(address: str) -> str | None:
    """For the socket module; a leading @ stands for the NUL of an abstract address."""
    if not address:
        return None
    if address[0] not in "@/":
        logger.warning("NOTIFY_SOCKET=%s is no Unix socket: the service manager is told nothing", address)
        return None
    return "\0" + address[1:] if address[0] == "@" else address


def _watchdog_s(environ: Mapping[str, str], pid: int) -> float | None:
    """sd_watchdog_enabled(3): the time between pings at which the manager gives the process up."""
    usec = environ.get("WATCHDOG_USEC", "")
    if not usec.isdecimal() or int(usec) == 0 or environ.get("WATCHDOG_PID", str(pid)) != str(pid):
        return None
    return int(usec) / 1e6
