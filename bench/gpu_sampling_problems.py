"""Problems of sampling: to the token what torch draws, and the logprobs of what was drawn; see gpu_problems.py."""

from typing import Any

import numpy as np
import torch
from torch import Generator, Tensor

from bench.gpu_problems import Problem, noise
from core.plan import SequenceStart
from core.types import SamplingParams
from gpu.sampler import Sampler, SamplingSlots

PROMPT = (1, 2, 3, 3, 7)
OUTPUT = (4, 5, 5)  # so far
STOP_IDS = (2, 9)
# By turns: what requests of a server ask for.
UNPENALISED: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.7},
    {"temperature": 0.8, "top_k": 20, "top_p": 0.9},
    {"temperature": 1.0, "min_p": 0.05},
    {"temperature": 1.3, "top_p": 0.5},
    {"temperature": 0.9, "top_k": 1},
    {"temperature": 1.0, "logit_bias": ((5, 3.5), (9, -100.0)), "min_tokens": 8},
)
PENALISED: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0, "repetition_penalty": 1.3},
    {"temperature": 1.0, "presence_penalty": 0.5, "frequency_penalty": 0.3, "min_p": 0.02},
    {"temperature": 0.8, "repetition_penalty": 0.8, "logit_bias": ((4, 2.0),), "top_k": 50, "top_p": 0.95},
)
ASKS = {"greedy": UNPENALISED[:1], "unpenalised": UNPENALISED, "all": UNPENALISED + PENALISED}
LOGPROB_TOLERANCE = 1e-5


def sample(generator: Generator, dtype: torch.dtype, rows: int, vocab: int, asks: str) -> Problem:
    """
    Args:
        asks: of ASKS.
    """
    from gpu.kernels.sampler import DeviceSampler

    logits, asked = _logits(generator, dtype, rows, vocab), SamplingSlots(rows, vocab, generator.device)
    by_torch = Sampler(rows, vocab, generator.device)
    for start in _starts(rows, ASKS[asks], {}):
        asked.start(start)
        by_torch.start(start)
    kernel, slots, positions = DeviceSampler(asked), np.arange(rows), np.full(rows, len(PROMPT + OUTPUT))
    kernel.place(slots, positions)
    return Problem(
        dtype,
        lambda: kernel.launch(logits),
        lambda: (by_torch.sample(logits.float(), slots, positions).token_ids,),
        logits.nbytes,
        outputs=lambda _: (kernel.token_ids[:rows],),
        tolerance=0.0,
    )


def logprobs(generator: Generator, dtype: torch.dtype, rows: int, vocab: int) -> Problem:
    """Of the drawn tokens and of all others, whatever else is asked for."""
    from gpu.kernels.sampler import DeviceSampler

    logits, asked = _logits(generator, dtype, rows, vocab), SamplingSlots(rows, vocab, generator.device)
    for start in _starts(rows, ASKS["all"], {"num_logprobs": 0}):
        asked.start(start)
    kernel = DeviceSampler(asked)
    kernel.place(np.arange(rows), np.full(rows, len(PROMPT + OUTPUT)))

    def reference() -> tuple[Tensor, Tensor]:
        exact = logits.double().log_softmax(-1)
        return exact.gather(1, kernel.token_ids[:rows].unsqueeze(1)).squeeze(1), exact

    def found(_: Any) -> tuple[Tensor, Tensor]:
        drawn, top, log_total = kernel.logprobs[:rows].unbind(-1)
        return drawn, logits - top.unsqueeze(1) - log_total.unsqueeze(1)

    return Problem(
        dtype, lambda: kernel.launch(logits), reference, logits.nbytes, outputs=found, tolerance=LOGPROB_TOLERANCE
    )


def _logits(generator: Generator, dtype: torch.dtype, rows: int, vocab: int) -> Tensor:
    return 4 * noise(generator, dtype, rows, vocab)


def _starts(rows: int, asks: tuple[dict[str, Any], ...], more: dict[str, Any]) -> list[SequenceStart]:
    known = PROMPT + OUTPUT
    found = []
    for slot in range(rows):
        params = SamplingParams(max_tokens=64, **asks[slot % len(asks)], **more)
        found.append(SequenceStart(slot, known, len(PROMPT), params, seed=slot + 1, stop_ids=STOP_IDS))
    return found
