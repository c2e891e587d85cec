"""What the acceptor does when a connection cannot be taken: by a fault of ours, or for want of a descriptor.

The latter is tried in a process with few of them.
"""

import asyncio
import contextlib
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import uvloop

from server.listening.listener import Acceptor

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
    run = subprocess.run([sys.executable, "-c", EXHAUST], cwd=REPOSITORY, capture_output=True, text=True, timeout=60)
    assert run.stdout == "1\n", run.stderr
    assert run.stderr.count("no connection can be accepted now") == 1


def test_connection_that_cannot_be_taken_is_closed_and_the_next_comes_in(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def scenario() -> None:
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

    uvloop.run(asyncio.wait_for(scenario(), 30))
    assert "ZeroDivisionError" in caplog.text
