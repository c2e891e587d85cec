"""What tokens cost: the table [prices] of the TOML file. Whole numbers; nothing here knows a request. Any thread."""

from collections.abc import Mapping
from decimal import Decimal
from pathlib import Path
from typing import Any

import msgspec

from core.errors import ExitCode, StartupError
from core.types import Usage

MILLION = 10**6
ANY_MODEL = "*"
SAMPLE = (
    '[prices."Qwen3-0.6B"] with prompt = 0.05, cached = 0.01, completion = 0.20: of your currency, per million tokens'
)
MAX_PRICE = 10**6


class ModelPrice(msgspec.Struct, frozen=True):
    """Millionths of the currency per million tokens.

    Args:
        cached: for tokens of the prompt that an earlier request had computed.
    """

    prompt: int = 0
    cached: int = 0
    completion: int = 0

    def cost_micro(self, usage: Usage) -> int:
        """Millionths of the currency, half a one rounded up."""
        num_computed = usage.num_prompt_tokens - usage.num_cached_tokens
        cost = num_computed * self.prompt + usage.num_cached_tokens * self.cached
        return (cost + usage.num_completion_tokens * self.completion + MILLION // 2) // MILLION


FREE = ModelPrice()


class Prices(msgspec.Struct, frozen=True):
    """By the name of the model; ANY_MODEL for those without one of their own."""

    by_model: tuple[tuple[str, ModelPrice], ...] = ()

    def cost_micro(self, model: str, usage: Usage) -> int:
        by_model = dict(self.by_model)
        return by_model.get(model, by_model.get(ANY_MODEL, FREE)).cost_micro(usage)


NO_PRICES = Prices()


def parse_prices(table: Any, path: Path) -> Prices:
    """What [prices] of a TOML file says.

    Args:
        path: of the file, for messages.

    Raises:
        StartupError: naming the model and the field.
    """
    if not isinstance(table, Mapping):
        raise StartupError(f"prices in {path} is no table", SAMPLE, ExitCode.CONFIGURATION)
    return Prices(tuple((model, _parse_model(model, fields, path)) for model, fields in table.items()))


def _parse_model(model: str, fields: Any, path: Path) -> ModelPrice:
    where = f"[prices.{model!r}] in {path}"
    if not isinstance(fields, Mapping):
        raise StartupError(f"{where} is no table", SAMPLE, ExitCode.CONFIGURATION)
    known = ModelPrice.__struct_fields__
    for name, value in fields.items():
        if name not in known:
            raise StartupError(f"{where} has {name!r}", f"known: {', '.join(known)}", ExitCode.CONFIGURATION)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= MAX_PRICE:
            cause = f"{name} of {where} is {value!r}, and must be a number from 0 to {MAX_PRICE:,}"
            raise StartupError(cause, SAMPLE, ExitCode.CONFIGURATION)
    prices = {name: int(Decimal(str(value)) * MILLION) for name, value in fields.items()}
    return ModelPrice(**({"cached": prices.get("prompt", 0)} | prices))
