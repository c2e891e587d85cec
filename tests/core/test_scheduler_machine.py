"""Any history of submit, cancel, pause, resume and steps: what must hold after each of them, and at the end.

With one step in flight, and with two: the second is planned and computed before the first is applied.
"""

from collections import Counter, deque
from dataclasses import dataclass, replace

import hypothesis
import numpy as np
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from core.blocks import Domain
from core.plan import SequenceStart, StepOutput, StepPlan
from core.scheduler import Scheduler
from core.sequence import Sequence, SequenceState
from core.simulation import CostModel, SimulatedClock, continuation, logprobs_after
from core.types import FinishReason, Request, TokenLogprobs, Usage
from tests.core.kv_oracle import ChainCheckingRunner
from tests.fakes import DeliveryLog, make_request, small_limits

EOS = 3
VOCAB_SIZE = 30
PROMPTS = tuple(tuple((3 * i + (i >= fork)) % 29 for i in range(20)) for fork in (1, 6, 12, 20))


@dataclass(slots=True, eq=False)
class Sent:
    """A step in flight.

    Args:
        has_raised: when it was sent.
        failing: row that will be reported as failed.
    """

    plan: StepPlan
    has_raised: bool
    failing: int | None = None


class SchedulerMachine(RuleBasedStateMachine):
    """Drives a scheduler and a simulated runner call by call, so that messages come between plan and apply too."""

    num_host_blocks = 0
    max_in_flight = 1

    @initialize(
        num_blocks=st.integers(3, 14),
        block_size=st.sampled_from((1, 2, 4)),
        max_batch_tokens=st.integers(1, 9),
        has_prefix_cache=st.sampled_from((True, True, True, False)),
    )
    def begin(self, num_blocks: int, block_size: int, max_batch_tokens: int, has_prefix_cache: bool) -> None:
        limits = small_limits(
            num_blocks=num_blocks,
            block_size=block_size,
            max_batch_tokens=max_batch_tokens,
            vocab_size=VOCAB_SIZE,
            num_host_blocks=self.num_host_blocks,
        )
        self.limits = replace(limits, max_in_flight=self.max_in_flight)
        self.clock = SimulatedClock()
        self.runner = ChainCheckingRunner(self.limits, CostModel(), self.clock)
        self.scheduler = Scheduler(self.limits, (EOS,), lambda: 0, has_prefix_cache)
        self.domains: dict[int, Domain] = {}  # by serial of a publication: of those who held its block
        self.log = DeliveryLog()
        self.requests: dict[str, Request] = {}
        self.starts: dict[tuple[str, int], SequenceStart] = {}
        self.sequences: dict[str, list[Sequence]] = {}
        self.paused: set[str] = set()
        self.in_flight: deque[Sent] = deque()

    # Rules

    @rule(
        num_prompt_tokens=st.integers(1, 20),
        max_tokens=st.integers(0, 12),
        num_sequences=st.sampled_from((1, 1, 2, 3)),
        priority=st.sampled_from((0, 0, 1, -2)),
        tenant=st.sampled_from(("", "a", "b")),
        due_in_s=st.sampled_from((None, None, 0.0, 20.0)),
        min_tokens=st.sampled_from((0, 3)),
        prompt=st.sampled_from(PROMPTS),
        salt=st.sampled_from(("", "", "s")),
        num_prompt_logprobs=st.sampled_from((None, None, 0, 2)),
    )
    def submit(
        self,
        num_prompt_tokens: int,
        max_tokens: int,
        num_sequences: int,
        priority: int,
        tenant: str,
        due_in_s: float | None,
        min_tokens: int,
        prompt: tuple[int, ...],
        salt: str,
        num_prompt_logprobs: int | None = None,
    ) -> None:
        request = make_request(
            f"r{len(self.requests)}",
            max_tokens=max_tokens,
            prompt_ids=prompt[:num_prompt_tokens],
            num_sequences=num_sequences,
            arrival_s=self.clock(),
            priority=priority,
            tenant=tenant,
            deadline_s=None if due_in_s is None else self.clock() + due_in_s,
            min_tokens=min_tokens,
            num_prompt_logprobs=num_prompt_logprobs,
            seed=len(self.requests) % 2,  # the same prompt and seed: the same tokens
            cache_salt=salt,
        )
        self.requests[request.request_id] = request
        self.scheduler.submit(request)
        group = self.scheduler._states.groups.get(request.request_id)
        self.sequences[request.request_id] = [] if group is None else list(group.sequences)
        for sequence in self.sequences[request.request_id]:
            self.remember(sequence)

    @precondition(lambda self: self.requests)
    @rule(pick=st.integers(0, 99), index=st.sampled_from((None, None, 0, 1)), kept=st.sampled_from((None, 0, 2)))
    def cancel(self, pick: int, index: int | None, kept: int | None) -> None:
        reason = FinishReason.CANCELLED if kept is None else FinishReason.STOP
        self.scheduler.cancel(self.pick(pick), reason, index, kept)

    @precondition(lambda self: self.requests)
    @rule(pick=st.integers(0, 99))
    def pause(self, pick: int) -> None:
        self.scheduler.pause(self.pick(pick))
        self.paused.add(self.pick(pick))

    @precondition(lambda self: self.paused)
    @rule(pick=st.integers(0, 99))
    def resume(self, pick: int) -> None:
        request_id = sorted(self.paused)[pick % len(self.paused)]
        self.scheduler.resume(request_id)
        self.paused.remove(request_id)

    @precondition(lambda self: self.may_send())
    @rule(
        failing=st.sampled_from((None, None, None, None, 0, 1, 2)), raises=st.sampled_from((None,) * 8 + ("", "done"))
    )
    def plan(self, failing: int | None = None, raises: str | None = None) -> None:
        """
        Args:
            failing: this row writes nothing that can be read.
            raises: the step does, before it has done anything or after it is done.
        """
        made = self.scheduler.plan(self.clock())
        if made is None:
            delivery = self.scheduler.flush()
            if delivery is not None:
                self.log(delivery)
            return
        assert made.num_tokens <= self.limits.max_batch_tokens
        sequences = self.scheduler._in_flight.find(made).sequences
        assert not any(s.is_paused or s.is_lost or s.state is SequenceState.FINISHED for s in sequences)
        self.in_flight.append(Sent(made, raises is not None))
        if raises != "":
            self.compute(made)
            if self.runner.misled_rows:
                assert any(sent.failing is not None for sent in self.in_flight)
        if failing is not None and failing < made.num_rows:
            self.in_flight[-1].failing = failing
            if raises != "":
                self.runner.spoil(made, failing)

    @precondition(lambda self: self.in_flight)
    @rule(computed_again=st.booleans())
    def apply(self, computed_again: bool = False) -> None:
        sent = self.in_flight.popleft()
        if sent.has_raised:
            output = self.compute_row_by_row(sent.plan)
        else:
            output = self.runner.collect(sent.plan)
            if computed_again and not self.in_flight:
                again = self.compute_row_by_row(sent.plan)
                unread = self.unread_rows(sent.plan)
                assert [
                    (row, token_id)
                    for row, token_id in zip(again.rows.tolist(), again.token_ids.tolist(), strict=True)
                    if row not in unread
                ] == [
                    (row, token_id)
                    for row, token_id in zip(output.rows.tolist(), output.token_ids.tolist(), strict=True)
                    if row not in unread
                ]
        if sent.failing is not None:
            output.failed_rows[sent.failing] = "lost"
            if not self.in_flight:
                self.runner.spoil(sent.plan, sent.failing)
        self.log(self.scheduler.apply(sent.plan, output, self.clock()))

    @precondition(lambda self: len(self.in_flight) > 1)
    @rule()
    def raise_when_collected(self) -> None:
        """Both steps are lost."""
        self.in_flight.clear()
        self.log(self.scheduler.lose_in_flight(self.clock()))

    @precondition(lambda self: not self.in_flight)
    @rule(prompt=st.sampled_from(PROMPTS), num_prompt_tokens=st.integers(2, 8), failing=st.integers(0, 2))
    def lose_a_row_beside_others_that_share_its_prompt(
        self, prompt: tuple[int, ...], num_prompt_tokens: int, failing: int
    ) -> None:
        for _ in range(3):
            self.submit(num_prompt_tokens, 3, 1, 1, "", None, 0, prompt, "")
        self.plan(failing=failing)
        while self.may_send():
            num_before = len(self.in_flight)
            self.plan()
            if len(self.in_flight) == num_before:
                break
        if self.in_flight:
            self.apply()

    @rule(seconds=st.sampled_from((0.1, 3.0, 40.0)))
    def let_time_pass(self, seconds: float) -> None:
        """Classes age, deadlines come near; in mid-step it makes the step slow."""
        self.clock.advance(seconds)

    @rule(name=st.sampled_from(("", "a", "b")))
    def find_a_tenant_far_ahead(self, name: str) -> None:
        for tenant in self.scheduler.shares.tenants():
            if tenant.name == name:
                tenant.charge(5.0)

    @rule()
    def clear_cache(self) -> None:
        self.scheduler.cache.clear()

    @rule()
    def step(self) -> None:
        """Plan and apply in one, so that most histories get somewhere."""
        for _ in range(3):
            self.send_and_apply()

    # What must hold

    @invariant()
    def blocks_are_conserved(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        pool = self.scheduler.pool
        held = Counter(block for sequence in self.all_sequences() for block in sequence.table.blocks)
        assert all(pool._references[block] == held[block] for block in range(pool.num_blocks))
        assert len(pool._empty) + pool.num_kept + len(held) == pool.num_blocks
        assert set(pool._empty).isdisjoint(pool._kept)
        assert held.keys().isdisjoint(pool._kept)

    @invariant()
    def slots_are_conserved(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        occupied = [sequence.slot for sequence in self.all_sequences() if sequence.slot >= 0]
        assert sorted(occupied + self.scheduler._states.free_slots) == list(
            range(len(self.scheduler._states.occupants))
        )

    @invariant()
    def everyone_is_in_one_place(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        live = [s for s in self.all_sequences() if s.state is not SequenceState.FINISHED]
        assert set(self.scheduler._states.running) == {s for s in live if s.state is SequenceState.RUNNING}
        unforked = {s for group in self.scheduler._states.groups.values() for s in group.unforked.values()}
        waiting = {s for s in live if s.state is SequenceState.WAITING and not s.is_paused} - unforked
        queues = self.scheduler._states.waiting._classes
        assert waiting == {s for queue in queues.values() for line in queue.tenants.values() for s in line}
        assert len(self.scheduler._states.waiting) == len(waiting)
        for queue in queues.values():
            due = {s for line in queue._due.values() for s in line}
            assert due == {s for line in queue.tenants.values() for s in line if s.has_deadline}

    @invariant()
    def accounts_add_up(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        for tenant in self.scheduler.shares.tenants():
            requests = [g.request for g in self.scheduler._states.groups.values() if g.tenant is tenant]
            assert tenant.num_live == len(requests)
            running = [s for s in self.scheduler._states.running if s.tenant is tenant]
            assert tenant.num_running == len(running)
            assert abs(tenant.prepaid_s - sum(s.prepaid_s for s in running)) < 1e-9
            assert tenant.credit_s >= 0

    @invariant()
    def only_running_sequences_hold_blocks(self) -> None:
        if hasattr(self, "scheduler"):
            holders = [s for s in self.all_sequences() if s.table.blocks]
            assert all(s.state is SequenceState.RUNNING or s.is_in_flight for s in holders)

    @invariant()
    def everyone_knows_what_is_in_flight(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        flights = list(self.scheduler._in_flight)
        assert [flight.plan for flight in flights] == [sent.plan for sent in self.in_flight]
        for sequence in self.all_sequences():
            rows = [
                (flight.plan, flight.sequences.index(sequence)) for flight in flights if sequence in flight.sequences
            ]
            assert sequence.num_in_flight == len(rows)
            assert sequence.num_pending == sum(bool(plan.samples[row]) for plan, row in rows)
            if sequence.state is not SequenceState.FINISHED:
                most = max(sequence.max_length, sequence.num_prompt_tokens + 1)  # max_tokens may be 0
                assert len(sequence.token_ids) + sequence.num_pending <= most

    @invariant()
    def no_parent_is_evicted_before_its_children(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        cache = self.scheduler.cache
        assert {cache._keys[block]: block for block in cache._blocks.values()} == cache._blocks
        evictable = list(cache.pool._kept)
        block_of = {serial: block for block, serial in enumerate(cache._serials) if serial}
        for i, block in enumerate(evictable):
            key = cache._keys[block]
            assert key is not None
            parent = key[0]
            if isinstance(parent, int) and parent in block_of:  # else it was forgotten: nobody finds the child either
                assert block_of[parent] not in evictable[:i]

    @invariant()
    def no_two_domains_share_a_block(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        for sequence in self.all_sequences():
            for block in sequence.table.blocks[: sequence.table.num_published]:
                serial = self.scheduler.cache._serials[block]
                if serial:
                    assert self.domains.setdefault(serial, sequence.table.domain) == sequence.table.domain

    def teardown(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        for request_id in list(self.paused):
            self.scheduler.resume(request_id)
        num_tokens = sum(s.max_length for s in self.all_sequences() if s.state is not SequenceState.FINISHED)
        for _ in range(3000 + 20 * num_tokens):  # each step computes one at least, and many of them again
            self.send_and_apply()
            if not self.in_flight:
                self.plan()
                if not self.in_flight:
                    break
        self.blocks_are_conserved()
        assert self.scheduler.pool.num_used == 0
        for request in self.requests.values():
            self.check_answer(request)

    def check_answer(self, request: Request) -> None:
        terminal = self.log.terminal(request.request_id)
        sequences = self.sequences[request.request_id]
        ends = Counter(c.index for c in self.log.chunks if c.request_id == request.request_id and c.finish_reason)
        assert ends == Counter(range(max(1, len(sequences))))
        num_billed = 0
        for sequence in sequences:
            start = self.starts[request.request_id, sequence.index]
            expected = continuation(start, self.limits)
            delivered = self.log.tokens(request.request_id, sequence.index)
            assert delivered == expected[: len(delivered)]
            reason = self.log.finish_reason(request.request_id, sequence.index)
            num_drawn = len(delivered)
            if reason is FinishReason.STOP and sequence.num_own_tokens > len(delivered):
                assert expected[len(delivered)] == EOS
                num_drawn += 1
            if reason is FinishReason.LENGTH or num_drawn > len(delivered):
                assert num_drawn == len(expected)
            num_billed += num_drawn if sequence.num_tokens_kept is None else min(num_drawn, sequence.num_tokens_kept)
        assert terminal.usage is not None
        num_prompt_tokens = terminal.usage.num_prompt_tokens
        num_cached_tokens = terminal.usage.num_cached_tokens
        assert terminal.usage == Usage(num_prompt_tokens, num_billed, num_cached_tokens)
        assert num_cached_tokens <= max(0, num_prompt_tokens - 1)
        assert num_prompt_tokens <= len(request.prompt_ids)
        if any(sequence.num_own_tokens for sequence in sequences):
            assert num_prompt_tokens == len(request.prompt_ids)
        self.check_prompt_logprobs(request)

    def check_prompt_logprobs(self, request: Request) -> None:
        """Each position once, in order, and none of what was lost; all of them before any token."""
        told = self.log.prompt_logprobs(request.request_id)
        num_top = request.sampling.num_prompt_logprobs
        prompt = np.array(request.prompt_ids, np.int32)
        wanted = (
            []
            if num_top is None
            else [logprobs_after(prompt[:i], token_id, num_top) for i, token_id in enumerate(request.prompt_ids) if i]
        )
        assert told == wanted[: len(told)]
        ends = {c.finish_reason for c in self.log.chunks if c.request_id == request.request_id}
        if any(s.num_own_tokens for s in self.sequences[request.request_id]) or FinishReason.LENGTH in ends:
            assert len(told) == len(wanted)

    # Means

    def pick(self, number: int) -> str:
        """One of the last requests: the older ones have mostly ended."""
        recent = list(self.requests)[-5:]
        return recent[number % len(recent)]

    def may_send(self) -> bool:
        return len(self.in_flight) < self.max_in_flight and not (self.in_flight and self.in_flight[-1].has_raised)

    def send_and_apply(self) -> None:
        """As the engine does."""
        while self.may_send():
            num_before = len(self.in_flight)
            self.plan()
            if len(self.in_flight) == num_before:
                break
        if self.in_flight:
            self.apply()

    def compute(self, made: StepPlan) -> None:
        self.runner.forward(made)
        self.runner.sample(made)

    def compute_row_by_row(self, made: StepPlan) -> StepOutput:
        """As the engine does after a fault."""
        unread = self.unread_rows(made)
        rows, token_ids, prompt_logprobs = list[int](), list[int](), dict[int, list[TokenLogprobs]]()
        for row in range(made.num_rows):
            restarted = self.scheduler.restart(made, range(row, row + 1))
            self.compute(restarted)
            assert not self.runner.misled_rows or row in unread
            output = self.runner.collect(restarted)
            rows += [row] * len(output.rows)
            token_ids += output.token_ids.tolist()
            if 0 in output.prompt_logprobs:
                prompt_logprobs[row] = output.prompt_logprobs[0]
        return StepOutput(np.array(rows, np.int32), np.array(token_ids, np.int32), prompt_logprobs=prompt_logprobs)

    def unread_rows(self, made: StepPlan) -> set[int]:
        """Those of sequences that take nothing from it any more."""
        sequences = self.scheduler._in_flight.find(made).sequences
        return {row for row, s in enumerate(sequences) if s.is_lost or s.state is SequenceState.FINISHED}

    def all_sequences(self) -> list[Sequence]:
        return [sequence for sequences in self.sequences.values() for sequence in sequences]

    def remember(self, sequence: Sequence) -> None:
        self.starts[sequence.request_id, sequence.index] = SequenceStart(
            slot=0,
            token_ids=tuple(sequence.token_ids),
            num_prompt_tokens=sequence.num_prompt_tokens,
            sampling=sequence.sampling,
            seed=sequence.seed,
            stop_ids=sequence.stop_ids,
        )


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(
    max_examples=120,
    stateful_step_count=50,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)


class OverlapMachine(SchedulerMachine):
    """Two steps in flight."""

    max_in_flight = 2


TestOverlap = OverlapMachine.TestCase
TestOverlap.settings = TestScheduler.settings

LONG_HISTORIES = settings(
    max_examples=10,
    stateful_step_count=500,
    deadline=None,
    database=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)


def run_machine(seed: int, machine: type[SchedulerMachine] = SchedulerMachine) -> int:
    """Some long histories. Returns how many steps they had; one that fails is printed as it is, not shrunk."""
    num_steps = 0

    class Counted(machine):  # type: ignore[misc,valid-type]  # mypy knows no base that is given
        @invariant()
        def is_counted(self) -> None:
            nonlocal num_steps
            num_steps += 1

    run_state_machine_as_test(hypothesis.seed(seed)(Counted), settings=LONG_HISTORIES)
    return num_steps
