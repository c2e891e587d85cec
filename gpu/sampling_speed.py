"""How long drawing takes: what is measured at start, and by bench/sampling.py. Thread: engine."""

import time

import numpy as np
import torch
from torch import Tensor

from core.plan import SequenceStart
from core.types import SamplingParams
from gpu.sampler import Sampler, SamplerChoice

ROUNDS = 3  # the best counts, and the first warms up
USUAL = SamplingParams(max_tokens=1024, temperature=0.8, top_k=50, top_p=0.9)
PROMPT = tuple(range(512))
LIKELY_TOKENS = 40
LIKELY_SPREAD, SPREAD = 8.0, 2.0  # logits' standard deviations


def seconds_of_drawing(choice: SamplerChoice | None, num_rows: int, vocab_size: int) -> float:
    """The best round of as many rows with USUAL parameters."""
    sampler = started(choice, num_rows, vocab_size, USUAL)
    logits = likely_logits(num_rows, vocab_size)
    slots, best_s = np.arange(num_rows), float("inf")
    for turn in range(ROUNDS):
        started_s = time.perf_counter()
        sampler.sample(logits, slots, np.full(num_rows, len(PROMPT) + turn))
        best_s = min(best_s, time.perf_counter() - started_s)
    return best_s


def started(choice: SamplerChoice | None, num_rows: int, vocab_size: int, params: SamplingParams) -> Sampler:
    """A sampler on the CPU, whose slots all ask for the same."""
    sampler = Sampler(num_rows, vocab_size, torch.device("cpu"), choice)
    prompt = tuple(token_id % vocab_size for token_id in PROMPT)
    for slot in range(num_rows):
        sampler.start(SequenceStart(slot, prompt, len(prompt), params, seed=slot, stop_ids=()))
    return sampler


def likely_logits(num_rows: int, vocab_size: int) -> Tensor:
    """As a trained model's: a few tokens stand out: [rows, vocab]."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(num_rows, vocab_size, generator=generator) * SPREAD
    likely = torch.randint(vocab_size, (num_rows, LIKELY_TOKENS), generator=generator)
    return logits.scatter_add_(1, likely, torch.randn(likely.shape, generator=generator).abs() * LIKELY_SPREAD)
