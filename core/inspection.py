"""A look at the scheduler's insides: for an operator (snapshot_of), and to see that they add up (check_conservation).

Thread: engine, between two calls of the scheduler. Nothing here changes anything.
"""

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from core.kv_cache import PrefixCache
from core.sequence import NO_SLOT, Sequence, SequenceGroup, SequenceState, Tenant
from core.step_cost import StepCostModel, StepWork
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


class BooksDoNotBalance(Exception):
    """Something is held that nobody has, or had that nobody holds: a fault of ours, and no answer can be trusted."""


@dataclass(frozen=True, slots=True)
class SchedulerView:
    """The scheduler's own structures, live.

    Args:
        running: all that hold blocks.
        occupants: who has each slot.
    """

    groups: Mapping[str, SequenceGroup]
    running: Iterable[Sequence]
    num_waiting: int
    num_paused: int
    occupants: Seq[Sequence | None]
    free_slots: Seq[int]
    cache: PrefixCache
    block_size: int
    last_work: StepWork
    last_step_s: float
    step_cost: StepCostModel
    tenants: Seq[Tenant]


def snapshot_of(view: SchedulerView, serial: int, now: float, store: StoreState = NO_STORE) -> EngineSnapshot:
    """
    Args:
        now: monotonic seconds, as requests' arrivals.
    """
    return EngineSnapshot(
        serial=serial,
        queues=_queues(view, now),
        running=tuple(map(_live, view.running)),
        last_step=_last_step(view),
        blocks=_blocks(view),
        step_cost=_fit(view.step_cost),
        tenants=tuple(map(_counters, view.tenants)),
        store=store,
    )


def check_conservation(view: SchedulerView) -> None:
    """Every block, slot and sequence is in one place. O(live sequences and the blocks that they hold).

    Raises:
        BooksDoNotBalance: it says what is wrong.
    """
    running, pool = list(view.running), view.cache.pool
    held = {block for sequence in running for block in sequence.table.blocks}
    live = [s for group in view.groups.values() for s in group.sequences if s.state is not SequenceState.FINISHED]
    occupied = [sequence for sequence in view.occupants if sequence is not None]
    claims = {
        "blocks that are used, and held by sequences": (pool.num_used, len(held)),
        "blocks that are published, and kept or held": (
            len(view.cache),
            pool.num_kept + view.cache.num_published(held),
        ),
        "sequences that run, of all that live": (len(running), sum(s.state is SequenceState.RUNNING for s in live)),
        "slots in all, and taken or free": (len(view.occupants), len(occupied) + len(view.free_slots)),
        "slots that are taken, and had": (len(occupied), sum(s.slot != NO_SLOT for s in live)),
        "sequences in the queue, of all that live": (view.num_waiting, len(list(_waiting(view)))),
        "requests that are paused": (view.num_paused, sum(group.is_paused for group in view.groups.values())),
        "requests that tenants have": (len(view.groups), sum(tenant.num_live for tenant in view.tenants)),
    }
    wrong = [f"{claim}: {one} and {other}" for claim, (one, other) in claims.items() if one != other]
    if wrong:
        raise BooksDoNotBalance("; ".join(wrong))


def _waiting(view: SchedulerView) -> Iterable[tuple[SequenceGroup, Sequence]]:
    """Those in the queue, with their requests."""
    for group in view.groups.values():
        if not group.is_paused:
            for sequence in group.sequences:
                if sequence.state is SequenceState.WAITING and sequence.index not in group.unforked:
                    yield group, sequence


def _queues(view: SchedulerView, now: float) -> tuple[WaitingLine, ...]:
    lines: dict[tuple[int, str], list[tuple[SequenceGroup, Sequence]]] = {}
    for group, sequence in _waiting(view):
        lines.setdefault((-sequence.priority, sequence.tenant.name), []).append((group, sequence))
    return tuple(
        WaitingLine(
            priority=-below,
            tenant=tenant,
            num_sequences=len(members),
            num_tokens=sum(sequence.num_uncomputed_tokens for _, sequence in members),
            oldest_s=now - min(group.request.arrival_s for group, _ in members),
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


def _last_step(view: SchedulerView) -> StepComposition:
    work = view.last_work
    return StepComposition(
        num_prompt_tokens=work.prompt_tokens,
        num_prompt_kv_tokens=round(work.prompt_kv),
        num_decoded_tokens=work.own_tokens,
        num_decoded_kv_tokens=work.own_kv,
        predicted_s=view.step_cost.predict(work) if view.step_cost.is_ready else None,
        measured_s=view.last_step_s,
    )


def _blocks(view: SchedulerView) -> BlockCounts:
    pool = view.cache.pool
    held = {block for sequence in view.running for block in sequence.table.blocks}
    return BlockCounts(
        num_tokens_each=view.block_size,
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


def _counters(tenant: Tenant) -> TenantCounters:
    return TenantCounters(
        name=tenant.name,
        share=tenant.share,
        counter_s=tenant.counter_s,
        served_s=tenant.served_s,
        num_requests=tenant.num_live,
        num_running=tenant.num_running,
    )
