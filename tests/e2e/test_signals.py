"""How a server ends, and how it refuses to start: by signals and by exit codes of a real process."""

import json
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from core.errors import ExitCode
from tests.e2e.conftest import MODEL
from tests.e2e.polling import wait_for
from tests.e2e.raw_http import RawClient, ask, connected, post, post_bytes
from tests.e2e.server_process import REPOSITORY, SMALL, ServerProcess

Spawn = Callable[..., ServerProcess]

COMPLETIONS = "/v1/completions"
STREAM = {"model": MODEL, "prompt": "hi", "stream": True, "ignore_eos": True, "max_tokens": 2000}


def begin_stream(client: RawClient, num_tokens: int = 2000) -> None:
    client.send(post_bytes(COMPLETIONS, STREAM | {"max_tokens": num_tokens}))
    status, _ = client.read_head()
    assert status == 200


def refusal(server: ServerProcess, exit_code: ExitCode) -> tuple[str, str]:
    """The cause and the fix that a server which did not start has told, in two lines and nothing else."""
    assert server.wait_exit() == exit_code, server.log
    assert "Traceback" not in server.log
    lines = [line for line in server.log.splitlines() if " INFO " not in line]
    assert len(lines) == 2, server.log
    assert lines[0].startswith("error: ")
    assert lines[1].startswith("fix: ")
    return lines[0], lines[1]


def test_sigint_ends_streams_with_an_error_event_and_exits_clean(spawn: Spawn) -> None:
    server = spawn()
    server.wait_ready()
    with connected(server.port) as client, connected(server.port) as whole, connected(server.port) as idle:
        begin_stream(client)
        whole.send(post_bytes(COMPLETIONS, STREAM | {"stream": False}))
        server.wait_running(2)
        server.send_signal(signal.SIGINT)
        events = client.read_until(b"0\r\n\r\n")
        assert b'"code":"draining"' in events
        assert b"[DONE]" not in events
        assert client.read_to_end() == b""
        answer = whole.read_answer()
        assert (answer.status, answer.code, answer.headers["connection"]) == (503, "draining", "close")
        assert idle.read_to_end() == b""
    assert server.wait_exit() == ExitCode.OK
    assert "Traceback" not in server.log
    assert "ERROR" not in server.log


def test_sigterm_lets_streams_end_and_says_draining_to_others(spawn: Spawn) -> None:
    server = spawn()
    server.wait_ready()
    with connected(server.port) as client, connected(server.port) as idle:
        assert idle.is_kept_open()
        begin_stream(client, num_tokens=1000)
        server.send_signal(signal.SIGTERM)
        server.wait_log("shutting down")
        assert not idle.is_kept_open()
        for late in (ask(server.port, "GET", "/ready"), post(server.port, COMPLETIONS, STREAM)):
            assert (late.status, late.code, late.headers["connection"]) == (503, "draining", "close")
            assert int(late.headers["retry-after"]) >= 1
        assert ask(server.port, "GET", "/health").status == 200
        rest = client.read_until(b"0\r\n\r\n")
        assert rest.count(b"data: ") >= 800
        assert b"data: [DONE]" in rest
        assert client.read_to_end() == b""
    assert server.wait_exit() == ExitCode.OK
    assert "Traceback" not in server.log
    with pytest.raises(ConnectionRefusedError):
        ask(server.port, "GET", "/health")


@pytest.mark.slow
def test_signal_while_the_model_loads_ends_the_server(spawn: Spawn) -> None:
    server = spawn()
    server.wait_listening()
    assert ask(server.port, "GET", "/health").status == 200
    loading = post(server.port, COMPLETIONS, STREAM)
    assert (loading.status, loading.code) == (503, "loading")
    assert int(loading.headers["retry-after"]) >= 1
    server.send_signal(signal.SIGINT)
    assert server.wait_exit() == ExitCode.OK
    assert "Traceback" not in server.log
    assert all(" server." in line for line in server.log.splitlines())


def test_taken_port_is_named_with_another_that_may_be_free(spawn: Spawn) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        cause, fix = refusal(spawn("--port", str(port)), ExitCode.PORT)
    assert f"127.0.0.1:{port} is in use" in cause
    assert "--port" in fix


def test_missing_model_directory_is_told_what_lies_near(spawn: Spawn, small_model: Path) -> None:
    cause, fix = refusal(spawn(model=small_model.with_name("smal")), ExitCode.MODEL)
    assert str(small_model.with_name("smal")) in cause
    assert fix == f"fix: --model {small_model}"


@pytest.mark.slow
def test_weights_that_are_cut_short_are_named(spawn: Spawn, small_model: Path, tmp_path: Path) -> None:
    model = Path(shutil.copytree(small_model, tmp_path / "broken"))
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    cause, _ = refusal(spawn(model=model), ExitCode.MODEL)
    assert "model.safetensors" in cause


@pytest.mark.slow
def test_context_that_does_not_fit_is_told_one_that_does_and_it_works(spawn: Spawn) -> None:
    _, fix = refusal(spawn("--kv-memory", "4MiB"), ExitCode.MEMORY)
    flag = fix.partition("--max-model-len ")[2].split()[0].rstrip(",.")
    server = spawn("--kv-memory", "4MiB", "--max-model-len", flag)
    server.wait_ready()
    model = ask(server.port, "GET", f"/v1/models/{MODEL}").json
    assert model["max_model_len"] == int(flag)
    filled = {"model": MODEL, "prompt": [5] * (int(flag) - 20), "max_tokens": 100, "ignore_eos": True}
    answer = post(server.port, COMPLETIONS, filled).json
    assert answer["usage"]["total_tokens"] == int(flag)
    server.send_signal(signal.SIGTERM)
    assert server.wait_exit() == ExitCode.OK


@contextmanager
def serving_beside(directory: Path, model: Path, *flags: str, closes: str = "") -> Iterator[subprocess.Popen[bytes]]:
    """A server whose stdout is a file of the directory, and whose stderr is a pipe that nobody reads, or as is said."""
    command = [sys.executable, "-m", "server", "serve", "--port", "0", "--model", str(model), *SMALL, *flags]
    with (directory / "stdout").open("wb") as output:
        process = subprocess.Popen(
            ["sh", "-c", f'exec "$@" {closes}', "sh", *command], cwd=REPOSITORY, stdout=output, stderr=subprocess.PIPE
        )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def port_told(directory: Path) -> int:
    stdout = directory / "stdout"
    wait_for(lambda: b"try " in stdout.read_bytes(), stdout.read_text)
    found = re.search(r"http://127\.0\.0\.1:(\d+)", stdout.read_text())
    assert found is not None
    return int(found[1])


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, ExitCode.OK), (signal.SIGABRT, -signal.SIGABRT)], ids=["end", "stacks"]
)
def test_log_that_nobody_reads_holds_up_neither_answers_nor_the_end(
    small_model: Path, tmp_path: Path, number: signal.Signals, code: int
) -> None:
    with serving_beside(tmp_path, small_model) as server:
        port = port_told(tmp_path)
        with connected(port) as client:
            for _ in range(900):  # lines of 150 bytes: twice what a pipe takes
                client.send(b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n")
                assert client.read_answer().status == 200
        server.send_signal(number)
        assert server.wait(60) == code


@pytest.mark.parametrize("closes", ["2>&-", "<&- 2>&-"])
def test_closed_stderr_is_no_fault(small_model: Path, tmp_path: Path, closes: str) -> None:
    with serving_beside(tmp_path, small_model, closes=closes) as server:
        assert ask(port_told(tmp_path), "GET", "/health").status == 200
        server.send_signal(signal.SIGTERM)
        assert server.wait(60) == ExitCode.OK
    assert "Traceback" not in (tmp_path / "stdout").read_text()


def test_every_line_is_json_where_the_log_is(small_model: Path, tmp_path: Path) -> None:
    with serving_beside(tmp_path, small_model, "--log-format", "json", closes="2>&1") as server:
        port = port_told(tmp_path)
        assert ask(port, "GET", "/health").status == 200
        other = tmp_path / "other"
        other.mkdir()
        with serving_beside(other, small_model, "--log-format", "json", "--port", str(port)) as second:
            _, refused = second.communicate(timeout=300)
            assert "in use" in json.loads(refused)["message"]
            assert second.returncode == ExitCode.PORT
        server.send_signal(signal.SIGTERM)
        assert server.wait(60) == ExitCode.OK
    lines = (tmp_path / "stdout").read_text().splitlines()
    assert {json.loads(line)["level"] for line in lines} == {"info"}
    assert len(lines) > 3, "the log, and the banner"
