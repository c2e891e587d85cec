"""Whole generations on a device that does everything as late as it may: the tokens of one that does it at once.

Only what the runner waits for has happened: steps, the copies up and down, and host memory's lie in two streams' order.
"""

import dataclasses
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from core.config import EngineConfig
from core.plan import StepPlan, make_plan
from core.types import SamplingParams
from gpu.runner import ModelRunner, StepTicket
from gpu.step_graphs import Graph
from gpu.streams import Streams
from tests.gpu.conftest import ENGINE
from tests.gpu.driver import Driver
from tests.gpu.fake_cuda_graphs import FakeRecorder
from tests.gpu.kernels.test_device_steps import (  # noqa: F401  # fixtures are found by their names
    draw_workload,
    on_a_cpu,
    open_with,
    uncounted,
)
from tests.gpu.late_streams import LateStreams
from tests.gpu.test_kv_offload import PROMPTS, Served
from tests.gpu.test_overlap import run

pytestmark = [
    pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning"),
    pytest.mark.usefixtures("wide_tiles"),
]
SMALL = dataclasses.replace(ENGINE, max_sequences=4, max_model_len=64, max_batch_tokens=32)


@pytest.fixture(autouse=True)
def in_inference() -> Iterator[None]:
    """What is late is done by whoever waits for it."""
    with torch.inference_mode():
        yield


class LateRecorder(FakeRecorder):
    """Waits for the device before it captures, as CUDA's does."""

    def __init__(self, streams: LateStreams) -> None:
        super().__init__()
        self._streams = streams

    def capture(self, work: Callable[[], None]) -> Graph:
        self._streams.finish()
        return super().capture(work)


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> LateStreams:
    """Of runners that are opened from now on."""
    found = LateStreams(work_s=0.0)
    monkeypatch.setattr("gpu.runner.open_streams", lambda device: found)
    monkeypatch.setattr("gpu.tune.CudaRecorder", lambda device: LateRecorder(found))
    return found


def open_at_once(directory: Path, engine: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> ModelRunner:
    with monkeypatch.context() as plain:
        plain.setattr("gpu.runner.open_streams", lambda device: Streams())
        return open_with(directory, engine)


def count_forwards(monkeypatch: pytest.MonkeyPatch, runner: ModelRunner) -> list[int]:
    """Tokens of each step from now on."""
    found: list[int] = []
    inner = runner.forward

    def forward(plan: StepPlan) -> StepTicket:
        found.append(plan.num_tokens)
        return inner(plan)

    monkeypatch.setattr(runner, "forward", forward)
    return found


@pytest.mark.parametrize("graphs", ["off", "on"])
def test_overlapped_steps_draw_the_same_and_each_is_one_copy(
    graphs: str, one_layer: Path, streams: LateStreams, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks of prompts beside decodes, penalties, filters, logprobs, preemption, clients that leave."""
    workload = draw_workload(random.Random(1), 4, 6)
    expected, _, _ = run(open_at_once(one_layer, dataclasses.replace(SMALL, graphs="off"), monkeypatch), workload, 1)
    runner = open_with(one_layer, dataclasses.replace(SMALL, graphs=graphs))
    steps, num_copies = count_forwards(monkeypatch, runner), streams.side.num_started
    outcomes, num_pending, _ = run(runner, workload, 2)
    assert outcomes == expected
    assert num_pending > 6
    assert streams.side.num_started - num_copies == len(steps) > 12
    assert streams.current.most_late > 8  # of two steps


def test_blocks_go_to_the_host_and_back_in_the_steps_order(
    one_layer: Path, streams: LateStreams, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = dataclasses.replace(SMALL, max_model_len=128, max_batch_tokens=64, graphs="off")
    plain = open_at_once(one_layer, engine, monkeypatch)
    expected = [Served(plain).ask(str(i), prompt)[0] for i, prompt in enumerate(PROMPTS[:3])]
    served = Served(open_with(one_layer, dataclasses.replace(engine, kv_offload_bytes=1024**2)))
    for turn in range(2):
        assert [served.ask(f"{turn}.{i}", prompt)[0] for i, prompt in enumerate(PROMPTS[:3])] == expected
    assert served.scheduler.stats().num_restored_blocks > 0


def test_a_step_that_brings_more_than_usual_is_one_copy_too(one_layer: Path, streams: LateStreams) -> None:
    """Slots that start with lists, tables of many blocks, and such as were another's before."""
    engine = dataclasses.replace(SMALL, max_sequences=16, max_model_len=256, graphs="off")
    runner = open_with(one_layer, engine)
    driver, copies, tables = Driver(runner), runner._steps._copies, runner._steps.tables
    usual, num_copies = copies._buffers[0].pinned.numel(), streams.side.num_started
    sampling = SamplingParams(temperature=1.0, logit_bias=((5, 1.0),), presence_penalty=0.5, max_tokens=9)
    for _ in range(2):
        sequences = [driver.add([5] * (3 + number), sampling) for number in range(16)]
        driver.step(dict.fromkeys((one.slot for one in sequences), 2), *sequences)
        grown = [(one.slot, place, driver.free_blocks.pop()) for one in sequences for place in range(1, 16)]
        driver.run(make_plan([(one.slot, 2, [5], False) for one in sequences], tables=grown))
        streams.finish()
        assert runner._steps._rows._tables.blocks.tolist() == tables.blocks.tolist()
        for one in sequences:
            driver.remove(one)
    assert copies._buffers[0].pinned.numel() > usual
    assert streams.side.num_started - num_copies == 4
