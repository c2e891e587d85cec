"""Idempotency-Key: a request is computed once, and its repetitions get the stored answer. Thread: loop.

A key belongs to its tenant. While its request is in progress, repetitions are refused; afterwards they get the same
bytes. A request that failed, or whose client left, is not stored: it may be repeated. With a ledger, answers outlive
the process: they are written a moment after their end.
"""

import hashlib
import re
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import InitVar, dataclass, field

from core.errors import ErrorKind, InvalidRequest, ServiceError
from server.ledger.store import MICRO, StoredAnswer
from server.wire.messages import Headers, HttpRequest, Peer, ResponseHead
from server.wire.stream import HttpStream, StreamCarrier, WrittenCallback

HEADER = b"idempotency-key"
KEPT_S = 86_400.0
MAX_ANSWER_BYTES = 2**20  # a longer one is not stored
MAX_KEPT_BYTES = 64 * 2**20  # the oldest are dropped first
KEPT_HEADERS = (b"content-type", b"x-accel-buffering")  # every response gets the others of its own
_SANE = re.compile(rb"[!-~]{1,255}")

KeyOfTenant = tuple[str, str]  # tenant, key
Keep = Callable[[StoredAnswer], None]
Forget = Callable[[tuple[KeyOfTenant, ...]], None]


class Recording(StreamCarrier):
    """Records an answer on its way. Between a stream and its connection.

    Args:
        max_bytes: of a body; a longer one is not recorded.

    Attributes:
        is_whole: all of the answer has been sent and recorded.
    """

    def __init__(self, carrier: StreamCarrier, max_bytes: int) -> None:
        self.status = 0
        self.headers: Headers = ()
        self.body = bytearray()
        self.is_whole = False
        self._carrier = carrier
        self._max_bytes = max_bytes
        self._is_too_long = False

    @property
    def peer(self) -> Peer:
        return self._carrier.peer

    def start_body(self, stream: HttpStream) -> None:
        self._carrier.start_body(stream)

    def write_head(self, stream: HttpStream, head: ResponseHead) -> None:
        self.status = head.status
        self.headers = tuple(field for field in head.headers if field[0] in KEPT_HEADERS)
        self._carrier.write_head(stream, head)

    def write_data(self, stream: HttpStream, data: bytes) -> None:
        self._is_too_long |= len(self.body) + len(data) > self._max_bytes
        if self._is_too_long:
            self.body.clear()
        else:
            self.body += data
        self._carrier.write_data(stream, data)

    def write_end(self, stream: HttpStream, trailers: Headers) -> None:
        self.is_whole = not self._is_too_long
        self._carrier.write_end(stream, trailers)

    def call_once_written(self, stream: HttpStream, callback: WrittenCallback) -> None:
        self._carrier.call_once_written(stream, callback)


@dataclass(slots=True)
class Claim:
    """One request's hold on its key: call keep() if it was answered, and leave() in any case.

    Args:
        place: tenant and key.
        stored: the answer to an earlier, equal request.
    """

    owner: "Idempotency"
    place: KeyOfTenant
    digest: bytes
    stored: StoredAnswer | None

    def keep(self, recording: Recording, request_id: str) -> None:
        """Unless the client left before the end, or the answer is too long."""
        if recording.is_whole:
            answer = StoredAnswer(
                tenant=self.place[0],
                key=self.place[1],
                request_id=request_id,
                digest=self.digest,
                stored_us=self.owner.now_us(),
                status=recording.status,
                headers=recording.headers,
                body=bytes(recording.body),
            )
            self.owner.keep(answer)

    def leave(self) -> None:
        self.owner.leave(self.place)


@dataclass(eq=False, repr=False)
class Idempotency:
    """The keys in use, and the answers of a day.

    Args:
        unix: seconds since 1970.
        answers: of the last process, the oldest first.
        on_keep, on_forget: called for each stored answer, and for dropped ones.
    """

    _unix: Callable[[], float]
    answers: InitVar[Iterable[StoredAnswer]] = ()
    _on_keep: Keep = lambda answer: None
    _on_forget: Forget = lambda places: None
    _in_progress: dict[KeyOfTenant, bytes] = field(default_factory=dict)  # digests

    def __post_init__(self, answers: Iterable[StoredAnswer]) -> None:
        self._answers = OrderedDict(((one.tenant, one.key), one) for one in answers)
        self._num_bytes = sum(one.size_bytes for one in self._answers.values())

    def claim(self, tenant: str, request: HttpRequest, body: bytes) -> Claim | None:
        """Take hold of the request's key; None: it has none.

        Raises:
            ServiceError: the key is malformed, its request is in progress, or it was sent with another request.
        """
        key = request.header(HEADER)
        if key is None:
            return None
        if not _SANE.fullmatch(key):
            message = "An Idempotency-Key is 1 to 255 visible ASCII characters. Send one such as a UUID."
            raise InvalidRequest(message, "idempotency-key")
        self._drop_old()
        place = tenant, key.decode()
        digest = hashlib.sha256(request.path.encode() + b"\0" + body).digest()
        stored = self._answers.get(place)
        known = self._in_progress.get(place) if stored is None else stored.digest
        if known is not None and known != digest:
            message = "This Idempotency-Key was sent with another request. Send a new one with each new request."
            raise ServiceError(ErrorKind.KEY_REUSED, message, "idempotency_key_reused", "idempotency-key")
        if stored is None:
            if known is not None:
                message = "The request with this Idempotency-Key is in progress. Try again once it has been answered."
                code = "idempotency_key_in_use"
                raise ServiceError(ErrorKind.CONFLICT, message, code, "idempotency-key", retry_after_s=1)
            self._in_progress[place] = digest
        return Claim(self, place, digest, stored)

    def now_us(self) -> int:
        return round(self._unix() * MICRO)

    def keep(self, answer: StoredAnswer) -> None:
        self._answers[answer.tenant, answer.key] = answer
        self._num_bytes += answer.size_bytes
        self._on_keep(answer)
        self._drop_old()

    def leave(self, place: KeyOfTenant) -> None:
        self._in_progress.pop(place, None)

    def _drop_old(self) -> None:
        oldest_us = self.now_us() - KEPT_S * MICRO
        dropped = []
        while self._answers:
            place, answer = next(iter(self._answers.items()))
            if answer.stored_us >= oldest_us and self._num_bytes <= MAX_KEPT_BYTES:
                break
            del self._answers[place]
            self._num_bytes -= answer.size_bytes
            dropped.append(place)
        if dropped:
            self._on_forget(tuple(dropped))


def replay(stream: HttpStream, answer: StoredAnswer, headers: Headers) -> None:
    """Send a stored answer at once.

    Args:
        headers: of this response.
    """
    length, replayed = (b"content-length", b"%d" % len(answer.body)), (b"idempotent-replayed", b"true")
    stream.send_head(ResponseHead(answer.status, (*answer.headers, length, *headers, replayed)))
    stream.send(answer.body)
    stream.end()
