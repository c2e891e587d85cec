"""The kernels' attention against the textbook's: random block tables, lengths, group sizes and windows."""

import random

import pytest
import torch

from gpu.attention import RaggedRows
from gpu.device import cpu_flags
from gpu.kv_cache import LayerKV
from gpu.scores import PLAIN, Scores

if "avx512_bf16" not in cpu_flags():
    pytest.skip("needs a CPU with avx512_bf16", allow_module_level=True)

from gpu.cpu_kernels.attention import PagedAttention, divide_decodes

NUM_BLOCKS = 330


@pytest.fixture(scope="module")
def kernel() -> PagedAttention:
    return PagedAttention()


def textbook(query: torch.Tensor, kv: LayerKV, rows: RaggedRows, scale: float) -> torch.Tensor:
    """Of rows of one token, in float32: query [rows, heads, head_dim]; returns [rows, heads * head_dim]."""
    per_kv = query.shape[1] // kv.keys.shape[1]
    out = []
    for row, vectors in enumerate(query.float()):
        end = int(rows.ends[row])
        seen = slice(0 if rows.window is None else max(0, end - rows.window), end)
        keys, values = kv.both[:, rows.tables[row]].flatten(1, 2)[:, seen].float().repeat_interleave(per_kv, 2)
        shares = (torch.einsum("hd,chd->hc", vectors, keys) * scale).softmax(1)
        out.append(torch.einsum("hc,chd->hd", shares, values).flatten())
    return torch.stack(out)


def noise(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).bfloat16()


def make_case(
    lengths: list[int], num_kv_heads: int, per_kv: int, head_dim: int, window: int | None
) -> tuple[torch.Tensor, LayerKV, RaggedRows]:
    """Blocks hold noise beyond each row's context, which nobody may see; queries lie beside keys, as in the model."""
    both = noise(2, NUM_BLOCKS, 16, num_kv_heads, head_dim)
    longest = -(-max(lengths) // 16)
    blocks = random.Random(longest).sample(range(NUM_BLOCKS), longest * len(lengths))
    ends = torch.tensor(lengths)
    tables = torch.tensor(blocks).view(len(lengths), longest)
    rows = RaggedRows(tables, ends, torch.arange(len(lengths) + 1), len(lengths), window)
    query = noise(len(lengths), num_kv_heads * (per_kv + 1), head_dim)[:, : num_kv_heads * per_kv]
    return query, LayerKV(both, both[0].flatten(0, 1), both[1].flatten(0, 1)), rows


def prompt(tables: torch.Tensor, start: int, end: int, window: int | None) -> RaggedRows:
    """One row of new tokens at positions start to end."""
    return RaggedRows(tables, torch.tensor([end]), torch.tensor([0, end - start]), 0, window)


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("window", [None, 1, 16, 21, 200])
@pytest.mark.parametrize(
    ("lengths", "num_kv_heads", "per_kv", "head_dim"),
    [
        ([1], 1, 1, 32),
        ([40, 17, 16], 2, 7, 64),
        ([300, 299, 128, 129, 1], 2, 3, 128),
        ([15] * 9, 8, 1, 64),
        ([1000], 1, 8, 256),
        ([77, 3], 3, 5, 96),
        ([1700, 40, 513], 2, 7, 64),
        ([512, 1025], 4, 1, 32),
    ],
    ids=str,
)
def test_rows_attend_as_the_textbook_says(
    kernel: PagedAttention,
    lengths: list[int],
    num_kv_heads: int,
    per_kv: int,
    head_dim: int,
    window: int | None,
    num_threads: int,
) -> None:
    query, kv, rows = make_case(lengths, num_kv_heads, per_kv, head_dim, window)
    want = textbook(query, kv, rows, head_dim**-0.5)
    torch.set_num_threads(num_threads)
    got = kernel.attend(query, kv, rows, PLAIN)
    assert got.dtype == torch.bfloat16
    assert torch.allclose(got.float(), want, atol=0.02, rtol=0.01)


def test_scores_are_multiplied_by_the_scale_given(kernel: PagedAttention) -> None:
    query, kv, rows = make_case([50], 1, 4, 64, None)
    assert torch.allclose(
        kernel.attend(query, kv, rows, Scores(0.5)).float(), textbook(query, kv, rows, 0.5), atol=0.02, rtol=0.01
    )


def test_one_score_far_above_the_others_takes_its_value_whole(kernel: PagedAttention) -> None:
    """And those summed before it came are forgotten: the sums are rescaled from chunk to chunk."""
    query, kv, rows = make_case([400], 1, 4, 64, None)
    slot = int(rows.tables[0, 390 // 16]) * 16 + 390 % 16
    kv.keys[slot, 0] = query[0, 0] * 50
    got = kernel.attend(query, kv, rows, Scores(1.0))
    assert torch.equal(got[0, :64], kv.values[slot, 0])


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("window", [None, 1, 21, 64, 200])
@pytest.mark.parametrize(
    ("start", "num_tokens", "num_kv_heads", "per_kv", "head_dim"),
    [
        (0, 2, 1, 1, 64),
        (0, 64, 2, 7, 64),
        (0, 230, 2, 3, 128),
        (47, 65, 1, 14, 64),
        (190, 33, 1, 100, 64),
        (191, 3, 3, 5, 256),
        (10, 90, 2, 4, 96),
        (70, 30, 1, 3, 32),
    ],
    ids=str,
)
def test_new_tokens_attend_as_the_textbook_says(
    kernel: PagedAttention,
    start: int,
    num_tokens: int,
    num_kv_heads: int,
    per_kv: int,
    head_dim: int,
    window: int | None,
    num_threads: int,
) -> None:
    """Each as a row of its own, which sees what lies before it."""
    end = start + num_tokens
    _, kv, of_one = make_case([end], num_kv_heads, per_kv, head_dim, None)
    ends = torch.arange(start, end) + 1
    query = noise(num_tokens, num_kv_heads * (per_kv + 1), head_dim)[:, : num_kv_heads * per_kv]
    of_each = RaggedRows(of_one.tables.expand(num_tokens, -1), ends, torch.arange(num_tokens + 1), num_tokens, window)
    want = textbook(query, kv, of_each, head_dim**-0.5)
    torch.set_num_threads(num_threads)
    got = kernel.attend(query, kv, prompt(of_one.tables, start, end, window), PLAIN)
    assert torch.allclose(got.float(), want, atol=0.02, rtol=0.01)


def test_an_early_score_far_above_the_others_outlives_all_chunks(kernel: PagedAttention) -> None:
    _, kv, rows = make_case([400], 1, 1, 64, None)
    slot = int(rows.tables[0, 0]) * 16 + 3
    query = noise(400, 1, 64)
    kv.keys[slot, 0] = query[399, 0] * 50
    got = kernel.attend(query, kv, prompt(rows.tables, 0, 400, None), Scores(1.0))
    assert torch.equal(got[399], kv.values[slot, 0])


@pytest.mark.bits
@pytest.mark.parametrize("window", [None, 100])
def test_a_token_is_rounded_the_same_in_any_chunk(kernel: PagedAttention, window: int | None) -> None:
    _, kv, rows = make_case([500], 2, 1, 64, None)
    query = noise(500, 6, 64)
    whole = kernel.attend(query, kv, prompt(rows.tables, 0, 500, window), PLAIN)
    for start, end in ((0, 1), (3, 70), (70, 500), (499, 500)):
        part = kernel.attend(query[start:end], kv, prompt(rows.tables, start, end, window), PLAIN)
        assert torch.equal(part, whole[start:end])


@pytest.mark.parametrize("window", [None, 21])
def test_rows_of_one_token_and_prompts_attend_beside_each_other(kernel: PagedAttention, window: int | None) -> None:
    _, kv, whole = make_case([300, 17, 90, 33], 2, 3, 64, None)
    query, starts, ends = noise(2 + 40 + 33, 8, 64)[:, :6], (299, 16, 50, 0), (300, 17, 90, 33)
    rows = RaggedRows(whole.tables, whole.ends, torch.tensor([0, 1, 2, 42, 75]), 2, window)
    got = kernel.attend(query, kv, rows, PLAIN)
    for row, (start, end) in enumerate(zip(starts, ends, strict=True)):
        tokens = slice(int(rows.offsets[row]), int(rows.offsets[row + 1]))
        alone = prompt(whole.tables[row : row + 1], start, end, window)
        if row < 2:
            alone.num_decodes = 1
        assert torch.equal(got[tokens], kernel.attend(query[tokens], kv, alone, PLAIN))


@pytest.mark.parametrize("window", [None, 100, 700])
@pytest.mark.parametrize(("num_kv_heads", "per_kv", "head_dim"), [(2, 7, 64), (8, 3, 32)])
@pytest.mark.parametrize("lengths", [[300, 251, 17, 64], [1100, 513, 512, 1200]], ids=str)
def test_a_row_attends_the_same_alone_and_in_company(
    kernel: PagedAttention,
    monkeypatch: pytest.MonkeyPatch,
    lengths: list[int],
    num_kv_heads: int,
    per_kv: int,
    head_dim: int,
    window: int | None,
) -> None:
    """Alone its heads, or the splits of its context, are divided among threads; with others they are not."""
    query, kv, rows = make_case(lengths, num_kv_heads, per_kv, head_dim, window)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    together = kernel.attend(query, kv, rows, PLAIN)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    for row in range(4):
        alone = RaggedRows(rows.tables[row : row + 1], rows.ends[row : row + 1], torch.tensor([0, 1]), 1, window)
        for _ in range(2):  # layers: with the same pieces
            assert torch.equal(kernel.attend(query[row : row + 1], kv, alone, PLAIN)[0], together[row])


@pytest.mark.parametrize(
    ("lengths", "window", "num_kv_heads", "head_dim", "num_threads", "found"),
    [
        ([100], None, 2, 64, 2, (1, [1])),  # two threads share the row
        ([100] * 2, None, 2, 64, 2, (2, [1] * 2)),
        ([100] * 3, None, 2, 64, 2, (1, [1] * 3)),  # one thread would wait for a whole row
        ([100] * 9, None, 2, 64, 2, (2, [1] * 9)),
        ([100] * 8, None, 8, 128, 2, (1, [1] * 8)),  # a head is as many bytes as are read together
        ([100] * 8, None, 8, 32, 2, (4, [1] * 8)),
        ([100] * 8, None, 6, 32, 2, (3, [1] * 8)),
        ([100] * 8, None, 5, 32, 2, (1, [1] * 8)),
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
