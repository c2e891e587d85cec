"""Heads: attacks with their exact verdicts, the limits at and one past, and what is read, which h11 reads alike."""

import h11
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fuzz import corpus
from fuzz.http1_head import check, read
from server.wire.http1 import HeadReader
from server.wire.limits import HeadLimits
from tests.server.framing_cases import Understood, load_cases
from tests.server.framing_mutants import mutants

NUM_MUTANTS = 20_000


def length_or_status(data: bytes, step: int | None = None) -> int | str | None:
    """The length of the body, or "chunked", or the status that refuses the head, or None while it is incomplete.

    Args:
        step: bytes per read; None for all at once.
    """
    found = read(data, step or len(data))
    if not isinstance(found, tuple):
        return found
    length = found[0].length
    return "chunked" if length is None else length


def head(*lines: bytes, start: bytes = b"POST /v1 HTTP/1.1", host: bytes | None = b"Host: a") -> bytes:
    return b"\r\n".join([start, *([host] if host else []), *lines, b"", b""])


ATTACKS = {
    "length_and_coding": head(b"Content-Length: 3", b"Transfer-Encoding: chunked"),
    "coding_and_length": head(b"Transfer-Encoding: chunked", b"Content-Length: 3"),
    "zero_length_and_coding": head(b"Transfer-Encoding: chunked", b"Content-Length: 0"),
    "list_of_lengths": head(b"Content-Length: 3, 3"),
    "two_lengths": head(b"Content-Length: 3", b"Content-Length: 4"),
    "two_equal_lengths": head(b"Content-Length: 3", b"content-length: 3"),
    "signed_length": head(b"Content-Length: +3"),
    "negative_length": head(b"Content-Length: -3"),
    "hex_length": head(b"Content-Length: 0x3"),
    "underscored_length": head(b"Content-Length: 1_0"),
    "empty_length": head(b"Content-Length: "),
    "endless_length": head(b"Content-Length: 18446744073709551616"),
    "arabic_digit_length": head("Content-Length: ٣".encode()),
    "obs_fold": head(b"X-A: 1", b" 2"),
    "obs_fold_tab": head(b"X-A: 1", b"\t2"),
    "fold_after_request_line": head(b" Host: a", host=None),
    "folded_coding": head(b"Transfer-Encoding:", b" chunked"),
    "bare_lf_request_line": b"POST /v1 HTTP/1.1\nHost: a\r\n\r\n",
    "bare_lf_field": b"POST /v1 HTTP/1.1\r\nHost: a\nX-A: 1\r\n\r\n",
    "bare_lf_end": b"POST /v1 HTTP/1.1\r\nHost: a\r\n\n",
    "bare_cr_in_field": head(b"X-A: 1\rTransfer-Encoding: chunked"),
    "bare_cr_before_crlf": head(b"X-A: 1\r"),
    "nul_in_field": head(b"X-A: \x00"),
    "control_in_field": head(b"X-A: a\x01b"),
    "delete_in_field": head(b"X-A: a\x7fb"),
    "version_0_9": head(start=b"GET /v1 HTTP/0.9"),
    "version_1_9": head(start=b"GET /v1 HTTP/1.9"),
    "version_2_0": head(start=b"GET /v1 HTTP/2.0"),
    "http2_preface": b"PRI * HTTP/2.0\r\n\r\n",
    "version_1_10": head(start=b"GET /v1 HTTP/1.10"),
    "version_lower_case": head(start=b"GET /v1 http/1.1"),
    "no_version": head(start=b"GET /v1"),
    "two_spaces": head(start=b"GET  /v1 HTTP/1.1"),
    "tab_for_space": head(start=b"GET\t/v1 HTTP/1.1"),
    "space_in_target": head(start=b"GET /v1 x HTTP/1.1"),
    "trailing_space": head(start=b"GET /v1 HTTP/1.1 "),
    "control_in_target": head(start=b"GET /v\x011 HTTP/1.1"),
    "bytes_in_target": head(start="GET /vä HTTP/1.1".encode()),
    "bad_method": head(start=b"G(T /v1 HTTP/1.1"),
    "empty_request_line": b"\r\nGET / HTTP/1.1\r\nHost: a\r\n\r\n",
    "coding_gzip": head(b"Transfer-Encoding: gzip"),
    "coding_gzip_chunked": head(b"Transfer-Encoding: gzip, chunked"),
    "coding_chunked_twice": head(b"Transfer-Encoding: chunked, chunked"),
    "coding_two_lines": head(b"Transfer-Encoding: chunked", b"Transfer-Encoding: identity"),
    "coding_xchunked": head(b"Transfer-Encoding: xchunked"),
    "coding_vertical_tab": head(b"Transfer-Encoding: \x0bchunked"),
    "coding_empty": head(b"Transfer-Encoding: "),
    "coding_in_http10": head(b"Transfer-Encoding: chunked", start=b"POST / HTTP/1.0"),
    "space_before_colon": head(b"Transfer-Encoding : chunked"),
    "no_colon": head(b"Transfer-Encoding chunked"),
    "empty_name": head(b": chunked"),
    "name_with_bytes": head("Ä: x".encode()),
    "no_host": head(host=None),
    "two_hosts": head(b"Host: b"),
    "two_equal_hosts": head(b"host: a"),
    "two_hosts_http10": head(b"Host: b", start=b"GET / HTTP/1.0"),
    "host_with_path": head(host=b"Host: a/b"),
    "host_with_user": head(host=b"Host: u@a"),
    "host_with_space": head(host=b"Host: a b"),
    "host_with_bad_port": head(host=b"Host: a:80x"),
}


@pytest.mark.parametrize("name", ATTACKS)
@pytest.mark.parametrize("step", [None, 1, 7])
def test_attack_on_the_head_is_refused_with_400(name: str, step: int | None) -> None:
    assert length_or_status(ATTACKS[name], step) == 400


GOOD = {
    b"GET / HTTP/1.1\r\nHost: a\r\n\r\n": 0,
    b"GET / HTTP/1.0\r\n\r\n": 0,
    head(b"Content-Length: 3"): 3,
    head(b"Content-Length:\t 3 \t"): 3,
    head(b"Content-Length: 0"): 0,
    head(b"Transfer-Encoding: Chunked"): "chunked",
    head(b"X-A:", b"X-B: \xff\t\x80", b"X-C: a:b"): 0,
    head(host=b"Host: [::1]:8000"): 0,
    head(host=b"Host:"): 0,
}


@pytest.mark.parametrize("data", GOOD)
@pytest.mark.parametrize("step", [None, 1])
def test_good_heads_pass_with_their_framing(data: bytes, step: int | None) -> None:
    assert length_or_status(data, step) == GOOD[data]


def padded_line(size: int) -> bytes:
    """A request line of so many bytes, its CRLF counted."""
    return b"GET /" + b"a" * (size - len(b"GET / HTTP/1.1\r\n")) + b" HTTP/1.1"


def padded_head(size: int) -> bytes:
    fill = size - len(head(b"X-A: ", b"X-B: "))
    return head(b"X-A: " + b"a" * (fill // 2), b"X-B: " + b"b" * (fill - fill // 2))


@pytest.mark.parametrize("step", [None, 1, 4096])
def test_limits_hold_at_and_one_past(step: int | None) -> None:
    assert length_or_status(head(start=padded_line(8192)), step) == 0
    assert length_or_status(head(start=padded_line(8193)), step) == 414
    assert length_or_status(padded_head(16384), step) == 0
    assert length_or_status(padded_head(16385), step) == 431
    assert length_or_status(head(*[b"X: 1"] * 99), step) == 0
    assert length_or_status(head(*[b"X: 1"] * 100), step) == 431


@pytest.mark.parametrize("step", [None, 1, 4096])
def test_heads_without_an_end_are_refused_at_the_limit(step: int | None) -> None:
    assert length_or_status(b"G" * 8192, step) is None
    assert length_or_status(b"G" * 8193, step) == 414
    endless = b"GET / HTTP/1.1\r\nX: "
    assert length_or_status(endless + b"a" * (16384 - len(endless)), step) is None
    assert length_or_status(endless + b"a" * (16385 - len(endless)), step) == 431


def test_h11_would_have_let_these_pass() -> None:
    """Why the gate stands: should h11 become strict here, it can shrink."""
    lenient = ["length_and_coding", "list_of_lengths", "obs_fold", "bare_lf_field", "coding_in_http10", "version_1_9"]
    for name in lenient:
        parser = h11.Connection(h11.SERVER)
        parser.receive_data(ATTACKS[name])
        assert type(parser.next_event()) is h11.Request, name


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
    sent = [case.sent for case in cases] + list(ATTACKS.values()) + corpus.load("http1")
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
