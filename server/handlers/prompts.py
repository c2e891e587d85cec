"""What takes a prompt for its body: generations, and what only counts or cuts its tokens. Thread: loop."""

import math
from collections.abc import Awaitable, Callable

from core.errors import ErrorKind, InvalidRequest, ServiceError
from server.api import tokenize
from server.api.fields import checked_ids
from server.api.models import find_model
from server.api.responses import ResponsesSurface, input_tokens_reply
from server.api.surface import GenerationDefaults, Surface
from server.app_state import AppState
from server.exchange import Exchange
from server.observing.timing import Stage
from server.wire.messages import HttpRequest

BODY_BYTES = 4096  # of a body, beside its ids
MAX_ID_BYTES = 16  # of an id in JSON, on a line of its own


def generating(surface: Surface) -> Callable[[AppState, Exchange], Awaitable[None]]:
    """A handler that answers in the surface's words."""

    async def generate(state: AppState, exchange: Exchange) -> None:
        check_media_type(exchange.request)
        state.begin_trace(exchange)
        outcome = await state.served.generate(
            surface, exchange.stream, exchange.request_id, exchange.timings, exchange.known_ticket
        )
        exchange.outcome = outcome
        if outcome.error is not None:
            raise outcome.error

    return generate


async def tokenize_prompt(state: AppState, exchange: Exchange) -> None:
    reader, cards = state.served.reader, state.cards_for(exchange)

    def work(body: bytes) -> tuple[bytes, tuple[str, ...]]:
        call = tokenize.parse_tokenize(body)
        find_model(cards, call.model)
        ids = reader.encode(call.prompt)
        strs = [reader.tokenizer.str_of(token_id) for token_id in ids] if call.wants_token_strs else None
        return tokenize.tokenize_reply(ids, reader.max_model_len, strs), call.unknown_fields

    await _answer_computed(state, exchange, work)


async def show_tokenizer_info(state: AppState, exchange: Exchange) -> None:
    """The special tokens by name, the chat template and the context: what evaluation asks before it tokenizes."""
    find_model(state.cards_for(exchange)[:1], None)
    reader = state.served.reader
    exchange.send(
        tokenize.tokenizer_info_reply(
            reader.tokenizer.special_tokens, reader.chat_template.sources.get("default"), reader.max_model_len
        )
    )


async def detokenize(state: AppState, exchange: Exchange) -> None:
    reader, cards = state.served.reader, state.cards_for(exchange)
    vocab_size = reader.defaults.vocab_size

    def work(body: bytes) -> tuple[bytes, tuple[str, ...]]:
        call = tokenize.parse_detokenize(body)
        find_model(cards, call.model)
        if len(call.ids) > reader.max_model_len:
            most = reader.max_model_len
            message = f"tokens has {len(call.ids)} ids, and the model's context is {most}. Send fewer at once."
            raise InvalidRequest(message, "tokens", "context_length_exceeded")
        ids = checked_ids(call.ids, "tokens", vocab_size)
        text = reader.tokenizer.decode(ids, skip_special_tokens=False)
        return tokenize.detokenize_reply(text), call.unknown_fields

    await _answer_computed(state, exchange, work, BODY_BYTES + MAX_ID_BYTES * reader.max_model_len)


async def count_input_tokens(state: AppState, exchange: Exchange) -> None:
    reader, cards = state.served.reader, state.cards_for(exchange)

    def defaults_of(model: str | None) -> tuple[str, GenerationDefaults]:
        return find_model(cards, model).id, reader.defaults

    def work(body: bytes) -> tuple[bytes, tuple[str, ...]]:
        call = ResponsesSurface().parse(body, defaults_of)
        num_tokens = sum(len(reader.encode(prompt)) for prompt in call.prompts)
        return input_tokens_reply(num_tokens), call.unknown_fields

    await _answer_computed(state, exchange, work)


async def _answer_computed(
    state: AppState,
    exchange: Exchange,
    work: Callable[[bytes], tuple[bytes, tuple[str, ...]]],
    most_bytes: float = math.inf,
) -> None:
    """Answer with what `work` makes of the body: reply, names of unknown fields. It may run elsewhere.

    Args:
        most_bytes: of the body: parsing holds the GIL, wherever it runs.
    """
    body = await _read_json(state, exchange, most_bytes)
    place = state.served.admission.enter(exchange.known_caller.sharing_name, len(body))
    try:
        reply, unknown_fields = await state.served.compute(lambda: work(body), len(body))
    finally:
        place.leave(None, exchange.clock())
    state.metrics.count_unknown_fields(unknown_fields)
    exchange.send(reply)


async def _read_json(state: AppState, exchange: Exchange, most_bytes: float) -> bytes:
    check_media_type(exchange.request)
    exchange.timings.enter(Stage.BODY, exchange.clock())
    body = await state.served.read_body(exchange.stream, exchange.known_caller.sharing_name, most_bytes)
    exchange.timings.enter(Stage.ANSWER, exchange.clock())
    return body


def check_media_type(request: HttpRequest) -> None:
    """
    Raises:
        ServiceError: the body says that it is something else than JSON, or packed. One that says nothing is taken for
            JSON.
    """
    coding = request.header(b"content-encoding")
    if coding is not None and coding.strip().lower() not in (b"", b"identity"):
        raise ServiceError(
            ErrorKind.UNSUPPORTED_MEDIA_TYPE,
            f"The body's content-encoding is {coding.decode('latin-1')[:64]!r}. Send it unpacked, without that field.",
            "unsupported_content_encoding",
            "content-encoding",
        )
    value = request.header(b"content-type")
    if value is None:
        return
    media_type = value.split(b";", 1)[0].strip().lower()
    if media_type != b"application/json" and not media_type.endswith(b"+json"):
        raise ServiceError(
            ErrorKind.UNSUPPORTED_MEDIA_TYPE,
            f"The body is {media_type.decode('latin-1')[:64]!r}. Send JSON, with 'content-type: application/json'.",
            "unsupported_media_type",
        )
