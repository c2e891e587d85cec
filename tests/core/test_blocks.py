import pytest

from core.kv_cache import BlockPool, OutOfBlocks, num_blocks_for


def test_least_recently_freed_block_is_reused_first() -> None:
    pool = BlockPool(4)
    first, second = pool.allocate(2), pool.allocate(2)
    pool.release(second)
    pool.release(first)
    assert pool.allocate(4) == [second[1], second[0], first[1], first[0]]


def test_fresh_blocks_are_taken_before_freed_ones() -> None:
    pool = BlockPool(3)
    (used,) = pool.allocate(1)
    pool.release([used])
    assert pool.allocate(2) == [1, 2]


def test_shared_block_stays_used_until_its_last_holder_lets_go() -> None:
    pool = BlockPool(2)
    blocks = pool.allocate(1)
    pool.share(blocks)
    assert pool.is_shared(blocks[0])
    pool.release(blocks)
    assert (pool.num_used, pool.is_shared(blocks[0])) == (1, False)
    pool.release(blocks)
    assert (pool.num_used, pool.num_free) == (0, 2)


def test_asking_for_too_many_takes_none() -> None:
    pool = BlockPool(3)
    pool.allocate(1)
    with pytest.raises(OutOfBlocks) as caught:
        pool.allocate(3)
    assert (caught.value.num_asked, caught.value.num_free) == (3, 2)
    assert pool.num_free == 2


def test_double_release_is_our_bug() -> None:
    pool = BlockPool(1)
    blocks = pool.allocate(1)
    pool.release(blocks)
    with pytest.raises(AssertionError, match="released twice"):
        pool.release(blocks)


def test_sharing_a_free_block_is_our_bug() -> None:
    with pytest.raises(AssertionError, match="is empty"):
        BlockPool(1).share([0])


def test_taking_for_a_shared_block_leaves_it_to_its_other_holder() -> None:
    pool = BlockPool(2)
    (shared,) = pool.allocate(1)
    pool.share([shared])
    taken = pool.take_for_shared(shared)
    assert taken != shared
    assert (pool.num_used, pool.is_shared(shared), pool.is_shared(taken)) == (2, False, False)


def test_taking_for_a_block_that_nobody_shares_is_our_bug() -> None:
    pool = BlockPool(2)
    (block,) = pool.allocate(1)
    with pytest.raises(AssertionError, match="no other holder"):
        pool.take_for_shared(block)
    assert pool.num_used == 1


def test_taking_for_a_shared_block_when_none_is_free_changes_nothing() -> None:
    pool = BlockPool(1)
    (shared,) = pool.allocate(1)
    pool.share([shared])
    with pytest.raises(OutOfBlocks):
        pool.take_for_shared(shared)
    assert pool.is_shared(shared)


def kept_pool(num_blocks: int) -> tuple[BlockPool, list[int], list[int]]:
    """All of its blocks were held, worth keeping, and let go of; and where evictions are told."""
    evicted: list[int] = []
    pool = BlockPool(num_blocks, evicted.append)
    blocks = pool.allocate(num_blocks)
    for block in blocks:
        pool.keep(block)
    pool.release(blocks)
    return pool, blocks, evicted


def test_empty_blocks_are_taken_before_kept_ones_and_of_those_the_tail_first() -> None:
    pool, blocks, evicted = kept_pool(3)
    pool.discard(blocks[0])
    assert (pool.num_free, pool.num_kept) == (3, 2)
    assert pool.allocate(3) == [blocks[0], blocks[2], blocks[1]]
    assert evicted == [blocks[2], blocks[1]]
    assert pool.num_evictions == 2


def test_kept_block_can_be_held_again_and_is_then_the_last_to_go() -> None:
    pool, (first, second), evicted = kept_pool(2)
    pool.share([second])
    assert (pool.num_used, pool.num_kept) == (1, 1)
    pool.release([second])
    pool.allocate(1)
    assert evicted == [first]


def test_evicted_block_is_worth_nothing_until_it_is_kept_anew() -> None:
    pool, _, _ = kept_pool(1)
    pool.release(pool.allocate(1))
    assert (pool.num_free, pool.num_kept) == (1, 0)


def test_discarding_a_held_block_takes_it_from_nobody() -> None:
    pool, blocks, _ = kept_pool(1)
    pool.share(blocks)
    pool.discard(blocks[0])
    assert pool.num_used == 1
    pool.release(blocks)
    assert pool.num_kept == 0


@pytest.mark.parametrize(("num_tokens", "expected"), [(0, 0), (1, 1), (16, 1), (17, 2)])
def test_blocks_for_tokens_round_up(num_tokens: int, expected: int) -> None:
    assert num_blocks_for(num_tokens, 16) == expected
