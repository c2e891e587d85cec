"""bench.prefix on a model of two layers: the figures are of what they say, the times are nobody's concern here."""

from pathlib import Path

from bench import prefix
from bench.results import read_result
from tests.oracle import save_random_model


def test_tables_tell_what_was_computed_and_what_was_cached(tmp_path: Path) -> None:
    model = save_random_model("llama2", tmp_path / "model")
    out = tmp_path / "prefix.json"
    assert prefix.main(["--model", str(model), "--quick", "--threads", "1", "--json", str(out)]) == 0
    no_hits, ttft, chats, restart = read_result(out).tables
    assert [row[0] for row in no_hits.rows] == [1, "median"]
    num_common = int(prefix.QUICK.long_prompt * prefix.QUICK.cached_share)
    assert [row[1] for row in ttft.rows] == [0, num_common // 16 * 16]
    (_, computed_without, cached_without, *_), (_, computed_with, cached_with, *_) = chats.rows
    assert cached_without == 0
    assert isinstance(computed_with, int)
    assert isinstance(cached_with, int)
    assert cached_with > 0
    assert computed_with + cached_with == computed_without
    most = (prefix.QUICK.long_prompt - 1) // 16 * 16
    assert [row[:2] for row in restart.rows] == [("cold", 0), ("from host memory", most), ("after a restart", most)]


def test_a_part_can_be_measured_alone(tmp_path: Path) -> None:
    model = save_random_model("llama2", tmp_path / "model")
    out = tmp_path / "prefix.json"
    assert prefix.main(["--model", str(model), "--quick", "--parts", "ttft", "--json", str(out)]) == 0
    assert len(read_result(out).tables) == 1
