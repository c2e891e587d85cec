"""A request's head on HTTP/1.1, understood. Thread: loop. Sans-io.

Any head passes the strict gate of http1_prefilter, and then h11, whose verdict is its own. Nearly all heads are plain,
though: well within what those two take, an origin-form target, visible ASCII, no name twice, framed by nothing but a
Content-Length. Those are read in two looks: 7 µs for an SDK's seventeen fields, where prefilter and h11 take 50. Of the
others nothing is decided here, least of all that they are refused. That a plain head means to those two what it means
here is held by tests/server/test_http1_head.py and fuzz/http1_prefilter.py.
"""

import re
from typing import NamedTuple

import h11

from server.wire.http1_prefilter import CONTENT_LENGTH, Framing, HeadLimits, HeadRefused, check_head, is_authority
from server.wire.messages import Headers

_NAME = rb"[!#$%&'*+.^_`|~0-9A-Za-z-]++"
# At most one space before it, and none behind it: the line ends in CR LF, and in nothing else that could be an end
_VALUE = rb"[\x21-\x7e][\x20-\x7e]*+|"
_END = rb"(?<! )\r\n"
_TARGET = rb"/[\x21\x22\x24-\x7e]*+"  # no fragment
# Possessive within a field: what is taken is never given back, so that a look takes time in proportion to its bytes
_FIELD = re.compile(rb"(%b): ?+(%b)%b" % (_NAME, _VALUE, _END))
# No `*+` over the fields: Python before 3.11.5 matches such groups wrongly (gh-106052). There is one way to cut them,
# so that nothing is tried twice
_HEAD = re.compile(rb"(%b) (%b) HTTP/1\.1\r\n((?:%b: ?+(?:%b)%b)*)\r\n" % (_NAME, _TARGET, _NAME, _VALUE, _END))


class RequestHead(NamedTuple):
    """A request's head, understood.

    Args:
        length: of the body, where it is COUNTED.
    """

    method: bytes
    target: bytes
    headers: Headers
    is_http10: bool
    framing: Framing
    length: int


def read_plain_head(buffer: bytearray, limits: HeadLimits) -> tuple[RequestHead, int] | None:
    """The head that the buffer begins with, and where it ends; None: it is not plain, or not complete."""
    match = _HEAD.match(buffer)
    if match is None:
        return None
    end = match.end()
    start_of_fields, end_of_fields = match.span(3)
    if end > limits.head_bytes or start_of_fields > limits.request_line_bytes:
        return None
    headers = tuple([(name.lower(), value) for name, value in _FIELD.findall(buffer, start_of_fields, end_of_fields)])
    by_name = dict(headers)
    host = by_name.get(b"host")
    if len(by_name) != len(headers) or len(headers) > limits.num_fields or host is None or not is_authority(host):
        return None
    if b"transfer-encoding" in by_name:
        return None
    framing, length = Framing.NONE, 0
    declared = by_name.get(b"content-length")
    if declared is not None:
        if CONTENT_LENGTH.fullmatch(declared) is None:
            return None
        length = int(declared)
        if length:
            framing = Framing.COUNTED
    return RequestHead(match[1], match[2], headers, False, framing, length), end


def read_head(head: bytes) -> RequestHead:
    """Any head, first by the prefilter, then by a parser of h11's that sees nothing else.

    Args:
        head: from the request line to the empty line, as LineScanner found it.

    Raises:
        HeadRefused: it is not one that is taken.
    """
    framing, length = check_head(head)
    parser = h11.Connection(h11.SERVER, max_incomplete_event_size=len(head))
    parser.receive_data(head)
    try:
        request = parser.next_event()
    except h11.RemoteProtocolError as error:
        raise HeadRefused(400, f"The request's head is malformed: {error}.") from error
    assert isinstance(request, h11.Request)
    is_http10 = request.http_version == b"1.0"
    return RequestHead(request.method, request.target, tuple(request.headers), is_http10, framing, length)
