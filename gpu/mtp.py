"""Drafts by the model's own head that predicts later tokens (multi-token prediction). Thread: engine.

The head is one layer more. It reads a token's last hidden state together with the token that followed, and predicts the
one after that; to go on, it reads its own state and its own prediction. It runs as a draft model does, over the
sequence's tokens from the second one on; their states the model's steps leave in LastStates. Where some are there no
more, of a long prompt or of what the prefix cache has brought, it sees the text from the oldest state on.
Source: DeepSeek-V3 (arXiv:2412.19437), section 2.2.
"""

import time
from collections.abc import Callable, Hashable
from collections.abc import Sequence as Seq
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from core.config import BLOCK_SIZE, ModelConfig
from core.drafts import DraftWish
from core.plan import StepOutput, StepPlan
from core.sequence import Sequence
from gpu.draft_model import Drafted, Draftee, DraftRunner, Rows, Shifted
from gpu.kv_cache import zeros
from gpu.linear import make_linear
from gpu.memory_plan import MemoryPlan
from gpu.model import Model
from gpu.operators import Operators
from gpu.parameters import ModelWeights, MtpWeights
from gpu.rows import LastStates, StepTokens
from gpu.runner import ModelRunner, StepTicket


class MtpModel(Model):
    """The head.

    Args:
        config: of its layer.
        target: the model, whose embedding and head it shares, and whose normed states it reads.
        num_kv_slots: of its KV cache.

    Attributes:
        before: [num_kv_slots, hidden]: the state that each token of the cache is read with.
        states: of the tokens that the last step has sampled after: [sampled, hidden].
    """

    def __init__(
        self, config: ModelConfig, weights: MtpWeights, operators: Operators, target: Model, num_kv_slots: int
    ) -> None:
        own = ModelWeights(weights.join, [weights.layer], weights.norm, weights.join)
        super().__init__(config, own, operators, ends=(target.embed, target.lm_head))
        self.target = target
        self._join, self._is_normed = make_linear(weights.join, None), weights.is_normed
        self._norms = weights.embedding_norm, weights.state_norm
        self.before = zeros((num_kv_slots, config.hidden_size), weights.join.dtype, weights.join.device)
        self.states = self.before[:0]

    def _begin(self, tokens: StepTokens) -> Tensor:
        read = super()._begin(tokens), self.before.index_select(0, tokens.kv_slots)
        normed = [self.operators.norm(x, weight) for x, weight in zip(read, self._norms, strict=True)]
        return self._join(torch.cat(normed, 1))

    def logits(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        self.states = self.normed(x) if self._is_normed and len(x) else x
        return super().logits(x, out)


class MtpRunner(ModelRunner):
    """Steps of the head.

    Attributes:
        offsets: [slots]: how much later than here a token is in its sequence, on which its noise depends.
        sampled_rows: of the step that was collected last, in the order of MtpModel.states.
    """

    def __init__(self, head: MtpModel, memory: MemoryPlan) -> None:
        super().__init__(head.config, memory.engine, memory, head, head.operators)
        self.head = head
        self.offsets = np.zeros(memory.engine.max_sequences, np.int64)
        self.sampled_rows: list[int] = []

    def forward(self, plan: StepPlan) -> StepTicket:
        ticket = super().forward(plan)
        rows = ticket.sent.sampled
        ticket.sent.sampled = replace(rows, positions=rows.positions + self.offsets[rows.slots])
        return ticket

    def collect(self, ticket: StepTicket) -> StepOutput:
        self.sampled_rows = ticket.sent.sampled.rows.tolist()
        return super().collect(ticket)


class MtpDrafts(DraftRunner):
    """
    Args:
        runner: nobody else steps it.
        states: that the model's steps leave.
        vocab_size: the model's.
    """

    name = "mtp"

    def __init__(
        self, runner: MtpRunner, states: LastStates, vocab_size: int, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        super().__init__(runner, vocab_size, clock)
        self._head_runner, self._states = runner, states
        self._shifted: dict[Sequence, Shifted] = {}
        self._own: dict[int, Tensor] = {}  # by wish: the head's state of what it has drafted last, [1, hidden]

    def clear(self) -> None:
        super().clear()
        self._shifted.clear()

    def read(self, sequence: Sequence) -> Drafted | None:
        """None: the state of the token before the newest is not known."""
        end = len(sequence.token_ids) - 1
        oldest = self._states.oldest(sequence.slot, end)
        if sequence.num_computed_tokens < end or oldest >= end:
            return None
        shifted = self._shifted.get(sequence)
        if shifted is not None and shifted.first + self._num_sure(shifted) < oldest:  # it was not asked for too long
            if (one := self._known.get(shifted)) is not None:
                self._forget(one)
            shifted = None
        if shifted is None:
            self._shifted = {source: one for source, one in self._shifted.items() if one in self._known}
            num_prompt = max(0, sequence.num_prompt_tokens - oldest - 1)
            settings = sequence.sampling, sequence.seed, sequence.stop_ids
            shifted = self._shifted[sequence] = Shifted(sequence, oldest, [], num_prompt, *settings)
        known = self._num_sure(shifted)
        shifted.token_ids[known:] = sequence.token_ids[shifted.first + 1 + known :]
        return shifted

    def _num_sure(self, shifted: Shifted) -> int:
        one = self._known.get(shifted)
        return 0 if one is None else one.num_sure

    def _num_known(self, one: Draftee, token_ids: list[int]) -> int:
        """Drafts that were right are read again, with the model's states."""
        return min(one.num_sure, len(token_ids) - 1)

    def _donor(self, token_ids: list[int], domain: Hashable) -> tuple[Draftee | None, int]:
        return None, 0

    def _step(self, rows: Rows, wishes: Seq[DraftWish], copies: list[tuple[int, int]]) -> dict[int, int]:
        if not rows:
            return {}
        runner, head = self._head_runner, self._head_runner.head
        with torch.inference_mode():
            for index, (one, start, token_ids) in rows.items():
                shifted, end = one.sequence, start + len(token_ids)
                assert isinstance(shifted, Shifted), "read() says so"
                runner.offsets[one.slot] = shifted.first + 1
                places = [one.blocks[i // BLOCK_SIZE] * BLOCK_SIZE + i % BLOCK_SIZE for i in range(start, end)]
                if end <= len(shifted.token_ids):
                    first = shifted.first + start
                    states = self._states.of(shifted.source.slot, first, first + len(token_ids))
                    head.before[places] = head.target.normed(states)
                else:
                    head.before[places] = self._own[index]
        found = super()._step(rows, wishes, copies)
        indexes = list(rows)
        self._own = {indexes[row]: head.states[i : i + 1] for i, row in enumerate(runner.sampled_rows)}
        return found
