"""Drafts change how many tokens a step brings, and no token: whatever happens to the sequences beside that."""

import zlib
from collections.abc import Hashable
from collections.abc import Sequence as Seq
from dataclasses import replace
from random import Random

import msgspec
import pytest

from core.drafter import (
    ALLOWED_LOSS,
    LEAST_MATCH,
    MOST_DRAFT,
    MOST_LOSS,
    MOST_NOTED,
    MOST_RECENT,
    Acceptance,
    DraftBudget,
    Drafter,
    RecentAnswers,
    RepeatedText,
    StepPrice,
)
from core.drafts import DraftWish
from core.engine import check_conservation
from core.plan import TimedRow
from core.sequence import Sequence
from core.simulation import CostModel, SimulatedRunner
from core.types import Cancel, ClearCache, FinishReason, Pause, Request, Resume, Submit
from tests.core.kv_oracle import ChainCheckingRunner
from tests.fakes import EngineUnderTest, FakeClock, make_request, small_limits

pytestmark = pytest.mark.usefixtures("steps_in_flight")

LIMITS = small_limits(num_blocks=400, max_sequences=8, max_batch_tokens=64, max_model_len=300)
EOS = 11


class RepeatingRunner(SimulatedRunner):
    """A token depends on the three before it, and now and then on all: text that repeats itself, but not quite."""

    def _sample_row(self, slot: int, length: int) -> int:
        start, prefix = self._starts[slot], self._prefix(slot, length)
        seed = zlib.crc32(start.seed.to_bytes(8, "little"))
        whole = zlib.crc32(prefix, seed)
        token_id = whole // 16 % 40 if whole % 16 == 0 else zlib.crc32(bytes(prefix[-3:]), seed) % 3
        is_free = length - start.num_prompt_tokens >= start.sampling.min_tokens
        while not is_free and token_id in start.stop_ids:
            token_id += 1
        return token_id


class CheckedRunner(RepeatingRunner, ChainCheckingRunner):
    """What each row reads was computed after its own tokens, recurrent states as well."""


def engine(
    speculates: bool = True, num_blocks: int = 400, num_kept_states: int | None = None, is_checked: bool = False
) -> EngineUnderTest:
    clock = FakeClock()
    limits = replace(
        LIMITS,
        max_in_flight=EngineUnderTest.max_in_flight,
        num_blocks=num_blocks,
        few_tokens=8,
        max_drafts=32 if speculates else 0,
        num_kept_states=num_kept_states,
    )
    runner = (CheckedRunner if is_checked else RepeatingRunner)(limits, CostModel(), clock)
    return EngineUnderTest(limits, (EOS,), runner, clock=clock)


def alone(request: Request) -> list[list[int]]:
    under_test = engine(speculates=False)
    under_test.send(Submit(request))
    under_test.run()
    return [under_test.log.tokens(request.request_id, index) for index in range(request.num_sequences)]


def test_text_that_repeats_itself_takes_fewer_steps(steps_in_flight: int) -> None:
    request = make_request("a", max_tokens=200, ignore_eos=True)
    under_test = engine()
    under_test.send(Submit(request))
    under_test.run()
    assert [under_test.log.tokens("a")] == alone(request)
    stats = under_test.scheduler.stats()
    assert stats.num_generated_tokens == 200
    if steps_in_flight == 1:
        assert stats.num_steps < 100
        assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens
        assert stats.num_accepted_tokens == 200 - stats.num_steps


class MisleadingRunner(SimulatedRunner):
    """Three tokens come again and again, and after them one that has not come before."""

    def _sample_row(self, slot: int, length: int) -> int:
        return length % 4 or 100 + length


@pytest.mark.usefixtures("one_step")
@pytest.mark.parametrize("num_kept_states", [None, 3])
def test_drafts_that_are_never_right_cost_two_percent_at_most(
    num_kept_states: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even where nothing is learned from that, and where recurrent layers compute a token again after each."""
    monkeypatch.setattr(Drafter, "_share", lambda *_: 0.9)
    took_s = []
    for max_drafts in (32, 0):
        clock = FakeClock()
        limits = replace(LIMITS, num_blocks=800, max_model_len=1000, few_tokens=8, max_drafts=max_drafts)
        limits = replace(limits, num_kept_states=num_kept_states, block_size=16)
        under_test = EngineUnderTest(limits, (EOS,), MisleadingRunner(limits, CostModel(), clock), clock=clock)
        under_test.send(Submit(make_request("a", max_tokens=600, ignore_eos=True)))
        under_test.run()
        took_s.append(clock())
        if max_drafts:
            assert under_test.scheduler.stats().num_draft_tokens > 50
    assert took_s[0] <= 1.02 * took_s[1]


@pytest.mark.usefixtures("one_step")
def test_wrong_drafts_cost_two_percent_at_most_while_the_load_rises_and_falls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams come one by one until none could pay, and leave."""
    monkeypatch.setattr(Drafter, "_share", lambda *_: 0.9)
    took_s = []
    for max_drafts in (32, 0):
        clock = FakeClock()
        limits = replace(LIMITS, num_blocks=1600, max_model_len=1000, few_tokens=4, max_drafts=max_drafts)
        under_test = EngineUnderTest(limits, (EOS,), MisleadingRunner(limits, CostModel(), clock), clock=clock)
        for number in range(12):
            under_test.send(Submit(make_request(str(number), max_tokens=60 + 40 * (number % 4), ignore_eos=True)))
            under_test.step(20)
        under_test.run()
        took_s.append(clock())
        if max_drafts:
            assert under_test.scheduler.stats().num_draft_tokens > 0
    assert took_s[0] <= 1.02 * took_s[1]


class NoiseRunner(SimulatedRunner):
    """Some tokens are frequent, as in text (Zipf), and none depends on those before it."""

    def _sample_row(self, slot: int, length: int) -> int:
        return drawn_token(self._starts[slot].seed, length)


def drawn_token(seed: int, place: int) -> int:
    return int(1000 ** (zlib.crc32(b"%d %d" % (seed, place)) / 2**32))


@pytest.mark.usefixtures("one_step")
@pytest.mark.parametrize("num_streams", [1, 8, 32])
def test_noise_has_few_drafts_and_costs_one_percent_at_most(num_streams: int) -> None:
    """Runs of three tokens occur again by chance."""
    took_s = []
    for max_drafts in (32, 0):
        clock = FakeClock()
        limits = replace(LIMITS, num_blocks=3200, max_sequences=32, vocab_size=1000, few_tokens=8)
        limits = replace(limits, max_batch_tokens=512, max_drafts=max_drafts, block_size=16)
        under_test = EngineUnderTest(limits, (), NoiseRunner(limits, CostModel(), clock), clock=clock)
        for number in range(num_streams):
            prompt = tuple(drawn_token(1000 + number, place) for place in range(60))
            under_test.send(Submit(make_request(str(number), prompt_ids=prompt, max_tokens=200, seed=number)))
        under_test.run()
        took_s.append(clock())
        if max_drafts:
            assert under_test.scheduler.stats().num_draft_tokens <= 16
    assert took_s[0] <= 1.01 * took_s[1]


class AgreeingModel:
    """A draft model of a part of the target's size, of whose tokens a share is right."""

    name = "model"

    def __init__(self, part: float, share: float, clock: FakeClock) -> None:
        self._part, self._share, self._clock, self._random = part, share, clock, Random(3)
        self.token_s, self.prompt_token_s = part * step_s_of(1), part * step_s_of(64) / 64
        self.max_model_len = LIMITS.max_model_len
        self.right: dict[str, list[int]] = {}  # by request
        self._num_known: dict[Sequence, int] = {}

    def num_behind(self, sequence: Sequence, domain: Hashable) -> int:
        return len(sequence.token_ids) - min(self._num_known.get(sequence, 0), len(sequence.token_ids) - 1)

    def propose(self, wishes: Seq[DraftWish]) -> tuple[list[list[int]], float, float]:
        num_behind = sum(self.num_behind(wish.sequence, wish.domain) for wish in wishes)
        self._num_known.update((wish.sequence, len(wish.sequence.token_ids)) for wish in wishes)
        lengths = [wish.length for wish in wishes]
        widths = [sum(length > i for length in lengths) for i in range(1, max(lengths))]
        first_s, rest_s = self._part * step_s_of(num_behind), self._part * sum(map(step_s_of, widths))
        self._clock.advance(first_s + rest_s)
        drafts = [
            [token if self._random.random() < self._share else token ^ 1 for token in self._coming(wish)]
            for wish in wishes
        ]
        is_far = num_behind > 16 * len(wishes)
        return drafts, first_s * is_far, rest_s + first_s * (not is_far)

    def _coming(self, wish: DraftWish) -> list[int]:
        return self.right[wish.sequence.request_id][wish.sequence.num_own_tokens :][: wish.length]

    def clear(self) -> None:
        self._num_known.clear()


def step_s_of(num_tokens: int) -> float:
    return EngineUnderTest.cost.fixed_s + EngineUnderTest.cost.token_s * num_tokens


def timed_rows() -> tuple[TimedRow, ...]:
    """As at a server's start."""
    rows = [(0, length, length) for length in (64, 32, 16)] + [(length, length + 1, 10) for length in (50, 100, 200)]
    return tuple(TimedRow(*row, step_s_of(row[1] - row[0])) for row in rows * 4)


def answers_s(model: AgreeingModel | None, clock: FakeClock, num_answers: int) -> list[float]:
    """How long each answer of 48 tokens takes, to a prompt of as many."""
    limits = replace(LIMITS, few_tokens=8, max_drafts=32, timed_rows=timed_rows())
    under_test = EngineUnderTest(limits, (EOS,), SimulatedRunner(limits, CostModel(), clock), clock=clock, draft=model)
    took_s = []
    for number in range(num_answers):
        prompt = tuple(Random(number).choices(range(1, limits.vocab_size), k=48))
        request = make_request(str(number), prompt_ids=prompt, max_tokens=48, ignore_eos=True)
        if model is not None:
            model.right[str(number)] = under_test.reference(request)
        began_s = clock()
        under_test.send(Submit(request))
        under_test.run()
        took_s.append(clock() - began_s)
    return took_s


@pytest.mark.parametrize("part", [0.1, 0.3])
@pytest.mark.parametrize(("share", "least", "least_of_all"), [(0.0, 0.975, 0.985), (0.9, 0.95, 1.3)])
def test_a_draft_model_that_is_never_right_costs_little_from_the_first_answer_on(
    part: float, share: float, least: float, least_of_all: float, steps_in_flight: int
) -> None:
    if steps_in_flight > 1:
        pytest.skip("drafts wait for the tokens before them")
    clock, other = FakeClock(), FakeClock()
    plain_s, took_s = answers_s(None, other, 8), answers_s(AgreeingModel(part, share, clock), clock, 8)
    assert min(one / other for one, other in zip(plain_s, took_s, strict=True)) >= least
    assert sum(plain_s) / sum(took_s) >= least_of_all


@pytest.mark.usefixtures("one_step")
@pytest.mark.parametrize("learns", [True, False])
@pytest.mark.parametrize(("name", "part"), [("mtp", 0.05), ("model", 0.3)])
def test_a_model_that_is_never_right_costs_one_percent_while_the_load_rises_and_falls(
    name: str, part: float, learns: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Streams come one by one until no draft could pay, and leave."""
    took_s = []
    if not learns:
        monkeypatch.setattr(Drafter, "_share", lambda *_: 0.9)
    for max_drafts in (32, 0):
        clock = FakeClock()
        limits = replace(LIMITS, num_blocks=1600, max_model_len=1000, max_sequences=24, few_tokens=4)
        limits = replace(
            limits, max_drafts=max_drafts, max_batch_tokens=256, vocab_size=10_007, timed_rows=timed_rows()
        )
        model = AgreeingModel(part, 0.0, clock)
        model.name = name
        runner = SimulatedRunner(limits, CostModel(), clock)
        under_test = EngineUnderTest(limits, (), runner, clock=clock, draft=model if max_drafts else None)
        for number in range(24):
            prompt = tuple(Random(number).choices(range(limits.vocab_size), k=20))
            request = make_request(str(number), prompt_ids=prompt, max_tokens=100 + 40 * (number % 4), ignore_eos=True)
            model.right[str(number)] = under_test.reference(request)
            under_test.send(Submit(request))
            under_test.step(8)
        under_test.run()
        took_s.append(clock())
        if max_drafts:
            assert under_test.scheduler.stats().draft_tokens[name] > 0
    assert took_s[0] <= 1.01 * took_s[1]


def test_a_drafts_token_is_tried_where_the_model_may_be_wrong() -> None:
    dear = StepPrice(1, 1.0, 1.0, 1.0, 7, 9.0)
    assert not dear.allows_any
    assert dear.lengths([0.9], [MOST_DRAFT], 32, tries=True) == [1]
    assert dear.lengths([0.3], [MOST_DRAFT], 32, tries=True) == [0]
    budget = DraftBudget()
    budget.plan(replace(dear, is_measured=True), 2)
    budget.settle(0, 1.5)
    assert not budget.is_full
    budget.plan(replace(dear, is_measured=True), 2)
    budget.settle(0, 9.0)
    assert budget.is_empty
    for _ in range(int(1.5 * MOST_LOSS / ALLOWED_LOSS)):
        budget.settle(0, 1.0)
    assert budget.is_full


def random_request(rng: Random, number: int) -> Request:
    prompt = [rng.randrange(10) for _ in range(rng.randint(1, 40))]
    if rng.random() < 0.3:
        prompt = prompt[:8] * 4
    fields = {"stop_token_ids": (rng.randrange(40),)} if rng.random() < 0.3 else {}
    if rng.random() < 0.2:
        fields["frequency_penalty"] = 0.5  # type: ignore[assignment]
    return make_request(
        f"r{number}",
        prompt_ids=tuple(prompt),
        max_tokens=rng.randint(0, 80),
        num_sequences=rng.choice((1, 1, 1, 2, 3)),
        priority=rng.choice((0, 0, 1)),
        tenant=rng.choice("ab"),
        seed=rng.randrange(5),
        min_tokens=rng.choice((0, 0, 5)),
        **fields,
    )


@pytest.mark.parametrize(("num_blocks", "num_kept_states"), [(400, None), (90, None), (400, 3), (90, 6)])
@pytest.mark.parametrize("seed", range(12))
def test_any_history_brings_the_same_tokens(seed: int, num_blocks: int, num_kept_states: int | None) -> None:
    rng = Random(seed)
    under_test = engine(num_blocks=num_blocks, num_kept_states=num_kept_states, is_checked=True)
    requests = [random_request(rng, number) for number in range(20)]
    waiting, paused, cancelled = list(requests), set[str](), set[str]()
    is_idle = False
    while waiting or not is_idle:
        if waiting and (rng.random() < 0.3 or is_idle):
            under_test.send(Submit(waiting.pop()))
        name = rng.choice(requests).request_id
        if rng.random() < 0.1:
            under_test.send(Resume(name) if name in paused else Pause(name))
            paused ^= {name}
        if rng.random() < 0.01:
            cancelled.add(name)
            under_test.send(Cancel(name, FinishReason.CANCELLED))
        is_idle = not under_test.step()
        if is_idle and paused:
            under_test.send(*map(Resume, sorted(paused)))
            paused.clear()
            is_idle = False
        if not under_test.scheduler.in_flight:
            check_conservation(under_test.scheduler)
    assert under_test.scheduler.pool.num_used == 0
    for request in requests:
        found = [under_test.log.tokens(request.request_id, index) for index in range(request.num_sequences)]
        wanted = alone(request)
        if request.request_id in cancelled:
            assert all(some == whole[: len(some)] for some, whole in zip(found, wanted, strict=True))
            continue
        assert found == wanted
        usage = under_test.log.terminal(request.request_id).usage
        assert usage is not None
        assert usage.num_completion_tokens - sum(map(len, found)) in range(request.num_sequences + 1)


def test_a_request_may_go_without() -> None:
    request = make_request("a", max_tokens=100, ignore_eos=True)
    under_test = engine()
    under_test.send(Submit(msgspec.structs.replace(request, speculates=False)))
    under_test.run()
    assert under_test.scheduler.stats().num_draft_tokens == 0


def predicted(request: Request, prediction: list[int]) -> EngineUnderTest:
    under_test = engine()
    under_test.send(Submit(msgspec.structs.replace(request, prediction_ids=tuple(prediction))))
    under_test.run()
    assert [under_test.log.tokens("a")] == alone(request)
    return under_test


@pytest.fixture
def one_step(steps_in_flight: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In flight: a sequence whose step is in flight has no draft."""
    monkeypatch.setattr(EngineUnderTest, "max_in_flight", 1)


@pytest.mark.usefixtures("one_step")
def test_a_prediction_is_a_draft_and_is_counted_alone() -> None:
    request = make_request("a", max_tokens=60, ignore_eos=True)
    (answer,) = alone(request)
    under_test = predicted(request, answer)
    stats, usage = under_test.scheduler.stats(), under_test.log.terminal("a").usage
    assert usage is not None
    assert usage.num_completion_tokens == 60
    assert usage.num_predicted_tokens == stats.accepted_tokens["prediction"] > 40
    assert usage.num_predicted_tokens + usage.num_mispredicted_tokens == stats.draft_tokens["prediction"]
    stop = next(place for place in range(40, 60) if answer[place] not in answer[:place])
    asked = msgspec.structs.replace(request.sampling, stop_token_ids=(answer[stop],))
    usage = predicted(msgspec.structs.replace(request, sampling=asked), answer).log.terminal("a").usage
    assert usage is not None
    assert usage.num_predicted_tokens < usage.num_completion_tokens == stop + 1  # without those drafted beyond its end
    edited = [*answer[:20], 35, 36, *answer[22:]]
    usage = predicted(request, edited).log.terminal("a").usage
    assert usage is not None
    assert usage.num_predicted_tokens > 20
    assert usage.num_mispredicted_tokens > 0


@pytest.mark.usefixtures("one_step")
def test_recent_answers_are_drafts_for_their_own_domain_alone() -> None:
    under_test = engine()

    def ask(name: str, **fields: object) -> int:
        request = make_request(name, prompt_ids=(1, 2), max_tokens=60, seed=3, ignore_eos=True, **fields)  # type: ignore[arg-type]
        before = under_test.scheduler.stats().accepted_tokens["recent"]
        under_test.send(Submit(request))
        under_test.run()
        assert [under_test.log.tokens(name)] == alone(request)
        return under_test.scheduler.stats().accepted_tokens["recent"] - before

    assert ask("first") == 0
    assert ask("other", tenant="other") == 0
    assert ask("salted", cache_salt="x") == 0
    assert ask("again") > 20
    under_test.send(ClearCache())
    assert ask("cleared") == 0


def found(tail: list[int], text: RepeatedText) -> tuple[int, int]:
    own = RepeatedText(tail)
    while not (own.note() and text.note()):
        pass
    return text.find(tail, own.run)


def test_recent_answers_are_bounded() -> None:
    recent = RecentAnswers()
    for number in range(4):
        recent.add("domain", [number] * MOST_RECENT)
    assert len(recent.of("domain").token_ids) <= 2 * MOST_RECENT
    assert found([3] * 5, recent.of("domain"))[1] == 5
    for number in range(100):
        recent.add(number, [1])
    assert not recent.of("domain").token_ids


def test_a_text_finds_the_longest_and_then_the_latest_occurrence() -> None:
    text = RepeatedText([1, 2, 3, 4, 9, 7, 2, 3, 4, 8, 2, 3, 4, 5, 0, 1, 2, 3, 4])
    end, length = found(text.token_ids, text)
    assert (end, length) == (4, 4)
    assert text.after(end, 3, is_own=True) == [9, 7, 2]
    assert found([6, 2, 3, 4], text) == (13, 3)
    assert found([6, 6, 6], text) == (0, 0)
    text.token_ids += [9, 7, 2]
    end, length = found(text.token_ids, text)
    assert (end, length) == (7, 7)


def test_a_long_text_is_noted_in_parts_and_drafted_from_once_it_is() -> None:
    drafter = Drafter([*range(3 * MOST_NOTED), 0, 1, 2], Acceptance())
    found = [drafter.propose(4) for _ in range(4)]
    assert found[:3] == [None] * 3
    assert found[3] is not None
    assert found[3].token_ids == [3, 4, 5, 6]


def test_a_text_that_goes_round_is_drafted_round_and_round() -> None:
    text = RepeatedText([5, 1, 2, 1, 2, 1, 2])
    end, _ = found(text.token_ids, text)
    assert text.after(end, 6, is_own=True) == [1, 2, 1, 2, 1, 2]


def test_what_never_holds_is_drafted_less_and_less() -> None:
    drafter = Drafter(token_ids := [1, 2, 3], Acceptance())
    rng, shares = Random(1), []
    for _ in range(30):
        token_ids += [rng.randrange(100, 10_000), 1, 2, 3]
        draft = drafter.propose(MOST_DRAFT)
        assert draft is not None
        shares.append(draft.share)
    assert shares == sorted(shares, reverse=True)
    assert shares[-1] < 0.1
    assert len(token_ids) > LEAST_MATCH


@pytest.mark.parametrize(
    ("price", "shares", "wanted"),
    [
        (StepPrice(1, 1.0, 0.02, 0.2, 7, 9.0), [0.9], [7]),  # few are nearly free
        (StepPrice(1, 1.0, 0.02, 0.2, 7, 9.0), [0.1], [1]),
        (StepPrice(1, 1.0, 0.02, 0.02, 0, 1.1), [0.99], [5]),  # what others wait
        (StepPrice(32, 1.0, 0.03, 0.05, 0, 1.6), [0.9, 0.5], [0, 0]),  # each token costs as much as a decode's
        (StepPrice(4, 1.0, 0.02, 0.2, 4, 1.6), [0.9, 0.9], [2, 2]),
    ],
)
def test_drafts_are_as_long_as_they_pay(price: StepPrice, shares: list[float], wanted: list[int]) -> None:
    assert price.lengths(shares, [MOST_DRAFT] * len(shares), 32) == wanted
