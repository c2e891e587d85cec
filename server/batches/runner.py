"""Runs batches: lines go through the app's handler, as requests of sockets do, when there is room. Thread: loop.

    file ─ scan ─▶ lines ─ App.handle ─▶ answers ─ one commit for several ─▶ output file, error file

Lines are of the lowest class, and take at most a share of the server's slots, tenants in turns. While requests that
somebody waits for are in progress, all of them pause. What is refused for lack of room or quota is asked again. A
line's request id follows from its batch and number: after a crash the lines without an answer are asked again under
their ids, and the ledger has each once.
"""

import asyncio
import contextlib
import contextvars
import heapq
import logging
import math
import sqlite3
from array import array
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b
from typing import Any, Protocol, TypeVar

import msgspec
import orjson

from server.batches.store import OVER, Answer, Batch, Credential, FileLimits, Line, LineError, Scan, Status, Store
from server.gate.identity import Caller
from server.wire import sse
from server.wire.messages import Headers, HttpRequest, Peer, ResponseHead
from server.wire.stream import HttpStream, StreamCarrier, WrittenCallback

logger = logging.getLogger(__name__)

T = TypeVar("T")

SHARE = 0.5  # of the sequences that the engine runs at once
SLOTS_ELSEWHERE = 8  # where other servers compute
LINGER_S = 1.0  # after the last request that somebody waited for: an agent's next one may follow
MOST_HELD_S, TURN_S = 20.0, 1.0  # where such requests never cease, lines get a twentieth of the time: p95 stays
CHECK_S = 0.02
DISK_S = 5.0  # between tries of a disk that is full
SWEEP_S = 60.0  # between looks for expired files
RETRY_S, MOST_RETRY_S = 1.0, 60.0
RETRIED = (429, 503, 504)  # no room, no quota, too late
MOST_LATE = 3  # times that one line may be too late
NOT_AGAIN = (b"x-should-retry", b"false")


class Offload(Protocol):
    """Runs work on the store's thread, in order."""

    def __call__(self, work: Callable[[], T], /) -> Awaitable[T]: ...


class Handle(Protocol):
    """App.handle."""

    def __call__(self, stream: HttpStream, request_id: str, identify: Callable[[], Caller], /) -> Awaitable[None]: ...


@dataclass(slots=True)
class _Collected(StreamCarrier):
    """Collects one line's answer."""

    now: Callable[[], float]
    peer: Peer = Peer()  # noqa: RUF009
    status: int = 0
    headers: Headers = ()
    body: bytearray = field(default_factory=bytearray)

    def start_body(self, stream: HttpStream) -> None:
        """It came whole."""

    def write_head(self, stream: HttpStream, head: ResponseHead) -> None:
        self.status, self.headers = head.status, head.headers

    def write_data(self, stream: HttpStream, data: bytes) -> None:
        self.body += data

    def write_end(self, stream: HttpStream, trailers: Headers) -> None:
        """The handler returns then."""

    def call_once_written(self, stream: HttpStream, callback: WrittenCallback) -> None:
        callback(self.now())

    @property
    def retry_s(self) -> float:
        given = next((value for name, value in self.headers if name == b"retry-after"), b"")
        return min(max(float(given or 0), RETRY_S), MOST_RETRY_S)


@dataclass(slots=True)
class _Running:
    """A batch that is not over.

    Args:
        pending: numbers of lines that have not been asked.
        later: those to be asked again, with the time.
        nums_late: by line.
    """

    batch: Batch
    scan: Scan
    pending: deque[int]
    later: list[tuple[float, int]] = field(default_factory=list)
    nums_late: dict[int, int] = field(default_factory=dict)
    num_asked: int = 0  # and not answered
    is_ending: bool = False
    expiry: asyncio.TimerHandle | None = None

    def next_line(self, now_s: float) -> int | None:
        if self.batch.status is not Status.IN_PROGRESS:
            return None
        if self.later and self.later[0][0] <= now_s:
            return heapq.heappop(self.later)[1]
        return self.pending.popleft() if self.pending else None

    @property
    def is_done(self) -> bool:
        left = self.pending or self.later
        return not self.num_asked and not (left and self.batch.status is Status.IN_PROGRESS)


@dataclass(eq=False, repr=False)
class Batches:
    """
    Args:
        identify: the caller of a credential, as a request's; raises ServiceError where it is no longer valid.
        may_begin: the server is ready, and does not drain.
        num_slots: sequences that the engine runs at once; None: other servers compute.
        is_busy: whether requests that somebody waits for are in progress.
        unix: seconds since 1970.
    """

    store: Store
    limits: FileLimits
    offload: Offload
    _handle: Handle
    _identify: Callable[[Credential], Caller]
    _may_begin: Callable[[], bool]
    _num_slots: Callable[[], int | None]
    _is_busy: Callable[[], bool]
    _unix: Callable[[], float]
    _loop: asyncio.AbstractEventLoop
    _running: dict[str, _Running] = field(default_factory=dict)
    _turns: deque[str] = field(default_factory=deque)  # tenants
    _streams: set[HttpStream] = field(default_factory=set)  # of lines in progress
    _released: asyncio.Event = field(default_factory=asyncio.Event)  # unset while lines give way
    _busy_s: float = -math.inf  # see give_way
    _held_s: float = -math.inf
    _turn_until_s: float = -math.inf
    _unwritten: list[tuple[_Running, Answer]] = field(default_factory=list)
    _is_writing: bool = False
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)
    _context: contextvars.Context = field(default_factory=contextvars.copy_context)
    _timer: asyncio.TimerHandle | None = None
    _sweeper: asyncio.TimerHandle | None = None
    _hold_timer: asyncio.TimerHandle | None = None
    _is_closed: bool = False

    def __post_init__(self) -> None:
        self._released.set()

    def start(self) -> None:
        """Go on with what the last process left. The loop runs."""
        self._spawn(self._resume())
        self._sweep()

    async def _resume(self) -> None:
        for batch in await self.offload(self.store.unfinished):
            self._spawn(self._begin(batch))

    def _sweep(self) -> None:
        self._sweeper = self._loop.call_later(SWEEP_S, self._sweep)
        self._spawn(self._remove_expired())

    async def _remove_expired(self) -> None:
        now_s = self.now_s()
        await self.offload(lambda: self.store.remove_expired(now_s))

    async def close(self) -> None:
        """Leave what is in progress to the next process; answers that have come are written."""
        self._is_closed = True
        for timer in (self._timer, self._sweeper, self._hold_timer):
            if timer is not None:
                timer.cancel()
        for stream in list(self._streams):
            stream.disconnect()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        answers = [answer for _, answer in self._unwritten]
        with contextlib.suppress(sqlite3.Error):  # the next process asks these lines again
            await self.offload(lambda: self.store.add_answers(answers))
        await self.offload(self.store.close)

    def now_s(self) -> int:
        return int(self._unix())

    # What handlers ask.

    async def create(self, batch: Batch, most_unfinished: int) -> None:
        """Raises ServiceError: see Store.add_batch."""
        await self.offload(lambda: self.store.add_batch(batch, most_unfinished, self.limits.quota))
        self._spawn(self._begin(batch))

    async def find(self, tenant: str, batch_id: str) -> Batch:
        """Raises ServiceError: the tenant has no such batch."""
        return self.latest(await self.offload(lambda: self.store.batch(tenant, batch_id)))

    def latest(self, batch: Batch) -> Batch:
        """With the counts of now."""
        running = self._running.get(batch.id)
        return batch if running is None or batch.status in OVER else running.batch

    async def cancel(self, tenant: str, batch_id: str) -> Batch:
        """End it once the lines that are being answered are; what is over stays as it is."""
        batch = await self.find(tenant, batch_id)
        if batch.status not in (Status.VALIDATING, Status.IN_PROGRESS):
            return batch
        batch = batch.entering(Status.CANCELLING, self.now_s())
        await self.offload(lambda: self.store.update(batch))
        if (running := self._running.get(batch_id)) is None:  # it is validated still
            return batch
        cancelled = running.batch = running.batch.entering(Status.CANCELLING, self.now_s())
        await self.offload(lambda: self.store.update(cancelled))  # behind what its validation wrote
        self._end_if_done(running)
        return cancelled

    # From lines to answers.

    def _spawn(self, work: Any) -> None:
        task = self._loop.create_task(work, context=self._context.copy())  # not a request's
        self._tasks.add(task)
        task.add_done_callback(self._note_end)

    def _note_end(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("a batch cannot continue", exc_info=error)

    async def _on_disk(self, work: Callable[[], T]) -> T:
        """Do it on the store's thread, again and again while the disk is full or fails."""
        while True:
            try:
                return await self.offload(work)
            except FileNotFoundError:
                raise
            except (sqlite3.Error, OSError) as error:
                logger.error("batches wait for the disk: %s", error)
                await asyncio.sleep(DISK_S)

    async def _begin(self, batch: Batch) -> None:
        try:
            scan = await self._on_disk(lambda: self.store.scan(batch))
        except FileNotFoundError:
            scan = Scan(array("q"), (LineError("file_not_found", "The input file was deleted."),))
        except Exception:  # a bug
            logger.exception("the file of the batch %s cannot be checked", batch.id)
            scan = Scan(array("q"), (LineError("server_error", "The server failed to check the input file."),))
        answered = await self._on_disk(lambda: self.store.answered(batch))
        now_s = self.now_s()
        latest = await self._on_disk(lambda: self.store.batch(batch.tenant, batch.id))  # it may be cancelled by now
        if scan.errors:
            failed = latest.entering(Status.FAILED, now_s, errors=scan.errors)
            await self._on_disk(lambda: self.store.update(failed))
            return
        num_failed = sum(answered.values())
        counts = {"total": scan.num_lines, "completed": len(answered) - num_failed, "failed": num_failed}
        if latest.status is Status.VALIDATING:
            latest = latest.entering(Status.IN_PROGRESS, now_s)
        latest = msgspec.structs.replace(latest, **counts)
        pending = deque(i for i in range(scan.num_lines) if i not in answered)
        running = self._running[batch.id] = _Running(latest, scan, pending)
        await self._on_disk(lambda: self.store.update(latest))
        if batch.tenant not in self._turns:
            self._turns.append(batch.tenant)
        left_s = max(0.0, latest.expires_at - self._unix())
        running.expiry = self._loop.call_later(left_s, self._expire, running)
        self._end_if_done(running)
        self._go_on()

    def _expire(self, running: _Running) -> None:
        if running.batch.status is Status.IN_PROGRESS and not self._is_closed:
            running.batch = running.batch.entering(Status.FINALIZING, self.now_s())  # not EXPIRED: its files come first
            self._end_if_done(running)

    def _go_on(self) -> None:
        """Ask as many lines as there is room for."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._is_closed or not self._released.is_set() or not self._running:
            return
        if not self._may_begin():
            self._timer = self._loop.call_later(RETRY_S, self._go_on)
            return
        slots = self._num_slots()
        most = SLOTS_ELSEWHERE if slots is None else max(1, int(slots * SHARE))
        while len(self._streams) < most and (found := self._next()) is not None:
            running, number = found
            running.num_asked += 1
            carrier = _Collected(self._loop.time)
            stream = HttpStream(HttpRequest(0, "POST", running.batch.endpoint, "", (), True), carrier)
            self._streams.add(stream)
            self._spawn(self._ask(running, number, stream, carrier))
        due_s = min((one.later[0][0] for one in self._running.values() if one.later), default=None)
        if due_s is not None:
            self._timer = self._loop.call_later(max(CHECK_S, due_s - self._loop.time()), self._go_on)

    def _next(self) -> tuple[_Running, int] | None:
        """The next line: of the tenants in turns, of each its oldest batch's."""
        now_s = self._loop.time()
        for _ in range(len(self._turns)):
            tenant = self._turns[0]
            self._turns.rotate(-1)
            for running in self._running.values():
                if running.batch.tenant == tenant and (number := running.next_line(now_s)) is not None:
                    return running, number
        return None

    async def _ask(self, running: _Running, number: int, stream: HttpStream, carrier: _Collected) -> None:
        batch, custom_id = running.batch, ""
        request_id = request_id_of(batch.id, number)
        try:
            line = await self._on_disk(lambda: self.store.line(batch, running.scan, number))
            custom_id = line.custom_id
            stream.request = HttpRequest(0, "POST", line.url, "", _headers(line), True)
            stream.received_s = self._loop.time()
            stream.receive_body(bytes(line.body))
            stream.complete_body()
            await self._released.wait()
            await self._handle(stream, request_id, partial(self._identify, batch.credential))
        except Exception:
            logger.exception("line %d of the batch %s cannot be answered", number + 1, batch.id)
            carrier.status = 500
        finally:
            self._streams.discard(stream)
            running.num_asked -= 1
        if self._may_ask_again(running, number, carrier):
            heapq.heappush(running.later, (self._loop.time() + carrier.retry_s, number))
        else:
            self._note(running, _answer(batch, number, custom_id, request_id, carrier))
        self._end_if_done(running)
        self._go_on()

    def _may_ask_again(self, running: _Running, number: int, carrier: _Collected) -> bool:
        if carrier.status not in RETRIED or NOT_AGAIN in carrier.headers:
            return False
        if carrier.status == 504:
            running.nums_late[number] = running.nums_late.get(number, 0) + 1
        return running.nums_late.get(number, 0) < MOST_LATE

    def _note(self, running: _Running, answer: Answer) -> None:
        running.num_asked += 1  # until it is written
        self._unwritten.append((running, answer))
        if not self._is_writing:
            self._is_writing = True
            self._spawn(self._write_answers())

    async def _write_answers(self) -> None:
        try:
            while self._unwritten:
                some = list(self._unwritten)
                await self._on_disk(partial(self.store.add_answers, [answer for _, answer in some]))
                del self._unwritten[: len(some)]
                for running, answer in some:
                    batch = running.batch
                    counts = {"failed": batch.failed + 1} if answer.is_error else {"completed": batch.completed + 1}
                    running.batch = msgspec.structs.replace(batch, **counts)
                    running.num_asked -= 1
                    self._end_if_done(running)
        finally:
            self._is_writing = False

    def _end_if_done(self, running: _Running) -> None:
        if running.is_done and not running.is_ending and not self._is_closed:
            running.is_ending = True
            self._spawn(self._finish(running))

    async def _finish(self, running: _Running) -> None:
        now_s, batch = self.now_s(), running.batch
        if batch.status is Status.IN_PROGRESS:
            batch = running.batch = batch.entering(Status.FINALIZING, now_s)
            await self._on_disk(lambda: self.store.update(batch))
        left = [*running.pending, *(number for _, number in running.later)]
        if batch.status is Status.CANCELLING:
            ended = Status.CANCELLED
        elif left:
            ended = Status.EXPIRED
            await self._on_disk(lambda: self._add_expired(running, left))
            batch = msgspec.structs.replace(batch, failed=batch.failed + len(left))
        else:
            ended = Status.COMPLETED
        batch = batch.entering(ended, self.now_s())
        running.batch = await self._on_disk(lambda: self.store.finish(batch, now_s))
        del self._running[batch.id]
        if running.expiry is not None:
            running.expiry.cancel()
        if not any(one.batch.tenant == batch.tenant for one in self._running.values()):
            with contextlib.suppress(ValueError):
                self._turns.remove(batch.tenant)
        logger.info("the batch %s is %s: %d answered, %d failed", batch.id, batch.status, batch.completed, batch.failed)

    def _add_expired(self, running: _Running, left: list[int]) -> None:
        message = "The batch's completion window ended before this line was run."
        batch = running.batch
        self.store.add_answers(
            _error_line(batch, number, self.store.line(batch, running.scan, number).custom_id, "batch_expired", message)
            for number in left
        )

    # Room for those who wait.

    def give_way(self) -> None:
        """A request that somebody waits for begins: pause all lines until none has been there for LINGER_S."""
        now_s = self._loop.time()
        self._busy_s = now_s
        if self._running and self._released.is_set() and now_s >= self._turn_until_s:
            self._released.clear()
            self._held_s = now_s
            for stream in self._streams:
                if stream.on_blocked is not None:  # it is with the engine
                    stream.set_blocked(True)
            self._hold_timer = self._loop.call_later(CHECK_S, self._check_held)

    def _check_held(self) -> None:
        now_s, is_busy = self._loop.time(), self._is_busy()
        if is_busy:
            self._busy_s = now_s
        if now_s < min(self._busy_s + LINGER_S, self._held_s + MOST_HELD_S):
            self._hold_timer = self._loop.call_later(CHECK_S, self._check_held)
            return
        self._released.set()
        if is_busy:
            self._turn_until_s = now_s + TURN_S
            self._hold_timer = self._loop.call_later(TURN_S, self._end_turn)
        for stream in list(self._streams):
            stream.set_blocked(False)
        self._go_on()

    def _end_turn(self) -> None:
        if self._is_busy():
            self.give_way()


def request_id_of(batch_id: str, number: int) -> str:
    """Of a line: the same whenever it is asked."""
    return blake2b(f"{batch_id}/{number}".encode(), digest_size=16).hexdigest()


def _headers(line: Line) -> Headers:
    """The line's custom_id is its client's request id, where it can be one."""
    own_id = line.custom_id.encode()
    is_plain = len(own_id) <= 64 and line.custom_id.isascii() and line.custom_id.isprintable() and b" " not in own_id
    headers: Headers = ((b"content-type", b"application/json"),)
    return (*headers, (b"x-request-id", own_id)) if is_plain else headers


def _answer(batch: Batch, number: int, custom_id: str, request_id: str, carrier: _Collected) -> Answer:
    try:
        body = orjson.loads(carrier.body)
    except orjson.JSONDecodeError:  # a bug
        return _error_line(batch, number, custom_id, "server_error", "The server failed to answer this line.")
    response = {"status_code": carrier.status, "request_id": request_id, "body": body}
    line = {"id": f"batch_req_{request_id}", "custom_id": custom_id, "response": response, "error": None}
    return Answer(batch.id, number, carrier.status != 200, sse.json_line(line))


def _error_line(batch: Batch, number: int, custom_id: str, code: str, message: str) -> Answer:
    line = {
        "id": f"batch_req_{request_id_of(batch.id, number)}",
        "custom_id": custom_id,
        "response": None,
        "error": {"code": code, "message": message},
    }
    return Answer(batch.id, number, True, sse.json_line(line))
