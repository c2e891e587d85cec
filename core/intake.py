"""What becomes of a request when it comes: a refusal, or sequences that can run. Thread: engine."""

from collections.abc import Callable

from core.plan import RunnerLimits
from core.sequence import SequenceGroup, Tenant
from core.types import Request


class Intake:
    """
    Args:
        num_slots: sequences that can run at once.
        eos_ids: the model's own ends.
        seeds: draws a 64-bit seed for a request that names none.
    """

    def __init__(
        self, limits: RunnerLimits, num_slots: int, eos_ids: tuple[int, ...], seeds: Callable[[], int]
    ) -> None:
        self._max_length = min(limits.max_model_len, limits.num_blocks * limits.block_size)  # a lone sequence fits
        self._num_slots = num_slots
        self._eos_ids = eos_ids
        self._seeds = seeds
        self._num_made = 0

    def cause_of_refusal(self, request: Request) -> str | None:
        """Why a request can never run, for its user; None if it can."""
        num_tokens = len(request.prompt_ids)
        if num_tokens == 0:
            return "The prompt is empty."
        if num_tokens >= self._max_length:
            return (
                f"The prompt has {num_tokens} tokens; this server holds at most {self._max_length - 1}, and one more."
            )
        if request.num_sequences > self._num_slots:
            return f"{request.num_sequences} sequences were asked for; this server runs {self._num_slots} at once."
        return None

    def make_group(self, request: Request, tenant: Tenant, latest_start_s: float) -> SequenceGroup:
        """The sequences of a request that can run, the first of which leads.

        Args:
            latest_start_s: see SequenceGroup.
        """
        seed = request.sampling.seed
        group = SequenceGroup(request, tenant, self._num_made, self._seeds() if seed is None else seed, latest_start_s)
        self._num_made += 1
        sampling = request.sampling
        stop_ids = sampling.stop_token_ids if sampling.ignore_eos else self._eos_ids + sampling.stop_token_ids
        max_length = min(len(request.prompt_ids) + sampling.max_tokens, self._max_length)
        leader, *siblings = [group.add(stop_ids, max_length) for _ in range(request.num_sequences)]
        group.leader = leader
        group.unforked = {sibling.index: sibling for sibling in siblings}
        return group
