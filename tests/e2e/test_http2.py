"""HTTP/2 as real clients speak it, in the clear and over TLS."""

import asyncio
import json
import re
import signal
import socket
import ssl
from collections.abc import Callable
from pathlib import Path

import httpx
from h2 import events
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.errors import ErrorCodes
from h2.settings import SettingCodes

from core.errors import ExitCode
from tests.certificates import make_certificate, needs_openssl
from tests.e2e.conftest import MODEL
from tests.e2e.raw_http import TIMEOUT_S
from tests.e2e.server_process import ServerProcess

CHAT = {"model": MODEL, "max_tokens": 5, "temperature": 0, "messages": [{"role": "user", "content": "What is a step?"}]}
ENDLESS = CHAT | {"stream": True, "ignore_eos": True, "max_tokens": 1500}


class RealClient:
    """h2 over a real socket.

    Args:
        window: that each response may fill, unread.
        receive_buffer_bytes: what the kernel takes unread; None: what it likes.
        certificate: to trust, where the server speaks TLS.
    """

    def __init__(
        self,
        port: int,
        window: int = 65_535,
        receive_buffer_bytes: int | None = None,
        certificate: Path | None = None,
    ) -> None:
        self.h2 = H2Connection(H2Configuration(client_side=True, header_encoding="utf-8"))
        self.h2.local_settings.update({SettingCodes.INITIAL_WINDOW_SIZE: window})
        self.h2.local_settings.acknowledge()
        self.h2.initiate_connection()
        self.bodies: dict[int, bytes] = {}
        self.ended: set[int] = set()
        self.resets: dict[int, ErrorCodes | int] = {}
        self._socket = socket.socket()
        self._socket.settimeout(TIMEOUT_S)
        if receive_buffer_bytes is not None:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer_bytes)
        self._socket.connect(("127.0.0.1", port))
        if certificate is not None:
            context = ssl.create_default_context(cafile=str(certificate))
            context.set_alpn_protocols(["h2"])
            self._socket = context.wrap_socket(self._socket, server_hostname="127.0.0.1")
        self.flush()

    def __enter__(self) -> "RealClient":
        return self

    def __exit__(self, *error: object) -> None:
        self._socket.close()

    def chat(self, content: dict[str, object]) -> int:
        stream_id = self.h2.get_next_available_stream_id()
        head = [(":method", "POST"), (":scheme", "http"), (":authority", "a"), (":path", "/v1/chat/completions")]
        self.h2.send_headers(stream_id, [*head, ("content-type", "application/json")])
        self.h2.send_data(stream_id, json.dumps(content).encode(), end_stream=True)
        self.bodies[stream_id] = b""
        self.flush()
        return stream_id

    def flush(self) -> None:
        self._socket.sendall(self.h2.data_to_send())

    def read_until(self, condition: Callable[[], bool], acknowledges: bool = True) -> None:
        while not condition():
            data = self._socket.recv(65_536)
            assert data, "the connection has ended"
            for event in self.h2.receive_data(data):
                if isinstance(event, events.DataReceived) and event.stream_id is not None:
                    self.bodies[event.stream_id] += event.data or b""
                    if acknowledges and event.flow_controlled_length:
                        self.h2.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
                elif isinstance(event, events.StreamEnded) and event.stream_id is not None:
                    self.ended.add(event.stream_id)
                elif isinstance(event, events.StreamReset) and event.stream_id is not None:
                    self.resets[event.stream_id] = event.error_code or 0
            self.flush()


def text_of(body: bytes) -> str:
    """What the events of a chat say."""
    parts = [json.loads(line[6:]) for line in body.decode().splitlines() if line.startswith("data: {")]
    return "".join(part["choices"][0]["delta"].get("content") or "" for part in parts)


def test_httpx_streams_many_at_once_on_one_connection(server: ServerProcess) -> None:
    async def stream(client: httpx.AsyncClient) -> tuple[str, str]:
        async with client.stream("POST", f"{server.url}/v1/chat/completions", json=CHAT | {"stream": True}) as reply:
            return reply.http_version, text_of(await reply.aread())

    async def stream_all() -> list[tuple[str, str]]:
        async with httpx.AsyncClient(http1=False, http2=True, timeout=TIMEOUT_S) as client:
            return await asyncio.gather(*(stream(client) for _ in range(16)))

    num_before = server.metrics()["steploop_connections_accepted_total"]
    answers = asyncio.run(stream_all())
    assert server.metrics()["steploop_connections_accepted_total"] == num_before + 2, "httpx's, and the one that asks"
    assert len(set(answers)) == 1
    assert answers[0][0] == "HTTP/2"
    assert answers[0][1]


# Streams on one connection.


def test_reset_stream_frees_its_blocks_and_leaves_its_neighbour(server: ServerProcess) -> None:
    with RealClient(server.port) as client:
        gone, stays = client.chat(ENDLESS), client.chat(CHAT | {"stream": True, "max_tokens": 60})
        client.read_until(lambda: bool(client.bodies[gone]))
        client.h2.reset_stream(gone, ErrorCodes.CANCEL)
        client.flush()
        client.read_until(lambda: stays in client.ended)
        server.wait_running(0)
        assert client.bodies[stays].endswith(b"data: [DONE]\n\n")


def metric(server: ServerProcess, name: str, certificate: Path | None) -> float:
    scheme = "http" if certificate is None else "https"
    verify = True if certificate is None else ssl.create_default_context(cafile=str(certificate))
    page = httpx.get(f"{scheme}://127.0.0.1:{server.port}/metrics", verify=verify, timeout=TIMEOUT_S).text
    return float(re.findall(rf"^{name}\{{[^}}]*\}} (\S+)$", page, re.MULTILINE)[0])


def test_sigterm_lets_streams_end_and_takes_no_more(spawn: Callable[..., ServerProcess]) -> None:
    server = spawn()
    server.wait_ready()
    with RealClient(server.port) as client:
        stream_id = client.chat(ENDLESS | {"max_tokens": 100})
        client.read_until(lambda: bool(client.bodies[stream_id]))
        server.send_signal(signal.SIGTERM)
        received = b""
        while data := client._socket.recv(65_536):
            received += data
            if received.count(b"\0\0\x08\x06\0\0\0\0\0steploop"):
                client._socket.sendall(b"\0\0\x08\x06\x01\0\0\0\0steploop")
                received = received.replace(b"\0\0\x08\x06\0\0\0\0\0steploop", b"")
        assert b"data: [DONE]" in received
        assert received.count(b"\0\0\x08\x07\0\0\0\0\0") == 2, "two GOAWAYs"
    assert server.wait_exit() == 0


# TLS.


@needs_openssl
def test_openai_sdk_over_tls(tls_server: tuple[ServerProcess, Path]) -> None:
    import openai

    server, certificate = tls_server
    context = ssl.create_default_context(cafile=str(certificate))
    with httpx.Client(http2=True, verify=context, timeout=TIMEOUT_S) as transport:
        client = openai.OpenAI(
            base_url=f"https://localhost:{server.port}/v1", api_key="none", http_client=transport, max_retries=0
        )
        stream = client.chat.completions.create(stream=True, **CHAT)  # type: ignore[call-overload]
        assert [chunk.choices[0].finish_reason for chunk in stream][-1] == "length"


@needs_openssl
def test_sighup_replaces_the_certificate_and_keeps_connections(
    spawn: Callable[..., ServerProcess], tmp_path: Path
) -> None:
    certificate, key = make_certificate(tmp_path / "tls")
    server = spawn("--tls-cert", str(certificate), "--tls-key", str(key))
    server.wait_ready()
    url = f"https://localhost:{server.port}/health"
    context = ssl.create_default_context(cafile=str(certificate))
    with httpx.Client(http2=True, verify=context, timeout=TIMEOUT_S) as client:
        assert client.get(url).status_code == 200
        key_text = key.read_text()
        make_certificate(tmp_path / "tls")
        new_key = key.read_text()
        key.write_text(key_text)  # of the old certificate: they do not fit
        server.send_signal(signal.SIGHUP)
        server.wait_log("the reload failed; everything but revocations stays as it was")
        key.write_text(new_key)
        server.send_signal(signal.SIGHUP)
        server.wait_log("the certificate is reloaded")
        assert client.get(url).status_code == 200
    new = ssl.create_default_context(cafile=str(certificate))
    assert httpx.get(url, verify=new, timeout=TIMEOUT_S).status_code == 200


@needs_openssl
def test_certificate_that_cannot_be_served_with_is_refused_at_start(
    spawn: Callable[..., ServerProcess], tmp_path: Path
) -> None:
    _, key = make_certificate(tmp_path / "tls")
    server = spawn("--tls-cert", str(key), "--tls-key", str(key))
    assert server.wait_exit() == ExitCode.CONFIGURATION
    assert re.search(r"^error: .*key.pem .*cannot be served with", server.log, re.MULTILINE)
    assert "Traceback" not in server.log
