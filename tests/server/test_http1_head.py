"""Heads of HTTP/1.1: what is taken, h11 reads alike. Verdicts case by case: test_http1_framing."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fuzz.http1_head import check, read
from fuzz.run import load_inputs
from server.wire.http1 import HeadReader
from server.wire.limits import HeadLimits
from tests.server.framing_cases import Understood, load_cases
from tests.server.framing_mutants import mutants

NUM_MUTANTS = 20_000


def head(*lines: bytes, start: bytes = b"POST /v1 HTTP/1.1", host: bytes | None = b"Host: a") -> bytes:
    return b"\r\n".join([start, *([host] if host else []), *lines, b"", b""])


# What http1_framing_cases.toml does not have
ATTACKS = {
    "endless_length": head(b"Content-Length: 18446744073709551616"),
    "bare_lf_field": b"POST /v1 HTTP/1.1\r\nHost: a\nX-A: 1\r\n\r\n",
    "bare_cr_in_field": head(b"X-A: 1\rTransfer-Encoding: chunked"),
    "control_in_field": head(b"X-A: a\x01b"),
    "delete_in_field": head(b"X-A: a\x7fb"),
    "version_1_10": head(start=b"GET /v1 HTTP/1.10"),
    "space_in_target": head(start=b"GET /v1 x HTTP/1.1"),
    "control_in_target": head(start=b"GET /v\x011 HTTP/1.1"),
    "bytes_in_target": head(start="GET /vä HTTP/1.1".encode()),
    "empty_request_line": b"\r\nGET / HTTP/1.1\r\nHost: a\r\n\r\n",
    "coding_in_http10": head(b"Transfer-Encoding: chunked", start=b"POST / HTTP/1.0"),
    "no_colon": head(b"Transfer-Encoding chunked"),
    "name_with_bytes": head("Ä: x".encode()),
    "no_host": head(host=None),
    "two_hosts_http10": head(b"Host: b", start=b"GET / HTTP/1.0"),
    "host_with_bad_port": head(host=b"Host: a:80x"),
}


@pytest.mark.parametrize("name", ATTACKS)
@pytest.mark.parametrize("step", [None, 1, 7])
def test_attack_on_the_head_is_refused_with_400(name: str, step: int | None) -> None:
    assert read(ATTACKS[name], step or len(ATTACKS[name])) == 400


@pytest.mark.parametrize("space", [b" ", b"\t", b" \t"])
def test_white_space_within_a_value_is_gone_through_once(space: bytes) -> None:
    """In linear time: looked at from each of its bytes, it would take hours."""
    value = b"a" + space * 2**20 + b"b"
    section = b"GET / HTTP/1.1\r\nHost: a\r\nContent-Length:" + space + b"7\r\nX: " + value + b"\r\n\r\n"
    found = HeadReader(HeadLimits(head_bytes=2**22)).read(bytearray(section))
    assert found is not None
    assert found[0].length == 7
    assert found[0].headers[2] == (b"x", value)


def test_every_case_and_mutant_is_read_as_h11_reads_it() -> None:
    """Also what stands behind a head, and however the bytes are split."""
    cases = load_cases()
    sent = [case.sent for case in cases] + list(ATTACKS.values()) + load_inputs("http1")
    sent += [data[data.index(b"\r\n\r\n") + 4 :] for data in sent if b"\r\n\r\n" in data]
    sent += [case.data for case in mutants(cases, NUM_MUTANTS, seed=7, read=lambda data: Understood((), ""))]
    for data in sent:
        check(data)


PIECES = st.sampled_from(
    [b"a", b"A-b", b"Host", b"Content-Length", b" ", b"\t", b":", b": ", b"1", b"\r", b"\n", b"\r\n"]
)


@given(st.lists(st.one_of(PIECES, st.binary(max_size=3)), max_size=20))
def test_any_fields_are_read_as_h11_reads_them(pieces: list[bytes]) -> None:
    check(b"GET / HTTP/1.1\r\nHost: a\r\n" + b"".join(pieces) + b"\r\n\r\n")
    check(b"GET /" + b"".join(pieces) + b" HTTP/1.1\r\nHost: a\r\n\r\n")


def test_limits_are_those_configured() -> None:
    data = b"GET /v1/models HTTP/1.1\r\nHost: 127.0.0.1:8000\r\nAccept: */*\r\n\r\n"
    line, size = data.index(b"\n") + 1, len(data)
    assert isinstance(read(data, size, HeadLimits(line, size, 2)), tuple)
    assert read(data, size, HeadLimits(line - 1, size, 2)) == 414
    assert read(data, size, HeadLimits(line, size - 1, 2)) == read(data, size, HeadLimits(line, size, 1)) == 431
