"""What a step costs, fitted online to the steps that were measured, and how much prefill a step may bear by it.

Thread: engine. Nothing here reads a clock: durations are given.
"""

import math
from bisect import bisect_right
from collections import deque
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from core.config import BLOCK_SIZE

# Prompts attend in tiles of so many query tokens, each of which reads its context once and is computed whole
# (gpu/attention.py): chunks that end with a tile cost no tile twice. Some kernels compute no more than what is new:
# RunnerLimits.prompt_tile.
PROMPT_TILE = 64
LEAST_TOKENS = 8  # of a chunk that ends within a block: each has a row of its own in every matmul
# Before anything was measured, for tenants' shares alone: a sampled token at twice a prompt's (arXiv:2401.00588 §5).
NOMINAL_S = (0.0, 1e-3, 0.0, 2e-3, 0.0)
MEMORY_STEPS = 512  # of each kind, with prompts and without: older ones fade
LEAST_STEPS = 8  # of each kind, before predictions are used
MAX_SPREADS = 2.0  # a step that takes longer than predicted by more of these has its weight cut (Huber)
FIRST_SPREAD, LEAST_SPREAD, SPREAD_RATE = 0.3, 0.02, 0.02
SOLVE_EVERY = 16  # steps of a kind at most, and as soon as they are NEWS_SHARE of the kind's: see StepCostModel
NEWS_SHARE = 1 / 8
SURPRISE = 0.1  # a step that was off by more of what it took is news enough
NUM_SWEEPS = 6
ERROR_WINDOW, ERROR_REFRESH = 256, 32  # steps
MOST_LATE = 0.15  # what is off by more is no noise of the machine but the model's error, which learns

Features = tuple[float, float, float, float, float]
Float64Array = npt.NDArray[np.float64]


@dataclass(slots=True)
class StepWork:
    """What a step computes.

    Args:
        prompt_kv: KV tokens that prompts read, PROMPT_TILE query tokens at a time: smaller tiles count as a part.
        own_tokens: those that were sampled: each attends alone.
        own_kv: KV tokens that these read.
        tile: see RunnerLimits.prompt_tile.
    """

    prompt_tokens: int = 0
    prompt_kv: float = 0.0
    own_tokens: int = 0
    own_kv: int = 0
    tile: int = PROMPT_TILE

    def add(self, start: int, end: int, num_prompt_tokens: int) -> None:
        """A row that computes positions `start` to `end` - 1 of a sequence with so long a prompt."""
        border = min(max(start, num_prompt_tokens), end)
        if start < border:
            first, last = start // self.tile, (border - 1) // self.tile
            num_tiles_read = ((last + 1) * (last + 2) - first * (first + 1)) / 2
            self.prompt_tokens += border - start
            self.prompt_kv += self.tile * self.tile / PROMPT_TILE * num_tiles_read
        self.own_tokens += end - border
        self.own_kv += (end * (end + 1) - border * (border + 1)) // 2


class StepCostModel:
    """seconds = fixed + a x tokens beyond the few + b x KV tokens prompts read + c x own tokens + d x KV these read.

    The few are multiplied while the weights are read, which a step does however few they are; beyond, each takes its
    time (the roofline). So a batch that grows is predicted before the first step of its size was measured.

    No coefficient is negative. The fit minimises squared relative errors over the last steps of each kind; a step that
    was held up (by another process, by a compilation) counts less, one that was faster counts fully: nothing makes a
    step faster than it is.

    A step is noted when it was measured, which takes a few microseconds; the fit is solved anew when the notes of a
    kind make an eighth of what is known of it, after SOLVE_EVERY of them at the latest, and at once for a step that was
    far off: the next ones will be like it. So the first steps count at once, as do those of a batch that has changed,
    and later ones, each of which moves the fit by a part in hundreds, cost next to nothing. Not by whoever
    asks for a prediction: every plan and every charge does. And not in closed form: with one stream the fixed part and
    the part of its one token cannot be told apart, where a descent stays with what it has.

    Args:
        prompt_tile, few_tokens: see RunnerLimits.

    Attributes:
        is_ready: enough steps of both kinds were measured to predict one.
        error_p50, error_p90: of the last steps: |predicted - measured| / measured.
        late_p90: nine of ten of the last steps took at most this part longer than predicted: MOST_LATE at most.
        coefficients_s: the same as a line, for charges and estimates: fixed, a prompt's token, KV token that prompts
            read, own token with its part of those beyond the few in a batch as large as the last, KV token it reads.
    """

    def __init__(self, prompt_tile: int = PROMPT_TILE, few_tokens: int = 0) -> None:
        self.prompt_tile, self.few_tokens = prompt_tile, few_tokens
        self.coefficients_s: Features = NOMINAL_S
        self.is_ready = False
        self.error_p50 = self.error_p90 = self.late_p90 = 0.0
        self._fit: Features = (0.0, 0.0, 0.0, 0.0, 0.0)
        self._linear_s = self._fit  # see coefficients_s
        self._num_own = 1  # own tokens of the last step that had any
        self._with_prompts, self._without = _Memory(), _Memory()
        self._spread = FIRST_SPREAD
        self._excesses: deque[float] = deque(maxlen=ERROR_WINDOW)  # (measured - predicted) / predicted
        self._num_excesses = 0
        self._num_observed = 0
        self._has_prompt = False  # the last step

    @property
    def wants_bare_decode(self) -> bool:
        """Whether the next step should leave prompts out, so that the model is ready soon.

        In a rush there is no such step for minutes, and none of the full ones tells what a decode costs beside its
        prompts. Never two in a row, and LEAST_STEPS in all: no prompt starves.
        """
        return self._has_prompt and self._with_prompts.num_steps > 0 and self._without.num_steps < LEAST_STEPS

    @property
    def rough_s(self) -> Features | None:
        """The fit so far, for estimates: under a rush there may be no step without a prompt for a long time."""
        return None if self._num_observed < 2 * LEAST_STEPS else self._linear_s

    def predict(self, work: StepWork) -> float:
        """Seconds; meaningless before is_ready."""
        fixed, a, b, c, d = self._fit
        num_beyond = max(0, work.prompt_tokens + work.own_tokens - self.few_tokens)
        return fixed + a * num_beyond + b * work.prompt_kv + c * work.own_tokens + d * work.own_kv

    def prefill_s(self, start: int, end: int, num_prompt_tokens: int, num_few: int = 0) -> float:
        """What positions `start` to `end` - 1 of a sequence with so long a prompt add to a step.

        Args:
            num_few: tokens that the step has less than the few.
        """
        work = StepWork(tile=self.prompt_tile)
        work.add(start, end, num_prompt_tokens)
        return row_cost_s(self.coefficients_s, work) - self.coefficients_s[1] * min(num_few, end - start)

    def observe(self, work: StepWork, seconds: float) -> None:
        """Learn from a step. One that took no time says nothing."""
        self._has_prompt = work.prompt_tokens > 0
        if seconds <= 0:
            return
        predicted = self.predict(work)
        if self.is_ready and predicted > 0:
            self._note_excess(seconds / predicted - 1)
        memory = self._with_prompts if self._has_prompt else self._without
        num_beyond = max(0, work.prompt_tokens + work.own_tokens - self.few_tokens)
        features = 1.0, num_beyond, work.prompt_kv, work.own_tokens, work.own_kv
        memory.note(features, seconds, self._weight(predicted, seconds))
        self._num_own = work.own_tokens or self._num_own
        self._num_observed += 1
        if memory.is_due or abs(predicted - seconds) > SURPRISE * seconds:
            self._solve()

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
        self._fit = fixed, a, b, c, d = _descend(moments, self._fit)
        self._linear_s = fixed, a, b, c + a * max(0.0, 1 - self.few_tokens / self._num_own), d
        self.is_ready = min(self._with_prompts.num_steps, self._without.num_steps) >= LEAST_STEPS
        if self.is_ready:
            self.coefficients_s = self._linear_s

    def _note_excess(self, excess: float) -> None:
        self._excesses.append(excess)
        self._num_excesses += 1
        if self._num_excesses % ERROR_REFRESH == 0:
            errors = sorted(abs(excess) / (1 + excess) for excess in self._excesses)
            self.error_p50, self.error_p90 = (errors[int(share * (len(errors) - 1))] for share in (0.5, 0.9))
            late = sorted(self._excesses)[int(0.9 * (len(errors) - 1))]
            self.late_p90 = min(max(late, 0.0), MOST_LATE)


class _Memory:
    """One kind of steps, of which old ones fade: the second moments of their features and seconds.

    Each step is taken by its seconds, so that relative errors count.
    """

    def __init__(self) -> None:
        self.num_steps = 0
        self._moments: Float64Array = np.zeros((6, 6))
        self._notes: list[tuple[float, ...]] = []  # not in the moments yet

    @property
    def is_due(self) -> bool:
        """Whether there is enough new to solve for it."""
        return len(self._notes) >= min(SOLVE_EVERY, NEWS_SHARE * self.num_steps)

    def note(self, features: Features, seconds: float, weight: float) -> None:
        self.num_steps += 1
        root = math.sqrt(weight)
        scale = root / seconds
        fixed, a, b, c, d = features
        self._notes.append((scale * fixed, scale * a, scale * b, scale * c, scale * d, root))

    def learn(self) -> Float64Array:
        """The moments, with all that was noted: [6, 6], the features' and, last, the seconds'."""
        if self._notes:
            notes = np.array(self._notes)
            self._moments *= (1 - 1 / min(self.num_steps + 1, MEMORY_STEPS)) ** len(notes)
            self._moments += notes.T @ notes
            self._notes.clear()
        return self._moments


def _descend(moments: list[list[float]], fit: Features) -> Features:
    """Coordinate descent from a fit, none below 0: exact in each coordinate, so it needs no step size.

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
    """What a step may compute beside its decodes.

    Args:
        seconds: by the model; infinite where no target is set or nobody decodes.
        is_due: something has to be granted, however little is left.
        num_few: tokens that the step has less than the model's few.
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
        """The step does something else as well, for so long."""
        self._seconds -= seconds

    def use_up(self) -> None:
        """Nothing is left."""
        self._seconds, self._is_due = 0.0, False

    def chunk(self, start: int, end: int, num_prompt_tokens: int, max_tokens: int) -> int:
        """How many tokens from `start` on, of those up to `end`, may be computed now.

        Chunks that do not reach the end stop at a tile's end, or at a block's where that is much further, or anywhere
        where that is again much further. The step's first chunk has at least LEAST_TOKENS, so that nobody starves, and
        what is left of a block where a whole tile is computed for fewer too; a later one may be 0.
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
        """Where to stop short of the end: at the coarsest of ends that loses no more than a quarter of the tokens."""
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
        """The last multiple of `unit` up to which may be computed, `start` if there is none."""
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
    """What may be computed beside these decodes: up to the target for a step of all who could decode by now.

    The target is not for those alone who do: with many prompts waiting, the batch would stay small, and the queue
    grow. What streams notice stays bounded by what they notice once the prompts have become streams. One prompt makes
    no queue: it is bound by those who do decode. As much is left as noise in step times may take: nine of ten steps
    stay under the target, and not every other one. Until the model predicts, a chunk is the least there is, or what
    fits among the few tokens that cost nothing.

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


def row_cost_s(coefficients_s: Features, work: StepWork) -> float:
    """What rows add to a step, its fixed part left out."""
    _, a, b, c, d = coefficients_s
    return a * work.prompt_tokens + b * work.prompt_kv + c * work.own_tokens + d * work.own_kv
