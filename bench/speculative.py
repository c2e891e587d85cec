"""What drafts bring: `python -m bench.speculative --model DIR`. Tokens per second with them and without, in pairs.

The model computes every step; what it samples is replaced by the answers of a named set, so that a model with random
weights repeats text as a trained one does. The pairs take turns, with drafts first in every other one. A second table
replays answers with a share p of each draft's tokens right, up to a length.
"""

import argparse
import statistics
import sys
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import numpy as np

from bench.engine import MODEL_FLAGS, Streams, open_model, shown_model
from bench.kit import Flag, Found, bench
from bench.results import Cell, Table, table_of
from core.drafter import Acceptance, Draft, Drafter
from core.plan import Int32Array, RunnerLimits, StepOutput, StepPlan
from core.scheduler import Scheduler
from gpu.runner import ModelRunner

Script = tuple[tuple[int, ...], list[int]]  # a prompt and its answer
RESAMPLED = 2000  # for the confidence interval


class ScriptedRunner:
    """The model's runner; what it samples is replaced by the answers that belong to the prompts."""

    def __init__(self, runner: ModelRunner) -> None:
        self.limits: RunnerLimits = runner.limits
        self.answers: dict[tuple[int, ...], list[int]] = {}
        self._runner = runner
        self._prompts: dict[int, tuple[int, ...]] = {}  # by slot

    def forward(self, plan: StepPlan) -> Any:
        for start in plan.sequence_starts:
            self._prompts[start.slot] = start.token_ids[: start.num_prompt_tokens]
        return plan, self._runner.forward(plan)

    def sample(self, ticket: Any, masks: Int32Array | None = None) -> None:
        self._runner.sample(ticket[1], masks)

    def collect(self, ticket: Any) -> StepOutput:
        plan, sent = ticket
        output = self._runner.collect(sent)
        ends = (plan.starts + plan.lengths).tolist()
        rows: list[int] = output.rows.tolist()
        for index, row in enumerate(rows):
            prompt = self._prompts[int(plan.slots[row])]
            num_before = index - rows.index(row) - plan.num_drafts.get(row, 0)
            output.token_ids[index] = self.answers[prompt][ends[row] + num_before - len(prompt)]
        return output


def _words(random: Random, count: int, vocab_size: int) -> list[int]:
    """Tokens of which few are frequent, as in text (Zipf)."""
    return random.choices(range(vocab_size), [1 / (rank + 2) for rank in range(vocab_size)], k=count)


def copying(random: Random, size: int, vocab_size: int) -> Script:
    """The prompt's text again, with one token in thirty changed."""
    text = _words(random, size, vocab_size)
    return tuple(text), [random.randrange(vocab_size) if random.random() < 1 / 30 else token for token in text]


def code_edits(random: Random, size: int, vocab_size: int) -> Script:
    """The prompt's text again; runs of some tokens are replaced by new ones of another length."""
    text = _words(random, size, vocab_size)
    answer: list[int] = []
    at = 0
    while at < size:
        kept = random.randint(10, 40)
        answer += text[at : at + kept] + _words(random, random.randint(3, 10), vocab_size)
        at += kept + random.randint(0, 6)
    return tuple(text), answer


def extraction(random: Random, size: int, vocab_size: int) -> Script:
    """Pieces of the prompt, with a few new tokens between them."""
    text = _words(random, size, vocab_size)
    answer: list[int] = []
    while len(answer) < size:
        first = random.randrange(size - 24)
        answer += text[first : first + random.randint(8, 24)] + _words(random, random.randint(2, 5), vocab_size)
    return tuple(text), answer


def json_records(random: Random, size: int, vocab_size: int) -> Script:
    """Records with the same keys, a third of their tokens values."""
    keys = [_words(random, random.randint(4, 8), vocab_size) for _ in range(4)]
    answer: list[int] = []
    while len(answer) < size:
        for key in keys:
            answer += key + _words(random, random.randint(1, 4), vocab_size)
    return tuple(_words(random, size, vocab_size)), answer


def free_text(random: Random, size: int, vocab_size: int) -> Script:
    return tuple(_words(random, size, vocab_size)), _words(random, size, vocab_size)


def noise(random: Random, size: int, vocab_size: int) -> Script:
    return tuple(random.choices(range(vocab_size), k=size)), random.choices(range(vocab_size), k=size)


TEXTS: dict[str, Callable[[Random, int, int], Script]] = {
    "copying": copying,
    "code edits": code_edits,
    "extraction": extraction,
    "json": json_records,
    "free text": free_text,
    "noise": noise,
}


def speed(streams: Streams, scripts: Sequence[Script], num_tokens: int) -> float:
    """Tokens per second of all of them together, from the moment when each has its first."""
    runner: ScriptedRunner = streams.clocked._runner  # type: ignore[assignment]
    runner.answers = dict(scripts)
    names = [streams.submit(prompt, num_tokens) for prompt, _ in scripts]
    streams.run()
    for name, (_, answer) in zip(names, scripts, strict=True):
        if streams.tokens[name] != answer[:num_tokens]:
            raise RuntimeError("drafts have changed an answer")
    first_s = max(streams.times_s[name][0] for name in names)
    last_s = max(streams.times_s[name][-1] for name in names)
    return sum(sum(time_s > first_s for time_s in streams.times_s[name]) for name in names) / (last_s - first_s)


def interval(ratios: Sequence[float], seed: int = 0) -> tuple[float, float]:
    """95 % of the medians of resampled ratios."""
    drawn = np.random.default_rng(seed).choice(np.array(ratios), (RESAMPLED, len(ratios)))
    low, high = np.percentile(np.median(drawn, axis=1), [2.5, 97.5])
    return float(low), float(high)


def measure_pairs(runner: ModelRunner, arguments: argparse.Namespace) -> Table:
    rows: list[dict[str, Cell]] = []
    for num_streams in arguments.streams:
        for name in arguments.texts:
            found = {True: list[float](), False: list[float]()}
            engines = {
                speculates: Streams(ScriptedRunner(runner), speculates=speculates, has_prefix_cache=False)
                for speculates in (True, False)
            }
            for number in range(arguments.pairs + 1):  # the first one warms up
                random = Random(1000 * number + num_streams)
                make, vocab_size = TEXTS[name], runner.limits.vocab_size
                scripts = [make(random, arguments.prompt, vocab_size) for _ in range(num_streams)]
                for speculates in (number % 2 == 0, number % 2 == 1):
                    one = speed(engines[speculates], scripts, arguments.tokens)
                    if number:
                        found[speculates].append(one)
            ratios = [one / other for one, other in zip(found[True], found[False], strict=True)]
            low, high = interval(ratios)
            stats = engines[True].scheduler.stats()
            rows.append(
                {
                    "streams": num_streams,
                    "text": name,
                    "tokens/s without": statistics.median(found[False]),
                    "with": statistics.median(found[True]),
                    "ratio": statistics.median(ratios),
                    "from": low,
                    "to": high,
                    "drafted": stats.num_draft_tokens,
                    "accepted": stats.num_accepted_tokens,
                }
            )
            print(rows[-1], file=sys.stderr)
    return table_of(f"Tokens per second with drafts and without, {arguments.pairs} pairs, 95 % of medians", rows)


class Replay(Drafter):
    """Proposes what the answer will say, each token right with the same chance."""

    def __init__(self, script: Script, token_ids: list[int], share: float, most: int) -> None:
        super().__init__(token_ids, Acceptance())
        self._prompt, self._answer = script
        self._token_ids = token_ids
        self._share_right, self._most, self._random = share, most, Random(7)

    def propose(self, most: int, forced: Sequence[int] = ()) -> Draft | None:
        at = len(self._token_ids) - len(self._prompt)
        coming = self._answer[at : at + min(most, self._most)]
        draft = [token if self._random.random() < self._share_right else token ^ 1 for token in coming]
        self.last = Draft(draft, self._share_right, "suffix", 0, len(self._token_ids)) if draft else None
        return self.last


def measure_replay(runner: ModelRunner, arguments: argparse.Namespace) -> Table:
    rows: list[dict[str, Cell]] = []
    for share in (0.5, 0.7, 0.9, 1.0):
        for most in (1, 2, 4, 8, 16):
            ratios = []
            for number in range(arguments.pairs):
                scripts = [noise(Random(number), arguments.prompt, runner.limits.vocab_size)]
                with_drafts = Streams(ScriptedRunner(runner), has_prefix_cache=False)
                _replay(with_drafts.scheduler, dict(scripts), share, most)
                without = Streams(ScriptedRunner(runner), has_prefix_cache=False, speculates=False)
                ratios.append(speed(with_drafts, scripts, arguments.tokens) / speed(without, scripts, arguments.tokens))
            low, high = interval(ratios)
            rows.append({"p": share, "at most": most, "ratio": statistics.median(ratios), "from": low, "to": high})
            print(rows[-1], file=sys.stderr)
    return table_of("One stream: drafts up to a length, each token right with the chance p", rows)


def _replay(scheduler: Scheduler, answers: dict[tuple[int, ...], list[int]], share: float, most: int) -> None:
    submit = scheduler.submit

    def submit_with_replay(request: Any) -> None:
        submit(request)
        (sequence,) = scheduler.states.groups[request.request_id].sequences
        prompt = request.prompt_ids
        sequence.drafter = Replay((prompt, answers[prompt]), sequence.token_ids, share, most)

    scheduler.submit = submit_with_replay  # type: ignore[method-assign]


PARTS = {"pairs": measure_pairs, "replay": measure_replay}


def _measure(arguments: argparse.Namespace) -> Found:
    longest, most = arguments.prompt + arguments.tokens + 32, max(arguments.streams)
    runner = open_model(arguments, most * longest, max_model_len=longest, max_sequences=max(16, most))
    tables = [PARTS[part](runner, arguments) for part in arguments.parts]
    name = "-".join(["speculative", *arguments.parts] if len(tables) < len(PARTS) else ["speculative"])
    return Found(tables, shown_model(arguments, runner), name=name)


FLAGS = (
    *MODEL_FLAGS,
    Flag("--streams", (1, 8, 32), "at once", (1,), more={"nargs": "+", "type": int}),
    Flag("--texts", tuple(TEXTS), "to measure", more={"nargs": "+", "choices": tuple(TEXTS)}),
    Flag("--prompt", 384, "tokens", 64),
    Flag("--tokens", 256, "of each answer, no more than the prompt's", 24),
    Flag("--pairs", 9, "of each case", 1),
    Flag("--parts", tuple(PARTS), "to measure", more={"nargs": "+", "choices": tuple(PARTS)}),
)
main = bench("speculative", __doc__, _measure, FLAGS)

if __name__ == "__main__":
    sys.exit(main())
