"""What crosses between ranks arrives as it was sent, all of it, and a message that is cut off is none."""

import dataclasses
import io
from typing import Any

import numpy as np
import pytest

from core.config import EngineConfig
from core.plan import SequenceStart, StepPlan
from core.types import SamplingParams
from gpu.parallel.messages import (
    Found,
    Job,
    Load,
    Loaded,
    Refused,
    Step,
    read_answer,
    read_order,
    write_message,
)
from tests.gpu.driver import make_plan
from tests.gpu.test_memory_plan import MODEL

SAMPLING = SamplingParams(max_tokens=3, logit_bias=((1, 2.5),), stop=("\n",), seed=2**64 - 1)
PLAN = make_plan(
    [(3, 0, [5, -1, 7], False), (1, 16, [2**31 - 1], True)],
    tables=[(3, 0, 9)],
    copies=[(4, 5)],
    sequence_starts=[SequenceStart(3, (5, 6, 7), 2, SAMPLING, 2**64 - 1, (2,))],
)


def written(message: Any) -> io.BytesIO:
    pipe = io.BytesIO()
    write_message(pipe, message)
    pipe.seek(0)
    return pipe


@pytest.mark.parametrize("field", dataclasses.fields(StepPlan), ids=lambda field: field.name)
def test_every_field_of_a_plan_arrives(field: Any) -> None:
    read = read_order(written(Step(PLAN, (3,))))
    assert isinstance(read, Step)
    sent, got = getattr(PLAN, field.name), getattr(read.plan, field.name)
    if isinstance(sent, np.ndarray):
        assert got.dtype == sent.dtype
        assert np.array_equal(got, sent)
    else:
        assert got == sent


@pytest.mark.parametrize("message", [Job(1, "/models/m", MODEL, EngineConfig(quantize="int8"), 7), Load(5)], ids=repr)
def test_orders_arrive(message: Any) -> None:
    assert read_order(written(message)) == message


@pytest.mark.parametrize("message", [Found(2**40), Loaded(), Refused("cause", "fix", 7)], ids=repr)
def test_answers_arrive(message: Any) -> None:
    assert read_answer(written(message)) == message


def test_a_message_that_is_cut_off_is_none_and_those_before_it_are() -> None:
    whole = written(Load(2**20)).getvalue()
    for length in range(len(whole)):
        pipe = io.BytesIO(whole + whole[:length])
        assert read_order(pipe) == Load(2**20)
        assert read_order(pipe) is None
