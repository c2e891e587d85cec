"""A client that hides nothing: bytes over a socket, and the answer as it came."""

import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

TIMEOUT_S = 180.0  # for a read of a server that hangs: a test then fails, whatever else it asserts


@dataclass(frozen=True)
class RawAnswer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        """The envelope's content, which must be whole."""
        error: dict[str, Any] = self.json["error"]
        assert set(error) == {"message", "type", "param", "code"}, error
        assert error["message"], error
        return error

    @property
    def code(self) -> str | None:
        code: str | None = self.error["code"]
        return code


class ConnectionEnded(Exception):
    """The server closed before the answer was whole; `received` is what there was of it."""

    def __init__(self, received: bytes) -> None:
        super().__init__(f"the connection ended after {received!r}")
        self.received = received


class RawClient:
    """One connection.

    Args:
        receive_buffer_bytes: what the kernel takes unread; None: what it likes.
    """

    def __init__(self, port: int, receive_buffer_bytes: int | None = None) -> None:
        self._socket = socket.socket()
        self._socket.settimeout(TIMEOUT_S)
        if receive_buffer_bytes is not None:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer_bytes)
        try:
            self._socket.connect(("127.0.0.1", port))
        except OSError:
            self._socket.close()
            raise
        self._buffer = b""

    def send(self, data: bytes) -> None:
        self._socket.sendall(data)

    def half_close(self) -> None:
        self._socket.shutdown(socket.SHUT_WR)

    def reset(self) -> None:
        """Close with RST, as a crashed client does."""
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        self._socket.close()

    def close(self) -> None:
        self._socket.close()

    def read_answer(self, has_body: bool = True) -> RawAnswer:
        """The next final answer, whole; informational ones are skipped.

        Args:
            has_body: False for the answer to HEAD.
        """
        status, headers = self.read_head()
        while status < 200:
            status, headers = self.read_head()
        if not has_body or status in (204, 304):
            return RawAnswer(status, headers, b"")
        if headers.get("transfer-encoding") == "chunked":
            body = b"".join(self.read_chunks())
        elif "content-length" in headers:
            body = self.read_exactly(int(headers["content-length"]))
        else:
            body = self.read_to_end()
        return RawAnswer(status, headers, body)

    def read_head(self) -> tuple[int, dict[str, str]]:
        lines = self.read_until(b"\r\n\r\n").decode("latin-1").split("\r\n")[:-2]
        version, status, _ = lines[0].split(" ", 2)
        assert version == "HTTP/1.1", lines[0]
        fields = [line.split(": ", 1) for line in lines[1:]]
        assert len(dict(fields)) == len(fields), f"a field appears twice: {lines}"
        return int(status), dict(fields)

    def read_chunks(self) -> Iterator[bytes]:
        while size := int(self.read_until(b"\r\n"), 16):
            yield self.read_exactly(size)
            assert self.read_exactly(2) == b"\r\n"
        assert self.read_exactly(2) == b"\r\n"

    def read_until(self, mark: bytes) -> bytes:
        """All up to the mark, and it. Framing is not taken off."""
        while mark not in self._buffer:
            self._receive()
        end = self._buffer.index(mark) + len(mark)
        data, self._buffer = self._buffer[:end], self._buffer[end:]
        return data

    def read_exactly(self, num_bytes: int) -> bytes:
        while len(self._buffer) < num_bytes:
            self._receive()
        data, self._buffer = self._buffer[:num_bytes], self._buffer[num_bytes:]
        return data

    def read_to_end(self) -> bytes:
        try:
            while True:
                self._receive()
        except ConnectionEnded:
            data, self._buffer = self._buffer, b""
            return data

    def read_to_end_or_reset(self) -> bytes:
        """As read_to_end, of a server that may cut the connection off."""
        try:
            return self.read_to_end()
        except ConnectionResetError:
            data, self._buffer = self._buffer, b""
            return data

    def is_kept_open(self) -> bool:
        """Whether another request is answered on this connection; otherwise it must be closed."""
        try:
            self.send(b"GET /health HTTP/1.1\r\nhost: h\r\n\r\n")
            return self.read_answer().status == 200
        except (ConnectionEnded, ConnectionError):
            return False

    def _receive(self) -> None:
        data = self._socket.recv(65536)
        if not data:
            raise ConnectionEnded(self._buffer)
        self._buffer += data


@contextmanager
def connected(port: int, receive_buffer_bytes: int | None = None) -> Iterator[RawClient]:
    client = RawClient(port, receive_buffer_bytes)
    try:
        yield client
    finally:
        client.close()


def request_bytes(
    method: str, path: str, body: bytes | None = None, headers: tuple[str, ...] = (), api_key: str | None = None
) -> bytes:
    lines = [f"{method} {path} HTTP/1.1", "host: 127.0.0.1", *headers]
    if body is not None:
        lines += ["content-type: application/json", f"content-length: {len(body)}"]
    if api_key is not None:
        lines.append(f"authorization: Bearer {api_key}")
    return "\r\n".join([*lines, "", ""]).encode() + (body or b"")


def post_bytes(path: str, content: Any, headers: tuple[str, ...] = (), api_key: str | None = None) -> bytes:
    return request_bytes("POST", path, json.dumps(content).encode(), headers, api_key)


def ask(port: int, method: str, path: str, body: bytes | None = None, api_key: str | None = None) -> RawAnswer:
    """One request on a connection of its own."""
    with connected(port) as client:
        client.send(request_bytes(method, path, body, api_key=api_key))
        return client.read_answer(has_body=method != "HEAD")


def post(port: int, path: str, content: Any, api_key: str | None = None) -> RawAnswer:
    return ask(port, "POST", path, json.dumps(content).encode(), api_key)
