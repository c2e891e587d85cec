"""Sampled tokens come down behind an event, those of two steps side by side, however late a device copies them."""

import numpy as np
import torch

from core.types import TokenLogprobs
from gpu.sampler import RequestedLogprobs, Sampled, TokensToHost
from tests.gpu.late_streams import LateStreams


def sampled(*token_ids: int, logprobs: RequestedLogprobs | None = None) -> Sampled:
    return Sampled(torch.tensor(token_ids), torch.tensor([token_id > 0 for token_id in token_ids]), logprobs)


def test_a_step_is_waited_for_without_the_one_behind_it() -> None:
    streams = LateStreams()
    tokens = TokensToHost(4, streams)
    first, second = tokens.send(sampled(5, 0, 7)), tokens.send(sampled(8))
    assert first.token_ids.tolist() == [-1] * 3  # nothing has come yet
    first.wait()
    assert (first.token_ids.tolist(), first.is_finite.tolist()) == ([5, 0, 7], [True, False, True])
    assert second.token_ids.tolist() == [-1]
    second.wait()
    assert (first.token_ids.tolist(), second.token_ids.tolist()) == ([5, 0, 7], [8])


def test_buffers_take_turns_and_are_made_once() -> None:
    streams = LateStreams()
    tokens = TokensToHost(2, streams)
    num_buffers = len(streams.pinned_bytes)
    sent = [tokens.send(sampled(step, step + 1)) for step in range(1, 3)]
    for step in range(3, 7):
        sent[0].wait()
        assert sent.pop(0).token_ids.tolist() == [step - 2, step - 1]
        sent.append(tokens.send(sampled(step, step + 1)))
    assert len(streams.pinned_bytes) == num_buffers == 4


def test_logprobs_come_with_their_tokens() -> None:
    """They are computed when the device comes to it."""
    tokens = TokensToHost(4, LateStreams())
    logits = torch.full((1,), torch.nan)

    def find() -> tuple[torch.Tensor, ...]:
        return logits * 1, torch.tensor([[-0.5, -1.5]]), torch.tensor([[7, 3]])

    sent = tokens.send(sampled(5, 7, logprobs=RequestedLogprobs(np.array([1]), [2], 2, find)))
    logits.fill_(-0.5)
    sent.wait()
    assert sent.logprobs_by_row() == {1: TokenLogprobs(7, -0.5, ((7, -0.5), (3, -1.5)))}
