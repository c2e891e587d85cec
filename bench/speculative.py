"""What drafts bring: `python -m bench.speculative --model DIR`. Tokens per second with them and without, in pairs.

The model computes every step; what it samples is replaced by the answers of a named set, so that a model with random
weights repeats text as a trained one does; free text is this project's own prose. The pairs take turns, with drafts
first in every other one; the first of each case warms up, and is not counted. All streams are counted while all of them
decode. In the part `crossing` streams come one after the other until there are as many as asked for, more than drafts
pay for, and leave again: all tokens count, prompts too. `replay` has answers with a share p of each draft's tokens
right, up to a length. The part `cost` has streams of noise, which no draft can meet: stretches of steps take turns to
look for drafts, and not to.
"""

import argparse
import re
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from bench.engine import MODEL_FLAGS, Streams, model_config, open_model, shown_model
from bench.kit import Flag, Found, bench
from bench.results import Cell, Table, table_of
from core.drafter import Acceptance, Draft, Drafter
from core.drafts import DraftWish
from core.plan import Int32Array, RunnerLimits, StepOutput, StepPlan
from core.scheduler import Scheduler
from gpu.draft_model import DraftRunner, draft_settings
from gpu.loading import load_runner
from gpu.runner import ModelRunner

Script = tuple[tuple[int, ...], list[int]]  # a prompt and its answer
RESAMPLED = 2000  # for the confidence interval
LEAST_PAIRS = 1
MANY_STREAMS = 16
STRETCH = 8  # steps
NOISE_PROMPT = 16  # tokens
DOCUMENTS = Path(__file__).parent.parent / "docs"


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


@cache
def _prose() -> list[int]:
    """The documentation, a token for each word and mark."""
    text = " ".join(path.read_text(encoding="utf-8") for path in sorted(DOCUMENTS.glob("*.md")))
    numbers: dict[str, int] = {}
    return [numbers.setdefault(word, len(numbers)) for word in re.findall(r"\w+|[^\w\s]", text)]


def free_text(random: Random, size: int, vocab_size: int) -> Script:
    """Two places of one text, which repeats what texts repeat."""
    prompt, answer = (
        [word % vocab_size for word in _prose()[first : first + size]]
        for first in random.sample(range(len(_prose()) - size), 2)
    )
    return tuple(prompt), answer


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
    """Tokens per second of all of them together, while all decode: until one has its last."""
    runner: ScriptedRunner = streams.clocked._runner  # type: ignore[assignment]
    runner.answers = dict(scripts)
    names = started(streams, scripts, num_tokens)
    num_before = sum(len(streams.tokens[name]) for name in names)
    started_s = time.perf_counter()
    streams.run_until(lambda: any(len(streams.tokens[name]) >= num_tokens for name in names))
    took_s = time.perf_counter() - started_s
    num_after = sum(len(streams.tokens[name]) for name in names)
    streams.run()
    for name, (_, answer) in zip(names, scripts, strict=True):
        if streams.tokens[name] != answer[:num_tokens]:
            raise RuntimeError("drafts have changed an answer")
    return (num_after - num_before) / took_s


def started(streams: Streams, scripts: Sequence[Script], num_tokens: int) -> list[str]:
    """Their prompts are computed, and all decode from now on."""
    names: list[str] = []
    for prompt, _ in scripts:  # each waits until all have begun
        names.append(name := streams.submit(prompt, num_tokens))
        streams.run_until(partial(streams.have_all, [name], 1))
        streams.pause([name])
    streams.resume(names)
    return names


def interval(ratios: Sequence[float], seed: int = 0) -> tuple[float, float]:
    """95 % of the medians of resampled ratios."""
    drawn = np.random.default_rng(seed).choice(np.array(ratios), (RESAMPLED, len(ratios)))
    low, high = np.percentile(np.median(drawn, axis=1), [2.5, 97.5])
    return float(low), float(high)


@dataclass(slots=True)
class Case:
    """A text at a number of streams, and tokens per second with drafts (True) and without, pair by pair."""

    num_streams: int
    text: str
    engines: dict[bool, Streams]
    found: dict[bool, list[float]] = field(default_factory=lambda: {True: [], False: []})

    def measure(self, number: int, num_prompt_tokens: int, num_tokens: int) -> None:
        """One more pair; that before number 0 is not counted."""
        random = Random(1000 * number + self.num_streams)
        counts = self.found if number >= 0 else {True: [], False: []}
        vocab_size = self.engines[True].scheduler.limits.vocab_size
        scripts = [TEXTS[self.text](random, num_prompt_tokens, vocab_size) for _ in range(self.num_streams)]
        for speculates in (number % 2 == 0, number % 2 == 1):
            counts[speculates].append(speed(self.engines[speculates], scripts, num_tokens))

    def row(self) -> dict[str, Cell]:
        ratios = [one / other for one, other in zip(self.found[True], self.found[False], strict=True)]
        low, high = interval(ratios)
        stats = self.engines[True].scheduler.stats()
        return {
            "streams": self.num_streams,
            "text": self.text,
            "pairs": len(ratios),
            "tokens/s without": statistics.median(self.found[False]),
            "with": statistics.median(self.found[True]),
            "ratio": statistics.median(ratios),
            "from": low,
            "to": high,
            "drafted": stats.num_draft_tokens,
            "accepted": stats.num_accepted_tokens,
        }


def measure_pairs(runner: ModelRunner, arguments: argparse.Namespace, end_s: float) -> Table:
    """Pairs of each case in turn, until time is up."""
    cases = [
        Case(
            num_streams,
            text,
            {
                drafts: Streams(ScriptedRunner(runner), speculates=drafts, has_prefix_cache=False)
                for drafts in (True, False)
            },
        )
        for num_streams in arguments.streams
        for text in arguments.texts
    ]
    for number in range(-1, arguments.pairs):  # at first kernels compile, and the step-cost model learns
        for case in cases:
            if number < LEAST_PAIRS or time.monotonic() < end_s:
                is_many = case.num_streams > MANY_STREAMS
                case.measure(number, arguments.prompt // (1 + is_many), arguments.tokens // (1 + is_many))
                if number >= 0:
                    print(case.row(), file=sys.stderr)
    sizes = f"Prompts of {arguments.prompt} tokens, answers of {arguments.tokens}"
    note = f"{sizes}; half of both beyond {MANY_STREAMS} streams."
    return table_of(
        "Tokens per second with drafts and without, 95 % of medians", [case.row() for case in cases], note=note
    )


def measure_crossing(runner: ModelRunner, arguments: argparse.Namespace, end_s: float) -> Table:
    """Seconds of a load that rises and falls, without drafts over with them, text by text."""
    most, rows = max(arguments.streams), list[dict[str, Cell]]()
    for place, text in enumerate(arguments.texts):
        now_s = time.monotonic()
        until_s = now_s + (end_s - now_s) / (len(arguments.texts) - place)
        engines = {
            drafts: Streams(ScriptedRunner(runner), speculates=drafts, has_prefix_cache=False)
            for drafts in (True, False)
        }
        ratios, least, largest = list[float](), most, 0
        for number in range(-1, arguments.pairs):
            if number >= LEAST_PAIRS and time.monotonic() > until_s:
                break
            random, took_s = Random(f"{number} {text}"), dict[bool, float]()
            size, vocab_size = arguments.prompt // 4, runner.limits.vocab_size
            by_prompt: dict[tuple[int, ...], list[int]] = {}  # two streams of one prompt would have one answer
            while len(by_prompt) < 2 * most:
                by_prompt |= [TEXTS[text](random, size, vocab_size)]
            scripts = list(by_prompt.items())
            for drafts in (number % 2 == 0, number % 2 == 1):
                took_s[drafts], drafted, undrafted = _rise_and_fall(engines[drafts], scripts, size, most)
                if drafts and number >= 0:
                    largest, least = max(largest, drafted), min(least, undrafted)
            if number >= 0:
                ratios.append(took_s[False] / took_s[True])
        low, high = interval(ratios)
        row: dict[str, Cell] = {"text": text, "pairs": len(ratios), "ratio": statistics.median(ratios)}
        rows.append(row | {"from": low, "to": high, "drafts with up to": largest, "none with": least})
        print(rows[-1], file=sys.stderr)
    return table_of(f"A load that rises to {most} streams and falls: tokens per second with drafts and without", rows)


def _rise_and_fall(streams: Streams, scripts: Sequence[Script], num_tokens: int, most: int) -> tuple[float, int, int]:
    """The seconds of all scripts, each begun so many tokens after the one before that about `most` run at the peak.

    Returns: them; the most streams of a step with drafts, and the fewest, beyond one, of a step that had none.
    """
    runner: ScriptedRunner = streams.clocked._runner  # type: ignore[assignment]
    runner.answers = dict(scripts)
    drafted, undrafted, names = 0, most, list[str]()
    started_s = time.perf_counter()
    while len(names) < len(scripts) or streams.num_open:
        done = sum(len(streams.tokens[name]) for name in names)
        if len(names) < len(scripts) and (done >= len(names) * num_tokens / most or not streams.num_open):
            names.append(streams.submit(scripts[len(names)][0], num_tokens))
        before = streams.scheduler.stats()
        streams.step()
        if streams.scheduler.stats().num_draft_tokens > before.num_draft_tokens:
            drafted = max(drafted, before.num_running)
        elif before.num_running > 1:
            undrafted = min(undrafted, before.num_running)
    took_s = time.perf_counter() - started_s
    for name, (_, answer) in zip(names, scripts, strict=True):
        if streams.tokens[name] != answer[:num_tokens]:
            raise RuntimeError("drafts have changed an answer")
    return took_s, drafted, undrafted


@dataclass(slots=True)
class Stretches:
    """Seconds of each stretch of steps, with drafts (True) and without; and what of them is not the runner's."""

    took_s: dict[bool, list[float]] = field(default_factory=lambda: {True: [], False: []})
    loop_s: dict[bool, list[float]] = field(default_factory=lambda: {True: [], False: []})


def measure_cost(runner: ModelRunner, arguments: argparse.Namespace, end_s: float) -> Table:
    """Stretches of the same streams' steps with and without, in pairs, until time is up: a share for each number."""
    rows: list[dict[str, Cell]] = []
    for place, num_streams in enumerate(arguments.streams):
        now_s, found = time.monotonic(), Stretches()
        until_s = now_s + (end_s - now_s) / (len(arguments.streams) - place)
        while not found.took_s[True] or time.monotonic() < until_s:
            _measure_stretches(runner, num_streams, arguments.prompt, found, until_s)
        took_s, loop_s = found.took_s, found.loop_s
        ratios = [without / one for one, without in zip(took_s[True], took_s[False], strict=True)]
        low, high = interval(ratios)
        rows.append(
            {
                "streams": num_streams,
                "pairs": len(ratios),
                "ms a step without": 1e3 * statistics.median(took_s[False]) / STRETCH,
                "with": 1e3 * statistics.median(took_s[True]) / STRETCH,
                "ratio": statistics.median(ratios),
                "from": low,
                "to": high,
                "of it the loop, ms without": 1e3 * statistics.median(loop_s[False]) / STRETCH,
                "the loop with": 1e3 * statistics.median(loop_s[True]) / STRETCH,
            }
        )
        print(rows[-1], file=sys.stderr)
    return table_of(f"Looking for drafts in noise: pairs of {STRETCH} steps, tokens per second with and without", rows)


def _measure_stretches(runner: ModelRunner, num_streams: int, size: int, found: Stretches, until_s: float) -> None:
    """Streams from their prompts to their ends, after `size` tokens; the first pair of stretches warms up."""
    scripted, seed = ScriptedRunner(runner), len(found.took_s[True])
    streams = Streams(scripted, speculates=True, has_prefix_cache=False)
    scripts = [noise(Random(f"{seed} {i}"), size, runner.limits.vocab_size) for i in range(num_streams)]
    scripts = [(prompt[:NOISE_PROMPT], answer) for prompt, answer in scripts]
    scripted.answers = dict(scripts)
    started(streams, scripts, size)
    for number in range((size - 2) // (2 * STRETCH)):
        if found.took_s[True] and time.monotonic() > until_s:
            break
        for speculates in (number % 2 == 0, number % 2 == 1):
            streams.scheduler.drafts.speculates = speculates
            begun_s, clocked_s = time.perf_counter(), streams.clocked.send_s + streams.clocked.wait_s
            for _ in range(STRETCH):
                streams.step()
            one_s = time.perf_counter() - begun_s
            if number:
                found.took_s[speculates].append(one_s)
                found.loop_s[speculates].append(one_s - (streams.clocked.send_s + streams.clocked.wait_s - clocked_s))
    streams.cancel_all()


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


def measure_replay(runner: ModelRunner, arguments: argparse.Namespace, end_s: float) -> Table:
    ratios: dict[tuple[float, int], list[float]] = {
        (p, most): [] for p in (0.5, 0.7, 0.9, 1.0) for most in (1, 2, 4, 8, 16)
    }
    for number in range(arguments.pairs):  # once each, then as time allows
        scripts = [noise(Random(number), arguments.prompt // 4, runner.limits.vocab_size)]
        for (share, most), found in ratios.items():
            if number and time.monotonic() > end_s:
                continue
            speeds: dict[bool, float] = {}
            for drafts in (number % 2 == 0, number % 2 == 1):
                streams = Streams(ScriptedRunner(runner), has_prefix_cache=False, speculates=drafts)
                if drafts:
                    _replay(streams.scheduler, dict(scripts), share, most)
                speeds[drafts] = speed(streams, scripts, arguments.tokens // 2)
            found.append(speeds[True] / speeds[False])
    rows: list[dict[str, Cell]] = []
    for (share, most), found in ratios.items():
        low, high = interval(found)
        rows.append({"p": share, "at most": most, "ratio": statistics.median(found), "from": low, "to": high})
    return table_of("One stream: drafts up to a length, each token right with the chance p", rows)


def _replay(scheduler: Scheduler, answers: dict[tuple[int, ...], list[int]], share: float, most: int) -> None:
    submit = scheduler.submit

    def submit_with_replay(request: Any) -> None:
        submit(request)
        (sequence,) = scheduler.states.groups[request.request_id].sequences
        prompt = request.prompt_ids
        sequence.drafter = Replay((prompt, answers[prompt]), sequence.token_ids, share, most)

    scheduler.submit = submit_with_replay  # type: ignore[method-assign]


class AgreeingDraft(DraftRunner):
    """A draft model that takes the time it takes; each token that it drafts is the answer's with the same chance."""

    answers: dict[tuple[int, ...], list[int]]
    share: float

    def propose(self, wishes: Sequence[DraftWish]) -> tuple[list[list[int]], float, float]:
        drafts, *took_s = super().propose(wishes)
        random = Random(len(wishes[0].sequence.token_ids))
        for wish, draft in zip(wishes, drafts, strict=True):
            own, num_prompt = wish.sequence, wish.sequence.num_prompt_tokens
            answer = self.answers[tuple(own.token_ids[:num_prompt])][own.num_own_tokens :]
            draft[:] = [one if random.random() < self.share else one ^ 1 for one in answer[: len(draft)]]
        return drafts, took_s[0], took_s[1]


def measure_model(runner: ModelRunner, arguments: argparse.Namespace, end_s: float) -> Table:
    """With a draft model whose tokens are right with the chance p, and without drafts."""
    config = model_config(arguments.draft)
    drafting = load_runner(
        arguments.draft, config, draft_settings(runner.memory.engine, runner.config, config), lambda *_: None
    )
    cases = [(count, share) for count in arguments.streams for share in (0.0, 0.5, 0.7, 0.9)]
    ratios: dict[tuple[int, float], list[float]] = {case: [] for case in cases}
    models = {case: AgreeingDraft(drafting, runner.config.vocab_size) for case in cases}
    engines = {
        (case, drafts): Streams(
            ScriptedRunner(runner),
            has_prefix_cache=False,
            speculates=drafts,
            draft_model=models[case] if drafts else None,
        )
        for case in cases
        for drafts in (True, False)
    }
    for number in range(-1, arguments.pairs):
        for case, found in ratios.items():
            if number >= LEAST_PAIRS and time.monotonic() > end_s:
                continue
            count, share = case
            scripts = [noise(Random(f"{number} {i}"), arguments.tokens, config.vocab_size) for i in range(count)]
            model, speeds = models[case], dict[bool, float]()
            model.answers, model.share = dict(scripts), share
            model.clear()  # the models share a runner
            for drafts in (number % 2 == 0, number % 2 == 1):
                speeds[drafts] = speed(engines[case, drafts], scripts, arguments.tokens)
            if number >= 0:
                found.append(speeds[True] / speeds[False])
    rows: list[dict[str, Cell]] = []
    for case, found in ratios.items():
        low, high = interval(found)
        sizes: dict[str, Cell] = {"streams": case[0], "p": case[1], "pairs": len(found)}
        stats = engines[case, True].scheduler.stats()
        rows.append(
            {
                **sizes,
                "ratio": statistics.median(found),
                "from": low,
                "to": high,
                "drafted": stats.draft_tokens["model"],
                "accepted": stats.accepted_tokens["model"],
            }
        )
    size = f"{drafting.memory.num_parameters / runner.memory.num_parameters:.0%} of the parameters"
    return table_of(f"A draft model with {size}, each token right with the chance p", rows)


PARTS = {"pairs": measure_pairs, "crossing": measure_crossing, "cost": measure_cost, "replay": measure_replay}
PARTS["model"] = measure_model
SHARES = {"pairs": 6, "crossing": 3, "cost": 3, "replay": 2, "model": 2}  # of the minutes


def _measure(arguments: argparse.Namespace) -> Found:
    longest, most = arguments.prompt + arguments.tokens + 32, max(arguments.streams)
    runner = open_model(arguments, most * longest, max_model_len=longest, max_sequences=max(16, most))
    started_s, tables = time.monotonic(), list[Table]()
    parts = [part for part in arguments.parts if part != "model" or arguments.draft is not None]
    share_s = 60 * arguments.minutes / sum(SHARES[part] for part in parts)
    for place, part in enumerate(parts, 1):
        end_s = started_s + share_s * sum(SHARES[one] for one in parts[:place])
        tables.append(PARTS[part](runner, arguments, end_s))
    name = "-".join(["speculative", *parts] if len(tables) < len(PARTS) else ["speculative"])
    return Found(tables, shown_model(arguments, runner), name=name)


FLAGS = (
    *MODEL_FLAGS,
    Flag("--streams", (1, 8, 32), "at once", (1,), more={"nargs": "+", "type": int}),
    Flag("--texts", tuple(TEXTS), "to measure", more={"nargs": "+", "choices": tuple(TEXTS)}),
    Flag("--draft", None, "directory of a draft model of the same vocabulary, for the part model", more={"type": Path}),
    Flag("--prompt", 256, "tokens", 64),
    Flag("--tokens", 128, "of each answer, no more than the prompt's", 32),
    Flag("--pairs", 25, "of each case, as far as time allows", 1),
    Flag("--minutes", 7.0, "after which no pair begins, beyond the first of each case"),
    Flag("--parts", tuple(PARTS), "to measure", more={"nargs": "+", "choices": tuple(PARTS)}),
)
main = bench("speculative", __doc__, _measure, FLAGS)

if __name__ == "__main__":
    sys.exit(main())
