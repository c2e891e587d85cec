"""RFC 9113 §6.9: flow control."""

from server.wire.http2_frames import WINDOW_UPDATE
from tests.server.http2_cases.case import (
    FLOW,
    GOES_ON,
    HALF_CLOSED,
    LARGEST,
    LARGEST_INCREMENT,
    OPEN,
    PROTOCOL,
    SIZE,
    answers,
    case,
    ends,
    has_body,
    resets,
    sent,
)
from tests.server.raw_http2 import INITIAL_WINDOW, RESERVED, Frame, data, get, post, settings, window_update

WINDOWS = (
    case("6.9", "WINDOW_UPDATE of 0 on the connection", window_update(0), ends(PROTOCOL)),
    case("6.9", "WINDOW_UPDATE of 0 on a stream", window_update(0, 1), resets(PROTOCOL), HALF_CLOSED),
    case("6.9", "WINDOW_UPDATE of 0 on an idle stream", window_update(0, 1), ends(PROTOCOL)),
    case("6.9", "WINDOW_UPDATE of 0 but for the reserved bit", window_update(RESERVED, 1), resets(PROTOCOL), OPEN),
    case("6.9", "WINDOW_UPDATE with the reserved bit", window_update(RESERVED | 5), GOES_ON),
    case(
        "6.9", "WINDOW_UPDATE with the reserved bit on a stream", window_update(RESERVED | 5, 1), GOES_ON, HALF_CLOSED
    ),
    case("6.9", "WINDOW_UPDATE of 3 bytes", Frame(WINDOW_UPDATE, bytes(3)), ends(SIZE)),
    case("6.9", "WINDOW_UPDATE of 5 bytes", Frame(WINDOW_UPDATE, bytes(5)), ends(SIZE)),
    case("6.9", "WINDOW_UPDATE of 3 bytes on a stream", Frame(WINDOW_UPDATE, bytes(3), 0, 1), ends(SIZE), OPEN),
    case(
        "6.9",
        "a response waits for its window",
        (settings((INITIAL_WINDOW, 0)), get()),
        answers(),
        check=sent(),
        restore=(settings((INITIAL_WINDOW, 65_535)),),
    ),
    case(
        "6.9.1",
        "a window that grows by one lets one byte through",
        (settings((INITIAL_WINDOW, 0)), get(), window_update(1, 1)),
        answers(),
        check=sent(1),
        restore=(settings((INITIAL_WINDOW, 65_535)),),
    ),
    case("6.9.1", "connection's window of 2^31 - 1 and more", window_update(LARGEST_INCREMENT), ends(FLOW)),
    case(
        "6.9.1",
        "stream's window of more than 2^31 - 1",
        window_update(LARGEST_INCREMENT, 1),
        resets(FLOW),
        HALF_CLOSED,
    ),
    case(
        "6.9.1",
        "stream's window past its end in two steps",
        (window_update(2**30, 1), window_update(2**30, 1)),
        resets(FLOW),
        HALF_CLOSED,
    ),
    case(
        "6.9.1",
        "body past the stream's window",
        tuple(data(bytes(LARGEST)) for _ in range(4)),  # 65,536 bytes, one more than the window
        ends(FLOW),
        (post(b"/later"),),
    ),
    case(
        "6.9.1",
        "body that fills the stream's window",
        (*(data(bytes(LARGEST)) for _ in range(3)), data(bytes(LARGEST - 1))),
        GOES_ON,
        (post(b"/later"),),
        lambda seen: not seen.of(WINDOW_UPDATE, 1),
    ),
    case(
        "6.9.2",
        "SETTINGS make windows grow",
        settings((INITIAL_WINDOW, 65_535)),
        answers(),
        (settings((INITIAL_WINDOW, 1)), get()),
        has_body(b"ok"),
    ),
    case(
        "6.9.2",
        "SETTINGS make a window negative, and it is kept",
        (settings((INITIAL_WINDOW, 0)), window_update(1, 1)),
        answers(),
        (settings((INITIAL_WINDOW, 1)), get()),  # one byte is sent: the window is -1, then 0
        sent(1),
        (settings((INITIAL_WINDOW, 65_535)),),
    ),
    case(
        "6.9.2",
        "SETTINGS that push a window past 2^31 - 1",
        settings((INITIAL_WINDOW, 2**31 - 1)),
        ends(FLOW),
        (*HALF_CLOSED, window_update(65_535, 1)),
    ),
    case(
        "6.9.2",
        "SETTINGS do not change the connection's window",
        (settings((INITIAL_WINDOW, 2**31 - 1)), window_update(2**31 - 1 - 65_535)),
        GOES_ON,
    ),
)
