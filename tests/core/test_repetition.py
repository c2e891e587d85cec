"""DRY against a literal reading of llama.cpp's, and penalties over a window."""

import random

from hypothesis import given
from hypothesis import strategies as st

from core.repetition import MOST_PENALTY, Breakers, Repetition, RepetitionRules
from tests.core.test_tokenizer import ours


def dry_of_llama(tokens: list[int], rules: RepetitionRules) -> dict[int, float]:
    """llama_sampler_dry_apply, without its Z-algorithm."""
    last_n = len(tokens) if rules.dry_penalty_last_n < 0 else min(rules.dry_penalty_last_n, len(tokens))
    tokens, limit = tokens[len(tokens) - last_n :], last_n
    for i in range(last_n):
        sequences = [
            *rules.breakers.tails.get(tokens[-1 - i], ()),
            *([()] if tokens[-1 - i] in rules.breakers.alone else []),
        ]
        lengths = [
            len(one) for one in sequences if tuple(tokens[len(tokens) - i :][: len(one)]) == one and len(one) <= i
        ]
        if lengths:
            limit = i - max(lengths)
            break
    found: dict[int, int] = {}
    if last_n > rules.dry_allowed_length and limit >= rules.dry_allowed_length:
        for end in range(last_n - 1):
            length = 0
            while length < min(end + 1, limit) and tokens[end - length] == tokens[-1 - length]:
                length += 1
            if length >= rules.dry_allowed_length and tokens[end + 1] not in rules.breakers.alone:
                found[tokens[end + 1]] = max(length, found.get(tokens[end + 1], 0))
    allowed, base = rules.dry_allowed_length, rules.dry_base
    return {token: rules.dry_multiplier * base ** (length - allowed) for token, length in found.items()}


@given(st.integers(0, 2**32 - 1), st.sampled_from([0, 1, 2, 4]), st.sampled_from([-1, 1, 3, 20]), st.booleans())
def test_dry_is_llama_servers(seed: int, allowed: int, last_n: int, has_breakers: bool) -> None:
    """At each length of a text that grows by one token, by some, and by many at once."""
    rng = random.Random(seed)
    breakers = Breakers(frozenset({7}), {5: ((6,), (6, 7)), 4: ((4, 4),)}) if has_breakers else Breakers()
    rules = RepetitionRules(
        dry_multiplier=0.8, dry_base=1.1, dry_allowed_length=allowed, dry_penalty_last_n=last_n, breakers=breakers
    )
    repetition, tokens = Repetition(rules), rng.choices(range(8), k=rng.randint(1, 90))
    for _ in range(12):
        found = repetition.penalties(3, tokens)
        assert (found.slot, found.counts) == (3, None)
        assert found.dry == dry_of_llama(tokens, rules)
        tokens += rng.choices(range(rng.choice((2, 8))), k=rng.choice((1, 1, 2, 70)))


def test_a_penalty_stays_a_number() -> None:
    rules = RepetitionRules(dry_multiplier=9.0, dry_base=100.0, dry_allowed_length=1)
    assert Repetition(rules).penalties(0, [5] * 3000).dry == {5: MOST_PENALTY}


def test_a_window_counts_the_last_tokens() -> None:
    repetition = Repetition(RepetitionRules(repeat_last_n=3))
    assert repetition.penalties(1, [9, 4, 5, 4]).counts == {4: 2, 5: 1}
    assert repetition.penalties(1, [4]).counts == {4: 1}


def test_breakers_are_the_tokens_that_contain_begin_or_complete_a_text() -> None:
    tokenizer = ours("byte_level")
    texts = tokenizer.full_table.token_bytes
    for strings in (("e",), ("\n", "the"), ("ü!",)):
        found = tokenizer.breakers(strings)
        wanted = [one.encode() for one in strings]
        assert found.alone == {i for i, text in enumerate(texts) if any(one in text for one in wanted)}
        tails = {
            token: {
                tuple(tokenizer.encode(s[k:], False))
                for s in strings
                for k in range(1, len(s))
                if text.endswith(s[:k].encode())
            }
            for token, text in enumerate(texts)
        }
        assert {token: set(all) for token, all in found.tails.items()} == {t: all for t, all in tails.items() if all}
        assert tokenizer.breakers(strings) is found
