from server.observing.metrics import TICK_S, Histogram, LoopLag
from tests.server.virtual_loop import VirtualTimeLoop


def test_lateness_of_each_tick_is_noted_until_it_is_closed() -> None:
    loop, lags = VirtualTimeLoop(), Histogram((0.01, 1.0))
    times_s = iter((0.0, TICK_S + 0.5, TICK_S + 0.5))  # the first tick comes half a second late
    lag = LoopLag(loop, lambda: next(times_s), lags)
    lag.start()
    loop.advance(TICK_S)
    assert (lags.counts, lags.total) == ([0, 1, 0], 0.5)
    lag.close()
    assert loop.next_timer() is None
    loop.close()
