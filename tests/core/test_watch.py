"""What somebody who watches the engine is told: each step, who was preempted and why, who has which block."""

import math
from collections import Counter

import numpy as np
import pytest
from msgspec import structs

from core.kv_cache import BlockTable
from core.types import BlockMap, Pause, PreemptionCause, Submit, Watch, Watched
from core.watch import MAX_OWNERS, OWNER_BIT, STATES, block_map
from tests.core.kv_oracle import ask
from tests.fakes import EngineUnderTest, make_request, small_limits

PROMPT = tuple(range(100, 122))  # 22 tokens: 5 blocks and a half


def told(under_test: EngineUnderTest) -> list[Watched]:
    return [one.watched for one in under_test.log.deliveries if one.watched is not None]


def cells_of(found: BlockMap, cells: bytes) -> list[tuple[str, int, str]]:
    """State, prefix and owner of each."""
    numbers = np.frombuffer(cells, "<u2").tolist()
    return [(STATES[cell & (1 << OWNER_BIT) - 1], *found.owners[cell >> OWNER_BIT]) for cell in numbers]


def map_of(under_test: EngineUnderTest) -> BlockMap:
    under_test.send(Watch(-math.inf, tells_blocks=True))
    under_test.step()
    found = told(under_test)[-1].blocks
    assert found is not None
    return found


def test_nothing_is_told_unasked_nor_after_the_time() -> None:
    under_test = EngineUnderTest(small_limits())
    under_test.send(ask("a", PROMPT, max_tokens=8))
    under_test.step(3)
    assert told(under_test) == []
    under_test.send(Watch(under_test.clock() + 1e-9))
    under_test.run()
    assert told(under_test) == []
    under_test.send(ask("b", PROMPT[:9], max_tokens=8), Watch(math.inf))
    under_test.run()
    steps = [step for one in told(under_test) for step in one.steps]
    assert (sum(step.num_prompt_tokens for step in steps), sum(step.num_own_tokens for step in steps)) == (1, 7)
    assert all(step.took_s > 0 for step in steps)
    assert len({step.at_s for step in steps}) == len(steps)
    assert all(one.blocks is None and not one.preempted for one in told(under_test))


def test_steps_are_told_with_what_the_model_predicted() -> None:
    under_test = EngineUnderTest(small_limits())
    under_test.send(Watch(math.inf), *(ask(f"r{i}", tuple(range(9 * i, 9 * i + 9)), max_tokens=9) for i in range(20)))
    under_test.run()
    steps = [step for one in told(under_test) for step in one.steps]
    assert steps[0].predicted_s is None
    assert steps[-1].predicted_s == pytest.approx(steps[-1].took_s, rel=0.2)


@pytest.mark.parametrize("is_paused", [False, True])
def test_who_lost_its_blocks_is_told_with_the_cause(is_paused: bool) -> None:
    under_test = EngineUnderTest(small_limits(num_blocks=4 if is_paused else 6))
    under_test.send(Watch(math.inf), Submit(make_request("a", 6, arrival_s=0.0, max_tokens=16)))
    under_test.step()
    if is_paused:
        under_test.send(Pause("a"))
    under_test.send(Submit(make_request("b", 7, arrival_s=1.0, max_tokens=3 if is_paused else 16)))
    under_test.run()
    first = next(one for found in told(under_test) for one in found.preempted)
    if is_paused:
        assert (first.request_id, first.by, first.cause) == ("a", "b", PreemptionCause.PAUSED)
    else:
        assert (first.request_id, first.index, first.cause) == ("b", 0, PreemptionCause.OUT_OF_BLOCKS)
    assert under_test.scheduler.stats().num_preemptions == sum(len(one.preempted) for one in told(under_test))


def test_each_block_is_told_by_state_prefix_and_owner_and_never_by_content() -> None:
    under_test = EngineUnderTest(small_limits(num_blocks=32, max_batch_tokens=64))
    assert Counter(cells_of(map_of(under_test), map_of(under_test).cells)) == {("free", 0, "others"): 32}
    under_test.send(ask("a", PROMPT, max_tokens=1))
    under_test.run()
    found = map_of(under_test)
    (prefix,) = {number for _, number, _ in cells_of(found, found.cells) if number}
    assert Counter(state for state, _, _ in cells_of(found, found.cells)) == {"cached": 5, "free": 27}
    for name in "bc":
        under_test.send(ask(name, (*PROMPT, 7), max_tokens=40))
    under_test.step(2)
    under_test.send(Pause("c"))
    found = map_of(under_test)
    cells = Counter(cells_of(found, found.cells))
    assert cells["shared", prefix, found.owners[-1][1]] + cells["shared", prefix, ""] >= 5
    assert {state for state, *_ in cells} == {"shared", "used", "paused", "free"}
    assert sum(cells.values()) == 32


def test_whose_a_block_is_shows_the_tenant_and_no_salt() -> None:
    under_test = EngineUnderTest(small_limits(num_blocks=7, num_host_blocks=30, max_batch_tokens=64))
    for name in "ab":
        request = make_request(name, 22, cache_salt="s3cret")
        under_test.send(Submit(structs.replace(request, cache_domain=f"tenant:{name}")))
        under_test.run()
    found = map_of(under_test)
    assert {name for state, _, name in cells_of(found, found.cells) if state == "cached"} == {"b"}
    host = cells_of(found, found.host_cells)
    assert host
    assert {(state, name) for state, _, name in host} == {("offloaded", "a")}
    assert "s3cret" not in repr(found)
    request = structs.replace(make_request("c", 22), cache_domain="tenant:local", tenant="local 127.0.0.1")
    under_test.send(Submit(request))
    under_test.step(1)
    found = map_of(under_test)
    assert {name for state, _, name in cells_of(found, found.cells) if state == "used"} == {"local"}


def test_more_owners_than_a_cell_can_name_are_others() -> None:
    under_test = EngineUnderTest(small_limits(num_blocks=MAX_OWNERS + 10, block_size=1, max_batch_tokens=64))
    pool, host = under_test.scheduler.pool, under_test.scheduler.host
    for i in range(MAX_OWNERS + 5):
        table = BlockTable(domain=(f"tenant:{i}", ""), blocks=pool.allocate(1))
        pool.publish(table, [i], 1)
    found = block_map(pool, host, [])
    states = Counter((state, name) for state, _, name in cells_of(found, found.cells))
    assert states["used", "others"] == 5
    assert states["used", str(MAX_OWNERS - 1)] == 1
    assert len(found.owners) == MAX_OWNERS + 1
