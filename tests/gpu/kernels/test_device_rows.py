"""Rows by token and by slot: exact, in any format, for every width."""

import pytest
import torch

from gpu.kernels.device_rows import SpareBlocks, embed_rows, empty_rows, fill_rows, scatter_rows
from tests.gpu.kernels.ahead import Case, Compiled, assert_fits, compile_ahead, pointer

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


@pytest.mark.parametrize("width", [3, 1100])
def test_decoding_rows_are_filled_in_from_what_stays_on_the_device(device: torch.device, width: int) -> None:
    """The second row's token is the one that its slot drew last; the third is padding."""
    tables = torch.arange(4 * width, dtype=torch.int32, device=device).view(4, width)
    last_tokens = torch.tensor([7, 8, 9, 10], device=device)
    step = torch.tensor([[3, 1, -1, 5], [17, 32, -1, 5], [40, -1, -1, 5]], dtype=torch.int32, device=device)
    rows = empty_rows(4, width, torch.full((2, 4), -7, device=device))
    rows.tables.fill_(-7)
    rows.ends.fill_(-7)
    fill_rows(rows.first(3), step[:, :3], tables, last_tokens, SpareBlocks(scratch=500, padding=501))
    assert rows.token_ids[:3].tolist() == [40, 8, 0]
    assert rows.positions[:3].tolist() == [17.0, 32.0, 0.0]
    assert rows.kv_slots[:3].tolist() == [(3 * width + 1) * 16 + 1, (width + 2) * 16, 501 * 16]
    assert rows.ends.tolist() == [18, 33, 0, -7]
    assert rows.drawn[0].tolist() == [3, 1, -1, -7]
    assert rows.drawn[1, :2].tolist() == [18, 33]
    used = [3 * width, 3 * width + 1], [width, width + 1, width + 2], []
    assert rows.tables[:3].tolist() == [[*blocks, *[500] * (width - len(blocks))] for blocks in used]
    assert (rows.tables[3] == -7).all()


def ahead_cases() -> list[Case]:
    module, cases = "gpu.kernels.request_rows", []
    for dtype in (torch.bfloat16, torch.float32, torch.int64):
        rows = {"table": pointer(dtype), "out": pointer(dtype), "rows": pointer(dtype), "slots": "*i64", "width": "i32"}
        ids = {"token_ids": "*i64"}
        cases.append(Case(f"{module}:embed", rows | ids, {"BLOCK": 1024}, multiples_of_16=("width",)))
        cases.append(Case(f"{module}:scatter", rows, {"BLOCK": 1024}))
    ints = ("step", "tables", "ends", "row_tables")
    longs = ("last_tokens", "token_ids", "kv_slots", "drawn_slots", "drawn_positions")
    types = dict.fromkeys(ints, "*i32") | dict.fromkeys(longs, "*i64") | {"positions": "*fp32"}
    types |= dict.fromkeys(("step_stride", "width", "scratch_block", "padding_block"), "i32")
    cases.append(Case(f"{module}:lay_out_rows", types, {"BLOCK_TOKENS": 16, "BLOCK": 1024}))
    return cases


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Compiled]:
    return {str(found.case): found for found in compile_ahead(ahead_cases(), tmp_path_factory.mktemp("ahead"))}


@pytest.mark.parametrize("case", ahead_cases(), ids=str)
def test_they_compile_for_a_device(case: Case, compiled: dict[str, Compiled]) -> None:
    assert_fits(compiled[str(case)])
