"""haproxy's agent-check (its configuration manual, section 5.2): a port that answers each connection with one line.

It says how much of its weight the server wants, and whether it takes requests. Thread: loop.
"""

import asyncio
from collections.abc import Callable
from typing import cast

from server.listening.sockets import TcpAddress, open_tcp

BACKLOG = 64


class AgentCheck(asyncio.Protocol):
    """line: returns what is to be said now, such as "up ready 75%"."""

    def __init__(self, address: TcpAddress, line: Callable[[], str]) -> None:
        self._address = address
        self._line = line
        self._servers: list[asyncio.Server] = []

    @property
    def port(self) -> int:
        return cast(int, self._servers[0].sockets[0].getsockname()[1])

    async def start(self) -> None:
        """Raises StartupError: the address cannot be listened on."""
        for sock in open_tcp(self._address, BACKLOG):
            self._servers.append(await asyncio.get_running_loop().create_server(lambda: self, sock=sock))

    def close(self) -> None:
        for server in self._servers:
            server.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        answering = cast(asyncio.Transport, transport)
        answering.write(f"{self._line()}\n".encode())
        answering.close()
