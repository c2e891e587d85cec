"""bench.prefix on a model of two layers: its figures are of what they say; times do not matter here."""

from pathlib import Path

from bench import prefix
from bench.results import read_result
from tests.oracle import save_random_model


def test_tables_tell_what_was_cached(tmp_path: Path) -> None:
    model, out = save_random_model("llama2", tmp_path / "model"), tmp_path / "prefix.json"
    assert prefix.main(["--model", str(model), "--quick", "--threads", "1", "--json", str(out)]) == 0
    ttft, restart, count = read_result(out).tables
    assert [row[1] for row in ttft.rows] == [0, int(128 * prefix.CACHED_SHARE) // 16 * 16]
    assert [row[:2] for row in restart.rows] == [("cold", 0), ("from host memory", 112), ("after a restart", 112)]
    assert [row[0] for row in count.rows][:2] == ["for the first time", "again"]
