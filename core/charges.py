"""What tenants are charged for: engine time, by the step-cost model, and KV blocks. Thread: engine.

A prompt is charged when it is admitted, as in arXiv:2401.00588: the next admission knows of it. A step charges each
row an equal part of its fixed time, and drawn tokens for themselves. Blocks count by the part of the cache that they
are: to hold all of it for a second costs a second.
"""

from collections import defaultdict
from collections.abc import Collection
from collections.abc import Sequence as Seq

from core.fairness import Tenant
from core.sequence import Sequence
from core.step_cost import StepCostModel, StepWork, row_cost_s


class Charges:
    """
    Args:
        num_blocks: that there are.
    """

    def __init__(self, model: StepCostModel, num_blocks: int) -> None:
        self._model = model
        self._num_blocks = num_blocks

    def prefill_s(self, start: int, end: int, num_prompt_tokens: int) -> float:
        """What these positions of a sequence cost."""
        work = StepWork()
        work.add(start, end, num_prompt_tokens)
        return row_cost_s(self._model.coefficients_s, work)

    def prepay(self, sequence: Sequence) -> None:
        """Charge for all that an admitted sequence has to compute now."""
        start, end = sequence.num_computed_tokens, len(sequence.token_ids)
        cost_s = self.prefill_s(start, end, sequence.num_prompt_tokens)
        sequence.prepaid_end = end
        sequence.prepaid_token_s = cost_s / (end - start)
        sequence.prepaid_s = cost_s
        sequence.tenant.charge(cost_s)
        sequence.tenant.prepaid_s += cost_s

    def refund(self, sequence: Sequence) -> None:
        """Give back what a sequence has not used of it, because it came from the cache, or because it gives way."""
        sequence.tenant.refund(sequence.prepaid_s)
        sequence.prepaid_s = 0.0

    def _use(self, sequence: Sequence, seconds: float) -> None:
        seconds = min(seconds, sequence.prepaid_s)
        sequence.prepaid_s -= seconds
        sequence.tenant.prepaid_s -= seconds

    def charge_step(
        self, rows: Seq[Sequence], ends: Seq[int], running: Collection[Sequence], work: StepWork, step_s: float
    ) -> int:
        """Charge a step that took step_s, and attribute it to the sequences that were in it.

        Args:
            rows: the sequences that computed something, still in flight and before it is counted as computed.
            ends: the position after the last that each computed.
            running: all that hold blocks.

        Returns: how many blocks they hold; a shared one counts for each.
        """
        fixed_s, _, _, token_s, kv_s = self._model.coefficients_s
        fixed_s /= len(rows)
        block_s = (self._model.predict(work) if self._model.is_ready else step_s) / self._num_blocks
        owed_s: defaultdict[Tenant, float] = defaultdict(float)
        own_token_s = fixed_s + token_s
        parts_s: list[float] = []  # of the step, as predicted
        num_held = 0
        for sequence, end in zip(rows, ends, strict=True):
            start, num_blocks = sequence.num_computed_tokens, len(sequence.table.blocks)
            num_held += num_blocks
            sequence.kv_block_s += num_blocks * step_s
            if start >= sequence.prepaid_end:
                part_s = own_token_s + kv_s * start
                owed_s[sequence.tenant] += part_s + block_s * num_blocks
            else:
                part_s = fixed_s + (end - start) * sequence.prepaid_token_s
                owed_s[sequence.tenant] += fixed_s + block_s * num_blocks
                self._use(sequence, part_s - fixed_s)
                if end >= sequence.prepaid_end:
                    self.refund(sequence)
            parts_s.append(part_s)
        _attribute(rows, parts_s, step_s)
        if len(running) > len(rows):
            for sequence in running:
                if not sequence.is_in_flight:
                    num_blocks = len(sequence.table.blocks)
                    num_held += num_blocks
                    sequence.kv_block_s += num_blocks * step_s
                    owed_s[sequence.tenant] += block_s * num_blocks
        for tenant, seconds in owed_s.items():
            tenant.charge(seconds)
        return num_held


def _attribute(rows: Seq[Sequence], parts_s: list[float], step_s: float) -> None:
    """Divide a step among its rows in proportion to their parts; where nothing is predicted, equally."""
    predicted_s = sum(parts_s)
    if predicted_s <= 0.0:
        parts_s, predicted_s = [1.0] * len(rows), len(rows)
    scale = step_s / predicted_s
    for sequence, part_s in zip(rows, parts_s, strict=True):
        sequence.device_s += part_s * scale
