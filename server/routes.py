"""The routes: which handler a path and a method have, what is checked before it runs, what it does. Thread: loop."""

import hashlib
import logging
import math
import re
from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime
from functools import cache, partial
from typing import Any, Literal
from urllib.parse import parse_qs, unquote

from msgspec import structs

from core.errors import ErrorKind, InvalidRequest, ServiceError
from core.incident import Explanation
from server import batch_routes, dashboard, openapi, switches, tenant_routes
from server.adapters import Adapters
from server.api import (
    chat,
    completions,
    embeddings,
    llama_server,
    messages,
    models,
    ollama,
    responses,
    scores,
    tokenize,
)
from server.api.decoding import PAGE, decode, is_ascending, page_of
from server.api.fields import DefaultsOf, GenerationCall, RequestLimits, checked_ids
from server.api.models import ServedModel, ServerCard
from server.api.replies import EVENTS, LINES, OPENAI_ERRORS, Deleted, ErrorForm, Surface, deleted_reply
from server.app import Exchange, Handler, MethodNotAllowed, Operation, Route
from server.gate.identity import Caller, Scope
from server.gate.tenants import Tenant
from server.generation import Generation, weight_of
from server.ledger.ledger import PROBE_S
from server.ledger.responses import Responses, Turn, input_items_reply
from server.ledger.store import Grouping
from server.ledger.usage import NO_LEDGER, parse_usage, read_usage, usage_reply
from server.observing.accounting import NumAsked, ToldRequest, ToldRequests, requests_reply, timeline_reply
from server.observing.metrics import CONTENT_TYPE
from server.observing.timing import Stage
from server.prompts import PromptReader, find_model
from server.relay import Relay
from server.relayed import SURFACES, keep_alive_asked
from server.switches import explain_request
from server.values import nearest
from server.wire.messages import HttpRequest

logger = logging.getLogger(__name__)

BODY_BYTES = 4096  # of a body, beside its ids
MAX_ID_BYTES = 16  # of an id in JSON, on a line of its own
SHOWN_CHARS = 200  # of what a client asked for, in errors that repeat it


# Generations, and what only counts or cuts tokens.


async def generate(exchange: Exchange, surface: Surface, turn: Turn | None = None) -> None:
    """Generate, in the surface's wire format."""
    check_media_type(exchange.request)
    exchange.begin_trace()
    served, ticket = exchange.server.served, exchange.ticket
    assert ticket is not None, "a counted route"
    # No name here: an error's traceback would keep the generation
    run = Generation(served, surface, exchange.stream, exchange.request_id, exchange.timings, ticket, turn).run()
    outcome = exchange.outcome = await run
    if outcome.error is not None:
        raise outcome.error


async def respond(exchange: Exchange) -> None:
    """Generate a response, with the history that is stored, and store it."""
    turn = stored_turn(exchange)
    try:
        await generate(exchange, responses.SURFACE, turn)
    except InvalidRequest as error:
        if turn is not None:
            turn.name_place(error)
        raise


def stored_turn(exchange: Exchange) -> Turn | None:
    """None: no responses are stored."""
    store, tenant = exchange.server.responses, exchange.known_caller.tenant.name
    compute = partial(exchange.server.served.compute, tenant=tenant)
    return None if store is None else Turn(store, tenant, compute)


def known_responses(exchange: Exchange) -> Responses:
    if (store := exchange.server.responses) is None:
        message = (
            "This server stores no responses. Its operator can enable it with --store-responses 30d and --ledger FILE."
        )
        raise ServiceError(ErrorKind.NOT_FOUND, message, "responses_not_stored")
    return store


async def show_response(exchange: Exchange) -> None:
    store = known_responses(exchange)
    if parse_qs(exchange.request.query).get("stream", ["false"])[0] == "true":
        message = "A stored response cannot be streamed. Leave stream out."
        raise InvalidRequest(message, "stream", "unsupported_parameter")
    exchange.send((await store.find(exchange.known_caller.tenant.name, exchange.argument)).document)


async def list_input_items(exchange: Exchange) -> None:
    """Of a stored response."""
    query = parse_qs(exchange.request.query)
    response = await known_responses(exchange).find(exchange.known_caller.tenant.name, exchange.argument)
    exchange.send(input_items_reply(response, *page_of(query), is_ascending=is_ascending(query)))


async def delete_response(exchange: Exchange) -> None:
    await known_responses(exchange).delete(exchange.known_caller.tenant.name, exchange.argument)
    exchange.send(deleted_reply(exchange.argument, "response"))


def answering_ollamas(surface: Surface) -> Handler:
    """A handler that generates, or loads or unloads the model if there is nothing to answer."""

    async def answer(exchange: Exchange) -> None:
        try:
            await generate(exchange, surface)
        except ollama.NothingAsked as asked:
            await keep_model(exchange, asked)

    return answer


async def keep_model(exchange: Exchange, asked: ollama.NothingAsked) -> None:
    """Load a model that is started on demand, or unload it at a keep_alive of 0; others stay as they are."""
    keep_alive_s = keep_alive_asked(asked.keep_alive)
    local, is_unload = exchange.server.local_models, keep_alive_s == 0
    model = None if local is None else local.find(asked.model)
    if local is not None and model is not None and not (is_unload and model.stays):
        if is_unload:
            await local.unload(model)
        else:
            if keep_alive_s is not None:
                model.pool.keep(keep_alive_s)
            await local.load(model)
            local.on_used(model)
    exchange.send(ollama.kept_reply(asked, is_unload, exchange.server.clock.unix()))


Computed = tuple[bytes, tuple[str, ...]]  # a reply, and the names of the body's unknown fields


def computing(
    work: Callable[[PromptReader, tuple[ServedModel, ...], Tenant, bytes], Computed],
    bounds_body: bool = False,
    has_history: bool = False,
) -> Handler:
    """A handler that answers with what `work` computes from the body.

    Args:
        work: gets the models that the caller may use, and its tenant; may run on another thread.
        bounds_body: limit the body to the size of a whole context's ids: parsing holds the GIL on any thread.
        has_history: the body may continue a stored response.
    """

    async def compute(exchange: Exchange) -> None:
        check_media_type(exchange.request)
        served, caller = exchange.server.served, exchange.known_caller
        longest = max(
            (math.inf if one.max_model_len is None else one.max_model_len for one in exchange.cards), default=0
        )
        most_bytes = BODY_BYTES + MAX_ID_BYTES * longest if bounds_body else math.inf
        exchange.enter(Stage.BODY)
        body = await served.read_body(exchange.stream, caller.sharing_name, most_bytes)
        exchange.enter(Stage.ANSWER)
        reader, _, admission = await served.backend_of(body, caller.tenant)
        if has_history and (turn := stored_turn(exchange)) is not None:
            body = await turn.begin(body, not isinstance(reader, Relay))
        place = admission.enter(caller.sharing_name, len(body))
        try:
            if isinstance(reader, Relay):
                exchange.send(await reader.ask(exchange.stream.request.path, body, caller))
                return
            cards, own = exchange.own_cards, served.reader
            tenant = caller.tenant
            done = await served.compute(lambda: work(own, cards, tenant, body), weight_of(body), tenant.name)
            reply, unknown_fields = done
        finally:
            place.leave(exchange.server.clock.monotonic())
        if own.turns is not None:
            own.turns.learn()
        exchange.server.metrics.count_unknown_fields(unknown_fields)
        exchange.send(reply)

    return compute


def tokenize_prompt(reader: PromptReader, cards: tuple[ServedModel, ...], tenant: Tenant, body: bytes) -> Computed:
    wire, prompt, unknown_fields = tokenize.parse_tokenize(body, reader.defaults.tool_style)
    find_model(cards, wire.model)
    ids = reader.encode(prompt, domain=(tenant.cache_salt_domain, ""))
    strs = [reader.tokenizer.str_of(token_id) for token_id in ids] if wire.return_token_strs else None
    return tokenize.tokenize_reply(ids, reader.max_model_len, strs), unknown_fields


def detokenize(reader: PromptReader, cards: tuple[ServedModel, ...], tenant: Tenant, body: bytes) -> Computed:
    wire, unknown_fields = tokenize.parse_detokenize(body)
    find_model(cards, wire.model)
    num_ids, most = len(wire.tokens), reader.max_model_len
    if num_ids > most:
        message = f"tokens has {num_ids} ids, and the model's context is {most}. Send fewer at once."
        raise InvalidRequest(message, "tokens", "context_length_exceeded")
    ids = checked_ids(wire.tokens, "tokens", reader.defaults.vocab_size)
    return tokenize.detokenize_reply(reader.tokenizer.decode(ids, skip_special_tokens=False)), unknown_fields


def counting(
    parse: Callable[[bytes, DefaultsOf], GenerationCall], reply: Callable[[int], bytes]
) -> Callable[[PromptReader, tuple[ServedModel, ...], Tenant, bytes], Computed]:
    """What counts the prompt's tokens that a generation's request would be billed."""

    def count(reader: PromptReader, cards: tuple[ServedModel, ...], tenant: Tenant, body: bytes) -> Computed:
        call = parse(body, lambda model: (find_model(cards, model).id, reader.defaults))
        return reply(reader.count(call, tenant)), call.unknown_fields

    return count


def check_media_type(request: HttpRequest) -> None:
    """Raises ServiceError: the headers say that the body is not JSON, or compressed. Without them it counts as JSON."""
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


# What is served, and by which server.


async def list_models(exchange: Exchange) -> None:
    if exchange.errors is messages.ERRORS:
        exchange.send(messages.models_reply(exchange.cards, parse_qs(exchange.request.query)))
    else:
        exchange.send(models.list_reply(exchange.cards, exchange.server.model_states))


async def get_model(exchange: Exchange) -> None:
    model = find_model(exchange.cards, exchange.argument)
    if exchange.errors is messages.ERRORS:
        exchange.send(messages.model_reply(model))
    else:
        exchange.send(models.model_reply(model, exchange.server.model_states))


def describing(reply: Callable[[ServerCard], bytes]) -> Handler:
    """A handler that shows the server's card with the model that the caller may use; without one it is a 404."""

    async def describe(exchange: Exchange) -> None:
        card = exchange.server.card
        exchange.send(reply(structs.replace(card, model=find_model(exchange.described_cards[:1], None))))

    return describe


def listing(reply: Callable[[Sequence[ServedModel], ServerCard], bytes]) -> Handler:
    """A handler that lists the models that the caller may use."""

    async def list_all(exchange: Exchange) -> None:
        exchange.send(reply(exchange.cards, exchange.server.card))

    return list_all


async def list_running(exchange: Exchange) -> None:
    """Ollama's /api/ps: the models that are loaded."""
    server = exchange.server
    local = server.local_models
    unix_s = server.clock.unix() - server.clock.monotonic()
    running: list[tuple[ServedModel, int, float]] = []
    for model in exchange.cards:
        found = None if local is None else local.find(model.name)
        if found is None:
            running.append((model, 0, math.inf))
        elif found.is_awake:
            running.append((model, found.needed_bytes, found.expires_s + unix_s))
    exchange.send(ollama.running_reply(running, server.card))


async def show_ollamas_model(exchange: Exchange) -> None:
    check_media_type(exchange.request)
    card, served = exchange.server.card, exchange.server.served
    name, unknown_fields = ollama.parse_show(
        await served.read_body(exchange.stream, exchange.known_caller.sharing_name, BODY_BYTES)
    )
    exchange.server.metrics.count_unknown_fields(unknown_fields)
    model, template, capabilities = find_model(exchange.cards, name), None, []
    if served.own is not None and model in served.own.reader.cards:
        reader = served.own.reader
        template = reader.chat_template.sources.get("default")
        styles = {"tools": reader.defaults.tool_style, "thinking": reader.defaults.thought_style}
        capabilities = [kind for kind, style in styles.items() if style is not None]
    exchange.send(ollama.show_reply(model, card, template, capabilities))


async def show_tokenizer_info(exchange: Exchange) -> None:
    """The special tokens by name, the chat template and the context, for evaluation tools. ?model=NAME: of that one."""
    served, caller = exchange.server.served, exchange.known_caller
    name = parse_qs(exchange.request.query).get("model", [None])[0]
    card = find_model(exchange.described_cards if name is None else exchange.cards, name)
    if (other := served.others.get(card.id)) is not None and isinstance(other.reader, Relay):
        exchange.send(await other.reader.ask(exchange.request.path, None, caller))
        return
    reader = served.reader
    template = reader.chat_template.sources.get("default")
    exchange.send(tokenize.tokenizer_info_reply(reader.tokenizer.special_tokens, template, reader.max_model_len))


# For other routers.


async def show_props(exchange: Exchange) -> None:
    server = exchange.server
    template = server.served.reader.chat_template.sources.get("default", "")
    exchange.send(llama_server.props_reply(server.card, template))


async def show_slots(exchange: Exchange) -> None:
    """503 with ?fail_on_no_slot=1 if none is free."""
    card, num_running = exchange.server.card, exchange.server.stats.num_running
    if "fail_on_no_slot" in parse_qs(exchange.request.query) and num_running >= card.max_sequences:
        raise ServiceError(ErrorKind.UNAVAILABLE, "No slot is free. Requests wait in the queue.", "no_slot_available")
    exchange.send(llama_server.slots_reply(card, num_running))


async def show_loads(exchange: Exchange) -> None:
    server, load = exchange.server, exchange.server.load()
    numbers = load.num_running, load.num_waiting
    exchange.send(models.loads_reply(server.card, server.stats, *numbers, server.clock.unix()))


async def show_sleep(exchange: Exchange) -> None:
    """Like vLLM's answer: the engine of this process never sleeps."""
    exchange.send(b'{"is_sleeping":false}')


# For operators and monitoring.


async def show_usage(exchange: Exchange) -> None:
    """Usage of the caller's tenant, by ?by=day|model|key and ?since=."""
    served, now = exchange.server.served, datetime.fromtimestamp(exchange.server.clock.unix(), UTC)
    query = parse_usage(exchange.request.query, exchange.known_caller.tenant.name, now)
    ledger = served.ledger
    if ledger is None:
        raise NO_LEDGER
    lines = await served.offload(lambda: read_usage(ledger.path, query))
    exchange.send(usage_reply(query, lines))


async def show_front(exchange: Exchange) -> None:
    """The dashboard, for browsers; a short text for other clients, such as the ollama command's first check."""
    if b"text/html" in (exchange.request.header(b"accept") or b""):
        await dashboard.show_file(exchange, "index.html")
    else:
        exchange.send(b"steploop is running", media_type=b"text/plain; charset=utf-8")


async def show_health(exchange: Exchange) -> None:
    exchange.send(b'{"status":"ok"}')


async def show_readiness(exchange: Exchange) -> None:
    server = exchange.server
    server.readiness.check()
    if server.readiness.is_stalled:  # requests in progress may still end well; a balancer should look elsewhere
        message = "The engine has been busy with one step for too long."
        raise ServiceError(ErrorKind.UNAVAILABLE, message, "stalled", retry_after_s=5)
    why = None if (ledger := server.served.ledger) is None else ledger.why_unavailable
    if why is not None:  # every generation would be refused
        message = f"The billing ledger is unavailable: {why}."
        raise ServiceError(ErrorKind.UNAVAILABLE, message, "ledger_unavailable", retry_after_s=PROBE_S)
    exchange.send(b'{"status":"ready"}')


@cache
def _openapi(limits: RequestLimits) -> tuple[bytes, bytes]:
    """The document and its entity tag."""
    body = openapi.document(ROUTES, limits)
    return body, b'"%s"' % hashlib.sha256(body).hexdigest()[:32].encode()


async def show_openapi(exchange: Exchange) -> None:
    body, tag = await exchange.server.offload(partial(_openapi, exchange.server.request_limits))
    known = exchange.request.header(b"if-none-match") or b""
    is_known = tag in [one.strip().removeprefix(b"W/") for one in known.split(b",")]
    exchange.send(body, 304 if is_known else 200, ((b"etag", tag),), caching=(b"cache-control", b"no-cache"))


async def show_metrics(exchange: Exchange) -> None:
    server, listener = exchange.server, exchange.server.listener
    body = server.metrics.render(server.stats, listener.num_open, listener.num_accepted, listener.refusals.counts)
    exchange.send(body, media_type=CONTENT_TYPE)


async def show_engine(exchange: Exchange) -> None:
    engine = exchange.server.loaded_engine
    snapshot = await engine.inspect()
    exchange.send(models.engine_reply(snapshot, engine.stats))


async def clear_cache(exchange: Exchange) -> None:
    await exchange.server.loaded_engine.clear_cache()
    if (turns := exchange.server.served.reader.turns) is not None:
        turns.clear()
    logger.info("the prefix cache is cleared, by POST /admin/cache/clear")
    exchange.send(models.CACHE_CLEARED)


def adapting(work: Callable[[Adapters, bytes], Awaitable[Computed]]) -> Handler:
    """A handler that loads or unloads adapters, and answers in plain text, as vLLM does."""

    async def adapt(exchange: Exchange) -> None:
        check_media_type(exchange.request)
        body = await exchange.stream.read_body(
            BODY_BYTES + models.MOST_PATH_CHARS * 6, exchange.known_caller.sharing_name
        )
        adapters = exchange.server.adapters
        if adapters is None:
            has_own_processes = exchange.server.local_models is not None
            way = "[[models]] with adapter_of (docs/scale.md)" if has_own_processes else "--lora, --lora-dir"
            message = f"This server does not load LoRA adapters on request. Its operator can enable it with {way}."
            raise ServiceError(ErrorKind.PERMISSION, message, "lora_disabled")
        reply, unknown_fields = await work(adapters, body)
        exchange.server.metrics.count_unknown_fields(unknown_fields)
        exchange.send(reply, media_type=b"text/plain; charset=utf-8")

    return adapt


async def load_adapter(adapters: Adapters, body: bytes) -> Computed:
    asked, unknown_fields = decode(body, models.LoadAdapterBody, {})
    await adapters.load(asked)
    return f"Success: LoRA adapter '{asked.lora_name}' added successfully.".encode(), unknown_fields


async def unload_adapter(adapters: Adapters, body: bytes) -> Computed:
    asked, unknown_fields = decode(body, models.UnloadAdapterBody, {})
    adapters.unload(asked.lora_name)
    return f"Success: LoRA adapter '{asked.lora_name}' removed successfully.".encode(), unknown_fields


async def switch_model(exchange: Exchange, is_load: bool) -> None:
    """Load or unload a model that is started on demand."""
    local = exchange.server.local_models
    model = None if local is None else local.find(exchange.argument)
    if local is None or model is None:
        names = "" if local is None else f" Known: {', '.join(local.models)}."
        message = f"/admin/models/NAME/load and .../unload take the name of a model that is started on demand.{names}"
        raise ServiceError(ErrorKind.NOT_FOUND, message, "model_not_found")
    await (local.load(model) if is_load else local.unload(model))
    exchange.send(models.state_reply(model.name, local.states))


async def drain(exchange: Exchange) -> None:
    server = exchange.server
    grace_s = server.drain()
    exchange.send(models.drain_reply(grace_s, server.listener.num_handlers - 1), status=202)


# Requests in progress and past: how they went, their streams again, their cancellation.


async def list_requests(exchange: Exchange) -> None:
    server = exchange.server
    query, recorder = exchange.request.query, server.accounting.recorder
    exchange.send(requests_reply(query, server.generating(), recorder, server.clock))


async def show_request(exchange: Exchange) -> None:
    server, named = exchange.server, (_plain_id(exchange.argument), _tenant_of(exchange.known_caller))
    exchange.send(timeline_reply(*named, server.generating(), server.accounting.recorder, server.clock))


async def resume_stream(exchange: Exchange) -> None:
    last_id = exchange.request.header(b"last-event-id") or b"0"
    if not last_id.isdigit() or len(last_id) > 18:
        raise InvalidRequest("Last-Event-ID must be the number of an event of this stream.", "Last-Event-ID")
    own = exchange.known_caller.tenant.name  # whatever else the caller may see
    events = exchange.server.served.resumable.find(own, _plain_id(exchange.argument))
    if exchange.request.method == "HEAD":  # whoever reads goes on
        exchange.send(b"", media_type=EVENTS)
    else:
        await events.send_to(exchange.stream, int(last_id))


async def show_why(exchange: Exchange) -> None:
    await explain_request(exchange, _plain_id(exchange.argument), _tenant_of(exchange.known_caller))


async def delete_request(exchange: Exchange) -> None:
    """Cancel by our id alone: other clients could guess a client's own id, and retries repeat it."""
    if not exchange.server.served.cancel(_plain_id(exchange.argument), _tenant_of(exchange.known_caller)):
        message = (
            f"No request {exchange.argument[:SHOWN_CHARS]!r} is in progress. It may have ended already. "
            "Use the response's id, which each event of its stream shows, not x-request-id."
        )
        raise ServiceError(ErrorKind.NOT_FOUND, message, "request_not_found")
    exchange.send(b'{"status":"cancelled"}')


def _tenant_of(caller: Caller) -> str | None:
    """The tenant whose requests the caller may see and cancel; None: all tenants."""
    return None if Scope.ADMIN in caller.scopes else caller.tenant.name


def _plain_id(shown: str) -> str:
    """Ids of answers are accepted as they were shown."""
    for surface in SURFACES:
        shown = shown.removeprefix(surface.prefix)
    return shown


# The table.


ASKS = Scope.INFERENCE


COUNT_INPUT = computing(counting(responses.parse, responses.input_tokens_reply), has_history=True)
COUNT_MESSAGES = computing(counting(messages.parse_count, messages.count_reply))


def _generation(surface: Surface, operation: Operation, errors: ErrorForm = OPENAI_ERRORS) -> Route:
    handler = answering_ollamas(surface) if errors is ollama.ERRORS else partial(generate, surface=surface)
    return Route(handler, ASKS, is_counted=True, needs_tokens=True, errors=errors, operation=operation)


def _counted(handler: Handler, operation: Operation, errors: ErrorForm = OPENAI_ERRORS) -> Route:
    return Route(handler, ASKS, is_counted=True, errors=errors, operation=operation)


def _adapting(work: Callable[[Adapters, bytes], Awaitable[Computed]], operation: Operation) -> Route:
    return Route(adapting(work), Scope.ADMIN, operation=operation)


def _shown(
    handler: Handler, summary: str, scope: Scope | None = ASKS, errors: ErrorForm = OPENAI_ERRORS, **more: Any
) -> Route:
    """What is asked without a body. The model is needed where callers that generate may ask, or for usage."""
    needs_model = scope in (ASKS, Scope.USAGE)
    return Route(handler, scope, needs_model, errors=errors, operation=Operation(summary, **more))


_HI = {"messages": [{"role": "user", "content": "Hello"}]}
_PAIR = {"query": "What is a panda?", "documents": ["A bear.", "A city."]}
_CHAT = Operation(
    "Answer a chat",
    chat.ChatBody,
    "chat",
    {**_HI, "max_tokens": 64},
    chat.ChatCompletion,
    events=chat.ChatChunk,
    ends_with_done=True,
)
_COMPLETE = Operation(
    "Complete a text",
    completions.CompletionBody,
    "completions",
    {"prompt": "Once upon a time", "max_tokens": 16},
    completions.Completion,
    events=completions.CompletionChunk,
    ends_with_done=True,
)
_RESPOND = Operation(
    "Answer, with items",
    responses.ResponsesBody,
    "responses",
    {"input": "Hello", "max_output_tokens": 64},
    events=dict[str, Any],
)
_COUNT = Operation("Count the tokens of a response's input", responses.ResponsesBody, "responses", {"input": "Hello"})
_SAY = Operation("Answer messages", messages.MessagesBody, "messages", {**_HI, "max_tokens": 64}, events=dict[str, Any])
_COUNT_SAID = Operation("Count the tokens of messages", messages.CountBody, "messages", _HI)
_streaming_lines = partial(Operation, events=dict[str, Any], media_type=LINES)
_OLLAMA_CHAT = _streaming_lines("Answer a chat", ollama.ChatBody, "ollama", {**_HI, "stream": False})
_GENERATE = _streaming_lines("Complete a prompt", ollama.GenerateBody, "ollama", {"prompt": "Hello", "stream": False})
_EMBED = Operation("Embed texts", embeddings.EmbeddingBody, "embeddings", {"input": ["Hello"]})
_OLLAMA_EMBED = Operation("Embed texts", embeddings.OllamaBody, "embed", {"input": ["Hello"]})
_RERANK = Operation("Sort documents by how well they answer", scores.RerankBody, "rerank", _PAIR)
_SCORE = Operation("Score pairs of texts", scores.ScoreBody, "score", {"text_1": "Hello", "text_2": ["Hi", "Bye"]})
_FILL = {"input_prefix": "def f():\n", "input_suffix": "\n", "n_predict": 16}
_INFILL = Operation("Fill in code", llama_server.InfillBody, "infill", _FILL, events=dict[str, Any])
_GO_ON = {"prompt": "Once upon a time", "n_predict": 16}
_COMPLETION = Operation("Complete a prompt", llama_server.CompletionBody, "completion", _GO_ON, events=dict[str, Any])
_TOKENIZE = Operation("The token ids of a prompt", tokenize.TokenizeBody, "tokenize", {"prompt": "Hello"})
_DETOKENIZE = Operation("The text of token ids", tokenize.DetokenizeBody, "detokenize", {"tokens": [1, 2]})
_MODEL_INFO = "The model, as SGLang's router reads it"
_ADAPTER = {"lora_name": "mine", "lora_path": "mine"}
_TEXT = b"text/plain; charset=utf-8"
_PROGRESS = Operation("A request's progress and timings", answer=ToldRequest)
_RESUME = Operation("Resume its stream after Last-Event-ID", answer=None, events=dict[str, Any])
_WHY = Operation("What made a request slow, by simulation", answer=Explanation)
_CANCEL = Operation("Cancel a request", answer=models.Status)


def _of_requests(start: str, scope: Scope) -> dict[str, dict[str, Route]]:
    shown = partial(Route, scope=scope, needs_model=False)
    return {
        f"{start}/{{request_id}}": {
            "GET": shown(show_request, operation=_PROGRESS),
            "DELETE": Route(delete_request, scope, operation=_CANCEL),
        },
        f"{start}/{{request_id}}/stream": {"GET": shown(resume_stream, operation=_RESUME)},
        f"{start}/{{request_id}}/why": {"GET": shown(show_why, operation=_WHY)},
    }


def _switch(is_load: bool, summary: str) -> dict[str, Route]:
    operation = Operation(summary, answer=models.ModelState)
    return {"POST": Route(partial(switch_model, is_load=is_load), Scope.ADMIN, operation=operation)}


# By path; the name in braces is the handler's argument
ROUTES: dict[str, dict[str, Route]] = {
    "/v1/chat/completions": {"POST": _generation(chat.SURFACE, _CHAT)},
    "/v1/completions": {"POST": _generation(completions.SURFACE, _COMPLETE)},
    "/v1/responses": {"POST": Route(respond, ASKS, is_counted=True, needs_tokens=True, operation=_RESPOND)},
    "/infill": {"POST": _generation(llama_server.INFILL, _INFILL)},
    "/completion": {"POST": _generation(llama_server.COMPLETION, _COMPLETION)},
    "/v1/embeddings": {"POST": _generation(embeddings.SURFACE, _EMBED)},
    "/v1/rerank": {"POST": _generation(scores.RERANK, _RERANK)},
    "/v2/rerank": {"POST": _generation(scores.COHERE_RERANK, _RERANK)},
    "/v1/score": {"POST": _generation(scores.SCORE, _SCORE)},
    "/v1/responses/input_tokens": {"POST": _counted(COUNT_INPUT, _COUNT)},
    "/v1/responses/{response_id}": {
        "GET": _shown(show_response, "A stored response", query={"stream": Literal["false"]}),
        "DELETE": _shown(delete_response, "Delete a stored response", answer=Deleted),
    },
    "/v1/responses/{response_id}/input_items": {"GET": _shown(list_input_items, "The items of its input", query=PAGE)},
    "/v1/messages": {"POST": _generation(messages.SURFACE, _SAY, messages.ERRORS)},
    "/v1/messages/count_tokens": {"POST": _counted(COUNT_MESSAGES, _COUNT_SAID, messages.ERRORS)},
    "/api/chat": {"POST": _generation(ollama.CHAT, _OLLAMA_CHAT, ollama.ERRORS)},
    "/api/generate": {"POST": _generation(ollama.GENERATE, _GENERATE, ollama.ERRORS)},
    "/api/embed": {"POST": _generation(embeddings.OLLAMA, _OLLAMA_EMBED, ollama.ERRORS)},
    "/api/embeddings": {"POST": _generation(embeddings.OLLAMA, _OLLAMA_EMBED, ollama.ERRORS)},
    "/api/tags": {"GET": _shown(listing(ollama.tags_reply), "The models", errors=ollama.ERRORS)},
    "/api/ps": {"GET": _shown(list_running, "The models that are loaded", errors=ollama.ERRORS)},
    "/api/show": {
        "POST": _counted(
            show_ollamas_model,
            Operation("A model's details", ollama.ShowBody, "show", {"model": "NAME"}),
            ollama.ERRORS,
        )
    },
    "/api/version": {
        "GET": _shown(
            describing(models.version_reply), "The server's version", answer=models.Version, errors=ollama.ERRORS
        )
    },
    "/tokenize": {"POST": _counted(computing(tokenize_prompt), _TOKENIZE)},
    "/detokenize": {"POST": _counted(computing(detokenize, bounds_body=True), _DETOKENIZE)},
    "/v1/models": {
        "GET": _shown(
            list_models,
            "The models that the caller may use",
            answer=models.ModelList,
            query=dict.fromkeys(("limit", "before_id", "after_id"), str),  # Anthropic's
        )
    },
    "/v1/models/{model}": {"GET": _shown(get_model, "A model", answer=models.ModelObject)},
    "/tokenizer_info": {
        "GET": _counted(show_tokenizer_info, Operation("Special tokens and the chat template", query={"model": str}))
    },
    "/version": {"GET": _shown(describing(models.version_reply), "The server's version", answer=models.Version)},
    "/model_info": {"GET": _shown(describing(models.model_info_reply), _MODEL_INFO)},
    "/server_info": {"GET": _shown(describing(models.server_info_reply), "The server, as routers read it")},
    "/v1/loads": {"GET": _shown(show_loads, "The load, as routers read it")},
    "/props": {"GET": _shown(show_props, "The model and its template, in llama-server's format")},
    "/slots": {
        "GET": _shown(
            show_slots, "The slots, in llama-server's format", answer=list[Any], query={"fail_on_no_slot": str}
        )
    },
    "/is_sleeping": {"GET": _shown(show_sleep, "Whether the engine sleeps: never")},
    "/v1/usage": {
        "GET": _shown(show_usage, "Usage of the caller's tenant", Scope.USAGE, query={"by": Grouping, "since": str})
    },
    "/health": {"GET": _shown(show_health, "Whether the process lives", None, answer=models.Status)},
    "/ping": dict.fromkeys(
        ("GET", "POST"), _shown(show_health, "Whether the process lives", None, answer=models.Status)
    ),
    "/ready": {"GET": _shown(show_readiness, "Whether it answers requests", None, answer=models.Status)},
    "/metrics": {"GET": _shown(show_metrics, "The metrics, for Prometheus", Scope.METRICS, answer=CONTENT_TYPE)},
    "/v1/load_lora_adapter": {
        "POST": _adapting(
            load_adapter, Operation("Load a LoRA adapter", models.LoadAdapterBody, "adapters", _ADAPTER, _TEXT)
        )
    },
    "/v1/unload_lora_adapter": {
        "POST": _adapting(
            unload_adapter,
            Operation("Unload a LoRA adapter", models.UnloadAdapterBody, "adapters", {"lora_name": "mine"}, _TEXT),
        )
    },
    "/admin/requests": {
        "GET": _shown(
            list_requests,
            "Requests in progress, the slowest and the failed",
            Scope.ADMIN,
            answer=ToldRequests,
            query={"slowest": NumAsked},
        )
    },
    "/admin/engine": {
        "GET": _shown(show_engine, "The engine's state and counters", Scope.ADMIN, answer=models.EngineReport)
    },
    "/admin/cache/clear": {"POST": _shown(clear_cache, "Clear the prefix cache", Scope.ADMIN, answer=models.Status)},
    "/admin/drain": {
        "POST": _shown(drain, "End the process as SIGTERM does", Scope.ADMIN, answer=models.Draining, status=202)
    },
    "/admin/models/{model}/load": _switch(True, "Load a model that is started on demand"),
    "/admin/models/{model}/unload": _switch(False, "Unload it"),
    **_of_requests("/admin/requests", Scope.ADMIN),
    **_of_requests("/v1/requests", ASKS),
    **tenant_routes.ROUTES,
    **switches.ROUTES,
    **batch_routes.ROUTES,
    "/openapi.json": {"GET": _shown(show_openapi, "This document", None)},
    **{path: dashboard.ROUTES[path] for path in ("/docs", "/dashboard")},
}
_SHOWN = [
    path for path in ROUTES if not path.startswith("/admin") and "{" not in path
]  # in the error for an unknown path
_LEAST_SIMILARITY = 0.8  # of a slip; /v1/messages and /v1/usage have 0.75
# Other names that routers ask for
ROUTES |= {
    name: ROUTES[path]
    for name, path in {
        "/get_model_info": "/model_info",
        "/get_server_info": "/server_info",
        "/health_generate": "/ready",
    }.items()
}
ROUTES |= dashboard.ROUTES
_FRONT_HEADERS = (*dashboard.PROTECTION, (b"vary", b"accept"))
ROUTES["/"] = {"GET": Route(show_front, None, needs_model=False, headers=_FRONT_HEADERS)}
# For clients whose base URL ends without /v1
ROUTES |= {
    path.removeprefix("/v1"): ROUTES[path]
    for path in (
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/responses",
        "/v1/responses/{response_id}",
        "/v1/responses/{response_id}/input_items",
        "/v1/models",
        "/v1/models/{model}",
        "/v1/embeddings",
        "/v1/rerank",
        "/v1/score",
    )
}
# A model's name may have slashes
_PATTERNS = [
    (
        re.compile(re.sub(r"\{(\w+)\}", lambda found: "(.+)" if found[1] == "model" else "([^/]+)", path), re.DOTALL),
        routes,
    )
    for path, routes in ROUTES.items()
    if "{" in path
]


def find_route(path: str, method: str) -> tuple[Route, str]:
    """The route, and the name in its path, decoded.

    Below a path of _FORMS, unknown paths have a route that refuses them.

    Raises:
        ServiceError: there is no such path.
        MethodNotAllowed: the path does not support the method.
    """
    try:
        return _known_route(path, method)
    except ServiceError as error:
        form = next((form for start, form in _FORMS.items() if path.startswith(start)), None)
        if form is None:
            raise
        return Route(_refusing(error), None, needs_model=False, errors=form), ""


_FORMS = {
    "/v1/messages": messages.ERRORS,
    "/api/v1/": OPENAI_ERRORS,
    "/api/": ollama.ERRORS,
}  # of errors; the first counts


def _refusing(error: ServiceError) -> Handler:
    async def refuse(exchange: Exchange) -> None:
        raise error

    return refuse


def _known_route(path: str, method: str) -> tuple[Route, str]:
    methods, argument = None if "{" in path else ROUTES.get(path), ""
    for pattern, candidates in _PATTERNS if methods is None else ():
        if (match := pattern.fullmatch(path)) is not None:
            methods, argument = candidates, unquote(match[1])
    if methods is None:
        raise _not_found(path[:SHOWN_CHARS])
    route = methods.get("GET" if method == "HEAD" else method)
    if route is None:
        allowed = ", ".join("GET, HEAD" if name == "GET" else name for name in methods)
        message = f"{path[:SHOWN_CHARS]} does not take {method}. Allowed: {allowed}."
        raise MethodNotAllowed(message, allowed)
    return route, argument


def _not_found(path: str) -> ServiceError:
    ends = (known for known in _SHOWN if path.rstrip("/").endswith(known.removeprefix("/v1")))
    likely = nearest(path, _SHOWN, _LEAST_SIMILARITY) or next(ends, None)
    meant = f"; did you mean {likely}?" if likely else "."
    message = f"There is no {path} here{meant} Known: {', '.join(sorted(_SHOWN))}."
    return ServiceError(ErrorKind.NOT_FOUND, message, "not_found")
