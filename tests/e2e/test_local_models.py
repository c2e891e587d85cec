"""Models that a server starts when they are asked for: which are awake, what a killed process costs, what is left."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

import pytest

from server.engine_loader import DEMO_DIRECTORY
from server.gate.identity import Scope, create_key
from tests.e2e import raw_http
from tests.e2e.polling import wait_for
from tests.e2e.raw_http import RawAnswer, ask, post_bytes
from tests.e2e.server_process import ServerProcess, ready_server

SMALL = (
    'settings = { dtype = "bfloat16", max_model_len = 256, max_sequences = 4, max_batch_tokens = 64,'
    ' kv_memory = "8MiB" }'
)
QUESTION = [{"role": "user", "content": "What is a KV cache, and what is it good for? " * 2}]
BOUND = "30MiB"  # for one of them


def entry(name: str, path: Path | str = DEMO_DIRECTORY, *lines: str) -> str:
    return "\n".join((f'[[models]]\nname = "{name}"\npath = "{path}"', SMALL, *lines, ""))


@contextmanager
def serving(directory: Path, *entries: str, flags: tuple[str, ...] = ()) -> Iterator[ServerProcess]:
    directory.mkdir(parents=True, exist_ok=True)
    config = directory / "models.toml"
    config.write_text("\n".join(entries))
    with ready_server(directory / "server", None, "--config", str(config), *flags) as server:
        yield server


def post(server: ServerProcess, path: str, **body: object) -> RawAnswer:
    return ask(server.port, "POST", path, json.dumps(body).encode())


def chat(server: ServerProcess, model: str, **more: object) -> RawAnswer:
    return post(server, "/v1/chat/completions", model=model, messages=QUESTION, max_tokens=4, **more)


def children(pid: int, num_generations: int = 4) -> list[int]:
    """All below it: fork server, model, its process for grammars."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if fields[0] != "Z":
            parents[int(path.parent.name)] = int(fields[1])
    below = {pid}
    for _ in range(num_generations):
        below |= {child for child, parent in parents.items() if parent in below}
    return sorted(below - {pid})


def models_of(server: ServerProcess) -> list[int]:
    """The processes of its models."""
    (forks,) = [one for one in children(server.process.pid, 1) if os.getpgid(one) == one]
    return [one for one in children(forks, 1) if os.path.exists(f"/proc/{one}")]


def wait_models(server: ServerProcess, number: int) -> set[int]:
    """Once there are so many: one that has planned a model may end later than the model is loaded."""
    return wait_for(lambda: len(found := set(models_of(server))) == number and found, lambda: f"{number} processes")


def loaded(server: ServerProcess) -> list[str]:
    cards = ask(server.port, "GET", "/v1/models").json["data"]
    return [card["id"] for card in cards if card["status"]["value"] == "loaded"]


def tasks(server: ServerProcess) -> dict[str, list[str] | None]:
    return {card["id"]: card.get("tasks") for card in ask(server.port, "GET", "/v1/models").json["data"]}


def test_a_model_is_loaded_when_it_is_asked_for_and_the_least_recently_used_gives_way(tmp_path: Path) -> None:
    entries = (entry("one", DEMO_DIRECTORY, 'aliases = ["uno"]'), entry("two"), entry("gone", tmp_path / "x.gguf"))
    (tmp_path / "x.gguf").write_bytes(b"GGUF, and nothing more")
    flags = ("--models-memory", BOUND, "--ledger", str(tmp_path / "ledger.db"))
    with serving(tmp_path, *entries, flags=flags) as server:
        assert loaded(server) == []
        listed = {"one": ["generate"], "uno": ["generate"], "two": ["generate"], "gone": None}
        wait_for(lambda: tasks(server) == listed, lambda: str(tasks(server)))
        for name, shown in (("uno", ["one", "uno"]), ("two", ["two"]), ("one", ["one", "uno"])):
            answer = chat(server, name)
            assert (answer.status, answer.json["model"]) == (200, name)
            assert loaded(server) == shown
            (pid,) = wait_models(server, 1)
        for _ in range(2):  # a failed load is told, and those who ask soon after get the same at once
            answer = chat(server, "gone")
            assert (answer.status, answer.code) == (503, "model_not_loaded")
            assert "GGUF" in answer.error["message"]
            assert "retry-after" in answer.headers
        assert wait_models(server, 1) == {pid}
        lines = ask(server.port, "GET", "/v1/usage?by=model").json["data"]
        assert {line["model"]: line["requests"] for line in lines} == {"one": 2, "two": 1}
        page = ask(server.port, "GET", "/metrics").body.decode()
        for sample in (
            'model_loaded{model="one"} 1',
            'model_loads_total{model="one"} 2',
            'model_failures_total{model="gone"} 1',
            'upstream_up{upstream="one process"} 1',
            'upstream_up{upstream="two process"} 0',
        ):
            assert f"\nsteploop_{sample}" in page
        assert '\nvllm:request_success_total{model_name="one",finished_reason="length"} 2' in page
        assert '\nvllm:num_requests_running{model_name="two"} 0' in page
        assert page.count("# TYPE vllm:request_success_total") == 1
        server.send_signal(signal.SIGTERM)
        assert server.wait_exit() == 0
        assert not os.path.exists(f"/proc/{pid}")


def test_the_list_is_read_again_and_keys_do_not_wait_for_a_missing_model(tmp_path: Path) -> None:
    keys_file = tmp_path / "keys.json"
    keys = [create_key(keys_file, datetime.now(UTC), "local", scopes=(Scope.INFERENCE,))[0]]

    def listed(key: str) -> list[str]:
        answer = ask(server.port, "GET", "/v1/models", api_key=key)
        return [card["id"] for card in answer.json["data"]] if answer.status == 200 else [str(answer.status)]

    def answered(model: str) -> int:
        return raw_http.post(
            server.port, "/v1/completions", {"model": model, "prompt": "a", "max_tokens": 2}, keys[0]
        ).status

    with serving(tmp_path, entry("one"), entry("two"), flags=("--keys-file", str(keys_file))) as server:
        assert [answered(name) for name in ("one", "two")] == [200, 200]
        first, second = wait_models(server, 2)
        (tmp_path / "models.toml").write_text(
            "\n".join((entry("two", DEMO_DIRECTORY, 'aliases = ["zwei"]'), entry("three")))
        )
        server.send_signal(signal.SIGHUP)
        wait_for(lambda: listed(keys[0]) == ["two", "zwei", "three"], lambda: listed(keys[0]))
        wait_for(lambda: not {first, second} & set(models_of(server)), lambda: "the end of those that are gone")
        assert [answered(name) for name in ("one", "zwei", "three")] == [404, 200, 200]
        (tmp_path / "models.toml").write_text(entry("two", tmp_path / "away.gguf"))
        keys.append(create_key(keys_file, datetime.now(UTC), "local", scopes=(Scope.INFERENCE,))[0])
        server.send_signal(signal.SIGHUP)
        wait_for(lambda: listed(keys[1]) == ["two", "zwei", "three"], lambda: listed(keys[1]))
        assert answered("three") == 200


def test_why_a_model_cannot_be_loaded_is_told_to_the_operator(tmp_path: Path) -> None:
    broken, keys_file = tmp_path / "x.gguf", tmp_path / "keys.json"
    broken.write_bytes(b"GGUF, and nothing more")
    keys: dict[Scope, str] = {}
    for scope in (Scope.ADMIN, Scope.USAGE):
        keys[scope], _ = create_key(keys_file, datetime.now(UTC), "local", scopes=(Scope.INFERENCE, scope))
    with serving(tmp_path, entry("gone", broken), flags=("--keys-file", str(keys_file))) as server:
        for stream in (False, True):
            for scope, key in keys.items():
                body = {"model": "gone", "messages": QUESTION, "stream": stream}
                answer = raw_http.post(server.port, "/v1/chat/completions", body, key)
                assert (answer.status, answer.code) == (503, "model_not_loaded")
                message = answer.error["message"]
                is_operator = scope is Scope.ADMIN
                assert ("GGUF" in message, "its files are missing" in message) == (is_operator, not is_operator)
                assert is_operator or str(tmp_path) not in message
        answer = raw_http.post(server.port, "/admin/models/gone/load", {}, keys[Scope.ADMIN])
        assert "GGUF" in answer.error["message"]


def test_a_killed_process_ends_its_streams_alone_and_is_started_again(tmp_path: Path) -> None:
    with serving(tmp_path, entry("one"), entry("two")) as server:
        assert chat(server, "two").status == 200
        (other,) = wait_models(server, 1)
        assert chat(server, "one").status == 200
        (pid,) = wait_models(server, 2) - {other}
        with socket.create_connection(("127.0.0.1", server.port)) as client:
            long: dict[str, object] = {"n": 4, "max_tokens": 240, "ignore_eos": True}
            body = {"model": "one", "prompt": "a", "stream": True, **long}
            client.sendall(post_bytes("/v1/completions", body, ("connection: close",)))
            received = client.recv(1 << 16)
            while b"data: {" not in received:
                received += client.recv(1 << 16)
            os.kill(pid, signal.SIGKILL)
            while piece := client.recv(1 << 16):
                received += piece
        last = received[received.rindex(b"data: {") + 6 :].splitlines()[0]
        error = json.loads(last)["error"]
        assert error["code"] == "upstream_error"
        assert error["message"] == "The process of this model has ended. Send the request again: it is being restarted."
        assert chat(server, "one").status == 200
        assert other in wait_models(server, 2)
        below = children(server.process.pid)
        server.send_signal(signal.SIGKILL)
        wait_for(lambda: not any(os.path.exists(f"/proc/{one}") for one in below), lambda: f"the end of {below}")


@pytest.mark.slow
def test_a_process_that_hangs_is_killed_and_its_requests_are_told(tmp_path: Path) -> None:
    with serving(tmp_path, entry("one")) as server:
        assert chat(server, "one").status == 200
        (pid,) = wait_models(server, 1)
        os.kill(pid, signal.SIGSTOP)
        answer = chat(server, "one", stream=True)  # is asked again of the process that is started anew
        assert (answer.status, answer.body.count(b"[DONE]"), pid in models_of(server)) == (200, 1, False), answer.body
        wait_models(server, 1)


def test_ollamas_clients_are_served_and_waits_are_told(tmp_path: Path) -> None:
    with serving(tmp_path, entry("one")) as server:

        def running() -> list[str]:
            return [one["name"] for one in ask(server.port, "GET", "/api/ps").json["models"]]

        assert running() == []
        told = chat(server, "one", stream=True, timings={"queue": True}).body
        assert b'"loading":"' in told  # which stage is told depends on how long each takes
        assert running() == ["one"]
        options: dict[str, object] = {"options": {"num_predict": 3}, "keep_alive": "1h"}
        lines = post(server, "/api/chat", model="one:latest", messages=QUESTION, **options).body.splitlines()
        first, last = json.loads(lines[0]), json.loads(lines[-1])
        assert (first["model"], first["done"], first["message"]["role"]) == ("one", False, "assistant")
        assert (last["done"], last["done_reason"], last["eval_count"]) == (True, "length", 3)
        answer = post(server, "/api/generate", model="one", prompt="a", stream=False, **options)
        assert (answer.status, answer.json["eval_count"]) == (200, 3)
        answer = post(server, "/api/generate", model="one", prompt="a", keep_alive="soon")
        assert (answer.status, "keep_alive" in answer.json["error"]) == (400, True)
        assert post(server, "/api/show", model="one").json["model_info"]["unknown.context_length"] == 256
        for action, shown in (("load", ["one"]), ("unload", [])):
            command = [sys.executable, "-m", "server", "models", action, "one", "--port", str(server.port)]
            assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == f"one: {action}ed\n"
            assert running() == shown
        late = chat(server, "one", deadlines={"ttft_ms": 10})  # less than the load took
        assert (late.status, late.code) == (503, "deadline_unattainable")
        assert int(late.headers["retry-after"]) >= 1
        wait_for(lambda: running() == ["one"], lambda: "the load that the refused request has begun")
        assert post(server, "/api/generate", model="one", prompt="a", keep_alive=0).status == 200
        wait_for(lambda: running() == [], lambda: "the end of the model")
        for path, body, said in (
            ("/api/generate", {"keep_alive": "1h"}, {"response": "", "done": True, "done_reason": "load"}),
            ("/api/chat", {"messages": []}, {"message": {"role": "assistant", "content": ""}, "done_reason": "load"}),
            ("/api/chat", {"keep_alive": 0}, {"message": {"role": "assistant", "content": ""}, "done": True}),
            ("/api/generate", {"prompt": ""}, {"done_reason": "load"}),
            ("/api/generate", {"keep_alive": "0s", "stream": False}, {"response": "", "done_reason": "unload"}),
        ):
            answer = post(server, path, model="one:latest", **body)
            assert (answer.status, answer.json | said) == (200, answer.json)
            assert answer.json["model"] == "one"
            assert running() == ([] if answer.json["done_reason"] == "unload" else ["one"])
        assert "keep_alive" in post(server, "/api/generate", model="one", keep_alive="soon").json["error"]
        assert post(server, "/api/generate", model="two").status == 404
        assert post(server, "/api/generate", model="one").status == 200
        (pid,) = wait_models(server, 1)
        with socket.create_connection(("127.0.0.1", server.port)) as client:
            body = {"model": "one", "prompt": "a", "max_tokens": 240, "stream": True, "ignore_eos": True}
            client.sendall(post_bytes("/v1/completions", body))
            received = b""
            while b"data: {" not in received:
                received += client.recv(1 << 16)
            os.kill(pid, signal.SIGSTOP)  # so that the stream does not end
            busy = post(server, "/api/generate", model="one", keep_alive=0)
            os.kill(pid, signal.SIGCONT)
            assert (busy.status, "requests in progress" in busy.json["error"]) == (409, True)
            while b"[DONE]" not in received:
                received += client.recv(1 << 16)
        assert b'"finish_reason":"length"' in received
        assert post(server, "/admin/models/none/load").code == "model_not_found"
        assert post(server, "/tokenize", model="one", prompt="step").json["count"] > 0
        assert (
            post(server, "/infill", model="one", input_prefix="a", input_suffix="b").json["error"]["param"]
            == "input_suffix"
        )


@pytest.mark.slow
def test_swaps_leak_nothing_and_lose_nothing(tmp_path: Path) -> None:
    swap(tmp_path, 7)


def swap(directory: Path, num_swaps: int) -> None:
    """Models that give way to each other, one after another: `make simulate` has more of them."""
    names = ("one", "two", "three")
    kept = ("--kv-offload-memory", "2MiB", "--kv-offload-dir", str(directory))
    flags = ("--models-memory", BOUND, "--ledger", str(directory / "ledger.db"), *kept)
    with serving(directory, *map(entry, names), flags=flags) as server:
        first = chat(server, names[0])
        open_files = len(os.listdir(f"/proc/{server.process.pid}/fd"))
        tokens = [first.json["usage"]["completion_tokens"]]
        for i in range(1, num_swaps + 1):
            answer = chat(server, names[i % 3])
            assert answer.status == 200, answer
            tokens.append(answer.json["usage"]["completion_tokens"])
            cached = answer.json["usage"]["prompt_tokens_details"]["cached_tokens"]
            assert (cached >= 16) == (i >= 3), "what a process has computed is there for the model's next one"
        wait_models(server, 1)
        assert len(os.listdir(f"/proc/{server.process.pid}/fd")) <= open_files
        lines = ask(server.port, "GET", "/v1/usage?by=model").json["data"]
        assert sum(line["completion_tokens"] for line in lines) == sum(tokens)
        assert sum(line["requests"] for line in lines) == num_swaps + 1
