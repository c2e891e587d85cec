"""What people paste into a shell: the real curl."""

import json
import shutil
import subprocess

import pytest

from tests.e2e.conftest import MODEL
from tests.e2e.server_process import ServerProcess

pytestmark = pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl: apt-get install curl")

CHAT = {"model": MODEL, "max_tokens": 5, "temperature": 0, "messages": [{"role": "user", "content": "What is a step?"}]}


def curl(server: ServerProcess, path: str, *arguments: str, content: object = None) -> str:
    """curl's output, which must have succeeded."""
    command = ["curl", "--silent", "--show-error", "--max-time", "60", *arguments, f"{server.url}{path}"]
    if content is not None:
        command += ["-H", "content-type: application/json", "--data-binary", "@-"]
    result = subprocess.run(command, input=json.dumps(content), capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_banner_has_a_command_that_answers_when_pasted(server: ServerProcess) -> None:
    command = server.stdout.read_text().split("try ", 1)[1].strip()
    small = command.replace('{"model"', '{"max_tokens": 3, "model"')
    result = subprocess.run(["sh", "-c", small], capture_output=True, text=True, check=True)
    assert json.loads(result.stdout)["usage"]["completion_tokens"] in (1, 2, 3), "sampled: it may end early"


def test_banner_has_at_most_eight_lines(server: ServerProcess) -> None:
    assert len(server.stdout.read_text().splitlines()) <= 8


def test_streamed_answer_comes_as_events(server: ServerProcess) -> None:
    text = curl(server, "/v1/chat/completions", "--no-buffer", content=CHAT | {"stream": True})
    events = text.strip().split("\n\n")
    assert events[-1] == "data: [DONE]"
    assert all(event.startswith("data: ") for event in events)


def test_body_is_sent_after_100_continue(server: ServerProcess) -> None:
    output = curl(server, "/v1/chat/completions", "-i", "-H", "expect: 100-continue", content=CHAT)
    assert output.startswith("HTTP/1.1 100 Continue\n\nHTTP/1.1 200 OK\n"), output


@pytest.mark.parametrize(
    "flags", [(), ("--http1.0",), ("-H", "transfer-encoding: chunked")], ids=["1.1", "1.0", "chunked"]
)
def test_curls_ways_of_asking_get_one_answer(server: ServerProcess, flags: tuple[str, ...]) -> None:
    answer = json.loads(curl(server, "/v1/chat/completions", *flags, content=CHAT))
    assert answer["usage"]["completion_tokens"] == 5


def test_head_of_a_known_path_has_no_body(server: ServerProcess) -> None:
    assert curl(server, "/v1/models", "--head").startswith("HTTP/1.1 200 OK")


@pytest.mark.parametrize("flag", ["--http1.1", "--http2", "--http2-prior-knowledge"])
def test_upload_that_is_refused_before_its_end_reads_why(server: ServerProcess, flag: str) -> None:
    """More of it than a window holds."""
    answer = curl(server, "/v1/nowhere", flag, "-w", "%{http_code}", content="x" * 1_000_000)
    assert answer.endswith("404"), answer


def test_upgrade_to_http2_is_taken(server: ServerProcess) -> None:
    assert curl(server, "/health", "--http2", "-w", "%{http_version}") == '{"status":"ok"}2'
    answer = curl(server, "/v1/chat/completions", "--http2", "-i", content=CHAT)
    assert answer.startswith("HTTP/1.1 101 Switching Protocols\n")
    assert "\nHTTP/2 200 \n" in answer
