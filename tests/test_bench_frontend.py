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

from bench import null_server, raw_clients
from bench.front_peers import ChatRequest, Floor, TokenSource, stream_chat
from bench.frontend import PARTS, SERVERS, Case, Measured, main, median_run, plan_cases, result_tables, running_server
from bench.kit import PIECES, CpuTimes, cpu_times
from bench.load import LoadConfig, LoadResult, LoadRun, run_on_fast_loop
from bench.null_server import NullRunner, Pace
from bench.raw_clients import Load, run
from core.plan import RunnerLimits, StepPlan, make_plan

LIMITS = RunnerLimits(8, 16, 4, 64, 128, 1_000)


def plan_of(starts: list[int], lengths: list[int], samples: list[bool]) -> StepPlan:
    rows = zip(starts, lengths, samples, strict=True)
    return make_plan([(slot, start, [0] * length, one) for slot, (start, length, one) in enumerate(rows)])


def test_null_runner_waits_for_the_step_and_gives_each_sampling_row_a_token() -> None:
    waits: list[None] = []
    runner = NullRunner(LIMITS, [100, 101, 102], lambda: waits.append(None))
    output = runner.collect(runner.forward(plan_of([0, 0, 5], [4, 16, 1], [True, False, True])))
    assert output.rows.tolist() == [0, 2]
    assert output.token_ids.tolist() == [101, 100]  # by position: 4 and 6
    assert output.rows.dtype == output.token_ids.dtype == np.int32
    assert len(waits) == 1


def test_pace_is_kept_and_lost_steps_are_not_made_up_for(monkeypatch: pytest.MonkeyPatch) -> None:
    times_s = iter([100.0, 100.25, 200.0, 200.25])
    slept: list[float] = []
    monkeypatch.setattr(null_server.time, "monotonic", lambda: next(times_s))
    monkeypatch.setattr(null_server.time, "sleep", slept.append)
    pace = Pace(0.5)
    for _ in range(4):
        pace.wait()
    assert slept == [0.0, 0.25, 0.0, 0.25]


def test_cpu_times_see_this_process_work_and_subtract_field_by_field() -> None:
    before = cpu_times(os.getpid())
    end_s = time.process_time() + 0.05
    while time.process_time() < end_s:
        pass
    used = cpu_times(os.getpid()) - before
    assert used.total_s >= used.main_s >= 0.04
    assert CpuTimes(4, 3) - CpuTimes(1, 1) == CpuTimes(3, 2)
    with pytest.raises(OSError, match="No such file"):
        cpu_times(2**22 + 1)


def cases_of(**changes: object) -> list[Case]:
    fields = {"parts": PARTS, "step_rate": [0.0], "streams": None, "tokens": 100_000, "servers": tuple(SERVERS)}
    return plan_cases(argparse.Namespace(**{**fields, "quick": False, **changes}))


def test_cases_share_their_tokens_among_the_streams() -> None:
    cases = cases_of(parts=["http1"], step_rate=[0.0, 50.0], servers=["steploop"])
    unpaced, paced = [(1, 16_000), (64, 1_562), (256, 390)], [(1, 400), (64, 400), (256, 390)]
    found = [(case.num_streams, case.num_tokens, case.step_rate) for case in cases]
    assert found == [(*size, 0.0) for size in unpaced] + [(*size, 50.0) for size in paced]


def test_http2_is_tried_on_one_connection_and_on_many() -> None:
    cases = cases_of(parts=["http2"], streams=[256], servers=["steploop", "FastAPI + granian"])
    assert [(case.server, case.num_connections) for case in cases] == [
        (name, number) for number in (1, 4, 16) for name in ("steploop", "FastAPI + granian")
    ]


def test_every_part_has_the_peers_beside_steploop() -> None:
    for part in PARTS:
        assert set(SERVERS) >= {case.server for case in cases_of(parts=[part])} > {"steploop"}


def run_of(cpu_us: float) -> Measured:
    return Measured(cpu_us, 4.0, 1.0, 1000.0, 10, 0, 0.5)


def test_the_run_in_the_middle_is_shown_and_an_even_number_has_none() -> None:
    assert median_run([run_of(9.0), run_of(1.0), run_of(5.0)]) == run_of(5.0)
    with pytest.raises(SystemExit):
        main(["--repeats", "2"])


def test_each_protocol_and_pace_is_a_table_with_a_row_per_case() -> None:
    measured = {case: run_of(5.0) for case in cases_of(step_rate=[0.0, 50.0], servers=["steploop"])}
    tables = result_tables(measured)
    assert [len(table.rows) for table in tables] == [3, 3, 6, 6, 2]
    assert all(len(row) == len(table.columns) for table in tables for row in table.rows)


def test_the_clients_count_what_the_real_server_sends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(raw_clients, "NUM_PER_CONNECTION", 5)  # then a new connection takes its place
    with running_server("steploop", 0.0) as (_, port):
        for is_http2, num_connections in ((False, 6), (True, 2)):
            came = run(Load(port, is_http2, num_connections, 6, 40))
            assert (came.num_done, came.num_failed) == (240, 0)
            answered = run(Load(port, is_http2, num_connections, 6, duration_s=0.2))
            assert answered.num_done > 0
            assert answered.num_failed == 0


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
            came = run(Load(listener.getsockname()[1], False, 1, 1, 4))
            server.join()
        assert came.num_failed == num_failed, answer


def test_the_floor_streams_every_token_that_was_asked_for() -> None:
    async def measure() -> LoadResult:
        server = await asyncio.get_running_loop().create_server(lambda: Floor(0.0), "127.0.0.1", 0)
        async with server:
            port = server.sockets[0].getsockname()[1]
            sizes = {"concurrency": 4, "num_requests": 12, "max_tokens": 30}
            return await LoadRun(LoadConfig(host="127.0.0.1", port=port, **sizes)).measure()  # type: ignore[arg-type]

    result = run_on_fast_loop(measure())
    assert (result.num_done, result.num_failed, result.num_tokens, result.num_events) == (12, 0, 360, 360)


def test_the_fastapi_peer_streams_every_token_that_was_asked_for() -> None:
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
