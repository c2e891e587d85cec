"""Decides what each step computes, and what its result means. Thread: engine. No I/O; time and seeds are arguments.

A step lets sequences catch up on their tokens. Every submitted request ends with exactly one terminal TokenChunk, from
the last of its sequences. What is decided where: planner.py, what a step computes; step_results.py, what came of it;
sequence_states.py, what becomes of sequences meanwhile.
"""

import math
from collections.abc import Callable, Iterable

from core.config import INTER_TOKEN_TARGET
from core.inspection import SchedulerView
from core.intake import Intake
from core.kv_cache import BlockCopies, BlockLabel
from core.plan import InFlight, RunnerLimits, StepOutput, StepPlan, restart_rows
from core.planner import Planner
from core.queue import Charges, TenantShares
from core.sequence import SequenceGroup, SequenceState
from core.sequence_states import Outbox, SequenceBlocks, SequenceStates
from core.step_cost import StepCostModel
from core.step_results import StepResults
from core.types import EngineStats, FinishReason, Request, StepDelivery, TokenChunk, Usage


class Scheduler:
    """Sequences, their slots and their blocks, between the inbox and the runner.

    Args:
        limits: what the runner has room for.
        eos_ids: the model's own ends.
        seeds: draws a 64-bit seed for a request that names none.
        has_prefix_cache: requests use what others of their domain have computed.
        inter_token_target: see EngineConfig.
        stored: see HostBlocks.
    """

    def __init__(
        self,
        limits: RunnerLimits,
        eos_ids: tuple[int, ...],
        seeds: Callable[[], int],
        has_prefix_cache: bool = True,
        inter_token_target: float | None = INTER_TOKEN_TARGET,
        stored: Iterable[tuple[int, BlockLabel]] = (),
    ) -> None:
        self.limits = limits
        num_slots = min(limits.max_sequences, limits.max_batch_tokens)  # so that every running decode has its token
        self._intake = Intake(limits, num_slots, eos_ids, seeds)
        self.step_cost = StepCostModel(limits.prompt_tile, limits.few_tokens)
        for row in limits.timed_rows:
            self.step_cost.observe_row(row.start, row.end, row.num_prompt_tokens, row.took_s)
        self.shares = TenantShares()
        self._charges = Charges(self.step_cost, limits.num_blocks)
        blocks = SequenceBlocks(limits, has_prefix_cache, self._charges.prefill_s, stored)
        self.cache, self.pool, self.host = blocks.cache, blocks.pool, blocks.host
        self._outbox = Outbox()
        self._in_flight = InFlight(limits.max_in_flight)
        self._states = SequenceStates(num_slots, blocks, self._charges, self.shares, self._outbox)
        self._planner = Planner(limits, self._states, self._in_flight, self.step_cost, inter_token_target)
        self._results = StepResults(self._states, self._in_flight, self.step_cost, limits.block_size)
        self._outbox.take(self.stats())  # what the loop knows already

    # What the loop asks

    def submit(self, request: Request) -> None:
        """Queue a request; one that can never run is refused with a terminal ERROR chunk."""
        assert request.request_id not in self._states.groups, f"request {request.request_id} was submitted twice"
        cause = self._intake.cause_of_refusal(request)
        if cause is not None:
            self._outbox.chunks.append(
                TokenChunk(
                    request_id=request.request_id,
                    index=0,
                    finish_reason=FinishReason.ERROR,
                    usage=Usage(num_prompt_tokens=0, num_completion_tokens=0),
                    error=cause,
                )
            )
            return
        group = self._make_group(request)
        self._states.groups[request.request_id] = group
        assert group.leader is not None, "a request has a sequence"
        self._states.waiting.add(group.leader, request.arrival_s)

    def cancel(
        self, request_id: str, reason: FinishReason, index: int | None = None, num_tokens_kept: int | None = None
    ) -> None:
        """End a request, or one of its sequences. What is in flight is marked, and apply() finishes it.

        A sequence that has ended is not ended again, but until its request's terminal chunk its usage is still cut.
        Without an index, num_tokens_kept holds for each of the request's sequences.
        """
        group = self._states.groups.get(request_id)
        if group is None or (index is not None and not 0 <= index < len(group.sequences)):
            return
        chosen = group.sequences if index is None else [group.sequences[index]]
        for sequence in chosen:  # all before the first ends: the terminal chunk counts them all
            sequence.keep(num_tokens_kept)
        for sequence in reversed(chosen):  # the leader last, so that it is not handed on among those who leave too
            if not sequence.is_in_flight:
                self._states.finish(sequence, reason)
            elif sequence.cancel_reason is None:
                sequence.cancel_reason = reason
                sequence.plain_end = 0
                self._states.unsettled[sequence] = None

    def pause(self, request_id: str) -> None:
        """Leave the request out of the next plans. It keeps its blocks as long as nobody else needs them."""
        group = self._states.groups.get(request_id)
        if group is None or group.is_paused:
            return
        group.is_paused = True
        self._states.num_paused += 1
        for sequence in group.sequences:
            sequence.is_paused = True
            sequence.plain_end = 0
            self._states.waiting.remove(sequence)

    def resume(self, request_id: str) -> None:
        """Let a paused request go on, from its old place in the queue."""
        group = self._states.groups.get(request_id)
        if group is None or not group.is_paused:
            return
        group.is_paused = False
        self._states.num_paused -= 1
        for sequence in group.sequences:
            sequence.is_paused = False
            if sequence.state is SequenceState.WAITING and sequence.index not in group.unforked:
                self._states.waiting.add(sequence, self._states.now_s)

    # One step

    def plan(self, now: float) -> StepPlan | None:
        """The next step, None when nothing can be computed now. Every plan must come back to apply(), in order.

        With a step in flight, None too where it has to come back first: somebody may have to give way, and whoever it
        is may be in it.
        """
        return self._planner.plan(now)

    def offload_kept(self) -> BlockCopies | None:
        """No more steps come: what has to be copied out for all that nobody holds to be on the host."""
        self.cache.offload_kept()
        return self.host.take_copies()

    def restart(self, plan: StepPlan, rows: range) -> StepPlan:
        """These rows of a plan whose step failed, to be computed anew whatever the failed step has left behind.

        Args:
            plan: the only one in flight: what has been made behind it would have read what it did not write.
        """
        assert len(self._in_flight) == 1, "a later step is in flight"
        restarted = restart_rows(plan, rows, self._in_flight.find(plan).sequences[rows.start : rows.stop])
        restarted.host_copies = self.host.on_restart()
        return restarted

    def apply(self, plan: StepPlan, output: StepOutput, now: float) -> StepDelivery:
        """Take in what the oldest step in flight gave: tokens, forks, ends. Returns all news since the last delivery.

        What it computed for those who have ended or were lost since it was planned counts for nobody.
        """
        self._results.take_in(plan, output, now)
        return self._outbox.take(self.stats())

    def lose_in_flight(self, now: float) -> StepDelivery:
        """A step raised when its result was read, with another one behind it: neither is known to have done anything.

        Their sequences compute all again. From now on each step with one of them in it has to come back before the
        next is sent, until it has drawn a token: if one raises again, its rows can be computed one by one.
        """
        self._results.lose_in_flight(now)
        return self._outbox.take(self.stats())

    def flush(self) -> StepDelivery | None:
        """News that no step will bring: ends of what was not in flight, who is paused. None when there are none."""
        stats = self.stats()
        return self._outbox.take(stats) if self._outbox.has_news(stats) else None

    def stats(self) -> EngineStats:
        """A snapshot. Waiting is the queue's length, running are sequences that hold blocks, paused are requests."""
        return EngineStats(
            num_waiting=len(self._states.waiting),
            num_running=len(self._states.running),
            num_paused=self._states.num_paused,
            num_blocks=self.pool.num_blocks,
            num_used_blocks=self.pool.num_used,
            num_cached_blocks=self.pool.num_kept,
            num_steps=self._results.counts.num_steps,
            num_rows=self._results.counts.num_rows,
            num_prefill_rows=self._results.counts.num_prefill_rows,
            num_prompt_tokens=self._results.counts.num_prompt_tokens,
            num_generated_tokens=self._results.counts.num_generated_tokens,
            num_preemptions=self._planner.num_preemptions,
            num_cache_queries=self._results.counts.num_cache_queries,
            num_cache_hits=self._results.counts.num_cache_hits,
            num_cache_evictions=self.pool.num_evictions,
            num_host_blocks=self.host.num_slots,
            num_used_host_blocks=self.host.num_used,
            num_offloaded_blocks=self.host.num_offloaded,
            num_restored_blocks=self.host.num_restored,
            num_recomputed_blocks=self.host.num_recomputed,
            block_bytes=self.limits.block_bytes,
            step_s=self._results.counts.step_s,
            step_cost_s=self.step_cost.rough_s,
            device_s=self._results.counts.device_s,
            kv_block_s=self._results.counts.kv_block_s,
            step_cost_error_p50=self.step_cost.error_p50,
            step_cost_error_p90=self.step_cost.error_p90,
        )

    def view(self) -> SchedulerView:
        """Its insides, to be looked at between two calls."""
        return SchedulerView(
            groups=self._states.groups,
            running=self._states.running,
            num_waiting=len(self._states.waiting),
            num_paused=self._states.num_paused,
            occupants=self._states.occupants,
            free_slots=self._states.free_slots,
            cache=self.cache,
            block_size=self.limits.block_size,
            last_work=self._results.last_work,
            last_step_s=self._results.counts.step_s,
            step_cost=self.step_cost,
            tenants=self.shares.tenants(),
        )

    @property
    def has_requests(self) -> bool:
        """Any that has not ended: running, waiting or paused."""
        return bool(self._states.groups)

    def is_waiting(self, tenant: str) -> bool:
        """Whether a tenant has a sequence in the queue."""
        return self._states.waiting.is_waiting(tenant)

    def end_all(self, reason: FinishReason, error: str | None = None) -> None:
        """End every request, those of steps that will never come back too."""
        abandoned = self._in_flight.abandon(self._states.now_s)
        for group in list(self._states.groups.values()):
            for sequence in reversed(group.sequences):
                self._states.finish(sequence, sequence.cancel_reason or reason, error)
        self._states.unsettled.clear()
        for sequence in abandoned:  # some had ended before
            self._states.give_back(sequence)

    def _make_group(self, request: Request) -> SequenceGroup:
        latest_start_s = math.inf
        if request.deadline_s is not None:
            num_tokens = len(request.prompt_ids)
            latest_start_s = request.deadline_s - self._charges.prefill_s(0, num_tokens, num_tokens)
        tenant = self.shares.enter(request.tenant, request.share)
        return self._intake.make_group(request, tenant, latest_start_s)
