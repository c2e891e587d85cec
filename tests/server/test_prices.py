"""[prices] of the TOML file: what is read, what is refused, and what a request costs by it."""

from pathlib import Path
from typing import Any

import pytest

from core.errors import StartupError
from core.types import Usage
from server.config_sources import load_config
from server.ledger.usage import ModelPrice, Prices, parse_prices

PATH = Path("steploop.toml")


def test_prices_are_read_from_the_file_exactly(tmp_path: Path) -> None:
    path = tmp_path / "steploop.toml"
    path.write_text('port = 0\n[prices."org/m"]\nprompt = 0.07\ncompletion = 3\n[prices."*"]\ncached = 0.1\n')
    prices = load_config({"config_file": str(path)}, {}).prices
    assert dict(prices.by_model) == {
        "org/m": ModelPrice(prompt=70_000, cached=70_000, completion=3_000_000),
        "*": ModelPrice(cached=100_000),
    }


def test_cost_counts_cached_tokens_at_their_own_price() -> None:
    price = ModelPrice(prompt=2_000_000, cached=500_000, completion=10_000_000)
    assert price.cost_micro(Usage(100, 7, 40)) == 60 * 2 + 20 + 70


@pytest.mark.parametrize(("num_tokens", "cost"), [(0, 0), (4, 0), (5, 1), (14, 1), (15, 2)])
def test_cost_is_rounded_to_whole_micros_once(num_tokens: int, cost: int) -> None:
    assert ModelPrice(completion=100_000).cost_micro(Usage(0, num_tokens)) == cost


def test_model_without_a_price_takes_the_common_one_or_none() -> None:
    prices = Prices((("m", ModelPrice(completion=1_000_000)), ("*", ModelPrice(completion=5_000_000))))
    assert prices.cost_micro("m", Usage(0, 2)) == 2
    assert prices.cost_micro("other", Usage(0, 2)) == 10
    assert Prices().cost_micro("m", Usage(10, 10)) == 0


@pytest.mark.parametrize(
    ("table", "words"),
    [
        (3, ["prices in steploop.toml", "not a table"]),
        ({"prompt": 0.1}, ["[prices.'prompt']", "not a table"]),
        ({"m": {"promt": 0.1}}, ["'promt'", "prompt"]),
        ({"m": {"prompt": -1}}, ["prompt", "-1"]),
        ({"m": {"prompt": "0.1"}}, ["prompt", "number"]),
        ({"m": {"prompt": True}}, ["True"]),
        ({"m": {"prompt": float("nan")}}, ["nan"]),
        ({"m": {"prompt": float("inf")}}, ["inf"]),
    ],
)
def test_what_is_no_price_is_named(table: Any, words: list[str]) -> None:
    with pytest.raises(StartupError) as raised:
        parse_prices(table, PATH)
    told = f"{raised.value.cause} {raised.value.fix}"
    assert all(word in told for word in words), told
