"""The pulse of the process in virtual time: an engine that hangs in a step, comes back, or does not."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from core.types import EngineStats
from server.app import Readiness
from server.supervision import (
    FIRST_STEP_S,
    MIN_SILENCE_S,
    NUM_SILENCES_TO_DEATH,
    TICK_S,
    EngineLost,
    EngineWatch,
    Pulse,
    ServiceManager,
    Supervision,
)
from tests.deploy.notify_socket import notify_socket
from tests.server.virtual_loop import VirtualTimeLoop


class Process:
    """What supervision asks and tells; its engine beats when it is asked, unless it hangs."""

    num_in_progress = 0
    why_refusing: str | None = None

    def __init__(self, environ: Mapping[str, str]) -> None:
        self.loop = VirtualTimeLoop()
        self.readiness = Readiness("loading")
        self.supervision = Supervision(self, self.readiness, ServiceManager(environ, 1), self.loop)
        self.hangs = False
        self.told: list[type[BaseException]] = []

    def ask_for_beat(self) -> None:
        if not self.hangs:
            self.supervision.on_beat()

    def on_failed(self, error: BaseException) -> None:
        self.told.append(type(error))


@pytest.fixture
def process() -> Iterator[Process]:
    with running({}) as process:
        yield process


@contextmanager
def running(environ: Mapping[str, str]) -> Iterator[Process]:
    process = Process(environ)
    process.supervision.start()
    process.supervision.on_ready(max_batch_tokens=16)
    process.supervision.on_step(EngineStats(num_steps=1, num_prompt_tokens=16, step_s=0.01))  # steps are short
    yield process
    process.supervision.close()
    assert process.loop.next_timer() is None
    process.loop.close()


def test_engine_that_hangs_is_not_ready_and_then_lost_once(process: Process, caplog: pytest.LogCaptureFixture) -> None:
    process.loop.advance(1000)
    process.hangs = True
    process.loop.advance(MIN_SILENCE_S)
    assert not process.readiness.is_stalled
    process.loop.advance(3)
    assert process.readiness.is_stalled
    assert process.told == []
    process.loop.advance(MIN_SILENCE_S * NUM_SILENCES_TO_DEATH)
    assert process.told == [EngineLost]
    assert "most recent call first" in caplog.text  # the stacks of all threads
    process.loop.advance(1000)
    assert process.told == [EngineLost]


def test_engine_that_comes_back_is_ready_again(process: Process) -> None:
    process.hangs = True
    process.loop.advance(MIN_SILENCE_S + 5)
    assert process.readiness.is_stalled
    process.hangs = False
    process.supervision.on_beat()
    process.loop.advance(1000)
    assert not process.readiness.is_stalled


def test_manager_is_told_why_requests_are_refused_and_when_they_are_not(tmp_path: Path) -> None:
    with notify_socket(tmp_path / "notify") as manager:
        with running({"NOTIFY_SOCKET": manager.address}) as process:
            process.why_refusing = "the disk is full"
            process.loop.advance(TICK_S)
            process.supervision.reload(lambda: None)
            process.why_refusing = None
            process.loop.advance(TICK_S)
        statuses = [fields["STATUS"] for fields in manager.receive_rest() if "STATUS" in fields]
    refusing = "Refusing requests: the disk is full"
    assert statuses == ["Loading: loading", "Serving", refusing, "Reloading", refusing, "Serving"]


def test_long_step_that_was_foreseen_is_no_silence(process: Process) -> None:
    process.supervision.on_step(EngineStats(num_steps=2, num_prompt_tokens=17, step_s=20.0))
    process.loop.advance(1)  # the tick that notes it
    process.hangs = True
    process.loop.advance(55)
    assert not process.readiness.is_stalled


class RecordingManager(ServiceManager):
    """What a service manager would be told."""

    def __init__(self) -> None:
        super().__init__({}, 1)
        self.told: list[str] = []

    def send(self, *lines: str, status: str | None = None) -> None:
        self.told += lines[:1]


def test_reload_that_fails_by_a_fault_of_ours_is_over_for_the_manager_too(
    process: Process, caplog: pytest.LogCaptureFixture
) -> None:
    manager = RecordingManager()
    supervision = Supervision(process, process.readiness, manager, process.loop)
    supervision.on_ready(max_batch_tokens=16)
    supervision.reload(lambda: 1 // 0)
    assert manager.told == ["READY=1", "RELOADING=1", "READY=1"]
    assert "ZeroDivisionError" in caplog.text


# How long an engine may be silent: tick by tick, without a clock.

MAX_BATCH_TOKENS = 100


class Engine:
    """Answers when it is asked for a beat, unless it is silent."""

    def __init__(self) -> None:
        self.num_asked = 0
        self.is_silent = False
        self.watch = EngineWatch(self.ask, 1.0, MAX_BATCH_TOKENS)

    def ask(self) -> None:
        self.num_asked += 1
        if not self.is_silent:
            self.watch.on_beat()

    def step(self, step_s: float = 0.01, num_tokens: int = 1) -> None:
        """Args: num_tokens: since the start."""
        self.watch.on_step(EngineStats(step_s=step_s, num_generated_tokens=num_tokens))

    def pulses(self, num_ticks: int) -> list[Pulse]:
        return [self.watch.tick() for _ in range(num_ticks)]


def test_silence_is_noticed_after_ten_seconds_and_given_up_after_three_times_that() -> None:
    engine = Engine()
    engine.step()
    assert set(engine.pulses(100)) == {Pulse.BEATING}
    assert engine.num_asked == 100
    engine.is_silent = True
    limit = int(MIN_SILENCE_S)
    assert set(engine.pulses(1 + limit)) == {Pulse.BEATING}, "the first tick asks"
    assert set(engine.pulses(2 * limit)) == {Pulse.SILENT}
    assert engine.pulses(1) == [Pulse.LOST]
    assert engine.num_asked == 101, "one beat is owed at a time"


def test_first_step_may_take_as_long_as_compiling_and_later_ones_as_a_token_took() -> None:
    engine = Engine()
    assert engine.watch.max_silence_s == 3 * FIRST_STEP_S
    engine.step(0.25, num_tokens=1)
    assert engine.watch.max_silence_s == 3 * 0.25 * MAX_BATCH_TOKENS
    engine.step(5.0, num_tokens=51)  # 50 more
    assert engine.watch.max_silence_s == 3 * 5.0 * 2


def test_long_steps_are_allowed_again_for_a_while() -> None:
    engine = Engine()
    engine.step(20.0, num_tokens=2000)
    engine.pulses(60)
    assert engine.watch.max_silence_s == 60.0
    engine.pulses(1)
    assert engine.watch.max_silence_s == MIN_SILENCE_S
