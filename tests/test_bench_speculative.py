"""bench.speculative on a model of two layers: answers stay as they are, and what repeats is drafted."""

from pathlib import Path

import pytest

from bench import speculative
from bench.results import read_result
from core.step_cost import StepCostModel
from tests.oracle import save_random_model


def test_tables_tell_what_was_drafted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StepCostModel, "own_s", lambda *_: 0.0)  # any draft pays, whatever else the machine does
    model, out = save_random_model("llama2", tmp_path / "model"), tmp_path / "speculative.json"
    flags = ["--quick", "--threads", "1", "--tokens", "48", "--texts", "copying", "noise", "--parts", "pairs", "cost"]
    flags += ["--minutes", "0"]
    assert speculative.main(["--model", str(model), *flags, "--json", str(out)]) == 0
    pairs, cost = read_result(out).tables
    assert [row[:2] for row in pairs.rows] == [(1, "copying"), (1, "noise")]
    copied, of_noise = (dict(zip(pairs.columns, row, strict=True)) for row in pairs.rows)
    assert int(str(copied["drafted"])) >= int(str(copied["accepted"])) > 0
    assert of_noise["accepted"] == 0
    (row,) = (dict(zip(cost.columns, row, strict=True)) for row in cost.rows)
    assert (row["streams"], row["pairs"]) == (1, 1)
