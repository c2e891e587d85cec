"""The front-end bench: its null runner, its arithmetic, and the servers it compares."""

import argparse
import asyncio
import os
import time

import msgspec
import numpy as np
import pytest

from bench.floor_server import Floor, StepLoop
from bench.frontend import SERVERS, Case, Measured, plan_cases, result_tables
from bench.load_run import LoadConfig, LoadResult, LoadRun, run_on_fast_loop
from bench.null_runner import NullRunner
from bench.peer import PIECES
from bench.process_cpu import CpuTimes, cpu_times
from core.plan import RunnerLimits, StepPlan

LIMITS = RunnerLimits(8, 16, 4, 64, 128, 1_000)


def plan_of(starts: list[int], lengths: list[int], samples: list[bool]) -> StepPlan:
    nothing = np.empty(0, np.int32)
    return StepPlan(
        slots=np.arange(len(starts), dtype=np.int32),
        starts=np.array(starts, np.int32),
        lengths=np.array(lengths, np.int32),
        samples=np.array(samples),
        token_ids=np.zeros(sum(lengths), np.int32),
        table_slots=nothing,
        table_positions=nothing,
        table_blocks=nothing,
        copy_sources=nothing,
        copy_targets=nothing,
    )


def test_null_runner_draws_one_token_for_each_sampling_row() -> None:
    runner = NullRunner(LIMITS, token_ids=[100, 101, 102])
    ticket = runner.forward(plan_of([0, 0, 5], [4, 16, 1], [True, False, True]))
    runner.sample(ticket)
    output = runner.collect(ticket)
    assert output.rows.tolist() == [0, 2]
    assert output.token_ids.tolist() == [101, 100]  # by position: 4 and 6
    assert output.rows.dtype == output.token_ids.dtype == np.int32


def test_null_runner_keeps_its_pace_and_does_not_make_up_for_lost_steps() -> None:
    times_s = iter([100.0, 100.25, 200.0, 200.25])
    slept: list[float] = []
    runner = NullRunner(LIMITS, [1], step_interval_s=0.5, clock=lambda: next(times_s), sleep=slept.append)
    plan = plan_of([0], [1], [True])
    for _ in range(4):
        runner.collect(plan)
    assert slept == [0.25, 0.25]


def test_cpu_times_see_this_process_work() -> None:
    before = cpu_times(os.getpid())
    end_s = time.process_time() + 0.05
    while time.process_time() < end_s:
        pass
    used = cpu_times(os.getpid()) - before
    assert used.total_s >= 0.04
    assert used.main_s >= 0.04


def test_cpu_times_of_no_process_are_an_error() -> None:
    with pytest.raises(OSError, match="No such file"):
        cpu_times(2**22 + 1)


def test_cpu_times_subtract_field_by_field() -> None:
    assert CpuTimes(4, 3, 2, 1) - CpuTimes(1, 1, 1, 1) == CpuTimes(3, 2, 1, 0)


def test_cases_share_their_tokens_among_the_streams() -> None:
    arguments = argparse.Namespace(
        step_rate=[0.0, 50.0], streams=[1, 100], tokens=100_000, servers=["steploop", "FastAPI + uvicorn"]
    )
    cases = plan_cases(arguments)
    assert [(case.num_streams, case.num_tokens, case.step_rate) for case in cases if case.server == "steploop"] == [
        (1, 16_000, 0.0),
        (100, 1_000, 0.0),
        (1, 500, 50.0),
        (100, 500, 50.0),
    ]
    assert len(cases) == 8
    assert {case.server for case in cases} <= set(SERVERS)


def test_each_pace_is_a_table_with_a_row_per_case() -> None:
    measured = Measured(5.0, 2.0, 3.0, 4.0, 1.0, 1000.0, 10, 10, 0.5, 0)
    tables = result_tables({Case("steploop", n, 10, rate): measured for n in (1, 64) for rate in (0.0, 50.0)})
    assert [len(table.rows) for table in tables] == [2, 2]
    assert all(len(row) == len(table.columns) for table in tables for row in table.rows)


def test_the_floor_streams_every_token_that_was_asked_for() -> None:
    async def measure() -> LoadResult:
        loop = asyncio.get_running_loop()
        steps = StepLoop(loop, 0.0)
        server = await loop.create_server(lambda: Floor(steps), "127.0.0.1", 0)
        async with server:
            port = server.sockets[0].getsockname()[1]
            return await LoadRun(
                LoadConfig(host="127.0.0.1", port=port, concurrency=4, num_requests=12, max_tokens=30)
            ).measure()

    result = run_on_fast_loop(measure())
    assert (result.num_done, result.num_failed, result.num_tokens, result.num_events) == (12, 0, 360, 360)


def test_the_fastapi_peer_streams_every_token_that_was_asked_for() -> None:
    pytest.importorskip("fastapi", reason="needs the extra `bench`")
    pytest.importorskip("uvicorn", reason="needs the extra `bench`")
    from bench.fastapi_peer import ChatRequest, TokenSource, stream_chat

    async def read(source: TokenSource, num_tokens: int) -> list[str]:
        request = ChatRequest(model="null", messages=[], max_tokens=num_tokens, stream=True)
        return [line async for line in stream_chat(request, "chatcmpl-1", source)]

    async def read_two() -> tuple[list[str], list[str]]:
        source = TokenSource(0.0)
        task = asyncio.create_task(source.run())
        answers: tuple[list[str], list[str]] = await asyncio.gather(read(source, 5), read(source, 3))
        task.cancel()
        return answers

    for lines, num_tokens in zip(asyncio.run(read_two()), (5, 3), strict=True):
        assert lines[-1] == "data: [DONE]\n\n"
        chunks = [msgspec.json.decode(line.removeprefix("data: ")) for line in lines[:-1]]
        words = [choice["delta"].get("content") for chunk in chunks for choice in chunk["choices"]]
        assert len([word for word in words if word in PIECES]) == num_tokens
        assert chunks[-1]["usage"]["completion_tokens"] == num_tokens
