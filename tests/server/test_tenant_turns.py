"""Tenants' work off the loop begins in turns, ends are not lost, and whoever waits can leave or be late."""

import asyncio
from collections import Counter, deque
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.gate.turns import TenantTurns
from server.generation import OFFLOAD_BYTES
from tests.server.simulated_server import (
    SERVER_DEADLINES,
    as_caller,
    chat,
    keyed_tenant,
    refusal_of,
    serving,
    the_answer,
)


async def settle() -> None:
    for _ in range(4):
        await asyncio.sleep(0)


def test_a_tenant_with_much_work_lets_another_one_begin_next() -> None:
    async def order() -> list[str]:
        turns, begun = TenantTurns(2, 1), list[str]()

        async def work(tenant: str) -> None:
            await turns.begin(tenant)
            begun.append(tenant)
            await settle()
            turns.end(tenant)

        await asyncio.gather(*(work(one) for one in "aaaabbc"))
        return begun

    begun = "".join(asyncio.run(order()))
    assert begun == "ababcaa"  # not aaaabbc


@given(st.lists(st.tuples(st.sampled_from(["begin", "leave", "end"]), st.integers(0, 2), st.integers(0, 5))))
def test_no_turn_is_lost_or_given_twice(history: list[tuple[str, int, int]]) -> None:
    async def run() -> None:
        turns, tasks = TenantTurns(3, 2), list[tuple[str, asyncio.Task[None]]]()
        running = Counter[str]()

        async def begin(tenant: str) -> None:
            await turns.begin(tenant)
            running[tenant] += 1

        for what, tenant, number in history:
            name = "abc"[tenant]
            if what == "begin":
                tasks.append((name, asyncio.ensure_future(begin(name))))
            elif what == "leave" and number < len(tasks):
                tasks[number][1].cancel()
            elif what == "end" and running[name]:
                running[name] -= 1
                turns.end(name)
            if number % 2:
                await settle()
        await settle()
        while any(not task.done() for _, task in tasks):
            assert running.total() == 3 or all(running[name] == 2 for name, task in tasks if not task.done())
            assert max(running.values()) <= 2
            name = next(name for name, num in running.items() if num)
            running[name] -= 1
            turns.end(name)
            await settle()

    asyncio.run(run())


def test_a_turn_that_does_not_come_in_time_is_an_error_and_takes_no_place() -> None:
    async def run() -> None:
        turns = TenantTurns(1, 1)
        await turns.begin("a")
        with pytest.raises(TimeoutError):
            await turns.begin("b", asyncio.get_running_loop().time() - 1)
        turns.end("a")
        await turns.begin("c")

    asyncio.run(run())


def test_many_large_bodies_of_one_tenant_hold_up_that_tenant_alone_and_until_its_deadline() -> None:
    with serving(tenants=(keyed_tenant("flood"), keyed_tenant("light"))) as server:
        begun: deque[tuple[Callable[[], Any], asyncio.Future[Any]]] = deque()

        def offload(work: Callable[[], Any]) -> asyncio.Future[Any]:
            begun.append((work, server.loop.create_future()))
            return begun[-1][1]

        def finish(work: Callable[[], Any], done: asyncio.Future[Any]) -> None:
            done.set_result(work())
            server.loop.settle()

        server.generations.offload, server.generations.turns = offload, TenantTurns(2, 1)
        large = chat(max_tokens=2, padding="x" * OFFLOAD_BYTES)
        flood = [server.send(as_caller(large, "flood")) for _ in range(3)]
        first = begun.popleft()
        assert not begun
        flood[0].feed_eof()  # its thread goes on
        server.loop.settle()
        assert not begun
        light = server.send(as_caller(large, "light"))
        assert begun
        while begun:
            finish(*begun.popleft())
        server.run()
        assert the_answer(light).status == 200
        assert not any(one.received for one in flood)
        server.run_for(SERVER_DEADLINES.ttft_s + 1)
        assert [refusal_of(the_answer(one)) for one in flood[1:]] == [(504, "deadline_exceeded")] * 2
        finish(*first)
        while begun:
            finish(*begun.popleft())
        server.run()
        server.check_idle()
