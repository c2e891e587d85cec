"""bench.lora on a model of two layers: its table has every kind of step, and adapters are loaded."""

import time
from pathlib import Path

import pytest

from bench import lora
from bench.results import read_result
from tests.oracle import save_random_model


def test_tables_have_every_kind_of_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "perf_counter", time.perf_counter)  # --cpu-time replaces it
    model, out = save_random_model("llama2", tmp_path / "model"), tmp_path / "lora.json"
    assert lora.main(["--model", str(model), "--quick", "--threads", "1", "--cpu-time", "--json", str(out)]) == 0
    steps, loads = read_result(out).tables
    assert [row[0] for row in steps.rows] == [*["none of 2 loaded"] * 2, *["one"] * 2, *["2 mixed"] * 2]
    assert dict(zip(loads.columns, loads.rows[0], strict=True))["rank"] == 4
