"""Ray Serve and SGLang's router before two servers, as the examples have them, where they are on the path: tests do
not install them.
"""

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.deploy.proxies import DEPLOY, find
from tests.e2e.polling import wait_for
from tests.e2e.server_process import start_process

SERVE = find("serve")
CODE = """
import signal, sys
from ray import serve
from ray_serve import app
serve.start(http_options={"host": "127.0.0.1", "port": int(sys.argv[1])})
serve.run(app)
signal.pause()
"""
ASKED = {"model": "steploop-demo", "max_tokens": 4, "ignore_eos": True}
CHAT = {"model": "steploop-demo", "max_tokens": 8, "messages": [{"role": "user", "content": "What is a KV cache?"}]}


def free_ports(num: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(num)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


@pytest.mark.slow
@pytest.mark.skipif(SERVE is None, reason='needs ray: pip install "ray[serve]", in an environment on the path')
def test_two_replicas_answer_alike_and_hear_of_clients_that_leave(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = os.environ | {"PATH": path, "RAY_USAGE_STATS_ENABLED": "0", "STEPLOOP_THREADS": "1"}
    command = [str(Path(SERVE or "").parent / "python"), "-c", CODE, str(port)]
    log = tmp_path / "log"
    with log.open("wb") as output:
        ray = subprocess.Popen(command, cwd=DEPLOY, env=environment, stdout=output, stderr=subprocess.STDOUT)
    url = f"http://127.0.0.1:{port}/v1/chat/completions"

    def answers(_: int = 0) -> str | None:
        try:
            told = httpx.post(url, json=CHAT, timeout=300)
        except httpx.TransportError:
            return None
        return told.json()["choices"][0]["message"]["content"] if told.status_code == 200 else None

    try:
        wait_for(lambda: answers() is not None, log.read_text)
        with ThreadPoolExecutor(16) as clients:
            assert len({*clients.map(answers, range(32)), answers()}) == 1
        with httpx.stream("POST", url, json=CHAT | {"stream": True}, timeout=300) as answer:
            lines = [line for line in answer.iter_lines() if line]
        assert lines[-1] == "data: [DONE]"
        assert json.loads(lines[0].removeprefix("data: "))["model"] == "steploop-demo"
        with httpx.stream("POST", url, json=CHAT | {"stream": True, "max_tokens": 4000, "ignore_eos": True}) as answer:
            next(answer.iter_lines())
        wait_for(lambda: " 499 " in log.read_text(), log.read_text)
    finally:
        ray.send_signal(signal.SIGINT)
        ray.wait(60)


def num_cached(url: str, prompt: str) -> int:
    told = httpx.post(f"{url}/v1/completions", json=ASKED | {"prompt": prompt}, timeout=300).json()
    cached: int = told["usage"]["prompt_tokens_details"]["cached_tokens"]
    return cached


@pytest.mark.slow
@pytest.mark.skipif(find("smg") is None, reason="needs smg: pip install smg")
def test_a_conversation_stays_where_its_beginning_is_cached(tmp_path: Path) -> None:
    servers = []
    port, metrics_port = free_ports(2)
    try:
        for i in range(2):
            servers.append(start_process(tmp_path / f"server{i}", "server", "serve", "--port", "0", "--threads", "1"))
        for one in servers:
            one.wait_ready()
        changes = {
            r"/opt/smg/bin/smg": find("smg") or "smg",
            r"0\.0\.0\.0 --port 30000": f"127.0.0.1 --port {port}",
            r"29000": str(metrics_port),
            r"http://gpu1:8000": servers[0].url,
            r"http://gpu2:8000": servers[1].url,
        }
        (command,) = re.findall(r"ExecStart=(.*)", (DEPLOY / "smg.service").read_text())
        for pattern, new in changes.items():
            command, num_changes = re.subn(pattern, new, command)
            assert num_changes, pattern
        log = tmp_path / "log"
        with log.open("wb") as output:
            router = subprocess.Popen(shlex.split(command), stdout=output, stderr=subprocess.STDOUT)
        try:
            url = f"http://127.0.0.1:{port}"

            def is_ready() -> bool:
                try:
                    return httpx.get(f"{url}/readiness").status_code == 200
                except httpx.TransportError:
                    return False

            wait_for(is_ready, log.read_text)
            said = "What is a KV cache? " * 20
            num_cached(url, said)
            for _ in range(3):
                said += "And a block of it? " * 10
                assert num_cached(url, said) > 100
            with httpx.stream("POST", f"{url}/v1/completions", json=ASKED | {"prompt": "x", "stream": True}) as answer:
                assert [line for line in answer.iter_lines() if line][-1] == "data: [DONE]"
        finally:
            router.send_signal(signal.SIGTERM)
            router.wait(60)
    finally:
        for one in servers:
            one.kill()
