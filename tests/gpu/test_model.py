"""The whole runner against transformers, for every family: however a sequence is computed, it says the same."""

import functools
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from core.config import ExpertsConfig, RopeConfig
from core.plan import make_plan
from gpu.layers import Rope, apply_rope, rope_frequencies, shares_of, sigmoid
from gpu.operators import Operators
from gpu.runner import ModelRunner
from tests.gpu.conftest import ENGINE, open_runner
from tests.gpu.driver import Driver
from tests.oracle import KINDS, Oracle

NUM_TOKENS, NUM_FIRST = 32, 8


def make_prompt(seed: int, num_tokens: int) -> list[int]:
    return random.Random(seed).choices(range(3, 300), k=num_tokens)


@pytest.fixture(scope="session")
def expected_of(oracle_of: Callable[[str], Oracle]) -> Callable[[str, int, int, list[int]], list[int]]:
    """(family, seed, prompt tokens, what was said) -> NUM_TOKENS greedy tokens, each computed once."""
    known: dict[tuple[str, int, int], list[int]] = {}

    def greedy(family: str, seed: int, num_tokens: int, said: list[int]) -> list[int]:
        key = family, seed, num_tokens
        if key not in known:
            known[key] = oracle_of(family).greedy(make_prompt(seed, num_tokens), NUM_TOKENS, said)
        return known[key]

    return greedy


@pytest.fixture
def expected(family: str, expected_of: Callable[[str, int, int, list[int]], list[int]]) -> object:
    return functools.partial(expected_of, family)


def test_logits_agree_with_the_oracle(runner: ModelRunner, oracle: Oracle) -> None:
    """At every position: each token is its own chunk's last one."""
    prompt = make_prompt(1, 48)  # beyond every window
    want = oracle.logits(prompt)
    tables = [(0, index, index) for index in range(3)]
    whole = runner.forward(make_plan([(0, 0, prompt, True)], tables=tables)).sent.logits
    got = [runner.forward(make_plan([(0, i, [t], True)])).sent.logits for i, t in enumerate(prompt)]
    for logits, reference in ((torch.cat(got), want), (whole, want[-1:])):
        assert (logits - reference).abs().max() <= 1e-4 * reference.abs().max()


def test_greedy_tokens_equal_the_oracles_plain(runner: ModelRunner, expected) -> None:
    driver = Driver(runner)
    for seed, length in ((1, 70), (2, 1)):
        (said,) = driver.generate(NUM_TOKENS, driver.add(make_prompt(seed, length)))
        assert said == expected(seed, length, said)


def test_greedy_tokens_equal_the_oracles_in_random_chunks(runner: ModelRunner, expected) -> None:
    driver, rng = Driver(runner), random.Random(0)
    sequence = driver.add(make_prompt(1, 70))
    while not sequence.output_ids:
        driver.step({sequence.slot: rng.choice((1, 2, 5, 16, 17, 33))}, sequence)
    (said,) = driver.generate(NUM_FIRST, sequence)
    assert said == expected(1, 70, said)[:NUM_FIRST]


def test_greedy_tokens_equal_the_oracles_in_any_company(runner: ModelRunner, expected) -> None:
    """Sequences join at different steps, in random chunks; two leave, and a late one that gets their blocks and slots
    is preempted."""
    driver, rng = Driver(runner), random.Random(5)
    shapes = [(1, 70), (2, 1), (3, 16)]
    stays = [driver.add(make_prompt(*shape)) for shape in shapes]
    leaves = [driver.add(make_prompt(9, 50)), driver.add(make_prompt(8, 20))]
    for step in range(24):
        joined = [*stays, *leaves][: 1 + step // 4]
        rng.shuffle(joined)
        driver.step({sequence.slot: rng.choice((1, 7, 20)) for sequence in joined}, *joined)
    for sequence in leaves:
        driver.remove(sequence)
    late = driver.add(make_prompt(4, 33))
    for _ in range(5):
        driver.step(None, late, *stays)
    driver.preempt(late)
    said = driver.generate(NUM_TOKENS, late, *stays)
    assert said == [expected(*shape, one) for shape, one in zip([(4, 33), *shapes], said, strict=True)]


@pytest.mark.parametrize("family", KINDS, scope="session")
def test_a_guess_changes_nothing_that_the_oracle_says(oracle: Oracle) -> None:
    plain = oracle.greedy(prompt := make_prompt(1, 40), 12)
    for guess in (plain, [*plain[:5], plain[5] ^ 1, *plain[6:]], plain[:3]):
        assert oracle.greedy(prompt, 12, guess) == plain


@pytest.mark.parametrize("num_experts", [6, 8, 20])
def test_experts_are_chosen_in_the_same_way_in_any_company(num_experts: int) -> None:
    config = ExpertsConfig(num_experts, 3, 8, "deepseek_v3", scoring="sigmoid", num_groups=2, num_active_groups=1)
    scores = torch.randn(9, num_experts, generator=torch.Generator().manual_seed(0))
    together = shares_of(scores, config)
    for token in range(9):
        alone = shares_of(scores[token : token + 1], config)
        assert all(torch.equal(one[0], all_[token]) for one, all_ in zip(alone, together, strict=True))
    assert torch.allclose(sigmoid(scores), scores.sigmoid(), atol=1e-7)


def test_longropes_long_factors_serve_the_longer_context(model_directory: Callable[[str], Path]) -> None:
    """Transformers takes them for sequences beyond the original context of 160 tokens."""
    directory, prompt = model_directory("phi4_longrope"), make_prompt(3, 170)
    driver = Driver(open_runner(directory, replace(ENGINE, max_model_len=512)))
    assert driver.generate(8, driver.add(prompt)) == [Oracle(directory).greedy(prompt, 8)]


def test_rope_turns_a_pair_by_position_times_frequency() -> None:
    x = torch.tensor([[[1.0, 0.0, 0.0, 2.0]]])  # [1, 1, 4]
    rope = Rope(RopeConfig(theta=25.0), 4, torch.device("cpu"))  # 1 and 0.2 radians per token
    rotation = rope.rotation(torch.tensor([3.0]))
    angles = torch.tensor([3.0, 0.6])
    want = torch.stack([angles[0].cos(), angles[0].sin(), -2 * angles[1].sin(), 2 * angles[1].cos()])
    assert torch.allclose(apply_rope(x, rotation).flatten(), want)


def test_llama3_rope_keeps_high_frequencies_and_divides_low_ones() -> None:
    plain = rope_frequencies(RopeConfig(theta=10_000.0), 64)
    scaled = rope_frequencies(RopeConfig(10_000.0, "llama3", 8.0, 1.0, 4.0, original_max_position=512), 64)
    assert scaled[0] == plain[0]
    assert scaled[-1] == plain[-1] / 8
    assert ((plain / 8 <= scaled) & (scaled <= plain)).all()


def test_bfloat16_norm_is_computed_in_float32() -> None:
    """Squares of these overflow nothing, but their sum in bfloat16 would stop growing at 256."""
    operators = Operators(torch.bfloat16, torch.device("cpu"), 1e-6)
    x = torch.ones(1, 4096, dtype=torch.bfloat16)
    assert (operators.norm(x, torch.ones(4096, dtype=torch.bfloat16)) - 1).abs().max() < 0.01
