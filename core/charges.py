"""What tenants are charged for: engine time, by the step-cost model, and KV blocks. Thread: engine.

A prompt is charged when it is admitted, as in arXiv:2401.00588: the next admission knows of it. A step charges each
row an equal part of its fixed time, and drawn tokens for themselves. Blocks count by the part of the cache that they
are: to hold all of it for a second costs a second.
"""

from collections.abc import Collection
from collections.abc import Sequence as Seq

from core.in_flight import Flight
from core.preemption import RunningBounds
from core.sequence import Sequence, SequenceState
from core.step_cost import StepCostModel


class Charges:
    """
    What differs by the row lies on its sequence, in plain floats: few rows cost a fraction of what the same takes in
    arrays, and hundreds no more, for each has its tenant to be charged.

    Args:
        num_blocks: that there are.

    Attributes:
        bounds: raised by all that is charged to those who run.
    """

    def __init__(self, model: StepCostModel, num_blocks: int) -> None:
        self._model = model
        self._num_blocks = num_blocks
        self.bounds = RunningBounds()

    def prefill_s(self, start: int, end: int, num_prompt_tokens: int) -> float:
        """What these positions of a sequence cost."""
        return self._model.prefill_s(start, end, num_prompt_tokens)

    def prepay(self, sequence: Sequence) -> None:
        """Charge for all that an admitted sequence, which has its slot and does not run yet, has to compute now."""
        start, end = sequence.num_computed_tokens, len(sequence.token_ids)
        cost_s = self.prefill_s(start, end, sequence.num_prompt_tokens)
        sequence.prepaid_end = end
        sequence.prepaid_token_s = cost_s / (end - start)
        sequence.prepaid_s = cost_s
        sequence.tenant.charge(cost_s)
        sequence.tenant.prepaid_s += cost_s

    def refund(self, sequence: Sequence) -> None:
        """Give back what was charged ahead and came from the cache instead, or is not computed as it gives way."""
        sequence.prepaid_end = 0
        sequence.tenant.refund(sequence.prepaid_s)
        sequence.prepaid_s = 0.0

    def charge_step(self, flight: Flight, running: Collection[Sequence], step_s: float) -> int:
        """Charge a step that took step_s, and attribute it to the sequences that were in it.

        Rows that were computed for nothing, because their sequences had ended one step earlier, are charged to their
        tenants all the same, as the device has computed them. No request's Cost has them.

        Args:
            running: all that may be computed: some of the rows, and those that only hold blocks.

        Returns: how many blocks they hold; a shared one counts for each.
        """
        rows = flight.sequences
        fixed_s, _, _, token_s, kv_s = self._model.coefficients_s
        fixed_s /= len(rows)
        drawn_s = fixed_s + token_s
        block_s = (self._model.predict(flight.work) if self._model.is_ready else step_s) / self._num_blocks
        parts_s: list[float] = []  # of the step, as predicted
        held: list[int] = []  # blocks
        for sequence, start, length in zip(
            rows, flight.plan.starts.tolist(), flight.plan.lengths.tolist(), strict=True
        ):
            owed_s = part_s = drawn_s + kv_s * start
            if start < sequence.prepaid_end:
                owed_s, part_s = fixed_s, fixed_s + self._use_prepaid(sequence, start, length)
            num_blocks = len(sequence.table.blocks)
            parts_s.append(part_s)
            held.append(num_blocks)
            tenant = sequence.tenant
            owed_s += block_s * num_blocks
            if tenant.credit_s or tenant.share != 1:
                tenant.charge(owed_s)
            else:  # what charge() comes to for most rows of most steps
                tenant.served_s += owed_s
                tenant.counter_s += owed_s
        num_held = sum(held)
        predicted_s = sum(parts_s)
        num_running = _attribute(rows, parts_s, predicted_s, held, step_s)
        if len(running) > num_running:
            num_held += self._charge_bystanders(running, set(rows), block_s, step_s)
        self.bounds.most_s += predicted_s + block_s * num_held  # no tenant was charged more than all together
        return num_held

    def _use_prepaid(self, sequence: Sequence, start: int, length: int) -> float:
        """Of what was charged when it was admitted, these positions' part is used now. Returns it, in seconds."""
        part_s = length * sequence.prepaid_token_s
        used_s = min(part_s, sequence.prepaid_s)
        sequence.prepaid_s -= used_s
        sequence.tenant.prepaid_s -= used_s
        if start + length >= sequence.prepaid_end:
            self.refund(sequence)
        return part_s

    def _charge_bystanders(
        self, running: Collection[Sequence], rows: set[Sequence], block_s: float, step_s: float
    ) -> int:
        """Charge those who only hold blocks. Returns how many."""
        num_held = 0
        for sequence in running:
            if sequence not in rows:
                num_blocks = len(sequence.table.blocks)
                num_held += num_blocks
                sequence.kv_block_s += num_blocks * step_s
                sequence.tenant.charge(num_blocks * block_s)
        return num_held


def _attribute(rows: Seq[Sequence], parts_s: Seq[float], predicted_s: float, held: Seq[int], step_s: float) -> int:
    """Divide what the step took among its sequences: by the parts, equally where these are nothing.

    The part of one that had ended before is nobody's.

    Args:
        predicted_s: all parts together.
        held: blocks of each.

    Returns: how many of them run.
    """
    running, finished, num_running = SequenceState.RUNNING, SequenceState.FINISHED, 0
    if predicted_s <= 0.0:
        parts_s, predicted_s = [1.0] * len(rows), len(rows)
    scale = step_s / predicted_s
    for sequence, part_s, num_blocks in zip(rows, parts_s, held, strict=True):
        if sequence.state is running:
            num_running += 1
        elif sequence.state is finished:
            continue
        sequence.device_s += part_s * scale
        sequence.kv_block_s += num_blocks * step_s
    return num_running
