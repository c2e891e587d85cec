"""A real server whose model two processes share: the same answers, and one end for both."""

import os
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from core.errors import ExitCode
from tests.e2e.conftest import MODEL
from tests.e2e.polling import wait_for
from tests.e2e.raw_http import connected, post, post_bytes
from tests.e2e.server_process import ServerProcess

Spawn = Callable[..., ServerProcess]

COMPLETIONS = "/v1/completions"
LISTEN = "0A"  # Linux, include/net/tcp_states.h
LOOPBACK = "0100007F"  # 127.0.0.1, in the order of this machine's bytes
ASKED = {"model": MODEL, "prompt": "A KV cache keeps", "temperature": 0, "max_tokens": 48, "ignore_eos": True}


def children_of(server: ServerProcess) -> list[int]:
    """The process ids of its ranks (proc(5)): others try grammars."""
    tasks = Path(f"/proc/{server.process.pid}/task").glob("*/children")
    pids = [int(pid) for task in tasks for pid in task.read_text().split()]
    return [pid for pid in pids if b"grammar_guard" not in Path(f"/proc/{pid}/cmdline").read_bytes()]


def follower_of(server: ServerProcess) -> int:
    server.wait_ready()
    (follower,) = children_of(server)
    return follower


def has_ended(pid: int) -> bool:
    """It is gone, or its parent has only not asked yet."""
    with suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    return True


def listening_addresses(pid: int) -> set[str]:
    """In hexadecimal, as the kernel writes them (proc(5), /proc/net/tcp)."""
    inodes = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):
            inodes.add(os.readlink(descriptor).removeprefix("socket:[").removesuffix("]"))
    lines = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()]
    return {line[1].split(":")[0] for line in lines if line[3] == LISTEN and line[9] in inodes}


def test_two_ranks_answer_as_one_and_a_rank_that_is_lost_ends_an_idle_server(
    spawn: Spawn, server_process: ServerProcess
) -> None:
    server = spawn("--tensor-parallel", "2")
    follower = follower_of(server)
    assert b"2 ranks" in server.stdout.read_bytes()
    for pid in (server.process.pid, follower):
        assert listening_addresses(pid) == {LOOPBACK}
    for content in (ASKED, ASKED | {"prompt": "def step(plan):" * 40}):
        got, want = (post(each.port, COMPLETIONS, content).json for each in (server, server_process))
        assert got["choices"] == want["choices"]
        assert got["usage"] == want["usage"]
    os.kill(follower, signal.SIGKILL)
    assert server.wait_exit() == ExitCode.ENGINE, server.log_tail
    assert f"Rank 1 (process {follower}) has ended by signal 9" in server.log


def test_a_rank_that_is_killed_ends_every_stream_with_an_error_event(spawn: Spawn) -> None:
    server = spawn("--tensor-parallel", "2")
    follower = follower_of(server)
    with connected(server.port) as first, connected(server.port) as second:
        for client in (first, second):
            client.send(post_bytes(COMPLETIONS, ASKED | {"stream": True, "max_tokens": 2000}))
        for client in (first, second):
            assert client.read_head()[0] == 200
            client.read_until(b"data: ")
        os.kill(follower, signal.SIGKILL)
        for client in (first, second):
            rest = client.read_to_end()
            assert b'"code":"engine_error"' in rest
            assert b"[DONE]" not in rest
    assert server.wait_exit() == ExitCode.ENGINE, server.log_tail


@pytest.mark.parametrize("is_told", [True, False], ids=["SIGTERM", "killed"])
def test_ranks_end_with_the_server_however_it_ends(spawn: Spawn, is_told: bool) -> None:
    server = spawn("--tensor-parallel", "2")
    follower = follower_of(server)
    os.kill(follower, signal.SIGTERM)  # as systemd sends it to all: the server drains, its ranks go on
    assert post(server.port, COMPLETIONS, ASKED).status == 200
    if is_told:
        server.send_signal(signal.SIGTERM)
        assert server.wait_exit() == ExitCode.OK, server.log_tail
        assert "Traceback" not in server.log
    else:
        server.kill()
    wait_for(lambda: has_ended(follower), lambda: f"the end of rank 1, process {follower}")
