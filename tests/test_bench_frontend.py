"""The front-end bench: its null runner, its arithmetic, and the servers it compares."""

import argparse
import asyncio
import os
import socket
import threading
import time

import msgspec
import numpy as np
import pytest

from bench.front_peers import Floor, StepLoop
from bench.frontend import (
    PARTS,
    SERVERS,
    HealthCase,
    Measured,
    RequestCase,
    StreamCase,
    main,
    median_run,
    plan_cases,
    result_tables,
    running_server,
)
from bench.kit import PIECES, CpuTimes, cpu_times
from bench.load import LoadConfig, LoadResult, LoadRun, run_on_fast_loop
from bench.null_server import NullRunner, Pace
from bench.raw_clients import RequestLoad, StreamLoad, ask, drain, latencies_s
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


def test_null_runner_waits_for_every_step() -> None:
    waits: list[None] = []
    runner = NullRunner(LIMITS, [1], lambda: waits.append(None))
    plan = plan_of([0], [1], [True])
    for _ in range(3):
        runner.collect(plan)
    assert len(waits) == 3


def test_pace_is_kept_and_lost_steps_are_not_made_up_for() -> None:
    times_s = iter([100.0, 100.25, 200.0, 200.25])
    slept: list[float] = []
    pace = Pace(0.5, clock=lambda: next(times_s), sleep=slept.append)
    for _ in range(4):
        pace.wait()
    assert slept == [0.25, 0.25]


def test_cpu_times_see_this_process_work() -> None:
    before = cpu_times(os.getpid())
    end_s = time.process_time() + 0.05
    while time.process_time() < end_s:
        pass
    used = cpu_times(os.getpid()) - before
    assert used.total_s >= 0.04
    assert used.main_s >= 0.04


def test_cpu_times_of_no_process_are_an_error_and_subtract_field_by_field() -> None:
    with pytest.raises(OSError, match="No such file"):
        cpu_times(2**22 + 1)
    assert CpuTimes(4, 3, 2, 1) - CpuTimes(1, 1, 1, 1) == CpuTimes(3, 2, 1, 0)


def arguments_of(**changes: object) -> argparse.Namespace:
    fields = {"parts": PARTS, "step_rate": [0.0], "streams": None, "tokens": 100_000, "servers": tuple(SERVERS)} | {
        "quick": False
    }
    return argparse.Namespace(**{**fields, **changes})


def test_cases_share_their_tokens_among_the_streams() -> None:
    cases = plan_cases(arguments_of(parts=["http1"], step_rate=[0.0, 50.0], servers=["steploop"]))
    found = [(case.num_streams, case.num_tokens, case.step_rate) for case in cases if isinstance(case, StreamCase)]
    assert found == [
        (1, 16_000, 0.0),
        (64, 1_562, 0.0),
        (256, 390, 0.0),
        (1, 400, 50.0),
        (64, 400, 50.0),
        (256, 390, 50.0),
    ]


def test_http2_is_tried_on_one_connection_and_on_many() -> None:
    cases = plan_cases(arguments_of(parts=["http2"], streams=[256], servers=["steploop", "FastAPI + granian"]))
    found = [(case.server, case.num_connections) for case in cases if isinstance(case, StreamCase) and case.is_http2]
    assert found == [(name, number) for number in (1, 4, 16) for name in ("steploop", "FastAPI + granian")]


def test_every_part_has_the_peers_beside_steploop() -> None:
    for part in PARTS:
        servers = {case.server for case in plan_cases(arguments_of(parts=[part]))}
        assert servers > {"steploop"}
        assert servers <= set(SERVERS)


def run_of(cpu_us: float, latencies_ms: tuple[float, ...] = ()) -> Measured:
    return Measured(cpu_us, 2.0, 3.0, 4.0, 1.0, 1000.0, 10, 0, 0.5, latencies_ms)


def test_the_run_in_the_middle_is_shown_and_an_even_number_has_none() -> None:
    assert median_run([run_of(9.0), run_of(1.0), run_of(5.0)]) == run_of(5.0)
    with pytest.raises(AssertionError, match="middle"):
        median_run([run_of(1.0), run_of(2.0)])
    with pytest.raises(SystemExit):
        main(["--repeats", "2"])


def test_each_protocol_and_pace_is_a_table_with_a_row_per_case() -> None:
    streams = [
        StreamCase("steploop", h2, n, n, 10, rate) for h2 in (False, True) for n in (1, 64) for rate in (0.0, 50.0)
    ]
    others = [RequestCase("steploop", True, 32, 1.0), HealthCase("steploop", 256, 100.0, 1.0)]
    tables = result_tables({case: run_of(5.0, (1.0, 3.0)) for case in [*streams, *others]})
    assert [len(table.rows) for table in tables] == [2, 2, 2, 2, 1, 1]
    assert all(len(row) == len(table.columns) for table in tables for row in table.rows)
    assert tables[-1].rows[0][1:5] == (2, 2.0, 2.98, 3.0)


def test_the_clients_count_what_the_real_server_sends() -> None:
    with running_server("steploop", 0.0) as (_, port):
        for is_http2, num_connections in ((False, 6), (True, 2)):
            came = drain(StreamLoad(port, is_http2, num_connections, 6, 40))
            assert (came.num_done, came.num_failed) == (240, 0)
        for is_http2 in (False, True):
            answered = ask(RequestLoad(port, is_http2, 4, 0.2))
            assert answered.num_done > 0
            assert answered.num_failed == 0
        assert latencies_s(port, 0.02)


def test_a_stream_that_is_not_all_there_has_failed() -> None:
    def serve(listener: socket.socket, answer: bytes) -> None:
        connection, _ = listener.accept()
        with connection:
            connection.recv(65_536)
            connection.sendall(answer)

    sound = b"data: {}\n\n" * 3 + b"data: [DONE]\n\n\r\n0\r\n\r\n"
    for answer, num_failed in ((sound, 0), (sound[11:], 1), (sound[:-40], 1), (sound * 4, 1)):
        with socket.create_server(("127.0.0.1", 0)) as listener:
            server = threading.Thread(target=serve, args=(listener, answer))
            server.start()
            came = drain(StreamLoad(listener.getsockname()[1], False, 1, 1, 4))
            server.join()
        assert came.num_failed == num_failed, answer


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
    from bench.front_peers import ChatRequest, TokenSource, stream_chat

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
