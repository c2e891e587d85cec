"""Connections to one upstream: TCP, TLS or a Unix socket; HTTP/2 by ALPN or prior knowledge, or HTTP/1.1. Thread: loop.

A connection takes requests (`Connection.send`) and calls their exchanges with what comes. HTTP/2 carries many
at once and outlives a cancelled one (RST_STREAM); HTTP/1.1 carries one after another, and a cancel closes it.
"""

import asyncio
import errno
import ssl
from typing import Any, NamedTuple, cast
from urllib.parse import urlsplit

import h11

from server.upstream.exchange import AnswerHead, ConnectionLost, Exchange, Outgoing, Reader, UpstreamFault
from server.upstream.http2 import Http2
from server.wire.messages import ConnectionFault, Http2ErrorCode

CONNECT_S = 2.0
MAX_HEAD_BYTES, MAX_INTERIM_HEADS = 64 * 1024, 1024  # of an answer, over HTTP/1.1; HTTP/2 has FrameLimits
BYTES_A_TURN = 8 * 1024  # that are read of a connection in one turn of the loop: the others' requests come between
MAX_UNSENT_BYTES = 64 * 1024 * 1024  # of requests that the upstream does not read
OWN_LIMITS = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS, errno.EADDRNOTAVAIL)  # of this machine

H2, H1 = b"h2", b"http/1.1"


class Address(NamedTuple):
    """Where an upstream listens."""

    host: str
    port: int
    path: str | None  # of a Unix socket; None: TCP
    authority: str  # for the Host field
    prefix: str  # of each request's path
    tls: ssl.SSLContext | None  # None: in the clear
    protocols: tuple[bytes, ...]  # to be offered, or tried, the first first


def address_of(of: str, tls: ssl.SSLContext | None, protocols: tuple[bytes, ...]) -> Address:
    """Of a URL that check_url takes."""
    url = urlsplit(of)
    if url.scheme == "unix":
        return Address("", 0, url.path, "localhost", "", None, protocols)
    port = url.port or (443 if tls else 80)
    return Address(url.hostname or "", port, None, url.netloc, url.path.rstrip("/"), tls, protocols)


class _Http1:
    is_ready, is_multiplexed = True, False

    def __init__(self, connection: "Connection") -> None:
        self.is_closing = False
        self._connection = connection
        self._h11 = h11.Connection(h11.CLIENT, max_incomplete_event_size=MAX_HEAD_BYTES)
        self._exchange: Exchange | None = None

    @property
    def num_open(self) -> int:
        return int(self._exchange is not None)

    @property
    def room(self) -> int:
        return int(self._exchange is None and not self.is_closing)

    def send(self, outgoing: Outgoing, reader: Reader) -> Exchange:
        exchange, self._num_interim = Exchange(self, reader), 0
        self._exchange = exchange
        fields = [(b"host", self._connection.address.authority.encode()), *outgoing.fields, *outgoing.length]
        head = h11.Request(method=outgoing.method, target=outgoing.path, headers=fields)
        events = [head, *([h11.Data(data=outgoing.body)] if outgoing.body else []), h11.EndOfMessage()]
        self._connection.write(b"".join(self._h11.send(event) or b"" for event in events))
        return exchange

    def receive(self, data: bytes) -> None:
        try:
            if data and self._exchange is None:
                raise h11.RemoteProtocolError("an answer to no request")
            self._h11.receive_data(data)
            while True:
                event = self._h11.next_event()
                if event is h11.NEED_DATA or event is h11.PAUSED:
                    break
                if isinstance(event, h11.ConnectionClosed):
                    raise ConnectionFault(Http2ErrorCode.NO_ERROR, "It has closed the connection.")
                if self._exchange is None:  # its reader has called it off
                    break
                self._tell(self._exchange, event)
                if isinstance(event, h11.EndOfMessage):
                    break
        except h11.RemoteProtocolError as error:
            what = f"does not speak HTTP/1.1: {error}" if data else "has closed the connection in an answer"
            raise ConnectionFault(Http2ErrorCode.NO_ERROR, f"It {what}.") from error

    def _tell(self, exchange: Exchange, event: Any) -> None:
        if isinstance(event, h11.InformationalResponse):
            self._num_interim += 1
            if self._num_interim > MAX_INTERIM_HEADS:
                raise h11.RemoteProtocolError("too many interim heads")
        elif isinstance(event, h11.Response):
            exchange.take_head(AnswerHead(event.status_code, tuple(event.headers)))
        elif isinstance(event, h11.Data):
            exchange.take_data(bytes(event.data))
        elif isinstance(event, h11.EndOfMessage):
            self._exchange = None
            is_at_end = self._h11.our_state is h11.DONE and self._h11.their_state is h11.DONE
            if is_at_end and not self._h11.trailing_data[0]:
                self._h11.start_next_cycle()
            else:  # Connection: close, a body without a length, or more than an answer: the next request's is not in it
                self.is_closing = True
            exchange.take_end()
            self._connection.set_reading(True)

    def acknowledge(self, exchange: Exchange, num_bytes: int) -> None:
        """TCP's window does it."""

    def set_paused(self, exchange: Exchange, is_paused: bool) -> None:
        if exchange is self._exchange:
            self._connection.set_reading(not is_paused)

    def cancel(self, exchange: Exchange) -> None:
        if exchange is self._exchange:
            self._exchange, self.is_closing = None, True
            self._connection.abort()

    def fail(self, fault: UpstreamFault) -> None:
        self.is_closing = True
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            exchange.take_end(fault)


class Connection(asyncio.BufferedProtocol):
    """
    Attributes:
        http: its protocol, once it is connected.
        ready: its protocol is known and the peer has said that it speaks it. Its exception is an UpstreamFault.
    """

    http: Http2 | _Http1

    def __init__(self, address: Address, protocol: bytes) -> None:
        self.address = address
        self.loop = asyncio.get_running_loop()
        self.ready: asyncio.Future[None] = self.loop.create_future()
        self.heard_s = self.loop.time()  # when something came last
        self._protocol = protocol
        self._transport: asyncio.Transport | None = None
        self._buffer = bytearray(BYTES_A_TURN)
        self._is_reading = True  # as the exchange of HTTP/1.1 wants it

    @property
    def is_closed(self) -> bool:
        return self._transport is None

    def close(self) -> None:
        """Once all is written."""
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    # The protocols' side.

    def write(self, data: bytes) -> None:
        if self._transport is not None:
            self._transport.write(data)
            if self._transport.get_write_buffer_size() > MAX_UNSENT_BYTES:
                self._transport.abort()

    def set_reading(self, is_reading: bool) -> None:
        self._is_reading = is_reading
        self._read_or_not()

    def _read_or_not(self) -> None:
        if self._transport is not None and not self._transport.is_closing():
            if self._is_reading:
                self._transport.resume_reading()
            else:
                self._transport.pause_reading()

    # asyncio.BufferedProtocol.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        over_tls = transport.get_extra_info("ssl_object")
        if over_tls is not None:
            self._protocol = (over_tls.selected_alpn_protocol() or H1.decode()).encode()
        if self._protocol == H2:
            scheme, authority = b"https" if self.address.tls else b"http", self.address.authority.encode()
            origin = [(b":scheme", scheme), (b":authority", authority)]
            self.http = Http2(self.write, self.loop.time, origin)
        else:
            self.http = _Http1(self)
            self.ready.set_result(None)

    def get_buffer(self, sizehint: int) -> bytearray:
        return self._buffer

    def buffer_updated(self, num_bytes: int) -> None:
        is_full, self.heard_s = num_bytes == BYTES_A_TURN, self.loop.time()
        self._receive(bytes(self._buffer if is_full else self._buffer[:num_bytes]))
        if is_full and self._transport is not None and not self._transport.is_closing():  # the loop would read on
            self._transport.pause_reading()
            self.loop.call_soon(self._read_or_not)

    def _receive(self, data: bytes) -> None:
        http = self.http
        try:
            http.receive(data)
        except ConnectionFault as fault:
            kind = UpstreamFault if data else ConnectionLost
            self._fail(kind(str(fault).rstrip(".").replace("It ", "it ", 1)))
            self.abort()
            return
        if http.is_ready and not self.ready.done():
            self.ready.set_result(None)
        if http.is_closing and not http.num_open:
            self.close()

    def eof_received(self) -> bool:
        self._receive(b"")  # ends a body without a length
        return False

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        self._fail(ConnectionLost("the connection was lost" if error is None else f"the connection was lost: {error}"))

    def _fail(self, fault: UpstreamFault) -> None:
        if not self.ready.done():
            self.ready.set_exception(fault)
            self.ready.exception()  # marks it as retrieved
        self.http.fail(fault)


async def connect(address: Address, protocol: bytes) -> Connection:
    """Open a connection that takes requests, within CONNECT_S.

    Args:
        protocol: in the clear; over TLS, ALPN decides.

    Raises:
        UpstreamFault: that cannot be done.
    """
    loop = asyncio.get_running_loop()
    connection = Connection(address, protocol)
    try:
        async with asyncio.timeout(CONNECT_S):
            if address.path is not None:
                await loop.create_unix_connection(lambda: connection, address.path)
            else:
                name = address.host if address.tls else None
                await loop.create_connection(
                    lambda: connection, address.host, address.port, ssl=address.tls, server_hostname=name
                )
            await connection.ready
    except TimeoutError:
        connection.abort()
        raise UpstreamFault(f"it did not accept a connection within {CONNECT_S:g} s", is_untouched=True) from None
    except UpstreamFault as fault:
        if protocol == H2 and H1 in address.protocols and address.tls is None:  # it is connected, and knows no HTTP/2
            return await connect(address, H1)
        raise UpstreamFault(str(fault), is_untouched=True) from fault
    except OSError as error:  # ssl.SSLError is one
        why, is_absent = f"the connection failed: {error.strerror or error}", error.errno not in OWN_LIMITS
        raise UpstreamFault(why, is_untouched=True, is_absent=is_absent) from None
    except asyncio.CancelledError:
        connection.abort()
        raise
    return connection
