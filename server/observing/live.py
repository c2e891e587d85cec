"""What the dashboard shows: an hour of points, and the one stream that all its viewers read. Thread: loop.

History takes a point every POINT_S, whether anybody looks or not: counters are copied, no request is looked at. Live
makes one frame each TICK_S while somebody looks, the same for all; nothing of a prompt or an answer is in it.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import orjson

from core.errors import ErrorKind, ServiceError
from core.types import EngineStats
from server.api.replies import EVENT_FIELDS
from server.observing.accounting import Ring
from server.observing.metrics import Histogram, Metrics, resident_bytes
from server.observing.timing import NO_STORE
from server.wire.messages import ResponseHead
from server.wire.sse import event
from server.wire.stream import HttpStream

TICK_S = 0.25
POINT_S = 5.0
MAX_POINTS = 720  # an hour
MINUTE_POINTS = 12
MAX_VIEWERS = 32
MAX_VIEW_S = 600.0  # then the viewer asks again, with a key that must still be good
COLUMNS = (
    "at",
    "requests_per_s",
    "tokens_in_per_s",
    "tokens_out_per_s",
    "ttft_p50_ms",
    "ttft_p95_ms",
    "inter_token_p50_ms",
    "inter_token_p95_ms",
    "errors_per_s",
    "num_waiting",
    "num_running",
    "kv_used",
    "memory_bytes",
)
CANCELLED = "request_cancelled"  # by DELETE: no error
Row = tuple[float | None, ...]  # by COLUMNS


class _Counters(NamedTuple):
    """Since the start, at a time."""

    at_s: float
    num_requests: int
    num_tokens_in: int
    num_tokens_out: int
    num_errors: int
    ttft: tuple[int, ...]
    inter_token: tuple[int, ...]


def quantile_ms(bounds: Sequence[float], counts: Sequence[int], part: float) -> float | None:
    """Of a histogram of seconds, on a line within its bucket; beyond the last bound, that bound. None: it is empty."""
    rank, below = sum(counts) * part, 0
    for i, count in enumerate(counts):
        if count and below + count >= rank:
            low, high = (bounds[i - 1] if i else 0.0), bounds[min(i, len(bounds) - 1)]
            return round((low + (high - low) * (rank - below) / count) * 1e3, 3)
        below += count
    return None


Source = Callable[[int], tuple[int, list[Any]]]  # how many things there ever were, and the latest after so many
Seen = tuple[int, ...]  # so many of each source's things a viewer has been sent


class History:
    """An hour of points; rates are those of the time between two of them, times to tokens those of a minute.

    Args:
        stats: of the engine in this process; all zeros: there is none, and tokens count once a request has ended.
        clock: monotonic seconds.
        unix: seconds since 1970.

    Attributes:
        points: the hour's.
    """

    def __init__(
        self, metrics: Metrics, stats: Callable[[], EngineStats], clock: Callable[[], float], unix: Callable[[], float]
    ) -> None:
        self._metrics, self._stats, self._clock, self._unix = metrics, stats, clock, unix
        self.points: Ring[Row] = Ring(MAX_POINTS)
        self._counters = deque([self._count()], maxlen=MINUTE_POINTS + 1)

    def take(self) -> None:
        """To be called every POINT_S."""
        counters = self._count()
        self.points.put(self._row(counters, self._counters[-1]))
        self._counters.append(counters)

    def now(self) -> Row:
        """As a point of the last 5 to 10 seconds."""
        return self._row(self._count(), self._counters[-2 if len(self._counters) > 1 else -1])

    def _count(self) -> _Counters:
        metrics, stats = self._metrics, self._stats()
        has_engine = bool(stats.num_blocks)
        return _Counters(
            self._clock(),
            sum(one.num_requests for one in metrics.tenants.values()),
            stats.num_prompt_tokens if has_engine else metrics.num_prompt_tokens,
            stats.num_generated_tokens if has_engine else metrics.num_generation_tokens,
            metrics.failed.total() - metrics.failed[CANCELLED] + metrics.refused.total(),
            tuple(metrics.ttft.counts),
            tuple(metrics.inter_token.counts),
        )

    def _row(self, new: _Counters, old: _Counters) -> Row:
        stats, spent_s, minute = self._stats(), new.at_s - old.at_s, self._counters[0]

        def per_s(count: int) -> float:
            return round(count / spent_s, 2) if spent_s > 0 else 0.0

        def quantiles(histogram: Histogram, after: tuple[int, ...], before: tuple[int, ...]) -> list[float | None]:
            counts = [now - then for now, then in zip(after, before, strict=True)]
            return [quantile_ms(histogram.bounds, counts, part) for part in (0.5, 0.95)]

        return (
            round(self._unix(), 2),
            per_s(new.num_requests - old.num_requests),
            per_s(new.num_tokens_in - old.num_tokens_in),
            per_s(new.num_tokens_out - old.num_tokens_out),
            *quantiles(self._metrics.ttft, new.ttft, minute.ttft),
            *quantiles(self._metrics.inter_token, new.inter_token, minute.inter_token),
            per_s(new.num_errors - old.num_errors),
            stats.num_waiting,
            stats.num_running,
            round(stats.num_used_blocks / stats.num_blocks, 4) if stats.num_blocks else None,
            resident_bytes(),
        )


@dataclass(slots=True, eq=False)
class _Viewer:
    stream: HttpStream
    may_look: Callable[[], bool]
    ends_s: float
    left: asyncio.Future[None]
    seen: Seen | None = None


class Live:
    """The stream of events at 4 Hz: `{"now": {...}, "points": [...], "ended": [...], ...}`, of sources since Seen.

    A viewer that does not read is sent nothing until it does; its connection's stall limit ends it.

    Args:
        frame: what is so now, made once a tick.
        sources: by name, beside the points.
        is_over: no more is to be shown: the server drains.
    """

    def __init__(
        self,
        history: History,
        frame: Callable[[], dict[str, Any]],
        sources: Mapping[str, Source],
        is_over: Callable[[], bool],
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self.history = history
        self._frame, self._is_over, self._loop = frame, is_over, loop
        self._sources = {"points": history.points.since, **sources}
        self._viewers: list[_Viewer] = []
        self._ticker: asyncio.TimerHandle | None = None
        self._pointer: asyncio.TimerHandle | None = None
        self.num_frames = 0  # ever made

    def start(self) -> None:
        """Take points from now on."""
        self._pointer = self._loop.call_later(POINT_S, self._take_point)

    def close(self) -> None:
        if self._pointer is not None:
            self._pointer.cancel()

    def _take_point(self) -> None:
        self.start()
        self.history.take()

    async def show(self, stream: HttpStream, may_look: Callable[[], bool]) -> None:
        """Send frames until the viewer leaves, may no longer look, or MAX_VIEW_S have passed.

        Raises:
            ServiceError: too many look.
        """
        if len(self._viewers) >= MAX_VIEWERS:
            message = f"{MAX_VIEWERS} viewers are connected, the most allowed. Close one of them."
            raise ServiceError(ErrorKind.RATE_LIMITED, message, "too_many_viewers", retry_after_s=5)
        stream.send_head(ResponseHead(200, (*EVENT_FIELDS, NO_STORE)))
        if stream.request.method == "HEAD":
            stream.end()
            return
        viewer = _Viewer(stream, may_look, self._loop.time() + MAX_VIEW_S, self._loop.create_future())
        self._viewers.append(viewer)
        stream.on_disconnect = lambda: self._let_go(viewer)
        try:
            if self._ticker is None:
                self._tick()
            await viewer.left
        finally:
            self._let_go(viewer)

    def _let_go(self, viewer: _Viewer) -> None:
        viewer.stream.on_disconnect = None
        if viewer in self._viewers:
            self._viewers.remove(viewer)
        if not self._viewers and self._ticker is not None:
            self._ticker.cancel()
            self._ticker = None
        if not viewer.left.done():
            viewer.left.set_result(None)

    def _tick(self) -> None:
        is_over, now_s = self._is_over(), self._loop.time()
        for viewer in self._viewers[:]:
            if is_over or now_s >= viewer.ends_s or not viewer.may_look():
                viewer.stream.end()
                self._let_go(viewer)
        self._ticker = self._loop.call_later(TICK_S, self._tick) if self._viewers else None
        readers = [one for one in self._viewers if not one.stream.is_blocked]
        if not readers:
            return
        self.num_frames += 1
        frame, events = self._frame() | {"now": self.history.now()}, dict[Seen | None, tuple[bytes, Seen]]()
        for viewer in readers:
            if viewer.seen not in events:
                events[viewer.seen] = self._event(frame, viewer.seen)
            data, viewer.seen = events[viewer.seen]
            viewer.stream.send(data)

    def _event(self, frame: dict[str, Any], seen: Seen | None) -> tuple[bytes, Seen]:
        nums_seen = seen or (0,) * len(self._sources)
        news = [since(num) for since, num in zip(self._sources.values(), nums_seen, strict=True)]
        shown = frame | {name: things for name, (_, things) in zip(self._sources, news, strict=True)}
        if seen is None:
            shown["columns"] = COLUMNS
        line = orjson.dumps(shown).replace(b"\xe2\x80\xa8", b"\\u2028").replace(b"\xe2\x80\xa9", b"\\u2029")
        return event(line), tuple(num_ever for num_ever, _ in news)
