from collections.abc import Callable

import pytest

from core.kv_cache import BlockPool, BlockTable, num_blocks_for
from core.types import Cancel, FinishReason, Message, Submit, Usage
from tests.call_counter import CallCounter, InstructionCounter
from tests.core.kv_oracle import ask, checked_engine, usage
from tests.fakes import EngineUnderTest, FakeClock, FaultyRunner, make_request, small_limits

pytestmark = pytest.mark.usefixtures("steps_in_flight")

GUILTY = 999
PROMPT = tuple(range(100, 122))  # 22 tokens: 5 blocks and a half


def make_engine(**limits: int) -> EngineUnderTest:
    return checked_engine(small_limits(**limits))


def run(under_test: EngineUnderTest, *messages: Message) -> None:
    under_test.send(*messages)
    under_test.run()


def num_computed(under_test: EngineUnderTest) -> int:
    """Tokens of prompts, those of preempted requests more than once."""
    return under_test.scheduler.stats().num_prompt_tokens


def test_second_request_computes_only_what_the_first_has_not() -> None:
    under_test = make_engine()
    run(under_test, ask("a", PROMPT))
    run(under_test, ask("b", (*PROMPT[:10], 7, 7, 7, 7)))
    assert usage(under_test, "a") == Usage(22, 5, 0)
    assert usage(under_test, "b") == Usage(14, 5, 8)
    stats = under_test.scheduler.stats()
    assert (stats.num_prompt_tokens, stats.num_cache_queries, stats.num_cache_hits) == (22 + 6, 22 + 14, 8)


def test_hit_never_covers_the_last_token_of_the_prompt() -> None:
    under_test = make_engine()
    run(under_test, ask("a", PROMPT[:8]))
    run(under_test, ask("b", PROMPT[:8]))
    assert usage(under_test, "b").num_cached_tokens == 4


def test_next_turn_of_a_chat_finds_the_answer_too() -> None:
    under_test = make_engine()
    run(under_test, ask("a", PROMPT, max_tokens=11))
    answered = (*PROMPT, *under_test.log.tokens("a"))
    run(under_test, ask("b", (*answered, 7, 8, 9)))
    assert usage(under_test, "b").num_cached_tokens == 32  # of 33: the last token drawn was never computed


def test_same_prompt_at_the_same_moment_is_computed_once() -> None:
    under_test = make_engine(max_batch_tokens=64)
    run(under_test, *(ask(name, PROMPT) for name in "abcd"))
    assert num_computed(under_test) == 22 + 3 * 2
    assert [usage(under_test, name).num_cached_tokens for name in "abcd"] == [0, 20, 20, 20]


def test_prompt_that_runs_behind_another_takes_over_what_that_one_computes() -> None:
    """Whoever was admitted first computes; the other goes on where it is, chunk for chunk."""
    under_test = make_engine(max_batch_tokens=7)
    long = tuple(range(200, 260))
    under_test.send(ask("a", long))
    under_test.step(2)
    run(under_test, ask("b", long))
    assert num_computed(under_test) <= 60 + 4
    assert under_test.log.tokens("b") == under_test.log.tokens("a")


def test_preempted_request_finds_its_own_blocks_again() -> None:
    under_test = make_engine(num_blocks=12, max_batch_tokens=64)
    run(under_test, ask("old", tuple(range(20)), max_tokens=20), ask("new", PROMPT, max_tokens=4, arrival_s=1.0))
    stats = under_test.scheduler.stats()
    assert stats.num_preemptions > 0
    assert usage(under_test, "new") == Usage(22, 4, 0)  # its own tokens are not an earlier request's
    assert under_test.log.tokens("new") == under_test.reference(ask("new", PROMPT, max_tokens=4).request)
    assert num_computed(under_test) < 20 + 2 * 22


def test_blocks_are_reused_from_the_least_recently_used_leaf_on() -> None:
    under_test = make_engine(num_blocks=10, max_batch_tokens=64)
    run(under_test, ask("a", tuple(range(16)), max_tokens=1))
    run(under_test, ask("b", tuple(range(50, 66)), max_tokens=1))
    assert under_test.scheduler.stats().num_cached_blocks == 8
    run(under_test, ask("c", tuple(range(80, 91)), max_tokens=1))  # 3 blocks: 2 were empty
    assert under_test.scheduler.stats().num_cache_evictions == 1
    run(under_test, ask("again", tuple(range(16)), max_tokens=1))
    assert usage(under_test, "again").num_cached_tokens == 12


@pytest.mark.parametrize("is_raised", [True, False])
def test_whoever_shares_a_block_in_flight_computes_it_when_its_writer_fails(is_raised: bool) -> None:
    limits = small_limits(max_batch_tokens=64)
    raises_at: dict[int, Exception] = {GUILTY: ValueError("shape")} if is_raised else {}
    runner = FaultyRunner(limits, FakeClock(), raises_at, frozenset() if is_raised else frozenset({GUILTY}))
    under_test = EngineUnderTest(limits, runner=runner)
    sharers = [make_request(name, prompt_ids=(*PROMPT[:8], i), arrival_s=i) for i, name in enumerate("bcd", 1)]
    run(under_test, ask("a", (*PROMPT[:8], GUILTY)), *map(Submit, sharers))
    assert under_test.log.finish_reason("a") is FinishReason.ERROR
    for sharer in sharers:
        assert under_test.log.tokens(sharer.request_id) == under_test.reference(sharer)
    assert [usage(under_test, name).num_cached_tokens for name in "abcd"] == [0, 0, 8, 8]
    assert under_test.scheduler.pool.num_used == 0


def test_cancelled_sharer_of_a_failed_writer_ends_as_cancelled() -> None:
    limits = small_limits(max_batch_tokens=64)
    under_test = EngineUnderTest(limits)
    scheduler, runner = under_test.scheduler, under_test.runner
    scheduler.submit(ask("a", PROMPT).request)
    scheduler.submit(ask("b", PROMPT).request)
    made = scheduler.plan(0.0)
    assert made is not None
    runner.sample(runner.forward(made))
    output = runner.collect(made)
    output.failed_rows[0] = "lost"
    scheduler.cancel("b", FinishReason.CANCELLED)
    delivery = scheduler.apply(made, output, 0.0)
    assert {chunk.request_id: chunk.finish_reason for chunk in delivery.chunks} == {
        "a": FinishReason.ERROR,
        "b": FinishReason.CANCELLED,
    }
    assert scheduler.pool.num_used == 0


def test_failed_row_leaves_nothing_to_be_found_of_its_earlier_chunks_either() -> None:
    limits = small_limits(max_batch_tokens=8)
    runner = FaultyRunner(limits, FakeClock(), fails_at=frozenset({GUILTY}))
    under_test = EngineUnderTest(limits, runner=runner)
    run(under_test, ask("a", (*PROMPT, GUILTY)))
    assert under_test.scheduler.stats().num_cached_blocks == 0
    run(under_test, ask("b", PROMPT))
    assert usage(under_test, "b").num_cached_tokens == 0


def test_cancelled_prefill_leaves_its_computed_blocks(steps_in_flight: int) -> None:
    under_test = make_engine(max_batch_tokens=8)
    under_test.send(ask("a", PROMPT))
    under_test.step(2)
    run(under_test, Cancel("a", FinishReason.CANCELLED))
    run(under_test, ask("b", PROMPT))
    assert usage(under_test, "b").num_cached_tokens == (16 if steps_in_flight == 1 else 20)


def test_siblings_count_their_prompt_once() -> None:
    under_test = make_engine(max_batch_tokens=64)
    run(under_test, ask("a", PROMPT))
    run(under_test, ask("b", PROMPT, num_sequences=3))
    assert usage(under_test, "b") == Usage(22, 15, 20)


def test_disabled_cache_finds_and_counts_nothing() -> None:
    limits = small_limits()
    under_test = EngineUnderTest(limits, has_prefix_cache=False)
    run(under_test, ask("a", PROMPT))
    run(under_test, ask("b", PROMPT))
    stats = under_test.scheduler.stats()
    assert usage(under_test, "b") == Usage(22, 5, 0)
    assert (stats.num_cache_queries, stats.num_cache_hits, stats.num_cached_blocks) == (0, 0, 0)


def test_queue_head_that_needs_blocks_is_looked_up_once() -> None:
    under_test = make_engine(num_blocks=12, max_batch_tokens=64)
    run(under_test, ask("a", PROMPT))
    under_test.send(ask("long", tuple(range(30)), max_tokens=9), ask("waits", PROMPT, arrival_s=1.0))
    under_test.step()
    waiting, _ = under_test.scheduler.states.waiting.head(under_test.clock()) or pytest.fail("nobody waits")
    assert waiting.num_free_blocks_needed > under_test.scheduler.pool.num_free
    with CallCounter(lambda path: path.endswith("/kv_cache.py")) as counter:
        under_test.step()
    assert counter.calls["BlockPool.extend"] == 0 < counter.calls.total()
    under_test.run()
    assert under_test.log.finish_reason("waits") is FinishReason.LENGTH


# The blocks alone


def make_pool(num_blocks: int) -> BlockPool:
    return BlockPool(num_blocks, block_size=2)


def test_least_recently_freed_block_is_reused_first() -> None:
    pool = make_pool(4)
    first, second = pool.allocate(2), pool.allocate(2)
    pool.release(second)
    pool.release(first)
    assert pool.allocate(4) == [second[1], second[0], first[1], first[0]]


def test_fresh_blocks_are_taken_before_freed_ones() -> None:
    pool = make_pool(3)
    (used,) = pool.allocate(1)
    pool.release([used])
    assert pool.allocate(2) == [1, 2]


def kept_pool(num_blocks: int) -> tuple[BlockPool, list[int]]:
    """All of its blocks were held, published, and let go of."""
    pool = make_pool(num_blocks)
    table = BlockTable(blocks=pool.allocate(num_blocks))
    assert pool.publish(table, range(2 * num_blocks), 2 * num_blocks)
    blocks = table.take()
    pool.release(blocks)
    return pool, blocks


def test_empty_blocks_are_taken_before_kept_ones_and_of_those_the_tail_first() -> None:
    pool, blocks = kept_pool(3)
    pool.forget(blocks[:1])
    assert (pool.num_free, pool.num_kept) == (3, 2)
    assert pool.allocate(3) == [blocks[0], blocks[2], blocks[1]]
    assert (pool.num_evictions, pool.num_published) == (2, 0)


def test_kept_block_can_be_held_again_and_is_then_the_last_to_go() -> None:
    pool, (first, second) = kept_pool(2)
    pool.share([second])
    assert (pool.num_used, pool.num_kept) == (1, 1)
    pool.release([second])
    assert pool.allocate(1) == [first]


def test_forgetting_a_held_block_takes_it_from_nobody() -> None:
    pool, blocks = kept_pool(1)
    pool.share(blocks)
    pool.forget(blocks)
    assert pool.num_used == 1
    pool.release(blocks)
    assert pool.num_kept == 0


@pytest.mark.parametrize(("num_tokens", "expected"), [(0, 0), (1, 1), (16, 1), (17, 2)])
def test_blocks_for_tokens_round_up(num_tokens: int, expected: int) -> None:
    assert num_blocks_for(num_tokens, 16) == expected


# Cost


def instructions(work: Callable[[], object]) -> int:
    """Of core, that `work` takes."""
    with InstructionCounter(lambda path: "/core/" in path) as counter:
        work()
    return counter.num_instructions


def filled_cache(num_blocks: int) -> BlockPool:
    """All blocks of it published, nobody holding them."""
    pool = make_pool(num_blocks)
    for first in range(0, num_blocks, 4):
        table = BlockTable(blocks=pool.allocate(4))
        pool.publish(table, [first] * 8, 8)
        pool.release(table.take())
    return pool


def test_hit_publication_release_and_eviction_cost_the_same_in_a_large_cache() -> None:
    def use(pool: BlockPool) -> None:
        table = BlockTable()
        assert pool.extend(table, [4] * 9) == 8
        table.blocks += pool.allocate(4)
        pool.publish(table, [4] * 16, 16)
        pool.release(table.take())

    small, large = filled_cache(40), filled_cache(4000)
    assert instructions(lambda: use(small)) == instructions(lambda: use(large))
    assert small.num_evictions == large.num_evictions == 4


def test_long_prompt_costs_instructions_by_block_not_by_token() -> None:
    def lookup(block_size: int) -> int:
        pool = BlockPool(8, block_size)
        ids = list(range(4 * block_size + 1))
        table = BlockTable(blocks=pool.allocate(4))
        pool.publish(table, ids, 4 * block_size)
        pool.release(table.take())
        found = BlockTable()
        num_instructions = instructions(lambda: pool.extend(found, ids))
        assert len(found) == 4
        return num_instructions

    assert lookup(2) == lookup(256)
