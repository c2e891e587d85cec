"""Several binds of one real server: Unix sockets over its lives and deaths, and a proxy that names its client."""

import re
import signal
import socket
from collections.abc import Callable

import pytest

from tests.e2e.server_process import ServerProcess
from tests.server.test_clients import HEADERS

GET = b"GET /health HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n"


def ask_at(address: str | tuple[str, int], data: bytes) -> bytes:
    family = socket.AF_UNIX if isinstance(address, str) else socket.AF_INET
    received = b""
    with socket.socket(family) as client:
        client.settimeout(60)
        client.connect(address)
        client.sendall(data)
        while piece := client.recv(4096):
            received += piece
    return received


@pytest.mark.slow
def test_a_unix_socket_comes_back_after_a_kill_and_goes_at_the_end(
    spawn: Callable[..., ServerProcess], tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("s") / "a"
    first = spawn("--bind", f"unix:{path}")
    first.wait_listening()
    assert ask_at(str(path), GET).startswith(b"HTTP/1.1 200")
    second = spawn("--bind", f"unix:{path}")
    assert second.wait_exit() == 6
    assert f"error: unix:{path} is in use by another process" in second.log
    first.kill()
    assert path.exists()
    third = spawn("--bind", f"unix:{path}")
    third.wait_listening()
    assert ask_at(str(path), GET).startswith(b"HTTP/1.1 200")
    third.send_signal(signal.SIGTERM)
    assert third.wait_exit() == 0
    assert not path.exists()


@pytest.mark.slow
def test_the_client_that_a_proxy_names_stands_in_the_access_log(spawn: Callable[..., ServerProcess]) -> None:
    server = spawn("--bind", "proxy:127.0.0.1:0", "--trusted-proxies", "127.0.0.1", "--deny", "2001:db8::/32")
    server.wait_listening()
    direct, proxied = map(int, re.findall(r"127\.0\.0\.1:(\d+)", server.log)[:2])
    assert ask_at(("127.0.0.1", proxied), HEADERS["tcp4"][0] + GET).startswith(b"HTTP/1.1 200")
    assert ask_at(("127.0.0.1", direct), GET.replace(b"Host", b"X-Forwarded-For: 192.0.2.8\r\nHost")).startswith(
        b"HTTP/1.1 200"
    )
    server.wait_log("client=192.0.2.7:4242")
    server.wait_log("client=192.0.2.8")
    assert ask_at(("127.0.0.1", direct), GET.replace(b"Host", b"X-Forwarded-For: 2001:db8::1\r\nHost")).startswith(
        b"HTTP/1.1 403"
    )
    server.wait_log("error=permission_denied client=2001:db8::1")
