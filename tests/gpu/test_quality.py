"""Perplexity and greedy choices are the oracle's; quantising costs what it costs, and int8 nearly nothing."""

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from gpu.quality import HELD_TEXT, MAX_TOKENS, Predictions, held_tokens, predict
from tests.gpu.conftest import ENGINE, open_runner
from tests.oracle import Oracle

TOKENS = torch.randint(0, 300, (150,), generator=torch.Generator().manual_seed(0)).tolist()


def test_predictions_are_the_oracles(model_directory: Callable[[str], Path]) -> None:
    directory = model_directory("llama2")
    logits = Oracle(directory).logits(TOKENS)[:-1]
    made = predict(open_runner(directory), TOKENS)
    want = torch.nn.functional.cross_entropy(logits, torch.tensor(TOKENS[1:]))
    assert made.choices.tolist() == logits.argmax(-1).tolist()
    assert made.perplexity == pytest.approx(math.exp(float(want)), rel=1e-4)


@pytest.mark.parametrize("num_tokens", [2, 32, 33, 34])
def test_every_token_but_the_first_is_predicted(num_tokens: int, model_directory: Callable[[str], Path]) -> None:
    runner = open_runner(model_directory("llama2"))
    made = predict(runner, TOKENS[:num_tokens])
    assert len(made.choices) == len(made.surprises) == num_tokens - 1


def test_int8_is_nearer_to_the_model_than_int4(model_directory: Callable[[str], Path]) -> None:
    directory = model_directory("llama2")
    plain = predict(open_runner(directory), TOKENS)
    int8, int4 = (
        predict(open_runner(directory, dataclasses.replace(ENGINE, quantize=scheme)), TOKENS)
        for scheme in ("int8", "int4")
    )
    assert plain.agreement(plain) == 1
    assert int8.agreement(plain) > 0.95
    assert int8.agreement(plain) > int4.agreement(plain)
    assert abs(math.log(int8.perplexity / plain.perplexity)) < 0.02


def test_a_text_of_even_odds_has_as_much_perplexity_as_choices() -> None:
    made = Predictions(torch.full((5,), math.log(7)), torch.zeros(5))
    assert made.perplexity == pytest.approx(7)


def test_the_text_is_cut_to_the_context_and_to_what_is_quick() -> None:
    assert held_tokens(range(100), 50) == list(range(49))
    assert len(held_tokens(range(10_000), 100_000)) == MAX_TOKENS


def test_the_held_text_is_ascii_of_a_few_kilobytes() -> None:
    assert 3000 < len(HELD_TEXT.read_bytes().decode("ascii")) < 6000
