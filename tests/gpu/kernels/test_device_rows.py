"""Rows by token and by slot: exact, in any format, for every width."""

import pytest
import torch

from gpu.kernels.device_rows import (
    CLEARED_COLUMNS,
    TOKENS,
    SpareBlocks,
    clear_blocks,
    embed_rows,
    empty_rows,
    fill_rows,
    fill_tokens,
    scatter_rows,
)

FORMATS = (torch.float32, torch.bfloat16, torch.int32, torch.int64)
WIDTHS = (1, 48, 1024, 1100)


def numbers(device: torch.device, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.randint(-100, 100, shape, generator=torch.Generator().manual_seed(shape[0])).to(device, dtype)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("id_format", [torch.int32, torch.int64])
def test_an_embedding_is_its_rows(device: torch.device, width: int, id_format: torch.dtype) -> None:
    table = numbers(device, torch.float32, 30, width)
    ids = torch.tensor([29, 0, 7, 7], device=device, dtype=id_format)
    assert torch.equal(embed_rows(table, ids), table[ids.long()])
    assert embed_rows(table, ids[:0]).shape == (0, width)


@pytest.mark.parametrize("width", [(), *((width,) for width in WIDTHS), (2, 3)])
@pytest.mark.parametrize("dtype", FORMATS, ids=str)
def test_rows_are_scattered_by_slot(device: torch.device, dtype: torch.dtype, width: tuple[int, ...]) -> None:
    table, rows = numbers(device, dtype, 9, *width), numbers(device, dtype, 4, *width)
    slots = torch.tensor([8, -1, 0, 3], device=device)
    want = table.clone()
    want[slots[[0, 2, 3]]] = rows[[0, 2, 3]]
    scatter_rows(table, slots, rows)
    assert torch.equal(table, want)


@pytest.mark.parametrize("head_dim", [3, CLEARED_COLUMNS // 16 + 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_blocks_are_cleared_in_all_layers_and_others_kept(
    device: torch.device, dtype: torch.dtype, head_dim: int
) -> None:
    cache = torch.full((3, 2, 5, 16, 1, head_dim), float("nan"), dtype=dtype, device=device)
    clear_blocks(cache, torch.tensor([4, 1], dtype=torch.int32, device=device))
    assert (cache[:, :, [1, 4]] == 0).all()
    assert cache[:, :, [0, 2, 3]].isnan().all()


@pytest.mark.parametrize("width", [3, 1100])
def test_decoding_rows_are_filled_in_from_what_stays_on_the_device(device: torch.device, width: int) -> None:
    """The second row's token is the one that its slot drew last; the third is padding."""
    tables = torch.arange(4 * width, dtype=torch.int32, device=device).view(4, width)
    last_tokens = torch.tensor([7, 8, 9, 10], device=device)
    step = torch.tensor([[3, 1, -1, 5], [17, 32, -1, 5], [40, -1, -1, 5]], dtype=torch.int32, device=device)
    rows = empty_rows(4, 5, width, torch.full((2, 4), -7, device=device))
    rows.tables.fill_(-7)
    rows.ends.fill_(-7)
    fill_rows(rows.first(3, 3), step[:, :3], tables, last_tokens, SpareBlocks(scratch=500, padding=501))
    assert rows.token_ids[:3].tolist() == [40, 8, 0]
    assert rows.positions[:3].tolist() == [17.0, 32.0, 0.0]
    assert rows.kv_slots[:3].tolist() == [(3 * width + 1) * 16 + 1, (width + 2) * 16, 501 * 16]
    assert rows.ends.tolist() == [18, 33, 0, -7]
    assert rows.drawn[0].tolist() == [3, 1, -1, -7]
    assert rows.drawn[1, :2].tolist() == [18, 33]
    used = [3 * width, 3 * width + 1], [width, width + 1, width + 2], []
    assert rows.tables[:3].tolist() == [[*blocks, *[500] * (width - len(blocks))] for blocks in used]
    assert (rows.tables[3] == -7).all()


@pytest.mark.parametrize("num_padding", [1, TOKENS])
def test_tokens_of_prompts_are_filled_in_behind_the_rows(device: torch.device, num_padding: int) -> None:
    """Of slot 2 in its second block, of slot 1 one that is known and one that it drew last; then padding."""
    width = 3
    tables = torch.arange(4 * width, dtype=torch.int32, device=device).view(4, width)
    last_tokens = torch.tensor([7, 8, 9, 10], device=device)
    known = torch.tensor([[2, 2, 1, 1], [31, 32, 4, 5], [40, 41, 42, -1]], dtype=torch.int32)
    step = torch.cat([known, torch.full((3, num_padding), -1, dtype=torch.int32)], 1).to(device)
    rows = empty_rows(2, 3 + step.shape[1], width, torch.full((2, 2), -7, device=device))
    for written in (rows.token_ids, rows.positions, rows.kv_slots):
        written.fill_(-7)
    fill_tokens(rows, 2, step, tables, last_tokens, SpareBlocks(scratch=500, padding=501))
    assert rows.token_ids.tolist() == [-7, -7, 40, 41, 42, 8, *[0] * num_padding, -7]
    assert rows.positions.tolist() == [-7, -7, 31, 32, 4, 5, *[0] * num_padding, -7]
    places = [(2 * width + 1) * 16 + 15, (2 * width + 2) * 16, width * 16 + 4, width * 16 + 5]
    assert rows.kv_slots.tolist() == [-7, -7, *places, *[501 * 16] * num_padding, -7]
