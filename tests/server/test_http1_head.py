"""A plain head is read as prefilter and h11 read it, and h11 is spared every head of the usual clients."""

import h11
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fuzz import corpus
from server.wire.http1 import Framing, Http1Protocol, LineScanner, RequestHead, read_head, read_plain_head
from server.wire.limits import HeadLimits
from server.wire.messages import HeadRefused
from tests.server.framing_cases import LAST_REQUEST, Understood, load_cases
from tests.server.framing_mutants import mutants
from tests.server.test_http1_prefilter import ATTACKS

LIMITS = HeadLimits()
NUM_MUTANTS = 20_000


def by_the_long_way(data: bytes, limits: HeadLimits = LIMITS) -> tuple[RequestHead, int] | str:
    """As Http1Protocol reads a head that is not plain; or why there is none."""
    try:
        end = LineScanner(limits).scan(bytearray(data))
        return "incomplete" if end is None else (read_head(data[:end]), end)
    except HeadRefused as refusal:
        return f"refused with {refusal.status}"


def compare(data: bytes, limits: HeadLimits = LIMITS) -> bool:
    """Whether the head is plain; if so, it is the same the long way."""
    plain = read_plain_head(bytearray(data), limits)
    assert plain is None or plain == by_the_long_way(data, limits), data
    return plain is not None


CURL = b"GET /v1/models?a=b HTTP/1.1\r\nHost: 127.0.0.1:8000\r\nUser-Agent: curl/8.5.0\r\nAccept: */*\r\n\r\n"
OPENAI_SDK = (
    b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost:8000\r\nAccept-Encoding: gzip, deflate\r\n"
    b"Connection: keep-alive\r\nAccept: application/json\r\nContent-Type: application/json\r\n"
    b"User-Agent: OpenAI/Python 1.68.2\r\nX-Stainless-Lang: python\r\nX-Stainless-OS: Linux\r\n"
    b"X-Stainless-Arch: x64\r\nX-Stainless-Runtime: CPython\r\nX-Stainless-Runtime-Version: 3.11.7\r\n"
    b"Authorization: Bearer sk-abc\r\nX-Stainless-Async: false\r\nx-stainless-retry-count: 0\r\n"
    b"x-stainless-read-timeout: 600\r\nContent-Length: 231\r\n\r\n"
)
NODE_FETCH = (
    b"POST /v1/completions HTTP/1.1\r\nhost: [::1]:8000\r\nconnection: keep-alive\r\ncontent-type: application/json\r\n"
    b"accept: */*\r\naccept-language: *\r\nsec-fetch-mode: cors\r\nuser-agent: node\r\ncontent-length: 20\r\n\r\n"
)


@pytest.mark.parametrize("head", [CURL, OPENAI_SDK, NODE_FETCH], ids=["curl", "openai", "node"])
def test_heads_of_usual_clients_are_plain(head: bytes) -> None:
    assert compare(head)
    assert compare(head + b"what follows it\r\n\r\n")


@pytest.mark.parametrize("head", [CURL, OPENAI_SDK, NODE_FETCH], ids=["curl", "openai", "node"])
def test_head_that_is_incomplete_is_not_plain(head: bytes) -> None:
    assert not any(compare(head[:end]) for end in range(len(head)))


def test_length_of_zero_is_no_body() -> None:
    plain = read_plain_head(bytearray(b"GET / HTTP/1.1\r\nHost: a\r\nContent-Length: 000\r\n\r\n"), LIMITS)
    assert plain is not None
    assert (plain[0].framing, plain[0].length) == (Framing.NONE, 0)


@pytest.mark.parametrize(
    "change",
    [
        pytest.param((b"Host:", b"Host :"), id="space before the colon"),
        pytest.param((b"Accept:", b" Accept:"), id="fold"),
        pytest.param((b"*/*\r\n", b"*/*\n"), id="bare LF"),
        pytest.param((b"*/*\r\n", b"*/*\r"), id="bare CR"),
        pytest.param((b"*/*\r\n", b"*/*\r\r\n"), id="CR before CR LF"),
        pytest.param((b"*/*", b"*\0*"), id="NUL"),
        pytest.param((b"*/*", b"*\xff*"), id="no ASCII"),
        pytest.param((b"*/*", b"*\t*"), id="tab"),
        pytest.param((b"*/*", b"*/* "), id="space behind the value"),
        pytest.param((b"Accept: */*", b"Host: a"), id="two hosts"),
        pytest.param((b"Accept: */*", b"Content-Length: 1\r\ncontent-length: 1"), id="two lengths"),
        pytest.param((b"Accept: */*", b"Content-Length: 1, 1"), id="list of lengths"),
        pytest.param((b"Accept: */*", b"Content-Length: +1"), id="signed length"),
        pytest.param((b"Accept: */*", b"Content-Length:"), id="empty length"),
        pytest.param((b"Accept: */*", b"Content-Length: 1" + b"0" * 19), id="endless length"),
        pytest.param((b"Accept: */*", b"Transfer-Encoding: chunked"), id="coding"),
        pytest.param((b"Host: ", b"Host: a@"), id="no authority"),
        pytest.param((b"Host: ", b"X: "), id="no host"),
        pytest.param((b"HTTP/1.1", b"HTTP/1.0"), id="HTTP/1.0"),
        pytest.param((b"HTTP/1.1", b"HTTP/1.2"), id="HTTP/1.2"),
        pytest.param((b" HTTP", b"  HTTP"), id="two spaces"),
        pytest.param((b"/v1", b"http://a/v1"), id="absolute form"),
        pytest.param((b"?a=b", b"#a"), id="fragment"),
        pytest.param((b"GET ", b"G@T "), id="no method"),
    ],
)
def test_head_out_of_the_ordinary_goes_the_long_way(change: tuple[bytes, bytes]) -> None:
    changed = CURL.replace(*change, 1)
    assert changed != CURL
    assert not compare(changed)


def test_every_case_and_attack_is_read_alike() -> None:
    cases = load_cases()
    sent = [case.sent for case in cases] + list(ATTACKS.values())
    sent += [
        sent[sent.index(b"\r\n\r\n") + 4 :] for sent in sent if b"\r\n\r\n" in sent
    ]  # and what stands behind a head
    sent += corpus.load("http1_prefilter") + corpus.load("http1")
    num_plain = sum(map(compare, sent))
    assert len(sent) / 10 < num_plain < len(sent), "some are plain, and some are not"


def test_mutants_are_read_alike() -> None:
    found = mutants(load_cases(), NUM_MUTANTS, seed=7, read=lambda data: Understood((), ""))
    num_plain = sum(compare(case.data) for case in found)
    assert NUM_MUTANTS / 10 < num_plain < NUM_MUTANTS


LINES = st.sampled_from([b"a", b"A-b", b"Host", b"Content-Length", b"", b" ", b"\t", b":", b"1", b"x y", b"\r", b"\n"])


@given(st.lists(st.one_of(LINES, st.binary(max_size=3), st.just(b": "), st.just(b"\r\n")), max_size=20))
def test_any_fields_are_read_alike(pieces: list[bytes]) -> None:
    compare(b"GET / HTTP/1.1\r\nHost: a\r\n" + b"".join(pieces) + b"\r\n\r\n")
    compare(b"GET /" + b"".join(pieces) + b" HTTP/1.1\r\nHost: a\r\n\r\n")


@pytest.mark.parametrize("head", [CURL, OPENAI_SDK, NODE_FETCH], ids=["curl", "openai", "node"])
def test_limits_hold_for_plain_heads(head: bytes) -> None:
    line, size, num_fields = head.index(b"\n") + 1, len(head), head.count(b"\r\n") - 2
    assert compare(head, HeadLimits(line, size, num_fields))
    for limits in (
        HeadLimits(line - 1, size, num_fields),
        HeadLimits(line, size - 1, num_fields),
        HeadLimits(line, size, num_fields - 1),
    ):
        assert not compare(head, limits)
        assert by_the_long_way(head, limits) in ("refused with 414", "refused with 431")


def test_h11_sees_no_plain_head(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bytes] = []
    receive = h11.Connection.receive_data
    monkeypatch.setattr(h11.Connection, "receive_data", lambda self, data: (seen.append(data), receive(self, data))[1])
    protocol = Http1Protocol(LIMITS, lambda: b"now")
    protocol.receive(OPENAI_SDK + bytes(231) + LAST_REQUEST)
    assert not seen
    other = Http1Protocol(LIMITS, lambda: b"now")
    for byte in CURL:
        other.receive(bytes([byte]))
    assert seen == [CURL]
    assert other.num_requests == protocol.num_requests == 1
