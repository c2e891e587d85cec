"""Torch's FlashAttention behind the protocol, and who is chosen; on a CPU SDPA stands in for it."""

import inspect
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from gpu.attention import RaggedRows
from gpu.device_attention import FLASH, KERNELS, LEAST_GAIN, Attends, DeviceAttention, attention_here
from gpu.kv_cache import LayerKV
from gpu.scores import PLAIN, Scores
from gpu.varlen_attention import MAX_GATHERED_TOKENS, VarlenAttention, find_varlen

CPU = torch.device("cpu")
ENDS, LENGTHS = [17, 40, 33, 5], [1, 1, 20, 5]


def varlen(
    query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor | None, **options: Any
) -> Tensor:
    """varlen_attn's meaning: rows end where their queries do."""
    pool, out = (key, value), []
    for row, used in enumerate(options["seqused_k"].tolist()):
        tokens = slice(int(cu_seq_q[row]), int(cu_seq_q[row + 1]))
        if cu_seq_k is None:
            context = [both[options["block_table"][row]].flatten(0, 1)[:used] for both in pool]
        else:
            context = [both[int(cu_seq_k[row]) : int(cu_seq_k[row]) + used] for both in pool]
        num_new = tokens.stop - tokens.start
        assert num_new <= options["max_q"]
        assert used <= options["max_k"]
        positions = torch.arange(used - num_new, used)[:, None]
        left, right = options["window_size"]
        seen = torch.arange(used)[None] <= positions + right
        if left >= 0:
            seen &= torch.arange(used)[None] >= positions - left
        own, keys, values = (each.transpose(0, 1).float() for each in (query[tokens], *context))
        found = F.scaled_dot_product_attention(
            own, keys, values, seen, scale=options["scale"], enable_gqa=options["enable_gqa"]
        )
        out.append(found.transpose(0, 1))
    return torch.cat(out).to(query.dtype)


def make_step(window: int | None = None) -> tuple[Tensor, LayerKV, RaggedRows]:
    generator = torch.Generator().manual_seed(1)
    both = torch.randn(2, 13, 16, 2, 16, generator=generator).half()
    tables = torch.tensor([[3, 7, 12], [1, 0, 9], [5, 2, 8], [4, 12, 12]], dtype=torch.int32)
    offsets = torch.tensor([0, *LENGTHS], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    rows = RaggedRows(tables, torch.tensor(ENDS, dtype=torch.int32), offsets, 2, window)
    query = torch.randn(sum(LENGTHS), 6, 16, generator=generator).half()
    return query, LayerKV(both, both[0].flatten(0, 1), both[1].flatten(0, 1)), rows


def textbook(query: Tensor, kv: LayerKV, rows: RaggedRows) -> Tensor:
    out = []
    for row, (end, length) in enumerate(zip(ENDS, LENGTHS, strict=True)):
        keys, values = kv.both[:, rows.tables[row]].flatten(1, 2).float().repeat_interleave(3, 2)
        for place in range(length):
            position = end - length + place
            seen = slice(0 if rows.window is None else max(0, position + 1 - rows.window), position + 1)
            vectors = query[int(rows.offsets[row]) + place].float()
            shares = (torch.einsum("hd,chd->hc", vectors, keys[seen]) / 4).softmax(1)
            out.append(torch.einsum("hc,chd->hd", shares, values[seen]).flatten())
    return torch.stack(out)


@pytest.mark.parametrize("window", [None, 1, 9])
@pytest.mark.parametrize("reads_tables", [False, True])
def test_rows_are_told_as_varlen_attention_takes_them(window: int | None, reads_tables: bool) -> None:
    query, kv, rows = make_step(window)
    got = VarlenAttention(varlen, reads_tables).attend(query, kv, rows, PLAIN)
    assert torch.allclose(got.float(), textbook(query, kv, rows), atol=2e-3, rtol=2e-3)


def test_torchs_takes_what_it_is_told() -> None:
    found = find_varlen()
    if found is None:
        pytest.skip("needs a torch whose varlen_attn has block tables: 2.12 or newer")
    told: list[dict[str, Any]] = []

    def bind(*args: Any, **options: Any) -> Tensor:
        told.append(inspect.signature(found).bind(*args, **options).arguments)
        return varlen(*args, **options)

    for reads_tables in (False, True):
        VarlenAttention(bind, reads_tables).attend(*make_step(), PLAIN)
    assert len(told) == 2


def test_what_it_does_not_know_is_the_kernels() -> None:
    query, _, rows = make_step()
    gathering, reading = (VarlenAttention(varlen, reads_tables) for reads_tables in (False, True))
    assert gathering.can_attend(query, rows, PLAIN)
    assert not gathering.can_attend(query, rows, Scores(cap=3.0))
    assert not gathering.can_attend(query, rows, Scores(sinks=torch.zeros(6)))
    assert not gathering.can_attend(query.float(), rows, PLAIN)
    assert not gathering.can_attend(query.new_zeros(1, 6, 12), rows, PLAIN)
    rows.tables = torch.zeros(MAX_GATHERED_TOKENS // 16 + 1, 1, dtype=torch.int32)
    assert not gathering.can_attend(query, rows, PLAIN)
    assert reading.can_attend(query, rows, PLAIN)


class Kernels:
    """Answers with ones, and counts."""

    index_dtype = torch.int32
    are_own_tokens_alone = False
    prompt_tile = 64

    def __init__(self) -> None:
        self.num_steps = 0

    def attend(self, query: Tensor, kv: LayerKV, rows: RaggedRows, scores: Scores) -> Tensor:
        self.num_steps += 1
        return torch.ones_like(query).flatten(1)


class Clock:
    """Prices in turn, the kernels' first; does the work once."""

    def __init__(self, *prices: float) -> None:
        self.prices = list(prices)

    def __call__(self, work: Any) -> float:
        work()
        return self.prices.pop(0)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "steploop" / "attention.json"


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shapes to measure, the last of which the cache has no room for."""
    monkeypatch.setattr("gpu.device_attention.MEASURED_DECODES", ((1, 32, 1), (2, 16, 1), (8, 16, 1)))
    monkeypatch.setattr("gpu.device_attention.MEASURED_EXTENDS", ((1, 32, 32), (1, 48, 16), (4, 32, 16)))


def small_kv() -> LayerKV:
    both = torch.zeros(2, 3, 16, 1, 8, dtype=torch.float16)
    return LayerKV(both, both[0].flatten(0, 1), both[1].flatten(0, 1))


def choose(*prices: float) -> tuple[DeviceAttention, Clock]:
    clock = Clock(*prices)
    chosen = DeviceAttention(Kernels(), VarlenAttention(varlen, True), clock)
    chosen.choose(small_kv(), 2)
    return chosen, clock


def test_torchs_serves_where_it_is_faster_by_enough() -> None:
    """On the geometric mean: of two decodes, then of two prompts."""
    chosen, clock = choose(LEAST_GAIN * 0.99, 1.0, LEAST_GAIN, 1.0, 3.0, 1.0, 1.0, 1.0)
    assert clock.prices == []
    assert chosen.attends == Attends(decodes=KERNELS, extends=FLASH)
    assert str(chosen.attends) == "decodes by Triton's kernel, prompts by torch's FlashAttention"
    query, kv, rows = make_step()
    assert torch.allclose(chosen.attend(query, kv, rows, PLAIN).float(), textbook(query, kv, rows), atol=2e-3)
    assert chosen.attend(query, kv, rows, Scores(cap=2.0)).eq(1).all()
    decodes = RaggedRows(rows.tables[:2], rows.ends[:2], rows.offsets[:3], 2, None)
    assert chosen.attend(query[:2], kv, decodes, PLAIN).eq(1).all()


def test_a_choice_is_kept_and_not_measured_again(cache: Path) -> None:
    first, _ = choose(*[2.0, 1.0] * 2, *[1.0, 2.0] * 2)
    assert first.attends == Attends(FLASH, KERNELS)
    again, _ = choose()
    assert again.attends == first.attends
    assert attention_here(CPU) == {"2 / 1 heads of 8, float16": first.attends}
    cache.write_text(json.dumps({"it": {"is": {"decodes": FLASH, "extends": "another"}}}))
    assert attention_here(CPU) == {}


def test_without_torchs_nothing_is_measured() -> None:
    chosen = DeviceAttention(Kernels(), None, Clock())
    assert chosen.choose(small_kv(), 2) == Attends()


@pytest.mark.parametrize("error", [RuntimeError, torch.AcceleratorError, NotImplementedError])
def test_where_torchs_fails_the_kernels_serve(error: type[Exception], caplog: pytest.LogCaptureFixture) -> None:
    def refuse(*args: Any, **options: Any) -> Tensor:
        raise error("FlashAttention only supports Ampere GPUs or newer.")

    chosen = DeviceAttention(Kernels(), VarlenAttention(refuse, True), Clock(1.0, 1.0, 1.0, 1.0))
    assert chosen.choose(small_kv(), 2) == Attends()
    told = "torch's FlashAttention does not serve here"
    assert [record.getMessage()[: len(told)] for record in caplog.records] == [told] * 2


def test_where_the_kernels_fail_torchs_serves_what_it_knows() -> None:
    class Failing(Kernels):
        def attend(self, *args: Any) -> Tensor:
            raise RuntimeError("out of resource: shared memory")

    chosen = DeviceAttention(Failing(), VarlenAttention(varlen, True), Clock(*[1.0] * 8))
    assert chosen.choose(small_kv(), 2) == Attends(FLASH, FLASH)
