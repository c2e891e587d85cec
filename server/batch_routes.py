"""/v1/files and /v1/batches: bodies and queries in, documents out. Thread: loop; the disk has its own.

What is done with them: server/batches.
"""

import asyncio
import re
import secrets
from collections.abc import Mapping
from typing import Annotated, Any, NamedTuple
from urllib.parse import parse_qs

import msgspec
from msgspec import Meta

from core.errors import ErrorKind, InvalidRequest, ServiceError
from server.api.decoding import MAX_UNKNOWN_FIELDS, PAGE, decode, is_ascending, page_of
from server.api.replies import Deleted, deleted_reply, list_reply
from server.api.responses import check_metadata
from server.app import Exchange, Handler, Operation, Route
from server.batches.runner import Batches
from server.batches.store import Batch, Credential, File, Purpose, new_file_id
from server.gate.identity import Caller, Scope
from server.observing.timing import Stage, answer_headers
from server.values import seconds_of
from server.wire import sse
from server.wire.messages import ResponseHead

FORM_FIELDS = ("file", "purpose", "expires_after[anchor]", "expires_after[seconds]")
ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings")
MOST_UNFINISHED = 100  # batches of a tenant
MOST_LISTED = 10_000  # files
FORM_BYTES = 64 * 1024  # of a form, beside its file
MOST_FIELDS, MOST_HEAD_BYTES = 16, 4096  # of a form, and of each field
PIECE_BYTES = 64 * 1024
MOST_NAME_CHARS = 255
LEAST_EXPIRY_S, MOST_EXPIRY_S = 3600, 30 * 86_400
BODY_BYTES = 64 * 1024
_BOUNDARY = re.compile(rb'multipart/form-data\s*;.*?boundary="?([^";,\s]{1,70})"?', re.IGNORECASE | re.DOTALL)
_FIELD = re.compile(rb'\bname="((?:[^"\\]|\\.)*)"', re.IGNORECASE)
_ESCAPED = re.compile("%(00|0A|0D|22)", re.IGNORECASE)  # in names, by browsers and httpx
_FILENAME = re.compile(rb'\bfilename="((?:[^"\\]|\\.)*)"', re.IGNORECASE)


class Part(NamedTuple):
    """One field of a form.

    Args:
        filename: None: it is no file.
    """

    filename: str | None
    content: memoryview


def parse_form(body: bytes, content_type: bytes) -> dict[str, Part]:
    """The fields of a multipart/form-data body (RFC 7578), by their names. Raises InvalidRequest: it is none."""
    found = _BOUNDARY.match(content_type.strip())
    if found is None:
        message = "Send the file as multipart/form-data: curl -F purpose=batch -F file=@requests.jsonl"
        raise InvalidRequest(message, "content-type", "invalid_form")
    mark, parts, whole = b"--" + found[1], dict[str, Part](), memoryview(body)
    at = body.find(mark)
    while at >= 0 and body[at + len(mark) : at + len(mark) + 2] == b"\r\n" and len(parts) < MOST_FIELDS:
        head = at + len(mark) + 2
        start, at = body.find(b"\r\n\r\n", head), body.find(b"\r\n" + mark, head)
        if start < 0 or at < start:
            raise InvalidRequest("The form is incomplete. Send all of it.", code="invalid_form")
        if (num_bytes := start - head) > MOST_HEAD_BYTES:
            message = f"The headers of a form field have {num_bytes:,} bytes; at most {MOST_HEAD_BYTES:,} are allowed."
            raise InvalidRequest(f"{message} Shorten its name, or that of its file.", "file", "invalid_form")
        fields = body[head:start]
        name, filename = _FIELD.search(fields), _FILENAME.search(fields)
        if name is None:
            raise InvalidRequest('A field of the form has no name="...".', code="invalid_form")
        shown = None if filename is None else _safe_name(filename[1].decode("utf-8", "replace"))
        parts[name[1].decode("utf-8", "replace")] = Part(shown, whole[start + 4 : at])
        at += 2
    if at < 0 or body[at + len(mark) : at + len(mark) + 2] != b"--":
        message = f"The form is incomplete, or has over {MOST_FIELDS} fields. Send file, purpose and expires_after."
        raise InvalidRequest(message, code="invalid_form")
    return parts


def _safe_name(told: str) -> str:
    """The last part of a path, without what cannot be printed: clients save files by their names."""
    told = _ESCAPED.sub(lambda found: chr(int(found[1], 16)), told)
    name = "".join(char for char in re.split(r"[/\\]", told)[-1] if char.isprintable())
    return "" if name in (".", "..") else name


class ExpiresAfter(msgspec.Struct, frozen=True):
    anchor: str
    seconds: int


class BatchBody(msgspec.Struct, frozen=True, kw_only=True):
    input_file_id: str
    endpoint: str
    completion_window: str
    metadata: dict[str, str] | None = None
    output_expires_after: ExpiresAfter | None = None


def known_batches(exchange: Exchange) -> Batches:
    if (batches := exchange.server.batches) is None:
        message = "This server stores no files. Its operator can enable them with --files DIR."
        raise ServiceError(ErrorKind.NOT_FOUND, message, "files_disabled")
    return batches


# Files.


async def upload(exchange: Exchange) -> None:
    batches, caller = known_batches(exchange), exchange.known_caller
    exchange.enter(Stage.BODY)
    limits = batches.limits
    body = await exchange.stream.read_body(limits.max_file_bytes + FORM_BYTES, caller.sharing_name)
    exchange.enter(Stage.ANSWER)
    content_type, now_s = exchange.request.header(b"content-type") or b"", batches.now_s()

    def store() -> tuple[File, set[str]]:
        form = parse_form(body, content_type)
        file = _file_of(form, caller.tenant.name, now_s)
        if file.bytes > limits.max_file_bytes:
            message = f"The file has {file.bytes:,} bytes; at most {limits.max_file_bytes:,} are allowed."
            raise ServiceError(ErrorKind.BODY_TOO_LARGE, message, "file_too_large", "file")
        batches.store.add_file(file, form["file"].content, limits.quota)
        return file, form.keys() - FORM_FIELDS

    file, unknown_fields = await batches.offload(store)
    exchange.server.metrics.count_unknown_fields(sorted(unknown_fields)[:MAX_UNKNOWN_FIELDS])
    exchange.send(sse.json_line(file_document(file)))


def _file_of(form: Mapping[str, Part], tenant: str, now_s: int) -> File:
    part, purpose = form.get("file"), _text(form, "purpose")
    if part is None or part.filename is None:
        raise InvalidRequest("The form has no file: curl -F purpose=batch -F file=@requests.jsonl", "file")
    if purpose != Purpose.BATCH:
        raise InvalidRequest("purpose must be 'batch': files are stored only for batches.", "purpose")
    if len(part.filename) > MOST_NAME_CHARS or not part.filename:
        raise InvalidRequest(f"The file's name must have 1 to {MOST_NAME_CHARS} characters.", "file")
    if not len(part.content):
        raise InvalidRequest("The file is empty.", "file")
    expires_at = None
    if (seconds := _text(form, "expires_after[seconds]")) is not None:
        given = int(seconds) if seconds.isdecimal() and len(seconds) < 9 else 0
        after = ExpiresAfter(_text(form, "expires_after[anchor]") or "created_at", given)
        expires_at = now_s + checked_expiry(after, "expires_after")
    return File(
        id=new_file_id(),
        tenant=tenant,
        purpose=Purpose.BATCH,
        filename=part.filename,
        bytes=len(part.content),
        created_at=now_s,
        expires_at=expires_at,
    )


def _text(form: Mapping[str, Part], name: str) -> str | None:
    part = form.get(name)
    return None if part is None else bytes(part.content[:256]).decode("utf-8", "replace").strip()


def checked_expiry(after: ExpiresAfter, param: str) -> int:
    """In seconds from the creation. Raises InvalidRequest."""
    if after.anchor != "created_at":
        raise InvalidRequest("anchor must be 'created_at'.", f"{param}.anchor")
    if not LEAST_EXPIRY_S <= after.seconds <= MOST_EXPIRY_S:
        message = f"seconds must be {LEAST_EXPIRY_S} to {MOST_EXPIRY_S}."
        raise InvalidRequest(message, f"{param}.seconds")
    return after.seconds


async def list_files(exchange: Exchange) -> None:
    batches, tenant = known_batches(exchange), exchange.known_caller.tenant.name
    query = parse_qs(exchange.request.query)
    after, limit = page_of(query, MOST_LISTED, MOST_LISTED)
    purpose, ascends = query.get("purpose", [None])[0], is_ascending(query)
    found, has_more = await batches.offload(lambda: batches.store.files(tenant, purpose, after, limit, ascends))
    exchange.send(list_reply([file_document(file) for file in found], has_more))


async def find_file(exchange: Exchange) -> File:
    batches, tenant = known_batches(exchange), exchange.known_caller.tenant.name
    return await batches.offload(lambda: batches.store.file(tenant, exchange.argument))


async def show_file(exchange: Exchange) -> None:
    exchange.send(sse.json_line(file_document(await find_file(exchange))))


async def send_content(exchange: Exchange) -> None:
    """In pieces, as fast as the client reads."""
    file, batches, stream = await find_file(exchange), known_batches(exchange), exchange.stream
    unblocked = asyncio.Event()
    opened = await batches.offload(batches.store.path_of(file).open("rb").__enter__)
    try:
        exchange.enter(Stage.LAST_FLUSH)
        headers = ((b"content-type", b"application/octet-stream"), (b"content-length", b"%d" % file.bytes))
        stream.send_head(ResponseHead(200, (*headers, *answer_headers(exchange.timings))))
        stream.on_unblocked = unblocked.set
        while piece := await batches.offload(lambda: opened.read(PIECE_BYTES)):
            while stream.is_blocked:
                unblocked.clear()
                await unblocked.wait()
            stream.send(piece)
        stream.end()
        stream.call_once_written(exchange.timings.finish)
    finally:
        stream.on_unblocked = None
        opened.close()


async def delete_file(exchange: Exchange) -> None:
    batches, tenant = known_batches(exchange), exchange.known_caller.tenant.name
    await batches.offload(lambda: batches.store.delete_file(tenant, exchange.argument))
    exchange.send(deleted_reply(exchange.argument, "file"))


def file_document(file: File) -> dict[str, Any]:
    shown: dict[str, Any] = msgspec.to_builtins(file) | {
        "object": "file",
        "status": "processed",
        "status_details": None,
    }
    del shown["tenant"]
    return shown


# Batches.


async def create_batch(exchange: Exchange) -> None:
    batches, caller = known_batches(exchange), exchange.known_caller
    body = await exchange.stream.read_body(BODY_BYTES, caller.sharing_name)
    wire, unknown_fields = decode(body, BatchBody, {})
    exchange.server.metrics.count_unknown_fields(unknown_fields)
    if wire.endpoint not in ENDPOINTS:
        raise InvalidRequest(f"endpoint must be one of {', '.join(ENDPOINTS)}.", "endpoint")
    exchange.server.find_route(wire.endpoint, "POST")
    check_metadata(wire.metadata or {})
    file = await batches.offload(lambda: batches.store.file(caller.tenant.name, wire.input_file_id, "input_file_id"))
    if file.purpose != Purpose.BATCH:
        message = f"{file.id} has the purpose {file.purpose!r}: send a file with the purpose 'batch'."
        raise InvalidRequest(message, "input_file_id")
    now_s, after = batches.now_s(), wire.output_expires_after
    batch = Batch(
        id=f"batch_{secrets.token_hex(16)}",
        credential=_credential(caller),
        endpoint=wire.endpoint,
        input_file_id=file.id,
        completion_window=wire.completion_window,
        created_at=now_s,
        expires_at=now_s + window_s(wire.completion_window),
        metadata=wire.metadata,
        output_expires_s=None if after is None else checked_expiry(after, "output_expires_after"),
    )
    await batches.create(batch, MOST_UNFINISHED)
    exchange.send(batch_document(batch))


def _credential(caller: Caller) -> Credential:
    digest = None if caller.digest is None else caller.digest.hex()
    return Credential(caller.tenant.name, digest, caller.key_id, caller.subject)


def window_s(text: str) -> int:
    """Raises InvalidRequest."""
    seconds = int(seconds_of(text) or 0)
    if not 60 <= seconds <= MOST_EXPIRY_S:
        message = "completion_window must be a time from 1min to 30d, such as 24h."
        raise InvalidRequest(message, "completion_window")
    return seconds


async def list_batches(exchange: Exchange) -> None:
    batches, tenant = known_batches(exchange), exchange.known_caller.tenant.name
    after, limit = page_of(parse_qs(exchange.request.query))
    found, has_more = await batches.offload(lambda: batches.store.batches(tenant, after, limit))
    exchange.send(list_reply([batch_fields(batches.latest(one)) for one in found], has_more))


async def show_batch(exchange: Exchange) -> None:
    batches = known_batches(exchange)
    exchange.send(batch_document(await batches.find(exchange.known_caller.tenant.name, exchange.argument)))


async def cancel_batch(exchange: Exchange) -> None:
    batches = known_batches(exchange)
    exchange.send(batch_document(await batches.cancel(exchange.known_caller.tenant.name, exchange.argument)))


def batch_document(batch: Batch) -> bytes:
    return sse.json_line(batch_fields(batch))


def batch_fields(batch: Batch) -> dict[str, Any]:
    shown: dict[str, Any] = msgspec.to_builtins(batch) | {"object": "batch"}
    for name in ("credential", "output_expires_s"):
        del shown[name]
    counts = {name: shown.pop(name) for name in ("total", "completed", "failed")}
    errors = {"object": "list", "data": shown["errors"]} if shown["errors"] else None
    return shown | {"request_counts": counts, "errors": errors}


def _route(handler: Handler, summary: str, *body: Any, **more: Any) -> Route:
    return Route(handler, Scope.INFERENCE, needs_model=False, operation=Operation(summary, *body, **more))


_BATCH = {"input_file_id": "file-...", "endpoint": ENDPOINTS[0], "completion_window": "24h"}
ROUTES: dict[str, dict[str, Route]] = {
    "/v1/files": {
        "POST": _route(upload, "Upload a batch's file", FORM_FIELDS, "files"),
        "GET": _route(
            list_files,
            "The files",
            query=PAGE | {"limit": Annotated[int, Meta(ge=1, le=MOST_LISTED)], "purpose": str},
        ),
    },
    "/v1/batches": {
        "POST": _route(create_batch, "Run a file's requests", BatchBody, "batches", _BATCH),
        "GET": _route(list_batches, "The batches", query={"after": str, "limit": PAGE["limit"]}),
    },
    "/v1/files/{file_id}": {
        "GET": _route(show_file, "A file"),
        "DELETE": _route(delete_file, "Delete a file", answer=Deleted),
    },
    "/v1/files/{file_id}/content": {"GET": _route(send_content, "Its content", answer=b"application/octet-stream")},
    "/v1/batches/{batch_id}": {"GET": _route(show_batch, "A batch")},
    "/v1/batches/{batch_id}/cancel": {"POST": _route(cancel_batch, "Cancel a batch")},
}
