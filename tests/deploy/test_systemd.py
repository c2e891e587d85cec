"""What a service manager hears of a real server process, on a real notify socket."""

import os
import signal
import subprocess
import sys
import time
from hashlib import sha256
from pathlib import Path

import pytest

from core.errors import ExitCode
from tests.certificates import make_certificate, needs_openssl
from tests.deploy.conftest import Gate, Simulate
from tests.deploy.notify_socket import notify_socket
from tests.e2e.raw_http import ask, connected, post_bytes
from tests.e2e.server_process import REPOSITORY, ServerProcess, start_process

STREAM = {"model": "small", "prompt": "hi", "stream": True, "max_tokens": 5, "ignore_eos": True}
SIMULATED = "tests.deploy.simulated_process"
WATCHDOG = {"WATCHDOG_USEC": "300000"}


@pytest.mark.parametrize("is_abstract", [False, True], ids=["path", "abstract"])
def test_ready_is_told_after_loading_and_the_stages_before(
    simulate: Simulate, gates: Path, tmp_path: Path, is_abstract: bool
) -> None:
    gate = Gate(gates / "load")
    with notify_socket(None if is_abstract else tmp_path / "notify") as manager:
        server = simulate(NOTIFY_SOCKET=manager.address)
        with gate.held():
            loading = manager.receive_until("STATUS", "Loading: waiting at the gate")
            assert int(loading["EXTEND_TIMEOUT_USEC"]) > 0
            assert ask(server.port, "GET", "/ready").status == 503
            assert not any("READY" in fields for fields in manager.history)
        assert manager.receive_until("READY") == {"READY": "1", "STATUS": "Serving"}
        assert ask(server.port, "GET", "/ready").status == 200
        server.send_signal(signal.SIGTERM)
        assert server.wait_exit() == ExitCode.OK
        assert not any("WATCHDOG" in fields for fields in manager.receive_rest()), "nobody has asked for it"


def test_model_that_cannot_be_loaded_is_told_to_the_end(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    with notify_socket(tmp_path / "notify") as manager:
        flags = ("serve", "--port", "0", "--model", str(model))
        server = start_process(tmp_path, "server", *flags, environment={"NOTIFY_SOCKET": manager.address})
        assert server.wait_exit() == ExitCode.MODEL
        *_, last = manager.receive_rest()
        assert last["STOPPING"] == "1"
        assert last["STATUS"].startswith(f"Failed: {model}")
        assert not any("READY" in fields for fields in manager.history)


@needs_openssl
def test_sighup_is_told_as_a_reload_with_its_time_and_its_end(simulate: Simulate, tmp_path: Path) -> None:
    certificate, key = make_certificate(tmp_path)
    with notify_socket(tmp_path / "notify") as manager:
        server = simulate("--tls-cert", str(certificate), "--tls-key", str(key), NOTIFY_SOCKET=manager.address)
        manager.receive_until("READY")

        def reload() -> dict[str, str]:
            before_us = time.monotonic_ns() // 1000
            server.send_signal(signal.SIGHUP)
            reloading = manager.receive_until("RELOADING")
            assert reloading["RELOADING"] == "1"
            assert before_us <= int(reloading["MONOTONIC_USEC"]) <= time.monotonic_ns() // 1000
            return manager.receive()

        assert reload() == {"READY": "1", "STATUS": "Serving"}
        key.write_text("none")
        failed = reload()
        assert failed["READY"] == "1"
        assert "reload failed" in failed["STATUS"]
        assert str(key) in failed["STATUS"]


def test_sighup_reloads_a_server_that_nobody_supervises_and_opens_none(simulate: Simulate, tmp_path: Path) -> None:
    config = tmp_path / "steploop.toml"
    config.write_text("")
    server = simulate("--config", str(config))
    server.wait_ready()

    def reload(text: str, told: str) -> None:
        config.write_text(text)
        server.send_signal(signal.SIGHUP)
        server.wait_log(told)

    def status(key: str | None = None) -> int:
        return ask(server.port, "GET", "/v1/models", api_key=key).status

    reload("", "reloaded: tenants=0 keys=0")
    assert (status(), server.metrics()["steploop_reload_success"]) == (200, 1)
    reload("port: 1", "is not TOML")
    assert (status(), server.metrics()["steploop_reload_success"]) == (200, 0)
    tenant = f'[[tenants]]\nname = "acme"\nkey_sha256 = ["{sha256(b"k").hexdigest()}"]\n'
    reload(tenant, "reloaded: tenants=1 keys=1")
    assert (status(), status("k")) == (401, 200)
    reload("", "would let everyone in")
    assert (status(), status("k")) == (401, 200)


@pytest.mark.parametrize("is_to_stay", [False, True], ids=["", "nohup"])
def test_terminal_that_is_closed_ends_a_server_unless_it_is_to_stay(tmp_path: Path, is_to_stay: bool) -> None:
    """Of the server's own: it leads the terminal's session, as a shell's `exec steploop serve` does."""
    ours, its = os.openpty()
    stdout, stderr = tmp_path / "stdout", tmp_path / "stderr"
    with stdout.open("wb") as out, stderr.open("wb") as err:
        stays = ["nohup"] if is_to_stay else ["env", "--default-signal=HUP"]  # whatever these tests were started with
        command = ["setsid", "--ctty", *stays, sys.executable, "-m", SIMULATED, "/nowhere"]
        process = subprocess.Popen([*command, "--port", "0"], cwd=REPOSITORY, stdin=its, stdout=out, stderr=err)
    os.close(its)
    server = ServerProcess(process, stdout, stderr)
    try:
        server.wait_ready()
        os.close(ours)
        if is_to_stay:
            server.wait_log("reloaded: tenants=0")
            assert ask(server.port, "GET", "/ready").status == 200
        else:
            assert server.wait_exit() == ExitCode.OK
            assert "the terminal is closed" in server.log
    finally:
        server.kill()


def test_draining_is_told_with_its_streams_and_asks_for_time(simulate: Simulate, gates: Path, tmp_path: Path) -> None:
    gate = Gate(gates / "step")
    with notify_socket(tmp_path / "notify") as manager:
        server = simulate(NOTIFY_SOCKET=manager.address, **WATCHDOG)
        manager.receive_until("READY")
        with connected(server.port) as client:
            client.send(post_bytes("/v1/completions", STREAM))
            with gate.held():
                server.send_signal(signal.SIGTERM)
                for _ in range(3):  # told again and again: each asks for more time
                    stopping = manager.receive_until("STOPPING")
                    assert stopping["STATUS"] == "Draining: 1 request in progress"
                    assert int(stopping["EXTEND_TIMEOUT_USEC"]) >= 10_000_000
                manager.receive_until("WATCHDOG")
            assert b"data: [DONE]" in client.read_to_end()
        assert server.wait_exit() == ExitCode.OK


@pytest.mark.parametrize("is_ours", [True, False])
def test_watchdog_is_fed_while_the_engine_idles_if_it_is_this_processes(
    simulate: Simulate, tmp_path: Path, is_ours: bool
) -> None:
    with notify_socket(tmp_path / "notify") as manager:
        server = simulate(NOTIFY_SOCKET=manager.address, **WATCHDOG, **({} if is_ours else {"WATCHDOG_PID": "1"}))
        manager.receive_until("READY")
        for _ in range(5 * is_ours):
            assert manager.receive() == {"WATCHDOG": "1"}
        server.send_signal(signal.SIGTERM)
        assert server.wait_exit() == ExitCode.OK
        assert is_ours or not any("WATCHDOG" in fields for fields in manager.receive_rest())


def test_engine_that_hangs_is_not_vouched_for_and_ends_streams_and_process(simulate: Simulate, tmp_path: Path) -> None:
    gates = tmp_path / "fatal"
    gates.mkdir()
    gate = Gate(gates / "step")
    with notify_socket(tmp_path / "notify") as manager:
        server = simulate(gates=gates, NOTIFY_SOCKET=manager.address, **WATCHDOG)
        manager.receive_until("WATCHDOG")
        with connected(server.port) as client:
            client.send(post_bytes("/v1/completions", STREAM))
            with gate.held():
                manager.receive_until("STATUS", "The engine has been busy with one step")
                answer = client.read_answer()
                assert (answer.status, answer.code) == (500, "engine_error")
                assert server.wait_exit() == ExitCode.ENGINE
        assert not any("WATCHDOG" in fields for fields in manager.receive_rest())
        assert "in collect" in server.log, "where it hangs"


def test_engine_that_comes_back_is_vouched_for_again(simulate: Simulate, tmp_path: Path) -> None:
    gates = tmp_path / "hasty"
    gates.mkdir()
    gate = Gate(gates / "step")
    with notify_socket(tmp_path / "notify") as manager:
        server = simulate(gates=gates, NOTIFY_SOCKET=manager.address, **WATCHDOG)
        manager.receive_until("READY")
        with connected(server.port) as client:
            client.send(post_bytes("/v1/completions", STREAM))
            with gate.held():
                manager.receive_until("STATUS", "The engine has been busy with one step")
                assert ask(server.port, "GET", "/ready").code == "stalled"
                assert ask(server.port, "GET", "/health").status == 200
            assert client.read_answer().status == 200
        manager.receive_until("STATUS", "Serving")
        manager.receive_until("WATCHDOG")
        assert ask(server.port, "GET", "/ready").status == 200
