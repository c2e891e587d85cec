"""traceparent: what is taken, and what must be ignored (W3C Trace Context, section 3.2 and 4.3)."""

import pytest

from server.observing.accounting import TraceContext, continue_trace

TRACE, PARENT, OURS = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7", "1" * 16


@pytest.mark.parametrize(
    ("header", "is_sampled"),
    [
        (f"00-{TRACE}-{PARENT}-01", True),
        (f" 00-{TRACE}-{PARENT}-00 ", False),
        (f"00-{TRACE}-{PARENT}-ff", True),
        (f"cc-{TRACE}-{PARENT}-01", True),  # a later version: its first fields mean the same
        (f"cc-{TRACE}-{PARENT}-01-what-the-future-will-be", True),
    ],
)
def test_trace_of_the_caller_goes_on(header: str, is_sampled: bool) -> None:
    trace = continue_trace(header.encode(), OURS)
    assert trace == TraceContext(TRACE, OURS, PARENT, is_sampled)
    flags = "01" if is_sampled else "00"
    assert trace.response_header == (b"traceresponse", f"00-{TRACE}-{OURS}-{flags}".encode())


@pytest.mark.parametrize(
    "header",
    [
        "",
        "00",
        f"ff-{TRACE}-{PARENT}-01",
        f"00-{'0' * 32}-{PARENT}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE.upper()}-{PARENT}-01",
        f"00-{TRACE}-{PARENT}-01-more",
        f"00-{TRACE}-{PARENT}-1",
        f"00-{TRACE}-{PARENT}-01.",
        f"cc-{TRACE}-{PARENT}-01.what",
        f"00-{TRACE[1:]}-{PARENT}-01",
        f"00-{TRACE}-{PARENT}-0\xff",
    ],
)
def test_header_that_is_not_fit_is_ignored(header: str) -> None:
    assert continue_trace(header.encode("latin-1"), OURS) is None
