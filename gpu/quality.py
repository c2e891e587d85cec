"""Measures how much quantisation worsens a model's predictions of a fixed text. Thread: engine (the doctor's).

The text is this project's own, so that no model was trained on it: prose, speech, a recipe, code, minutes. Each token
is predicted from all before it; the reference is the model itself in the serving format.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from core.config import BLOCK_SIZE
from core.plan import SequenceStart, StepPlan, make_plan
from core.types import SamplingParams
from gpu.runner import ModelRunner

HELD_TEXT = Path(__file__).parent / "held_text.txt"
CHUNK_TOKENS = 32  # computed at once: few enough for the operators that decode
MAX_TOKENS = 2048


@dataclass(frozen=True, slots=True)
class Predictions:
    """Of every token of a text but the first.

    Args:
        surprises: [tokens - 1], float32, nats: how unlikely the token was.
        choices: [tokens - 1]: the tokens that greedy decoding would sample.
    """

    surprises: Tensor
    choices: Tensor

    @property
    def perplexity(self) -> float:
        return math.exp(float(self.surprises.double().mean()))

    def agreement(self, other: "Predictions") -> float:
        """The share of tokens that both choose alike, from 0 to 1."""
        return float((self.choices == other.choices).double().mean())


def held_tokens(token_ids: Sequence[int], max_model_len: int) -> list[int]:
    """The first tokens of the text, as many as are measured."""
    return list(token_ids[: min(MAX_TOKENS, max_model_len - 1)])


def predict(runner: ModelRunner, token_ids: Sequence[int]) -> Predictions:
    """Predict a text in slot 0 of a runner that computes nothing else.

    Args:
        token_ids: at least two, and less than the runner's max_model_len.
    """
    surprises, choices = [], []
    size = min(CHUNK_TOKENS, runner.limits.max_batch_tokens)
    for start in range(0, len(token_ids) - 1, size):
        chunk = token_ids[start : min(start + size, len(token_ids) - 1)]
        logits = runner.logits(_plan(chunk, start, len(token_ids))).cpu()  # [tokens, vocab], float32
        wanted = torch.tensor(token_ids[start + 1 : start + 1 + len(chunk)])
        surprises.append(torch.nn.functional.cross_entropy(logits, wanted, reduction="none"))
        choices.append(logits.argmax(-1))
    return Predictions(torch.cat(surprises), torch.cat(choices))


def _plan(chunk: Sequence[int], start: int, num_prompt_tokens: int) -> StepPlan:
    """A step of a prompt's next tokens, in slot 0, whose blocks are 0, 1, 2 and so on."""
    blocks = range(-(-start // BLOCK_SIZE), -(-(start + len(chunk)) // BLOCK_SIZE))
    params = SamplingParams(max_tokens=1, temperature=0.0)
    starts = [SequenceStart(0, tuple(chunk), num_prompt_tokens, params, seed=0, stop_ids=())] if start == 0 else []
    return make_plan([(0, start, chunk, True)], ((0, block, block) for block in blocks), sequence_starts=starts)
