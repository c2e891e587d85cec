"""The listener on real loopback sockets, on ephemeral ports; and its acceptor, short of descriptors."""

import asyncio
import contextlib
import itertools
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from core.errors import ExitCode, StartupError
from server.listening.clients import MAX_CONNECTIONS, Refusals
from server.listening.listener import ACCEPTS_PER_WAKEUP, Acceptor, Listener, ListenerConfig
from server.listening.sockets import Bind, PassedSocket, TcpAddress, UnixAddress
from server.wire.messages import ResponseHead
from server.wire.stream import HttpStream
from tests.server.fakes import PEER, refuse

GET = b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"


async def hello(stream: HttpStream) -> None:
    stream.send_head(ResponseHead(200, ((b"content-length", b"5"),)))
    stream.send(b"hello")
    stream.end()


class Hold:
    """Streams, and ends when told to."""

    def __init__(self) -> None:
        self.started: asyncio.Future[HttpStream] = asyncio.get_running_loop().create_future()
        self.gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.may_end: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def __call__(self, stream: HttpStream) -> None:
        stream.on_disconnect = lambda: self.gone.set_result(None)
        stream.send_head(ResponseHead(200, ()))
        self.started.set_result(stream)
        await asyncio.wait([self.gone, self.may_end], return_when=asyncio.FIRST_COMPLETED)
        stream.end()


async def start(
    handler: Callable[[HttpStream], Awaitable[None]], max_connections: int = 100, host: str = "127.0.0.1"
) -> Listener:
    config = ListenerConfig((Bind(TcpAddress(host, 0)),), max_connections=max_connections)
    listener = Listener(handler, refuse, config)
    await listener.start()
    return listener


async def connect(listener: Listener) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", listener.port)


async def close(writer: asyncio.StreamWriter) -> None:
    writer.close()
    await writer.wait_closed()


async def test_drain_answers_who_was_accepted_in_the_turn_before_it() -> None:
    listener = await start(hello)
    with socket.create_connection(("127.0.0.1", listener.port), timeout=10) as client:
        client.sendall(GET)
        while not listener.num_open:
            await asyncio.sleep(0)
        await listener.drain(5)  # its opening has not begun
        assert client.recv(1000).startswith(b"HTTP/1.1 200")


async def test_answers_on_the_port_it_reports() -> None:
    listener = await start(hello)
    assert listener.port > 0
    reader, writer = await connect(listener)
    writer.write(GET)
    assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 OK\r\n")
    assert await reader.readexactly(5) == b"hello"
    assert (listener.num_accepted, listener.num_open, listener.refusals.counts.total()) == (1, 1, 0)
    await listener.drain(5)
    assert await reader.read() == b""
    assert listener.num_open == 0
    await close(writer)


async def test_connections_over_the_cap_are_closed_and_counted() -> None:
    listener = await start(hello, max_connections=1)
    reader, writer = await connect(listener)
    writer.write(GET)
    await reader.readuntil(b"hello")
    over_reader, over_writer = await connect(listener)
    with contextlib.suppress(ConnectionResetError):
        assert await over_reader.read() == b""
    assert (listener.num_accepted, listener.num_open, listener.refusals.counts.total()) == (2, 1, 1)
    await listener.drain(5)
    await close(writer)
    over_writer.close()


@pytest.mark.parametrize("num_turns", range(6))
async def test_drain_closes_whom_it_finds_on_the_doorstep(num_turns: int) -> None:
    listener = await start(hello)
    clients = [socket.create_connection(("127.0.0.1", listener.port)) for _ in range(5)]
    for _ in range(num_turns):
        await asyncio.sleep(0)
    await listener.drain(5)
    assert listener.num_open == 0
    for client in clients:
        with contextlib.suppress(ConnectionResetError):
            assert client.recv(1) == b""
        client.close()


async def test_client_is_known_by_its_address_and_noticed_when_it_closes() -> None:
    hold = Hold()
    listener = await start(hold)
    _, writer = await connect(listener)
    writer.write(GET)
    stream = await hold.started
    assert str(stream.peer) == "127.0.0.1:{}".format(writer.get_extra_info("sockname")[1])
    await close(writer)
    await hold.gone
    assert not stream.is_open
    await listener.drain(5)


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_UNIX])
async def test_slow_reader_is_noticed_within_a_bounded_amount(
    family: socket.AddressFamily, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = str(tmp_path_factory.mktemp("s") / "a")
    hold = Hold()
    binds = (Bind(TcpAddress(port=0)), Bind(UnixAddress(path)))
    listener = Listener(hold, refuse, ListenerConfig(binds))
    await listener.start()
    with socket.socket(family) as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(path if family == socket.AF_UNIX else ("127.0.0.1", listener.port))
        client.sendall(GET)
        stream = await hold.started
        num_sent = 0
        while not stream.is_blocked:
            stream.send(b"x" * 1024)
            num_sent += 1024
            listener.batch.flush_all()
            await asyncio.sleep(0)
            assert num_sent < 128 * 1024
    await hold.gone
    await listener.drain(5)


async def test_address_in_use_names_the_port_and_a_way_out() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(StartupError, match=str(port)) as caught:
            await Listener(hello, refuse, ListenerConfig((Bind(TcpAddress(port=port)),))).start()
    assert "--port" in caught.value.fix
    assert caught.value.exit_code == ExitCode.PORT


async def test_localhost_listens_on_every_address_with_one_port() -> None:
    listener = await start(hello, host="localhost")
    reader, writer = await connect(listener)
    writer.write(GET)
    await reader.readuntil(b"hello")
    await listener.drain(5)
    await close(writer)


async def test_unix_socket_serves_clients_that_have_no_address(tmp_path_factory: pytest.TempPathFactory) -> None:
    path = str(tmp_path_factory.mktemp("s") / "a")
    hold = Hold()
    listener = Listener(hold, refuse, ListenerConfig((Bind(UnixAddress(path)),)))
    await listener.start()
    assert listener.port == 0
    reader, writer = await asyncio.open_unix_connection(path)
    writer.write(GET)
    assert str((await hold.started).peer) == "unix"
    hold.may_end.set_result(None)
    await reader.readuntil(b"0\r\n\r\n")
    await listener.drain(5)
    with pytest.raises(FileNotFoundError):
        await asyncio.open_unix_connection(path)
    await close(writer)


async def test_passed_socket_keeps_who_comes_during_the_drain_for_the_next_process() -> None:
    with socket.create_server(("127.0.0.1", 0)) as systemds:
        hold = Hold()
        passed = [PassedSocket(systemds.dup(), "front")]
        listener = Listener(hold, refuse, ListenerConfig((), passed))
        await listener.start()
        assert listener.port == systemds.getsockname()[1]
        _, writer = await connect(listener)
        writer.write(GET)
        await hold.started
        draining = asyncio.create_task(listener.drain(30))
        await asyncio.sleep(0)
        late_reader, late_writer = await connect(listener)
        hold.may_end.set_result(None)
        await draining
        heir = Listener(hello, refuse, ListenerConfig((), [PassedSocket(systemds.dup(), "front")]))
        await heir.start()
        late_writer.write(GET)
        await late_reader.readuntil(b"hello")
        assert (listener.num_accepted, heir.num_accepted) == (1, 1)
        await heir.drain(5)
        await close(late_writer)
        await close(writer)


async def test_hundreds_that_come_at_once_are_all_accepted_a_few_a_turn() -> None:
    listener = await start(hello, max_connections=1000)
    clients = []
    for _ in range(300):
        client = socket.socket()
        client.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            client.connect(("127.0.0.1", listener.port))
        clients.append(client)
    steps = [0]
    while listener.num_open < len(clients):
        await asyncio.sleep(0)
        steps.append(listener.num_open)
    assert max(after - before for before, after in itertools.pairwise(steps)) <= ACCEPTS_PER_WAKEUP
    for client in clients:
        client.close()
    await listener.drain(5)


def test_refusals_are_told_in_one_line_now_and_then(caplog: pytest.LogCaptureFixture) -> None:
    now = 0.0
    refusals = Refusals(lambda: now)
    for _ in range(3):
        refusals.add(MAX_CONNECTIONS, PEER)
    assert [record.getMessage() for record in caplog.records] == [
        "a connection refused, the last from 192.0.2.7:4242: --max-connections are open"
    ]
    now = 11.0
    refusals.add(MAX_CONNECTIONS, PEER)
    assert caplog.records[-1].getMessage().startswith("3 connections refused, the last from")
    assert refusals.counts[MAX_CONNECTIONS] == 4


REPOSITORY = Path(__file__).parents[2]
# Fills the table of descriptors, has a client connect, and frees two: counts how often the loop came round meanwhile
EXHAUST = """
import asyncio, os, resource, socket, sys
import uvloop
from server.listening.listener import Acceptor

async def main():
    loop = asyncio.get_running_loop()
    listening = socket.create_server(("127.0.0.1", 0))
    listening.setblocking(False)
    accepted = loop.create_future()
    acceptor = Acceptor(loop, listening, lambda sock, address: accepted.set_result(sock))
    client = socket.socket()
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
    taken = []
    try:
        while True:
            taken.append(os.dup(0))
    except OSError:
        pass
    acceptor.start()
    client.connect(listening.getsockname())
    while not acceptor.num_pauses:
        await asyncio.sleep(0)
    os.close(taken.pop())
    os.close(taken.pop())  # accept(2) takes one before it looks whether there is anybody left
    sock = await accepted
    assert sock.getpeername() == client.getsockname()
    acceptor.stop()
    print(acceptor.num_pauses)

uvloop.run(asyncio.wait_for(main(), 30))
"""


def test_without_descriptors_it_pauses_and_goes_on_once_there_is_one() -> None:
    run = subprocess.run([sys.executable, "-c", EXHAUST], cwd=REPOSITORY, capture_output=True, text=True, timeout=300)
    assert run.stdout == "1\n", run.stderr
    assert run.stderr.count("connections cannot be accepted") == 1


async def test_connection_that_cannot_be_taken_is_closed_and_the_next_comes_in(
    caplog: pytest.LogCaptureFixture,
) -> None:
    loop = asyncio.get_running_loop()
    welcomed = loop.create_future()
    names: list[Any] = []

    def welcome(accepted: socket.socket, address: Any) -> None:
        names.append(address)
        if len(names) == 1:
            raise ZeroDivisionError
        welcomed.set_result(accepted)

    with contextlib.ExitStack() as stack:
        listening = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        listening.setblocking(False)
        first, second = (stack.enter_context(socket.create_connection(listening.getsockname())) for _ in range(2))
        acceptor = Acceptor(loop, listening, welcome)
        acceptor.start()
        stack.enter_context(await welcomed)
        acceptor.stop()
        assert names == [first.getsockname(), second.getsockname()]
        assert first.recv(1) == b""
    assert "ZeroDivisionError" in caplog.text
