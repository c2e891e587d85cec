"""How long an engine may be silent: tick by tick, without a clock."""

from core.types import EngineStats
from server.supervision import FIRST_STEP_S, MIN_SILENCE_S, EngineWatch, Pulse

MAX_BATCH_TOKENS = 100


class Asked:
    """Counts the beats asked for, and gives them where it is told to."""

    def __init__(self) -> None:
        self.num = 0
        self.watch = EngineWatch(self.ask, 1.0, MAX_BATCH_TOKENS)
        self.answers = False

    def ask(self) -> None:
        self.num += 1
        if self.answers:
            self.watch.on_beat()

    def pulses(self, num_ticks: int) -> list[Pulse]:
        return [self.watch.tick() for _ in range(num_ticks)]


def fast_steps(watch: EngineWatch, step_s: float = 0.01, num_tokens: int = 1) -> None:
    watch.on_step(EngineStats(step_s=step_s, num_generated_tokens=num_tokens))


def test_engine_that_answers_is_asked_at_each_tick_and_beats() -> None:
    asked = Asked()
    fast_steps(asked.watch)
    for _ in range(100):
        assert asked.watch.tick() is Pulse.BEATING
        asked.watch.on_beat()
    assert asked.num == 100


def test_one_beat_is_owed_at_a_time() -> None:
    asked = Asked()
    asked.pulses(20)
    assert asked.num == 1


def test_silence_is_noticed_after_ten_seconds_and_given_up_after_three_times_that() -> None:
    asked = Asked()
    fast_steps(asked.watch)
    limit = int(MIN_SILENCE_S)
    assert set(asked.pulses(1 + limit)) == {Pulse.BEATING}, "the first tick asks"
    assert set(asked.pulses(2 * limit)) == {Pulse.SILENT}
    assert asked.pulses(1) == [Pulse.LOST]


def test_engine_that_answers_late_beats_again() -> None:
    asked = Asked()
    fast_steps(asked.watch)
    assert asked.pulses(15)[-1] is Pulse.SILENT
    asked.watch.on_beat()
    assert set(asked.pulses(5)) == {Pulse.BEATING}


def test_first_step_may_take_as_long_as_compiling_does() -> None:
    asked = Asked()
    assert asked.watch.max_silence_s == 3 * FIRST_STEP_S


def test_what_a_token_took_bounds_what_a_full_step_takes() -> None:
    asked = Asked()
    fast_steps(asked.watch, step_s=0.25, num_tokens=1)
    assert asked.watch.max_silence_s == 3 * 0.25 * MAX_BATCH_TOKENS
    fast_steps(asked.watch, step_s=5.0, num_tokens=51)  # 50 more
    assert asked.watch.max_silence_s == 3 * 5.0 * 2


def test_long_steps_are_allowed_again_for_a_while() -> None:
    asked = Asked()
    asked.answers = True
    fast_steps(asked.watch, step_s=20.0, num_tokens=2000)
    assert asked.watch.max_silence_s == 60.0
    asked.pulses(60)
    assert asked.watch.max_silence_s == 60.0
    asked.pulses(1)
    assert asked.watch.max_silence_s == MIN_SILENCE_S
