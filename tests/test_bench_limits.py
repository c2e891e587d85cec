"""Ceilings, the arithmetic of shares, the engine bench over a tiny model, and its tables."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from bench.engine import Cases, DecodeRun, ReadProbe, Streams, main, speed_tables
from bench.limits import (
    Limits,
    ModelWork,
    Probe,
    Speed,
    count_work,
    decode_limit_s,
    limit_tables,
    prefill_limit_s,
    serving_limit_tokens_per_s,
    work_of,
)
from bench.make_model import MOE_1B, QWEN2_05B, make_model, num_parameters, tensor_shapes
from bench.results import read_result
from core.config import EngineConfig
from core.config_json import parse_model_config
from gpu.device import num_physical_cores
from gpu.loading import load_runner
from tests.packed_files import save_pair
from tests.test_bench_models import TINY

PROBES = (
    Probe(1, "read", "sum", 10e9),
    Probe(1, "read", "dot", 12e9),
    Probe(1, "product", "plain", 300e9),
    Probe(2, "read", "sum", 20e9),
    Probe(2, "read", "dot", 15e9),
    Probe(2, "product", "plain", 200e9),
)
LIMITS = Limits("bfloat16", PROBES)
DENSE = ModelWork(body=900, head=100, experts=0, num_experts=0, num_used_experts=0, query_width=10, kv_width=4)
CASES = Cases(prompts=(20,), batches=(1, 3), contexts=(17, 40), num_steps=3, num_repeats=1, max_tokens=60)


@pytest.fixture
def tiny_directory(tmp_path: Path) -> Path:
    make_model({**QWEN2_05B, **TINY}, tmp_path / "tiny")
    return tmp_path / "tiny"


@pytest.fixture(autouse=True)
def _threads_kept() -> Any:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def work_of_preset(config: dict[str, Any]) -> ModelWork:
    return count_work(config, dict(tensor_shapes(config)))


def test_a_ceiling_is_the_best_form_of_its_threads_and_the_limit_the_best_ceiling() -> None:
    best = [LIMITS.best("read", num_threads) for num_threads in LIMITS.threads]
    assert [(probe.form, probe.per_s) for probe in best] == [("dot", 12e9), ("sum", 20e9)]
    assert LIMITS.speed == Speed(20e9, 300e9)
    ceilings, forms = limit_tables(LIMITS)
    assert ceilings.rows[0] == (1, 12.0, "dot", 300.0, "plain")
    assert forms.rows[-1] == ("plain", 2, 200.0, "GFLOP/s")


def test_a_tied_model_reads_all_its_matrices_once() -> None:
    work = work_of_preset(QWEN2_05B)
    vectors = 24 * (2 * 896 + 896 + 2 * 128) + 896
    assert work.bytes_read(1, 1) == work.bytes_read(32, 1) == num_parameters(QWEN2_05B) - vectors
    assert work.bytes_read(1, 2, 0.5) == 0.5 * work.body + 2 * work.head
    assert work.kv_width == 24 * 2 * 2 * 64
    assert work.query_width == 24 * 896


def test_an_untied_model_does_not_read_its_embedding() -> None:
    tied, untied = (work_of_preset({**QWEN2_05B, "tie_word_embeddings": is_tied}) for is_tied in (True, False))
    assert tied == untied


def test_more_tokens_touch_more_experts_but_each_computes_its_own() -> None:
    work = work_of_preset(MOE_1B)
    dense = work.body + work.head
    assert work.bytes_read(1, 1) == dense + work.experts * 4 / 32
    assert work.bytes_read(2, 1) == pytest.approx(dense + work.experts * (1 - (28 / 32) ** 2))
    assert work.bytes_read(10_000, 1) == pytest.approx(dense + work.experts)
    assert work.flops(2, 0, 2) == 2 * work.flops(1, 0, 1) == 4 * (dense + work.experts / 8)


def test_steps_are_limited_by_reading_or_by_computing_whichever_takes_longer() -> None:
    # 1000 weights and 5 * 50 * 4 numbers of keys and values, 2 bytes each; 5 rows compute 2 * 1000 and 4 * 10 * 50 each
    assert decode_limit_s(DENSE, Speed(1000.0, 1e9), 5, 50, 2) == (1000 + 1000) * 2 / 1000
    assert decode_limit_s(DENSE, Speed(1e9, 1000.0), 5, 50, 2) == 5 * (2000 + 2000) / 1000
    # a prompt computes the head once and half of all pairs
    assert prefill_limit_s(DENSE, Speed(1e9, 1.0), 3, 2) == 2 * (900 * 3 + 100) + 4 * 10 * (1 + 2 + 3)
    assert prefill_limit_s(DENSE, Speed(1.0, 1e9), 3, 2) == 1000 * 2
    # serving: all prompts, and then all steps
    speed = Speed(1000.0, 1000.0)
    seconds = 4 * prefill_limit_s(DENSE, speed, 10, 2) + 7 * decode_limit_s(DENSE, speed, 4, 14, 2)
    assert serving_limit_tokens_per_s(DENSE, speed, 4, 10, 8, 2) == 4 * 8 / seconds


def test_cases_leave_out_what_would_not_fit_and_have_room_for_the_rest() -> None:
    assert CASES.decodes == [(1, 17), (1, 40), (3, 17)]
    assert CASES.max_model_len > 40 + CASES.num_steps
    assert CASES.num_kv_tokens >= 3 * (17 + CASES.num_steps)


@pytest.mark.parametrize("overlap", ["off", "on"])
def test_a_stepped_engine_decodes_all_rows_in_each_step_it_times(tiny_directory: Path, overlap: str) -> None:
    """Also where their prompts take several steps, and two steps are in flight."""
    config = parse_model_config(msgspec.json.decode((tiny_directory / "config.json").read_bytes()))
    sizes = {"max_model_len": 64, "max_sequences": 4, "max_batch_tokens": 20, "overlap": overlap}
    engine = EngineConfig(device="cpu", dtype="float32", threads=1, **sizes)  # type: ignore[arg-type]
    runner = load_runner(tiny_directory, config, engine, lambda done, total: None)
    assert runner.limits.max_in_flight == (2 if overlap == "on" else 1)
    streams = Streams(runner)
    assert streams.prefill_s(20) > 0
    runs = [streams.decode_s(num_rows, context, 3) for num_rows, context in ((1, 17), (1, 40), (4, 12))]
    assert [context for _, context in runs] == [21, 44, 16]
    assert all(step_s > 0 for step_s, _ in runs)


def test_shares_are_of_the_limits_given() -> None:
    decodes = [DecodeRun(5, 50, 8.0, 1000.0), DecodeRun(5, 50, 8.0, 500.0)]
    prefill, decode = speed_tables({3: 4.0}, decodes, DENSE, Speed(1000.0, 1e9), number_bytes=2)
    assert prefill.rows == ((3, 0.75, 1.5, 0.5),)
    assert decode.rows == ((5, 50, 8000.0, 1e-6, 0.625, 1.25, 0.5), (5, 50, 8000.0, 5e-7, 0.625, 0.625, 1.0))


def test_a_probe_reads_with_all_cores() -> None:
    assert ReadProbe().bytes_per_s() > 0
    assert torch.get_num_threads() == num_physical_cores()


def test_the_work_of_packed_matrices_is_that_of_their_floats(tmp_path: Path, tiny_directory: Path) -> None:
    assert work_of(tiny_directory) == work_of_preset({**QWEN2_05B, **TINY})
    packed, floats = save_pair(tmp_path, {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False})
    assert work_of(packed) == work_of(floats)


def test_a_directory_without_a_model_is_a_cause_and_a_fix(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--model", str(tmp_path), "--quick"]) == 2
    assert "Fix: name a Hugging Face model directory, or a .gguf file" in capsys.readouterr().err


@pytest.mark.slow
def test_the_engine_bench_measures_and_writes(tiny_directory: Path, tmp_path: Path) -> None:
    path = tmp_path / "engine.json"
    assert main(["--model", str(tiny_directory), "--quick", "--json", str(path)]) == 0
    result = read_result(path)
    assert [table.title for table in result.tables][:4] == [
        "Prefill of one prompt",
        "Decode",
        "Step cost, predicted against measured",
        "Memory, MiB",
    ]
    assert {probe["kind"] for probe in result.details["limits"]["probes"]} == {"read", "product"}
