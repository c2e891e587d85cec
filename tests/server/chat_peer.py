"""A model server on a real socket that plays prepared answers: the other end for what talks to servers."""

import json
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

USAGE = {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10}


def piece(text: str) -> bytes:
    return b"data: " + json.dumps({"choices": [{"index": 0, "delta": {"content": text}}]}).encode() + b"\n\n"


ANSWER = [
    b'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}\n\n',
    b": keep-alive\n\n",
    piece("KV"),
    piece(" ca"),
    piece("che"),
    b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"stop"}],"usage":null}\n\n',
    b'data: {"choices":[],"usage":' + json.dumps(USAGE).encode() + b"}\n\n",
    b"data: [DONE]\n\n",
]


class Peer(ThreadingHTTPServer):
    """A model server that plays prepared answers and keeps what it was asked."""

    daemon_threads = True

    def __init__(self, tls: ssl.SSLContext | None = None) -> None:
        super().__init__(("127.0.0.1", 0), PeerHandler)
        self._scheme = "http" if tls is None else "https"
        if tls is not None:
            self.socket = tls.wrap_socket(self.socket, server_side=True)
        self.chunks: list[bytes] = ANSWER
        self.refusal: tuple[int, bytes] | None = None
        self.stages: list[str] = []  # what /ready still answers 503 with
        self.ends_answer = True
        self.missing_bytes = 0  # of a GET's answer, which breaks off
        self.asked: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.client_left = threading.Event()

    @property
    def url(self) -> str:
        return f"{self._scheme}://127.0.0.1:{self.server_address[1]}"


class PeerHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Peer

    def log_message(self, format: str, *args: Any) -> None:
        """Quiet."""

    def do_GET(self) -> None:
        if self.path == "/v1/models":
            self._answer(200, b'{"data": [{"id": "tiny"}, {"id": "other"}]}')
        elif self.path == "/ready" and self.server.stages:
            stage = self.server.stages.pop(0)
            self._answer(503, json.dumps({"error": {"message": stage}}).encode())
        elif self.path.startswith("/v1/files/"):
            self._answer(*(self.server.refusal or (200, b"{}")), self.server.missing_bytes)
        else:
            self._answer(200, b"{}")

    def do_POST(self) -> None:
        self.server.keys.append(self.headers["authorization"])
        self.server.asked.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
        if self.server.refusal is not None:
            self._answer(*self.server.refusal)
            return
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        for chunk in self.server.chunks:
            self.wfile.write(b"%x\r\n%s\r\n" % (len(chunk), chunk))
        if self.server.ends_answer:
            self.wfile.write(b"0\r\n\r\n")
        elif self.rfile.read(1) == b"":  # blocks until the client closes
            self.server.client_left.set()
        self.close_connection = True

    def _answer(self, status: int, body: bytes, missing_bytes: int = 0) -> None:
        self.send_response(status)
        self.send_header("content-length", str(len(body) + missing_bytes))
        self.close_connection = missing_bytes > 0
        self.end_headers()
        self.wfile.write(body)


@contextmanager
def running_peer(tls: ssl.SSLContext | None = None) -> Iterator[Peer]:
    with Peer(tls) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
