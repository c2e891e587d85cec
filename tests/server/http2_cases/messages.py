"""RFC 9113 §8: requests and their answers."""

from tests.server.http2_cases.case import CLOSED, OPEN, PROTOCOL, answers, case, has_body, padded, resets
from tests.server.raw_http2 import END_HEADERS, END_STREAM, Frame, block, data, get, headers, literal, post


def of_field(name: bytes, value: bytes = b"1") -> Frame:
    """A request with one more field."""
    return headers(block((name, value)))


def of_body(length: bytes, *frames: Frame) -> tuple[Frame, ...]:
    """A request that declares its body's length, and its body."""
    return (post(b"/read", 1, (b"content-length", length)), *frames)


MESSAGES = (
    case("8.1", "request with a body", data(b"body", END_STREAM), answers(), OPEN, has_body(b"4")),
    case(
        "8.1",
        "request with trailers",
        (data(b"body"), headers(literal(b"x-sum", b"1"))),
        answers(),
        OPEN,
        has_body(b"4"),
    ),
    case("8.1", "request with nothing but trailers", headers(literal(b"x", b"1")), answers(), OPEN, has_body(b"0")),
    case("8.1", "trailers without END_STREAM", headers(literal(b"x", b"1"), END_HEADERS), resets(PROTOCOL), OPEN),
    case("8.1", "second head without END_STREAM", post(), resets(PROTOCOL), OPEN),
    case("8.1", "DATA after trailers", (headers(literal(b"x", b"1")), data(b"x")), resets(CLOSED), (post(b"/wait"),)),
    case("8.1", "HEADERS after trailers", (headers(literal(b"x", b"1")), get()), resets(CLOSED), (post(b"/wait"),)),
    case("8.1", "pseudo-field in trailers", headers(literal(b":path", b"/")), resets(PROTOCOL), OPEN),
    case("8.1", "status in trailers", headers(literal(b":status", b"200")), resets(PROTOCOL), OPEN),
    case("8.1", "upper case in trailers", headers(literal(b"X", b"1")), resets(PROTOCOL), OPEN),
    case("8.1", "connection in trailers", headers(literal(b"connection", b"close")), resets(PROTOCOL), OPEN),
    case("8.1.1", "content-length is right", of_body(b"4", data(b"bo"), data(b"dy", 0x1)), answers()),
    case("8.1.1", "content-length of 0", of_body(b"0", data(b"", 0x1)), answers()),
    case("8.1.1", "content-length does not count padding", of_body(b"4", data(padded(b"body", 9), 0x9)), answers()),
    case("8.1.1", "content-length without a body", headers(block((b"content-length", b"1"))), resets(PROTOCOL)),
    case("8.1.1", "content-length too long", of_body(b"5", data(b"body", 0x1)), resets(PROTOCOL)),
    case("8.1.1", "content-length too short", of_body(b"3", data(b"body", 0x1)), resets(PROTOCOL)),
    case("8.1.1", "content-length too short, in mid-body", of_body(b"3", data(b"body")), resets(PROTOCOL)),
    case(
        "8.1.1", "content-length too long for several", of_body(b"5", data(b"bo"), data(b"dy", 0x1)), resets(PROTOCOL)
    ),
    case(
        "8.1.1", "content-length too short for several", of_body(b"3", data(b"bo"), data(b"dy", 0x1)), resets(PROTOCOL)
    ),
    case("8.1.1", "content-length and an empty body", of_body(b"3", data(b"", 0x1)), resets(PROTOCOL)),
    case(
        "8.1.1",
        "content-length too long before trailers",
        of_body(b"5", data(b"body"), headers(literal(b"x", b"1"))),
        resets(PROTOCOL),
    ),
    case("8.1.1", "content-length that is no number", of_body(b"4x", data(b"body", 0x1)), resets(PROTOCOL)),
    case("8.1.1", "content-length that is negative", of_body(b"-4", data(b"body", 0x1)), resets(PROTOCOL)),
    case("8.1.1", "content-length with a sign", of_body(b"+4", data(b"body", 0x1)), resets(PROTOCOL)),
    case("8.1.1", "content-length of nothing", of_body(b"", data(b"", 0x1)), resets(PROTOCOL)),
    case("8.1.1", "content-length of 5,000 digits", of_body(b"9" * 5000, data(b"body", 0x1)), resets(PROTOCOL)),
    case("8.1.1", "content-length of a list", of_body(b"4, 4", data(b"body", 0x1)), resets(PROTOCOL)),
    case(
        "8.1.1",
        "two content-lengths",
        (post(b"/read", 1, (b"content-length", b"4"), (b"content-length", b"5")), data(b"body", 0x1)),
        resets(PROTOCOL),
    ),
    case("8.2.1", "upper case in a name", of_field(b"X-Upper"), resets(PROTOCOL)),
    case("8.2.1", "empty name", of_field(b""), resets(PROTOCOL)),
    case("8.2.1", "space in a name", of_field(b"x y"), resets(PROTOCOL)),
    case("8.2.1", "colon in a name", of_field(b"x:y"), resets(PROTOCOL)),
    case("8.2.1", "NUL in a name", of_field(b"x\0"), resets(PROTOCOL)),
    case("8.2.1", "DEL in a name", of_field(b"x\x7f"), resets(PROTOCOL)),
    case("8.2.1", "byte above ASCII in a name", of_field(b"x\xe4"), resets(PROTOCOL)),
    case("8.2.1", "NUL in a value", of_field(b"x", b"a\0b"), resets(PROTOCOL)),
    case("8.2.1", "CR in a value", of_field(b"x", b"a\rb"), resets(PROTOCOL)),
    case("8.2.1", "LF in a value", of_field(b"x", b"a\nb"), resets(PROTOCOL)),
    case("8.2.1", "space before a value", of_field(b"x", b" a"), resets(PROTOCOL)),
    case("8.2.1", "tab before a value", of_field(b"x", b"\ta"), resets(PROTOCOL)),
    case("8.2.1", "space after a value", of_field(b"x", b"a "), resets(PROTOCOL)),
    case("8.2.1", "tab after a value", of_field(b"x", b"a\t"), resets(PROTOCOL)),
    case("8.2.1", "empty value", of_field(b"x", b""), answers()),
    case("8.2.1", "byte above ASCII in a value", of_field(b"x", b"\xe4"), answers()),
    case("8.2.1", "LF in a pseudo-field", headers(block(path=b"/\n")), resets(PROTOCOL)),
    case("8.2.2", "connection", of_field(b"connection", b"close"), resets(PROTOCOL)),
    case("8.2.2", "proxy-connection", of_field(b"proxy-connection", b"close"), resets(PROTOCOL)),
    case("8.2.2", "keep-alive", of_field(b"keep-alive"), resets(PROTOCOL)),
    case("8.2.2", "transfer-encoding", of_field(b"transfer-encoding", b"chunked"), resets(PROTOCOL)),
    case("8.2.2", "upgrade", of_field(b"upgrade", b"websocket"), resets(PROTOCOL)),
    case("8.2.2", "te of something else", of_field(b"te", b"gzip"), resets(PROTOCOL)),
    case("8.2.2", "te of more than trailers", of_field(b"te", b"trailers, gzip"), resets(PROTOCOL)),
    case("8.2.2", "te of trailers", of_field(b"te", b"trailers"), answers()),
    case(
        "8.2.3",
        "crumbs of a cookie, which is not kept",
        headers(block((b"cookie", b"a=1"), (b"x", b"y"), (b"cookie", b"b=2"), path=b"/cookie")),
        answers(),
        check=has_body(b""),
    ),
    case("8.3", "unknown pseudo-field", headers(block((b":unknown", b"1"))), resets(PROTOCOL)),
    case("8.3", "pseudo-field of responses", headers(block((b":status", b"200"))), resets(PROTOCOL)),
    case("8.3", "informational status alone", headers(literal(b":status", b"100")), resets(PROTOCOL)),
    case("8.3", "pseudo-field after a field", headers(literal(b"x", b"y") + block()), resets(PROTOCOL)),
    case("8.3", "pseudo-field twice", headers(literal(b":path", b"/now") + block()), resets(PROTOCOL)),
    case("8.3.1", "method twice", headers(literal(b":method", b"GET") + block()), resets(PROTOCOL)),
    case("8.3.1", "scheme twice", headers(literal(b":scheme", b"http") + block()), resets(PROTOCOL)),
    case("8.3.1", "authority twice", headers(literal(b":authority", b"a") + block()), resets(PROTOCOL)),
    case("8.3.1", "no method", headers(block(without=b"method")), resets(PROTOCOL)),
    case("8.3.1", "no scheme", headers(block(without=b"scheme")), resets(PROTOCOL)),
    case("8.3.1", "no path", headers(block(without=b"path")), resets(PROTOCOL)),
    case("8.3.1", "neither authority nor host", headers(block(without=b"authority")), resets(PROTOCOL)),
    case("8.3.1", "host for authority", headers(block((b"host", b"a"), without=b"authority")), answers()),
    case("8.3.1", "host as authority", headers(block((b"host", b"a"))), answers()),
    case("8.3.1", "host other than authority", headers(block((b"host", b"b"))), resets(PROTOCOL)),
    case("8.3.1", "authority with a user", headers(block(authority=b"me@a")), resets(PROTOCOL)),
    case("8.3.1", "empty authority", headers(block(authority=b"")), resets(PROTOCOL)),
    case("8.3.1", "empty path", headers(block(path=b"")), resets(PROTOCOL)),
    case("8.3.1", "path that does not begin with a slash", headers(block(path=b"now")), resets(PROTOCOL)),
    case("8.3.1", "path * of another method", headers(block(path=b"*")), resets(PROTOCOL)),
    case("8.3.1", "path * of OPTIONS", headers(block(path=b"*", method=b"OPTIONS")), answers()),
    case("8.3.1", "empty scheme", headers(block(scheme=b"")), resets(PROTOCOL)),
    case("8.3.1", "empty method", headers(block(method=b"")), resets(PROTOCOL)),
    case(
        "8.5",
        "CONNECT",
        headers(literal(b":method", b"CONNECT") + literal(b":authority", b"a:1"), END_HEADERS),
        answers(501),
    ),
    case("8.5", "CONNECT with scheme and path", headers(block(method=b"CONNECT"), END_HEADERS), resets(PROTOCOL)),
    case("8.5", "CONNECT without an authority", headers(literal(b":method", b"CONNECT"), 0x4), resets(PROTOCOL)),
    case(
        "8441 4",
        "extended CONNECT, which is not offered",
        headers(block((b":protocol", b"websocket"), method=b"CONNECT"), END_HEADERS),
        resets(PROTOCOL),
    ),
    case(
        "8.1",
        "answer to HEAD has no body",
        headers(block(method=b"HEAD")),
        answers(),
        check=lambda seen: not seen.body() and seen.has_ended(),
    ),
    case(
        "8.1",
        "100 Continue comes before the final answer",
        post(b"/read", 1, (b"expect", b"100-continue")),
        answers(100),
        restore=(data(b"x", END_STREAM),),
    ),
)
