"""HTTP/2 by an upgrade from HTTP/1.1, with h2 as the peer."""

from ipaddress import ip_network

import pytest

from server.listening.clients import ClientRules
from server.wire.stream import HttpStream
from tests.server.fakes import MemoryServer
from tests.server.http2_client import Http2Client
from tests.server.memory_connection import Hold, Serve, answer, echo

UPGRADE = (
    b"%b / HTTP/1.1\r\nHost: a\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: %b\r\n%b\r\n"
)
SWITCHED = b"HTTP/1.1 101 Switching Protocols\r\nconnection: Upgrade\r\nupgrade: h2c\r\n\r\n"


class UpgradingClient(Http2Client):
    """Begins in HTTP/1.1.

    Args:
        pieces: what follows the request's head, one read each.
    """

    def __init__(self, server: MemoryServer, method: bytes = b"GET", fields_: bytes = b"", *pieces: bytes) -> None:
        super().__init__(
            server, settings=None, upgrade=lambda settings: UPGRADE % (method, settings, fields_), pieces=pieces
        )


def test_upgrade_is_answered_in_http2(serve: Serve) -> None:
    client = UpgradingClient(serve(echo))
    assert client.transport.received.startswith(SWITCHED)
    assert client.responses[1].body == b"/"
    assert client.responses[1].is_complete
    assert client.responses[client.request()].body == b"/"
    assert client.goaways == []


@pytest.mark.parametrize("pieces", [(b"body",), (b"bo", b"dy")])
def test_upgrade_with_a_body_is_answered_in_http2(serve: Serve, pieces: tuple[bytes, ...]) -> None:
    client = UpgradingClient(serve(echo), b"POST", b"Content-Length: 4\r\n", *pieces)
    assert client.responses[1].body == b"/body"
    assert client.responses[client.request()].status == 200


def test_upgrade_is_left_unless_it_is_asked_for() -> None:
    """A proxy before us that hands it on, and shows itself by no field, no longer sees what its client asks for."""
    server = MemoryServer(echo)
    assert server.exchange(UPGRADE % (b"GET", b"AAMAAABk", b"")).received.startswith(b"HTTP/1.1 200")
    server.close()


def test_upgrade_that_a_trusted_proxy_hands_on_is_left() -> None:
    """Its client would speak to us unseen."""
    server = MemoryServer(echo, clients=ClientRules(trusted_proxies=(ip_network("192.0.2.0/24"),)), takes_upgrade=True)
    assert server.exchange(UPGRADE % (b"GET", b"AAMAAABk", b"")).received.startswith(b"HTTP/1.1 200")
    server.close()


def test_upgrade_comes_too_late_for_an_answer_that_has_begun(serve: Serve) -> None:
    async def refuse(stream: HttpStream) -> None:
        answer(stream, 401, b"no")

    head = UPGRADE % (b"POST", b"AAMAAABk", b"Content-Length: 4\r\n")
    transport = serve(refuse).exchange(head, b"body")
    assert transport.received.startswith(b"HTTP/1.1 401")


@pytest.mark.parametrize(
    "change",
    [
        (b"Upgrade: h2c", b"Upgrade: h2"),
        (b"Upgrade: h2c", b"Upgrade: websocket"),
        (b"Upgrade, HTTP2-Settings", b"Upgrade"),
        (b"Upgrade, HTTP2-Settings", b"HTTP2-Settings"),
        (b"Upgrade, HTTP2-Settings", b"Upgrade, HTTP2-Settings, close"),
        (b"AAMAAABk", b"AAMAAABk\r\nHTTP2-Settings: AAMAAABk"),
        (b"AAMAAABk", b"AAMAAAB"),
        (b"AAMAAABk", b"?"),
        (b"AAMAAABk", b"AAT_____"),
        (b"AAMAAABk", b"AAMAAABk" * 33),
        (b"HTTP2-Settings: AAMAAABk\r\n", b""),
    ],
)
def test_unfit_upgrade_is_answered_in_http11(serve: Serve, change: tuple[bytes, bytes]) -> None:
    head = UPGRADE % (b"GET", b"AAMAAABk", b"")
    assert head.replace(*change) != head
    server = serve(echo)
    assert server.exchange(head).received.startswith(SWITCHED)
    assert server.exchange(head.replace(*change)).received.startswith(b"HTTP/1.1 200")


def test_second_request_of_a_connection_is_not_upgraded(serve: Serve) -> None:
    transport = serve(echo).exchange(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n", UPGRADE % (b"GET", b"AAMAAABk", b""))
    assert transport.received.count(b"HTTP/1.1 200") == 2


def test_upgraded_request_is_cancelled_by_its_reset(serve: Serve) -> None:
    hold = Hold()
    client = UpgradingClient(serve(hold))
    client.h2.reset_stream(1)
    client.exchange()
    assert hold.told == ["gone"]
