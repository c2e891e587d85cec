"""A short run of bench/idle.py: what it counts is counted right, on both transports."""

from pathlib import Path

import pytest

from bench.idle import NUM_FURTHER, NUM_REFUSED, make_certificate, measure, raise_descriptor_limit, tables_of
from bench.load_run import CannotRun
from tests.certificates import needs_openssl

HTTP1, HTTP2 = 20, 10


@pytest.mark.slow
@needs_openssl
def test_held_connections_let_others_in_up_to_the_cap_and_none_past_it(tmp_path: Path) -> None:
    flags, tls = make_certificate(tmp_path)
    runs = [measure("HTTP/1.1", HTTP1, [], None), measure("TLS, HTTP/2", HTTP2, flags, tls)]
    for run in runs:
        assert run.num_refused == run.num_counted == NUM_REFUSED
        assert run.further_ms.count == run.further_alone_ms.count == NUM_FURTHER
    assert [len(table.rows) for table in tables_of(runs)] == [2, 6, 2]


def test_more_connections_than_files_may_be_open_is_told_before_anything_starts() -> None:
    with pytest.raises(CannotRun, match="open files are needed"):
        raise_descriptor_limit(2**40)
