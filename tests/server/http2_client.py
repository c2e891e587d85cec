"""An HTTP/2 client on a network in memory: h2 as the peer, and what it has seen."""

from collections.abc import Callable
from dataclasses import dataclass, field

from h2 import events
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.errors import ErrorCodes
from h2.settings import SettingCodes

from tests.server.fakes import MemoryServer

BASE = ((":method", "GET"), (":scheme", "http"), (":authority", "a"), (":path", "/"))


def fields(**changes: str | None) -> list[tuple[str, str]]:
    """A request's pseudo-fields, some of them changed, or left out with None."""
    replaced = {f":{name}": value for name, value in changes.items()}
    pairs = [(name, replaced.get(name, value)) for name, value in BASE]
    return [(name, value) for name, value in pairs if value is not None]


POST = fields(method="POST")


@dataclass
class Response:
    """One stream, as the client has seen it."""

    headers: dict[str, str] = field(default_factory=dict)
    informational: list[int] = field(default_factory=list)
    body: bytes = b""
    trailers: dict[str, str] | None = None
    is_complete: bool = False
    reset: ErrorCodes | int | None = None

    @property
    def status(self) -> int:
        return int(self.headers[":status"])


class Http2Client:
    """Speaks to a MemoryServer.

    Args:
        upgrade: makes an HTTP/1.1 head of HTTP2-Settings; `pieces` are its body, one read each.
        reads: acknowledge response bodies as they come; otherwise the windows fill up.
    """

    def __init__(
        self,
        server: MemoryServer,
        reads: bool = True,
        settings: dict[int, int] | None = None,
        upgrade: Callable[[bytes], bytes] | None = None,
        pieces: tuple[bytes, ...] = (),
    ) -> None:
        config = H2Configuration(client_side=True, header_encoding="utf-8", validate_outbound_headers=False)
        self.h2 = H2Connection(config)
        self.transport = server.connect()
        self.responses: dict[int, Response] = {}
        self.goaways: list[tuple[ErrorCodes | int, int]] = []  # code, last stream
        self.reads = reads
        self._server = server
        self._num_seen = 0
        self._next_stream_id = 1
        if settings:
            self.h2.local_settings.update(settings)
            self.h2.local_settings.acknowledge()
        if upgrade is None:
            self.h2.initiate_connection()
        else:
            self._upgrade(upgrade, pieces)
        self.exchange()

    def _upgrade(self, upgrade: Callable[[bytes], bytes], pieces: tuple[bytes, ...]) -> None:
        settings = self.h2.initiate_upgrade_connection()
        assert settings is not None
        for piece in (upgrade(settings.rstrip(b"=")), *pieces):
            self.transport.feed(piece)
            self._server.loop.settle()
        self.responses[1] = Response()
        self._next_stream_id = 3
        self._num_seen = self.transport.received.index(b"\r\n\r\n") + 4

    def request(self, headers: list[tuple[str, str]] | None = None, body: bytes | None = None, end: bool = True) -> int:
        """Send one; its stream id."""
        stream_id = self.begin(headers, body, end)
        self.exchange()
        return stream_id

    def begin(self, headers: list[tuple[str, str]] | None = None, body: bytes | None = None, end: bool = True) -> int:
        """Prepare a request without sending it."""
        stream_id = self._next_stream_id
        self._next_stream_id += 2
        self.responses[stream_id] = Response()
        self.h2.send_headers(stream_id, headers or fields(), end_stream=end and body is None)
        if body is not None:
            self.h2.send_data(stream_id, body, end_stream=end)
        return stream_id

    def exchange(self) -> None:
        """Send what there is, read what comes, until both are quiet."""
        while True:
            data = self.h2.data_to_send()
            if data:
                self.transport.feed(data)
            self._server.loop.settle()
            self.read()
            if not self.h2._data_to_send and len(self.transport.received) == self._num_seen:
                return

    def send(self, data: bytes) -> None:
        """Raw frames, behind h2's back."""
        self.transport.feed(data)
        self.exchange()

    def advance(self, seconds: float) -> None:
        self._server.loop.advance(seconds)
        self.exchange()

    def acknowledge(self, stream_id: int) -> None:
        """Read on: give back all that was taken of the windows."""
        size = len(self.responses[stream_id].body)
        self.h2.acknowledge_received_data(size, stream_id)
        self.exchange()

    def read(self) -> None:
        """Take what has come."""
        data = bytes(self.transport.received[self._num_seen :])
        self._num_seen += len(data)
        for piece in without_goaways(data, self.goaways):
            for event in self.h2.receive_data(piece):
                self._take(event)

    def _take(self, event: events.Event) -> None:
        stream_id = getattr(event, "stream_id", None)
        response = self.responses.get(stream_id) if stream_id else None
        if response is None:
            return
        if isinstance(event, events.InformationalResponseReceived):
            response.informational.append(int({str(name): value for name, value in event.headers or ()}[":status"]))
        elif isinstance(event, events.ResponseReceived):
            response.headers = {str(name): str(value) for name, value in event.headers or ()}
        elif isinstance(event, events.TrailersReceived):
            response.trailers = {str(name): str(value) for name, value in event.headers or ()}
        elif isinstance(event, events.DataReceived):
            response.body += event.data or b""
            if self.reads and event.flow_controlled_length:
                self.h2.acknowledge_received_data(event.flow_controlled_length, stream_id)  # type: ignore[arg-type]
        elif isinstance(event, events.StreamEnded):
            response.is_complete = True
        elif isinstance(event, events.StreamReset):
            response.reset = event.error_code


def without_goaways(data: bytes, goaways: list[tuple[ErrorCodes | int, int]]) -> list[bytes]:
    """The frames but GOAWAY, after which h2 would hear nothing more; `data` is of whole frames."""
    frames = []
    while data:
        end = 9 + int.from_bytes(data[:3], "big")
        if data[3] == 7:
            goaways.append((ErrorCodes(int.from_bytes(data[13:17], "big")), int.from_bytes(data[9:13], "big")))
        else:
            frames.append(data[:end])
        data = data[end:]
    return frames


INITIAL_WINDOW = SettingCodes.INITIAL_WINDOW_SIZE
