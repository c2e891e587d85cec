"""What tenants are charged for: engine time, by the step-cost model, and KV blocks. Thread: engine.

A prompt is charged when it is admitted, as in arXiv:2401.00588: the next admission knows of it. A step charges each
row an equal part of its fixed time, and drawn tokens for themselves. Blocks count by the part of the cache that they
are: to hold all of it for a second costs a second.
"""

from collections.abc import Collection
from collections.abc import Sequence as Seq

import numpy as np

from core.plan import StepPlan
from core.sequence import Sequence, SequenceState
from core.step_cost import StepCostModel, StepWork, row_cost_s


class Charges:
    """
    What differs by the row is kept by slot, so that a step of hundreds of rows costs a few array operations.

    Args:
        num_blocks: that there are.
        num_slots: that sequences may have.
    """

    def __init__(self, model: StepCostModel, num_blocks: int, num_slots: int) -> None:
        self._model = model
        self._num_blocks = num_blocks
        self._device_s = np.zeros(num_slots)  # that the slot's sequence has taken since it has the slot
        self._kv_block_s = np.zeros(num_slots)
        self._prepaid_ends = np.zeros(num_slots, np.int64)  # up to this position its tenant was charged when admitted

    def prefill_s(self, start: int, end: int, num_prompt_tokens: int) -> float:
        """What these positions of a sequence cost."""
        work = StepWork()
        work.add(start, end, num_prompt_tokens)
        return row_cost_s(self._model.coefficients_s, work)

    def prepay(self, sequence: Sequence) -> None:
        """Charge for all that an admitted sequence, which has its slot, has to compute now."""
        start, end = sequence.num_computed_tokens, len(sequence.token_ids)
        cost_s = self.prefill_s(start, end, sequence.num_prompt_tokens)
        self._prepaid_ends[sequence.slot] = end
        sequence.prepaid_token_s = cost_s / (end - start)
        sequence.prepaid_s = cost_s
        sequence.tenant.charge(cost_s)
        sequence.tenant.prepaid_s += cost_s

    def leave(self, sequence: Sequence) -> None:
        """Before a sequence loses its slot: put down what it has taken, and give back what it has not used."""
        slot = sequence.slot
        sequence.device_s += float(self._device_s[slot])
        sequence.kv_block_s += float(self._kv_block_s[slot])
        self._device_s[slot] = self._kv_block_s[slot] = 0.0
        self._refund(sequence)

    def vacate(self, slot: int) -> None:
        """What the slot's sequence has taken since it left is nobody's: it was computed for nothing."""
        self._device_s[slot] = self._kv_block_s[slot] = 0.0

    def _refund(self, sequence: Sequence) -> None:
        """Give back what was charged ahead and came from the cache instead, or is not computed as it gives way."""
        self._prepaid_ends[sequence.slot] = 0
        sequence.tenant.refund(sequence.prepaid_s)
        sequence.prepaid_s = 0.0

    def _use(self, sequence: Sequence, seconds: float) -> None:
        seconds = min(seconds, sequence.prepaid_s)
        sequence.prepaid_s -= seconds
        sequence.tenant.prepaid_s -= seconds

    def charge_step(
        self, plan: StepPlan, rows: Seq[Sequence], running: Collection[Sequence], work: StepWork, step_s: float
    ) -> int:
        """Charge a step that took step_s, and attribute it to the sequences that were in it.

        Rows that were computed for nothing, because their sequences had ended one step earlier, are charged to their
        tenants all the same: who ends often pays for the steps that it leaves. No request's Cost has them.

        Args:
            rows: the plan's sequences.
            running: all that may be computed: some of the rows, and those that only hold blocks.

        Returns: how many blocks they hold; a shared one counts for each.
        """
        fixed_s, _, _, token_s, kv_s = self._model.coefficients_s
        fixed_s /= len(rows)
        block_s = (self._model.predict(work) if self._model.is_ready else step_s) / self._num_blocks
        num_blocks = np.array([len(sequence.table.blocks) for sequence in rows])
        parts_s = fixed_s + token_s + kv_s * plan.starts  # of the step, as predicted; of a row that draws
        owed_s = parts_s + block_s * num_blocks
        for row in np.flatnonzero(plan.starts < self._prepaid_ends[plan.slots]).tolist():
            sequence, start, length = rows[row], int(plan.starts[row]), int(plan.lengths[row])
            used_s = length * sequence.prepaid_token_s
            parts_s[row] = fixed_s + used_s
            owed_s[row] = fixed_s + block_s * num_blocks[row]
            self._use(sequence, used_s)
            if start + length >= self._prepaid_ends[sequence.slot]:
                self._refund(sequence)
        predicted_s = float(parts_s.sum())
        self._device_s[plan.slots] += parts_s * (step_s / predicted_s) if predicted_s > 0.0 else step_s / len(rows)
        self._kv_block_s[plan.slots] += num_blocks * step_s
        for sequence, seconds in zip(rows, owed_s.tolist(), strict=True):
            sequence.tenant.charge(seconds)
        num_held = int(num_blocks.sum())
        if len(running) > sum(sequence.state is SequenceState.RUNNING for sequence in rows):
            num_held += self._charge_bystanders(running, set(rows), block_s, step_s)
        return num_held

    def _charge_bystanders(
        self, running: Collection[Sequence], rows: set[Sequence], block_s: float, step_s: float
    ) -> int:
        """Charge those who only hold blocks. Returns how many."""
        num_held = 0
        for sequence in running:
            if sequence not in rows:
                num_blocks = len(sequence.table.blocks)
                num_held += num_blocks
                self._kv_block_s[sequence.slot] += num_blocks * step_s
                sequence.tenant.charge(num_blocks * block_s)
        return num_held
