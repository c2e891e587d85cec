"""Triton's kernels sample what torch samples, to the last bit, however many programs share a row."""

import numpy as np
import pytest
import torch

from core.plan import SequenceStart
from core.types import SamplingParams
from gpu.kernels.sampling import MAX_BIASES, MAX_STOP_IDS, SHAPES, DeviceSampler, Shape, shape_of
from gpu.rows import NO_SLOT
from gpu.sampler import IntArray, LaunchedSampler, Sampled, Sampler
from tests.gpu.sampling_cases import NEXT, SETTINGS, Fields, make_sampler, noise

ONE, SPLIT = Shape(1, 2, 1), Shape(3, 1, 1)  # of a few segments, as the interpreter takes milliseconds for each


def make_samplers(
    vocab: int, shape: Shape, device: torch.device, settings: tuple[Fields, ...] = SETTINGS
) -> tuple[Sampler, Sampler, LaunchedSampler]:
    """Torch's, the kernel's, and the kernel."""
    by_kernel = make_sampler(settings, vocab, lambda slots: DeviceSampler(slots, shape=shape), device=device)
    assert by_kernel.launched is not None
    return make_sampler(settings, vocab, device=device), by_kernel, by_kernel.launched


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


@pytest.mark.parametrize(("vocab", "shape", "scale", "dtype"), CASES, ids=str)
def test_it_samples_the_same_tokens(
    vocab: int, shape: Shape, scale: float, dtype: torch.dtype, device: torch.device
) -> None:
    logits = noise(len(SETTINGS), vocab, scale=scale).to(device, dtype)
    before = logits.clone()
    by_torch, by_kernel, kernel = make_samplers(vocab, shape, device)
    rows = np.arange(len(SETTINGS))
    for step in range(2 if vocab == 50 else 1):
        want = by_torch.sample(logits.float(), rows, rows * 0 + NEXT + step)
        found = launch(by_kernel, logits, rows, rows * 0 + NEXT + step)
        assert found.token_ids.tolist() == want.token_ids.tolist() == by_kernel.last_tokens.tolist()
        assert found.is_finite.all()
        assert want.logprobs is not None
        assert found.logprobs is not None
        assert (found.logprobs.rows.tolist(), found.logprobs.num_top) == (
            want.logprobs.rows.tolist(),
            want.logprobs.num_top,
        )
        (sampled, top, top_ids), expected = found.logprobs.find(), want.logprobs.find()
        assert top_ids.tolist() == expected[2].tolist()
        assert torch.allclose(sampled, expected[0], atol=1e-5)
        assert torch.allclose(top, expected[1], atol=1e-5)
        assert torch.equal(sampled, kernel.logprobs[found.logprobs.rows, 0])
        assert sampled[0] == top[0, 0]  # the likeliest has one logprob
    assert torch.equal(by_kernel._settings.write_seen(), by_torch._settings.write_seen())
    assert torch.equal(logits, before)


@pytest.mark.parametrize("shape", [ONE, SPLIT], ids=str)
def test_rows_come_in_any_order_and_padding_samples_nothing(shape: Shape, device: torch.device) -> None:
    logits = noise(4, 300).to(device)
    by_torch, by_kernel, kernel = make_samplers(300, shape, device)
    slots, positions = np.array([5, 0, 8]), np.array([7, 9, 11])
    want = by_torch.sample(logits[:3], slots, positions).token_ids
    kernel.token_ids.fill_(-3)
    by_kernel.last_tokens.fill_(-3)
    launch(by_kernel, logits, slots, positions)  # of one row more than there are slots
    assert kernel.token_ids[:4].tolist() == [*want.tolist(), -3]
    assert by_kernel.last_tokens[[5, 0, 8]].tolist() == want.tolist()
    assert (by_kernel.last_tokens == -3).sum() == len(SETTINGS) - 3


@pytest.mark.parametrize("shape", [ONE, SPLIT], ids=str)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_row_that_is_not_finite_is_reported_and_harms_no_other(
    shape: Shape, bad: float, device: torch.device
) -> None:
    settings: tuple[Fields, ...] = ({"top_p": 0.9}, {"top_k": 5, "logit_bias": ((3, 1.0),)}, {"temperature": 0.0})
    logits, rows = noise(3, 300).to(device), np.arange(3)
    by_torch, by_kernel, _ = make_samplers(300, shape, device, settings)
    want = by_torch.sample(logits, rows, rows + NEXT).token_ids
    logits[1, 260] = bad
    found = launch(by_kernel, logits, rows, rows + NEXT)
    assert found.is_finite.tolist() == [True, False, True]
    assert found.token_ids[[0, 2]].tolist() == want[[0, 2]].tolist()
    assert 0 <= found.token_ids[1] < 300


def test_a_slot_that_starts_anew_is_updated_and_the_others_stay(device: torch.device) -> None:
    logits, rows = torch.zeros(2, 64, device=device), np.arange(2)
    settings: tuple[Fields, ...] = ({"temperature": 0.0, "logit_bias": ((9, 5.0),)},) * 2
    _, by_kernel, _ = make_samplers(64, ONE, device, settings)
    assert launch(by_kernel, logits, rows, rows + NEXT).token_ids.tolist() == [9, 9]
    params = SamplingParams(max_tokens=4, temperature=0.0, logit_bias=((11, 1.0), (12, 2.0)), min_tokens=3)
    by_kernel.start(SequenceStart(1, (1,), 1, params, seed=1, stop_ids=(12,)))
    assert launch(by_kernel, logits, rows, rows + 2).token_ids.tolist() == [9, 11]


def test_torch_samples_rows_whose_lists_are_too_long_for_it(device: torch.device) -> None:
    biases = tuple((token_id, -1.0) for token_id in range(MAX_BIASES + 1))
    settings: tuple[Fields, ...] = ({"temperature": 0.0, "logit_bias": biases}, {"temperature": 0.0})
    _, by_kernel, kernel = make_samplers(MAX_BIASES + 9, ONE, device, settings)
    assert [kernel.can_sample(np.array(rows)) for rows in ([0], [1], [0, 1])] == [False, True, False]
    found = by_kernel.sample(torch.zeros(2, MAX_BIASES + 9, device=device), np.arange(2), np.full(2, NEXT))
    assert found.token_ids.tolist() == [MAX_BIASES + 1, 0]
    stop_ids = tuple(range(MAX_STOP_IDS + 1))
    by_kernel.start(SequenceStart(1, (1,), 1, SamplingParams(max_tokens=4), seed=1, stop_ids=stop_ids))
    assert not kernel.can_sample(np.array([1]))


def test_the_launch_shape_depends_on_the_number_of_rows_and_the_vocabulary() -> None:
    assert [shape_of(rows, 152_000).num_splits for rows in (1, 8, 9, 32, 64, 65, 512)] == [16, 16, 4, 4, 2, 1, 1]
    assert shape_of(1, 1000).num_splits == 1
    assert all(shape.group & (shape.group - 1) == 0 for _, shape in SHAPES)
