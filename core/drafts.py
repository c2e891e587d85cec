"""Drafts of a step: what is computed beside the next tokens, and how much of it was right. Thread: engine.

core/drafter.py proposes from text; a draft model, if there is one, where that has nothing. A draft is as long as the
step-cost model says that it pays. Its tokens hold to the sequence's grammar: what each token may be is known with the
plan.
"""

import logging
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Hashable
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Any, Protocol

import msgspec
import numpy as np

from core.drafter import (
    FIRST_ACCEPTED,
    FIRST_MODEL_LOSS,
    MOST_DRAFT,
    Acceptance,
    Draft,
    DraftBudget,
    Drafter,
    StepPrice,
    num_common,
    price_of,
)
from core.grammar import GrammarState, allow, forbid
from core.plan import Flight, Int32Array, RunnerLimits, StepOutput, StepPlan
from core.sequence import Sequence, SequenceState
from core.sequence_states import SequenceStates, domain_of
from core.step_cost import StepCostModel, StepWork
from core.types import Request, SamplingParams

logger = logging.getLogger(__name__)

MOST_DRAFTS = 32  # tokens of a step, of all sequences
SELDOM_FROM = 8  # decodes: a text that did not repeat itself is looked at every second step, beside 16 every third
FEW_ROWS = 4  # of a draft model's step: they cost what one costs
TURNED = 0.002  # of a share that is too low to be tried, towards the first one, a step

_PLAIN: dict[str, Any] = {
    "num_logprobs": None,
    "num_prompt_logprobs": None,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "dry_multiplier": 0.0,
    "repeat_last_n": -1,
}


class DraftWish(msgspec.Struct, frozen=True):
    """What a draft model is to continue.

    Args:
        length: tokens; 0: only compute what it lacks of the sequence.
    """

    sequence: Sequence
    domain: Hashable
    length: int


def plain_sampling(sampling: SamplingParams) -> SamplingParams:
    """For a draft model: without what needs a history; its drafts are right less often then."""
    return msgspec.structs.replace(sampling, **_PLAIN)


class DraftModel(Protocol):
    """What drafts where text does not: a smaller model (gpu/draft_model.py), or the model's own head (gpu/mtp.py).

    Attributes:
        name: of FIRST_ACCEPTED.
        token_s: a draft's token takes so long.
        prompt_token_s: a token that it lacks of a sequence, likewise.
        max_model_len: longer sequences get no drafts.
    """

    name: str
    token_s: float
    prompt_token_s: float
    max_model_len: int

    def num_behind(self, sequence: Sequence, domain: Hashable) -> int:
        """How many of the sequence's tokens it lacks; at least the newest."""

    def propose(self, wishes: Seq[DraftWish]) -> tuple[list[list[int]], float, float]:
        """The drafts, some of them shorter than asked for, as the target would sample them with the same noise.

        Returns: them, and the seconds that they took: for what it lacked, and for the rest.
        """

    def clear(self) -> None:
        """Forget all sequences."""


class Drafts:
    """Those of a scheduler's steps, and the masks of rows under grammars.

    Args:
        inter_token_target: see EngineConfig.
        forces_tokens: see Scheduler.
        speculates: likewise.
        model: None: text alone is a source of drafts.

    Attributes:
        speculates: may change between two steps.
        computed, accepted: tokens since the start, by drafter.
    """

    def __init__(
        self,
        limits: RunnerLimits,
        states: SequenceStates,
        step_cost: StepCostModel,
        inter_token_target: float | None,
        forces_tokens: bool,
        speculates: bool,
        model: DraftModel | None = None,
    ) -> None:
        self.computed, self.accepted = (dict.fromkeys(FIRST_ACCEPTED, 0) for _ in range(2))
        self.drafting_s = 0.0  # of the step that is planned: what the draft model took of it ...
        self._caught_up_s = 0.0  # ... and of that, what it had lacked
        self._limits, self._states, self._step_cost = limits, states, step_cost
        self._inter_token_target, self._forces_tokens = inter_token_target, forces_tokens
        self.speculates = speculates and limits.max_drafts > 0
        self._is_recurrent = limits.num_kept_states is not None  # what follows a wrong draft is computed over
        self._acceptance, self._budget = Acceptance(), DraftBudget()
        self._model = model if self.speculates else None
        self._model_name = "model" if model is None else model.name
        self._model_budget = DraftBudget(FIRST_MODEL_LOSS)  # of steps with its drafts, and of what it catches up with
        self._budgets = (self._budget,) if self._model is None else (self._budget, self._model_budget)

    def drafter_of(self, sequence: Sequence, request: Request) -> Drafter | None:
        """Of a new sequence; None: it is not speculated about."""
        is_excluded = sequence.repetition is not None or sequence.search is not None or request.pooling is not None
        if not (self.speculates and request.speculates) or is_excluded:
            return None
        recent = self._states.recent.of(domain_of(request))
        return Drafter(sequence.token_ids, self._acceptance, request.prediction_ids, recent)

    def clear(self) -> None:
        """Forget what was generated."""
        self._states.recent.clear()
        if self._model is not None:
            self._model.clear()

    def plan(self, plain: list[Sequence], others: list[Sequence], has_prompts: bool) -> dict[Sequence, list[int]]:
        """What to compute beside the decodes' next tokens, as far as it shortens the time per token."""
        self.drafting_s = self._caught_up_s = 0.0
        budget = self._budget
        if not self.speculates or budget.is_empty:
            return {}
        decodes = [*plain, *others]
        every = 1 + len(decodes) // SELDOM_FROM if self._model is None else 1
        able = [
            s
            for s in decodes
            if s.drafter is not None
            and (s.drafter.last is not None or s.forced or (len(s.token_ids) + s.slot) % every == 0)
            and self._may_draft(s)
        ]
        if not able:
            return {}
        work = StepWork(own_tokens=len(plain), own_kv=sum([sequence.num_computed_tokens + 1 for sequence in plain]))
        for sequence in others:
            work.add(sequence.num_computed_tokens, len(sequence.token_ids) + sequence.num_pending, 0)
        waits, target = has_prompts or len(self._states.waiting) > 0, self._inter_token_target
        price = price_of(self._step_cost, work, len(decodes), waits, target)
        if not (price.allows_any or budget.is_full):
            return {}
        drafts: dict[Sequence, Draft] = {}
        for sequence in able:
            most = self._most_of(sequence)
            draft = sequence.drafter.propose(most, sequence.forced) if sequence.drafter and most > 0 else None
            if draft is not None:
                drafts[sequence] = draft
        modelled = [s for s in able if s not in drafts] if self._model is not None else []
        for sequence in modelled:
            if (most := self._most_of(sequence)) > 0 and sequence.drafter is not None:
                drafts[sequence] = sequence.drafter.expect(self._model_name, most)
        dearer = self._model_s(price)[0] / min(len(modelled), FEW_ROWS) if modelled else 0.0
        lengths = price.lengths(
            [draft.share for draft in drafts.values()],
            [len(draft.token_ids) for draft in drafts.values()],
            min(self._limits.max_drafts, max(0, self._limits.max_batch_tokens - work.own_tokens)),
            tries=budget.is_full,
            dearer=[dearer if draft.drafter == self._model_name else 0.0 for draft in drafts.values()],
        )
        wanted = {sequence: length for sequence, length in zip(drafts, lengths, strict=True) if length}
        if modelled:
            self._ask_model({s: wanted.pop(s, 0) for s in modelled if s in drafts}, drafts, price, wanted)
        found: dict[Sequence, list[int]] = {}
        for sequence, length in wanted.items():
            if kept := self._held(sequence, drafts[sequence].token_ids[:length]):
                found[sequence] = kept
        budget.plan(price, sum(map(len, found.values())))
        self._model_budget.plan(price, sum(len(found.get(sequence, ())) for sequence in modelled))
        return found

    def _may_draft(self, sequence: Sequence) -> bool:
        """Whether it can go back to before a wrong draft: recurrent layers to where the row began, in its own slot."""
        if sequence.num_in_flight or len(sequence.token_ids) == sequence.num_prompt_tokens:
            return False
        num_behind = len(sequence.token_ids) - sequence.num_computed_tokens
        return not self._is_recurrent or (num_behind == 1 and sequence.state_source is None)

    def _most_of(self, sequence: Sequence) -> int:
        """Tokens of a draft. Recurrent states are kept where a row ends at a block border: no row goes beyond one."""
        most = min(MOST_DRAFT, sequence.max_length - len(sequence.token_ids) - 1)
        return min(most, -len(sequence.token_ids) % self._limits.block_size) if self._is_recurrent else most

    def _model_s(self, price: StepPrice) -> tuple[float, float]:
        """A draft's token, and one that the draft model lacks; nothing where the steps' own time is not known."""
        model = self._model
        return (0.0, 0.0) if model is None or not price.is_measured else (model.token_s, model.prompt_token_s)

    def _ask_model(
        self, lengths: dict[Sequence, int], drafts: dict[Sequence, Draft], price: StepPrice, wanted: dict[Sequence, int]
    ) -> None:
        """Replace what is expected of the draft model by what it drafts, and let it catch up where that will pay."""
        model, wishes, to_spend = self._model, list[DraftWish](), 0.0
        assert model is not None, "it is asked"
        for sequence, length in lengths.items():
            assert sequence.drafter is not None, "it has an expectation"
            sequence.drafter.last = None
            if not length:
                self._acceptance.turn_back(self._model_name, TURNED)
                continue
            domain = domain_of(self._states.groups[sequence.request_id].request)
            num_behind = model.num_behind(sequence, domain)
            if len(sequence.token_ids) + length >= model.max_model_len:
                continue
            is_far = num_behind > MOST_DRAFT + 1
            if is_far or not sequence.drafter.is_modelled:
                num_left = min(self._states.mean_answer_tokens, sequence.max_length - len(sequence.token_ids))
                token_s, prompt_token_s = self._model_s(price)
                behind_s = num_behind * prompt_token_s
                pays = behind_s < num_left * price.saved_s(drafts[sequence].share, length, token_s)
                if not pays or not self._model_budget.allows(to_spend + behind_s / price.step_s):
                    continue
                to_spend += behind_s / price.step_s
                sequence.drafter.is_modelled = True
            wishes.append(DraftWish(sequence, domain, 0 if is_far else length))
        if not wishes:
            return
        try:
            proposed, self._caught_up_s, drafting_s = model.propose(wishes)
        except Exception:  # no request depends on it
            logger.exception("the draft model failed and is no longer used")
            self._model = None
            return
        self.drafting_s = self._caught_up_s + drafting_s
        if price.is_measured:
            self._model_budget.spend(self._caught_up_s / price.step_s)
        for wish, token_ids in zip(wishes, proposed, strict=True):
            drafter = wish.sequence.drafter
            if token_ids and drafter is not None:
                drafts[wish.sequence] = drafter.last = replace(drafts[wish.sequence], token_ids=token_ids)
                wanted[wish.sequence] = len(token_ids)

    def _held(self, sequence: Sequence, draft: list[int]) -> list[int]:
        """As much of a draft as the sequence's grammar takes; the masks of what is sampled meanwhile are kept."""
        grammar = sequence.grammar
        if grammar is None or not draft:
            return draft
        masks = self.open_masks(len(draft) + 1)
        forced, num_before, num_kept = deque(sequence.forced), grammar.num_accepted, 0
        for mask, token_id in zip(masks, draft, strict=False):
            self._fill_mask(mask, sequence, num_kept, forced)
            if not mask.view(np.uint32)[token_id // 32] >> token_id % 32 & 1:
                break
            grammar.accept(token_id)
            if grammar.fault is not None or grammar.has_ended:
                break
            num_kept += 1
            self.next_forced(forced, grammar)
        else:
            self._fill_mask(masks[num_kept], sequence, num_kept, forced)
        if grammar.fault is None:
            grammar.roll_back(grammar.num_accepted - num_before)
        else:  # it cannot be rolled back, and its last mask means nothing
            num_kept = max(0, num_kept - 1)
            sequence.grammar = self._grammar_anew(sequence)
        sequence.draft_masks = masks[: num_kept + 1]
        return draft[:num_kept]

    def _grammar_anew(self, sequence: Sequence) -> GrammarState:
        grammar = self._states.groups[sequence.request_id].request.grammar
        assert grammar is not None, "the sequence has one"
        state = grammar.start()
        for token_id in sequence.token_ids[sequence.num_prompt_tokens :]:
            state.accept(token_id)
        return state

    def next_forced(self, forced: deque[int], grammar: GrammarState) -> None:
        """After a token, what the grammar forces next."""
        if forced:
            forced.popleft()
        if not forced and self._forces_tokens:
            forced.extend(grammar.forced())

    def open_masks(self, num_tokens: int) -> Int32Array:
        return np.full((num_tokens, -(-self._limits.vocab_size // 32)), -1, np.int32)

    def verify(self, flight: Flight, output: StepOutput, lost: set[int], step_s: float) -> set[int]:
        """Which of the sampled tokens follow a wrong draft; what was computed of these does not count as computed."""
        plan = flight.plan
        rows, token_ids = (output.rows.tolist(), output.token_ids.tolist()) if plan.num_drafts else ([], [])
        refused: set[int] = set()
        num_all_right = num_again = 0
        for row, num_drafts in plan.num_drafts.items():
            if row in lost:
                continue
            first = bisect_left(rows, row)
            end = bisect_right(rows, row, lo=first)
            num_right = min(num_common(token_ids[first:end], plan.drafts_of(row)), end - first - 1)
            refused.update(range(first + num_right + 1, end))
            sequence = flight.sequences[row]
            num_lost = num_drafts - num_right
            if self._is_recurrent and num_lost:  # the row's next one begins where it began
                num_lost = num_drafts + 1
                num_again += num_right + 1
            if sequence.num_computed_tokens:  # it was not forgotten meanwhile
                sequence.num_computed_tokens -= num_lost
            last = None if sequence.drafter is None else sequence.drafter.last
            assert last is not None, "it has drafts"
            self.computed[last.drafter] += num_drafts
            self.accepted[last.drafter] += num_right
            num_all_right += num_right
            sequence.num_spared_steps += num_right
            if last.drafter == "prediction":
                sequence.predicted += range(sequence.num_own_tokens, sequence.num_own_tokens + num_right)
                sequence.num_mispredicted_tokens += num_drafts - num_right
        for budget in self._budgets:
            budget.settle(num_all_right, None if flight.work.prompt_tokens else step_s - self._caught_up_s, num_again)
        return refused

    def masks(self, plan: StepPlan) -> Int32Array | None:
        """What the plan's masked rows may sample, as Runner.sample() takes it: every step before it was applied."""
        if not plan.masked_rows:
            return None
        found: list[Int32Array] = []
        for row, slot in zip(plan.masked_rows, plan.slots[plan.masked_rows].tolist(), strict=True):
            sequence, num_drafts = self._states.occupants[slot], plan.num_drafts.get(row, 0)
            masks = self.open_masks(1 + num_drafts)
            if sequence is not None and sequence.grammar is not None and sequence.state is SequenceState.RUNNING:
                if num_drafts:
                    assert sequence.draft_masks is not None, "they were made with the plan"
                    masks = sequence.draft_masks
                else:
                    self._fill_mask(masks[0], sequence, 0, sequence.forced)
            found.append(masks)
        return np.concatenate(found)

    def _fill_mask(self, mask: Int32Array, sequence: Sequence, num_drafts: int, forced: Seq[int]) -> None:
        """What may be sampled after so many drafts: the first forced token, or what the grammar allows.

        Before min_tokens no stop id; if nothing else may come, the request's, as text; at last the model's end.
        """
        if forced:
            mask[:] = 0
            allow(mask.view(np.uint32), forced[0])
        elif sequence.grammar is not None:
            sequence.grammar.fill_mask(mask)
            ends = (sequence.stop_ids, sequence.model_ends)
            for banned in ends if sequence.num_own_tokens + num_drafts < sequence.sampling.min_tokens else ():
                kept = mask.copy()
                for token_id in (*banned, *range(self._limits.vocab_size, 32 * len(mask))):
                    forbid(kept.view(np.uint32), token_id)
                if kept.any():
                    mask[:] = kept
                    return
