from bench.overlap import QUICK, measure_arrivals, measure_decode


def test_overlapped_decode_takes_the_longer_of_host_and_device() -> None:
    table = measure_decode(QUICK)
    for _, _, apart, overlapped, ratio, busy, busy_overlapped in table.rows:
        assert float(ratio or 0) > 1.2
        assert float(busy_overlapped or 0) > max(float(busy or 0), 0.95)
        assert float(overlapped or 0) > float(apart or 0)


def test_streams_get_their_tokens_sooner_beside_arrivals() -> None:
    apart, overlapped = measure_arrivals(QUICK).rows
    assert float(overlapped[4] or 0) < float(apart[4] or 0)
