"""Attacks on the head, each with its exact verdict, and the limits at and one past."""

import h11
import pytest

from server.wire.http1 import Framing, LineScanner, check_head
from server.wire.limits import HeadLimits
from server.wire.messages import HeadRefused

LIMITS = HeadLimits()


def judge(data: bytes, step: int | None = None) -> tuple[Framing, int] | int | None:
    """The framing of the head that `data` starts with, the status that refuses it, or None while it is incomplete.

    Args:
        step: bytes per read; None for all at once.
    """
    scanner = LineScanner(LIMITS)
    buffer = bytearray()
    step = step or len(data)
    try:
        for start in range(0, len(data), step):
            buffer += data[start : start + step]
            end = scanner.scan(buffer)
            if end is not None:
                return check_head(bytes(buffer[:end]))
    except HeadRefused as refusal:
        return refusal.status
    return None


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
    assert judge(ATTACKS[name], step) == 400


GOOD = {
    b"GET / HTTP/1.1\r\nHost: a\r\n\r\n": (Framing.NONE, 0),
    b"GET / HTTP/1.0\r\n\r\n": (Framing.NONE, 0),
    head(b"Content-Length: 3"): (Framing.COUNTED, 3),
    head(b"Content-Length:\t 3 \t"): (Framing.COUNTED, 3),
    head(b"Content-Length: 0"): (Framing.NONE, 0),
    head(b"Transfer-Encoding: Chunked"): (Framing.CHUNKED, 0),
    head(b"X-A:", b"X-B: \xff\t\x80", b"X-C: a:b"): (Framing.NONE, 0),
    head(host=b"Host: [::1]:8000"): (Framing.NONE, 0),
    head(host=b"Host:"): (Framing.NONE, 0),
}


@pytest.mark.parametrize("data", GOOD)
@pytest.mark.parametrize("step", [None, 1])
def test_good_heads_pass_with_their_framing(data: bytes, step: int | None) -> None:
    assert judge(data, step) == GOOD[data]


def padded_line(size: int) -> bytes:
    """A request line of so many bytes, its CRLF counted."""
    return b"GET /" + b"a" * (size - len(b"GET / HTTP/1.1\r\n")) + b" HTTP/1.1"


def padded_head(size: int) -> bytes:
    fill = size - len(head(b"X-A: ", b"X-B: "))
    return head(b"X-A: " + b"a" * (fill // 2), b"X-B: " + b"b" * (fill - fill // 2))


@pytest.mark.parametrize("step", [None, 1, 4096])
def test_limits_hold_at_and_one_past(step: int | None) -> None:
    assert judge(head(start=padded_line(8192)), step) == (Framing.NONE, 0)
    assert judge(head(start=padded_line(8193)), step) == 414
    assert judge(padded_head(16384), step) == (Framing.NONE, 0)
    assert judge(padded_head(16385), step) == 431
    assert judge(head(*[b"X: 1"] * 99), step) == (Framing.NONE, 0)
    assert judge(head(*[b"X: 1"] * 100), step) == 431


@pytest.mark.parametrize("step", [None, 1, 4096])
def test_heads_without_an_end_are_refused_at_the_limit(step: int | None) -> None:
    assert judge(b"G" * 8192, step) is None
    assert judge(b"G" * 8193, step) == 414
    endless = b"GET / HTTP/1.1\r\nX: "
    assert judge(endless + b"a" * (16384 - len(endless)), step) is None
    assert judge(endless + b"a" * (16385 - len(endless)), step) == 431


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
    assert check_head(b"GET / HTTP/1.1\r\nHost: a\r\nContent-Length:" + space + b"7\r\nX: " + value + b"\r\n\r\n") == (
        Framing.COUNTED,
        7,
    )
