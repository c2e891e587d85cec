"""What crosses between ranks arrives as it was sent, all of it, and a message that is cut off is none."""

import io
from dataclasses import replace
from typing import Any

import pytest

from core.config import EngineConfig
from core.plan import make_plan
from core.prequantized import Fp8Config
from gpu.parallel.processes import Answer, Job, Load, Refusal, Step, read_message, write_message
from tests.gpu.test_memory_plan import MODEL

PLAN = make_plan([(3, 0, [5, -1, 7], False), (1, 16, [9], True)])


def written(message: Any) -> io.BytesIO:
    pipe = io.BytesIO()
    write_message(pipe, message)
    pipe.seek(0)
    return pipe


def test_a_step_arrives_with_its_plan() -> None:
    read = read_message(written(Step(PLAN, (3,))), Step)
    assert read is not None
    assert read.broken_slots == (3,)
    assert read.plan.token_ids.tolist() == [5, -1, 7, 9]
    assert read.plan.samples.tolist() == [False, True]


@pytest.mark.parametrize(
    "message",
    [
        Job(1, "/models/m", MODEL, EngineConfig(quantize="int8"), 7),
        Job(1, "/models/m", replace(MODEL, packing=Fp8Config((128, 128))), EngineConfig(), 7),
        Load(5),
        Answer(2**40),
        Answer(refusal=Refusal("cause", "fix", 7)),
    ],
    ids=lambda message: type(message).__name__,
)
def test_messages_arrive(message: Any) -> None:
    assert read_message(written(message), type(message)) == message


def test_a_message_that_is_cut_off_is_none_and_those_before_it_are() -> None:
    whole = written(Load(2**20)).getvalue()
    for length in range(len(whole)):
        pipe = io.BytesIO(whole + whole[:length])
        assert read_message(pipe, Load) == Load(2**20)
        assert read_message(pipe, Load) is None
