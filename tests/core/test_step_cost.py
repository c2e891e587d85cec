import math
import random

import pytest

from core.step_cost import (
    LEAST_STEPS,
    LEAST_TOKENS,
    NOMINAL_S,
    PROMPT_TILE,
    SOLVE_EVERY,
    Features,
    PrefillAllowance,
    StepCostModel,
    StepWork,
    allow_prefill,
)
from tests.call_counter import CallCounter

TRUE_S: Features = (0.02, 7e-4, 2e-6, 1e-4, 1.5e-6)  # fixed, each token, its KV; beside that an own one, its KV


def seconds_of(work: StepWork, few_tokens: int = 0) -> float:
    num_beyond = max(0, work.prompt_tokens + work.own_tokens - few_tokens)
    features = 1.0, num_beyond, work.prompt_kv, work.own_tokens, work.own_kv
    return sum(a * b for a, b in zip(TRUE_S, features, strict=True))


def random_step(rng: random.Random) -> StepWork:
    """Some decodes, in every third step beside a chunk of a prompt."""
    work = StepWork()
    for _ in range(rng.choice((1, 4, 8, 8))):
        position = rng.randint(100, 4000)
        work.add(position, position + 1, 50)
    if rng.random() < 0.3:
        start = 64 * rng.randint(0, 60)
        work.add(start, start + rng.choice((16, 64, 500)), 5000)
    return work


def trained(num_steps: int, disturbed: float = 0.0, noise: float = 0.0, tile: int = PROMPT_TILE) -> StepCostModel:
    """A model that has seen steps of the true costs; a share of them was held up, 2 to 10 times as long."""
    rng, model = random.Random(1), StepCostModel(tile)
    for _ in range(num_steps):
        work = random_step(rng)
        held_up = rng.uniform(2, 10) if rng.random() < disturbed else 1.0
        model.observe(work, seconds_of(work) * rng.gauss(1, noise) * held_up)
    return model


def worst_error(model: StepCostModel) -> float:
    rng = random.Random(2)
    works = [random_step(rng) for _ in range(50)]
    return max(abs(model.predict(work) / seconds_of(work) - 1) for work in works)


def test_work_parts_a_row_at_the_end_of_its_prompt() -> None:
    work = StepWork()
    work.add(start=60, end=72, num_prompt_tokens=70)
    assert (work.prompt_tokens, work.prompt_kv) == (10, 64 + 128)  # of the tiles that end at 64 and at 128
    assert (work.own_tokens, work.own_kv) == (2, 71 + 72)


def test_where_only_new_tokens_are_computed_each_counts_for_itself_however_a_prompt_is_cut() -> None:
    whole, cut = StepWork(tile=1), StepWork(tile=1)
    whole.add(0, 256, 256)
    for start, end in ((0, 80), (80, 83), (83, 256)):
        cut.add(start, end, 256)
    assert cut == whole
    assert whole.prompt_kv == sum(range(1, 257)) / PROMPT_TILE


def test_chunks_that_end_with_tiles_read_no_context_twice() -> None:
    whole, aligned, crooked = StepWork(), StepWork(), StepWork()
    whole.add(0, 256, 256)
    for start, end in ((0, 64), (64, 192), (192, 256)):
        aligned.add(start, end, 256)
    for start, end in ((0, 80), (80, 256)):
        crooked.add(start, end, 256)
    assert aligned == whole
    assert crooked.prompt_kv > whole.prompt_kv


def test_model_finds_the_cost_of_exact_steps() -> None:
    assert worst_error(trained(2000)) < 0.02


def test_disturbed_and_noisy_steps_hardly_move_it() -> None:
    model = trained(2000, disturbed=0.05, noise=0.04)
    assert worst_error(model) < 0.1
    assert model.error_p50 < 0.05
    assert 0.05 < model.error_p90 < 0.15


def test_first_step_that_took_ages_is_forgotten() -> None:
    model = StepCostModel()
    model.observe(random_step(random.Random(0)), 30.0)
    rng = random.Random(1)
    for _ in range(100):
        work = random_step(rng)
        model.observe(work, seconds_of(work))
    assert worst_error(model) < 0.15


def test_machine_that_becomes_slower_is_followed() -> None:
    rng, model = random.Random(3), trained(500)
    for _ in range(1500):
        work = random_step(rng)
        model.observe(work, 2 * seconds_of(work))
    assert worst_error(model) == pytest.approx(1.0, abs=0.2)  # twice the true cost


def test_coefficients_are_never_negative() -> None:
    rng, model = random.Random(4), StepCostModel()
    for _ in range(300):
        model.observe(random_step(rng), rng.uniform(0.001, 0.1))
        assert min(model.fit) >= 0


def test_steps_without_prompts_do_not_make_it_forget_prompts() -> None:
    model = trained(500)
    for _ in range(5000):
        decode = StepWork(own_tokens=8, own_kv=8000)
        model.observe(decode, seconds_of(decode))
    chunk = StepWork(own_tokens=8, own_kv=8000)
    chunk.add(1024, 1536, 4096)
    assert model.predict(chunk) == pytest.approx(seconds_of(chunk), rel=0.05)


def test_batch_that_grows_beyond_the_few_is_predicted_before_it_was_measured() -> None:
    rng, model = random.Random(6), StepCostModel(few_tokens=8)
    for number in range(200):
        work = StepWork(own_tokens=rng.choice((1, 4)), own_kv=rng.randint(100, 8000))
        if number % 3 == 0:
            work = StepWork(prompt_tokens=512, prompt_kv=rng.randint(2000, 60_000))
        model.observe(work, seconds_of(work, few_tokens=8))
    for num_own in (1, 8, 9, 16, 64):
        work = StepWork(own_tokens=num_own, own_kv=500 * num_own)
        assert model.predict(work) == pytest.approx(seconds_of(work, few_tokens=8), rel=0.03)


@pytest.mark.parametrize("num_own", [4, 8, 16, 64])
def test_own_token_is_charged_its_part_of_those_beyond_the_few(num_own: int) -> None:
    model, works = StepCostModel(few_tokens=8), [StepWork(own_tokens=num_own, own_kv=500 * num_own)] * 2
    works[1:] = [StepWork(512, 3000.0, num_own, 500 * num_own)]
    for work in works * 100:
        model.observe(work, seconds_of(work, few_tokens=8))
    fixed_s, _, _, own_s, own_kv_s = model.coefficients_s
    together_s = fixed_s + num_own * own_s + works[0].own_kv * own_kv_s
    assert together_s == pytest.approx(seconds_of(works[0], few_tokens=8), rel=0.02)


def test_predictions_are_used_once_both_kinds_of_step_were_seen() -> None:
    model = StepCostModel()
    for _ in range(100):
        model.observe(StepWork(own_tokens=1, own_kv=10), 0.1)
    model.observe(StepWork(own_tokens=1, own_kv=10), 0.0)  # no clock
    assert not model.is_ready
    assert model.coefficients_s == NOMINAL_S
    for _ in range(8):
        model.observe(StepWork(prompt_tokens=100, prompt_kv=192), 0.2)
    assert model.is_ready
    assert model.coefficients_s != NOMINAL_S


def test_each_of_the_first_steps_counts_at_once_and_later_ones_many_at_a_time() -> None:
    rng, model, solved = random.Random(5), StepCostModel(), list[int]()
    for number in range(1, 1001):
        work = random_step(rng)
        with CallCounter(lambda path: path.endswith("/step_cost.py")) as counter:
            model.observe(work, seconds_of(work))
        if counter.calls["_descend"]:
            solved.append(number)
    assert solved[:LEAST_STEPS] == list(range(1, LEAST_STEPS + 1))
    assert len([number for number in solved if number > 300]) <= 700 / SOLVE_EVERY + 2


def test_step_that_was_far_off_counts_at_once_however_many_were_seen() -> None:
    model, work = trained(1000), StepWork(own_tokens=30, own_kv=30_000)
    for share, num_solved in ((1.0, 0), (0.8, 1), (1.3, 1), (1.0, 0)):
        with CallCounter(lambda path: path.endswith("/step_cost.py")) as counter:
            model.observe(work, share * seconds_of(work))
        assert counter.calls["_descend"] == num_solved


# The allowance


TRAINED, ONLY_NEW = trained(2000), trained(2000, tile=1)  # ONLY_NEW: kernels that compute no more than what is new


@pytest.mark.parametrize(
    ("seconds", "asked", "granted"),  # of (start, end, tokens that the budget has)
    [
        pytest.param(math.inf, [(0, 4096, 504)], [448], id="without a target: all of the budget, to a tile's end"),
        pytest.param(math.inf, [(448, 500, 504)], [52], id="the prompt's end"),
        pytest.param(math.inf, [(0, 100, 50), (0, 100, 7)], [48, 7], id="far from a tile's end: a block's"),
        *((s, [(0, 4096, 512)], [n]) for s, n in ((0.06, 64), (0.075, 96), (0.3, 384), (0.013, 16), (0.035, 48))),
        pytest.param(0.0, [(32, 4096, 512), (0, 10, 496)], [16, 0], id="the first has a block at least"),
        pytest.param(0.0, [(37, 4096, 512)], [11], id="a block that was begun is ended first"),
        pytest.param(0.018, [(0, 2000, 512)], [25], id="no block where that would lose more than a quarter"),
        pytest.param(0.1, [(0, 20, 512), (0, 70, 512), (0, 4096, 512)], [20, 70, 48], id="prompts share a step"),
        pytest.param(0.043, [(0, 2000, 512)] * 3, [48, 13, 0], id="what blocks leave goes to the next prompt"),
        pytest.param(0.036, [(0, 2000, 512)] * 2, [48, 0], id="few tokens of a block are left to another step"),
    ],
)
def test_chunks_are_as_long_as_the_seconds_allow(
    seconds: float, asked: list[tuple[int, int, int]], granted: list[int]
) -> None:
    allowance = PrefillAllowance(TRAINED, seconds)
    assert [allowance.chunk(start, end, end, budget) for start, end, budget in asked] == granted
    if seconds in (0.0, math.inf):
        assert allowance.is_spent is (seconds == 0.0)


@pytest.mark.parametrize(("seconds", "first"), [(0.0, LEAST_TOKENS), (0.009, 10)])
def test_first_chunk_may_be_half_a_block_where_only_new_tokens_are_computed(seconds: float, first: int) -> None:
    """On a long context a block's worth may take twice what the target leaves: of its attention, all is its own."""
    spent = PrefillAllowance(ONLY_NEW, seconds)
    assert [spent.chunk(start, end, end, max_tokens=504) for start, end in ((4032, 8192), (0, 10))] == [first, 0]


def test_tokens_that_lack_to_the_few_take_nothing_of_the_seconds() -> None:
    bound, freer = (PrefillAllowance(TRAINED, 0.018, num_few=few) for few in (0, 23))
    assert bound.chunk(0, 2000, 2000, max_tokens=512) == 25
    assert [freer.chunk(0, n, n, max_tokens=512) for n in (2000, 10)] == [48, 0]


def test_bare_decodes_are_wanted_after_each_step_with_prompts_until_enough_were_seen() -> None:
    model, decode, prompt = StepCostModel(), StepWork(own_tokens=2, own_kv=20), StepWork(prompt_tokens=9, prompt_kv=64)
    wanted = []
    for _ in range(LEAST_STEPS + 1):
        for work in (prompt, decode):
            model.observe(work, 0.1)
            wanted.append(model.wants_bare_decode)
    assert wanted == [True, False] * LEAST_STEPS + [False, False]


def test_steps_that_take_no_time_make_no_bare_decode_wanted() -> None:
    model = StepCostModel()
    model.observe(StepWork(prompt_tokens=9, prompt_kv=64), 0.0)
    assert not model.wants_bare_decode


def test_own_tokens_of_a_decode_are_bound_by_what_is_left() -> None:
    model = trained(2000)
    decodes = StepWork(own_tokens=16, own_kv=16 * 500)
    unbound = allow_prefill(model, None, decodes, 0)
    assert unbound.own_tokens(500, 17) == 17
    bound = allow_prefill(model, 1.2, decodes, 0)
    first = bound.own_tokens(500, 17)
    assert 1 < first < 17
    assert bound.own_tokens(500, 17) == 1
    assert allow_prefill(StepCostModel(), 1.2, decodes, 0).own_tokens(500, 17) == LEAST_TOKENS
