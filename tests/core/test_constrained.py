"""Sequences under grammars: the same tokens in any company, valid whatever happens to them, faults their own."""

import json
import re
from dataclasses import replace
from random import Random

import msgspec
import pytest

from core.constraints import choice, json_schema, regex
from core.drafts import Drafts
from core.grammar import Grammar, GrammarCompiler, GrammarState
from core.plan import RunnerLimits
from core.sequence import Sequence
from core.types import Cancel, FinishReason, Pause, Request, Resume, SamplingParams, Submit
from tests.core.grammars import compiler, tokenizer
from tests.fakes import EngineUnderTest, FakeClock, FaultyRunner, make_request, small_limits

pytestmark = pytest.mark.usefixtures("steps_in_flight")

PATTERN = r"[a-c]{2,4}x\d{1,30}!"
GUILTY = 999


def limits(**fields: int) -> RunnerLimits:
    return small_limits(vocab_size=tokenizer().vocab_size, **fields)


def engine(runner_limits: RunnerLimits, runner: FaultyRunner | None = None) -> EngineUnderTest:
    assert tokenizer().eos_id is not None
    return EngineUnderTest(runner_limits, eos_ids=(tokenizer().eos_id,), runner=runner)


def constrained(name: str, grammar: Grammar, **fields: object) -> Request:
    request = make_request(name, **{"max_tokens": 60, **fields})  # type: ignore[arg-type]
    return msgspec.structs.replace(request, grammar=grammar)


def requests(count: int) -> list[Request]:
    """Every other one under a grammar."""
    by_pattern = compiler().compile(regex(PATTERN, "regex"))
    return [
        constrained(f"r{i}", by_pattern, seed=i) if i % 2 else make_request(f"r{i}", max_tokens=20, seed=i)
        for i in range(count)
    ]


def alone(request: Request) -> list[int]:
    under_test = engine(limits())
    under_test.send(Submit(request))
    under_test.run()
    return under_test.log.tokens(request.request_id)


def test_answers_are_held_and_end_when_nothing_more_may_come() -> None:
    for seed in range(20):
        tokens = alone(constrained("a", compiler().compile(regex(PATTERN, "regex")), seed=seed))
        assert re.fullmatch(PATTERN, tokenizer().decode(tokens))
    chosen = compiler().compile(choice(["yes", "no"], "choice"))
    under_test = engine(limits())
    under_test.send(Submit(constrained("a", chosen)))
    under_test.run()
    assert tokenizer().decode(under_test.log.tokens("a")) in ("yes", "no")
    assert under_test.log.terminal("a").finish_reason is FinishReason.STOP


def test_company_changes_no_token() -> None:
    under_test = engine(limits())
    crowd = requests(8)
    under_test.send(*map(Submit, crowd))
    under_test.run()
    for request in crowd:
        assert under_test.log.tokens(request.request_id) == alone(request)


def test_preemption_changes_no_token() -> None:
    """So few blocks that sequences give way to each other and are computed again."""
    under_test = engine(limits(num_blocks=8))
    crowd = requests(6)
    under_test.send(*map(Submit, crowd))
    under_test.run()
    assert under_test.scheduler.stats().num_preemptions > 0
    for request in crowd:
        assert under_test.log.tokens(request.request_id) == alone(request)


def test_prefix_hits_and_blocks_from_the_host_change_no_token() -> None:
    """Each asks three times; others evict its prompt to the host before the third time."""
    under_test = engine(limits(num_blocks=7, num_host_blocks=30, max_batch_tokens=64))
    by_pattern = compiler().compile(regex(r"[a-c]{2}x!", "regex"))
    first, other = (tuple(range(start, start + 22)) for start in (100, 200))
    crowd = [constrained(name, by_pattern, prompt_ids=first, seed=1) for name in ("a", "cached", "restored")]
    others = [constrained("other", by_pattern, prompt_ids=other, seed=1)]
    for request in (*crowd[:2], *others, crowd[2]):
        under_test.send(Submit(request))
        under_test.run()
        assert under_test.log.tokens(request.request_id) == alone(request)
    stats = under_test.scheduler.stats()
    assert (stats.num_offloaded_blocks > 0, stats.num_restored_blocks > 0) == (True, True)
    for name, is_found in (("a", False), ("cached", True), ("restored", True)):
        usage = under_test.log.terminal(name).usage
        assert usage is not None
        assert (usage.num_cached_tokens > 0) == is_found


def test_drafts_change_no_token() -> None:
    """Of the text that the prompt holds, and the grammar allows."""
    by_pattern = compiler().compile(regex("(abc ){30}[a-c]{2}!", "regex"))
    request = constrained("a", by_pattern, prompt_ids=tuple(tokenizer().encode("abc " * 12, False)), max_tokens=100)
    under_test = engine(replace(limits(num_blocks=400, max_batch_tokens=64), few_tokens=8, max_drafts=32))
    under_test.send(Submit(request))
    under_test.run()
    assert under_test.log.tokens("a") == alone(request)
    assert under_test.scheduler.stats().num_accepted_tokens > 20


def test_forced_tokens_that_are_sampled_are_drafts(steps_in_flight: int) -> None:
    """Of penalised answers, and those that ask for logprobs."""
    for fields in ({"frequency_penalty": 0.5}, {"num_logprobs": 0}):
        under_test = engine(replace(limits(num_blocks=400, max_batch_tokens=64), few_tokens=8, max_drafts=32))
        request = forcing("a", **fields)
        under_test.send(Submit(request))
        under_test.run()
        assert under_test.log.tokens("a") == alone(request)
        stats = under_test.scheduler.stats()
        assert stats.draft_tokens["grammar"] == stats.accepted_tokens["grammar"]
        assert (stats.accepted_tokens["grammar"] > 60) == (steps_in_flight == 1)


def test_a_grammar_that_fails_in_a_draft_fails_where_it_would_without(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library's limits are exceeded while a draft is looked at, which may be wrong."""
    pattern = compiler().compile(regex("(abc ){30}[a-c]{2}!", "regex"))
    request = constrained("a", pattern, prompt_ids=tuple(tokenizer().encode("abc " * 12, False)), max_tokens=100)
    wanted, fault = alone(request), GrammarState.fault
    is_looking = False

    def held(self: Drafts, sequence: Sequence, draft: list[int]) -> list[int]:
        nonlocal is_looking
        is_looking = True
        try:
            return found(self, sequence, draft)
        finally:
            is_looking = False

    def fault_while_looking(state: GrammarState) -> str | None:
        return "limits" if is_looking and state.num_accepted % 7 == 6 else fault.fget(state)  # type: ignore[attr-defined,no-any-return]

    found = Drafts._held
    monkeypatch.setattr(Drafts, "_held", held)
    monkeypatch.setattr(GrammarState, "fault", property(fault_while_looking))
    under_test = engine(replace(limits(num_blocks=400, max_batch_tokens=64), few_tokens=8, max_drafts=32))
    under_test.send(Submit(request))
    under_test.run()
    assert under_test.log.tokens("a") == wanted


def test_a_mask_is_made_while_the_step_that_it_is_for_runs(
    steps_in_flight: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of each step but the first: sent, then the step before it is read, whose token decides the mask."""
    runner_limits, events = replace(limits(), max_in_flight=steps_in_flight), list[str]()
    grammar = compiler().compile(regex("[a-c]{200}", "regex"))  # which tries it out

    def noted(owner: type, name: str) -> None:
        method = getattr(owner, name)

        def call(*args: object) -> object:
            events.append(name)
            return method(*args)

        monkeypatch.setattr(owner, name, call)

    for owner, name in ((FaultyRunner, "forward"), (FaultyRunner, "sample"), (FaultyRunner, "collect")):
        noted(owner, name)
    noted(GrammarState, "fill_mask")
    under_test = engine(runner_limits, FaultyRunner(runner_limits, FakeClock()))
    under_test.send(Submit(constrained("a", grammar, max_tokens=20)))
    under_test.run()
    assert len(under_test.log.tokens("a")) == 20
    if steps_in_flight == 2:
        overlapped = ["forward", "collect", "fill_mask", "sample"]
        assert events == ["forward", "fill_mask", "sample"] + overlapped * 19 + ["collect"]
    else:
        assert events == ["forward", "fill_mask", "sample", "collect"] * 20


def test_choices_of_one_request_have_grammars_of_their_own() -> None:
    request = constrained("a", compiler().compile(regex(PATTERN, "regex")), num_sequences=3)
    under_test = engine(limits())
    under_test.send(Submit(request))
    under_test.run()
    texts = [tokenizer().decode(under_test.log.tokens("a", i)) for i in range(3)]
    assert all(re.fullmatch(PATTERN, text) for text in texts)
    assert len(set(texts)) > 1


def test_a_pause_changes_no_token() -> None:
    request = requests(2)[1]
    under_test = engine(limits())
    under_test.send(Submit(request))
    under_test.step(3)
    under_test.send(Pause(request.request_id))
    under_test.run()
    under_test.send(Resume(request.request_id))
    under_test.run()
    assert under_test.log.tokens(request.request_id) == alone(request)


def test_a_cancel_in_flight_ends_it_once() -> None:
    by_pattern = compiler().compile(regex("a{1000}", "regex"))
    under_test = engine(limits())
    under_test.send(Submit(constrained("a", by_pattern)), Submit(constrained("b", by_pattern)))
    under_test.step(4)
    under_test.send(Cancel("a", FinishReason.CANCELLED))
    under_test.run()
    assert under_test.log.terminal("a").finish_reason is FinishReason.CANCELLED
    assert set(tokenizer().decode(under_test.log.tokens("b"))) == {"a"}


@pytest.mark.parametrize("how", ["raises", "fails"])
def test_a_faulty_neighbour_changes_no_token(how: str, steps_in_flight: int) -> None:
    runner_limits = replace(limits(), max_in_flight=steps_in_flight)
    error = {GUILTY: RuntimeError("broken")} if how == "raises" else {}
    runner = FaultyRunner(runner_limits, FakeClock(), error, frozenset({GUILTY}) if how == "fails" else frozenset())
    under_test = engine(runner_limits, runner)
    crowd = requests(4)
    under_test.send(*map(Submit, crowd[:3]), Submit(make_request("guilty", prompt_ids=(5, GUILTY, 6))))
    under_test.step(2)
    under_test.send(Submit(crowd[3]))
    under_test.run()
    assert under_test.log.terminal("guilty").finish_reason is FinishReason.ERROR
    for request in crowd:
        assert under_test.log.tokens(request.request_id) == alone(request)


@pytest.mark.parametrize("is_too_complex", [True, False])
def test_a_grammar_that_fails_ends_its_sequence_alone(is_too_complex: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a schema that is too much for the library's limits, or by a token that may not come."""
    monkeypatch.setattr(GrammarCompiler, "_probe", lambda *_: None)
    properties = {f"a{i}": {"type": "integer"} for i in range(400)}
    complex_one = {"anyOf": [{"type": "object", "properties": {**properties, name: {}}} for name in "bc"]}
    schema = complex_one if is_too_complex else {"type": "string"}
    fails = compiler().compile(json_schema(schema, "schema"))

    class Failing:
        def start(self) -> object:
            state = fails.start()
            state.accept(tokenizer().encode("{", False)[0])
            return state

    under_test = engine(limits())
    crowd = requests(4)
    under_test.send(*map(Submit, crowd), Submit(constrained("failing", Failing())))  # type: ignore[arg-type]
    under_test.run()
    terminal = under_test.log.terminal("failing")
    reason = FinishReason.TOO_COMPLEX if is_too_complex else FinishReason.ERROR
    assert (terminal.finish_reason, terminal.usage and terminal.usage.num_completion_tokens) == (reason, 0)
    for request in crowd:
        assert under_test.log.tokens(request.request_id) == alone(request)


KEYS = {
    "type": "object",
    "properties": {
        "the_first_of_the_long_names": {"enum": ["alpha", "beta"]},
        "the_second_of_the_long_names": {"type": "integer", "minimum": 0, "maximum": 9},
        "nested": {"const": "a text that is longer than one block of tokens, which is forced from its first word on"},
    },
    "required": ["the_first_of_the_long_names", "the_second_of_the_long_names", "nested"],
    "additionalProperties": False,
}


def forcing(name: str, **fields: object) -> Request:
    by_schema = compiler().compile(json_schema(KEYS, "schema"))
    return constrained(name, by_schema, **{"max_tokens": 140, "seed": len(name), **fields})


def one_by_one(request: Request) -> list[int]:
    """The reference: with logprobs each forced token is sampled, with nothing else allowed."""
    return alone(msgspec.structs.replace(request, sampling=replaced(request, num_logprobs=0)))


def replaced(request: Request, **fields: object) -> SamplingParams:
    return msgspec.structs.replace(request.sampling, **fields)


def test_forced_tokens_are_computed_together_and_are_the_same_as_one_by_one() -> None:
    under_test = engine(limits(max_batch_tokens=64))
    request = forcing("a", num_sequences=2)
    under_test.send(Submit(request))
    under_test.run()
    stats = under_test.scheduler.stats()
    assert stats.num_forced_tokens > stats.num_generated_tokens / 2
    assert stats.num_rows < 1 + stats.num_generated_tokens - stats.num_forced_tokens * 0.7
    tokens = under_test.log.tokens("a")
    assert json.loads(tokenizer().decode(tokens))["the_first_of_the_long_names"] in ("alpha", "beta")
    assert tokens == one_by_one(request)
    usage = under_test.log.terminal("a").usage
    assert usage is not None
    assert usage.num_completion_tokens == len(tokens) + len(under_test.log.tokens("a", 1))


@pytest.mark.parametrize("num_blocks", [400, 40])
@pytest.mark.parametrize("max_batch_tokens", [8, 64])
def test_forced_tokens_are_the_same_in_any_company(num_blocks: int, max_batch_tokens: int) -> None:
    under_test = engine(limits(num_blocks=num_blocks, max_batch_tokens=max_batch_tokens, max_sequences=8))
    crowd = [forcing("f" * i, seed=i, max_tokens=20 + 40 * i) for i in range(1, 4)]
    crowd += [make_request(f"plain{i}", max_tokens=60, seed=i) for i in range(3)]
    under_test.send(*map(Submit, crowd))
    under_test.step(4)
    under_test.send(Pause("ff"))
    under_test.step(8)
    under_test.send(Resume("ff"))
    under_test.run()
    assert (under_test.scheduler.stats().num_preemptions > 0) == (num_blocks == 40)
    for request in crowd:
        tokens = under_test.log.tokens(request.request_id)
        assert tokens == one_by_one(request)
        assert len(tokens) <= request.sampling.max_tokens


def test_penalties_count_forced_tokens() -> None:
    """Their sampler counts what it samples: they are sampled one by one."""
    under_test = engine(limits(max_batch_tokens=64))
    request = forcing("a", frequency_penalty=0.5)
    under_test.send(Submit(request))
    under_test.run()
    assert under_test.scheduler.stats().num_forced_tokens == 0
    assert under_test.log.tokens("a") == one_by_one(request)


def test_forced_tokens_are_the_same_where_they_are_sampled() -> None:
    for seed in range(5):
        found = []
        for forces_tokens in (True, False):
            under_test = EngineUnderTest(
                limits(max_batch_tokens=64), engine(limits()).eos_ids, forces_tokens=forces_tokens
            )
            under_test.send(Submit(forcing("a", seed=seed)))
            under_test.run()
            assert (under_test.scheduler.stats().num_forced_tokens > 0) == forces_tokens
            found.append(under_test.log.tokens("a"))
        assert found[0] == found[1]


STOPPED = ["%%%[0-9]+", "a%*", "(%|&){0,6}", "[a-c%]{2,4}x%+!", "", "%{3}"]


@pytest.mark.parametrize("pattern", STOPPED)
def test_a_grammar_wins_over_min_tokens_where_stop_ids_alone_may_come(pattern: str) -> None:
    """Whatever ends an answer, it is as the grammar has it, or begins so; forced, drafted and sampled tokens alike."""
    rng, grammar = Random(pattern), compiler().compile(regex(pattern, "regex"))
    end = tokenizer().eos_id
    assert end is not None
    choices = [*(tokenizer().encode(one, False)[0] for one in "%&0a5x!"), end]
    for seed in range(30):
        request = constrained(
            "a",
            grammar,
            seed=seed,
            max_tokens=12,
            min_tokens=rng.randrange(10),
            stop_token_ids=tuple(rng.sample(choices, rng.randrange(5))),
            ignore_eos=rng.random() < 0.2,
            prompt_ids=tuple(tokenizer().encode(rng.choice(("%%%&&&", "a%%%%%")), False)),
        )
        found = []
        for forces_tokens, max_drafts in ((True, 0), (False, 0), (True, 8)):
            few = replace(limits(num_blocks=40, max_batch_tokens=64), few_tokens=8, max_drafts=max_drafts)
            under_test = EngineUnderTest(few, (end,), forces_tokens=forces_tokens)
            under_test.send(Submit(request))
            under_test.run()
            found.append((under_test.log.tokens("a"), under_test.log.terminal("a").finish_reason))
        assert found[0] == found[1] == found[2]
        tokens, reason = found[0]
        assert _is_held(request, tokens, reason), (request, found)


def _is_held(request: Request, tokens: list[int], reason: FinishReason | None) -> bool:
    sampling, state = request.sampling, request.grammar.start()  # type: ignore[union-attr]
    for token_id in tokens:
        state.accept(token_id)
    if state.fault is not None or reason not in (FinishReason.STOP, FinishReason.LENGTH):
        return False
    ends = {token_id for token_id in (*sampling.stop_token_ids, tokenizer().eos_id) if state.takes(token_id)}
    if reason is FinishReason.LENGTH or (ends and len(tokens) >= sampling.min_tokens):
        return len(tokens) <= sampling.max_tokens
    return not any(map(state.takes, set(range(tokenizer().vocab_size)) - {tokenizer().eos_id}))


def test_a_stop_id_and_the_limit_end_a_run_of_forced_tokens() -> None:
    whole = one_by_one(forcing("a"))
    for fields, end in (
        ({"max_tokens": 7}, 7),
        ({"stop_token_ids": (whole[12],)}, 1 + whole.index(whole[12])),
    ):
        under_test = engine(limits(max_batch_tokens=64))
        under_test.send(Submit(forcing("a", **fields)))
        under_test.run()
        usage = under_test.log.terminal("a").usage
        assert usage is not None
        assert usage.num_completion_tokens == end
        assert under_test.log.tokens("a") == whole[: end - ("stop_token_ids" in fields)]
