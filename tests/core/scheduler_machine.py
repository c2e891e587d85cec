"""Any history of submit, cancel, pause, resume and steps: SchedulerMachine.

With one step in flight, and with two: the second is planned and computed before the first is applied.
"""

from dataclasses import replace

import numpy as np
from hypothesis import HealthCheck, settings

from core.kv_cache import least_window_blocks
from core.plan import SequenceStart, StepOutput, StepPlan
from core.sequence import Sequence, SequenceState
from core.types import FinishReason, Pooling, PoolingKind, TokenLogprobs
from tests.core.drawn_rules import drawn_rule, drawn_start
from tests.core.scheduler_history import SchedulerHistory, Sent
from tests.fakes import make_request, sequences_of, small_limits

VOCAB_SIZE = 30
MOST_PRESENT = 20  # sequences: of three classes and three tenants each, and a longer queue makes no other history
PROMPTS = tuple(tuple((3 * i + (i >= fork)) % 29 for i in range(20)) for fork in (1, 6, 12, 20))


def _has_requests(machine: SchedulerHistory) -> bool:
    return bool(machine.requests)


class SchedulerMachine(SchedulerHistory):
    """Drives a scheduler and a simulated runner call by call, so that messages come between plan and apply too."""

    num_host_blocks = 0
    max_in_flight = 1
    num_kept_states: int | None = None
    window: int | None = None
    num_spare_windows: int | None = (
        None  # window blocks beside those that one sequence needs; None: all layers have one table
    )
    shares_answers = True

    @drawn_start(
        num_blocks=range(3, 15),
        block_size=(1, 2, 4),
        max_batch_tokens=range(1, 10),
        has_prefix_cache=(True, True, True, False),
    )
    def begin(self, num_blocks: int, block_size: int, max_batch_tokens: int, has_prefix_cache: bool) -> None:
        limits = small_limits(
            num_blocks=num_blocks,
            block_size=block_size,
            max_batch_tokens=max_batch_tokens,
            vocab_size=VOCAB_SIZE,
            num_host_blocks=self.num_host_blocks,
        )
        names = ("max_in_flight", "num_kept_states", "window", "shares_answers")
        limits = replace(limits, **{name: getattr(self, name) for name in names})
        if self.num_spare_windows is not None:
            assert self.window is not None
            num_windows = least_window_blocks(self.window, max_batch_tokens, block_size) + self.num_spare_windows
            limits = replace(limits, num_window_blocks=num_windows)
        self.start(limits, has_prefix_cache)

    # Rules

    @drawn_rule(
        lambda self: len(self.present) < MOST_PRESENT,
        is_vital=True,
        num_prompt_tokens=range(1, 21),
        max_tokens=range(13),
        num_sequences=(1, 1, 2, 3),
        priority=(0, 0, 1, -2),
        tenant=("", "a", "b"),
        due_in_s=(None, None, 0.0, 20.0),
        min_tokens=(0, 3),
        prompt=PROMPTS,
        salt=("", "", "s"),
        num_prompt_logprobs=(None, None, 0, 2),
        pooling=(None, None, None, "last", "mean"),
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
        pooling: PoolingKind | None = None,
    ) -> None:
        if pooling is not None:
            max_tokens, num_sequences, min_tokens, num_prompt_logprobs = 0, 1, 0, None
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
            pooling=None if pooling is None else Pooling(pooling),
        )
        self.requests[request.request_id] = request
        self.scheduler.submit(request)
        group = self.scheduler.states.groups.get(request.request_id)
        self.sequences[request.request_id] = [] if group is None else list(group.sequences)
        self.present += self.sequences[request.request_id]
        for sequence in self.sequences[request.request_id]:
            self.remember(sequence)

    @drawn_rule(_has_requests, pick=range(100), index=(None, None, 0, 1), kept=(None, 0, 2))
    def cancel(self, pick: int, index: int | None, kept: int | None) -> None:
        reason = FinishReason.CANCELLED if kept is None else FinishReason.STOP
        self.scheduler.cancel(self.pick(pick), reason, index, kept)

    @drawn_rule(_has_requests, pick=range(100))
    def pause(self, pick: int) -> None:
        self.scheduler.pause(self.pick(pick))
        self.paused.add(self.pick(pick))

    @drawn_rule(lambda self: self.paused, pick=range(100))
    def resume(self, pick: int) -> None:
        request_id = sorted(self.paused)[pick % len(self.paused)]
        self.scheduler.resume(request_id)
        self.paused.remove(request_id)

    @drawn_rule(
        lambda self: self.may_send(), failing=(None, None, None, None, 0, 1, 2), raises=(None,) * 8 + ("", "done")
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
        sequences = sequences_of(self.scheduler, made)
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

    @drawn_rule(lambda self: self.in_flight, computed_again=(False, True))
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

    @drawn_rule(lambda self: len(self.in_flight) > 1)
    def raise_when_collected(self) -> None:
        """Both steps are lost."""
        self.in_flight.clear()
        self.log(self.scheduler.lose_in_flight(self.clock()))

    @drawn_rule(lambda self: not self.in_flight, prompt=PROMPTS, num_prompt_tokens=range(2, 9), failing=range(3))
    def lose_a_row_beside_others_that_share_its_prompt(
        self, prompt: tuple[int, ...], num_prompt_tokens: int, failing: int
    ) -> None:
        for _ in range(3):
            self.submit(num_prompt_tokens, 3, 1, 1, "", None, 0, prompt, "")
        self.plan(failing=failing)
        self.send_and_apply()

    @drawn_rule(seconds=(0.1, 3.0, 40.0))
    def let_time_pass(self, seconds: float) -> None:
        """Classes age, deadlines come near; in mid-step it makes the step slow."""
        self.clock.advance(seconds)

    @drawn_rule(name=("", "a", "b"))
    def find_a_tenant_far_ahead(self, name: str) -> None:
        for tenant in self.scheduler.shares.tenants():
            if tenant.name == name:
                tenant.charge(5.0)

    @drawn_rule()
    def clear_cache(self) -> None:
        self.scheduler.pool.clear()

    @drawn_rule(is_vital=True)
    def step(self) -> None:
        """Plan and apply in one, so that most histories get somewhere."""
        for _ in range(3):
            self.send_and_apply()

    def teardown(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        for request_id in list(self.paused):
            self.scheduler.resume(request_id)
        num_tokens = sum(s.max_length for s in self.present if s.state is not SequenceState.FINISHED)
        for _ in range(3000 + 20 * num_tokens):  # each step computes one at least, and many of them again
            self.send_and_apply()
            if not self.in_flight:
                self.plan()
                if not self.in_flight:
                    break
        self.everything_holds()
        assert not self.present
        assert self.scheduler.pool.num_used == 0
        assert self.scheduler.pool.windows is None or self.scheduler.pool.windows.num_used == 0
        for request in self.requests.values():
            self.check_answer(request)

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
        pooled = dict[int, bytes]()
        for row in range(made.num_rows):
            restarted = self.scheduler.restart(made, range(row, row + 1))
            self.compute(restarted)
            assert not self.runner.misled_rows or row in unread
            output = self.runner.collect(restarted)
            rows += [row] * len(output.rows)
            token_ids += output.token_ids.tolist()
            if 0 in output.prompt_logprobs:
                prompt_logprobs[row] = output.prompt_logprobs[0]
            if 0 in output.pooled:
                pooled[row] = output.pooled[0]
        token_columns = np.array(rows, np.int32), np.array(token_ids, np.int32)
        return StepOutput(*token_columns, prompt_logprobs=prompt_logprobs, pooled=pooled)

    def unread_rows(self, made: StepPlan) -> set[int]:
        """Those of sequences that take nothing from it any more."""
        sequences = sequences_of(self.scheduler, made)
        return {row for row, s in enumerate(sequences) if s.is_lost or s.state is SequenceState.FINISHED}

    def remember(self, sequence: Sequence) -> None:
        self.starts[sequence.request_id, sequence.index] = SequenceStart(
            slot=0,
            token_ids=tuple(sequence.token_ids),
            num_prompt_tokens=sequence.num_prompt_tokens,
            sampling=sequence.sampling,
            seed=sequence.seed,
            stop_ids=sequence.stop_ids,
        )


class OverlapMachine(SchedulerMachine):
    """Two steps in flight."""

    max_in_flight = 2


SHORT_HISTORIES = settings(
    max_examples=120,
    stateful_step_count=50,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
