"""What is encoded comes back as it was, every field of it."""

import dataclasses
from typing import Any

import msgspec
import numpy as np
import pytest

from core.config import EngineConfig
from core.kv_cache import BlockCopies, BlockLabel
from core.plan import PooledRow, PromptTargets, SequenceStart, StateSave, StepPlan, decode, encode
from core.repetition import TokenPenalties
from core.types import Pooling, SamplingParams


def int32(*values: int) -> Any:
    return np.array(values, dtype=np.int32)


SAMPLING = SamplingParams(max_tokens=3, logit_bias=((1, 2.5),), stop=("\n",), seed=2**64 - 1, num_logprobs=2)
PLAN = StepPlan(
    slots=int32(3, 1),
    starts=int32(0, 16),
    lengths=int32(3, 1),
    samples=np.array([False, True]),
    token_ids=int32(5, -1, 7, 2**31 - 1),
    table_slots=int32(3),
    table_positions=int32(0),
    table_blocks=int32(9),
    copy_sources=int32(4),
    copy_targets=int32(5),
    sequence_starts=[SequenceStart(3, (5, 6, 7), 2, SAMPLING, 2**64 - 1, (2,))],
    prompt_targets=[PromptTargets(row=0, first=1, token_ids=(6, 7), num_top=2)],
    masked_rows=[1],
    pooled_rows=[PooledRow(0, Pooling("last", (4, 5), 2), is_last=True)],
    penalties=[TokenPenalties(3, {5: 1.5}, {7: 2}), TokenPenalties(1, {}, None)],
    state_reads={3: 0, 1: ~3},
    state_saves=[StateSave(row=1, position=16, kept=2)],
    host_copies=BlockCopies({1: 2}, {1: BlockLabel(7, (("tenant", "salt"), b"\0\xff"))}, {3: 4}, {4: None}),
)


@pytest.mark.parametrize("field", dataclasses.fields(StepPlan), ids=lambda field: field.name)
def test_every_field_of_a_plan_comes_back(field: Any) -> None:
    sent, got = (getattr(plan, field.name) for plan in (PLAN, decode(encode(PLAN), StepPlan)))
    assert len(sent) if isinstance(sent, list) else sent is not None, "a field without content proves nothing"
    if isinstance(sent, np.ndarray):
        assert got.dtype == sent.dtype
        assert np.array_equal(got, sent)
        assert not got.flags.writeable
    else:
        assert got == sent


def test_a_step_without_rows_comes_back() -> None:
    none = int32()
    empty = StepPlan(none, none, none, np.empty(0, np.bool_), *[none] * 6)
    assert decode(encode(empty), StepPlan).num_rows == 0


def test_a_configuration_comes_back() -> None:
    config = EngineConfig(quantize="int8", tensor_parallel=2, max_model_len=100)
    assert decode(encode(config), EngineConfig) == config


def test_what_is_of_another_kind_is_refused() -> None:
    with pytest.raises(msgspec.DecodeError):
        decode(encode(EngineConfig()), StepPlan)
    with pytest.raises(NotImplementedError, match="cannot encode a object"):
        encode(object())
