import math

import pytest

from core.sequence import Sequence, SequenceGroup, Tenant, sequence_seed
from core.types import FinishReason
from tests.fakes import make_request


def make_sequence(stop_ids: tuple[int, ...] = (9,), max_length: int = 10, min_tokens: int = 0) -> Sequence:
    request = make_request(prompt_ids=(1, 2, 3), min_tokens=min_tokens)
    return SequenceGroup(request, Tenant("local"), serial=0, seed=5, latest_start_s=math.inf).add(stop_ids, max_length)


@pytest.mark.parametrize(
    ("drawn", "expected"),
    [
        ([4], None),
        ([9], FinishReason.STOP),
        ([4] * 6, None),
        ([4] * 7, FinishReason.LENGTH),
        ([4] * 6 + [9], FinishReason.STOP),
    ],
)
def test_sequence_ends_at_a_stop_id_or_at_its_length(drawn: list[int], expected: FinishReason | None) -> None:
    sequence = make_sequence()
    sequence.token_ids += drawn
    assert sequence.end_after_last_token() is expected


@pytest.mark.parametrize(("num_drawn", "expected"), [(2, None), (3, FinishReason.STOP)])
def test_stop_ids_count_from_min_tokens_on(num_drawn: int, expected: FinishReason | None) -> None:
    sequence = make_sequence(min_tokens=2)
    sequence.token_ids += [4] * (num_drawn - 1) + [9]
    assert sequence.end_after_last_token() is expected


def test_of_several_cuts_the_smallest_is_billed() -> None:
    sequence = make_sequence()
    sequence.token_ids += [4] * 5
    sequence.keep(3)
    sequence.keep(4)
    sequence.keep(None)
    assert sequence.num_billed_tokens == 3


def test_no_cut_bills_more_than_was_drawn() -> None:
    sequence = make_sequence()
    sequence.token_ids += [4, 4]
    sequence.keep(8)
    assert sequence.num_billed_tokens == 2


def test_siblings_have_their_own_64_bit_seeds() -> None:
    seeds = {sequence_seed(seed, index) for seed in (0, 1, -1, 2**64 - 1) for index in range(8)}
    assert len(seeds) == 3 * 8  # -1 and 2^64 - 1 are the same 64 bits
    assert all(0 <= seed < 2**64 for seed in seeds)
