"""bench.fairness and bench.scheduler on few requests: what their tables say."""

from pathlib import Path

import pytest

from bench import fairness, scheduler
from bench.results import read_result


def test_fairness_compares_the_same_light_requests_with_and_without_the_flood(tmp_path: Path) -> None:
    out = tmp_path / "fairness.json"
    assert fairness.main(["--quick", "--parts", "flood", "gap", "--json", str(out)]) == 0
    flood, gap = read_result(out).tables
    (_, num_without, *_), (_, num_with, *_) = flood.rows
    assert num_without == num_with == len(fairness.QUICK.light_requests())
    ((num_steps, furthest_s, bound_s),) = gap.rows
    assert isinstance(num_steps, int)
    assert isinstance(furthest_s, float)
    assert isinstance(bound_s, float)
    assert num_steps > 0
    assert 0 < furthest_s < bound_s


@pytest.mark.slow
def test_over_sockets_the_same_light_requests_are_sent_with_and_without_the_flood(tmp_path: Path) -> None:
    """How many of the flood's are done in the time is the machine's."""
    out = tmp_path / "fairness.json"
    assert fairness.main(["--quick", "--parts", "wall", "--json", str(out)]) == 0
    (wall,) = read_result(out).tables
    assert [row[:2] for row in wall.rows] == [("without", wall.rows[0][1]), ("with", wall.rows[0][1])]
    assert wall.rows[0][2] == 0


def test_scheduler_measures_by_sequences_by_prompt_and_by_queue(tmp_path: Path) -> None:
    out = tmp_path / "scheduler.json"
    assert scheduler.main(["--quick", "--json", str(out)]) == 0
    sizes = [[row[0] for row in table.rows] for table in read_result(out).tables]
    assert sizes == [[2, 4], [2, 4], [32], [1, 3], [1, 3]]
