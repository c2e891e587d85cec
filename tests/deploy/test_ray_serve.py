"""Ray Serve before two servers, as the example has it, where `serve` is on the path: tests do not install Ray."""

import json
import os
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

SERVE = find("serve")
CODE = """
import signal, sys
from ray import serve
from ray_serve import app
serve.start(http_options={"host": "127.0.0.1", "port": int(sys.argv[1])})
serve.run(app)
signal.pause()
"""
CHAT = {"model": "steploop-demo", "max_tokens": 8, "messages": [{"role": "user", "content": "What is a KV cache?"}]}


@pytest.mark.slow
@pytest.mark.skipif(SERVE is None, reason='needs ray: pip install "ray[serve]", in an environment on the path')
def test_two_replicas_answer_alike_and_hear_of_clients_that_leave(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = os.environ | {"PATH": path, "RAY_USAGE_STATS_ENABLED": "0", "STEPLOOP_THREADS": "1"}
    command = [str(Path(SERVE or "").parent / "python"), "-c", CODE, str(port)]
    log = tmp_path / "log"
    with log.open("wb") as output:
        ray = subprocess.Popen(command, cwd=DEPLOY, env=environment, stdout=output, stderr=subprocess.STDOUT)
    url = f"http://127.0.0.1:{port}/v1/chat/completions"

    def answers(_: int = 0) -> str | None:
        try:
            told = httpx.post(url, json=CHAT, timeout=60)
        except httpx.TransportError:
            return None
        return told.json()["choices"][0]["message"]["content"] if told.status_code == 200 else None

    try:
        wait_for(lambda: answers() is not None, log.read_text)
        with ThreadPoolExecutor(16) as clients:
            assert len({*clients.map(answers, range(32)), answers()}) == 1
        with httpx.stream("POST", url, json=CHAT | {"stream": True}, timeout=60) as answer:
            lines = [line for line in answer.iter_lines() if line]
        assert lines[-1] == "data: [DONE]"
        assert json.loads(lines[0].removeprefix("data: "))["model"] == "steploop-demo"
        with httpx.stream("POST", url, json=CHAT | {"stream": True, "max_tokens": 4000, "ignore_eos": True}) as answer:
            next(answer.iter_lines())
        wait_for(lambda: " 499 " in log.read_text(), log.read_text)
    finally:
        ray.send_signal(signal.SIGINT)
        ray.wait(60)
