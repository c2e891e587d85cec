"""The bench of overload in a few simulated seconds: everybody is answered, and the same seed gives the same."""

from bench.overload import Arrivals, run_load
from core.simulation import CostModel

ARRIVALS = Arrivals(duration_s=8.0)


def outcomes(requests_per_s: float, admits_all: bool) -> list[tuple[int, float | None, float | None]]:
    clients = run_load(ARRIVALS, CostModel(), ARRIVALS.times_s(requests_per_s), admits_all)
    return [(client.status, client.first_text_s, client.end_s) for client in clients]


def test_rush_is_served_or_refused_and_never_left_without_an_answer() -> None:
    found = outcomes(9.0, admits_all=False)
    assert all(end_s is not None for _, _, end_s in found)
    assert {status for status, _, _ in found} <= {200, 503, 504}
    assert {200, 503} <= {status for status, _, _ in found}
    assert found == outcomes(9.0, admits_all=False)


def test_without_admission_everybody_is_served_at_last() -> None:
    found = outcomes(9.0, admits_all=True)
    assert {status for status, _, _ in found} == {200}
    assert all(first_s is not None for _, first_s, _ in found)
