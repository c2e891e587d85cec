"""Rows by token and by slot: exact, in any format, for every width."""

import pytest
import torch

from gpu.kernels.rows import CLEARED_COLUMNS, TOKENS, DeviceRows, embed_rows, scatter_rows
from gpu.rows import DeviceTables, RowOperators, StepInputs

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
    rows_over(torch.zeros(1, 1, dtype=torch.int32, device=device)).clear_blocks(
        cache, torch.tensor([4, 1], dtype=torch.int32, device=device)
    )
    assert (cache[:, :, [1, 4]] == 0).all()
    assert cache[:, :, [0, 2, 3]].isnan().all()


def rows_over(
    blocks: torch.Tensor,
    make: type[RowOperators] = DeviceRows,
    num_tokens: int = 300,
    scratch_window: int | None = None,
) -> RowOperators:
    last_tokens = torch.arange(7, 7 + len(blocks), device=blocks.device)
    return make(DeviceTables(blocks, last_tokens, 500, scratch_window), 4, num_tokens)


def inputs_of(device: torch.device, ends: list[int], slots: list[int], tokens: list[list[int]]) -> StepInputs:
    none = torch.empty(0, dtype=torch.int32, device=device)
    found = (torch.tensor(part, dtype=torch.int32, device=device) for part in (slots, ends, tokens))
    slots_there, ends_there, tokens_there = found
    return StepInputs(slots_there, ends_there, none, none, none, tokens_there)


@pytest.mark.parametrize("width", [3, 1100])
def test_a_rows_table_is_its_slots_up_to_its_end(device: torch.device, width: int) -> None:
    """The third row is padding."""
    blocks = torch.arange(4 * width, dtype=torch.int32, device=device).view(4, width)
    rows = rows_over(blocks)
    rows.tables_of(inputs_of(device, [48] * 4, [0] * 4, [[], [], []]), width)
    (found,) = rows.tables_of(inputs_of(device, [18, 33, 0], [3, 1, -1], [[], [], []]), width)
    used = [3 * width, 3 * width + 1], [width, width + 1, width + 2], []
    assert found.tolist() == [[*blocks, *[500] * (width - len(blocks))] for blocks in used]


@pytest.mark.parametrize("num_padding", [0, 1, TOKENS])
def test_tokens_read_what_stays_on_the_device(device: torch.device, num_padding: int) -> None:
    """Of slot 2 in its second block, of slot 1 one that is known and one that it sampled last; then padding."""
    width = 3
    blocks = torch.arange(4 * width, dtype=torch.int32, device=device).view(4, width)
    known = [[2, 2, 1, 1], [31, 32, 4, 5], [40, 41, 42, -1]]
    inputs = inputs_of(device, [], [], [[*part, *[-1] * num_padding] for part in known])
    found = rows_over(blocks).tokens_of(inputs)
    assert found.token_ids.tolist() == [40, 41, 42, 8, *[0] * num_padding]
    assert found.positions.tolist() == [31, 32, 4, 5, *[0] * num_padding]
    places = [(2 * width + 1) * 16 + 15, (2 * width + 2) * 16, width * 16 + 4, width * 16 + 5]
    assert found.kv_slots.tolist() == [*places, *[501 * 16] * num_padding]


def test_padding_writes_to_the_padding_block_of_each_kind(device: torch.device) -> None:
    """And rows end in the scratch block of each."""
    width = 3
    blocks = torch.arange(2 * 2 * width, dtype=torch.int32, device=device).view(2, 2 * width)
    rows = rows_over(blocks, scratch_window=50)
    inputs = inputs_of(device, [20, 0], [1, -1], [[1, -1], [19, -1], [40, -1]])
    found = rows.tokens_of(inputs)
    assert found.kv_slots.tolist() == [(2 * width + 1) * 16 + 3, 501 * 16]
    assert found.window_slots is not None
    assert found.window_slots.tolist() == [(3 * width + 1) * 16 + 3, 51 * 16]
    assert [table.tolist() for table in rows.tables_of(inputs, width)] == [
        [[first, first + 1, scratch], [scratch] * 3] for first, scratch in ((6, 500), (9, 50))
    ]


@pytest.mark.parametrize("scratch_window", [None, 50])
def test_they_are_torchs(device: torch.device, scratch_window: int | None) -> None:
    """Tables of a random step without padding, as a CPU computes them; and changes, and blocks that are cleared."""
    generator = torch.Generator().manual_seed(1)
    width = 9 if scratch_window is None else 18
    blocks = torch.randint(0, 99, (5, width), generator=generator).to(device, torch.int32)
    tokens = torch.stack([torch.randint(0, most, (70,), generator=generator) for most in (5, 9 * 16, 300)])
    tokens[2, ::3] = -1
    inputs = inputs_of(device, [144, 130, 129], [4, 0, 2], tokens.tolist())
    found = []
    for make in (DeviceRows, RowOperators):
        kept, cache = blocks.clone(), torch.ones(2, 2, 6, 16, 1, 3, device=device)
        rows = rows_over(kept, make, scratch_window=scratch_window)
        rows.change_tables(*torch.tensor([[7, 44], [501, 502]], dtype=torch.int32, device=device))
        rows.clear_blocks(cache, torch.tensor([5, 0], dtype=torch.int32, device=device))
        read = rows.tokens_of(inputs)
        slots = [one for one in (read.kv_slots, read.window_slots) if one is not None]
        parts = (kept, cache, read.token_ids, read.positions, *slots, *rows.tables_of(inputs, 9))
        found.append([part.tolist() for part in parts])
        assert len(parts) == (6 if scratch_window is None else 8)
    assert found[0] == found[1]
