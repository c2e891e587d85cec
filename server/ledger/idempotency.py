"""Idempotency-Key: what was asked once is computed once, and answered again from what is kept. Thread: loop.

A key is its tenant's. While its request is in progress, another one is refused; once it has been answered, the same
request gets the same bytes again. What failed, or was left before its end, is forgotten: to repeat it is what the key
is for. With a ledger, answers outlive the process: they are written down a moment after their end.
"""

import hashlib
import re
from collections import OrderedDict
from collections.abc import Callable, Iterable
from functools import partial

from core.errors import ErrorKind, InvalidRequest, ServiceError
from server.ledger.store import MICRO, StoredAnswer
from server.wire.messages import Headers, HttpRequest, Peer, ResponseHead, TextFrame, TextWriter
from server.wire.stream import HttpStream, StreamCarrier, WrittenCallback

HEADER = b"idempotency-key"
KEPT_S = 86_400.0
MAX_ANSWER_BYTES = 2**20  # a longer one is given, and not kept
MAX_KEPT_BYTES = 64 * 2**20  # the oldest are forgotten first
KEPT_HEADERS = (b"content-type", b"x-accel-buffering")  # the others are each response's own
_SANE = re.compile(rb"[!-~]{1,255}")

KeyOfTenant = tuple[str, str]  # tenant, key
Keep = Callable[[StoredAnswer], None]
Forget = Callable[[tuple[KeyOfTenant, ...]], None]


class Recording:
    """An answer's bytes as they pass, to be said again. Implements StreamCarrier between a stream and its connection.

    Args:
        max_bytes: of a body; a longer one is not remembered.

    Attributes:
        is_whole: all of the answer has been sent, and is here.
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

    def text_writer(self, stream: HttpStream, frame: TextFrame) -> TextWriter:
        return partial(stream.send_text, frame)

    def write_end(self, stream: HttpStream, trailers: Headers) -> None:
        self.is_whole = not self._is_too_long
        self._carrier.write_end(stream, trailers)

    def call_once_written(self, stream: HttpStream, callback: WrittenCallback) -> None:
        self._carrier.call_once_written(stream, callback)


class Claim:
    """One request's hold on its key: leave() it in any case, keep() what it was answered before.

    Attributes:
        stored: what the same request was answered before.
    """

    def __init__(
        self, owner: "Idempotency", place: KeyOfTenant, digest: bytes, stored: StoredAnswer | None = None
    ) -> None:
        self.stored = stored
        self._owner = owner
        self._place = place
        self._digest = digest

    def keep(self, recording: Recording, request_id: str) -> None:
        """If it is whole: its client has not left before the end, and it is not too long."""
        if recording.is_whole:
            self._owner.keep(self._place, self._digest, recording, request_id)

    def leave(self) -> None:
        self._owner.leave(self._place)


class Idempotency:
    """The keys in use, and the answers of a day.

    Args:
        unix: seconds since 1970.
        answers: of the last process, the oldest first.
        on_keep, on_forget: told of each answer that is kept, and of those that are not any more.
    """

    def __init__(
        self,
        unix: Callable[[], float],
        answers: Iterable[StoredAnswer] = (),
        on_keep: Keep = lambda answer: None,
        on_forget: Forget = lambda places: None,
    ) -> None:
        self._unix = unix
        self._on_keep = on_keep
        self._on_forget = on_forget
        self._in_progress: dict[KeyOfTenant, bytes] = {}  # digests
        self._answers = OrderedDict(((one.tenant, one.key), one) for one in answers)
        self._num_bytes = sum(one.size_bytes for one in self._answers.values())

    def claim(self, tenant: str, request: HttpRequest, body: bytes) -> Claim | None:
        """Take hold of the key that the request bears; None: it bears none.

        Raises:
            ServiceError: the key is not fit, its request is in progress, or it was sent with another one.
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

    def keep(self, place: KeyOfTenant, digest: bytes, recording: Recording, request_id: str) -> None:
        answer = StoredAnswer(
            tenant=place[0],
            key=place[1],
            request_id=request_id,
            digest=digest,
            stored_us=round(self._unix() * MICRO),
            status=recording.status,
            headers=recording.headers,
            body=bytes(recording.body),
        )
        self._answers[place] = answer
        self._num_bytes += answer.size_bytes
        self._on_keep(answer)
        self._drop_old()

    def leave(self, place: KeyOfTenant) -> None:
        self._in_progress.pop(place, None)

    def _drop_old(self) -> None:
        oldest_us = (self._unix() - KEPT_S) * MICRO
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
    """Say again what was answered, all of it at once.

    Args:
        headers: that each response gets of its own.
    """
    all_headers = (
        *answer.headers,
        (b"content-length", b"%d" % len(answer.body)),
        *headers,
        (b"idempotent-replayed", b"true"),
    )
    stream.send_head(ResponseHead(answer.status, all_headers))
    stream.send(answer.body)
    stream.end()
