"""Reads the scheduler's state: to show it to operators, and to check its accounting. It changes nothing.

Thread: engine, between two calls of the scheduler.
"""

from typing import Any

from core.scheduler import Scheduler
from core.sequence import NO_SLOT, Sequence, SequenceState
from core.sequence_states import SequenceStates


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


def state_of(scheduler: Scheduler, now: float) -> dict[str, Any]:
    """The engine's state as a JSON object, for operators.

    Args:
        now: monotonic seconds, as requests' arrivals.
    """
    states, pool, work, step_cost = scheduler.states, scheduler.pool, scheduler.last_work, scheduler.step_cost
    held = {block for sequence in states.running for block in sequence.table.blocks}
    fixed_s, prompt_token_s, prompt_kv_token_s, decoded_token_s, decoded_kv_token_s = step_cost.coefficients_s
    return {
        "queues": _queues(states, now),
        "running": [  # sequences that hold blocks
            {
                "request_id": sequence.request_id,
                "index": sequence.index,
                "tenant": sequence.tenant.name,
                "priority": sequence.priority,
                "num_prompt_tokens": sequence.num_prompt_tokens,
                "num_tokens": len(sequence.token_ids),  # the prompt's and its own
                "num_computed_tokens": sequence.num_computed_tokens,  # including those of a step in flight
                "num_blocks": len(sequence.table),
                "is_paused": sequence.is_paused,
            }
            for sequence in states.running
        ],
        "last_step": {
            "num_prompt_tokens": work.prompt_tokens,
            "num_prompt_kv_tokens": round(work.prompt_kv),  # read by them
            "num_decoded_tokens": work.own_tokens,
            "num_decoded_kv_tokens": work.own_kv,  # read by them
            # by the present step-cost model; None: too few steps were measured
            "predicted_s": step_cost.predict(work) if step_cost.is_ready else None,
            "measured_s": scheduler.stats().step_s,
        },
        "blocks": {  # held + cached + empty = all
            "num_tokens_each": scheduler.limits.block_size,
            "num_all": pool.num_blocks,
            "num_held": pool.num_used,
            "num_shared": sum(map(pool.is_shared, held)),  # held by more than one sequence
            "num_cached": pool.num_kept,  # not held, with content that may be found again
            "num_empty": pool.num_free - pool.num_kept,
        },
        "step_cost": {  # coefficients of the model, in seconds
            "is_ready": step_cost.is_ready,
            "fixed_s": fixed_s,
            "prompt_token_s": prompt_token_s,
            "prompt_kv_token_s": prompt_kv_token_s,
            "decoded_token_s": decoded_token_s,
            "decoded_kv_token_s": decoded_kv_token_s,
            "error_p50": step_cost.error_p50,  # of the last steps: |predicted - measured| / measured
            "error_p90": step_cost.error_p90,
        },
        "tenants": [  # without idle ones that are not ahead of the others
            {
                "name": tenant.name,
                "share": tenant.share,
                "counter_s": tenant.counter_s,  # engine seconds divided by its share; the least goes first
                "served_s": tenant.served_s,  # engine seconds in all
                "num_requests": tenant.num_live,
                "num_running": tenant.num_running,  # sequences that hold blocks
            }
            for tenant in scheduler.shares.tenants()
        ],
    }


def _queues(states: SequenceStates, now: float) -> list[dict[str, Any]]:
    """The waiting sequences, by class and tenant, the highest class first."""
    lines: dict[tuple[int, str], list[Sequence]] = {}
    for sequence in _waiting(states):
        lines.setdefault((-sequence.priority, sequence.tenant.name), []).append(sequence)
    return [
        {
            "priority": -below,
            "tenant": tenant,
            "num_sequences": len(members),
            "num_tokens": sum(len(s.token_ids) - s.num_computed_tokens for s in members),  # to compute before decoding
            "oldest_s": now - min(s.arrival_s for s in members),  # since the first of their requests arrived
        }
        for (below, tenant), members in sorted(lines.items())
    ]


def _waiting(states: SequenceStates) -> list[Sequence]:
    """The sequences that the queue should have."""
    return [
        sequence
        for group in states.groups.values()
        for sequence in group.sequences
        if sequence.state is SequenceState.WAITING and not group.is_paused and sequence.index not in group.unforked
    ]
