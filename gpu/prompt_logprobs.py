"""How likely a prompt's own tokens are: logprobs out of the logits of the tokens before them. Thread: engine.

The logits of a whole chunk of a long prompt would be gigabytes: they are computed in pieces, and of each piece only
what was asked for is kept. It comes to the host as drawn tokens do, behind an event.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from core.plan import Int32Array, PromptTargets, StepPlan
from core.types import TokenLogprobs
from gpu.device import to_device
from gpu.streams import Event, Streams

PIECE_BYTES = 32 * 1024**2  # of float32 logits, at most ...
PIECE_ROWS = 256  # ... and so many tokens: reading the head's weights is not what takes the time then


def piece_rows(vocab_size: int) -> int:
    """Tokens whose logits are there at once."""
    return min(PIECE_ROWS, max(1, PIECE_BYTES // (4 * vocab_size)))


@dataclass(slots=True)
class PromptScores:
    """What one step tells of prompts, on the host once the event has come.

    Args:
        slots: of the targets' rows.
    """

    targets: list[PromptTargets]
    slots: list[int]
    logprobs: Tensor  # [tokens of all targets], float32
    top: Tensor  # [tokens, most asked for], float32, likeliest first
    top_ids: Tensor  # [tokens, most asked for]
    event: Event

    def wait(self) -> None:
        self.event.synchronize()

    def told(self) -> Iterator[tuple[PromptTargets, int, list[TokenLogprobs] | None]]:
        """Of each target, with its slot; None: the logits are not finite."""
        first = 0
        for targets, slot in zip(self.targets, self.slots, strict=True):
            part = slice(first, first + len(targets.token_ids))
            is_finite = bool(self.logprobs[part].isfinite().all())
            yield targets, slot, self._entries(targets, part) if is_finite else None
            first = part.stop

    def _entries(self, targets: PromptTargets, part: slice) -> list[TokenLogprobs]:
        num_top = targets.num_top
        columns = (self.logprobs[part], self.top[part, :num_top], self.top_ids[part, :num_top])
        return [
            TokenLogprobs(token_id, logprob, tuple(zip(top_ids, top, strict=True)))
            for token_id, logprob, top, top_ids in zip(
                targets.token_ids, *(column.tolist() for column in columns), strict=True
            )
        ]


def scored_tokens(plan: StepPlan, first_tokens: Int32Array) -> Int32Array:
    """Of the plan's tokens, those whose next ones its targets name, in their order.

    Args:
        first_tokens: [rows]: index of each row's first token.
    """
    parts = [
        np.arange(len(targets.token_ids), dtype=np.int32) + first_tokens[targets.row] + targets.first
        for targets in plan.prompt_targets
    ]
    return np.concatenate(parts) if parts else np.empty(0, dtype=np.int32)


def score(
    hidden: Tensor, plan: StepPlan, logits_of: Callable[[Tensor], Tensor], vocab_size: int, streams: Streams
) -> PromptScores:
    """Start what the plan's targets ask for on its way to the host.

    Args:
        hidden: [tokens of all targets, hidden]
        logits_of: [tokens, hidden] -> [tokens, vocab], float32
    """
    targets = plan.prompt_targets
    most = min(max(one.num_top for one in targets), vocab_size)
    all_ids = np.array(list(chain.from_iterable(one.token_ids for one in targets)), dtype=np.int64)
    wanted = to_device(all_ids, hidden.device)
    found: list[tuple[Tensor, ...]] = []
    num_rows = piece_rows(vocab_size)
    for some, token_ids in zip(torch.split(hidden, num_rows), torch.split(wanted, num_rows), strict=True):
        logprobs = logits_of(some).log_softmax(-1)  # [some, vocab]
        found.append((logprobs.gather(1, token_ids.unsqueeze(1)).squeeze(1), *logprobs.topk(most)))
    logprobs, top, top_ids = (_to_host(torch.cat(pieces), streams) for pieces in zip(*found, strict=True))
    slots = plan.slots[[one.row for one in targets]].tolist()
    return PromptScores(targets, slots, logprobs, top, top_ids, streams.current.record())


def _to_host(found: Tensor, streams: Streams) -> Tensor:
    kept = streams.pinned(found.nbytes).view(found.dtype).view(found.shape)
    streams.current.run(lambda: kept.copy_(found, non_blocking=True))
    return kept
