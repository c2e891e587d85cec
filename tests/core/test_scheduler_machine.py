"""Any history of submit, cancel, pause, resume and steps: what must hold after each of them, and at the end."""

from collections import Counter

import hypothesis
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
from core.simulation import CostModel, SimulatedClock, continuation
from core.types import FinishReason, Request, Usage
from tests.core.kv_oracle import ChainCheckingRunner
from tests.fakes import DeliveryLog, make_request, small_limits

EOS = 3
VOCAB_SIZE = 30
PROMPTS = tuple(tuple((3 * i + (i >= fork)) % 29 for i in range(20)) for fork in (1, 6, 12, 20))


class SchedulerMachine(RuleBasedStateMachine):
    """Drives a scheduler and a simulated runner call by call, so that messages come between plan and apply too."""

    num_host_blocks = 0

    @initialize(
        num_blocks=st.integers(3, 14),
        block_size=st.sampled_from((1, 2, 4)),
        max_batch_tokens=st.integers(1, 9),
        has_prefix_cache=st.sampled_from((True, True, True, False)),
    )
    def begin(self, num_blocks: int, block_size: int, max_batch_tokens: int, has_prefix_cache: bool) -> None:
        self.limits = small_limits(
            num_blocks=num_blocks,
            block_size=block_size,
            max_batch_tokens=max_batch_tokens,
            vocab_size=VOCAB_SIZE,
            num_host_blocks=self.num_host_blocks,
        )
        self.clock = SimulatedClock()
        self.runner = ChainCheckingRunner(self.limits, CostModel(), self.clock)
        self.scheduler = Scheduler(self.limits, (EOS,), lambda: 0, has_prefix_cache)
        self.domains: dict[int, Domain] = {}  # by serial of a publication: of those who held its block
        self.log = DeliveryLog()
        self.requests: dict[str, Request] = {}
        self.starts: dict[tuple[str, int], SequenceStart] = {}
        self.sequences: dict[str, list[Sequence]] = {}
        self.paused: set[str] = set()
        self.in_flight: tuple[StepPlan, StepOutput] | None = None

    # Rules

    @rule(
        num_prompt_tokens=st.integers(1, 20),
        max_tokens=st.integers(1, 12),
        num_sequences=st.sampled_from((1, 1, 2, 3)),
        priority=st.sampled_from((0, 0, 1, -2)),
        tenant=st.sampled_from(("", "a", "b")),
        due_in_s=st.sampled_from((None, None, 0.0, 20.0)),
        min_tokens=st.sampled_from((0, 3)),
        prompt=st.sampled_from(PROMPTS),
        salt=st.sampled_from(("", "", "s")),
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
            seed=len(self.requests) % 2,  # the same prompt and seed: the same tokens
            cache_salt=salt,
        )
        self.requests[request.request_id] = request
        self.scheduler.submit(request)
        group = self.scheduler._groups.get(request.request_id)
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

    @precondition(lambda self: self.in_flight is None)
    @rule()
    def plan(self) -> None:
        made = self.scheduler.plan(self.clock())
        if made is None:
            delivery = self.scheduler.flush()
            if delivery is not None:
                self.log(delivery)
            return
        assert made.num_tokens <= self.limits.max_batch_tokens
        assert not any(s.is_paused for s in self.scheduler._sequences_of(made, range(made.num_rows)))
        ticket = self.runner.forward(made)
        self.runner.sample(ticket)
        self.in_flight = made, self.runner.collect(ticket)

    @precondition(lambda self: self.in_flight is not None)
    @rule(computed_again=st.booleans(), failing=st.sampled_from((None, None, None, 0, 1, 2)))
    def apply(self, computed_again: bool, failing: int | None) -> None:
        assert self.in_flight is not None
        made, output = self.in_flight
        if computed_again:  # as the engine does after a fault, row by row
            for row in range(made.num_rows):
                again = self.runner.collect(self.runner.forward(self.scheduler.restart(made, range(row, row + 1))))
                assert again.token_ids.tolist() == output.token_ids[output.rows == row].tolist()
        if failing is not None and failing < made.num_rows:
            output.failed_rows[failing] = "lost"
            self.runner.spoil(made, failing)
        self.in_flight = None
        self.log(self.scheduler.apply(made, output, self.clock()))

    @precondition(lambda self: self.in_flight is None)
    @rule(prompt=st.sampled_from(PROMPTS), num_prompt_tokens=st.integers(2, 8), failing=st.integers(0, 2))
    def lose_a_row_beside_others_that_share_its_prompt(
        self, prompt: tuple[int, ...], num_prompt_tokens: int, failing: int
    ) -> None:
        for _ in range(3):
            self.submit(num_prompt_tokens, 3, 1, 1, "", None, 0, prompt, "")
        self.plan()
        if self.in_flight is not None:
            self.apply(computed_again=False, failing=failing)

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
            if self.in_flight is None:
                self.plan()
            if self.in_flight is not None:
                self.apply(computed_again=False, failing=None)

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
        assert sorted(occupied + self.scheduler._free_slots) == list(range(len(self.scheduler._occupants)))

    @invariant()
    def everyone_is_in_one_place(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        live = [s for s in self.all_sequences() if s.state is not SequenceState.FINISHED]
        assert set(self.scheduler._running) == {s for s in live if s.state is SequenceState.RUNNING}
        unforked = {s for group in self.scheduler._groups.values() for s in group.unforked.values()}
        waiting = {s for s in live if s.state is SequenceState.WAITING and not s.is_paused} - unforked
        queues = self.scheduler._waiting._classes
        assert waiting == {s for queue in queues.values() for line in queue.tenants.values() for s in line}
        assert len(self.scheduler._waiting) == len(waiting)
        for queue in queues.values():
            due = {s for line in queue._due.values() for s in line}
            assert due == {s for line in queue.tenants.values() for s in line if s.has_deadline}

    @invariant()
    def accounts_add_up(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        for tenant in self.scheduler.shares.tenants():
            requests = [g.request for g in self.scheduler._groups.values() if g.tenant is tenant]
            assert tenant.num_live == len(requests)
            running = [s for s in self.scheduler._running if s.tenant is tenant]
            assert tenant.num_running == len(running)
            assert abs(tenant.prepaid_s - sum(s.prepaid_s for s in running)) < 1e-9
            assert tenant.credit_s >= 0

    @invariant()
    def only_running_sequences_hold_blocks(self) -> None:
        if hasattr(self, "scheduler"):
            assert all(s.state is SequenceState.RUNNING for s in self.all_sequences() if s.table.blocks)

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
            if self.in_flight is not None:
                self.apply(computed_again=False, failing=None)
            self.plan()
            if self.in_flight is None:
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

    # Means

    def pick(self, number: int) -> str:
        """One of the last requests: the older ones have mostly ended."""
        recent = list(self.requests)[-5:]
        return recent[number % len(recent)]

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
