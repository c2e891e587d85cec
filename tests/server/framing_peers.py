"""Who reads the table's cases: our server on a real socket, alone and behind nginx and haproxy.

A proxy tells its client's address in X-Forwarded-For: each case is sent from a loopback address of its own.
"""

import asyncio
import contextlib
import os
import re
import shutil
import socket
import subprocess
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from server.listening.listener import Listener, ListenerConfig
from server.listening.sockets import Bind, TcpAddress
from server.wire.messages import ResponseHead
from server.wire.stream import HttpStream
from tests.server.fakes import refuse
from tests.server.framing_cases import LAST, Case, Understood, noted

PROXIES = ("nginx", "haproxy")
DEADLINE_S = 20.0  # for a peer that says nothing: what it has is then an open request
_NUM_AT_ONCE = 16
_NO_LIMIT = 2**64
_HOST = "127.0.0.1"
_OK = ResponseHead(200, ((b"content-length", b"0"),))
_ABSOLUTE = re.compile(r"https?://[^/?]*", re.IGNORECASE)

_NGINX = """
daemon off;
worker_processes 1;
pid {directory}/nginx.pid;
error_log {directory}/log info;
events {{ worker_connections 1024; }}
http {{
    access_log off;
    client_body_temp_path {directory}/body;
    proxy_temp_path {directory}/proxy;
    fastcgi_temp_path {directory}/fastcgi;
    uwsgi_temp_path {directory}/uwsgi;
    scgi_temp_path {directory}/scgi;
    client_max_body_size 0;
    client_body_buffer_size 1m;
    large_client_header_buffers 4 32k;
    proxy_http_version 1.1;
    proxy_ignore_client_abort on;
    server {{
        listen {host}:{port};
        server_name a;
        location / {{
            proxy_pass http://{host}:{backend};
            proxy_set_header Host $host;
            proxy_set_header X-Forwarded-For $remote_addr;
        }}
    }}
}}
"""

_HAPROXY = """
global
    maxconn 500
defaults
    mode http
    http-reuse never
    timeout connect 30s
    timeout client 60s
    timeout server 60s
frontend front
    bind fd@{fd}
    http-request set-header X-Forwarded-For %[src]
    default_backend back
backend back
    server steploop {host}:{backend}
"""


class Steploop:
    """Our server, but for what it answers: a handler that notes each request.

    Args:
        is_behind_proxy: X-Forwarded-For says whose the request is, not the connection.
    """

    def __init__(self, is_behind_proxy: bool) -> None:
        self._is_behind_proxy = is_behind_proxy
        self.requests: dict[str, list[str]] = defaultdict(list)  # by the client's address
        self._listener = Listener(
            self._serve, refuse, ListenerConfig((Bind(TcpAddress(_HOST, 0)),), takes_upgrade=True)
        )

    async def _serve(self, stream: HttpStream) -> None:
        request = stream.request
        body = await stream.read_body(_NO_LIMIT)
        client = str(stream.peer).partition(":")[0]
        if self._is_behind_proxy:
            client = (request.header(b"x-forwarded-for") or b"").decode()
        self.requests[client].append(noted(request.method, f"{request.path}?{request.query}", body))
        stream.send_head(_OK)
        stream.end()

    @contextlib.asynccontextmanager
    async def listening(self) -> AsyncIterator[int]:
        await self._listener.start()
        try:
            yield self._listener.port
        finally:
            await self._listener.drain(DEADLINE_S)


class Recorder:
    """Stands between a proxy and our server, hands on every byte, and notes what requests the proxy's are.

    It has a reader of its own, for what proxies send: well-formed, by Content-Length or in chunks.
    """

    def __init__(self, backend: int) -> None:
        self.requests: dict[str, list[str]] = defaultdict(list)
        self._backend = backend

    @contextlib.asynccontextmanager
    async def listening(self) -> AsyncIterator[int]:
        server = await asyncio.start_server(self._serve, _HOST, 0)
        async with server:
            yield server.sockets[0].getsockname()[1]

    async def _serve(self, from_proxy: asyncio.StreamReader, to_proxy: asyncio.StreamWriter) -> None:
        from_us, to_us = await asyncio.open_connection(_HOST, self._backend)
        copy = asyncio.StreamReader(limit=2**20)
        with contextlib.closing(to_proxy), contextlib.closing(to_us):
            await asyncio.gather(self._note_all(copy), _hand_on(from_proxy, to_us, copy), _hand_on(from_us, to_proxy))

    async def _note_all(self, reader: asyncio.StreamReader) -> None:
        case = ""
        try:
            while True:
                case, request = await _read_request(reader)
                self.requests[case].append(request)
        except asyncio.IncompleteReadError:
            pass  # the proxy has said all
        except (ValueError, KeyError, asyncio.LimitOverrunError):
            self.requests[case].append("garbage")


async def _hand_on(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, copy: asyncio.StreamReader | None = None
) -> None:
    with contextlib.suppress(ConnectionError):
        while data := await reader.read(2**16):
            writer.write(data)
            if copy is not None:
                copy.feed_data(data)
    if copy is not None:
        copy.feed_eof()
    writer.close()


async def _read_request(reader: asyncio.StreamReader) -> tuple[str, str]:
    """The case it belongs to, and its note."""
    line, *lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")[:-2]
    method, target, _ = line.split(" ")
    fields = {name.lower(): value.strip(" \t") for name, value in (line.split(":", 1) for line in lines)}
    if fields.get("transfer-encoding", "").lower() == "chunked":
        body = await _read_chunks(reader)
    else:
        body = await reader.readexactly(int(fields.get("content-length", 0)))
    if not target.startswith(("/", "*")):
        path = _ABSOLUTE.sub("", target)
        target = path if path.startswith("/") else "/" + path
    return fields["x-forwarded-for"], noted(method, target, body)


async def _read_chunks(reader: asyncio.StreamReader) -> bytes:
    body = b""
    while size := int((await reader.readuntil(b"\r\n")).partition(b";")[0], 16):
        body += await reader.readexactly(size)
        assert await reader.readexactly(2) == b"\r\n"
    while await reader.readuntil(b"\r\n") != b"\r\n":
        pass
    return body


def installed(name: str) -> str | None:
    """Where the program is; Debian keeps it from the path of users who are not root."""
    return shutil.which(name, path=f"{os.environ.get('PATH', os.defpath)}{os.pathsep}/usr/sbin")


@contextlib.contextmanager
def _proxy(name: str, backend: int, directory: Path) -> Iterator[int]:
    """Run a proxy; its port. Its socket listens already when it starts: there is nothing to wait for."""
    with socket.create_server((_HOST, 0), backlog=1024) as listening, (directory / "log").open("wb") as log:
        port, fd = listening.getsockname()[1], listening.fileno()
        program = installed(name)
        assert program is not None
        configuration = directory / f"{name}.conf"
        text = {"nginx": _NGINX, "haproxy": _HAPROXY}[name]
        configuration.write_text(text.format(directory=directory, host=_HOST, port=port, fd=fd, backend=backend))
        flags = {"nginx": ["-e", str(directory / "log"), "-c"], "haproxy": ["-db", "-f"]}[name]
        process = subprocess.Popen(
            [program, *flags, str(configuration)],
            env=os.environ | {"NGINX": f"{fd};"},  # how nginx is handed a socket
            pass_fds=[fd],
            stdout=log,
            stderr=log,
        )
        try:
            yield port
        finally:
            has_ended = process.poll() is not None
            process.terminate()
            process.wait()
        assert not has_ended, (directory / "log").read_text()


@dataclass(frozen=True)
class Conversation:
    """What one case's client heard: the statuses but 100, and whether the peer closed before it did."""

    statuses: tuple[int, ...]
    is_closed: bool


async def understood_by_us(cases: Sequence[Case]) -> dict[str, Understood]:
    """What our server makes of each case."""
    steploop = Steploop(is_behind_proxy=False)
    async with steploop.listening() as port:
        heard = await _converse(cases, port, is_proxy=False)
    return {
        case.name: _judge(steploop.requests[address], heard[case.name])
        for case, address in zip(cases, _addresses(), strict=False)
    }


@dataclass(frozen=True)
class Forwarded:
    """What a proxy made of a case, and which of the requests that it sent on our server understood."""

    by_proxy: Understood
    understood: tuple[str, ...]


async def understood_by_proxy(name: str, cases: Sequence[Case], directory: Path) -> dict[str, Forwarded]:
    steploop = Steploop(is_behind_proxy=True)
    async with steploop.listening() as backend:
        recorder = Recorder(backend)
        async with recorder.listening() as port:
            with _proxy(name, port, directory) as front:
                heard = await _converse(cases, front, is_proxy=True)
    return {
        case.name: Forwarded(_judge(recorder.requests[address], heard[case.name]), tuple(steploop.requests[address]))
        for case, address in zip(cases, _addresses(), strict=False)
    }


def _judge(requests: list[str], heard: Conversation) -> Understood:
    refusals = [status for status in heard.statuses if status != 200]
    if refusals:
        end = str(refusals[0])
    elif not heard.is_closed:
        end = "waits"
    else:
        end = "end" if requests and requests[-1] == LAST else "closed"
    return Understood(tuple(requests), end)


def _addresses() -> Iterator[str]:
    return (f"127.0.{number >> 8}.{number & 255}" for number in range(2, 2**16))


async def _converse(cases: Sequence[Case], port: int, is_proxy: bool) -> dict[str, Conversation]:
    turn = asyncio.Semaphore(_NUM_AT_ONCE)

    async def one(case: Case, address: str) -> Conversation:
        async with turn:
            return await _send(case, port, address, is_proxy)

    heard = await asyncio.gather(*(one(case, address) for case, address in zip(cases, _addresses(), strict=False)))
    return {case.name: conversation for case, conversation in zip(cases, heard, strict=True)}


async def _send(case: Case, port: int, address: str, is_proxy: bool) -> Conversation:
    """Say what the case says, and hear what comes of it, until the peer closes.

    Where the last request is not expected to come to its end, we say that we are done: a proxy at once, for it answers
    what it has; our server after its answers, for it would take us for gone.
    """
    expected = case.expected
    is_open_end = expected.end == "waits" or (is_proxy and expected.end not in ("end", "101"))
    num_answers = 0 if is_proxy else len(expected.requests)
    reader, writer = await asyncio.open_connection(_HOST, port, local_addr=(address, 0))
    with contextlib.closing(writer):
        writer.write(case.sent)
        received = bytearray()
        try:
            async with asyncio.timeout(DEADLINE_S):
                if is_open_end:
                    while len(_statuses(received)) < num_answers and not reader.at_eof():
                        received += await reader.read(2**16)
                    writer.write_eof()
                received += await reader.read()
        except TimeoutError:
            return Conversation(_statuses(received), is_closed=False)
        except OSError:
            pass  # it closed while we spoke
        return Conversation(_statuses(received), is_closed=is_proxy or not is_open_end)


def _statuses(received: bytearray) -> tuple[int, ...]:
    """The statuses of whole answers but 100, up to the one that ends HTTP/1.1."""
    statuses: list[int] = []
    position = 0
    while received.startswith(b"HTTP/1.", position) and (end := received.find(b"\r\n\r\n", position)) >= 0:
        head = bytes(received[position:end]).decode("latin-1").lower()
        status = int(head[9:12])
        length = re.search(r"\r\ncontent-length: *(\d+)", head)
        position = end + 4 + (int(length[1]) if length else 0)
        if status != 100:
            statuses.append(status)
        if status == 101:
            break
    return tuple(statuses)
