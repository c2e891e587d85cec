"""Clients that do not move: bench/drain.py has them beside those that do. Nothing but the server's end ends them."""

import asyncio
import socket
from contextlib import suppress

from bench import http2_frames
from bench.http2_frames import END_HEADERS, HEADERS, PREFACE, SETTINGS, frame

RECEIVE_BUFFER_BYTES = 4096
HALF_A_HEAD = b"GET /hea"
NO_WINDOW = (4).to_bytes(2, "big") + bytes(4)  # RFC 9113 §6.5.2: SETTINGS_INITIAL_WINDOW_SIZE 0


async def upload_http1(port: int, path: str, body: bytes) -> bytes:
    """All that is said to a request whose last byte never comes."""
    head = f"POST {path} HTTP/1.1\r\nhost: a\r\ncontent-length: {len(body)}\r\n\r\n".encode()
    return await hear(port, head + body[:-1])


async def upload_http2(port: int, path: str, body: bytes) -> bytes:
    """Likewise; frames."""
    upload = frame(HEADERS, http2_frames.request_head("POST", path), END_HEADERS, 1)
    return await hear(port, http2_frames.OPENING + upload + frame(http2_frames.DATA, body[:-1], 0, 1))


async def hear(port: int, sent: bytes) -> bytes:
    """What is said on a connection to its end."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    received = b""
    with suppress(ConnectionError):
        writer.write(sent)
        while data := await reader.read(65_536):
            received += data
    writer.close()
    with suppress(OSError):
        await writer.wait_closed()
    return received


def stop_in_midst(port: int, path: str, body: bytes) -> list[socket.socket]:
    """A socket that nobody reads, an HTTP/2 window that stays shut, half a head: to be closed by the caller."""
    head = f"POST {path} HTTP/1.1\r\nhost: a\r\ncontent-length: {len(body)}\r\n\r\n".encode()
    shut = PREFACE + frame(SETTINGS, NO_WINDOW)
    shut += http2_frames.request(1, http2_frames.request_head("POST", path), body)
    sockets = []
    for sent in (head + body, shut, HALF_A_HEAD):
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER_BYTES)
        connection.connect(("127.0.0.1", port))
        connection.sendall(sent)
        sockets.append(connection)
    return sockets
