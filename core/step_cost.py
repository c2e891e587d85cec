"""Predicts a step's duration, fitted online to measured steps, and limits its prefill by that. Thread: engine.

Nothing here reads a clock: durations are arguments.
"""

import math
from bisect import bisect_right
from collections import deque
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from core.config import BLOCK_SIZE

# Prompts attend in tiles of so many query tokens, each of which reads its context once and is computed whole
# (gpu/attention.py): a chunk that ends with a tile leaves no tile to be computed twice. Kernels with smaller tiles say
# so in RunnerLimits.prompt_tile.
PROMPT_TILE = 64
LEAST_TOKENS = 8  # of a chunk that ends within a block: each token is a row of every matmul
# Before any measurement, for tenants' shares alone: a sampled token costs twice a prompt's (arXiv:2401.00588 §5).
NOMINAL_S = (0.0, 1e-3, 0.0, 2e-3, 0.0)
MEMORY_STEPS = 512  # of each kind, with prompts and without: older ones fade
LEAST_STEPS = 8  # of each kind, before predictions are used
MAX_SPREADS = 2.0  # a step that takes longer than predicted by more than this has its weight cut (Huber)
FIRST_SPREAD, LEAST_SPREAD, SPREAD_RATE = 0.3, 0.02, 0.02
SOLVE_EVERY = 16  # new steps of a kind, or as soon as they are NEWS_SHARE of the kind's: see StepCostModel
NEWS_SHARE = 1 / 8
SURPRISE = 0.1  # relative error that causes a fit at once
NUM_SWEEPS = 6
ERROR_WINDOW, ERROR_REFRESH = 256, 32  # steps
MOST_LATE = 0.15  # larger errors are not measurement noise but the model's, which learns

Features = tuple[float, float, float, float, float]
Float64Array = npt.NDArray[np.float64]


@dataclass(slots=True)
class StepWork:
    """What a step computes.

    Args:
        prompt_kv: KV tokens that prompts read, in units of PROMPT_TILE query tokens; smaller tiles count in proportion.
        own_tokens: generated tokens, each of which attends alone.
        own_kv: KV tokens that these read.
        tile: see RunnerLimits.prompt_tile.
    """

    prompt_tokens: int = 0
    prompt_kv: float = 0.0
    own_tokens: int = 0
    own_kv: int = 0
    tile: int = PROMPT_TILE

    def add(self, start: int, end: int, num_prompt_tokens: int) -> None:
        """A row that computes positions `start` to `end` - 1 of a sequence, given the length of its prompt."""
        border = min(max(start, num_prompt_tokens), end)
        if start < border:
            first, last = start // self.tile, (border - 1) // self.tile
            num_tiles_read = ((last + 1) * (last + 2) - first * (first + 1)) / 2
            self.prompt_tokens += border - start
            self.prompt_kv += self.tile * self.tile / PROMPT_TILE * num_tiles_read
        self.own_tokens += end - border
        self.own_kv += (end * (end + 1) - border * (border + 1)) // 2


class StepCostModel:
    """seconds = fixed + a x tokens beyond few + b x KV read by prompts + c x own tokens + d x KV that these read.

    The first few tokens cost no more than reading the weights; each further one adds its own time (the roofline). So a
    growing batch is predicted before a step of its size was measured.

    No coefficient is negative. The fit minimises squared relative errors over the last steps of each kind. A step that
    was delayed (by another process, by a compilation) counts less; one that was faster than predicted counts fully.

    Recording a step takes a few microseconds. The fit is updated when the new steps of a kind are an eighth of all its
    steps, after SOLVE_EVERY of them at the latest, and at once after a step that was far off, because the next ones
    will resemble it. So the first steps and those after a change count at once, and later ones cost next to nothing.
    The solver is a descent, not a closed form: with one stream, the fixed part and that of its one token cannot be
    separated, and a descent keeps its previous values.

    Args:
        prompt_tile, few_tokens: see RunnerLimits.

    Attributes:
        fit: the coefficients, in the order above.
        is_ready: enough steps of both kinds were measured to predict one.
        error_p50, error_p90: of recent steps: |predicted - measured| / measured.
        late_p90: nine of ten recent steps exceeded their prediction by at most this share; at most MOST_LATE.
        coefficients_s: a linear form for charges and estimates: fixed, per prompt token, per KV token that prompts
            read, per own token (with its part of the tokens beyond the few, at the last batch size), per KV token it
            reads.
    """

    def __init__(self, prompt_tile: int = PROMPT_TILE, few_tokens: int = 0) -> None:
        self.prompt_tile, self.few_tokens = prompt_tile, few_tokens
        self.coefficients_s: Features = NOMINAL_S
        self.is_ready = False
        self._learns = True
        self.error_p50 = self.error_p90 = self.late_p90 = 0.0
        self.fit: Features = (0.0, 0.0, 0.0, 0.0, 0.0)
        self._linear_s = self.fit  # see coefficients_s
        self._num_own = 1  # own tokens of the last step that had any
        self._with_prompts, self._without = _Memory(), _Memory()
        self._spread = FIRST_SPREAD
        self._excesses: deque[float] = deque(maxlen=ERROR_WINDOW)  # (measured - predicted) / predicted
        self._num_excesses = 0
        self._num_observed = 0
        self._has_prompt = False  # the last step

    @property
    def wants_bare_decode(self) -> bool:
        """Whether the next step should leave out prompts, so that the model is ready soon.

        Under load there may be no such step for minutes, and mixed steps do not show the cost of decodes alone. Never
        two in a row, and LEAST_STEPS in all, so that no prompt starves.
        """
        return self._has_prompt and self._with_prompts.num_steps > 0 and self._without.num_steps < LEAST_STEPS

    @property
    def rough_s(self) -> Features | None:
        """The fit so far, for estimates before is_ready; None after too few steps."""
        return None if self._num_observed < 2 * LEAST_STEPS else self._linear_s

    def predict(self, work: StepWork) -> float:
        """Seconds; meaningless before is_ready."""
        return predicted_s(self.fit, work, self.few_tokens)

    def prefill_s(self, start: int, end: int, num_prompt_tokens: int, num_few: int = 0) -> float:
        """What positions `start` to `end` - 1 of a sequence with so long a prompt add to a step.

        Args:
            num_few: how many tokens the step still has below the few.
        """
        work = StepWork(tile=self.prompt_tile)
        work.add(start, end, num_prompt_tokens)
        return row_cost_s(self.coefficients_s, work) - self.coefficients_s[1] * min(num_few, end - start)

    def own_s(self, start: int, end: int, num_few: int) -> float:
        """What positions `start` to `end` - 1 of a sequence, its own tokens, add to a step.

        Meaningless before is_ready.

        Args:
            num_few: how many tokens the step still has below the few.
        """
        _, a, _, c, d = self.fit
        num_tokens = end - start
        return a * max(0, num_tokens - num_few) + c * num_tokens + d * (end * (end + 1) - start * (start + 1)) / 2

    def recall(self, fit: Features, late_p90: float) -> None:
        """Predict as it once did, and learn no more."""
        self.fit = self._linear_s = self.coefficients_s = fit
        self.late_p90, self.is_ready, self._learns = late_p90, True, False

    def observe(self, work: StepWork, seconds: float) -> float:
        """Learn from a step; one of no duration is ignored. Returns its prediction, before is_ready its duration."""
        self._has_prompt = work.prompt_tokens > 0
        if seconds <= 0 or not self._learns:
            return seconds
        predicted = predicted_s(self.fit, work, self.few_tokens)
        if self.is_ready and predicted > 0:
            self._note_excess(seconds / predicted - 1)
        memory = self._with_prompts if self._has_prompt else self._without
        num_beyond = max(0, work.prompt_tokens + work.own_tokens - self.few_tokens)
        features = 1.0, num_beyond, work.prompt_kv, work.own_tokens, work.own_kv
        memory.note(features, seconds, self._weight(predicted, seconds))
        self._num_own = work.own_tokens or self._num_own
        self._num_observed += 1
        was_ready = self.is_ready
        if memory.is_due or abs(predicted - seconds) > SURPRISE * seconds:
            self._solve()
        return predicted if was_ready else seconds

    def observe_row(self, start: int, end: int, num_prompt_tokens: int, seconds: float) -> None:
        """Learn from a step of one row; see StepWork.add."""
        work = StepWork(tile=self.prompt_tile)
        work.add(start, end, num_prompt_tokens)
        self.observe(work, seconds)

    def _weight(self, predicted: float, seconds: float) -> float:
        if predicted <= 0:
            return 1.0
        excess = seconds / predicted - 1
        limit = MAX_SPREADS * self._spread
        self._spread += SPREAD_RATE * (min(abs(excess), 2 * limit) - self._spread)
        self._spread = max(self._spread, LEAST_SPREAD)
        return min(1.0, limit / excess) if excess > 0 else 1.0

    def _solve(self) -> None:
        moments = (self._with_prompts.learn() + self._without.learn()).tolist()
        self.fit = fixed, a, b, c, d = _descend(moments, self.fit)
        self._linear_s = fixed, a, b, c + a * max(0.0, 1 - self.few_tokens / self._num_own), d
        self.is_ready = min(self._with_prompts.num_steps, self._without.num_steps) >= LEAST_STEPS
        if self.is_ready:
            self.coefficients_s = self._linear_s

    def _note_excess(self, excess: float) -> None:
        self._excesses.append(excess)
        self._num_excesses += 1
        if self._num_excesses % ERROR_REFRESH == 0:
            errors, last = sorted(abs(excess) / (1 + excess) for excess in self._excesses), len(self._excesses) - 1
            self.error_p50, self.error_p90 = errors[last // 2], errors[int(0.9 * last)]
            late = sorted(self._excesses)[int(0.9 * last)]
            self.late_p90 = min(max(late, 0.0), MOST_LATE)


class _Memory:
    """The fading second moments of one kind of steps: their features and seconds, each divided by the seconds."""

    def __init__(self) -> None:
        self.num_steps = 0
        self._moments: Float64Array = np.zeros((6, 6))
        self._notes: list[tuple[float, ...]] = []  # not in the moments yet

    @property
    def is_due(self) -> bool:
        """Whether enough is new to solve again."""
        return len(self._notes) >= min(SOLVE_EVERY, NEWS_SHARE * self.num_steps)

    def note(self, features: Features, seconds: float, weight: float) -> None:
        self.num_steps += 1
        root = math.sqrt(weight)
        scale = root / seconds
        fixed, a, b, c, d = features
        self._notes.append((scale * fixed, scale * a, scale * b, scale * c, scale * d, root))

    def learn(self) -> Float64Array:
        """Add the notes to the moments and return these: [6, 6], the features' and, last, the seconds'."""
        if self._notes:
            notes = np.array(self._notes)
            self._moments *= (1 - 1 / min(self.num_steps + 1, MEMORY_STEPS)) ** len(notes)
            self._moments += notes.T @ notes
            self._notes.clear()
        return self._moments


def _descend(moments: list[list[float]], fit: Features) -> Features:
    """Coordinate descent from a fit, no coefficient below 0: exact in each coordinate, so it needs no step size.

    Args:
        moments: [6, 6], as of _Memory.
    """
    active = [(i, row) for i, row in enumerate(moments[:5]) if row[i] > 0]
    found = list(fit)
    for _ in range(NUM_SWEEPS):
        for i, (fixed, a, b, c, d, target) in active:
            slope = target - fixed * found[0] - a * found[1] - b * found[2] - c * found[3] - d * found[4]
            found[i] = max(0.0, found[i] + slope / moments[i][i])
    fixed, a, b, c, d = found
    return fixed, a, b, c, d


class PrefillAllowance:
    """The prefill that a step may compute beside its decodes.

    Args:
        seconds: by the model; infinite where no target is set or no sequence decodes.
        is_due: the step's first chunk is granted, however little is left.
        num_few: how many tokens the step still has below the model's few.
    """

    def __init__(self, model: StepCostModel, seconds: float, is_due: bool = True, num_few: int = 0) -> None:
        self._model = model
        self._seconds = seconds
        self._is_due = is_due
        self._num_few = num_few

    @property
    def is_spent(self) -> bool:
        return not self._is_due and self._seconds <= 0

    def spend(self, seconds: float) -> None:
        """The step also does something else for so long."""
        self._seconds -= seconds

    def use_up(self) -> None:
        self._seconds, self._is_due = 0.0, False

    def own_tokens(self, start: int, most: int) -> int:
        """How many of a sequence's own tokens may be computed from `start` on, at most so many.

        The first one may be in any case: it is among the decodes that the allowance is beside. Before the model is
        ready, LEAST_TOKENS.
        """
        if math.isinf(self._seconds):
            return most
        if not self._model.is_ready:
            return min(most, LEAST_TOKENS)

        def cost_s(num_more: int) -> float:
            return self._model.own_s(start + 1, start + 1 + num_more, self._num_few)

        num_more = bisect_right(range(1, most), self._seconds, key=cost_s)
        self._seconds -= cost_s(num_more)
        self._num_few = max(0, self._num_few - num_more)
        return 1 + num_more

    def chunk(self, start: int, end: int, num_prompt_tokens: int, max_tokens: int) -> int:
        """How many tokens from `start` on, of those up to `end`, may be computed now.

        A chunk that does not reach the end stops at the end of a tile, or of a block where that is much further, or
        anywhere where that is again much further. The step's first chunk has at least LEAST_TOKENS, so that no prompt
        starves, or the rest of its block if a started tile costs as much as a full one; a later chunk may be 0.
        """
        limit = min(end, start + max_tokens)
        if not (limit == end and self._fits(start, end, num_prompt_tokens)):
            limit = self._cut(start, limit, num_prompt_tokens)
        if limit > start:
            self._seconds -= self._cost_s(start, limit, num_prompt_tokens)
            self._num_few = max(0, self._num_few - (limit - start))
            self._is_due = False
        return limit - start

    def _cut(self, start: int, limit: int, num_prompt_tokens: int) -> int:
        """Where to stop short of the end: the coarsest boundary that loses no more than a quarter of the tokens."""
        if limit - start < BLOCK_SIZE and self._fits(start, limit, num_prompt_tokens):
            return limit
        tile, block, token = (
            self._last_fitting(start, limit, num_prompt_tokens, unit) for unit in (PROMPT_TILE, BLOCK_SIZE, 1)
        )
        if token - start < LEAST_TOKENS:
            token = start
        if self._is_due and self._model.prompt_tile < LEAST_TOKENS:
            token = max(token, min(limit, start + LEAST_TOKENS))
        elif self._is_due:
            block = max(block, min(limit, start // BLOCK_SIZE * BLOCK_SIZE + BLOCK_SIZE))
        if 4 * (tile - start) >= 3 * (max(block, token) - start):
            return tile
        return block if 4 * (block - start) >= 3 * (token - start) else token

    def _last_fitting(self, start: int, limit: int, num_prompt_tokens: int, unit: int) -> int:
        """The last multiple of `unit` that the allowance reaches, `start` if there is none."""
        ends = range(start // unit * unit + unit, limit + 1, unit)
        num_fitting = bisect_right(ends, self._seconds, key=lambda end: self._cost_s(start, end, num_prompt_tokens))
        return ends[num_fitting - 1] if num_fitting else start

    def _fits(self, start: int, end: int, num_prompt_tokens: int) -> bool:
        return self._cost_s(start, end, num_prompt_tokens) <= self._seconds

    def _cost_s(self, start: int, end: int, num_prompt_tokens: int) -> float:
        if math.isinf(self._seconds):
            return 0.0
        return self._model.prefill_s(start, end, num_prompt_tokens, self._num_few)


def allow_prefill(
    model: StepCostModel, inter_token_target: float | None, decodes: StepWork, num_coming: int
) -> PrefillAllowance:
    """The prefill that the inter-token target permits beside these decodes.

    The target applies to the duration of a step of all sequences that could decode by now, those with unfinished
    prompts included. Applied to the present decodes alone, it would keep the batch small while prompts queue up; what
    streams notice stays bounded by what they would notice once these prompts have become streams. A single prompt makes
    no queue, and is bound by the present decodes. A margin for noise in step times lets nine of ten steps, not every
    other one, stay within the target. Until the model is ready, a chunk has the least tokens, or what fits below the
    few, which are free.

    Args:
        inter_token_target: see EngineConfig.
        num_coming: sequences that still have a prompt to compute, and could run.
    """
    if inter_token_target is None or decodes.own_tokens == 0:
        return PrefillAllowance(model, math.inf)
    num_few = max(0, model.few_tokens - decodes.own_tokens)
    if not model.is_ready:
        return PrefillAllowance(model, 0.0, is_due=not model.wants_bare_decode, num_few=num_few)
    num_soon = decodes.own_tokens + max(0, num_coming - 1)
    soon = StepWork(own_tokens=num_soon, own_kv=decodes.own_kv)
    seconds = inter_token_target / (1 + model.late_p90) * model.predict(soon) - model.predict(decodes)
    return PrefillAllowance(model, seconds, num_few=num_few)


def predicted_s(fit: Features, work: StepWork, few_tokens: int) -> float:
    """What a step takes: see StepCostModel."""
    fixed, a, b, c, d = fit
    num_beyond = work.prompt_tokens + work.own_tokens - few_tokens
    return (
        fixed + (a * num_beyond if num_beyond > 0 else 0.0) + b * work.prompt_kv + c * work.own_tokens + d * work.own_kv
    )


def row_cost_s(coefficients_s: Features, work: StepWork) -> float:
    """What rows add to a step, without its fixed part."""
    _, a, b, c, d = coefficients_s
    return a * work.prompt_tokens + b * work.prompt_kv + c * work.own_tokens + d * work.own_kv
