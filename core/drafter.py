"""Proposes how a sequence may go on, from text that it repeats. Thread: engine.

A draft is a guess. The step computes its tokens as if they were right and samples a token after each one; the scheduler
takes what was sampled up to the first that differs (speculative decoding, arXiv:2211.17192). Noise depends on the seed
and the position alone, so the tokens are those that would be sampled one by one: drafts change how many a step brings.

A draft is what followed the longest earlier occurrence of the sequence's last tokens: in itself (prompt lookup), in the
answer that the request predicts, or in recent answers of its cache domain. How likely such a token is right is learned
for each sequence, by the length of the occurrence, also from drafts that were not computed: what they would have
brought is seen anyway.
"""

import heapq
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from core.step_cost import StepCostModel, StepWork

LEAST_MATCH = 3  # tokens that must occur again: fewer often do by chance
MOST_MATCH = 32  # tokens that are compared
MOST_OCCURRENCES = 8  # that are looked at, the latest ones
MOST_DRAFT = 16  # tokens of one sequence
MOST_INDEXED = 1 << 16  # tokens of a text: older ones are not found
MOST_NOTED = 1 << 12  # tokens of a text at once: some 2 ms
MATCH_CLASSES = (3, 5, 9, 17)  # least lengths of matches that are learned about apart
# By drafter, shares of each class before anything was learned. Of equal matches the first drafter's is taken.
FIRST_ACCEPTED = {
    "prediction": (0.6, 0.7, 0.8, 0.9),
    "suffix": (0.3, 0.5, 0.75, 0.85),
    "recent": (0.2, 0.4, 0.7, 0.8),
    "grammar": (1.0, 1.0, 1.0, 1.0),  # tokens that it forces, of sequences that have to sample them
    "model": (0.4,),  # a draft model
    "mtp": (0.5,),  # the model's own head
}
MODELS = ("model", "mtp")  # of these, the one that a server has; their wrong tokens are dear
PRIOR_WEIGHT = 4.0  # tokens that the mean of all sequences counts for, beside a sequence's own
MODEL_PRIOR_WEIGHT = 2.0  # likewise, of MODELS
FADING = 0.9  # of what a sequence has learned, with each draft
ALL_FADING = 0.98
MOST_RECENT = 1 << 15  # tokens of recent answers, of a cache domain
MOST_DOMAINS = 64  # whose recent answers are kept
END = -1  # between recent answers
TOKEN_BITS = 20  # of a run's number; what a larger id might find is compared with the text, and not taken
RUN_MASK = (1 << LEAST_MATCH * TOKEN_BITS) - 1
LEAST_GAIN = 1.05  # tokens per second with a draft's token against without it, by the step-cost model
LEAST_COST = 0.02  # of the step, that a draft's token costs at least, whatever was learned or measured
ALLOWED_LOSS = 0.005  # of the time
MOST_LOSS = 2.0  # steps' time that drafts may lose at once
FIRST_MODEL_LOSS = 0.5  # that a draft model may lose before it has gained any
MOST_COST = 2.0  # steps' time that a step's drafts are taken to have cost, whatever else has held it up
LEAST_TRIED = 0.5  # share of a draft that is tried where the model, which may be wrong, finds it too dear
UNKNOWN_COST = 0.05  # before the model is ready


class RepeatedText:
    """Tokens, and where each run of LEAST_MATCH of them has occurred.

    Args:
        token_ids: may grow; what is already there never changes.

    Attributes:
        run: the last of the tokens noted, as one number: unlike a tuple, nothing for the garbage collector.
    """

    def __init__(self, token_ids: list[int]) -> None:
        self.token_ids = token_ids
        self._first = max(0, len(token_ids) - MOST_INDEXED)
        self.run = 0
        self._ends: dict[int, int] = {}  # of a run: one past its last occurrence
        self._earlier: list[int] = []  # by the end of an occurrence, behind _first: of the run's one before it, or 0

    def note(self) -> bool:
        """Note what was added, MOST_NOTED tokens at most: a long prompt holds no step up. Returns whether all is."""
        text, earlier = self.token_ids, self._earlier
        num_noted, num_tokens = self._first + len(earlier), len(text)
        if num_noted < num_tokens:
            ends, run = self._ends, self.run
            for end in range(num_noted + 1, min(num_tokens, num_noted + MOST_NOTED) + 1):
                run = (run << TOKEN_BITS | text[end - 1]) & RUN_MASK
                earlier.append(ends.get(run, 0))
                ends[run] = end
            self.run = run
        return num_tokens <= num_noted + MOST_NOTED

    def find(self, tail: list[int], run: int) -> tuple[int, int]:
        """The occurrence of the longest end of `tail`: (one past it, its length); of equally long ones the latest.

        (0, 0): no end of LEAST_MATCH tokens occurs with another token behind it, as far as is noted.

        Args:
            run: of the tail.
        """
        text, earlier, first, end = self.token_ids, self._earlier, self._first, self._ends.get(run, 0)
        if end and end == len(text):
            end = earlier[-1]
        if not end:
            return 0, 0
        found = length = 0
        for _ in range(MOST_OCCURRENCES):
            most, matched = min(MOST_MATCH, end - first, len(tail)), 0
            while matched < most and text[end - 1 - matched] == tail[-1 - matched]:
                matched += 1
            if matched > max(length, LEAST_MATCH - 1):
                found, length = end, matched
            end = earlier[end - 1 - first]
            if not end or length >= MOST_MATCH:
                break
        return found, length

    def after(self, end: int, most: int, is_own: bool) -> list[int]:
        """Up to so many tokens from there on, up to END; at the end of the own text, those again that follow `end`."""
        draft = self.token_ids[end : end + most]
        if END in draft:
            del draft[draft.index(END) :]
        while is_own and draft and len(draft) < most:
            draft += draft[: most - len(draft)]
        return draft


class RecentAnswers:
    """What each cache domain was answered lately: of a tenant, under one salt, as in the prefix cache."""

    def __init__(self) -> None:
        self._texts: OrderedDict[Hashable, RepeatedText] = OrderedDict()

    def of(self, domain: Hashable) -> RepeatedText:
        """The domain's, which may be empty; it changes when an answer is added."""
        if domain not in self._texts:
            self._texts[domain] = RepeatedText([])
            if len(self._texts) > MOST_DOMAINS:
                self._texts.popitem(last=False)
        self._texts.move_to_end(domain)
        return self._texts[domain]

    def add(self, domain: Hashable, answer: list[int]) -> None:
        text = self.of(domain)
        text.token_ids += [*answer[:MOST_RECENT], END]
        if len(text.token_ids) > 2 * MOST_RECENT:
            self._texts[domain] = RepeatedText(text.token_ids[-MOST_RECENT:])

    def clear(self) -> None:
        self._texts.clear()


@dataclass(slots=True)
class Acceptance:
    """Shares of drafted tokens that were right, by drafter and class of match."""

    shares: dict[str, list[float]] = field(default_factory=lambda: {n: list(all) for n, all in FIRST_ACCEPTED.items()})

    def learn(self, drafter: str, match_class: int, num_right: int, num_tried: int) -> None:
        kept, shares = ALL_FADING**num_tried, self.shares[drafter]
        shares[match_class] = kept * shares[match_class] + (1 - kept) * num_right / num_tried

    def turn_back(self, drafter: str, part: float) -> None:
        """Believe a little less in what was learned of a drafter that is not tried any more."""
        self.shares[drafter][0] += part * (FIRST_ACCEPTED[drafter][0] - self.shares[drafter][0])


@dataclass(slots=True)
class Draft:
    """
    Args:
        share: how likely each token is right, if those before it are.
        drafter: its name.
    """

    token_ids: list[int]
    share: float
    drafter: str
    match_class: int
    num_tokens_before: int


class Drafter:
    """One sequence's.

    Args:
        token_ids: the sequence's; it may grow.
        acceptance: of all sequences.
        prediction: of the answer, which begins behind token_ids as they are now.
        recent: answers of its cache domain.

    Attributes:
        last: what was proposed last.
        is_modelled: a draft model has been asked about the sequence.
    """

    def __init__(
        self,
        token_ids: list[int],
        acceptance: Acceptance,
        prediction: Sequence[int] = (),
        recent: RepeatedText | None = None,
    ) -> None:
        self.last: Draft | None = None
        self.is_modelled = False
        self._own = RepeatedText(token_ids)
        self._texts = {"suffix": self._own}
        if prediction:
            self._texts = {"prediction": RepeatedText([*token_ids[-LEAST_MATCH:], *prediction]), **self._texts}
        if recent is not None:
            self._texts["recent"] = recent
        self._acceptance = acceptance
        self._right: dict[tuple[str, int], float] = {}
        self._tried: dict[tuple[str, int], float] = {}

    def propose(self, most: int, forced: Sequence[int] = ()) -> Draft | None:
        """What may come next, up to so many tokens.

        Args:
            forced: what must come next, as far as that is known.
        """
        own = self._own
        if self.last is not None:
            self._learn(self.last, own.token_ids)
            self.last = None
        if forced:
            self.last = Draft(list(forced)[:most], 1.0, "grammar", 0, len(own.token_ids))
            return self.last
        if not own.note():
            return None
        longest = 0
        for name, text in self._texts.items():
            if text is not own:
                text.note()
            end, length = text.find(own.token_ids, own.run)
            if length > longest and (draft := text.after(end, most, is_own=text is own)):
                longest = length
                match_class = sum(length >= least for least in MATCH_CLASSES) - 1
                self.last = Draft(draft, self._share(name, match_class), name, match_class, len(own.token_ids))
        return self.last

    def expect(self, drafter: str, most: int) -> Draft:
        """A draft of another origin, whose tokens are not known yet. The caller sets `last` to what becomes of it."""
        return Draft([END] * most, self._share(drafter, 0), drafter, 0, len(self._own.token_ids))

    def _share(self, drafter: str, match_class: int) -> float:
        weight, key = MODEL_PRIOR_WEIGHT if drafter in MODELS else PRIOR_WEIGHT, (drafter, match_class)
        prior = weight * self._acceptance.shares[drafter][match_class]
        return (prior + self._right.get(key, 0.0)) / (weight + self._tried.get(key, 0.0))

    def _learn(self, last: Draft, token_ids: list[int]) -> None:
        """Compare the last draft with what has come, whether it was computed or not."""
        came = token_ids[last.num_tokens_before :]
        num_right = num_common(last.token_ids, came)
        num_tried = min(num_right + 1, len(last.token_ids), len(came))
        if num_tried:
            key = last.drafter, last.match_class
            self._right[key] = FADING * self._right.get(key, 0.0) + num_right
            self._tried[key] = FADING * self._tried.get(key, 0.0) + num_tried
            self._acceptance.learn(*key, num_right, num_tried)


def num_common(one: list[int], other: list[int]) -> int:
    """How many tokens both begin with."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


class DraftBudget:
    """The time that drafts may lose: a part of each step's, and what right drafts save, up to a few steps' time."""

    def __init__(self, steps: float = MOST_LOSS) -> None:
        self._steps = steps  # time left, as a number of steps
        self._price: StepPrice | None = None
        self._num_drafts = 0

    @property
    def is_empty(self) -> bool:
        return self._steps <= 0

    @property
    def is_full(self) -> bool:
        return self._steps >= MOST_LOSS

    def allows(self, steps: float) -> bool:
        """Whether there is so much, or as much as there ever is: then what costs more is a debt, to be won back."""
        return self._steps >= min(steps, MOST_LOSS)

    def spend(self, steps: float) -> None:
        """Beside what a step's drafts cost."""
        self._steps -= steps

    def plan(self, price: "StepPrice", num_drafts: int) -> None:
        """The next step computes so many tokens of drafts."""
        self._price, self._num_drafts = price if num_drafts else None, num_drafts

    def settle(self, num_right: int, step_s: float | None, num_again: int = 0) -> None:
        """The step has come back, and so many drafts were right.

        Args:
            step_s: None: it has computed prompts, too.
            num_again: tokens that the next step computes once more.
        """
        gained, price = ALLOWED_LOSS, self._price
        if price is not None:
            cost = self._num_drafts * UNKNOWN_COST
            if price.is_measured and step_s is not None:
                cost = max(self._num_drafts * LEAST_COST, min(step_s / price.step_s - 1, MOST_COST))
            cost += num_again * price.within_s / price.step_s
            gained += num_right / price.num_decodes - cost
        self._steps, self._price = min(MOST_LOSS, self._steps + gained), None


@dataclass(frozen=True, slots=True)
class StepPrice:
    """What a step costs without drafts, and what they add.

    Args:
        num_decodes: tokens that it brings without drafts, one a sequence.
        step_s: without drafts; in whatever unit.
        within_s: of a draft's token that is multiplied while the weights are read ...
        beyond_s: ... and of each further one.
        num_few: how many of the former there are.
        most_s: of the step.
        is_measured: these are seconds.
    """

    num_decodes: int
    step_s: float
    within_s: float
    beyond_s: float
    num_few: int
    most_s: float
    is_measured: bool = False

    @property
    def allows_any(self) -> bool:
        """Whether a token that is certainly right would pay."""
        return self.step_s > LEAST_GAIN * self.num_decodes * (self.within_s if self.num_few else self.beyond_s)

    def saved_s(self, share: float, length: int, dearer_s: float) -> float:
        """What a draft of so many tokens saves of the time of each token."""
        within = min(length, self.num_few)
        cost_s = within * self.within_s + (length - within) * self.beyond_s + length * dearer_s
        num_right = sum(share**i for i in range(1, length + 1))
        return self.step_s / self.num_decodes - (self.step_s + cost_s) / (self.num_decodes + num_right)

    def lengths(
        self, shares: list[float], most_each: list[int], most: int, tries: bool = False, dearer: Sequence[float] = ()
    ) -> list[int]:
        """How many tokens of each draft to compute, so that the step brings the most tokens per second.

        Args:
            shares: how likely a token of each draft is right.
            most: in all.
            tries: a likely token is computed even where it does not pay, to see what it costs.
            dearer: what a token of each draft costs beside the step's time.
        """
        lengths = [0] * len(shares)
        num_tokens, step_s, num_few = float(self.num_decodes), self.step_s, self.num_few
        best = [(-share, index) for index, share in enumerate(shares) if most_each[index]]
        heapq.heapify(best)
        while best and most:
            chance, index = best[0]
            cost_s = (self.within_s if num_few else self.beyond_s) + (dearer[index] if dearer else 0.0)
            pays = -chance * step_s > LEAST_GAIN * num_tokens * cost_s and step_s + cost_s <= self.most_s
            if not pays and not (tries and -chance >= LEAST_TRIED):
                if not dearer:
                    break
                heapq.heappop(best)
                continue
            tries = False
            lengths[index] += 1
            most -= 1
            num_few = max(0, num_few - 1)
            num_tokens -= chance
            step_s += cost_s
            if lengths[index] < most_each[index]:
                heapq.heapreplace(best, (chance * shares[index], index))
            else:
                heapq.heappop(best)
        return lengths


def price_of(
    model: StepCostModel, work: StepWork, num_decodes: int, has_prompts: bool, target: float | None
) -> StepPrice:
    """
    Args:
        work: of the decodes.
        has_prompts: the step computes prompts, too, which take what is multiplied while the weights are read.
        target: see EngineConfig.inter_token_target.
    """
    num_few = 0 if has_prompts else max(0, model.few_tokens - work.own_tokens)
    step_s, mean_kv = 1.0, work.own_kv // max(1, work.own_tokens)
    within_s = beyond_s = UNKNOWN_COST
    if model.is_ready:
        step_s = model.predict(work)
        within_s = model.own_s(mean_kv, mean_kv + 1, 1)
        beyond_s = model.own_s(mean_kv, mean_kv + 1, 0)
    within_s, beyond_s = max(within_s, LEAST_COST * step_s), max(beyond_s, LEAST_COST * step_s)
    most_s = step_s * target if target is not None and num_decodes > 1 else float("inf")
    return StepPrice(num_decodes, step_s, within_s, beyond_s, num_few, most_s, model.is_ready)
