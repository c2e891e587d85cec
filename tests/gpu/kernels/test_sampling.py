"""Triton's kernels sample what torch samples, to the last bit, however a row is divided."""

from typing import Any

import numpy as np
import pytest
import torch

from core.plan import SequenceStart
from core.types import SamplingParams
from gpu.kernels.sampler import MAX_BIASES, MAX_STOP_IDS, SHAPES, DeviceSampler, Shape, shape_of
from gpu.rows import NO_SLOT
from gpu.sampler import IntArray, Sampled, Sampler, SamplingSlots

ASKED: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0, "num_logprobs": 3},
    {"temperature": 0.7},
    {"temperature": 1.3, "top_k": 2, "min_p": 0.05},
    {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "num_logprobs": 0},
    {"temperature": 2.0, "top_k": 400, "top_p": 0.5},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 1.0, "top_p": 0.95, "min_p": 0.3},
    {"temperature": 1.0, "min_p": 0.2, "logit_bias": ((4, 8.0), (40, 9.0), (5, 20.0)), "min_tokens": 9},
    {"temperature": 1.0, "presence_penalty": 0.5, "repetition_penalty": 1.2, "top_k": 3},
    {"temperature": 0.0, "frequency_penalty": 0.7, "logit_bias": ((2, 9.0),), "num_logprobs": 0},
)
ONE, SPLIT = Shape(1, 2, 1), Shape(3, 1, 1)  # of a few segments, as the interpreter takes milliseconds for each


def start_all(sampler: Sampler, asked: tuple[dict[str, Any], ...] = ASKED) -> None:
    for slot, fields in enumerate(asked):
        params = SamplingParams(max_tokens=64, **fields)
        sampler.start(SequenceStart(slot, (1, 2, 3, 3, 9), 3, params, seed=2**64 - 1 - slot, stop_ids=(5, 6)))


def make_samplers(
    vocab: int, shape: Shape, device: torch.device, asked: tuple[dict[str, Any], ...] = ASKED
) -> tuple[Sampler, Sampler, DeviceSampler]:
    """Torch's, the kernel's, and its launcher."""
    made: list[DeviceSampler] = []

    def make(slots: SamplingSlots) -> DeviceSampler:
        made.append(DeviceSampler(slots, shape=shape))
        return made[0]

    by_torch = Sampler(len(asked), vocab, device)
    by_kernel = Sampler(len(asked), vocab, device, make)
    start_all(by_torch, asked)
    start_all(by_kernel, asked)
    return by_torch, by_kernel, made[0]


def launch(sampler: Sampler, logits: torch.Tensor, slots: IntArray, positions: IntArray) -> Sampled:
    """What a step does, of as many rows as there are logits: those without a slot are padding."""
    kernel = sampler.launched
    assert kernel is not None
    kernel.put_started([torch.from_numpy(part.reshape(-1)).to(logits.device) for part in kernel.take_started()])
    rows = torch.full((2, len(logits)), NO_SLOT, dtype=torch.int32, device=logits.device)
    rows[:, : len(slots)] = torch.from_numpy(np.stack([slots, positions])).to(rows)
    kernel.launch(logits, rows)
    return sampler.launched_tokens(logits, slots)


CASES = (
    (50, ONE, 6.0, torch.float32),
    (50, ONE, 0.0, torch.float16),
    (400, ONE, 1.0, torch.float16),
    (400, SPLIT, 1.0, torch.float32),
    (390, SPLIT, 0.0, torch.float32),
)


@pytest.mark.parametrize(("vocab", "shape", "spread", "dtype"), CASES, ids=str)
def test_a_sampler_draws_the_same_tokens_with_it(
    vocab: int, shape: Shape, spread: float, dtype: torch.dtype, device: torch.device
) -> None:
    logits = torch.randn(len(ASKED), vocab, generator=torch.Generator().manual_seed(2)) * spread
    logits = logits.to(device, dtype)
    before = logits.clone()
    by_torch, by_kernel, launcher = make_samplers(vocab, shape, device)
    rows = np.arange(len(ASKED))
    for step in range(2 if vocab == 50 else 1):
        want = by_torch.sample(logits.float(), rows, rows * 0 + 5 + step)
        drawn = launch(by_kernel, logits, rows, rows * 0 + 5 + step)
        assert drawn.token_ids.tolist() == want.token_ids.tolist()
        assert drawn.is_finite.all()
        assert torch.equal(by_kernel.last_tokens, want.token_ids)
        assert want.logprobs is not None
        assert drawn.logprobs is not None
        rows_told = drawn.logprobs.rows
        assert (rows_told.tolist(), drawn.logprobs.num_top) == (want.logprobs.rows.tolist(), want.logprobs.num_top)
        told, expected = drawn.logprobs.find(), want.logprobs.find()
        assert told[2].tolist() == expected[2].tolist()
        assert torch.allclose(told[0], expected[0], atol=1e-5)
        assert torch.allclose(told[1], expected[1], atol=1e-5)
        assert torch.equal(told[0], launcher.logprobs[rows_told, 0])
        assert told[0][0] == told[1][0, 0]  # the likeliest is told as such
    assert torch.equal(by_kernel._asked.write_seen(), by_torch._asked.write_seen())
    assert torch.equal(logits, before)


@pytest.mark.parametrize("shape", [ONE, SPLIT], ids=str)
def test_rows_come_in_any_order_and_padding_draws_nothing(shape: Shape, device: torch.device) -> None:
    logits = torch.randn(4, 300, generator=torch.Generator().manual_seed(3)).to(device)
    by_torch, by_kernel, launcher = make_samplers(300, shape, device)
    slots, positions = np.array([5, 0, 8]), np.array([7, 9, 11])
    want = by_torch.sample(logits[:3], slots, positions).token_ids
    launcher.token_ids.fill_(-3)
    by_kernel.last_tokens.fill_(-3)
    launch(by_kernel, logits, slots, positions)  # of one row more than there are slots
    assert launcher.token_ids[:4].tolist() == [*want.tolist(), -3]
    assert by_kernel.last_tokens[[5, 0, 8]].tolist() == want.tolist()
    assert (by_kernel.last_tokens == -3).sum() == len(ASKED) - 3


@pytest.mark.parametrize("shape", [ONE, SPLIT], ids=str)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_row_that_is_not_finite_is_told_and_harms_no_other(shape: Shape, bad: float, device: torch.device) -> None:
    asked: tuple[dict[str, Any], ...] = ({"top_p": 0.9}, {"top_k": 5, "logit_bias": ((3, 1.0),)}, {"temperature": 0.0})
    logits = torch.randn(3, 300, generator=torch.Generator().manual_seed(4)).to(device)
    by_torch, by_kernel, _ = make_samplers(300, shape, device, asked)
    rows = np.arange(3)
    want = by_torch.sample(logits, rows, rows + 5).token_ids
    logits[1, 260] = bad
    drawn = launch(by_kernel, logits, rows, rows + 5)
    assert drawn.is_finite.tolist() == [True, False, True]
    assert drawn.token_ids[[0, 2]].tolist() == want[[0, 2]].tolist()
    assert 0 <= drawn.token_ids[1] < 300


def test_a_slot_that_starts_anew_is_brought_up_and_the_others_stay(device: torch.device) -> None:
    logits = torch.zeros(2, 64, device=device)
    asked: tuple[dict[str, Any], ...] = ({"temperature": 0.0, "logit_bias": ((9, 5.0),)},) * 2
    _, by_kernel, _ = make_samplers(64, ONE, device, asked)
    rows = np.arange(2)
    assert launch(by_kernel, logits, rows, rows + 5).token_ids.tolist() == [9, 9]
    params = SamplingParams(max_tokens=4, temperature=0.0, logit_bias=((11, 1.0), (12, 2.0)), min_tokens=3)
    by_kernel.start(SequenceStart(1, (1,), 1, params, seed=1, stop_ids=(12,)))
    assert launch(by_kernel, logits, rows, rows + 2).token_ids.tolist() == [9, 11]


def test_longer_lists_than_it_has_room_for_are_torchs(device: torch.device) -> None:
    biases = tuple((token_id, -1.0) for token_id in range(MAX_BIASES + 1))
    asked: tuple[dict[str, Any], ...] = ({"temperature": 0.0, "logit_bias": biases}, {"temperature": 0.0})
    _, by_kernel, launcher = make_samplers(MAX_BIASES + 9, ONE, device, asked)
    assert [launcher.can_sample(np.array(rows)) for rows in ([0], [1], [0, 1])] == [False, True, False]
    drawn = by_kernel.sample(torch.zeros(2, MAX_BIASES + 9, device=device), np.arange(2), np.full(2, 5))
    assert drawn.token_ids.tolist() == [MAX_BIASES + 1, 0]
    stop_ids = tuple(range(MAX_STOP_IDS + 1))
    by_kernel.start(SequenceStart(1, (1,), 1, SamplingParams(max_tokens=4), seed=1, stop_ids=stop_ids))
    assert not launcher.can_sample(np.array([1]))


def test_a_rows_division_depends_on_the_batchs_size_alone() -> None:
    assert [shape_of(rows, 152_000).num_splits for rows in (1, 8, 9, 32, 64, 65, 512)] == [16, 16, 4, 4, 2, 1, 1]
    assert shape_of(1, 1000).num_splits == 1
    assert all(shape.group & (shape.group - 1) == 0 for _, shape in SHAPES)
