"""Stored responses: what previous_response_id goes on from, and what GET and DELETE name. Thread: loop; reads: any.

They are in the ledger's database, each with the items of its own input and the id of the one before it; a tenant sees
its own alone. One is written with the row that its request has in the ledger, and its client then hears of its end.
"""

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol, TypeVar

import msgspec

from core.errors import ErrorKind, InvalidRequest, ServiceError
from server.api.decoding import page_behind, parse_object
from server.api.replies import list_reply
from server.ledger.ledger import Kept, Ledger, Place, unavailable
from server.ledger.store import MICRO, ForgetResponse, KeepResponse, StoredResponse, open_to_read
from server.values import UNREADABLE
from server.wire import sse

logger = logging.getLogger(__name__)

MOST_TURNS = 1000  # of a history
_COLUMNS = StoredResponse.__struct_fields__
_SELECT = f"SELECT {', '.join(_COLUMNS)} FROM responses WHERE tenant = ? AND id = ? AND created_us >= ?"
# An item of an output bears its response's id: server/api/responses.py
_ITEM_ID = re.compile(r"(?:msg|rs|fc)_(.+?)(?:_\d+)?")

T = TypeVar("T")
Item = dict[str, Any]


class Compute(Protocol):
    """Does work that takes longer the more bytes there are: here, or off the loop."""

    def __call__(self, work: Callable[[], T], num_bytes: int, /) -> Awaitable[T]: ...


class _Chain(NamedTuple):
    """Responses, the last first.

    Args:
        missing_id: of the next one, which was not found.
        is_too_long: there are more of them, or more of their bytes, than are taken.
    """

    found: list[StoredResponse]
    missing_id: str | None = None
    is_too_long: bool = False


@dataclass(slots=True, eq=False)
class Responses:
    """
    Args:
        most_bytes: of all stored responses.
        most_history_bytes: of what one request goes on from.
        offload: runs reads of the disk.
    """

    _ledger: Ledger
    _most_bytes: int
    _most_history_bytes: int
    _offload: Callable[[Callable[[], _Chain]], Awaitable[_Chain]]

    def now_us(self) -> int:
        return self._ledger.now_us()

    async def find(self, tenant: str, response_id: str) -> StoredResponse:
        """Raises ServiceError: it is not stored."""
        return (await self.history(tenant, response_id, most=1))[0]

    async def history(
        self, tenant: str, response_id: str, param: str | None = None, most: int = MOST_TURNS
    ) -> list[StoredResponse]:
        """A response, and before it those that it goes on from.

        Args:
            param: of the request that names it.
            most: of them; 1: the response alone.

        Raises:
            ServiceError: one of them is not stored, or they are too long.
        """
        since_us = self._ledger.now_us() - round(self._ledger.keep_responses_s * MICRO)
        known, most_bytes = dict(self._ledger.unkept), self._most_history_bytes
        chain = await self._offload(
            lambda: _read(self._ledger.path, tenant, response_id, since_us, known, most, most_bytes)
        )
        if chain.missing_id is not None:
            message = f"There is no response {chain.missing_id[:100]!r}: it was not stored, is deleted, or is too old."
            raise ServiceError(ErrorKind.NOT_FOUND, message, "response_not_found", param)
        if chain.is_too_long and most > 1:
            message = "The history is too long. Send the part that matters as input, without previous_response_id."
            raise InvalidRequest(message, param, "context_length_exceeded")
        return chain.found[::-1]

    def keeping(self, response: StoredResponse) -> KeepResponse:
        return KeepResponse(response, self._most_bytes)

    async def delete(self, tenant: str, response_id: str) -> None:
        """Raises ServiceError: it is not stored, or the ledger takes no writes."""
        self._ledger.check()
        await self.find(tenant, response_id)
        self._ledger.unkept.pop((KeepResponse, tenant, response_id), None)
        written: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

        def on_written(is_durable: bool) -> None:
            if not written.done():  # its client may have left
                written.set_result(is_durable)

        self._ledger.write(ForgetResponse(tenant, response_id), on_written)
        if not await written:
            raise unavailable()


def _read(
    path: Path, tenant: str, response_id: str, since_us: int, known: Mapping[Place, Kept], most: int, most_bytes: int
) -> _Chain:
    found: list[StoredResponse] = []
    next_id: str | None = response_id
    with open_to_read(path) as database:
        while next_id is not None and len(found) < most:
            kept = known.get((KeepResponse, tenant, next_id))
            if isinstance(kept, KeepResponse):
                one = kept.response
            else:
                row = database.execute(_SELECT, (tenant, next_id, since_us)).fetchone()
                if row is None:
                    return _Chain(found, next_id)
                one = StoredResponse(**dict(zip(_COLUMNS, row, strict=True)))
            found.append(one)
            most_bytes -= one.size_bytes
            if most_bytes < 0 and most > 1:
                return _Chain(found, is_too_long=True)
            next_id = one.previous_id
    return _Chain(found, is_too_long=next_id is not None)


class _LastEvent(msgspec.Struct, frozen=True):
    type: str
    response: msgspec.Raw


class _Facts(msgspec.Struct, frozen=True):
    id: str
    object: Literal["response"]


@dataclass(slots=True)
class Turn:
    """One request of /v1/responses: its body gets the history, and its response is stored.

    Args:
        compute: parses bodies.

    Attributes:
        num_before: items of the history, before the body's own.
    """

    store: Responses
    tenant: str
    compute: Compute
    num_before: int = 0
    _previous_id: str | None = None
    _own_items: bytes | None = field(default=None, repr=False)  # of the input; None: it is not stored
    _is_own: bool = True

    async def begin(self, body: bytes, is_own: bool = True) -> bytes:
        """The body as if its client had sent the whole history.

        Args:
            is_own: this process computes the answer; another server is asked without an id that it does not know.

        Raises:
            ServiceError: what it goes on from is not stored.
        """
        fields = await self.compute(lambda: parse_object(body), len(body))
        previous_id, wanted, items = fields.get("previous_response_id"), fields.get("store"), _items(fields)
        if items is None or not isinstance(previous_id, str | None) or not isinstance(wanted, bool | None):
            return body  # whoever parses it says what is wrong
        self._previous_id, self._is_own = previous_id, is_own
        history = []
        if previous_id is not None:
            history = await self.store.history(self.tenant, previous_id, "previous_response_id")
        before = await self.compute(lambda: [item for one in history for item in _turn_items(one)], len(history) * 1024)
        self.num_before = len(before)
        has_references = any(map(_is_reference, items))
        if has_references:
            items = [await self._referred(item, f"input[{i}]") for i, item in enumerate(items)]
        if wanted is not False:
            self._own_items = sse.json_line(items)
        if before or has_references:
            fields["input"] = [*before, *items]
        elif is_own:
            return body
        if not is_own:
            fields.pop("previous_response_id", None)
            fields["store"] = False
        return await self.compute(lambda: sse.json_line(fields), len(body))

    async def _referred(self, item: Any, param: str) -> Any:
        """The item itself, where it stands for one of a stored response."""
        if not _is_reference(item):
            return item
        item_id = str(item.get("id"))
        if (found := _ITEM_ID.fullmatch(item_id)) is not None:
            response = await self.store.find(self.tenant, f"resp_{found[1]}")
            for one in msgspec.json.decode(response.document)["output"]:
                if one.get("id") == item_id:
                    return one
        message = f"There is no item {item_id[:100]!r} in a stored response. Send the item itself."
        raise ServiceError(ErrorKind.NOT_FOUND, message, "item_not_found", f"{param}.id")

    def name_place(self, error: InvalidRequest) -> None:
        """Change an error to say where the client finds what it names: the history comes before its own items."""
        found = re.match(r"input\[(\d+)\]", error.param or "")
        if found is None or error.param is None or not self.num_before:
            return
        place = int(found[1]) - self.num_before
        own = "previous_response_id" if place < 0 else f"input[{place}]{error.param[found.end() :]}"
        error.message, error.param = error.message.replace(error.param, own), own

    def shown(self, last: bytes) -> bytes:
        """What ends an answer, for its client: another server knows neither the history nor that it is stored."""
        told = {"store": self._own_items is not None, "previous_response_id": self._previous_id}
        before, event, data = (b"", b"", last) if last.startswith(b"{") else last.rpartition(b"\ndata: ")
        try:
            document = None if self._is_own else msgspec.json.decode(data)
        except UNREADABLE:  # as another server wrote it
            return last
        response = document.get("response") if event and isinstance(document, dict) else document
        if not isinstance(response, dict):
            return last
        response |= told
        return before + event + sse.json_line(document) + (sse.EVENT_END if event else b"")

    def end(self, last: bytes) -> KeepResponse | None:
        """What stores the response; None: it is not stored.

        Args:
            last: what ends the answer: the whole document, or a stream's last events.
        """
        if self._own_items is None:
            return None
        try:
            document = _document_of(last)
            facts = msgspec.json.decode(document, type=_Facts)
        except UNREADABLE as error:  # as another server wrote it
            logger.error("a response cannot be stored: %s", error)
            return None
        response = StoredResponse(
            tenant=self.tenant,
            id=facts.id,
            previous_id=self._previous_id,
            created_us=self.store.now_us(),
            input=self._own_items,
            document=document,
        )
        return self.store.keeping(response)


def _is_reference(item: Any) -> bool:
    """Its type may be left out."""
    return isinstance(item, dict) and (item.get("type") == "item_reference" or item.keys() == {"id"})


def _document_of(last: bytes) -> bytes:
    if last.startswith(b"{"):
        return last
    lines = [line for line in last.splitlines() if line.startswith(b"data:")]
    event = msgspec.json.decode(lines[-1].removeprefix(b"data:") if lines else b"", type=_LastEvent)
    return bytes(event.response)


def _items(fields: dict[str, Any]) -> list[Any] | None:
    """The items of a body's input; None: it has none that could be read."""
    match fields.get("input"):
        case str(text):
            return [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": text}]}]
        case list(items):
            return items
        case _:
            return None


def _turn_items(response: StoredResponse) -> list[Item]:
    """What one response adds to the history: its input, then its output."""
    document = msgspec.json.decode(response.document)
    return [*msgspec.json.decode(response.input), *document["output"]]


def input_items_reply(response: StoredResponse, after: str | None, limit: int, is_ascending: bool) -> bytes:
    """A page of GET /v1/responses/ID/input_items; items that had no id bear one of their place."""
    items: list[Item] = [
        {"id": f"{response.id.replace('resp_', 'in_', 1)}_{i}", "type": "message"} | item
        for i, item in enumerate(msgspec.json.decode(response.input))
    ]
    return list_reply(*page_behind(items if is_ascending else items[::-1], after, limit))
