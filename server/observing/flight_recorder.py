"""The requests of the last hour that somebody may ask about: the slowest, the failed, and the latest. Thread: loop.

Bounded, whatever comes: what is slow is judged within windows of minutes, each of which keeps its slowest few.
"""

import heapq
import itertools
from collections import deque
from collections.abc import Callable, Iterable

import msgspec

from server.observing.logs import AccessRecord
from server.observing.timing import MS_NS, S_NS, StageClock
from server.observing.trace_context import TraceContext

HOUR_S = 3600.0
WINDOW_S = 300.0
SLOWEST_PER_WINDOW = 32
MAX_FAILED = 256
MAX_RECENT = 256
MAX_ASKED = SLOWEST_PER_WINDOW  # of the slowest: as many are right, wherever in the hour they were


class Interval(msgspec.Struct, frozen=True):
    """A stage of a request, since its first byte."""

    stage: str
    start_ms: float
    duration_ms: float


class Flight(msgspec.Struct, frozen=True, kw_only=True):
    """One request as it went.

    Args:
        ended_s: monotonic.
        started_unix_s: when its first byte came.
        tenant: whose it is; an open server's requests are all its one tenant's.
        detokenize_ms: of the decode, the loop's work on its tokens.
        has_failed: by our fault, or broken off.
    """

    record: AccessRecord
    ended_s: float
    started_unix_s: float
    tenant: str
    model: str
    intervals: tuple[Interval, ...]
    detokenize_ms: float
    prefill_chunks: int
    has_failed: bool
    trace: TraceContext | None = None
    alias: str | None = None  # the client's own id

    @property
    def request_id(self) -> str:
        return self.record.request_id


def intervals_of(timings: StageClock) -> tuple[Interval, ...]:
    """The stages left so far, in order."""
    first_ns = round(timings.accepted_s * S_NS)
    return tuple(
        Interval(stage.value, round((start - first_ns) / MS_NS, 3), round((end - start) / MS_NS, 3))
        for stage, start, end in timings.intervals()
    )


class FlightRecorder:
    """
    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._serials = itertools.count()
        # (number of the window, a heap of its slowest: (duration, serial, flight)), oldest first
        self._windows: deque[tuple[int, list[tuple[float, int, Flight]]]] = deque()
        self._failed: deque[Flight] = deque(maxlen=MAX_FAILED)
        self._recent: deque[Flight] = deque(maxlen=MAX_RECENT)

    def keep(self, flight: Flight) -> None:
        self._recent.append(flight)
        if flight.has_failed:
            self._failed.append(flight)
        number = int(flight.ended_s // WINDOW_S)
        if not self._windows or self._windows[-1][0] != number:
            self._windows.append((number, []))
            self._forget()
        slowest = self._windows[-1][1]
        heapq.heappush(slowest, (flight.record.duration_ms, next(self._serials), flight))
        if len(slowest) > SLOWEST_PER_WINDOW:
            heapq.heappop(slowest)

    def slowest(self, number: int) -> list[Flight]:
        """Of the last hour, the slowest first; of two that took as long, the later first."""
        kept = [entry for _, window in self._windows for entry in window]
        return list(self._of_last_hour(flight for _, _, flight in sorted(kept, reverse=True)))[:number]

    def failed(self, number: int) -> list[Flight]:
        """Of the last hour, the latest first."""
        return list(self._of_last_hour(reversed(self._failed)))[:number]

    def find(self, request_id: str, tenant: str | None) -> Flight | None:
        """The request of that id, ours or its client's, if it is kept and the tenant's (None: any's); the latest."""
        kept = (flight for _, window in self._windows for _, _, flight in window)
        for flight in self._of_last_hour(itertools.chain(reversed(self._recent), reversed(self._failed), kept)):
            if request_id in (flight.request_id, flight.alias) and tenant in (None, flight.tenant):
                return flight
        return None

    def _of_last_hour(self, flights: Iterable[Flight]) -> Iterable[Flight]:
        oldest_s = self._clock() - HOUR_S
        return (flight for flight in flights if flight.ended_s >= oldest_s)

    def _forget(self) -> None:
        oldest = int((self._clock() - HOUR_S) // WINDOW_S)
        while self._windows and self._windows[0][0] < oldest:
            self._windows.popleft()
