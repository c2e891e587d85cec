from dataclasses import replace

import numpy as np
import pytest

from core.engine import check_conservation
from core.plan import StepOutput, StepPlan
from core.scheduler import Scheduler
from core.simulation import CostModel, SimulatedClock, SimulatedRunner
from core.types import Admitted, FinishReason, Pooling, Prefilled, Request, StepDelivery, TokenLogprobs, Usage
from tests.fakes import DeliveryLog, make_request, small_limits


def make_scheduler(*requests: Request, eos_ids: tuple[int, ...] = (), **limits: int) -> Scheduler:
    scheduler = Scheduler(small_limits(**limits), eos_ids, seeds=lambda: 77, inter_token_target=None)
    for request in requests:
        scheduler.submit(request)
    return scheduler


def plan(scheduler: Scheduler) -> StepPlan:
    made = scheduler.plan(0.0)
    assert made is not None
    return made


def answer(scheduler: Scheduler, made: StepPlan, token_id: int = 500) -> StepDelivery:
    """Apply the plan as if every row that samples had drawn this token."""
    rows = np.flatnonzero(made.samples).astype(np.int32)
    return scheduler.apply(made, StepOutput(rows, np.full(len(rows), token_id, np.int32)), 0.0)


def step(scheduler: Scheduler, token_id: int = 500) -> StepDelivery:
    return answer(scheduler, plan(scheduler), token_id)


def test_first_plan_starts_the_slot_with_prompt_table_and_seed() -> None:
    scheduler = make_scheduler(
        make_request(prompt_ids=(10, 11, 12, 13, 14), seed=None, stop_token_ids=(8,)), eos_ids=(2,)
    )
    made = plan(scheduler)
    (start,) = made.sequence_starts
    assert (start.slot, start.token_ids, start.num_prompt_tokens) == (0, (10, 11, 12, 13, 14), 5)
    assert (start.seed, start.stop_ids) == (77, (2, 8))
    assert made.token_ids.tolist() == [10, 11, 12, 13, 14]
    assert made.table_positions.tolist() == [0, 1]
    assert made.samples.tolist() == [True]


def test_decode_plans_carry_differences_only() -> None:
    scheduler = make_scheduler(make_request(prompt_ids=(10, 11, 12), max_tokens=9))
    step(scheduler)
    made = plan(scheduler)
    assert (made.starts.tolist(), made.lengths.tolist(), made.token_ids.tolist()) == ([3], [1], [500])
    assert (made.sequence_starts, made.table_blocks.tolist()) == ([], [])
    answer(scheduler, made)
    assert plan(scheduler).table_positions.tolist() == [1]  # position 4 needs a second block


def test_decodes_go_before_prefill_chunks_and_the_oldest_prompt_first() -> None:
    scheduler = make_scheduler(make_request("new", 30, arrival_s=2.0), make_request("old", 10, arrival_s=1.0))
    first = plan(scheduler)
    assert (first.lengths.tolist(), first.samples.tolist()) == ([10, 6], [True, False])
    answer(scheduler, first)
    scheduler.submit(make_request("newest", 3, arrival_s=3.0))
    second = plan(scheduler)
    assert second.lengths.tolist() == [1, 15]
    answer(scheduler, second)
    assert plan(scheduler).lengths.tolist() == [1, 9, 3]


def test_head_of_the_queue_without_blocks_is_not_overtaken() -> None:
    scheduler = make_scheduler(
        make_request("running", 11, arrival_s=0.0),
        make_request("large", 15, arrival_s=1.0),
        make_request("small", 2, arrival_s=2.0),
        num_blocks=6,
        max_batch_tokens=64,
    )
    assert plan(scheduler).lengths.tolist() == [11]
    assert scheduler.stats().num_waiting == 2


def test_request_needs_slots_for_all_its_sequences() -> None:
    scheduler = make_scheduler(
        make_request("one", 4, arrival_s=0.0), make_request("four", 4, num_sequences=4, arrival_s=1.0)
    )
    assert plan(scheduler).num_rows == 1
    assert scheduler.stats().num_waiting == 1


def test_siblings_share_the_prompt_and_copy_its_last_block_on_write() -> None:
    scheduler = make_scheduler(make_request(prompt_ids=(1, 2, 3, 4, 5, 6), num_sequences=3))
    first = plan(scheduler)
    assert first.num_rows == 1
    answer(scheduler, first)
    forks = plan(scheduler)
    assert forks.starts.tolist() == [5, 5, 6]
    assert forks.token_ids.tolist() == [6, 6, 500]
    prompt_blocks = first.table_blocks.tolist()
    assert forks.copy_sources.tolist() == [prompt_blocks[1]] * 2  # the last holder, which is furthest, writes in place
    assert len({start.seed for start in forks.sequence_starts} | {first.sequence_starts[0].seed}) == 3
    heads = [block for position, block in zip(forks.table_positions, forks.table_blocks, strict=True) if position == 0]
    assert heads == [prompt_blocks[0]] * 2
    assert scheduler.pool._references[prompt_blocks[0]] == 3


def test_ending_stop_id_is_billed_but_not_delivered() -> None:
    scheduler = make_scheduler(make_request(num_prompt_tokens=6), eos_ids=(2,))
    step(scheduler, 500)
    delivery = step(scheduler, 2)
    assert delivery.token_ids == []
    (chunk,) = delivery.chunks
    assert (chunk.finish_reason, chunk.token_ids, chunk.usage) == (FinishReason.STOP, (), Usage(6, 2))


def test_context_ends_a_sequence_before_its_max_tokens() -> None:
    scheduler = make_scheduler(make_request(num_prompt_tokens=6, max_tokens=100), max_model_len=8)
    assert step(scheduler).chunks == []
    assert step(scheduler).chunks[0].usage == Usage(6, 2)


def test_tokens_with_logprobs_come_as_chunks() -> None:
    scheduler = make_scheduler(make_request(num_logprobs=0))
    made = plan(scheduler)
    logprobs = TokenLogprobs(500, -0.5)
    rows = np.array([0], np.int32)
    delivery = scheduler.apply(made, StepOutput(rows, np.array([500], np.int32), {0: logprobs}), 0.0)
    assert delivery.token_ids == []
    assert [(chunk.token_ids, chunk.logprobs) for chunk in delivery.chunks] == [((500,), (logprobs,))]


def test_row_that_draws_several_tokens_stops_at_the_ending_one() -> None:
    scheduler = make_scheduler(make_request(num_prompt_tokens=6), eos_ids=(2,))
    made = plan(scheduler)
    output = StepOutput(np.zeros(4, np.int32), np.array([500, 501, 2, 502], np.int32))
    delivery = scheduler.apply(made, output, 0.0)
    assert delivery.token_ids == [500, 501]
    assert delivery.chunks[0].usage == Usage(6, 3)


@pytest.mark.parametrize(
    ("num_prompt_tokens", "num_sequences", "cause"),
    [(23, 1, None), (24, 1, "24 tokens"), (0, 1, "empty"), (5, 5, "5 sequences"), (5, 4, None)],
)
def test_what_can_never_run_is_refused_at_once(num_prompt_tokens: int, num_sequences: int, cause: str | None) -> None:
    scheduler = make_scheduler(
        make_request(num_prompt_tokens=num_prompt_tokens, num_sequences=num_sequences), num_blocks=6
    )
    delivery = scheduler.flush()
    assert delivery is not None
    if cause is None:
        assert (delivery.chunks, delivery.stats.num_waiting) == ([], 1)
        return
    assert delivery is not None
    (chunk,) = delivery.chunks
    assert (chunk.finish_reason, chunk.usage) == (FinishReason.ERROR, Usage(0, 0))
    assert cause in (chunk.error or "")
    assert scheduler.plan(0.0) is None


def test_cancel_in_mid_prefill_bills_the_computed_part_of_the_prompt() -> None:
    scheduler = make_scheduler(make_request(num_prompt_tokens=40))
    step(scheduler)
    scheduler.cancel("a", FinishReason.CANCELLED)
    delivery = scheduler.flush()
    assert delivery is not None
    assert delivery.chunks[0].usage == Usage(16, 0)
    assert scheduler.pool.num_used == 0


def test_cancel_in_flight_frees_blocks_once_in_apply() -> None:
    scheduler = make_scheduler(make_request())
    step(scheduler)
    made = plan(scheduler)
    scheduler.cancel("a", FinishReason.CANCELLED)
    scheduler.cancel("a", FinishReason.DEADLINE)
    assert scheduler.flush() is None
    assert scheduler.pool.num_used > 0
    delivery = answer(scheduler, made)
    assert delivery.token_ids == []
    (chunk,) = delivery.chunks
    assert (chunk.finish_reason, chunk.usage) == (FinishReason.CANCELLED, Usage(6, 1))
    assert scheduler.pool.num_used == 0


@pytest.mark.parametrize("is_in_flight", [False, True])
def test_stop_string_cuts_usage_whatever_the_timing(is_in_flight: bool) -> None:
    scheduler = make_scheduler(make_request(max_tokens=9))
    for _ in range(4):
        step(scheduler)
    made = plan(scheduler) if is_in_flight else None
    scheduler.cancel("a", FinishReason.STOP, index=0, num_tokens_kept=2)
    delivery = answer(scheduler, made) if made else scheduler.flush()
    assert delivery is not None
    assert (delivery.chunks[0].finish_reason, delivery.chunks[0].usage) == (FinishReason.STOP, Usage(6, 2))


def test_of_several_cuts_the_smallest_is_billed_and_none_bills_more_than_was_sampled() -> None:
    scheduler = make_scheduler(make_request(max_tokens=9))
    for _ in range(5):
        step(scheduler)
    (sequence,) = scheduler.states.running
    billed = []
    for num_tokens in (8, 3, 4, None):
        sequence.keep(num_tokens)
        billed.append(sequence.num_billed_tokens)
    assert billed == [5, 3, 3, 3]


def test_late_cut_of_an_ended_sequence_counts_until_the_terminal_chunk() -> None:
    scheduler = make_scheduler(make_request(num_prompt_tokens=6, max_tokens=3, num_sequences=2), eos_ids=(2,))
    step(scheduler)
    made = plan(scheduler)
    first = scheduler.apply(made, StepOutput(np.array([0, 1], np.int32), np.array([500, 2], np.int32)), 0.0)
    assert [(chunk.index, chunk.is_terminal) for chunk in first.chunks] == [(0, False)]
    scheduler.cancel("a", FinishReason.STOP, index=0, num_tokens_kept=1)
    step(scheduler)
    assert step(scheduler).chunks[0].usage == Usage(6, 1 + 3)


def test_leaving_leader_hands_its_prefill_to_a_sibling() -> None:
    scheduler = make_scheduler(make_request(num_prompt_tokens=20, num_sequences=3))
    step(scheduler)
    scheduler.cancel("a", FinishReason.CANCELLED, index=0)
    made = plan(scheduler)
    assert (made.starts.tolist(), made.lengths.tolist()) == ([16], [4])
    answer(scheduler, made)
    assert plan(scheduler).starts.tolist() == [20, 16]  # the last token fills a block, which is computed anew


def test_unknown_ids_and_indexes_are_ignored() -> None:
    scheduler = make_scheduler(make_request())
    scheduler.cancel("b", FinishReason.CANCELLED)
    scheduler.cancel("a", FinishReason.CANCELLED, index=1)
    scheduler.pause("b")
    scheduler.resume("b")
    told = scheduler.flush()
    assert told is not None
    assert (told.chunks, told.stats.num_waiting) == ([], 1)
    assert scheduler.flush() is None
    assert plan(scheduler).num_rows == 1


def test_pause_is_told_although_no_step_comes() -> None:
    scheduler = make_scheduler(make_request(max_tokens=9))
    step(scheduler)
    assert scheduler.flush() is None
    scheduler.pause("a")
    assert scheduler.plan(0.0) is None
    told = scheduler.flush()
    assert told is not None
    assert (told.chunks, told.stats.num_paused) == ([], 1)
    assert scheduler.flush() is None


def test_paused_request_in_the_queue_lets_others_pass_and_returns_to_its_place() -> None:
    scheduler = make_scheduler(
        make_request("a", 4, arrival_s=0.0, max_tokens=1),
        make_request("b", 5, arrival_s=1.0, max_tokens=1),
        make_request("c", 6, arrival_s=2.0, max_tokens=1),
        max_sequences=1,
    )
    scheduler.pause("a")
    made = plan(scheduler)
    assert made.lengths.tolist() == [5]
    scheduler.resume("a")
    answer(scheduler, made)
    assert plan(scheduler).lengths.tolist() == [4]


def test_out_of_blocks_paused_go_first_and_lose_no_token() -> None:
    scheduler = make_scheduler(make_request("paused", 6, arrival_s=0.0, max_tokens=50), num_blocks=4)
    step(scheduler)
    scheduler.pause("paused")
    scheduler.submit(make_request("b", 7, arrival_s=1.0, max_tokens=3))
    for _ in range(3):  # the third needs b's third block; b ends with it
        step(scheduler)
    assert scheduler.stats().num_preemptions == 1
    scheduler.resume("paused")
    (start,) = plan(scheduler).sequence_starts
    assert start.token_ids[6:] == (500,)
    assert start.num_prompt_tokens == 6


def test_out_of_blocks_the_latest_arrival_of_the_lowest_priority_gives_way() -> None:
    scheduler = make_scheduler(
        make_request("old", 6, arrival_s=0.0, max_tokens=50),
        make_request("urgent", 3, arrival_s=2.0, max_tokens=50, priority=1),
        make_request("new", 7, arrival_s=1.0, max_tokens=50),
        num_blocks=6,
    )
    while scheduler.stats().num_preemptions == 0:
        step(scheduler)
    assert {sequence.request_id for sequence in scheduler.states.running} == {"old", "urgent"}


@pytest.mark.parametrize(("has_prefix_cache", "shares_answers"), [(True, True), (True, False), (False, True)])
def test_blocks_behind_the_window_are_given_back_while_a_sequence_runs(
    has_prefix_cache: bool, shares_answers: bool
) -> None:
    limits = replace(small_limits(), window=8, shares_answers=shares_answers)  # blocks of 4 tokens, 16 of a step
    scheduler = Scheduler(limits, (), seeds=lambda: 77, has_prefix_cache=has_prefix_cache)
    scheduler.submit(make_request("a", 60, max_tokens=100))
    num_used = []
    for _ in range(100):
        made = plan(scheduler)
        num_used.append(scheduler.pool.num_used)
        answer(scheduler, made)
    assert num_used[0] == 16  # all of the prompt and the next token
    assert max(num_used[10:]) <= 6
    scheduler.submit(make_request("b", 60, max_tokens=1, prompt_ids=make_request("a", 60).prompt_ids))
    usage = [chunk.usage for _ in range(3) for chunk in step(scheduler).chunks if chunk.usage is not None]
    assert usage[0].num_cached_tokens == (56 if has_prefix_cache else 0)  # they are still found


def test_sibling_of_a_row_that_fails_after_it_gave_blocks_back_holds_all_of_its_own() -> None:
    scheduler = Scheduler(replace(small_limits(), window=8), (), seeds=lambda: 77, inter_token_target=None)
    scheduler.submit(make_request("a", 60, num_sequences=2))
    step(scheduler)
    step(scheduler)
    made = plan(scheduler)
    assert made.starts.tolist() == [32]
    assert scheduler.pool.num_used < 16  # behind its window
    nothing = np.zeros(0, np.int32)
    scheduler.apply(made, StepOutput(nothing, nothing, failed_rows={0: "lost"}), 0.0)
    made = plan(scheduler)
    assert made.starts.tolist() == [0]
    check_conservation(scheduler)
    answer(scheduler, made)
    while scheduler.has_requests:
        step(scheduler)
    assert scheduler.pool.num_used == 0


@pytest.mark.parametrize(("num_window_blocks", "num_found"), [(9, 0), (48, 24)])
def test_window_blocks_behind_the_window_are_given_back_and_found_while_there_is_room(
    num_window_blocks: int, num_found: int
) -> None:
    limits = replace(small_limits(), window=8, num_window_blocks=num_window_blocks)  # blocks of 4 tokens, 16 of a step
    scheduler = Scheduler(limits, (), seeds=lambda: 77)
    prompt = make_request("a", 60).prompt_ids

    def cached(name: str, num_tokens: int) -> int:
        """Tokens of the prompt that are found, in prefix and windows."""
        scheduler.submit(make_request(name, prompt_ids=prompt[:num_tokens], max_tokens=1))
        while True:
            for chunk in step(scheduler).chunks:
                if chunk.usage is not None:
                    return chunk.usage.num_cached_tokens

    scheduler.submit(make_request("a", 60, max_tokens=100))
    num_used = []
    for _ in range(100):
        made = plan(scheduler)
        num_used.append(scheduler.stats().num_used_window_blocks)
        answer(scheduler, made)
    assert scheduler.pool.num_used > 30  # of the layers that see all
    assert max(num_used) <= 9
    assert max(num_used[10:]) <= 4
    while scheduler.has_requests:
        answer(scheduler, plan(scheduler))
    assert cached("b", 28) == num_found
    assert cached("c", 28) == 24  # their window blocks are attached to the blocks of before
    check_conservation(scheduler)


def test_stats_count_steps_tokens_and_the_time_of_a_step() -> None:
    scheduler = make_scheduler(make_request(num_prompt_tokens=20, max_tokens=9))
    step(scheduler)
    step(scheduler)
    made = scheduler.plan(10.0)
    assert made is not None
    stats = scheduler.apply(made, StepOutput(np.zeros(1, np.int32), np.array([500], np.int32)), 10.25).stats
    assert (stats.num_steps, stats.num_prompt_tokens, stats.num_generated_tokens) == (3, 20, 2)
    assert (stats.num_running, stats.num_waiting, stats.step_s) == (1, 0, 0.25)


def test_marks_tell_once_when_a_request_was_admitted_and_when_its_prompt_was_done() -> None:
    scheduler = make_scheduler(make_request("a", num_prompt_tokens=24, max_tokens=3, num_sequences=2))
    marks = []
    for now in range(1, 20):
        made = scheduler.plan(float(now))
        if made is None:
            break
        rows = np.flatnonzero(made.samples).astype(np.int32)
        output = StepOutput(rows, np.full(len(rows), 500, np.int32))
        marks += scheduler.apply(made, output, now + 0.5).marks
    assert marks == [Admitted("a", 1.0), Prefilled("a", 2.5, num_chunks=2, num_cached_tokens=0)]


def test_mark_of_a_prompt_counts_what_was_cached() -> None:
    scheduler = make_scheduler()
    prompt = tuple(range(10, 22))
    scheduler.submit(make_request("a", prompt_ids=prompt, max_tokens=1))
    step(scheduler)
    scheduler.submit(make_request("b", prompt_ids=prompt, max_tokens=1))
    assert step(scheduler).marks[-1] == Prefilled("b", 0.0, num_chunks=1, num_cached_tokens=8)


def test_a_prompt_that_is_taken_whole_waits_for_a_step_with_room() -> None:
    limits = replace(small_limits(max_batch_tokens=10), takes_whole_prompts=True)
    scheduler = Scheduler(limits, (), lambda: 0, has_prefix_cache=False)
    runner, log = SimulatedRunner(limits, CostModel(), SimulatedClock()), DeliveryLog()
    sizes = {"a": 6, "b": 10, "c": 3, "d": 1}
    for name, size in sizes.items():
        scheduler.submit(make_request(name, size, 0, pooling=Pooling("mean")))
    while (plan := scheduler.plan(0.0)) is not None:
        assert plan.num_tokens <= 10
        assert not plan.starts.any()
        runner.forward(plan)
        runner.sample(plan)
        log(scheduler.apply(plan, runner.collect(plan), 0.0))
    assert all(log.terminal(name).pooled for name in sizes)


@pytest.mark.parametrize("is_recurrent", [True, False])
def test_recurrent_layers_compute_whole_blocks_of_each_prompt_however_many_share_a_step(is_recurrent: bool) -> None:
    lengths = [5, 37, 50, 21, 90, 33, 70, 14]
    limits = small_limits(num_blocks=400, max_sequences=8, max_batch_tokens=24, max_model_len=200)
    limits = replace(limits, block_size=16, num_kept_states=3 if is_recurrent else None)
    scheduler = Scheduler(limits, (), seeds=lambda: 77, inter_token_target=None)
    for i, length in enumerate(lengths):
        scheduler.submit(make_request(str(i), length, max_tokens=3))
    ends = []
    while (made := scheduler.plan(0.0)) is not None:
        for slot, start, length in zip(made.slots.tolist(), made.starts.tolist(), made.lengths.tolist(), strict=True):
            sequence = scheduler.states.occupants[slot]
            assert sequence is not None
            if start < sequence.num_prompt_tokens != start + length:
                ends.append(start + length)
        answer(scheduler, made)
    assert not scheduler.has_requests
    assert any(end % 16 for end in ends) != is_recurrent  # whether a prompt is cut inside of a block
