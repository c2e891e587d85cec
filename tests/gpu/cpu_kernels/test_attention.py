"""numba's attention against the textbook's: random block tables, lengths, group sizes and windows."""

import math
from collections.abc import Callable

import pytest
import torch

from gpu.attention import Scores
from gpu.cpu_kernels.support import NEEDED_FLAGS
from gpu.device import cpu_flags
from tests.gpu.attention_cases import Case, assert_near, make_case

if not cpu_flags() >= NEEDED_FLAGS:
    pytest.skip("needs a CPU with AVX2", allow_module_level=True)

from gpu.cpu_kernels.attention import PagedAttention, divide_decodes

Rows = list[tuple[int, int]]


@pytest.fixture(scope="module")
def kernels() -> PagedAttention:
    return PagedAttention()


@pytest.fixture
def use_threads(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    return lambda count: monkeypatch.setattr(torch, "get_num_threads", lambda: count)


def make(rows: Rows, num_kv_heads: int, per_kv: int, head_dim: int, window: int | None = None) -> Case:
    """rows: (end, new tokens). What lies beyond a row's end is finite, as in the model, but large."""
    kinds = {"dtype": torch.bfloat16, "unseen": 90.0, "index_dtype": torch.int64}
    return make_case(rows, num_kv_heads, per_kv, head_dim, window, **kinds)


def decodes(*ends: int) -> Rows:
    return [(end, 1) for end in ends]


@pytest.mark.parametrize(
    ("window", "num_threads"), [(None, 1), (None, 2), (1, 2), (16, 1), (21, 2), (64, 1), (200, 1), (200, 2)]
)
@pytest.mark.parametrize(
    ("rows", "num_kv_heads", "per_kv", "head_dim"),
    [
        (decodes(1), 1, 1, 32),
        (decodes(40, 17, 16), 2, 7, 64),
        (decodes(300, 299, 128, 129, 1), 2, 3, 128),
        (decodes(*[15] * 9), 8, 1, 64),
        (decodes(1000), 1, 8, 256),
        (decodes(77, 3), 3, 5, 96),
        (decodes(1700, 40, 513), 2, 7, 64),
        (decodes(512, 1025), 4, 1, 32),
        ([(2, 2)], 1, 1, 64),
        ([(64, 64)], 2, 7, 64),
        ([(230, 230)], 2, 3, 128),
        ([(112, 65)], 1, 14, 64),
        ([(223, 33)], 1, 100, 64),
        ([(194, 3)], 3, 5, 256),
        ([(100, 90), (100, 30)], 2, 4, 96),
        ([(300, 1), (17, 1), (90, 40), (33, 33)], 2, 3, 64),
    ],
    ids=str,
)
def test_rows_attend_as_the_textbook_says(
    kernels: PagedAttention,
    use_threads: Callable[[int], None],
    rows: Rows,
    num_kv_heads: int,
    per_kv: int,
    head_dim: int,
    window: int | None,
    num_threads: int,
) -> None:
    use_threads(num_threads)
    case = make(rows, num_kv_heads, per_kv, head_dim, window)
    assert_near(case.in_pairs().attend(kernels), case.want())
    stored, exact = case.in_8_bits(is_paired=True)
    assert_near(stored.attend(kernels), exact.want())


@pytest.mark.parametrize("spread", [0.0, 1.0])
@pytest.mark.parametrize(("rows", "per_kv", "head_dim"), [([(700, 1), (33, 1)], 7, 64), ([(200, 90)], 2, 128)], ids=str)
def test_in_8_bits_nothing_is_lost_but_the_rounding_of_the_result(
    kernels: PagedAttention, rows: Rows, per_kv: int, head_dim: int, spread: float
) -> None:
    """Queries and shares are 16 bits wide, also beside a number that is larger by far."""
    case = make(rows, 2, per_kv, head_dim)
    sizes = torch.exp(spread * torch.randn(case.query.shape, generator=torch.Generator().manual_seed(1)))
    case.query.mul_(sizes.bfloat16() / math.exp(spread))
    stored, exact = case.in_8_bits(is_paired=True)
    wanted = exact.want()
    error = (stored.attend(kernels).float() - wanted).abs()
    assert (error <= wanted.abs() * 2**-8 + wanted.abs().amax(1, keepdim=True) * 2**-10).all()


def test_scores_are_multiplied_by_the_scale_given(kernels: PagedAttention) -> None:
    case = make([(50, 1), (50, 20)], 1, 4, 64)
    assert_near(case.in_pairs().attend(kernels, Scores(0.5)), case.want(Scores(0.5)))


@pytest.mark.parametrize("rows", [[(400, 1)], [(400, 400)]], ids=str)
@pytest.mark.parametrize("place", [3, 390])
def test_one_score_far_above_the_others_takes_its_value_whole(kernels: PagedAttention, rows: Rows, place: int) -> None:
    """The sums before it are forgotten, and those after it weigh nothing: they are rescaled from chunk to chunk."""
    case = make(rows, 1, 4, 64)
    slot = case.contexts[0][place // 16] * 16 + place % 16
    case.kv.keys[slot, 0] = case.query[-1, 0] * 50
    assert torch.equal(case.in_pairs().attend(kernels, Scores(1.0))[-1, :64], case.kv.values[slot, 0])


@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("is_int8", [False, True])
def test_a_token_is_rounded_the_same_in_any_chunk(kernels: PagedAttention, window: int | None, is_int8: bool) -> None:
    case = make([(500, 500)], 2, 3, 64, window)
    case = case.in_8_bits(is_paired=True)[0] if is_int8 else case.in_pairs()
    whole = case.attend(kernels)
    for start, end in ((0, 1), (3, 70), (70, 500), (499, 500)):
        assert torch.equal(case.chunk(start, end).attend(kernels), whole[start:end])


@pytest.mark.parametrize("window", [None, 21, 100, 700])
@pytest.mark.parametrize(("num_kv_heads", "per_kv", "head_dim"), [(2, 7, 64), (8, 3, 32)])
@pytest.mark.parametrize(
    "rows",
    [decodes(300, 251, 17, 64), decodes(1100, 513, 512, 1200), [(300, 1), (17, 1), (90, 40), (33, 33)]],
    ids=str,
)
def test_a_row_attends_the_same_alone_and_in_company(
    kernels: PagedAttention,
    use_threads: Callable[[int], None],
    rows: Rows,
    num_kv_heads: int,
    per_kv: int,
    head_dim: int,
    window: int | None,
) -> None:
    """Alone its heads, or the splits of its context, are divided among threads; with others they are not."""
    case = make(rows, num_kv_heads, per_kv, head_dim, window).in_pairs()
    use_threads(1)
    together = case.attend(kernels)
    use_threads(2)
    case.assert_each_row_is_the_same_alone(kernels, together)


@pytest.mark.parametrize(
    ("lengths", "window", "num_kv_heads", "head_dim", "num_threads", "found"),
    [
        ([100], None, 2, 64, 2, (1, [1])),  # two threads share the row
        ([100] * 2, None, 2, 64, 2, (2, [1] * 2)),
        ([100] * 3, None, 2, 64, 2, (1, [1] * 3)),  # one thread would wait for a whole row
        ([100] * 9, None, 2, 64, 2, (2, [1] * 9)),
        ([100] * 8, None, 8, 256, 2, (4, [1] * 8)),  # four heads are as many bytes as are read together
        ([100] * 8, None, 6, 256, 2, (3, [1] * 8)),
        ([100] * 8, None, 5, 256, 2, (1, [1] * 8)),
        ([100] * 8, None, 5, 32, 2, (5, [1] * 8)),
        ([100], None, 8, 128, 2, (4, [1])),
        ([100, 400], None, 8, 128, 2, (2, [1] * 2)),  # with more heads one thread would have most of the work
        ([512], None, 2, 64, 2, (1, [1])),
        ([513], None, 2, 64, 2, (1, [2])),
        ([8192], None, 2, 64, 2, (2, [16])),
        ([8192], None, 2, 64, 1, (2, [1])),
        ([8192] * 8, None, 2, 64, 2, (2, [1] * 8)),  # a row is an eighth of the work
        ([8192] * 7, None, 2, 64, 2, (2, [16] * 7)),
        ([8192, 40, 600], None, 2, 64, 2, (2, [16, 1, 2])),  # one long row would be one thread's
        ([2000, 512], 700, 2, 64, 2, (1, [2, 1])),  # positions 1300 to 1999 lie in two splits
        ([2000, 40], 500, 2, 64, 2, (1, [2, 1])),
    ],
    ids=str,
)
def test_heads_are_read_together_and_rows_split_so_that_no_thread_waits(
    lengths: list[int],
    window: int | None,
    num_kv_heads: int,
    head_dim: int,
    num_threads: int,
    found: tuple[int, list[int]],
) -> None:
    assert divide_decodes(lengths, window, num_kv_heads, head_dim, num_threads) == found
