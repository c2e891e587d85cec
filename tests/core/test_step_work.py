"""What a step costs the engine's thread beside its model, counted and never timed: functions entered."""

from dataclasses import dataclass, replace
from pathlib import Path

import pytest

import core
from core.plan import RunnerLimits
from core.types import Submit
from tests.call_counter import CallCounter, InstructionCounter
from tests.fakes import EngineUnderTest, make_request

NUM_STEPS = 64  # that are counted: four blocks of each row
LIMITS = RunnerLimits(
    num_blocks=4096, block_size=16, max_sequences=256, max_batch_tokens=8192, max_model_len=256, vocab_size=100
)
CORE = Path(core.__file__).parent


def is_counted(path: str) -> bool:
    """The engine's own, without the simulated runner."""
    return Path(path).parent == CORE and not path.endswith("/simulation.py")


@dataclass
class Work:
    """Of a step: Python functions entered, and functions in C that these call."""

    num_calls: float
    num_builtin_calls: float


class OverlapUnderTest(EngineUnderTest):
    max_in_flight = 2


def decoding(num_rows: int, engine: type[EngineUnderTest] = EngineUnderTest, **limits: int) -> EngineUnderTest:
    """Each of so many sequences, all of tenants of their own, decodes a token in each step from now on.

    Args:
        limits: other ones of the runner.
    """
    under_test = engine(replace(LIMITS, **limits))
    for number in range(num_rows):  # prompts of different lengths: not all need a block in the same step
        under_test.send(Submit(make_request(str(number), 20 + number % LIMITS.block_size, 200, tenant=str(number))))
    deliveries = under_test.log.deliveries
    while sum(len(delivery.token_ids) for delivery in deliveries[-1:]) < num_rows or len(deliveries) < NUM_STEPS:
        under_test.step()
    deliveries.clear()
    return under_test


def measure(num_rows: int, engine: type[EngineUnderTest] = EngineUnderTest, **limits: int) -> Work:
    under_test = decoding(num_rows, engine, **limits)
    with CallCounter(is_counted) as counter:
        for _ in range(NUM_STEPS):
            under_test.step()
    assert [len(delivery.token_ids) for delivery in under_test.log.deliveries] == [num_rows] * NUM_STEPS
    return Work(counter.calls.total() / NUM_STEPS, counter.num_builtin_calls / NUM_STEPS)


def test_step_of_one_row_takes_so_many_calls() -> None:
    """Before raising a bound: what is new may be done once for many steps, or only when somebody asks.

    Some nine of the calls keep what is in flight, so that a step can be sent before the one before it comes back; some
    six look for a draft, and count what drafts gained and lost; two ask whether somebody watches the steps.
    """
    work = measure(1)
    assert work.num_calls <= 85
    assert work.num_builtin_calls <= 91


@pytest.mark.parametrize("engine", [EngineUnderTest, OverlapUnderTest])
@pytest.mark.parametrize("num_rows", [64, 256])
def test_each_further_row_takes_so_many_calls(engine: type[EngineUnderTest], num_rows: int) -> None:
    """In one step of sixteen a row needs a block, which takes some twenty; in the others, no call of its own."""
    one, many = measure(1, engine), measure(num_rows, engine)
    assert (many.num_calls - one.num_calls) / (num_rows - 1) <= 1.6
    assert (many.num_builtin_calls - one.num_builtin_calls) / (num_rows - 1) <= 10.8


@pytest.mark.parametrize("num_rows", [8, 32])
def test_looking_for_a_draft_where_nothing_repeats_takes_so_many_calls_a_row(num_rows: int) -> None:
    """Its newest run is noted once, and looked for in its own text and in its tenant's recent answers: not in each step
    of many rows."""
    noise = {"vocab_size": 1 << 19}
    plain, looking = measure(num_rows, **noise), measure(num_rows, **noise, max_drafts=32, few_tokens=8)
    looks = num_rows / (1 + num_rows // 8)
    assert looking.num_calls - plain.num_calls <= 7 * looks + 20
    assert looking.num_builtin_calls - plain.num_builtin_calls <= 10 * num_rows + 30


def instructions_beside_a_queue(num_waiting: int, deadline_s: float | None) -> float:
    """Of a step that admits nobody.

    Args:
        num_waiting: requests in the queue, of tenants of their own too.
        deadline_s: theirs.
    """
    num_rows = LIMITS.max_sequences
    under_test = decoding(num_rows)
    for number in range(num_rows, num_rows + num_waiting):
        under_test.send(Submit(make_request(str(number), tenant=str(number), deadline_s=deadline_s)))
    under_test.step()
    with InstructionCounter(is_counted) as counter:
        under_test.step(LIMITS.block_size)
    assert under_test.scheduler.stats().num_waiting == num_waiting
    return counter.num_instructions / LIMITS.block_size


@pytest.mark.parametrize("deadline_s", [None, 0.0, 1e9])
def test_a_queue_takes_as_little_however_many_wait_in_it(deadline_s: float | None) -> None:
    """Of those who wait only the next is asked, and of those who run nobody, in most steps, whether he gives way."""
    nobody, few, many = (instructions_beside_a_queue(number, deadline_s) for number in (0, 2, 500))
    assert many - few <= 20
    assert few - nobody <= 4000  # a look at each of the 256 takes 12,000
