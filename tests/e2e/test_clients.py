"""Clients as people have them: each asks and streams, and some leave a stream in its middle."""

import json
import os
import re
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

from tests.certificates import needs_openssl
from tests.e2e.conftest import API_KEY, MODEL
from tests.e2e.server_process import ServerProcess

CLIENTS = Path(__file__).parent / "clients"
PATH = "/v1/chat/completions"
CHAT = {"model": MODEL, "temperature": 0, "max_tokens": 5, "messages": [{"role": "user", "content": "What is a step?"}]}
STREAM = CHAT | {"stream": True, "ignore_eos": True, "max_tokens": 1000}  # more than a window holds
LIMIT_S = 300.0  # for a program that hangs


def needs(program: str, package: str) -> pytest.MarkDecorator:
    reason = f"needs {program}: apt-get install {package}"
    return pytest.mark.skipif(shutil.which(program) is None, reason=reason)


needs_curl, needs_nghttp = needs("curl", "curl"), needs("nghttp", "nghttp2-client")
each_protocol = pytest.mark.parametrize("flag", ["--http1.1", "--http2", "--http2-prior-knowledge"])


def run(*command: str, content: object = None, **environment: str) -> str:
    result = subprocess.run(
        command,
        input=json.dumps(content),
        capture_output=True,
        text=True,
        check=False,
        timeout=LIMIT_S,
        env=os.environ | environment,
    )
    assert result.returncode == 0, (result.stdout, result.stderr)
    return result.stdout


def curl(server: ServerProcess, path: str, *arguments: str, content: object = None) -> str:
    """curl's output, which must have succeeded."""
    command = ["curl", "-sS", "--no-buffer", *arguments, f"{server.url}{path}"]
    if content is not None:
        command += ["-H", "content-type: application/json", "--data-binary", "@-"]
    return run(*command, content=content)


def is_whole(text: str) -> bool:
    """Whether it is a stream's text from its first event to its last."""
    return text.startswith("data: {") and text.endswith("data: [DONE]\n\n")


@needs_curl
@needs_openssl
@pytest.mark.parametrize("is_secure", [False, True], ids=["in the clear", "TLS"])
def test_banner_is_short_and_has_a_command_that_answers_when_pasted(
    server: ServerProcess, tls_server: tuple[ServerProcess, Path], is_secure: bool
) -> None:
    banner = (tls_server[0] if is_secure else server).stdout.read_text()
    assert len(banner.splitlines()) <= 10
    command = banner.split("try ", 1)[1].strip().replace("curl ", "curl -sS ", 1)
    answer = run("sh", "-c", command.replace('{"model"', '{"max_tokens": 3, "model"'))
    assert json.loads(answer)["usage"]["completion_tokens"] in (1, 2, 3), "sampled: it may end early"


@needs_curl
@each_protocol
def test_curl_streams_events_and_reads_why_an_upload_is_refused_before_its_end(
    server: ServerProcess, flag: str
) -> None:
    text = curl(server, PATH, flag, content=CHAT | {"stream": True})
    assert is_whole(text)
    assert all(event.startswith("data: ") for event in text.strip().split("\n\n"))
    answer = curl(
        server, "/v1/nowhere", flag, "-w", "%{http_code}", content="x" * 1_000_000
    )  # more than a window holds
    assert answer.endswith("404"), answer


@needs_curl
def test_curls_ways_of_asking_get_one_answer(server: ServerProcess) -> None:
    ways = ((), ("--http1.0",), ("-H", "transfer-encoding: chunked"), ("--http2-prior-knowledge",), ("--http2",))
    answers = [json.loads(curl(server, PATH, *flags, content=CHAT)) for flags in ways]
    assert all(answer["usage"]["completion_tokens"] == 5 for answer in answers)
    assert all(answer["choices"] == answers[0]["choices"] for answer in answers)
    output = curl(server, PATH, "-i", "-H", "expect: 100-continue", content=CHAT)
    assert output.startswith("HTTP/1.1 100 Continue\n\nHTTP/1.1 200 OK\n"), output
    assert curl(server, "/v1/models", "--head").startswith("HTTP/1.1 200 OK")


@needs_curl
def test_upgrade_to_http2_is_taken(server: ServerProcess) -> None:
    assert curl(server, "/health", "--http2", "-w", "%{http_version}") == '{"status":"ok"}2'
    answer = curl(server, PATH, "--http2", "-i", content=CHAT)
    assert answer.startswith("HTTP/1.1 101 Switching Protocols\n")
    assert "\nHTTP/2 200 \n" in answer


@needs_curl
def test_usage_and_timings_come_in_trailers_on_request(server: ServerProcess) -> None:
    flags = ("--http2-prior-knowledge", "-D", "-", "-o", "/dev/null", "-H", "te: trailers")
    head, trailers = curl(server, PATH, *flags, content=CHAT | {"stream": True}).split("\n\n")[:2]
    assert head.startswith("HTTP/2 200")
    assert re.search(r"^steploop-usage: prompt-tokens=\d+, cached-tokens=\d+, completion-tokens=5 *$", trailers, re.M)
    assert "server-timing: head;dur=" in trailers


@needs_openssl
@needs_curl
@pytest.mark.parametrize(("flag", "version"), [("--http2", "2"), ("--http1.1", "1.1")])
def test_curl_over_tls(tls_server: tuple[ServerProcess, Path], flag: str, version: str) -> None:
    server, certificate = tls_server
    url = f"https://localhost:{server.port}/health"
    text = run("curl", "-sS", flag, "--cacert", str(certificate), "-w", "%{http_version}", url)
    assert text == '{"status":"ok"}' + version


@needs_curl
@each_protocol
def test_curl_that_is_interrupted_frees_its_blocks(server: ServerProcess, flag: str) -> None:
    num_before = server.metrics()["steploop_disconnects_total"]
    command = ["curl", "-sS", "--no-buffer", flag, "-H", "content-type: application/json"]
    with subprocess.Popen([*command, "-d", json.dumps(STREAM), server.url + PATH], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith(b"data: ")
        process.terminate()  # what an ignored SIGINT, as of a background job, would not do
        process.wait(LIMIT_S)
    server.wait_metric("steploop_disconnects_total", num_before + 1)
    server.wait_quiet()


@needs_nghttp
def test_nghttp_and_its_priorities_and_an_upgrade_with_a_body(server: ServerProcess, tmp_path: Path) -> None:
    output = run("nghttp", "-nv", "-m", "10", f"{server.url}/health")
    assert output.count(":status: 200") == 10
    assert "RST_STREAM" not in output
    (tmp_path / "chat.json").write_text(json.dumps(CHAT))
    command = ("nghttp", "-u", "-H", "content-type: application/json", "-d", str(tmp_path / "chat.json"))
    assert json.loads(run(*command, server.url + PATH))["usage"]["completion_tokens"] == 5


@needs_nghttp
def test_h2load_loses_nothing(server: ServerProcess, tmp_path: Path) -> None:
    for num_streams in (1, 16, 256):
        output = run("h2load", "-n", "1000", "-c", "2", "-m", str(num_streams), f"{server.url}/health")
        assert "1000 succeeded, 0 failed, 0 errored, 0 timeout" in output, output
    (tmp_path / "body.json").write_text(json.dumps(STREAM | {"max_tokens": 10}))
    command = ("h2load", "-n", "64", "-c", "2", "-m", "16", "-H", "content-type: application/json")
    output = run(*command, "-d", str(tmp_path / "body.json"), server.url + PATH)
    assert "64 succeeded, 0 failed, 0 errored, 0 timeout" in output, output
    assert "status codes: 64 2xx" in output


@needs("node", "nodejs")
def test_node_streams_and_leaves_by_http2_and_by_fetch(server: ServerProcess) -> None:
    num_before = server.metrics()["steploop_disconnects_total"]
    told = json.loads(run("node", str(CLIENTS / "http2.mjs"), server.url, json.dumps(STREAM)))
    assert [(told[name]["status"], told[name]["code"]) for name in ("whole", "reset")] == [(200, 0), (200, 8)]
    assert [is_whole(told[name]["text"]) for name in ("whole", "reset")] == [True, False]
    server.wait_metric("steploop_disconnects_total", num_before + 1)
    told = json.loads(run("node", str(CLIENTS / "fetch.mjs"), server.url, json.dumps(STREAM)))
    assert (told["whole"]["status"], told["aborted"]["error"]) == (200, "AbortError")
    assert [is_whole(told[name]["text"]) for name in ("whole", "aborted")] == [True, False]
    server.wait_metric("steploop_disconnects_total", num_before + 2)


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
def test_page_in_chromium_streams_aborts_and_resumes_across_origins(
    spawn: Callable[..., ServerProcess], tmp_path: Path
) -> None:
    with page_server(json.dumps(STREAM)) as (origin, told):
        server = spawn("--cors-origin", origin, "--api-key", API_KEY)
        open_server = spawn("--cors-origin", origin)
        for one in (server, open_server):
            one.wait_ready()
        command = ["chromium", "--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run"]
        command += [
            f"--user-data-dir={tmp_path}/chromium",
            f"{origin}/page.html?url={server.url}&open={open_server.url}",
        ]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as browser:
            try:
                answer = told.get(timeout=LIMIT_S)
            finally:
                browser.terminate()
        assert answer["whole"]["status"] == 200, answer
        assert is_whole(answer["whole"]["text"])
        assert answer["whole"]["id"], "the page may read its headers"
        assert answer["aborted"]["error"] == "AbortError"
        assert is_whole(answer["resumed"]["text"])
        assert answer["resumed"]["ids"] == list(range(1, len(answer["resumed"]["ids"]) + 1))
        assert server.metrics(API_KEY)["steploop_disconnects_total"] == 1
