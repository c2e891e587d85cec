"""Triton's attention against the textbook's: random block tables, lengths, group sizes, windows, caps and sinks.

Tiles are small, so that short contexts have many; what nobody may see is NaN. test_ahead.py compiles what is
launched on a device.
"""

import pytest
import torch

from gpu.attention import PLAIN, Scores
from gpu.kernels.attention import PagedAttention
from gpu.kernels.sizes import Tiles, tiles_for
from tests.gpu.attention_cases import assert_near, make_case

SMALL = Tiles(decode_tokens=16, extend_rows=32, extend_tokens=16, num_warps=4, num_stages=2, least_split=32)
OF_16_BITS = 2e-4  # as decodes have queries and shares over keys and values in 8 bits
# Interpreted, -inf - -inf and what overflows warn; a device does not.
pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")


def small_kernels() -> PagedAttention:
    return PagedAttention(3, SMALL)


ROWS = pytest.mark.parametrize(
    ("rows", "num_kv_heads", "per_kv", "head_dim"),
    [
        ([(1, 1)], 1, 1, 16),
        ([(200, 1), (31, 1), (32, 1), (0, 1), (33, 1)], 2, 3, 64),
        ([(70, 1)], 1, 8, 80),
        ([(20, 20)], 2, 7, 24),
        ([(17, 1), (60, 2), (33, 20), (16, 0)], 2, 3, 32),
        ([(90, 45)], 1, 1, 96),
    ],
    ids=str,
)


@pytest.mark.parametrize("window", [None, 21])
@ROWS
def test_rows_attend_as_the_textbook_says(
    rows: list[tuple[int, int]],
    num_kv_heads: int,
    per_kv: int,
    head_dim: int,
    window: int | None,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    case = make_case(rows, num_kv_heads, per_kv, head_dim, window, dtype, device)
    assert_near(case.attend(small_kernels()), case.want())


@pytest.mark.parametrize("window", [None, 21])
@ROWS
def test_rows_over_8_bits_attend_as_over_what_these_stand_for(
    rows: list[tuple[int, int]],
    num_kv_heads: int,
    per_kv: int,
    head_dim: int,
    window: int | None,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    stored, exact = make_case(rows, num_kv_heads, per_kv, head_dim, window, dtype, device).in_8_bits(is_paired=False)
    assert_near(stored.attend(small_kernels()), exact.want(), OF_16_BITS)


@pytest.mark.parametrize("size", [2.0**-12, 2.0**14])
def test_values_of_any_size_keep_their_bits(size: float, dtype: torch.dtype, device: torch.device) -> None:
    """Their scales multiply shares, which are halves: what is small has few bits, and nothing may overflow."""
    case = make_case([(70, 1), (40, 20)], 1, 2, 32, dtype=dtype, device=device)
    case.kv.values.clamp_(-3, 3).mul_(size)
    stored, exact = case.in_8_bits(is_paired=False)
    assert_near(stored.attend(small_kernels()) / size, exact.want() / size, OF_16_BITS)


@pytest.mark.parametrize("window", [1, 400])
def test_windows_of_one_token_and_of_more_than_there_are(window: int, device: torch.device) -> None:
    case = make_case([(50, 1), (40, 20)], 1, 2, 16, window, device=device)
    assert_near(case.attend(small_kernels()), case.want())


@pytest.mark.parametrize(("head_dim", "per_kv", "dtype"), [(128, 4, torch.float16), (256, 2, torch.float32)], ids=str)
def test_rows_attend_in_the_tiles_that_serve(
    head_dim: int, per_kv: int, dtype: torch.dtype, device: torch.device
) -> None:
    case = make_case([(300, 1), (80, 35)], 1, per_kv, head_dim, None, dtype, device)
    got = PagedAttention(3).attend(case.query, case.kv, case.rows, PLAIN)
    assert_near(got, case.want())


@pytest.mark.parametrize(
    ("window", "scale", "cap", "has_sinks"),
    [(None, 0.31, None, False), (21, None, 1.5, False), (None, None, None, True), (21, 0.31, 1.5, True)],
)
def test_scores_are_scaled_capped_and_shared_with_sinks(
    window: int | None, scale: float | None, cap: float | None, has_sinks: bool, device: torch.device
) -> None:
    case = make_case([(150, 1), (0, 1), (50, 20)], 2, 3, 32, window, device=device)
    sinks = torch.linspace(-2, 3, 6, device=device) if has_sinks else None
    scores = Scores(scale, cap, sinks)
    assert_near(case.attend(small_kernels(), scores), case.want(scores))
    stored, exact = case.in_8_bits(is_paired=False)
    assert_near(stored.attend(small_kernels(), scores), exact.want(scores), OF_16_BITS)


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("in_8_bits", [False, True])
def test_a_row_is_rounded_the_same_in_any_company(window: int | None, in_8_bits: bool, device: torch.device) -> None:
    """To the last bit: beside longer and shorter rows, beside prompts, and by however many programs."""
    case = make_case([(300, 1), (33, 1), (1, 1), (120, 1), (64, 30), (20, 2)], 2, 2, 32, window, device=device)
    case = case.in_8_bits(is_paired=False)[0] if in_8_bits else case
    whole = case.attend(small_kernels())
    assert torch.equal(case.attend(PagedAttention(7, SMALL)), whole)
    case.assert_each_row_is_the_same_alone(small_kernels(), whole)


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize(("per_kv", "in_8_bits"), [(1, False), (3, False), (3, True)])
def test_a_token_is_rounded_the_same_in_any_chunk(
    window: int | None, per_kv: int, in_8_bits: bool, device: torch.device
) -> None:
    case = make_case([(90, 90)], 1, per_kv, 32, window, device=device)
    case = case.in_8_bits(is_paired=False)[0] if in_8_bits else case
    whole = case.attend(small_kernels())
    for start, end in ((0, 1), (3, 50), (50, 90), (89, 90)):
        assert torch.equal(case.chunk(start, end).attend(small_kernels()), whole[start:end])


@pytest.mark.parametrize("rows", [[(300, 1)], [(300, 40)]], ids=str)
@pytest.mark.parametrize("place", [3, 290])
def test_one_score_far_above_the_others_takes_its_value_whole(
    rows: list[tuple[int, int]], place: int, device: torch.device
) -> None:
    """Those summed before it came are forgotten, those after it weigh nothing."""
    case = make_case(rows, 1, 2, 32, device=device)
    slot = case.contexts[0][place // 16] * 16 + place % 16
    case.kv.keys[slot, 0] = case.query[-1, 0] * 50
    got = case.attend(small_kernels(), Scores(1.0))
    assert torch.equal(got[-1, :32], case.kv.values[slot, 0])


def test_layers_that_share_rows_share_what_is_laid_out(device: torch.device) -> None:
    """Whatever was attended to in between, and took more room."""
    case, kernels = make_case([(80, 1), (40, 9)], 1, 2, 32, device=device), small_kernels()
    larger = make_case([(200, 1), (190, 1)], 1, 2, 32, device=device)
    first = kernels.attend(case.query, case.kv, case.rows, PLAIN)
    laid_out = case.rows.layout
    assert_near(kernels.attend(larger.query, larger.kv, larger.rows, PLAIN), larger.want())
    assert torch.equal(kernels.attend(case.query, case.kv, case.rows, PLAIN), first)
    assert case.rows.layout is laid_out


def test_heads_that_shared_memory_does_not_hold_are_refused() -> None:
    assert tiles_for(256, torch.float32).decode_tokens == 16
    with pytest.raises(ValueError, match="heads of 300: at most 256"):
        tiles_for(300, torch.float32)
