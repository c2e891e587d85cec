"""W3C Trace Context: which trace a request belongs to, by its traceparent. Any thread.

Source: www.w3.org/TR/trace-context/, section 3.2; the answer's header is that of trace-context-2's traceresponse.
"""

import re
from dataclasses import dataclass

TRACEPARENT = re.compile(rb"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
SAMPLED = 1
_NO_TRACE, _NO_SPAN = "0" * 32, "0" * 16


@dataclass(frozen=True, slots=True)
class TraceContext:
    """
    Args:
        trace_id: 32 hex digits.
        span_id: of our span, 16 hex digits.
        parent_id: of the caller's span; None: the trace begins here.
    """

    trace_id: str
    span_id: str
    parent_id: str | None
    is_sampled: bool

    @property
    def response_header(self) -> tuple[bytes, bytes]:
        flags = SAMPLED if self.is_sampled else 0
        return b"traceresponse", f"00-{self.trace_id}-{self.span_id}-{flags:02x}".encode()


def continue_trace(traceparent: bytes, span_id: str) -> TraceContext | None:
    """The trace that the caller's header names; None: it is not fit, and must be ignored."""
    match = TRACEPARENT.fullmatch(traceparent.strip())
    if match is None:
        return None
    version, trace_id, parent_id, flags = (part.decode() for part in match.groups()[:4])
    has_rest = match[5] is not None
    if version == "ff" or (version == "00" and has_rest) or trace_id == _NO_TRACE or parent_id == _NO_SPAN:
        return None
    return TraceContext(trace_id, span_id, parent_id, bool(int(flags, 16) & SAMPLED))
