"""What is served, and by which server. Thread: loop."""

from msgspec import structs

from server.api import models
from server.api.models import ServerCard
from server.app_state import AppState
from server.exchange import Exchange


async def list_models(state: AppState, exchange: Exchange) -> None:
    exchange.send(models.list_reply(state.cards_for(exchange)))


async def get_model(state: AppState, exchange: Exchange) -> None:
    exchange.send(models.model_reply(models.find_model(state.cards_for(exchange), exchange.argument)))


async def show_model_info(state: AppState, exchange: Exchange) -> None:
    """For routers that probe it: model_path, tokenizer_path, served_model_name, is_generation, model_type,
    architectures, max_model_len, and that it understands neither images nor audio."""
    exchange.send(models.model_info_reply(_card_for(state, exchange)))


async def show_version(state: AppState, exchange: Exchange) -> None:
    """As vLLM tells it."""
    exchange.send(models.version_reply(_card_for(state, exchange)))


async def show_server_info(state: AppState, exchange: Exchange) -> None:
    """For routers that probe it: model_path, served_model_name, version, the context (context_length,
    max_model_len), sequences at once (max_num_reqs, max_running_requests), tokens of a step (max_prefill_tokens)
    and of the KV cache (max_total_tokens), that it is one process (tp_size, dp_size, pp_size), and where it
    listens (binds)."""
    exchange.send(models.server_info_reply(_card_for(state, exchange)))


def _card_for(state: AppState, exchange: Exchange) -> ServerCard:
    """
    Raises:
        ServiceError: the caller may use no model, and so is told of none.
    """
    return structs.replace(state.known_card, model=models.find_model(state.cards_for(exchange)[:1], None))
