"""Connections to one upstream: TCP, TLS or a Unix socket; HTTP/2 by ALPN or prior knowledge, or HTTP/1.1. Thread: loop.

A connection takes requests (`Connection.send`) and calls their exchanges with what comes. HTTP/2 carries many
at once and outlives a cancelled one (RST_STREAM); HTTP/1.1 carries one after another, and a cancel closes it.
"""

import asyncio
import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast
from urllib.parse import SplitResult

import h11

from server.upstream.exchange import AnswerHead, Exchange, UpstreamFault
from server.upstream.http2 import Answer, Ended, Happening, Http2Client, NotHttp2, Piece
from server.wire.messages import ConnectionFault, Http2ErrorCode

CONNECT_S = 2.0
MAX_HEAD_BYTES = 64 * 1024  # of an answer, over HTTP/1.1
MAX_UNSENT_BYTES = 64 * 1024 * 1024  # of requests that the upstream does not read

H2, H1 = b"h2", b"http/1.1"


@dataclass(frozen=True, slots=True)
class Address:
    """Where an upstream listens.

    Args:
        path: of a Unix socket; None: TCP.
        authority: for the Host field.
        prefix: of each request's path.
        tls: None: in the clear.
        protocols: to be offered, or tried, the first first.
    """

    host: str
    port: int
    path: str | None
    authority: str
    prefix: str
    tls: ssl.SSLContext | None
    protocols: tuple[bytes, ...]


def address_of(url: SplitResult, tls: ssl.SSLContext | None, protocols: tuple[bytes, ...]) -> Address:
    """
    Args:
        url: http://, https:// or unix:///path.
    """
    if url.scheme == "unix":
        return Address("", 0, url.path, "localhost", "", None, protocols)
    port = url.port or (443 if tls else 80)
    return Address(url.hostname or "", port, None, url.netloc, url.path.rstrip("/"), tls, protocols)


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A request to an upstream.

    Args:
        fields: without Host and the body's length.
    """

    method: bytes
    path: bytes
    fields: tuple[tuple[bytes, bytes], ...]
    body: bytes = b""


class _Protocol(Protocol):
    """HTTP on one connection, with the exchanges that are open on it."""

    @property
    def is_ready(self) -> bool: ...

    @property
    def room(self) -> int:
        """How many more requests it takes now; none once it is closing."""

    @property
    def num_open(self) -> int: ...

    def send(self, exchange: Exchange, outgoing: Outgoing) -> None: ...

    def receive(self, data: bytes) -> None:
        """b"": the end. Raises ConnectionFault."""

    def acknowledge(self, exchange: Exchange, num_bytes: int) -> None: ...

    def set_paused(self, exchange: Exchange, is_paused: bool) -> None: ...

    def cancel(self, exchange: Exchange) -> None: ...

    def fail(self, fault: UpstreamFault) -> None:
        """End all its exchanges."""


class _Http2:
    def __init__(self, connection: "Connection") -> None:
        self._connection = connection
        self._client = Http2Client()
        self._exchanges: dict[int, Exchange] = {}

    @property
    def is_ready(self) -> bool:
        return self._client.is_ready

    @property
    def num_open(self) -> int:
        return len(self._exchanges)

    @property
    def room(self) -> int:
        return 0 if self._client.is_closing else max(0, self._client.max_streams - self._client.num_streams)

    def send(self, exchange: Exchange, outgoing: Outgoing) -> None:
        address = self._connection.address
        pseudo = (
            (b":method", outgoing.method),
            (b":scheme", b"https" if address.tls else b"http"),
            (b":authority", address.authority.encode()),
            (b":path", outgoing.path),
        )
        length = ((b"content-length", b"%d" % len(outgoing.body)),) if outgoing.body else ()
        exchange.stream_id = self._client.request((*pseudo, *outgoing.fields, *length), outgoing.body)
        self._exchanges[exchange.stream_id] = exchange
        self.flush()

    def receive(self, data: bytes) -> None:
        if not data:
            raise ConnectionFault(Http2ErrorCode.NO_ERROR, "It has closed the connection.")
        try:
            for event in self._client.receive(data, self._connection.loop.time()):
                self._tell(event)
        finally:
            self.flush()
        if self._client.is_closing and not self._exchanges:
            self._connection.close()

    def _tell(self, event: Happening) -> None:
        exchange = self._exchanges.get(event.stream_id)
        if exchange is None:  # cancelled by what came before it, in the same read
            return
        if isinstance(event, Piece):
            exchange.take_data(event.data)
        elif isinstance(event, Answer):
            exchange.take_head(AnswerHead(event.status, event.fields))
        else:
            del self._exchanges[event.stream_id]
            exchange.take_end(None if isinstance(event, Ended) else event.fault)

    def acknowledge(self, exchange: Exchange, num_bytes: int) -> None:
        self._client.acknowledge(exchange.stream_id, num_bytes)
        self._connection.flush_soon()

    def set_paused(self, exchange: Exchange, is_paused: bool) -> None:
        """Its window does it."""

    def cancel(self, exchange: Exchange) -> None:
        self._exchanges.pop(exchange.stream_id, None)
        self._client.reset(exchange.stream_id)
        self.flush()

    def flush(self) -> None:
        self._connection.write(self._client.take_output())

    def fail(self, fault: UpstreamFault) -> None:
        while self._exchanges:
            self._exchanges.popitem()[1].take_end(fault)


class _Http1:
    is_ready = True

    def __init__(self, connection: "Connection") -> None:
        self._connection = connection
        self._h11 = h11.Connection(h11.CLIENT, max_incomplete_event_size=MAX_HEAD_BYTES)
        self._exchange: Exchange | None = None
        self._is_closing = False

    @property
    def num_open(self) -> int:
        return int(self._exchange is not None)

    @property
    def room(self) -> int:
        return int(self._exchange is None and not self._is_closing)

    def send(self, exchange: Exchange, outgoing: Outgoing) -> None:
        self._exchange = exchange
        fields = [(b"host", self._connection.address.authority.encode()), *outgoing.fields]
        if outgoing.body:
            fields.append((b"content-length", b"%d" % len(outgoing.body)))
        head = h11.Request(method=outgoing.method, target=outgoing.path, headers=fields)
        data = [self._h11.send(head)]
        if outgoing.body:
            data.append(self._h11.send(h11.Data(data=outgoing.body)))
        data.append(self._h11.send(h11.EndOfMessage()))
        self._connection.write(b"".join(one for one in data if one))

    def receive(self, data: bytes) -> None:
        try:
            self._h11.receive_data(data)
            while True:
                event = self._h11.next_event()
                if event is h11.NEED_DATA or event is h11.PAUSED:
                    break
                if isinstance(event, h11.ConnectionClosed):
                    raise ConnectionFault(Http2ErrorCode.NO_ERROR, "It has closed the connection.")
                self._tell(event)
                if isinstance(event, h11.EndOfMessage):
                    break
        except h11.RemoteProtocolError as error:
            raise ConnectionFault(Http2ErrorCode.NO_ERROR, f"It does not speak HTTP/1.1: {error}.") from error

    def _tell(self, event: Any) -> None:
        exchange = self._exchange
        if exchange is None:
            raise h11.RemoteProtocolError("an answer to no request")
        if isinstance(event, h11.Response):
            exchange.take_head(
                AnswerHead(event.status_code, tuple((name.lower(), value) for name, value in event.headers))
            )
        elif isinstance(event, h11.Data):
            exchange.take_data(bytes(event.data))
        elif isinstance(event, h11.EndOfMessage):
            self._exchange = None
            if self._h11.our_state is h11.DONE and self._h11.their_state is h11.DONE:
                self._h11.start_next_cycle()
            else:  # Connection: close, or a body without a length
                self._is_closing = True
                self._connection.close()
            exchange.take_end()
            self._connection.set_reading(True)

    def acknowledge(self, exchange: Exchange, num_bytes: int) -> None:
        """TCP's window does it."""

    def set_paused(self, exchange: Exchange, is_paused: bool) -> None:
        if exchange is self._exchange:
            self._connection.set_reading(not is_paused)

    def cancel(self, exchange: Exchange) -> None:
        if exchange is self._exchange:
            self._exchange, self._is_closing = None, True
            self._connection.abort()

    def fail(self, fault: UpstreamFault) -> None:
        self._is_closing = True
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            exchange.take_end(fault)


class Connection(asyncio.Protocol):
    """
    Attributes:
        ready: its protocol is known and the peer has said that it speaks it. Its exception is an UpstreamFault.
        speaks_http1: it was tried with HTTP/2, and is HTTP/1.1.
    """

    def __init__(self, address: Address, protocol: bytes) -> None:
        self.address = address
        self.loop = asyncio.get_running_loop()
        self.ready: asyncio.Future[None] = self.loop.create_future()
        self.speaks_http1 = False
        self.idle_since_s = self.loop.time()
        self._protocol = protocol
        self._http: _Protocol | None = None
        self._transport: asyncio.Transport | None = None
        self._will_flush = False

    @property
    def room(self) -> int:
        return 0 if self._http is None or self._transport is None or not self._http.is_ready else self._http.room

    @property
    def num_open(self) -> int:
        return 0 if self._http is None else self._http.num_open

    @property
    def is_closed(self) -> bool:
        return self._transport is None and self._http is not None

    @property
    def is_multiplexed(self) -> bool:
        return isinstance(self._http, _Http2)

    def send(self, outgoing: Outgoing) -> Exchange:
        """Send a request, for which there must be room."""
        http = self._http
        assert http is not None

        def on_over() -> None:
            self.idle_since_s = self.loop.time()

        exchange = Exchange(http, on_over)
        http.send(exchange, outgoing)
        return exchange

    def close(self) -> None:
        """Once all is written."""
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    # The protocols' side.

    def write(self, data: bytes) -> None:
        if data and self._transport is not None:
            self._transport.write(data)
            if self._transport.get_write_buffer_size() > MAX_UNSENT_BYTES:
                self._transport.abort()

    def flush_soon(self) -> None:
        """Once for all exchanges that are read in this turn."""
        if not self._will_flush:
            self._will_flush = True
            self.loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._will_flush = False
        cast(_Http2, self._http).flush()

    def set_reading(self, is_reading: bool) -> None:
        if self._transport is not None and not self._transport.is_closing():
            if is_reading:
                self._transport.resume_reading()
            else:
                self._transport.pause_reading()

    # asyncio.Protocol.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        over_tls = transport.get_extra_info("ssl_object")
        if over_tls is not None:
            self._protocol = (over_tls.selected_alpn_protocol() or H1.decode()).encode()
        if self._protocol == H2:
            self._http = http2 = _Http2(self)
            http2.flush()
        else:
            self._http = _Http1(self)
            self.ready.set_result(None)

    def data_received(self, data: bytes) -> None:
        http = self._http
        assert http is not None
        try:
            http.receive(data)
        except ConnectionFault as fault:
            self.speaks_http1 = isinstance(fault, NotHttp2)
            self._fail(UpstreamFault(str(fault).rstrip(".").replace("It ", "it ", 1)))
            self.abort()
            return
        if http.is_ready and not self.ready.done():
            self.ready.set_result(None)

    def eof_received(self) -> bool:
        self.data_received(b"")  # ends a body without a length
        return False

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        was_asking_http2 = isinstance(self._http, _Http2) and not self._http.is_ready
        self.speaks_http1 |= was_asking_http2
        self._fail(UpstreamFault("the connection was lost" if error is None else f"the connection was lost: {error}"))

    def _fail(self, fault: UpstreamFault) -> None:
        if not self.ready.done():
            self.ready.set_exception(fault)
            self.ready.exception()  # marks it as retrieved
        if self._http is not None:
            self._http.fail(fault)


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
        raise UpstreamFault(f"it cannot be connected to within {CONNECT_S:g} s", is_untouched=True) from None
    except UpstreamFault as fault:
        if connection.speaks_http1 and H1 in address.protocols and protocol == H2 and address.tls is None:
            return await connect(address, H1)
        raise UpstreamFault(str(fault), is_untouched=True) from fault
    except OSError as error:  # ssl.SSLError is one
        raise UpstreamFault(f"it cannot be connected to: {error.strerror or error}", is_untouched=True) from None
    except asyncio.CancelledError:
        connection.abort()
        raise
    return connection


def client_tls(ca: str | None, certificate: str | None, key: str | None, protocols: Sequence[bytes]) -> ssl.SSLContext:
    """
    Args:
        ca: file of the upstream's; None: the system's.
        certificate, key: files of ours, towards it.

    Raises:
        OSError: a file cannot be used.
    """
    context = ssl.create_default_context(cafile=ca)
    if certificate is not None:
        context.load_cert_chain(certificate, key)
    context.set_alpn_protocols([one.decode() for one in protocols])
    return context
