"""Reads the scheduler's state: a snapshot for operators, and a check of its accounting. It changes nothing.

Thread: engine, between two calls of the scheduler.
"""

from core.scheduler import Scheduler
from core.sequence import NO_SLOT, Sequence, SequenceState
from core.sequence_states import SequenceStates
from core.step_cost import StepCostModel
from core.types import (
    NO_STORE,
    BlockCounts,
    EngineSnapshot,
    LiveSequence,
    StepComposition,
    StepCostFit,
    StoreState,
    TenantCounters,
    WaitingLine,
)


class InconsistentAccounting(Exception):
    """Blocks, slots or sequences are counted differently in two places: a bug, after which no answer can be trusted."""


def check_conservation(scheduler: Scheduler) -> None:
    """Check that every block, slot and sequence is in one place. O(live sequences and the blocks that they hold).

    Raises:
        InconsistentAccounting: it names the counts that differ.
    """
    states, pool = scheduler.states, scheduler.pool
    held = {block for sequence in states.running for block in sequence.table.blocks}
    live = [s for group in states.groups.values() for s in group.sequences if s.state is not SequenceState.FINISHED]
    num_occupied = sum(sequence is not None for sequence in states.occupants)
    num_published = pool.num_kept + sum(map(pool.is_published, held))
    claims = {
        "blocks that are used, and held by sequences": (pool.num_used, len(held)),
        "blocks that are published, and kept or held": (pool.num_published, num_published),
        "sequences that run, of all that live": (
            len(states.running),
            sum(s.state is SequenceState.RUNNING for s in live),
        ),
        "slots in all, and taken or free": (len(states.occupants), num_occupied + len(states.free_slots)),
        "slots that are taken, and had": (num_occupied, sum(s.slot != NO_SLOT for s in live)),
        "sequences in the queue, of all that live": (len(states.waiting), len(_waiting(states))),
        "requests that are paused": (states.num_paused, sum(group.is_paused for group in states.groups.values())),
        "requests that tenants have": (len(states.groups), sum(t.num_live for t in scheduler.shares.tenants())),
    }
    wrong = [f"{claim}: {one} and {other}" for claim, (one, other) in claims.items() if one != other]
    if wrong:
        raise InconsistentAccounting("; ".join(wrong))


def snapshot_of(scheduler: Scheduler, serial: int, now: float, store: StoreState = NO_STORE) -> EngineSnapshot:
    """
    Args:
        now: monotonic seconds, as requests' arrivals.
    """
    return EngineSnapshot(
        serial=serial,
        queues=_queues(scheduler.states, now),
        running=tuple(map(_live, scheduler.states.running)),
        last_step=_last_step(scheduler),
        blocks=_blocks(scheduler),
        step_cost=_fit(scheduler.step_cost),
        tenants=tuple(
            TenantCounters(
                name=tenant.name,
                share=tenant.share,
                counter_s=tenant.counter_s,
                served_s=tenant.served_s,
                num_requests=tenant.num_live,
                num_running=tenant.num_running,
            )
            for tenant in scheduler.shares.tenants()
        ),
        store=store,
    )


def _waiting(states: SequenceStates) -> list[Sequence]:
    """The sequences that the queue should have."""
    return [
        sequence
        for group in states.groups.values()
        for sequence in group.sequences
        if sequence.state is SequenceState.WAITING and not group.is_paused and sequence.index not in group.unforked
    ]


def _queues(states: SequenceStates, now: float) -> tuple[WaitingLine, ...]:
    lines: dict[tuple[int, str], list[Sequence]] = {}
    for sequence in _waiting(states):
        lines.setdefault((-sequence.priority, sequence.tenant.name), []).append(sequence)
    return tuple(
        WaitingLine(
            priority=-below,
            tenant=tenant,
            num_sequences=len(members),
            num_tokens=sum(len(sequence.token_ids) - sequence.num_computed_tokens for sequence in members),
            oldest_s=now - min(sequence.arrival_s for sequence in members),
        )
        for (below, tenant), members in sorted(lines.items())
    )


def _live(sequence: Sequence) -> LiveSequence:
    return LiveSequence(
        request_id=sequence.request_id,
        index=sequence.index,
        tenant=sequence.tenant.name,
        priority=sequence.priority,
        num_prompt_tokens=sequence.num_prompt_tokens,
        num_tokens=len(sequence.token_ids),
        num_computed_tokens=sequence.num_computed_tokens,
        num_blocks=len(sequence.table),
        is_paused=sequence.is_paused,
    )


def _last_step(scheduler: Scheduler) -> StepComposition:
    work, step_cost = scheduler.last_work, scheduler.step_cost
    return StepComposition(
        num_prompt_tokens=work.prompt_tokens,
        num_prompt_kv_tokens=round(work.prompt_kv),
        num_decoded_tokens=work.own_tokens,
        num_decoded_kv_tokens=work.own_kv,
        predicted_s=step_cost.predict(work) if step_cost.is_ready else None,
        measured_s=scheduler.stats().step_s,
    )


def _blocks(scheduler: Scheduler) -> BlockCounts:
    pool = scheduler.pool
    held = {block for sequence in scheduler.states.running for block in sequence.table.blocks}
    return BlockCounts(
        num_tokens_each=scheduler.limits.block_size,
        num_all=pool.num_blocks,
        num_held=pool.num_used,
        num_shared=sum(map(pool.is_shared, held)),
        num_cached=pool.num_kept,
        num_empty=pool.num_free - pool.num_kept,
    )


def _fit(model: StepCostModel) -> StepCostFit:
    fixed, prompt, prompt_kv, decoded, decoded_kv = model.coefficients_s
    return StepCostFit(
        is_ready=model.is_ready,
        fixed_s=fixed,
        prompt_token_s=prompt,
        prompt_kv_token_s=prompt_kv,
        decoded_token_s=decoded,
        decoded_kv_token_s=decoded_kv,
        error_p50=model.error_p50,
        error_p90=model.error_p90,
    )
