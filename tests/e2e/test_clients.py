"""Clients as people have them: each streams, and each leaves a stream in its middle."""

import json
import os
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from queue import Queue
from typing import Any

import pytest

from tests.certificates import make_certificate, needs_openssl
from tests.e2e.conftest import API_KEY, MODEL
from tests.e2e.server_process import ServerProcess

CLIENTS = Path(__file__).parent / "clients"
CHAT = {"model": MODEL, "temperature": 0, "messages": [{"role": "user", "content": "What is a step?"}]}
STREAM = CHAT | {"stream": True, "ignore_eos": True, "max_tokens": 1000}  # more than a window holds
LIMIT_S = 120.0  # for a program that hangs


def needs(program: str, package: str) -> pytest.MarkDecorator:
    reason = f"needs {program}: apt-get install {package}"
    return pytest.mark.skipif(shutil.which(program) is None, reason=reason)


def run(*command: str, **environment: str) -> str:
    result = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=LIMIT_S, env=os.environ | environment
    )
    assert result.returncode == 0, (result.stdout, result.stderr)
    return result.stdout


def is_whole(text: str) -> bool:
    """Whether it is a stream's text from its first event to its last."""
    return text.startswith("data: {") and text.endswith("data: [DONE]\n\n")


@pytest.fixture
def tls_server(spawn: Callable[..., ServerProcess], tmp_path: Path) -> tuple[ServerProcess, Path]:
    certificate, key = make_certificate(tmp_path / "tls")
    server = spawn("--tls-cert", str(certificate), "--tls-key", str(key))
    server.wait_ready()
    return server, certificate


@needs("curl", "curl")
@pytest.mark.parametrize("flag", ["--http1.1", "--http2", "--http2-prior-knowledge"])
def test_curl_that_is_interrupted_frees_its_blocks(server: ServerProcess, flag: str) -> None:
    num_before = server.metrics()["steploop_disconnects_total"]
    command = ["curl", "-sS", "--no-buffer", flag, "-H", "content-type: application/json"]
    command += ["-d", json.dumps(STREAM), f"{server.url}/v1/chat/completions"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as curl:
        assert curl.stdout is not None
        assert curl.stdout.readline().startswith("data: ")
        curl.terminate()  # what an ignored SIGINT, as of a background job, would not do
        curl.wait(LIMIT_S)
    server.wait_metric("steploop_disconnects_total", num_before + 1)
    server.wait_quiet()


@needs("h2load", "nghttp2-client")
def test_h2load_posts_streams(server: ServerProcess, tmp_path: Path) -> None:
    body = tmp_path / "body.json"
    body.write_text(json.dumps(STREAM | {"max_tokens": 10}))
    command = ["h2load", "-n", "64", "-c", "2", "-m", "16", "-d", str(body), "-H", "content-type: application/json"]
    output = run(*command, f"{server.url}/v1/chat/completions")
    assert "64 succeeded, 0 failed, 0 errored, 0 timeout" in output, output
    assert "status codes: 64 2xx" in output


@needs("node", "nodejs")
def test_node_http2_streams_and_resets(server: ServerProcess) -> None:
    num_before = server.metrics()["steploop_disconnects_total"]
    told = json.loads(run("node", str(CLIENTS / "http2.mjs"), server.url, json.dumps(STREAM)))
    assert (told["whole"]["status"], told["whole"]["code"]) == (200, 0)
    assert is_whole(told["whole"]["text"])
    assert (told["reset"]["status"], told["reset"]["code"]) == (200, 8)
    assert not is_whole(told["reset"]["text"])
    server.wait_metric("steploop_disconnects_total", num_before + 1)


@pytest.mark.slow
@needs_openssl
@needs("node", "nodejs")
def test_node_speaks_http2_and_fetches_over_tls(tls_server: tuple[ServerProcess, Path]) -> None:
    server, certificate = tls_server
    url = f"https://localhost:{server.port}"
    told = json.loads(run("node", str(CLIENTS / "http2.mjs"), url, json.dumps(STREAM), str(certificate)))
    assert told["protocol"] == "h2"
    assert is_whole(told["whole"]["text"])
    environment = {"NODE_EXTRA_CA_CERTS": str(certificate)}
    told = json.loads(run("node", str(CLIENTS / "fetch.mjs"), url, json.dumps(STREAM), **environment))
    assert is_whole(told["whole"]["text"])


@needs("node", "nodejs")
def test_node_fetch_streams_and_aborts(server: ServerProcess) -> None:
    num_before = server.metrics()["steploop_disconnects_total"]
    told = json.loads(run("node", str(CLIENTS / "fetch.mjs"), server.url, json.dumps(STREAM)))
    assert told["whole"]["status"] == 200
    assert is_whole(told["whole"]["text"])
    assert told["aborted"]["error"] == "AbortError"
    assert not is_whole(told["aborted"]["text"])
    server.wait_metric("steploop_disconnects_total", num_before + 1)


@pytest.mark.slow
@needs("java", "default-jdk-headless")
def test_java_upgrades_with_a_body_and_stays_on_that_connection(server: ServerProcess) -> None:
    num_before = server.metrics()["steploop_connections_accepted_total"]
    output = run("java", str(CLIENTS / "Client.java"), server.url, json.dumps(STREAM | {"max_tokens": 20}))
    lines = output.splitlines()
    assert lines.count("HTTP_2 200") == 2
    assert lines.count("data: [DONE]") == 2
    assert server.metrics()["steploop_connections_accepted_total"] == num_before + 2, "Java's, and the one that asks"


@contextmanager
def page_server(body: str) -> Iterator[tuple[str, Queue[Any]]]:
    """An origin of its own with the page. Gives it, and what the page posts."""
    told: Queue[Any] = Queue()
    pages = {"/page.html": ("text/html", (CLIENTS / "page.html").read_bytes())}
    pages["/body.json"] = ("application/json", body.encode())

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            media_type, content = pages.get(self.path.partition("?")[0], ("text/plain", b""))
            self.send_response(200)
            self.send_header("content-type", media_type)
            self.end_headers()
            self.wfile.write(content)

        def do_POST(self) -> None:
            told.put(json.loads(self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(204)
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as httpd:
        thread = threading.Thread(target=httpd.serve_forever)
        thread.start()
        try:
            yield f"http://localhost:{httpd.server_port}", told
        finally:
            httpd.shutdown()
            thread.join()


@pytest.mark.slow
@needs("chromium", "chromium")
def test_page_in_chromium_streams_and_aborts_across_origins(
    spawn: Callable[..., ServerProcess], tmp_path: Path
) -> None:
    with page_server(json.dumps(STREAM)) as (origin, told):
        server = spawn("--cors-origin", origin, "--api-key", API_KEY)
        server.wait_ready()
        command = ["chromium", "--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run"]
        command += [f"--user-data-dir={tmp_path}/chromium", f"{origin}/page.html?url={server.url}"]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as browser:
            try:
                answer = told.get(timeout=LIMIT_S)
            finally:
                browser.terminate()
        assert answer["whole"]["status"] == 200, answer
        assert is_whole(answer["whole"]["text"])
        assert answer["whole"]["id"], "the page may read its headers"
        assert answer["aborted"]["error"] == "AbortError"
        assert server.metrics(API_KEY)["steploop_disconnects_total"] == 1
