"""Rows by token and by slot: exact, in any format, for every width."""

import pytest
import torch

from gpu.kernels.device_rows import LastTokens, embed_rows, gather_rows, scatter_rows
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


@pytest.mark.parametrize("id_format", [torch.int32, torch.int64])
def test_a_pending_token_is_what_its_slot_drew_last(device: torch.device, id_format: torch.dtype) -> None:
    table = numbers(device, torch.float32, 30, 48)
    ids = torch.tensor([4, -1, 7, -1], device=device, dtype=id_format)
    slots = torch.tensor([2, 0, 0, 5], device=device, dtype=torch.int32)
    drawn = torch.tensor([11, 12, 13, 14, 15, 16], device=device, dtype=id_format)
    assert torch.equal(embed_rows(table, ids, LastTokens(slots, drawn)), table[[4, 11, 7, 16]])


@pytest.mark.parametrize("width", [(), *((width,) for width in WIDTHS), (2, 3)])
@pytest.mark.parametrize("dtype", FORMATS, ids=str)
def test_rows_are_gathered_and_scattered_by_slot(
    device: torch.device, dtype: torch.dtype, width: tuple[int, ...]
) -> None:
    table, rows = numbers(device, dtype, 9, *width), numbers(device, dtype, 4, *width)
    slots = torch.tensor([8, -1, 0, 3], device=device)
    want = table.clone()
    want[slots[[0, 2, 3]]] = rows[[0, 2, 3]]
    scatter_rows(table, slots, rows)
    assert torch.equal(table, want)
    assert torch.equal(gather_rows(table, slots[[2, 0]]), want[[0, 8]])


def ahead_cases() -> list[Case]:
    module, cases = "gpu.kernels.request_rows", []
    for dtype in (torch.bfloat16, torch.float32, torch.int64):
        rows = {"table": pointer(dtype), "out": pointer(dtype), "rows": pointer(dtype), "slots": "*i64", "width": "i32"}
        ids = {"token_ids": "*i64", "last_tokens": "*i64"}
        for has_last in (False, True):
            constants = {"HAS_LAST": has_last, "BLOCK": 1024}
            cases.append(Case(f"{module}:embed", rows | ids, constants, multiples_of_16=("width",)))
        for name in ("gather", "scatter"):
            cases.append(Case(f"{module}:{name}", rows, {"BLOCK": 1024}))
    return cases


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Compiled]:
    return {str(found.case): found for found in compile_ahead(ahead_cases(), tmp_path_factory.mktemp("ahead"))}


@pytest.mark.parametrize("case", ahead_cases(), ids=str)
def test_they_compile_for_a_device(case: Case, compiled: dict[str, Compiled]) -> None:
    assert_fits(compiled[str(case)])
