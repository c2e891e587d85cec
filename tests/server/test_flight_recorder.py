"""The flight recorder alone: what it keeps, for how long, how much of it."""

from server.observing.accounting import (
    HOUR_S,
    MAX_FAILED,
    MAX_RECENT,
    SLOWEST_PER_WINDOW,
    WINDOW_S,
    FlightRecorder,
    RequestRecord,
)
from server.observing.logs import AccessRecord
from server.observing.timing import StageClock


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def flight(number: int, ended_s: float = 0.0, tenant: str = "a", has_failed: bool = False) -> RequestRecord:
    """Number n took n milliseconds."""
    record = AccessRecord(request_id=f"r{number}", method="POST", path="/", status=200, duration_ms=float(number))
    return RequestRecord(
        record=record,
        ended_s=ended_s,
        started_unix_s=0.0,
        tenant=tenant,
        model="m",
        timings=StageClock(0.0),
        has_failed=has_failed,
    )


def ids(flights: list[RequestRecord]) -> list[str]:
    return [one.request_id for one in flights]


def test_slowest_come_first_whichever_window_they_were_in() -> None:
    clock = Clock()
    recorder = FlightRecorder(clock)
    for number in (5, 70, 3, 80, 1):
        recorder.keep(flight(number, clock.now_s))
        clock.now_s += WINDOW_S
    assert ids(recorder.slowest(3)) == ["r80", "r70", "r5"]


def test_many_fast_ones_do_not_push_out_a_slow_one_and_all_is_bounded() -> None:
    clock = Clock()
    recorder = FlightRecorder(clock)
    recorder.keep(flight(10_000))
    for number in range(5_000):
        recorder.keep(flight(number, has_failed=True))
    assert ids(recorder.slowest(2)) == ["r10000", "r4999"]
    assert len(recorder.slowest(9_999)) == SLOWEST_PER_WINDOW
    assert len(recorder.failed(9_999)) == MAX_FAILED
    assert ids(recorder.failed(2)) == ["r4999", "r4998"]
    assert recorder.find("r10000", "a") is not None
    assert recorder.find(f"r{5_000 - MAX_RECENT}", "a") is not None


def test_an_hour_later_nothing_is_left() -> None:
    clock = Clock()
    recorder = FlightRecorder(clock)
    recorder.keep(flight(1, has_failed=True))
    clock.now_s = HOUR_S
    assert (ids(recorder.slowest(1)), ids(recorder.failed(1))) == (["r1"], ["r1"])
    clock.now_s = HOUR_S + 1
    assert (recorder.slowest(1), recorder.failed(1), recorder.find("r1", "a")) == ([], [], None)
    recorder.keep(flight(2, HOUR_S + WINDOW_S + 1))
    assert len(recorder._windows) == 2
    clock.now_s = 2 * HOUR_S + 2 * WINDOW_S
    recorder.keep(flight(3, clock.now_s))
    assert len(recorder._windows) == 1


def test_each_tenant_finds_its_own() -> None:
    recorder = FlightRecorder(Clock())
    recorder.keep(flight(1, tenant="a"))
    assert recorder.find("r1", "b") is None
    found = recorder.find("r1", "a")
    assert found is not None
    assert found.tenant == "a"
