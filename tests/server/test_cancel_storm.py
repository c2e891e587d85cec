"""Random histories of clients that leave; `make storm` runs a million of them."""

from tests.server.cancel_storm import CANCELS_PER_ROUND, CancelStorm

WAYS = {
    "RST_STREAM",
    "DELETE",
    "end of connection",
    "TCP reset",
    "GOAWAY",
    "stop string",
    "stall",
    "all at the end",
}


def test_two_thousand_cancels_of_every_kind_leave_nothing() -> None:
    storm = CancelStorm(seed=1)
    storm.run_round()
    storm.run_round()
    assert storm.num_called_off >= 2 * CANCELS_PER_ROUND
    assert {way for way, count in storm.called_off.items() if count} == WAYS
    assert storm.num_pauses
    assert storm.server.stats.num_preemptions
    storm.server.close()
