"""Two ranks in processes of their own, over gloo: the tokens of one, and what becomes of all when one is lost."""

import os
import random
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from core.config_json import parse_model_config
from core.errors import ExitCode, StartupError
from core.plan import DeviceError, Int32Array, StepOutput, make_plan
from gpu.parallel.processes import Followers, Job, Step
from gpu.parallel.ranks import Ranks, close
from gpu.parallel.runner import ParallelRunner, load_parallel_runner
from tests import fp8_files, packed_files
from tests.gpu.conftest import ENGINE, no_progress, open_runner
from tests.gpu.driver import Driver
from tests.gpu.test_model import make_prompt
from tests.gpu.test_overlap import draw_workload, run
from tests.oracle import read_config

TWO = replace(ENGINE, tensor_parallel=2)
NUM_TOKENS = 24


@pytest.fixture
def open_parallel() -> Iterator[Callable[..., ParallelRunner]]:
    opened = []

    def open_one(directory: Path, **engine: Any) -> ParallelRunner:
        model = parse_model_config(read_config(directory))
        opened.append(load_parallel_runner(directory, model, replace(TWO, **engine), no_progress))
        return opened[-1]

    yield open_one
    for runner in opened:
        runner.followers.end()
    close()


@pytest.mark.parametrize("family", ["llama3", "gemma3"])
def test_two_processes_say_what_one_says(
    family: str, model_directory: Callable[[str], Path], open_parallel: Callable[[Path], ParallelRunner]
) -> None:
    """Of gemma3 both share the one KV head; tests/gpu/parallel/test_shards.py has the other families."""
    directory = model_directory(family)
    assert tokens_of(open_parallel(directory)) == tokens_of(open_runner(directory))


def tokens_of(runner: Any) -> list[list[int]]:
    driver = Driver(runner)
    first = driver.add(make_prompt(1, 37))
    driver.generate(4, first)
    return driver.generate(NUM_TOKENS, driver.add(make_prompt(2, 20)), first)


def test_overlapped_steps_of_two_processes_sample_the_same(
    model_directory: Callable[[str], Path], open_parallel: Callable[..., ParallelRunner]
) -> None:
    """The first rank alone samples; the other gets the tokens before the host has read them."""
    workload = draw_workload(random.Random(1))
    runner: Any = open_parallel(model_directory("llama3"), overlap="on")
    assert runner.limits.max_in_flight == 2
    expected, num_pending, _ = run(runner, workload, 1)
    assert num_pending == 0
    outcomes, num_pending, _ = run(runner, workload, 2)
    assert outcomes == expected
    assert num_pending > 30


def test_two_processes_share_packed_integers(tmp_path: Path, open_parallel: Callable[..., ParallelRunner]) -> None:
    gptq = {"quant_method": "gptq", "bits": 4, "group_size": 64, "desc_act": False}
    packed, floats = packed_files.save_pair(tmp_path / "packed", gptq)
    assert tokens_of(open_parallel(packed)) == tokens_of(open_runner(floats))


def test_two_processes_share_8_bit_floats(tmp_path: Path, open_parallel: Callable[..., ParallelRunner]) -> None:
    _, plain = packed_files.save_pair(tmp_path / "plain", {"quant_method": "awq", "bits": 4, "group_size": 32})
    stored, floats = fp8_files.save_pair(plain, tmp_path, fp8_files.BLOCKS)
    assert tokens_of(open_parallel(stored, quantize="fp8")) == tokens_of(open_runner(floats))


def test_a_rank_that_is_killed_is_a_lost_device(
    model_directory: Callable[[str], Path], open_parallel: Callable[[Path], ParallelRunner]
) -> None:
    runner = open_parallel(model_directory("llama3"))
    driver = Driver(runner)
    sequence = driver.add(make_prompt(1, 5))
    driver.generate(2, sequence)
    runner.followers.check()
    (follower,) = runner.followers.processes
    os.kill(follower.pid, signal.SIGKILL)
    with pytest.raises(DeviceError, match="ank"):  # by its pipe, or in the middle of a sum
        driver.generate(1000, sequence)
    follower.wait()
    with pytest.raises(DeviceError, match=rf"Rank 1 \(process {follower.pid}\) has ended by signal 9"):
        runner.followers.check()


def test_what_a_rank_cannot_load_is_told_as_its_own(tmp_path: Path, model_directory: Callable[[str], Path]) -> None:
    model = parse_model_config(read_config(model_directory("llama3")))
    meeting = os.memfd_create("ranks")
    followers = Followers(2, meeting)
    try:
        followers.tell(lambda rank: Job(rank, str(tmp_path), model, TWO, meeting))
        with pytest.raises(StartupError, match=r"Rank 1: .* has neither model\.safetensors") as caught:
            followers.answers()
        assert caught.value.exit_code == ExitCode.MODEL
        (process,) = followers.processes
        assert process.wait() == ExitCode.MODEL
    finally:
        followers.end()
        os.close(meeting)


def test_a_rank_whose_orders_end_ends() -> None:
    meeting = os.memfd_create("ranks")
    followers = Followers(2, meeting)
    (process,) = followers.processes
    assert process.stdin is not None
    process.stdin.close()
    assert process.wait() == ExitCode.OK
    with pytest.raises(StartupError, match=r"Rank 1 \(process \d+\) has ended by code 0 while it was loading"):
        followers.answers()
    followers.end()
    os.close(meeting)


def test_columns_are_whole_again_where_the_last_rank_has_fewer(monkeypatch: pytest.MonkeyPatch) -> None:
    columns = torch.arange(14.0).view(2, 7)  # of 3 ranks: 3, 3 and 1
    sent: dict[int, torch.Tensor] = {}

    def gather_on(rank: int) -> torch.Tensor:
        def gather(part: torch.Tensor, parts: list[torch.Tensor] | None) -> None:
            sent[rank] = part
            for index, into in enumerate(parts or ()):
                into.copy_(sent[index])

        monkeypatch.setattr(dist, "gather", gather)
        ranks = object.__new__(Ranks)  # without its group
        ranks.rank, ranks.num_ranks = rank, 3
        return ranks.gather_columns(columns[:, 3 * rank : 3 * rank + 3], 7)

    others = [gather_on(rank) for rank in (1, 2)]
    assert torch.equal(gather_on(0), columns)
    assert all(found.shape == columns.shape and not found.any() for found in others)


class OwnRank:
    """A rank 0 whose second row fails, or whose step does."""

    limits = memory = None

    def __init__(self, error: Exception | None = None) -> None:
        self._error = error

    def forward(self, plan: Any) -> Any:
        if self._error is not None:
            raise self._error
        return plan

    def sample(self, ticket: Any, masks: Int32Array | None = None) -> None:
        """Draws nothing."""

    def collect(self, ticket: Any) -> StepOutput:
        none = np.empty(0, np.int32)
        return StepOutput(none, none, failed_rows={1: "not finite"})


class ToldFollowers:
    """Writes down what they are told."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    def tell(self, order_of: Callable[[int], Any]) -> None:
        self.told.append(order_of(1))


def test_rows_that_fail_are_mended_on_every_rank_before_the_next_step() -> None:
    followers: Any = ToldFollowers()
    own: Any = OwnRank()
    runner = ParallelRunner(own, followers)
    plan = make_plan([(5, 0, [1], True), (2, 0, [1], True)])
    for _ in range(2):
        runner.collect(runner.forward(plan))
    runner.forward(plan)
    assert [step.broken_slots for step in followers.told] == [(), (2,), (2,)]
    assert all(isinstance(step, Step) and step.plan is plan for step in followers.told)


def test_a_step_that_raises_on_one_rank_alone_breaks_all() -> None:
    followers: Any = ToldFollowers()
    own: Any = OwnRank(ValueError("out of memory"))
    with pytest.raises(DeviceError, match="out of memory"):
        ParallelRunner(own, followers).forward(make_plan([(0, 0, [1], True)]))
